"""Rules of custom derivatives that take, keep and give Python numbers, None and known zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_probes import bfloat16, normal
from jax import lax

import ampx

W, X = normal(8, 8, seed=1), normal(4, 8, seed=2)


def keeps(*kept):
    """tanh, whose rule keeps these beside its result."""

    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    def backward(residuals, cotangent):
        out, *others = residuals
        factor = jnp.float32(1)
        for other, was in zip(others, kept, strict=True):
            if was is not None:
                factor = jnp.where(other == was, factor, jnp.nan)
        return (cotangent * (1 - out**2) * factor,)

    tanh.defvjp(lambda x: (jnp.tanh(x), (jnp.tanh(x), *kept)), backward)
    return tanh


def takes_numbers():
    @jax.custom_vjp
    def scaled(x, flag, count, factor):
        return jnp.where(flag, x * factor * count, x)

    def forward(x, flag, count, factor):
        return scaled(x, flag, count, factor), (flag, count, factor)

    def backward(residuals, cotangent):
        flag, count, factor = residuals
        return jnp.where(flag, cotangent * factor * count, cotangent), None, None, None

    scaled.defvjp(forward, backward)
    return lambda x: scaled(x, True, 2, 0.5)


def gives_numbers():
    """A rule that gives a Python number for a scalar and None for an integer."""

    @jax.custom_vjp
    def scaled(x, s, n):
        return x * s * n.astype(x.dtype)

    def backward(residuals, cotangent):
        s, n = residuals
        return cotangent * s * n.astype(cotangent.dtype), 0.0, None

    scaled.defvjp(lambda x, s, n: (scaled(x, s, n), (s, n)), backward)
    return lambda x: scaled(x, jnp.float32(0.5), jnp.int32(2))


def gives_constant_results():
    """A rule whose function has results that depend on nothing."""

    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x), True, 3, 2.0

    tanh.defvjp(lambda x: (tanh(x), jnp.tanh(x)), lambda out, cts: (cts[0] * (1 - out**2),))

    def fun(x):
        y, flag, count, factor = tanh(x)
        return jnp.where(flag, y * factor * count, 0.0)

    return fun


def static_arguments():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def power(x, flag, name):
        return x**2 if flag and name == "square" else x

    def backward(flag, name, x, cotangent):
        assert flag is True and name == "square"
        return (2 * x * cotangent,)

    power.defvjp(lambda x, flag, name: (power(x, flag, name), x), backward)
    return lambda x: power(x, True, "square")


def known_zeros():
    """A rule that is told which operands are differentiated, and keeps the answer."""

    @jax.custom_vjp
    def pair(x, s):
        return x * s, x + s

    def forward(x, s):
        assert x.perturbed and not s.perturbed
        return (x.value * s.value, x.value + s.value), (s.value, s.perturbed)

    def backward(residuals, cotangents):
        s, perturbed = residuals
        first, second = cotangents
        if not isinstance(second, jax.custom_derivatives.SymbolicZero):
            first = first * s + second
        else:
            first = first * s
        return first, jnp.where(perturbed, jnp.nan, jnp.zeros_like(s))

    pair.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x: pair(x, lax.stop_gradient(jnp.float32(2.0)))[0]


def jvp_of(make):
    @jax.custom_jvp
    def tanh(x, flag, s):
        return jnp.tanh(x) * s

    @functools.partial(tanh.defjvp, symbolic_zeros=False)
    def rule(primals, tangents):
        x, flag, s = primals
        return make(jnp.tanh(x) * s, (1 - jnp.tanh(x) ** 2) * s * tangents[0])

    return lambda x: tanh(x, True, 2.0)


def jvp_with_constants():
    """A rule with constant results, and tangents of them that are Python zeros or float0."""

    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x), 2.0, 3, True

    @tanh.defjvp
    def rule(primals, tangents):
        (x,), (dx,) = primals, tangents
        zero = np.zeros((), jax.dtypes.float0)
        return (jnp.tanh(x), 2.0, 3, True), ((1 - jnp.tanh(x) ** 2) * dx, 0.0, zero, zero)

    def fun(x):
        y, factor, count, flag = tanh(x)
        return jnp.where(flag, y * factor * count, 0.0)

    return fun


def jvp_with_static_arguments():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x, flag):
        return x**2 if flag else x

    @power.defjvp
    def rule(flag, primals, tangents):
        (x,), (dx,) = primals, tangents
        return power(x, flag), 2 * x * dx if flag else dx

    return lambda x: power(x, True)


def jvp_with_known_zeros():
    @jax.custom_jvp
    def scaled(x, s):
        return x * s

    def rule(primals, tangents):
        (x, s), (dx, ds) = primals, tangents
        assert isinstance(ds, jax.custom_derivatives.SymbolicZero)
        return x * s, dx * s

    scaled.defjvp(rule, symbolic_zeros=True)
    return lambda x: scaled(x, 2.0)


def rule_in_a_loop():
    """A rule inside of a scan, in another rule that keeps a flag, as loops with checkpoints do."""

    @jax.custom_vjp
    def loop(x):
        return lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)[0]

    def step(c, _):
        return keeps(True, 1)(c), None

    def forward(x):
        return loop(x), (x, False)

    def backward(residuals, cotangent):
        x, _ = residuals
        return jax.vjp(lambda x: lax.scan(step, x, None, length=3)[0], x)[1](cotangent)

    loop.defvjp(forward, backward)
    return loop


RULES = {
    "keeps a bool": keeps(True),
    "keeps a false bool": keeps(False),
    "keeps an int": keeps(3),
    "keeps a float": keeps(0.5),
    "keeps a complex": keeps(1 + 2j),
    "keeps numbers of numpy": keeps(np.bool_(True), np.int32(3), np.float32(0.5)),
    "keeps arrays of numpy": keeps(np.zeros(()), np.ones((), bool)),
    "keeps None": keeps(None, True, None),
    "takes numbers": takes_numbers(),
    "gives numbers": gives_numbers(),
    "gives constant results": gives_constant_results(),
    "static arguments": static_arguments(),
    "known zeros": known_zeros(),
    "jvp": jvp_of(lambda out, tangent: (out, tangent)),
    "jvp with constants": jvp_with_constants(),
    "jvp with static arguments": jvp_with_static_arguments(),
    "jvp with known zeros": jvp_with_known_zeros(),
    "a rule in a loop": rule_in_a_loop(),
}


def loss_of(rule):
    return lambda w: jnp.sum(jnp.square(rule(X @ w)))


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, jax.checkpoint],
    ids=["as it is", "jit", "checkpoint"],
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_through_rules_with_python_numbers(rule, transform):
    expected = jax.grad(loss_of(rule))(W)
    gradient = jax.grad(transform(bfloat16(loss_of(rule))))(W)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(
        gradient, expected, rtol=0.05, atol=0.05 * jnp.max(jnp.abs(expected))
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_inside_of_autocast(rule):
    expected = jax.grad(loss_of(rule))(W)
    gradient = ampx.autocast(jax.grad(loss_of(rule)), output="original")(W)
    np.testing.assert_allclose(
        gradient, expected, rtol=0.05, atol=0.05 * jnp.max(jnp.abs(expected))
    )


@pytest.mark.parametrize("rule", [RULES["keeps a bool"], RULES["takes numbers"]])
def test_gradients_of_a_batch_through_rules_with_python_numbers(rule):
    batch = jnp.stack([W, 2 * W])
    gradients = jax.vmap(jax.grad(bfloat16(loss_of(rule))))(batch)
    expected = jax.vmap(jax.grad(loss_of(rule)))(batch)
    np.testing.assert_allclose(
        gradients, expected, rtol=0.05, atol=0.05 * jnp.max(jnp.abs(expected))
    )


@pytest.mark.parametrize("value", [True, 3, 2.0, 1j, np.float32(2), np.bool_(False)])
def test_results_that_are_constants_are_arrays(value):
    constant, _ = bfloat16(lambda w: (jnp.asarray(value), w @ w))(W)
    assert isinstance(constant, jax.Array)
    assert constant == value
    assert constant.dtype == jnp.asarray(value).dtype
