"""Finite gradients whose norm is beyond float32, under a clip: the step is undone and counted.

A clip multiplies by `max_norm / inf`, and all gradients become 0: an update that nobody asked for,
made of decay and old moments, in which every number is finite.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}
LARGEST = 3e38
scaled = functools.partial(ampx.dynamic_loss_scale, init_scale=1.0)
OPTIMIZERS = {
    "optax": optax.adamw(0.1),
    "fused": fused.adamw(0.1),
    "fused, injected": optax.inject_hyperparams(fused.adamw)(learning_rate=0.1),
    "fused, partition": optax.partition({"all": fused.adamw(0.1)}, lambda p: "all"),
    "fused, masters": ampx.master_weights(fused.adamw(0.1)),
    "masters": ampx.master_weights(optax.adamw(0.1)),
}


def loss_fn(params, batch):
    """Its gradient is the mean of the batch, in every element."""
    return sum(jnp.sum(p) for p in jax.tree.leaves(params)) * jnp.mean(batch)


def assert_undone(before, after, loss_scale):
    """All but the scale's own figures are as they were."""
    assert_bit_equal(after.inner_state, before.inner_state)
    assert after.overflow and int(after.bad_update_total) == 1 and int(after.skipped_total) == 1
    assert int(after.inf_total) == int(after.nan_total) == 0
    assert float(after.loss_scale) == loss_scale, "a smaller scale would not help"


@pytest.mark.whole_but(
    "fused, partition-skip",
    "optax-hold",
    "optax-skip",
    "fused-hold",
    "masters-skip",
    "fused, masters-hold",
    "fused, injected-skip",
)
@pytest.mark.slow_but("fused, partition-skip")
@pytest.mark.parametrize("mode", ["hold", "skip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_undone_and_counted(name, mode):
    wrap = functools.partial(scaled, nonfinite_updates=mode)
    step = ampx.train_step(loss_fn, OPTIMIZERS[name], loss_scale=wrap, max_grad_norm=1.0)
    jitted = jax.jit(step)
    state, _ = jitted(step.init(PARAMS), jnp.ones(1))
    after, report = jitted(state, jnp.full(1, LARGEST))
    assert report.overflow and int(after.step) == 1
    assert_bit_equal(after.params, state.params)
    assert_undone(state.opt_state, after.opt_state, loss_scale=1.0)
    onwards, report = jitted(after, jnp.ones(1))
    assert not report.overflow and int(onwards.step) == 2
    assert_bit_equal(onwards.params, jitted(state, jnp.ones(1))[0].params)


@pytest.mark.parametrize("fits", [True, False], ids=["fused form", "plain form"])
def test_apply_undoes_and_counts(fits):
    """In the plain form, which a loss scale of saturating numbers takes, too."""
    tx = scaled(fused.adamw(0.1), saturation_dtype=None if fits else jnp.float32)
    grads = jax.tree.map(lambda p: jnp.full_like(p, LARGEST), PARAMS)
    state = tx.init(PARAMS)
    after, new, report = fused.apply(tx, grads, state, PARAMS, max_norm=1.0)
    assert report.overflow
    assert_bit_equal(after, PARAMS)
    assert_undone(state, new, loss_scale=1.0)


@pytest.mark.parametrize("value", [1e20, 1e30])
def test_a_norm_that_float32_holds_is_clipped(value):
    step = ampx.train_step(loss_fn, fused.sgd(1.0), loss_scale=scaled, max_grad_norm=1.0)
    state, report = jax.jit(step)(step.init(PARAMS), jnp.full(1, value))
    np.testing.assert_allclose(report.global_norm, value * 5**0.5, rtol=1e-5)
    np.testing.assert_allclose(state.params["a"], 1 - 5**-0.5, rtol=1e-5)
    assert not report.overflow and int(state.opt_state.bad_update_total) == 0


@pytest.mark.slow_but("optax")
@pytest.mark.parametrize("name", ["optax", "fused"])
def test_an_overflow_is_counted_as_one_alone(name):
    step = ampx.train_step(loss_fn, OPTIMIZERS[name], loss_scale=scaled, max_grad_norm=1.0)
    state, report = jax.jit(step)(step.init(PARAMS), jnp.full(1, jnp.inf))
    figures = ampx.metrics(state.opt_state)
    assert report.overflow and int(figures["skipped_total"]) == int(figures["inf_total"]) == 1
    assert int(figures["bad_update_total"]) == 0


@pytest.mark.slow_but("fused")
@pytest.mark.parametrize("name", ["optax", "fused"])
def test_devices_agree(name):
    step = ampx.train_step(
        loss_fn, OPTIMIZERS[name], loss_scale=scaled, max_grad_norm=1.0, axis_name="data"
    )
    mesh = make_mesh((4,), ("data",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    state, report = jax.jit(mapped)(step.init(PARAMS), jnp.full(4, LARGEST))
    assert report.overflow
    assert_bit_equal(state.params, PARAMS)
    assert_undone(step.init(PARAMS).opt_state, state.opt_state, loss_scale=1.0)


@pytest.mark.slow_but("optax")
@pytest.mark.parametrize("name", ["optax", "fused"])
def test_without_a_clip_the_step_is_undone_too(name):
    step = ampx.train_step(loss_fn, OPTIMIZERS[name], loss_scale=scaled)
    state = step.init(PARAMS)
    after, report = jax.jit(step)(state, jnp.full(1, LARGEST))
    assert report.overflow and int(after.step) == 0
    assert_bit_equal(after.params, state.params)
    assert_undone(state.opt_state, after.opt_state, loss_scale=1.0)
