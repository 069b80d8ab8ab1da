"""The losses of optax, and parts of JAX that models are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas, sparse
from listing import Peer
from programs import (
    FORMS,
    RUN,
    SEQUENCE,
    VECTORS,
    Program,
    Programs,
    draw,
    mean_square,
    parametrize_cases,
)

EXCLUDED: dict[str, str] = {}
OPTAX, JAX = Programs(EXCLUDED), Programs(EXCLUDED)
ALL = (OPTAX, JAX)
PEERS = (
    Peer(
        source="optax",
        runs="its losses, CTC among them, behind a product: traced, gradients, and ten steps at "
        "O0 and O1 in both half types",
        cases=OPTAX.cases,
        in_suite=OPTAX.in_suite,
        excluded=EXCLUDED,
    ),
    Peer(
        source="jax",
        runs="`jax.nn.dot_product_attention`, sparse products, conjugate gradients and a Pallas "
        "kernel: the same",
        cases=JAX.cases,
        in_suite=JAX.in_suite,
        excluded=EXCLUDED,
    ),
)

LABELS = np.arange(24).reshape(4, 6) % 8
PADDING, WORDS = np.zeros((4, 6)), np.arange(12).reshape(4, 3) % 7 + 1
LOSSES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "ctc_loss": lambda z, y: optax.ctc_loss(z, PADDING, WORDS, np.zeros((4, 3))),
    "softmax_cross_entropy": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.softmax(y)),
    "softmax_cross_entropy_with_integer_labels": lambda z, y: (
        optax.softmax_cross_entropy_with_integer_labels(z, LABELS)
    ),
    "sigmoid_binary_cross_entropy": lambda z, y: optax.sigmoid_binary_cross_entropy(
        z, jax.nn.sigmoid(y)
    ),
    "sigmoid_focal_loss": lambda z, y: optax.sigmoid_focal_loss(z, jax.nn.sigmoid(y), gamma=2.0),
    "huber_loss": lambda z, y: optax.huber_loss(z, y),
    "log_cosh": lambda z, y: optax.log_cosh(z, y),
    "cosine_distance": lambda z, y: optax.cosine_distance(z, y, epsilon=1e-6),
    "kl_divergence": lambda z, y: optax.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(y)),
    "ranking_softmax_loss": lambda z, y: optax.losses.ranking_softmax_loss(
        z, jax.nn.softmax(y), reduce_fn=None
    ),
    "triplet_margin_loss": lambda z, y: optax.losses.triplet_margin_loss(z, y, -y),
}


def _make_loss(name: str) -> Callable[[], Program]:
    def make() -> Program:
        def loss(weight: jax.Array, batch: Any) -> jax.Array:
            return jnp.mean(LOSSES[name](batch["x"] @ weight, batch["y"]))

        return Program(loss, draw(8, 8) / 2, SEQUENCE)

    make.__name__ = name
    return make


for _name in LOSSES:
    OPTAX.add(_make_loss(_name))


def _of_attention(**options: Any) -> Program:
    def loss(weights: Any, batch: Any) -> jax.Array:
        q, k, v = (batch["x"] @ weights[name] for name in "qkv")
        q, k, v = (x.reshape(4, 6, -1, 4) for x in (q, k, v))
        found = jax.nn.dot_product_attention(q, k, v, **options)
        return mean_square(found.reshape(4, 6, 8), batch["y"])

    # Two heads of queries share one of keys and values.
    weights = {"q": draw(8, 8) / 2, "k": draw(8, 4, seed=1) / 2, "v": draw(8, 4, seed=2) / 2}
    return Program(loss, weights, SEQUENCE)


@JAX.add
def attention() -> Program:
    return _of_attention(is_causal=True)


@JAX.add
def attention_with_a_window() -> Program:
    return _of_attention(bias=draw(1, 2, 6, 6), local_window_size=2)


@JAX.add
def sparse_product() -> Program:
    pattern = sparse.BCOO.fromdense(np.where(draw(8, 8) > 0, draw(8, 8), 0))

    def loss(values: jax.Array, batch: Any) -> jax.Array:
        matrix = sparse.BCOO((values, pattern.indices), shape=(8, 8))
        return mean_square((matrix @ batch["x"].T).T, batch["y"])

    return Program(loss, np.asarray(pattern.data), VECTORS)


@JAX.add
def conjugate_gradients() -> Program:
    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def product(v):
            return (v @ weight.T) @ weight + v

        found, _ = jax.scipy.sparse.linalg.cg(product, batch["x"] @ weight, maxiter=20)
        return mean_square(found, batch["y"])

    return Program(loss, draw(8, 8) / 3, VECTORS)


@JAX.add
def pallas_kernel() -> Program:
    def add_and_double(x_ref, y_ref, out_ref):
        out_ref[...] = 2.0 * (x_ref[...] + y_ref[...])

    @jax.custom_vjp
    def kernel(x, y):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(add_and_double, out_shape=shape, interpret=True)(x, y)

    kernel.defvjp(lambda x, y: (kernel(x, y), None), lambda _, g: (2.0 * g, 2.0 * g))

    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        return mean_square(kernel(batch["x"] @ weight, batch["x"]) @ weight, batch["y"])

    return Program(loss, draw(8, 8) / 3, VECTORS, rate=0.02)


@pytest.mark.slow_but("ctc_loss-traced", "attention-traced", "pallas_kernel-traced")
@parametrize_cases(ALL, FORMS[:1])
def test_programs_are_traced(programs, case):
    programs.check(case)


@pytest.mark.slow_but("ctc_loss-gradients")
@parametrize_cases(ALL, RUN)
def test_programs_are_run(programs, case):
    programs.check(case)
