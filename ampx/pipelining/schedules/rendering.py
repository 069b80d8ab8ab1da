"""A schedule as text: a row for each device, a column for each tick, `.` where it is idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampx.checking import as_int, join_first
from ampx.pipelining.schedules.grid import Grid

_IDLE = "."


def render_grid(
    schedule: Grid, start: int = 0, stop: int | None = None, devices: range | None = None
) -> str:
    """Draws the grid of a schedule as text, or that of some devices; see `Schedule.render`.

    A schedule with faults is drawn too, as far as that goes: it is part of the message about them.
    """
    num_ticks = schedule.num_ticks
    start = as_int("start", start)
    stop = None if stop is None else as_int("stop", stop)
    # As a slice of a list would be: `stop` may be None, or beyond the end.
    ticks = range(*slice(start, stop).indices(num_ticks))
    chunked = schedule.num_stages > schedule.num_devices
    columns = [[str(tick) for tick in ticks]]
    devices = range(schedule.num_devices) if devices is None else devices
    for device in devices:
        columns.append([_write_cell(schedule.rows[device], tick, chunked) for tick in ticks])
    # All columns are as wide as the widest cell, so that ticks of different devices stand in line.
    width = max((len(cell) for row in columns for cell in row), default=1)
    labels = ["tick", *(_write_label(schedule, device, chunked) for device in devices)]
    margin = max(map(len, labels))
    lines = (
        f"{label:<{margin}}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for label, row in zip(labels, columns, strict=True)
    )
    return "\n".join([_write_headline(schedule, num_ticks), *lines])


def _write_headline(schedule: Grid, num_ticks: int) -> str:
    # In ticks of equal length; `simulate` knows the share of idle time.
    used = sum(action is not None for row in schedule.rows for action in row)
    idle = 1 - used / max(1, num_ticks * len(schedule.rows))
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices, "
        f"{schedule.num_microbatches} micro-batches, {num_ticks} ticks, {idle:.1%} idle"
    )


def _write_label(schedule: Grid, device: int, chunked: bool) -> str:
    if not chunked:
        return f"device {device}"
    return f"device {device} (stages {join_first(schedule.stages_on(device), most=16)})"


def _write_cell(row: Sequence[Any], tick: int, chunked: bool) -> str:
    """Writes one action. Without chunks the row says which stage it is, so the cell need not."""
    # A schedule with faults may have rows that are too short, and anything in a cell.
    action = row[tick] if tick < len(row) else None
    if action is None:
        return _IDLE
    text = str(action)
    return text if chunked or not hasattr(action, "kind") else f"{action.kind}{action.microbatch}"
