"""Which activations a schedule keeps, from when to when."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from ampx.pipelining.schedules.grid import Grid


@dataclasses.dataclass(frozen=True)
class Liveness:
    """The activations that a schedule keeps; made by `Schedule.liveness`.

    Attributes:
      lifetimes: for each (stage, micro-batch) the ticks of its forward and of what releases it,
        both included.
      slots: for each (stage, micro-batch) its place in the buffer of its device: two that live in
        the same tick never share one.
      live: array of shape (devices, ticks), how many places are in use.
      peak: for each device the most that are in use at once, which is also how many it needs.
      peak_of_stage: for each stage the most micro-batches that it keeps at once.

    Examples:
      >>> from ampx.pipelining.schedules.generators import one_f_one_b
      >>> liveness = one_f_one_b(num_stages=2, num_microbatches=3).liveness()
      >>> liveness.peak
      (2, 1)
      >>> liveness.lifetimes[0, 1], liveness.slots[0, 2]
      ((1, 5), 0)
      >>> liveness.live
      array([[1, 2, 2, 2, 2, 2, 1, 1],
             [0, 1, 1, 1, 1, 1, 1, 0]])
    """

    lifetimes: dict[tuple[int, int], tuple[int, int]]
    slots: dict[tuple[int, int], int]
    live: np.ndarray
    peak: tuple[int, ...]
    peak_of_stage: tuple[int, ...]


def find_liveness(schedule: Grid, *, merge_chunks: bool) -> Liveness:
    """Finds lifetimes, and colours their intervals; see `Schedule.liveness`."""
    lifetimes = _lifetimes(schedule)
    peak_of_stage = [0] * schedule.num_stages
    for stage in range(schedule.num_stages):
        own = [interval for (s, _), interval in lifetimes.items() if s == stage]
        peak_of_stage[stage] = int(_counts(own, schedule.num_ticks).max(initial=0))
    live = np.zeros((schedule.num_devices, schedule.num_ticks), int)
    slots: dict[tuple[int, int], int] = {}
    for device in range(schedule.num_devices):
        owners = _owners(lifetimes, schedule.stages_on(device), merge_chunks)
        intervals = [
            (min(lifetimes[key][0] for key in keys), max(lifetimes[key][1] for key in keys))
            for keys in owners
        ]
        live[device] = _counts(intervals, schedule.num_ticks)
        for keys, interval, slot in zip(
            owners, intervals, lowest_free_slots(intervals), strict=True
        ):
            slots |= dict.fromkeys(keys, slot)
            lifetimes |= dict.fromkeys(keys, interval)
    peak = tuple(int(row.max(initial=0)) for row in live)
    return Liveness(lifetimes, slots, live, peak, tuple(peak_of_stage))


def _lifetimes(schedule: Grid) -> dict[tuple[int, int], tuple[int, int]]:
    starts: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    for row in schedule.rows:
        for tick, action in enumerate(row):
            if action is None:
                continue
            key = action.stage, action.microbatch
            if action.kind == "F":
                starts.setdefault(key, tick)
            if action.kind in "BW" or not schedule.has_backward:
                ends[key] = tick
    for key, tick in ends.items():
        if starts.get(key, tick) > tick or key not in starts:
            stage, microbatch = key
            raise ValueError(
                f"stage {stage}, micro-batch {microbatch} has a backward at tick {tick}, but no "
                "forward before it: call validate()"
            )
    unreleased = sorted(starts.keys() - ends.keys())
    if unreleased:
        stage, microbatch = unreleased[0]
        raise ValueError(
            f"stage {stage}, micro-batch {microbatch} has neither B nor W, so its activations are "
            "never released: call validate()"
        )
    return {key: (start, ends[key]) for key, start in starts.items()}


def _owners(
    lifetimes: dict[tuple[int, int], tuple[int, int]], stages: tuple[int, ...], merge_chunks: bool
) -> list[list[tuple[int, int]]]:
    """What shares one place: each (stage, micro-batch) alone, or all stages of a micro-batch."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for stage, microbatch in lifetimes:
        if stage in stages:
            group = (0, microbatch) if merge_chunks else (stage, microbatch)
            groups.setdefault(group, []).append((stage, microbatch))
    return list(groups.values())


def _counts(intervals: list[tuple[int, int]], num_ticks: int) -> np.ndarray:
    changes = np.zeros(num_ticks + 1, int)
    for start, end in intervals:
        changes[start] += 1
        changes[end + 1] -= 1
    return np.cumsum(changes)[:-1]


def lowest_free_slots(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A slot for each interval, the lowest that is free when it begins: as few as can be.

    A slot is free again after the end of an interval, not at it.
    """
    slots = [0] * len(intervals)
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        start, end = intervals[index]
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slots[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, slots[index]))
    return slots
