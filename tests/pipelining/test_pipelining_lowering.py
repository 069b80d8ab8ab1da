"""The tables of a schedule, played without arrays: every reader finds what was written for it."""

import numpy as np
import pytest

from ampx.pipelining.runtime.lowering import IDLE, lower
from ampx.pipelining.schedules.generators import make_schedule
from ampx.pipelining.schedules.intervals import Interval, Timeline, assign_slots
from ampx.pipelining.schedules.ticks import place_in_lockstep

WHOLE = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"]
NAMES = [*WHOLE, "zero-bubble", "zero-bubble-v", "forward-only"]
SIZES = [(1, 3), (2, 1), (2, 5), (4, 8), (3, 7)]


def work(table, tick, device):
    """(stage, micro-batch) of an action; None where a device is idle."""
    stage, microbatch = int(table.stage[tick, device]), int(table.microbatch[tick, device])
    return None if stage == IDLE else (stage, microbatch)


def empty(storage, num_devices):
    return [[None] * (storage.num_slots + 1) for _ in range(num_devices)]


def exchange(buffers, route, tick, sent, target_of):
    """Puts what each device has made where the tables say, under the name of its receiver."""

    def put(row, source, target):
        value = sent[source] and target_of(sent[source])
        buffers[target][route.arrivals[row, tick, target]] = value

    for row, pairs in enumerate(route.links):
        for source, target in pairs:
            put(row, source, target)
    for device in range(len(buffers)):
        if route.arrivals[-1, tick, device] < route.storage.num_slots:
            put(-1, device, device)


@pytest.mark.parametrize("rereads", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_reader_finds_its_value(name, size, rereads):
    schedule = make_schedule(name, *size)
    count, devices = schedule.num_stages, range(schedule.num_devices)
    tables = lower(schedule, [[(s, s + 1) for s in range(count - 1)]], keeps_inputs=rereads)
    (activations,), (cotangents,) = tables.activations, tables.cotangents
    received = empty(activations.storage, len(devices))
    returned = empty(cotangents.storage, len(devices))
    residuals, deferred = (empty(s, len(devices)) for s in (tables.residuals, tables.deferred))
    done = []
    for tick in range(tables.num_ticks):
        forward_of, backward_of = {}, {}
        for device in devices:
            forward = forward_of[device] = work(tables.forward, tick, device)
            half = work(tables.halved, tick, device)
            backward = backward_of[device] = work(tables.backward, tick, device) or half
            weight = work(tables.weight, tick, device)

            def read(buffer, table, tick=tick, device=device):
                return buffer[device][table[tick, device]]

            if forward:
                if forward[0]:
                    assert read(received, activations.storage.forward) == forward
                residuals[device][tables.residuals.forward[tick, device]] = forward
            for value, table in ((backward, "backward"), (weight, "weight")):
                if value:
                    assert read(residuals, getattr(tables.residuals, table)) == value
                    if rereads and value[0]:
                        assert read(received, getattr(activations.storage, table)) == value
            if backward and backward[0] < count - 1:
                assert read(returned, cotangents.storage.backward) == backward
            if half:
                deferred[device][tables.deferred.backward[tick, device]] = half
            if weight:
                assert read(deferred, tables.deferred.weight) == weight
            done += [
                (kind, *value)
                for kind, value in (("F", forward), ("B", backward), ("W", weight))
                if value
            ]
        exchange(received, activations, tick, forward_of, lambda v: (v[0] + 1, v[1]))
        exchange(returned, cotangents, tick, backward_of, lambda v: (v[0] - 1, v[1]))
    kinds = ["F", *"B" * schedule.has_backward, *"W" * schedule.splits_backward]
    everything = np.ndindex(count, schedule.num_microbatches)
    assert sorted(done) == sorted((kind, *value) for value in everything for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_as_few_as_values_that_live_at_once(name):
    schedule = make_schedule(name, 4, 7)
    placement = place_in_lockstep(schedule.rows, schedule.num_stages)
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
