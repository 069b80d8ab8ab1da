"""Over which mapped axes the parameters themselves are divided: the setting `model_axes`.

Inside `shard_map` a batch is split over some axes, say "data", and parameters may be divided over
others: over "model" (tensor parallelism), "expert" or "stage". A device then holds one shard of a
divided parameter and all of a replicated one, and two things have to be known of each:

    norm       squares of a divided leaf are summed over its axes; a replicated leaf counts once
    verdict    one shard with an infinity makes the step bad on all devices

With `check_vma=True` the type of each array says over what it varies, and nobody has to name
anything. With `check_vma=False`, and in `vmap`, types say nothing: a shard looks like a whole
array. There the caller names the axes once, for all leaves or leaf by leaf as in `in_specs`:

    "model"                                     every leaf is divided over it
    ("model", "expert")                         every leaf is divided over both
    {"dense": P(None, "model"), "norm": P()}    a tree prefix of the parameters: specs, names, None

Each axis is decided by types where types are checked, and by the setting elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ampx.mesh_axes import (
    as_axes,
    axes_of_spec,
    count_devices,
    is_spec,
    sum_over_shards,
    untracked_axes,
    varying_axes,
)
from ampx.trees import path_name


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelAxes:
    """The setting `model_axes`, converted and checked. It is hashable, as settings of a step are.

    To `jax.tree` it is a tree without leaves: optimizers get it as an extra argument, which may
    pass through `jax.jit`.

    Attributes:
      entries: pairs of a path, whose names are joined by "/", and the axes over which every leaf
        below that path is divided. The empty path stands for all leaves.
      specs: pairs of a path and the `PartitionSpec` that was given for it, where one was.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...] = ()
    specs: tuple[tuple[str, PartitionSpec], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All axes over which any leaf is divided; each once, sorted."""
        return tuple(sorted({axis for _, axes in self.entries for axis in axes}))

    def of_path(self, path: str) -> tuple[str, ...]:
        """The axes over which the leaf at a path is divided.

        Raises:
          ValueError: if the setting is a tree that does not reach the path.
        """
        if not self.names:
            return ()
        for start, axes in self.entries:
            if _reaches(start, path):
                return axes
        raise ValueError(
            f"model_axes names no axes for the parameter {path!r}, and has "
            f"{[start for start, _ in self.entries]}: give each parameter, or the part of the tree "
            "that it is in, a PartitionSpec, a name, or None if it is not divided"
        )

    def named_for(self, path: str) -> tuple[str, ...]:
        """The axes that a tree names for the leaf at a path; none where one name is for all."""
        below = (axes for start, axes in self.entries if start and _reaches(start, path))
        return next(below, ())

    def spec_of_path(self, path: str) -> PartitionSpec | None:
        """The spec of the leaf at a path; None if none was given."""
        below = (spec for start, spec in self.specs if _reaches(start, path))
        return next(below, None)

    def below(self, name: str) -> ModelAxes:
        """The setting for the part of the parameters that has this name at the top."""
        below = name + "/"

        def part(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
            return tuple(
                (path.removeprefix(name if path == name else below), value)
                for path, value in pairs
                if path in ("", name) or path.startswith(below)
            )

        return ModelAxes(part(self.entries), part(self.specs))

    def as_extra_args(self) -> dict[str, Any]:
        """What hands the setting down to an optimizer; nothing where no leaf is divided."""
        return {"model_axes": self} if self.names else {}


def _reaches(start: str, path: str) -> bool:
    """Whether an entry for `start` is one for the leaf at `path`."""
    return start in ("", path) or path.startswith(start + "/")


NOT_DIVIDED = ModelAxes()


def as_model_axes(value: Any, default: ModelAxes = NOT_DIVIDED) -> ModelAxes:
    """Converts what a caller gave as `model_axes`.

    Args:
      value: the name of an axis or a sequence of names: every leaf is divided over these. Or a tree
        prefix of the parameters, of `PartitionSpec`s, names and None. Or None: `default`.
      default: what a transformation was built with, for an update that is given nothing else. The
        one who calls knows as much as the one who built it, or more: a step has it from its own
        setting.

    Raises:
      TypeError: if it is something else.

    Examples:
      >>> from jax.sharding import PartitionSpec as P
      >>> from ampx import model_axes
      >>> axes = model_axes.as_model_axes({"dense": P(None, "model"), "norm": None})
      >>> axes.names, axes.of_path("dense/kernel"), axes.of_path("norm/scale")
      (('model',), ('model',), ())
    """
    if isinstance(value, ModelAxes):
        return value
    if value is None:
        return default
    if isinstance(value, str) or (
        isinstance(value, list | tuple | set | frozenset)
        and not is_spec(value)
        and all(isinstance(name, str) for name in value)
    ):
        # A tuple of names is several axes of all leaves, as everywhere; not a tree of names.
        axes = as_axes(value, "model_axes", may_be_empty=True)
        return ModelAxes((("", axes),)) if axes else NOT_DIVIDED

    def is_entry(node: Any) -> bool:
        return node is None or is_spec(node)

    found = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_entry)
    named = [(path_name(path), leaf) for path, leaf in found]
    return ModelAxes(
        tuple((path, _axes_of_entry(leaf, value)) for path, leaf in named),
        tuple((path, leaf) for path, leaf in named if is_spec(leaf)),
    )


def _axes_of_entry(entry: Any, value: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    axes = axes_of_spec(entry) if is_spec(entry) else (entry,)
    if not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            "model_axes must be the name of a mesh axis, such as 'model', a sequence of names, or "
            f"a tree of PartitionSpecs, names and None like the parameters, got {value!r}"
        )
    return axes


def axes_of_leaves(tree: Any, model_axes: ModelAxes = NOT_DIVIDED) -> list[tuple[str, ...]]:
    """The mapped axes over which each leaf of a tree like the parameters is divided.

    Args:
      tree: parameters, or gradients that were summed over the axes of the batch. Those that a leaf
        still varies over by its type are among its axes.
      model_axes: the setting. Of an axis that types keep track of, the type decides.

    Returns:
      One tuple of names, sorted, for each leaf, in their order.

    Raises:
      NameError: if one of the named axes is not mapped here.
      ValueError: if the setting is a tree that does not reach a leaf.
    """
    pairs = zip(jax.tree.leaves(tree), untracked_of_leaves(tree, model_axes), strict=True)
    return [tuple(sorted({*varying_axes(leaf), *untracked})) for leaf, untracked in pairs]


def untracked_of_leaves(tree: Any, model_axes: ModelAxes) -> list[tuple[str, ...]]:
    """The axes of `axes_of_leaves` that only the setting knows."""
    untracked = untracked_axes(model_axes.names)
    return [
        tuple(axis for axis in model_axes.of_path(path_name(path)) if axis in untracked)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def find_own_axes(grads: Any, params: Any, model_axes: ModelAxes) -> list[tuple[str, ...]]:
    """For each gradient the axes over which its parameter is divided; no sum may run over these.

    Gradients of one device vary over the axes of the batch, so their types do not tell; those of
    the parameters do.

    Args:
      grads: gradients that were not summed over devices yet.
      params: the parameters, a tree like `grads`; None where nobody has them. Then the setting
        alone decides.
      model_axes: the setting.
    """
    if params is not None and jax.tree.structure(params) == jax.tree.structure(grads):
        return axes_of_leaves(params, model_axes)
    count_devices(model_axes.names)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    return list(map(model_axes.of_path, paths))


def add_over_shards(
    numbers: Sequence[jax.Array], axes: Sequence[Sequence[str]] | None = None
) -> jax.Array:
    """Adds one number from each leaf, over all leaves and all their shards; float32 scalar.

    Leaves that are divided over the same axes are added before they are reduced, so there are as
    many reductions of one number as there are sets of axes, and not as there are leaves.

    Args:
      numbers: for each leaf a scalar, what this device found in its shard. The axes over which it
        varies by its type are read from the number: it may have been summed over some already.
      axes: for each leaf the axes over which it is divided; None where types tell all of them.
    """
    axes = axes or [()] * len(numbers)
    untracked = untracked_axes(sorted({axis for own in axes for axis in own}))
    sums: dict[tuple[str, ...], jax.Array] = {}
    for number, named in zip(numbers, axes, strict=True):
        known = {*varying_axes(number), *(axis for axis in named if axis in untracked)}
        key, own = tuple(sorted(known)), number.astype(jnp.float32)
        sums[key] = lax.add(sums[key], own) if key in sums else own
    parts = (sum_over_shards(part, key) for key, part in sums.items())
    return sum(parts, jnp.zeros((), jnp.float32))
