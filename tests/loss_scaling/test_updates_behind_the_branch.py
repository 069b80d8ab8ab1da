"""Updates that are made behind the branch: bytes, derivatives, and what a skip leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, optimizer_step
from jax.sharding import PartitionSpec as P

import ampx
from ampx.updates.tails import Tail

dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)
PARAMS = {"w": np.linspace(-1, 1, 4, dtype=np.float32), "b": np.ones(3, np.float32), "no": None}
GRADS = {"w": np.full(4, 8.0, np.float32), "b": np.full(3, 4.0, np.float32), "no": None}


def with_nan(grads):
    return grads | {"w": grads["w"] * np.array([1, np.nan, 1, 1], np.float32)}


@pytest.mark.parametrize(
    ("tx", "more"),
    [
        # optax alone writes the clipped gradients; in the branch they are computed twice.
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), -12),
        # The verdict reads the gradients, and so does the search, which only a bad step runs.
        (optax.sgd(1e-3), 8),
    ],
    ids=["adamw", "sgd"],
)
def test_bytes_moved_and_temporaries(tx, more):
    size = 2**16
    params = jax.ShapeDtypeStruct((size,), jnp.float32)

    def compile_step(tx):
        def step(carry, grads):
            return optimizer_step(tx, *carry, grads)

        carry = params, jax.eval_shape(tx.init, params)
        return jax.jit(step, donate_argnums=0).lower(carry, params).compile()

    ours, theirs = compile_step(ampx.dynamic_loss_scale(tx)), compile_step(tx)
    moved = [step.cost_analysis()["bytes accessed"] / size for step in (ours, theirs)]
    assert moved[0] <= moved[1] + more + 0.1
    temporary = [step.memory_analysis().temp_size_in_bytes / size for step in (ours, theirs)]
    assert temporary[0] <= temporary[1] + 0.1


def of_floats(tx, state):
    """The sum of all updates as a function of arrays that have derivatives."""

    def total(floats):
        params, grads, mu, nu = floats
        updates, _ = tx.update(grads, optax.tree.set(state, mu=mu, nu=nu), params)
        return sum(jnp.sum(update) for update in jax.tree.leaves(updates))

    return total


@pytest.mark.parametrize("inner", ["plain", "clipped"])
def test_a_gradient_through_lanes_of_vmap(inner):
    """As learned optimizers need it; one lane skips its step."""
    clip = optax.clip_by_global_norm(1.0) if inner == "clipped" else optax.identity()
    inner = optax.chain(clip, optax.adamw(0.1))

    def through(tx):
        def task(grads):
            return jnp.sum(tx.update(grads, tx.init(grads), grads)[0] ** 2)

        return jax.jit(jax.grad(lambda lanes: jnp.sum(jax.vmap(task)(lanes))))

    lanes = jnp.arange(1.0, 7.0).reshape(2, 3)
    scaled = through(ampx.static_loss_scale(inner, 1.0))
    np.testing.assert_allclose(scaled(lanes), through(inner)(lanes), rtol=1e-5, atol=1e-7)
    found = scaled(lanes.at[0, 1].set(jnp.inf))
    assert not np.any(found[0])
    np.testing.assert_allclose(found[1], scaled(lanes)[1], rtol=1e-6)


@pytest.mark.slow_but("reverse-plain")
@pytest.mark.parametrize("inner", ["plain", "clipped"])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_a_skipped_update_has_a_derivative_of_zero(mode, inner):
    """Its zero cotangent times 1 / 0 would be NaN: in a select behind it, or a norm in front."""
    clip = optax.clip_by_global_norm(1.0) if inner == "clipped" else optax.identity()
    inner = optax.chain(clip, optax.adamw(0.1))
    tx = dynamic(inner)
    state = tx.init(PARAMS)
    total = of_floats(tx, state)
    moments = [optax.tree.get(state, name) for name in ("mu", "nu")]

    @jax.jit
    def differentiate(grads):
        floats = (PARAMS, grads, *moments)
        if mode == "reverse":
            return jax.grad(total)(floats)
        return jax.jvp(total, (floats,), (jax.tree.map(jnp.ones_like, floats),))[1]

    for found in jax.tree.leaves(differentiate(with_nan(GRADS))):
        assert not np.any(found)
    taken = differentiate(GRADS)
    plain = of_floats(inner, inner.init(PARAMS))
    floats = PARAMS, jax.tree.map(lambda g: g / 8, GRADS), *moments
    if mode == "reverse":
        own = jax.jit(jax.grad(plain))(floats)
        expected = own[0], jax.tree.map(lambda g: g / 8, own[1]), *own[2:]
    else:
        ones = jax.tree.map(np.ones_like, floats)
        ones = ones[0], jax.tree.map(lambda g: g / 8, ones[1]), *ones[2:]
        expected = jax.jit(lambda *given: jax.jvp(plain, *given)[1])((floats,), (ones,))
    for a, b in zip(*map(jax.tree.leaves, (taken, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow_but("False")
@pytest.mark.parametrize("check_vma", [True, False])
def test_reverse_mode_inside_shard_map(check_vma):
    tx = dynamic(optax.adamw(0.1), axis_names="data")
    params = np.linspace(1, 2, 4, dtype=np.float32)
    state = tx.init(params[:2])

    def shard(grads, params):
        def total(params):
            return jnp.sum(tx.update(grads, state, params)[0])

        return jax.grad(total)(params)

    mesh = make_mesh((2,), ("data",))
    mapped = jax.jit(
        jax.shard_map(
            shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
        )
    )
    np.testing.assert_allclose(mapped(np.ones(4, np.float32), params), -0.1 * 1e-4, rtol=1e-5)
    assert not np.any(mapped(np.array([1, np.inf, 1, 1], np.float32), params))


def test_lanes_of_vmap_and_a_skip_with_nan_everywhere():
    """Two lanes, of which one is skipped; its parameters and moments are NaN and infinite."""
    tx = dynamic(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)))
    state = tx.init(PARAMS)
    bad = jax.tree.map(lambda x: np.full_like(x, np.inf), (PARAMS, GRADS))
    bad_state = optax.tree.set(state, mu=jax.tree.map(lambda x: np.full_like(x, np.nan), PARAMS))

    def stack(*lanes):
        return jax.tree.map(lambda *x: np.stack(x), *lanes)

    def both(grads, state, params):
        updates, new = tx.update(grads, state, params)
        applied, _ = tx.update(grads, state, params, tail=Tail(new_params=True))
        return updates, new, applied.params

    given = stack(GRADS, bad[1]), stack(state, bad_state), stack(PARAMS, bad[0])
    updates, new, applied = jax.jit(jax.vmap(both))(*given)
    first, second = (jax.tree.map(lambda x, n=n: x[n], updates) for n in (0, 1))
    assert_bit_equal(second, jax.tree.map(lambda u: np.full_like(u, -0.0), second))
    assert new.overflow.tolist() == [False, True]
    # In the branch, too, if the caller asks for parameters: the same numbers.
    ours = optax.apply_updates(PARAMS, first)
    for a, b in zip(*map(jax.tree.leaves, (ours, applied)), strict=True):
        np.testing.assert_allclose(a, b[0], rtol=2e-6)


def test_devices_that_decide_each_for_itself_share_parameters():
    """The derivative of what they share is the sum of theirs, and no device waits for another's."""
    tx = ampx.static_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 8.0)
    params = jnp.ones(4)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(params))

    def shard(params, states, grads):
        state = jax.tree.map(lambda x: x[0], states)
        return jax.grad(lambda p: jnp.sum(tx.update(grads[0], state, p)[0]))(params)

    mesh = make_mesh((2,), ("data",))
    mapped = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    )
    of_decay = np.full(4, -0.1 * 1e-4)
    grads = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(mapped(params, states, grads), 2 * of_decay, rtol=1e-5)
    grads[0, 1] = np.inf
    np.testing.assert_allclose(mapped(params, states, grads), of_decay, rtol=1e-5)
