"""Acceptance cases of autocast: precisions of operations, marks, and what must not change.

Each case is a promise to users, in its name. `autocast_call_cases` has the others.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from autocast_probes import (
    W,
    X,
    assert_gradients_are_float32,
    bfloat16,
    dots,
    dtypes,
    float16,
    half_product,
    normal,
    numbered,
    total,
)
from helpers import all_finite, assert_bit_equal
from jax import lax

import ampx

HALVES = (jnp.bfloat16, jnp.float16)
FLOAT32_MIN = np.finfo(np.float32).min
MASK = jnp.array([[True, False] * 4, [False] * 8, [True] * 8, [False] * 7 + [True]])


def case_01_dense_layers_multiply_in_half_forward_and_backward():
    def layer(w, b, x):
        hidden = x @ w + b
        return hidden, jax.nn.gelu(hidden) @ w

    b = normal(8, seed=3)
    autocast = bfloat16(layer)
    assert dtypes(autocast(W, b, X)) == ("bfloat16", "bfloat16")
    assert dots(autocast, W, b, X) == {"bfloat16": 2}
    # Backward: dw twice, dx twice.
    assert dots(jax.grad(total(autocast), (0, 1, 2)), W, b, X) == {"bfloat16": 6}
    assert_gradients_are_float32(autocast, W, b, X)


def case_02_softmax_is_float32_and_bit_equal_to_one_of_the_half_product():
    def attention(x, w):
        return jax.nn.softmax((x @ w) * 0.3)

    def exact(x, w):
        return jax.nn.softmax(half_product(x, w, jnp.bfloat16) * 0.3)

    for transform in (lambda f: f, jax.jit):
        assert_bit_equal(transform(bfloat16(attention))(X, W), transform(exact)(X, W))
    assert_gradients_are_float32(bfloat16(attention), X, W)


def _rms_norm(h):
    return h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6)


def _layer_norm(h):
    centred = h - jnp.mean(h, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-6)


def case_03_float16_norms_of_large_values_are_finite_and_bit_exact():
    x, w = 20.0 * X, 20.0 * W  # squares of the products leave the range of float16
    exact = half_product(x, w, jnp.float16)
    assert jnp.abs(exact).max() > 300
    for norm in (_rms_norm, _layer_norm, jnp.var, jnp.linalg.norm):
        autocast = float16(lambda x, w, norm=norm: norm(x @ w))
        result = autocast(x, w)
        assert_bit_equal(result, norm(exact))
        assert all_finite(result)
        # Scaled down, as cotangents of a variance of such values must be in float16.
        assert_gradients_are_float32(lambda x, w, f=autocast: 1e-4 * f(x, w), x, w)


def case_04_variance_as_a_difference_of_means_is_bit_exact():
    def variance(h):
        return jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2

    autocast = bfloat16(lambda x, w: variance(x @ w))
    assert_bit_equal(autocast(X, W), variance(half_product(X, W, jnp.bfloat16)))
    assert_gradients_are_float32(autocast, X, W)


MASKINGS = {
    "a number": lambda h, fill: jnp.where(MASK, h, fill),
    "an array": lambda h, fill: jnp.where(MASK, h, jnp.full_like(h, fill)),
    "a sum": lambda h, fill: h + jnp.where(MASK, 0.0, fill),
}


def _attention(masking, fill, half):
    """Scores and weights of a masked attention, whose dtypes it checks.

    Weights are float32. Scores are half, unless a fill is added to them that half cannot hold.
    """

    def attention(x, w):
        scores = masking(x @ w, fill)
        return scores, jax.nn.softmax(scores)

    scores, weights = ampx.autocast(attention, half_dtype=half)(X, W)
    summed = masking is MASKINGS["a sum"] and -jnp.inf < fill < float(jnp.finfo(half).min)
    assert scores.dtype == (jnp.float32 if summed else half) and weights.dtype == jnp.float32
    np.testing.assert_array_equal(weights[0, 1::2], 0)
    return scores, weights


def case_05_finite_mask_fills_stay_finite_and_infinite_ones_infinite():
    for half, masking in itertools.product(HALVES, MASKINGS.values()):
        for fill in (-1e9, FLOAT32_MIN):
            scores, weights = _attention(masking, fill, half)
            assert all_finite((scores, weights))
            # The row without any score: uniform, but for what a sum leaves of its scores.
            np.testing.assert_allclose(weights[1], 1 / 8, atol=1e-6)
        scores, weights = _attention(masking, -jnp.inf, half)
        np.testing.assert_array_equal(scores == -jnp.inf, ~MASK)
        assert jnp.isnan(weights[1]).all()  # as in float32: there is nothing to attend to
    for half, fill in itertools.product(HALVES, (-1e9, FLOAT32_MIN)):
        padded = ampx.autocast(
            lambda x, w, fill=fill: lax.pad(x @ w, fill, [(0, 1, 0)] * 2), half_dtype=half
        )(X, W)
        assert padded.dtype == half and all_finite(padded)


OPERATIONS_IN_HALF = {
    "times a Python number": lambda h, x: h * 2.0,
    "times a NumPy number": lambda h, x: h * np.float32(2),
    "times booleans": lambda h, x: h * MASK.astype(jnp.float32),
    "where, else zero": lambda h, x: jnp.where(MASK, h, 0.0),
    "maximum with zero": lambda h, x: jnp.maximum(h, 0.0),
    "relu": lambda h, x: jax.nn.relu(h),
    "indexed add": lambda h, x: h.at[0].add(h[1]),
    "stack": lambda h, x: jnp.stack([h, h]),
    "pad": lambda h, x: jnp.pad(h, 1),
}
OPERATIONS_IN_FLOAT32 = {
    "plus an input": lambda h, x: h + x,
    "plus zeros": lambda h, x: h + jnp.zeros(h.shape),
    "concatenate with an input": lambda h, x: jnp.concatenate([h, x]),
    "where, else an input": lambda h, x: jnp.where(MASK, h, x),
    "sum": lambda h, x: jnp.sum(h, 0),
    "exp": lambda h, x: jnp.exp(h),
}


def case_06_each_operation_runs_in_its_own_precision():
    for operations, expected in (
        (OPERATIONS_IN_HALF, "bfloat16"),
        (OPERATIONS_IN_FLOAT32, "float32"),
    ):
        for name, operation in operations.items():
            autocast = bfloat16(lambda x, w, operation=operation: operation(x @ w, x))
            assert (name, dtypes(autocast(X, W))) == (name, expected)
            assert_gradients_are_float32(autocast, X, W)


def case_07_products_of_an_asked_precision_stay_float32():
    for precision in (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32):
        matmul = functools.partial(jnp.matmul, precision=precision)
        autocast = bfloat16(matmul)
        assert_bit_equal(autocast(X, W), matmul(X, W))
        assert dots(autocast, X, W) == {"float32": 1}
        assert dots(jax.grad(total(autocast), (0, 1)), X, W) == {"float32": 3}
        assert_gradients_are_float32(autocast, X, W)


def case_08_half_operands_summed_into_float32_stay_so():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    assert_bit_equal(bfloat16(matmul)(x, w), matmul(x, w))
    assert dots(bfloat16(matmul), x, w) == {"bfloat16, float32": 1}


def case_16_float_functions_multiply_in_float32():
    def mixed(x, w):
        return ampx.float_function(jnp.matmul)(x @ w, w)

    assert_bit_equal(bfloat16(mixed)(X, W), half_product(X, W, jnp.bfloat16) @ W)
    assert dots(bfloat16(mixed), X, W) == {"bfloat16": 1, "float32": 1}
    assert_gradients_are_float32(bfloat16(mixed), X, W)


def case_17_promote_functions_follow_the_widest_argument():
    distance = ampx.promote_function(lambda a, b: jnp.exp(a - b))
    autocast = bfloat16(lambda x, w: (distance(x @ w, x @ w), distance(x @ w, x)))
    assert dtypes(autocast(X, W)) == ("bfloat16", "float32")
    assert_gradients_are_float32(autocast, 0.1 * X, 0.1 * W)


def case_18_the_inner_of_nested_autocasts_wins():
    cached = jax.jit(ampx.half_function(jnp.matmul))  # asks which half while it is traced
    for matmul in (jnp.matmul, jax.jit(jnp.matmul), cached):
        inner, disabled = float16(matmul), bfloat16(matmul, enabled=False)

        def outer(x, w, matmul=matmul, inner=inner, disabled=disabled):
            return matmul(x, w), inner(x, w), disabled(x, w), matmul(x, w)

        expected = ("bfloat16", "float16", "float32", "bfloat16")
        assert dtypes(bfloat16(outer)(X, W)) == expected
        assert dtypes((matmul(X, W), inner(X, W), disabled(X, W))) == (
            "float32",
            "float16",
            "float32",
        )
        assert_gradients_are_float32(bfloat16(outer), X, W)


def case_19_integers_and_complex_numbers_are_unchanged():
    for dtype in (jnp.int32, jnp.complex64):
        x, w = X.astype(dtype), W.astype(dtype)
        fun = lambda x, w: (lax.dot(x, w), (x + x) * w[:4], jnp.sum(x))  # noqa: E731
        assert_bit_equal(bfloat16(fun)(x, w), fun(x, w))
        assert str(jax.make_jaxpr(bfloat16(fun))(x, w)) == str(jax.make_jaxpr(fun)(x, w))


def case_20_random_numbers_are_bit_identical():
    def draws(key, x, w):
        h = x @ w
        return h, {
            "normal": jax.random.normal(key, h.shape),
            "uniform": jax.random.uniform(key, h.shape, minval=-1.0, maxval=2.0),
            "truncated": jax.random.truncated_normal(key, -1.0, 1.0, h.shape),
            "bernoulli": jax.random.bernoulli(key, 0.3, h.shape),
            "gumbel": jax.random.gumbel(key, h.shape),
            "gamma": jax.random.gamma(key, 2.0, h.shape),
            "permutation": jax.random.permutation(key, x),
            "integers": jax.random.randint(key, h.shape, 0, 9),
            "bits": jax.random.bits(key, h.shape),
        }

    key = jax.random.key(7)
    h, drawn = jax.jit(bfloat16(draws))(key, X, W)
    assert h.dtype == jnp.bfloat16
    assert_bit_equal(drawn, jax.jit(draws)(key, X, W)[1])


def case_21_dropout_is_half_with_the_same_mask():
    def dropped(key, x, w):
        h = x @ w
        kept = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.where(kept, h / 0.7, 0.0)

    key, x = jax.random.key(8), normal(4096, 8, seed=9)  # some draws are close to 0.7
    result = bfloat16(dropped)(key, x, W)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result == 0, dropped(key, x, W) == 0)
    assert_gradients_are_float32(functools.partial(bfloat16(dropped), key), X, W)


def case_24_gradients_inside_are_half_unless_the_original_dtypes_are_asked_for():
    for fun in (jax.grad(lambda w, x: jnp.sum(x @ w)), lambda w, x: x @ w):
        assert dtypes(bfloat16(fun)(W, X)) == "bfloat16"
        assert dtypes(bfloat16(fun, output="original")(W, X)) == "float32"


def case_25_what_is_not_known_gets_float32_and_conversions_are_honoured():
    seen = []

    def on_host(h):
        seen.append(h.dtype.name)
        return np.asarray(h)

    def outside(x, w):
        h = x @ w
        shape = jax.ShapeDtypeStruct(h.shape, jnp.float32)
        solved = jnp.linalg.solve(w + 9.0 * jnp.eye(8), h.T)
        bits = lax.bitcast_convert_type(h, jnp.int32)
        return jax.pure_callback(on_host, shape, h), solved, bits

    called, solved, bits = bfloat16(outside)(X, W)
    assert seen == ["float32"]
    h = half_product(X, W, jnp.bfloat16)
    assert_bit_equal(called, h)
    assert_bit_equal(bits, lax.bitcast_convert_type(h, jnp.int32))
    assert solved.dtype == jnp.float32
    converted = bfloat16(lambda x, w: (ampx.cast(x @ w, jnp.float32) * 2, (x @ w).astype("f2")))
    assert dtypes(converted(X, W)) == ("float32", "float16")


CASES = numbered(globals())
