"""When each action of a schedule runs: on its own grid, or if all devices move in step.

In one compiled program neighbours exchange their results together, at the end of every tick. Which
ticks are best depends on the schedule and on what takes how long, so actions are placed in two
ways, and the one that takes less time is taken:

  *full* ticks    have room for one action of each sort: a forward, a backward and a weight
                  gradient, in this order. With one action a tick, a device that goes forward would
                  make its neighbours, which go backward and for longer, wait.
  *single* ticks  have room for one action, and each device keeps to the order of its row. Where
                  all actions are equally long nobody waits for longer than the schedule says.

In full ticks a device runs its forwards in the order of the schedule, and as early as they can run.
A backward waits for the forwards and the backwards that the schedule puts before it. Whatever the
order of micro-batches is, nobody waits for ever if the schedule has a grid: of all actions that are
left, the one that comes first on the grid has all it waits for. Gradients of weights keep nobody
waiting, so they go where a device would wait for others, see `_place_weight_gradients`.

`1f1b` with 3 stages and 4 micro-batches has 12 ticks on its grid, and 8 full ticks:

  tick      0      1      2      3      4      5      6      7
  device 0  F0     F1     F2     F3     B0     B1     B2     B3
  device 1  .      F0     F1     F2 B0  F3 B1  B2     B3     .
  device 2  .      .      F0 B0  F1 B1  F2 B2  F3 B3  .      .

Stage s of S runs the forward of micro-batch m at tick s + m. The last stage goes backward in that
same tick, and each stage before it one tick later, so stage s does at tick 2 (S - 1) - s + m. It
therefore keeps a micro-batch for 2 (S - 1 - s) + 1 ticks, and as many micro-batches at once, where
the grid keeps S - s. That is the price of early forwards. It does not grow with their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ampx.checking import join_first
from ampx.pipelining.schedules.actions import Action, Kind, needs_of, result_of

Rows = Sequence[Sequence[Action | None]]
Lengths = Mapping[Kind, float]
# What a stage keeps of a micro-batch for its backward: its inputs, or all that the backward reads.
Stash = Literal["inputs", "residuals"]


class Placement(NamedTuple):
    """The ticks of all actions.

    Attributes:
      tick_of: for each action its tick, counted from 0.
      num_ticks: how many ticks there are.
    """

    tick_of: dict[Action, int]
    num_ticks: int


def placement_on_grid(rows: Rows) -> Placement:
    """Reads off the ticks that the columns of a grid say.

    Args:
      rows: for each device its actions; column t is tick t.
    """
    tick_of: dict[Action, int] = {}
    for row in rows:
        for tick, action in enumerate(row):
            # Rows may have faults: of a forward that is there twice the first one counts, since
            # its activations are there from then on; of a backward the last one.
            if action is not None and (action.kind != "F" or action not in tick_of):
                tick_of[action] = tick
    return Placement(tick_of, max(map(len, rows), default=0))


class _Stream:
    """The actions of one device that share a slot of the ticks, in their order.

    Attributes:
      actions: all of them.
      forwards_before: for each, how many forwards the schedule puts before it on its device, which
        have to be done first. By default none: the stream has them itself, in their order.
      done: how many have their ticks.
    """

    def __init__(self, actions: list[Action], forwards_before: list[int] | None = None) -> None:
        self.actions, self.done = actions, 0
        self.forwards_before = forwards_before or [0] * len(actions)

    @property
    def head(self) -> Action | None:
        return self.actions[self.done] if self.done < len(self.actions) else None


def lengths_with(stash: Stash) -> Lengths:
    """How long actions take in a program whose stages keep this, in the unit of the papers.

    It is an estimate: one program cannot know how long its stages will take.
    """
    again = stash == "inputs"  # a backward then begins with a second forward
    return {"F": 1, "B": 2 + again, "I": 1 + again, "W": 1}


def place_in_lockstep(
    rows: Rows, num_stages: int, lengths: Lengths, communication: float = 0.0
) -> Placement:
    """Places the actions of each device, as a compiled program runs them.

    Args:
      rows: for each device its actions in their order; None is an idle place.
      num_stages: number of stages of the model.
      lengths: how long an action of each kind takes.
      communication: how long the exchange at the end of a tick takes.

    Raises:
      ValueError: if devices wait for each other for ever.
    """
    forwards = [_make_stream(row, "F") for row in rows]
    backwards = [_make_stream(row, "BI") for row in rows]
    full = _fill_ticks((forwards, backwards), forwards, num_stages)
    full = _place_weight_gradients(rows, full, lengths)
    singles = [_Stream([a for a in row if a is not None]) for row in rows]
    try:
        single = _fill_ticks((singles,), singles, num_stages)
    except ValueError:  # rows that nobody has validated, where a forward has to run ahead
        return full
    # Of equals the first: fewer ticks, and halves of a backward are hardly ever equally long.
    return min((full, single), key=lambda p: _find_duration(p, rows, lengths, communication))


def _find_duration(
    placement: Placement, rows: Rows, lengths: Lengths, communication: float
) -> float:
    """How long the ticks take: each as long as the actions in it of its fullest device."""
    busy = _find_busy(placement, rows, lengths)
    return float(busy.max(axis=0, initial=0).sum()) + communication * placement.num_ticks


def _find_busy(placement: Placement, rows: Rows, lengths: Lengths) -> np.ndarray:
    """How long each device computes in each tick, of shape (devices, ticks): what has its place."""
    busy = np.zeros((len(rows), placement.num_ticks))
    for device, row in enumerate(rows):
        for action in row:
            if action in placement.tick_of:
                busy[device, placement.tick_of[action]] += lengths[action.kind]
    return busy


def _fill_ticks(
    rounds: Sequence[list[_Stream]], forwards: list[_Stream], num_stages: int
) -> Placement:
    """Gives all actions of some streams their ticks.

    Args:
      rounds: in the order in which the program runs them in a tick; for each device a stream.
      forwards: those of them that have the forwards.
      num_stages: number of stages of the model.

    Raises:
      ValueError: if devices wait for each other for ever.
    """
    tick_of: dict[Action, int] = {}
    done: dict[Action, int] = {}  # the same, by result
    tick = 0
    # Each pass fills one tick, forwards first: a backward may use the forward of its own tick. What
    # is placed is final, and what an action needs was placed before it. A pass that places nothing
    # would therefore be followed by another such, for ever.
    while heads := [s.head for streams in rounds for s in streams if s.head]:
        before = len(tick_of)
        for streams in rounds:
            for action in _take_ready(streams, forwards, done, tick, num_stages):
                tick_of[action] = done[result_of(action)] = tick
        if len(tick_of) == before:
            raise ValueError(
                f"at tick {tick} the devices wait for each other, at {join_first(heads)}: call "
                "validate()"
            )
        tick += 1
    return Placement(tick_of, tick)


def _place_weight_gradients(rows: Rows, placement: Placement, lengths: Lengths) -> Placement:
    """Adds the gradients of weights to forwards and backwards that have their ticks.

    A tick lasts as long as its fullest device, so a device that has less to do in it has a *gap*: a
    weight gradient costs no time there. The others are put where all devices have one at a time.
    In `zero-bubble` with 3 stages and 4 micro-batches, gaps are in brackets:

      tick      0     1     2      3      4        5        6      7     8     9
      device 0  F0    F1    F2     F3     I0 [W0]  I1 [W1]  I2     W2    I3    W3
      device 1  .     F0    F1     F2 I0  F3 I1    I2 [W0]  I3     W1    [W2]  W3
      device 2  .     .     F0 I0  F1 I1  F2 I2    F3 I3    [W0]   W1    [W2]  W3

    All devices together take as long as devices that go on by themselves: 3 * 4 + 3 - 1 units.
    """
    tick_of, num_ticks = placement
    # The `I` of each device by their ticks.
    halves = [{tick_of[a]: a for a in row if a is not None and a.kind == "I"} for row in rows]
    if not any(halves):
        return placement
    busy = _find_busy(placement, rows, lengths)
    has_gap = busy.max(axis=0, initial=0) - busy >= lengths["W"]  # bool[devices, ticks]
    # From the last tick to the first. A weight gradient comes after its `I`, so from each tick on a
    # device needs as many places as it still has `I`. Where one is lacking, all devices get one.
    lacking = np.zeros(len(rows), int)  # by device: `I` without a place, from this tick on
    is_longer = np.zeros(num_ticks, bool)
    for tick in reversed(range(num_ticks)):
        lacking += [tick in own for own in halves]
        lacking -= has_gap[:, tick]
        is_longer[tick] = lacking.max(initial=0) > 0
        lacking -= is_longer[tick]
    # The place for all is in the tick itself, or, since a tick has one for each device, in a tick
    # of its own behind it, if some device has a gap there.
    is_doubled = is_longer & has_gap.any(axis=0)
    begins = np.cumsum(1 + is_doubled) - (1 + is_doubled)
    placed = {action: int(begins[tick]) for action, tick in tick_of.items()}
    for device, own in enumerate(halves):
        # The first place is the best one: values that wait for it are then freed soonest.
        waiting: deque[Action] = deque()
        for tick in range(num_ticks):
            waiting.extend([own[tick]] if tick in own else [])
            first = has_gap[device, tick] or (is_longer[tick] and not is_doubled[tick])
            for place, is_there in enumerate((first, is_doubled[tick])):
                if is_there and waiting:
                    action = waiting.popleft()._replace(kind="W")
                    placed[action] = int(begins[tick]) + place
    return Placement(placed, num_ticks + int(is_doubled.sum()))


def _make_stream(row: Sequence[Action | None], kinds: str) -> _Stream:
    actions, forwards_before, forwards = [], [], 0
    for action in row:
        if action is None:
            continue
        if action.kind in kinds:
            actions.append(action)
            forwards_before.append(forwards)
        forwards += action.kind == "F"
    return _Stream(actions, forwards_before)


def _take_ready(
    streams: list[_Stream],
    forwards: list[_Stream],
    done: dict[Action, int],
    tick: int,
    num_stages: int,
) -> Iterator[Action]:
    """Takes the first action off each stream, if what it needs is there at this tick."""
    for stream, forward in zip(streams, forwards, strict=True):
        head = stream.head
        # That forwards of the schedule come first is what bounds how far backwards can run ahead,
        # and tells gpipe from 1f1b here: gpipe's first backward has all forwards before it.
        if head is None or forward.done < stream.forwards_before[stream.done]:
            continue
        if _has_inputs(head, done, tick, num_stages):
            stream.done += 1
            yield head


def _has_inputs(action: Action, done: dict[Action, int], tick: int, num_stages: int) -> bool:
    """Whether a neighbour's result was sent before this tick, and the stage's own one is there."""
    # What another stage makes in tick t is exchanged at its end and can be read from t + 1 on, even
    # if that stage is on the same device. What the stage itself made can be read in t.
    return all(
        done.get(need, tick + 1) < tick + (need.stage == action.stage)
        for need in needs_of(action, num_stages)
    )
