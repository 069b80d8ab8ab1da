"""Products in float8 beside bfloat16: the benchmark of `benchmarks.float8` at one size, as rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import ampx
from benchmarks import float8
from benchmarks.gpu.rows import Case, Way
from benchmarks.measuring import Candidate

SIZE = 4096


def make_cases(tiny: bool) -> list[Case]:
    """Each recipe of `autocast(dots=...)`, with the kernels that ran."""
    size = 32 if tiny else SIZE

    def make_data() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        x, weight, cotangent = (jax.random.normal(key, (size, size)) for key in keys)
        return weight, x, cotangent

    case = Case(
        f"product of {size} x {size} and its gradients",
        {recipe or "bfloat16": _way(recipe, size) for recipe in float8.RECIPES},
        make_data,
        "bfloat16",
        describe=_list_kernels,
    )
    return [case]


def _way(recipe: str | None, size: int) -> Way:
    fun = ampx.autocast(lambda weight, x: x @ weight, dots=recipe)

    # The last gradients are the state, so that none is allocated anew.
    def step(_: Any, weight: jax.Array, x: jax.Array, cotangent: jax.Array) -> Any:
        y, pull = jax.vjp(fun, weight, x)
        return pull(cotangent.astype(y.dtype))

    zeros = functools.partial(jnp.zeros, (size, size))
    return Way(step, lambda: (zeros(), zeros()))


def _list_kernels(candidate: Candidate) -> str:
    kernels = float8.profile(candidate)
    longest = ", ".join(name[:40] for name in kernels.longest)
    return f"{kernels.float8_share:.0%} of the time in float8 kernels: {longest}"
