"""Following a precision schedule: a wrapper of an optimizer whose state knows the phase.

The wrapper goes around the loss scale and does three things after each update: it counts the step,
decides the phase of the next one, and sets the loss scale to what that phase asks for. With a
schedule of float16 until step 3, float32 until step 5, then float16 again:

    step                     0        1        2        3        4        5        6
    phase                    0        0        0        1        1        2        2
    scale is                 dynamic  dynamic  dynamic  fixed    fixed    dynamic  dynamic
    gradients overflow                yes
    loss_scale, before       65536    65536    32768    1        1        32768    32768
    parked_scale, before     65536    65536    32768    32768    32768    32768    32768

The scale of a dynamic phase is parked while another phase runs, and taken up by the next dynamic
one. Nothing else changes at a switch. Each update divides by the scale that its own loss was
multiplied by, and the new scale is set after that, so moments are in the same units in all phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import check_transformation
from ampx.loss_scaling.dynamics import parse_choice
from ampx.loss_scaling.new_values import hide_new_values
from ampx.loss_scaling.state import LossScaleState
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.summaries import show_fields
from ampx.tree_checks import check_opt_state, check_scalar
from ampx.trees import count_up, find_nodes, hold, is_marked
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_update, guard


class PrecisionScheduleState(NamedTuple):
    """State of `ampx.follow_schedule`.

    Attributes:
      precision_phase: int32 scalar, the phase of the next step, from 0.
      steps_seen: int32 scalar, steps so far, skipped ones included.
      parked_scale: float32, in the shape of the loss scale: the scale with which the next phase
        with a dynamic one begins, left by the last such phase. A scalar 1 if there is no scale.
      recent_losses: float32[n], the last finite losses, the newest first, infinite where there was
        none yet; n is the longest `smoothing` of a phase. Infinite throughout if no loss ends one.
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
    recent_losses: jax.Array
    inner_state: Any

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    hands_on_tail = True  # see `ampx.updates.tails.takes_tail`
    wraps_loss_scale = True  # the scale inside still counts as outermost


def follow_schedule(
    inner: optax.GradientTransformation, schedule: PrecisionSchedule
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its state knows the phase of a precision schedule.

    `ampx.train_step(policy=schedule)` does this by itself. In a loop of your own take gradients by
    `ampx.value_and_grad(loss_fn, policy=schedule)`, called with
    `phase=ampx.precision_phase(opt_state)` and `loss_scale=ampx.current_loss_scale(opt_state)`.

    Args:
      inner: any optax transformation with its loss scale, as `ampx.loss_scale(schedule.loss_scale,
        optimizer)` gives it. Each phase sets that scale to its own.
      schedule: the phases.

    Returns:
      A transformation whose state is a `PrecisionScheduleState`. If a loss ends a phase, its
      `update` needs the extra argument `value`, a float scalar, the unscaled loss over all devices.
      All extra arguments are handed on to `inner`. Updates are what the loss scale inside takes: a
      whole `GradResult`, too, and a tuple or a dict of several losses or optimizers.

    Raises:
      TypeError: if `inner` is not a gradient transformation or `schedule` not a schedule.
      ValueError: at `init`, if phases have a loss scale and `inner` has none, or has it inside
        another wrapper; in `update`, if `value` is needed and missing.

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
    inner = guard("follow_schedule", accept_extra_args(inner))
    scales = _PhaseScales.of(schedule)

    def init(params: optax.Params) -> PrecisionScheduleState:
        inner_state = inner.init(params)
        phase, parked = jnp.zeros((), jnp.int32), jnp.ones((), jnp.float32)
        if isinstance(inner_state, LossScaleState):
            parked = inner_state.loss_scale
            inner_state = inner_state._replace(loss_scale=scales.first(parked))
        elif find_nodes(inner_state, LossScaleState):
            raise ValueError(_misplaced(inner_state))
        elif scales.are_needed:
            raise ValueError(
                f"the schedule '{schedule}' has phases with a loss scale, but the optimizer has "
                "none to set: wrap it in ampx.loss_scale(schedule.loss_scale, optimizer)"
            )
        return PrecisionScheduleState(
            phase, jnp.copy(phase), parked, schedule.no_losses(), inner_state
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, PrecisionScheduleState]:
        if not _has_loss_scale(state):
            check_update("follow_schedule", PrecisionScheduleState, updates, state, params)
        elif value is None and is_marked(updates, "holds_scaled_gradients"):
            value = updates.loss
        if schedule.needs_loss and value is None:
            raise ValueError(
                f"the schedule '{schedule}' waits for a loss: call update(..., value=loss)"
            )
        if schedule.needs_loss:
            check_scalar("value", value)
        about = extra_args if value is None else {**extra_args, "value": value}
        updates, new = inner.update(updates, state.inner_state, params, **about)
        steps_seen = count_up(state.steps_seen)
        losses = state.recent_losses
        if schedule.needs_loss and value is not None:
            losses = schedule.remember(losses, value)
        phase = schedule.next_phase(state.precision_phase, steps_seen, value, losses)
        parked = state.parked_scale
        if isinstance(new, LossScaleState):
            new, parked = scales.enter(phase, state, new)
        return updates, PrecisionScheduleState(phase, steps_seen, parked, losses, new)

    follow = optax.GradientTransformationExtraArgs(init, update)
    hidden = hide_new_values(follow)

    def choose(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        # A loss scale checks and hides by itself. It knows of several losses and optimizers.
        tx = follow if _has_loss_scale(state) else hidden
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(hidden.init, choose)


class _PhaseScales(NamedTuple):
    """The loss scale of each phase, known while tracing: the device looks up its phase in them.

    Attributes:
      is_dynamic: bool[num_phases].
      fixed: float32[num_phases]; 1 for no scale, and not read where the scale is dynamic.
    """

    is_dynamic: np.ndarray
    fixed: np.ndarray

    @classmethod
    def of(cls, schedule: PrecisionSchedule) -> _PhaseScales:
        # -1 is no scale, and 0 a dynamic one.
        scales = [parse_choice(recipe.loss_scale) for recipe in schedule.recipes]
        fixed = np.array([max(scale, 1.0) for scale in scales], np.float32)
        return cls(np.array([scale == 0 for scale in scales]), fixed)

    @property
    def are_needed(self) -> bool:
        """Whether any phase has a loss scale."""
        return bool(self.is_dynamic.any() or (self.fixed != 1).any())

    def first(self, dynamic: jax.Array) -> jax.Array:
        """The scale of the first phase, where a dynamic one begins with the one given."""
        # A copy, because no buffer may be in two fields of a state: it could not be donated.
        return jnp.copy(dynamic) if self.is_dynamic[0] else jnp.full_like(dynamic, self.fixed[0])

    def enter(
        self, phase: jax.Array, state: PrecisionScheduleState, new: LossScaleState
    ) -> tuple[LossScaleState, jax.Array]:
        """The loss scale's new state in the phase of the next step, and the dynamic scale.

        Args:
          phase: of the next step.
          state: the state before this step, with its phase.
          new: what this step has made of `state.inner_state`.
        """
        was_dynamic, is_now = (
            jnp.asarray(self.is_dynamic)[p] for p in (state.precision_phase, phase)
        )
        # A fixed scale stands still: `inner` has moved it all the same, if it is dynamic, and so
        # its counters. Both are put back, while counts of overflows and skips go on.
        parked = jnp.where(was_dynamic, new.loss_scale, state.parked_scale)
        old, trackers = state.inner_state, ("growth_tracker", "hysteresis_tracker", "interval")
        held = {
            name: hold(~was_dynamic, getattr(new, name), getattr(old, name))
            for name in (*trackers, "floor_hits", "ceiling_hits", "floor_flag")
        }
        scale = jnp.where(is_now, parked, jnp.asarray(self.fixed)[phase])
        return new._replace(loss_scale=scale, **held), parked


def _has_loss_scale(state: Any) -> bool:
    is_own = isinstance(state, PrecisionScheduleState)
    return is_own and isinstance(state.inner_state, LossScaleState)


def _misplaced(holder: Any) -> str:
    """The error's text for a loss scale that is inside the transformation with this state."""
    if type(holder) is tuple:
        return (
            "the loss scale is inside optax.chain, where the schedule cannot set it: put it around "
            "the chain, as in dynamic_loss_scale(optax.chain(...)); a chain that holds nothing but "
            "the loss scale can be left out"
        )
    return (
        f"the loss scale is inside {type(holder).__name__}, which may hold sums of gradients that "
        "were multiplied by the scale of one phase and would be divided by that of the next: put "
        "the loss scale around the whole optimizer, as in dynamic_loss_scale(multi_steps("
        "optimizer, k))"
    )


def precision_phase(opt_state: optax.OptState) -> jax.Array:
    """The phase of a precision schedule that the next step is in.

    Args:
      opt_state: an optimizer state, however nested.

    Returns:
      int32 scalar; 0 where the state follows no schedule.

    Raises:
      TypeError: if `opt_state` is no optimizer state.
      ValueError: if it follows several schedules.

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
    check_opt_state(opt_state)
    states = find_nodes(opt_state, PrecisionScheduleState)
    if len(states) > 1:
        raise ValueError(
            f"found {len(states)} precision schedules in the state: wrap the optimizer in one, or "
            "pass the part of the state that is meant"
        )
    # A leaf and not the field itself: flax nnx keeps a variable there.
    return jax.tree.leaves(states[0].precision_phase)[0] if states else jnp.zeros((), jnp.int32)
