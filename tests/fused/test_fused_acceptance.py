"""What other fused optimizers test of themselves, with tighter tolerances, named after its source.

Sharded optimizers against whole ones (apex's test_dist_adam) are in test_fused_sharding; int8
states and stochastic rounding (torchao, FlashOptim) in test_fused_formats and test_fused_kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, optimizer_step

import ampx
from ampx import fused


def draw(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def tree_of(seed, shapes, dtype=jnp.float32):
    return {str(i): draw(100 * seed + i, shape, dtype) for i, shape in enumerate(shapes)}


def apply_step(tx, params, state, grads, **options):
    return fused.apply(tx, grads, state, params, **options)[:2]


def run(tx, step, params, steps, **options):
    step, state = jax.jit(functools.partial(step, tx, **options)), tx.init(params)
    for grads in steps:
        params, state = step(params, state, grads)
    return params, state


def near(actual, expected, rtol=2e-6, atol=None):
    """Absolute tolerance: `rtol` of the largest, if none is given."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        own = rtol * np.max(np.abs(b), initial=1e-9) if atol is None else atol
        np.testing.assert_allclose(a, b, rtol=rtol, atol=own)


APEX = {
    "adam": dict(learning_rate=5e-4, b1=0.9, b2=0.999, eps=1e-8),
    "adamw": dict(learning_rate=5e-4, weight_decay=0.1),
    "adagrad": dict(learning_rate=5e-4, eps=1e-8, initial_accumulator_value=0.0),
    "sgd": dict(learning_rate=0.125, momentum=0.5, nesterov=True),
    "novograd": dict(learning_rate=1e-3, b2=0.98, weight_decay=0.01),
}
# TestFusedOptimizer.test_multi_params, in miniature: matrices, vectors and one number.
MULTI = [(278_011,), (64, 48), (64,), (33, 7), (1,)]


@pytest.mark.slow_but("adamw")
@pytest.mark.parametrize("name", APEX)
def test_apex_fused_optimizer_of_278011_elements_and_several_parameters(name):
    """run_optimizers/test_fused_optimizer.py: 7 steps; abs 1e-3 there."""
    params, *steps = (tree_of(i, MULTI) for i in range(8))
    ours, plain = (getattr(library, name)(**APEX[name]) for library in (fused, optax))
    near(run(ours, apply_step, params, steps), run(plain, optimizer_step, params, steps))


def test_apex_frozen_parameters_stay_frozen():
    """TestFusedOptimizer.test_frozen_model: half of the parameters have a gradient."""
    params = tree_of(0, [(5, 3), (4,)])
    tx = optax.partition(
        {"trained": fused.adamw(0.1), "frozen": fused.sgd(0.0)}, {"0": "trained", "1": "frozen"}
    )
    new, _, _ = fused.apply(tx, tree_of(1, [(5, 3), (4,)]), tx.init(params), params)
    assert_bit_equal(new["1"], params["1"])
    assert (new["0"] != params["0"]).all()


@pytest.mark.slow_but("master")
@pytest.mark.parametrize("kind", ["plain", "master"])
def test_apex_adam_with_a_grad_scaler_for_a_hundred_steps(kind):
    """run_optimizers/test_adam.py: 1e-3 there, and no step that overflows on purpose."""
    params = tree_of(0, [(8, 4), (4,)], jnp.float16 if kind == "master" else jnp.float32)

    def make(library):
        inner = library.adamw(1e-3, weight_decay=0.01)
        inner = ampx.master_weights(inner) if kind == "master" else inner
        return ampx.dynamic_loss_scale(inner, init_scale=2.0**10, growth_interval=8)

    results = []
    for tx, step in ((make(fused), apply_step), (make(optax), optimizer_step)):
        step, state, trained = jax.jit(functools.partial(step, tx)), tx.init(params), params
        for i in range(100):
            scale = ampx.current_loss_scale(state) * (np.inf if i % 30 == 7 else 1.0)
            grads = tree_of(i + 1, [(8, 4), (4,)])
            grads = jax.tree.map(lambda g, scale=scale: (g * scale).astype(jnp.float16), grads)
            trained, state = step(trained, state, grads)
        assert int(state.skipped_total) >= 4
        results.append((ampx.master_params(state, trained), state._replace(inner_state=())))
    near(*results)


def test_apex_lamb_of_18011_elements_clipped_by_the_global_norm():
    """run_optimizers/test_lamb.py: 7 steps, max_grad_norm=1; abs 1e-3 there."""
    settings = dict(learning_rate=5e-4, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
    params, *steps = (tree_of(i, [(18_011,), (3, 5)]) for i in range(8))
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(**settings))
    expected, (_, expected_state) = run(plain, optimizer_step, params, steps)
    ours = run(fused.lamb(**settings), apply_step, params, steps, max_norm=1.0)
    near(ours, (expected, expected_state))


EACH = {
    "adadelta": fused.adadelta(1.0, weight_decay=0.1),
    "adagrad": fused.adagrad(0.1),
    "adamw": fused.adamw(1e-2, weight_decay=0.1),
    "lamb": fused.lamb(1e-2, weight_decay=0.1),
    "lion": fused.lion(1e-2),
    "novograd": fused.novograd(1e-2),
    "sgd": fused.sgd(0.1, momentum=0.9),
}


@pytest.mark.whole_but("bfloat16-adamw", "float32-lamb", "bfloat16-sgd")
@pytest.mark.slow_but("bfloat16-adamw")
@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("half", ["float32", "bfloat16"])
def test_deepspeed_many_tensors_are_updated_as_each_alone(name, half):
    """test_cpu_adam.py: sizes 64, 22, 1024 and 2**20, float32 and half; bit-equal."""
    tx, shapes = EACH[name], [(64,), (22,), (1024,), (2**20,)]
    params, *steps = (tree_of(i, shapes, half) for i in range(3))
    together, _ = run(tx, apply_step, params, steps)
    for key, param in params.items():
        alone, _ = run(tx, apply_step, param, [grads[key] for grads in steps])
        assert_bit_equal(together[key], alone)


BNB = {
    "adam": dict(learning_rate=1e-3),
    "adamw": dict(learning_rate=1e-3, weight_decay=0.01),
    "lion": dict(learning_rate=1e-4, b1=0.9, b2=0.99, weight_decay=0.1),
    "sgd": dict(learning_rate=1e-3, momentum=0.9),
    "lamb": dict(learning_rate=1e-3, weight_decay=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BNB)
def test_bnb_twenty_steps_with_the_state_saved_and_loaded_every_four(name):
    """tests/test_optim.py: 1e-6 + 1e-5 relative there, and up to 15 outliers; here none."""
    tx, plain = (getattr(library, name)(**BNB[name]) for library in (fused, optax))
    shapes = [(1024, 1), (1024, 32), (64, 4097)]
    params = expected = tree_of(0, shapes)
    state, plain_state = tx.init(params), plain.init(params)
    pairs = (apply_step, tx), (optimizer_step, plain)
    steps = [jax.jit(functools.partial(*pair)) for pair in pairs]
    for i in range(20):
        grads = optax.tree.scale(0.01, tree_of(i % 5 + 1, shapes))
        params, state = steps[0](params, state, grads)
        expected, plain_state = steps[1](expected, plain_state, grads)
        if i % 4 == 3:
            near(params, expected, rtol=1e-6, atol=1e-6)
            saved = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state)]
            state = jax.tree.unflatten(jax.tree.structure(tx.init(params)), map(jnp.asarray, saved))
    near(state, plain_state)


def test_bnb_lion_decays_apart_from_the_sign():
    """A gradient of zero moves a parameter by its decay alone."""
    tx = fused.lion(0.1, weight_decay=0.5)
    new, _, _ = fused.apply(tx, jnp.zeros(2), tx.init(jnp.ones(2)), jnp.array([1.0, -2.0]))
    np.testing.assert_allclose(new, [0.95, -1.9], rtol=1e-6)


def test_flashoptim_jax_schedules_count_from_zero():
    """test_adamw.py: ten steps against optax; L2 below 0.05 there."""
    rates = []

    def rate(count):
        jax.debug.callback(lambda c: rates.append(int(c)), count)
        return 0.01 * (1 + count.astype(jnp.float32))

    params, *steps = (draw(i, (7, 5)) for i in range(11))
    near(
        run(fused.adamw(rate, weight_decay=0.1), apply_step, params, steps),
        run(optax.adamw(rate, weight_decay=0.1), optimizer_step, params, steps),
    )
    jax.effects_barrier()
    assert sorted(rates) == sorted([*range(10), *range(10)])


@pytest.mark.parametrize("name", EACH)
def test_flashoptim_zero_gradients_keep_a_state_of_zeros(name):
    """test_optimizers.py, for the states of all optimizers that begin at zero."""
    tx = fused.adadelta(1.0) if name == "adadelta" else EACH[name]  # no decay in the gradient
    params, zeros = draw(0, (5, 4)), jnp.zeros((5, 4))
    new, state = run(tx, apply_step, params, [zeros] * 3)
    assert np.isfinite(new).all()
    counted = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    begun = [x for x in jax.tree.leaves(tx.init(params)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert_bit_equal(counted, begun)


def test_torch_fused_matches_the_loop_over_parameters_of_many_dtypes():
    """test_optim.py::test_fused_matches_forloop, with parameters of three dtypes in one tree."""
    dtypes = ("float32", "bfloat16", "float16")
    tx = fused.adamw(1e-2, weight_decay=0.1)
    params, *steps = ({d: draw(i, (9, 13), d) for d in dtypes} for i in range(4))
    together, state = run(tx, apply_step, params, steps)
    for dtype in dtypes:
        alone, own = run(tx, apply_step, params[dtype], [grads[dtype] for grads in steps])
        assert_bit_equal((together[dtype], state[0].mu[dtype]), (alone, own[0].mu))
