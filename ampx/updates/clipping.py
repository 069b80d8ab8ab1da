"""A clip by the global norm around an optimizer, which also reports the norm.

`optax.chain(optax.clip_by_global_norm(m), tx)` clips just as well, but a fused optimizer in a chain
is hidden: the gradients would be clipped in a pass of their own. This wrapper hands its clip to a
fused optimizer inside as a `Tail` instead, and does what the chain does around any other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.model_axes import NOT_DIVIDED, ModelAxes, as_model_axes, axes_of_leaves
from ampx.trees import is_marked
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.gradient_norms import compute_clip_factor, compute_norm, fold_clip, measure_norm
from ampx.updates.tails import Tail, takes_tail, unwrap_results


class ClippedState(NamedTuple):
    """The state of `clipped`.

    Attributes:
      clip_state: that of `optax.clip_by_global_norm`, empty.
      inner_state: the wrapped transformation's.
      gradient_norm: float32 scalar, global norm of the unscaled gradients before the clip, of the
        last update that was not skipped; 0 before the first. Along mapped axes over which a
        gradient varies, it is taken as a shard.
    """

    clip_state: Any
    inner_state: Any
    gradient_norm: jax.Array

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    hands_on_tail = True


def find_clip(state: Any) -> ClippedState | None:
    """The state of a clip around the whole optimizer with this state, or None.

    Wrappers that see the same gradients in the same step may stand around it.
    """
    while is_marked(state, "hands_on_tail") and not isinstance(state, ClippedState):
        state = state.inner_state
    return state if isinstance(state, ClippedState) else None


def clip_by_norm_of_whole(
    grads: Any, max_norm: float | jax.Array, model_axes: ModelAxes = NOT_DIVIDED
) -> tuple[Any, jax.Array]:
    """Clips gradients by their global norm, of which devices may hold shards.

    Returns:
      The clipped gradients, and the norm that they had; float32 scalar.
    """
    norm = compute_norm(grads, model_axes)
    if not any(axes_of_leaves(grads, model_axes)):
        # Bit for bit what optax does, whose norm is that of what a device holds.
        return optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())[0], norm
    factor = compute_clip_factor(norm, max_norm)
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads), norm


def clipped(
    inner: optax.GradientTransformation, max_norm: float
) -> optax.GradientTransformationExtraArgs:
    """A clip by the global norm, then `inner`; in one pass if `inner` is fused.

    Args:
      inner: any optax transformation.
      max_norm: the largest global norm that `inner` sees.

    Returns:
      A transformation whose state is a `ClippedState`.
    """
    clip = optax.clip_by_global_norm(max_norm)
    inner = accept_extra_args(inner)

    def init(params: optax.Params) -> ClippedState:
        return ClippedState(clip.init(params), inner.init(params), jnp.zeros((), jnp.float32))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        tail: Tail | None = None,
        model_axes: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, ClippedState]:
        axes = as_model_axes(model_axes)
        extra_args |= axes.as_extra_args()
        if takes_tail(state.inner_state):
            own_tail = tail or Tail()
            norm = measure_norm(own_tail, updates, axes)
            clipping = fold_clip(
                dataclasses.replace(own_tail, max_norm=max_norm, norm=norm), updates, axes
            )
            updates, inner_state = inner.update(
                updates, state.inner_state, params, tail=clipping, **extra_args
            )
            # Whoever handed a tail in waits for `TailResult`s; a plain caller for arrays.
            updates = updates if tail else unwrap_results(updates)[0]
            # Around a plain optimizer the loss scale chooses between old and new state, with this
            # norm in it. In the fused form each receiver of a tail holds its own state.
            if own_tail.skip is not None:
                norm = jnp.where(own_tail.skip, state.gradient_norm, norm)
            return updates, ClippedState(state.clip_state, inner_state, norm)
        updates, norm = clip_by_norm_of_whole(updates, max_norm, axes)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return updates, ClippedState(state.clip_state, inner_state, norm)

    return optax.GradientTransformationExtraArgs(init, update)
