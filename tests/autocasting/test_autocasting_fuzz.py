"""Random programs of small integers, which half precision computes exactly: nothing may change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax import lax

import ampx

EXACT = 2**8  # integers up to here are bfloat16
ROWS = np.array([1, 0, 1])


def _scanned(a, b):
    carry, stacked = lax.scan(lambda c, row: (c + row @ b, row - c), a[0], a)
    return stacked + carry


def _counted(a, b):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + a), (0, b))[1]


@jax.custom_vjp
def _doubled_backward(a):
    return -a


_doubled_backward.defvjp(lambda a: (-a, a), lambda a, g: (2 * g + 0 * a,))

UNARY = {
    "negative": jnp.negative,
    "absolute": jnp.abs,
    "relu": jax.nn.relu,
    "square": jnp.square,
    "transpose": jnp.transpose,
    "double": lambda a: a * 2.0,
    "add one": lambda a: a + 1,
    "sum": lambda a: jnp.sum(a, 0, keepdims=True) - a,
    "max": lambda a: jnp.max(a, 1, keepdims=True) - a,
    "cumsum": lambda a: jnp.cumsum(a, 0),
    "sort": lambda a: jnp.sort(a, 0),
    "gather": lambda a: a[ROWS],
    "bias": lambda a: a + a[0],
    "mask": lambda a: jnp.where(np.tri(3, dtype=bool), a, 0.0),
    "tile": lambda a: jnp.tile(a, 2)[:, 1:4],
    "scatter": lambda a: a.at[ROWS].add(a),
    "cast": lambda a: ampx.cast(a, jnp.float32) + a,
    "half": ampx.half_function(lambda a: a + a),
    "float": ampx.float_function(lambda a: a @ a),
    "custom": _doubled_backward,
}
BINARY = {
    "matmul": jnp.matmul,
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "maximum": jnp.maximum,
    "where": lambda a, b: jnp.where(a > b, a, b * 2),
    "concatenate": lambda a, b: jnp.concatenate([a, b])[1:4],
    "scan": _scanned,
    "while": _counted,
    "cond": lambda a, b: lax.cond(jnp.sum(a) > 0, lambda: a @ b, lambda: jnp.sum(b, 0) + a),
    "jit": jax.jit(lambda a, b: a @ b - a),
    "remat": jax.checkpoint(lambda a, b: jax.nn.relu(a @ b)),
    "vmap": jax.vmap(lambda row, b: row @ b + row, (0, None)),
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=7,
)


def program(steps, looked_at):
    """A function that applies each step to earlier values; `looked_at` collects their sizes."""

    def run(x, w):
        values = [x, w]
        for name, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
            looked_at.append(jnp.max(jnp.abs(values[-1])))
        return values[-1], values[-2]

    return run


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(STEPS, st.integers(0, 99))
def test_programs_of_small_integers_are_unchanged(steps, seed):
    rng = np.random.default_rng(seed)
    x, w = (jnp.asarray(rng.integers(-1, 2, (3, 3)), jnp.float32) for _ in range(2))
    sizes = []
    exact = program(steps, sizes)(x, w)
    assume(max(sizes) <= EXACT / 4)
    fun = program(steps, [])
    assert_bit_equal(ampx.autocast(fun, output="original")(x, w), exact)

    has_while = any(name == "while" for name, *_ in steps)
    if not has_while:
        cotangents = tuple(jnp.ones_like(out) for out in exact)
        of_float32 = jax.vjp(fun, x, w)[1](cotangents)
        assume(max(jnp.max(jnp.abs(g)) for g in of_float32) <= EXACT / 4)
        half_fun = ampx.autocast(fun, output="original")
        assert_bit_equal(jax.vjp(half_fun, x, w)[1](cotangents), of_float32)
    batch = jnp.stack([x, -x])
    vmapped = jax.vmap(ampx.autocast(fun, output="original"), (0, None))
    inside = ampx.autocast(jax.vmap(fun, (0, None)), output="original")
    assert_bit_equal(vmapped(batch, w)[0][0], exact[0])
    assert_bit_equal(inside(batch, w)[0][0], exact[0])
