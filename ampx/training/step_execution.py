"""What one call of a training step does, in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx import flax_modules
from ampx.accumulation.results import GradResult
from ampx.accumulation.sparse_rows import densify
from ampx.data_parallel.reduction import Reduction, ReductionState
from ampx.data_parallel.zero1 import Zero1State
from ampx.fused.application import apply, can_apply
from ampx.loss_scaling.nonfinite import Verdict, count_nonfinite, unscale
from ampx.loss_scaling.state import current_loss_scale, find_outermost_loss_scale
from ampx.precision.follow_schedule import precision_phase
from ampx.precision.opt_levels import Recipe
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.training import train_states
from ampx.training.step_reports import StepReport, measure_groups
from ampx.training.train_states import TrainState
from ampx.trees import cast_like, find_nodes
from ampx.updates.applying import apply_updates


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A pure function `step(state, batch, *, key=None) -> (state, StepReport)`, to be jitted.

    With `jax.jit`, or `nnx.jit` for an nnx model, which keeps shared parameters shared.

    Attributes:
      tx: the whole optax transformation, loss scale and clipping included. Give this one to
        flax's `TrainState.create` or `nnx.Optimizer`.

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
    learning_rate: optax.ScalarOrSchedule | None
    group_of: Callable[[str], str] | None
    reduction: Reduction | None = dataclasses.field(default=None, repr=False)
    schedule: PrecisionSchedule | None = None

    def init(
        self, params: Any, *, key: jax.Array | None = None, model_state: Any = None
    ) -> TrainState:
        """A first state.

        Args:
          params: a pytree of parameters, or `ampx.fused.FlatParams`, stored as the policy says.
          key: a random key, if `loss_fn` takes one.
          model_state: batch statistics and the like, if `loss_fn` takes them.

        Returns:
          A `TrainState`; copies, so that it can be donated without losing `params`.
        """
        if flax_modules.is_nnx_module(params):
            raise TypeError("for an nnx model make the pair (model, nnx.Optimizer(model, step.tx))")
        stored = params if self.recipe is None else self.recipe.cast_params(params)
        stored, key, model_state = jax.tree.map(jnp.copy, (stored, key, model_state))
        step = jnp.zeros((), jnp.int32)
        state = TrainState(step, stored, self.tx.init(stored), key, model_state)
        return train_states.place_beside(params, state)

    def __call__(
        self, state: Any, batch: Any, *, key: jax.Array | None = None
    ) -> tuple[Any, StepReport]:
        """One step.

        Args:
          state: an `ampx.TrainState`, a flax linen `TrainState`, or a pair (nnx model,
            nnx.Optimizer).
          batch: a pytree of arrays with a leading batch axis.
          key: a random key for this step, instead of the state's own.

        Returns:
          The next state, of the same kind, and a `StepReport`.

        Raises:
          TypeError: for a state of another kind.
          ValueError: for a flax state that was made with another optimizer than `step.tx`.
        """
        now = train_states.as_train_state(state, self.tx)
        next_key = now.key
        if key is None and now.key is not None:
            next_key, key = jax.random.split(now.key)
        train_states.check_loss_scale_is_outermost(now.opt_state)
        scale = current_loss_scale(now.opt_state)  # f32[], held from before this step
        is_nnx = train_states.is_nnx_pair(state)
        phase: dict[str, Any] = {}
        if self.schedule is not None:
            phase["phase"] = precision_phase(now.opt_state)
        result = self.grads_of(
            now.params,
            batch,
            loss_scale=scale,
            key=key,
            model_state=now.model_state,
            wrt=state[1].wrt if is_nnx else None,
            **phase,
        )
        # Rows of lookup tables become dense only here, after all micro-batches.
        result = result._replace(grads=densify(result.grads))
        extra_args: dict[str, Any] = {"weight": result.weight}
        if phase:  # a schedule that waits for a loss reads it as `value`, as optax's own do
            extra_args["value"] = result.loss
        grads, of_reduction, sent = self._reduce(result, now.opt_state)
        result = result._replace(grads=grads)
        extra_args |= of_reduction
        if is_nnx:
            with jax.named_scope("ampx.update"):
                new_state = train_states.apply_to_nnx(state, grads, result.model_state, extra_args)
            new_opt_state = train_states.as_train_state(new_state, self.tx).opt_state
            norm = None
        else:
            params, new_opt_state, norm = self._apply(grads, now, extra_args)
            following = train_states.advance(
                now, params, new_opt_state, next_key, result.model_state
            )
            new_state = train_states.write_back(state, following)
        report = self._report(now, new_opt_state, result, scale, norm)
        return new_state, report._replace(**phase, **sent)

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
        if not 0 <= number < len(phases):
            raise IndexError(f"number must be that of one of {len(phases)} phases, got {number}")

        def grads_of(*args: Any, phase: jax.Array, **kwargs: Any) -> GradResult:
            return self.grads_of(*args, phase=number, **kwargs)

        return dataclasses.replace(self, grads_of=grads_of)

    def _reduce(
        self, result: GradResult, opt_state: Any
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Takes the verdict from local gradients, then reduces them.

        Returns:
          Gradients as `tx` wants them, extra arguments that tell it what is known of them, and
          fields of the report.
        """
        grads, is_judged = result.grads, find_outermost_loss_scale(opt_state) is not None
        if self.reduction is None:
            # A pipeline has reduced by itself, and has taken the verdict before it did.
            if is_judged and result.verdict is not None:
                return grads, {"verdict": Verdict(result.verdict, ())}, {}
            return grads, {}, {}
        axes = self.reduction.axes
        verdict = Verdict(count_nonfinite(grads, axis_names=axes), axes)
        about = {"verdict": verdict} if is_judged else {}
        if find_nodes(opt_state, Zero1State):
            return grads, {**about, "reduce_op": self.reduction.op}, {}
        if find_nodes(opt_state, ReductionState):
            raise ValueError(
                f"tx reduces gradients, and so does train_step(axis_name={axes}): leave all_reduce "
                "out of tx"
            )
        reduced, sent = self.reduction.reduce(grads, jnp.sum(verdict.counts))
        return reduced, about, sent._asdict()

    @jax.named_scope("ampx.update")
    def _apply(
        self, grads: Any, now: TrainState, extra_args: dict[str, Any]
    ) -> tuple[Any, Any, jax.Array | None]:
        """New parameters and optimizer state, and the norm of the gradients if it came along."""
        if can_apply(now.opt_state):
            params, opt_state, report = apply(
                self.tx, grads, now.opt_state, now.params, **extra_args
            )
            return params, opt_state, report.global_norm
        updates, opt_state = self.tx.update(grads, now.opt_state, now.params, **extra_args)
        # float32 gradients must not widen the half moments that half parameters came with.
        opt_state = cast_like(opt_state, now.opt_state)
        return apply_updates(now.params, updates), opt_state, None

    def _report(
        self,
        now: TrainState,
        new_opt_state: Any,
        result: GradResult,
        scale: jax.Array,
        norm: jax.Array | None,
    ) -> StepReport:
        grads = unscale(result.grads, scale)
        if norm is None:
            norm = optax.tree.norm(grads)
        sharded = find_nodes(new_opt_state, Zero1State)
        if sharded:
            norm = sharded[0].gradient_norm
            if self.group_of is not None:
                raise ValueError("local_norm is not known with zero1, which reduces inside tx")
        local_norm = size = None
        if self.group_of is not None:
            local_norm, size = measure_groups(grads, self.group_of)
        return StepReport(
            loss=result.loss,
            overflow=train_states.compare_states(now.opt_state, new_opt_state).skipped,
            loss_scale=scale,
            learning_rate=self._learning_rate(now, new_opt_state),
            global_norm=norm,
            local_norm=local_norm,
            size=size,
            aux=result.aux,
        )

    def _learning_rate(self, now: TrainState, new_opt_state: Any) -> jax.Array | None:
        rate = self.learning_rate
        if rate is None:
            # inject_hyperparams stores the rate it has just used, beside the schedule's own state.
            found = optax.tree.get_all_with_path(
                new_opt_state, "learning_rate", lambda _, value: isinstance(value, jax.Array)
            )
            return found[0][1] if len(found) == 1 else None
        return jnp.asarray(rate(now.step) if callable(rate) else rate, jnp.float32)
