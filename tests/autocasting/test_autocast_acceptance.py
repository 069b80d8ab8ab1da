"""The acceptance cases of `ampx.autocast`, and what it guarantees besides them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_finite, assert_bit_equal
from jax import lax

# Only from here on do their assertions say what they compared.
pytest.register_assert_rewrite("autocast_probes", "autocast_cases", "autocast_call_cases")
import autocast_call_cases  # noqa: E402
import autocast_cases  # noqa: E402
from autocast_probes import (  # noqa: E402
    W,
    X,
    bfloat16,
    dots,
    dtypes,
    equations,
    float16,
    named,
    normal,
    total,
)

import ampx  # noqa: E402

CASES = dict(sorted((autocast_cases.CASES | autocast_call_cases.CASES).items()))
ROWS = 70_000  # more than 2**16: a sum in bfloat16 stops growing at 2**8


# The three that are slow have many operations, which compile one at a time.
@pytest.mark.slow_but(*(fun.__name__ for number, fun in CASES.items() if number not in (3, 6, 20)))
@pytest.mark.parametrize("number", CASES, ids=[fun.__name__ for fun in CASES.values()])
def test_autocast(number):
    CASES[number]()


def test_all_25_cases_are_here():
    assert list(CASES) == list(range(1, 26))


# Sums of cotangents. Each cotangent of a row is 1 or a small integer, exact in bfloat16.


def _loss(layer):
    """Sums what a matrix product in half reads, so that the cotangents of `layer` are half."""
    ones = jnp.ones((2, 1))
    return bfloat16(lambda *args: jnp.sum(layer(*args) @ ones))


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1), (1,), ()])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_of_a_bias_is_summed_in_float32(shape, transform):
    x, w, b = jnp.ones((ROWS, 1)), jnp.ones((1, 2)), jnp.zeros(shape)
    grad = transform(jax.grad(_loss(lambda b, w, x: x @ w + b)))(b, w, x)
    of_each = ROWS * 2 // max(b.size, 1)
    assert_bit_equal(grad, jnp.full(shape, of_each, jnp.float32))


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1), (1,), ()])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_of_a_scale_is_summed_in_float32(shape, transform):
    x, w, scale = jnp.full((ROWS, 1), 3.0), jnp.ones((1, 2)), jnp.ones(shape)
    grad = transform(jax.grad(_loss(lambda scale, w, x: x @ w * scale)))(scale, w, x)
    of_each = 3 * ROWS * 2 // max(scale.size, 1)
    assert_bit_equal(grad, jnp.full(shape, of_each, jnp.float32))


def test_the_gradient_of_an_explicitly_broadcast_bias_is_summed_in_float32():
    x, w, b = jnp.ones((ROWS, 1)), jnp.ones((1, 2)), jnp.zeros(2)
    loss = _loss(lambda b, w, x: x @ w + jnp.broadcast_to(b, (ROWS, 2)))
    assert_bit_equal(jax.grad(loss)(b, w, x), jnp.full(2, ROWS, jnp.float32))


@pytest.mark.parametrize(
    "spread",
    [
        lambda h: jnp.broadcast_to(h, (ROWS, 2)),
        lambda h: jnp.tile(h, (ROWS, 1)),
        lambda h: jnp.repeat(h, ROWS, axis=0),
        lambda h: h[jnp.zeros(ROWS, int)],
    ],
    ids=["broadcast", "tile", "repeat", "gather"],
)
def test_cotangents_of_a_spread_activation_are_summed_in_float32(spread):
    x, w = jnp.ones((1, 1)), jnp.ones((1, 2))
    grad = jax.grad(_loss(lambda w, x: spread(x @ w)))
    sums = [*named("reduce_sum", grad, w, x), *named("scatter-add", grad, w, x)]
    assert "float32" in [dtypes(eqn.outvars[0].aval) for eqn in sums]
    assert "bfloat16" not in [dtypes(eqn.outvars[0].aval) for eqn in sums]
    # The product in half gets the bfloat16 next to the sum.
    nearest = jnp.full((1, 2), ROWS, jnp.bfloat16).astype(jnp.float32)
    assert_bit_equal(grad(w, x), nearest)


def test_cotangents_of_a_weight_used_twice_are_added_in_float32():
    def loss(w, x, y):
        return jnp.sum(x @ w) + jnp.sum(y @ w)

    x, y = jnp.full((1, 8), 256.0), jnp.ones((1, 8))
    grad = jax.grad(bfloat16(loss))(W, x, y)
    assert_bit_equal(grad, jnp.full((8, 8), 257.0))  # 257 is no bfloat16


def test_cotangents_of_a_weight_used_by_every_step_of_a_scan_are_added_in_float32():
    def loss(w, xs):
        return jnp.sum(lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, xs)[0])

    xs = jnp.ones((300, 1, 8))
    assert_bit_equal(jax.grad(bfloat16(loss))(W, xs), jnp.full((8, 8), 300.0))


# Additive masks of -1e9, where the scores themselves are read in half too.


def _masked_by_addition(mask_of):
    def attention(x, w, mask):
        scores = x @ w + mask_of(mask)
        return scores, jax.nn.softmax(scores)

    return float16(attention)


def test_masks_that_are_arguments_stay_finite_in_float16():
    attention = _masked_by_addition(lambda mask: mask)
    assert all_finite(attention(X, W, jnp.full((4, 1), -1e9, jnp.float32)))


def test_masks_made_of_constants_stay_finite_in_float16_when_scores_are_added():
    attention = _masked_by_addition(lambda mask: jnp.where(mask, 0.0, -1e9))
    scores, _ = attention(jnp.full((4, 8), -4.0), jnp.ones((8, 8)), jnp.zeros((4, 8), bool))
    assert all_finite(scores)


def test_infinite_fills_beside_finite_ones_stay_infinite():
    def masked(x, w, mask):
        return jnp.where(mask, x @ w, jnp.where(mask[::-1], -1e9, -jnp.inf))

    mask = jnp.arange(32).reshape(4, 8) % 3 == 0
    scores = float16(masked)(X, W, mask)
    assert scores.dtype == jnp.float16
    np.testing.assert_array_equal(scores == -jnp.inf, ~mask & ~mask[::-1])


# Loops.


def _converted_shapes(jaxpr):
    """Shapes that equations of this jaxpr itself convert to bfloat16."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
    ]


def test_weights_of_a_scan_over_layers_are_cast_once_before_it():
    def model(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    ws = normal(5, 8, 8)
    jaxpr = jax.make_jaxpr(bfloat16(model))(ws, X)
    (scan,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert ws.shape in _converted_shapes(jaxpr)
    assert _converted_shapes(scan.params["jaxpr"]) == [X.shape]
    # Nor are they cast again in the gradient.
    grad = jax.make_jaxpr(jax.grad(total(bfloat16(model))))(ws, X)
    for scan in [eqn for eqn in equations(grad) if eqn.primitive.name == "scan"]:
        assert W.shape not in _converted_shapes(scan.params["jaxpr"])


def test_carries_keep_their_dtypes_and_trees():
    def loop(w, x):
        carry = {"float32": x @ w, "float16": x.astype(jnp.float16), "step": 0}

        def step(carry, _):
            state = jnp.tanh(carry["float32"] @ w)
            return {**carry, "float32": state, "step": carry["step"] + 1}, None

        return lax.scan(step, carry, length=3)[0]

    expected = {"float32": "float32", "float16": "float16", "step": "int32"}
    assert dtypes(bfloat16(loop)(W, X)) == expected


def test_original_outputs_have_the_types_of_the_function_without_autocast():
    def fun(x, w):
        return {"h": x @ w, "n": 2, "x": x, "half": x.astype(jnp.float16), "mask": x > 0}

    types = jax.tree.map(jax.typeof, jax.eval_shape(fun, X, W))
    assert jax.tree.map(jax.typeof, jax.eval_shape(bfloat16(fun, output="original"), X, W)) == types


# State.


def test_calls_without_jit_compile_nothing_anew(caplog):
    def step(carry, _):  # not defined anew at every call, or JAX itself would compile it anew
        w, h = carry
        return (w, jax.nn.relu(h @ w)), None

    def model(w, x):
        (_, h), _ = lax.scan(step, (w, jax.nn.silu(x @ w)), length=2)
        return jnp.where(h > 0, jnp.var(h), jax.checkpoint(jnp.tanh)(h))

    autocast = bfloat16(model)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        autocast(W, X)
        assert any("Compiling" in record.message for record in caplog.records)
        caplog.clear()
        autocast(W, X)
        compiled = [r.message for r in caplog.records if "Compiling" in r.message]
    assert compiled == []


def test_closed_over_arrays_are_read_at_every_call():
    weights = np.ones((8, 8), np.float32)
    autocast = bfloat16(lambda x: x @ weights)
    x = jnp.ones((4, 8))
    assert_bit_equal(autocast(x), jnp.full((4, 8), 8, jnp.bfloat16))
    weights[:] = 2.0
    assert_bit_equal(autocast(x), jnp.full((4, 8), 16, jnp.bfloat16))
    weights = jnp.full((8, 8), 3.0)
    assert_bit_equal(autocast(x), jnp.full((4, 8), 24, jnp.bfloat16))


@pytest.mark.parametrize("cast", [bfloat16, float16, lambda f: bfloat16(float16(f))])
def test_an_error_inside_leaves_no_autocast_behind(cast):
    matmul = jax.jit(ampx.half_function(jnp.matmul))

    def failing(x, w):
        matmul(x, w)
        raise ValueError("inside")

    for transform in (lambda f: f, jax.jit, jax.grad):
        with pytest.raises(ValueError, match="inside"):
            transform(cast(failing))(X, W)
        assert matmul(X, W).dtype == jnp.float32
        assert dots(matmul, X, W) == {"float32": 1}


def test_weighted_random_choices_are_identical():
    def draw(key, x):
        return x @ W, jax.random.choice(key, 8, (100,), p=jnp.arange(8.0) / 28.0)

    key = jax.random.key(9)
    assert_bit_equal(bfloat16(draw)(key, X)[1], draw(key, X)[1])
