"""A choice by one number is made behind the reduction of what was chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

from ampx.jaxprs import building, reading
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


def chosen(x, norm, number=1.0):
    """The array, or a number where its norm is small."""
    return jnp.where(norm <= 0.1, number, x)


def length(x):
    return jnp.sqrt(jnp.sum(x * x))


MOVED = {
    "a norm of optax": lambda x: optax.safe_norm(x, 0.1),
    "of magnitudes": lambda x: optax.safe_norm(x.ravel(), 0.1, ord=1),
    "root mean square": lambda x: optax.safe_root_mean_squares(x, 0.1),
    "squares where magnitudes are small": lambda x: jnp.sum(
        chosen(x, jnp.sum(jnp.abs(x)), -2.0) ** 2
    ),
    "two sums": lambda x: (
        jnp.sum(jnp.abs(y := chosen(x, length(x)))),
        jnp.sum(jnp.square(y)),
    ),
    "an array that is read besides": lambda x: ((y := chosen(x, length(x))), jnp.sum(y * y)),
    "of a choice": lambda x: (
        jnp.sum(chosen(chosen(x, length(x)), length(x * 2)) ** 2) + optax.safe_norm(x, 0.1)
    ),
    "one element": lambda x: optax.safe_norm(x[:1, :1], 0.1),
    "in half precision": lambda x: optax.safe_norm(x.astype(jnp.float16), 0.1),
}
# Where `x` is not chosen it need not be finite, or there would be more to read, or another number.
NOT_MOVED = {
    "a choice of what is finite": lambda x: jnp.sum(
        jnp.where(jnp.isfinite(jnp.sum(x * x)), x, 0.0) ** 2
    ),
    "a choice of what is small": lambda x: jnp.sum(jnp.where(length(x) <= 9.0, x, 1.0) ** 2),
    "a norm that is at most infinite": lambda x: jnp.sum(
        jnp.where(length(x) <= jnp.inf, 1.0, x) ** 2
    ),
    "the norm of another array": lambda x: jnp.sum(chosen(x, length(x[:1])) ** 2),
    "a sum with signs": lambda x: jnp.sum(chosen(x, jnp.sum(x)) ** 2),
    "a condition for each element": lambda x: jnp.sum(jnp.where(x * x <= 0.1, 1.0, x) ** 2),
    "two arrays": lambda x: jnp.sum(jnp.where(length(x) <= 0.1, X + 1, x) ** 2),
    "a number that is computed": lambda x: jnp.sum(chosen(x, length(x), x[0, 0]) ** 2),
    "a sum of rows": lambda x: jnp.sum(chosen(x, length(x)) ** 2, axis=0),
    "an array besides": lambda x: jnp.sum(chosen(x, length(x)) * X),
    "a square of a square": lambda x: jnp.sum((chosen(x, length(x)) ** 2) ** 2),
    "a root": lambda x: jnp.sum(jnp.sqrt(chosen(x, length(x)))),
    "no reduction": lambda x: chosen(x, length(x)) ** 2,
    # On CPUs the largest of numbers may leave a NaN out.
    "the largest": lambda x: jnp.sum(chosen(x, jnp.max(jnp.abs(x))) ** 2),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MOVED)
def test_numbers_and_derivatives_are_those_of_the_program_as_it_is_written(name, kind):
    x = INPUTS[kind]
    jaxpr, moved = rewrite(MOVED[name], x)
    assert moved is not jaxpr
    expected, found = (reading.evaluate(program, x) for program in (jaxpr, moved))
    assert_bit_equal(found, expected)

    def total(program, x):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in reading.evaluate(program, x))

    expected, found = (jax.grad(total, 1)(program, x) for program in (jaxpr, moved))
    assert_bit_equal(found, expected)


@pytest.mark.parametrize("name", NOT_MOVED)
def test_other_choices_stay_where_they_are(name):
    jaxpr, moved = rewrite(NOT_MOVED[name], X)
    assert moved is jaxpr


def test_a_norm_has_one_sum():
    """Two sums of the same squares are one to a compiler."""
    _, moved = rewrite(lambda x: optax.safe_norm(x, 0.0), X)
    compiled = jax.jit(lambda x: reading.evaluate(moved, x)).lower(X).compile().as_text()
    assert compiled.count(" reduce(") == 1


def both_ways(x):
    """Numbers as they are written, and with late choices."""

    def program(x):
        return optax.safe_norm(x, 0.0), jnp.sum(jnp.abs(chosen(x, length(x))))

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
    """On one mesh after the other: what is traced for one is not for the next."""
    for shape in ((2, 2), (4, 1)):
        mesh = make_mesh(shape, ("rows", "columns"), "Explicit")
        x = np.arange(16, dtype=np.float32).reshape(4, 4)
        with jax.set_mesh(mesh):
            assert_bit_equal(*jax.jit(both_ways)(jax.device_put(x, P("rows", "columns"))))


def test_a_choice_in_many_others_takes_no_more_equations():
    def program(x):
        y = x
        for _ in range(300):
            y = chosen(y, length(y)) * 1.01
        return jnp.sum(y * y) + optax.safe_norm(x, 0.1)

    jaxpr, moved = rewrite(program, X)
    count = len(reading.open_jaxpr(building.inline_calls(jaxpr)).eqns)
    assert len(reading.open_jaxpr(moved).eqns) < count + 10


def test_a_call_that_says_where_results_lie_stays():
    mesh = make_mesh((2,), ("data",))
    placed = jax.jit(lambda x: 2 * x, out_shardings=jax.sharding.NamedSharding(mesh, P("data")))
    _, moved = rewrite(lambda x: (optax.safe_norm(x, 0.1), placed(x)), np.ones((2, 2), np.float32))
    assert {"jit", "pjit"} & set(names_of(moved))
