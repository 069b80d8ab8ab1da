"""Updates by Pallas kernels, in place: the same arithmetic, block by block and not leaf by leaf.

XLA runs an elementwise optimizer as fast as memory allows. A kernel pays where that is not so: for
LAMB, whose norms make XLA read everything a second time, and for many small parameters on GPUs,
where one launch serves several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.fused.kernels.placement import placed
from ampx.fused.leaf_updates import Leaf, held, is_finite, ratio_of_norms, wide_step
from ampx.fused.rules import Operations, Packed, Rule, read
from ampx.gradient_norms import sums_of_squares
from ampx.tails import Backend, Tail, TailResult

_DTYPES = ("float32", "bfloat16", "float16")
_OF_PLATFORM: dict[str, Backend] = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def resolved(backend: Backend) -> Backend:
    """What runs an update, where the caller left that to the library.

    Raises:
      ValueError: for kernels on a platform that has none.
    """
    if backend == "auto":  # until kernels have been seen to be faster
        return "xla"
    if backend != "pallas":
        return backend
    platform = jax.default_backend()
    if platform not in _OF_PLATFORM:
        raise ValueError(
            f"backend='pallas' has kernels for GPUs and TPUs, and this is JAX on {platform!r}, "
            "where XLA runs updates: use 'auto'; in a test 'interpret', which is slow; and to "
            "lower for another platform 'mosaic_gpu' or 'mosaic_tpu'"
        )
    return _OF_PLATFORM[platform]


def runs_in_kernel(rule: Rule, leaf: Leaf, tail: Tail) -> bool:
    """Whether a kernel updates this parameter; all others are left to XLA.

    Those are parameters of NovoGrad, which needs the norm of a gradient before anything else; of
    float64; those with state that is not an array of the parameter's shape in a common type, such
    as 8-bit moments; and those of LAMB with half moments, which its second pass would read rounded,
    or in flat buffers.
    """
    if not tail.new_params or tail.backend in ("auto", "xla") or rule.needs_squares:
        return False
    if any(getattr(slot, "dtype", None) == jnp.float16 for slot in leaf.slots):
        return False
    if rule.direction_again and leaf.segments is not None:
        return False
    if rule.direction_again and any(getattr(s, "dtype", None) != jnp.float32 for s in leaf.slots):
        return False
    arrays = leaf.grad, leaf.param, *leaf.slots
    return all(
        hasattr(array, "dtype") and array.dtype.name in _DTYPES and array.shape == leaf.param.shape
        for array in arrays
    )


def kernel_updates(
    rule: Rule, coefficients: Packed, leaves: Sequence[Leaf], tail: Tail
) -> list[tuple[TailResult, tuple[jax.Array, ...]]]:
    """`leaf_update` of several parameters with the same coefficients.

    Raises:
      ValueError: if the parameters may be divided over devices in a way that is not known here.
    """
    results: list[Any] = [None] * len(leaves)
    vector, numbers, is_bad = coefficients
    if tail.skip is not None:
        vector = jnp.append(vector, tail.skip.astype(vector.dtype))
    # Only those in float16 overflow, and what counts that would slow the others down.
    for counts in (False, True):
        step = _Step(rule, numbers, tail.skip is not None, counts)
        group = [k for k, leaf in enumerate(leaves) if counts == step.may_overflow(leaf)]
        arrays = [(leaf.grad, leaf.param, leaf.slots) for leaf in map(leaves.__getitem__, group)]
        update = functools.partial(_updates, step, _map_leaves(tail.backend))
        for k, new in zip(group, placed(update, vector, arrays), strict=True):
            param, slots, overflows = new
            results[k] = TailResult(param, is_bad | (overflows > 0) if counts else is_bad), slots
    return results


def kernel_squares(
    backend: Backend,
) -> Callable[[Sequence[jax.Array]], list[jax.Array]] | None:
    """What sums the squares of many arrays in few launches; None where XLA is as good."""
    if backend not in ("mosaic_gpu", "interpret"):
        return None
    map_leaves = _map_leaves(backend)

    def squared(scalars: Any, read_: Any, written: Any, sqrt: Any) -> tuple[list, list]:
        wide = _wide(read_[0])
        return [], [wide * wide]

    def update(vector: jax.Array, leaves: Any, axes: Sequence[tuple[str, ...]]) -> list[Any]:
        _, sums = map_leaves(squared, [(vector, leaf, []) for leaf in leaves], num_sums=1)
        return [((), (), total[0]) for total in _over_axes(sums, axes)]

    def squares(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        suits = [array.dtype.name in _DTYPES for array in arrays]
        ours = [[array] for array, is_ours in zip(arrays, suits, strict=True) if is_ours]
        others = [array for array, is_ours in zip(arrays, suits, strict=True) if not is_ours]
        by_kernel = iter(placed(update, jnp.ones(1, jnp.float32), ours))
        by_xla = iter(sums_of_squares(others))
        return [next(by_kernel)[-1] if is_ours else next(by_xla) for is_ours in suits]

    return squares


def _over_axes(sums: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
    """The sums of each leaf over the shards along its axes."""
    return [lax.psum(s, over) if over else s for s, over in zip(sums, axes, strict=True)]


def _map_leaves(backend: Backend) -> Callable[..., Any]:
    """The kernels of a backend, imported when they are needed: Pallas takes a second."""
    if backend == "mosaic_gpu":
        from ampx.fused.kernels import gpu

        return gpu.map_leaves
    from ampx.fused.kernels import tpu

    return functools.partial(tpu.map_leaves, interpret=backend == "interpret")


class _Step(NamedTuple):
    """What kernels do to the blocks of a parameter: the functions that they map.

    Attributes:
      rule: the optimizer.
      numbers: coefficients, of which only matters which are None.
      has_skip: whether the last scalar says to keep everything.
      counts: whether to count the parameters that overflow.
    """

    rule: Rule
    numbers: Any
    has_skip: bool
    counts: bool

    def may_overflow(self, leaf: Leaf) -> bool:
        return self.has_skip and leaf.param.dtype == jnp.float16

    def whole(self, scalars: Any, read_: Any, written: Any, sqrt: Any) -> tuple[list, list]:
        """Reads the gradient, writes parameter and slots."""
        h, skip, _ = self._unpacked(scalars)
        param, *slots = written
        direction, new_slots = self._stepped(h, skip, read_[0], param, slots, sqrt)
        new, overflows = self._landed(h, skip, param, direction)
        return [new, *new_slots], overflows

    def slots(self, scalars: Any, read_: Any, written: Any, sqrt: Any) -> tuple[list, list]:
        """Reads gradient and parameter, writes the slots; sums the squares of both norms."""
        h, skip, _ = self._unpacked(scalars)
        grad, param = read_
        direction, new_slots = self._stepped(h, skip, grad, param, written, sqrt)
        param = _wide(param)
        return new_slots, [param * param, direction * direction]

    def param(self, scalars: Any, read_: Any, written: Any, sqrt: Any) -> tuple[list, list]:
        """Reads the new slots, writes the parameter; the first scalar is the trust ratio."""
        h, skip, ratio = self._unpacked(scalars)
        again: Any = self.rule.direction_again
        operations = Operations(sqrt, functools.partial(held, skip))
        direction = again(_wide(written[0]), tuple(map(_wide, read_)), h, operations)
        new, overflows = self._landed(h, skip, written[0], direction * ratio)
        return [new], overflows

    def _unpacked(self, scalars: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """The coefficients, whether to skip, and a trust ratio behind both if there is one."""
        given = sum(number is not None for number in self.numbers)
        numbers, (*rest,) = scalars[:given], scalars[given:]
        skip = rest.pop(0) > 0 if self.has_skip else None
        return read(self.numbers, numbers), skip, rest[0] if rest else None

    def _stepped(
        self, h: Any, skip: Any, grad: Any, param: Any, slots: Any, sqrt: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        wide = Leaf(_wide(grad), _wide(param), tuple(map(_wide, slots)))
        direction, new_slots = wide_step(self.rule, h, wide, skip, sqrt)
        return direction, [n.astype(s.dtype) for n, s in zip(new_slots, slots, strict=True)]

    def _landed(self, h: Any, skip: Any, param: Any, direction: Any) -> tuple[Any, list]:
        """The new parameter, or the old one; and ones where a finite one would not stay so."""
        step = direction if h.step_size is None else h.step_size * direction
        old = _wide(param)
        new = (old + step).astype(param.dtype)
        if skip is None:
            return new, []
        # In float32, since not every accelerator compares halves.
        fits = is_finite(_wide(new))
        overflows = jnp.where(is_finite(old) & ~fits, jnp.float32(1), jnp.float32(0))
        return jnp.where(fits & ~skip, new, param), [overflows] * self.counts


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _updates(
    step: _Step,
    map_leaves: Callable[..., Any],
    vector: jax.Array,
    leaves: Sequence[tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]],
    axes: Sequence[tuple[str, ...]],
) -> list[tuple[Any, tuple[Any, ...], jax.Array]]:
    """Parameter, slots and number of overflows of each (gradient, parameter, slots).

    The leaves are divided along mapped `axes`; their sums are those of the whole.
    """

    def mapped(fun: Any, jobs: Sequence[Any], num_sums: int) -> tuple[Any, list[jax.Array]]:
        arrays, sums = map_leaves(fun, jobs, num_sums=num_sums)
        if not num_sums:
            return arrays, [jnp.zeros((), jnp.float32)] * len(arrays)
        return arrays, _over_axes(sums, axes)

    if step.rule.direction_again is None:
        jobs = [(vector, [grad], [param, *slots]) for grad, param, slots in leaves]
        new, overflows = mapped(step.whole, jobs, int(step.counts))
        params, slots = [param for param, *_ in new], [own for _, *own in new]
    else:  # the norms that scale a step are known only after everything was read once
        jobs = [(vector, [grad, param], list(slots)) for grad, param, slots in leaves]
        slots, squares = mapped(step.slots, jobs, 2)
        vectors = [jnp.append(vector, ratio_of_norms(*jnp.sqrt(s))) for s in squares]
        jobs = [(v, s, [leaf[1]]) for v, s, leaf in zip(vectors, slots, leaves, strict=True)]
        new, overflows = mapped(step.param, jobs, int(step.counts))
        params = [param for [param] in new]
    totals = [jnp.sum(overflow) for overflow in overflows]
    return list(zip(params, map(tuple, slots), totals, strict=True))
