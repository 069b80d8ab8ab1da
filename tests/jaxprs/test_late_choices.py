"""A choice by one number is made behind the reduction of what was chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from ampx.jaxprs import reading
from ampx.jaxprs.late_choices import choose_late

X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
INPUTS = {
    "ordinary": X,
    "zero": np.zeros_like(X),
    "infinite": X * np.float32(np.inf),
    "NaN": np.full_like(X, np.nan),
}


def names_of(jaxpr):
    return [eqn.primitive.name for eqn in reading.open_jaxpr(jaxpr).eqns]


def rewrite(fun, *operands):
    jaxpr, _ = reading.trace(fun, *operands)
    return jaxpr, choose_late(jaxpr)


# From an array and a condition. In each a number decides what is summed.
MOVED = {
    "a norm of optax": lambda x, c: optax.safe_norm(x, 0.1),
    "of the largest": lambda x, c: optax.safe_norm(x.ravel(), 0.1, ord=jnp.inf),
    "root mean square": lambda x, c: optax.safe_root_mean_squares(x, 0.1),
    "arithmetic with numbers": lambda x, c: jnp.sum(2 * jnp.where(c, x, 3.0) ** 2 - 1),
    "an array that comes second": lambda x, c: jnp.sum(jnp.where(c, 3.0, x)),
    "the least": lambda x, c: jnp.min(jnp.where(c, x, -1.0)),
    "one of three": lambda x, c: jnp.sum(
        lax.select_n(c.astype(jnp.int32), jnp.ones_like(x), x, jnp.zeros_like(x))
    ),
    "a choice of a choice": lambda x, c: jnp.sum(jnp.where(c, jnp.where(x[0, 0] > 0, x, 1.0), 2)),
    "in another dtype": lambda x, c: jnp.sum(jnp.where(c, x, 3.0).astype(jnp.bfloat16)),
    "two sums": lambda x, c: (jnp.sum(y := jnp.where(c, x, 3.0)), jnp.max(jnp.abs(y))),
    "an array that is read besides": lambda x, c: ((y := jnp.where(c, x, 3.0)), jnp.sum(y)),
}
NOT_MOVED = {
    "a condition for each element": lambda x, c: jnp.sum(jnp.where(x > 2, x, 1.0)),
    "two arrays": lambda x, c: jnp.sum(jnp.where(c, x, X + 1)),
    "a sum of rows": lambda x, c: jnp.sum(jnp.where(c, x, 1.0), axis=0),
    "another array behind it": lambda x, c: jnp.sum(jnp.where(c, x, 1.0) * X),
    "an infinite derivative": lambda x, c: jnp.sum(jnp.sqrt(jnp.where(c, 1.0, x))),
    "a great derivative": lambda x, c: jnp.sum(jnp.where(c, 1.0, x) ** 8),
    "a negative power": lambda x, c: jnp.sum(jnp.where(c, 1.0, x) ** -2),
    "no reduction": lambda x, c: jnp.where(c, x, 1.0),
    "no array": lambda x, c: jnp.sum(jnp.where(c, x[0, 0], 1.0)),
    "what is no sum": lambda x, c: jnp.argmax(jnp.where(c, x, 1.0)),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MOVED)
def test_a_choice_by_a_number_is_made_of_numbers(name, kind):
    x = INPUTS[kind]
    for condition in (True, False):
        jaxpr, moved = rewrite(MOVED[name], x, jnp.bool_(condition))
        assert moved is not jaxpr
        expected, found = (reading.evaluate(program, x, condition) for program in (jaxpr, moved))
        assert_bit_equal(found, expected)
    if name != "an array that is read besides":
        assert [
            eqn.outvars[0].aval.shape
            for eqn in reading.open_jaxpr(moved).eqns
            if eqn.primitive.name == "select_n" and eqn.outvars[0].aval.shape
        ] == []


@pytest.mark.parametrize("name", NOT_MOVED)
def test_other_choices_stay_where_they_are(name):
    jaxpr, moved = rewrite(NOT_MOVED[name], X, jnp.bool_(True))
    assert moved is jaxpr


def test_a_norm_has_one_sum():
    """Two sums of the same squares are one to a compiler."""
    _, moved = rewrite(lambda x: optax.safe_norm(x, 0.0), X)
    compiled = jax.jit(lambda x: reading.evaluate(moved, x)).lower(X).compile().as_text()
    assert compiled.count(" reduce(") == 1


@pytest.mark.parametrize("kind", INPUTS)
def test_a_derivative_is_what_it_was(kind):
    def norm(x):
        return optax.safe_norm(x, 0.0)

    _, moved = rewrite(norm, X)
    found = jax.grad(lambda x: reading.evaluate(moved, x)[0])(INPUTS[kind])
    assert_bit_equal(found, jax.grad(norm)(INPUTS[kind]))


def both_ways(x):
    """Numbers as they are written, and with late choices."""

    def program(x):
        return optax.safe_norm(x, 0.0), jnp.max(jnp.where(jnp.sum(x) > 0, x, 1.0))

    jaxpr, moved = rewrite(program, x)
    assert moved is not jaxpr
    return [jnp.stack(reading.evaluate(one, x)) for one in (jaxpr, moved)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_choices_of_shards(check_vma):
    def of_shard(x):
        return [both[None] for both in both_ways(x)]

    mesh = make_mesh((2,), ("data",))
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    found = jax.jit(jax.shard_map(of_shard, mesh=mesh, check_vma=check_vma, **specs))(X)
    assert_bit_equal(*found)


def test_choices_of_arrays_whose_types_say_where_they_lie():
    mesh = make_mesh((2,), ("data",), "Explicit")
    with jax.set_mesh(mesh):
        assert_bit_equal(*jax.jit(both_ways)(jax.device_put(X, P("data"))))
