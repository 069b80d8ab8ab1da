"""Loss and gradients of a model that is divided over devices, stage by stage.

Parameters and gradients are global arrays in the layout of the model. One `shard_map` program runs
the schedule and what has to be agreed on: the weight, the verdict, the sums over devices. What
follows (loss scale, clipping, optimizer) therefore need not know of stages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from ampx.accumulation import GradResult, batch_size, rows_of_microbatches
from ampx.checking import check_choice
from ampx.normalization import Normalize, normalized
from ampx.opt_levels import Recipe, as_recipe
from ampx.pipelining.assembly import assemble
from ampx.pipelining.executor import Executor, Totals
from ampx.pipelining.layouts import Layout, separate_layout, stacked_layout
from ampx.pipelining.lowering import Edge
from ampx.pipelining.models import Model
from ampx.pipelining.parameters import stage_parameters
from ampx.pipelining.resharding import axes_of, is_spec, placed
from ampx.pipelining.schedules import Schedule
from ampx.precision import Policy
from ampx.reduction import Reduction, checked_reduction
from ampx.trees import path_name
from ampx.verdicts import count_nonfinite, is_floating, varying

PARTS = ("first", "stages", "last", "shared")
Stash = Literal["inputs", "residuals"]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineGradients:
    """A function `g(params, batch, *, loss_scale=1.0, key=None) -> GradResult`.

    Made by `ampx.pipelining.value_and_grad`; call it under `jax.jit`, or give it to
    `ampx.train_step` in the place of a loss.

    Attributes:
      schedule: what it runs.
      recipe: the precision of its stages, or None.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> grads_of = ampx.pipelining.value_and_grad(
      ...     first=lambda p, shared, batch, key: batch,
      ...     stage=lambda p, x, key: x * p,
      ...     last=lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(x.size)),
      ...     schedule=ampx.pipelining.one_f_one_b(1, 2),
      ...     axis_name="stage",
      ...     mesh=jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,)),
      ... )
      >>> params = {"stages": jnp.array([2.0, 3.0])}
      >>> result = jax.jit(grads_of)(params, jnp.ones(4))
      >>> print(result.loss, result.grads["stages"])
      6.0 [3. 2.]
      >>> print(grads_of.value(params, jnp.ones(4)).loss)
      6.0
    """

    schedule: Schedule
    recipe: Recipe | None
    model: Model = dataclasses.field(repr=False)
    axis_name: str
    data_axes: tuple[str, ...]
    mesh: Mesh | None
    aux_reduction: Any
    accumulator_dtype: Any
    layers_per_stage: tuple[int, ...] | None
    param_specs: Any
    check_vma: bool
    reductions: tuple[Reduction, Reduction] = dataclasses.field(repr=False)

    def __call__(
        self,
        params: Any,
        batch: Any,
        *,
        loss_scale: ArrayLike = 1.0,
        key: jax.Array | None = None,
        model_state: Any = None,
        wrt: Any = None,
    ) -> GradResult:
        """Loss and gradients.

        Args:
          params: see `ampx.pipelining.value_and_grad`.
          batch: a pytree of arrays with a leading batch axis.
          loss_scale: multiplies the loss before it is differentiated.
          key: a random key. Each part of the data gets its own, of that each micro-batch, and of
            that each layer: the same for every schedule and number of stages.
          model_state: not supported.
          wrt: not supported.

        Returns:
          A `GradResult`: gradients like `params`, float32, still times the loss scale, complete on
          all devices; `verdict` is what was found in them before they were summed.

        Raises:
          TypeError: if `params` is not a dict of such parts, or stages do not fit together.
          ValueError: for a batch, layers or a mesh that the schedule does not divide; for a state.
        """
        if model_state is not None:
            raise ValueError(
                "a pipeline has no model_state: batch statistics would depend on the order of "
                "micro-batches. Use LayerNorm, RMSNorm or GroupNorm, or freeze the statistics"
            )
        if wrt is not None:
            raise TypeError("a pipeline takes a dict of parameters, not an nnx module")
        return self._run(self.model, params, batch, jnp.asarray(loss_scale, jnp.float32), key)

    def value(self, params: Any, batch: Any, *, key: jax.Array | None = None) -> GradResult:
        """The loss alone, by the forward actions of the schedule.

        Args:
          params: as above.
          batch: as above.
          key: as above.

        Returns:
          A `GradResult` whose `grads` and `verdict` are None.
        """
        rows = tuple(tuple(a for a in row if a and a.kind == "F") for row in self.schedule.rows)
        forward = dataclasses.replace(self.schedule, rows=rows, has_backward=False).aligned()
        model = dataclasses.replace(self.model, schedule=forward)
        return self._run(model, params, batch, jnp.ones((), jnp.float32), key)

    def observed(
        self,
        params: Any,
        batch: Any,
        observe: Callable[[Executor], None],
        *,
        key: jax.Array | None = None,
    ) -> GradResult:
        """The same as a call, for `ampx.pipelining.plan`: tells `observe` of the executor."""
        scale = jnp.ones((), jnp.float32)
        return self._run(self.model, params, batch, scale, key, observe)

    def shardings(self, params: Any, mesh: Mesh | None = None) -> Any:
        """Where parameters, and an optimizer's state of the same shapes, should lie.

        Args:
          params: the parameters, or their shapes.
          mesh: by default the one given to `value_and_grad`.

        Returns:
          A tree of `NamedSharding` for `jax.device_put`: layers divided over the stages, the rest
          on every device. Layers that stages share unequally are on every device, too.
        """
        specs = self._specs(self._layout(self.model, params["stages"]).is_divided)
        mesh = mesh or self.mesh
        if mesh is None:
            raise ValueError("shardings needs a mesh: give it here or to value_and_grad")
        whole = {part: specs[part] for part in params}
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec), part),
            whole,
            dict(params),
            is_leaf=is_spec,
        )

    def _run(
        self,
        model: Model,
        params: Any,
        batch: Any,
        scale: jax.Array,
        key: jax.Array | None,
        observe: Callable[[Executor], None] | None = None,
    ) -> GradResult:
        if scale.shape:
            raise ValueError(f"loss_scale must be a scalar, got shape {scale.shape}")
        mesh = self._checked_mesh()
        _check_params(params)
        parts = {part: params.get(part) for part in PARTS}
        computed = parts if self.recipe is None else self.recipe.half_params(parts)
        layout = self._layout(model, computed["stages"])
        self._check_batch(batch)
        specs = self._specs(True)
        kinds = model.kinds(layout)

        def local(params: Any, batch: Any, key: Any, scale: jax.Array) -> GradResult:
            for axis in self.data_axes:
                key = key if key is None else jax.random.fold_in(key, lax.axis_index(axis))
            own = (self.axis_name, *self.data_axes)
            params, batch, key, scale = varying((params, batch, key, scale), own)
            executor = assemble(
                model.schedule,
                kinds,
                model.wires,
                stage_parameters(
                    params | {"stages": layout.local(params["stages"], self.axis_name)},
                    layout,
                    kinds,
                    self.accumulator_dtype,
                ),
                rows_of_microbatches(batch, model.schedule.num_microbatches),
                key,
                scale,
                self.axis_name,
            )
            if observe is not None:
                observe(executor)
            return self._finished(executor.run(), layout)

        out_specs: Any = (P(), specs if model.schedule.has_backward else None, P(), P(), P(), P())
        place = functools.partial(placed, mesh=self.mesh, axes=self._axes)
        in_specs = (specs, P(self.data_axes or None), P(), P())
        stored_as = specs["stages"]
        if not layout.is_divided:
            stored_as = jax.tree.map(lambda spec: P(None, *spec[1:]), stored_as, is_leaf=is_spec)
        arranged = layout.arranged(place(computed["stages"], stored_as))
        result = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=GradResult(*out_specs),
            axis_names=set(self._axes),
            check_vma=self.check_vma,
        )(*place((computed | {"stages": arranged}, batch, key, scale), in_specs))
        if not model.schedule.has_backward:
            return result
        stages = layout.restored(place(result.grads["stages"], stored_as), parts["stages"])
        grads = {part: (result.grads | {"stages": stages})[part] for part in params}
        return result._replace(grads=grads)

    def _finished(self, totals: Totals, layout: Layout) -> GradResult:
        """Sums over devices: of the loss and the weight, then the verdict, then the gradients."""
        losses, weights, aux = lax.psum(totals.results, self.axis_name)
        loss, grads, weight, aux = normalized(
            totals.grads,
            losses,
            weights,
            aux,
            self.model.normalize,
            self.aux_reduction,
            self.data_axes,
            None,
        )
        if grads is None:
            return GradResult(loss, None, weight, aux)
        verdict = count_nonfinite(grads, axis_names=self._axes)
        over_data, over_all = self.reductions
        first = jnp.sum(verdict)
        stages = layout.returned(grads["stages"], self.axis_name)
        stages = over_data(stages, first) if over_data.axes else stages
        rest = over_all({part: grads[part] for part in grads if part != "stages"}, first)
        return GradResult(loss, rest | {"stages": stages}, weight, aux, None, verdict)

    def _layout(self, model: Model, stages: Any) -> Layout:
        if model.is_separate:
            return separate_layout(model.schedule, stages)
        return stacked_layout(model.schedule, stages, self.layers_per_stage)

    def _specs(self, is_divided: bool) -> dict[str, Any]:
        stages = P(self.axis_name) if is_divided else P()
        return dict.fromkeys(PARTS, P()) | {"stages": stages} | dict(self.param_specs or {})

    @property
    def _axes(self) -> tuple[str, ...]:
        """All axes that the program maps."""
        named = [
            axis
            for spec in jax.tree.leaves(self.param_specs, is_leaf=is_spec)
            for entry in spec
            for axis in axes_of(entry)
        ]
        return tuple(dict.fromkeys((self.axis_name, *self.data_axes, *named)))

    def _checked_mesh(self) -> Mesh | None:
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "no mesh: give value_and_grad mesh=..., or call it under jax.set_mesh(mesh)"
            )
        for axis in self._axes:
            if axis not in mesh.shape:
                raise ValueError(f"the mesh has axes {mesh.axis_names}, and none named {axis!r}")
        size, wanted = mesh.shape[self.axis_name], self.schedule.num_devices
        if size != wanted:
            raise ValueError(
                f"the schedule is for {wanted} devices, and the mesh has {size} along "
                f"{self.axis_name!r}"
            )
        return self.mesh

    def _check_batch(self, batch: Any) -> None:
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        parts = math.prod(mesh.shape[axis] for axis in self.data_axes)
        rows, count = batch_size(batch), self.schedule.num_microbatches
        if rows % (parts * count):
            raise ValueError(
                f"a batch of {rows} rows is not divisible by {parts * count}, the {count} "
                f"micro-batches of the schedule times {parts} devices along data_axes="
                f"{self.data_axes}: choose another number of rows or micro-batches"
            )


def _check_params(params: Any) -> None:
    if not isinstance(params, Mapping) or "stages" not in params or set(params) - set(PARTS):
        found = list(params) if isinstance(params, Mapping) else type(params).__name__
        raise TypeError(
            f"params must be a dict with 'stages' and any of 'first', 'last', 'shared', got {found}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(params)):
        if not is_floating(leaf):
            raise TypeError(
                f"the parameter {path_name(path)} has dtype {leaf.dtype}, which has no gradient: "
                "keep it in the batch, or close over it"
            )


def value_and_grad(
    *,
    first: Callable[..., Any],
    stage: Callable[..., Any] | Sequence[Callable[..., Any]],
    last: Callable[..., Any],
    schedule: Schedule,
    axis_name: str,
    data_axes: str | Sequence[str] = (),
    mesh: Mesh | None = None,
    policy: Policy | Recipe | str | None = None,
    normalize: Normalize = "weights",
    has_aux: bool = False,
    has_aux_loss: bool = False,
    aux_reduction: Any = "mean",
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

    The parameters are a dict: `"stages"` has leaves with a leading axis of layers; `"first"` and
    `"last"` belong to what comes before and after the layers; `"shared"` is read by both, as a tied
    embedding is. All but `"stages"` may be left out. They keep this layout whatever the schedule
    and the number of devices.

    Args:
      first: `first(params["first"], params["shared"], microbatch, key) -> x`, any pytree.
      stage: one layer, `stage(layer_params, x, key) -> x` of the same type. Or, for stages that
        differ, a sequence of functions, one for each stage of the schedule: `params["stages"]`
        is then a list of trees, and what stages pass on may differ in shape.
      last: `last(params["last"], params["shared"], x, microbatch, key)`, which returns the pair
        (sum of losses, sum of weights) of a micro-batch, or what `normalize` asks for.
      schedule: from `ampx.pipelining.one_f_one_b` and its like; its number of micro-batches must
        divide the batch of each device.
      axis_name: the mesh axis of the stages, as many devices as the schedule has.
      data_axes: mesh axes that the batch is split over. Other axes of the mesh are left to the
        compiler, as under `jit`.
      mesh: by default the one of `jax.set_mesh`.
      policy: see `ampx.value_and_grad`. Parameters are cast once a step.
      normalize: see `ampx.value_and_grad`.
      has_aux: whether `last` returns auxiliary output, numbers, after its value.
      has_aux_loss: whether `stage` returns `(x, loss)`: a float32 scalar, such as a router's, in
        the unit of what `last` returns, to which it is added.
      aux_reduction: `"mean"` or `"sum"` over micro-batches and devices.
      stash: what a stage keeps of a micro-batch between its forward and its backward: `"inputs"`
        recomputes all else; `"residuals"` recomputes nothing; a policy of
        `jax.checkpoint_policies` says what each layer keeps. `first` and `last` are recomputed.
      skips: connections between stages that differ, `{name: (source, target)}`. The source returns
        `(x, {name: value})`, the target takes `{name: value}` after its key. Values go from device
        to device directly.
      layers_per_stage: how many layers each stage has, as `ampx.pipelining.balance` gives them.
        Equally many by default. If they differ, parameters should lie on every device.
      param_specs: `PartitionSpec`s for parts of `params` (a tree prefix for each part) that name
        further axes, over which `first`, `stage` and `last` may use collectives. The first entry
        for `"stages"` is `axis_name`.
      accumulator_dtype: dtype of the sums, at least the dtype of the gradients.
      check_vma: see `jax.shard_map`.
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
    if not isinstance(schedule, Schedule):
        raise TypeError(
            "schedule must be a Schedule, such as ampx.pipelining.one_f_one_b(4, 32), got "
            f"{type(schedule).__name__}"
        )
    schedule.validate()
    for kind in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", kind, ("mean", "sum"))
    check_choice("normalize", normalize, get_args(Normalize))
    recipe = as_recipe(policy)
    model = Model(
        first=first,
        stage=tuple(stage) if isinstance(stage, Sequence) else stage,
        last=last,
        schedule=schedule,
        recipe=recipe,
        normalize=normalize,
        has_aux=has_aux,
        has_aux_loss=has_aux_loss,
        stash=stash,
        skips=dict(skips or {}),
    )
    if not model.schedule.has_backward:
        raise ValueError(f"the schedule {schedule.name!r} has no backward: there are no gradients")
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    if axis_name in data:
        raise ValueError(f"{axis_name!r} is the axis of the stages: leave it out of data_axes")

    over_all = checked_reduction(
        (axis_name, *data), op="sum", bucket_bytes=bucket_bytes, tail_overlap=tail_overlap
    )
    return PipelineGradients(
        schedule=schedule,
        recipe=recipe,
        model=model,
        axis_name=axis_name,
        data_axes=data,
        mesh=mesh,
        aux_reduction=aux_reduction,
        accumulator_dtype=accumulator_dtype,
        layers_per_stage=None if layers_per_stage is None else tuple(layers_per_stage),
        param_specs=param_specs,
        check_vma=check_vma,
        reductions=(dataclasses.replace(over_all, axes=data), over_all),
    )
