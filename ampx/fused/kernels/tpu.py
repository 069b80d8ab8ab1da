"""An elementwise map over arrays in place, as a Mosaic TPU kernel.

Arrays are seen in one or two dimensions, (rows, columns), and cut into equal blocks. For each block
the hardware copies what is read from HBM into VMEM, runs the function on the vector unit, and
copies what is written back, while the blocks before and after are on their way:

    reference        memory   block                                dtype
    scalars          SMEM     all of f32[n], in each step          float32
    read, written    VMEM     (rows, columns) or (elements,)       that of the array
    their scales     VMEM     (rows, columns / 256)                float32
    results          VMEM     as `written`, the same HBM           that of the array
    sums             SMEM     all of f32[num_sums], in each step   float32

The scalars are an ordinary operand in SMEM. Scalar prefetch is for index maps that depend on data;
here step (i, j) of the grid always has block (i, j).

A register holds 8 rows of 128 lanes of 32 bits, or 16 or 32 rows of narrower types. So blocks are
multiples of 128 columns and of 32 rows, which is right for all of them, or else whole arrays.

Interpreted (`interpret=True`), the kernel runs as JAX operations on the host: the arithmetic and
the edges of blocks are as on a TPU, but there is no VMEM to overflow and no type that is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ampx.fused.kernels import blocks
from ampx.fused.moments.int8_blocks import BLOCK

_LANES = 128  # columns of a register
_ROWS = 32  # a multiple of the tile height of every type: 8 rows of 32 bits, 32 of 8 bits
_SMALL = 8 * _LANES  # smaller arrays are left to XLA, which fuses them with their neighbours
_ELEMENTS = 1 << 16  # 256 KiB of float32: twice that overflowed 16 MiB of VMEM with two sums
_BYTES = 1 << 21  # of all blocks together, which the pipeline holds twice


def map_leaves(
    fun: blocks.BlockFunction,
    leaves: Sequence[blocks.Job],
    *,
    num_sums: int = 0,
    interpret: bool = False,
) -> tuple[list[list[Any]], jax.Array]:
    """`map_blocks` for every leaf, one kernel each.

    Args:
      fun: see `blocks.BlockFunction`.
      leaves: scalars, read and written items of each leaf.
      num_sums: see `map_blocks`.
      interpret: see `map_blocks`.

    Returns:
      The new written items of each leaf, and its sums as a row of a float32 matrix.
    """
    results = [map_blocks(fun, *leaf, num_sums=num_sums, interpret=interpret) for leaf in leaves]
    return [new for new, _ in results], jnp.stack([sums for _, sums in results])


def map_blocks(
    fun: blocks.BlockFunction,
    scalars: jax.Array,
    read: Sequence[Any],
    written: Sequence[Any],
    *,
    num_sums: int = 0,
    interpret: bool = False,
    _elements: int | None = None,
) -> tuple[list[Any], jax.Array]:
    """`fun` applied to arrays of one shape, block by block; the written ones are updated in place.

    Blocks past the end of an array hold garbage there: it is not written back, and its terms are
    masked out of the sums. The grid runs in order when there are sums, which add up in SMEM.

    Small arrays, and those of short rows, which a kernel would want padded to 128 lanes, are left
    to XLA. Where the last of several dimensions is not a multiple of 128, XLA may copy an array
    into the layout that a kernel needs, and back.

    Args:
      fun: see `blocks.BlockFunction`.
      scalars: float32 vector.
      read: items that are only read.
      written: items of the same shape, aliased to the results.
      num_sums: number of terms that `fun` returns, to be summed over all elements.
      interpret: whether to run on any backend, slowly, as a test does.
      _elements: how many elements a block may have, for tests of ragged blocks.

    Returns:
      The new written items, and the sums as a float32 vector.
    """
    scalars, read, written = blocks.check_job(scalars, read, written)
    shape, shares_scales = blocks.shape_of(read, written), blocks.in_blocks((read, written))
    view = (math.prod(shape[:-1]), shape[-1]) if shares_scales else _view(shape)
    if math.prod(shape) < _SMALL or view[-1] < _LANES // 2:
        return blocks.map_whole(fun, scalars, read, written, num_sums=num_sums)
    # A kernel takes flat lists of arrays; an `Int8Blocks` is two of them, codes and scales.
    arrays, structure = jax.tree.flatten((read, written))
    outputs, structure_out = jax.tree.flatten(written)
    # A parameter that is updated in place counts twice: its block goes in and another comes out.
    whole = [array for array in [*arrays, *outputs] if array.shape == shape]  # no scales
    bytes_each = sum(array.dtype.itemsize for array in whole)
    limit = _elements or min(_ELEMENTS, _BYTES // bytes_each)
    block = _rows(view, limit) if shares_scales else _block(view, limit)
    grid = tuple(map(pl.cdiv, view, block))

    # Runs once for each step of the grid; refs are the blocks of inputs, of results, and the sums.
    def kernel(scalar_ref: Any, *refs: Any) -> None:
        inputs = jax.tree.unflatten(structure, refs[: len(arrays)])
        results = jax.tree.unflatten(structure_out, refs[len(arrays) :][: len(outputs)])
        totals: list[Any] = [0] * num_sums
        for window in _windows(block, shares_scales):
            index = functools.partial(_index, shape, block, window)
            cell = blocks.Cell(jnp.sqrt, index, lambda x: jnp.max(x, axis=-1, keepdims=True))
            new, terms = blocks.apply_to_block(fun, scalar_ref, window.load(inputs), cell, num_sums)
            window.store(results, new)
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
        # Terms of windows of one block were added element by element; here they become numbers.
        if totals:
            _accumulate(refs[-1], totals, _inside(view, (*block[:-1], totals[0].shape[-1])))

    def spec(array: jax.Array) -> pl.BlockSpec:
        has_scales = shares_scales and array.shape != shape
        own = (block[0], view[1] // BLOCK) if has_scales else block
        return pl.BlockSpec(own, lambda *index: index)

    def viewed(array: jax.Array) -> jax.Array:
        return array.reshape(view if array.shape == shape else (view[0], -1))

    # Whole arrays: a spec without a block shape.
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    like = jax.typeof(scalars).manual_axis_type
    specs, arrays = list(map(spec, arrays)), list(map(viewed, arrays))
    kinds = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=like) for a in map(viewed, outputs)
    ]
    if num_sums:
        kinds.append(jax.ShapeDtypeStruct((num_sums,), jnp.float32, manual_axis_type=like))
    # "arbitrary" is Mosaic's word for steps in order, one after the other: sums are added up from
    # step to step. "parallel" steps may be divided between cores.
    order = "arbitrary" if num_sums else "parallel"
    first = len(arrays) - len(outputs)
    new = list(
        pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[smem, *specs],
            out_specs=[*specs[first:], *[smem] * bool(num_sums)],
            out_shape=kinds,
            # Operands are the scalars, what is read, then what is written; results as the last.
            input_output_aliases={1 + first + k: k for k in range(len(outputs))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=(order,) * len(grid)),
            interpret=interpret,
            name="ampx_map_blocks",
        )(scalars, *arrays)
    )
    sums = new.pop() if num_sums else blocks.as_vector([])
    new = [array.reshape(like.shape) for array, like in zip(new, outputs, strict=True)]
    return jax.tree.unflatten(structure_out, new), sums


class _Window(NamedTuple):
    """What a step of the grid does at once: a whole block, or 256 of its columns that share scales.

    With scales, `column` c of a block of (32, 1024) elements is its columns 256 c to 256 c + 255,
    each row with one scale, which is column c of the block of scales, (32, 4).

    Attributes:
      shape: of the elements.
      column: the number of the group of columns, or None for a whole block.
    """

    shape: tuple[int, ...]
    column: int | None = None

    @property
    def start(self) -> int:
        return 0 if self.column is None else self.column * BLOCK

    def _elements(self) -> Any:
        return ... if self.column is None else (slice(None), pl.ds(self.start, BLOCK))

    def _scales(self) -> Any:
        return slice(None), pl.ds(self.column, 1)

    def load(self, items: Any) -> Any:
        return blocks.map_items(
            lambda ref: ref[self._elements()], lambda ref: ref[self._scales()], items
        )

    def store(self, items: Any, values: Any) -> None:
        def write(ref: Any, value: jax.Array) -> None:
            ref[self._elements()] = value

        def write_scales(ref: Any, value: jax.Array) -> None:
            ref[self._scales()] = value

        blocks.map_items(write, write_scales, items, values)


def _windows(block: tuple[int, ...], shares_scales: bool) -> list[_Window]:
    if not shares_scales:
        return [_Window(block)]
    return [_Window((block[0], BLOCK), column) for column in range(block[1] // BLOCK)]


def _index(
    shape: tuple[int, ...], block: tuple[int, ...], window: _Window
) -> tuple[jax.Array, jax.Array]:
    """Where the elements of a window lie in arrays of this shape.

    The view that a kernel has of an array keeps the last dimension, except for vectors, which are
    viewed as rows of 128: their elements all lie in row 0 of the array.
    """

    def along(axis: int, start: int = 0) -> jax.Array:
        # In int32, which `program_id` has, and cast once at the end.
        first = pl.program_id(axis) * block[axis] + start
        size = tuple(n if axis == k else 1 for k, n in enumerate(window.shape))
        place = lax.broadcasted_iota(jnp.int32, size, axis) + first
        return jnp.broadcast_to(place, window.shape).astype(jnp.uint32)

    column = along(len(block) - 1, window.start)
    if len(block) == 1:
        return jnp.uint32(0), column
    row = along(0)
    return (row, column) if len(shape) > 1 else (jnp.uint32(0), row * jnp.uint32(_LANES) + column)


def _rows(view: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A block of whole rows."""
    return _at_most(view[0], elements // view[1], _ROWS), view[1]


def _view(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of one or two dimensions that costs no copy where the array has its usual layout."""
    if len(shape) > 1:
        return math.prod(shape[:-1]), shape[-1]
    size = math.prod(shape)
    return (size // _LANES, _LANES) if size % (8 * _LANES) == 0 else (size,)


def _block(view: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A block of about `elements` elements: whole rows where they are short enough."""
    # Rows as they lie in VMEM, padded to 128 lanes, 32 of them at least.
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
    """Which elements of this step's block lie in the array; None where all blocks are full.

    The last block of a row or column reaches past the array's end. What it reads there is garbage,
    and NaN times 0 is NaN: terms are selected, not multiplied.
    """
    inside = None
    for axis, (size, step) in enumerate(zip(view, block, strict=True)):
        if size % step:
            left = jnp.int32(size) - pl.program_id(axis) * step
            here = lax.broadcasted_iota(jnp.int32, block, axis) < left
            inside = here if inside is None else inside & here
    return inside


def _accumulate(sums: Any, terms: Sequence[jax.Array], inside: jax.Array | None) -> None:
    """Adds the terms of one block to the sums, which the first step of the grid clears."""
    # SMEM keeps its numbers from step to step, as the block of sums is the same for all.
    steps = [pl.program_id(axis) for axis in range(terms[0].ndim)]

    @pl.when(sum(steps) == 0)
    def _clear() -> None:
        for k in range(len(terms)):
            sums[k] = jnp.float32(0)

    for k, term in enumerate(terms):
        sums[k] += jnp.sum(term if inside is None else jnp.where(inside, term, jnp.float32(0)))
