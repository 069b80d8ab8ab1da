"""One parameter's step: gradients in, everything that changes out, each number read once."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.fused.rules import Operations, Rule
from ampx.mapped_axes import varying_over
from ampx.precision import wider_dtype
from ampx.tails import Tail, TailResult
from ampx.verdicts import is_floating


class Leaf(NamedTuple):
    """What belongs to one parameter.

    Attributes:
      grad: of the parameter's shape.
      param: None where nobody gave it.
      slots: as the rule names them, of the parameter's shape or one number.
    """

    grad: Any
    param: Any
    slots: tuple[Any, ...]


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


def leaf_update(rule: Rule, h: Any, leaf: Leaf, tail: Tail) -> tuple[TailResult, tuple[Any, ...]]:
    """The update of a parameter, or its new value, and its new slots."""
    wide = compute_dtype(leaf)
    g, p, slots = jax.tree.map(lambda x: x.astype(wide), (leaf.grad, leaf.param, leaf.slots))
    if h.factor is not None:
        g = g * h.factor
    if rule.needs_squares:
        h = h._replace(squares=whole_sum(g * g))
    ops = Operations(keep=functools.partial(held, tail.skip))
    direction, new_slots = rule.direction(g, p, slots, h, ops)
    if rule.trust_ratio:
        direction = direction * trust_ratio(p, direction)
    step = direction if h.step_size is None else h.step_size * direction
    kept = tuple(new.astype(old.dtype) for new, old in zip(new_slots, leaf.slots, strict=True))
    return _result(p, step, leaf, h, tail), kept


def unchanged(leaf: Leaf, tail: Tail) -> TailResult:
    """The result for an integer parameter, whose gradient is empty."""
    return TailResult(leaf.param if tail.new_params else leaf.grad, jnp.zeros((), bool))


def _result(p: Any, step: jax.Array, leaf: Leaf, h: Any, tail: Tail) -> TailResult:
    """The update or the new parameter, and whether something is wrong with it.

    Behind gradients with a finite norm only two things make a finite parameter infinite or NaN: a
    coefficient that is so, which is seen for free, and a float16 that overflows, which is counted.
    """
    new = step if p is None else (p + step).astype(leaf.param.dtype)
    value = new if tail.new_params else step.astype(_update_dtype(leaf))
    numbers = [jnp.asarray(n, jnp.float32) for n in h if n is not None]
    bad = ~jnp.all(jnp.isfinite(jnp.stack(numbers)))
    if tail.skip is None:
        return TailResult(value, bad)
    is_lost = ~jnp.isfinite(new)
    if p is not None:
        is_lost &= jnp.isfinite(leaf.param)
    if new.dtype == jnp.float16:
        bad |= jnp.any(is_lost)
    # Negative zeros: a parameter of -0.0 plus 0.0 would become 0.0.
    stays = leaf.param if tail.new_params else jnp.full_like(value, -0.0)
    return TailResult(jnp.where(tail.skip | is_lost, stays, value), bad)


def held(skip: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new`, but `old` on a skip, and wherever a finite number would turn into none."""
    if skip is None:
        return new
    return jnp.where(skip | (~jnp.isfinite(new) & jnp.isfinite(old)), old, new)


def trust_ratio(p: jax.Array, direction: jax.Array) -> jax.Array:
    """LAMB's: the norm of the parameter over that of the direction, 1 where one of them is 0."""
    p_norm, norm = (jnp.sqrt(whole_sum(x * x)) for x in (p, direction))
    is_zero = (p_norm == 0) | (norm == 0)
    return jnp.where(is_zero, jnp.ones_like(norm), p_norm / norm)


def whole_sum(x: jax.Array) -> jax.Array:
    """The sum over a parameter; along mapped axes over which it varies, over its shards."""
    axes = tuple(sorted(varying_over(x)))
    return lax.psum(jnp.sum(x), axes) if axes else jnp.sum(x)


def _update_dtype(leaf: Leaf) -> np.dtype:
    """The dtype that optax's update has."""
    dtype = leaf.grad.dtype if leaf.param is None else leaf.param.dtype
    for other in (leaf.grad, *leaf.slots):
        dtype = wider_dtype(dtype, other.dtype)
    return dtype
