"""When each action of a schedule runs if all devices move in step.

In one compiled program neighbours exchange their results together, at the end of every tick. A tick
therefore has room for one action of each sort: a forward, a backward and a weight gradient, in this
order. With one action a tick, a device that goes forward would make its neighbours, which go
backward, wait.

A device runs its forwards in the order of the schedule, and as early as they can run; a backward
waits for the forwards that the schedule puts before it. Gradients of weights keep nobody waiting:
they are moved to the last ticks, where every device has some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampx.pipelining.schedules.actions import Action, needs_of, result_of

Rows = Sequence[Sequence[Action | None]]


class Placement(NamedTuple):
    """The tick of every action, and how many ticks there are."""

    tick_of: dict[Action, int]
    num_ticks: int


class _Stream:
    """The actions of one device that share a slot, in their order."""

    def __init__(self, actions: list[Action], forwards_before: list[int]) -> None:
        self.actions, self.forwards_before, self.done = actions, forwards_before, 0

    @property
    def head(self) -> Action | None:
        return self.actions[self.done] if self.done < len(self.actions) else None


def lockstep(rows: Rows, num_stages: int) -> Placement:
    """Places the actions of each device.

    Args:
      rows: for each device its actions in their order; None is an idle place.
      num_stages: number of stages of the model.

    Raises:
      ValueError: if devices wait for each other for ever.
    """
    forwards = [_stream(row, "F") for row in rows]
    backwards = [_stream(row, "BI") for row in rows]
    tick_of: dict[Action, int] = {}
    done: dict[Action, int] = {}  # the same, by result
    tick = 0
    while any(stream.head for stream in forwards + backwards):
        before = len(tick_of)
        for streams in (forwards, backwards):
            for action in _ready(streams, forwards, done, tick, num_stages):
                tick_of[action] = done[result_of(action)] = tick
        if len(tick_of) == before:
            heads = ", ".join(str(s.head) for s in forwards + backwards if s.head)
            raise ValueError(f"at tick {tick} the devices wait for each other, at {heads}")
        tick += 1
    for stream in backwards:
        halves = [action for action in stream.actions if action.kind == "I"]
        for place, action in enumerate(halves):
            tick_of[action._replace(kind="W")] = tick - len(halves) + place
    return Placement(tick_of, tick)


def _stream(row: Sequence[Action | None], kinds: str) -> _Stream:
    actions, forwards_before, forwards = [], [], 0
    for action in row:
        if action is None:
            continue
        if action.kind in kinds:
            actions.append(action)
            forwards_before.append(forwards)
        forwards += action.kind == "F"
    return _Stream(actions, forwards_before)


def _ready(
    streams: list[_Stream],
    forwards: list[_Stream],
    done: dict[Action, int],
    tick: int,
    num_stages: int,
) -> Iterator[Action]:
    """Takes the first action off each stream, if what it needs is there at this tick."""
    for stream, forward in zip(streams, forwards, strict=True):
        head = stream.head
        if head is None or forward.done < stream.forwards_before[stream.done]:
            continue
        if _has_inputs(head, done, tick, num_stages):
            stream.done += 1
            yield head


def _has_inputs(action: Action, done: dict[Action, int], tick: int, num_stages: int) -> bool:
    """Whether a neighbour's result was sent before this tick, and the stage's own one is there."""
    return all(
        done.get(need, tick + 1) < tick + (need.stage == action.stage)
        for need in needs_of(action, num_stages)
    )
