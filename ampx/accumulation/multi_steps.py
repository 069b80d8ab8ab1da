"""Accumulation over calls: the optimizer runs on every k-th one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from ampx import trees
from ampx.accumulation.normalization import Normalize
from ampx.checking import check_choice, check_positive_int, check_transformation
from ampx.loss_scaling import nonfinite
from ampx.loss_scaling.state import LossScaleState
from ampx.mesh_axes import as_axes, mark_varying
from ampx.trees import find_nodes, has_mark, wider_dtype

OnNonfinite = Literal["drop_window", "drop_micro_step"]


class MultiStepsState(NamedTuple):
    """State of `ampx.multi_steps`.

    Attributes:
      micro_step: int32, calls counted in the present window.
      gradient_step: int32, windows completed, dropped ones included.
      grad_sum: float32 sums of (weighted) gradients.
      weight_sum: float32, sum of weights.
      window_is_bad: bool, whether the window has seen a non-finite gradient.
      dropped_total: int32, windows or micro-steps dropped here; those that a loss scale inside
        skipped are counted there.
      inner_state: the wrapped transformation's state.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> int(ampx.multi_steps(optax.sgd(0.1), 4).init(jnp.ones(2)).micro_step)
      0
    """

    micro_step: jax.Array
    gradient_step: jax.Array
    grad_sum: Any
    weight_sum: jax.Array
    window_is_bad: jax.Array
    dropped_total: jax.Array
    inner_state: optax.OptState


def multi_steps(
    inner: optax.GradientTransformation,
    every_k: int | Callable[[jax.Array], jax.Array],
    *,
    normalize: Normalize = "mean",
    on_nonfinite: OnNonfinite = "drop_window",
    drop_if: Callable[[Any], jax.Array] | None = None,
    axis_names: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Sums the gradients of k calls in float32 and runs `inner` on the k-th, and only then.

    `optax.MultiSteps` computes the inner update on every call and masks it; here it is behind a
    `lax.cond`. Prefer `ampx.value_and_grad(num_microbatches=k)` where all k micro-batches are at
    hand: it needs no memory between calls.

    With a loss scale the order decides what an overflow costs. `multi_steps(dynamic_loss_scale(
    adamw), k)` holds the scale for the whole window and drops the window. `dynamic_loss_scale(
    multi_steps(adamw, k))` drops the micro-step alone and moves the scale at once.

    Args:
      inner: any optax transformation. It sees float32 gradients.
      every_k: window length, or a function from `gradient_step` to it.
      normalize: `"mean"` divides the sum by the number of calls, `"sum"` by nothing; `"weights"`
        takes `update(..., weight=w)` and gives the mean weighted by w. The others ignore `weight`,
        which `ampx.train_step` always passes.
      on_nonfinite: what a non-finite gradient drops: the whole window, or just its own micro-step,
        which is then not counted.
      drop_if: a function from a call's gradients to a bool, for micro-steps to leave out, such as
        those with a norm beyond a bound.
      axis_names: every mapped axis over which devices must agree on what to drop, inside
        `shard_map`, so that they run `inner`, and any reduction in it, on the same calls.

    Returns:
      A transformation. Between windows its updates are zero and the inner state stands still.

    Raises:
      TypeError: if `inner` is not a gradient transformation or `every_k` neither int nor function.
      ValueError: for `every_k` < 1, an unknown choice, a missing weight, or dropping micro-steps
        around a loss scale, which would then never see an overflow; or a reduction inside without
        `axis_names`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.multi_steps(optax.sgd(1.0), 2)
      >>> state = tx.init(jnp.zeros(1))
      >>> for grad in (1.0, 2.0):
      ...     updates, state = tx.update(jnp.array([grad]), state)
      ...     print(updates)
      [-0.]
      [-1.5]
    """
    check_transformation("inner", inner)
    if not callable(every_k):
        check_positive_int("every_k", every_k)
    check_choice("normalize", normalize, get_args(Normalize))
    check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    inner = optax.with_extra_args_support(inner)
    axis_names = as_axes(axis_names, "axis_names", may_be_empty=True)
    window_length = every_k if callable(every_k) else lambda _: every_k

    def init(params: optax.Params) -> MultiStepsState:
        inner_state = inner.init(params)
        if on_nonfinite == "drop_micro_step" and find_nodes(inner_state, LossScaleState):
            raise ValueError(
                "on_nonfinite='drop_micro_step' around a loss scale would hide every overflow from "
                "it: write dynamic_loss_scale(multi_steps(optimizer, k)) instead"
            )
        return MultiStepsState(
            micro_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            grad_sum=jax.tree.map(_float32_zeros, params),
            weight_sum=jnp.zeros((), jnp.float32),
            window_is_bad=jnp.zeros((), bool),
            dropped_total=jnp.zeros((), jnp.int32),
            inner_state=inner_state,
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, MultiStepsState]:
        if has_mark(state.inner_state, "reduces_gradients") and not axis_names:
            raise ValueError(
                "the transformation inside reduces gradients over mapped axes, so all devices must "
                "agree on what to drop: give multi_steps axis_names, as in axis_names='data'"
            )
        if normalize == "weights" and weight is None:
            raise ValueError("normalize='weights' needs update(..., weight=<float scalar>)")
        weight = jnp.asarray(weight if normalize == "weights" else 1.0, jnp.float32)
        bad = jnp.sum(nonfinite.count_nonfinite((updates, weight), axis_names=axis_names)) > 0
        left_out = jnp.asarray(False if drop_if is None else drop_if(updates), bool)
        if axis_names and drop_if is not None:
            any_left_out = mark_varying(left_out.astype(jnp.int32), axis_names)
            left_out = jax.lax.psum(any_left_out, axis_names) > 0
        if on_nonfinite == "drop_micro_step":
            left_out |= bad
            bad = jnp.zeros((), bool)

        def add(total: jax.Array, grad: jax.Array) -> jax.Array:
            added = total + grad.astype(total.dtype) * weight.astype(total.dtype)
            return jnp.where(left_out, total, added)

        counted = (~left_out).astype(jnp.int32)
        grad_sum = jax.tree.map(add, state.grad_sum, updates)
        weight_sum = state.weight_sum + jnp.where(left_out, 0.0, weight)
        window_is_bad = state.window_is_bad | (bad & ~left_out)
        micro_step = state.micro_step + counted
        due = (counted > 0) & (micro_step >= window_length(state.gradient_step))

        def sum_overflows() -> jax.Array:
            sums = (grad_sum, weight_sum)
            return jnp.sum(nonfinite.count_nonfinite(sums, axis_names=axis_names)) > 0

        # Finite gradients may add up to infinity. Looked at only when the sum is used.
        window_is_bad |= jax.lax.cond(due, sum_overflows, lambda: jnp.zeros_like(due))
        # A loss scale inside must see the overflow; a plain optimizer must not.
        inner_judges = bool(find_nodes(state.inner_state, LossScaleState))
        drop = window_is_bad & due & (not inner_judges)

        def run(_: None) -> tuple[Any, Any]:
            divisor = jnp.where(weight_sum == 0, 1.0, weight_sum)
            total = 1.0 if normalize == "sum" else divisor
            grads = jax.tree.map(lambda g: g / jnp.asarray(total, g.dtype), grad_sum)
            new_updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
            return new_updates, trees.cast_like(inner_state, state.inner_state)

        update_shapes, _ = jax.eval_shape(run, None)

        def wait(_: None) -> tuple[Any, Any]:
            return trees.null_updates(update_shapes), state.inner_state

        new_updates, inner_state = jax.lax.cond(due & ~drop, run, wait, None)
        # Cleared by choosing zeros: infinity times zero is not zero.
        cleared = jax.tree.map(lambda total: jnp.where(due, jnp.zeros_like(total), total), grad_sum)
        return new_updates, MultiStepsState(
            micro_step=jnp.where(due, 0, micro_step),
            gradient_step=state.gradient_step + due.astype(jnp.int32),
            grad_sum=cleared,
            weight_sum=jnp.where(due, 0.0, weight_sum),
            window_is_bad=window_is_bad & ~due,
            dropped_total=state.dropped_total + (left_out | drop).astype(jnp.int32),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _float32_zeros(param: Any) -> jax.Array:
    param = jnp.asarray(param)
    return jnp.zeros_like(param, dtype=wider_dtype(param.dtype, jnp.float32))
