"""The transition of a step: unscale, clip, update; or leave everything as it was.

    form          around                       a skip is
    plain         any optax transformation     one branch around the whole update; updates
                                               that are elementwise in new state and known
                                               arrays are made and chosen behind it (on
                                               GPUs all of them are: `ampx.updates.devices`)
    leaf by leaf  one with a reduction that    a select behind each leaf
                  overlaps with updates
    fused         an optimizer of ampx.fused   a select where each number is made

What an overflow skips and is computed all the same has no derivative then: see
`ampx.updates.skipped_derivatives`. What `nonfinite_updates` undoes or holds is not covered: the
verdict on it comes from the updates themselves.

A branch makes all parameters wait for all that is inside it. So where gradients are reduced bucket
by bucket, and the first parameters are to be updated while the last bucket is on its way, the plain
transition chooses leaf by leaf: each parameter then waits for the verdict and its own update alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx import trees
from ampx.loss_scaling import nonfinite
from ampx.loss_scaling.calls import Call, Judgement, ScaleSettings, Transition, split_by_loss
from ampx.trees import has_mark
from ampx.updates.applying import apply_updates
from ampx.updates.branching import run_unless, update_unless
from ampx.updates.clipping import clip_by_norm_of_whole
from ampx.updates.devices import reduces_beside_updates
from ampx.updates.gradient_norms import fold_clip
from ampx.updates.skipped_derivatives import stop_gradient_if
from ampx.updates.tails import Applied, Tail, hold_wrappers, unwrap_results


def run_plain(
    tx: optax.GradientTransformationExtraArgs,
    settings: ScaleSettings,
    call: Call,
    judgement: Judgement,
) -> Transition:
    """The plain transition, behind one branch or leaf by leaf."""
    wants_params = call.tail is not None and call.tail.new_params
    undone = judgement.undoes

    def run(grads: Any, loss_scale: jax.Array, params: Any) -> tuple[Any, Any, jax.Array]:
        state = call.state._replace(loss_scale=loss_scale)
        given = call._replace(grads=grads, state=state, params=params)
        return _update(tx, settings, given, judgement)

    def stay(types: Any) -> tuple[Any, Any, jax.Array]:
        # The update of a skip is u = -0.0, the one number for which x + u has all bits of x:
        #      x      x + 0.0    x + -0.0
        #     -0.0      0.0        -0.0
        #      0.0      0.0         0.0
        #      1.5      1.5         1.5
        nothing = call.params if wants_params else trees.null_updates(types[0])
        return nothing, call.state.inner_state, jnp.zeros((), bool)

    # Outside of `jit` a branch would be compiled anew in every call.
    if _overlaps(call) or not isinstance(undone, jax.core.Tracer):
        new = _update(tx, settings, stop_gradient_if(undone, call), judgement)
        # A select, not a product with 0: 0 * inf is NaN.
        updates, inner_state, is_bad = trees.hold(undone, new, stay(new))
    elif wants_params:
        with_params = functools.partial(run, params=call.params)
        updates, inner_state, is_bad = run_unless(
            undone, with_params, stay, call.grads, call.state.loss_scale, may_choose=True
        )
    else:
        updates, inner_state, is_bad = update_unless(
            undone, run, stay, call.grads, call.state.loss_scale, params=call.params
        )
    skip = undone | is_bad if settings.nonfinite_updates == "skip" else undone
    is_bad = (is_bad | judgement.is_too_large) & ~judgement.overflow
    updates = Applied(updates, judgement.norm) if wants_params else updates
    return Transition(updates, inner_state, skip, is_bad)


def _overlaps(call: Call) -> bool:
    """Whether a reduction of gradients is to overlap with their updates."""
    inside = call.state.inner_state
    if call.verdict is not None and call.verdict.overlaps:
        return True
    if has_mark(inside, "overlaps_by_device") and reduces_beside_updates():
        return True
    return has_mark(inside, "overlaps_updates")


def _update(
    tx: optax.GradientTransformationExtraArgs,
    settings: ScaleSettings,
    call: Call,
    judgement: Judgement,
) -> tuple[Any, Any, jax.Array]:
    """Updates, or new parameters; the new inner state; and whether they are not finite.

    The results have the dtypes of what was there before. Updates have those of the optimizer.
    """
    state, params, tail = call.state, call.params, call.tail
    per_loss = split_by_loss(call.grads, settings.num_losses)
    grads = nonfinite.unscale_and_sum(per_loss, call.scales)
    extra_args = dict(call.extra_args)
    if "grad" in extra_args:
        # optax's line searches take the gradient of `value` there. The caller's is still scaled.
        extra_args["grad"] = grads
    if tail is not None and tail.max_norm is not None:
        grads, _ = clip_by_norm_of_whole(grads, tail.max_norm, call.model_axes)
    if has_mark(state.inner_state, "reduces_gradients"):
        # The reduction inside lets its first bucket wait for this number: see `Reduction`.
        extra_args["overflow"] = jnp.sum(judgement.counts)
    with jax.named_scope("ampx.update"):
        updates, inner_state = tx.update(grads, state.inner_state, params, **extra_args)
    axes = judgement.axes
    if settings.nonfinite_updates == "accept":
        updates, is_bad = _mend_halves(call.params, axes, updates)
    else:
        skips = settings.nonfinite_updates == "skip"
        updates, inner_state, is_bad = _mend(skips, call, axes, updates, inner_state)
    if tail is not None and tail.new_params:
        updates = apply_updates(params, updates)
    return updates, trees.cast_like(inner_state, state.inner_state), is_bad


def _mend_halves(params: Any, axes: tuple[str, ...], updates: Any) -> tuple[Any, jax.Array]:
    """Holds elements of float16 parameters that would become infinite; accepts all the rest.

    It is the only type whose range an ordinary step can leave, and its updates alone are looked
    through. All else is as the optimizer made it.
    """
    judged: list[Any] = []

    def mend(param: Any, update: Any) -> Any:
        if param is None or not _is_float16(param):
            return update
        judged.append(nonfinite.mark_overflowing(update, param))
        return trees.keep_finite(judged[-1], trees.null_updates(update))

    if params is not None:
        updates = jax.tree.map(mend, params, updates, is_leaf=lambda leaf: leaf is None)
    if not judged:
        return updates, jnp.zeros((), bool)
    return updates, jnp.any(nonfinite.count_nonfinite(judged, axis_names=axes) > 0)


def _is_float16(param: Any) -> bool:
    return getattr(param, "dtype", None) == jnp.float16


def _mend(
    skips: bool, call: Call, axes: tuple[str, ...], updates: Any, inner_state: Any
) -> tuple[Any, Any, jax.Array]:
    """Holds elements that are not finite, or undoes the step because of them; and reports them.

    `"hold"` mends the state element by element, so only `"skip"` need look through it. Numbers that
    were infinite in the old state do not count: some optimizers start from infinity.
    """
    old = call.state.inner_state
    updates = nonfinite.mark_overflowing(updates, call.params)
    nothing = trees.null_updates(updates)
    judged = trees.zero_where_old_is_not_finite(inner_state, old) if skips else ()
    is_bad = jnp.any(nonfinite.count_nonfinite((updates, judged), axis_names=axes) > 0)
    if skips:
        held = trees.hold(is_bad, (updates, inner_state), (nothing, old))
        return *held, is_bad
    return trees.keep_finite(updates, nothing), trees.keep_finite(inner_state, old), is_bad


def run_fused(
    tx: optax.GradientTransformationExtraArgs,
    settings: ScaleSettings,
    call: Call,
    judgement: Judgement,
) -> Transition:
    """The fused transition: the optimizer below multiplies, clips, and holds its own state."""
    skip = judgement.undoes
    tail = dataclasses.replace(
        call.tail or Tail(),
        factor=1 / call.state.loss_scale,
        skip=skip,
        norm=judgement.norm,
    )
    tail = fold_clip(tail, call.grads, call.model_axes)
    # Unscaled gradients do not exist here, and a fused optimizer does not ask for any. Handed on,
    # `grad` would be scaled, and whatever read it would be silently wrong.
    extra_args = {name: value for name, value in call.extra_args.items() if name != "grad"}
    with jax.named_scope("ampx.update"):
        results, inner_state = tx.update(
            call.grads, call.state.inner_state, call.params, tail=tail, **extra_args
        )
    # The optimizer has chosen between old and new where each number is made, before it is written.
    # To choose here, behind the update, would need old and new moments in memory at once, and XLA
    # would copy every one of them.
    updates, is_bad = unwrap_results(results)
    if call.model_axes.names and any(map(_is_float16, jax.tree.leaves(call.params))):
        # Where a shard of a float16 parameter overflowed, that device alone has seen it.
        is_bad = nonfinite.agree_on(is_bad.astype(jnp.int32), call.model_axes.names) > 0
    if tail.new_params:
        updates = Applied(updates, judgement.norm)
    is_bad = (is_bad | judgement.is_too_large) & ~judgement.overflow
    inner_state = hold_wrappers(skip, inner_state, call.state.inner_state)
    return Transition(updates, inner_state, skip, is_bad)
