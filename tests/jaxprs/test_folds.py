"""A fold carries facts through a program; what is inside of equations can be listed and entered."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from ampx.jaxprs import folds, reading


def test_a_fold_of_arrays_evaluates():
    table = jnp.arange(3.0)

    def f(x, y):
        return jnp.sin(x) * table + 2.0, y, jax.jit(lambda x: x - 1)(x)

    jaxpr, _ = reading.trace(f, table, table)
    operands = [table + 1, table + 2]

    def apply(eqn, arrays):
        return reading.bind(eqn, arrays)

    results = folds.fold(jaxpr, operands, apply, constant=lambda array: array)
    for result, expected in zip(results, f(*operands), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_constants_and_literals_have_facts_of_their_own():
    table = jnp.arange(3.0)
    jaxpr, _ = reading.trace(lambda x: (x + table, x * 2.0, x, 3.0), table)

    def apply(eqn, facts):
        return ["(" + " ".join((eqn.primitive.name, *facts)) + ")"]

    facts = folds.fold(jaxpr, ["x"], apply, constant=lambda _: "table", literal=str)
    assert facts == ["(add x table)", "(mul x 2.0)", "x", "3.0"]


def program(x):
    def body(carry, row):
        return lax.cond(carry > 0, jnp.sin, jnp.cos, carry) + row, carry

    carry, rows = lax.scan(body, x[0] * 2, x)
    return lax.while_loop(lambda c: c < 9, lambda c: c * c + jnp.sum(rows), carry)


def test_equations_inside_come_with_those_around_them():
    jaxpr, _ = reading.trace(program, jnp.ones(3))
    found = [
        (eqn.primitive.name, tuple(outer.primitive.name for outer in around))
        for eqn, around in folds.equations_inside(jaxpr)
    ]
    assert ("sin", ("scan", "cond")) in found and ("cos", ("scan", "cond")) in found
    assert ("lt", ("while",)) in found and ("scan", ()) in found
    assert found.index(("scan", ())) < found.index(("cond", ("scan",)))


def test_bodies_come_with_operands_of_their_types():
    """Also for a cond, whose first operand no branch gets, and a while loop with two bodies."""
    mesh = make_mesh((2,), ("data",))
    mapped = jax.shard_map(jax.checkpoint(program), mesh=mesh, in_specs=P(), out_specs=P())
    jaxpr, _ = reading.trace(jax.jit(mapped), jnp.ones(3))
    entered = set()
    for eqn, _ in folds.equations_inside(jaxpr):
        name = eqn.primitive.name
        for body, atoms in folds.bodies_with_operands(eqn, eqn.invars):
            entered.add(name)
            for inner, atom in zip(reading.open_jaxpr(body).invars, atoms, strict=True):
                assert inner.aval.dtype == atom.aval.dtype
                assert name == "scan" or inner.aval.shape == atom.aval.shape
    assert {"scan", "while", "cond", "shard_map", "jit"} <= entered
    assert entered & {"checkpoint", "remat2"}


def test_operations_and_kernels_have_no_bodies_to_enter():
    jaxpr, _ = reading.trace(lambda x: jnp.cumsum(x).at[0].add(1.0), jnp.ones(3))
    for eqn in reading.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name not in ("jit", "pjit"):
            assert not folds.bodies_with_operands(eqn, eqn.invars)
