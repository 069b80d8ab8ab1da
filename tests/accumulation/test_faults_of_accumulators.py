"""One regression test a fault of other libraries' accumulation: theirs where it runs, then ours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ampx


def run(tx, grads, params):
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_optax_multi_steps_lets_a_nan_through_between_updates(bad):
    """It masks by `emit * update`, and 0 * NaN is NaN: one bad micro-step, and params are NaN."""
    grads, params = [jnp.full(2, bad)], jnp.ones(2)
    theirs, _ = run(optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(), grads, params)
    assert jnp.isnan(theirs).all()
    ours, state = run(ampx.multi_steps(optax.sgd(0.1), 4), grads, params)
    np.testing.assert_array_equal(ours, params)
    assert state.window_is_bad


@pytest.mark.parametrize(
    "value, theirs, ours", [(1.0, 256.0, 512.0), (0.01, 4.0, 4096 * float(jnp.bfloat16(0.01)))]
)
def test_optax_microbatch_sums_in_bfloat16(value, theirs, ours):
    """512 ones sum to 256, and 4096 hundredths to 4."""
    rows = 512 if value == 1.0 else 4096
    w, x = jnp.ones((), jnp.bfloat16), jnp.full(rows, value, jnp.bfloat16)

    def loss_fn(w, x):
        return w * x[0]

    grad = optax.microbatching.microbatch(jax.grad(loss_fn), argnums=1, microbatch_size=1)(w, x)
    assert grad == theirs
    result = ampx.value_and_grad(loss_fn, num_microbatches=rows, normalize="sum")(w, x)
    np.testing.assert_allclose((result.grads, result.loss), ours, rtol=1e-5)


def test_mean_of_means():
    """transformers#34191: 7, 512, 31 and 200 tokens. Their means average to 2.208, not 1.976."""
    tokens, means = np.array([7, 512, 31, 200]), np.array([2.532, 1.9, 2.3, 2.1], np.float32)
    mask = (np.arange(512) < tokens[:, None]).astype(np.float32)
    batch = {"loss": jnp.asarray(means[:, None] * mask), "mask": jnp.asarray(mask)}

    def mean_of_row(w, batch):
        return w * jnp.sum(batch["loss"]) / jnp.sum(batch["mask"])

    def sums(w, batch):
        return w * jnp.sum(batch["loss"]), jnp.sum(batch["mask"])

    wrong = ampx.value_and_grad(mean_of_row, num_microbatches=4)(jnp.array(1.0), batch)
    assert round(float(wrong.loss), 3) == 2.208
    right = ampx.value_and_grad(sums, num_microbatches=4, normalize="weights")
    result = right(jnp.array(1.0), batch)
    assert round(float(result.loss), 3) == round(float(result.grads), 3) == 1.976
    assert result.weight == 750


def test_one_key_for_every_microbatch():
    """t5x, vision_transformer#286: all micro-batches, and steps, shared one dropout mask."""

    def loss_fn(w, x, key):
        mask = jax.random.bernoulli(key, 0.5, (32,))
        return jnp.sum(w * x), mask

    step = ampx.train_step(
        loss_fn, optax.sgd(0.1), num_microbatches=4, has_aux=True, aux_reduction="stack"
    )
    state, masks = step.init(jnp.array(1.0), key=jax.random.key(0)), set()
    for _ in range(2):
        state, report = step(state, jnp.ones(4))
        masks |= {np.asarray(mask).tobytes() for mask in report.aux}
    assert len(masks) == 8


@pytest.mark.parametrize("wrap", [lambda tx: tx, ampx.dynamic_loss_scale])
def test_mindspore_clears_an_accumulator_by_multiplication(wrap):
    """0 * inf is NaN: one overflow stays in the sums, and every later window is lost."""
    tx = ampx.multi_steps(wrap(optax.sgd(1.0)), 2)
    state, params = tx.init(jnp.zeros(())), jnp.zeros(())
    for grad in (jnp.inf, 1.0):
        updates, state = tx.update(jnp.asarray(grad), state, params)
        params += updates
    assert params == 0 and jnp.isnan(jnp.inf * 0) and state.grad_sum == 0
    scale = ampx.current_loss_scale(state)
    for grad in (1.0, 2.0):
        updates, state = tx.update(grad * scale, state, params)
        params += updates
    assert params == -1.5


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_scaling_outside_of_the_microbatch(num_microbatches):
    """A gradient of 1e-8 is below float16: whoever scales it afterwards scales zero."""
    scale = 2.0**16

    def loss_fn(w, x):
        return 1e-8 * jnp.sum((w * x).astype(jnp.float32)) / x.size

    grads_of = ampx.value_and_grad(loss_fn, policy="p=f16", num_microbatches=num_microbatches)
    args = jnp.array(1.0), jnp.ones(4, jnp.float16)
    outside = grads_of(*args).grads * scale / scale
    inside = grads_of(*args, loss_scale=scale).grads / scale
    assert outside == 0
    np.testing.assert_allclose(inside, 1e-8, rtol=1e-3)


def test_nnx_optimizer_step_advances_on_a_skip():
    def loss_fn(model, x):
        return jnp.mean(model(x))

    step = ampx.train_step(loss_fn, optax.sgd(0.1), loss_scale="dynamic")
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
    bad = jnp.full((1, 2), jnp.inf)
    (_, ours), report = step((model, optimizer), bad)
    assert report.overflow and ours.step[...] == 0
    optimizer.update(model, nnx.grad(loss_fn)(model, bad))
    assert ampx.is_skipped(nnx.as_pure(optimizer.opt_state)) and optimizer.step[...] == 1


@pytest.mark.parametrize("k", [1, 4])
def test_keras_decays_weights_on_every_mini_step(k):
    """keras#19990: with no gradient at all, one window decays once."""
    tx = ampx.multi_steps(optax.adamw(0.1, weight_decay=0.5), k)
    params, _ = run(tx, [jnp.zeros(2)] * k, jnp.ones(2))
    np.testing.assert_allclose(params, 1 - 0.1 * 0.5, rtol=1e-6)


def test_schedules_move_with_updates_and_not_with_calls():
    """A schedule inside a window moves once a window, also where a window is dropped."""
    rate = functools.partial(jnp.power, 0.5)
    tx = ampx.multi_steps(optax.sgd(lambda count: rate(count.astype(jnp.float32))), 2)
    params, _ = run(tx, [jnp.float32(g) for g in (1, 1, jnp.nan, 1, 1, 1)], jnp.zeros(()))
    assert params == -1.0 - 0.5
