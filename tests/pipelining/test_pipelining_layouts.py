"""Where parameters lie, and that a checkpoint does not know of stages."""

import functools
import re

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from pipeline_steps import assert_close, make_batch, make_grads_of, make_params, placed
from quick_keys import quick_key

import ampx
from ampx.pipelining import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v


def make_step(schedule, **options):
    return ampx.train_step(
        make_grads_of(schedule, **options),
        optax.adamw(1e-2),
        loss_scale=functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10),
        max_grad_norm=1.0,
    )


def placed_batch(step, number, **options):
    sharding = jax.sharding.NamedSharding(step.grads_of.mesh, jax.P("data"))
    return jax.device_put(make_batch(number, **options), sharding)


def collectives(text):
    return set(
        re.findall(
            r"\s(all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(",
            text,
        )
    )


# --- where parameters lie ------------------------------------------------------------------------


@pytest.mark.slow_but("interleaved")
@pytest.mark.whole("zero-bubble-v")
@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(2, 4), interleaved(2, 4), zero_bubble_v(2, 4)],
    ids=lambda schedule: schedule.name,
)
def test_a_step_leaves_all_where_it_was_and_gathers_nothing(schedule):
    traces = []
    step = make_step(schedule)

    def counted(state, batch):
        traces.append(1)
        return step(state, batch)

    state, batch = placed(step, make_params()), placed_batch(step, 0)
    compiled = jax.jit(counted, donate_argnums=0).lower(state, batch).compile()
    assert collectives(compiled.as_text()) == {"all-reduce", "collective-permute"}

    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    for number in range(3):
        donated = state
        # A compiled program takes nothing that lies elsewhere.
        state, report = compiled(state, placed_batch(step, number))
        assert not report.overflow
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated) if leaf.ndim)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert len(traces) == 1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_device_holds_its_share_of_layers_and_of_their_moments(stages):
    step = make_step(one_f_one_b(stages, 4))
    state = placed(step, make_params())
    for path, leaf in leaves_with_path(state):
        share = stages if "['stages']" in jax.tree_util.keystr(path) else 1
        assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes / share, path
        for shard in leaf.addressable_shards:
            device = np.argwhere(step.grads_of.mesh.devices == shard.device)[0][1]
            if share > 1:
                assert shard.index[0] == slice(device * 4 // stages, (device + 1) * 4 // stages)


def test_shardings_follow_the_parts_that_there_are_and_take_another_mesh():
    grads_of = make_grads_of(one_f_one_b(2, 4))
    params = jax.eval_shape(lambda: {"stages": make_params()["stages"]})
    shardings = grads_of.shardings(params)
    assert {sharding.spec for sharding in jax.tree.leaves(shardings)} == {jax.P("stage")}
    other = make_grads_of(one_f_one_b(2, 4), data=4).mesh
    found = grads_of.shardings(params, other)
    assert {sharding.mesh for sharding in jax.tree.leaves(found)} == {other}
    odd = jax.eval_shape(lambda: {"stages": make_params(5)["stages"]})
    whole = make_grads_of(one_f_one_b(2, 4), layers_per_stage=(2, 3)).shardings(odd)
    assert {sharding.spec for sharding in jax.tree.leaves(whole)} == {jax.P()}
    with pytest.raises(ValueError, match="shardings needs a mesh"):
        make_grads_of(one_f_one_b(2, 4), mesh=None).shardings(params)


# --- checkpoints ---------------------------------------------------------------------------------

BEFORE, AFTER = 3, 3


def steps_from(step, state, first, last, key):
    """The losses; one of the steps is skipped."""
    jitted, losses = jax.jit(step), []
    for number in range(first, last):
        batch = placed_batch(step, number, spoilt=(5, 2) if number == 1 else None)
        state, report = jitted(state, batch, key=jax.random.fold_in(key, number))
        losses.append(float(report.loss))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint on 4 stages, and how training goes on from it without an interruption."""
    path = tmp_path_factory.mktemp("checkpoints") / "state"
    step, key = make_step(one_f_one_b(4, 4)), quick_key(3)
    state, _ = steps_from(step, placed(step, make_params()), 0, BEFORE, key)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path, state, steps_from(step, state, BEFORE, BEFORE + AFTER, key)


OTHERS = {
    "2 stages, interleaved": lambda: make_step(interleaved(2, 4)),
    "1 stage": lambda: make_step(gpipe(1, 4)),
    "4 stages, zero bubble": lambda: make_step(zero_bubble(4, 4)),
    "2 stages, uneven": lambda: make_step(one_f_one_b(2, 4), layers_per_stage=(1, 3)),
}


@pytest.mark.slow
@pytest.mark.whole("1 stage", "4 stages, zero bubble")
@pytest.mark.parametrize("name", OTHERS)
def test_training_goes_on_with_other_stages(name, saved):
    path, state, (expected, expected_losses) = saved
    step = OTHERS[name]()
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        placed(step, make_params()),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, like)
    assert_bit_equal(restored, state)
    assert restored.step == BEFORE - 1 and restored.opt_state.skipped_total == 1
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == wanted.sharding

    resumed, losses = steps_from(step, restored, BEFORE, BEFORE + AFTER, quick_key(3))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_close(resumed.params, expected.params)


@pytest.mark.slow
def test_parameters_that_lie_elsewhere_are_taken_too():
    """Only slower: they are brought to their devices in the step."""
    grads_of = make_grads_of(interleaved(2, 4))
    params = make_params()
    function = jax.jit(grads_of)
    found = [
        function(jax.device_put(params, place), make_batch(0)).grads
        for place in (
            grads_of.shardings(params),
            jax.sharding.NamedSharding(grads_of.mesh, jax.P()),
        )
    ]
    assert_bit_equal(*found)


@pytest.mark.slow
def test_evaluation_between_steps_changes_nothing():
    step = make_step(one_f_one_b(2, 4))
    state = placed(step, make_params())
    jitted, value = jax.jit(step), jax.jit(step.grads_of.value)
    expected, _ = jitted(state, make_batch(0))
    loss = value(state.params, make_batch(0)).loss
    found, report = jitted(state, make_batch(0))
    assert_bit_equal(found, expected)
    np.testing.assert_allclose(loss, report.loss, rtol=1e-6)
