"""What does a loss scale cost around each transformation of optax on an H100 that is not there?

On GPUs a skip is a choice behind each number, on CPUs a branch around the update (see
`ampx.updates.devices`). The table has both forms, compiled for an H100: bytes that they move a
parameter and, in brackets, those of temporaries, with updates that the caller adds to parameters
(`tx.update`) and with new parameters, as in `ampx.train_step`.

Run `python -m benchmarks.aot_optax` where `jax[cuda12]` or `jax[cuda13]` is installed, perhaps with
names: `adamw lamb`. Bytes are counted as by `benchmarks.aot`.

A model has many small arrays, for which a GPU takes as long as it takes to launch a kernel.
`--launches` counts the kernels that clip and AdamW launch for those of GPT-2 small.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

# Set before a backend starts: no driver is needed to compile.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import optax

import ampx
from benchmarks.aot import (
    ELEMENTS,
    SHAPES,
    Row,
    counted,
    is_installed,
    make_topology,
    measure_step,
)
from benchmarks.fused_traffic import Step, by_params, by_update
from benchmarks.gpu.tails import BY_KERNELS, make_cases
from benchmarks.measuring import print_table, traced_for
from benchmarks.optax_updates import TAKES, find_names, make_named

FORMS = {"choice": "gpu", "branch": "cpu"}  # by the platform that has the form


def count_all(name: str) -> list[Row]:
    """The rows of optax alone, and of each form with updates and with new parameters."""
    tx = optax.with_extra_args_support(make_named(name))
    scaled = ampx.dynamic_loss_scale(tx)
    extra_args = {"value": jnp.float32(1.0)} if TAKES.get(name) else {}
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}

    def count(step: Step, tx: Any) -> Row:
        def apart(params: Any, state: Any, grads: Any) -> Any:
            return step((params, state), grads)

        state = jax.eval_shape(tx.init, params)
        return measure_step("h100", apart, params, state, ELEMENTS, jnp.float32)

    with jax.numpy_dtype_promotion("standard"):
        rows = [count(by_update(tx, **extra_args), tx)]
        for platform in FORMS.values():
            with traced_for(platform):
                rows += [
                    count(make(scaled, **extra_args), scaled) for make in (by_update, by_params)
                ]
    return rows


def print_launches() -> None:
    """Prints how many kernels each tail of `make gpu` launches for the arrays of GPT-2 small."""
    case = make_cases(tiny=False, key="gpt2")[0]
    sharding = jax.sharding.SingleDeviceSharding(make_topology("h100").devices[0])
    rows = []
    for name, way in case.ways.items():
        if name in BY_KERNELS:  # these are XLA's where there is no GPU
            continue
        with traced_for("gpu"):
            state, data = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                (jax.eval_shape(way.make_state), jax.eval_shape(case.make_data)),
            )
            compiled = jax.jit(way.step, donate_argnums=0).lower(state, *data).compile()
        found = counted(compiled.as_text(), elements=case.elements)
        rows.append([name, str(found.kernels), f"{found.size / case.elements:.1f}"])
    header = ["everything behind the gradients", "kernels", "bytes a parameter"]
    print_table(f"{case.name}, for an H100", header, rows)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_optax")
    parser.add_argument("names", nargs="*", help="of transformations; all by default")
    parser.add_argument("--launches", action="store_true", help="count kernels for GPT-2 small")
    arguments = parser.parse_args()
    if not is_installed("h100"):
        raise SystemExit("jax[cuda12] or jax[cuda13] is not installed")
    if arguments.launches:
        print_launches()
        return
    names = arguments.names or find_names()
    header = ["transformation", "optax"]
    header += [f"{form}, {what}" for form in FORMS for what in ("updates", "parameters")]
    rows = [
        [f"`{name.removeprefix('contrib.')}`"]
        + [f"{row.moved:.0f} ({row.temporaries:.1f})" for row in count_all(name)]
        for name in names
    ]
    print_table("Bytes a parameter for an H100", header, rows)


if __name__ == "__main__":
    main()
