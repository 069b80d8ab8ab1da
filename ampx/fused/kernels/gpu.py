"""An elementwise map over many arrays in place, as one Mosaic GPU kernel (Hopper and newer).

    grid             one dimension: the thread blocks of all leaves, one leaf after the other
    thread block     128 threads, one warpgroup: what Mosaic's layouts are made for
    references       all in global memory (GMEM), flat: scalars f32[n]; items in the dtypes in which
                     they are stored; scales f32[elements / 256]; sums f32[thread blocks]
    registers        everything else; nothing is shared by threads but sums and largest values

Each thread block takes consecutive elements of one leaf from global memory to registers and back:
1024 of them, or what the plan says. Every number is used once, so there is nothing to gain from
shared memory. A leaf whose size is not a multiple of that ends with a window that overlaps the one
before it. A leaf of 3000:

    0                 1024              1976 2048               3000
    |--- thread block 0 ---|                                          window of 1024
                      |--- thread block 1 ---|                        window of 1024
                                        |--- thread block 1 ---|      window of 1024, 72 done

The last two belong to one thread block, which loads both before it stores either. So the 72
elements in both are worked out twice from the same old numbers, stored twice alike, and counted
once in sums. Where elements share the scale of 8 bits, a thread block takes one group of 256 after
the other, and no windows overlap.

Interpreted, the same code runs as JAX operations on the host. It shows that the arithmetic and the
windows are right, but knows nothing of layouts and alignment, which only lowering checks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ampx.fused.kernels import blocks
from ampx.fused.moments.int8_blocks import BLOCK
from ampx.mesh_axes import varying_axes
from ampx.updates.tails import DEFAULT_PLAN, KernelPlan

_THREADS = 128  # of a thread block: one warpgroup
_AXIS = "ampx_blocks"  # what the kernel calls the dimension of its grid


def map_blocks(
    fun: blocks.BlockFunction,
    scalars: jax.Array,
    read: Sequence[Any],
    written: Sequence[Any],
    *,
    num_sums: int = 0,
    interpret: bool = False,
) -> tuple[list[Any], jax.Array]:
    """`map_leaves` for one leaf, whose sums are a vector."""
    leaf = scalars, read, written
    [new], sums = map_leaves(fun, [leaf], num_sums=num_sums, interpret=interpret)
    return new, sums[0]


def map_leaves(
    fun: blocks.BlockFunction,
    leaves: Sequence[blocks.Job],
    *,
    num_sums: int = 0,
    interpret: bool = False,
    plan: KernelPlan = DEFAULT_PLAN,
) -> tuple[list[list[Any]], jax.Array]:
    """`fun` applied to every leaf, under `jax.jit`; the written items are updated in place.

    Leaves too small for a thread block are left to XLA, the others share kernels. Sums are those of
    one thread block each, which XLA adds up: the same bits every time, as no atomics are involved.

    Args:
      fun: see `blocks.BlockFunction`.
      leaves: scalars, read and written items of each leaf. Leaves of unlike types and shapes may
        share a kernel, and so may those of unlike hyperparameters or with a trust ratio each.
      num_sums: number of terms that `fun` returns, to be summed over all elements of a leaf.
      interpret: whether to run on the CPU, slowly, as a test does.
      plan: how many elements a thread block has, how many a thread loads at once, and how many
        leaves a kernel, whose code grows with their number.

    Returns:
      The new written items of each leaf, and its sums as a row of a float32 matrix.

    Raises:
      NotImplementedError: in a `shard_map` with `check_vma`, for arrays that vary over its axes.
        Since jax 0.11 or 0.12 a kernel takes no references to such arrays.
    """
    results: list[Any] = [None] * len(leaves)
    # One job's scalars vary over every axis over which any of its arrays does: see `check_job`.
    checked = [blocks.check_job(*leaf) for leaf in leaves]
    if any(varying_axes(scalars) for scalars, _, _ in checked):
        raise NotImplementedError(
            "a Mosaic GPU kernel that updates arrays in place cannot take arrays that vary over "
            "mesh axes: pass check_vma=False to the jax.shard_map around it"
        )
    # One element a thread at least; and 32-bit addresses, which a kernel counts in.
    large = []
    for k, leaf in enumerate(checked):
        if _THREADS <= _size(leaf) < 1 << 31:
            large.append(k)
        else:
            results[k] = blocks.map_whole(fun, *leaf, num_sums=num_sums)
    for first in range(0, len(large), plan.leaves):
        group = large[first : first + plan.leaves]
        launched = _launch(fun, [checked[k] for k in group], num_sums, interpret, plan)
        for k, result in zip(group, launched, strict=True):
            results[k] = result
    return [new for new, _ in results], jnp.stack([sums for _, sums in results])


def _size(leaf: blocks.Job) -> int:
    return math.prod(blocks.shape_of(*leaf[1:]))


class _Window(NamedTuple):
    """Consecutive elements of a leaf that a thread block works on at once.

    Attributes:
      start: int32 scalar, the place of the first in the flat leaf.
      vector: how many neighbours a thread loads at once; `start` is a multiple of it.
      done: how many of the first belong to the window before as well.
    """

    start: Any
    vector: int
    done: int = 0


class _Part(NamedTuple):
    """The thread blocks of one leaf.

    Attributes:
      shape: of the leaf.
      block: elements of a window, a power of two.
      elements: of a full thread block.
      vector: how many neighbours a thread loads at once, at most.
      first: the number, in the grid, of the leaf's first thread block.
      shares_scales: whether a window is a group of elements that share a scale. A thread block
        takes several such windows; otherwise it takes one, or two that overlap.
    """

    shape: tuple[int, ...]
    block: int
    elements: int
    vector: int
    first: int
    shares_scales: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def programs(self) -> int:
        return pl.cdiv(self.size, self.elements) if self.shares_scales else self.size // self.block

    def windows(self, index: Any, size: int) -> list[_Window]:
        """Finds the windows of this leaf's thread block `index`, which works on `size` elements."""
        # No more than each thread has.
        vector = min(self.vector, self.block // _THREADS)
        begin = index * self.elements
        if self.shares_scales:
            return [_Window(begin + k, vector) for k in range(0, size, self.block)]
        if size == self.block:
            return [_Window(begin, vector)]
        # The second window ends with the leaf. It may begin anywhere, so it is loaded one by one.
        end = self.size - self.block
        return [_Window(begin, vector), _Window(end, 1, 2 * self.block - size)]


def _part(leaf: blocks.Job, first: int, plan: KernelPlan) -> _Part:
    shape, shares_scales = blocks.shape_of(*leaf[1:]), blocks.in_blocks(leaf[1:])
    # The greatest power of two within the leaf: a small leaf is one thread block, two windows.
    fitting = 1 << (math.prod(shape).bit_length() - 1)
    block = BLOCK if shares_scales else min(plan.elements, fitting)
    elements = plan.elements if shares_scales else block
    return _Part(shape, block, elements, plan.vector, first, shares_scales)


def _launch(
    fun: blocks.BlockFunction,
    leaves: Sequence[blocks.Job],
    num_sums: int,
    interpret: bool,
    plan: KernelPlan,
) -> list[tuple[list[Any], jax.Array]]:
    parts: list[_Part] = []
    total = 0
    for leaf in leaves:
        parts.append(_part(leaf, total, plan))
        total += parts[-1].programs

    # Every thread block runs this code and finds its leaf. `part` and `refs` are static, so there
    # is a branch for each leaf, with the leaf's own dtypes and sizes.
    def kernel(leaf_refs: Any, *sums_refs: Any) -> None:
        program = lax.axis_index(_AXIS)
        for part, refs in zip(parts, leaf_refs, strict=True):

            def update(windows: Sequence[_Window], part=part, refs=refs) -> None:
                sums = _update(fun, refs, part, windows, num_sums, interpret)
                for k, value in enumerate(sums):
                    sums_refs[k][program] = value

            _dispatch(part, program - part.first, update)

    same = jax.typeof(leaves[0][0]).manual_axis_type
    partial = jax.ShapeDtypeStruct((total,), jnp.float32, manual_axis_type=same)
    # Flat, since windows know nothing of rows. Written items become references that the kernel
    # updates in place, and are frozen to arrays behind it.
    operands = [
        (scalars, *jax.tree.map(lambda array: array.reshape(-1), (read, written)))
        for scalars, read, written in leaves
    ]
    operands = [(scalars, read, jax.tree.map(_ref, new)) for scalars, read, new in operands]
    sums: Any = pl.kernel(
        kernel,
        out_type=[partial] * num_sums,
        mesh=plgpu.Mesh(grid=(total,), grid_names=(_AXIS,)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_interpreter() if interpret else False,
        name="ampx_map_blocks",
    )(operands)
    results = []
    for part, (*_, refs), (*_, written) in zip(parts, operands, leaves, strict=True):
        new = jax.tree.map(lambda ref, like: jax.freeze(ref).reshape(like.shape), refs, written)
        # f32[thread blocks of this leaf], added up by XLA in an order that never changes.
        own = slice(part.first, part.first + part.programs)
        results.append((new, blocks.as_vector([jnp.sum(one[own]) for one in sums])))
    return results


def _ref(array: jax.Array) -> Any:
    """A mutable reference to an array, in global memory."""
    return jax.new_ref(array, memory_space=plgpu.GMEM)


def _dispatch(part: _Part, index: jax.Array, update: Callable[[Sequence[_Window]], None]) -> None:
    """Calls `update` with the windows of this thread block, if it is one of this leaf.

    The number of windows must be static. So there are two branches: one for thread blocks that are
    full, and one for the last, which has the rest of the leaf.
    """
    rest = part.size % part.elements
    full = part.programs - bool(rest)

    @pl.when((index >= 0) & (index < full))
    def _full() -> None:
        update(part.windows(index, part.elements))

    if rest:

        @pl.when(index == full)
        def _last() -> None:
            update(part.windows(full, rest if part.shares_scales else part.elements + rest))


def _update(
    fun: blocks.BlockFunction,
    refs: tuple[Any, Sequence[Any], Sequence[Any]],
    part: _Part,
    windows: Sequence[_Window],
    num_sums: int,
    interpret: bool,
) -> list[jax.Array]:
    """Updates some windows of one leaf, all loaded before any is stored, and sums their terms."""
    scalars, read, written = refs

    # Arrays of one window must agree in how threads hold them: thread t has elements
    # t * vector to (t + 1) * vector - 1, then the same 128 * vector further on, and so on.
    def cast(array: jax.Array, window: _Window) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED((part.block,), vec_size=window.vector)
        return array if interpret else plgpu.layout_cast(array, layout)

    def places(window: _Window) -> jax.Array:
        return cast(lax.broadcasted_iota(jnp.int32, (part.block,), 0), window)

    def load(items: Sequence[Any], window: _Window) -> Any:
        return blocks.map_items(
            lambda ref: cast(ref[pl.ds(window.start, part.block)], window),
            lambda ref: ref[window.start // BLOCK],
            items,
        )

    def index(window: _Window) -> tuple[jax.Array, jax.Array]:
        if len(part.shape) < 2:
            return jnp.uint32(0), (window.start + places(window)).astype(jnp.uint32)
        columns = part.shape[-1]
        if part.shares_scales:  # rows are multiples of a window, which so lies within one row
            row, start = window.start // columns, window.start % columns
            return jnp.asarray(row, jnp.uint32), (start + places(window)).astype(jnp.uint32)
        place = (window.start + places(window)).astype(jnp.uint32)
        # One division and no `%`: GPUs have no instruction for either.
        row = place // jnp.uint32(columns)
        return row, place - row * jnp.uint32(columns)

    def store(items: Sequence[Any], values: Sequence[Any], window: _Window) -> None:
        def write(ref: Any, value: jax.Array) -> None:
            ref[pl.ds(window.start, part.block)] = value

        def write_scale(ref: Any, value: jax.Array) -> None:
            ref[window.start // BLOCK] = value

        blocks.map_items(write, write_scale, items, values)

    # All loads before any store: windows may overlap.
    loaded = [(load(read, window), load(written, window)) for window in windows]
    results = [
        blocks.apply_to_block(
            fun,
            scalars,
            pair,
            blocks.Cell(_sqrt, functools.partial(index, window), jnp.max),
            num_sums,
        )
        for window, pair in zip(windows, loaded, strict=True)
    ]
    sums = [jnp.float32(0)] * num_sums
    for window, (new, terms) in zip(windows, results, strict=True):
        store(written, new, window)
        # Both windows stored the same numbers; in sums they count once.
        if window.done:
            is_done = places(window) < window.done
            terms = [jnp.where(is_done, jnp.float32(0), term) for term in terms]
        sums = [total + jnp.sum(term) for total, term in zip(sums, terms, strict=True)]
    return sums


def _sqrt(x: jax.Array) -> jax.Array:
    """A square root; before jax 0.12 by way of `rsqrt`, and zero for subnormal numbers.

    Older Mosaic lowers no `sqrt` for GPUs. x * rsqrt(x) is NaN for infinity, and for 0 and what
    the GPU flushes to 0, where rsqrt is infinite: both are put right.
    """
    if jax.__version_info__ >= (0, 12):
        return jnp.sqrt(x)
    root = jnp.where(x == jnp.inf, x, x * lax.rsqrt(x))
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, jnp.zeros_like(x), root)


def _interpreter() -> Any:
    """What asks `pl.kernel` for the interpreter, which is public since jax 0.11 or 0.12."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
