"""Haiku's layers and networks, and NumPyro's variational inference."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from listing import Peer
from numpyro import distributions
from programs import (
    CHECKS,
    FORMS,
    IMAGES,
    RUN,
    SEQUENCE,
    VECTORS,
    Program,
    Programs,
    cross_entropy,
    draw,
    fill,
    like_params,
    mean_square,
    parametrize_cases,
    zeros,
)

EXCLUDED: dict[str, str] = {}
HAIKU, NUMPYRO = Programs(EXCLUDED), Programs(EXCLUDED)
ALL = (HAIKU, NUMPYRO)
PEERS = (
    Peer(
        source="dm-haiku",
        runs="transformer blocks, an LSTM, residual networks: traced, gradients, and ten steps at "
        "O0, at O1 in both half types, and where a model computes in the dtype of its parameters "
        "at O2 in float16 (ResNet18: traced, and gradients; ResNet50: traced, and with `--whole` "
        "ten steps at O0 and O1)",
        cases=HAIKU.cases,
        in_suite=HAIKU.in_suite,
        excluded=EXCLUDED,
    ),
    Peer(
        source="numpyro",
        runs="a variational bound: traced, gradients, and ten steps at O0 and O1",
        cases=NUMPYRO.cases,
        in_suite=NUMPYRO.in_suite,
        excluded=EXCLUDED,
    ),
)


def _of_haiku(forward: Callable, loss_of: Callable, batch: Any, **settings: Any) -> Program:
    model = hk.transform_with_state(forward)
    params, state = jax.eval_shape(model.init, jax.random.key(0), batch["x"])
    state = zeros(state)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = like_params(params, batch["x"])
        found, _ = model.apply(params, state, jax.random.key(1), x)
        return loss_of(found, batch["y"])

    return Program(loss, fill(params), batch, **settings)


@HAIKU.add(casts=True)
def haiku_transformer() -> Program:
    def norm(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def forward(x):
        for _ in range(2):
            h = norm(x)
            initializer = hk.initializers.VarianceScaling(1.0)
            x = x + hk.MultiHeadAttention(2, 4, w_init=initializer)(h, h, h)
            x = x + hk.nets.MLP([16, 8], activation=jax.nn.gelu)(norm(x))
        return x

    return _of_haiku(forward, mean_square, SEQUENCE)


@HAIKU.add
def haiku_lstm() -> Program:
    def forward(x):
        core = hk.LSTM(8)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)[0]

    return _of_haiku(forward, mean_square, SEQUENCE)


def _of_network(network: Callable[..., Any], images: Any = IMAGES) -> Program:
    def forward(x):
        return network(10, resnet_v2=True)(x, is_training=True)

    # Batch norms over 4 rows, in the end of one pixel each, magnify rounding: to round parameters
    # and images to bfloat16, and to compute in float32, changes these gradients by a third.
    return _of_haiku(forward, cross_entropy, images, largest_error=64.0)


@HAIKU.add(forms=("traced", "gradients"))
def haiku_resnet18() -> Program:
    return _of_network(hk.nets.ResNet18)


@HAIKU.add(forms=("traced",))
def haiku_resnet50() -> Program:
    return _of_network(hk.nets.ResNet50)


@NUMPYRO.add
def numpyro_bound() -> Program:
    def model(batch):
        weight = numpyro.sample("weight", distributions.Normal(0.0, 1.0).expand([8, 8]).to_event(2))
        with numpyro.plate("rows", 4):
            found = distributions.Normal(batch["x"] @ weight, 1.0).to_event(1)
            numpyro.sample("y", found, obs=batch["y"])

    def guide(batch):
        location = numpyro.param("location", draw(8, 8))
        scale = jnp.exp(numpyro.param("log_scale", draw(8, 8, seed=1)))
        numpyro.sample("weight", distributions.Normal(location, scale).to_event(2))

    def loss(params: Any, batch: Any) -> jax.Array:
        bound = numpyro.infer.Trace_ELBO()
        return bound.loss(jax.random.key(1), params, model, guide, batch) / 32

    params = {"location": draw(8, 8), "log_scale": draw(8, 8, seed=1)}
    return Program(loss, params, VECTORS, rate=0.02)


@pytest.mark.slow_but("haiku_transformer-traced", "numpyro_bound-traced")
@parametrize_cases(ALL, FORMS[:1])
def test_programs_are_traced(programs, case):
    programs.check(case)


@pytest.mark.slow_but("haiku_lstm-O1-float16")
@parametrize_cases(ALL, RUN)
def test_programs_are_run(programs, case):
    programs.check(case)


@pytest.mark.whole  # it takes three minutes
def test_a_network_of_fifty_layers_trains():
    """Ten steps at O0 are those of optax; at O1 the loss falls as far in both half types."""
    images = {"x": draw(16, 16, 16, 3), "y": np.arange(16) % 10}
    with jax.numpy_dtype_promotion("standard"):
        program = dataclasses.replace(_of_network(hk.nets.ResNet50, images), rate=0.003)
        for form in ("O0", "O1-bfloat16", "O1-float16"):
            CHECKS[form](program)
