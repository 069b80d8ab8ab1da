"""Loss and gradients of a model that is divided over devices: the program that computes them.

Parameters and gradients are global arrays in the layout of the model. One `shard_map` program runs
the schedule and what has to be agreed on: the weight, the verdict, the sums over devices. What
follows (loss scale, clipping, optimizer) therefore need not know of stages.

  global arrays, under jit
    params --> half precision, once a step --> | shard_map                                       |
    batch  ----------------------------------> | layout.as_view: layers to their stages            |
                                               | assemble, Executor.run: all ticks               |
                                               | losses and weights summed over stages and data  |
                                               | gradients / weight, then the verdict            |
                                               | gradients summed over data (ends: over stages)  |
    gradients like params <------------------- | layout.as_stored: layers back to their places    |

The verdict looks at gradients that are divided by the weight, as they will be used, and not yet
summed over data: a non-finite number is found on the device that made it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from ampx.accumulation.microbatches import batch_size, reshape_into_microbatches
from ampx.accumulation.normalization import as_scale, choose_aux_reductions, normalize_sums
from ampx.accumulation.results import GradResult
from ampx.data_parallel.reduction import Reduction
from ampx.loss_scaling.nonfinite import count_nonfinite
from ampx.mesh_axes import (
    axes_of_spec,
    check_axes_of_mesh,
    fold_in_device,
    is_spec,
    join_shards,
    mark_varying,
    place,
)
from ampx.overwritten import split_overwritten
from ampx.pipelining.gradient_sums import join_replicas, sum_gradients
from ampx.pipelining.model_parts import (
    NO_SCALARS,
    NO_STATE,
    PARTS,
    as_dict,
    as_whole_gradients,
    check_params,
    check_parts,
    check_specs,
    make_shardings,
    make_specs,
)
from ampx.pipelining.runtime.assembly import assemble, make_stage_parameters
from ampx.pipelining.runtime.buffers import store_keys
from ampx.pipelining.runtime.executor import Executor, Totals
from ampx.pipelining.runtime.layouts import Layout, make_separate_layout, make_stacked_layout
from ampx.pipelining.runtime.models import Model
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.shard_map_errors import explain_refused_functions
from ampx.precision.opt_levels import Recipe
from ampx.precision.phase_switch import as_number_of_phase, switch_by_phase
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.trees import merge_trainable


# Compared and hashed by identity: functions of a model have no other equality, and `jax.jit` caches
# what it has traced by the function that it is given.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelineGradients:
    """A function `g(params, batch, *, loss_scale=1.0, key=None) -> GradResult`.

    Made by `ampx.pipelining.value_and_grad`; call it under `jax.jit`, or give it to
    `ampx.train_step` in the place of a loss.

    Attributes:
      schedule: what it runs.
      recipe: the precision of its stages, or None; with a precision schedule that of phase 0.
      precision_schedule: the precisions of its stages, one after the other, or None.
      model: the functions of its stages.
      axis_name: the mesh axis of the stages.
      data_axes: the mesh axes that the batch is split over.
      mesh: the mesh; None for that of `jax.set_mesh`.
      aux_reduction: `"auto"`, `"mean"`, `"sum"` or `"concat"`, or a tree of these.
      accumulator_dtype: dtype of the sums of gradients, at least.
      layers_per_stage: how many layers each stage has; None for equally many.
      param_specs: partition specs by part of the parameters, or None.
      check_vma: see `jax.shard_map`.
      reductions: of gradients over the data axes, for the stages, and over the stage axis, too, for
        what the ends read.

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
    precision_schedule: PrecisionSchedule | None
    model: Model
    axis_name: str
    data_axes: tuple[str, ...]
    mesh: Mesh | None
    aux_reduction: Any
    accumulator_dtype: Any
    layers_per_stage: tuple[int, ...] | None
    param_specs: Any
    check_vma: bool
    reductions: tuple[Reduction, Reduction]

    def __post_init__(self) -> None:
        # A mesh that is set around by `jax.set_mesh` is known only when the program is called.
        if self.mesh is not None:
            self._check_axes_of(self.mesh)

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"PipelineGradients({schedule.name}, {schedule.num_stages} stages on "
            f"{schedule.num_devices} devices along {self.axis_name!r})"
        )

    def __call__(
        self,
        params: Any,
        batch: Any,
        *,
        loss_scale: ArrayLike = 1.0,
        key: jax.Array | None = None,
        model_state: Any = None,
        wrt: Any = None,
        phase: jax.Array | int | None = None,
    ) -> GradResult:
        """Computes loss and gradients.

        Args:
          params: see `ampx.pipelining.value_and_grad`.
          batch: a pytree of arrays with a leading batch axis.
          loss_scale: multiplies the loss before it is differentiated.
          key: a random key. Each part of the data gets its own, of that each micro-batch, and of
            that each layer: the same for every schedule and number of stages.
          model_state: not supported.
          wrt: not supported.
          phase: with a precision schedule, `ampx.precision_phase(opt_state)`.

        Returns:
          A `GradResult`: gradients like `params`, float32 (None for leaves that are not
          floating), still times the loss scale, complete on all devices; `verdict` is what was
          found in them before they were summed.

        Raises:
          TypeError: if `params` is not a dict of such parts, or stages do not fit together.
          ValueError: for a batch, layers or a mesh that the schedule does not divide; for a state.
        """
        if model_state is not None:
            raise ValueError(NO_STATE)
        if wrt is not None:
            raise TypeError(
                "a pipeline takes a dict of parameters, not an nnx module, so there is no wrt: "
                "split the module with nnx.split, and give its state as params['stages']"
            )
        scale = as_scale(loss_scale)
        result = self._switch(lambda at: at._run(at.model, params, batch, scale, key), phase)
        result = result._replace(grads=as_whole_gradients(result.grads, params))
        return result.with_scale(loss_scale)

    def value(
        self,
        params: Any,
        batch: Any,
        *,
        key: jax.Array | None = None,
        phase: jax.Array | int | None = None,
    ) -> GradResult:
        """Computes the loss alone, by the forward actions of the schedule.

        Args:
          params: as above.
          batch: as above.
          key: as above.
          phase: as above.

        Returns:
          A `GradResult` whose `grads` and `verdict` are None.
        """
        # The same stages on the same devices, so parameters need not move. Nothing is kept, and
        # aligned rows do not wait where the backwards were.
        rows = tuple(tuple(a for a in row if a and a.kind == "F") for row in self.schedule.rows)
        forward = dataclasses.replace(self.schedule, rows=rows, has_backward=False).aligned()

        def run(at: PipelineGradients) -> GradResult:
            model = dataclasses.replace(at.model, schedule=forward)
            return at._run(model, params, batch, jnp.ones((), jnp.float32), key)

        return self._switch(run, phase)

    def in_phase(self, number: int) -> PipelineGradients:
        """The gradients of one phase of the precision schedule, without the others.

        Args:
          number: of the phase, from 0.

        Raises:
          IndexError: if there is no such phase.
        """
        recipes = () if self.precision_schedule is None else self.precision_schedule.recipes
        recipe = recipes[as_number_of_phase(number, len(recipes))]
        model = dataclasses.replace(self.model, recipe=recipe)
        return dataclasses.replace(self, recipe=recipe, model=model, precision_schedule=None)

    def _switch(
        self, run: Callable[[PipelineGradients], GradResult], phase: jax.Array | int | None
    ) -> GradResult:
        """Calls `run` with the gradients of a phase, which the device looks up."""
        # All devices are in one phase, so all take the same branch, with its exchanges.
        if self.precision_schedule is not None:
            phases = range(len(self.precision_schedule.phases))
            each = [functools.partial(run, self.in_phase(number)) for number in phases]
            return switch_by_phase(each)(phase=phase)
        if phase is not None:
            raise TypeError(
                "phase belongs to a precision schedule, and this pipeline has none: give one to "
                "ampx.pipelining.value_and_grad(policy=...)"
            )
        return run(self)

    def observed(
        self,
        params: Any,
        batch: Any,
        observe: Callable[[Executor], None],
        *,
        key: jax.Array | None = None,
    ) -> GradResult:
        """Does what a call does, and shows `observe` the executor; for `ampx.pipelining.plan`.

        Args:
          params: as above.
          batch: as above.
          observe: called while tracing, with the executor that will run the schedule.
          key: as above.

        Raises:
          ValueError: for a precision schedule, each of whose phases is another program.
        """
        if self.precision_schedule is not None:
            raise ValueError(
                f"the precision schedule '{self.precision_schedule}' has a program for each phase: "
                "ask for that of one, as in plan(grads_of.in_phase(0), ...)"
            )
        scale = jnp.ones((), jnp.float32)
        result = self._run(self.model, params, batch, scale, key, observe)
        return result._replace(grads=as_whole_gradients(result.grads, params))

    def shardings(self, params: Any, mesh: Mesh | None = None) -> Any:
        """Says where parameters, and an optimizer's state of the same shapes, should lie.

        Args:
          params: the parameters, or their shapes.
          mesh: by default the one given to `value_and_grad`.

        Returns:
          A tree of `NamedSharding` for `jax.device_put`: layers divided over the devices of the
          stages, the rest on every device. So are layers whose number these do not divide, and
          stages that differ.
        """
        check_parts(params)
        stages = jax.eval_shape(store_keys, as_dict(params)["stages"])
        is_divided = self._make_layout(self.model, stages).is_divided
        specs = make_specs(self.axis_name, self.param_specs, is_divided)
        mesh = self.mesh if mesh is None else mesh
        if mesh is None:
            raise ValueError(
                "shardings needs a mesh with devices: give it here or to value_and_grad"
            )
        self._check_axes_of(mesh)
        return make_shardings(params, specs, mesh)

    def _run(
        self,
        model: Model,
        params: Any,
        batch: Any,
        scale: jax.Array,
        key: jax.Array | None,
        observe: Callable[[Executor], None] | None = None,
    ) -> GradResult:
        mesh = self._check_mesh()
        check_params(params, key, draws=model.schedule.has_backward and observe is None)
        # A part that is left out is None, a tree without leaves. Half-precision copies are made
        # once a step, outside of the loop: all micro-batches read the same ones.
        parts = dict.fromkeys(PARTS) | as_dict(params)
        computed = store_keys(self.recipe.half_params(parts) if self.recipe else parts)
        layout = self._make_layout(model, computed["stages"])
        self._check_batch(batch)
        specs = make_specs(self.axis_name, self.param_specs, layout.is_divided)
        check_specs(parts, specs, self.mesh or jax.sharding.get_abstract_mesh())
        kinds = model.kinds(layout)
        # Unchecked, a sum over devices is differentiated as if each of them had its own loss, and
        # the gradient of a `psum` is summed again: n devices find n times the gradient. So the loss
        # scale is divided by n, and gradients of parameters that all n have are summed
        # (`join_replicas`): what the checked mode does by types.
        own = (self.axis_name, *self.data_axes)
        replicas = () if self.check_vma else tuple(a for a in self._axes if a not in own)

        def local(params: Any, batch: Any, key: Any, scale: jax.Array) -> GradResult:
            key = fold_in_device(key, self.data_axes)
            # All that a branch touches is made varying here, before any of it is differentiated.
            # JAX sums the gradient of an unvarying value, by a `psum` where it became varying: in a
            # branch, where only some devices are, and they would wait for the others for ever.
            params, batch, key, scale = mark_varying((params, batch, key, scale), own)
            if replicas:
                scale = scale / math.prod(map(lax.axis_size, replicas))
            executor = assemble(
                model.schedule,
                kinds,
                model.wires,
                make_stage_parameters(
                    params | {"stages": layout.as_view(params["stages"], self.axis_name)},
                    layout,
                    kinds,
                    self.accumulator_dtype,
                ),
                reshape_into_microbatches(batch, model.schedule.num_microbatches),
                key,
                scale,
                self.axis_name,
            )
            if observe is not None:
                observe(executor)
            rows_each = batch_size(batch) // model.schedule.num_microbatches
            result = self._reduce_over_devices(executor.run(), specs, layout, rows_each)
            return result._replace(grads=join_replicas(result.grads, specs, replicas))

        # Results: loss, gradients, weight, auxiliary output, state, verdict. All but gradients of
        # the stages are the same on all devices, as `P()` promises and `check_vma` checks.
        out_specs: Any = (P(), specs if model.schedule.has_backward else None, P(), P(), P(), P())
        in_specs = (specs, P(self.data_axes or None), P(), P())
        placed = place((computed, batch, key, scale), in_specs, self.mesh, self._axes)
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=GradResult(*out_specs),
            axis_names=set(self._axes),
            check_vma=self.check_vma,
        )
        # Without `jit` JAX compiles each operation, and refuses unchecked ones on larger meshes.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(placed))
        with explain_refused_functions():
            return (mapped if is_traced else jax.jit(mapped))(*placed)

    def _reduce_over_devices(
        self, totals: Totals, specs: Any, layout: Layout, rows_each: int
    ) -> GradResult:
        """Sums over devices: loss and weight, then the verdict, then gradients."""
        # The last stage's device has loss and weight of each micro-batch, others zeros (and losses
        # of their layers): the sum over stages collects them.
        losses, weights, aux = lax.psum(totals.results, self.axis_name)
        kinds, axes = choose_aux_reductions(self.aux_reduction, aux, rows_each), self.data_axes
        own, new = split_overwritten(totals.grads)  # `new` is neither divided, judged nor summed
        loss, grads, weight, aux = normalize_sums(
            own, losses, weights, aux, self.model.normalize, kinds, axes, None, rows_each
        )
        aux = jax.tree.map(
            lambda kind, leaf: join_shards(leaf, axes) if kind == "concat" else leaf, kinds, aux
        )
        if grads is None:
            return GradResult(loss, None, weight, aux)
        verdict = count_nonfinite(grads, axis_names=self._axes)
        grads = merge_trainable(grads, new)
        grads = sum_gradients(
            grads, specs, layout, self.axis_name, self.reductions, jnp.sum(verdict)
        )
        return GradResult(loss, grads, weight, aux, None, verdict)

    def _make_layout(self, model: Model, stages: Any) -> Layout:
        if model.is_separate:
            return make_separate_layout(model.schedule, stages)
        return make_stacked_layout(model.schedule, stages, self.layers_per_stage)

    @property
    def _axes(self) -> tuple[str, ...]:
        """All axes that the program maps."""
        named = [
            axis
            for spec in jax.tree.leaves(self.param_specs, is_leaf=is_spec)
            for axis in axes_of_spec(spec)
        ]
        return tuple(dict.fromkeys((self.axis_name, *self.data_axes, *named)))

    def _check_axes_of(self, mesh: Any) -> None:
        check_axes_of_mesh("axis_name, data_axes or param_specs", self._axes, mesh)

    def _check_mesh(self) -> Mesh | None:
        """Checks the mesh; returns that of the caller, or None for the one that is set around."""
        around = jax.sharding.get_abstract_mesh()
        if mapped := getattr(around, "manual_axes", ()):
            raise ValueError(
                f"{mapped} are mapped here already, and a pipeline maps its own: call it under "
                "plain jit, with global arrays, not in jax.shard_map. data_axes divide the batch"
            )
        mesh = self.mesh or around
        if mesh.empty:
            raise ValueError(
                "no mesh: give value_and_grad mesh=..., or call it under jax.set_mesh(mesh)"
            )
        self._check_axes_of(mesh)
        size, wanted = mesh.shape[self.axis_name], self.schedule.num_devices
        if size != wanted:
            raise ValueError(
                f"the schedule is for {wanted} devices, and the mesh has {size} along "
                f"{self.axis_name!r}: make the schedule with num_stages={size}"
            )
        return self.mesh

    def _check_batch(self, batch: Any) -> None:
        """Raises unless each data shard can be divided into the schedule's micro-batches."""
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        parts = math.prod(mesh.shape[axis] for axis in self.data_axes)
        rows, count = batch_size(batch, NO_SCALARS), self.schedule.num_microbatches
        if rows % (parts * count):
            raise ValueError(
                f"a batch of {rows} rows is not divisible by {parts * count}, the {count} "
                f"micro-batches of the schedule times {parts} devices along data_axes="
                f"{self.data_axes}: choose another number of rows or micro-batches"
            )
