"""The bare rows of a pipeline schedule: all that a look at it needs.

What reads schedules (checks, liveness, simulation, text, pictures) takes a `Grid`. `Schedule` is a
`Grid` with those readers as methods. It imports them, so they cannot import it.
"""

from __future__ import annotations

import dataclasses

from ampx.checking import as_bool, as_int, check_word, describe
from ampx.pipelining.schedules.actions import Action


@dataclasses.dataclass(frozen=True)
class Grid:
    """The rows of a schedule, without what can be done with them; its fields are `Schedule`'s."""

    name: str
    rows: tuple[tuple[Action | None, ...], ...]
    device_of: tuple[int, ...]
    num_microbatches: int
    has_backward: bool = True

    def __post_init__(self) -> None:
        # Lists are welcome, but a schedule is hashed when it is an argument of a compiled function.
        check_word("name", self.name)
        for name in ("rows", "device_of"):
            if not isinstance(value := getattr(self, name), list | tuple):
                raise TypeError(f"{name} must be a tuple, {describe(value)}")
        for row in self.rows:
            if not isinstance(row, list | tuple):
                raise TypeError(f"rows must be a tuple of rows of actions, got the row {row!r}")
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        places = tuple(as_int("device_of", device) for device in self.device_of)
        object.__setattr__(self, "device_of", places)
        object.__setattr__(self, "has_backward", as_bool("has_backward", self.has_backward))

    @property
    def num_devices(self) -> int:
        """How many devices there are along the stage axis."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """How many stages the model has; with chunks, several on each device."""
        return len(self.device_of)

    @property
    def num_ticks(self) -> int:
        """How many columns the grid has."""
        return max(map(len, self.rows), default=0)

    @property
    def splits_backward(self) -> bool:
        """Whether some backwards come in two halves."""
        return any(action is not None and action.kind == "I" for row in self.rows for action in row)

    def stages_on(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in the order of the model."""
        return tuple(s for s, d in enumerate(self.device_of) if d == device)


def number_chunks(schedule: Grid) -> tuple[int, ...]:
    """Finds for each stage which of its device's chunks it is, counted from 0 along the model."""
    return tuple(
        schedule.stages_on(device).index(stage) for stage, device in enumerate(schedule.device_of)
    )
