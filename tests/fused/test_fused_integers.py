"""Integer parameters with gradients of their own: fused optimizers do as optax's.

JAX gives integers gradients of dtype float0, which are tested with the wrappers in
`test_fused_apply`. Programs that make gradients by hand give integers or floats.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, types_of

import ampx
from ampx import fused

pytestmark = pytest.mark.usefixtures("standard_promotion")

NAMES = ("sgd", "momentum", "adam", "adamw", "lamb", "adadelta", "lion", "adagrad")
PARAMS = {"i": jnp.array([50, -70, 3]), "w": jnp.array([1.0, -2.0])}
GRADS = {
    "integers": {"i": jnp.array([3, -4, 0]), "w": jnp.ones(2)},
    "floats": {"i": jnp.array([3.5, -4.25, 0.5]), "w": jnp.ones(2)},
    "integers for floats": {"i": jnp.array([3, -4, 1]), "w": jnp.array([2, -1])},
    "small integers": {"i": jnp.array([3, -4, 1], jnp.int8), "w": jnp.ones(2)},
}


def make(library, name):
    return library.sgd(7.0, momentum=0.9) if name == "momentum" else getattr(library, name)(7.0)


# optax keeps their sums of squares in the parameter's dtype: squares times 0.001 become 0.
TRUNCATED = ("adam", "adamw", "lamb", "adagrad")


@pytest.mark.whole_but(
    "sgd-integers",
    "sgd-small integers",
    "momentum-floats",
    "adam-integers for floats",
    "adam-floats",
    "adamw-small integers",
    "lamb-integers for floats",
    "lamb-floats",
    "adadelta-integers",
    "lion-small integers",
    "lion-integers",
    "adagrad-floats",
)
@pytest.mark.slow_but("momentum-floats", "adamw-small integers", "lamb-integers for floats")
@pytest.mark.parametrize("kind", GRADS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_optax(name, kind):
    both = []
    for library in (optax, fused):
        tx, params, seen = make(library, name), PARAMS, []
        state = tx.init(params)
        for _ in range(1 if name in TRUNCATED else 3):
            updates, state = tx.update(GRADS[kind], state, params)
            seen.append(updates)
            params = optax.apply_updates(params, updates)
        both.append((params, seen))
    for expected, found in zip(*map(jax.tree.leaves, both), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_sums_of_squares_are_not_truncated():
    tx = fused.adam(7.0)
    _, state = tx.update(GRADS["integers"], tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(state[0].nu["i"], [0.009, 0.016, 0.0], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_keeps_its_dtypes(name):
    tx = make(fused, name)
    state = tx.init(PARAMS)
    assert types_of(tx.update(GRADS["integers"], state, PARAMS)[1]) == types_of(state)


@pytest.mark.whole_but("sgd", "adamw", "lamb", "adadelta")
@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("name", NAMES)
def test_the_single_pass_gives_the_same(name):
    """Under a loss scale integers are not unscaled: nothing has multiplied them."""
    tx = make(fused, name)
    updates, _ = tx.update(GRADS["integers"], tx.init(PARAMS), PARAMS)
    expected = optax.apply_updates(PARAMS, updates)
    scaled = ampx.dynamic_loss_scale(tx, init_scale=8.0)
    grads = {**GRADS["integers"], "w": 8 * GRADS["integers"]["w"]}
    found, _, _ = fused.apply(scaled, grads, scaled.init(PARAMS), PARAMS)
    assert_bit_equal(found["i"], expected["i"])
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)
    grads["w"] = jnp.full(2, jnp.nan)
    held, _, report = fused.apply(scaled, grads, scaled.init(PARAMS), PARAMS)
    assert report.overflow
    assert_bit_equal(held, PARAMS)


def test_integers_that_floats_do_not_hold_stay_if_their_step_is_not_finite():
    tx = ampx.static_loss_scale(fused.adam(0.1, eps=0.0), 1.0)
    params = jnp.array([2**24 + 1, -3])
    new, _, _ = fused.apply(tx, jnp.zeros(2), tx.init(params), params)  # 0 / 0
    assert_bit_equal(new, params)


def test_complex_numbers_are_refused():
    tx, params = fused.adam(0.1), jnp.ones(2, jnp.complex64)
    with pytest.raises(TypeError, match="it takes real numbers"):
        tx.update(params, tx.init(params), params)
