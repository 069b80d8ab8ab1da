"""What does a loss scale cost around each transformation of optax on an H100 that is not there?

On GPUs a skip is a choice behind each number, on CPUs a branch around the update (see
`ampx.updates.devices`). The table has both forms, compiled for an H100: bytes that they move a
parameter and, in brackets, those of temporaries, with updates that the caller adds to parameters
(`tx.update`) and with new parameters, as in `ampx.train_step`.

Run `python -m benchmarks.aot_optax` where `jax[cuda12]` or `jax[cuda13]` is installed, perhaps with
names: `adamw lamb`. Bytes are counted as by `benchmarks.aot`.
"""

from __future__ import annotations

import argparse
import functools
import os
import unittest.mock
from typing import Any

# Set before a backend starts: no driver is needed to compile.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.updates import devices
from ampx.updates.tails import Tail
from benchmarks.aot import ELEMENTS, SHAPES, Row, is_installed, measure_step
from benchmarks.measuring import print_table
from benchmarks.optax_updates import TAKES, find_names, make_named

FORMS = {"choice": "gpu", "branch": "cpu"}  # by the platform that has the form


def count_all(name: str) -> list[Row]:
    """The rows of optax alone, and of each form with updates and with new parameters."""
    tx = optax.with_extra_args_support(make_named(name))
    scaled = ampx.dynamic_loss_scale(tx)
    extra_args = {"value": jnp.float32(1.0)} if TAKES.get(name) else {}

    def by_update(tx: Any, params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def by_params(params: Any, state: Any, grads: Any) -> Any:
        tail = Tail(new_params=True)
        applied, state = scaled.update(grads, state, params, tail=tail, **extra_args)
        return applied.params, state

    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    count = functools.partial(measure_step, "h100", elements=ELEMENTS, grads=jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(scaled.init, params)
        rows = [count(functools.partial(by_update, tx), params, state.inner_state)]
        for platform in FORMS.values():
            with unittest.mock.patch.object(devices, "find_device", lambda own=platform: (own, "")):
                rows.append(count(functools.partial(by_update, scaled), params, state))
                rows.append(count(lambda *args: by_params(*args), params, state))
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_optax")
    parser.add_argument("names", nargs="*", help="of transformations; all by default")
    names = parser.parse_args().names or find_names()
    if not is_installed("h100"):
        raise SystemExit("jax[cuda12] or jax[cuda13] is not installed")
    jax.devices()  # a step has the form of the devices that are known when it is traced
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
