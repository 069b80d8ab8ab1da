"""Which activations a schedule keeps, from when to when, counted in ticks.

These are the residuals of `intervals`: made by a forward, released by its backward. The figure is
that of the one compiled program, in *lockstep*: what a step allocates. In its ticks forwards run
ahead, so it is larger than those of the papers, in which each device does one action at a time, in
the ticks of the schedule's own grid. `"async"` gives these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import get_args

import numpy as np

from ampx.checking import as_bool, check_choice
from ampx.pipelining.schedules.grid import Grid
from ampx.pipelining.schedules.intervals import Interval, StageValue, Timeline, assign_slots
from ampx.pipelining.schedules.ticks import (
    Placement,
    Stash,
    lengths_with,
    place_in_lockstep,
    placement_on_grid,
)
from ampx.summaries import show_fields


@dataclasses.dataclass(frozen=True)
class Liveness:
    """The activations that a schedule keeps; made by `Schedule.liveness`.

    Attributes:
      lifetimes: for each (stage, micro-batch) the ticks of its forward and of what releases it,
        both included.
      slots: for each (stage, micro-batch) its place in the buffer of its device: two that live in
        the same tick never share one.
      live: int array of shape (devices, ticks), how many places are in use.
      peak: for each device the most that are in use at once, which is also how many it needs.
      peak_of_stage: for each stage the most micro-batches that it keeps at once.

    Examples:
      >>> from ampx.pipelining import one_f_one_b
      >>> liveness = one_f_one_b(num_stages=2, num_microbatches=3).liveness()
      >>> liveness.peak
      (3, 1)
      >>> liveness.lifetimes[0, 1], liveness.slots[1, 2]  # forward in tick 1, backward in tick 3
      ((1, 3), 0)
      >>> liveness.live
      array([[1, 2, 3, 2, 1],
             [0, 1, 1, 1, 0]])
    """

    lifetimes: dict[tuple[int, int], tuple[int, int]]
    slots: dict[tuple[int, int], int]
    live: np.ndarray
    peak: tuple[int, ...]
    peak_of_stage: tuple[int, ...]

    __repr__ = show_fields


def find_liveness(schedule: Grid, *, merge_chunks: bool, mode: str, stash: Stash) -> Liveness:
    """Finds lifetimes, and gives them slots; see `Schedule.liveness`."""
    check_choice("mode", mode, ("async", "lockstep"))
    check_choice("stash", stash, get_args(Stash))
    merge_chunks = as_bool("merge_chunks", merge_chunks)
    placement = placement_on_grid(schedule.rows)
    _check_released(schedule, placement)
    if mode == "lockstep":
        placement = place_in_lockstep(schedule.rows, schedule.num_stages, lengths_with(stash))
    intervals = Timeline(placement, schedule.num_microbatches).residuals()
    # Who shares a place: a (stage, micro-batch) has one alone, or all stages that a device runs on
    # a micro-batch share one, under the name of the first of them.
    owner_of = {
        (stage, microbatch): (
            schedule.stages_on(schedule.device_of[stage])[0] if merge_chunks else stage,
            microbatch,
        )
        for stage, microbatch in intervals
    }
    owned: dict[StageValue, Interval] = {}
    for value, own in intervals.items():
        other = owned.setdefault(owner_of[value], own)
        owned[owner_of[value]] = Interval(
            min(own.made, other.made), max(own.last_read, other.last_read)
        )
    slots = assign_slots(owned, schedule.device_of)
    # What shares a place is counted once; stages are counted one by one.
    live = np.stack(
        [
            _count_live(
                (x for (stage, _), x in owned.items() if schedule.device_of[stage] == device),
                placement.num_ticks,
            )
            for device in range(schedule.num_devices)
        ]
    )
    peak_of_stage = (
        _count_live((x for (s, _), x in intervals.items() if s == stage), placement.num_ticks)
        for stage in range(schedule.num_stages)
    )
    return Liveness(
        {value: owned[owner].ticks for value, owner in owner_of.items()},
        {value: slots.slot_of[owner] for value, owner in owner_of.items()},
        live,
        tuple(int(row.max(initial=0)) for row in live),
        tuple(int(counts.max(initial=0)) for counts in peak_of_stage),
    )


def _check_released(schedule: Grid, placement: Placement) -> None:
    """Raises unless every forward has a later backward, and every backward a forward."""
    tick_of = placement.tick_of
    forwards = {(a.stage, a.microbatch) for a in tick_of if a.kind == "F"}
    released = set()
    for action, tick in tick_of.items():
        if action.kind not in "BW":
            continue
        stage, microbatch = action.stage, action.microbatch
        released.add((stage, microbatch))
        if tick_of.get(action._replace(kind="F"), tick + 1) > tick:
            raise ValueError(
                f"stage {stage}, micro-batch {microbatch} has a backward at tick {tick}, but no "
                "forward before it: call validate()"
            )
    unreleased = sorted(forwards - released) if schedule.has_backward else []
    if unreleased:
        stage, microbatch = unreleased[0]
        raise ValueError(
            f"stage {stage}, micro-batch {microbatch} has neither B nor W, so its activations are "
            "never released: call validate()"
        )


def _count_live(intervals: Iterable[Interval], num_ticks: int) -> np.ndarray:
    """Counts the values that live in each tick: int of shape (ticks,)."""
    # A running sum of changes: +1 at the first tick of a life, -1 after its last one.
    changes = np.zeros(num_ticks + 1, int)
    for interval in intervals:
        first, last = interval.ticks
        changes[first] += 1
        changes[last + 1] -= 1
    return np.cumsum(changes)[:-1]
