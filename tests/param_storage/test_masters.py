import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import assert_bit_equal, optimizer_step, types_of
from hypothesis import given
from hypothesis import strategies as st

import ampx

HALVES = ("float16", "bfloat16")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.LayerNorm()(nn.tanh(nn.Dense(4)(x))))


@pytest.mark.slow
@pytest.mark.parametrize("half_dtype", HALVES)
def test_master_weights_equal_float32_parameters_cast_each_step(half_dtype):
    """Both ways to O2, through policy, scale, clip and AdamW, for 30 steps with two skips."""
    model = Net()
    x, y = jax.random.normal(jax.random.key(0), (2, 8, 3))
    params = model.init(jax.random.key(1), x)["params"]

    def loss_fn(params, batch):
        x, y, poison = batch
        return jnp.mean((model.apply({"params": params}, x) - y[:, :1]) ** 2) * poison

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02, weight_decay=0.01))
    recipe = ampx.opt_level("O2", half_dtype=half_dtype)
    cast_each_step = ampx.dynamic_loss_scale(optimizer, growth_interval=5, init_scale=2.0**10)
    with_masters = ampx.dynamic_loss_scale(
        ampx.master_weights(optimizer), growth_interval=5, init_scale=2.0**10
    )
    half = recipe.half_params(params)
    states = [(params, cast_each_step.init(params)), (half, with_masters.init(params))]
    grads_of = jax.jit(ampx.value_and_grad(loss_fn, policy=recipe))
    steps = [functools.partial(optimizer_step, tx) for tx in (cast_each_step, with_masters)]
    for i in range(30):
        poison = jnp.float32(jnp.inf if i in (7, 20) else 1.0)
        for j, (params, state) in enumerate(states):
            scale = ampx.current_loss_scale(state)
            grads = grads_of(params, (x, y, poison), loss_scale=scale).grads
            states[j] = steps[j](params, state, grads)
        (params, cast_state), (half, master_state) = states
        assert_bit_equal(ampx.master_params(master_state, half), params)
        assert_bit_equal(half, recipe.half_params(params))
    assert cast_state.skipped_total == 2
    assert_bit_equal(cast_state.inner_state, master_state.inner_state.inner_state)
    assert half["Dense_0"]["kernel"].dtype == half_dtype
    assert half["LayerNorm_0"]["scale"].dtype == jnp.float32


def normal_halves(dtype):
    """Normal numbers: XLA's CPU flushes subnormal float32, which bfloat16's subnormals are."""
    low, high = (2.0**-14, 2.0**15) if dtype == "float16" else (2.0**-120, 2.0**120)
    sign = st.sampled_from([-1.0, 1.0])
    magnitude = st.floats(np.log2(low), np.log2(high)).map(lambda e: 2.0**e)
    return st.builds(lambda s, m: float(jnp.asarray(s * m, dtype)), sign, magnitude)


@pytest.mark.parametrize("dtype", HALVES)
@given(data=st.data())
def test_parameter_plus_update_is_exactly_the_rounded_master(dtype, data):
    param = data.draw(normal_halves(dtype))
    ratio = data.draw(st.floats(-12.0, 6.0))
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    master = np.float32(np.clip(sign * abs(param) * 2.0**ratio, -65000, 65000))
    params = jnp.array([param], dtype)
    to_master = optax.GradientTransformation(
        lambda p: (), lambda g, s, p: (jnp.asarray([master]) - p, s)
    )
    tx = ampx.master_weights(to_master)
    for apply in (ampx.apply_updates, standard_apply_updates):
        updates, state = tx.update(jnp.zeros(1), tx.init(params), params)
        new = apply(params, updates)
        assert new.dtype == params.dtype
        np.testing.assert_array_equal(new, state.master_params.astype(dtype))


def standard_apply_updates(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def test_a_parameter_that_shrinks_further_is_made_right_by_the_next_step():
    tx = ampx.master_weights(optax.sgd(1.0))
    params = jnp.array([30000.0], jnp.float16)
    state = tx.init(params)
    params, state = optimizer_step(tx, params, state, jnp.array([30000.0 - 2.0**-13]))
    params, state = optimizer_step(tx, params, state, jnp.zeros(1))
    np.testing.assert_array_equal(params, state.master_params.astype(jnp.float16))


@pytest.mark.parametrize("dtype, small", [("float16", 2.0**-12), ("bfloat16", 2.0**-9)])
def test_steps_too_small_for_half_add_up_in_the_masters(dtype, small):
    params = jnp.ones(1, dtype)
    assert (params - jnp.asarray(small / 2, dtype) == params).all()
    tx = ampx.master_weights(optax.sgd(small / 2))
    state = tx.init(params)
    seen = []
    for _ in range(8):
        params, state = optimizer_step(tx, params, state, jnp.ones(1, dtype))
        seen.append(float(params[0]))
    assert seen[0] == 1.0 and seen[-1] == 1.0 - 4 * small
    assert state.master_params == 1.0 - 4 * small


@pytest.mark.parametrize(
    "wrap", [ampx.master_weights, ampx.fused.split_masters, ampx.fused.stochastic_rounding]
)
def test_inner_sees_float32_gradients_and_parameters_and_makes_float32_state(wrap):
    seen = []

    def record(updates, params):
        seen.extend(types_of((updates, params)))
        return updates

    half = {name: jnp.ones(2, name) for name in HALVES}
    params = {**half, "norm": jnp.ones(2)}
    tx = wrap(optax.chain(optax.stateless(record), optax.adam(0.1)))
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, new_state = tx.update(grads, state, params)
    float32 = ((2,), jnp.float32, False)
    assert seen == [dict.fromkeys(params, float32)] * 2
    assert types_of(new_state) == types_of(state)
    assert types_of(updates) == dict.fromkeys(params, float32)


def test_starting_from_float32_weights_keeps_what_half_loses():
    weights = jnp.array([1.0 + 2.0**-20])
    state = ampx.master_weights(optax.sgd(1.0)).init(weights)
    assert_bit_equal(ampx.master_params(state, weights.astype(jnp.float16)), weights)


def test_masters_are_copies_so_that_both_can_be_donated():
    params = jnp.ones(4)
    tx = ampx.dynamic_loss_scale(ampx.master_weights(optax.adam(0.1)), init_scale=1.0)
    step = jax.jit(functools.partial(optimizer_step, tx), donate_argnums=(0, 1))
    state = tx.init(params)
    for _ in range(2):
        params, state = step(params, state, jnp.ones(4))
    assert_bit_equal(params, ampx.master_params(state, params))


@pytest.mark.parametrize("empty", [False, True])
def test_parameters_that_are_not_floating_stay(empty):
    params = {"w": jnp.ones(2, jnp.float16), "ids": jnp.arange(2), "mask": jnp.ones(2, bool)}
    grads = jax.tree.map(jnp.zeros_like, params)
    if empty:  # the gradients that jax.grad(allow_int=True) gives
        params["key"] = jax.random.key(0)
        grads = {name: np.zeros(p.shape, jax.dtypes.float0) for name, p in params.items()}
    grads["w"] = jnp.ones(2, jnp.float16)
    tx = ampx.master_weights(optax.masked(optax.sgd(1.0), {name: name == "w" for name in params}))
    state = tx.init(params)
    assert state.master_params["ids"].dtype == jnp.int32
    new_params, _ = optimizer_step(tx, params, state, grads)
    assert_bit_equal(new_params, params | {"w": jnp.zeros(2, jnp.float16)})


def test_master_params_without_masters_are_the_parameters():
    params = jnp.ones(2)
    assert ampx.master_params(optax.adam(0.1).init(params), params) is params


def test_two_master_copies_must_be_told_apart():
    tx = optax.partition(
        {"a": ampx.master_weights(optax.sgd(0.1)), "b": ampx.master_weights(optax.sgd(0.1))},
        {"x": "a", "y": "b"},
    )
    params = {"x": jnp.ones(1), "y": jnp.ones(1)}
    with pytest.raises(ValueError, match="found 2 master copies"):
        ampx.master_params(tx.init(params), params)


def test_update_without_parameters_is_refused():
    tx = ampx.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


@pytest.mark.parametrize("param", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("update", ["float16", "bfloat16", "float32"])
def test_apply_updates_computes_in_the_wider_and_keeps_the_parameters_dtype(param, update):
    params, updates = jnp.array([1.0, 2.0], param), jnp.array([0.125, -0.25], update)
    assert_bit_equal(ampx.apply_updates(params, updates), jnp.array([1.125, 1.75], param))


def test_apply_updates_is_optax_for_float32():
    params = {"w": jax.random.normal(jax.random.key(0), (5,)), "none": None}
    updates = {"w": jax.random.normal(jax.random.key(1), (5,)), "none": None}
    assert_bit_equal(ampx.apply_updates(params, updates), optax.apply_updates(params, updates))


def test_masters_of_a_part_leave_the_other_parameters():
    params = {"w": jnp.ones(2, jnp.float16), "v": jnp.full(2, 3.0, jnp.float16)}
    tx = optax.partition(
        {"m": ampx.master_weights(optax.sgd(0.1)), "p": optax.sgd(0.1)}, {"w": "m", "v": "p"}
    )
    whole = ampx.master_params(tx.init(params), params)
    assert whole["w"].dtype == jnp.float32
    assert_bit_equal(whole["v"], params["v"])
