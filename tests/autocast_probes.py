"""Probes for the test cases of autocast: dtypes of results, of equations and of gradients.

In all cases `x` and `w` are float32 arrays, `h = x @ w` is half, and gradients are float32.
"""

import collections
import functools

import jax
import jax.numpy as jnp
from helpers import all_finite
from jax.extend.core import jaxprs_in_params

import ampx

bfloat16 = functools.partial(ampx.autocast, half_dtype=jnp.bfloat16)
float16 = functools.partial(ampx.autocast, half_dtype=jnp.float16)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


X, W = normal(4, 8, seed=1), normal(8, 8, seed=2)


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


def equations(jaxpr):
    """Every equation of a jaxpr, and of the jaxprs inside its equations."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for body in jaxprs_in_params(eqn.params):
            yield from equations(body)


def named(name, fun, *args):
    """The equations of `fun(*args)` whose primitive has this name."""
    return [eqn for eqn in equations(jax.make_jaxpr(fun)(*args)) if eqn.primitive.name == name]


def dots(fun, *args):
    """Counts the matrix products of `fun(*args)` by the dtypes of their operands and results."""
    return collections.Counter(
        ", ".join(sorted({atom.aval.dtype.name for atom in (*eqn.invars, *eqn.outvars)}))
        for eqn in named("dot_general", fun, *args)
    )


def half_product(x, w, half):
    """`x @ w` rounded as autocast rounds it, returned in float32."""
    return (x.astype(half) @ w.astype(half)).astype(jnp.float32)


def total(fun):
    """A loss: the sum of squares of every output."""
    return lambda *args: sum(
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(fun(*args))
    )


def assert_gradients_are_float32(fun, *args):
    places = tuple(range(len(args)))
    grads = jax.jit(jax.grad(total(fun), places))(*args)
    assert dtypes(grads) == jax.tree.map(lambda _: "float32", args)
    assert all_finite(grads)


def numbered(functions):
    """The functions called `case_NN_...`, by their number."""
    return {
        int(name.split("_")[1]): fun for name, fun in functions.items() if name.startswith("case_")
    }
