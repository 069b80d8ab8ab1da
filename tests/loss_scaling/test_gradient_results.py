"""A `GradResult` given to an update whole: it knows the scale that it carries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal

import ampx

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
X = jnp.array([3.0, 4.0])


def loss_fn(params, x):
    return jnp.sum(params["w"] * x) ** 2 + params["b"] ** 2


grads_of = ampx.value_and_grad(loss_fn)
dynamic = ampx.dynamic_loss_scale
WRAPPERS = {
    "dynamic": lambda tx: dynamic(tx, init_scale=8.0, growth_interval=1),
    "static": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "unchecked": lambda tx: ampx.static_loss_scale(tx, 8.0, check=False),
    "fused": lambda tx: dynamic(ampx.fused.sgd(0.1, momentum=0.9), init_scale=8.0),
    "windows": lambda tx: dynamic(ampx.multi_steps(tx, 2, normalize="weights"), init_scale=8.0),
    "none": ampx.no_loss_scale,
}
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.slow_but("dynamic", "unchecked", "none")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_result_is_taken_as_its_parts_are(wrapper):
    tx = WRAPPERS[wrapper](SGD)

    @jax.jit
    def step(state):
        result = grads_of(PARAMS, X, loss_scale=ampx.current_loss_scale(state))
        parts = {"value": result.loss, "weight": result.weight}
        return tx.update(result, state, PARAMS), tx.update(result.grads, state, PARAMS, **parts)

    whole, parts = step(tx.init(PARAMS))
    assert_bit_equal(whole, parts)
    assert np.any(np.asarray(whole[0]["w"]) != 0) or wrapper == "windows"


@pytest.mark.slow_but("fused", "none")
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_the_gradient_is_right_with_the_scale_that_it_carries(wrapper):
    """Inside of jit nobody can tell that it is another one than that of the state."""
    tx = WRAPPERS[wrapper](SGD)
    state = tx.init(PARAMS)
    run = jax.jit(lambda scale: tx.update(grads_of(PARAMS, X, loss_scale=scale), state, PARAMS))
    jit_state = jax.jit(
        lambda state: tx.update(grads_of(PARAMS, X, loss_scale=32.0), state, PARAMS)
    )
    right = tx.update(grads_of(PARAMS, X, loss_scale=ampx.current_loss_scale(state)), state, PARAMS)
    for found in (run(jnp.float32(32)), jit_state(state)):
        assert_bit_equal(found, right)


def test_several_losses_carry_one_each():
    tx = dynamic(SGD, init_scale=8.0, num_losses=2)
    state = tx.init(PARAMS)
    parts = [grads_of(PARAMS, x, loss_scale=s) for x, s in ((X, 8.0), (2 * X, 8.0))]
    whole = tx.update(tuple(parts), state, PARAMS)
    assert_bit_equal(whole, tx.update(tuple(part.grads for part in parts), state, PARAMS))
    with pytest.raises(
        ValueError, match="loss scale of 4.* is 8: .*current_loss_scale.opt_state, 1"
    ):
        tx.update((parts[0], parts[1].with_scale(4.0)), state, PARAMS)
    one = tx.update((None, parts[1]), state, PARAMS)
    assert_bit_equal(one, tx.update((None, parts[1].grads), state, PARAMS))
    right = jax.jit(
        lambda s: tx.update((None, grads_of(PARAMS, 2 * X, loss_scale=s)), state, PARAMS)
    )
    assert_bit_equal(right(jnp.float32(2.0)), one)


def test_several_optimizers_take_one():
    tx = dynamic({"w": SGD, "b": SGD}, init_scale=8.0, growth_interval=1)
    state = tx.init(PARAMS)
    step = jax.jit(lambda s: tx.update(grads_of(PARAMS, X, loss_scale=s), state, PARAMS))
    updates, new = step(jnp.float32(2.0))
    _, kept = step(jnp.float32(8.0))
    assert_bit_equal(new, kept)
    np.testing.assert_allclose(updates["w"], -0.1 * jax.grad(loss_fn)(PARAMS, X)["w"])
    assert float(new.loss_scale) == 16


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_a_forgotten_scale_is_refused(jit):
    tx = WRAPPERS["dynamic"](SGD)

    def step(state):
        return tx.update(grads_of(PARAMS, X), state, PARAMS)

    with pytest.raises(
        ValueError, match="carry no loss scale.* give ampx.value_and_grad loss_scale="
    ):
        (jax.jit(step) if jit else step)(tx.init(PARAMS))
    one = ampx.static_loss_scale(SGD, 1.0)  # skips bad steps, and scales nothing
    updates, _ = one.update(grads_of(PARAMS, X), one.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["b"], -0.1)


def test_another_scale_is_refused_where_both_are_known():
    for name, held in (("dynamic", 8), ("none", 1)):
        tx = WRAPPERS[name](SGD)
        with pytest.raises(ValueError, match=f"loss scale of 4, .* state is {held}: give"):
            tx.update(grads_of(PARAMS, X, loss_scale=4.0), tx.init(PARAMS), PARAMS)


def test_a_loss_that_is_not_finite_is_counted():
    tx = WRAPPERS["dynamic"](SGD)
    result = grads_of(PARAMS, X, loss_scale=8.0)._replace(loss=jnp.float32(jnp.inf))
    _, state = tx.update(result, tx.init(PARAMS), PARAMS)
    assert int(state.nonfinite_loss_total) == 1


def test_a_result_that_flax_has_taken_apart_is_named():
    class Fields(dict):  # what nnx.Optimizer.update makes of a NamedTuple: a mapping of its fields
        pass

    tx = dynamic(SGD)
    result = grads_of(PARAMS, X, loss_scale=65536.0)
    with pytest.raises(ValueError, match="the fields of a GradResult: give result.grads"):
        tx.update(Fields(grads=result.grads, loss=result.loss), tx.init(PARAMS), PARAMS)
    named = {"grads": PARAMS["w"]}  # a parameter may have that name
    tx.update(named, tx.init(named), named)


@pytest.mark.parametrize("wrap", [lambda tx: ampx.multi_steps(tx, 2), ampx.master_weights])
def test_who_takes_gradients_alone_says_what_to_give(wrap):
    tx = wrap(SGD)
    with pytest.raises(ValueError, match="got a GradResult .*: give the grads of a GradResult"):
        tx.update(grads_of(PARAMS, X), tx.init(PARAMS), PARAMS)


def test_a_state_is_no_loss_scale():
    state = dynamic(SGD).init(PARAMS)
    with pytest.raises(TypeError, match="got LossScaleState: give ampx.current_loss_scale"):
        grads_of(PARAMS, X, loss_scale=state)
