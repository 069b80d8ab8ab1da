"""`fused.from_rule`: optimizers that users write are as those of ampx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal

import ampx
from ampx import fused

RATE = optax.linear_schedule(0.1, 0.05, 10)
PARAMS = {"w": jnp.linspace(-1, 1, 256).reshape(2, 128), "b": jnp.ones(3)}


def rms_direction(grad, param, slots, numbers, operations):
    nu = numbers.decay * slots["nu"] + numbers.rest * grad**2
    nu = operations.keep(nu, slots["nu"])
    return grad / operations.sqrt(nu + numbers.eps), {"nu": nu}


def rms_direction_without_keep(grad, param, slots, numbers, operations):
    nu = numbers.decay * slots["nu"] + numbers.rest * grad**2
    return grad / operations.sqrt(nu + numbers.eps), {"nu": nu}


def rmsprop(learning_rate, direction=rms_direction, decay=0.9):
    numbers = {"decay": decay, "rest": 1 - decay, "eps": 1e-8}
    return fused.from_rule(direction, learning_rate, slots={"nu": 0.0}, numbers=numbers)


def corrected_direction(grad, param, slots, numbers, operations):
    """Adam without a first moment: its numbers depend on the step."""
    nu = operations.keep(0.9 * slots["nu"] + numbers.rest * grad**2, slots["nu"])
    return grad / (operations.sqrt(nu * numbers.correction) + 1e-8), {"nu": nu}


def corrected(learning_rate):
    def numbers(count):
        return {"rest": 1 - 0.9, "correction": 1 / (1 - 0.9 ** count.astype(jnp.float32))}

    return fused.from_rule(corrected_direction, learning_rate, slots={"nu": 0.0}, numbers=numbers)


CASES = {
    "rmsprop": (rmsprop, optax.rmsprop),
    "without keep": (
        functools.partial(rmsprop, direction=rms_direction_without_keep),
        optax.rmsprop,
    ),
    "numbers of the step": (
        corrected,
        lambda rate: optax.adam(rate, b1=0.0, b2=0.9),
    ),
}


def normal(seed):
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=p.shape), jnp.float32) for name, p in PARAMS.items()}


@pytest.mark.slow_but("rmsprop-xla", "numbers of the step-xla")
@pytest.mark.parametrize(
    ("case", "backend"), [("rmsprop", "interpret"), *((case, "xla") for case in CASES)]
)
def test_a_rule_of_ones_own_is_optaxs_optimizer_and_skips(case, backend):
    make, of_optax = CASES[case]
    tx = ampx.dynamic_loss_scale(make(RATE), init_scale=8.0)
    reference = optax.chain(optax.clip_by_global_norm(1.0), of_optax(RATE))
    params, state = PARAMS, tx.init(PARAMS)
    expected, ref_state = PARAMS, reference.init(PARAMS)

    @jax.jit
    def step(params, state, grads):
        return fused.apply(tx, grads, state, params, max_norm=1.0, backend=backend)

    for seed in range(3):
        scaled = optax.tree.scale(8.0, normal(seed))
        skipped = step(params, state, scaled | {"w": scaled["w"].at[1, 2].set(jnp.inf)})
        assert skipped[2].overflow
        assert_bit_equal((skipped[0], skipped[1].inner_state), (params, state.inner_state))
        params, state, _ = step(params, state, scaled)
        updates, ref_state = reference.update(normal(seed), ref_state, expected)
        expected = optax.apply_updates(expected, updates)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-6)
        kept, slot = state.inner_state[0].slots["nu"], optax.tree.get(ref_state, "nu")
        np.testing.assert_allclose(kept[name], slot[name], rtol=1e-6)
    assert state.inner_state[0].count == 3


def test_masters_and_groups_take_rules():
    halves = ampx.cast_floating(PARAMS, jnp.bfloat16)
    groups = {"rms": rmsprop(0.1), "still": fused.sgd(0.0)}
    tx = ampx.master_weights(optax.partition(groups, {"w": "rms", "b": "still"}))
    params, state, _ = jax.jit(functools.partial(fused.apply, tx))(
        normal(0), tx.init(halves), halves
    )
    updates, _ = (plain := optax.rmsprop(0.1)).update(normal(0), plain.init(PARAMS))
    master = ampx.cast_floating(halves, jnp.float32)["w"] + updates["w"]
    assert_bit_equal(params["b"], halves["b"])
    assert params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(params["w"], master.astype(jnp.bfloat16), rtol=2**-7)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda g, s: (g, s["nu"]), TypeError, r"slots \['nu'\], got"),
        (lambda g, s: (g, {}), TypeError, r"slots \['nu'\], got \[\]"),
        (lambda g, s: (g.sum(), s), ValueError, r"a direction of shape \(\)"),
        (lambda g, s: (g, {"nu": s["nu"][0]}), ValueError, "the slot 'nu' of shape"),
    ],
)
def test_what_a_rule_must_return(result, error, words):
    tx = fused.from_rule(lambda g, p, slots, h, ops: result(g, slots), 0.1, slots={"nu": 0.0})
    with pytest.raises(error, match=words):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"direction": 3}, TypeError, "direction"),
        ({"slots": ["nu"]}, TypeError, "slots must be a dict"),
        ({"slots": {"nu": "0"}}, TypeError, r"slots\['nu'\]"),
        ({"numbers": {"step_size": 1.0}}, ValueError, "'step_size' has a meaning"),
        ({"numbers": {"b-1": 1.0}}, ValueError, "'b-1' is no name"),
        ({"numbers": {"b1": jnp.nan}}, ValueError, r"numbers\['b1'\]"),
    ],
)
def test_settings_of_rules(changed, error, words):
    arguments = {"direction": rms_direction, "learning_rate": 0.1} | changed
    with pytest.raises(error, match=words):
        fused.from_rule(**arguments)
