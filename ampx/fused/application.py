"""The whole tail of a step: from scaled gradients to new parameters, in two passes over memory.

Written as separate transformations, unscaling, judging, clipping, updating and choosing between old
and new each read and write every number once more. Here they share two passes. For AdamW with
float32 gradients, parameters and moments, in bytes a parameter:

    1. norm and verdict    read the gradient                                        4
    2. all the rest        read gradient, parameter, mu, nu                        16
                           write parameter, mu, nu                                 12
                                                                                  ---
                                                                                   32

Two are the least. The clip is a function of every gradient, and so is the decision to skip a step,
so nothing may be written before all gradients were read once. The first pass yields one sum of
squares, which gives both: a finite sum has finite terms (see `updates.gradient_norms`).

The second pass multiplies gradients by one factor, clip / loss scale, that travels down to the
optimizer in a `Tail`, with the verdict beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast, get_args

import jax
import optax
from jax.typing import DTypeLike

from ampx.checking import (
    as_dtype,
    as_number,
    check_choice,
    check_hyperparameter,
    check_transformation,
)
from ampx.fused.kernels.measured import resolve_backend
from ampx.fused.kernels.pallas_updates import make_kernel_squares
from ampx.loss_scaling.gradient_results import put_grads, take_grads, unscale_result
from ampx.loss_scaling.new_values import hide
from ampx.loss_scaling.nonfinite import Verdict
from ampx.loss_scaling.state import current_loss_scale, find_outermost_loss_scale, has_skipped
from ampx.model_axes import as_model_axes
from ampx.overwritten import join_new_values, leave_overwritten_out
from ampx.summaries import show_fields
from ampx.tree_checks import check_gradients, check_memory
from ampx.trees import cast_castable, leave_untrained_out, merge_trainable
from ampx.updates.extra_args import check_spelling, explain_refused
from ampx.updates.gradient_norms import fold_clip, measure_and_judge
from ampx.updates.tails import Applied, Backend, Tail, takes_tail, unwrap_results

_SETTINGS = ("max_norm", "half_dtype", "backend", "verdict", "model_axes")


class ApplyReport(NamedTuple):
    """What `ampx.fused.apply` found out on its way.

    Attributes:
      global_norm: float32 scalar, norm of the unscaled gradients before any clip; None if neither
        a clip nor a loss scale measured it.
      overflow: bool scalar, whether the step was skipped.
      loss_scale: float32 scalar, what the gradients were multiplied by; the first of several.
      half_params: a tree like the parameters, the new ones in `half_dtype`; or None.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.sgd(0.1)
      >>> params = jnp.ones(2)
      >>> report = ampx.fused.apply(tx, 3 * params, tx.init(params), params, max_norm=1.0)[2]
      >>> report.global_norm.round(3), bool(report.overflow)
      (Array(4.243, dtype=float32), False)
    """

    global_norm: jax.Array | None
    overflow: jax.Array
    loss_scale: jax.Array
    half_params: Any

    __repr__ = show_fields


def can_apply(opt_state: optax.OptState) -> bool:
    """Whether `apply` takes a transformation with this state."""
    scaled = find_outermost_loss_scale(opt_state)
    return takes_tail(opt_state if scaled is None else scaled.inner_state)


def apply(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt_state: optax.OptState,
    params: Any,
    *,
    max_norm: float | jax.Array | None = None,
    half_dtype: DTypeLike | None = None,
    backend: Backend = "auto",
    verdict: Verdict | None = None,
    model_axes: Any = None,
    **extra_args: Any,
) -> tuple[Any, optax.OptState, ApplyReport]:
    """Unscales, judges, clips, updates and keeps or skips, in two passes: the norm, then the rest.

    It gives what `tx.update` and `ampx.apply_updates` give, but no gradient, update or choice
    between old and new goes through memory on its own. A skipped step leaves every bit of the
    parameters and of the optimizer's state.

    Args:
      tx: an optimizer of `ampx.fused`, or one in `fuse`, or several in `optax.partition`, inside
        `optax.inject_hyperparams`, `ampx.master_weights` and, outermost,
        `ampx.dynamic_loss_scale` or `static_loss_scale`, with `ampx.follow_schedule` around it.
      grads: gradients, still multiplied by the loss scale; any floating dtype. Or the whole result
        of `ampx.value_and_grad`, of which a loss scale knows whether its loss was multiplied.
      opt_state: the state of `tx`. Donate it and `params` to update in place, to a jitted function
        that takes them in the order in which they come back: `params` first. JAX pairs donated
        arrays with results of the same shape in order; crossed pairs cost a copy.
      params: parameters; of an Equinox module the whole, which is returned whole, too.
      max_norm: clip the unscaled gradients by their global norm. The norm of finite gradients is
        right even where the sum of their squares overflows.
      half_dtype: also return the new parameters in this dtype, for the next forward pass.
      backend: what runs the update. `"auto"` is XLA, but for kinds of work in which kernels were
        measured to be faster on this kind of GPU, as `ampx/fused/kernels/measured.json` says (today
        it says nothing), and for arrays that lie whole on one device. Kernels have no derivatives;
        give `"xla"` where an update is differentiated or under `vmap`. `"pallas"` is kernels, in
        place, for the GPU (Hopper or newer) or TPU at hand. `"mosaic_gpu"` and `"mosaic_tpu"` lower
        for those from anywhere; `"interpret"` is for tests. Kernels work on the shards that each
        device has, under plain `jit` on meshes of Auto or of Explicit axes, and in `shard_map` over
        all axes (on GPUs with `check_vma=False`). Parameters that kernels cannot update are left to
        XLA: those of NovoGrad; of float64; on TPUs of float16; with float16 moments; of LAMB in
        flat buffers or with moments that are not float32; with 8-bit moments in rows that are not a
        multiple of 256, or on TPUs longer than 8192; and those that are rounded by random bits and
        divided over devices along an axis that is neither the first nor the last, or on a mesh of
        Auto axes have such an axis.
      verdict: a verdict on the gradients that devices agreed on already.
      model_axes: under `check_vma=False`, the mapped axes over which parameters are divided, see
        `ampx.train_step`: norms are then those of the whole, and one verdict holds for all shards.
      **extra_args: handed to `tx`.

    Returns:
      New parameters and state, in the dtypes of the old, and an `ApplyReport`.

    Raises:
      TypeError: if something in `tx` would have to see updates or unscaled gradients, or for an
        extra argument that is nearly called as one of these.
      ValueError: for a `max_norm` that is not positive, a result whose loss scale is missing or
        not that of `opt_state`, a backend that is unknown or has no kernels for this platform, or
        arrays of which kernels cannot know where they lie.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> tx = ampx.dynamic_loss_scale(ampx.fused.adamw(0.1), init_scale=8.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> step = jax.jit(lambda g, s, p: ampx.fused.apply(tx, g, s, p, max_norm=1.0))
      >>> params, state, report = step(jnp.array([24.0, -32.0]), state, params)
      >>> print(f"{params[0]:.3f}, {params[1]:.3f}; norm {report.global_norm}")
      0.900, 2.100; norm 5.0
    """
    check_transformation("tx", tx)
    check_spelling(extra_args, _SETTINGS)
    check_choice("backend", backend, get_args(Backend))
    if max_norm is not None:
        bounds: dict[str, Any] = dict(above=0, may_be_infinite=True, fix="None is off")
        check_hyperparameter("max_norm", max_norm, **bounds)
        if not isinstance(max_norm, jax.Array):
            max_norm = as_number("max_norm", max_norm, **bounds)
    if half_dtype is not None:
        half_dtype = as_dtype("half_dtype", half_dtype, "castable")
    if verdict is not None and not isinstance(verdict, Verdict):
        raise TypeError(
            f"verdict must be what ampx's own reductions hand on, got {verdict!r}: leave it out"
        )
    divided = as_model_axes(model_axes)
    extra_args |= divided.as_extra_args()
    if params is None:
        raise TypeError("params must be a tree of arrays, got None")
    check_memory("opt_state", opt_state)
    scaled = find_outermost_loss_scale(opt_state)
    # A loss scale reads of whole results which scale their gradients carry. It hides overwritten
    # leaves by itself, since it knows the `model_axes` that it was built with.
    given, grads = grads, take_grads(grads)
    whole, params = params, leave_untrained_out(params, grads)
    params_are_part = params is not whole
    hidden = hide(grads, opt_state, params, extra_args, divided) if scaled is None else None
    if hidden is not None:
        grads, params, extra_args = hidden.grads, hidden.params, hidden.extra_args
        divided = as_model_axes(extra_args.get("model_axes"))
    if scaled is None or scaled.loss_scale.size == 1:  # else a tree for each of several losses
        check_gradients("grads", leave_overwritten_out(grads), leave_overwritten_out(params))
    if not can_apply(opt_state):
        found = opt_state.inner_state if opt_state is scaled else opt_state
        raise TypeError(
            "opt_state: fused.apply needs a fused optimizer, such as ampx.fused.adamw or another "
            "in ampx.fused.fuse, and around it nothing but a loss scale, got a state of type "
            f"{type(found).__name__}: clip with max_norm, and where fuse finds no rules use "
            "tx.update and ampx.apply_updates; fuse(tx, strict=True) says why it finds none"
        )
    backend, plan = resolve_backend(backend)
    # What sums squares in the first pass, if kernels do it; the rest of the way it is the tail's.
    squares = make_kernel_squares(backend, plan)
    tail = Tail(max_norm=max_norm, new_params=True, backend=backend, plan=plan, squares=squares)
    scale = current_loss_scale(opt_state)
    norm = None
    if scaled is not None:
        # The loss scale judges, folds its own factor and the clip into the tail, and moves.
        applied, new_state = tx.update(
            put_grads(given, grads), opt_state, params, tail=tail, verdict=verdict, **extra_args
        )
        new_params, norm = cast(Applied, applied)
    else:
        grads, extra_args = unscale_result(given, grads, opt_state, extra_args)
        # Without a loss scale there is no verdict: a norm is measured only where a clip needs it.
        if max_norm is not None:
            norm = measure_and_judge(grads, squares=squares, model_axes=divided).norm
            tail = fold_clip(dataclasses.replace(tail, norm=norm), grads, divided)
        with explain_refused(extra_args):
            results, new_state = tx.update(grads, opt_state, params, tail=tail, **extra_args)
        new_params, _ = unwrap_results(results)
    if hidden is not None:
        new_params = join_new_values(new_params, hidden.held(opt_state, new_state))
    if params_are_part:
        new_params = merge_trainable(whole, new_params)
    # Fused with the update by XLA: the new parameter is at hand.
    half = None if half_dtype is None else cast_castable(new_params, half_dtype)
    return new_params, new_state, ApplyReport(norm, has_skipped(new_state), scale, half)
