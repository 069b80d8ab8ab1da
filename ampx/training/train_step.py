"""`ampx.train_step`: builds a training step of a loss and an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ampx.accumulation.gradients import Remainder, value_and_grad
from ampx.accumulation.multi_steps import MultiStepsState
from ampx.accumulation.normalization import Normalize
from ampx.checking import (
    as_bool,
    as_number,
    as_positive_int,
    check_hyperparameter,
    check_transformation,
)
from ampx.data_parallel.reduction import Reduction, make_reduction
from ampx.data_parallel.zero1 import Zero1State
from ampx.function_checks import check_callable, refuse_lazy
from ampx.loss_scaling.state import LossScaleState
from ampx.loss_scaling.wrappers import loss_scale as wrap_loss_scale
from ampx.mesh_axes import as_axes
from ampx.model_axes import as_model_axes
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.precision.follow_schedule import follow_schedule
from ampx.precision.opt_levels import Recipe
from ampx.precision.policies import Policy
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.precision.recipe_names import as_recipe
from ampx.training.step_execution import TrainStep
from ampx.training.step_reports import as_group_function
from ampx.trees import find_nodes
from ampx.updates.clipping import clipped
from ampx.updates.extra_args import accept_extra_args


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
    *,
    policy: Policy | Recipe | PrecisionSchedule | str | None = None,
    loss_scale: Any = "policy",
    max_grad_norm: float | None = None,
    num_microbatches: int = 1,
    batch_axes: Any = 0,
    normalize: Normalize = "mean",
    has_aux: bool = False,
    aux_reduction: Any = "auto",
    accumulator_dtype: DTypeLike = jnp.float32,
    remainder: Remainder = "error",
    sparse_rows: Mapping[str, Callable[[Any], jax.Array]] | None = None,
    learning_rate: optax.ScalarOrSchedule | Mapping[str, optax.ScalarOrSchedule] | None = None,
    local_norm: bool | Callable[[str], str] | Any = False,
    axis_name: str | Sequence[str] | None = None,
    bucket_bytes: int | None = None,
    tail_overlap: bool | None = None,
    model_axes: Any = None,
    scatter_gradients: bool = False,
) -> TrainStep:
    """Builds a training step from a loss and an optimizer.

    With its defaults it does what the same lines of optax do, bit for bit.

    Args:
      loss_fn: see `ampx.value_and_grad`. Or what `ampx.pipelining.value_and_grad` returns; the
        arguments that are about gradients are then its own, and not given here.
      tx: any optax transformation, also one that asks for the loss or for a function of it: see
        `TrainStep.__call__`. It may hold its loss scale already. Or several by name, as
        `ampx.dynamic_loss_scale` takes them: the parameters are then a dict with these names, and
        an optimizer whose gradients are bad is skipped alone.
      policy: a `Policy`, a `Recipe`, or a string: `"O2"`, `"p=f32,c=bf16,o=f32"`. Or a
        `PrecisionSchedule`, such as `ampx.precision_schedule("fast|step|0.9", total_steps=1000)`.
      loss_scale: what `ampx.loss_scale` takes, or a function that wraps a transformation, such as
        `functools.partial(ampx.dynamic_loss_scale, growth_interval=100)`. `"policy"` takes the
        opt level's, and adds none where the policy has none.
      max_grad_norm: clip the unscaled gradients by their global norm, before `tx`.
      num_microbatches: see `ampx.value_and_grad`.
      batch_axes: see `ampx.value_and_grad`.
      normalize: see `ampx.value_and_grad`.
      has_aux: see `ampx.value_and_grad`.
      aux_reduction: see `ampx.value_and_grad`.
      accumulator_dtype: see `ampx.value_and_grad`.
      remainder: see `ampx.value_and_grad`.
      sparse_rows: see `ampx.value_and_grad`; made dense once, after accumulation.
      learning_rate: the rate or schedule that `tx` was built with, for the report; a schedule is
        read at the last step that was applied. For several groups a dict from group to rate or
        schedule. Not needed with `optax.inject_hyperparams`, also in groups of `optax.partition`.
      local_norm: report norm and size of every parameter group. True groups by the first component
        of a parameter's path; a function maps the path, joined by "/", to a group. Or a tree of
        group names, a prefix of the parameters: the labels of `optax.partition`.
      axis_name: mapped axes that the batch is split over, inside `shard_map`. Gradients are then
        judged and summed over them, once a step, in buckets, so `tx` must not do it too, unless it
        is an `ampx.zero1`. Under plain `jit` leave it out: arrays are global there. Statistics in a
        model's state stay each device's own, unless `loss_fn` averages them.
      bucket_bytes: see `ampx.bucket_layout`; for `axis_name`.
      tail_overlap: see `ampx.all_reduce`; for `axis_name`.
      model_axes: inside `shard_map` with `check_vma=False`, the mapped axes over which parameters
        are divided: `"model"`, or several names, if all parameters are; else a tree prefix of the
        parameters with a `PartitionSpec`, a name or None for each, as in `in_specs`. Devices then
        agree over these axes too on whether a step is good; the norms of the report, of
        `max_grad_norm` and of `ampx.fused.lamb` and `novograd` are those of the whole parameters;
        and gradients are not summed over an axis that divides their parameter. With
        `check_vma=True` types tell all this. Norms inside transformations of optax itself, such as
        `optax.clip_by_global_norm` in a chain, are those of the shard in either case; but inside
        `ampx.zero1` they are those of the whole.
      scatter_gradients: see `ampx.value_and_grad`; with an `ampx.zero1` as `tx` that is ZeRO-2.

    Returns:
      A `TrainStep`.

    Raises:
      TypeError: for an argument of the wrong kind.
      ValueError: for a number outside its range, or `max_grad_norm` beside several optimizers; at
        `init` for two loss scales, or for `max_grad_norm` around a loss scale.

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
    check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
    if not isinstance(tx, Mapping):
        check_transformation("tx", tx)
    group_of = _as_grouping(local_norm)
    rates = _as_rates(learning_rate)
    if isinstance(loss_fn, PipelineGradients):
        _refuse_options(
            policy=policy,
            num_microbatches=num_microbatches,
            batch_axes=batch_axes,
            normalize=normalize,
            has_aux=has_aux,
            aux_reduction=aux_reduction,
            accumulator_dtype=accumulator_dtype,
            remainder=remainder,
            sparse_rows=sparse_rows,
            axis_name=axis_name,
            bucket_bytes=bucket_bytes,
            tail_overlap=tail_overlap,
            model_axes=model_axes,
            scatter_gradients=scatter_gradients,
        )
        # It decides how parameters are stored, and what happens to the loss scale.
        policy = loss_fn.precision_schedule or loss_fn.recipe
    schedule = None
    if isinstance(policy, PrecisionSchedule):
        # All phases store parameters in one dtype, so any recipe says how.
        schedule, policy = policy, policy.recipes[0]
    recipe = as_recipe(policy)  # None where there is no policy: then nothing is cast
    grads_of = (
        loss_fn
        if isinstance(loss_fn, PipelineGradients)
        else value_and_grad(
            loss_fn,
            num_microbatches=num_microbatches,
            batch_axes=batch_axes,
            policy=schedule or recipe,
            normalize=normalize,
            has_aux=has_aux,
            aux_reduction=aux_reduction,
            accumulator_dtype=accumulator_dtype,
            axis_name=axis_name,
            remainder=remainder,
            sparse_rows=sparse_rows,
            scatter_gradients=scatter_gradients,
            **_choose_scattering(scatter_gradients, bucket_bytes, model_axes),
        )
    )
    reduction = _choose_reduction(axis_name, bucket_bytes, tail_overlap)
    whole_tx = _wrap(tx, max_grad_norm, _choose_loss_scale(loss_scale, recipe, schedule), schedule)
    divided = as_model_axes(model_axes)
    return TrainStep(whole_tx, grads_of, recipe, rates, group_of, reduction, schedule, divided)


def _choose_loss_scale(
    given: Any, recipe: Recipe | None, schedule: PrecisionSchedule | None
) -> Any:
    """The caller's loss scale, or that of the precision."""
    if isinstance(given, str) and given == "policy":
        return getattr(schedule or recipe, "loss_scale", None)
    if given is not None and schedule is not None and schedule.loss_scale != "dynamic":
        raise ValueError(
            f"loss_scale={given!r} would be used in no phase of the schedule '{schedule}': "
            "only those use it whose recipe has loss_scale='dynamic'"
        )
    return given


def _wrap(
    tx: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
    max_grad_norm: float | None,
    loss_scale: Any,
    schedule: PrecisionSchedule | None,
) -> optax.GradientTransformationExtraArgs:
    """Puts around an optimizer, from the inside out: the clip, the loss scale, the schedule.

    In this order the clip sees unscaled gradients, and a schedule can change the loss scale when
    its phase changes.
    """
    if max_grad_norm is not None:
        if isinstance(tx, Mapping):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} is one norm, and tx has several optimizers: clip "
                "inside each, as in {'head': optax.chain(optax.clip_by_global_norm(1.0), adam)}"
            )
        tx = _clip(tx, max_grad_norm)
    tx = accept_extra_args(wrap_loss_scale(loss_scale, tx))
    return follow_schedule(tx, schedule) if schedule else tx


# Where a pipeline has what a step would be given; all others it takes by the same names.
_PLACES_IN_PIPELINES = {
    "num_microbatches": "give it to the schedule, as in ampx.pipelining.one_f_one_b(num_stages, 8)",
    "axis_name": "name the axes of the batch in ampx.pipelining.value_and_grad(data_axes=...)",
    "model_axes": "say how parameters are divided in "
    "ampx.pipelining.value_and_grad(param_specs=...)",
    "scatter_gradients": "leave it out, as its gradients are global arrays. Shardings by "
    "ampx.zero1_specs divide the optimizer's state over the data",
    "batch_axes": "leave it out, as each array of the batch has its rows on axis 0",
    "remainder": "leave it out, as micro-batches and devices must divide the rows",
    "sparse_rows": "leave it out, as it makes no gradients of rows",
}


def _refuse_options(**options: Any) -> None:
    """Refuses arguments about gradients beside a pipeline, which has its own."""
    # The signature is the one place where the defaults stand. "is" comes first: a value such as a
    # tree of strings or an array may have no plain answer to "!=".
    defaults = inspect.signature(train_step).parameters
    for name, value in options.items():
        if value is not defaults[name].default and value != defaults[name].default:
            same = f"give it to ampx.pipelining.value_and_grad({name}=...)"
            raise ValueError(
                f"{name}={value!r} is not for a step over a pipeline, which has made all choices "
                f"about gradients: {_PLACES_IN_PIPELINES.get(name, same)}"
            )


def _choose_scattering(scatter_gradients: Any, bucket_bytes: Any, model_axes: Any) -> Any:
    """Further arguments of `value_and_grad`, which takes them for this alone."""
    is_on = as_bool("scatter_gradients", scatter_gradients)
    return dict(bucket_bytes=bucket_bytes, model_axes=model_axes) if is_on else {}


def _choose_reduction(
    axis_name: str | Sequence[str] | None, bucket_bytes: int | None, tail_overlap: bool | None
) -> Reduction | None:
    # A sum, not a mean: `value_and_grad(axis_name=...)` has divided each device's gradients by the
    # weight of all devices, so that devices with more tokens count for more.
    if axes := as_axes(axis_name, may_be_empty=True):
        return make_reduction(axes, op="sum", bucket_bytes=bucket_bytes, tail_overlap=tail_overlap)
    tail_overlap = None if tail_overlap is None else as_bool("tail_overlap", tail_overlap)
    if bucket_bytes is not None:
        bucket_bytes = as_positive_int("bucket_bytes", bucket_bytes)
    for name, value in (("tail_overlap", tail_overlap), ("bucket_bytes", bucket_bytes)):
        if value:
            raise ValueError(
                f"{name}={value} without axis_name: there is no reduction to overlap; name the "
                "mapped axes that the batch is split over"
            )
    return None


def _clip(
    tx: optax.GradientTransformation, max_grad_norm: float
) -> optax.GradientTransformationExtraArgs:
    # Infinity clips nothing, and the norm is measured all the same.
    max_grad_norm = as_number(
        "max_grad_norm", max_grad_norm, above=0, may_be_infinite=True, fix="None is off"
    )
    clipping = clipped(tx, max_grad_norm)

    # Both mistakes are seen only in the state, whose structure tells what is inside `tx`.
    def init(params: optax.Params) -> optax.OptState:
        state = clipping.init(params)
        if find_nodes(state, Zero1State):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} around zero1 would clip gradients that are not "
                "reduced yet: clip inside, as in "
                "zero1(optax.chain(optax.clip_by_global_norm(1.0), optimizer), axis_name)"
            )
        windows = (MultiStepsState, optax.MultiStepsState)
        if any(find_nodes(state, kind) for kind in windows):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} around steps that are added up would clip the "
                "gradients of each call, and not their mean: clip inside, as in multi_steps("
                "optax.chain(optax.clip_by_global_norm(1.0), optimizer), k), or add up micro-"
                "batches of one call by num_microbatches=k"
            )
        if find_nodes(state, LossScaleState):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} around a loss scale would clip scaled gradients: "
                "leave the loss scale to train_step(loss_scale=...), or clip inside it, as in "
                "dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))"
            )
        return state

    return optax.GradientTransformationExtraArgs(init, clipping.update)


def _as_rates(learning_rate: Any) -> Any:
    """Checks a rate, or those of several groups, and makes these hashable: pairs in a tuple.

    `jax.jit` hashes a `TrainStep`, which is the function that it compiles.
    """
    if learning_rate is None:
        return None
    if isinstance(learning_rate, Mapping) and learning_rate:
        named = learning_rate.items()
        return tuple((group, _as_rate(f"learning_rate[{group!r}]", rate)) for group, rate in named)
    return _as_rate("learning_rate", learning_rate)


def _as_rate(name: str, rate: Any) -> Any:
    """A rate or schedule as it is, a number in an array as Python's."""
    check_hyperparameter(name, rate, may_be_schedule=True)
    is_known = isinstance(rate, jax.Array | np.ndarray) and not isinstance(rate, jax.core.Tracer)
    return as_number(name, rate) if is_known else rate


def _as_grouping(local_norm: Any) -> Callable[[str], str] | None:
    """A function from a parameter's path to its group, or None for no groups."""
    if callable(local_norm):
        refuse_lazy("local_norm", local_norm)
        return local_norm
    names = jax.tree.leaves(local_norm)
    # A word alone would be one group for all, or more likely a slip.
    is_tree = bool(names) and not jax.tree_util.all_leaves([local_norm])
    if is_tree and all(isinstance(name, str) for name in names):
        return as_group_function(local_norm)
    what = "local_norm, if it is no function and no tree of group names,"
    # True stands for a grouping by the first name in a path, as of the layers of a model.
    return _first_component if as_bool(what, local_norm) else None


def _first_component(path: str) -> str:
    return path.split("/")[0]
