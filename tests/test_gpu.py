"""Ordinary programs on a GPU: what they compute there is what they compute on a CPU.

Without a GPU all are skipped. `make gpu` runs them, and those of the kernels in `fused/`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal

import ampx

pytestmark = pytest.mark.gpu
KEYS = jax.random.split(jax.random.key(0), 4)


def loss_fn(params, batch):
    x, y = batch
    hidden = jax.nn.gelu(x.astype(params["up"].dtype) @ params["up"] + params["b"])
    normed = hidden - hidden.mean(axis=-1, keepdims=True)
    out = normed @ params["down"]
    return jnp.mean((out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def start(dtype=jnp.float32):
    params = {
        "up": jax.random.normal(KEYS[0], (16, 64), dtype) / 4,
        "b": jnp.zeros(64, dtype),
        "down": jax.random.normal(KEYS[1], (64, 8), dtype) / 8,
    }
    x = jax.random.normal(KEYS[2], (32, 16))
    return params, (x, jnp.sin(x[:, :8]))


def losses_on(platform, steps=20, **settings):
    """The losses of some steps of training on a kind of device, and the last state."""
    with jax.default_device(jax.devices(platform)[0]):
        params, batch = start()
        step = ampx.train_step(loss_fn, optax.adamw(1e-2), **settings)
        state = step.init(params)
        run = jax.jit(step)
        losses = []
        for _ in range(steps):
            state, report = run(state, batch)
            losses.append(float(report.loss))
    return np.array(losses), state


@pytest.mark.parametrize("policy", ["O0", "O1", "O2"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_training_falls_alike(policy, half):
    recipe = ampx.opt_level(policy, half_dtype=half)
    on_gpu, _ = losses_on("gpu", policy=recipe, max_grad_norm=1.0)
    on_cpu, _ = losses_on("cpu", policy=recipe, max_grad_norm=1.0)
    assert on_gpu[-1] < 0.7 * on_gpu[0]
    # float32 products of a GPU may have 10 bits (TF32), as many as float16.
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=0.03)


def test_micro_batches_are_summed_as_one_batch():
    one, _ = losses_on("gpu", steps=5)
    four, _ = losses_on("gpu", steps=5, num_microbatches=4)
    np.testing.assert_allclose(four, one, rtol=5e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_keeps_every_bit(fused):
    adamw = (ampx.fused if fused else optax).adamw(1e-2)
    tx = ampx.dynamic_loss_scale(adamw)
    params, batch = start()
    grads = ampx.value_and_grad(loss_fn)(params, batch, loss_scale=2.0**16).grads

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, state = step(params, tx.init(params), grads)
    for bad in (jnp.inf, jnp.nan):
        broken = grads | {"b": grads["b"].at[3].set(bad)}
        after, next_state = step(params, state, broken)
        assert_bit_equal((after, next_state.inner_state), (params, state.inner_state))
        assert next_state.loss_scale == state.loss_scale / 2


@functools.cache
def blocked_params():
    return {"w": jax.random.normal(KEYS[3], (64, 512))}


@pytest.mark.parametrize("tx", [optax.adamw(1e-3), optax.lamb(1e-3)], ids=["adamw", "lamb"])
def test_a_loss_scale_around_optax_works_in_place(tx):
    """Old or new is chosen in the kernel that makes what is new."""
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    step = ampx.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, loss_scale="dynamic")
    batch = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    state = jax.eval_shape(step.init, params)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    size = 4 * 1024**2
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < 2 * size  # the gradient, and LAMB's direction
    assert " conditional(" not in compiled.as_text()  # the host would wait for it


@pytest.mark.parametrize("form", ["int8", "split", "stochastic"])
def test_narrow_forms_by_xla_are_those_of_the_cpu(form):
    adamw = functools.partial(ampx.fused.adamw, 1e-2)
    tx = {
        "int8": lambda: adamw(mu_dtype="int8", nu_dtype="int8"),
        "split": lambda: ampx.fused.split_masters(adamw()),
        "stochastic": lambda: ampx.fused.stochastic_rounding(adamw()),
    }[form]()

    def run(platform):
        with jax.default_device(jax.devices(platform)[0]):
            params = jax.device_put(blocked_params())
            if form != "int8":
                params = ampx.cast_floating(params, jnp.bfloat16)
            state = tx.init(params)

            @jax.jit
            def step(params, state):
                grads = {"w": jnp.cos(9 * params["w"])}
                return ampx.fused.apply(tx, grads, state, params, backend="xla")[:2]

            for _ in range(3):
                params, state = step(params, state)
        return np.asarray(params["w"], np.float32)

    on_gpu, on_cpu = run("gpu"), run("cpu")
    # A last bit in a number may move it to the next code or half; not many.
    assert np.mean(np.abs(on_gpu - on_cpu) > 1e-2) < 0.01


def test_one_program_serves_all_phases_of_a_schedule():
    schedule = ampx.precision_schedule("fast|step|0.5", total_steps=8)
    losses, state = losses_on("gpu", steps=8, policy=schedule)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert int(state.step) == 8


def test_float8_products_are_near_bfloat16():
    params, batch = start()
    plain = ampx.autocast(loss_fn)(params, batch)
    eighth = ampx.autocast(loss_fn, dots="float8")(params, batch)
    assert abs(float(eighth) - float(plain)) < 0.1 * float(plain)
