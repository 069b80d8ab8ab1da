"""Following a precision schedule: the wrapper of an optimizer, and its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import check_transformation
from ampx.loss_scaling.dynamics import parse_choice
from ampx.loss_scaling.state import LossScaleState
from ampx.precision.precision_schedules import PrecisionSchedule
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
    wraps_loss_scale = True  # the one inside still counts as outermost


def follow_schedule(
    inner: optax.GradientTransformation, schedule: PrecisionSchedule
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its state knows the phase of a precision schedule.

    `ampx.train_step(policy=schedule)` does it by itself. In a loop of your own take gradients with
    `ampx.value_and_grad(loss_fn, policy=schedule)`, called with
    `phase=ampx.precision_phase(opt_state)` and `loss_scale=ampx.current_loss_scale(opt_state)`.

    Args:
      inner: any optax transformation with its loss scale, as `ampx.loss_scale(schedule.loss_scale,
        optimizer)` gives it. Each phase sets that scale to its own.
      schedule: the phases.

    Returns:
      A transformation whose state is a `PrecisionScheduleState`. Its `update` takes the extra
      argument `value`, the unscaled loss over all devices, if a loss ends a phase, and hands all
      extra arguments on.

    Raises:
      TypeError: if `inner` is not a gradient transformation or `schedule` no schedule.
      ValueError: at `init`, for phases with a loss scale where `inner` has none, or has it inside
        another wrapper; in `update`, for a missing `value`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> schedule = ampx.precision_schedule("fast|loss|1.5", final_loss=2.0)
      >>> tx = ampx.follow_schedule(ampx.dynamic_loss_scale(optax.sgd(0.1)), schedule)
      >>> state = tx.init(jnp.ones(2))
      >>> for loss in (4.0, 3.0, 5.0):
      ...     scale = ampx.current_loss_scale(state)
      ...     _, state = tx.update(scale * jnp.ones(2), state, value=jnp.array(loss))
      ...     print(ampx.precision_phase(state), ampx.current_loss_scale(state))
      0 65536.0
      1 1.0
      1 1.0
    """
    check_transformation("inner", inner)
    if not isinstance(schedule, PrecisionSchedule):
        raise TypeError(
            f"schedule must be an ampx.PrecisionSchedule, got {type(schedule).__name__}"
        )
    inner = optax.with_extra_args_support(inner)
    scales = [parse_choice(recipe.loss_scale) for recipe in schedule.recipes]
    is_dynamic = np.array([scale == 0 for scale in scales])
    fixed_scales = np.array([max(scale, 1.0) for scale in scales], np.float32)  # off, -1, is 1

    def init(params: optax.Params) -> PrecisionScheduleState:
        inner_state = inner.init(params)
        phase, parked = jnp.zeros((), jnp.int32), jnp.ones((), jnp.float32)
        if isinstance(inner_state, LossScaleState):
            parked = inner_state.loss_scale
            first = jnp.full_like(parked, fixed_scales[0])
            inner_state = inner_state._replace(
                loss_scale=jnp.copy(parked) if is_dynamic[0] else first
            )
        elif find_nodes(inner_state, LossScaleState):
            raise ValueError(_misplaced(inner_state))
        elif is_dynamic.any() or (fixed_scales != 1).any():
            raise ValueError(
                f"the schedule '{schedule}' has phases with a loss scale, but the optimizer has "
                "none to set: wrap it in ampx.loss_scale(schedule.loss_scale, optimizer)"
            )
        return PrecisionScheduleState(phase, jnp.copy(phase), parked, inner_state)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, PrecisionScheduleState]:
        if schedule.needs_loss and value is None:
            raise ValueError(
                f"the schedule '{schedule}' waits for a loss: call update(..., value=loss)"
            )
        about = extra_args if value is None else {**extra_args, "value": value}
        updates, new = inner.update(updates, state.inner_state, params, **about)
        steps_seen = state.steps_seen + 1
        phase = schedule.next_phase(state.precision_phase, steps_seen, value)
        parked = state.parked_scale
        if isinstance(new, LossScaleState):
            was_dynamic, is_now = (
                jnp.asarray(is_dynamic)[p] for p in (state.precision_phase, phase)
            )
            parked = jnp.where(was_dynamic, new.loss_scale, parked)
            of_dynamics = ("growth_tracker", "hysteresis_tracker", "floor_hits", "floor_flag")
            held = {
                name: jnp.where(was_dynamic, getattr(new, name), getattr(state.inner_state, name))
                for name in of_dynamics
            }
            scale = jnp.where(is_now, parked, jnp.asarray(fixed_scales)[phase])
            new = new._replace(loss_scale=scale, **held)
        return updates, PrecisionScheduleState(phase, steps_seen, parked, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _misplaced(holder: Any) -> str:
    """What to say of a loss scale that is inside the transformation with this state."""
    if type(holder) is tuple:
        return (
            "the loss scale is inside optax.chain, where the schedule cannot set it: put it around "
            "the chain, as in dynamic_loss_scale(optax.chain(...)), and leave out a chain of "
            "nothing but the loss scale"
        )
    return (
        f"the loss scale is inside {type(holder).__name__}, which may hold sums of gradients at a "
        "scale that the schedule is about to change: put it around the whole optimizer, as in "
        "dynamic_loss_scale(multi_steps(optimizer, k))"
    )


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
