"""Equations that are the same are differentiated once, and mean what they meant."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir

import ampx
from ampx.autocasting import transform
from ampx.jaxprs import reading
from ampx.jaxprs.sharing import is_differentiated, share_bodies
from ampx.jaxprs.source_info import is_transposed, line_of, scope_of

X = np.linspace(0.5, 2.0, 4, dtype=np.float32)
LAYERS = 6


def make_counted_primitive():
    """The sine, which counts how often JAX asks for its derivative."""
    asked = []
    sine_p = core.Primitive("counted_sine")
    sine_p.def_impl(jnp.sin)
    sine_p.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(sine_p, mlir.lower_fun(jnp.sin, multiple_results=False))

    def differentiate(primals, tangents):
        asked.append(primals)
        return sine_p.bind(*primals), tangents[0] * jnp.cos(primals[0])

    ad.primitive_jvps[sine_p] = differentiate
    return sine_p, asked


def test_a_derivative_is_asked_for_once():
    sine_p, asked = make_counted_primitive()

    def loss(x):
        for _ in range(LAYERS):
            x = sine_p.bind(x)
        return jnp.sum(x)

    def reference(x):
        for _ in range(LAYERS):
            x = jnp.sin(x)
        return jnp.sum(x)

    gradient = jax.jit(jax.grad(ampx.autocast(loss)))(X)
    assert len(asked) == 1
    np.testing.assert_allclose(gradient, jax.grad(reference)(X), rtol=1e-6)


def programs():
    def layers(x):
        for _ in range(LAYERS):
            x = jnp.maximum(x * 2.0 + x, 0.5) / jnp.sqrt(x)
        return x

    def signed_zeros(x):
        return lax.div(1.0, lax.mul(x, 0.0)) + lax.atan2(lax.mul(x, -0.0), lax.mul(x, -1.0))

    def several_results(x):
        for _ in range(2):
            x, places = lax.top_k(x, 4)
            x = x + places.astype(x.dtype)
        return x

    def no_operands(x):
        return x + lax.iota(x.dtype, 4) + lax.iota(x.dtype, 4)

    def bodies(x):
        for _ in range(2):
            x = lax.fori_loop(0, 2, lambda _, y: jnp.sin(y), x)
            x = lax.cond(x[0] > 0, jnp.cos, jnp.tanh, x)
        return x

    return [layers, signed_zeros, several_results, no_operands, bodies]


@pytest.mark.parametrize("fun", programs(), ids=lambda fun: fun.__name__)
def test_values_and_derivatives_stay(fun):
    jaxpr, _ = reading.trace(fun, X)
    shared = share_bodies(jaxpr)

    def run(jaxpr):
        (result,) = reading.evaluate(jaxpr, jnp.asarray(X))
        (tangent,) = jax.jvp(lambda x: reading.evaluate(jaxpr, x)[0], (X,), (X,))[1:]
        return result, tangent

    assert_bit_equal(jax.jit(lambda: run(shared))(), jax.jit(lambda: run(jaxpr))())


def test_each_kind_of_equation_has_one_body():
    jaxpr, _ = reading.trace(programs()[0], X)
    kinds = collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    shared = share_bodies(jaxpr)
    assert {reading.call_name(eqn) for eqn in shared.eqns} == {*kinds}
    assert len({id(eqn.params["jaxpr"]) for eqn in shared.eqns}) == len(kinds)
    # Written out again where the program is traced: what is compiled knows of no calls.
    again, _ = reading.trace(lambda x: reading.evaluate(shared, x), X)
    assert [eqn.primitive for eqn in again.eqns] == [eqn.primitive for eqn in jaxpr.eqns]


def test_operands_that_differ_in_their_bits_are_two():
    jaxpr, _ = reading.trace(lambda x: (lax.mul(x, 0.0), lax.mul(x, -0.0)), X)
    assert share_bodies(jaxpr).eqns == jaxpr.eqns


def test_lines_scopes_and_direction_are_those_of_each_call(monkeypatch):
    def loss(x):
        with jax.named_scope("first"):
            x = jnp.sin(x)
        with jax.named_scope("second"):
            x = jnp.sin(x)
        return jnp.sum(x)

    def places():
        jaxpr = jax.make_jaxpr(jax.grad(ampx.autocast(lambda x: loss(x))))(X)
        return collections.Counter(
            (eqn.primitive.name, scope_of(eqn), line_of(eqn), is_transposed(eqn))
            for eqn in jaxpr.eqns
        )

    found = places()
    assert len({line for name, _, line, _ in found if name == "sin"}) == 2
    assert {scope for name, scope, *_ in found if name == "sin"} == {("first",), ("second",)}
    monkeypatch.setattr(transform, "share_bodies", lambda jaxpr: jaxpr)
    assert places() == found


def test_only_what_is_traced_and_differentiated_shares():
    seen = []

    def fun(x):
        seen.append(is_differentiated([x]))
        return jnp.sum(x)

    fun(jnp.asarray(X))
    jax.grad(fun)(jnp.asarray(X))  # each operation is compiled for itself: nothing is traced
    jax.eval_shape(fun, X)
    jax.eval_shape(jax.vmap(fun), X)
    assert seen == [False] * 4
    jax.eval_shape(jax.grad(fun), X)
    jax.eval_shape(lambda x: jax.jvp(fun, (x,), (x,)), X)
    jax.eval_shape(jax.vmap(jax.grad(fun)), X)
    assert seen[4:] == [True] * 3
