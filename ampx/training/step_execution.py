"""What one call of a training step does, in which order.

    state      params as stored, opt_state, step i32[], key
      │
      │  1  scale = current_loss_scale(opt_state)        f32[], as held before this step
      │  2  grads_of(params, batch, loss_scale=scale)
      │       loss                                       f32[], unscaled
      │       weight                                     f32[], of all micro-batches and devices
      │       grads                                      f32 like params: summed over micro-batches,
      │                                                  over the weight, still times the scale
      │  3  verdict = judge(grads)                       i32[3]: inf, NaN, squares overflow  ┐ with
      │  4  reduction.reduce(grads, verdict)             f32, in buckets, after the verdict  ┘ axes
      │  5  tx.update(grads, opt_state, params,          from the outside in:
      │       value=loss, grad=grads, ...)               (`step_arguments`)
      │       loss scale   reads the verdict, or takes one; multiplies by 1/scale
      │       clip         by the global norm, f32[]
      │       optimizer    updates and new state
      │       loss scale   after a bad verdict: none of this, the old state; then moves the scale
      │  6  params + updates                             in the dtypes of params
      ▼
    next state, StepReport

Every line is a pure function of those above it, so XLA is free to overlap them. Steps 3 and 4 are
here only where `axis_name` is given. A pipeline does them inside step 2, `ampx.zero1` does step 4
inside step 5, and under plain `jit` arrays are global and JAX reduces them. `scatter_gradients`
does step 4 in step 2, after each micro-batch; the verdict is then taken from shards of the sums.

A fused optimizer takes 5 and 6 in one pass over memory (`ampx.fused.apply`). Around any other, both
stand in one branch, which a skipped step does not take (`loss_scaling.transitions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Never, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from ampx import flax_modules
from ampx.accumulation.results import GradResult
from ampx.accumulation.sparse_rows import densify
from ampx.data_parallel.reduction import Reduction
from ampx.data_parallel.reduction_states import ReductionState
from ampx.data_parallel.zero1 import Zero1State
from ampx.fused.application import apply, can_apply
from ampx.loss_scaling.nonfinite import Verdict, find_verdict_axes, judge, unscale
from ampx.loss_scaling.outcomes import compare_states
from ampx.loss_scaling.state import OptimizersState, find_outermost_loss_scale, scale_or_one
from ampx.model_axes import NOT_DIVIDED, ModelAxes, find_own_axes
from ampx.overwritten import (
    axes_of_optimized,
    merge_optimized,
    split_optimized,
    split_overwritten,
    take_largest_of_shards,
)
from ampx.precision.follow_schedule import precision_phase
from ampx.precision.opt_levels import Recipe
from ampx.precision.phase_switch import as_number_of_phase
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.summaries import show_fields
from ampx.training import step_arguments, train_states
from ampx.training.half_warnings import warn_of_half
from ampx.training.step_reports import StepReport, find_learning_rate, measure_groups
from ampx.training.train_states import TrainState
from ampx.tree_checks import check_arrays, check_key, check_trainable
from ampx.trees import cast_like, copy_arrays, find_nodes, has_mark
from ampx.updates.applying import apply_updates
from ampx.updates.extra_args import explain_refused
from ampx.updates.gradient_norms import compute_norm
from ampx.updates.guards import explain_choices_of_flat
from ampx.updates.tails import Applied, Tail

State = TypeVar("State")  # of any of the kinds that a step takes


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A pure function `step(state, batch, *, key=None, **extra_args) -> (state, StepReport)`.

    It is to be jitted: by `jax.jit`, or for an nnx model by `nnx.jit`, which keeps shared
    parameters shared. An nnx model and its optimizer are trained in place, as by flax's own
    optimizer, and given back.

    Attributes:
      tx: the whole optax transformation, loss scale and clipping included. Give this one to
        flax's `TrainState.create` or `nnx.Optimizer`.
      grads_of: from parameters and a batch to a `GradResult`, as `ampx.value_and_grad` makes it.
      recipe: how parameters are stored and computed with; None leaves them as they are.
      learning_rate: a number or schedule, or pairs of a group and its own, for the report alone;
        None where it was not given.
      group_of: from a parameter's path to its group in `StepReport.local_norm`; None for no groups.
      reduction: how gradients are reduced over `axis_name`; None without it.
      schedule: a precision schedule, or None.
      model_axes: over which mapped axes parameters are divided.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> step = ampx.train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.5))
      >>> jitted = jax.jit(step, donate_argnums=0)
      >>> state, report = jitted(step.init(jnp.array(2.0)), jnp.ones(4))
      >>> float(state.params)
      0.0
    """

    tx: optax.GradientTransformationExtraArgs
    grads_of: Callable[..., GradResult] = dataclasses.field(repr=False)
    recipe: Recipe | None
    learning_rate: optax.ScalarOrSchedule | tuple[tuple[str, optax.ScalarOrSchedule], ...] | None
    group_of: Callable[[str], str] | None
    reduction: Reduction | None = dataclasses.field(default=None, repr=False)
    schedule: PrecisionSchedule | None = None
    model_axes: ModelAxes = NOT_DIVIDED

    __repr__ = show_fields

    def init(
        self, params: Any, *, key: jax.Array | None = None, model_state: Any = None
    ) -> TrainState:
        """Makes the first state.

        Args:
          params: a pytree of parameters, or `ampx.fused.FlatParams`, stored as the policy says. The
            optimizer sees its floating arrays. A state that holds functions or strings, as that of
            an Equinox module may, needs `equinox.filter_jit` in the place of `jax.jit`.
          key: a random key, if `loss_fn` takes one.
          model_state: batch statistics and the like, if `loss_fn` takes them.

        Returns:
          A `TrainState`; copies, so that it can be donated without losing `params`.

        Raises:
          TypeError: for an nnx model, which needs an `nnx.Optimizer` in the place of a state; for
            what is no array, or no key.
          ValueError: for a loss scale of several losses.

        Warns:
          UserWarning: where the policy computes in float16 and there is no loss scale, or stores
            parameters in half precision and nothing keeps what half cannot hold.
        """
        if flax_modules.is_nnx_module(params):
            raise TypeError(
                "step.init takes a pytree of parameters, got an nnx module: call the step with the "
                "pair (model, nnx.Optimizer(model, step.tx, wrt=nnx.Param)) instead of a state"
            )
        check_trainable("params", params)
        check_key("key", key)
        check_arrays("model_state", model_state)
        # The optimizer starts from what is stored, so that moments are as wide as parameters.
        stored = params if self.recipe is None else self.recipe.cast_params(params)
        stored, key, model_state = copy_arrays((stored, key, model_state))
        step = jnp.zeros((), jnp.int32)
        with explain_choices_of_flat():
            opt_state = self.tx.init(split_optimized(stored)[0])
        state = TrainState(step, stored, opt_state, key, model_state)
        train_states.check_has_one_loss(state.opt_state)
        if self.recipe is not None and self.schedule is None:
            warn_of_half(self.recipe, opt_state, stacklevel=2)
        state = train_states.separate_buffers(state)
        return train_states.place_beside(params, state)

    def __call__(
        self,
        state: State,
        batch: Any,
        *more: Never,
        key: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[State, StepReport]:
        """Takes one step.

        Args:
          state: an `ampx.TrainState`, a flax linen `TrainState`, or a pair (nnx model,
            nnx.Optimizer), which is changed in place.
          batch: a pytree of arrays with a leading batch axis.
          *more: nothing; here so that a call by the custom of other loops gets an error that helps.
          key: a random key for this step, instead of the state's own.
          **extra_args: handed to the optimizer, beside `value`, `grad`, `value_fn`, `obj_fn`,
            `grad_fn` and `weight`, which it always gets; of these, `value` and the functions may
            be given to replace the step's own.

        Returns:
          The next state, of the same kind, and a `StepReport`.

        Raises:
          TypeError: for a state of another kind, a third argument without a name, or an extra
            argument that is the step's own.
          ValueError: for a state that was made with another optimizer than `step.tx`.
        """
        step_arguments.check_given(state, more, extra_args)
        check_key("key", key)
        now = train_states.as_train_state(state, self.tx)
        # The key advances on a skipped step too, as the data do, so that no two steps draw the same
        # dropout masks. A key that the caller gives leaves the state's own untouched.
        next_key = now.key
        if key is None and now.key is not None:
            next_key, key = jax.random.split(now.key)
        train_states.check_loss_scale_is_outermost(now.opt_state)
        train_states.check_has_one_loss(now.opt_state)
        scale = scale_or_one(now.opt_state)  # f32[], held from before this step
        is_nnx = train_states.is_nnx_pair(state)
        model, wrt = (cast(Any, state)[0], cast(Any, state)[1].wrt) if is_nnx else (None, None)
        self._check_reduces_new_values(now, is_nnx)
        phase: dict[str, Any] = {}
        if self.schedule is not None:
            phase["phase"] = precision_phase(now.opt_state)
        about = {"key": key, "model_state": now.model_state, **phase}
        result = self.grads_of(now.params, batch, loss_scale=scale, wrt=wrt, **about)
        # Rows of lookup tables become dense only here, after all micro-batches.
        grads, overwritten = densify(result.grads), None
        if not is_nnx:
            # New values and no gradients: all that follows is not for them.
            overwritten = take_largest_of_shards(split_overwritten(grads)[1], self.model_axes)
            grads = split_optimized(grads)[0]
        result = result._replace(grads=grads)
        grads, of_reduction, sent = self._reduce(result, now)
        result = result._replace(grads=grads)
        # `grad` is scaled here, as `grads` are; a loss scale hands it on unscaled.
        rest = None if is_nnx else split_optimized(now.params)[1]
        own = {"weight": result.weight, "value": result.loss, "grad": grads, **of_reduction}
        own |= self._axes_of_optimized(now).as_extra_args()
        functions = step_arguments.make_functions(
            step_arguments.Evaluation(self.grads_of, model, wrt, rest),
            step_arguments.Inputs(batch, scale, about),
            now.opt_state,
            self.reduction,
            {*own, *extra_args},
        )
        extra_args = {**own, **functions, **extra_args}
        # Both branches undo what a skip must not change. For nnx the optimizer's own method applies
        # the update, so that a subclass of `nnx.Optimizer` keeps its say.
        if is_nnx:
            with jax.named_scope("ampx.update"), explain_refused(extra_args):
                new_state = train_states.apply_to_nnx(state, grads, result.model_state, extra_args)
            new_opt_state = train_states.as_train_state(new_state, self.tx).opt_state
            norm = None
        else:
            with explain_refused(extra_args):
                params, new_opt_state, norm = self._apply(grads, now, extra_args)
            following = train_states.make_next_state(
                now, params, new_opt_state, next_key, result.model_state, overwritten
            )
            new_state = train_states.write_back(state, following)
        report = self._report(now, new_opt_state, result, scale, norm)
        return cast(State, new_state), report._replace(**phase, **sent)

    def in_phase(self, number: int) -> TrainStep:
        """The step of one phase of its precision schedule, compiled without the others.

        For a loop that chooses by `schedule.phase_at(i)`: faster on CPUs, where XLA runs what is
        inside a `switch` on one core, and smaller. States are the same, so the steps take turns.

        Args:
          number: of the phase, from 0.

        Returns:
          A `TrainStep`. Whether it was called in its phase is seen in `report.phase`.

        Raises:
          IndexError: if there is no such phase.

        Examples:
          >>> import ampx, jax, jax.numpy as jnp, optax
          >>> schedule = ampx.precision_schedule("fast1|step|0.5", total_steps=4)
          >>> def loss_fn(w, x):
          ...     return jnp.mean(w * x.astype(w.dtype))
          >>> step = ampx.train_step(loss_fn, optax.sgd(0.1), policy=schedule)
          >>> steps = [jax.jit(step.in_phase(number)) for number in range(2)]
          >>> state = step.init(jnp.ones(()))
          >>> for i in range(4):
          ...     state, report = steps[schedule.phase_at(i)](state, jnp.ones(4))
          ...     print(report.phase)
          0
          0
          1
          1
        """
        phases = () if self.schedule is None else self.schedule.phases
        number = as_number_of_phase(number, len(phases))

        # A Python int in the place of the traced phase chooses the function while tracing.
        def grads_of(*args: Any, phase: jax.Array, **kwargs: Any) -> GradResult:
            return self.grads_of(*args, phase=number, **kwargs)

        return dataclasses.replace(self, grads_of=grads_of)

    def _axes_of_optimized(self, now: TrainState) -> ModelAxes:
        return axes_of_optimized(self.model_axes, now.params)

    def _check_reduces_new_values(self, now: TrainState, is_nnx: bool) -> None:
        """Refuses devices that would go on with new values of their own.

        Raises:
          ValueError: for a reduction inside `tx` of a model with leaves that `tx` does not see; for
            an nnx model with such leaves whose weights are divided.
        """
        if is_nnx:
            has_any = flax_modules.has_overwritten_nnx(now.params)
        else:
            has_any = split_overwritten(now.params)[1] is not None
        if has_any and is_nnx and self.model_axes.names:
            raise ValueError(
                f"model_axes with an nnx model that has variables of {flax_modules.OVERWRITE!r}: "
                "their new values would differ between shards. Give the step linen's variables"
            )
        if self.reduction is not None or not has_mark(now.opt_state, "reduces_gradients"):
            return
        if has_any:
            raise ValueError(
                f"the model has leaves under {flax_modules.OVERWRITE!r}, whose gradients are their "
                "new values, and tx reduces gradients without them: name the mapped axes in "
                "train_step(axis_name=...), and leave all_reduce out of tx (zero1 may stay)"
            )

    def _reduce(
        self, result: GradResult, now: TrainState
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Takes the verdict from local gradients, then reduces them.

        Returns:
          Gradients as `tx` wants them, extra arguments that tell it what is known of them, and
          fields of the report.
        """
        grads, opt_state = result.grads, now.opt_state
        is_judged = find_outermost_loss_scale(opt_state) is not None
        if self.reduction is None:
            # A pipeline has reduced by itself, and has taken the verdict before it did.
            if is_judged and result.verdict is not None:
                return grads, {"verdict": Verdict(result.verdict, ())}, {}
            return grads, {}, {}
        # Before the reduction and from local gradients: see `data_parallel.reduction`. The sum of
        # the two counts is what the first bucket waits for.
        scale = scale_or_one(opt_state)
        named = (*self.reduction.axes, *self.model_axes.names)
        axes = find_verdict_axes(grads, scale, named)
        counts, is_too_large, _ = judge([grads], [scale], axes)
        about = {}
        inside = bool(find_nodes(opt_state, Zero1State))  # it reduces inside `tx`
        if result.reduction is not None and not inside:
            raise ValueError(
                "scatter_gradients=True gives each device its shards of the gradients, and tx has "
                "no ampx.zero1, which alone takes them: write zero1(tx, axis_name)"
            )
        if is_judged:
            overlaps = self.reduction.overlaps and not inside
            about = {"verdict": Verdict(counts[0], axes, is_too_large, overlaps)}
        if inside:  # and must be told how
            sent = {} if result.reduction is None else result.reduction._asdict()
            how = {"reduce_op": self.reduction.op, "reduce_axes": self.reduction.axes}
            return grads, {**about, **how}, sent
        if find_nodes(opt_state, ReductionState):
            raise ValueError(
                "tx reduces gradients, and so does train_step(axis_name="
                f"{self.reduction.axes}): leave all_reduce out of tx"
            )
        seen = split_optimized(now.params)[0]
        own_axes = find_own_axes(grads, seen, self._axes_of_optimized(now))
        reduced, state = self.reduction.reduce(grads, jnp.sum(counts), own_axes)
        return reduced, about, state._asdict()

    @jax.named_scope("ampx.update")
    def _apply(
        self, grads: Any, now: TrainState, extra_args: dict[str, Any]
    ) -> tuple[Any, Any, jax.Array | None]:
        """Updates parameters and optimizer state.

        Returns:
          The new ones, and the norm of the unscaled gradients if a fused update has measured it on
          its way; else None.
        """
        trained, rest = split_optimized(now.params)
        if can_apply(now.opt_state):  # all that is inside the loss scale works in one pass
            params, opt_state, report = apply(self.tx, grads, now.opt_state, trained, **extra_args)
            return merge_optimized(params, rest), opt_state, report.global_norm
        scaled = find_outermost_loss_scale(now.opt_state)
        if scaled is not None and not isinstance(scaled.inner_state, OptimizersState):
            # New parameters are asked for: they belong into the branch that a skip does not take.
            result, opt_state = self.tx.update(
                grads, now.opt_state, trained, tail=Tail(new_params=True), **extra_args
            )
            applied = cast(Applied, result)
            return merge_optimized(applied.params, rest), opt_state, applied.norm
        updates, opt_state = self.tx.update(grads, now.opt_state, trained, **extra_args)
        # float32 gradients must not widen the half moments that half parameters came with.
        opt_state = cast_like(opt_state, now.opt_state)
        return merge_optimized(apply_updates(trained, updates), rest), opt_state, None

    def _report(
        self,
        now: TrainState,
        new_opt_state: Any,
        result: GradResult,
        scale: jax.Array,
        norm: jax.Array | None,
    ) -> StepReport:
        # By the scale that the gradients were made with: the new state's may have moved already.
        grads = unscale(result.grads, scale)
        if norm is None:
            norm = compute_norm(grads, self._axes_of_optimized(now))
        skipped, applied = compare_states(now.opt_state, new_opt_state)
        # Under ZeRO-1 `grads` are each device's own: only the sum inside has the norm of the whole.
        # A skipped step has not made that sum: the state still holds the norm of an earlier one.
        sharded = find_nodes(new_opt_state, Zero1State)
        if sharded:
            norm = jnp.where(skipped, jnp.nan, sharded[0].gradient_norm)
            if self.group_of is not None:
                raise ValueError(
                    "local_norm cannot be reported with ampx.zero1: gradients are reduced inside "
                    "tx, and are not whole there. Leave local_norm out"
                )
        local_norm = size = None
        if self.group_of is not None:
            local_norm, size = measure_groups(grads, self.group_of, self._axes_of_optimized(now))
        return StepReport(
            loss=result.loss,
            overflow=skipped,
            loss_scale=scale,
            learning_rate=find_learning_rate(self.learning_rate, now.step, applied, new_opt_state),
            global_norm=norm,
            local_norm=local_norm,
            size=size,
            aux=result.aux,
        )
