"""Optimizers that nobody wrote: each way that ampx runs an update gives the numbers of optax.

A loss scale moves parts of an update in front of its branch and behind it, `fuse` derives rules
from it, `zero1` runs it on shards: all by reading its program. Here programs are random.

    python tests/updates/test_random_optimizers.py 1000 1200     more of them: seeds 1000 to 1199
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, map_zero1
from random_optimizers import make

import ampx
from ampx import fused
from ampx.fused.derived_states import unmark_derived
from ampx.updates import devices
from ampx.updates.tails import takes_tail

pytestmark = pytest.mark.usefixtures("standard_promotion")
SEEDS = range(40)
RANDOM = np.random.default_rng(0)
SCALE = 8.0


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


PARAMS = {"w": normal(8, 4), "v": normal(8, 4), "b": normal(8), "s": normal()}
GRADS = [jax.tree.map(lambda p: normal(*p.shape), PARAMS) for _ in range(3)]
BAD = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), GRADS[0])


def train(update, state, scale=1.0, inner=lambda state: state, skips=True):
    """Three steps, and before each one that must be skipped. Parameters and inner state."""
    update, params = jax.jit(update), PARAMS
    for grads in GRADS:
        if skips:
            after, skipped = update(BAD, state, params)
            assert_bit_equal((after, inner(skipped)), (params, inner(state)))
            state = skipped
        params, state = update(optax.tree.scale(scale, grads), state, params)
    return params, inner(state)


def as_update(tx):
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def plain(tx):
    return train(as_update(tx), tx.init(PARAMS), skips=False)


def scaled(tx, **settings):
    wrapped = ampx.static_loss_scale(tx, SCALE, **settings)
    return train(as_update(wrapped), wrapped.init(PARAMS), SCALE, lambda state: state.inner_state)


def chosen(tx):
    """With a choice behind each number, as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "find_device", lambda: ("gpu", ""))
        return scaled(tx)


def in_train_step(tx):
    def loss(params, batch):  # whose gradient is the batch
        return sum(map(jnp.vdot, jax.tree.leaves(params), jax.tree.leaves(batch)))

    step = ampx.train_step(loss, tx, loss_scale=SCALE)

    def update(batch, state, params):
        state, _ = step(state, batch)
        return state.params, state

    return train(update, step.init(PARAMS), inner=lambda state: state.opt_state.inner_state)


def in_fuse(tx, backend="xla"):
    wrapped = ampx.static_loss_scale(fused.fuse(tx), SCALE)
    state = wrapped.init(PARAMS)
    update = as_update(wrapped)
    if takes_tail(state.inner_state):

        def update(grads, state, params):
            return fused.apply(wrapped, grads, state, params, backend=backend)[:2]

    return train(update, state, SCALE, lambda state: unmark_derived(state.inner_state))


def in_multi_steps(tx):
    wrapped = ampx.multi_steps(tx, 2)
    once = as_update(wrapped)

    def update(grads, state, params):
        for part in (0.5, 1.5):
            params, state = once(optax.tree.scale(part, grads), state, params)
        return params, state

    return train(update, wrapped.init(PARAMS), inner=lambda state: state.inner_state, skips=False)


def in_zero1(tx, check_vma):
    wrapped = ampx.zero1(tx, "data")

    def update(grads, state, params):
        grads = jax.lax.pcast(grads, "data", to="varying")
        return as_update(wrapped)(grads, state, params)

    mapped, state = map_zero1(wrapped, update, PARAMS, make_mesh((4,), ("data",)), check_vma)
    return train(mapped, state, inner=lambda state: state.inner_state, skips=False)


WAYS = {
    "loss scale": scaled,
    "loss scale, hold": functools.partial(scaled, nonfinite_updates="hold"),
    "loss scale, skip": functools.partial(scaled, nonfinite_updates="skip"),
    "loss scale on a GPU": chosen,
    "train_step": in_train_step,
    "fuse": in_fuse,
    "fuse, kernels": functools.partial(in_fuse, backend="interpret"),
    "multi_steps": in_multi_steps,
    "zero1": functools.partial(in_zero1, check_vma=False),
    "zero1, checked": functools.partial(in_zero1, check_vma=True),
}


def check(seed, way):
    """Whether a program ran in a way, which `zero1` alone may refuse; with the numbers of optax."""
    tx, words = make(seed)
    try:
        found = WAYS[way](tx)
    except NotImplementedError as error:
        assert "zero1" in way and "on shard" in str(error)
        return False

    def near(found, expected):
        assert found.dtype == expected.dtype
        scale = np.max(np.abs(expected), initial=1e-3)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * scale, err_msg=words)

    jax.tree.map(near, found, reference(seed))
    return True


@functools.lru_cache(maxsize=1)
def reference(seed):
    return plain(make(seed)[0])


@pytest.mark.sampled(16)
@pytest.mark.slow_but(*map(str, SEEDS[:1]))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_way_gives_the_numbers_of_optax(seed):
    assert sum(check(seed, way) for way in WAYS) >= len(WAYS) - 2


def test_programs_are_of_every_kind():
    states = [make(seed)[0].init(PARAMS) for seed in SEEDS]
    derived = [fused.fuse(make(seed)[0]).init(PARAMS) for seed in SEEDS]
    kinds = {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(states)}
    assert kinds == {"int32", "float32", "bfloat16"}
    assert 10 < sum(map(takes_tail, derived)) < len(SEEDS) - 10


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        print(number, sum(check(number, way) for way in WAYS), "of", len(WAYS), flush=True)
