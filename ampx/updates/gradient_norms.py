"""The global norm of gradients, and whether they are finite, from one pass over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mesh_axes import mark_varying, sum_over_shards, varying_axes
from ampx.trees import is_floating, wider_dtype
from ampx.updates.tails import Tail

# Squares of anything finite in float32 can be summed in this unit, 2**40 of them and more.
_LARGE_UNIT = 2.0**90


class JudgedNorm(NamedTuple):
    """What one pass over gradients tells.

    Attributes:
      norm: float32, global norm of the gradients times their factor, over all shards.
      counts: int32 of shape (2,): this device's arrays with an infinity and those with a NaN; an
        array with both counts as one with a NaN.
    """

    norm: jax.Array
    counts: jax.Array


@jax.named_scope("ampx.verdict")
def measure_and_judge(
    grads: Any,
    factor: jax.Array | None = None,
    squares: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None,
) -> JudgedNorm:
    """Norm and verdict together.

    A sum of squares that is finite has finite terms. One that is not may have overflowed, which is
    no fault of the gradients: only then they are read again, in a unit in which that cannot be.

    Args:
      grads: any pytree of arrays; leaves that are not floating are left out. Along mapped axes over
        which a leaf varies, it is taken as a shard.
      factor: scalar that multiplies every gradient.
      squares: see `Tail`.
    """
    leaves = [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]
    if not leaves:
        return JudgedNorm(jnp.zeros((), jnp.float32), jnp.zeros(2, jnp.int32))
    # Otherwise XLA would share the casts of half gradients with the update, through memory.
    # One by one: in jax 0.10 a joint barrier makes all vary over what any of them does.
    leaves = [lax.optimization_barrier(leaf) for leaf in leaves]
    axes = sorted(varying_axes(leaves))
    multiplier = jnp.asarray(1 if factor is None else factor, jnp.float32)
    total = _over_shards((squares or sum_squares)(leaves))

    def all_is_well() -> JudgedNorm:
        return JudgedNorm(jnp.sqrt(total) * multiplier, mark_varying(jnp.zeros(2, jnp.int32), axes))

    def second_look() -> JudgedNorm:
        # A number for each: one that reductions share XLA writes out, as an array.
        inverses = lax.optimization_barrier([jnp.float32(1 / _LARGE_UNIT)] * len(leaves))
        large = list(map(_large_squares, leaves, inverses))
        widest = max((s.dtype for s in large), key=lambda dtype: dtype.itemsize)
        sums = jnp.stack([s.astype(widest) for s in large])
        found = jnp.stack([jnp.isinf(sums), jnp.isnan(sums)], axis=1)
        norm = jnp.sqrt(_over_shards(large)) * multiplier * _LARGE_UNIT
        return JudgedNorm(norm, mark_varying(jnp.sum(found, axis=0, dtype=jnp.int32), axes))

    return lax.cond(jnp.isfinite(total), all_is_well, second_look)


def sum_squares(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of squares of each array, in float32 or wider."""
    return [jnp.sum(leaf.astype(wider_dtype(leaf.dtype, jnp.float32)) ** 2) for leaf in leaves]


def _large_squares(leaf: jax.Array, inverse_unit: jax.Array) -> jax.Array:
    """The sum of squares in the large unit."""
    wide = leaf.astype(wider_dtype(leaf.dtype, jnp.float32))
    return jnp.sum((wide * inverse_unit.astype(wide.dtype)) ** 2)


def _over_shards(numbers: Sequence[jax.Array]) -> jax.Array:
    """The sum of one number from each leaf over all shards: one reduction for equal axes."""
    sums: dict[frozenset[str], jax.Array] = {}
    for number in numbers:
        axes, own = varying_axes(number), number.astype(jnp.float32)
        sums[axes] = sums[axes] + own if axes in sums else own
    return sum(map(sum_over_shards, sums.values()), jnp.zeros((), jnp.float32))


def compute_norm(grads: Any) -> jax.Array:
    """The norm of `measure_and_judge` without a verdict. XLA merges equal ones into one."""
    leaves = [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]
    return jnp.sqrt(_over_shards(sum_squares(leaves)))


def compute_clip_factor(norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """What gradients of this norm are multiplied by, to have at most `max_norm`; float32."""
    return jnp.where(norm > max_norm, max_norm / norm, jnp.ones_like(norm))


def measure_norm(tail: Tail, grads: Any) -> jax.Array:
    """The norm of the gradients that a tail speaks of, measured here if nobody has yet."""
    return (
        measure_and_judge(grads, tail.factor, tail.squares).norm if tail.norm is None else tail.norm
    )


def fold_clip(tail: Tail, grads: Any) -> Tail:
    """The same tail with its clip in the factor, the norm measured for it if nobody has yet.

    The clip times 1/scale is zero below 2**-126: such gradients are clipped to nothing.
    """
    if tail.max_norm is None:
        return tail
    norm = measure_norm(tail, grads)
    clip = compute_clip_factor(norm, tail.max_norm)
    factor = clip if tail.factor is None else tail.factor * clip
    return dataclasses.replace(tail, factor=factor, max_norm=None, norm=norm * clip)
