"""Optax's own states, marked: the transformation takes a tail. Fields and paths are the same."""

from __future__ import annotations

from typing import Any

import optax

from ampx.tails import TakesTail


class FusedAdamState(optax.ScaleByAdamState, TakesTail):
    """Adam, AdamW and LAMB: `count`, `mu`, `nu`."""


class FusedTraceState(optax.TraceState, TakesTail):
    """SGD with momentum: `trace`."""


class FusedEmptyState(optax.EmptyState, TakesTail):
    """SGD without momentum."""


class FusedAdaDeltaState(optax.ScaleByAdaDeltaState, TakesTail):
    """Adadelta: `e_g`, `e_x`."""


class FusedLionState(optax.ScaleByLionState, TakesTail):
    """Lion: `count`, `mu`."""


class FusedRssState(optax.ScaleByRssState, TakesTail):
    """Adagrad: `sum_of_squares`."""


class FusedNovogradState(optax.ScaleByNovogradState, TakesTail):
    """NovoGrad: `count`, `mu`, and `nu`, which is one number a parameter."""


_KINDS = {
    kind.__bases__[0]: kind
    for kind in (
        FusedAdamState,
        FusedTraceState,
        FusedAdaDeltaState,
        FusedLionState,
        FusedRssState,
        FusedNovogradState,
    )
}


def marked(state: Any) -> tuple[Any, ...]:
    """The state of an optax optimizer, its own part marked."""
    parts = tuple(_KINDS[type(part)](*part) if type(part) in _KINDS else part for part in state)
    if any(isinstance(part, TakesTail) for part in parts):
        return parts
    return (FusedEmptyState(), *parts[1:])


def own_part(state: Any) -> int:
    """The place of the marked part.

    Raises:
      TypeError: if no part is.
    """
    for place, part in enumerate(state if isinstance(state, tuple) else ()):
        if isinstance(part, TakesTail):
            return place
    raise TypeError(
        f"got a state of {type(state).__name__} that no optimizer of ampx.fused has made: to go on "
        "from a state of optax, use "
        "jax.tree.unflatten(jax.tree.structure(tx.init(params)), jax.tree.leaves(state))"
    )
