"""`ampx.pipelining.value_and_grad`: loss and gradients of a model that is divided over devices.

Here is what a caller may ask for, and the checks of it that need no parameters. What is asked for
is put together in `ampx.pipelining.shard_map_program`, and run by `ampx.pipelining.runtime`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ampx.accumulation.normalization import Normalize
from ampx.checking import as_bool, as_dtype, as_int, check_choice
from ampx.data_parallel.reduction import make_reduction
from ampx.mesh_axes import as_axes, axes_of_spec, is_spec
from ampx.pipelining.model_parts import PARTS
from ampx.pipelining.runtime.models import Model
from ampx.pipelining.schedules.intervals import Edge
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.ticks import Stash
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.precision.opt_levels import Recipe
from ampx.precision.policies import Policy
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.precision.recipe_names import as_recipe
from ampx.trees import path_name


def value_and_grad(
    *,
    first: Callable[..., Any],
    stage: Callable[..., Any] | Sequence[Callable[..., Any]],
    last: Callable[..., Any],
    schedule: Schedule,
    axis_name: str,
    data_axes: str | Sequence[str] = (),
    mesh: Mesh | None = None,
    policy: Policy | Recipe | PrecisionSchedule | str | None = None,
    normalize: Normalize = "weights",
    has_aux: bool = False,
    has_aux_loss: bool = False,
    aux_reduction: Any = "auto",
    stash: Stash | Callable[..., Any] = "inputs",
    skips: Mapping[str, Edge] | None = None,
    layers_per_stage: Sequence[int] | None = None,
    param_specs: Mapping[str, Any] | None = None,
    accumulator_dtype: DTypeLike = jnp.float32,
    check_vma: bool = True,
    bucket_bytes: int | None = None,
    tail_overlap: bool | None = None,
) -> PipelineGradients:
    """`ampx.value_and_grad` for a model whose layers are divided over devices.

    A batch is divided into micro-batches. They pass through `first`, all layers and `last`, from
    one device to the next, forward and back again, in the order that the schedule says.

    The parameters are a dict: `"stages"` has leaves with a leading axis of layers; `"first"` and
    `"last"` belong to what comes before and after the layers; `"shared"` is read by both, as a tied
    embedding is. All but `"stages"` may be left out. They keep this layout whatever the schedule
    and the number of devices. Leaves that are not floating are read and not trained; random keys
    among them, as those of nnx streams, are folded with a number drawn by the key of the call.

    Args:
      first: `first(params["first"], params["shared"], microbatch, key) -> x`, any pytree.
      stage: one layer, `stage(layer_params, x, key) -> x` of the same type. Or, for stages that
        differ, a sequence of functions, one for each stage of the schedule: `params["stages"]`
        is then a list of trees, and what stages pass on may differ in shape.
      last: `last(params["last"], params["shared"], x, microbatch, key)`, which returns the pair
        (sum of losses, sum of weights) of a micro-batch, or what `normalize` asks for.
      schedule: from `ampx.pipelining.one_f_one_b` or another such function; its number of
        micro-batches must divide the number of rows that each data shard has.
      axis_name: the mesh axis of the stages, as many devices as the schedule has.
      data_axes: mesh axes that the batch is split over. Other axes of the mesh are left to the
        compiler, as under `jit`.
      mesh: by default the one of `jax.set_mesh`.
      policy: see `ampx.value_and_grad`. Parameters are cast once a step. With a
        `PrecisionSchedule`, `g` takes the argument `phase=ampx.precision_phase(opt_state)`.
      normalize: see `ampx.value_and_grad`.
      has_aux: whether `last` returns auxiliary output after its value: a tree of numbers.
      has_aux_loss: whether `stage` returns `(x, loss)`: a float32 scalar, such as a router's, in
        the unit of what `last` returns, to which it is added.
      aux_reduction: `"mean"` or `"sum"` over micro-batches and devices, `"concat"` for the rows of
        the batch in their order, or `"auto"`: see `ampx.value_and_grad`.
      stash: what a stage keeps of a micro-batch between its forward and its backward: `"inputs"`
        recomputes all else; `"residuals"` only what a few instructions an element make of kept
        values; a policy of `jax.checkpoint_policies` says what each layer keeps. `first` and
        `last` are recomputed.
      skips: connections between stages that differ, `{name: (source, target)}`. The source returns
        `(x, {name: value})`, the target takes `{name: value}` after its key. Values go from device
        to device directly.
      layers_per_stage: how many layers each stage has, as `ampx.pipelining.balance` gives them.
        Equally many by default. 0 is a stage that hands on what it is given. If the devices do
        not divide the number of all layers, every device has to hold them all, and their optimizer
        state.
      param_specs: `PartitionSpec`s for parts of `params` (a tree prefix for each part) that name
        further axes, over which `first`, `stage` and `last` may use collectives, or data axes: as
        fully sharded parameters, which are gathered in the stage, and experts are divided. The
        first entry for `"stages"` is `axis_name`.
      accumulator_dtype: dtype in which gradients of micro-batches are added; that of the gradients
        where that is wider.
      check_vma: see `jax.shard_map`. Collectives over axes of `param_specs` have the same gradients
        with and without it: the gradient of a sum is not summed again, also not by a rule of your
        own, such as Megatron's f and g. False admits loops that begin with constants.
      bucket_bytes: see `ampx.bucket_layout`.
      tail_overlap: see `ampx.all_reduce`.

    Returns:
      A `PipelineGradients`: `g(params, batch, *, loss_scale=1.0, key=None) -> GradResult`.

    Raises:
      TypeError: if a function or the schedule is of the wrong kind.
      ValueError: for a schedule that is not valid or has no backward, or an argument outside its
        choices; when it is called, for a collective over `axis_name` in a stage, which would hang.

    References:
      Huang et al., GPipe, https://arxiv.org/abs/1811.06965; Narayanan et al., Megatron-LM,
      https://arxiv.org/abs/2104.04473; Qi et al., Zero Bubble, https://arxiv.org/abs/2401.10241.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> grads_of = ampx.pipelining.value_and_grad(
      ...     first=lambda p, shared, batch, key: batch["x"] @ p,
      ...     stage=lambda p, x, key: x + jnp.tanh(x @ p),
      ...     last=lambda p, shared, x, batch, key: (
      ...         jnp.sum((x - batch["y"]) ** 2),
      ...         jnp.float32(len(x)),
      ...     ),
      ...     schedule=ampx.pipelining.one_f_one_b(1, 4),
      ...     axis_name="stage",
      ...     mesh=jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,)),
      ... )
      >>> params = {"first": jnp.eye(2), "stages": jnp.zeros((3, 2, 2))}
      >>> batch = {"x": jnp.ones((8, 2)), "y": jnp.zeros((8, 2))}
      >>> result = jax.jit(grads_of)(params, batch)
      >>> print(result.loss, result.grads["stages"].shape, result.weight)
      2.0 (3, 2, 2) 8.0
    """
    _check_schedule(schedule)
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be the name of one mesh axis, got {axis_name!r}")
    for name, value in (("skips", skips), ("param_specs", param_specs)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping, got {value!r}")
    _check_specs(dict(param_specs or {}), axis_name, is_stacked=callable(stage))
    for kind in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", kind, ("auto", "mean", "sum", "concat"))
    check_choice("normalize", normalize, get_args(Normalize))
    phases = None
    if isinstance(policy, PrecisionSchedule):
        phases, policy = policy, policy.recipes[0]
    recipe = as_recipe(policy)
    model = Model(
        first=first,
        # A tuple, like the dict and the tuples below: what a caller changes later has no effect.
        stage=tuple(stage) if isinstance(stage, Sequence) else stage,
        last=last,
        schedule=schedule,
        recipe=recipe,
        normalize=normalize,
        has_aux=as_bool("has_aux", has_aux),
        has_aux_loss=as_bool("has_aux_loss", has_aux_loss),
        stash=stash,
        skips=dict(skips or {}),
    )
    data = as_axes(data_axes, "data_axes", may_be_empty=True)
    if axis_name in data:
        raise ValueError(f"{axis_name!r} is the axis of the stages: leave it out of data_axes")

    # Sums, never means: gradients are divided by the weight of the whole batch before. Each device
    # has gradients for its own layers, so those are summed over the data axes alone; those of the
    # ends over the stage axis, too.
    over_all = make_reduction(
        (axis_name, *data), op="sum", bucket_bytes=bucket_bytes, tail_overlap=tail_overlap
    )
    return PipelineGradients(
        schedule=schedule,
        recipe=recipe,
        precision_schedule=phases,
        model=model,
        axis_name=axis_name,
        data_axes=data,
        mesh=mesh,
        aux_reduction=aux_reduction,
        accumulator_dtype=as_dtype("accumulator_dtype", accumulator_dtype, "sum"),
        layers_per_stage=None if layers_per_stage is None else _as_counts(layers_per_stage),
        param_specs=param_specs,
        check_vma=as_bool("check_vma", check_vma),
        reductions=(dataclasses.replace(over_all, axes=data), over_all),
    )


def _check_schedule(schedule: Any) -> None:
    """Raises unless this is a schedule with backwards that runs to its end."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            "schedule must be a Schedule, such as ampx.pipelining.one_f_one_b(4, 32), got "
            f"{type(schedule).__name__}"
        )
    # A faulty schedule could make devices wait for ever, or leave out gradients silently.
    schedule.validate()
    if not schedule.has_backward:
        raise ValueError(
            f"the schedule {schedule.name!r} has no backward: there are no gradients. Use another, "
            "such as one_f_one_b; value(...) of the result runs its forwards alone"
        )


def _check_specs(param_specs: dict[str, Any], axis_name: str, *, is_stacked: bool) -> None:
    """Raises unless these are specs of parts, of which the layers alone lie along the stages."""
    if unknown := set(param_specs) - set(PARTS):
        raise ValueError(f"param_specs has {sorted(unknown)}: the parts of params are {PARTS}")
    for path, spec in jax.tree_util.tree_leaves_with_path(param_specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise TypeError(
                f"param_specs must hold PartitionSpecs, such as P('stage'), got {spec!r}"
            )
        name, is_ends = path_name(path), path[0].key != "stages"
        if is_ends and axis_name in axes_of_spec(spec):
            raise ValueError(
                f"param_specs divides {name!r} over the axis {axis_name!r} of the stages, as "
                f"{spec}: devices along it run different stages, and cannot exchange such parts in "
                "one. Divide it over another axis, such as one of data_axes"
            )
        entries = tuple(spec)
        is_first_alone = entries[:1] == (axis_name,) and axis_name not in axes_of_spec(P(*spec[1:]))
        if is_stacked and not is_ends and not is_first_alone:
            raise ValueError(
                f"param_specs has {spec} for {name!r}: its first entry divides the layers over the "
                f"stages, so it must be {axis_name!r} alone, as in {P(axis_name, *entries[1:])}"
            )


def _as_counts(layers_per_stage: Any) -> tuple[int, ...]:
    if isinstance(layers_per_stage, str) or not isinstance(layers_per_stage, Iterable):
        raise TypeError(
            "layers_per_stage must be a sequence of ints, as ampx.pipelining.balance gives it, got "
            f"{layers_per_stage!r}"
        )
    return tuple(as_int("layers_per_stage", count) for count in layers_per_stage)
