"""One parameter's step: gradients in, everything that changes out, each number read once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.fused.coefficients import PackedCoefficients
from ampx.fused.moments.formats import narrow_slot, widen_slot
from ampx.fused.moments.int8_blocks import Int8Blocks
from ampx.fused.segments import Segments
from ampx.fused.update_rules import Operations, UpdateRule
from ampx.mesh_axes import sum_over_shards
from ampx.param_storage.wide_updates import overflows
from ampx.trees import is_floating, wider_dtype
from ampx.updates.tails import Tail, TailResult


class Leaf(NamedTuple):
    """What belongs to one parameter.

    Attributes:
      grad: of the parameter's shape.
      param: None where nobody gave it.
      slots: as the rule names them: arrays of the parameter's shape, `Int8Blocks`, or one number.
      place: the parameter's among all of the optimizer.
      step: int32, how many steps the optimizer has done.
      segments: the parameters, if it is a flat buffer of several.
    """

    grad: Any
    param: Any
    slots: tuple[Any, ...]
    place: int = 0
    step: Any = 0
    segments: Segments | None = None


def compute_dtype(leaf: Leaf) -> np.dtype:
    """What the arithmetic of a parameter is done in: float32, or float64 for what has it."""
    like = leaf.grad if leaf.param is None else leaf.param
    if not is_floating(like) or jnp.iscomplexobj(like) or jnp.iscomplexobj(leaf.grad):
        raise TypeError(
            f"a fused update of a parameter of dtype {like.dtype} with a gradient of dtype "
            f"{leaf.grad.dtype}: it takes real floating numbers; leave other parameters to optax "
            "with optax.partition"
        )
    return wider_dtype(like.dtype, jnp.float32)


def leaf_update(
    rule: UpdateRule, coefficients: PackedCoefficients, leaf: Leaf, tail: Tail
) -> tuple[TailResult, tuple[Any, ...]]:
    """The update of a parameter, or its new value, and its new slots."""
    # A few buffers gain nothing by jit, and moments in blocks XLA fuses less well behind a call.
    in_blocks = any(isinstance(slot, Int8Blocks) for slot in leaf.slots)
    update = _update if in_blocks or leaf.segments is not None else _update_once_traced
    (value, bad), slots = update(rule, tail.new_params, coefficients, leaf, tail.skip)
    return TailResult(value, bad), slots


def _update(
    rule: UpdateRule,
    new_params: bool,
    coefficients: PackedCoefficients,
    leaf: Leaf,
    skip: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    wide = compute_dtype(leaf)
    h = coefficients.numbers
    g, p = jax.tree.map(lambda x: x.astype(wide), (leaf.grad, leaf.param))
    slots = tuple(widen_slot(slot, wide) for slot in leaf.slots)
    if rule.needs_squares:
        scaled = g if h.factor is None else g * h.factor
        h = h._replace(squares=whole_sum(scaled * scaled, leaf.segments))
    step, new_slots = wide_step(rule, h, leaf._replace(grad=g, param=p, slots=slots), skip)
    if rule.direction_again is not None:
        step = step * trust_ratio(p, step, leaf.segments)
    step = step if h.step_size is None else h.step_size * step
    kept = tuple(
        narrow_slot(new, old, leaf.step, leaf.place, holds=skip is not None)
        for new, old in zip(new_slots, leaf.slots, strict=True)
    )
    return _result(p, step, leaf, skip, coefficients.is_bad, new_params), kept


# Parameters of a kind are traced and lowered once, which is most of the work for hundreds of them.
_update_once_traced = jax.jit(_update, static_argnums=(0, 1))


def wide_step(
    rule: UpdateRule,
    h: Any,
    leaf: Leaf,
    skip: jax.Array | None,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Direction and new slots of numbers in the compute dtype; all that kernels share with XLA."""
    g = leaf.grad if h.factor is None else leaf.grad * h.factor
    operations = Operations(sqrt, functools.partial(held, skip))
    if leaf.segments is not None:
        operations = operations._replace(spread=leaf.segments.spread)
    return rule.direction(g, leaf.param, leaf.slots, h, operations)


def unchanged(leaf: Leaf, tail: Tail) -> TailResult:
    """The result for an integer parameter, whose gradient is empty."""
    return TailResult(leaf.param if tail.new_params else leaf.grad, jnp.zeros((), bool))


def _result(
    p: Any, step: jax.Array, leaf: Leaf, skip: Any, bad: jax.Array, new_params: bool
) -> tuple[jax.Array, jax.Array]:
    """The update or the new parameter, and whether something is wrong with it.

    Counted are a coefficient that is not finite, which is seen for free, and a float16 parameter
    that overflows. What else is not finite (0/0 without epsilon) is held, and not counted: that
    would be one more pass over every parameter.
    """
    new = step if p is None else (p + step).astype(leaf.param.dtype)
    if skip is None:
        return new if new_params else step.astype(_update_dtype(leaf)), bad
    if p is not None:
        bad |= overflows(new, leaf.param)
    # A wide update: that of a half might overflow where its sum with the parameter does not.
    # Negative zeros: a parameter of -0.0 plus 0.0 would become 0.0.
    value, stays = (new, leaf.param) if new_params else (step, jnp.full_like(step, -0.0))
    return jnp.where(is_finite(new) & ~skip, value, stays), bad


def held(skip: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new`, but `old` on a skip, and wherever `new` is not finite."""
    return new if skip is None else jnp.where(is_finite(new) & ~skip, new, old)


def is_finite(x: jax.Array) -> jax.Array:
    """`jnp.isfinite`, which not every kernel language has."""
    return jnp.abs(x) < jnp.inf


def trust_ratio(p: jax.Array, direction: jax.Array, segments: Segments | None = None) -> jax.Array:
    """LAMB's: the norm of the parameter over that of the direction, 1 where one of them is 0."""
    ratio = ratio_of_norms(*(jnp.sqrt(whole_sum(x * x, segments)) for x in (p, direction)))
    return ratio if segments is None else segments.spread(ratio)


def ratio_of_norms(p_norm: jax.Array, norm: jax.Array) -> jax.Array:
    """The trust ratio from both norms."""
    is_zero = (p_norm == 0) | (norm == 0)
    return jnp.where(is_zero, jnp.ones_like(norm), p_norm / norm)


def whole_sum(x: jax.Array, segments: Segments | None = None) -> jax.Array:
    """The sum over a parameter; along mapped axes over which it varies, over its shards.

    Of a flat buffer, the sums over its parameters.
    """
    return sum_over_shards(jnp.sum(x) if segments is None else segments.sums(x))


def _update_dtype(leaf: Leaf) -> np.dtype:
    """The dtype that optax's update has."""
    dtype = leaf.grad.dtype if leaf.param is None else leaf.param.dtype
    for other in (leaf.grad, *leaf.slots):
        if isinstance(other, jax.Array):
            dtype = wider_dtype(dtype, other.dtype)
    return dtype
