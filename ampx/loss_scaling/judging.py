"""The judgement of a step by its gradients alone, before anything is computed with them.

A step is undone if an element of a gradient is not finite: an *overflow*, after which the scale
falls. It is also undone if all elements are finite and their squares do not add up in float32. Then
a second moment would be infinite, a norm would be, and a clip by it would multiply by 0. That is a
*bad update*: the scale is not to blame, and stays.

One sum of squares tells that all is well, so a good step reads each gradient once. Only where the
sum is not finite are the elements looked at.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ampx.loss_scaling import nonfinite
from ampx.loss_scaling.calls import Call, Judgement, ScaleSettings, split_by_loss
from ampx.loss_scaling.nonfinite import Verdict
from ampx.mesh_axes import varying_axes
from ampx.trees import has_mark
from ampx.updates.gradient_norms import measure_and_judge
from ampx.updates.tails import Tail


def judge_plain(settings: ScaleSettings, call: Call) -> Judgement:
    """The plain judgement: for any optax transformation inside.

    A verdict from outside is one pair of counts. It cannot tell losses apart, and knows nothing of
    saturation, so with either of these the gradients are looked at again.
    """
    axes = _find_axes(settings, call)
    per_loss = split_by_loss(call.grads, settings.num_losses)
    seen = np.array([grads is not None for grads in per_loss]).reshape(settings.shape)
    given = _complete(call.verdict, axes)
    if settings.num_losses > 1 or settings.saturation_dtype is not None:
        given = None
    if given is None or given.is_too_large is None:
        counts, is_too_large, square_sum = nonfinite.judge(
            per_loss, call.scales, axes, saturation_dtype=settings.saturation_dtype
        )
        counts = counts.reshape(*settings.shape, 2) if given is None else given.counts
        # Inside `shard_map` it may be that of a shard, or of gradients that are still to be summed.
        is_whole = settings.num_losses == 1 and not axes and not varying_axes(square_sum)
        norm = jnp.sqrt(square_sum.astype(jnp.float32)) if is_whole else None
        return Judgement(counts, is_too_large, seen, axes, norm)
    return Judgement(given.counts, given.is_too_large, seen, axes)


def judge_fused(settings: ScaleSettings, call: Call) -> Judgement:
    """The judgement together with the norm, which a clip and a report need anyway, in one pass.

    With a whole verdict from outside and no clip, the gradients are not read at all. Where
    gradients are clipped, it is the true norm that counts, also where squares overflow: what the
    optimizer sees is small.
    """
    axes = _find_axes(settings, call)
    given = _complete(call.verdict, axes)
    tail = call.tail or Tail()
    if given is not None and given.is_too_large is not None and not call.is_clipped:
        return Judgement(given.counts, given.is_too_large, np.array(True), axes)
    factor = 1 / call.state.loss_scale
    norm, counts = measure_and_judge(call.grads, factor, tail.squares, call.model_axes)
    largest = jnp.inf if call.is_clipped else nonfinite.largest_norm(axes)
    is_large = ~(norm < largest)
    found = jnp.append(counts, is_large.astype(jnp.int32))
    found = nonfinite.agree_on(found, axes)
    counts = found[:2] if given is None else given.counts
    return Judgement(counts, found[2] > 0, np.array(True), axes, norm)


def judge_loss(settings: ScaleSettings, call: Call, judgement: Judgement) -> Judgement:
    """Adds what there is to say of the loss, which may be infinite while gradients are finite."""
    skips = settings.nonfinite_loss == "skip"
    value = call.extra_args.get("value")
    is_bad = nonfinite.is_bad_loss(value, judgement.axes, must_agree=skips)
    return judgement._replace(is_bad_loss=is_bad, skips_loss=skips)


def _find_axes(settings: ScaleSettings, call: Call) -> tuple[str, ...]:
    """The mapped axes whose devices must come to one verdict.

    A reduction inside means that this device's gradients are only its share. A verdict on a share
    differs between devices, and devices that disagree on a skip hold different parameters from then
    on. Without a reduction inside, the gradients may be the same on all devices already, and then
    no axis is needed: but for those over which parameters are divided, where each device judges
    its shard.
    """
    before = call.verdict.axes if call.verdict else ()
    reduces = has_mark(call.state.inner_state, "reduces_gradients")
    if reduces and not (settings.axis_names or before):
        raise ValueError(
            "the transformation inside reduces gradients over mapped axes, so all devices must "
            "agree on what to skip: give this loss scale axis_names, as in axis_names='data', or "
            "ampx.train_step its axis_name, which makes an all_reduce inside superfluous"
        )
    named = (*settings.axis_names, *call.model_axes.names, *(before if reduces else ()))
    return nonfinite.find_verdict_axes(call.grads, call.state.loss_scale, named)


def _complete(given: Verdict | None, axes: tuple[str, ...]) -> Verdict | None:
    """A verdict from outside, agreed on over the axes that it was not taken over."""
    missing = [axis for axis in axes if given is not None and axis not in given.axes]
    if given is None or not missing:
        return given
    counts = nonfinite.agree_on(given.counts, missing)
    if given.is_too_large is None:
        return given._replace(counts=counts)
    is_too_large = nonfinite.agree_on(given.is_too_large.astype(jnp.int32), missing) > 0
    return given._replace(counts=counts, is_too_large=is_too_large)
