"""An elementwise map over many arrays in place, as one Mosaic GPU kernel (Hopper and newer).

Each thread block of 128 threads takes `_BLOCK` consecutive elements of one leaf straight from
global memory to registers and back. A leaf whose size is no multiple of that ends with a window
that overlaps the block before it. Both belong to one thread block, which loads both before it
stores either, so that no element is updated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ampx.fused.kernels import blocks
from ampx.mapped_axes import varying_over

_THREADS = 128
_BLOCK = 1024
_AXIS = "ampx_blocks"
_LEAVES = 16  # in one kernel, whose code grows with their number

Leaf = tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]
"""The scalars of one leaf, the arrays that it reads, and those that it writes, of one shape."""


def map_blocks(
    fun: blocks.Rule,
    scalars: jax.Array,
    read: Sequence[jax.Array],
    written: Sequence[jax.Array],
    *,
    num_sums: int = 0,
    interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """`map_leaves` for one leaf, whose sums are a vector."""
    leaf = scalars, read, written
    [new], sums = map_leaves(fun, [leaf], num_sums=num_sums, interpret=interpret)
    return new, sums[0]


def map_leaves(
    fun: blocks.Rule,
    leaves: Sequence[Leaf],
    *,
    num_sums: int = 0,
    interpret: bool = False,
) -> tuple[list[list[jax.Array]], jax.Array]:
    """`fun` applied to every leaf, under `jax.jit`; the written arrays are updated in place.

    Leaves too small for a thread block are left to XLA, the others share kernels. Sums are those of
    one thread block each, which XLA adds up: the same bits every time, as no atomics are involved.

    Args:
      fun: see `blocks.Rule`.
      leaves: scalars, read and written arrays of each leaf. Leaves of unlike types and shapes may
        share a kernel, and so may those of unlike hyperparameters or with a trust ratio each.
      num_sums: number of terms that the rule returns, to be summed over all elements of a leaf.
      interpret: whether to run on the CPU, slowly, as a test does.

    Returns:
      The new written arrays of each leaf, and its sums as a row of a float32 matrix.

    Raises:
      NotImplementedError: in a `shard_map` with `check_vma`, for arrays that vary over its axes.
        Since jax 0.11 or 0.12 a kernel takes no references to such arrays.
    """
    results: list[Any] = [None] * len(leaves)
    checked = [blocks.checked(*leaf) for leaf in leaves]
    if any(varying_over(scalars) for scalars, _, _ in checked):
        raise NotImplementedError(
            "a Mosaic GPU kernel that updates arrays in place cannot take arrays that vary over "
            "mesh axes: pass check_vma=False to the jax.shard_map around it"
        )
    large = []
    for k, leaf in enumerate(checked):
        if _THREADS <= _size(leaf) < 1 << 31:
            large.append(k)
        else:
            results[k] = blocks.map_whole(fun, *leaf, num_sums=num_sums)
    for first in range(0, len(large), _LEAVES):
        group = large[first : first + _LEAVES]
        launched = _launch(fun, [checked[k] for k in group], num_sums, interpret)
        for k, result in zip(group, launched, strict=True):
            results[k] = result
    return [new for new, _ in results], jnp.stack([sums for _, sums in results])


def _size(leaf: Leaf) -> int:
    _, read, written = leaf
    return (*read, *written)[0].size


class _Part(NamedTuple):
    """The thread blocks of one leaf, `programs` from `first` on, of `block` elements each."""

    size: int
    block: int
    first: int

    @property
    def programs(self) -> int:
        return self.size // self.block


class _Window(NamedTuple):
    """Consecutive elements, of which the first `done` belong to the window before as well."""

    start: Any
    vector: int  # elements that a thread loads at once, from an address that is a multiple
    done: int = 0


def _launch(
    fun: blocks.Rule, leaves: Sequence[Leaf], num_sums: int, interpret: bool
) -> list[tuple[list[jax.Array], jax.Array]]:
    parts: list[_Part] = []
    total = 0
    for size in map(_size, leaves):
        parts.append(_Part(size, min(_BLOCK, 1 << (size.bit_length() - 1)), total))
        total += parts[-1].programs

    def kernel(leaf_refs: Any, *sums_refs: Any) -> None:
        program = lax.axis_index(_AXIS)
        for part, refs in zip(parts, leaf_refs, strict=True):

            def update(windows: Sequence[_Window], part=part, refs=refs) -> None:
                sums = _update(fun, refs, part.block, windows, num_sums, interpret)
                for k, value in enumerate(sums):
                    sums_refs[k][program] = value

            _dispatch(part, program - part.first, update)

    same = jax.typeof(leaves[0][0]).manual_axis_type
    partial = jax.ShapeDtypeStruct((total,), jnp.float32, manual_axis_type=same)
    operands = [
        (scalars, [array.reshape(-1) for array in read], [_ref(array) for array in written])
        for scalars, read, written in leaves
    ]
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
        new = [jax.freeze(ref).reshape(a.shape) for ref, a in zip(refs, written, strict=True)]
        own = slice(part.first, part.first + part.programs)
        results.append((new, blocks.stacked([jnp.sum(one[own]) for one in sums])))
    return results


def _ref(array: jax.Array) -> Any:
    return jax.new_ref(array.reshape(-1), memory_space=plgpu.GMEM)


def _dispatch(part: _Part, index: jax.Array, update: Callable[[Sequence[_Window]], None]) -> None:
    """Call `update` with the windows of this thread block, if it is one of this leaf."""
    vector = min(4, part.block // _THREADS)
    rest = part.size % part.block
    full = part.programs - bool(rest)

    @pl.when((index >= 0) & (index < full))
    def _full() -> None:
        update([_Window(index * part.block, vector)])

    if rest:

        @pl.when(index == full)
        def _last() -> None:
            before = _Window(full * part.block, vector)
            update([before, _Window(part.size - part.block, 1, part.block - rest)])


def _update(
    fun: blocks.Rule,
    refs: tuple[Any, Sequence[Any], Sequence[Any]],
    block: int,
    windows: Sequence[_Window],
    num_sums: int,
    interpret: bool,
) -> list[jax.Array]:
    """Update some windows of one leaf, all loaded before any is stored, and sum their terms."""
    scalars, read, written = refs

    def cast(array: jax.Array, window: _Window) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED((block,), vec_size=window.vector)
        return array if interpret else plgpu.layout_cast(array, layout)

    def load(refs: Sequence[Any], window: _Window) -> list[jax.Array]:
        return [cast(ref[pl.ds(window.start, block)], window) for ref in refs]

    loaded = [(load(read, window), load(written, window)) for window in windows]
    results = [blocks.applied(fun, scalars, *pair, _sqrt, num_sums) for pair in loaded]
    sums = [jnp.float32(0)] * num_sums
    for window, (new, terms) in zip(windows, results, strict=True):
        for ref, value in zip(written, new, strict=True):
            ref[pl.ds(window.start, block)] = value
        if window.done:
            place = cast(lax.broadcasted_iota(jnp.int32, (block,), 0), window)
            terms = [jnp.where(place < window.done, jnp.float32(0), term) for term in terms]
        sums = [total + jnp.sum(term) for total, term in zip(sums, terms, strict=True)]
    return sums


def _sqrt(x: jax.Array) -> jax.Array:
    """A square root; before jax 0.12 by way of `rsqrt`, and zero for subnormal numbers."""
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
