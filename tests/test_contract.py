"""What every transformation of ampx owes, as optax's own contract test asks of every optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import all_finite, assert_bit_equal, counted_step, optimizer_step, types_of

import ampx


def inner(learning_rate=0.1):
    return optax.chain(optax.add_decayed_weights(0.01), optax.sgd(learning_rate, momentum=0.9))


TRANSFORMATIONS = {
    "dynamic_loss_scale": lambda tx: ampx.dynamic_loss_scale(tx, init_scale=8.0),
    "dynamic_loss_scale skip": lambda tx: ampx.dynamic_loss_scale(
        tx, init_scale=8.0, nonfinite_updates="skip", hysteresis=2, refill="finite"
    ),
    "static_loss_scale": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "several optimizers": lambda tx: ampx.dynamic_loss_scale(
        {"w": tx, "b": tx}, init_scale=8.0, growth_interval=(1, 2), nonfinite_loss="skip"
    ),
    "static_loss_scale unchecked": lambda tx: ampx.static_loss_scale(tx, 8.0, check=False),
    "no_loss_scale": ampx.no_loss_scale,
    "master_weights": ampx.master_weights,
    "multi_steps": lambda tx: ampx.multi_steps(tx, 2),
    "densify_rows": lambda tx: optax.chain(ampx.densify_rows(), tx),
    "all": lambda tx: ampx.multi_steps(
        ampx.dynamic_loss_scale(
            optax.chain(ampx.densify_rows(), ampx.master_weights(tx)), init_scale=8.0
        ),
        2,
    ),
}
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": (jnp.array([0.25, -0.75]),)}


SLOW = ("several optimizers", "static_loss_scale unchecked")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in TRANSFORMATIONS
    ]
)
def wrap(request):
    return TRANSFORMATIONS[request.param]


def gradients(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 2))
    return jax.tree.map(lambda p: 8 * jax.random.normal(next(keys), p.shape), PARAMS)


@functools.cache
def jitted_step(tx):
    return jax.jit(functools.partial(optimizer_step, tx))


def after(tx, num_steps, params=PARAMS, state=None, first=0):
    state = tx.init(params) if state is None else state
    for seed in range(first, first + num_steps):
        params, state = jitted_step(tx)(params, state, gradients(seed))
    return params, state


def assert_close(left, right):
    for a, b in zip(*map(jax.tree.leaves, (left, right)), strict=True):
        exact = a.dtype != jnp.float32
        np.testing.assert_allclose(a, b, rtol=0 if exact else 2e-6, atol=0 if exact else 1e-8)


def test_takes_and_ignores_unknown_extra_arguments(wrap):
    tx = wrap(inner())
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(PARAMS)
    plain = tx.update(gradients(0), state, PARAMS)
    assert_bit_equal(tx.update(gradients(0), state, PARAMS, nobody_knows_this=1), plain)


def test_hands_known_extra_arguments_to_the_inner_transformation(wrap):
    def update(updates, state, params=None, *, factor, **_):
        return optax.tree.scale(factor, updates), state

    seen = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = wrap(optax.chain(seen, optax.sgd(1.0)))
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(gradients(0), state, PARAMS, factor=0.0)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_state_keeps_structure_shapes_dtypes_and_weak_types(wrap, num_steps):
    tx = wrap(inner())
    state = tx.init(PARAMS)
    params, new_state = after(tx, num_steps)
    assert types_of(new_state) == types_of(state)
    assert types_of(params) == types_of(PARAMS)
    assert all_finite((params, new_state))


@pytest.mark.slow_but("dynamic_loss_scale", "no_loss_scale", "all")
def test_jit_equals_no_jit_with_one_trace_and_donation(wrap):
    tx = wrap(inner())
    step, traces = counted_step(tx)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for seed in range(4):
        params, state = step(params, state, gradients(seed))
    assert len(traces) == 1
    eager, eager_state = PARAMS, tx.init(PARAMS)
    for seed in range(4):
        eager, eager_state = optimizer_step(tx, eager, eager_state, gradients(seed))
    assert_close((params, state), (eager, eager_state))


@pytest.mark.slow_but("dynamic_loss_scale", "master_weights")
def test_works_in_inject_hyperparams(wrap):
    def build(learning_rate):
        return wrap(inner(learning_rate))

    tx = optax.inject_hyperparams(build)(learning_rate=0.1)
    params, state = after(tx, 4)
    assert_close(params, after(wrap(inner(0.1)), 4)[0])
    np.testing.assert_array_equal(optax.tree.get(state, "learning_rate"), np.float32(0.1))
    changed = optax.tree.set(state, learning_rate=0.0)
    held, _ = after(tx, 2, params, changed, first=4)
    assert_bit_equal(held, params)


@pytest.mark.slow_but("dynamic_loss_scale")
def test_works_in_a_chain(wrap):
    alone = wrap(inner())
    chained = optax.chain(optax.identity(), alone, optax.scale(1.0))
    params, state = after(chained, 4)
    expected, expected_state = after(alone, 4)
    assert_close((params, state[1]), (expected, expected_state))


@pytest.mark.slow_but("dynamic_loss_scale", "master_weights", "densify_rows")
def test_works_in_optax_multi_steps(wrap):
    alone = wrap(inner())
    many = optax.MultiSteps(alone, 2).gradient_transformation()
    state, expected_state = many.init(PARAMS), alone.init(PARAMS)
    params = expected = PARAMS
    for _ in range(2):
        for _ in range(2):
            params, state = jitted_step(many)(params, state, gradients(0))
        expected, expected_state = after(alone, 1, expected, expected_state)
    assert_close(params, expected)


NUMBERS = {
    "Python": {"w": 1.5, "n": 2},
    "NumPy": {"w": np.full(2, 1.5), "n": np.float32(2)},  # float64, which JAX holds as float32
}
COMPUTING = {  # with gradients or parameters, before the optimizer inside
    **{name: TRANSFORMATIONS[name] for name in ("dynamic_loss_scale", "master_weights")},
    "multi_steps": lambda tx: ampx.multi_steps(tx, 1),
    "clip_by_bucket_norm": lambda tx: optax.chain(ampx.clip_by_bucket_norm(1e3), tx),
    "stochastic_rounding": ampx.fused.stochastic_rounding,
    "split_masters": ampx.fused.split_masters,
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", COMPUTING)
def test_takes_numbers_for_arrays_as_optax_does(name, kind):
    """optax's `test_extra_args_positional_params`: its updates are the number 1."""
    tx = COMPUTING[name](optax.sgd(0.5))
    given = NUMBERS[kind] if kind == "NumPy" else {"w": NUMBERS[kind]["w"]}
    arrays = jax.tree.map(jnp.asarray, given)
    results = [tx.update(leaf, tx.init(leaf), leaf) for leaf in (given, arrays)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_state_survives_a_pytree_round_trip_through_numpy(wrap):
    tx = wrap(inner())
    params, state = after(tx, 3)
    leaves, treedef = jax.tree.flatten(state)
    restored = jax.tree.unflatten(treedef, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    resumed = after(tx, 3, params, restored, first=3)
    assert_bit_equal(resumed, after(tx, 3, params, state, first=3))


def test_no_buffer_appears_twice_in_a_state(wrap):
    for make_init in (lambda init: init, jax.jit):
        state = make_init(wrap(inner()).init)(PARAMS)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((PARAMS, state))]
        assert len(set(pointers)) == len(pointers)


def test_lookahead_takes_gradients_of_its_fast_parameters():
    """optax's `test_lookahead`: gradients have another structure than its pair of parameters."""
    plain = optax.lookahead(optax.sgd(0.5), sync_period=1, slow_step_size=0.5)
    tx = ampx.dynamic_loss_scale(plain, init_scale=8.0)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2)})
    grads = {"w": jnp.array([1.0, -2.0])}
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies by an integer
        expected, _ = plain.update(grads, plain.init(params), params)
        found, _ = tx.update(optax.tree.scale(8.0, grads), tx.init(params), params)
    assert_bit_equal(found, expected)


def test_gradients_of_single_examples_may_be_summed_inside():
    """optax's `test_clipping_norm`: what comes out has one axis less than what went in."""
    plain = optax.contrib.differentially_private_aggregate(1.0, 0.0, 0)
    tx = ampx.dynamic_loss_scale(plain, init_scale=8.0)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones((3, 2))}
    with jax.numpy_dtype_promotion("standard"):  # optax divides by the number of examples
        expected, _ = plain.update(grads, plain.init(params))
        for given in (None, params):
            found, _ = tx.update(optax.tree.scale(8.0, grads), tx.init(params), given)
            assert_bit_equal(found, expected)


@pytest.mark.parametrize("make", [optax.adam, optax.sgd, ampx.fused.adam])
def test_gradients_of_single_examples_that_nobody_sums_are_refused(make):
    tx = ampx.dynamic_loss_scale(make(0.1))
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"gradient at 'w' has shape \(3, 2\), and its parameter"):
        tx.update({"w": jnp.ones((3, 2))}, tx.init(params), params)
