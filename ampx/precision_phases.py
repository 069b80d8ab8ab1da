"""Where training is in a precision schedule: a part of the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.trees import find_nodes


class PrecisionScheduleState(NamedTuple):
    """State of `ampx.follow_schedule`.

    Attributes:
      precision_phase: int32, the phase of the next step, from 0.
      steps_seen: int32, steps so far, skipped ones included.
      parked_scale: float32, the scale that the last phase with a dynamic one left behind.
      inner_state: the wrapped transformation's state.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> schedule = ampx.precision_schedule("fast1|step|0.9", total_steps=100)
      >>> state = ampx.follow_schedule(optax.sgd(0.1), schedule).init(jnp.ones(2))
      >>> int(state.precision_phase), int(state.steps_seen)
      (0, 0)
    """

    precision_phase: jax.Array
    steps_seen: jax.Array
    parked_scale: jax.Array
    inner_state: Any

    hands_on_tail = True


def precision_phase(opt_state: optax.OptState) -> jax.Array:
    """The phase of a precision schedule that the next step is in.

    Args:
      opt_state: an optimizer state, however nested.

    Returns:
      int32 scalar; 0 where the state follows no schedule.

    Raises:
      ValueError: if it follows several.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> schedule = ampx.precision_schedule("fast1|step|0.5", total_steps=2)
      >>> tx = ampx.follow_schedule(optax.sgd(0.1), schedule)
      >>> state = tx.init(jnp.ones(2))
      >>> for _ in range(2):
      ...     print(ampx.precision_phase(state))
      ...     _, state = tx.update(jnp.ones(2), state)
      0
      1
    """
    states = find_nodes(opt_state, PrecisionScheduleState)
    if len(states) > 1:
        raise ValueError(f"found {len(states)} precision schedules in the state: one is enough")
    return jax.tree.leaves(states[0].precision_phase)[0] if states else jnp.zeros((), jnp.int32)
