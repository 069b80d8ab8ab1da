"""A pipeline schedule as data: which device does what, in which order.

A schedule can be checked (`validate`), timed (`simulate`), measured (`liveness`), drawn (`render`,
`plot`) and exchanged with torch (`from_csv`, `to_csv`); `ampx.pipelining.value_and_grad` runs it.
What is run is the order of each row, not its ticks: the compiled program has ticks of its own, see
`ampx.pipelining.schedules.ticks`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ampx.checking import describe, join_first
from ampx.pipelining.schedules.actions import (
    Action,
    merge_backwards,
    needs_of,
    result_of,
    split_backwards,
)
from ampx.pipelining.schedules.csv_format import parse_csv
from ampx.pipelining.schedules.grid import Grid
from ampx.pipelining.schedules.liveness import Liveness, find_liveness
from ampx.pipelining.schedules.rendering import render_grid
from ampx.pipelining.schedules.simulation import Cost, Simulation, run_schedule
from ampx.pipelining.schedules.ticks import Stash
from ampx.pipelining.schedules.validation import check_schedule
from ampx.summaries import show_fields, show_table
from ampx.text_tables import show_rich

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Schedule(Grid):
    """Which device does what, in which order.

    The rows are a grid: each action takes one tick, and what it needs is done in an earlier one.
    `simulate` says how long it takes when actions are not equally long.

    Attributes:
      name: what it is called.
      rows: for each device its actions; column t is tick t, and None an idle tick.
      device_of: for each stage of the model, counted along the model, the device that runs it.
      num_microbatches: into how many parts the batch of a step is divided.
      has_backward: whether there are gradients; False for inference.

    Examples:
      >>> from ampx.pipelining import one_f_one_b
      >>> print(one_f_one_b(num_stages=2, num_microbatches=3))
      1f1b: 2 stages on 2 devices, 3 micro-batches, 8 ticks, 25.0% idle
      tick      0  1  2  3  4  5  6  7
      device 0  F0 F1 .  B0 F2 B1 .  B2
      device 1  .  F0 B0 F1 B1 F2 B2 .
    """

    __repr__ = show_fields
    _repr_html_ = show_table
    __rich_console__ = show_rich

    def __str__(self) -> str:
        return self.render()

    def aligned(self) -> Schedule:
        r"""Moves each action to the first tick that it can have; the order on each device stays.

        Returns:
          A schedule without avoidable idle ticks, whose ticks keep what each action needs.

        Raises:
          ValueError: if the devices wait for each other for ever.

        Examples:
          >>> from ampx.pipelining import Schedule
          >>> lists = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
          >>> print(lists.aligned().to_csv())
          0F0,0F1,,0B0,,0B1
          ,1F0,1B0,1F1,1B1,
          <BLANKLINE>
        """
        # Tick by tick, each device looks only at the head of its order. Heads are judged by what
        # was done in earlier ticks: `done` grows after the whole column is chosen. So an action
        # and what it needs never share a tick.
        orders = [[action for action in row if action is not None] for row in self.rows]
        rows: list[list[Action | None]] = [[] for _ in orders]
        done: set[Action] = set()
        places = [0] * len(orders)
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            heads = [order[place : place + 1] for place, order in zip(places, orders, strict=True)]
            column = [
                head[0] if head and done.issuperset(needs_of(head[0], self.num_stages)) else None
                for head in heads
            ]
            if not any(column):
                waiting = join_first(
                    f"device {device} for the inputs of {head[0]}"
                    for device, head in enumerate(heads)
                    if head
                )
                raise ValueError(
                    f"schedule {self.name!r}: the devices wait for each other for ever: {waiting}. "
                    "Change the order of their actions"
                )
            for device, action in enumerate(column):
                rows[device].append(action)
                if action is not None:
                    places[device] += 1
                    done.add(result_of(action))
        return dataclasses.replace(self, rows=tuple(map(tuple, rows)))

    def merged(self) -> Schedule:
        """The schedule with a `B` for every `I` that its own `W` follows at once, aligned.

        Examples:
          >>> from ampx.pipelining import zero_bubble
          >>> print(zero_bubble(num_stages=1, num_microbatches=2).merged().to_csv().strip())
          0F0,0B0,0F1,0B1
        """
        return self._with_orders([merge_backwards(row) for row in self.rows])

    def split(self) -> Schedule:
        """The schedule with an `I` and a `W` for every `B`, aligned: undoes `merged`.

        Examples:
          >>> from ampx.pipelining import gpipe
          >>> print(gpipe(num_stages=1, num_microbatches=1).split().to_csv().strip())
          0F0,0I0,0W0
        """
        return self._with_orders([split_backwards(row) for row in self.rows])

    def _with_orders(self, orders: Sequence[Sequence[Action]]) -> Schedule:
        return dataclasses.replace(self, rows=tuple(map(tuple, orders))).aligned()

    def validate(self) -> Schedule:
        r"""Looks for faults.

        Every stage goes forward with every micro-batch once, and backward once, whole or in two
        halves, on its own device, and after what it needs. Any order in which that holds is right,
        and `ampx.pipelining.value_and_grad` runs it.

        Returns:
          The schedule itself, so that calls can be chained.

        Raises:
          ValueError: about the first fault: which stage, micro-batch and tick, with the ticks
            around it.

        References:
          `_validate_schedule` in torch.distributed.pipelining.

        Examples:
          >>> from ampx.pipelining import Schedule
          >>> Schedule.from_csv("0F0,0B0\n1F0,1B0").validate()
          Traceback (most recent call last):
          ValueError: schedule 'csv': 1F0 (forward of stage 1, micro-batch 0) at tick 0 on device 1
          comes before its input, the forward of stage 0, micro-batch 0, which is at tick 0
          csv: 2 stages on 2 devices, 1 micro-batches, 2 ticks, 0.0% idle
          tick      0  1
          device 0  F0 B0
          device 1  F0 B0
        """
        check_schedule(self)
        return self

    def simulate(
        self,
        *,
        forward: Cost = 1.0,
        backward: Cost | None = None,
        input_grad: Cost | None = None,
        weight_grad: Cost | None = None,
        communication: float = 0.0,
        mode: Literal["async", "lockstep"] = "async",
        stash: Stash | None = None,
    ) -> Simulation:
        """Finds how long a step takes when actions are not equally long, and who waits.

        Args:
          forward: time of a forward, in any unit: one number, or one for each stage of the model.
            With chunks, a stage is a part of what a device has.
          backward: time of a whole backward. The default is the sum of its halves where both are
            given, else 2.
          input_grad: time of the half that gives gradients of the stage's input. The default is
            what `weight_grad` leaves of `backward`, or half of it.
          weight_grad: time of the half that gives gradients of the weights; as `input_grad`.
          communication: time until another device has a result. Devices go on computing meanwhile,
            except in lockstep, where each tick ends with it if anybody sends.
          mode: `"async"`: a device goes on as soon as it has its inputs, as in a program for each
            device. `"lockstep"`: all devices end a tick together, as in ampx's one compiled
            program. A tick has room for a forward, a backward and a weight gradient, or for one
            action, whichever takes less time.
          stash: in lockstep, choose the ticks as `value_and_grad` does with this `stash`: for
            forwards and weight gradients of 1, and a first half of a backward of 1, or of 2 with
            `"inputs"`, where it computes the forward again. None: for the costs given here.

        Returns:
          A `Simulation`, with the times of all actions.

        Raises:
          ValueError: if costs are negative, not finite, too few, or do not add up, if `mode` or
            `stash` is unknown, or if the devices wait for each other for ever.

        Examples:
          >>> from ampx.pipelining import one_f_one_b
          >>> result = one_f_one_b(num_stages=4, num_microbatches=8).simulate(forward=1, backward=2)
          >>> result.makespan, round(result.bubble_fraction, 3)
          (33.0, 0.273)
        """
        return run_schedule(
            self,
            mode=mode,
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            communication=communication,
            stash=stash,
        )

    def liveness(
        self,
        *,
        merge_chunks: bool = False,
        mode: Literal["async", "lockstep"] = "lockstep",
        stash: Stash = "inputs",
    ) -> Liveness:
        """Finds which activations each device holds, tick by tick, and how many places they need.

        A stage holds the activations of a micro-batch from its forward to its backward, or to its
        weight gradient where the backward is done in halves.

        Args:
          merge_chunks: whether a micro-batch has one place for all stages of a device, from the
            first forward to the last backward.
          mode: `"lockstep"`: in the ticks of ampx's one compiled program, so this is what a step
            allocates. `"async"`: in the ticks of this grid, where each device does one action at a
            time. These are the figures of the papers. They are mostly smaller, since the program
            runs forwards as early as they can run.
          stash: in lockstep, that of the program: how long backwards take says which ticks it has.

        Returns:
          A `Liveness`.

        Raises:
          ValueError: if a backward has no forward before it, a forward has no backward, `mode` or
            `stash` is unknown, or the devices wait for each other for ever.

        References:
          `analyze_pipeline_activation_liveness` in torch.distributed.pipelining.

        Examples:
          >>> from ampx.pipelining import gpipe, one_f_one_b
          >>> gpipe(num_stages=4, num_microbatches=8).liveness().peak
          (8, 8, 8, 8)
          >>> one_f_one_b(num_stages=4, num_microbatches=8).liveness().peak
          (7, 5, 3, 1)
          >>> one_f_one_b(num_stages=4, num_microbatches=8).liveness(mode="async").peak
          (4, 3, 2, 1)
        """
        return find_liveness(self, merge_chunks=merge_chunks, mode=mode, stash=stash)

    def render(self, start: int = 0, stop: int | None = None) -> str:
        """Draws the grid as text; `print(schedule)` shows all of it.

        Where a device has several stages, every action says its stage: `2F0` is the forward of
        stage 2 with micro-batch 0. Else `F0` is enough.

        Args:
          start: the first tick to show.
          stop: the tick before which to stop; all by default.

        Returns:
          A headline, a line of ticks and a line for each device.

        Examples:
          >>> from ampx.pipelining import interleaved
          >>> print(interleaved(num_stages=2, num_microbatches=2).render(stop=6))
          interleaved: 4 stages on 2 devices, 2 micro-batches, 10 ticks, 20.0% idle
          tick                    0   1   2   3   4   5
          device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   2B0
          device 1 (stages 1, 3)  .   1F0 1F1 3F0 3B0 3F1
        """
        return render_grid(self, start, stop)

    def plot(self, axes: Axes | None = None, **simulation: Any) -> Axes:
        """Draws which device does what when; see `ampx.plotting.plot_schedule`.

        Args:
          axes: where to draw; a new figure by default.
          **simulation: what `simulate` takes.

        Returns:
          The axes. Their `figure` has `savefig`.

        Raises:
          ImportError: if matplotlib is missing.

        Examples:
          >>> from ampx.pipelining import one_f_one_b
          >>> one_f_one_b(4, 8).plot(backward=2).figure.savefig("1f1b.png")  # doctest: +SKIP
        """
        from ampx.pipelining.schedules.schedule_plots import plot_schedule

        return plot_schedule(self, axes=axes, **simulation)

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], *, name: str = "csv") -> Schedule:
        r"""Reads torch's format: a line for each device, a column for each tick.

        Which device has which stage, and how many micro-batches there are, follows from the
        actions. What torch would overlap, `(0F7;7B3)OVERLAP_F_B`, is done one after the other. What
        it adds to send, receive, gather and reduce, such as `0SEND_F7` and `0UNSHARD`, is left out.

        Args:
          source: the text itself, or the path (a `pathlib.Path`) of a file with it.
          name: of the schedule.

        Returns:
          The schedule, not yet validated. Files that list actions without idle ticks, as most of
          torch's, need `aligned()`.

        Raises:
          TypeError: if `source` or `name` is of another kind.
          OSError: if a file cannot be read.
          ValueError: if the text is not such a file, or has gaps: about the first line that is
            wrong. Nothing in a file can make a schedule or an error that is much larger than it.

        Examples:
          >>> from ampx.pipelining import Schedule
          >>> schedule = Schedule.from_csv("0F0,,,0B0\n,1F0,1B0,").validate()
          >>> schedule.device_of, schedule.num_microbatches
          ((0, 1), 1)
        """
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"source must be text such as '0F0,0B0' or a pathlib.Path, {describe(source)}"
            )
        # A string is the text itself, never a path: "0F0,0B0" could be either.
        text = source if isinstance(source, str) else Path(source).read_text(encoding="utf-8-sig")
        grid = parse_csv(text, name)
        return cls(**{field.name: getattr(grid, field.name) for field in dataclasses.fields(grid)})

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the rows in torch's format, which `from_csv` reads.

        Args:
          path: a file to write, too.

        Returns:
          A line for each device; idle ticks are blank.

        Raises:
          TypeError: if `path` is none.
          OSError: if the file cannot be written.

        Examples:
          >>> from ampx.pipelining import gpipe
          >>> print(gpipe(num_stages=2, num_microbatches=1).to_csv().strip())
          0F0,,,0B0
          ,1F0,1B0,
        """
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a string or a pathlib.Path, {describe(path)}")
        # Two idle ticks at the end of a row are two commas: rows stay equally long.
        lines = (",".join("" if a is None else str(a) for a in row) for row in self.rows)
        text = "".join(f"{line}\n" for line in lines)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text
