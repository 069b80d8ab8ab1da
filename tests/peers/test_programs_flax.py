"""Flax's own layers, linen and nnx, trained at all opt levels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from listing import Peer
from programs import (
    IMAGES,
    RUN,
    SEQUENCE,
    VECTORS,
    Program,
    Programs,
    cross_entropy,
    fill,
    mean_square,
    parametrize_cases,
)

import ampx

EXCLUDED: dict[str, str] = {}
FLAX = Programs(EXCLUDED)
PEERS = (
    Peer(
        source="flax",
        runs="attention, LSTM, batch norm and scans over layers, of linen and nnx: traced, "
        "gradients, and ten steps at O0, at O1 in both half types, and where a model computes in "
        "the dtype of its parameters at O2 in float16",
        cases=FLAX.cases,
        in_suite=FLAX.in_suite,
        excluded=EXCLUDED,
    ),
)


def _of_linen(model: linen.Module, batch: Any, loss_of: Callable = mean_square) -> Program:
    variables = fill(jax.eval_shape(model.init, jax.random.key(0), batch["x"]))
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def loss(params: Any, batch: Any) -> jax.Array:
        found, _ = model.apply({"params": params, **others}, batch["x"], mutable=list(others))
        return loss_of(found, batch["y"])

    return Program(loss, variables["params"], batch)


@FLAX.add(casts=True)
def linen_attention() -> Program:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            h = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(h, h)
            h = linen.gelu(linen.Dense(16)(linen.LayerNorm()(x)))
            return x + linen.Dense(8)(h)

    return _of_linen(Block(), SEQUENCE)


@FLAX.add(casts=True)
def linen_lstm() -> Program:
    return _of_linen(linen.RNN(linen.OptimizedLSTMCell(8)), SEQUENCE)


@FLAX.add(casts=True)
def linen_batch_norm() -> Program:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(8, (3, 3), strides=2)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
            return linen.Dense(10)(x.mean((1, 2)))

    return _of_linen(Net(), IMAGES, cross_entropy)


@FLAX.add(casts=True)
def linen_scan_over_layers() -> Program:
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + linen.silu(linen.Dense(8)(linen.RMSNorm()(x))), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            layers = linen.scan(
                linen.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3
            )
            return layers()(x, None)[0]

    return _of_linen(Net(), VECTORS)


def _of_nnx(model: nnx.Module, batch: Any, run: Callable | None = None) -> Program:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    rest = jax.tree.map(lambda leaf: leaf, rest)

    def loss(params: Any, batch: Any) -> jax.Array:
        merged = nnx.merge(graph, params, rest, copy=True)
        found = run(merged, batch["x"]) if run else merged(batch["x"])
        return mean_square(found, batch["y"])

    return Program(loss, nnx.to_pure_dict(params), batch)


@FLAX.add
def nnx_attention() -> Program:
    return _of_nnx(nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False), SEQUENCE)


@FLAX.add
def nnx_rnn() -> Program:
    cell = nnx.OptimizedLSTMCell(8, 8, rngs=nnx.Rngs(0))
    return _of_nnx(nnx.RNN(cell, rngs=nnx.Rngs(1)), SEQUENCE)


@FLAX.add
def nnx_scan_over_layers() -> Program:
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return x + jax.nn.silu(self.linear(self.norm(x)))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make_layers(rngs):
        return Layer(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run_layers(layer, x):
        return layer(x)

    return _of_nnx(make_layers(nnx.Rngs(0)), VECTORS, run_layers)


@pytest.mark.slow_but("linen_attention-traced", "nnx_scan_over_layers-traced")
@pytest.mark.parametrize("case", FLAX.cases(["traced"]))
def test_programs_are_traced(case):
    FLAX.check(case)


@pytest.mark.slow_but("linen_batch_norm-O2-float16")
@parametrize_cases([FLAX], RUN)
def test_programs_are_run(programs, case):
    programs.check(case)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_layers_in_8_bits_run_as_they_are_written(half):
    """Their products quantize operands themselves; autocast keeps its hands off."""
    model = linen.Dense(16, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = np.ones((16, 16), np.float32) / 3
    variables = model.init(jax.random.key(0), x)
    plain, cast = model.apply, ampx.autocast(model.apply, half_dtype=half)
    found, expected = jax.jit(lambda v: (cast(v, x), plain(v, x)))(variables)
    # Spacing of float8_e4m3 is 2**-3: an operand that half has rounded may go to its neighbour.
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-3, atol=2**-6)
