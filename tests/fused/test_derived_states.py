"""States of `fused.fuse` are those of optax: by path, in checkpoints, in pickles, for its tools."""

import copy
import pickle

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal, paths_of, types_of
from optax_optimizers import NAMES, make

import ampx
from ampx import fused
from ampx.fused.derived_states import BareState, find_derived, unmark_derived
from ampx.updates.tails import takes_tail

PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}
GRADS = jax.tree.map(lambda p: p / 2 + 1, PARAMS)
# Without a tuple of names there is nothing that could bear a mark.
BARE = optax.GradientTransformation(
    lambda params: {"sum": jax.tree.map(jnp.zeros_like, params)},
    lambda g, s, p=None: (s["sum"], {"sum": jax.tree.map(jnp.add, s["sum"], g)}),
)
PART_OF_A_CHAIN = {
    "the first": lambda one: optax.chain(one, optax.scale(0.5)),
    "the only one": lambda one: optax.chain(one),
    "behind a clip": lambda one: optax.chain(optax.clip(0.5), one),
    "deeper": lambda one: optax.chain(optax.chain(one), optax.scale(0.5)),
}
EMPTY = optax.EmptyState()
# All of one object: the first alone is marked.
STATELESS = optax.GradientTransformation(lambda params: EMPTY, lambda g, s, p=None: (g, EMPTY))
KINDS = {
    "one state": lambda: optax.scale_by_rms(),
    "a chain": lambda: optax.rmsprop(0.1),
    "a chain in a chain": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.1)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(0.1),
    "groups": lambda: optax.partition(
        {"a": optax.rmsprop(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
    ),
    "a wrapper of ampx": lambda: ampx.master_weights(optax.rmsprop(0.1)),
    "one object in two places": lambda: optax.chain(STATELESS, optax.chain(STATELESS)),
    "no tuple of names": lambda: BARE,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_has_the_leaves_of_optax_at_their_paths(kind):
    tx = KINDS[kind]()
    state, expected = fused.fuse(tx, strict=True).init(PARAMS), tx.init(PARAMS)
    assert takes_tail(state)
    assert_bit_equal(unmark_derived(state), expected)
    if tx is BARE:
        assert isinstance(state, BareState)
    else:
        assert paths_of(state) == paths_of(expected)


@pytest.mark.parametrize("inner", ["one state", "a chain", "no tuple of names"])
@pytest.mark.parametrize("place", PART_OF_A_CHAIN)
def test_what_is_a_part_of_a_chain_answers_for_no_more(place, inner):
    tx = PART_OF_A_CHAIN[place](fused.fuse(KINDS[inner]()))
    assert not takes_tail(tx.init(PARAMS))
    whole = fused.fuse(tx, strict=True)
    assert takes_tail(whole.init(PARAMS))
    assert_bit_equal(unmark_derived(whole.init(PARAMS)), tx.init(PARAMS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_goes_on_from_a_pickle_and_from_a_copy(kind):
    tx = ampx.static_loss_scale(fused.fuse(KINDS[kind]()), 8.0)
    state = tx.init(PARAMS)
    step = jax.jit(lambda p, s: fused.apply(tx, GRADS, s, p)[:2])
    params, state = step(PARAMS, state)
    expected = step(params, state)
    structure = pickle.loads(pickle.dumps(jax.tree.structure(state)))
    unpickled = pickle.loads(pickle.dumps(state))
    for again in (unpickled, copy.deepcopy(state), copy.copy(state)):
        assert jax.tree.structure(again) == structure
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert_bit_equal(step(params, again), expected)
    assert step._cache_size() == 1


def test_checkpoints_go_to_and_from_optax(tmp_path):
    plain = optax.chain(optax.clip(0.5), optax.rmsprop(0.1, momentum=0.9))
    ours = fused.fuse(plain, strict=True)
    update = jax.jit(plain.update)
    updates, state = update(GRADS, plain.init(PARAMS), PARAMS)
    params = optax.apply_updates(PARAMS, updates)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "optax", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "optax", ours.init(PARAMS))
        checkpointer.save(tmp_path / "fused", restored)
        checkpointer.wait_until_finished()
        assert_bit_equal(checkpointer.restore(tmp_path / "fused", state), state)
    found, after, _ = jax.jit(lambda p, s: fused.apply(ours, GRADS, s, p))(params, restored)
    updates, expected = update(GRADS, state, params)
    assert types_of(after) == types_of(restored)
    jax.tree.map(
        lambda *pair: assert_near(*pair),
        (found, unmark_derived(after)),
        (optax.apply_updates(params, updates), expected),
    )


def assert_near(actual, expected):
    assert jnp.allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_state_of_optax_itself_runs_as_it_does_without_fuse():
    plain = optax.rmsprop(0.1)
    updates, state = fused.fuse(plain).update(GRADS, plain.init(PARAMS), PARAMS)
    assert_bit_equal((updates, state), plain.update(GRADS, plain.init(PARAMS), PARAMS))


# Their `init` takes the first of all parameters, and `map_params` gives none.
ASK_FOR_A_LEAF = ("lbfgs", "sgd, scale_by_backtracking_linesearch")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ASK_FOR_A_LEAF])
def test_optax_maps_over_the_state_of_every_optimizer(name):
    """Where it has no rules, too: `map_params` calls `init` with what is no parameter."""
    check_mapping(make(name), {"w": PARAMS["w"]})


@pytest.mark.parametrize("kind", KINDS)
def test_optax_maps_over_the_state_of_every_kind(kind):
    check_mapping(KINDS[kind](), PARAMS)


def check_mapping(tx, params):
    ours = fused.fuse(tx)
    state = ours.init(params)
    mapped = optax.tree.map_params(ours, lambda _: True, state, transform_non_params=lambda _: 0)
    expected = optax.tree.map_params(
        tx, lambda _: True, tx.init(params), transform_non_params=lambda _: 0
    )
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert jax.tree.leaves(mapped) == jax.tree.leaves(expected)


def test_what_is_said_of_a_class_is_what_optax_says():
    state = fused.fuse(optax.rmsprop(0.1)).init(PARAMS)
    part = find_derived(state)
    assert isinstance(part, optax.ScaleByRmsState)
    assert part.__doc__ == optax.ScaleByRmsState.__doc__
    assert repr(part).startswith("DerivedScaleByRmsState(nu=")
    assert_bit_equal(optax.tree.get(state, "nu"), jax.tree.map(jnp.zeros_like, PARAMS))
