"""One update of a loss-scaled optimizer: the path that all loss scales share.

Each loss scale of `ampx.loss_scaling.wrappers` is the same optax transformation, made by
`wrap_with_scale`. They differ in one function, `advance`, which says where the scale goes next. An
update has three parts: a judgement, a transition, and a move of the scale.

    gradients, times the scale, of this device        f32 or half, any shapes
        |
      judge ------ count infinities and NaN; sum the counts over devices   int32[2]
        |
      transition - unscale > inner update > undo if the judgement was bad  params' shapes
        |
      move ------- the scale, then the totals                              LossScaleState
        |
    updates, new state

Judgement and transition come in two forms. The plain form works around any optax transformation:
it divides the gradients by the scale, and on a skip it chooses the old state, leaf by leaf. The
fused form works around an optimizer of `ampx.fused`: it hands the factor 1/scale and the verdict
down as a `Tail`, and the optimizer does both in the one pass in which it reads each number anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ampx import trees
from ampx.checking import as_dtype, as_positive_int, check_choice, check_transformation
from ampx.loss_scaling import nonfinite
from ampx.loss_scaling.nonfinite import Verdict
from ampx.loss_scaling.state import LossScaleState
from ampx.mesh_axes import as_axes
from ampx.trees import find_nodes, has_mark
from ampx.updates.applying import apply_updates
from ampx.updates.clipping import find_clip
from ampx.updates.extra_args import accept_extra_args
from ampx.updates.gradient_norms import compute_norm, fold_clip, measure_and_judge
from ampx.updates.guards import check_update, guard
from ampx.updates.tails import Applied, Tail, hold_wrappers, takes_tail, unwrap_results

NonfiniteUpdates = Literal["hold", "skip"]
NonfiniteLoss = Literal["count", "skip"]
# From the state and bool[*losses], which losses were bad, to the state with its scale moved.
Advance = Callable[[LossScaleState, jax.Array], LossScaleState]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What stays the same in all updates of one loss scale; see `ampx.dynamic_loss_scale`."""

    inner: optax.GradientTransformationExtraArgs
    advance: Advance
    num_losses: int
    axis_names: tuple[str, ...]
    saturation_dtype: DTypeLike | None
    nonfinite_updates: NonfiniteUpdates
    nonfinite_loss: NonfiniteLoss

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_losses", as_positive_int("num_losses", self.num_losses))
        if self.saturation_dtype is not None:
            dtype = as_dtype("saturation_dtype", self.saturation_dtype, "floating")
            object.__setattr__(self, "saturation_dtype", dtype)
        check_choice("nonfinite_updates", self.nonfinite_updates, get_args(NonfiniteUpdates))
        check_choice("nonfinite_loss", self.nonfinite_loss, get_args(NonfiniteLoss))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what each loss has its own of: a scalar for one loss, else a vector."""
        return () if self.num_losses == 1 else (self.num_losses,)

    @property
    def can_fuse(self) -> bool:
        """Whether the fused form can do what these settings ask for.

        It takes one factor for all gradients, so there must be one loss. Its verdict comes from a
        sum of squares, which does not see saturated numbers. And it writes parameters before all
        updates are known, so it can hold single elements, but not undo the step because of one.
        """
        is_elementwise = self.nonfinite_updates == "hold"
        return self.num_losses == 1 and self.saturation_dtype is None and is_elementwise


class Call(NamedTuple):
    """The arguments of one update.

    Attributes:
      grads: gradients times the loss scale; a tuple of such trees where there are several losses.
      state: the state that the last update left. Its scale is the one that `grads` were made with.
      params: the parameters, or None if nobody gave them.
      verdict: a judgement that somebody else has made, or None.
      tail: what the caller asks for besides updates, or None.
      extra_args: further arguments, handed to the inner transformation. If the gradients are among
        them as `grad`, the inner transformation gets them unscaled.
    """

    grads: Any
    state: LossScaleState
    params: Any
    verdict: Verdict | None
    tail: Tail | None
    extra_args: dict[str, Any]


class Judgement(NamedTuple):
    """What is known of the gradients before anything is computed with them.

    Attributes:
      counts: int32[*losses, 2], arrays with an infinity and arrays with a NaN, the same on all
        devices that must agree.
      overflow: bool scalar, whether any count is above zero or the loss undoes the step.
      seen: bool[*losses], which losses took part; numpy's where that is known while tracing.
      axes: the mapped axes whose devices must agree.
      norm: float32 scalar, global norm of the unscaled gradients; None if nobody measured it.
      is_bad_loss: bool scalar, whether a loss was given and is not finite.
    """

    counts: jax.Array
    overflow: jax.Array
    seen: np.ndarray | jax.Array
    axes: tuple[str, ...]
    norm: jax.Array | None = None
    is_bad_loss: jax.Array | bool = False


class Transition(NamedTuple):
    """What a step changes besides the scale, already undone if the step is skipped.

    Attributes:
      updates: like the parameters; or an `Applied`, if the tail asks for new parameters.
      inner_state: the wrapped transformation's.
      skip: bool scalar, whether the step was undone.
      is_bad_update: bool scalar, whether finite gradients gave something that is not finite.
    """

    updates: Any
    inner_state: optax.OptState
    skip: jax.Array
    is_bad_update: jax.Array


def wrap_with_scale(
    inner: optax.GradientTransformation,
    init_scale: float,
    hysteresis: int,
    advance: Advance,
    *,
    num_losses: int,
    axis_names: Sequence[str],
    saturation_dtype: DTypeLike | None,
    nonfinite_updates: NonfiniteUpdates,
    nonfinite_loss: NonfiniteLoss,
) -> optax.GradientTransformationExtraArgs:
    """A loss scale around `inner` that moves by `advance`; the rest as in `dynamic_loss_scale`."""
    check_transformation("inner", inner)
    axes = as_axes(axis_names, "axis_names", may_be_empty=True)
    inner = guard("loss_scale", accept_extra_args(inner))
    settings = Settings(
        inner, advance, num_losses, axes, saturation_dtype, nonfinite_updates, nonfinite_loss
    )

    def init(params: optax.Params) -> LossScaleState:
        return _init_state(settings, init_scale, hysteresis, params)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        verdict: Verdict | None = None,
        tail: Tail | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        for grads in split_by_loss(updates, settings.num_losses):
            if grads is not None or settings.num_losses == 1:  # None: this loss was left out
                check_update("loss_scale", LossScaleState, grads, state, params)
        call = Call(updates, state, params, verdict, tail, extra_args)
        is_fused = settings.can_fuse and takes_tail(state.inner_state)
        judge, run = (_judge_fused, _run_fused) if is_fused else (_judge_plain, _run_plain)
        judgement = _judge_loss(settings, call, judge(settings, call))
        # The seam between looking and doing. `run` alone computes with parameters and the inner
        # state. All it needs are its arguments, and its result has the same shapes and dtypes
        # whatever the verdict: it is the call to put behind a `lax.cond` on `judgement.overflow`.
        transition = run(settings, call, judgement)
        return transition.updates, move_scale(settings.advance, state, judgement, transition)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_state(
    settings: Settings, init_scale: float, hysteresis: int, params: optax.Params
) -> LossScaleState:
    inner_state = settings.inner.init(params)
    if find_nodes(inner_state, LossScaleState):
        raise ValueError(
            "inner already has a loss scale: gradients would be unscaled twice; wrap once"
        )
    shape = settings.shape
    # One buffer a field: a buffer that appears twice in a state cannot be donated.
    return LossScaleState(
        loss_scale=jnp.full(shape, init_scale, jnp.float32),
        growth_tracker=jnp.zeros(shape, jnp.int32),
        hysteresis_tracker=jnp.full(shape, hysteresis, jnp.int32),
        inf_total=jnp.zeros(shape, jnp.int32),
        nan_total=jnp.zeros(shape, jnp.int32),
        floor_hits=jnp.zeros(shape, jnp.int32),
        overflow=jnp.zeros((), bool),
        skipped_total=jnp.zeros((), jnp.int32),
        bad_update_total=jnp.zeros((), jnp.int32),
        nonfinite_loss_total=jnp.zeros((), jnp.int32),
        floor_flag=jnp.zeros((), bool),
        inner_state=inner_state,
    )


# --- judge ---------------------------------------------------------------------------------------


def _judge_plain(settings: Settings, call: Call) -> Judgement:
    """The plain judgement: looks at every element, unless somebody has done so.

    A verdict from outside is one pair of counts. It cannot tell losses apart, and knows nothing of
    saturation, so with either of these the gradients are looked at again.
    """
    per_loss = split_by_loss(call.grads, settings.num_losses)
    axes = _find_axes(settings, call)
    saturation_dtype = settings.saturation_dtype
    if call.verdict is not None and settings.num_losses == 1 and saturation_dtype is None:
        counts = call.verdict.counts
    else:
        # They are judged as they arrive, scaled and in their own dtype. A half gradient is then
        # read as two bytes, and only there does saturation show.
        counts = jnp.stack(
            [
                nonfinite.count_nonfinite(grads, axis_names=axes, saturation_dtype=saturation_dtype)
                for grads in per_loss
            ]
        ).reshape(*settings.shape, 2)
    seen = np.array([grads is not None for grads in per_loss]).reshape(settings.shape)
    return Judgement(counts, jnp.any(counts > 0), seen, axes)


def _judge_fused(settings: Settings, call: Call) -> Judgement:
    """The judgement by a sum of squares, which a clip needs anyway: one pass for norm and verdict.

    With a verdict from outside and no clip, the gradients are not read at all.
    """
    axes = _find_axes(settings, call)
    tail = call.tail or Tail()
    counts, norm = None if call.verdict is None else call.verdict.counts, None
    # A clip measures the norm in any case. Measured here, it is known before anything is written.
    if counts is None or _is_clipped(call):
        factor = 1 / call.state.loss_scale
        norm, local_counts = measure_and_judge(call.grads, factor, tail.squares)
        counts = nonfinite.agree_on(local_counts, axes) if counts is None else counts
    return Judgement(counts, jnp.any(counts > 0), np.array(True), axes, norm)


def _judge_loss(settings: Settings, call: Call, judgement: Judgement) -> Judgement:
    """Adds what there is to say of the loss, which may be infinite while gradients are finite."""
    skips = settings.nonfinite_loss == "skip"
    value = call.extra_args.get("value")
    is_bad = nonfinite.is_bad_loss(value, judgement.axes, must_agree=skips)
    overflow = judgement.overflow | is_bad if skips else judgement.overflow
    return judgement._replace(overflow=overflow, is_bad_loss=is_bad)


def _is_clipped(call: Call) -> bool:
    """Whether gradients are clipped by a global norm that this loss scale can know."""
    asked_for = call.tail is not None and call.tail.max_norm is not None
    return asked_for or find_clip(call.state.inner_state) is not None


def _find_axes(settings: Settings, call: Call) -> tuple[str, ...]:
    """The mapped axes whose devices must come to one verdict.

    A reduction inside means that this device's gradients are only its share. A verdict on a share
    differs between devices, and devices that disagree on a skip hold different parameters from then
    on. Without a reduction inside, the gradients may be the same on all devices already, and then
    no axis is needed.
    """
    if not has_mark(call.state.inner_state, "reduces_gradients"):
        return settings.axis_names
    axes = settings.axis_names or (call.verdict.axes if call.verdict else ())
    if not axes:
        raise ValueError(
            "the transformation inside reduces gradients over mapped axes, so all devices must "
            "agree on what to skip: give this loss scale axis_names, as in axis_names='data'"
        )
    return axes


def split_by_loss(grads: Any, num_losses: int) -> list[Any]:
    """The gradient tree of each loss; None for one that was left out."""
    if num_losses == 1:
        return [grads]
    if not isinstance(grads, tuple | list) or len(grads) != num_losses:
        length = f" of length {len(grads)}" if isinstance(grads, tuple | list) else ""
        raise ValueError(
            f"num_losses={num_losses}: update() takes a tuple of {num_losses} gradient trees, one "
            f"per loss (None for a loss left out), got {type(grads).__name__}{length}"
        )
    if all(own is None for own in grads):
        raise ValueError("every loss was left out: at least one gradient tree is needed")
    return list(grads)


# --- transition ----------------------------------------------------------------------------------


def _run_plain(settings: Settings, call: Call, judgement: Judgement) -> Transition:
    """The plain transition: unscale, clip, update, then choose between new and old."""
    state, params, tail = call.state, call.params, call.tail
    per_loss = split_by_loss(call.grads, settings.num_losses)
    grads = nonfinite.unscale_and_sum(per_loss, state.loss_scale.reshape(settings.num_losses))
    extra_args = dict(call.extra_args)
    if "grad" in extra_args:
        # optax's line searches take the gradient of `value` there. The caller's is still scaled.
        extra_args["grad"] = grads
    norm = None
    if tail is not None and tail.max_norm is not None:
        norm = compute_norm(grads)
        grads, _ = optax.clip_by_global_norm(tail.max_norm).update(grads, optax.EmptyState())
    if has_mark(state.inner_state, "reduces_gradients"):
        # The reduction inside lets its first bucket wait for this number: see `Reduction`.
        extra_args["overflow"] = jnp.sum(judgement.counts)
    with jax.named_scope("ampx.update"):
        updates, inner_state = settings.inner.update(grads, state.inner_state, params, **extra_args)
    updates = nonfinite.mark_overflowing(updates, params)
    # The update of a skip is u = -0.0, the one number for which x + u has all bits of x:
    #      x      x + 0.0    x + -0.0
    #     -0.0      0.0        -0.0
    #      0.0      0.0         0.0
    #      1.5      1.5         1.5
    nothing = trees.null_updates(updates)

    is_bad = _is_bad_outcome(settings, judgement.axes, updates, inner_state, state.inner_state)
    skip = judgement.overflow
    if clip := find_clip(inner_state):
        norm = clip.gradient_norm
    if norm is not None:
        # A clip by an infinite norm multiplies finite gradients by 0. What would come out is an
        # update that nobody asked for, with nothing in it that is not finite.
        too_large = nonfinite.is_infinite(norm, judgement.axes)
        is_bad, skip = is_bad | too_large, skip | too_large
    if settings.nonfinite_updates == "skip":
        skip |= is_bad
    else:
        # Elements that are not finite are held one by one. This is elementwise and fuses into the
        # update. To know of all of them before the first is written would cost a pass over memory.
        updates = trees.keep_finite(updates, nothing)
        inner_state = trees.keep_finite(inner_state, state.inner_state)
    # A select and no `lax.cond`: it is made leaf by leaf, so that each parameter waits for the
    # verdict and its own update alone. A `cond` would tie all of them together, and with a
    # reduction inside the first bucket's update would wait for the last bucket. And a select, not
    # a product with 0: 0 * inf is NaN.
    updates = trees.hold(skip, updates, nothing)
    inner_state = trees.hold(skip, inner_state, state.inner_state)
    if tail is not None and tail.new_params:
        updates = Applied(apply_updates(params, updates), None)
    return Transition(updates, inner_state, skip, is_bad & ~judgement.overflow)


def _run_fused(settings: Settings, call: Call, judgement: Judgement) -> Transition:
    """The fused transition: the optimizer below multiplies, clips, and holds its own state."""
    skip, too_large = judgement.overflow, None
    if _is_clipped(call) and judgement.norm is not None:
        # Finite gradients whose true norm is beyond float32: clipped, they would all be 0.
        too_large = nonfinite.is_infinite(judgement.norm, judgement.axes)
        skip |= too_large
    tail = dataclasses.replace(
        call.tail or Tail(),
        factor=1 / call.state.loss_scale,
        skip=skip,
        norm=judgement.norm,
    )
    tail = fold_clip(tail, call.grads)
    # Unscaled gradients do not exist here, and a fused optimizer does not ask for any. Handed on,
    # `grad` would be scaled, and whatever read it would be silently wrong.
    extra_args = {name: value for name, value in call.extra_args.items() if name != "grad"}
    with jax.named_scope("ampx.update"):
        results, inner_state = settings.inner.update(
            call.grads, call.state.inner_state, call.params, tail=tail, **extra_args
        )
    # The optimizer has chosen between old and new where each number is made, before it is written.
    # To choose here, behind the update, would need old and new moments in memory at once, and XLA
    # would copy every one of them.
    updates, is_bad = unwrap_results(results)
    if tail.new_params:
        updates = Applied(updates, judgement.norm)
    if too_large is not None:
        is_bad |= too_large
    inner_state = hold_wrappers(skip, inner_state, call.state.inner_state)
    return Transition(updates, inner_state, skip, is_bad & ~judgement.overflow)


def _is_bad_outcome(
    settings: Settings, axes: tuple[str, ...], updates: Any, new_inner: Any, old_inner: Any
) -> jax.Array:
    """Whether an update, or with `"skip"` a number of the new state, is not finite; bool scalar.

    `"hold"` mends the state element by element, so there is no need to look through it. Numbers
    that were infinite in the old state do not count: some optimizers start from infinity.
    """
    skips = settings.nonfinite_updates == "skip"
    judged = trees.zero_where_old_is_not_finite(new_inner, old_inner) if skips else ()
    return jnp.any(nonfinite.count_nonfinite((updates, judged), axis_names=axes) > 0)


# --- move ----------------------------------------------------------------------------------------


def move_scale(
    advance: Advance, state: LossScaleState, judgement: Judgement, transition: Transition
) -> LossScaleState:
    """The state after the step: inner state, scale, counters.

    The scale moves last. Had it moved before the gradients were divided, a step on which it grows
    would divide by twice the factor that the loss was multiplied by, and halve the update.
    """
    found = judgement.counts > 0  # bool[*losses, 2]
    # By the verdict on gradients, not by `transition.skip`: if gradients were finite and the update
    # is not, a smaller scale would not help.
    moved = advance(state, jnp.any(found, axis=-1))
    # Nothing is known of the gradients of a loss that was left out, so its scale does not move.
    own = {
        name: trees.hold(~jnp.asarray(judgement.seen), getattr(moved, name), getattr(state, name))
        for name in ("loss_scale", "growth_tracker", "hysteresis_tracker", "floor_hits", "interval")
    }
    return moved._replace(
        **own,
        inf_total=trees.count_up(state.inf_total, found[..., 0]),
        nan_total=trees.count_up(state.nan_total, found[..., 1]),
        overflow=transition.skip,
        skipped_total=trees.count_up(state.skipped_total, transition.skip),
        bad_update_total=trees.count_up(state.bad_update_total, transition.is_bad_update),
        nonfinite_loss_total=trees.count_up(state.nonfinite_loss_total, judgement.is_bad_loss),
        inner_state=transition.inner_state,
    )
