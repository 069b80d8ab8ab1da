"""What this machine and this installation can do: the report of `python -m ampx`.

Whether half precision pays is a question to the device. It is asked here, and not looked up: a
product of two matrices is compiled for each dtype, the compiled program tells in which dtype it
multiplies, and it is timed. Most CPUs convert float16 to float32 first, so that it saves memory and
no time.
"""

from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import platform
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ampx.diagnostics.hlo import parse_computations
from ampx.fused.kernels.measured import resolve_backend
from ampx.text_tables import Block, Blocks, Table

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_HOPPER = "9.0"  # compute capability of the first GPUs that the kernels run on
_RUNS = 3  # of each product; the fastest counts
# What multiplies matrices in a compiled program: XLA itself, or a library that it calls.
_PRODUCTS = ("dot", "convolution", "custom-call")
_FLOAT = re.compile(r"\b(bf16|f\d+\w*)\[")
# Distribution, the module that it is imported as, what it is for, how to install it.
_OPTIONAL = (
    ("flax", "flax", "linen and nnx models", 'pip install "ampx-jax[flax]"'),
    ("matplotlib", "matplotlib", "ampx.plotting, the demo", 'pip install "ampx-jax[examples]"'),
    ("tqdm", "tqdm", "ampx.progress_bar, the demo", 'pip install "ampx-jax[examples]"'),
    ("orbax-checkpoint", "orbax.checkpoint", "checkpoints", "pip install orbax-checkpoint"),
    ("rich", "rich", "tables in terminals", 'pip install "ampx-jax[examples]"'),
    ("treescope", "treescope", "states as trees in notebooks", "pip install treescope"),
    ("torch", "torch", "tests that compare with it", "pip install torch"),
)


class MeasuredProduct(NamedTuple):
    """A product of two square matrices as this device computes it, with a float32 result.

    Attributes:
      dtype: of both matrices.
      computed_in: the dtype that is multiplied, as XLA writes it, such as `"bf16"`; `""` where the
        compiled program does not show it.
      flops: floating-point operations a second; 0.0 where the device refuses the dtype.
    """

    dtype: str
    computed_in: str
    flops: float


def measure_product(dtype: str, size: int) -> MeasuredProduct:
    """Compiles and times a product of two `size` x `size` matrices on the default device."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    try:
        compiled = product.lower(matrix, matrix).compile()
        jax.block_until_ready(compiled(matrix, matrix))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError):
        return MeasuredProduct(dtype, "", 0.0)
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(matrix, matrix))
        seconds.append(time.perf_counter() - started)
    return MeasuredProduct(
        dtype, _multiplied_dtype(compiled.as_text() or ""), 2 * size**3 / min(seconds)
    )


def _multiplied_dtype(hlo: str) -> str:
    """The dtype of the operands of the first product in a compiled program."""
    computations, _ = parse_computations(hlo)
    for instructions in computations.values():
        for instruction in instructions:
            found = _FLOAT.findall(" ".join(instruction.operand_types))
            if instruction.opcode in _PRODUCTS and found:
                return found[0]
    return ""


def find_version(distribution: str) -> str:
    """The version of an installed distribution, `""` if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe_environment(version: str, *, size: int | None = None) -> Blocks:
    """Describes versions, devices, what they do in half precision, kernels and optional parts.

    Args:
      version: that of ampx.
      size: rows of the matrices that are multiplied; by default as many as keep the device busy for
        some milliseconds.

    Returns:
      Several lines of text; `print` or `text_tables.print_report` them.
    """
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {"ampx": version} | {name: find_version(name) for name in names}
    versions["Python"] = platform.python_version()
    return Blocks(
        (
            ", ".join(f"{name} {found}" for name, found in versions.items() if found),
            "",
            _describe_devices(),
            "",
            *_describe_products(size),
            "",
            _describe_kernels(),
            "",
            _describe_optional_parts(),
        )
    )


def _describe_devices() -> str:
    counts = collections.Counter(device.device_kind for device in jax.devices())
    kinds = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    of_processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"Devices: {kinds} (backend {jax.default_backend()!r}{of_processes})"


def _describe_products(size: int | None) -> list[Block]:
    if size is None:
        size = 512 if jax.default_backend() == "cpu" else 4096
    products = [measure_product(dtype, size) for dtype in _DTYPES]
    rows = [("dtype", "computed in", "GFLOP/s", "of float32")]
    for product in products:
        if not product.flops:
            rows.append((product.dtype, "refused", "", ""))
            continue
        speed = f"{product.flops / 1e9:,.1f}", f"{product.flops / products[0].flops:.2f}"
        rows.append((product.dtype, product.computed_in or "-", *speed))
    slow = [p.dtype for p in products[1:] if p.computed_in == "f32"]
    title = f"Products of {size} x {size} matrices with float32 results, at JAX's precision:"
    note = f"{', '.join(slow)}: converted to float32 first, which saves memory and no time."
    return [title, Table(rows), *([note] if slow else [])]


def _describe_kernels() -> str:
    """Says which kernels ampx.fused has for this device; they were written for Hopper GPUs on."""
    try:
        kernels = f"{resolve_backend('pallas')[0]} kernels"
    except ValueError:
        kernels = (
            f"no kernels for {jax.default_backend()!r}, GPUs (Hopper or newer) and TPUs have some"
        )
    capability = getattr(jax.devices()[0], "compute_capability", _HOPPER)
    if not re.fullmatch(r"\d+\.\d+", capability):  # AMD's are names, such as gfx942
        kernels = "they are for NVIDIA's GPUs and for TPUs"
    elif float(capability) < float(_HOPPER):
        kernels = f"needs compute capability {_HOPPER} (Hopper), this GPU has {capability}"
    return (
        "Fused updates (ampx.fused): by default XLA's own fusions, on every device.\n"
        f'backend="pallas": {kernels}.'
    )


def _describe_optional_parts() -> Table:
    rows = [("optional part", "version", "for", "to install")]
    for distribution, module, purpose, command in _OPTIONAL:
        found = find_version(distribution) if _is_importable(module) else ""
        rows.append((distribution, found or "-", purpose, "" if found else command))
    return Table(rows)


def _is_importable(module: str) -> bool:
    """Whether a module can be found; the packages around it are imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
