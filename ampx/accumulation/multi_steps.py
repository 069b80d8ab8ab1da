"""Accumulation over calls: gradients are summed, and the optimizer runs on every k-th call.

A window is the k calls whose gradients make one update. With k = 3, and a NaN in call 5:

    call               1     2     3  |   4     5     6  |
    gradient           a     b     c  |   d    NaN    e  |
    after the call:                   |                  |
    micro_step         1     2     0  |   1     2     0  |
    grad_sum           a   a + b   0  |   d    NaN    0  |
    window_is_bad      no    no    no |   no   yes    no |
    gradient_step      0     0     1  |   1     1     2  |
    dropped_total      0     0     0  |   0     0     1  |
    updates          -0.0  -0.0    U  | -0.0  -0.0  -0.0 |

U is the update that the inner optimizer makes of (a + b + c) / 3; it runs in that call alone. The
second window is dropped but ends where it would have ended, so what call 7 gets does not depend on
earlier overflows. With `on_nonfinite="drop_micro_step"` only call 5 would be left out, and call 7
would end the window of d, e and its own gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx import trees
from ampx.accumulation.normalization import Normalize
from ampx.checking import as_positive_int, check_choice, check_transformation
from ampx.function_checks import check_callable
from ampx.loss_scaling import nonfinite
from ampx.loss_scaling.state import LossScaleState
from ampx.mesh_axes import as_axes, mark_varying
from ampx.model_axes import as_model_axes
from ampx.summaries import show_fields
from ampx.tree_checks import check_like, check_scalar, refuse_shards
from ampx.trees import find_nodes, has_mark, wider_dtype
from ampx.updates.branching import run_unless
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_update, guard

OnNonfinite = Literal["drop_window", "drop_micro_step"]


class MultiStepsState(NamedTuple):
    """State of `ampx.multi_steps`.

    Attributes:
      micro_step: int32 scalar, calls counted in the present window.
      gradient_step: int32 scalar, windows completed, dropped ones included.
      grad_sum: sums of (weighted) gradients, in the shapes of the parameters; float32, or float64
        for float64 parameters.
      weight_sum: float32 scalar, sum of the weights of the calls counted.
      window_is_bad: bool scalar, whether the window has seen a non-finite gradient.
      dropped_total: int32 scalar, windows or calls dropped here. Windows that a loss scale inside
        skips are counted in its own state.
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

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    sums_calls = True  # see `ampx.loss_scaling.outcomes`


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

    `optax.MultiSteps` computes the inner update on every call and masks it. Here a `lax.cond` runs
    it only when it is due. Prefer `ampx.value_and_grad(num_microbatches=k)` if all k micro-batches
    are at hand in one call: it keeps no sums between calls.

    With a loss scale the order decides what an overflow costs. `multi_steps(dynamic_loss_scale(
    adamw), k)` keeps the scale constant for a window, and an overflow drops the whole window.
    `dynamic_loss_scale(multi_steps(adamw, k))` drops only the call with the overflow, and the scale
    moves at once.

    Args:
      inner: any optax transformation. It sees float32 gradients.
      every_k: window length k, or a function from `gradient_step` (int32 scalar) to it.
      normalize: `"mean"` divides the sum by the number of calls, `"sum"` divides by nothing.
        `"weights"` needs `update(..., weight=w)`, a float scalar such as the number of tokens, and
        gives the mean weighted by w. The other two ignore `weight`, which `ampx.train_step` always
        passes.
      on_nonfinite: what a non-finite gradient drops: the whole window, or only its own call, which
        is then not counted.
      drop_if: a function from a call's gradients to a bool scalar: True leaves the call out. Use it
        for gradients with a norm beyond a bound, say.
      axis_names: inside `shard_map`, every mapped axis over which devices must agree on what to
        drop. Then all of them run `inner`, and any reduction in it, on the same calls. The
        `model_axes` of `ampx.train_step` are among them in any case.

    Returns:
      A transformation. Before the window is full its updates are zero (-0.0, which changes no
      parameter), and the inner state does not change.

    Raises:
      TypeError: if `inner` is not a gradient transformation, `every_k` neither int nor function, or
        `drop_if` no function; in `update`, if what `drop_if` returns is no bool scalar, or for the
        state of another transformation.
      ValueError: for `every_k` < 1, an unknown choice, a missing weight, a reduction inside
        without `axis_names`, or `"drop_micro_step"` around a loss scale, which would then never see
        an overflow.

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
        every_k = as_positive_int("every_k", every_k, is_counted=True)
    if drop_if is not None:
        check_callable("drop_if", drop_if, "drop_if(grads)")
    settings = _Settings(
        inner=guard("multi_steps", accept_extra_args(inner), holds_state=True),
        window_length=every_k if callable(every_k) else lambda _: every_k,
        normalize=normalize,
        on_nonfinite=on_nonfinite,
        drop_if=drop_if,
        axes=as_axes(axis_names, "axis_names", may_be_empty=True),
    )

    def init(params: optax.Params) -> MultiStepsState:
        return _init_state(settings, params)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight: Any = None,
        model_axes: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, MultiStepsState]:
        check_update("multi_steps", MultiStepsState, updates, state, params)
        if has_mark(state.inner_state, "reduces_gradients") and not settings.axes:
            raise ValueError(
                "the transformation inside reduces gradients over mapped axes, so all devices must "
                "agree on what to drop: give multi_steps axis_names, as in axis_names='data'"
            )
        refuse_shards("updates", updates)  # sums of calls are whole; inside zero1 they are shards
        divided = as_model_axes(model_axes)
        extra_args |= divided.as_extra_args()
        named = (*settings.axes, *divided.names)
        axes = nonfinite.find_verdict_axes(updates, state.micro_step, named)
        check_like("updates", updates, "grad_sum in the state", state.grad_sum, part="gradient")
        own = dataclasses.replace(settings, axes=axes)
        window = _add_call(own, state, trees.convert_numbers(updates), weight)
        new_updates, inner_state, is_bad = _update_when_due(own, state, window, params, extra_args)
        return new_updates, _next_state(state, window, inner_state, is_bad)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What stays the same in all calls of one `multi_steps`."""

    inner: optax.GradientTransformationExtraArgs
    window_length: Callable[[jax.Array], Any]
    normalize: Normalize
    on_nonfinite: OnNonfinite
    drop_if: Callable[[Any], jax.Array] | None
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))


class _Window(NamedTuple):
    """The present window, after this call was added to it.

    Attributes:
      micro_step: int32 scalar, calls counted so far.
      grad_sum: in the shapes of the parameters, float32 or wider.
      weight_sum: float32 scalar.
      is_bad: bool scalar, whether one of its gradients, or a sum that is due, is not finite.
      is_due: bool scalar, whether this call was the last one of the window.
      drop: bool scalar, whether the window is due and bad, and `inner` must not see it.
      leaves_out_call: bool scalar, whether this call was not added.
    """

    micro_step: jax.Array
    grad_sum: Any
    weight_sum: jax.Array
    is_bad: jax.Array
    is_due: jax.Array
    drop: jax.Array
    leaves_out_call: jax.Array


def _init_state(settings: _Settings, params: optax.Params) -> MultiStepsState:
    inner_state = settings.inner.init(params)
    if settings.on_nonfinite == "drop_micro_step" and find_nodes(inner_state, LossScaleState):
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


def _float32_zeros(param: Any) -> jax.Array:
    param = jnp.asarray(param)
    return jnp.zeros_like(param, dtype=wider_dtype(param.dtype, jnp.float32))


def _as_weight(settings: _Settings, weight: Any) -> jax.Array:
    """The weight of this call as a float32 scalar; 1 where weights do not count."""
    if settings.normalize != "weights":
        return jnp.asarray(1.0, jnp.float32)
    if weight is None:
        raise ValueError("normalize='weights' needs update(..., weight=<float scalar>)")
    check_scalar("weight", weight)
    return jnp.asarray(weight, jnp.float32)


def _judge_call(settings: _Settings, grads: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether to leave this call out, and whether it spoils its window: two bool scalars."""
    # Both are the same on all devices along the axes. A device that counted a call which another
    # left out would come to its update one call earlier, and a reduction in `inner` would hang. One
    # vote is enough to leave a call out.
    counts = nonfinite.count_nonfinite((grads, weight), axis_names=settings.axes)
    is_bad = jnp.sum(counts) > 0
    leave_out = jnp.asarray(False if settings.drop_if is None else _ask(settings.drop_if, grads))
    if settings.axes and settings.drop_if is not None:
        votes = mark_varying(leave_out.astype(jnp.int32), settings.axes)
        leave_out = jax.lax.psum(votes, settings.axes) > 0
    if settings.on_nonfinite == "drop_micro_step":
        return leave_out | is_bad, jnp.zeros((), bool)
    return leave_out, is_bad & ~leave_out


def _as_length(length: Any) -> Any:
    """The window length that `every_k` returned: a positive int, or an int32 scalar on the device.

    Raises:
      TypeError: if it is something else.
      ValueError: if it is known, and not positive.
    """
    if not isinstance(length, jax.Array):
        return as_positive_int("what every_k returns", length, is_counted=True)
    # Its value is not looked at: that would wait for the device. A 0 counts as 1.
    if not jnp.issubdtype(length.dtype, np.integer) or length.shape:
        raise TypeError(f"every_k must return an int scalar, got {jax.typeof(length)}")
    return length


def _ask(drop_if: Callable[[Any], Any], grads: Any) -> Any:
    """What `drop_if` says of the gradients of a call.

    Raises:
      TypeError: if that is no bool. The word "no" would drop every call, and a norm any but 0.
    """
    answer = drop_if(grads)
    is_array = isinstance(answer, bool | np.bool_ | np.ndarray | jax.Array)
    is_bool = is_array and jnp.issubdtype(jnp.result_type(answer), np.bool_)
    if not is_bool or jnp.shape(answer) != ():
        given = jax.typeof(answer) if is_array else repr(answer)
        raise TypeError(
            f"drop_if must return a bool scalar, got {given} of type {type(answer).__name__}: "
            "compare what it computes, as in optax.tree.norm(grads) > 100.0"
        )
    return answer


def _add_call(settings: _Settings, state: MultiStepsState, grads: Any, weight: Any) -> _Window:
    """Adds the gradients of this call, unless it is left out, and tells if the window is due."""
    weight = _as_weight(settings, weight)
    leave_out, is_bad = _judge_call(settings, grads, weight)

    def add(total: jax.Array, grad: jax.Array) -> jax.Array:
        added = total + grad.astype(total.dtype) * weight.astype(total.dtype)
        return jnp.where(leave_out, total, added)

    # A call that is left out leaves sums and count as they were, bit for bit, and ends no window.
    grad_sum = jax.tree.map(add, state.grad_sum, grads)
    weight_sum = state.weight_sum + jnp.where(leave_out, 0.0, weight)
    micro_step = trees.count_up(state.micro_step, ~leave_out)
    length = _as_length(settings.window_length(state.gradient_step))
    is_due = ~leave_out & (micro_step >= length)

    def sum_overflows() -> jax.Array:
        sums = (grad_sum, weight_sum)
        return jnp.sum(nonfinite.count_nonfinite(sums, axis_names=settings.axes)) > 0

    is_bad |= state.window_is_bad
    # A loss scale inside must see the overflow, to skip the step and to lower the scale. A plain
    # optimizer must not: it would write NaN into its moments.
    inner_judges = bool(find_nodes(state.inner_state, LossScaleState))
    if not inner_judges:
        # Finite gradients may add up to infinity. To look costs a pass over the sums, so it is done
        # in the one call in k that uses them. The branch needs the call's verdict: on CPUs a sum
        # over devices that no branch waits for may begin before one inside, or after it.
        is_bad |= run_unless(~is_due | is_bad, sum_overflows, lambda _: jnp.zeros((), bool))
    drop = is_bad & is_due & (not inner_judges)
    return _Window(micro_step, grad_sum, weight_sum, is_bad, is_due, drop, leave_out)


def _update_when_due(
    settings: _Settings,
    state: MultiStepsState,
    window: _Window,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, optax.OptState, jax.Array]:
    """Runs `inner` if the window is due and not dropped.

    Returns:
      Its update, or none; its state; and whether a window that goes on is bad. That is chosen in
      the branch, so that the branch waits for the call's verdict.
    """
    # A branch and not a select: in k - 1 of k calls no update is due, and a select would still
    # compute one.

    def run() -> tuple[Any, Any, jax.Array]:
        # With weights, sum(w_i * g_i) / sum(w_i); without them every w_i is 1, and this is the
        # mean. If all weights are zero so is the sum, and 0 / 1 is the 0 that is wanted, not NaN.
        divisor = jnp.where(window.weight_sum == 0, 1.0, window.weight_sum)
        total = 1.0 if settings.normalize == "sum" else divisor
        grads = jax.tree.map(lambda g: g / jnp.asarray(total, g.dtype), window.grad_sum)
        about = {**extra_args, "grad": grads} if "grad" in extra_args else extra_args
        new_updates, inner_state = settings.inner.update(grads, state.inner_state, params, **about)
        inner_state = trees.cast_like(inner_state, state.inner_state)
        return new_updates, inner_state, jnp.zeros((), bool)

    def wait(types: Any) -> tuple[Any, Any, jax.Array]:
        return trees.null_updates(types[0]), state.inner_state, window.is_bad & ~window.is_due

    return run_unless(~window.is_due | window.drop, run, wait)


def _next_state(
    state: MultiStepsState, window: _Window, inner_state: optax.OptState, is_bad: jax.Array
) -> MultiStepsState:
    """The state after this call. After a window that was due, dropped or not, a new one begins.

    Args:
      state: before the call.
      window: with this call in it.
      inner_state: after the call.
      is_bad: bool scalar, whether a window that goes on is bad.
    """
    is_due = window.is_due
    # Zeros are chosen, not multiplied in: infinity times zero is NaN.
    cleared = jax.tree.map(
        lambda total: jnp.where(is_due, jnp.zeros_like(total), total), window.grad_sum
    )
    dropped = window.leaves_out_call | window.drop
    return MultiStepsState(
        micro_step=jnp.where(is_due, 0, window.micro_step),
        gradient_step=trees.count_up(state.gradient_step, is_due),
        grad_sum=cleared,
        weight_sum=jnp.where(is_due, 0.0, window.weight_sum),
        window_is_bad=is_bad,
        dropped_total=trees.count_up(state.dropped_total, dropped),
        inner_state=inner_state,
    )
