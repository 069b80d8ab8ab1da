"""One update of a loss-scaled optimizer: the path that all loss scales share.

Each loss scale of `ampx.loss_scaling.wrappers` is the same optax transformation, made by
`wrap_with_scale`. They differ in one function, `advance`, which says where the scale goes next. An
update has three parts: a judgement, a transition, and a move of the scale.

    gradients, times the scale, of this device        f32 or half, any shapes
        |
      judge ------ infinities, NaN, squares that overflow; agreed on       int32[3]
        |
      transition - unscale > inner update; or nothing, if judged bad       params' shapes
        |
      move ------- the scale, then the totals                              LossScaleState
        |
    updates, new state

Judgement (`judging`) and transition (`transitions`) come in two forms. The plain form works around
any optax transformation: unscaling and the update stand in one branch, which a skip does not take
(but for what makes updates of results of the branch, element by element).
The fused form works around an optimizer of `ampx.fused`: it hands the factor 1/scale and the
verdict down as a `Tail`, and the optimizer does both in the one pass in which it reads each number
anyway.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ampx import trees
from ampx.checking import check_transformation
from ampx.loss_scaling.calls import (
    Advance,
    Call,
    Judgement,
    ScaleSettings,
    Transition,
    split_by_loss,
)
from ampx.loss_scaling.gradient_results import replace_scale
from ampx.loss_scaling.judging import judge_fused, judge_loss, judge_plain
from ampx.loss_scaling.nonfinite import Verdict
from ampx.loss_scaling.state import LossScaleState
from ampx.loss_scaling.transitions import run_fused, run_plain
from ampx.model_axes import as_model_axes
from ampx.trees import find_nodes
from ampx.updates.extra_args import accept_extra_args
from ampx.updates.guards import check_update, guard
from ampx.updates.tails import Tail, prefers_tail, takes_tail


def wrap_with_scale(
    inner: optax.GradientTransformation,
    init_scale: float,
    hysteresis: int,
    advance: Advance,
    settings: ScaleSettings,
) -> optax.GradientTransformationExtraArgs:
    """A loss scale around `inner` that moves by `advance`."""
    check_transformation("inner", inner)
    inner = guard("loss_scale", accept_extra_args(inner), holds_state=True)

    def init(params: optax.Params) -> LossScaleState:
        if find_nodes(params, LossScaleState):
            raise TypeError("params hold the state of a loss scale: give state.params alone")
        return _init_state(inner.init(params), settings.shape, init_scale, hysteresis)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        verdict: Verdict | None = None,
        tail: Tail | None = None,
        model_axes: Any = None,
        gradient_scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        params = trees.leave_untrained_out(params, updates)
        for grads in split_by_loss(updates, settings.num_losses):
            if grads is not None or settings.num_losses == 1:  # None: this loss was left out
                many = not takes_tail(getattr(state, "inner_state", ()))
                check_update("loss_scale", LossScaleState, grads, state, params, may_be_many=many)
        updates, params = trees.convert_numbers((updates, params))
        divided = as_model_axes(model_axes, settings.model_axes)
        extra_args |= divided.as_extra_args()
        scaled = replace_scale(state, gradient_scale)
        call = Call(updates, scaled, params, verdict, tail, divided, extra_args)
        is_fused = settings.can_fuse and prefers_tail(state.inner_state, tail)
        judge, run = (judge_fused, run_fused) if is_fused else (judge_plain, run_plain)
        judgement = judge_loss(settings, call, judge(settings, call))
        transition = run(inner, settings, call, judgement)
        return transition.updates, move_scale(advance, state, judgement, transition)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_state(
    inner_state: optax.OptState, shape: tuple[int, ...], init_scale: float, hysteresis: int
) -> LossScaleState:
    if find_nodes(inner_state, LossScaleState):
        raise ValueError(
            "inner already has a loss scale: gradients would be unscaled twice; wrap once. In "
            "ampx.train_step a policy may bring one: leave out your own, or give loss_scale=None"
        )
    # One buffer a field: a buffer that appears twice in a state cannot be donated.
    return LossScaleState(
        loss_scale=jnp.full(shape, init_scale, jnp.float32),
        growth_tracker=jnp.zeros(shape, jnp.int32),
        hysteresis_tracker=jnp.full(shape, hysteresis, jnp.int32),
        inf_total=jnp.zeros(shape, jnp.int32),
        nan_total=jnp.zeros(shape, jnp.int32),
        floor_hits=jnp.zeros(shape, jnp.int32),
        ceiling_hits=jnp.zeros(shape, jnp.int32),
        overflow=jnp.zeros((), bool),
        skipped_total=jnp.zeros((), jnp.int32),
        bad_update_total=jnp.zeros((), jnp.int32),
        nonfinite_loss_total=jnp.zeros((), jnp.int32),
        floor_flag=jnp.zeros((), bool),
        inner_state=inner_state,
    )


def move_scale(
    advance: Advance, state: LossScaleState, judgement: Judgement, transition: Transition
) -> LossScaleState:
    """The state after the step: inner state, scale, counters.

    The scale moves last. Had it moved before the gradients were divided, a step on which it grows
    would divide by twice the factor that the loss was multiplied by, and halve the update.
    """
    # Compared once they are apart: XLA sees then what was put together to `counts`.
    has_inf, has_nan = judgement.counts[..., 0] > 0, judgement.counts[..., 1] > 0  # bool[*losses]
    # By the elements of the gradients, not by `transition.skip`: if all were finite and the step
    # was bad all the same, a smaller scale would not help.
    moved = advance(state, has_inf | has_nan)
    # Nothing is known of the gradients of a loss that was left out, so its scale does not move.
    own = {
        name: trees.hold(~jnp.asarray(judgement.seen), getattr(moved, name), getattr(state, name))
        for name in (
            *("loss_scale", "growth_tracker", "hysteresis_tracker", "interval"),
            *("floor_hits", "ceiling_hits"),
        )
    }
    return moved._replace(
        **own,
        inf_total=trees.count_up(state.inf_total, has_inf),
        nan_total=trees.count_up(state.nan_total, has_nan),
        overflow=transition.skip,
        skipped_total=trees.count_up(state.skipped_total, transition.skip),
        bad_update_total=trees.count_up(state.bad_update_total, transition.is_bad_update),
        nonfinite_loss_total=trees.count_up(state.nonfinite_loss_total, judgement.is_bad_loss),
        inner_state=transition.inner_state,
    )
