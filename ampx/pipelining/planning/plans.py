"""What a pipeline will need, on meshes that nobody here has: memory, bubbles, bytes on the wire.

The step is traced for the mesh, which needs shapes and no devices (`footprints`). Tables of the
schedule and types of what stages pass on say what is stored and sent. The program of one device is
compiled, with stand-ins for what devices do together (`device_programs`), and the compiler says how
much memory it takes. The schedule is simulated for the time (`Schedule.simulate`). Nothing is run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ampx.checking import as_number, as_positive_int, check_transformation
from ampx.mesh_axes import check_axes_of_mesh
from ampx.pipelining.planning.footprints import WIRES, DevicePlan, Footprint
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.simulation import Cost, Simulation
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.summaries import show_fields, show_table
from ampx.text_tables import Block, Table, show_blocks, show_rich, spread
from ampx.tree_checks import check_arrays, check_key


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, bubbles and traffic that `ampx.pipelining.plan` found; print it for tables.

    Attributes:
      schedule: of the pipeline.
      mesh_shape: devices along each axis of the mesh.
      num_parameters: of the whole model.
      num_ticks: how long the compiled loop over the schedule is.
      lockstep: the simulation with all devices in step, as the compiled program runs.
      asynchronous: the simulation in which a device goes on as soon as it can.
      devices: what is different on each device along the stage axis, one entry for each.
      memory: bytes by purpose, the same on every device: one program runs on all.
      seconds: time on the wire in a step by purpose, for the device that sends most, in the unit of
        time of `bandwidth`; empty if no bandwidth is given.
      backend: the backend whose compiler was asked for memory, such as `"cpu"`.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> grads_of = ampx.pipelining.value_and_grad(
      ...     first=lambda p, shared, batch, key: batch,
      ...     stage=lambda p, x, key: jnp.tanh(x @ p),
      ...     last=lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(len(x))),
      ...     schedule=ampx.pipelining.one_f_one_b(4, 8),
      ...     axis_name="stage",
      ... )
      >>> params = {"stages": jax.ShapeDtypeStruct((8, 64, 64), "float32")}
      >>> batch = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> found = ampx.pipelining.plan(grads_of, params, batch, mesh={"stage": 4})
      >>> found.memory["parameters"], found.memory["stash of activations"]
      (32768, 12288)
      >>> round(found.lockstep.bubble_fraction, 3), found.devices[3].sent["cotangents"]
      (0.273, 20480)
    """

    schedule: Schedule
    mesh_shape: dict[str, int]
    num_parameters: int
    num_ticks: int
    lockstep: Simulation
    asynchronous: Simulation
    devices: tuple[DevicePlan, ...]
    memory: dict[str, int]
    seconds: dict[str, float]
    backend: str

    __repr__ = show_fields
    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    @property
    def peak_bytes(self) -> int:
        """Memory of a device at its fullest: arguments, results and all in between."""
        return sum(self.memory.values())

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that a device sends in a step, by purpose, for the device that sends most."""
        purposes = dict.fromkeys(name for device in self.devices for name in device.sent)
        return {name: max(d.sent.get(name, 0) for d in self.devices) for name in purposes}

    def _blocks(self) -> list[Block]:
        shape = " x ".join(f"{size} {axis}" for axis, size in self.mesh_shape.items())
        number = _format_count(self.num_parameters)
        lines = [
            f"{self.schedule.name}: {number} parameters on {shape} devices, "
            f"{self.schedule.num_stages} stages, {self.schedule.num_microbatches} micro-batches",
            f"{self.num_ticks} ticks; idle: {self.lockstep.bubble_fraction:.1%} in lockstep, "
            f"{self.asynchronous.bubble_fraction:.1%} if devices could go on by themselves",
        ]
        head = ["device", "stages", "layers", "parameters", "alive", "stash", "idle"]
        rows = [[*head, *(f"{name} sent" for name in WIRES)]]
        for d in self.devices:
            row = [
                str(d.device),
                ",".join(map(str, d.stages)),
                str(d.layers),
                _format_size(d.parameters),
                str(d.microbatches),
                _format_size(d.stash),
                f"{d.idle:.1%}",
                *(_format_size(d.sent[name]) for name in WIRES),
            ]
            rows.append(row)
        # Rows of numbers by device, then totals. What is zero, such as a stash of weight gradients
        # in a schedule with whole backwards, is left out.
        memory = [["memory of every device", ""]]
        memory += [[name, _format_size(size)] for name, size in self.memory.items() if size]
        memory.append([f"peak, by the compiler for {self.backend}", _format_size(self.peak_bytes)])
        wire = [["on the wire in a step, at most", ""]]
        for name, size in self.sent.items():
            time = [f"{self.seconds[name]:.3g} s"] if self.seconds else []
            wire.append([name, _format_size(size), *time])
        wire[0] += [""] * (len(wire[-1]) - 2)
        return spread(("\n".join(lines), Table(rows), Table(memory), Table(wire)))


def plan(
    grads_of: PipelineGradients,
    params: Any,
    batch: Any,
    tx: optax.GradientTransformation | None = None,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    key: Any = None,
    forward: Cost | None = None,
    backward: Cost | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Predicts memory, bubbles and traffic of a step, without the machine that it is for.

    Nothing is run, and no array is made. Memory is what the compiler of this machine's default
    backend counts: arguments, results and temporary arrays of one device, with parameters and
    optimizer state donated, or gradients returned. Other backends may choose otherwise: that of
    CPUs, for one, multiplies bfloat16 matrices in float32. Constants and the optimizer's own
    temporary arrays are left out.

    Args:
      grads_of: from `ampx.pipelining.value_and_grad`.
      params: parameters as they are stored, or their shapes (`jax.ShapeDtypeStruct`).
      batch: the global batch, or its shapes. It is divided over the data axes, and the same for all
        stages.
      tx: the optimizer, whose state is divided like the parameters. None: there is none.
      mesh: a mesh, with or without devices, or sizes such as `{"data": 16, "stage": 32}`. By
        default the one that `grads_of` has. Memory that the compiler would divide over axes that
        `grads_of` does not name counts in full.
      key: a random key or its shape, if the model needs one.
      forward: time of each stage's forward, as in `Schedule.simulate`. By default as long as it has
        layers, with 1 for the average stage.
      backward: time of its backward; by default twice that of the forward.
      bandwidth: what a device can send, in bytes for each unit of time of `forward`. With both,
        simulations count the exchanges of neighbours; and the report says what each purpose takes.

    Returns:
      A `Plan`; print it.

    Raises:
      TypeError: if `grads_of` is something else.
      ValueError: for a mesh, a batch or costs that do not fit the schedule.

    References:
      Huang et al., GPipe, https://arxiv.org/abs/1811.06965. Bytes of an all-reduce are those of a
      ring: Patarasuk and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> grads_of = ampx.pipelining.value_and_grad(
      ...     first=lambda p, shared, batch, key: batch,
      ...     stage=lambda p, x, key: jnp.tanh(x @ p),
      ...     last=lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(len(x))),
      ...     schedule=ampx.pipelining.one_f_one_b(32, 64),
      ...     axis_name="stage",
      ...     data_axes="data",
      ... )
      >>> params = {"stages": jax.ShapeDtypeStruct((32, 512, 512), "float32")}
      >>> batch = jax.ShapeDtypeStruct((4096, 512), "float32")
      >>> mesh = {"data": 16, "stage": 32}
      >>> found = ampx.pipelining.plan(grads_of, params, batch, optax.adam(1e-3), mesh=mesh)
      >>> found.memory["optimizer state"] - 2 * found.memory["parameters"]  # its step count
      4
      >>> found.devices[0].microbatches, round(found.sent["sums over data"] / 2**20, 3)
      (63, 1.875)
    """
    if not isinstance(grads_of, PipelineGradients):
        raise TypeError(
            "grads_of must come from ampx.pipelining.value_and_grad, got "
            f"{type(grads_of).__name__}: of a train_step give step.grads_of and step.tx"
        )
    if tx is not None:
        check_transformation("tx", tx)
    if bandwidth is not None:
        bandwidth = as_number("bandwidth", bandwidth, above=0)
    check_arrays("params", params, may_be_shapes=True)
    check_arrays("batch", batch, may_be_shapes=True)
    check_key("key", key)
    abstract = _as_abstract_mesh(grads_of.mesh if mesh is None else mesh)
    params, batch, key = jax.tree.map(_as_shape, (params, batch, key))
    found = Footprint(grads_of, abstract, params, batch, key)
    devices = found.devices()
    # The busiest device's exchanges, evenly over the ticks with any: in lockstep all wait for it.
    sent = max(sum(device.sent[name] for name in WIRES) for device in devices)
    costs: dict[str, Any] = _estimate_costs(found.layers_of_stages, forward, backward)
    # Times and bytes have no common unit unless both are given.
    if forward is not None and bandwidth is not None:
        costs["communication"] = sent / max(1, found.num_exchanges) / bandwidth
    kept = grads_of.model.kept
    lockstep = grads_of.schedule.simulate(mode="lockstep", stash=kept, **costs)
    # The idle time of lockstep, since that is how the program runs.
    idle = [waits / lockstep.makespan for waits in lockstep.idle]
    result = Plan(
        schedule=grads_of.schedule,
        mesh_shape=dict(abstract.shape),
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        num_ticks=found.num_ticks,
        lockstep=lockstep,
        asynchronous=grads_of.schedule.simulate(mode="async", **costs),
        devices=tuple(d._replace(idle=i) for d, i in zip(devices, idle, strict=True)),
        memory=found.memory(tx),
        seconds={},
        backend=jax.default_backend(),
    )
    if bandwidth is None:
        return result
    seconds = {name: size / bandwidth for name, size in result.sent.items()}
    return dataclasses.replace(result, seconds=seconds)


def _estimate_costs(
    layers: Sequence[int], forward: Cost | None, backward: Cost | None
) -> dict[str, Any]:
    """Finds times of each stage; where they are not given, by how many layers it has."""
    # In units of an average stage: 8 layers on 4 stages as 3, 2, 2, 1 cost 1.5, 1, 1 and 0.5. A
    # backward of a matrix product is two of the same size.
    if forward is None:
        forward = [number * len(layers) / sum(layers) for number in layers]
    if backward is None:
        backward = (2 * np.asarray(forward, float)).tolist()
    return {"forward": forward, "backward": backward}


def _as_abstract_mesh(mesh: Any) -> AbstractMesh:
    # Only sizes count: the axes are Auto ones, whatever those of a given mesh are.
    if mesh is None:
        raise ValueError('no mesh: give plan a mesh or sizes, such as {"data": 16, "stage": 32}')
    if isinstance(mesh, Mapping):
        shape = {axis: as_positive_int(f"mesh[{axis!r}]", size) for axis, size in mesh.items()}
    else:
        check_axes_of_mesh("mesh", (), mesh)
        shape = dict(mesh.shape)
    return AbstractMesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def _as_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _format_count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _format_size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
