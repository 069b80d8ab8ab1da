"""One half copy of a value that several readers narrow, and their cotangents summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal

import ampx
from ampx.jaxprs import reading
from benchmarks.autocast import residual_bytes

HALF = jnp.bfloat16
READERS = 3
GENERATOR = np.random.default_rng(0)
W = jnp.asarray(GENERATOR.normal(size=(8, 8)), jnp.float32)
XS = jnp.asarray(GENERATOR.normal(size=(READERS, 4, 8)), jnp.float32)


def plain(w, xs):
    """Several products read one computed value, which they narrow."""
    value = jnp.exp(w)
    return sum(jnp.sum(jnp.square(jnp.tanh(x @ value))) for x in xs)


def each_for_itself(w, xs):
    """The same by hand, with a conversion of its own for each reader."""
    value = jnp.exp(w)
    products = [x.astype(HALF) @ value.astype(HALF) for x in xs]
    return sum(jnp.sum(jnp.square(jnp.tanh(y.astype(jnp.float32)))) for y in products)


def remat(fun):
    return jax.checkpoint(fun)


def directional(fun):
    """Forward over reverse: the derivative of the gradient along the parameter."""
    return lambda w, xs: jax.jvp(lambda w: jax.grad(fun)(w, xs), (w,), (w,))[1]


def twice_reverse(fun):
    return jax.grad(lambda w, xs: jnp.sum(jnp.sin(jax.grad(fun)(w, xs))))


@pytest.mark.slow_but("value", "grad of jit", "jvp", "vmap", "grad of grad")
@pytest.mark.parametrize(
    "derive",
    [
        lambda fun: fun,
        jax.grad,
        lambda fun: jax.grad(jax.jit(fun)),
        lambda fun: jax.grad(remat(fun)),
        lambda fun: lambda w, xs: jax.jvp(lambda w: fun(w, xs), (w,), (w,))[1],
        lambda fun: lambda w, xs: jax.vmap(jax.grad(fun), (0, None))(jnp.stack([w, 2 * w]), xs),
        directional,
        twice_reverse,
    ],
    ids=["value", "grad", "grad of jit", "remat", "jvp", "vmap", "jvp of grad", "grad of grad"],
)
def test_derivatives_are_those_of_a_conversion_for_each_reader(derive):
    ours, by_hand = (jax.jit(derive(f))(W, XS) for f in (ampx.autocast(plain), each_for_itself))
    np.testing.assert_allclose(ours, by_hand, rtol=3e-2, atol=3e-2 * np.abs(by_hand).max())


@pytest.mark.parametrize("derive", [jax.grad, lambda f: jax.grad(jax.jit(f))], ids=["grad", "jit"])
def test_cotangents_of_readers_are_added_in_float32(derive):
    def loss(w, x, y):
        value = w * 2.0  # float32: narrowed by two products and a third one, with cotangent 0.5
        return jnp.sum(x @ value) + jnp.sum(y @ value) + jnp.sum((y / 2) @ value)

    x, y = jnp.full((1, 8), 256.0), jnp.ones((1, 8))
    grad = derive(ampx.autocast(loss))(W, x, y)
    assert_bit_equal(grad, jnp.full((8, 8), 2 * 257.5))  # 257.5 is no bfloat16


def test_cotangents_are_added_in_float32_in_a_transposed_function_too():
    def linear(w):
        return sum(jnp.full((1, 8), size) @ w for size in (256.0, 1.0))

    (back,) = jax.linear_transpose(ampx.autocast(linear), W)(jnp.ones((1, 8), HALF))
    assert_bit_equal(back, jnp.full((8, 8), 257.0))


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_the_copy_is_kept_once_for_all_readers(inside):
    def kept(fun, readers):
        loss = inside(fun)
        return residual_bytes(lambda p, *_: (loss(*p), None), (W, XS[:readers]), None, None)

    ours, separate = (
        np.diff([kept(fun, n) for n in (1, 2, 3)])
        for fun in (ampx.autocast(plain), each_for_itself)
    )
    # What one more reader keeps: the same but for the copy of the value.
    assert list(separate - ours) == [W.size * HALF.dtype.itemsize] * 2


@pytest.mark.parametrize("constant", [0.3, np.float32(16.0)])
def test_a_constant_is_not_repeated_to_be_narrowed(constant):
    def scores(x, w):
        return (x @ w) / jnp.sqrt(constant)

    jaxpr, _ = reading.trace(ampx.autocast(scores), XS[0], W)
    names = [eqn.primitive.name for eqn in reading.open_jaxpr(jaxpr).eqns]
    assert "div" in names and "broadcast_in_dim" not in names
    _, pullback = jax.vjp(ampx.autocast(scores), XS[0], W)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == (4, 8)]
    assert [leaf.dtype for leaf in kept if leaf.dtype == HALF] == [HALF]  # the product's operand
