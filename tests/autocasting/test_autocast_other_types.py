"""Operations that move, pick or index values of types that autocast does not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal
from jax import lax

import ampx

W = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 64
TWO = jnp.int32(2)


def values():
    """One array of each type but float32, with eight elements."""
    numbers = ("int32", "uint8", "bool", "bfloat16", "float16", "complex64")
    return {
        **{name: (jnp.arange(8) % 4).astype(name) for name in numbers},
        "key": jax.random.split(jax.random.key(0), 8),
    }


def are_numbers(t):
    return jnp.issubdtype(t.dtype, jnp.number)


def numeric(fun):
    """`fun` of numbers, and anything else as it is."""
    return lambda t, i: fun(t, i) if are_numbers(t) else t


def ordered(fun):
    """`fun` of numbers that have an order, and anything else as it is."""
    return lambda t, i: fun(t, i) if are_numbers(t) and t.dtype != jnp.complex64 else t


def at(i):
    return jnp.array([1, 3]) + i


INDEXED = {
    "index": lambda t, i: t[i],
    "dynamic_slice": lambda t, i: lax.dynamic_slice(t, (i,), (3,)),
    "dynamic_slice 2d": lambda t, i: lax.dynamic_slice(t.reshape(4, 2), (i, i - 1), (2, 1)),
    "roll": lambda t, i: jnp.roll(t, i),
    "dynamic_update_slice": lambda t, i: lax.dynamic_update_slice(t, t[:2], (i,)),
    "gather": lambda t, i: t[at(i)],
    "gather, filled": numeric(lambda t, i: t.at[at(i) + 4].get(mode="fill", fill_value=1)),
    "scatter": lambda t, i: t.at[at(i)].set(t[:2]),
    "scatter-add": numeric(lambda t, i: t.at[at(i)].add(t[:2])),
    "scatter-mul": numeric(lambda t, i: t.at[at(i)].multiply(t[:2])),
    "scatter-min": ordered(lambda t, i: t.at[at(i)].min(t[:2])),
    "scatter-max": ordered(lambda t, i: t.at[at(i)].max(t[:2])),
    "sort by key": numeric(lambda t, i: lax.sort((jnp.arange(8)[::-1] + i, t), num_keys=1)[1]),
    "top_k": ordered(lambda t, i: tuple(lax.top_k(t, 3))),
    "argmax": ordered(lambda t, i: jnp.argmax(t) + i),
    "select": lambda t, i: lax.select_n(i % 3 == 2, t, t[::-1]),
    "clamp": ordered(lambda t, i: lax.clamp(t[1], t, t[2])),
    "pad": numeric(lambda t, i: lax.pad(t, t[i], ((1, 1, 0),))),
    "split": lambda t, i: tuple(jnp.split(t, 2)),
    "broadcast": lambda t, i: jnp.broadcast_to(t, (2, 8)),
    "tile": lambda t, i: jnp.tile(t, 2),
    "barrier": lambda t, i: lax.optimization_barrier((t, i)),
    "device_put": lambda t, i: tuple(jax.device_put((t, i))),
    "scan over indices": lambda t, i: lax.scan(lambda c, x: (c, t[x]), i, jnp.arange(4))[1],
    "loop": lambda t, i: lax.fori_loop(
        0, i, lambda k, a: lax.dynamic_update_index_in_dim(a, t[k + 1], k, 0), t
    ),
    "branch": lambda t, i: lax.cond(i > 1, lambda t: t[i], lambda t: t[0], t),
}


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def beside_a_product(fun):
    """`fun` of every type, in a program in which autocast has something to do."""

    def program(w, types, i):
        return w @ w, {name: jax.tree.map(data, fun(t, i)) for name, t in types.items()}

    return program


RULES = {
    "defaults": ampx.DEFAULT_RULES,
    "all half": ampx.DEFAULT_RULES.half(when=lambda eqn: True),
    "all float32": ampx.DEFAULT_RULES.float32(when=lambda eqn: True),
}


@pytest.mark.slow_but(*list(INDEXED)[::2])
@pytest.mark.parametrize("fun", INDEXED.values(), ids=INDEXED)
def test_values_of_other_types_are_indexed_and_moved_as_written(fun):
    program = beside_a_product(fun)
    types = values()
    product, results = jax.jit(ampx.autocast(program))(W, types, TWO)
    assert product.dtype == jnp.bfloat16
    assert_bit_equal(results, jax.jit(program)(W, types, TWO)[1])


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("fun", INDEXED.values(), ids=INDEXED)
def test_values_of_other_types_keep_them_under_every_rule(fun, rules):
    program, types = beside_a_product(fun), values()
    expected = jax.eval_shape(program, W, types, TWO)[1]
    assert jax.eval_shape(ampx.autocast(program, rules=rules), W, types, TWO)[1] == expected
    assert len(ampx.explain(program, rules=rules)(W, types, TWO).equations) > 1


@pytest.mark.parametrize("fun", INDEXED.values(), ids=INDEXED)
def test_values_of_double_width_keep_it(fun):
    with jax.enable_x64(True):
        types = {name: jnp.arange(8).astype(name) for name in ("float64", "int64")}
        program, index = beside_a_product(fun), jnp.int64(2)
        expected = jax.eval_shape(program, W, types, index)[1]
        assert jax.eval_shape(ampx.autocast(program), W, types, index)[1] == expected


@pytest.mark.parametrize("move", ["device_put", "barrier", "index", "roll", "split", "broadcast"])
def test_half_values_are_indexed_and_moved_in_half(move):
    def program(w, i):
        return jax.tree.leaves(INDEXED[move]((w @ w)[0], i))

    assert jax.eval_shape(ampx.autocast(program), W, TWO)[0].dtype == jnp.bfloat16


def test_operands_that_move_together_stay_what_each_of_them_was():
    def program(x):
        one, h = jax.device_put((jnp.float32(1.0), x @ x))
        return h * one, jnp.sum(h)

    rules = ampx.DEFAULT_RULES.float32("device_put")
    product, total = jax.jit(ampx.autocast(program, rules=rules))(W)
    assert product.dtype == total.dtype == jnp.float32
    np.testing.assert_allclose(product, W @ W, rtol=1e-2)


def test_a_table_is_read_by_tokens_that_are_indexed():
    def loss(w, tokens, i):
        return (w[tokens[i]] @ w.T).sum()

    tokens = jnp.arange(6)
    gradient = jax.grad(ampx.autocast(loss, output="original"))(W, tokens, TWO)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, jax.grad(loss)(W, tokens, TWO), rtol=2e-2, atol=2e-2)
