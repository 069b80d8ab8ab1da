"""When each value of a schedule is made, where it lies, and when it is last read.

All that is said elsewhere about memory (`Schedule.liveness`, the slots of the program's buffers,
the footprints of a plan) is read from the intervals of this module. Four kinds of values wait
between two actions. Each belongs to a stage and a micro-batch, and lies on that stage's device:

  kind         made by                      last read by
  residuals    the stage's own F            its B, or the W of a backward in two halves
  activations  F of the stage that sends    the stage's F, or as residuals if B and W read it again
  cotangents   B or I of the stage behind   the stage's B or I
  deferred     the stage's own I            its W

Times are counted in moments. A tick has four, in the order in which the program goes through them:

  tick t     | forward | backward | weight gradient | exchange |
  moment     |   4t    |  4t + 1  |     4t + 2      |  4t + 3  |

A moment is finer than a tick for a reason: what is last read by the backward of tick t leaves its
slot free for what arrives in the exchange of the same tick.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ampx.pipelining.schedules.actions import Action, Kind
from ampx.pipelining.schedules.ticks import Placement

Edge = tuple[int, int]  # from one stage to another
StageValue = tuple[int, int]  # a stage and a micro-batch
_FORWARD, _BACKWARD, _WEIGHT, _EXCHANGE, _MOMENTS_IN_A_TICK = range(5)


class Interval(NamedTuple):
    """The life of a value, in moments; both ends belong to it.

    Attributes:
      made: when it is written.
      last_read: when it is read for the last time.
    """

    made: int
    last_read: int

    @property
    def ticks(self) -> tuple[int, int]:
        """The ticks of both ends."""
        return self.made // _MOMENTS_IN_A_TICK, self.last_read // _MOMENTS_IN_A_TICK


Intervals = dict[StageValue, Interval]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The intervals of a schedule whose actions have their ticks.

    Attributes:
      placement: the tick of every action.
      num_microbatches: into how many parts the batch of a step is divided.

    Examples:
      >>> from ampx.pipelining import one_f_one_b
      >>> from ampx.pipelining.schedules.intervals import Timeline
      >>> from ampx.pipelining.schedules.ticks import placement_on_grid
      >>> schedule = one_f_one_b(num_stages=2, num_microbatches=3)
      >>> timeline = Timeline(placement_on_grid(schedule.rows), schedule.num_microbatches)
      >>> timeline.residuals()[0, 1].ticks  # of stage 0, micro-batch 1: from F1 to B1
      (1, 5)
    """

    placement: Placement
    num_microbatches: int

    def residuals(self) -> Intervals:
        """What a forward keeps for the backward of its stage."""
        return self._intervals(self._values("F"), self._moment_of(("F",), _FORWARD), self._released)

    def deferred(self) -> Intervals:
        """What the first half of a backward keeps for the second."""
        return self._intervals(
            self._values("I"), self._moment_of(("I",), _BACKWARD), self._moment_of(("W",), _WEIGHT)
        )

    def activations(self, edges: Sequence[Edge], *, read_again: bool) -> Intervals:
        """What stages receive from those before them.

        Args:
          edges: from the stage that sends to the stage that receives; one for each receiver.
          read_again: whether backwards read it, too, because they compute the stage again.
        """
        last_read = self._released if read_again else self._moment_of(("F",), _FORWARD)
        return self._received(edges, self._moment_of(("F",), _EXCHANGE), last_read)

    def cotangents(self, edges: Sequence[Edge]) -> Intervals:
        """What stages receive from those behind them.

        Args:
          edges: from the stage that sends, which is behind, to the stage that receives.
        """
        return self._received(
            edges, self._moment_of(("B", "I"), _EXCHANGE), self._moment_of(("B", "I"), _BACKWARD)
        )

    def _received(
        self,
        edges: Sequence[Edge],
        sent: Callable[[StageValue], int | None],
        last_read: Callable[[StageValue], int | None],
    ) -> Intervals:
        source_of = {target: source for source, target in edges}
        return self._intervals(
            [(target, m) for target in source_of for m in range(self.num_microbatches)],
            lambda value: sent((source_of[value[0]], value[1])),
            last_read,
        )

    def _values(self, kind: str) -> list[StageValue]:
        return sorted((a.stage, a.microbatch) for a in self.placement.tick_of if a.kind == kind)

    def _moment_of(self, kinds: Sequence[Kind], phase: int) -> Callable[[StageValue], int | None]:
        """When a stage's action of one of these kinds is at a phase; None if there is none."""

        def moment(value: StageValue) -> int | None:
            stage, microbatch = value
            for kind in kinds:
                tick = self.placement.tick_of.get(Action(stage, kind, microbatch))
                if tick is not None:
                    return tick * _MOMENTS_IN_A_TICK + phase
            return None

        return moment

    def _released(self, value: StageValue) -> int | None:
        """When nothing that a stage has of a micro-batch is needed any more."""
        # If the backward comes in halves, `W` is the later one. Without a backward the forward
        # itself is the last reader.
        phases: dict[Kind, int] = {"W": _WEIGHT, "B": _BACKWARD, "F": _FORWARD}
        for kind, phase in phases.items():
            moment = self._moment_of((kind,), phase)(value)
            if moment is not None:
                return moment
        return None

    @staticmethod
    def _intervals(
        values: Iterable[StageValue],
        made: Callable[[StageValue], int | None],
        last_read: Callable[[StageValue], int | None],
    ) -> Intervals:
        """Intervals of the values that are both made and read."""
        ends = ((value, made(value), last_read(value)) for value in values)
        return {v: Interval(a, b) for v, a, b in ends if a is not None and b is not None}


class SlotAssignment(NamedTuple):
    """Places for values in the buffers of their devices.

    Attributes:
      slot_of: for each value its place, counted from 0 on each device.
      used: for each device how many places it uses; a buffer that all devices have alike needs the
        largest of them.
    """

    slot_of: dict[StageValue, int]
    used: tuple[int, ...]


def assign_slots(
    intervals: Mapping[StageValue, Interval], device_of: Sequence[int]
) -> SlotAssignment:
    """Gives values slots so that two of a device share one only if they never live together.

    Args:
      intervals: of values of one kind.
      device_of: for each stage its device.

    Returns:
      The slots: on each device as few as the most values that live at once.

    Examples:
      >>> from ampx.pipelining.schedules.intervals import Interval, assign_slots
      >>> lives = {(0, 0): Interval(0, 5), (0, 1): Interval(2, 7), (0, 2): Interval(6, 9)}
      >>> assign_slots(lives, device_of=(0,))
      SlotAssignment(slot_of={(0, 0): 0, (0, 1): 1, (0, 2): 0}, used=(2,))
    """
    slot_of: dict[StageValue, int] = {}
    used = []
    for device in range(max(device_of) + 1):
        own = [value for value in intervals if device_of[value[0]] == device]
        slots = _lowest_free_slots([intervals[value] for value in own])
        slot_of |= zip(own, slots, strict=True)
        used.append(1 + max(slots, default=-1))
    return SlotAssignment(slot_of, tuple(used))


def _lowest_free_slots(intervals: Sequence[Interval]) -> list[int]:
    """A slot for each interval, the lowest that is free when it begins.

    This colours an interval graph, greedily in the order of the left ends, which is optimal there:
    a slot k is opened only where the slots 0 to k - 1 are all busy, so k + 1 values do live at that
    moment, and nobody could do with fewer. (In graphs of other kinds greedy colouring can waste.)

      moment  0 1 2 3 4 5 6 7 8 9
      slot 0  a a a a a a c c c c      c begins after the end of a, and takes its slot
      slot 1  . . b b b b b b . .      b begins while a lives
    """
    slots = [0] * len(intervals)
    free: list[int] = []  # a heap of slots that were used, and are free again
    busy: list[tuple[int, int]] = []  # a heap of (last_read, slot)
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        made, last_read = intervals[index]
        # Strictly before: a slot that is read at a moment is not written at the same one.
        while busy and busy[0][0] < made:
            heapq.heappush(free, heapq.heappop(busy)[1])
        # If none is free, those in use are exactly 0 to len(busy) - 1.
        slots[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last_read, slots[index]))
    return slots
