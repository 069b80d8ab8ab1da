"""Pictures of pipeline schedules: a row for each device, time from left to right.

Boxes are as long as the simulation says, so a picture shows what costs mean for a schedule, which
its grid of equal ticks does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampx.drawing import check_axes, make_axes, mix_colors, width_in_points
from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.grid import Grid
from ampx.pipelining.schedules.simulation import Simulation, run_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A colour for each kind of action, from the first chunk of a device to its last: the later, the
# darker. Numbers are black or white, whichever can be read.
_KINDS = {
    "F": ("forward", "#BBD9F0", "#1F5F99"),
    "B": ("backward", "#F6CFA8", "#B8560B"),
    "I": ("input gradient", "#F6CFA8", "#B8560B"),
    "W": ("weight gradient", "#BFE3C8", "#1E7A3E"),
}
_MIDDLE = 0.3  # how dark the only stage of a device is, from 0 to 1
_WAITING = "#ECECEC"


def plot_schedule(schedule: Grid, *, axes: Axes | None = None, **simulation: Any) -> Axes:
    """Draws what each device of a pipeline does when, as a simulation finds it.

    A row is a device, a box an action with the number of its micro-batch, where that fits. Of
    several stages on a device the later ones are darker. Grey is waiting.

    Args:
      schedule: what to draw.
      axes: where to draw; a new figure by default.
      **simulation: what `Schedule.simulate` takes: `mode`, `forward`, `backward` and so on.

    Returns:
      The axes. Their `figure` has `savefig`.

    Raises:
      ImportError: if matplotlib is missing.
      ValueError: as `Schedule.simulate`.

    Examples:
      >>> import ampx.plotting
      >>> from ampx.pipelining import one_f_one_b
      >>> axes = ampx.plotting.plot_schedule(one_f_one_b(num_stages=4, num_microbatches=8))
      >>> axes.get_title(loc="left")
      '1f1b: 4 stages on 4 devices, 8 micro-batches'
      >>> axes.get_title(loc="right")
      '27.3% idle'
      >>> axes.figure.savefig("1f1b.png")  # doctest: +SKIP
    """
    if not isinstance(schedule, Grid):
        raise TypeError(
            "schedule must be a Schedule, such as ampx.pipelining.one_f_one_b(4, 32), got "
            f"{schedule!r}"
        )
    result = run_schedule(schedule, **simulation)
    if axes is None:
        axes = make_axes(11, 1.3 + 0.42 * schedule.num_devices)
    check_axes(axes)
    for device in range(schedule.num_devices):
        axes.broken_barh([(0, result.makespan)], (device - 0.42, 0.84), color=_WAITING, zorder=0)
    _draw_actions(axes, schedule, result)
    axes.set_xlim(0, result.makespan)
    axes.set_ylim(schedule.num_devices - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_devices), map(str, range(schedule.num_devices)))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylabel("device")
    chunked = schedule.num_stages > schedule.num_devices
    axes.set_xlabel(
        "time" + (" (darker: later stages of the model)" if chunked else ""), loc="left"
    )
    shape = f"{schedule.num_stages} stages on {schedule.num_devices} devices"
    title = f"{schedule.name}: {shape}, {schedule.num_microbatches} micro-batches"
    axes.set_title(title + (", in lockstep" if result.mode == "lockstep" else ""), loc="left")
    axes.set_title(f"{result.bubble_fraction:.1%} idle", loc="right")
    _draw_legend(axes, {action.kind for action in result.times})
    return axes


def _draw_actions(axes: Axes, schedule: Grid, result: Simulation) -> None:
    bars: dict[tuple[int, str, float], list[tuple[float, float]]] = {}
    width = width_in_points(axes)
    # Font size in points: 0.55 of the height of a row, of which a box fills 0.84.
    size = min(9.0, 0.55 * axes.bbox.height / axes.figure.dpi * 72 / schedule.num_devices)
    shortest = min(end - start for start, end in result.times.values()) / result.makespan * width
    for action, (start, end) in result.times.items():
        device, shade = _find_place(schedule, action)
        bars.setdefault((device, action.kind, shade), []).append((start, end - start))
        text = str(action.microbatch)
        # A digit is about 0.6 of the font size wide. Hundreds of numbers in a few pixels would be
        # noise, and slow to draw: those that do not fit are left out.
        if size >= 4 and (end - start) / result.makespan * width > 0.65 * size * (len(text) + 0.4):
            axes.text(
                (start + end) / 2,
                device,
                text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color="white" if shade > 0.5 else "black",
                clip_on=True,
            )
    # One artist for all boxes of a colour on a device, not one for each of thousands of boxes.
    for (device, kind, shade), spans in bars.items():
        axes.broken_barh(
            spans,
            (device - 0.42, 0.84),
            facecolor=mix_colors(*_KINDS[kind][1:], shade),
            edgecolor="white",
            linewidth=min(0.6, shortest / 8),
        )


def _find_place(schedule: Grid, action: Action) -> tuple[int, float]:
    """Finds the device of an action, and how dark its stage is: 0 for the first, 1 for the last."""
    device = schedule.device_of[action.stage]
    stages = schedule.stages_on(device)
    return device, stages.index(action.stage) / (len(stages) - 1) if len(stages) > 1 else _MIDDLE


def _draw_legend(axes: Axes, kinds: set[str]) -> None:
    for kind, (label, light, dark) in _KINDS.items():
        if kind in kinds:
            axes.broken_barh([], (0, 0), facecolor=mix_colors(light, dark, _MIDDLE), label=label)
    axes.broken_barh([], (0, 0), facecolor=_WAITING, label="waiting")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=2, ncols=5, frameon=False)
