"""Optimizer state and parameters in few bytes: how far they may be from float32, and what holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal, counted_step, make_mesh, run_steps
from jax.sharding import NamedSharding, PartitionSpec

import ampx
from ampx import fused
from ampx.fused.moments.int8_blocks import Int8Blocks
from ampx.param_storage.split_floats import join

INT8 = dict(mu_dtype="int8", nu_dtype="int8")
SCHEDULE = optax.cosine_decay_schedule(3e-2, 200)
LOW_BIT = {
    "int8": lambda: fused.adamw(SCHEDULE, **INT8),
    "split 16": lambda: fused.split_masters(fused.adamw(SCHEDULE)),
    "split 8 and int8": lambda: fused.split_masters(fused.adamw(SCHEDULE, **INT8), 8),
    "stochastic": lambda: fused.stochastic_rounding(fused.adamw(SCHEDULE)),
    "stochastic and int8": lambda: fused.stochastic_rounding(fused.adamw(SCHEDULE, **INT8)),
    "masters": lambda: ampx.master_weights(fused.adamw(SCHEDULE)),
}
low_bit = pytest.mark.parametrize("name", LOW_BIT)
KEY = jax.random.key(0)
SCALES = jnp.exp(jax.random.uniform(jax.random.key(1), (64, 128), minval=-6.0, maxval=3.0))
TARGET = jax.random.normal(jax.random.key(2), (64, 128))


def parameters(name):
    dtype = jnp.float32 if name == "int8" else jnp.bfloat16
    return {"w": jax.random.normal(KEY, (64, 128)).astype(dtype), "norm": jnp.ones(128)}


def loss_fn(params, key):
    """Least squares whose curvature spans four orders of magnitude, with noise in the targets."""
    w, noise = params["w"].astype(jnp.float32), 0.1 * jax.random.normal(key, TARGET.shape)
    return jnp.sum(SCALES * (w - TARGET + noise) ** 2) / 1e3 + jnp.sum((params["norm"] - 2.0) ** 2)


def gradients(params, i):
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + i), params)


def step_of(tx):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, key, poison):
        grads_of = ampx.value_and_grad(lambda p, key: loss_fn(p, key) * poison)
        grads = grads_of(params, key, loss_scale=ampx.current_loss_scale(state)).grads
        return fused.apply(tx, grads, state, params, max_norm=1.0)[:2]

    return step


def trained(tx, params, steps=200):
    tx = ampx.dynamic_loss_scale(tx, init_scale=2.0**10, growth_interval=50)
    step, state = step_of(tx), tx.init(params)
    params = jax.tree.map(jnp.copy, params)
    for i in range(steps):
        params, state = step(params, state, jax.random.fold_in(KEY, i), jnp.float32(1.0))
    return params, state


def bytes_of_matrix(*trees):
    """Bytes a number of the matrix, with its moments, masters, codes and scales."""
    norm = 128
    held = [leaf for leaf in jax.tree.leaves(trees) if leaf.size >= 64 and leaf.size != norm]
    return sum(leaf.nbytes for leaf in held) / TARGET.size


@pytest.fixture(scope="module")
def float32_loss():
    params, _ = trained(fused.adamw(SCHEDULE), parameters("int8"))
    return float(loss_fn(params, KEY))


SCALE_BYTES = 2 * 4 / 128  # of two moments; rows of 128 have a scale each
BYTES = {
    "int8": 6 + SCALE_BYTES,
    "split 16": 12,
    "split 8 and int8": 5 + SCALE_BYTES,
    "stochastic": 10,
    "stochastic and int8": 4 + SCALE_BYTES,
    "masters": 14,
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@low_bit
def test_training_reaches_the_loss_of_float32_in_fewer_bytes(name, float32_loss):
    params, state = trained(LOW_BIT[name](), parameters(name))
    assert float(loss_fn(params, KEY)) == pytest.approx(float32_loss, rel=0.04)
    assert bytes_of_matrix(params, state.inner_state) == pytest.approx(BYTES[name])


@pytest.mark.slow
def test_bfloat16_parameters_alone_do_not(float32_loss):
    """What the formats above are for."""
    params, _ = trained(fused.adamw(SCHEDULE), parameters("split 16"))
    assert float(loss_fn(params, KEY)) > 1.05 * float32_loss


@pytest.mark.slow
def test_split_masters_of_16_bits_are_float32_masters():
    """Bit for bit, through skips; only the rounding of ties in the half copy may differ."""
    split = ampx.dynamic_loss_scale(LOW_BIT["split 16"](), init_scale=8.0)
    whole = ampx.dynamic_loss_scale(LOW_BIT["masters"](), init_scale=8.0)
    params = parameters("split 16")
    runs = []
    for tx in (split, whole):
        apply, own, state = jax.jit(functools.partial(fused.apply, tx)), params, tx.init(params)
        for i in range(12):
            # Not gradients at the parameters: the halves may differ by the rounding of a tie.
            grads = optax.tree.scale(jnp.nan if i in (3, 4) else 8.0, gradients(params, i))
            own, state, _ = apply(grads, state, own)
        runs.append((own, state))
    (half, state), (_, with_masters) = runs
    joined = join(half["w"], state.inner_state.error_bits["w"])
    assert state.skipped_total == 2
    assert_bit_equal(joined, with_masters.inner_state.master_params["w"])


@pytest.mark.slow
@low_bit
def test_a_skipped_step_keeps_every_bit(name):
    params = parameters(name)
    tx = ampx.dynamic_loss_scale(LOW_BIT[name](), init_scale=8.0)
    step, state = step_of(tx), tx.init(params)
    for i in range(3):
        params, state = step(params, state, jax.random.fold_in(KEY, i), jnp.float32(1.0))
    params["w"] = params["w"].at[5].set(0)  # pruned: its error bits are those of another half
    before = jax.tree.map(np.asarray, (params, state.inner_state))
    for poison in (jnp.inf, jnp.nan):
        params, state = step(params, state, KEY, jnp.float32(poison))
    assert state.skipped_total == 2
    assert_bit_equal(jax.tree.map(np.asarray, (params, state.inner_state)), before)


@pytest.mark.slow_but("stochastic")
@low_bit
def test_both_faces_give_the_same_parameters(name):
    params = parameters(name)
    tx = ampx.dynamic_loss_scale(LOW_BIT[name](), init_scale=8.0)
    grads = [gradients(params, i) for i in range(4)]
    step, traces = counted_step(tx)
    own = jax.tree.map(jnp.copy, params)
    updated, _ = run_steps(tx, own, grads, step)
    apply = jax.jit(functools.partial(fused.apply, tx))
    state = tx.init(params)
    for each in grads:
        scaled = optax.tree.scale(ampx.current_loss_scale(state), each)
        params, state, _ = apply(scaled, state, params)
    assert len(traces) == 1
    for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=2.0**-7)


@pytest.mark.slow_but("split_masters")
@pytest.mark.parametrize("wrap", [fused.split_masters, fused.stochastic_rounding])
def test_wrappers_take_plain_optax_too(wrap):
    params = parameters("split 16")
    grads = [gradients(params, i) for i in range(5)]
    plain, _ = run_steps(wrap(optax.adamw(1e-2)), params, grads)
    in_one_pass, _ = run_steps(wrap(fused.adamw(1e-2)), params, grads)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(in_one_pass), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=2.0**-6)


def test_stochastic_rounding_keeps_steps_on_average_that_rounding_loses():
    """torchao's case: steps of 1/16 of what the nearest bfloat16 could show."""
    rate = 2.0**-12
    params = jnp.ones(100_000, jnp.bfloat16)
    lost, _ = run_steps(fused.sgd(rate), params, [jnp.ones(100_000)] * 8)
    kept, _ = run_steps(fused.stochastic_rounding(fused.sgd(rate)), params, [jnp.ones(100_000)] * 8)
    assert_bit_equal(lost, params)
    assert np.mean(np.asarray(kept, np.float64)) == pytest.approx(1 - 8 * rate, abs=3e-5)


def test_random_bits_repeat_and_differ_by_seed_step_and_parameter():
    params = {"a": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(512, jnp.bfloat16)}
    grads = [jax.tree.map(lambda p: jnp.ones(p.shape), params)]

    def run(seed, steps=1):
        tx = fused.stochastic_rounding(fused.sgd(2.0**-10), seed)
        return run_steps(tx, params, grads * steps)[0]

    assert_bit_equal(run(0), run(0))
    once = run(0)
    assert np.any(once["a"] != once["b"])
    assert np.any(once["a"] != run(1)["a"])
    moved = [np.asarray(x["a"], np.float32) for x in (params, once, run(0, 2))]
    assert np.any((moved[0] - moved[1]) != (moved[1] - moved[2]))


@pytest.mark.slow
def test_bits_do_not_depend_on_sharding():
    mesh = make_mesh((4,), ("data",))
    tx = fused.stochastic_rounding(fused.adamw(1e-2, **INT8))
    params = jnp.ones((64, 1024), jnp.bfloat16)
    grads = [jax.random.normal(jax.random.key(i), (64, 1024)) for i in range(3)]
    alone = run_steps(tx, params, grads)
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    divided = run_steps(tx, jax.device_put(params, sharded), jax.device_put(grads, sharded))
    assert_bit_equal(jax.tree.map(np.asarray, divided), jax.tree.map(np.asarray, alone))


def test_only_large_parameters_have_int8_moments():
    params = {"w": jnp.ones((64, 64)), "narrow": jnp.ones((512, 16)), "b": jnp.ones(100)}
    state = fused.adamw(1e-3, **INT8).init(params)[0]
    for slot in (state.mu, state.nu):
        assert isinstance(slot["w"], Int8Blocks)
        assert slot["narrow"].dtype == slot["b"].dtype == jnp.float32
    assert state.mu["w"].codes.dtype == jnp.int8
    assert state.nu["w"].codes.dtype == jnp.uint8


@pytest.mark.slow_but("lamb", "bfloat16")
@pytest.mark.parametrize(
    "tx",
    [
        fused.lion(1e-2, mu_dtype="int8"),
        fused.sgd(1e-2, 0.9, accumulator_dtype=jnp.int8),
        fused.lamb(1e-2, mu_dtype="int8", nu_dtype="int8"),
        fused.adam(1e-2, nesterov=True, **INT8),
        fused.adam(1e-2, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16),
    ],
    ids=["lion", "sgd", "lamb", "nadam", "bfloat16"],
)
def test_every_moment_has_its_low_bit_form(tx):
    params = jax.random.normal(KEY, (32, 256))
    grads = [jnp.tanh(params) + 0.01 * i for i in range(5)]
    new, state = run_steps(tx, params, grads)
    moments = [x for x in jax.tree.leaves(state) if x.size == params.size]
    assert moments and all(m.dtype.itemsize < 4 for m in moments)
    assert np.all(np.isfinite(new)) and np.any(new != params)


def test_a_float32_second_moment_for_bfloat16_parameters():
    state = fused.adamw(1e-3, nu_dtype=jnp.float32).init(jnp.ones(8, jnp.bfloat16))
    assert optax.tree.get(state, "nu").dtype == jnp.float32
    assert optax.tree.get(state, "mu").dtype == jnp.bfloat16


def test_state_goes_through_a_checkpoint(tmp_path):
    params = parameters("split 8 and int8")
    params, state = trained(LOW_BIT["split 8 and int8"](), params, steps=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", (params, state))
    assert_bit_equal(restored, (params, state))


def test_what_the_formats_refuse():
    tx = fused.split_masters(fused.sgd(0.1))
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="split_masters needs params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="error_bits must be 8 or 16, got 4"):
        fused.split_masters(fused.sgd(0.1), 4)
    with pytest.raises(TypeError, match="seed must be an int, got 0.5"):
        fused.stochastic_rounding(fused.sgd(0.1), 0.5)
    with pytest.raises(TypeError, match="inner must be an optax gradient transformation"):
        fused.stochastic_rounding(0.1)
