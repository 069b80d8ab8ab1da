"""What do compilers make of the fused updates for an H100 and a TPU v5e, without either at hand?

Run `make aot`. It prints counts and bytes, never times. Kernels must work in place, without
temporaries, and move no more than XLA does. Optimizers of optax must work in place under a
loss scale. Where that is not so, the end of the output says it, and the exit status is 1.

Each accelerator needs its own large optional package, in an environment of its own: `jax[cuda12]`
or `jax[cuda13]` (5 GB), `jax[tpu]` (1.3 GB). Where one is missing, the output says so, and the
others are compiled.

Bytes are those of operands and results of what the entry of the optimized program runs: fusions,
custom calls and other instructions that do work, and those of the branch that updates. XLA starts
some copies between memory and a TPU's VMEM ahead of time; the bytes of those are not counted again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

import ampx
from ampx.diagnostics.hlo import Instruction, parse_computations
from ampx.updates.tails import Tail
from benchmarks.fused_traffic import DERIVED, OPTIMIZERS, sizes_of_arrays
from benchmarks.measuring import traced_for

TARGETS = {"h100": "NVIDIA H100", "v5e": "TPU v5e"}
PLATFORMS = {"h100": "gpu", "v5e": "tpu"}
NOT_INSTALLED = 3
SHAPES = {f"w{k}": (2048, 2048) for k in range(4)} | {f"b{k}": (2048,) for k in range(4)}
ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
KERNELS = {"h100": "mosaic_gpu", "v5e": "mosaic_tpu"}
# Of the optimizers that optax has too, those that are also compiled with a loss scale and a clip.
SCALED_TOO = ("AdamW", "LAMB")
# Of optax, as `ampx.train_step` runs them with a loss scale: behind a branch, and on GPUs behind a
# choice.
BRANCHES = {
    "SGD": optax.sgd(1e-3),
    "AdamW": optax.adamw(1e-3),
    "clip, AdamW": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "LAMB": optax.lamb(1e-3),
    "LARS": optax.lars(1e-3),
}
BRANCH = "optax, a loss scale"

_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"}
_COPIES = re.compile(r"(copy|slice|async)-(start|done)")


class Row(NamedTuple):
    """What a compiled update takes.

    Attributes:
      temporaries: bytes a parameter beside inputs and outputs.
      in_place: bytes a parameter of outputs that reuse the buffers of inputs.
      kernels: instructions of the entry that do work.
      custom_calls: those of them that are custom calls, as our kernels are.
      moved: bytes a parameter of all their operands and results.
    """

    temporaries: float
    in_place: float
    kernels: int
    custom_calls: int
    moved: float

    def faults(self, xla: Row, held: float) -> list[str]:
        """Lists what is wrong with kernels beside XLA's row; `held` are parameters and state."""
        wrong = {
            f"{self.kernels} kernels, and none of them ours": not self.custom_calls,
            f"{self.in_place:.2f} B/param in place of {held:.2f}": self.in_place < 0.999 * held,
            # A quarter of a byte is allowed: on TPUs XLA computes the norm, and takes as much.
            f"{self.temporaries:.2f} B/param of temporaries": self.temporaries > 0.25,
            f"{self.moved:.1f} B/param, XLA {xla.moved:.1f}": self.moved > 1.01 * xla.moved,
        }
        return [what for what, is_so in wrong.items() if is_so]


class Counts(NamedTuple):
    """What is counted in the text of a program; `size` in bytes."""

    kernels: int
    custom_calls: int
    size: float


def counted(text: str, *, elements: float = math.inf) -> Counts:
    """Counts what the entry computation of an optimized HLO text runs.

    Args:
      text: the program.
      elements: how many parameters a branch updates, if any does. That is the branch that an
        ordinary step takes. Else it takes the one for a norm that did not overflow, which reads no
        array again. An update moves at least 10 bytes a parameter, and a norm less.
    """
    computations, entry = parse_computations(text)

    def count(name: str) -> Counts:
        return sum_up(
            count_one(instruction)
            for instruction in computations[name]
            if instruction.opcode not in _FREE and not _COPIES.fullmatch(instruction.opcode)
        )

    def count_one(instruction: Instruction) -> Counts:
        operands: Sequence[str] = instruction.operand_types
        if instruction.opcode == "conditional":
            dear = max(map(count, instruction.called), key=lambda counts: counts.size)
            if dear.size > 8 * elements:
                return dear
            operands = ()
        size = sum(_bytes(kind) for kind in (instruction.result, *operands))
        return Counts(1, instruction.opcode == "custom-call", size)

    def sum_up(counts: Iterable[Counts]) -> Counts:
        return Counts(*map(sum, zip(Counts(0, 0, 0), *counts, strict=True)))

    return count(entry)


def _bytes(kind: str) -> float:
    return sum(size for _, size in sizes_of_arrays(kind))


def _h100_config() -> str:
    """XLA's own description of the GPU, in the text format that `get_topology_desc` takes."""
    return """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def make_topology(target: str, count: int = 1) -> Any:
    """Describes accelerators that are not there; `count` is of GPUs."""
    if target == "v5e":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    settings = dict(target_config=_h100_config(), topology=f"1x1x{count}")
    return topologies.get_topology_desc(platform="cuda", **settings)


def is_installed(target: str) -> bool:
    """Whether the package with an accelerator's compiler is there."""
    names = {"v5e": ["libtpu"], "h100": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}[target]
    return any(importlib.util.find_spec(name) for name in names)


def _kernels_know_the_tpu(target: str) -> Any:
    """A context that tells kernels which TPU they are for, as one-dimensional blocks need."""
    if target == "h100":
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _cases() -> dict[str, tuple[Any, Any]]:
    """The fused optimizers by name, with the dtype of their parameters."""
    adamw = functools.partial(ampx.fused.adamw, 1e-3)
    int8 = dict(mu_dtype="int8", nu_dtype="int8")
    # No kernel of ours takes NovoGrad.
    plain = {name: make for name, make in OPTIMIZERS.items() if name != "NovoGrad"}
    derived = {name: (ampx.fused.fuse(tx), jnp.float32) for name, tx in DERIVED.items()}
    written = {name: (make(ampx.fused), jnp.float32) for name, make in plain.items()}
    narrow = {
        "AdamW, int8 moments": (adamw(**int8), jnp.float32),
        "AdamW, split masters": (ampx.fused.split_masters(adamw()), jnp.bfloat16),
        "AdamW, split masters of 8 bits, int8 moments": (
            ampx.fused.split_masters(adamw(**int8), 8),
            jnp.bfloat16,
        ),
        "AdamW, stochastic rounding, int8 moments": (
            ampx.fused.stochastic_rounding(adamw(**int8)),
            jnp.bfloat16,
        ),
    }
    return written | derived | narrow


def compile_for(target: str) -> None:
    """Compiles everything for one accelerator, prints the rows of its table, exits with faults."""
    if not is_installed(target):
        sys.exit(NOT_INSTALLED)
    with traced_for(PLATFORMS[target]):
        faults = _find_faults(target)
    if faults:
        sys.exit("\n".join(faults))


def _find_faults(target: str) -> list[str]:
    faults: list[str] = []
    for name, tx in BRANCHES.items():
        faults += _run_scaled(target, name, tx)
    for name, (tx, dtype) in _cases().items():
        theirs = OPTIMIZERS[name](optax) if name in OPTIMIZERS else DERIVED.get(name)
        faults += _compare(target, name, tx, dtype, theirs)
        if theirs is None or name in SCALED_TOO:
            title, scaled = f"{name}, scale, clip", ampx.dynamic_loss_scale(tx)
            faults += _compare(target, title, scaled, dtype, max_norm=1.0)
    return faults


def _compare(
    target: str, title: str, tx: Any, dtype: Any, theirs: Any = None, max_norm: float | None = None
) -> list[str]:
    """Prints a row for optax's optimizer (if any), XLA and kernels; returns faults of the last."""
    params = {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in SHAPES.items()}
    state = jax.eval_shape(tx.init, params)
    steps = {"optax": functools.partial(_optax_step, theirs)} if theirs else {}
    for backend in ("xla", KERNELS[target]):
        steps[backend] = functools.partial(_step, tx, max_norm, backend)
    rows = {backend: measure_step(target, step, params, state) for backend, step in steps.items()}
    for backend, row in rows.items():
        _print_row(target, title, backend, row)
    found = rows[KERNELS[target]].faults(rows["xla"], _held(params, state))
    return [f"{TARGETS[target]}, {title}: {fault}" for fault in found]


def _run_scaled(target: str, title: str, theirs: Any) -> list[str]:
    """Prints rows for an optimizer of optax alone and under a loss scale; its faults."""
    tx = ampx.dynamic_loss_scale(theirs)

    def skipping(params: Any, state: Any, grads: Any) -> Any:
        applied, state = tx.update(grads, state, params, tail=Tail(new_params=True))
        return applied.params, state

    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    steps = {"optax": (functools.partial(_optax_step, theirs), theirs), BRANCH: (skipping, tx)}
    rows = {}
    for way, (step, own) in steps.items():
        state = jax.eval_shape(own.init, params)
        rows[way] = measure_step(target, step, params, state, elements=ELEMENTS)
        _print_row(target, title, way, rows[way])
    row, held = rows[BRANCH], _held(params, state)
    wrong = {
        f"{row.in_place:.2f} B/param in place of {held:.2f}": row.in_place < 0.999 * held,
        f"{row.temporaries:.2f} B/param of temporaries": row.temporaries
        > rows["optax"].temporaries + 0.25,
    }
    return [
        f"{TARGETS[target]}, {title}, {BRANCH}: {what}" for what, is_so in wrong.items() if is_so
    ]


def _print_row(target: str, title: str, way: str, row: Row) -> None:
    cells = (
        TARGETS[target],
        title,
        way,
        f"{row.temporaries:.2f}",
        f"{row.in_place:.2f}",
        f"{row.kernels} ({row.custom_calls})",
        f"{row.moved:.1f}",
    )
    print("|", " | ".join(cells), "|", flush=True)


def _held(params: Any, state: Any) -> float:
    """Bytes a parameter of parameters and state."""
    # Scalars (counts, the loss scale) are left out: they are nothing beside the parameters.
    arrays = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.ndim]
    return sum(a.size * a.dtype.itemsize for a in arrays) / ELEMENTS


def measure_step(
    target: str,
    step: Any,
    params: Any,
    state: Any,
    elements: float = math.inf,
    grads: Any = jnp.bfloat16,
) -> Row:
    """Compiles a step with donated parameters and state; reads memory and counts its program.

    Args:
      target: one of `TARGETS`.
      step: `(params, state, grads) -> (params, state)`.
      params: abstract values of `SHAPES`.
      state: those of the state.
      elements: see `counted`.
      grads: the dtype of gradients.
    """
    sharding = jax.sharding.SingleDeviceSharding(make_topology(target).devices[0])

    def shaped(tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding), tree
        )

    arguments = shaped(params), shaped(state), shaped(params, grads)
    with _kernels_know_the_tpu(target):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory, counts = compiled.memory_analysis(), counted(compiled.as_text(), elements=elements)
    return Row(
        memory.temp_size_in_bytes / ELEMENTS,
        memory.alias_size_in_bytes / ELEMENTS,
        counts.kernels,
        counts.custom_calls,
        counts.size / ELEMENTS,
    )


def _step(tx: Any, max_norm: Any, backend: Any, params: Any, state: Any, grads: Any) -> Any:
    return ampx.fused.apply(tx, grads, state, params, max_norm=max_norm, backend=backend)[:2]


def _optax_step(tx: Any, params: Any, state: Any, grads: Any) -> Any:
    """Optax's step on the same state: a fused optimizer's state is optax's, leaf by leaf."""
    structure = jax.tree.structure(jax.eval_shape(tx.init, params))
    own = jax.tree.unflatten(structure, jax.tree.leaves(state))
    updates, new = tx.update(grads, own, params)
    return optax.apply_updates(params, updates), new


def main() -> None:
    """Compiles for each accelerator in a process of its own, since a compiler may abort one."""
    print("Four matrices of 2048 x 2048 and four vectors, with bfloat16 gradients.")
    print(
        "\n| for | tail | backend | temporaries, B/param | in place, B/param "
        "| kernels (custom calls) | B/param |"
    )
    print("|---|---|---|---|---|---|---|")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no driver is needed to compile
        "TPU_SKIP_MDS_QUERY": "1",
    }
    failed = False
    for target in TARGETS:
        command = [sys.executable, "-m", "benchmarks.aot", target]
        code = subprocess.run(command, env=environment).returncode
        if code == NOT_INSTALLED:
            extra = "jax[tpu]" if target == "v5e" else "jax[cuda12] or jax[cuda13]"
            print(f"| {TARGETS[target]} | not compiled: {extra} is not installed | | | | | |")
        elif code:
            print(f"| {TARGETS[target]} | failed with exit status {code} | | | | | |")
            failed = True
    code = subprocess.run(
        [sys.executable, "-m", "benchmarks.aot_float8"], env=environment
    ).returncode
    if code == NOT_INSTALLED:
        print("\nProducts in float8: not compiled, jax[cuda12] or jax[cuda13] is not installed.")
    failed = failed or code not in (0, NOT_INSTALLED)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    compile_for(sys.argv[1]) if len(sys.argv) > 1 else main()
