"""A layer that is jitted, autocast inside: JAX has one equation for all of its calls.

The calls differ in what is differentiated: the first one's input is a batch, those of the others
come from layers before. What a derivative rule keeps must not depend on that, since JAX reads what
one call has kept by the tree of the other (`custom_rules.py`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ampx

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 32)).astype("f4")
LAYERS = [RNG.standard_normal((32, 32)).astype("f4") / 6 for _ in range(3)]


def with_own_rule(keep, added=0.0):
    """x @ w with a rule of its own that keeps both, in an order of its own."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w + added

    def backward(kept, g):
        x, w = (kept[name] for name in "xw")
        return g @ w.T, x.T @ g

    product.defvjp(lambda x, w: (x @ w + added, keep(x, w)), backward)
    return lambda w, x: x + jnp.tanh(product(x, w))


def multiply(w, x):
    return x + jnp.tanh(x @ w)


def convolve(w, x):
    rows = x[None].transpose(0, 2, 1)  # [1, features, rows]
    return x + jnp.tanh(lax.conv_general_dilated(rows, w[:, :, None], (1,), "SAME")[0].T)


def in_a_scan(layer):
    return lambda w, x: lax.scan(lambda x, _: (layer(w, x), None), x, None, length=2)[0]


WIDE = ampx.DEFAULT_RULES.half("dot_general", "conv_general_dilated", result="f32")
OWN = with_own_rule(lambda x, w: {"x": x, "w": w})
LAYER_KINDS = {
    "products": (multiply, {}),
    "own rule": (OWN, {}),
    "own rule, opaque": (OWN, {"custom_vjp": "opaque"}),
    "own rule that keeps what it makes": (
        with_own_rule(lambda x, w: {"x": x * 1.0, "w": w * 1.0}),
        {},
    ),
    "own rule that closes over an array": (
        with_own_rule(lambda x, w: {"x": x, "w": w}, added=jnp.asarray(X)),
        {},
    ),
    "own rule in a scan": (in_a_scan(OWN), {}),
    "own rule twice": (lambda w, x: OWN(w, OWN(w, x)), {}),
    "own rule with remat": (jax.checkpoint(OWN), {}),
    "autocast in autocast": (ampx.autocast(OWN), {}),
    "wide products": (multiply, {"rules": WIDE}),
    "wide convolutions": (convolve, {"rules": WIDE}),
    "float8": (multiply, {"dots": "float8"}),
    "mxfp8": (multiply, {"dots": "mxfp8"}),
    "own rule in float8": (OWN, {"dots": "float8"}),
}


def grads_of(layer, remat=False):
    def loss(layers):
        # Float32: a sum of halves would differ by its order.
        return jnp.sum(functools.reduce(lambda x, w: layer(w, x), layers, X).astype("f4"))

    return jax.grad(jax.checkpoint(loss) if remat else loss)(LAYERS)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("name", LAYER_KINDS)
def test_gradients_are_those_of_layers_traced_one_by_one(name, remat):
    layer, settings = LAYER_KINDS[name]
    each = ampx.autocast(layer, **settings)
    for got, expected in zip(grads_of(jax.jit(each), remat), grads_of(each, remat), strict=True):
        assert np.linalg.norm(got - expected) <= 0.04 * np.linalg.norm(expected)
