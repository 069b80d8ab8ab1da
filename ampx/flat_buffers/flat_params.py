"""Parameters that live in a few flat buffers, and whose gradients are born flat.

An optimizer over thousands of small parameters spends its time on starting loops, not on
arithmetic. A `FlatParams` is a pytree whose leaves are the buffers, so optimizers, loss scales,
reductions and checkpoints see a few long vectors; the loss function sees the tree:

    FlatParams ── .tree(), slices ──► {"w": ..., "b": ...} ── loss_fn ──► loss
        ▲                                                                  │
        └── optimizer ◄── FlatParams of gradients ◄── one concatenation ◄──┘

Each buffer costs the backward pass one concatenation, and nothing is put together or taken apart
anywhere else. With rows of 4 elements, `w` of 6, `b` of 3 and `.` for padding:

    buffer    w w w w | w w . . | b b b .

Every parameter begins at a row. Sums over single parameters (LAMB, NovoGrad) are then sums over
rows, see `fused.segments`. Padding is 0 and gets a gradient of 0, and optimizers with an epsilon
above 0 leave it at 0. The last element of a buffer is always padding, with a row added for it where
it would not be: there a reduction writes what makes it wait, see `Bucket.with_spare`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ampx.flat_buffers.buckets import Bucket, BucketLayout
from ampx.flat_buffers.whole_arrays import check_whole


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in the buffers of a `FlatParams`; all of it static.

    Attributes:
      layout: the buffers in the order in which a forward pass reads them.
      dtypes: of the parameters, as they were flattened, in the order of the tree's leaves.
      names: of the buffers: their dtype, then their group.
      row: elements; every parameter begins at a multiple of it.
      bucket_bytes: see `flatten`.
      multiple_of: see `flatten`.
    """

    layout: BucketLayout
    dtypes: tuple[Any, ...]
    names: tuple[str, ...]
    row: int
    bucket_bytes: int | None
    multiple_of: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.row))

    # `jit` hashes the static parts of its arguments at every call: thousands of shapes only once.
    def __hash__(self) -> int:
        return self._hash

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buffers' own layouts."""
        return self.layout.buckets

    def tree_of(self, found: Sequence[Sequence[Any]], empty: Callable[..., Any]) -> Any:
        """A tree of what was found for the parameters of each buffer."""
        # Parameters without elements lie in no buffer: they are made anew.
        leaves = [empty(*kind) for kind in zip(self.layout.shapes, self.dtypes, strict=True)]
        for bucket, own in zip(self.buckets, found, strict=True):
            for i, value in zip(bucket.leaves, own, strict=True):
                leaves[i] = value
        return jax.tree.unflatten(self.layout.structure, leaves)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FlatParams:
    """A tree of parameters, or of what belongs to them, in flat buffers; see `flatten`.

    A pytree whose leaves are the buffers, named by dtype and group.

    Attributes:
      buffers: arrays of shape (bucket.size,), one for each dtype and group. Gradients and moments
        have the layout of their parameters, whatever their own dtypes.
      layout: static.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> flat = ampx.fused.flatten({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)})
      >>> flat
      FlatParams({'float32': float32[512]}, 2 parameters)
      >>> doubled = jax.tree.map(lambda buffer: 2 * buffer, flat)
      >>> doubled.tree()["w"].shape, float(doubled.tree()["w"][0, 0])
      ((2, 3), 2.0)
    """

    buffers: tuple[Any, ...]
    layout: FlatLayout

    def tree(self) -> Any:
        """The parameters, in the dtypes of their buffers; for evaluation and checkpoints.

        Differentiable in reverse: the gradient of a buffer is one concatenation. JAX's own
        transpose of n slices would write the whole buffer n times.

        Returns:
          A tree of the structure and shapes that `flatten` was given.

        Raises:
          ValueError: for a part of a buffer, inside `shard_map`.
        """
        shapes = self.layout.layout.shapes  # in the order of the tree's leaves
        found = []
        for bucket, buffer in zip(self.layout.buckets, self.buffers, strict=True):
            check_is_whole(bucket, buffer)
            # Integers have no cotangent that could be put together.
            has_gradient = jnp.issubdtype(buffer.dtype, jnp.inexact)
            pieces = _pieces(bucket, buffer) if has_gradient else bucket.split(buffer)
            places = zip(bucket.leaves, pieces, strict=True)
            found.append([piece.reshape(shapes[i]) for i, piece in places])
        return self.layout.tree_of(found, jnp.zeros)

    def like(self, tree: Any) -> FlatParams:
        """Another tree in the same layout: parameters that were stored as a tree, for example.

        Args:
          tree: of the structure, shapes and dtypes that `flatten` was given.

        Raises:
          ValueError: if it does not fit, or is divided over devices; see `flatten`.
        """
        check_whole("FlatParams.like", tree)
        return FlatParams(tuple(self.layout.layout.flatten(tree)), self.layout)

    def shapes(self) -> Any:
        """The tree as shapes and dtypes; a mask's entry stands for each parameter of its buffer."""

        # A mask or labels in the layout of parameters have a bool or a str in a buffer's place.
        def of(bucket: Bucket, buffer: Any) -> list[Any]:
            if not hasattr(buffer, "dtype"):
                return [buffer] * len(bucket.leaves)
            shapes = self.layout.layout.shapes
            return [jax.ShapeDtypeStruct(shapes[i], buffer.dtype) for i in bucket.leaves]

        found = [of(*pair) for pair in zip(self.layout.buckets, self.buffers, strict=True)]
        return self.layout.tree_of(found, jax.ShapeDtypeStruct)

    def __repr__(self) -> str:
        kinds = {
            name: jax.typeof(b).str_short() if hasattr(b, "dtype") else b
            for name, b in zip(self.layout.names, self.buffers, strict=True)
        }
        inside = ", ".join(f"{name!r}: {kind}" for name, kind in kinds.items())
        return f"FlatParams({{{inside}}}, {len(self.layout.dtypes)} parameters)"


def _flatten(flat: FlatParams) -> tuple[tuple[Any, ...], FlatLayout]:
    return flat.buffers, flat.layout


def _flatten_with_keys(flat: FlatParams) -> tuple[list[Any], FlatLayout]:
    keys = map(jax.tree_util.DictKey, flat.layout.names)
    return list(zip(keys, flat.buffers, strict=True)), flat.layout


# With keys, so that a buffer has a path such as "params/float32" in checkpoints and messages.
jax.tree_util.register_pytree_with_keys(
    FlatParams,
    _flatten_with_keys,
    lambda layout, buffers: FlatParams(tuple(buffers), layout),
    _flatten,
)


# The transpose of a slice is a pad to the whole buffer, and that of n slices a sum of n of them.
# All slices together have a simpler one: the buffer is put together from their cotangents.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(bucket: Bucket, buffer: jax.Array) -> list[jax.Array]:
    return bucket.split(buffer)


_pieces.defvjp(
    lambda bucket, buffer: (bucket.split(buffer), None),
    lambda bucket, _, cotangents: (bucket.join(cotangents),),
)


def check_is_whole(bucket: Bucket, buffer: Any) -> None:
    """Raises a ValueError for a shard of a buffer."""
    if buffer.shape != (bucket.size,):
        raise ValueError(
            f"a flat buffer of {bucket.size} elements has shape {buffer.shape} here: a part of it "
            "holds no whole parameters. Give shard_map the spec P() for flat parameters; to divide "
            "the optimizer's state over devices use ampx.zero1"
        )


def is_flat(node: Any) -> bool:
    """Whether a node of a tree is a `FlatParams`."""
    return isinstance(node, FlatParams)


def as_tree(tree: Any) -> Any:
    """A tree in which every `FlatParams` is the tree that it holds."""
    return jax.tree.map(lambda node: node.tree() if is_flat(node) else node, tree, is_leaf=is_flat)


def has_flat(tree: Any) -> bool:
    """Whether there is a `FlatParams` in a tree."""
    return any(map(is_flat, jax.tree.leaves(tree, is_leaf=is_flat)))
