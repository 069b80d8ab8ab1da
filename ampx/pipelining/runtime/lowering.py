"""A schedule as tables of small integers: what each device does at each tick, and where things lie.

What a device keeps (an activation until its backward, a cotangent until it is used) lies in a slot
of a ring buffer. Slots are given out so that two things share one if they never live at the same
time. How many are needed is what a schedule costs in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.lifetimes import lowest_free_slots
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.ticks import Placement, lockstep

Edge = tuple[int, int]  # from one stage to another
Key = tuple[int, int]  # a stage and a micro-batch
IDLE = -1
# The order of events within a tick.
_FORWARD, _BACKWARD, _WEIGHT, _EXCHANGE, _PHASES = range(5)


class Work(NamedTuple):
    """What is done in one slot of every tick: int32 of shape (ticks, devices); -1 is idle."""

    stage: Any
    microbatch: Any


class Storage(NamedTuple):
    """Where the things of one kind lie; int32 of shape (ticks, devices), one array a reader.

    The slot `num_slots` is nobody's: whoever has nothing to write or to read uses it.
    """

    num_slots: int
    forward: Any
    backward: Any
    weight: Any


class Route(NamedTuple):
    """How results travel along the edges of one wire, in one direction.

    Attributes:
      links: for each exchange the pairs (sender, receiver); no device occurs twice on one side.
      arrivals: int32 of shape (exchanges + 1, ticks, devices), the slots that what arrives is
        written to; the last row is for results that stay on their device.
      storage: where they lie, for the receiver.
    """

    links: tuple[tuple[tuple[int, int], ...], ...]
    arrivals: Any
    storage: Storage


class Tables(NamedTuple):
    """A schedule, ready to be run.

    Attributes:
      num_ticks: how many ticks there are.
      forward, backward, weight: the three slots of a tick; `halved` shares that of `backward`, for
        gradients of inputs alone.
      activations, cotangents: a route for each wire.
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
    schedule: Schedule, wires: Sequence[Sequence[Edge]], *, keeps_inputs: bool = True
) -> Tables:
    """The tables of a schedule.

    Args:
      schedule: a valid one.
      wires: the edges of each wire: for the first one from every stage to the next.
      keeps_inputs: whether the backward of a stage reads its input again.
    """
    placement = lockstep(schedule.rows, schedule.num_stages)
    planner = _Planner(schedule, placement)
    last_use = planner.released if keeps_inputs else planner.moment_of("F", _FORWARD)
    return Tables(
        placement.num_ticks,
        planner.work("F"),
        planner.work("B"),
        planner.work("I"),
        planner.work("W"),
        tuple(planner.route(edges, planner.moment_of("F", _EXCHANGE), last_use) for edges in wires),
        tuple(
            planner.route(
                [(target, source) for source, target in edges],
                planner.moment_of("BI", _EXCHANGE),
                planner.moment_of("BI", _BACKWARD),
            )
            for edges in wires
        ),
        planner.storage(planner.lifetimes("F", _FORWARD, planner.released)),
        planner.storage(planner.lifetimes("I", _BACKWARD, planner.moment_of("W", _WEIGHT))),
    )


class _Planner:
    """The ticks of a schedule, seen as moments: the events of a tick one after the other."""

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        self.schedule, self.ticks = schedule, placement.tick_of
        self.shape = (placement.num_ticks, schedule.num_devices)

    def moment_of(self, kinds: str, phase: int) -> Callable[[Key], int | None]:
        """When the action of a stage on a micro-batch is at a phase; None if there is none."""

        def moment(key: Key) -> int | None:
            stage, microbatch = key
            for kind in kinds:
                tick = self.ticks.get(Action(stage, kind, microbatch))  # type: ignore[arg-type]
                if tick is not None:
                    return tick * _PHASES + phase
            return None

        return moment

    def released(self, key: Key) -> int | None:
        """When nothing of a stage's work on a micro-batch is needed any more."""
        for kinds, phase in (("W", _WEIGHT), ("B", _BACKWARD), ("F", _FORWARD)):
            moment = self.moment_of(kinds, phase)(key)
            if moment is not None:
                return moment
        return None

    def work(self, kinds: str) -> Work:
        stages, microbatches = (np.full(self.shape, IDLE, np.int32) for _ in range(2))
        for action, tick in self.ticks.items():
            if action.kind in kinds:
                place = tick, self.schedule.device_of[action.stage]
                stages[place], microbatches[place] = action.stage, action.microbatch
        return Work(stages, microbatches)

    def lifetimes(
        self, kinds: str, phase: int, death: Callable[[Key], int | None]
    ) -> dict[Key, tuple[int, int]]:
        """From when to when a stage's own things of each micro-batch live."""
        birth = self.moment_of(kinds, phase)
        keys = {(a.stage, a.microbatch) for a in self.ticks if a.kind in kinds}
        return _alive((key, birth(key), death(key)) for key in sorted(keys))

    def route(
        self,
        edges: Sequence[Edge],
        sent: Callable[[Key], int | None],
        death: Callable[[Key], int | None],
    ) -> Route:
        """Sends of one wire; what is sent belongs to the receiving stage."""
        source_of = {target: source for source, target in edges}
        lives = _alive(
            ((target, microbatch), sent((source, microbatch)), death((target, microbatch)))
            for target, source in source_of.items()
            for microbatch in range(self.schedule.num_microbatches)
        )
        slots, num_slots = self._slots(lives)
        device_of = self.schedule.device_of
        links = _links({(device_of[source], device_of[target]) for source, target in edges})
        arrivals = np.full((len(links) + 1, *self.shape), num_slots, np.int32)
        for (stage, microbatch), (birth, _) in lives.items():
            pair = device_of[source_of[stage]], device_of[stage]
            exchange = next((i for i, group in enumerate(links) if pair in group), len(links))
            arrivals[exchange, birth // _PHASES, pair[1]] = slots[stage, microbatch]
        return Route(links, arrivals, self._storage(slots, num_slots))

    def storage(self, lives: dict[Key, tuple[int, int]]) -> Storage:
        return self._storage(*self._slots(lives))

    def _storage(self, slots: dict[Key, int], num_slots: int) -> Storage:
        def table(kinds: str) -> np.ndarray:
            array = np.full(self.shape, num_slots, np.int32)
            for (stage, kind, microbatch), tick in self.ticks.items():
                if kind in kinds and (stage, microbatch) in slots:
                    array[tick, self.schedule.device_of[stage]] = slots[stage, microbatch]
            return array

        return Storage(num_slots, table("F"), table("BI"), table("W"))

    def _slots(self, lives: dict[Key, tuple[int, int]]) -> tuple[dict[Key, int], int]:
        """A slot for each, and how many the fullest device needs."""
        slots: dict[Key, int] = {}
        for device in range(self.schedule.num_devices):
            own = [key for key in lives if self.schedule.device_of[key[0]] == device]
            found = lowest_free_slots([lives[key] for key in own])
            slots |= zip(own, found, strict=True)
        return slots, max(slots.values(), default=-1) + 1


def _alive(
    lives: Iterable[tuple[Key, int | None, int | None]],
) -> dict[Key, tuple[int, int]]:
    return {
        key: (birth, death)
        for key, birth, death in lives
        if birth is not None and death is not None
    }


def _links(pairs: set[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pairs of devices in groups that can be exchanged at once; a device sends itself nothing."""
    groups: list[list[tuple[int, int]]] = []
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
