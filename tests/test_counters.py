"""Counters in states stop at their largest number; one that went on would turn negative."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import ampx
from ampx.data_parallel.zero1 import Zero1State
from ampx.loss_scaling.outcomes import compare_states
from ampx.trees import count_up

LAST = np.iinfo(np.int32).max
SCHEDULE = ampx.precision_schedule("fast1|step|0.5", total_steps=4)
TRANSFORMATIONS = {
    "dynamic": ampx.dynamic_loss_scale(optax.sgd(0.1), init_scale=1.0),
    "dynamic, skip": ampx.dynamic_loss_scale(
        optax.sgd(0.1), init_scale=1.0, nonfinite_updates="skip"
    ),
    "dynamic, rare growth": ampx.dynamic_loss_scale(
        optax.sgd(0.1), init_scale=1.0, growth_interval=LAST
    ),
    "dynamic, fused": ampx.dynamic_loss_scale(ampx.fused.adam(0.1), init_scale=1.0),
    "static": ampx.static_loss_scale(optax.sgd(0.1), 1.0),
    "multi_steps": ampx.multi_steps(optax.sgd(0.1), 2),
    "multi_steps, by call": ampx.multi_steps(
        optax.sgd(0.1), lambda step: jnp.where(step < 0, 1, LAST), on_nonfinite="drop_micro_step"
    ),
    "follow_schedule": ampx.follow_schedule(optax.sgd(0.1), SCHEDULE),
    "stochastic_rounding": ampx.fused.stochastic_rounding(ampx.fused.sgd(0.1)),
    "split_masters": ampx.fused.split_masters(ampx.fused.adam(0.1)),
    "master_weights": ampx.master_weights(ampx.fused.lion(0.1)),
}
GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])
# They count down, or are no counts.
FREE = ("hysteresis_tracker", "precision_phase", "error_bits")


def map_counters(fun, state):
    """Changes the int32 fields of all named tuples of a state, ampx's and optax's."""

    def change(node):
        if not hasattr(node, "_fields"):
            return node
        fields = {
            name: fun(name, value)
            if getattr(value, "dtype", None) == jnp.int32 and name not in FREE
            else jax.tree.map(change, value, is_leaf=is_record)
            for name, value in node._asdict().items()
        }
        return node._replace(**fields)

    def is_record(node):
        return hasattr(node, "_fields")

    return jax.tree.map(change, state, is_leaf=is_record)


def counters(state):
    found = {}
    map_counters(lambda name, value: found.setdefault(name, value), state)
    return found


@pytest.mark.parametrize("grads", [GOOD, BAD], ids=["good", "bad"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_counters_stop_at_their_largest_number(name, grads):
    tx = TRANSFORMATIONS[name]
    state = map_counters(lambda _, count: jnp.full_like(count, LAST), tx.init(GOOD))
    before = counters(state)
    if name not in ("static",):
        assert before, "nothing to test"
    for _ in range(2):
        _, state = jax.jit(tx.update)(grads, state, GOOD)
    for field, value in counters(state).items():
        assert jnp.all(value >= 0), field
        assert value.dtype == jnp.int32, field


def test_all_states_with_counters_are_here():
    """A new state class with an int32 field must join the table above, or say why not."""
    listed = {
        type(node).__name__
        for tx in TRANSFORMATIONS.values()
        for node in nodes_of(tx.init(GOOD))
        if type(node).__module__.startswith("ampx.")
    }
    declared = {
        name
        for name, kind in vars(ampx).items()
        if inspect.isclass(kind) and name.endswith("State") and "int32" in (kind.__doc__ or "")
    }
    # Figures of the last reduction, which are not added up; and the step's own, tested below.
    assert declared - {"ReductionState", "TrainState", Zero1State.__name__} <= listed


def nodes_of(state):
    def is_record(node):
        return hasattr(node, "_fields")

    for node in jax.tree.leaves(state, is_leaf=is_record):
        if is_record(node):
            yield node
            for value in node:
                yield from nodes_of(value)


def loss_fn(params, batch):
    return jnp.mean((params["w"] * batch) ** 2)


PARAMS = {"w": jnp.ones(2)}


def test_the_step_of_a_train_state_stops():
    step = ampx.train_step(loss_fn, optax.sgd(0.1), loss_scale="dynamic")
    state = step.init(PARAMS)._replace(step=jnp.int32(LAST - 1))
    for _ in range(2):
        state, report = jax.jit(step)(state, jnp.ones(2))
        assert int(state.step) == LAST and not report.overflow
    linen = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=step.tx)
    linen, _ = jax.jit(step)(linen.replace(step=jnp.int32(LAST)), jnp.ones(2))
    assert int(linen.step) == LAST


def test_the_step_of_an_nnx_optimizer_stops():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    step = ampx.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
    largest = jnp.iinfo(optimizer.step[...].dtype).max
    optimizer.step[...] = jnp.full_like(optimizer.step[...], largest)
    (_, optimizer), _ = nnx.jit(step)((model, optimizer), jnp.ones((1, 2)))
    assert int(optimizer.step[...]) == largest


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("judged", [False, True], ids=["judges", "judged inside"])
def test_windows_are_told_apart_when_their_count_has_stopped(judged, every_k):
    inner = ampx.dynamic_loss_scale(optax.sgd(0.1)) if judged else optax.sgd(0.1)
    tx = ampx.multi_steps(inner, every_k)
    state = tx.init(GOOD)._replace(gradient_step=jnp.int32(LAST))
    seen = []
    for grads in [GOOD] * every_k + [BAD] * every_k + [GOOD] * every_k:
        _, new = tx.update(grads, state, GOOD)
        seen.append(tuple(map(bool, compare_states(state, new))))
        state = new
    ends = seen[every_k - 1 :: every_k]
    assert ends == [(False, True), (True, False), (False, True)]
    assert not any(applied for i, (_, applied) in enumerate(seen, 1) if i % every_k)


def test_an_exhausted_scale_adds_its_counts_up():
    tx = ampx.dynamic_loss_scale(
        optax.sgd(0.1), init_scale=1.0, on_floor="raise-flag", num_losses=2
    )
    full = jnp.full(2, LAST)
    state = tx.init(GOOD)._replace(nan_total=full, floor_hits=full, floor_flag=jnp.array(True))
    with pytest.raises(FloatingPointError, match=f"{2 * LAST} floor hits, 0 .*, {2 * LAST} with"):
        ampx.raise_if_exhausted(state)


def test_count_up():
    counts = jnp.array([0, 5, LAST, LAST - 1])
    np.testing.assert_array_equal(count_up(counts), [1, 6, LAST, LAST])
    by = jnp.array([True, False, True, True])
    np.testing.assert_array_equal(count_up(counts, by), [1, 5, LAST, LAST])
