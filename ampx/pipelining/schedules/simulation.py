"""How long a schedule takes, and who waits.

Two machines are played. In the asynchronous one each device runs its own program: it takes the
actions of its row in their order, each as soon as its inputs have arrived. In lockstep all devices
run one program, and begin each tick together, when the slowest has ended the one before:

  async     device 0  |F0|F1|.....|B0   |..|B1   |    an action begins when its inputs are there
            device 1  |..|F0|B0   |F1|B1   |.....|
  lockstep  device 0  |F0|F1......|B0   ...|B1   |    a tick is as long as the forward, backward and
            device 1  |..|F0 B0   |F1 B1   |.....|    weight gradient of its fullest device

Here backwards take twice as long as forwards, and both machines need 9 units. They always do for
`gpipe`, `1f1b` and `interleaved` with stages that cost the same; where stages differ, or messages
take time, lockstep is slower. Costs are times of stages, in any unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args

import numpy as np

from ampx.checking import as_number, as_number_array, check_choice, join_first
from ampx.pipelining.schedules.actions import Action, Kind, needs_of, result_of
from ampx.pipelining.schedules.grid import Grid
from ampx.pipelining.schedules.ticks import Stash, lengths_with, place_in_lockstep
from ampx.summaries import show_fields, show_table
from ampx.text_tables import show_rich

Cost = float | Sequence[float]
_Costs = dict[Kind, list[float]]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The times that `Schedule.simulate` found, in the unit of the costs.

    Attributes:
      mode: `"async"` or `"lockstep"`.
      makespan: from the first action to the end of the last.
      busy: for each device, how long it computes.
      times: for each action, when it begins and ends.

    Examples:
      >>> from ampx.pipelining import gpipe
      >>> result = gpipe(num_stages=2, num_microbatches=3).simulate(forward=1, backward=2)
      >>> result.makespan, result.busy, result.idle
      (12.0, (9.0, 9.0), (3.0, 3.0))
      >>> result.efficiency, result.bubble_fraction
      (0.75, 0.25)
    """

    mode: str
    makespan: float
    busy: tuple[float, ...]
    times: dict[Action, tuple[float, float]] = dataclasses.field(repr=False)

    __repr__ = show_fields
    _repr_html_ = show_table
    __rich_console__ = show_rich

    def __str__(self) -> str:
        return (
            f"{self.mode}: {self.makespan:g} units of time, {self.bubble_fraction:.1%} idle "
            f"({', '.join(f'{idle:g}' for idle in self.idle)} by device)"
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """For each device, how long it waits between the beginning and the end of the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def efficiency(self) -> float:
        """The share of the devices' time in which they compute."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def bubble_fraction(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1 - self.efficiency


def run_schedule(
    schedule: Grid,
    *,
    mode: str = "async",
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_grad: Cost | None = None,
    weight_grad: Cost | None = None,
    communication: float = 0.0,
    stash: Stash | None = None,
) -> Simulation:
    """Plays a schedule; see `Schedule.simulate`."""
    check_choice("mode", mode, ("async", "lockstep"))
    if stash is not None:
        check_choice("stash", stash, get_args(Stash))
    costs = _find_costs(schedule.num_stages, forward, backward, input_grad, weight_grad)
    communication = as_number("communication", communication, least=0)
    # What a device computes does not depend on the mode, only when it does. `fsum` rounds once, so
    # equal costs give equal sums, in whatever order a row has them.
    if mode == "async":
        times = _play_async(schedule, costs, communication)
    else:
        times = _play_lockstep(schedule, costs, communication, stash)
    busy = tuple(
        math.fsum(costs[action.kind][action.stage] for action in row if action is not None)
        for row in schedule.rows
    )
    # Times begin at 0, with the first action.
    makespan = max((end for _, end in times.values()), default=0.0)
    if not makespan:
        raise ValueError("the step takes no time: give positive costs")
    return Simulation(mode, makespan, busy, times)


def _find_costs(
    num_stages: int,
    forward: Cost,
    backward: Cost | None,
    input_grad: Cost | None,
    weight_grad: Cost | None,
) -> _Costs:
    """Finds the time of each kind of action, for each stage.

    There are three numbers, and one equation: backward = input_grad + weight_grad. Two of them say
    the third; one leaves a choice (halves, or what it leaves of a backward of 2); all are checked.
    """

    def read(name: str, cost: Cost | None) -> list[float] | None:
        return None if cost is None else _as_cost_per_stage(name, cost, num_stages)

    whole, inputs = read("backward", backward), read("input_grad", input_grad)
    weights = read("weight_grad", weight_grad)
    if inputs is not None and weights is not None:
        sums = [i + w for i, w in zip(inputs, weights, strict=True)]
        # Close is enough: 0.1 + 0.2 is not 0.3.
        if whole is not None and not all(map(math.isclose, whole, sums)):
            raise ValueError(
                f"backward must be input_grad + weight_grad, got {backward} but {input_grad} + "
                f"{weight_grad}: leave one of the three out"
            )
    else:
        sums = whole or [2.0] * num_stages
        if weights is not None:
            inputs = _subtract(sums, weights, "weight_grad")
        else:
            inputs = inputs or [b / 2 for b in sums]
            weights = _subtract(sums, inputs, "input_grad")
    return {
        "F": _as_cost_per_stage("forward", forward, num_stages),
        "B": sums,
        "I": inputs,
        "W": weights,
    }


def _as_cost_per_stage(name: str, cost: Cost, num_stages: int) -> list[float]:
    # One number for all stages is broadcast; a list says each.
    costs = as_number_array(name, cost)
    if costs.shape not in ((), (num_stages,)):
        raise ValueError(
            f"{name} must be one number, or one for each of the {num_stages} stages of the model, "
            f"got an array of shape {costs.shape}"
        )
    if not np.all(np.isfinite(costs) & (costs >= 0)):
        raise ValueError(f"{name} must be finite and at least 0, got {cost}")
    return np.broadcast_to(costs, num_stages).tolist()


def _subtract(whole: list[float], part: list[float], name: str) -> list[float]:
    """Subtracts a part of each stage's backward from the whole."""
    rest = [w - p for w, p in zip(whole, part, strict=True)]
    for stage, left in enumerate(rest):
        if left < 0:
            raise ValueError(
                f"{name} must be at most backward, got {part[stage]} of {whole[stage]} for stage "
                f"{stage}"
            )
    return rest


def _play_async(
    schedule: Grid, costs: _Costs, communication: float
) -> dict[Action, tuple[float, float]]:
    """Runs the row of each device in order, an action as soon as its inputs are there.

    It begins at the latest of: the end of the device's last action, and the end of each action that
    it needs, plus the time of a message where that is on another device. The devices are visited in
    turn, each until it has to wait. In which order does not matter, since times depend only on
    what is before: a round in which nobody can go on is a deadlock.
    """
    orders = [[action for action in row if action is not None] for row in schedule.rows]
    # Per device: how many of its actions are done, and when the last of them ended.
    places, clocks = [0] * len(orders), [0.0] * len(orders)
    times: dict[Action, tuple[float, float]] = {}
    done: dict[Action, float] = {}
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(orders):
            while places[device] < len(order):
                action = order[places[device]]
                needs = needs_of(action, schedule.num_stages)
                if not all(need in done for need in needs):
                    break
                start = clocks[device]
                for need in needs:
                    # A message occupies no device: it runs beside what these compute.
                    away = schedule.device_of[need.stage] != device
                    start = max(start, done[need] + communication * away)
                clocks[device] = start + costs[action.kind][action.stage]
                times[action] = start, clocks[device]
                done[result_of(action)] = clocks[device]
                places[device] += 1
                progress = True
    waiting = [o[p] for o, p in zip(orders, places, strict=True) if p < len(o)]
    if waiting:
        raise ValueError(
            f"schedule {schedule.name!r}: the devices wait for each other at "
            f"{join_first(waiting)}: call validate()"
        )
    return times


def _play_lockstep(
    schedule: Grid, costs: _Costs, communication: float, stash: Stash | None
) -> dict[Action, tuple[float, float]]:
    """Runs tick by tick. All devices begin one together; in it, `F` comes before `B` before `W`."""
    if stash is not None:  # as a program chooses its ticks, which does not know the costs
        lengths, exchange = lengths_with(stash), 0.0
    else:
        lengths = {kind: math.fsum(own) / len(own) for kind, own in costs.items()}
        exchange = communication
    placement = place_in_lockstep(schedule.rows, schedule.num_stages, lengths, exchange)
    # By tick and device; the same order within a tick as in the program.
    slots: list[list[list[Action]]] = [
        [[] for _ in schedule.rows] for _ in range(placement.num_ticks)
    ]
    for action in sorted(placement.tick_of, key=lambda action: "FBIW".index(action.kind)):
        slots[placement.tick_of[action]][schedule.device_of[action.stage]].append(action)
    times: dict[Action, tuple[float, float]] = {}
    begin = 0.0
    for tick in slots:
        longest = begin
        for actions in tick:
            # Actions of one device in one tick follow each other without waiting.
            clock = begin
            for action in actions:
                times[action] = clock, clock + costs[action.kind][action.stage]
                clock = times[action][1]
            longest = max(longest, clock)
        # Neighbours exchange at the end of the tick, and nobody goes on before: messages cannot be
        # hidden. Where nobody has anything for another device, there is no exchange.
        sends = any(_is_sent(schedule, action) for actions in tick for action in actions)
        begin = longest + communication * sends
    return times


def _is_sent(schedule: Grid, action: Action) -> bool:
    """Whether another device waits for the result of an action."""
    to = action.stage + {"F": 1, "W": 0}.get(action.kind, -1)
    if to not in range(schedule.num_stages):
        return False
    return schedule.device_of[to] != schedule.device_of[action.stage]
