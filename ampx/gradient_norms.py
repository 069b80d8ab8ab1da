"""The global norm of gradients, and whether they are finite, from one pass over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mapped_axes import varying_over
from ampx.precision import wider_dtype
from ampx.tails import Tail
from ampx.verdicts import count_nonfinite, is_floating, varying


class JudgedNorm(NamedTuple):
    """What one pass over gradients tells.

    Attributes:
      norm: float32, global norm of the gradients times their factor, over all shards.
      counts: int32 of shape (2,): this device's arrays with an infinity, and those with a NaN.
    """

    norm: jax.Array
    counts: jax.Array


def judged_norm(grads: Any, factor: jax.Array | None = None) -> JudgedNorm:
    """Norm and verdict together.

    A sum of squares that is finite has finite terms. One that is not may have overflowed, which is
    no fault of the gradients: only then they are read again, to be counted, and to be measured in
    units of the largest of them.

    Args:
      grads: any pytree of arrays; leaves that are not floating are left out. Along mapped axes over
        which a leaf varies, it is taken as a shard.
      factor: scalar that multiplies every gradient.
    """
    leaves = [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]
    if not leaves:
        return JudgedNorm(jnp.zeros((), jnp.float32), jnp.zeros(2, jnp.int32))
    # Otherwise XLA would share the casts of half gradients with the update, through memory.
    leaves = lax.optimization_barrier(leaves)
    axes = frozenset[str]().union(*map(varying_over, leaves))

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(wider_dtype(leaf.dtype, jnp.float32))

    def squares(leaf: jax.Array) -> jax.Array:
        return jnp.sum((wide(leaf) * jnp.asarray(multiplier, wide(leaf).dtype)) ** 2)

    over_shards = lax.psum, jnp.add
    multiplier = 1 if factor is None else factor
    total = _total(leaves, squares, *over_shards)

    def all_is_well() -> JudgedNorm:
        return JudgedNorm(jnp.sqrt(total), varying(jnp.zeros(2, jnp.int32), sorted(axes)))

    def second_look() -> JudgedNorm:
        largest = _total(leaves, lambda x: jnp.max(jnp.abs(x), initial=0), lax.pmax, jnp.maximum)
        unit = jnp.where(jnp.isfinite(largest), largest, 1)

        def squares_in_units(leaf: jax.Array) -> jax.Array:
            return jnp.sum((wide(leaf) / unit.astype(wide(leaf).dtype)) ** 2)

        in_units = _total(lax.optimization_barrier(leaves), squares_in_units, *over_shards)
        counts = jnp.zeros(2, jnp.int32)
        for leaf in leaves:  # one after another, so that what they need lies in one place
            leaf, counts = lax.optimization_barrier((leaf, counts))
            counts = counts + count_nonfinite(leaf)
        return JudgedNorm(jnp.sqrt(in_units) * unit * multiplier, counts)

    return lax.cond(jnp.isfinite(total), all_is_well, second_look)


def clip_factor(norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """What gradients of this norm are multiplied by, to have at most `max_norm`; float32."""
    return jnp.where(norm > max_norm, max_norm / norm, jnp.ones_like(norm))


def folded(tail: Tail, grads: Any) -> Tail:
    """The same tail with its clip in the factor, the norm measured for it if nobody has yet."""
    if tail.max_norm is None:
        return tail
    norm = judged_norm(grads, tail.factor).norm if tail.norm is None else tail.norm
    clip = clip_factor(norm, tail.max_norm)
    factor = clip if tail.factor is None else tail.factor * clip
    return dataclasses.replace(tail, factor=factor, max_norm=None, norm=norm * clip)


def _total(
    leaves: Sequence[jax.Array],
    measure: Callable[[jax.Array], jax.Array],
    over_devices: Callable[..., jax.Array],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """One number from all leaves, joined over the shards of those that are divided."""
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for leaf in leaves:
        number = measure(leaf).astype(jnp.float32)
        by_axes.setdefault(tuple(sorted(varying_over(leaf))), []).append(number)
    total = jnp.zeros((), jnp.float32)
    for axes, numbers in by_axes.items():
        joined = jnp.zeros((), jnp.float32)
        for number in numbers:
            joined = join(joined, number)
        total = join(total, over_devices(joined, axes) if axes else joined)
    return total
