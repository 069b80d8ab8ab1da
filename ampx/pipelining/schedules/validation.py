"""Whether a schedule does all of the work, once, and nothing before what it needs.

Three passes, each of which may rely on what the ones before have found right:

  1. shape    rows are of one length, every stage has a device, every device a stage
  2. order    tick by tick: each action is a known one, on its device, new, after all it needs
  3. missing  nothing that should be there is absent

Only the first fault is reported, with the ticks around it: later ones are often its consequences.

Nothing is asked of the order of micro-batches. Each has its own slots in the program, and what it
adds to sums and results says which micro-batch it is of.
"""

from __future__ import annotations

from typing import Any, get_args

from ampx.checking import shorten
from ampx.pipelining.schedules.actions import Action, Kind, needs_of, result_of
from ampx.pipelining.schedules.grid import Grid
from ampx.pipelining.schedules.rendering import render_grid

# Ticks, and devices, that the message shows on either side of the fault: thousands help nobody.
_SHOWN = 10
# Which other kinds of the same stage and micro-batch an action does not go with.
_EXCLUDES: dict[Kind, tuple[Kind, ...]] = {"F": (), "B": ("I", "W"), "I": ("B",), "W": ("B",)}


def check_schedule(schedule: Grid) -> None:
    """Raises a ValueError about the first fault; see `Schedule.validate`."""
    fault = _find_fault_of_shape(schedule)
    if fault is not None:
        raise ValueError(f"schedule {schedule.name!r}: {fault}")
    found = _find_fault_of_order(schedule) or _find_missing(schedule)
    if found is not None:
        tick, device, fault = found
        devices = range(schedule.num_devices)[max(0, device - _SHOWN) : device + _SHOWN + 1]
        grid = render_grid(schedule, max(0, tick - _SHOWN), tick + _SHOWN + 1, devices)
        raise ValueError(f"schedule {schedule.name!r}: {fault}\n{grid}")


def _find_fault_of_shape(schedule: Grid) -> str | None:
    """Finds what keeps the rows from being a grid."""
    devices, microbatches = schedule.num_devices, schedule.num_microbatches
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        return f"num_microbatches must be a positive int, got {microbatches!r}"
    if not devices or not schedule.num_stages:
        return f"it needs devices and stages, got {devices} rows and {schedule.num_stages} stages"
    for stage, device in enumerate(schedule.device_of):
        if device not in range(devices):
            return f"stage {stage} is on device {device!r}, but there are rows for {devices}"
    used = set(schedule.device_of)
    for device, row in enumerate(schedule.rows):
        if device not in used:
            return f"device {device} has no stage: device_of is {shorten(schedule.device_of)}"
        if len(row) != len(schedule.rows[0]):
            return (
                f"rows must be of one length, got {len(row)} ticks for device {device} and "
                f"{len(schedule.rows[0])} for device 0: fill up with None, or call aligned()"
            )
        for tick, action in enumerate(row):
            if action is not None and not isinstance(action, Action):
                return (
                    f"device {device} has {shorten(action)} at tick {tick}: a place holds an "
                    "Action or None; parse_action reads text"
                )
    return None


def _find_fault_of_order(schedule: Grid) -> tuple[int, int, str] | None:
    """Finds the first fault of an action that is there: its tick, its device, and what it is."""
    tick_of = _find_first_ticks(schedule)
    seen: set[Action] = set()
    for tick, column in enumerate(zip(*schedule.rows, strict=True)):
        for device, action in enumerate(column):
            if action is None:
                continue
            fault = _find_unknown(schedule, action, device)
            # In this order, since each check may rely on those before: what a known action needs,
            # for one, can be looked up.
            if fault is None and action in seen:
                fault = "is there for the second time: do each action once"
            if fault is None:
                fault = _find_double_backward(action, seen) or _find_missing_input(
                    schedule, action, tick, tick_of
                )
            if fault is not None:
                where = f"at tick {tick} on device {device}"
                return tick, device, f"{_describe_action(action)} {where} {fault}"
            seen.add(action)
    return None


def _find_first_ticks(schedule: Grid) -> dict[Action, int]:
    """Finds the first tick of every result."""
    # All rows are read before any is judged, to tell what comes too late from what is missing.
    ticks: dict[Action, int] = {}
    for row in schedule.rows:
        for tick, action in enumerate(row):
            if action is not None:
                result = result_of(action)
                ticks[result] = min(tick, ticks.get(result, tick))
    return ticks


def _describe_action(action: Action) -> str:
    words = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    what = words.get(action.kind, "unknown action")
    return f"{action} ({what} of stage {action.stage}, micro-batch {action.microbatch})"


def _find_unknown(schedule: Grid, action: Action, device: int) -> str | None:
    if action.kind not in get_args(Kind):
        return f"is of kind {action.kind!r}: use one of {', '.join(get_args(Kind))}"
    if not _is_index(action.stage, schedule.num_stages):
        return f"is of an unknown stage: the stages are 0 to {schedule.num_stages - 1}"
    if not _is_index(action.microbatch, schedule.num_microbatches):
        return (
            "is of an unknown micro-batch: the micro-batches are 0 to "
            f"{schedule.num_microbatches - 1}"
        )
    if not schedule.has_backward and action.kind != "F":
        return "is in a schedule without backward: has_backward is False"
    if schedule.device_of[action.stage] != device:
        return (
            f"is on the wrong device: stage {action.stage} is on device "
            f"{schedule.device_of[action.stage]}"
        )
    return None


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _find_double_backward(action: Action, seen: set[Action]) -> str | None:
    """Finds a backward that is there whole and in halves; it must be one or the other."""
    for kind in _EXCLUDES[action.kind]:
        other = action._replace(kind=kind)
        if other in seen:
            return f"is there besides {other}: a backward is either B, or I and W"
    return None


def _find_missing_input(
    schedule: Grid, action: Action, tick: int, tick_of: dict[Action, int]
) -> str | None:
    for need in needs_of(action, schedule.num_stages):
        done = tick_of.get(need)
        if done is None or done >= tick:
            where = "which is missing" if done is None else f"which is at tick {done}"
            what = {"F": "the forward", "I": "the backward"}[need.kind]
            return (
                f"comes before its input, {what} of stage {need.stage}, micro-batch "
                f"{need.microbatch}, {where}"
            )
    return None


def _find_missing(schedule: Grid) -> tuple[int, int, str] | None:
    """Finds the first action that is nowhere; what is there is known to be right."""
    # What is there is known, and nothing is there twice, so counting would tell whether something
    # is missing. Looking for the first one that is costs little more, and says what to add.
    there = {action for row in schedule.rows for action in row if action is not None}
    tick = len(schedule.rows[0])
    for microbatch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            whole = Action(stage, "B", microbatch)
            wanted: tuple[Kind, ...] = ("F",)
            if schedule.has_backward and whole not in there:
                wanted = ("F", "I", "W")
            for kind in wanted:
                action = whole._replace(kind=kind)
                if action not in there:
                    # Neither half is there: then it is the whole that is missing.
                    halved = kind == "I" and whole._replace(kind="W") not in there
                    action = whole if halved else action
                    fault = f"{_describe_action(action)} is missing from all {tick} ticks"
                    return tick, schedule.device_of[stage], fault
    return None
