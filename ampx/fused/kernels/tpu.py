"""An elementwise map over arrays in place, as a Mosaic TPU kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ampx.fused.kernels import blocks

_LANES = 128
_ROWS = 32  # a multiple of the tile height of every type: 8 rows of 32 bits, 32 of 8 bits
_SMALL = 8 * _LANES  # smaller arrays are left to XLA, which fuses them with their neighbours
_ELEMENTS = 1 << 16  # 256 KiB of float32: twice that overflowed 16 MiB of VMEM with two sums
_BYTES = 1 << 21  # of all blocks together, which the pipeline holds twice


Leaf = tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]
"""The scalars of one leaf, the arrays that it reads, and those that it writes, of one shape."""


def map_leaves(
    fun: blocks.Rule,
    leaves: Sequence[Leaf],
    *,
    num_sums: int = 0,
    interpret: bool = False,
) -> tuple[list[list[jax.Array]], jax.Array]:
    """`map_blocks` for every leaf, one kernel each.

    Args:
      fun: see `blocks.Rule`.
      leaves: scalars, read and written arrays of each leaf.
      num_sums: see `map_blocks`.
      interpret: see `map_blocks`.

    Returns:
      The new written arrays of each leaf, and its sums as a row of a float32 matrix.
    """
    results = [map_blocks(fun, *leaf, num_sums=num_sums, interpret=interpret) for leaf in leaves]
    return [new for new, _ in results], jnp.stack([sums for _, sums in results])


def map_blocks(
    fun: blocks.Rule,
    scalars: jax.Array,
    read: Sequence[jax.Array],
    written: Sequence[jax.Array],
    *,
    num_sums: int = 0,
    interpret: bool = False,
    _elements: int | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """`fun` applied to arrays of one shape, block by block; the written ones are updated in place.

    Blocks past the end of an array hold garbage there: it is not written back, and its terms are
    masked out of the sums. The grid runs in order when there are sums, which add up in SMEM.

    Small arrays, and those of short rows, which a kernel would want padded to 128 lanes, are left
    to XLA. Where the last of several dimensions is no multiple of 128, XLA may copy an array into
    the layout that a kernel needs, and back.

    Args:
      fun: see `blocks.Rule`.
      scalars: float32 vector.
      read: arrays that the rule only reads.
      written: arrays of the same shape, aliased to the results.
      num_sums: number of terms that the rule returns, to be summed over all elements.
      interpret: whether to run on any backend, slowly, as a test does.
      _elements: how many elements a block may have, for tests of ragged blocks.

    Returns:
      The new written arrays, and the sums as a float32 vector.
    """
    scalars, read, written = blocks.checked(scalars, read, written)
    arrays = [*read, *written]
    shape, view = arrays[0].shape, _view(arrays[0].shape)
    if math.prod(shape) < _SMALL or view[-1] < _LANES // 2:
        return blocks.map_whole(fun, scalars, read, written, num_sums=num_sums)
    size = sum(a.dtype.itemsize for a in read) + 2 * sum(a.dtype.itemsize for a in written)
    block = _block(view, _elements or min(_ELEMENTS, _BYTES // size))
    grid = tuple(map(pl.cdiv, view, block))

    def kernel(scalar_ref: Any, *refs: Any) -> None:
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        loaded = [ref[...] for ref in inputs]
        new, terms = blocks.applied(
            fun, scalar_ref, loaded[: len(read)], loaded[len(read) :], jnp.sqrt, num_sums
        )
        for ref, value in zip(outputs, new, strict=False):  # the sums come last
            ref[...] = value
        if terms:
            _accumulate(outputs[-1], terms, _inside(view, block))

    spec = pl.BlockSpec(block, lambda *index: index)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    like = jax.typeof(scalars).manual_axis_type
    results = [jax.ShapeDtypeStruct(view, a.dtype, manual_axis_type=like) for a in written]
    if num_sums:
        results.append(jax.ShapeDtypeStruct((num_sums,), jnp.float32, manual_axis_type=like))
    order = "arbitrary" if num_sums else "parallel"
    new = list(
        pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[smem, *[spec] * len(arrays)],
            out_specs=[*[spec] * len(written), *[smem] * bool(num_sums)],
            out_shape=results,
            input_output_aliases={1 + len(read) + k: k for k in range(len(written))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=(order,) * len(grid)),
            interpret=interpret,
            name="ampx_map_blocks",
        )(scalars, *[array.reshape(view) for array in arrays])
    )
    sums = new.pop() if num_sums else blocks.stacked([])
    return [array.reshape(shape) for array in new], sums


def _view(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of one or two dimensions that costs no copy where the array has its usual layout."""
    if len(shape) > 1:
        return math.prod(shape[:-1]), shape[-1]
    size = math.prod(shape)
    return (size // _LANES, _LANES) if size % (8 * _LANES) == 0 else (size,)


def _block(view: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A block of about `elements` elements: whole rows where they are short enough."""
    if len(view) == 1:
        return (_at_most(view[0], elements, 8 * _LANES),)
    rows, columns = view
    if pl.cdiv(columns, _LANES) * _LANES * _ROWS <= elements:
        return _at_most(rows, elements // (pl.cdiv(columns, _LANES) * _LANES), _ROWS), columns
    height = min(rows, _ROWS)
    return height, _at_most(columns, elements // (pl.cdiv(height, 8) * 8), _LANES)


def _at_most(size: int, limit: int, unit: int) -> int:
    """The whole size, or else the greatest multiple of `unit` within the limit: one at least."""
    return size if size <= limit else max(unit, limit // unit * unit)


def _inside(view: tuple[int, ...], block: tuple[int, ...]) -> jax.Array | None:
    """Which elements of this step's block lie in the array; None where all blocks are full."""
    inside = None
    for axis, (size, step) in enumerate(zip(view, block, strict=True)):
        if size % step:
            left = jnp.int32(size) - pl.program_id(axis) * step
            here = lax.broadcasted_iota(jnp.int32, block, axis) < left
            inside = here if inside is None else inside & here
    return inside


def _accumulate(sums: Any, terms: Sequence[jax.Array], inside: jax.Array | None) -> None:
    """Add the terms of one block to the sums, which the first step of the grid clears."""
    steps = [pl.program_id(axis) for axis in range(terms[0].ndim)]

    @pl.when(sum(steps) == 0)
    def _clear() -> None:
        for k in range(len(terms)):
            sums[k] = jnp.float32(0)

    for k, term in enumerate(terms):
        sums[k] += jnp.sum(term if inside is None else jnp.where(inside, term, jnp.float32(0)))
