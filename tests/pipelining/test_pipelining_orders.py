"""Any order in which every action comes after what it needs is accepted, and runs right."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_models import run, stage_mesh
from pipeline_orders import as_schedule, assert_tables_are_right, can_run, random_orders

from ampx.pipelining import (
    Schedule,
    dualpipe_v,
    interleaved_zero_bubble,
    looped_breadth_first,
    make_schedule,
    value_and_grad,
    zero_bubble,
)

NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zero-bubble"]
NAMES += ["interleaved-zero-bubble", "zero-bubble-v", "dualpipe-v"]


def is_accepted(schedule):
    try:
        schedule.aligned().validate()
    except ValueError:
        return False
    return True


@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(1, 4),
    more_stages=st.integers(0, 2),
    num_microbatches=st.integers(1, 4),
    swaps=st.integers(0, 2),
)
def test_an_order_is_accepted_if_and_only_if_devices_can_run_it(
    seed, num_devices, more_stages, num_microbatches, swaps
):
    """And what is accepted, the tables of the program do."""
    num_stages = num_devices + more_stages
    rows, device_of = random_orders(seed, num_stages, num_devices, num_microbatches)
    rng = random.Random(seed)
    for _ in range(swaps):
        row = rng.choice(rows)
        a, b = (rng.randrange(len(row)) for _ in range(2))
        row[a], row[b] = row[b], row[a]
    schedule = as_schedule(rows, device_of, num_microbatches)
    runs = can_run(rows, num_stages)
    assert runs or swaps
    assert is_accepted(schedule) == runs
    if runs:
        assert_tables_are_right(schedule, rereads=True)
        assert_tables_are_right(schedule, rereads=False, stash="residuals")
        assert schedule.liveness().live.shape[0] == num_devices


def product_of(schedule, **options):
    """A pipeline of stages that multiply by a number."""
    functions = dict(
        first=lambda p, shared, batch, key: batch,
        stage=lambda p, x, key: p * x,
        last=lambda p, shared, x, batch, key: jnp.sum(x * x),
    )
    return value_and_grad(
        **functions | options,
        schedule=schedule,
        axis_name="stage",
        mesh=stage_mesh(schedule),
        normalize="sum",
    )


def assert_runs(schedule, **options):
    """Of x p0 p1 p2 ... all derivatives are known."""
    grads_of = product_of(schedule, **options)
    rng = np.random.default_rng(0)
    params = rng.uniform(0.5, 2.0, schedule.num_stages).astype(np.float32)
    batch = rng.uniform(-1.0, 1.0, (2 * schedule.num_microbatches, 1)).astype(np.float32)
    found = run(grads_of, {"stages": params}, batch)
    loss = np.sum((batch * np.prod(params)) ** 2)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(found.grads["stages"], 2 * loss / params, rtol=1e-5)


@pytest.mark.parametrize("schedule", [interleaved_zero_bubble(2, 3), dualpipe_v(2, 5)])
def test_gradients_of_schedules_with_halved_backwards_in_chunks(schedule):
    assert_runs(schedule)


def test_gradients_in_ticks_of_single_actions():
    """With as many micro-batches as stages zero-bubble has too few gaps for full ticks."""
    schedule = zero_bubble(3, 3)
    ticks = {s: schedule.liveness(stash=s).live.shape[1] for s in ("inputs", "residuals")}
    assert ticks["inputs"] < ticks["residuals"] == schedule.num_ticks
    assert_runs(schedule, stash="residuals")


@pytest.mark.slow_but("zero-bubble", "gpipe")
@pytest.mark.parametrize("name", NAMES)
def test_liveness_is_what_the_program_allocates(name):
    schedule = make_schedule(name, 4, 6)
    grads_of = product_of(schedule, stage=lambda p, x, key: jnp.sin(p * x), stash="residuals")
    params = {"stages": jnp.ones(schedule.num_stages)}
    slots = []

    def look(executor):
        kept = jax.eval_shape(executor._make_carry).kept
        slots.extend({leaf.shape[0] for leaf in kept})

    jax.eval_shape(lambda *args: grads_of.observed(*args, look), params, jnp.ones((12, 1)))
    # All devices have as many as the fullest.
    assert slots == [max(schedule.liveness(stash="residuals").peak)]


@pytest.mark.slow_but("0")
@pytest.mark.whole("3", "4", "5")
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_a_random_order_are_those_of_the_undivided_model(seed):
    rows, device_of = random_orders(
        seed, num_stages=4, num_devices=2 + seed % 2, num_microbatches=3
    )
    stash = ["inputs", "residuals"][seed % 2]
    assert_runs(as_schedule(rows, device_of, 3).aligned().validate(), stash=stash)


def test_torch_looped_bfs_goes_back_in_descending_order():
    """The order of torch's ScheduleLoopedBFS: the last micro-batch is the first one to go back."""
    forwards = [[f"{s}F{m}" for s in (d, d + 2) for m in range(3)] for d in range(2)]
    backwards = [[f"{s}B{m}" for s in (d + 2, d) for m in reversed(range(3))] for d in range(2)]
    rows = [",".join(f + b) for f, b in zip(forwards, backwards, strict=True)]
    schedule = Schedule.from_csv("\n".join(rows)).aligned().validate()
    ours = looped_breadth_first(2, 3)
    assert schedule.num_ticks == ours.num_ticks
    assert schedule.liveness().peak == ours.liveness().peak
    assert_runs(schedule)
