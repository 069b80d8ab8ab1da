"""A growth interval that adapts: short while the scale is on its way, long once it has arrived.

The reference is a plain Python model written after the description of MindFormers' adaptive scale:
it counts iterations since the last move, where ampx counts finite steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, counted_step, types_of

import ampx
from ampx.accumulation.multi_steps import multi_steps

LEVELS = (2, 3, 5)


class Model:
    def __init__(self, scale, levels):
        self.scale, self.levels = scale, levels
        self.index = 0  # -1 is the hidden interval of 1
        self.ups = self.downs = 0
        self.iteration, self.last_move = 1, 0

    @property
    def window(self):
        return 1 if self.index < 0 else self.levels[self.index]

    def step(self, overflow):
        is_due = self.iteration - self.last_move >= self.window
        if overflow or is_due:
            self.last_move = self.iteration
        self.iteration += 1
        if overflow:
            self.scale = max(self.scale / 2, 1)
            self.downs += 1
            if self.downs >= 3 and self.index > 0:
                self.index, self.ups, self.downs = -1, 0, 0
        elif is_due:
            self.scale, self.downs, self.ups = self.scale * 2, 0, self.ups + 1
            if self.ups == 3 and self.index < len(self.levels) - 1:
                self.index, self.ups = self.index + 1, 0
        return self.scale, self.window


def run(tx, overflows):
    """Scale and interval after each step, in one scan."""

    def body(state, overflow):
        grads = jnp.where(overflow, jnp.inf, state.loss_scale)
        _, state = tx.update(grads, state)
        return state, (state.loss_scale, state.interval.growth_interval)

    return jax.jit(lambda flags: jax.lax.scan(body, tx.init(jnp.ones(())), flags))(overflows)


def make(**options):
    options = {"growth_interval": LEVELS, "init_scale": 2.0**20, "max_scale": 2.0**100, **options}
    return ampx.dynamic_loss_scale(optax.sgd(0.1), **options)


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_follows_the_model(seed):
    # Quiet times and rough ones in turn, so that it climbs to the top and falls to 1 several times.
    rng = np.random.default_rng(seed)
    rates = rng.choice([0.0, 0.05, 0.3, 0.8], 40).repeat(15)
    overflows = rng.random(rates.size) < rates
    _, (scales, intervals) = run(make(), overflows)
    model = Model(2.0**20, LEVELS)
    expected = np.array([model.step(bool(bad)) for bad in overflows])
    np.testing.assert_array_equal(scales, expected[:, 0])
    np.testing.assert_array_equal(intervals, expected[:, 1])
    assert set(np.asarray(intervals).tolist()) == {1, *LEVELS}, "or nothing was seen"


def test_each_loss_has_its_own_interval():
    tx = make(num_losses=2)
    state = tx.init(jnp.ones(1))
    update = jax.jit(tx.update)
    for _ in range(6):  # three growths of the first alone
        _, state = update((jnp.ones(1), None), state)
    np.testing.assert_array_equal(state.interval.growth_interval, [3, 2])
    np.testing.assert_array_equal(state.loss_scale, [2.0**23, 2.0**20])


def test_one_level_after_the_other_is_saved_and_told():
    tx = make()
    state = tx.init({"w": jnp.ones(2)})
    types = types_of(state)
    step, traces = counted_step(tx)
    params = {"w": jnp.ones(2)}
    for _ in range(6):
        params, state = step(params, state, {"w": jnp.ones(2)})
    assert len(traces) == 1 and types_of(state) == types
    assert ampx.metrics(state)["growth_interval"] == 3
    leaves, structure = jax.tree.flatten(state)
    again = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    assert_bit_equal(again, state)
    assert ampx.find_loss_scale_state(multi_steps(tx, 2).init(params)).interval.growth_interval == 2


def test_a_fixed_interval_keeps_nothing():
    state = ampx.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(1))
    assert state.interval == () and "growth_interval" not in ampx.metrics(state)


def test_several_optimizers_move_one_interval():
    tx = ampx.dynamic_loss_scale(
        {"a": optax.sgd(0.1), "b": optax.sgd(0.1)}, growth_interval=(1, 2), init_scale=1.0
    )
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update({"a": params["a"]}, state, params, move_scale=False)
        _, state = tx.update({"b": params["b"]}, state, params)
    assert state.interval.growth_interval == 2 and state.loss_scale == 8


def test_a_phase_with_a_fixed_scale_holds_the_interval():
    def phase(name, **until):
        return ampx.Phase(ampx.opt_level("O2", half_dtype="f16", loss_scale=name), **until)

    schedule = ampx.PrecisionSchedule((phase(8.0, until_step=3), phase("dynamic")))
    tx = ampx.follow_schedule(make(growth_interval=(1, 2)), schedule)
    params = jnp.ones(1)
    state = tx.init(params)
    for due in (1, 1, 1, 1, 1, 2):  # three steps at 8, then three growths
        _, state = tx.update(params, state, params)
        assert state.inner_state.interval.growth_interval == due


@pytest.mark.parametrize("value", [(5,), (5, 5), (5, 3), (), [2, 1]])
def test_levels_ascend(value):
    with pytest.raises(ValueError, match="growth_interval must be .* at least two .*ascending"):
        make(growth_interval=value)


@pytest.mark.parametrize("value", [(2, "3"), (2, 3.5), "20"])
def test_levels_are_ints(value):
    with pytest.raises(TypeError, match="growth_interval must be a positive int"):
        make(growth_interval=value)
