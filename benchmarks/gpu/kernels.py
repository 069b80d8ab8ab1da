"""Which settings of kernels are best on this GPU, and where kernels measure a norm faster than XLA.

Every setting runs the update of AdamW with a verdict, without the norm in front of it: the bytes of
a load and the elements of a thread block on few large arrays, the number of parameters that share a
launch on many small ones. Moments in 8 bits cost arithmetic and not only bytes, so block sizes are
asked of them too. What wins becomes the default by the rule in `adopting`.

Decoding 8-bit moments by a table of 256 numbers is timed in XLA alone. A kernel cannot look up:
Mosaic lowers no gather by a vector of indices for GPUs (jax 0.11.2).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import ampx
from ampx.fused.kernels.pallas_updates import make_kernel_squares
from ampx.fused.moments.int8_blocks import BLOCK, from_codes
from ampx.updates.gradient_norms import sum_squares
from ampx.updates.tails import DEFAULT_PLAN, KernelPlan, Tail, unwrap_results
from benchmarks.gpu.rows import Case, Way
from benchmarks.gpu.tails import Tree, make_trees

DEFAULT = "default"
FEW, MANY, INT8 = "few large arrays", "many small arrays", "few large arrays, int8 moments"
NORM = "norm of the gradients"
XLA, KERNELS = "XLA", "kernels"

# The settings by the name of their row.
BLOCKS = {
    f"{elements} elements, {vector} a load": KernelPlan(elements=elements, vector=vector)
    for elements in (512, 1024, 2048, 4096)
    for vector in (2, 4, 8)
}
LAUNCHES = {f"{leaves} arrays a launch": KernelPlan(leaves=leaves) for leaves in (4, 8, 32, 64)}


def plan_of(candidate: str) -> KernelPlan | None:
    """The settings that a row is of."""
    return {DEFAULT: DEFAULT_PLAN, **BLOCKS, **LAUNCHES}.get(candidate)


def cases_of(plan: KernelPlan) -> tuple[str, ...]:
    """The cases in which settings are asked."""
    if plan.leaves != DEFAULT_PLAN.leaves:
        return (MANY,)
    return (FEW, MANY, INT8) if plan.vector == DEFAULT_PLAN.vector else (FEW,)


def make_cases(tiny: bool) -> list[Case]:
    """Settings, norms and decoding."""
    if tiny:
        few, many = Tree(FEW, ((2048,),) * 2), Tree(MANY, ((300,),) * 4)
    else:
        # Both are larger than a GPU's cache.
        few, many = Tree(FEW, ((2048, 4096),) * 8), Tree(MANY, ((125_000,),) * 64)
    int8 = functools.partial(ampx.fused.adamw, mu_dtype="int8", nu_dtype="int8")
    norms = {key: _norm(tree) for key, tree in make_trees(tiny).items()}
    if not tiny:  # it compiles for half a minute
        del norms["2000"].ways[KERNELS]
    return [
        _settings(FEW, few, ampx.fused.adamw, 28),
        *(norms[key] for key in ("1", "gpt2", "2000")),
        _decoding(1 << 12 if tiny else 1 << 26),
        _settings(INT8, few, int8, 16),
        _settings(MANY, many, ampx.fused.adamw, 28),
        norms["400"],
    ]


def _settings(name: str, tree: Tree, make: Any, size: float) -> Case:
    tx = make(1e-3, weight_decay=0.1)
    backend: Any = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"

    def make_state() -> Any:
        params = tree.make(0, 0.1)
        return params, tx.init(params)

    def way(plan: KernelPlan) -> Way:
        def step(state: Any, grads: Any, factor: jax.Array) -> Any:
            params, opt_state = state
            skip = ~jnp.isfinite(factor)
            tail = Tail(factor, skip, new_params=True, backend=backend, plan=plan)
            results, opt_state = tx.update(grads, opt_state, params, tail=tail)
            return unwrap_results(results)[0], opt_state

        return Way(step, make_state, size * tree.elements, 3 * len(tree.shapes))

    plans = {by: plan for by, plan in {**BLOCKS, **LAUNCHES}.items() if name in cases_of(plan)}
    others = {by: way(plan) for by, plan in plans.items() if plan != DEFAULT_PLAN}
    ways = {DEFAULT: way(DEFAULT_PLAN), **others}

    def make_data() -> Any:
        return tree.make(1, 1e-3), jnp.ones(())

    return Case(name, ways, make_data, DEFAULT, tree.elements)


def _norm(tree: Tree) -> Case:
    backend: Any = "mosaic_gpu" if jax.default_backend() == "gpu" else "interpret"
    squares = make_kernel_squares(backend, DEFAULT_PLAN)
    assert squares is not None

    def way(sum_all: Any, cost: float) -> Way:
        def step(total: jax.Array, grads: Any) -> jax.Array:
            return total + sum(sum_all(grads))

        return Way(step, lambda: jnp.zeros(()), 4.0 * tree.elements, cost)

    arrays = len(tree.shapes)
    ways = {XLA: way(sum_squares, arrays), KERNELS: way(squares, 3 * arrays)}
    return Case(f"{NORM}, {tree.name}", ways, lambda: (tree.make(1, 1e-3),), XLA, tree.elements)


def _decoding(elements: int) -> Case:
    """From codes of second moments to float32, by integer arithmetic and by a table."""
    shape = elements // BLOCK, BLOCK

    def make_data() -> Any:
        bits = jax.random.bits(jax.random.key(0), shape, jnp.uint8)
        return bits, jax.random.uniform(jax.random.key(1), (shape[0], 1))

    def by_table(codes: jax.Array, scales: jax.Array) -> jax.Array:
        table = from_codes(jnp.arange(256, dtype=jnp.uint8), jnp.ones(()))
        return table[codes] * scales

    def way(decode: Any) -> Way:
        def step(_: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
            return decode(codes, scales)

        return Way(step, functools.partial(jnp.zeros, shape), 5.0 * elements)

    ways = {"arithmetic": way(from_codes), "a table": way(by_table)}
    return Case("decoding of int8 moments, XLA", ways, make_data, "arithmetic", elements)
