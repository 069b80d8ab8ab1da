"""Equinox's layers and loops, and what is built upon it: Diffrax, Optimistix, Lineax."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax
import optimistix
import pytest
from equinox.internal import while_loop
from listing import Peer
from programs import (
    FORMS,
    IMAGES,
    RUN,
    SEQUENCE,
    VECTORS,
    Program,
    Programs,
    cross_entropy,
    draw,
    fill,
    like_params,
    mean_square,
    parametrize_cases,
)

import ampx

EXCLUDED: dict[str, str] = {}
EQUINOX, DIFFRAX, OPTIMISTIX, LINEAX = (Programs(EXCLUDED) for _ in range(4))
ALL = (EQUINOX, DIFFRAX, OPTIMISTIX, LINEAX)
RUNS = {
    "equinox": "MLP, attention, LSTM, convolutions, checkpointed loops",
    "diffrax": "neural differential equations, traced with three ways to their gradients",
    "optimistix": "fixed points and roots, differentiated by the implicit function theorem",
    "lineax": "linear systems, solved directly and by conjugate gradients",
}
PEERS = tuple(
    Peer(
        source=source,
        runs=f"{runs}: traced, gradients, and ten steps at O0, at O1 in both half types, and where "
        "a model computes in the dtype of its parameters at O2",
        cases=own.cases,
        in_suite=own.in_suite,
        excluded=EXCLUDED,
    )
    for own, (source, runs) in zip(ALL, RUNS.items(), strict=True)
)


def _of_module(make: Any, call: Any, batch: Any, loss_of: Any = mean_square) -> Program:
    """The module's arrays are the parameters; `call` runs it on one row of the batch."""
    shapes, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        model, x = eqx.combine(params, static), like_params(params, batch["x"])
        return loss_of(jax.vmap(lambda row: call(model, row))(x), batch["y"])

    return Program(loss, fill(shapes), batch)


@EQUINOX.add(casts=True)
def equinox_mlp() -> Program:
    def make(key):
        return eqx.nn.MLP(8, 8, 16, 2, key=key)

    return _of_module(make, lambda model, x: model(x), VECTORS)


@EQUINOX.add(casts=True)
def equinox_attention() -> Program:
    def make(key):
        return eqx.nn.MultiheadAttention(2, 8, key=key), eqx.nn.LayerNorm(8)

    def call(model, x):
        attention, norm = model
        h = jax.vmap(norm)(x)
        return x + attention(h, h, h)

    return _of_module(make, call, SEQUENCE)


@EQUINOX.add
def equinox_lstm() -> Program:
    def make(key):
        return eqx.nn.LSTMCell(8, 8, key=key)

    def call(model, xs):
        def step(state, x):
            state = model(x, state)
            return state, state[0]

        return jax.lax.scan(step, (jnp.zeros(8), jnp.zeros(8)), xs)[1]

    return _of_module(make, call, SEQUENCE)


@EQUINOX.add
def equinox_convolutions() -> Program:
    def make(key):
        first, second = jax.random.split(key)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 8, 3, stride=2, key=first),
                eqx.nn.GroupNorm(2, 8),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.AdaptiveAvgPool2d(1),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(8, 10, key=second),
            ]
        )

    images = {"x": np.moveaxis(IMAGES["x"], -1, 1), "y": IMAGES["y"]}
    return _of_module(make, lambda model, x: model(x), images, cross_entropy)


@EQUINOX.add
def equinox_checkpointed_loop() -> Program:
    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def body(carry):
            count, x = carry
            return count + 1, jnp.tanh(x @ weight)

        def goes_on(carry):
            return carry[0] < 5

        _, x = while_loop(goes_on, body, (0, batch["x"]), max_steps=16, kind="checkpointed")
        return mean_square(x, batch["y"])

    return Program(loss, draw(8, 8) / 3, VECTORS)


def _of_ode(adjoint: Any) -> Program:
    def field(t: Any, y: jax.Array, weights: Any) -> jax.Array:
        return jnp.tanh(y @ weights["in"]) @ weights["out"]

    def loss(weights: Any, batch: Any) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Euler(),
            0.0,
            1.0,
            0.25,
            batch["x"],
            args=weights,
            adjoint=adjoint,
            max_steps=4,
        )
        return mean_square(solution.ys[-1], batch["y"])

    return Program(loss, {"in": draw(8, 16) / 3, "out": draw(16, 8, seed=1) / 4}, VECTORS)


@DIFFRAX.add
def diffrax_checkpoints() -> Program:
    return _of_ode(diffrax.RecursiveCheckpointAdjoint())


@DIFFRAX.add(forms=("traced",))
def diffrax_backsolve() -> Program:
    return _of_ode(diffrax.BacksolveAdjoint())


@DIFFRAX.add(forms=("traced",))
def diffrax_direct() -> Program:
    return _of_ode(diffrax.DirectAdjoint())


@OPTIMISTIX.add
def optimistix_fixed_point() -> Program:
    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def layer(y, weight):
            return jnp.tanh(y @ weight + batch["x"])

        solver = optimistix.FixedPointIteration(1e-4, 1e-4)
        found = optimistix.fixed_point(layer, solver, batch["x"], weight, max_steps=32, throw=False)
        return mean_square(found.value, batch["y"])

    return Program(loss, draw(8, 8) / 8, VECTORS)


@OPTIMISTIX.add
def optimistix_newton() -> Program:
    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def one(x):
            def residual(y, weight):
                return y - jnp.tanh(weight @ y + x)

            solver = optimistix.Newton(1e-4, 1e-4)
            return optimistix.root_find(residual, solver, x, weight, max_steps=8, throw=False).value

        return mean_square(jax.vmap(one)(batch["x"]), batch["y"])

    return Program(loss, draw(8, 8) / 8, VECTORS)


def _of_system(solver: Any) -> Program:
    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def one(x):
            operator = lineax.FunctionLinearOperator(
                lambda v: weight.T @ (weight @ v) + v,
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                lineax.positive_semidefinite_tag,
            )
            return lineax.linear_solve(operator, x, solver, throw=False).value

        # A product before the solver, which is what runs in half.
        return mean_square(jax.vmap(one)(batch["x"] @ weight), batch["y"])

    return Program(loss, draw(8, 8) / 3, VECTORS)


@LINEAX.add
def lineax_conjugate_gradients() -> Program:
    return _of_system(lineax.CG(1e-5, 1e-5))


@LINEAX.add
def lineax_cholesky() -> Program:
    return _of_system(lineax.Cholesky())


QUICK = ("equinox_attention", "equinox_checkpointed_loop", "lineax_conjugate_gradients")


@pytest.mark.slow_but(*(f"{name}-traced" for name in QUICK))
@parametrize_cases(ALL, FORMS[:1])
def test_programs_are_traced(programs, case):
    programs.check(case)


@pytest.mark.slow_but("equinox_mlp-gradients")
@parametrize_cases(ALL, RUN)
def test_programs_are_run(programs, case):
    programs.check(case)


def test_solvers_of_linear_systems_stay_float32():
    """A system's condition multiplies rounding errors: matrix and solution stay exact."""

    def solve(weight, x):
        operator = lineax.FunctionLinearOperator(
            lambda v: weight.T @ (weight @ v) + v,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            lineax.positive_semidefinite_tag,
        )
        return lineax.linear_solve(operator, weight @ x, lineax.CG(1e-5, 1e-5)).value

    def rule_of_solve(**settings):
        rows = ampx.explain(solve, **settings)(draw(8, 8), draw(8)).equations
        (row,) = [row for row in rows if row.primitive == "linear_solve"]
        assert all(before == after for before, after in (*row.operands, *row.results))
        return row.rule

    assert rule_of_solve() == "float32"
    rules = ampx.DEFAULT_RULES.half("linear_solve")
    assert rule_of_solve(rules=rules) == "has no half form"


@pytest.mark.parametrize("powers", [0, 1, 2])
@pytest.mark.parametrize("solver", [lineax.CG(1e-5, 1e-5), lineax.Cholesky()])
def test_a_loss_scale_is_followed_through_solvers(solver, powers):
    """Not under `vmap`: there Equinox hides which primitive it is."""
    tx = ampx.dynamic_loss_scale(optax.sgd(0.1))

    def loss(weight, x):
        matrix = weight.T @ weight + jnp.eye(8)
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        return jnp.mean(lineax.linear_solve(operator, x, solver, throw=False).value ** 2)

    def step(weight, opt_state, x):
        scale = ampx.current_loss_scale(opt_state) ** powers
        grad = jax.grad(lambda w: loss(w, x) * scale)(weight)
        update, opt_state = tx.update(grad, opt_state, weight)
        return ampx.apply_updates(weight, update), opt_state

    report = ampx.lint_step(step)(draw(8, 8) / 3, tx.init(draw(8, 8)), draw(8))
    assert [found.check for found in report.findings] == ["loss_scale"] * (powers != 1), report
