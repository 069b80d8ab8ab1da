"""Torch's files of schedules: a line for each device, a cell for each tick.

A file may come from anywhere, so whatever is in it ends in a schedule or in a short ValueError that
names the line. Numbers in it make nothing large: rows are filled up only if the whole grid is no
larger than any schedule needs, and stages and micro-batches are those that occur.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Sequence

from ampx.pipelining.schedules.actions import Action, parse_action
from ampx.pipelining.schedules.grid import Grid

# What torch's DualPipeV writes for a forward and a backward that share a tick.
_OVERLAPPED = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
# What torch adds to a schedule that is ready to run, and writes with it by default. In one compiled
# program all of it follows from the actions.
_ADDED = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
# Devices times ticks: 1024 devices with 16384 ticks each.
_MOST_PLACES = 2**24


def parse_csv(text: str, name: str) -> Grid:
    r"""Reads the rows of a schedule; see `Schedule.from_csv`.

    Args:
      text: the lines.
      name: of the schedule.

    Raises:
      ValueError: if a cell is not an action, a line has none, the devices of the stages are not
        clear, a stage or a micro-batch does not occur though a later one does, or the grid would
        have more than 2**24 places.

    Examples:
      >>> from ampx.pipelining.schedules.csv_format import parse_csv
      >>> parse_csv("0F0,,,0B0\n,1F0,1B0", "own").device_of
      (0, 1)
    """
    rows: list[list[Action | None]] = []
    lines = csv.reader(io.StringIO(text))
    try:
        rows.extend(_read_row(device, cells) for device, cells in enumerate(lines))
    except csv.Error as error:  # such as a cell of more than 128 KiB
        raise ValueError(f"line {lines.line_num}: {error}") from error
    actions = [action for row in rows for action in row if action is not None]
    if not actions:
        raise ValueError("the schedule is empty: give a line such as 0F0,0B0 for each device")
    for device, row in enumerate(rows):
        if not any(row):
            raise ValueError(f"line {device + 1} has no action: give one line for each device")
    length = max(map(len, rows))
    if len(rows) * length > _MOST_PLACES:
        raise ValueError(
            f"{len(rows)} devices with {length} ticks each are more than {_MOST_PLACES} places"
        )
    devices = _find_devices(rows)
    _check_complete("stages", devices)
    _check_complete("micro-batches", {action.microbatch for action in actions})
    return Grid(
        name,
        tuple((*row, *[None] * (length - len(row))) for row in rows),
        tuple(devices[stage] for stage in range(len(devices))),
        1 + max(action.microbatch for action in actions),
        any(action.kind != "F" for action in actions),
    )


def _read_row(device: int, cells: Sequence[str]) -> list[Action | None]:
    row: list[Action | None] = []
    for tick, cell in enumerate(cells):
        # One cell can become two actions, which makes the row longer than the others: rows are
        # filled up, and `aligned` puts things in their ticks.
        cell = cell.strip()
        overlapped = _OVERLAPPED.fullmatch(cell)
        try:
            for text in overlapped.groups() if overlapped else [cell]:
                is_idle = not text.strip() or _ADDED.fullmatch(text)
                row.append(None if is_idle else parse_action(text))
        except ValueError as error:
            raise ValueError(
                f"line {device + 1}, column {tick + 1}: {error}; for a file, give a pathlib.Path"
            ) from error
    return row


def _find_devices(rows: Sequence[Sequence[Action | None]]) -> dict[int, int]:
    """Finds the device of each stage: a stage is where its actions are, in one row only."""
    devices: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if action is not None and devices.setdefault(action.stage, device) != device:
                raise ValueError(
                    f"stage {action.stage} must be on one device, got {action} on device {device} "
                    f"and others on device {devices[action.stage]}"
                )
    return devices


def _check_complete(what: str, numbers: dict[int, int] | set[int]) -> None:
    """Refuses numbers with a gap. The largest may be anything, so nothing counts up to it."""
    if max(numbers) >= len(numbers):
        absent = next(number for number in itertools.count() if number not in numbers)
        raise ValueError(f"{what} must be 0 to {max(numbers)}, but there is none of {absent}")
