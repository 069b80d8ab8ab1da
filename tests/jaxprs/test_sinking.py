"""Elementwise work on what a branch returns anyway moves behind it, and nothing else does."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ampx.jaxprs import hoisting, reading, sinking

X, OLD = np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
ROW = np.ones(3, np.float32)


def split(fun, *operands):
    """`fun` returns updates and then other results; the first operands are known behind."""
    jaxpr, (updates, _) = reading.trace(fun, *operands)
    return jaxpr, sinking.sink(jaxpr, range(len(jax.tree.leaves(updates))))


def names_of(jaxpr):
    return [eqn.primitive.name for eqn in reading.open_jaxpr(jaxpr).eqns]


def step_of(tx, leaves):
    """The update of a transformation over so many leaves, closed over its state."""
    params = [X] * leaves

    def program(state):
        def run(grads, params):
            return tx.update(grads, state, params)

        return split(run, params, params)

    return program, tx.init(params)


def test_adamw_reads_new_moments_parameters_and_numbers_behind_the_branch():
    program, state = step_of(optax.adamw(0.1), 2)
    parts = []
    jax.make_jaxpr(lambda state: parts.append(program(state)) or 0)(state)
    ((_, found),) = parts
    assert found.moved == (0, 1)
    shapes = [var.aval.shape for var in reading.open_jaxpr(found.behind).invars]
    # Of each leaf: both moments and the parameter; of all leaves: two corrections of a bias, or the
    # count of steps, where optax computes both in a jitted function.
    assert sorted(map(len, shapes)) in ([0] * 2 + [2] * 6, [0] + [2] * 6)
    assert "sqrt" in names_of(found.behind) and "sqrt" not in names_of(found.inside)
    assert "integer_pow" in names_of(found.inside)  # of the moments


def test_both_parts_together_are_the_whole():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, nesterov=True))

    def whole(state, grads, params):
        return tx.update([grads], state, [params])

    def in_parts(state, grads, params):
        def run(*given):
            return whole(state, *given)

        jaxpr, parts = split(run, grads, params)
        results = reading.evaluate(parts.inside, grads, params)
        values = [grads, params, *results]
        behind = reading.evaluate(parts.behind, *(values[n] for n in parts.sources))
        count = len(jaxpr.out_avals) - len(parts.moved)
        return jax.tree.unflatten(
            jax.tree.structure(jax.eval_shape(run, grads, params)), [*behind, *results[:count]]
        )

    state = tx.init([X])
    expected, found = jax.jit(lambda *a: (whole(*a), in_parts(*a)))(state, X, OLD)
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("run", "is_moved"),
    [
        pytest.param(lambda g: (-g, g * OLD), True, id="a gradient"),
        pytest.param(lambda g: (g, 0.0), True, id="nothing computed"),
        pytest.param(lambda g: ((m := g + OLD) * 2, m), True, id="new state"),
        pytest.param(lambda g: ((m := g + OLD), m), True, id="new state itself"),
        pytest.param(lambda g: (g + jnp.asarray(OLD), g), False, id="old state"),
        pytest.param(lambda g: (g * jnp.linalg.norm(g + OLD), 0.0), True, id="a norm"),
        pytest.param(lambda g: (jnp.sort(g), g), False, id="not elementwise"),
        pytest.param(lambda g: (jnp.tanh(g), g), False, id="not cheap"),
        pytest.param(lambda g: (jnp.where(g > 0, g, 0.0), g), True, id="a jitted function"),
        pytest.param(
            lambda g: (jax.jit(lambda g, n: g / jnp.power(n, 3.5))(g, jnp.max(g)), g),
            True,
            id="a jitted function with a number of its own",
        ),
        pytest.param(lambda g: (jax.jit(jnp.sin)(g), g), False, id="a dear jitted function"),
        pytest.param(lambda g: (g * ROW, 0.0), False, id="a row"),
        pytest.param(lambda g: ((u := g * 2), jnp.sum(u)), False, id="needed inside"),
        pytest.param(
            lambda g: (g + jax.random.normal(jax.random.key(0), g.shape), g), False, id="noise"
        ),
        pytest.param(lambda g: (g[0, 0] * 2, 0.0), False, id="a number"),
        pytest.param(lambda g: (jnp.zeros_like(g), 0.0), True, id="zeros"),
        pytest.param(lambda g: (jax.pure_callback(np.negative, g, g), 0.0), False, id="a callback"),
    ],
)
def test_only_cheap_elementwise_work_on_what_is_there_is_moved(run, is_moved):
    _, parts = split(run, X)
    assert parts.moved == ((0,) if is_moved else ())
    count = len(reading.open_jaxpr(parts.behind).outvars)
    assert count == len(parts.moved)


def test_an_equation_is_looked_at_equally_often_for_any_number_of_leaves():
    """Were the program walked once for each leaf, 4 times the leaves took 16 times the work."""

    def count_work(leaves):
        program, state = step_of(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), leaves
        )
        found, lines = [], 0
        jax.make_jaxpr(lambda state: found.append(program(state)[0]) or 0)(state)

        def follow(frame, event, _):
            nonlocal lines
            lines += 1
            return follow if frame.f_code.co_filename in FILES else None

        before = sys.gettrace()
        sys.settrace(follow)
        try:
            sinking.sink(found[0], range(leaves))
        finally:
            sys.settrace(before)
        return lines

    few, many = count_work(4), count_work(16)
    assert few < many <= 4.2 * few


FILES = {sinking.__file__, reading.__file__, hoisting.__file__}
