"""The tables of a schedule, played without arrays: every reader finds what was written for it."""

import pytest
from pipeline_orders import assert_tables_are_right

from ampx.pipelining.runtime.lowering import lower
from ampx.pipelining.schedules.generators import make_schedule
from ampx.pipelining.schedules.intervals import Interval, Timeline, assign_slots
from ampx.pipelining.schedules.ticks import lengths_with, place_in_lockstep

WHOLE = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"]
ZERO_BUBBLES = ["zero-bubble", "interleaved-zero-bubble", "zero-bubble-v", "dualpipe-v"]
NAMES = [*WHOLE, *ZERO_BUBBLES, "forward-only"]
SIZES = [(1, 3), (2, 1), (2, 5), (4, 4), (4, 8), (3, 7)]


@pytest.mark.parametrize("rereads", [True, False])
@pytest.mark.parametrize("stash", ["inputs", "residuals"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_reader_finds_its_value(name, size, stash, rereads):
    assert_tables_are_right(make_schedule(name, *size), rereads, stash)


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_as_few_as_values_that_live_at_once(name):
    schedule = make_schedule(name, 4, 7)
    placement = place_in_lockstep(schedule.rows, schedule.num_stages, lengths_with("inputs"))
    timeline = Timeline(placement, schedule.num_microbatches)
    edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    for intervals in (
        timeline.residuals(),
        timeline.deferred(),
        timeline.activations(edges, read_again=True),
        timeline.cotangents([(target, source) for source, target in edges]),
    ):
        slots = assign_slots(intervals, schedule.device_of)
        for device in range(schedule.num_devices):
            own = [i for v, i in intervals.items() if schedule.device_of[v[0]] == device]
            moments = range(1 + max((i.last_read for i in own), default=-1))
            alive = [sum(i.made <= moment <= i.last_read for i in own) for moment in moments]
            assert slots.used[device] == max(alive, default=0)


def test_a_slot_is_free_after_its_last_read_and_not_at_it():
    touching = {(0, 0): Interval(0, 3), (0, 1): Interval(3, 5)}
    assert assign_slots(touching, (0,)).used == (2,)
    apart = {(0, 0): Interval(0, 3), (0, 1): Interval(4, 5)}
    assert assign_slots(apart, (0,)).used == (1,)
    elsewhere = {(0, 0): Interval(0, 3), (1, 0): Interval(0, 3)}
    assert assign_slots(elsewhere, (0, 1)).used == (1, 1)


def test_what_arrives_takes_a_slot_from_its_exchange_on():
    """1F1B in lockstep: an activation waits one tick for its forward, then for its backward."""
    schedule, edges = make_schedule("1f1b", 4, 8), [(0, 1), (1, 2), (2, 3)]
    reread = lower(schedule, [edges], keeps_inputs=True)
    assert reread.residuals.used == (7, 5, 3, 1)
    assert reread.activations[0].storage.used == (0, 5, 3, 1)
    assert reread.cotangents[0].storage.used == (1, 1, 1, 0)
    assert lower(schedule, [edges], keeps_inputs=False).activations[0].storage.used == (0, 1, 1, 1)
