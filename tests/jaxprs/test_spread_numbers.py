"""What is computed of an array that is one number is computed of the number, and is the same."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bit_equal

from ampx.jaxprs.building import inline_calls
from ampx.jaxprs.reading import evaluate, open_jaxpr
from ampx.jaxprs.spread_numbers import spread_late

X = jnp.linspace(-1, 1, 6).reshape(2, 3)
PROGRAMS = {
    # By what is special in them: the program, and how many operations on whole arrays are left.
    "a root": (lambda x, n: jnp.sqrt(jnp.full_like(x, n)) * x, 1),
    "one after the other": (lambda x, n: (jnp.exp(jnp.full_like(x, n)) ** 2 + n) * x, 1),
    "two numbers": (lambda x, n: jnp.full_like(x, n) * jnp.full_like(x, 3) + x, 1),
    "a condition": (lambda x, n: jnp.where(jnp.full_like(x, n) > 1, x, 2 * x), 2),
    "a choice of numbers": (lambda x, n: jnp.where(n > 1, jnp.full_like(x, n), 0.5) - x, 1),
    "another dtype": (lambda x, n: jnp.full_like(x, n).astype(jnp.bfloat16), 0),
    "a row is no number": (lambda x, n: jnp.exp(jnp.broadcast_to(n * x[0], (2, 3))), 1),
    "a result": (lambda x, n: (jnp.exp(jnp.full_like(x, n)), x), 0),
    "nothing to move": (lambda x, n: jnp.exp(x) * n, 2),
}


def count_operations(jaxpr):
    spread = {"broadcast_in_dim", "slice", "squeeze"}
    found = (e for e in open_jaxpr(jaxpr).eqns if e.outvars[0].aval.ndim == 2)
    return sum(eqn.primitive.name not in spread for eqn in found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_stay_what_they_are(name):
    program, count = PROGRAMS[name]
    args = X, jnp.float32(1.5)
    with jax.numpy_dtype_promotion("standard"):
        traced = inline_calls(jax.make_jaxpr(program)(*args))
    moved = spread_late(traced)
    assert count_operations(moved) == count
    assert (moved is traced) == (name in ("nothing to move", "a row is no number"))
    old, new = (jax.jit(lambda *args, j=j: evaluate(j, *args))(*args) for j in (traced, moved))
    assert_bit_equal(new, old)
    assert [x.dtype for x in new] == [x.dtype for x in old]


def test_empty_arrays_and_axes_of_a_mesh():
    """Types that say how arrays are divided are kept."""
    empty = jax.make_jaxpr(lambda x, n: jnp.exp(jnp.full_like(x, n)) + x)(jnp.zeros((0, 3)), 1.0)
    assert count_operations(spread_late(inline_calls(empty))) == 1
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        traced = inline_calls(jax.make_jaxpr(lambda x, n: jnp.exp(jnp.full_like(x, n)) * x)(x, 1.0))
        moved = spread_late(traced)
        assert moved is not traced and count_operations(moved) == 1
        assert_bit_equal(evaluate(moved, x, 1.0), evaluate(traced, x, 1.0))
