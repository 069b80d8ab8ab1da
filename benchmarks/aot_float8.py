"""Does XLA make float8 instructions of `autocast(dots=...)` for an H100? `make aot` runs this, too.

A product of 4096x2048x8192 and its two gradients are compiled by XLA's CUDA compiler, without a
GPU, and calls of cuBLASLt in float8 are counted. XLA knows a float8 product by its form. If it does
not, it widens the operands to half without a word, and the casts cost time and digits for nothing.

On four H100s with weights in shards (FSDP), each device gathers the weight before its product. The
gather should move float8, a quarter of the bytes of the float32 that is stored.

Triton is off: it cannot be tuned without a device, and XLA would take it for all products then,
whose kernels multiply in half. With a GPU XLA measures both and takes the faster one, so these
counts tell what it can choose, not what it will. No time follows from them.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ampx
from ampx.autocasting.float8 import RecipeName
from benchmarks.aot import NOT_INSTALLED, is_installed, make_topology

TOKENS, INPUTS, OUTPUTS = 4096, 2048, 8192
# Calls of cuBLASLt in float8 that each recipe must come to, of three.
EXPECTED: dict[RecipeName, int] = {
    "tensorwise": 3,
    "rowwise": 3,
    "rowwise_half_dw": 2,  # the third is in half on purpose
    "mxfp8": 0,  # blocks along the sum: a product in half of what float8 leaves
}
_CALL = re.compile(r'custom_call_target="__cublas\$lt\$matmul\$f8"')
_GATHER = re.compile(r"= (.*?) all-gather(?:-start)?\(")
_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def loss(weight: jax.Array, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A scalar whose gradient asks for both backward products."""
    return jnp.sum((x @ weight) * cotangent)


def _compile(recipe: RecipeName, devices: Any) -> Any:
    """The loss and its gradients; over several devices with a weight in shards, as data is."""
    x_spec = weight_spec = PartitionSpec("data", None)
    mesh = jax.sharding.Mesh(devices, ("data",)) if len(devices) > 1 else None

    def placed(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
        one = SingleDeviceSharding(devices[0])
        sharding = one if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    arguments = (
        placed(weight_spec, INPUTS, OUTPUTS),
        placed(x_spec, TOKENS, INPUTS),
        placed(x_spec, TOKENS, OUTPUTS),
    )
    fun = jax.value_and_grad(ampx.autocast(loss, dots=recipe), argnums=(0, 1))
    results = functools.partial(jax.tree.map, lambda a: a.sharding)
    jitted = jax.jit(fun, out_shardings=(None, results(arguments[:2])))
    return jitted.lower(*arguments).compile(compiler_options=_OPTIONS)


def main() -> None:
    """Prints a row for each recipe, and exits with what is not as it should be."""
    if not is_installed("h100"):
        sys.exit(NOT_INSTALLED)
    print(f"\nA product of {TOKENS} x {INPUTS} x {OUTPUTS} and its gradients, for NVIDIA H100s.\n")
    print("| recipe | float8 calls of 3 | temporaries, MiB | gathers of a weight on 4 devices |")
    print("|---|---|---|---|")
    one, four = (make_topology("h100", count).devices for count in (1, 4))
    faults = []
    for recipe, expected in EXPECTED.items():
        compiled = _compile(recipe, one)
        calls = len(_CALL.findall(compiled.as_text()))
        gathered = _find_gathered(_compile(recipe, four).as_text())
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(f"| `{recipe}` | {calls} | {memory:.0f} | {', '.join(gathered)} |", flush=True)
        if calls != expected:
            faults.append(f"{recipe}: {calls} calls in float8, not {expected}")
        if expected == 3 and gathered != ["f8e4m3fn"]:
            faults.append(f"{recipe}: gathers {gathered}, not float8 alone")
    if faults:
        sys.exit("\n".join(faults))


def _find_gathered(text: str) -> list[str]:
    """The dtypes of matrices that are gathered."""
    arrays = re.findall(r"(\w+)\[\d+,\d+\]", " ".join(_GATHER.findall(text)))
    return sorted(set(arrays))


if __name__ == "__main__":
    main()
