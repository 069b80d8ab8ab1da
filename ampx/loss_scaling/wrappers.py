"""The loss scales of ampx: optax wrappers that take scaled gradients and skip bad steps.

float16 ends at 65504, and below 6e-8 it has nothing. Many gradients are smaller. If the loss is
multiplied by S, the chain rule multiplies every gradient by S, so the backward pass runs in the
range of float16; afterwards the gradients are divided by S in float32. If S is too large gradients
overflow: the step is skipped, and a dynamic scale falls.

The scale is a part of the optimizer's state, in an optax wrapper around any transformation. An
update of the wrapper first looks for infinities and NaN in the scaled gradients, and all devices
agree on the verdict. It divides by the scale held so far and runs the inner transformation. If the
verdict was bad, it undoes the whole transition. Only then does it move the scale.
`ampx.loss_scaling.scaled_update` is that path, and `ampx.loss_scaling.dynamics` has the rule by
which a dynamic scale moves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ampx.checking import as_bool, as_positive_int, check_transformation, suggest
from ampx.loss_scaling.calls import NonfiniteLoss, NonfiniteUpdates, ScaleSettings
from ampx.loss_scaling.dynamics import OnFloor, Refill, ScaleDynamics, as_scale_number, parse_choice
from ampx.loss_scaling.gradient_results import accept_results
from ampx.loss_scaling.new_values import hide_new_values
from ampx.loss_scaling.nonfinite import Verdict
from ampx.loss_scaling.scaled_update import wrap_with_scale
from ampx.loss_scaling.several_optimizers import run_each, wrap_each_with_scale
from ampx.loss_scaling.state import LossScaleState
from ampx.updates.extra_args import accept_extra_args

# One optimizer, or several by name.
Inner = optax.GradientTransformation | Mapping[str, optax.GradientTransformation]


def dynamic_loss_scale(
    inner: Inner,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int | Sequence[int] = 2000,
    hysteresis: int = 1,
    refill: Refill = "growth",
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    axis_names: Sequence[str] = (),
    model_axes: Any = None,
    num_losses: int = 1,
    on_floor: OnFloor = "hold",
    saturation_dtype: DTypeLike | None = None,
    nonfinite_updates: NonfiniteUpdates = "accept",
    nonfinite_loss: NonfiniteLoss = "count",
    powers_of_two: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer so that it takes scaled gradients, skips bad steps and tunes the scale.

    Multiply the loss by `ampx.current_loss_scale(opt_state)`; `ampx.value_and_grad` does so when
    it is given `loss_scale=`. The wrapper takes the scaled gradients, half or float32, divides them
    by that same scale, and gives `inner` the result in float32.

    A step whose gradients hold an infinity or a NaN is undone as a whole: updates are zero and the
    inner state (moments, counts, schedules, master weights) stays bit for bit what it was. So is a
    step with finite gradients whose squares do not add up to a finite float32, from a norm of
    1.3e19 (over the number of devices) on; it is counted in `bad_update_total`, and the scale
    stays. What lives outside the optimizer's state the caller has to keep: see
    `ampx.select_if_finite`.

    Args:
      inner: any optax transformation: clipping, optimizer, schedules. Or several by name, as in
        `{"generator": tx_g, "discriminator": tx_d}`: they share the scale, and each skips for
        itself. Parameters and gradients are then dicts with the same names. An update may have
        the gradients of some of them alone; the others stand still. With `move_scale=False` it
        leaves the scale to a later update of the same step.
      init_scale: first scale.
      growth_factor: factor after `growth_interval` finite steps in a row.
      backoff_factor: factor after an overflow.
      growth_interval: number of finite steps in a row after which the scale grows. Of several, in
        ascending order, each third growth leads from one to the next, and three falls in a row to
        an interval of 1: short while the scale searches, long when it has found its place.
        `(20, 30, 40, 50, 100, 200, 500, 1000)` are those of MindFormers.
      hysteresis: the number of overflows after which the scale falls; with 1 it falls at once.
        Every overflow skips its step, whether the scale falls or not.
      refill: when that count begins anew: `"growth"` when the scale grows (Megatron-LM),
        `"finite"` after any finite step (Apex), `"change"` when the scale moves either way, so
        that overflows are counted between moves (Ascend's `decr_every_n_nan_or_inf`).
      min_scale: the scale never falls below this; at least 2**-126.
      max_scale: the scale never grows beyond this; at most 2**126. A growth that finds it there is
        counted in `ceiling_hits`.
      axis_names: inside `shard_map`, every mapped axis (data, stage, shard) over which devices must
        agree. Under plain `jit` leave it empty: arrays are global there.
      model_axes: under `check_vma=False`, the mapped axes over which parameters are divided, see
        `ampx.train_step`. Devices agree over these too, and norms inside are those of the whole.
        An update may be given other ones: `update(grads, state, params, model_axes=...)`.
      num_losses: with n > 1 every loss has its own scale. `update` then takes a tuple of n
        gradient trees, each still scaled by `current_loss_scale(opt_state, i)`, or None for a loss
        that was left out. They are unscaled before they are summed. One bad tree skips the step
        for all, and lowers its own scale alone.
      on_floor: what a fall below `min_scale` does besides being counted in `floor_hits`:
        `"hold"` nothing, `"raise-flag"` sets a flag that `ampx.raise_if_exhausted` turns into an
        exception.
      saturation_dtype: for hardware that saturates instead of overflowing: ``|gradient|`` >= the
        largest number of this dtype counts as an overflow. The scaled gradients are compared, in
        the dtype in which they arrive.
      nonfinite_updates: what to do when finite gradients give a non-finite update or state (0/0 in
        an Adam with half moments, a learning rate of NaN). `"accept"` does nothing and costs
        nothing; only elements of float16 parameters that would become infinite are held. `"hold"`
        keeps the old value of exactly those elements, in parameters and state. On CPUs that takes 2
        to 3 times the time of clip and AdamW, and room for a copy of its state. `"skip"` undoes the
        whole step, and takes as long. Such steps are counted in `bad_update_total`. An optimizer of
        `ampx.fused` holds elements in the same pass with `"accept"` too, and counts only those that
        come from a coefficient that is not finite or from the range of float16.
      nonfinite_loss: what to do when the loss, the extra argument `value` of `update` (which
        `ampx.train_step` gives), is not finite and the gradients are: `"count"` it in
        `nonfinite_loss_total`, or `"skip"` the step, too. The scale stays in either case.
      powers_of_two: refuse factors and scales that are not powers of two, because unscaling is
        exact only for those. Turn it off to reproduce systems that use others (0.8, say).

    Returns:
      A transformation whose state is a `LossScaleState`. Extra arguments are handed to `inner`.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or a setting is not a number.
      ValueError: for a factor, interval or bound outside its range, or a loss scale inside `inner`.

    References:
      Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740;
      `torch.amp.GradScaler`, whose parameter names these are.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([8.0, 4.0]), state, params)
      >>> updates
      Array([-1. , -0.5], dtype=float32)
      >>> updates, state = tx.update(jnp.array([8.0, jnp.inf]), state, params)
      >>> updates, float(state.loss_scale), bool(state.overflow)
      (Array([-0., -0.], dtype=float32), 4.0, True)
    """
    dynamics = ScaleDynamics(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        refill=refill,
        min_scale=min_scale,
        max_scale=max_scale,
        on_floor=on_floor,
        powers_of_two=powers_of_two,
    )
    settings = ScaleSettings(
        num_losses, axis_names, model_axes, saturation_dtype, nonfinite_updates, nonfinite_loss
    )
    scaled = _wrap(inner)(
        inner, dynamics.init_scale, dynamics.hysteresis, dynamics.advance, settings
    )

    def init(params: optax.Params) -> LossScaleState:
        state = cast(LossScaleState, scaled.init(params))
        return state._replace(interval=dynamics.init_interval(state.loss_scale.shape))

    whole = optax.GradientTransformationExtraArgs(init, scaled.update)
    return accept_results(hide_new_values(whole, model_axes, num_losses), dynamics.init_scale)


def static_loss_scale(
    inner: Inner,
    scale: float,
    *,
    check: bool = True,
    axis_names: Sequence[str] = (),
    model_axes: Any = None,
    num_losses: int = 1,
    saturation_dtype: DTypeLike | None = None,
    nonfinite_updates: NonfiniteUpdates = "accept",
    nonfinite_loss: NonfiniteLoss = "count",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a fixed loss scale. It skips bad steps too, unless told not to.

    Args:
      inner: any optax transformation, or a dict of several: see `dynamic_loss_scale`.
      scale: the factor. Powers of two unscale exactly; others round each gradient.
      check: whether gradients are looked at. With False no step is skipped, as with a fixed scale
        in Apex, and an infinity goes where the optimizer lets it.
      axis_names: see `dynamic_loss_scale`.
      model_axes: see `dynamic_loss_scale`.
      num_losses: see `dynamic_loss_scale`; every loss has this scale.
      saturation_dtype: see `dynamic_loss_scale`.
      nonfinite_updates: see `dynamic_loss_scale`.
      nonfinite_loss: see `dynamic_loss_scale`.

    Returns:
      A transformation whose state is a `LossScaleState`.

    Raises:
      TypeError: if `inner` is not a gradient transformation or `scale` not a number.
      ValueError: if `scale` is not finite and positive, or not representable in float32; for
        `check=False` with several optimizers or losses, or beside an argument that is about bad
        gradients.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.static_loss_scale(optax.sgd(1.0), 128.0)
      >>> updates, state = tx.update(jnp.array([128.0]), tx.init(jnp.ones(1)))
      >>> updates
      Array([-1.], dtype=float32)
    """
    scale = as_scale_number("scale", scale, powers_of_two=False)
    check = as_bool("check", check)
    settings = ScaleSettings(
        num_losses, axis_names, model_axes, saturation_dtype, nonfinite_updates, nonfinite_loss
    )
    scaled = _wrap(inner)(inner, scale, 1, lambda state, bad: state, settings)
    if check:
        return accept_results(hide_new_values(scaled, model_axes, num_losses), scale)
    if isinstance(inner, Mapping) or as_positive_int("num_losses", num_losses) > 1:
        raise ValueError(
            "check=False is for one optimizer and one loss: where nothing is skipped, put several "
            "optimizers into optax.partition, and add up losses, which have the same scale"
        )
    for name, value, off in (
        ("saturation_dtype", saturation_dtype, None),
        ("nonfinite_loss", nonfinite_loss, "count"),
    ):
        if value != off:
            raise ValueError(
                f"{name}={value!r} says which steps are bad, and check=False that nobody looks: "
                "leave one of them out"
            )
    return accept_results(hide_new_values(_trust_gradients(scaled), model_axes), scale)


def no_loss_scale(inner: Inner) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, untouched: the off-switch, so that code need not branch.

    Nothing is checked or skipped, and the state is the inner state: checkpoints equal optax's. Only
    leaves whose gradient is their new value, as flax's layers in 8 bits have them, are hidden from
    `inner` and replaced, as by every loss scale.

    Args:
      inner: any optax transformation, or a dict of several: see `dynamic_loss_scale`.

    Returns:
      `inner`, taking extra arguments. `ampx.current_loss_scale` of its state is 1.

    Raises:
      TypeError: if `inner` is not a gradient transformation.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> state = ampx.no_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
      >>> float(ampx.current_loss_scale(state))
      1.0
    """
    if isinstance(inner, Mapping):
        return accept_results(hide_new_values(run_each(inner)), 1.0)
    check_transformation("inner", inner)
    return accept_results(hide_new_values(accept_extra_args(inner)), 1.0)


def loss_scale(
    choice: float | str | Callable[..., Any] | None,
    inner: Inner,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Picks a loss scale by one word or number, as a command line gives it.

    Args:
      choice: None, -1 or `"none"`: no scaling. 0 or `"dynamic"`: `dynamic_loss_scale`. A number
        >= 1, also as a string: `static_loss_scale`. A function that wraps a transformation, such
        as `functools.partial(dynamic_loss_scale, init_scale=2.0**10)`, is called.
      inner: any optax transformation, or a dict of several: see `dynamic_loss_scale`.
      **options: passed to the chosen transformation.

    Returns:
      The wrapped transformation.

    Raises:
      TypeError: if `choice` is neither number, string nor None (True included), or an option does
        not fit.
      ValueError: for any other number or string, or an array that is not a scalar.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.loss_scale("128", optax.sgd(0.1))
      >>> float(ampx.current_loss_scale(tx.init(jnp.ones(2))))
      128.0
    """
    if callable(choice):
        return choice(inner, **options)
    number = parse_choice(choice)
    if number == -1:
        if options:
            raise TypeError(
                f"loss scale {choice!r} is no scaling, so {sorted(options)} have no meaning: leave "
                "them out, or choose 'dynamic' or a number >= 1"
            )
        return no_loss_scale(inner)
    chosen = dynamic_loss_scale if number == 0 else static_loss_scale
    known = [
        p.name for p in inspect.signature(chosen).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise TypeError(
                f"options has {name!r}, which {chosen.__name__} does not take{suggest(name, known)}"
            )
    if number == 0:
        return dynamic_loss_scale(inner, **options)
    return static_loss_scale(inner, number, **options)


def _wrap(inner: Inner) -> Callable[..., optax.GradientTransformationExtraArgs]:
    return wrap_each_with_scale if isinstance(inner, Mapping) else wrap_with_scale


def _trust_gradients(
    scaled: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """A loss scale that takes every gradient for finite."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        verdict: Verdict | None = None,
        **extra_args: Any,
    ) -> Any:
        # A verdict from outside is taken as it is, and the gradients are not read. This one is
        # known when the program is compiled, so nothing is left of the choice between old and new.
        axes = () if verdict is None else verdict.axes
        good = Verdict(jnp.zeros(2, jnp.int32), axes, jnp.zeros((), bool))
        return scaled.update(updates, state, params, verdict=good, **extra_args)

    return optax.GradientTransformationExtraArgs(scaled.init, update)
