"""The parts of a pipeline's parameters: what comes before the layers, they, what comes after.

  part        read by                    stored
  "first"     the first stage            on every device
  "stages"    all stages                 divided over the devices of the stages
  "last"      the last stage             on every device
  "shared"    the first and the last     on every device

A caller may leave out all but `"stages"`. Floating leaves are trained. All others, such as
counters, flags and the random keys of nnx modules, are read and keep their values; in trees of
gradients None is in their places. Leaves that are replaced by their gradient, as those of flax's
layers in 8 bits, have in these trees their new value: the largest of all micro-batches and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ampx import flax_modules
from ampx.mesh_axes import axes_of_entry, is_spec
from ampx.overwritten import refuse_overwritten
from ampx.pipelining.runtime.buffers import is_key
from ampx.tree_checks import check_arrays, check_key, check_memory
from ampx.trees import broadcast_prefix, fill_floating, open_node, path_name

PARTS = ("first", "stages", "last", "shared")
NO_STATE = (
    "a pipeline has no model_state: batch statistics would depend on the order of micro-batches. "
    "Use LayerNorm, RMSNorm or GroupNorm, or close over frozen statistics"
)

NO_SCALARS = (
    "give each row its own, as jnp.full(rows, value); what is the same in all calls can be closed "
    "over"
)


def make_specs(axis_name: str, param_specs: Any, is_divided: bool) -> dict[str, Any]:
    """Says for each part over which mesh axes it is divided.

    Args:
      axis_name: the axis of the stages.
      param_specs: the caller's `PartitionSpec`s by part, or None.
      is_divided: whether the devices of the stages divide the layers.
    """
    # Whole arrays for the ends, a part of the layers for each device.
    specs: dict[str, Any] = dict.fromkeys(PARTS, P()) | {"stages": P(axis_name)}
    specs |= dict(param_specs or {})
    if is_divided:
        return specs

    # Layers that the devices do not divide are whole along the stages, and so are stages that
    # differ, which have no axis of layers. Over other axes they are divided as `param_specs` says.
    def whole_along_stages(spec: P) -> P:
        entries = [None if entry == axis_name else entry for entry in spec]
        return P(*entries) if any(entries) else P()

    specs["stages"] = jax.tree.map(whole_along_stages, specs["stages"], is_leaf=is_spec)
    return specs


def check_specs(params: Mapping[str, Any], specs: dict[str, Any], mesh: Any) -> None:
    """Raises unless parameters can be divided as specs say, in the words of the caller.

    Args:
      params: by part, as they are stored; parts that are left out may be missing, or None.
      specs: `PartitionSpec`s by part, or finer.
      mesh: with all axes that the specs name.
    """
    for part in PARTS:
        own = params.get(part)
        try:
            each = broadcast_prefix(specs[part], own, is_leaf=is_spec)
        except ValueError as error:
            raise ValueError(
                f"param_specs[{part!r}] is no tree prefix of params[{part!r}]: give one "
                "PartitionSpec for all of it, or one for each subtree or leaf, P() for what is not "
                f"divided ({error})"
            ) from error
        leaves = jax.tree_util.tree_leaves_with_path(own)
        for (path, leaf), spec in zip(leaves, each, strict=True):
            name, shape = path_name((jax.tree_util.DictKey(part), *path)), jnp.shape(leaf)
            if len(spec) > len(shape):
                raise ValueError(
                    f"param_specs has {spec} for {name!r}, which has the shape {shape}: give a "
                    "PartitionSpec with an entry for each axis at most, such as "
                    f"{P(*spec[: len(shape)])}. A spec for a subtree holds for all of its leaves"
                )
            for number, entry in enumerate(spec):
                devices = math.prod(mesh.shape[axis] for axis in axes_of_entry(entry))
                if shape[number] % devices:
                    raise ValueError(
                        f"param_specs has {spec} for {name!r}, which has the shape {shape}: "
                        f"{devices} devices along {entry!r} do not divide axis {number}. Divide "
                        "another axis, or none, or choose sizes that are multiples"
                    )


def make_shardings(params: Any, specs: dict[str, Any], mesh: Mesh) -> Any:
    """Makes a tree like the parameters that says where each leaf should lie, by the specs."""
    check_specs(as_dict(params), specs, mesh)

    def place_part(part: str, own: Any) -> Any:
        return jax.tree.map(
            lambda spec, below: jax.tree.map(lambda _: NamedSharding(mesh, spec), below),
            specs[part],
            own,
            is_leaf=is_spec,
        )

    return _map_parts(place_part, params)


def check_parts(params: Any) -> None:
    """Raises unless these are parts of a model, or their shapes."""
    if not isinstance(params, Mapping) or "stages" not in params or set(params) - set(PARTS):
        found = list(params) if isinstance(params, Mapping) else type(params).__name__
        raise TypeError(
            f"params must be a dict with 'stages' and any of 'first', 'last', 'shared', got {found}"
        )
    if set(as_dict(params)) != set(params):
        raise TypeError(
            f"params is a {type(params).__name__}, which is a leaf to jax.tree: give dict(params)"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"params: {path_name(path)} is no array but of type {type(leaf).__name__}, and a "
                "pipeline takes arrays: close over the rest, as eqx.partition(layer, eqx.is_array) "
                "divides an Equinox module"
            )
    check_arrays("params", params, may_be_shapes=True)


def check_params(params: Any, key: Any, *, draws: bool) -> None:
    """Raises unless these are parts of a model, what is floating in them trained, and a key."""
    check_parts(params)
    check_key("key", key)
    check_memory("params", params)
    state = flax_modules.find_floating_state(params)
    if state is not None:
        raise ValueError(
            f"{state} is no parameter, and {NO_STATE}. What is to be trained is an nnx.Param"
        )
    if isinstance(params["stages"], list | tuple):
        refuse_overwritten(
            "params",
            {"stages": params["stages"]},
            "Stages that differ cannot have such layers: their parameters are packed together. "
            "Stages of equal layers can, and so can first and last",
        )
    if draws and key is None:
        _refuse_keys(params)


def _refuse_keys(params: Any) -> None:
    """Refuses random keys among parameters, which would be the same in every call."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_key(leaf):
            raise ValueError(
                f"{path_name(path)} is a random key, and the call has none: all steps and "
                "micro-batches would draw the same numbers. Give key=..., as train_step does "
                "after step.init(params, key=...); keys among parameters are folded with it"
            )


def as_whole_gradients(grads: Any, params: Any) -> Any:
    """Makes gradients in the structure of parameters of those of the floating leaves.

    Args:
      grads: a dict of parts, with nothing in the places of other leaves.
      params: the parameters.
    """
    return _map_parts(lambda part, own: fill_floating(own, jax.tree.leaves(grads[part])), params)


def _map_parts(fun: Callable[[str, Any], Any], params: Any) -> Any:
    """Makes a mapping like the parameters, of their kind, of `fun(part, own)` for each part."""
    pairs, structure = open_node(params)
    return jax.tree.unflatten(structure, [fun(path_name(path), own) for path, own in pairs])


def as_dict(params: Any) -> dict[str, Any]:
    """The parts as `jax.tree` sees them: a FrozenDict makes new ones of what is read from it."""
    return {path_name(path): own for path, own in open_node(params)[0]}
