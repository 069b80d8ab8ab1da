"""Updates by Pallas kernels, in place: the same arithmetic, block by block and not leaf by leaf.

XLA runs an elementwise optimizer as fast as memory allows. A kernel pays where that is not so: for
moments in 8 bits, whose scales make XLA read everything twice, as do LAMB's norms on TPUs, and for
many small parameters on GPUs, where one launch serves several.

    runs_in_kernel       which parameters kernels take; the others are left to XLA
    update_in_kernels    groups those that one kernel function fits
      run_in_place       where each array lies: a device, a shard       (placement)
        map_leaves       the kernel, for a GPU or a TPU                 (gpu, tpu)
          KernelStep     what it does to a block                        (kernel_steps)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ampx.fused.coefficients import PackedCoefficients
from ampx.fused.kernels.blocks import LONGEST_TPU_ROW
from ampx.fused.kernels.kernel_steps import KernelStep, as_scalars, widen_item
from ampx.fused.kernels.placement import (
    Shard,
    decided_by_xla,
    is_on_one_device,
    run_in_place,
    why_place_unknown,
)
from ampx.fused.leaf_updates import Leaf, divide_norms
from ampx.fused.moments.formats import moment_words
from ampx.fused.moments.int8_blocks import BLOCK, Int8Blocks
from ampx.fused.update_rules import KERNEL_PRIMITIVES, UpdateRule
from ampx.mesh_axes import sum_over_shards
from ampx.param_storage.narrow_params import NarrowParam
from ampx.updates.gradient_norms import sum_squares
from ampx.updates.tails import Backend, KernelPlan, Tail, TailResult

_DTYPES = ("float32", "bfloat16", "float16")
# Mosaic compiles no kernel for TPUs that loads float16; XLA converts such arrays by its own means.
_TPU_DTYPES = ("float32", "bfloat16")
KindOfWork = Literal["elementwise", "norms", "blocks", "narrow", "squares"]


def runs_in_kernel(rule: UpdateRule, leaf: Leaf, tail: Tail) -> bool:
    """Whether a kernel updates this parameter.

    Left to XLA are

    - those of NovoGrad, which needs the norm of a gradient before anything else;
    - those of rules with operations that not all kernels have, such as a cube root;
    - those of float64, and on TPUs of float16, or with such gradients;
    - those with float16 moments, or other state that is not an array of the parameter's shape in
      float32 or bfloat16, or 8-bit blocks;
    - those of LAMB in flat buffers, or with half or 8-bit moments: its second pass would read
      them rounded, where XLA goes on with the numbers before rounding;
    - those with 8-bit moments or stochastic rounding of some shapes, see `_shape_suits`.
    """
    if not tail.in_kernels or rule.needs_squares or not rule.primitives <= KERNEL_PRIMITIVES:
        return False
    # Nobody asked for kernels here: they were faster on one device, and nothing else is known.
    if tail.plan.work is not None:
        is_known = find_kind_of_work(rule, leaf) in tail.plan.work
        if not is_known or not is_on_one_device(_items(leaf)):
            return False
    # A moment may overflow when it is stored in float16. `narrow_slot` checks that, kernels do not.
    if any(getattr(slot, "dtype", None) == jnp.float16 for slot in leaf.slots):
        return False
    if rule.direction_again and leaf.segments is not None:
        return False
    if rule.direction_again and any(getattr(s, "dtype", None) != jnp.float32 for s in leaf.slots):
        return False
    # What is left to look at are plain arrays: a narrow form is bfloat16 and integers, which every
    # kernel takes, and so are codes and scales.
    narrow = isinstance(leaf.param, NarrowParam)
    plain = [leaf.grad, *([] if narrow else [leaf.param])]
    plain += [slot for slot in leaf.slots if not isinstance(slot, Int8Blocks)]
    dtypes = _TPU_DTYPES if tail.backend == "mosaic_tpu" else _DTYPES
    return _shape_suits(leaf, tail.backend) and all(
        hasattr(array, "dtype") and array.dtype.name in dtypes and array.shape == leaf.param.shape
        for array in plain
    )


def find_kind_of_work(rule: UpdateRule, leaf: Leaf) -> KindOfWork:
    """What decides how kernels compare with XLA, which is the same for many optimizers.

    - `"blocks"`: moments in 8 bits, whose scales need all numbers of a block;
    - `"narrow"`: parameters that are stored in bfloat16 and error bits, or rounded at random;
    - `"norms"`: norms of the parameter between direction and step, as in LAMB;
    - `"elementwise"`: none of these.

    A fifth kind, `"squares"`, is that of the global norm.
    """
    if leaf.has_blocks:
        return "blocks"
    if isinstance(leaf.param, NarrowParam):
        return "narrow"
    return "elementwise" if rule.direction_again is None else "norms"


def _shape_suits(leaf: Leaf, backend: Backend) -> bool:
    """Whether the shape suits what is stored in blocks of 8 bits, or rounded by random bits.

    Blocks must be full, and on TPUs rows fit into the memory of a kernel. Random bits depend on the
    place in the whole array, which a shard must know: not where it is cut in the middle.
    """
    shape = leaf.param.shape
    if leaf.has_blocks:
        # So no block of a kernel ever holds a part only of the elements that share a scale.
        if not shape[-1] or shape[-1] % BLOCK:
            return False
        if backend != "mosaic_gpu" and shape[-1] > LONGEST_TPU_ROW:
            return False
    if not any(_find_draws(leaf)):
        return True
    # A shard is described by one first row and one first column. If an array (a, b, c)
    # is divided along b, the rows of a shard are not consecutive in the whole.
    # Where XLA decides how, after tracing, no axis may lie between the first and the last.
    if decided_by_xla(leaf.grad) and any(size > 1 for size in shape[1:-1]):
        return False
    spec = jax.typeof(leaf.grad).sharding.spec
    return all(part is None for part in spec[1:-1])


def _find_draws(leaf: Leaf) -> tuple[bool, ...]:
    """Which of parameter and slots are rounded by random bits."""
    drawn = [isinstance(s, Int8Blocks) and not s.signed for s in leaf.slots]
    return isinstance(leaf.param, NarrowParam) and leaf.param.words is not None, *drawn


def _draw_words(leaf: Leaf) -> list[jax.Array]:
    """What the random bits of a leaf depend on besides the place of an element."""
    of_param, *of_slots = _find_draws(leaf)
    words = [*leaf.param.words] if of_param else []
    for drawn in of_slots:
        words += moment_words(leaf.step, leaf.place) if drawn else ()
    return words


def update_in_kernels(
    rule: UpdateRule, coefficients: PackedCoefficients, leaves: Sequence[Leaf], tail: Tail
) -> list[tuple[TailResult, tuple[Any, ...]]]:
    """`update_leaf` of several parameters with the same coefficients.

    For a `NarrowParam` the value of the result is a `NarrowParam` too, in the same form.

    Raises:
      ValueError: if the parameters may be divided over devices in a way that is not known here.
    """
    results: list[Any] = [None] * len(leaves)
    # f32[coefficients], with the verdict behind them as 0.0 or 1.0.
    vector, numbers, is_bad = coefficients
    if tail.skip is not None:
        vector = jnp.append(vector, tail.skip.astype(vector.dtype))
    # Kernel functions are static, so leaves are grouped by what differs in them. Only float16
    # overflows: counting in a group of other dtypes would be a reduction for nothing.
    groups: dict[Any, list[int]] = {}
    for k, leaf in enumerate(leaves):
        counts = tail.skip is not None and leaf.param.dtype == jnp.float16
        groups.setdefault((counts, _find_draws(leaf), leaf.untracked), []).append(k)
    for (counts, draws, untracked), group in groups.items():
        step = KernelStep(rule, numbers, tail.skip is not None, counts, draws)
        arrays = [_items(leaves[k]) for k in group]
        words = [_draw_words(leaves[k]) for k in group]
        map_leaves = _map_leaves(tail.backend, tail.plan)
        update = functools.partial(_update_shards, step, map_leaves, untracked)
        for k, new in zip(group, run_in_place(update, (vector, words), arrays), strict=True):
            param, slots, overflows = new
            if isinstance(leaves[k].param, NarrowParam):
                param = NarrowParam(param)
            bad = is_bad | (overflows > 0) if counts else is_bad
            results[k] = TailResult(param, bad), slots
    return results


def _items(leaf: Leaf) -> tuple[Any, Any, tuple[Any, ...]]:
    """Gradient, parameter and slots, as kernels take them."""
    param = leaf.param.form if isinstance(leaf.param, NarrowParam) else leaf.param
    return leaf.grad, param, leaf.slots


def make_kernel_squares(
    backend: Backend, plan: KernelPlan
) -> Callable[[Sequence[jax.Array]], list[jax.Array]] | None:
    """What sums the squares of many arrays in few launches; None where XLA is as good."""
    if backend not in ("mosaic_gpu", "interpret"):
        return None
    if plan.work is not None and "squares" not in plan.work:
        return None
    map_leaves = _map_leaves(backend, plan)

    def squared(scalars: Any, read: Any, written: Any, cell: Any) -> tuple[list, list]:
        wide = widen_item(read[0])
        return [], [wide * wide]

    # In the shape that `run_in_place` wants: no arrays, and one number a leaf.
    def update(vector: jax.Array, leaves: Any, shards: Sequence[Shard]) -> list[Any]:
        _, sums = map_leaves(squared, [(vector, leaf, []) for leaf in leaves], num_sums=1)
        return [((), (), total[0]) for total in _sum_over_shards(sums, shards)]

    def squares(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if why_place_unknown(arrays) is not None or decided_by_xla(arrays):
            return sum_squares(arrays)
        if plan.work is not None and not is_on_one_device(arrays):
            return sum_squares(arrays)
        # Arrays of other dtypes (float64) go to XLA; the answers keep the order of the arrays.
        suits = [array.dtype.name in _DTYPES for array in arrays]
        ours = [[array] for array, is_ours in zip(arrays, suits, strict=True) if is_ours]
        others = [array for array, is_ours in zip(arrays, suits, strict=True) if not is_ours]
        by_kernel = iter(run_in_place(update, jnp.ones(1, jnp.float32), ours))
        by_xla = iter(sum_squares(others))
        return [next(by_kernel)[-1] if is_ours else next(by_xla) for is_ours in suits]

    return squares


def _sum_over_shards(sums: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """The sums of each leaf over all of its shards."""
    pairs = zip(sums, shards, strict=True)
    return [lax.psum(own, shard.axes) if shard.axes else own for own, shard in pairs]


def _map_leaves(backend: Backend, plan: KernelPlan) -> Callable[..., Any]:
    """The kernels of a backend, imported when they are needed: Pallas takes a second."""
    if backend == "mosaic_gpu":
        from ampx.fused.kernels import gpu

        return functools.partial(gpu.map_leaves, plan=plan)
    from ampx.fused.kernels import tpu

    return functools.partial(tpu.map_leaves, interpret=backend == "interpret")


def _update_shards(
    step: KernelStep,
    map_leaves: Callable[..., Any],
    untracked: tuple[str, ...],
    shared: tuple[jax.Array, Sequence[Sequence[jax.Array]]],
    leaves: Sequence[tuple[Any, Any, tuple[Any, ...]]],
    shards: Sequence[Shard],
) -> list[tuple[Any, tuple[Any, ...], jax.Array]]:
    """Parameter, slots and number of overflows of each (gradient, parameter, slots).

    The leaves may be shards; their sums are those of the whole. `shared` are the coefficients of
    all, and the words of each.
    """

    def mapped(fun: Any, jobs: Sequence[Any], num_sums: int) -> tuple[Any, list[jax.Array]]:
        items, sums = map_leaves(fun, jobs, num_sums=num_sums)
        if not num_sums:
            return items, [jnp.zeros((), jnp.float32)] * len(items)
        return items, _sum_over_shards(sums, shards)

    vector, words = shared
    # Each leaf's own scalars, in the order that `KernelStep` reads.
    vectors = [
        jnp.append(vector, as_scalars([*own, *shard.start])) if own else vector
        for own, shard in zip(words, shards, strict=True)
    ]
    if step.rule.direction_again is None:
        jobs = [
            (own, [grad], [param, *slots])
            for own, (grad, param, slots) in zip(vectors, leaves, strict=True)
        ]
        new, overflows = mapped(step.update_all, jobs, int(step.counts))
        params, slots = [param for param, *_ in new], [own for _, *own in new]
    else:  # the norms that scale a step are known only after everything was read once
        jobs = [
            (own, [grad, param], list(slots))
            for own, (grad, param, slots) in zip(vectors, leaves, strict=True)
        ]
        slots, squares = mapped(step.update_slots, jobs, 2)
        squares = [sum_over_shards(own, untracked) for own in squares]
        ratios = [divide_norms(*jnp.sqrt(sums)) for sums in squares]
        jobs = [
            (jnp.append(own, ratio), new, [param])
            for own, ratio, new, (_, param, _) in zip(vectors, ratios, slots, leaves, strict=True)
        ]
        new, overflows = mapped(step.update_param, jobs, int(step.counts))
        params = [param for [param] in new]
    # Of shape (1,) or (): how many float16 parameters of the leaf would have overflowed.
    totals = [jnp.sum(overflow) for overflow in overflows]
    return list(zip(params, map(tuple, slots), totals, strict=True))
