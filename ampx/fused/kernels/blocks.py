"""What the kernels of every platform share: the function they map, and the same map in plain JAX.

A kernel here maps one function over blocks of arrays that have one shape, reads some, updates the
others in place, and may sum up terms over all elements:

    scalars   f32[n], the same for every block
    read      items that are read only           in memory whole; the function sees them
    written   items that are updated in place    block by block

    new written blocks, terms = fun(scalars, read blocks, written blocks, cell)

An *item* is an array, or several that stand for one: `Int8Blocks`, whose scales are smaller than
its codes, or any other NamedTuple of arrays of one shape. `gpu.map_leaves` and `tpu.map_leaves` do
this for many jobs; `map_whole` is the same in plain JAX, which both must equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.fused.moments.int8_blocks import BLOCK, Int8Blocks
from ampx.mesh_axes import varying_axes
from ampx.param_storage.rounding import element_index

# Where elements share scales. There a block on a TPU is 32 whole rows, up to 32 * 8192 elements,
# and the blocks of all arrays together must fit into VMEM.
LONGEST_TPU_ROW = 8192
BlockFunction = Callable[..., tuple[Sequence[Any], Sequence[jax.Array]]]
"""`fun(scalars, read, written, cell) -> (new_written, terms)`, elementwise except for `cell`.

`scalars` is a tuple of float32 scalars; `read` and `written` are lists of items in equally shaped
blocks, in the types of their arrays; the scales of `Int8Blocks` broadcast against its codes. The
function casts: to float32 to compute, back to the types of each written item. `cell` is a `Cell`.
`terms` are float32 blocks, one for each sum: the map adds up all their elements.

What lowers everywhere: arithmetic, `cell.sqrt`, `lax.rsqrt`, `exp`, `abs`, `sign`, `round`, `clip`,
`maximum`, comparisons, casts, bit operations, and `where`, also with a scalar predicate. What does
not on GPUs: `isfinite` (compare `abs(x) < inf`), `pow`, `cbrt` and captured arrays.
"""


Job = tuple[jax.Array, Sequence[Any], Sequence[Any]]
"""What a map is done with: the scalars, the items that are read, and those that are written."""


class Cell(NamedTuple):
    """What the mapped function may ask about the block that it works on.

    Attributes:
      sqrt: a square root that the platform can lower.
      index: a function to uint32 `(row, column)`, where in the map's arrays each element lies; see
        `rounding.element_index`. It is a function so that only those who draw bits pay for it.
      largest: a function from a block to the largest element of each `BLOCK` that shares a scale;
        only where there are `Int8Blocks`.
    """

    sqrt: Callable[[jax.Array], jax.Array]
    index: Callable[[], tuple[jax.Array, jax.Array]]
    largest: Callable[[jax.Array], jax.Array]


def map_items(
    of_array: Callable[..., Any], of_scales: Callable[..., Any], items: Any, *others: Any
) -> Any:
    """A tree of items with a function applied to each array, and another to scales of 8 bits."""

    # With `is_leaf` a whole `Int8Blocks` arrives here; any other NamedTuple is walked through.
    def convert(item: Any, *rest: Any) -> Any:
        if not isinstance(item, Int8Blocks):
            return of_array(item, *rest)
        codes, scales = zip(item, *rest, strict=True)
        return Int8Blocks(of_array(*codes), of_scales(*scales))

    return jax.tree.map(convert, items, *others, is_leaf=_is_in_blocks)


def shape_of(*items: Any) -> tuple[int, ...]:
    """The shape that the arrays of all items share."""
    return jax.tree.leaves(items)[0].shape


def in_blocks(items: Any) -> bool:
    """Whether any item has blocks that share a scale."""
    return any(map(_is_in_blocks, jax.tree.leaves(items, is_leaf=_is_in_blocks)))


def _is_in_blocks(item: Any) -> bool:
    return isinstance(item, Int8Blocks)


def check_job(
    scalars: jax.Array, read: Sequence[Any], written: Sequence[Any]
) -> tuple[jax.Array, list[Any], list[Any]]:
    """The arguments of a map, all marked as varying over the mesh axes over which any of them does.

    A kernel is opaque to `shard_map`: with `check_vma` its results vary over what its operands do.

    Raises:
      ValueError: if the scalars are not a float32 vector, or the arrays have unlike shapes.
    """
    if scalars.ndim != 1 or scalars.dtype != jnp.float32:
        raise ValueError(f"scalars must be a float32 vector, not {jax.typeof(scalars)}")
    items = [*read, *written]
    # Scales count as the codes that they belong to: in kernels rows are made of whole blocks.
    shapes: list[tuple[int, ...]] = []
    map_items(
        lambda array: shapes.append(array.shape),
        lambda scales: shapes.append((*scales.shape[:-1], scales.shape[-1] * BLOCK)),
        items,
    )
    if len(set(shapes)) != 1:
        raise ValueError(f"one map needs arrays of one shape, not {shapes}")
    # JAX inserts these casts before its own operations, but not before a kernel. They move nothing:
    # `pcast` to "varying" only states what may be different on each device.
    axes = varying_axes((scalars, *items))

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return vary(scalars), jax.tree.map(vary, list(read)), jax.tree.map(vary, list(written))


def apply_to_block(
    fun: BlockFunction,
    scalars: Any,
    items: tuple[Sequence[Any], Sequence[Any]],
    cell: Cell,
    num_sums: int,
) -> tuple[list[Any], list[jax.Array]]:
    """What the function makes of one block of (read, written) items, checked while tracing.

    `scalars` is a vector, or a reference to one.

    Raises:
      ValueError: if the function returns too few or too many arrays, or arrays of other types.
    """
    read, written = items
    # One by one: of a reference into a TPU's scalar memory only scalars can be read.
    values = tuple(scalars[k] for k in range(scalars.shape[0]))
    new, terms = map(list, fun(values, list(read), list(written), cell))
    if len(terms) != num_sums:
        raise ValueError(
            f"the mapped function gave {len(terms)} terms to sum; num_sums is {num_sums}"
        )
    # Results replace the written arrays in memory, so shapes and types must be the same.
    types, due = (jax.tree.map(lambda a: (a.shape, a.dtype.name), all_) for all_ in (new, written))
    if types != due:
        raise ValueError(f"the mapped function gave {types} for the written arrays {due}")
    return new, terms


def map_whole(
    fun: BlockFunction,
    scalars: jax.Array,
    read: Sequence[Any],
    written: Sequence[Any],
    *,
    num_sums: int = 0,
) -> tuple[list[Any], jax.Array]:
    """The map as plain JAX: what the kernels must equal, and what serves leaves too small for one.

    Returns:
      The new written items, and the `num_sums` sums as a float32 vector.
    """
    shape = shape_of(read, written)
    # With shared scales a row of the view is one block, whose scale is a row of f32[blocks, 1].
    view = (-1, BLOCK) if in_blocks((read, written)) else shape

    def index() -> tuple[jax.Array, jax.Array]:
        row, column = (jnp.broadcast_to(i, shape).reshape(view) for i in element_index(shape))
        return row, column

    cell = Cell(jnp.sqrt, index, lambda x: jnp.max(x, axis=-1, keepdims=True))
    blocks = map_items(lambda a: a.reshape(view), lambda s: s.reshape(-1, 1), (read, written))
    new, terms = apply_to_block(fun, scalars, blocks, cell, num_sums)
    new = jax.tree.map(lambda a, like: a.reshape(like.shape), new, list(written))
    return new, as_vector([jnp.sum(term) for term in terms])


def as_vector(sums: Sequence[jax.Array]) -> jax.Array:
    """Stacks scalar sums to one float32 vector, which may be empty."""
    return jnp.stack(sums) if sums else jnp.zeros((0,), jnp.float32)
