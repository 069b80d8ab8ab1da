"""What a step stores and sends, read from its trace for a mesh that need not be there.

  known by shapes        parameters, optimizer state, batch, gradients     of one device's shards
  known by the tables    slots * bytes of a value                          for each buffer, with
                                                                           a slot more for wires
  sent, by the tables    exchanges * bytes of a value                      all devices or none
  sent, by the trace     bytes of each collective                          outside of the loop
  one stage's work       what the compiler says of one device's program, less all of the above

So the parts add up to what the compiler says, and the last one holds whatever the others miss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ampx.jaxprs import reading
from ampx.mesh_axes import axes_of_spec
from ampx.pipelining.planning.device_programs import find_traffic, make_device_program
from ampx.pipelining.runtime.executor import Executor
from ampx.pipelining.runtime.lowering import Route
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.trees import size_in_bytes, split_trainable

WIRES = "activations", "cotangents"


class DevicePlan(NamedTuple):
    """What is different on each device along the stage axis.

    Attributes:
      device: its number along the axis.
      stages: the stages that it runs.
      layers: how many layers they have; for stages that differ, how many stages.
      parameters: bytes of the parameters that they read.
      microbatches: how many are between forward and backward at most, counted for each stage.
      stash: bytes of the buffers' slots that this device uses. All devices have as many slots as
        the one that needs most.
      idle: the share of the step that it waits, if all devices move in step.
      sent: bytes that it sends in a step, by purpose.
    """

    device: int
    stages: tuple[int, ...]
    layers: int
    parameters: int
    microbatches: int
    stash: int
    idle: float
    sent: dict[str, int]


class _Stored(NamedTuple):
    """What the executor stores, as far as it is known outside of the trace.

    Attributes:
      tables: the schedule, lowered.
      programs: the different programs of its stages.
      program_of: for each stage, which of them it runs.
      activations: for each wire the bytes of a slot.
      cotangents: for each wire the bytes of a slot.
      kept: bytes of a slot of residuals.
      deferred: bytes of a slot for weight gradients.
      accumulators: bytes of the sums of gradients.
    """

    tables: Any
    programs: Sequence[Any]
    program_of: Sequence[int]
    activations: list[int]
    cotangents: list[int]
    kept: int
    deferred: int
    accumulators: int


class Footprint:
    """A step, traced for a mesh.

    Args:
      grads_of: the pipeline.
      mesh: with Auto axes.
      params: shapes of its parameters.
      batch: shapes of the global batch.
      key: the shape of a random key, or None.
    """

    def __init__(
        self, grads_of: PipelineGradients, mesh: AbstractMesh, params: Any, batch: Any, key: Any
    ) -> None:
        other: dict[str, Any] = {"mesh": mesh}
        grads_of = dataclasses.replace(grads_of, **other)
        self.grads_of, self.params, self.batch = grads_of, params, batch
        self.schedule = grads_of.schedule
        # The executor lives inside of the trace, where its arrays are tracers. What is taken out of
        # it are numbers, tables and jaxprs.
        seen: list[_Stored] = []

        def step(params: Any, batch: Any, key: Any) -> Any:
            return grads_of.observed(
                params, batch, lambda e: seen.append(_measure_storage(e)), key=key
            )

        with jax.sharding.use_abstract_mesh(mesh):
            traced, self.result = reading.trace(step, params, batch, key)
        (self.stored,) = seen
        self.outer = reading.open_jaxpr(traced)
        constants = getattr(traced, "consts", ())
        # The step, as it was traced: casts of parameters and the like around one `shard_map`, whose
        # body is what one device does.
        (self.mapped,) = (e for e in self.outer.eqns if e.primitive.name == "shard_map")
        # Arrays that functions of the model close over are constants of the trace, with known
        # values.
        values = dict(zip(self.outer.constvars, constants, strict=True))
        self.constants = {
            i: values[atom]
            for i, atom in enumerate(self.mapped.invars)
            if not reading.is_literal(atom) and atom in values
        }
        (self.body,) = reading.bodies_of(self.mapped)
        self.sizes = reading.mesh_sizes(self.mapped)

    @property
    def num_ticks(self) -> int:
        """How many ticks the loop over the schedule has."""
        return self.stored.tables.num_ticks

    @property
    def num_exchanges(self) -> int:
        """How many of the ticks end with an exchange between neighbours."""
        routes = (route for name in WIRES for route in getattr(self.stored.tables, name))
        busy = [row for route in routes for row in route.is_busy]
        return int(np.any(busy, axis=0).sum()) if busy else 0

    @property
    def layers_of_stages(self) -> list[int]:
        """How many layers each stage has; a stage of its own kind counts as one."""
        if self.grads_of.model.is_separate:
            return [1] * self.schedule.num_stages
        layers = jax.tree.leaves(self.params["stages"])[0].shape[0]
        counts = self.grads_of.layers_per_stage
        return list(counts or [layers // self.schedule.num_stages] * self.schedule.num_stages)

    # --- memory ----------------------------------------------------------------------------------

    def memory(self, tx: Any) -> dict[str, int]:
        """Counts bytes by purpose, the same on every device."""
        stored, tables = self.stored, self.stored.tables
        local = self._find_shards(self.params)
        trained, _ = split_trainable(local)
        known = {
            "parameters": _count_bytes(local),
            "optimizer state": 0 if tx is None else _count_bytes(jax.eval_shape(tx.init, trained)),
            "batch": self._count_local_batch(),
            "gradients": _count_bytes(self._find_shards(self.result.grads)),
        }
        # Types inside of the body are those of one device's parts.
        inner = reading.open_jaxpr(self.body).invars
        temporary = {
            "copies of parameters": sum(size_in_bytes(inner[i].aval) for i in self._find_made()),
            "sums of gradients": stored.accumulators,
            "stash of activations": _count_buffer_bytes(tables.activations, stored.activations),
            "stash of cotangents": _count_buffer_bytes(tables.cotangents, stored.cotangents),
            "stash of residuals": tables.residuals.num_slots * stored.kept,
            "stash of weight gradients": tables.deferred.num_slots * stored.deferred,
        }
        # The rest: what a branch needs while it runs, as the compiler arranges it.
        work = self._compile_temporary() - sum(temporary.values())
        return known | temporary | {"one stage's work": work}

    def _compile_temporary(self) -> int:
        """Counts the bytes of all that is neither an argument nor a result, by compiling."""
        made = self._find_made()
        program = make_device_program(self.body, self.constants, made, self._find_used())
        types = [
            variable.aval
            for i, variable in enumerate(reading.open_jaxpr(self.body).invars)
            if i not in made and i not in self.constants
        ]
        operands = [
            jax.ShapeDtypeStruct(t.shape, t.dtype)
            for t in (jax.ShapeDtypeStruct((), jnp.int32), *types)
        ]
        # One device of this machine, even where the caller has set a mesh of many: under that mesh
        # the program would be compiled for all of them.
        here = Mesh(np.array(jax.local_devices()[:1]), ("device",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(here), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            compiled = jax.jit(program).lower(*operands).compile()
        found: Any = compiled.memory_analysis()
        # Arguments and results are known by their shapes; asked for is all else, at its peak.
        return found.temp_size_in_bytes

    def _find_shards(self, tree: Any) -> Any:
        """Finds the shapes of what one device has of parameters, or of gradients."""
        shardings = self.grads_of.shardings(self.params)

        def shard(sharding: Any, leaf: Any) -> Any:
            if leaf is None:  # the gradient of a leaf that is not trained
                return None
            return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)

        return jax.tree.map(shard, shardings, dict(tree))

    def _count_local_batch(self) -> int:
        """Counts the bytes of the rows of one data shard; all stages have the same ones."""
        parts = math.prod(self.sizes[axis] for axis in self.grads_of.data_axes)
        return _count_bytes(self.batch) // parts

    def _find_made(self) -> list[int]:
        """Finds what the mapped program takes besides arguments of the step, such as casts."""
        given = set(self.outer.invars)
        return [
            i
            for i, atom in enumerate(self.mapped.invars)
            if i not in self.constants and (reading.is_literal(atom) or atom not in given)
        ]

    def _find_used(self) -> dict[int, Any]:
        """Finds what the mapped program gives besides results of the step, and what that becomes.

        Where stages differ, the compiler gathers the results of all stages before it takes out
        those of each.
        """
        returned = set(reading.variables_in(self.outer.outvars))
        local = reading.open_jaxpr(self.body).outvars
        whole = self.mapped.outvars if self.grads_of.model.is_separate else local
        return {
            i: whole[i].aval for i, out in enumerate(self.mapped.outvars) if out not in returned
        }

    # --- devices ---------------------------------------------------------------------------------

    def devices(self) -> list[DevicePlan]:
        """Describes all devices along the stage axis, without their idle time."""
        layers, sizes = self.layers_of_stages, self._measure_parameters()
        found = []
        for device in range(self.schedule.num_devices):
            stages = self.schedule.stages_on(device)
            # All devices hold the parameters of the ends; this is about what they read.
            parts = {part for stage in stages for part in self.grads_of.model.parts_of(stage)}
            ends = (sizes[part] for part in parts - {"stages"} if part in sizes)
            found.append(
                DevicePlan(
                    device,
                    stages,
                    sum(layers[stage] for stage in stages),
                    sum(map(_sum_leaves, ends))
                    + sum(self._count_stage_bytes(s, sizes) for s in stages),
                    self.stored.tables.residuals.used[device],
                    self._count_stash(device),
                    0.0,  # `plan` fills in the idle share, which a simulation finds
                    {name: round(size) for name, size in self._count_sent(device).items()},
                )
            )
        return found

    def _measure_parameters(self) -> dict[str, Any]:
        """Finds the bytes of each leaf, less what the axes besides that of stages divide."""

        def measure(leaf: Any, sharding: Any) -> int:
            axes = set(axes_of_spec(sharding.spec)) - {self.grads_of.axis_name}
            return size_in_bytes(leaf) // math.prod(self.sizes[axis] for axis in axes)

        return jax.tree.map(measure, dict(self.params), self.grads_of.shardings(self.params))

    def _count_stage_bytes(self, stage: int, sizes: dict[str, Any]) -> int:
        """Counts the bytes of the parameters of one stage."""
        layers = self.layers_of_stages
        if self.grads_of.model.is_separate:
            return _sum_leaves(sizes["stages"][stage])
        return _sum_leaves(sizes["stages"]) * layers[stage] // sum(layers)

    def _count_stash(self, device: int) -> int:
        """Counts the bytes of the slots that a device uses; it may have more."""
        stored, tables = self.stored, self.stored.tables
        return (
            sum(
                size * route.storage.used[device]
                for routes, sizes in (
                    (tables.activations, stored.activations),
                    (tables.cotangents, stored.cotangents),
                )
                for route, size in zip(routes, sizes, strict=True)
            )
            + stored.kept * tables.residuals.used[device]
            + stored.deferred * tables.deferred.used[device]
        )

    def _count_sent(self, device: int) -> dict[str, float]:
        """Counts the bytes that a device sends in a step."""
        sent: dict[str, float] = dict.fromkeys(WIRES, 0.0)
        tables = self.stored.tables

        def add(purpose: str, size: float) -> None:
            sent[purpose] = sent.get(purpose, 0.0) + size

        # All devices take part in an exchange, also those with nothing to send, if any has.
        for name in WIRES:
            for route, size in zip(getattr(tables, name), getattr(self.stored, name), strict=True):
                # A device can be a sender in several groups of links: one `ppermute` each.
                for pairs, is_busy in zip(route.links, route.is_busy, strict=True):
                    add(name, size * int(is_busy.sum()) * sum(device == s for s, _ in pairs))
        # Outside of the loop over ticks. What is in it was counted above, or is inside of stages,
        # which the devices run differently often.
        for found in find_traffic(self.body, self.sizes, loops=False):
            if found.pairs is not None:
                number = sum(source == device != target for source, target in found.pairs)
                add("layers to their stages and back", number * found.bytes)
            else:
                add(f"sums over {', '.join(found.axes)}", found.bytes)
        for action in self.schedule.rows[device]:
            if action is not None:
                add("inside of stages", self._count_sent_by(action.stage, action.kind))
        return {name: size for name, size in sent.items() if size or name in WIRES}

    def _count_sent_by(self, stage: int, kind: str) -> float:
        """Counts the bytes that a device sends inside of one action, as for tensor parallelism."""
        program = self.stored.programs[self.stored.program_of[stage]]
        halves = program.halves
        jaxpr = {
            "F": program.forward,
            "B": program.backward,
            "I": halves and halves.inputs,
            "W": halves and halves.weights,
        }[kind]
        return sum(found.bytes for found in find_traffic(jaxpr, self.sizes))


def _measure_storage(executor: Executor) -> _Stored:
    sums = jax.eval_shape(executor.parameters.zeros)
    return _Stored(
        executor.tables,
        executor.programs,
        executor.program_of,
        [_count_bytes(carrier.types) for carrier in executor.activations],
        [_count_bytes(carrier.types) for carrier in executor.cotangents],
        _count_bytes(executor.kept.types),
        _count_bytes(executor.deferred.types),
        _count_bytes(sums),
    )


def _count_bytes(tree: Any) -> int:
    return sum(map(size_in_bytes, jax.tree.leaves(tree)))


def _sum_leaves(sizes: Any) -> int:
    return sum(jax.tree.leaves(sizes))


def _count_buffer_bytes(routes: Sequence[Route], sizes: Sequence[int]) -> int:
    """Counts the bytes of the buffers of some wires, with the slot that nobody reads."""
    # One program for all devices: buffers have as many slots as the fullest device needs.
    pairs = zip(routes, sizes, strict=True)
    return sum((route.storage.num_slots + 1) * size for route, size in pairs)
