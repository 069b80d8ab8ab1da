"""A training step over the devices of a mesh, in one process or in several.

    start       gets the devices, and joins the processes
    make_mesh   names their axes
    spread      maps the step, and puts the first state on all devices
    split       puts each device's rows of a batch on it
    gather      brings what was trained back to one device

`None` in the place of a mesh is one device, and leaves everything as it is.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

DATA, STAGE = "data", "stage"
PROCESS_FLAGS = ("coordinator", "num_processes", "process_id")
_CPU_DEVICES = "jax_num_cpu_devices"


def axis_sizes(mesh: str | None) -> dict[str, int]:
    """What a `--mesh` asks for.

    Args:
      mesh: `"data=N"`, `"stage=N"` or both, with a comma; None for one device without a mesh.

    Returns:
      The number of devices along each axis.

    Raises:
      ValueError: for anything else.

    Examples:
      >>> from ampx.examples import meshes
      >>> meshes.axis_sizes("data=4,stage=2")
      {'data': 4, 'stage': 2}
    """
    if mesh is None:
        return {}
    axis = rf"({DATA}|{STAGE})=([1-9]\d*)"
    found = [re.fullmatch(axis, part) for part in mesh.split(",")]
    # An axis that is named twice also leaves fewer sizes than parts.
    sizes = {match[1]: int(match[2]) for match in found if match}
    if len(sizes) < len(found):
        raise ValueError(
            f"mesh must be {DATA}=N, {STAGE}=N or {DATA}=N,{STAGE}=N for numbers of devices N, got "
            f"{mesh!r}"
        )
    return sizes


def device_count(mesh: str | None) -> int:
    """How many devices a `--mesh` asks for.

    Args:
      mesh: see `axis_sizes`.

    Returns:
      The number of devices.

    Raises:
      ValueError: for a mesh that cannot be read.

    Examples:
      >>> from ampx.examples import meshes
      >>> meshes.device_count("data=4,stage=2")
      8
    """
    return math.prod(axis_sizes(mesh).values())


def check(mesh: str | None, batch_size: int, microbatches: int, zero1: bool) -> None:
    """Checks that a batch can be divided over a mesh and into micro-batches.

    Args:
      mesh: see `axis_sizes`.
      batch_size: rows of a batch.
      microbatches: slices of what one device has.
      zero1: whether the optimizer's state is to be divided too.

    Raises:
      ValueError: if they do not go together.

    Examples:
      >>> from ampx.examples import meshes
      >>> meshes.check("data=4", batch_size=6, microbatches=1, zero1=False)
      Traceback (most recent call last):
      ValueError: a batch of 6 has no 4 equal parts for the mesh data=4
    """
    # Rows are divided twice: over the devices along "data", then into micro-batches on each.
    sizes = axis_sizes(mesh)
    parts = sizes.get(DATA, 1)
    if batch_size % parts:
        raise ValueError(f"a batch of {batch_size} has no {parts} equal parts for the mesh {mesh}")
    rows = batch_size // parts
    if rows % microbatches:
        batch = f"a batch of {rows}" + (" on each device" if mesh else "")
        raise ValueError(
            f"{batch} has no {microbatches} equal micro-batches: give microbatches that divide it"
        )
    if zero1 and STAGE in sizes:
        raise ValueError(
            f"zero1 does not go with a mesh {mesh}: stages divide the optimizer's state already"
        )
    if zero1 and mesh is None:
        raise ValueError(f"zero1 needs a mesh {DATA}=N to divide the optimizer's state over")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a mesh and of processes to a command line.

    Args:
      parser: where to add them.

    Examples:
      >>> import argparse
      >>> from ampx.examples import meshes
      >>> parser = argparse.ArgumentParser()
      >>> meshes.add_flags(parser)
      >>> parser.parse_args(["--mesh", "data=4"]).mesh
      'data=4'
    """
    flag = parser.add_argument
    axes = f"{DATA}=N,{STAGE}=N"
    flag("--mesh", metavar=axes, help="split batches, layers or both over devices (CPU: virtual)")
    flag("--zero1", action="store_true", default=None, help="divide the optimizer's state too")
    flag("--coordinator", metavar="HOST:PORT", help="where process 0 of several listens")
    flag("--num-processes", type=int, metavar="N", help="how many processes share the mesh")
    flag("--process-id", type=int, metavar="I", help="which of them this one is, from 0")


def start(
    mesh: str | None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Gets the devices of a mesh, before anything else in the program touches one.

    On CPU there are as many virtual devices as the mesh needs, in equal parts in all processes.

    Args:
      mesh: see `axis_sizes`.
      coordinator: address and port of process 0. Without the three arguments there is one process.
      num_processes: how many there are.
      process_id: the number of this one.

    Raises:
      ValueError: for arguments that do not fit together, and for a mesh without its devices.

    Examples:
      >>> from ampx.examples import meshes
      >>> meshes.start(None)
    """
    given = dict(zip(PROCESS_FLAGS, (coordinator, num_processes, process_id), strict=True))
    if mesh is None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{_flag(name)} needs --mesh {DATA}=N, N devices in all processes")
        return
    if len({value is None for value in given.values()}) > 1:
        missing = next(name for name, value in given.items() if value is None)
        raise ValueError(f"{_flag(missing)} is missing: {', '.join(map(_flag, given))} are for all")
    processes = 1
    if coordinator is not None and num_processes is not None and process_id is not None:
        processes = num_processes
        _check_processes(device_count(mesh), coordinator, num_processes, process_id)
    # The number of virtual devices can be set only until JAX has started its backend. One process
    # then takes what there is, and `make_mesh` says so if that is too little.
    wanted = device_count(mesh) // processes
    if processes > 1 or getattr(jax.config, _CPU_DEVICES) < wanted:
        try:
            jax.config.update(_CPU_DEVICES, wanted)
        except RuntimeError as error:
            if processes > 1:
                raise ValueError("too late for --coordinator: JAX has been used already") from error
    if processes > 1:
        # An exception would wait for the other processes, which wait for this one.
        sys.excepthook = _exit_at_once
        jax.distributed.initialize(coordinator, num_processes, process_id)
    make_mesh(mesh)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_processes(devices: int, coordinator: str, num_processes: int, process_id: int) -> None:
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"--coordinator must be HOST:PORT, got {coordinator}")
    if num_processes < 1 or devices % num_processes:
        raise ValueError(f"a mesh of {devices} devices has no {num_processes} equal parts")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process-id must be 0 to {num_processes - 1}, got {process_id}")


def _exit_at_once(*error: Any) -> None:
    """Shows an error and ends the process without the interpreter's own ending."""
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)


def make_mesh(mesh: str | None) -> Mesh | None:
    """The mesh that is asked for.

    Args:
      mesh: see `axis_sizes`.

    Returns:
      A mesh of the first devices, as many as it needs, or None.

    Raises:
      ValueError: if there are too few devices, or too many in several processes.

    Examples:
      >>> from ampx.examples import meshes
      >>> meshes.make_mesh("data=1").shape["data"]
      1
    """
    if mesh is None:
        return None
    sizes, devices = axis_sizes(mesh), jax.devices()
    count = math.prod(sizes.values())
    backend, processes = jax.default_backend(), jax.process_count()
    if len(devices) < count:
        raise ValueError(
            f"a mesh {mesh} needs {count} devices, and {backend} has {len(devices)}. For virtual "
            f"ones set JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES={count // processes} before JAX "
            "starts"
        )
    if processes > 1 and len(devices) > count:
        raise ValueError(f"{processes} processes have {len(devices)} devices: use all in the mesh")
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),  # outside of shard_map XLA lays arrays out
        devices=devices[:count],
    )


def spread(
    step: ampx.TrainStep, params: Any, mesh: Mesh | None
) -> tuple[Callable[[Any, Any], Any], ampx.TrainState]:
    """Maps a step over a mesh: the state is the same on all devices, except what ZeRO-1 divides.

    Args:
      step: made with `axis_name="data"` if there is a mesh.
      params: the first parameters.
      mesh: a mesh, or None.

    Returns:
      A function `(state, batch) -> (state, report)`, not yet jitted, and the first state.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> from ampx.examples import meshes
      >>> mesh = meshes.make_mesh("data=1")
      >>> step = ampx.train_step(lambda w, x: jnp.sum(w * x), optax.sgd(1.0), axis_name="data")
      >>> mapped, state = meshes.spread(step, jnp.array(3.0), mesh)
      >>> state, report = jax.jit(mapped)(state, meshes.split(jnp.ones(2), mesh))
      >>> print(state.params, report.loss)
      1.0 6.0
    """
    if mesh is None:
        with warnings.catch_warnings():
            # O3 is among the runs to show what that costs.
            warnings.filterwarnings("ignore", "parameters are stored in")
            return step, step.init(params)
    # Nothing is computed for the shapes. The state is then made where it belongs: on one device the
    # moments of a model that needs ZeRO-1 might not fit.
    shapes = jax.eval_shape(step.init, params)
    everywhere: Any = P()
    specs = jax.tree.map(lambda _: everywhere, shapes)
    if _is_divided(shapes.opt_state):
        specs = specs._replace(opt_state=ampx.zero1_specs(step.tx, shapes.params, mesh, DATA))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    # Reports are the same on all devices, so their spec is P().
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(DATA)), out_specs=(specs, P()))
    return mapped, jax.jit(step.init, out_shardings=shardings)(params)


def _is_divided(opt_state: Any) -> bool:
    def is_zero1(node: Any) -> bool:
        return isinstance(node, ampx.Zero1State)

    return any(map(is_zero1, jax.tree.leaves(opt_state, is_leaf=is_zero1)))


def split(batch: Any, mesh: Mesh | None) -> Any:
    """Puts an equal part of a batch on each device; the stages of a pipeline all have the same.

    Args:
      batch: an array that all processes hold whole; each puts down what its own devices need.
      mesh: a mesh, or None.

    Returns:
      The batch as a global array; without a mesh as it was.

    Examples:
      >>> import numpy as np
      >>> from ampx.examples import meshes
      >>> meshes.split(np.ones((4, 2)), meshes.make_mesh("data=1")).shape
      (4, 2)
    """
    if mesh is None:
        return batch
    # The function is called once for each device of this process, with the rows of that device.
    batch = np.asarray(batch)
    rows = NamedSharding(mesh, P(DATA if DATA in mesh.shape else None))
    return jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])


def gather(tree: Any, mesh: Mesh | None) -> Any:
    """Whole arrays on one device of this process. All processes must call it.

    Args:
      tree: arrays on the mesh.
      mesh: a mesh, or None.

    Returns:
      The same values; without a mesh the same arrays.

    Examples:
      >>> import numpy as np
      >>> from ampx.examples import meshes
      >>> mesh = meshes.make_mesh("data=1")
      >>> print(meshes.gather(meshes.split(np.ones(2), mesh), mesh))
      [1. 1.]
    """
    if mesh is None:
        return tree
    # An identity with another sharding of its output is an all-gather. A process can read only what
    # lies on its own devices, so all of them get the whole.
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
