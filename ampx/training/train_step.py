"""One training step: precision, loss scale, micro-batches and optimizer put together."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.accumulation.gradients import Remainder, value_and_grad
from ampx.accumulation.normalization import Normalize
from ampx.accumulation.results import GradResult
from ampx.accumulation.sparse_rows import densify
from ampx.checking import check_transformation
from ampx.data_parallel.reduction import Reduction, ReductionState, make_reduction
from ampx.data_parallel.zero1 import Zero1State
from ampx.fused.application import apply, can_apply
from ampx.loss_scaling.nonfinite import Verdict, count_nonfinite, unscale
from ampx.loss_scaling.state import LossScaleState, current_loss_scale, find_outermost_loss_scale
from ampx.loss_scaling.wrappers import loss_scale as choose_loss_scale
from ampx.mesh_axes import as_axes
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.precision.follow_schedule import follow_schedule, precision_phase
from ampx.precision.opt_levels import Recipe, as_recipe
from ampx.precision.policies import Policy
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.training import train_states
from ampx.training.step_reports import StepReport, local_norms
from ampx.training.train_states import TrainState
from ampx.trees import cast_like, find_nodes
from ampx.updates.applying import apply_updates
from ampx.updates.clipping import clipped


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
        return train_states.placed_beside(params, state)

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
        now = train_states.read(state, self.tx)
        next_key = now.key
        if key is None and now.key is not None:
            next_key, key = jax.random.split(now.key)
        train_states.check_loss_scale_is_outermost(now.opt_state)
        scale = current_loss_scale(now.opt_state)
        is_nnx, norm = train_states.is_nnx_pair(state), None
        wrt = state[1].wrt if is_nnx else None
        about: dict[str, Any] = {}
        if self.schedule is not None:
            about["phase"] = precision_phase(now.opt_state)
        result = self.grads_of(
            now.params,
            batch,
            loss_scale=scale,
            key=key,
            model_state=now.model_state,
            wrt=wrt,
            **about,
        )
        grads = densify(result.grads)
        extra_args: dict[str, Any] = {"weight": result.weight}
        if about:
            extra_args["value"] = result.loss
        if self.reduction is not None:
            grads, of_reduction, sent = _reduced(self.reduction, grads, now.opt_state)
            extra_args |= of_reduction
            about |= sent
        elif result.verdict is not None and find_outermost_loss_scale(now.opt_state) is not None:
            extra_args["verdict"] = Verdict(result.verdict, ())
        if is_nnx:
            with jax.named_scope("ampx.update"):
                new_state = train_states.apply_to_nnx(state, grads, result.model_state, extra_args)
            new_opt_state = train_states.read(new_state, self.tx).opt_state
        else:
            params, new_opt_state, norm = self._applied(grads, now, extra_args)
            following = train_states.advance(
                now, params, new_opt_state, next_key, result.model_state
            )
            new_state = train_states.write(state, following)
        result = result._replace(grads=grads)
        report = self._report(now, new_opt_state, result, scale, norm)
        return new_state, report._replace(**about)

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

    @jax.named_scope("ampx.update")
    def _applied(
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
            local_norm, size = local_norms(grads, self.group_of)
        return StepReport(
            loss=result.loss,
            overflow=train_states.outcome(now.opt_state, new_opt_state).skipped,
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


def _reduced(
    reduction: Reduction, grads: Any, opt_state: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Gradients as `tx` wants them, what it should know of them, and what the report tells."""
    axes = reduction.axes
    verdict = Verdict(count_nonfinite(grads, axis_names=axes), axes)
    judges = find_outermost_loss_scale(opt_state) is not None
    about = {"verdict": verdict} if judges else {}
    if find_nodes(opt_state, Zero1State):
        return grads, {**about, "reduce_op": reduction.op}, {}
    if find_nodes(opt_state, ReductionState):
        raise ValueError(
            f"tx reduces gradients, and so does train_step(axis_name={axes}): leave all_reduce "
            "out of tx"
        )
    reduced, sent = reduction.reduce(grads, jnp.sum(verdict.counts))
    return reduced, about, sent._asdict()


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    policy: Policy | Recipe | PrecisionSchedule | str | None = None,
    loss_scale: Any = "policy",
    max_grad_norm: float | None = None,
    num_microbatches: int = 1,
    normalize: Normalize = "mean",
    has_aux: bool = False,
    aux_reduction: Any = "mean",
    accumulator_dtype: DTypeLike = jnp.float32,
    remainder: Remainder = "error",
    sparse_rows: Mapping[str, Callable[[Any], jax.Array]] | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    local_norm: bool | Callable[[str], str] = False,
    axis_name: str | Sequence[str] | None = None,
    bucket_bytes: int | None = None,
    tail_overlap: bool | None = None,
) -> TrainStep:
    """Builds a training step from a loss and an optimizer.

    With its defaults it does what the same lines of optax do, bit for bit.

    Args:
      loss_fn: see `ampx.value_and_grad`. Or what `ampx.pipelining.value_and_grad` returns; the
        arguments that are about gradients are then its own, and not given here.
      tx: any optax transformation. It may hold its loss scale already.
      policy: a `Policy`, a `Recipe`, or a string: `"O2"`, `"p=f32,c=bf16,o=f32"`. Or a
        `PrecisionSchedule`, such as `ampx.precision_schedule("fast|step|0.9", total_steps=1000)`.
      loss_scale: what `ampx.loss_scale` takes, or a function that wraps a transformation, such as
        `functools.partial(ampx.dynamic_loss_scale, growth_interval=100)`. `"policy"` takes the
        opt level's, and adds none where the policy has none.
      max_grad_norm: clip the unscaled gradients by their global norm, before `tx`.
      num_microbatches: see `ampx.value_and_grad`.
      normalize: see `ampx.value_and_grad`.
      has_aux: see `ampx.value_and_grad`.
      aux_reduction: see `ampx.value_and_grad`.
      accumulator_dtype: see `ampx.value_and_grad`.
      remainder: see `ampx.value_and_grad`.
      sparse_rows: see `ampx.value_and_grad`; made dense once, after accumulation.
      learning_rate: the rate or schedule that `tx` was built with, for the report; schedules are
        read at the number of applied steps. Not needed with `optax.inject_hyperparams`.
      local_norm: report norm and size of every parameter group. True groups by the first component
        of a parameter's path; a function maps the path, joined by "/", to a group.
      axis_name: mapped axes that the batch is split over, inside `shard_map`. Gradients are then
        judged and summed over them, once a step, in buckets, so `tx` must not do it too, unless it
        is an `ampx.zero1`. Under plain `jit` leave it out: arrays are global there. Statistics in a
        model's state stay each device's own, unless `loss_fn` averages them.
      bucket_bytes: see `ampx.bucket_layout`; for `axis_name`.
      tail_overlap: see `ampx.all_reduce`; for `axis_name`.

    Returns:
      A `TrainStep`.

    Raises:
      TypeError: if `loss_fn`, `tx`, `policy` or `loss_scale` is of the wrong kind.
      ValueError: for a number outside its range; at `init` for two loss scales, or for
        `max_grad_norm` around a loss scale.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> step = ampx.train_step(loss_fn, optax.sgd(0.1), loss_scale="dynamic", max_grad_norm=1.0)
      >>> state = step.init({"w": jnp.zeros((2, 1))})
      >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))}
      >>> state, report = jax.jit(step)(state, batch)
      >>> print(report.loss, report.loss_scale, report.overflow)
      1.0 65536.0 False
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    check_transformation("tx", tx)
    if not isinstance(local_norm, bool) and not callable(local_norm):
        raise TypeError(f"local_norm must be a bool or a function, got {local_norm!r}")
    if isinstance(loss_fn, PipelineGradients):
        _refuse_options(
            policy=policy,
            num_microbatches=num_microbatches,
            normalize=normalize,
            has_aux=has_aux,
            aux_reduction=aux_reduction,
            accumulator_dtype=accumulator_dtype,
            remainder=remainder,
            sparse_rows=sparse_rows,
            axis_name=axis_name,
            bucket_bytes=bucket_bytes,
            tail_overlap=tail_overlap,
        )
        policy = loss_fn.recipe
    schedule = None
    if isinstance(policy, PrecisionSchedule):
        schedule, policy = policy, policy.recipes[0]
    recipe = as_recipe(policy)
    if isinstance(loss_scale, str) and loss_scale == "policy":
        loss_scale = getattr(schedule or recipe, "loss_scale", None)
    elif loss_scale is not None and schedule is not None and schedule.loss_scale != "dynamic":
        raise ValueError(
            f"loss_scale={loss_scale!r} would be used in no phase of the schedule '{schedule}': "
            "only those use it whose recipe has loss_scale='dynamic'"
        )
    if max_grad_norm is not None:
        if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, int | float):
            raise TypeError(f"max_grad_norm must be a number or None, got {max_grad_norm!r}")
        if not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}: None is off")
        tx = _clipped(tx, max_grad_norm)
    grads_of = (
        loss_fn
        if isinstance(loss_fn, PipelineGradients)
        else value_and_grad(
            loss_fn,
            num_microbatches=num_microbatches,
            policy=schedule or recipe,
            normalize=normalize,
            has_aux=has_aux,
            aux_reduction=aux_reduction,
            accumulator_dtype=accumulator_dtype,
            axis_name=axis_name,
            remainder=remainder,
            sparse_rows=sparse_rows,
        )
    )
    group_of = _first_component if local_norm is True else (local_norm or None)
    tx = optax.with_extra_args_support(choose_loss_scale(loss_scale, tx))
    tx = follow_schedule(tx, schedule) if schedule else tx
    reduction = _reduction(axis_name, bucket_bytes, tail_overlap)
    return TrainStep(tx, grads_of, recipe, learning_rate, group_of, reduction, schedule)


def _refuse_options(**options: Any) -> None:
    defaults = inspect.signature(train_step).parameters
    for name, value in options.items():
        if value is not defaults[name].default and value != defaults[name].default:
            raise ValueError(
                f"{name}={value!r} belongs to the pipeline: give it to "
                "ampx.pipelining.value_and_grad, or leave it out if it has no such argument"
            )


def _reduction(
    axis_name: str | Sequence[str] | None, bucket_bytes: int | None, tail_overlap: bool | None
) -> Reduction | None:
    if axes := as_axes(axis_name, may_be_empty=True):
        return make_reduction(axes, op="sum", bucket_bytes=bucket_bytes, tail_overlap=tail_overlap)
    for name, value in (("tail_overlap", tail_overlap), ("bucket_bytes", bucket_bytes)):
        if value:
            raise ValueError(
                f"{name}={value} without axis_name: there is no reduction to overlap; name the "
                "mapped axes that the batch is split over"
            )
    return None


def _clipped(
    tx: optax.GradientTransformation, max_grad_norm: float
) -> optax.GradientTransformationExtraArgs:
    clipping = clipped(tx, max_grad_norm)

    def init(params: optax.Params) -> optax.OptState:
        state = clipping.init(params)
        if find_nodes(state, Zero1State):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} around zero1 would clip gradients that are not "
                "reduced yet: clip inside, as in "
                "zero1(optax.chain(optax.clip_by_global_norm(1.0), optimizer), axis_name)"
            )
        if find_nodes(state, LossScaleState):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} around a loss scale would clip scaled gradients: "
                "leave the loss scale to train_step(loss_scale=...), or clip inside it, as in "
                "dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))"
            )
        return state

    return optax.GradientTransformationExtraArgs(init, clipping.update)


def _first_component(path: str) -> str:
    return path.split("/")[0]
