"""Parameters that are stored in one form and updated in a wider one: what such wrappers share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.mesh_axes import sum_over_shards
from ampx.trees import is_float0, is_floating, wider_dtype
from ampx.updates.applying import apply_updates
from ampx.updates.tails import Tail, TailResult, takes_tail, unwrap_results


def updated(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    inner_state: Any,
    wide: Any,
    tail: Tail | None,
    extra_args: dict[str, Any],
) -> tuple[Any, jax.Array, Any]:
    """One step of `inner` on wide parameters.

    Args:
      inner: any transformation; a fused one works in one pass.
      grads: gradients of any floating dtype.
      inner_state: its state, made for wide parameters.
      wide: the parameters in the form in which they are updated.
      tail: what this step's tail asks for, if anything does.
      extra_args: handed to `inner`.

    Returns:
      New wide parameters, a bool scalar that tells whether a number was refused, and the new state.
    """
    if takes_tail(inner_state):
        own_tail = dataclasses.replace(tail or Tail(), new_params=True)
        results, new_state = inner.update(grads, inner_state, wide, tail=own_tail, **extra_args)
        new, bad = unwrap_results(results)
        return new, bad, new_state
    grads = jax.tree.map(lambda g: g if is_float0(g) else widened(g), grads)
    updates, new_state = inner.update(grads, inner_state, wide, **extra_args)
    return apply_updates(wide, updates), jnp.zeros((), bool), new_state


class Settled(NamedTuple):
    """A new parameter on which a kernel has decided already: on a skip it is the old one."""

    param: Any


def answer(new: Any, params: Any, bad: jax.Array, tail: Tail | None) -> Any:
    """What an update returns when `new` is to stand in the place of `params`: as the tail asks.

    Without a tail these are float32 updates, the difference of two stored parameters: added by
    `optax.apply_updates` they give the new one exactly, unless a half parameter shrinks by more
    than 2**12 in one step.
    """

    def result(leaf: jax.Array, new_leaf: Any) -> Any:
        if isinstance(new_leaf, Settled):
            return TailResult(new_leaf.param, bad)
        wants_params = tail is not None and tail.new_params
        value = new_leaf if wants_params else _difference(new_leaf, leaf)
        if tail is None:
            return value
        if tail.skip is None or not is_floating(leaf):
            return TailResult(value, bad)
        # Negative zeros: a parameter of -0.0 plus 0.0 would become 0.0.
        stays = leaf if wants_params else jnp.full_like(value, -0.0)
        held = jnp.where(jnp.isfinite(new_leaf) & ~tail.skip, value, stays)
        return TailResult(held, bad | overflows(new_leaf, leaf))

    return jax.tree.map(result, params, new)


def overflows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Whether a float16 parameter that is finite would not stay so; over all of its shards.

    Other types have the range of what they are computed in, and are not looked through.
    """
    if new.dtype != jnp.float16:
        return jnp.zeros((), bool)
    lost = jnp.sum(~jnp.isfinite(new) & jnp.isfinite(old), dtype=jnp.int32)
    return sum_over_shards(lost) > 0


def _difference(new: jax.Array, old: jax.Array) -> Any:
    if is_floating(old):
        return widened(new) - widened(old)
    is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
    return np.zeros(old.shape, jax.dtypes.float0) if is_key else jnp.zeros_like(old)


def widened(leaf: jax.Array) -> jax.Array:
    """A floating array in float32, or in its own dtype if that is wider; others as they are."""
    return leaf.astype(wider_dtype(leaf.dtype, jnp.float32)) if is_floating(leaf) else leaf
