"""A schedule as tables of small integers: what each device does at each tick, and where things lie.

What a device keeps (an activation until its backward, a cotangent until it is used) lies in a slot
of a buffer. `intervals` says when each value lives, and gives out the slots, so that two values
share one if they never live at the same time. Here both are written down as arrays of shape
(ticks, devices), which the program reads row by row. Of `1f1b` with 2 stages and 3 micro-batches,
one column for each device:

  tick  forward.microbatch  backward.microbatch  activations.storage.forward  .backward
   0          0  -1               -1  -1                     1  1                1  1
   1          1   0               -1   0                     1  0                1  0
   2          2   1                0   1                     1  0                1  0
   3         -1   2                1   2                     1  0                1  0
   4         -1  -1                2  -1                     1  1                1  1

  -1                idle
  0 (of a slot)     the only slot: micro-batch 1 arrives at the end of tick 1, after micro-batch 0
                    was read for the last time, by the backward of tick 1
  1 (of a slot)     nobody's: device 0 receives no activations
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ampx.pipelining.schedules.grid import Grid, number_chunks
from ampx.pipelining.schedules.intervals import (
    Edge,
    Intervals,
    SlotAssignment,
    Timeline,
    assign_slots,
)
from ampx.pipelining.schedules.ticks import Placement, Stash, lengths_with, place_in_lockstep

# In place of a stage or a micro-batch. As an index it means the last entry, which arrays that are
# indexed by it must expect.
IDLE = -1


class Work(NamedTuple):
    """What is done in one slot of every tick.

    Attributes:
      stage: int32[ticks, devices], the stage of each device's action; -1 is idle.
      microbatch: int32[ticks, devices], its micro-batch; -1 is idle.
      chunk: int32[ticks, devices], which of the device's stages it is, counted from 0 along the
        model; 0 is idle, too.
    """

    stage: Any
    microbatch: Any
    chunk: Any


class Storage(NamedTuple):
    """Where the values of one kind lie: a table for each sort of action that may read or write.

    The slot `num_slots` is nobody's. Where nobody has sent anything, what arrives goes there, and
    no condition is needed around that write. Here it stands where nothing is written or read.

    Attributes:
      used: for each device how many slots it uses.
      forward: int32[ticks, devices], the slot for the forward of this tick.
      backward: int32[ticks, devices], that for the backward, whole or its first half.
      weight: int32[ticks, devices], that for the weight gradient.
    """

    used: tuple[int, ...]
    forward: Any
    backward: Any
    weight: Any

    @property
    def num_slots(self) -> int:
        """How many slots the fullest device needs; all devices have as many."""
        return max(self.used)


class Route(NamedTuple):
    """How results travel along the edges of one wire, in one direction.

    Attributes:
      links: for each exchange the pairs (sender, receiver); no device occurs twice on one side.
      arrivals: int32[exchanges + 1, ticks, devices], the slots that what arrives is written to; the
        last row is for results that stay on their device.
      storage: where they lie, for the receiver.
    """

    links: tuple[tuple[tuple[int, int], ...], ...]
    arrivals: Any
    storage: Storage

    @property
    def is_busy(self) -> np.ndarray:
        """bool[exchanges, ticks]: whether any device awaits anything in an exchange of a tick."""
        return (self.arrivals[:-1] < self.storage.num_slots).any(axis=-1)


class Tables(NamedTuple):
    """A schedule, ready to be run.

    Attributes:
      num_ticks: how many ticks there are.
      forward: what is done in the first slot of a tick.
      backward: what is done in the second: whole backwards.
      halved: what else is done in the second: gradients of inputs alone.
      weight: what is done in the third: gradients of weights.
      activations: a route for each wire.
      cotangents: a route for each wire, the other way.
      residuals: what a forward keeps for its backward.
      deferred: what a gradient of inputs keeps for that of weights.
    """

    num_ticks: int
    forward: Work
    backward: Work
    halved: Work
    weight: Work
    activations: tuple[Route, ...]
    cotangents: tuple[Route, ...]
    residuals: Storage
    deferred: Storage


def lower(
    schedule: Grid,
    wires: Sequence[Sequence[Edge]],
    *,
    stash: Stash = "inputs",
    keeps_inputs: bool = True,
) -> Tables:
    """Writes a schedule down as tables.

    Args:
      schedule: a valid one.
      wires: the edges of each wire: for the first one from every stage to the next.
      stash: what stages keep, by which the kind of ticks is chosen.
      keeps_inputs: whether the backward of a stage reads its input again.
    """
    placement = place_in_lockstep(schedule.rows, schedule.num_stages, lengths_with(stash))
    timeline = Timeline(placement, schedule.num_microbatches)
    writer = _TableWriter(schedule, placement)
    # Cotangents take the edges the other way.
    returns = [[(target, source) for source, target in edges] for edges in wires]
    return Tables(
        placement.num_ticks,
        writer.work("F"),
        writer.work("B"),
        writer.work("I"),
        writer.work("W"),
        tuple(
            writer.route(edges, timeline.activations(edges, read_again=keeps_inputs))
            for edges in wires
        ),
        tuple(writer.route(edges, timeline.cotangents(edges)) for edges in returns),
        writer.storage(timeline.residuals()),
        writer.storage(timeline.deferred()),
    )


class _TableWriter:
    """Writes what is known of actions and values into arrays of shape (ticks, devices)."""

    def __init__(self, schedule: Grid, placement: Placement) -> None:
        self.device_of, self.tick_of = schedule.device_of, placement.tick_of
        self.chunk_of = number_chunks(schedule)
        self.shape = placement.num_ticks, schedule.num_devices

    def work(self, kind: str) -> Work:
        stages, microbatches = (np.full(self.shape, IDLE, np.int32) for _ in range(2))
        chunks = np.zeros(self.shape, np.int32)
        for action, tick in self.tick_of.items():
            if action.kind == kind:
                place = tick, self.device_of[action.stage]
                stages[place], microbatches[place] = action.stage, action.microbatch
                chunks[place] = self.chunk_of[action.stage]
        return Work(stages, microbatches, chunks)

    def storage(self, intervals: Intervals) -> Storage:
        return self._storage(assign_slots(intervals, self.device_of))

    def _storage(self, slots: SlotAssignment) -> Storage:
        # All actions of a stage on a micro-batch use one slot: the forward writes residuals there,
        # the backward reads them. Tables for which nobody has a use are never read.
        def table(kinds: str) -> np.ndarray:
            array = np.full(self.shape, max(slots.used), np.int32)
            for (stage, kind, microbatch), tick in self.tick_of.items():
                if kind in kinds and (stage, microbatch) in slots.slot_of:
                    array[tick, self.device_of[stage]] = slots.slot_of[stage, microbatch]
            return array

        # `B` and `I` share a table: a device does at most one of them in a tick.
        return Storage(slots.used, table("F"), table("BI"), table("W"))

    def route(self, edges: Sequence[Edge], intervals: Intervals) -> Route:
        """Plans the sends along one wire; what is sent belongs to the stage that receives it."""
        slots = assign_slots(intervals, self.device_of)
        device_of_source = {target: self.device_of[source] for source, target in edges}
        links = _group_links({(self.device_of[s], self.device_of[t]) for s, t in edges})
        arrivals = np.full((len(links) + 1, *self.shape), max(slots.used), np.int32)
        for (stage, microbatch), interval in intervals.items():
            # Both of one device: in none of the groups, so in the last row.
            pair = device_of_source[stage], self.device_of[stage]
            exchange = next((i for i, group in enumerate(links) if pair in group), len(links))
            sent, _ = interval.ticks
            arrivals[exchange, sent, pair[1]] = slots.slot_of[stage, microbatch]
        return Route(links, arrivals, self._storage(slots))


def _group_links(pairs: set[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Groups pairs of devices that can exchange at once; a device sends itself nothing.

    Each group is one `ppermute`, which takes at most one value from a device and gives it at most
    one. Stages in a row, d to d + 1, are one group; with chunks so are those in a ring. Zero-bubble
    V, which goes down the devices and up again, needs two.
    """
    groups: list[list[tuple[int, int]]] = []
    # Each pair goes to the first group in which both ends are free. Sorted, so that every process
    # finds the same groups.
    for source, target in sorted(pairs):
        if source == target:
            continue
        for group in groups:
            if all(source != s and target != t for s, t in group):
                group.append((source, target))
                break
        else:
            groups.append([(source, target)])
    return tuple(map(tuple, groups))
