"""Calls are opened: their equations stand in the caller, with their arrays and their lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal

from ampx.jaxprs import building, reading, source_info
from ampx.jaxprs.primitives import CALLS

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
TABLE = jnp.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
OTHER = np.full((2, 3), 3.0, np.float32)


@jax.jit
def add_table(x):
    return x + TABLE


@jax.jit
def nested(x):
    return jnp.sin(add_table(x)) * TABLE - OTHER


@jax.custom_jvp
def with_rule(x):
    return x * TABLE


with_rule.defjvp(lambda primals, tangents: (primals[0] * TABLE, tangents[0] * OTHER))

PROGRAMS = {
    "a call": lambda x: add_table(x) * 2,
    "two calls of one function": lambda x: add_table(add_table(x)),
    "a call inside of another": lambda x: nested(x) + add_table(x),
    "an array that is read outside, too": lambda x: add_table(x * TABLE) + OTHER,
    "remat": lambda x: jax.checkpoint(nested)(x),
    "a derivative": jax.grad(lambda x: jnp.sum(nested(x) ** 2)),
    "a result that is an array": lambda x: (jax.jit(lambda x: (x, TABLE))(x), TABLE),
    "no argument": lambda x: x + jax.jit(lambda: TABLE * OTHER)(),
    "a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: nested(x), add_table(x)),
    "a rule": lambda x: jnp.sum(jax.jit(with_rule)(x)),
    "no array": lambda x: jax.jit(jnp.tanh)(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_derivatives_stay(name):
    jaxpr, _ = reading.trace(PROGRAMS[name], X)
    whole = building.inline_calls(jaxpr)
    opened = reading.open_jaxpr(whole)
    assert not CALLS & {eqn.primitive.name for eqn in opened.eqns}
    assert_bit_equal(*(reading.evaluate(program, X) for program in (whole, jaxpr)))

    def total(program, x):
        return sum(map(jnp.sum, reading.evaluate(program, x)))

    ours, theirs = (jax.jit(jax.grad(total, 1), static_argnums=0)(p, X) for p in (whole, jaxpr))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_array_is_attached_once(name):
    jaxpr, _ = reading.trace(PROGRAMS[name], X)
    whole = building.inline_calls(jaxpr)
    arrays = reading.constants_of(whole)
    assert len(arrays) == len(reading.open_jaxpr(whole).constvars) == len(set(map(id, arrays)))
    assert len(arrays) <= 2
    again = building.inline_calls(whole)
    assert [id(array) for array in reading.constants_of(again)] == [id(array) for array in arrays]


def test_a_body_without_arrays_gets_those_of_what_it_calls():
    """The body of a loop or of remat is an open jaxpr: it has no place for arrays."""
    bodies = {
        name: reading.open_jaxpr(reading.trace(PROGRAMS[name], X)[0])
        for name in ("a call", "no array")
    }
    assert not any(map(reading.has_constants, bodies.values()))
    inlined = {name: building.inline_calls(body) for name, body in bodies.items()}
    assert reading.constants_of(inlined["a call"])[0] is TABLE
    assert_bit_equal(reading.evaluate(inlined["a call"], X), [add_table(X) * 2])
    assert type(inlined["no array"]) is type(bodies["no array"])


def test_equations_keep_the_line_of_the_called_function_but_for_those_of_jax():
    def program(x):
        return jax.checkpoint(nested)(jnp.where(x > 0, x, 2.0))

    whole = building.inline_calls(reading.trace(program, X)[0])
    lines = {eqn.primitive.name: source_info.line_of(eqn) for eqn in whole.eqns}
    assert lines["sin"].endswith("(nested)") and lines["add"].endswith("(add_table)")
    assert "test_inlining.py" in lines["select_n"] and lines["select_n"].endswith("program)")
