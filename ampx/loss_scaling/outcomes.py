"""What became of a call of an optimizer, read off its states before and after it.

A loss scale undoes a step, and says so in its state. `ampx.multi_steps` gathers the gradients of
several calls, so most of its calls neither undo anything nor move a parameter. Whoever keeps
something beside the optimizer, such as statistics of the model, a count of steps, or leaves that
are replaced (`ampx.overwritten`), asks here whether it is to go on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.loss_scaling.state import LossScaleState, has_skipped
from ampx.trees import find_marked, find_nodes, is_largest


class Outcome(NamedTuple):
    """What became of a call: its work was undone, or an update was applied, or neither yet.

    Attributes:
      skipped: bool scalar, the work was undone.
      applied: bool scalar, parameters have moved. Neither is true inside a window of
        `ampx.multi_steps` that goes on.
    """

    skipped: jax.Array
    applied: jax.Array


def compare_states(old_opt_state: optax.OptState, new_opt_state: optax.OptState) -> Outcome:
    """Compares the optimizer states before and after an update.

    With `ampx.multi_steps` and k = 3, where the gradient of call 5 is infinite:

        after call      1   2   3   4   5   6
        gradient_step   0   0   1   1   1   2    grows when a window is completed
        window_is_bad   -   -   -   -   x   -    from the overflow on; cleared with the window
        skipped         -   -   -   -   x   x    the window is lost, and is dropped at its end
        applied         -   -   x   -   -   -
    """
    skipped = has_skipped(new_opt_state)
    before, after = (find_marked(s, "sums_calls") for s in (old_opt_state, new_opt_state))
    if not after:
        return Outcome(skipped, ~skipped)
    pairs = list(zip(before, after, strict=True))
    completed = jnp.any(jnp.stack([_has_completed(old, new) for old, new in pairs]))
    # A loss scale inside speaks of the last window, until the next one is completed.
    judged_inside = any(find_nodes(new.inner_state, LossScaleState) for new in after)
    skipped &= completed | (not judged_inside)
    for old, new in pairs:
        skipped |= new.window_is_bad | (new.dropped_total > old.dropped_total)
    return Outcome(skipped, completed & ~skipped)


def _has_completed(old: Any, new: Any) -> jax.Array:
    """Whether a window ended with this call."""
    # A count that has reached its largest number stands still. A window's end is then seen by its
    # first micro-step alone, which a call that was left out there shows as well.
    is_full = is_largest(old.gradient_step) & (new.micro_step == 0)
    return (new.gradient_step > old.gradient_step) | is_full
