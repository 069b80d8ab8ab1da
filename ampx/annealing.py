"""Following a precision schedule: in the optimizer's state, and in the choice of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import check_transformation
from ampx.loss_scale_state import LossScaleState
from ampx.precision import wider_dtype
from ampx.precision_phases import PrecisionScheduleState
from ampx.precision_schedules import PrecisionSchedule
from ampx.scale_dynamics import checked_choice
from ampx.trees import find_nodes


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
    scales = [checked_choice(recipe.loss_scale) for recipe in schedule.recipes]
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


def by_phase(each: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One function of several: that of the argument `phase`, chosen while tracing if it is an int.

    Args:
      each: the function of each phase. Their results differ in dtypes at most, and are then given
        the widest.
    """

    def at_phase(*args: Any, phase: jax.Array | int | None = None, **kwargs: Any) -> Any:
        if phase is None:
            raise TypeError(
                "with a PrecisionSchedule as its policy this function needs to know the phase: "
                "call it with phase=ampx.precision_phase(opt_state)"
            )
        if len(each) == 1:
            return each[0](*args, **kwargs)
        if isinstance(phase, int):
            if not 0 <= phase < len(each):
                raise ValueError(f"phase must be that of one of {len(each)} phases, got {phase}")
            return each[phase](*args, **kwargs)
        # With jit the switch finds what eval_shape has traced.
        calls = [jax.jit(lambda fun=fun: fun(*args, **kwargs), inline=True) for fun in each]
        results = [jax.eval_shape(call) for call in calls]
        first, *others = map(jax.tree.structure, results)
        for number, structure in enumerate(others, 1):
            if structure != first:
                raise ValueError(
                    f"the loss function returns {first} in phase 0 and {structure} in phase "
                    f"{number}: what it returns may depend on the precision in dtypes only"
                )
        widest = jax.tree.map(lambda *leaves: _widest([leaf.dtype for leaf in leaves]), *results)

        def cast(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: jax.tree.map(lambda leaf, to: leaf.astype(to), call(), widest)

        return jax.lax.switch(phase, [cast(call) for call in calls])

    return at_phase


def _widest(dtypes: Sequence[Any]) -> Any:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = widest if dtype == widest else wider_dtype(widest, dtype)
    return widest
