"""A clip by the global norm around an optimizer, done along with the update where that is fused."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import optax

from ampx.gradient_norms import folded
from ampx.tails import Tail, takes_tail, unwrapped


class ClippedState(NamedTuple):
    """The state of `clipped`.

    Attributes:
      clip_state: optax's, empty.
      inner_state: the wrapped transformation's.
    """

    clip_state: Any
    inner_state: Any

    hands_on_tail = True


def clipped(
    inner: optax.GradientTransformation, max_norm: float
) -> optax.GradientTransformationExtraArgs:
    """A clip by the global norm, then `inner`; in one pass if `inner` is fused."""
    clip = optax.clip_by_global_norm(max_norm)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> ClippedState:
        return ClippedState(clip.init(params), inner.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, tail: Tail | None = None, **extra_args: Any
    ) -> tuple[Any, ClippedState]:
        if takes_tail(state.inner_state):
            own_tail = dataclasses.replace(tail or Tail(), max_norm=max_norm)
            updates, inner_state = inner.update(
                updates, state.inner_state, params, tail=folded(own_tail, updates), **extra_args
            )
            updates = updates if tail else unwrapped(updates)[0]
            return updates, ClippedState(state.clip_state, inner_state)
        updates, clip_state = clip.update(updates, state.clip_state, params)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return updates, ClippedState(clip_state, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
