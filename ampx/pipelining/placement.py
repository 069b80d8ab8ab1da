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

from collections.abc import Sequence
from typing import NamedTuple

from ampx.pipelining.actions import Action

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
    tick = 0
    while any(stream.head for stream in forwards + backwards):
        before = len(tick_of)
        _advance(forwards, forwards, tick_of, tick, num_stages)
        _advance(backwards, forwards, tick_of, tick, num_stages)
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


def _advance(
    streams: list[_Stream],
    forwards: list[_Stream],
    tick_of: dict[Action, int],
    tick: int,
    num_stages: int,
) -> None:
    """Runs the first action of each stream, if what it needs is there at this tick."""
    for stream, forward in zip(streams, forwards, strict=True):
        head = stream.head
        if head is None or forward.done < stream.forwards_before[stream.done]:
            continue
        if _has_inputs(head, tick_of, tick, num_stages):
            tick_of[head] = tick
            stream.done += 1


def _has_inputs(action: Action, tick_of: dict[Action, int], tick: int, num_stages: int) -> bool:
    """Whether a neighbour's result was sent before this tick, and the stage's own one is there."""
    stage, kind, microbatch = action
    if kind == "F":
        return stage == 0 or _is_sent(tick_of, tick, stage - 1, "F", microbatch)
    if action._replace(kind="F") not in tick_of:
        return False
    return stage == num_stages - 1 or _is_sent(tick_of, tick, stage + 1, "BI", microbatch)


def _is_sent(
    tick_of: dict[Action, int], tick: int, stage: int, kinds: str, microbatch: int
) -> bool:
    return any(tick_of.get(Action(stage, kind, microbatch), tick) < tick for kind in kinds)  # type: ignore
