"""Pictures of training: losses above, loss scales and skipped steps below.

The panels share the axis of steps. A jump of the loss, a fall of the scale and a change of the
precision can so be seen to belong together. Runs that agree lie on one another, so a panel between
the two may show how far each is from a reference. Names stand at the ends of their lines, and each
skipped step is a tick above the scales, in a row for each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ampx.checking import as_positive_int, suggest
from ampx.drawing import COLORS, check_axes, import_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.055  # height of a line of small print, as a share of the panel of losses
_RUG_ROW = 0.08  # and of a row of ticks, as one of the panel of scales


def plot_training(
    histories: Mapping[str, Any],
    *,
    smoothing: int | None = None,
    reference: str | None = None,
    axes: Sequence[Axes] | None = None,
) -> tuple[Axes, ...]:
    """Draws loss curves and, below them, the loss scale with every skipped step marked.

    The curves are drawn from wide to narrow, so that runs which agree show as one striped line. A
    run whose loss stops being finite ends in a cross. The losses of the runs that learn fill the
    panel; a run that ends above where it began may leave it, and a label says where. Where a run
    follows a precision schedule, a dashed line marks each change of its phase.

    Args:
      histories: from a run's name to what it reported: a list of `StepReport`, one report whose
        fields are arrays (as `lax.scan` returns it), or a mapping with the keys `"loss"` and, if
        there was a loss scale, `"loss_scale"` and `"overflow"`, and with a precision schedule
        `"phase"`. Lists and arrays are welcome.
      smoothing: number of steps to average over; 1 shows the raw losses alone. The default is a
        twenty-fifth of the longest run.
      reference: the name of a run: a panel between the two shows the difference of each other
        run's smoothed loss from that run's.
      axes: two axes to draw on, three with a reference; a new figure by default.

    Returns:
      The axes of the losses, of the differences if there is a reference, and of the scales. Their
      `figure` has `savefig`.

    Raises:
      ImportError: if matplotlib is missing.
      TypeError: for `axes` that are not as many of matplotlib's as there are panels.
      ValueError: if there is no history, or one whose arrays do not fit together, or no run of the
        reference's name.

    Examples:
      >>> import ampx.plotting
      >>> skips = {
      ...     "loss": [3.0, 3.0, 2.5],
      ...     "loss_scale": [4, 2, 2],
      ...     "overflow": [True, False, False],
      ... }
      >>> losses, scales = ampx.plotting.plot_training(
      ...     {"O2": skips, "O0": {"loss": [3.0, 2.7, 2.5]}}
      ... )
      >>> losses.get_legend_handles_labels()[1]
      ['O2', 'O0']
      >>> losses.figure.savefig("training.png")  # doctest: +SKIP
    """
    if not isinstance(histories, Mapping):
        raise TypeError(f"histories must be a mapping, as in {{'O2': reports}}, got {histories!r}")
    runs = {name: _read_run(name, history) for name, history in histories.items()}
    if not runs:
        raise ValueError("histories is empty: give at least one run, as in {'O2': reports}")
    longest = max(len(run.loss) for run in runs.values())
    width = max(1, longest // 25) if smoothing is None else as_positive_int("smoothing", smoothing)
    if reference is not None and not (isinstance(reference, str) and reference in runs):
        raise ValueError(
            f"reference={reference!r} is none of the runs {sorted(runs)}{suggest(reference, runs)}"
        )
    number = 2 if reference is None else 3
    panels = _new_axes(number) if axes is None else axes
    if not isinstance(panels, Sequence | np.ndarray) or len(panels) != number:
        count = {2: "a pair", 3: "three"}[number]
        raise TypeError(f"axes must be {count} of matplotlib's, got {axes!r}")
    for panel in panels:
        check_axes(panel)
    loss_axes, *between, scale_axes = panels

    rows = 0  # of ticks for skipped steps
    for index, (name, run) in enumerate(runs.items()):
        # The first run is the widest line and lies at the bottom.
        style = dict(
            color=COLORS[index % len(COLORS)],
            linewidth=1.0 + 3.2 * (1 - (index + 1) / len(runs)),
            zorder=2 + index,
        )
        _draw_loss(loss_axes, name, run.loss, width, style)
        if np.any(run.scale != 1) or np.any(run.skipped):  # else there is no loss scale to show
            _draw_scale(scale_axes, run.scale, style)
        if np.any(run.skipped):
            _draw_skips(scale_axes, name, run.skipped, rows, style["color"])
            rows += 1
        _mark_switches(panels, run.phase, style["color"])
    _name_switches(loss_axes, [run.phase for run in runs.values()])

    # Ends are marked once the limits are known: a loss that has left the picture ends at its top.
    bottom, top = _limits([run.loss for run in runs.values()], width)
    loss_axes.set_ylim(bottom, top)
    curves = {name: _moving_average(run.loss, width) for name, run in runs.items()}
    left = _mark_exits(loss_axes, curves, top)
    for index, run in enumerate(runs.values()):
        _mark_end(loss_axes, run.loss, top, COLORS[index % len(COLORS)])
    _name_ends(
        loss_axes,
        {
            _describe(name, runs[name].loss): curve
            for name, curve in curves.items()
            if name not in left
        },
    )
    loss_axes.set_ylabel("training loss")
    for panel in between:
        _draw_differences(panel, curves, reference, [name for name in runs if name not in left])
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylabel("loss scale")
    scale_axes.set_xlabel("step")
    return tuple(panels)


def _new_axes(number: int) -> list[Axes]:
    heights = {2: (3, 2), 3: (3, 2, 2)}[number]
    _, found = import_pyplot().subplots(
        number,
        sharex=True,
        figsize=(8, 6 if number == 2 else 8),
        height_ratios=heights,
        layout="constrained",
    )
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    return list(found)


class _Run(NamedTuple):
    """What happened in each step; without a loss scale it is 1 and nothing is skipped.

    Attributes:
      loss: float64 of shape (steps,).
      scale: float64 of shape (steps,), the loss scale that each step used.
      skipped: bool of shape (steps,).
      phase: integers of shape (steps,), of a precision schedule; all 0 without one.
    """

    loss: np.ndarray
    scale: np.ndarray
    skipped: np.ndarray
    phase: np.ndarray


def _read_run(name: str, history: Any) -> _Run:
    loss = _field(history, "loss")
    if loss is None or loss.ndim != 1 or not loss.size:
        raise ValueError(f"run {name!r} must have a loss for each of its steps")
    scale, skipped = _field(history, "loss_scale"), _field(history, "overflow")
    scale = np.ones(loss.shape) if scale is None else scale
    skipped = np.zeros(loss.shape) if skipped is None else skipped
    if not loss.shape == scale.shape == skipped.shape:
        raise ValueError(
            f"run {name!r} must have as many losses as scales and overflows, got {loss.size}, "
            f"{scale.size} and {skipped.size}"
        )
    phase = _field(history, "phase")
    phase = np.zeros(loss.shape, int) if phase is None else phase
    if phase.shape != loss.shape:
        raise ValueError(
            f"run {name!r} must have as many losses as phases, got {loss.size} and {phase.size}"
        )
    return _Run(loss.astype(float), scale.astype(float), skipped.astype(bool), phase)


def _field(history: Any, field: str) -> np.ndarray | None:
    """One field of a history of any kind, as an array of shape (steps,); None if it has none."""
    # Three kinds: a mapping, reports one by one, one report of arrays. A field that is None, or is
    # so in any report, is not there.
    if isinstance(history, Mapping):
        values = history.get(field)
    elif isinstance(history, list):
        values = [getattr(report, field, None) for report in history]
        values = None if any(value is None for value in values) else values
    else:
        values = getattr(history, field, None)
    if values is None:
        return None
    found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"histories: {field} must be numbers, got {values!r}")
    return found


def _draw_loss(axes: Axes, name: str, loss: np.ndarray, width: int, style: dict[str, Any]) -> None:
    steps = np.arange(1, len(loss) + 1)
    axes.plot(steps, _moving_average(loss, width), label=_describe(name, loss), **style)
    if width > 1:
        axes.plot(steps, loss, color=style["color"], linewidth=0.5, alpha=0.2, zorder=1)


def _describe(name: str, loss: np.ndarray) -> str:
    is_finite = np.isfinite(loss[-1])
    return name if is_finite else f"{name} (not finite after step {_last_finite(loss)})"


def _limits(losses: list[np.ndarray], width: int) -> tuple[float, float]:
    """Where the runs that learn lie: one that blows up must not flatten the others."""
    learning = [loss for loss in losses if _learns(loss, width)] or losses
    values = np.concatenate(learning)
    values = values[np.isfinite(values)]
    first = [loss[0] for loss in learning if np.isfinite(loss[0])]
    if not values.size:
        return 0.0, 1.0
    # The 2% of the largest losses may lie above the picture, but not where a run begins.
    bottom, top = values.min(), max([np.quantile(values, 0.98), *first])
    margin = 0.05 * (top - bottom) or 0.05
    return float(bottom - margin), float(top + margin)


def _learns(loss: np.ndarray, width: int) -> bool:
    """Whether a run ends below where it began, by the mean of `width` steps at either end."""
    ends = [part[np.isfinite(part)] for part in (loss[:width], loss[-width:])]
    return bool(all(end.size for end in ends) and ends[1].mean() <= ends[0].mean())


def _mark_exits(axes: Axes, runs: Mapping[str, np.ndarray], top: float) -> list[str]:
    """Names each curve that has left the picture for good, and tells where and how high it ends.

    Returns:
      The names of these runs.
    """
    left: list[str] = []
    for index, (name, curve) in enumerate(runs.items()):
        finite = np.flatnonzero(np.isfinite(curve))
        inside = finite[curve[finite] <= top]
        if not finite.size or curve[finite[-1]] <= top or finite[-1] < len(curve) - 1:
            continue
        step = int(inside[-1]) + 2 if inside.size else 1  # the first one above, counted from 1
        color = COLORS[index % len(COLORS)]
        axes.plot(step, top, "^", color=color, markersize=7, clip_on=False, zorder=20)
        is_late = step > len(curve) / 2  # then there is more room on the left
        axes.annotate(
            f"{name} leaves at step {step}, ends at {curve[-1]:.3g}",
            (step, top),
            xytext=(-6 if is_late else 6, -4 - 11 * len(left)),  # below the last label, in points
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="top",
            fontsize=8,
            color=color,
            bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.5),
            zorder=21,
        )
        left.append(name)
    return left


def _name_ends(axes: Axes, curves: Mapping[str, np.ndarray]) -> None:
    """Writes each run's label beside the end of its line, apart where lines end together."""
    bottom, top = axes.get_ylim()
    ends = {}  # from name to step and height of the last finite loss, as a share of the panel
    for name, curve in curves.items():
        if last := _last_finite(curve):
            ends[name] = (last, (curve[last - 1] - bottom) / (top - bottom))
    names = sorted(ends, key=lambda name: ends[name][1])
    places = _spread_apart([ends[name][1] for name in names])
    for name, place in zip(names, places, strict=True):
        step, height = ends[name]
        color = next(line.get_color() for line in axes.lines if line.get_label() == name)
        axes.annotate(
            name,
            (step, bottom + height * (top - bottom)),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=color,
            annotation_clip=False,
            arrowprops=dict(
                relpos=(0, 0.5), arrowstyle="-", color=color, linewidth=0.5, shrinkA=1, shrinkB=1
            ),
        )


def _spread_apart(heights: list[float]) -> list[float]:
    """Moves ascending heights apart until a line of text fits between each two."""
    # What overlaps is joined into a block around its own middle; blocks that then overlap are
    # joined in turn. Each block: its heights.
    blocks: list[list[float]] = []
    for height in heights:
        block = [height]
        while blocks and _bottom_of(block) - _LINE < _bottom_of(blocks[-1]) + _LINE * (
            len(blocks[-1]) - 1
        ):
            block = blocks.pop() + block
        blocks.append(block)
    return [_bottom_of(block) + _LINE * row for block in blocks for row in range(len(block))]


def _bottom_of(block: list[float]) -> float:
    """The height of the lowest of lines that stand close together around the mean of `block`."""
    return sum(block) / len(block) - _LINE * (len(block) - 1) / 2


def _draw_differences(
    axes: Axes, curves: Mapping[str, np.ndarray], reference: str | None, inside: list[str]
) -> None:
    """Draws each run's distance from the reference; those `inside` decide about the limits."""
    base = curves[reference or ""]
    found = []
    for index, (name, curve) in enumerate(curves.items()):
        steps = min(len(base), len(curve))
        difference = curve[:steps] - base[:steps]
        if name == reference:
            axes.axhline(0, color=COLORS[index % len(COLORS)], linewidth=1)
            continue
        axes.plot(
            np.arange(1, steps + 1),
            difference,
            color=COLORS[index % len(COLORS)],
            linewidth=1.2,
            label=name,
        )
        # The first steps of a run differ most and matter least.
        found += [difference[len(difference) // 10 :]] if name in inside else []
    values = np.concatenate([*found, np.zeros(1)])
    values = values[np.isfinite(values)]
    # Runs may all be worse than the reference; then nothing is below it, and it lies at the bottom.
    low, high = float(values.min()), float(values.max())
    margin = 0.1 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.set_ylabel(f"difference from\n{reference}")


def _mark_end(axes: Axes, loss: np.ndarray, top: float, color: str) -> None:
    end = _last_finite(loss)
    if 0 < end < len(loss):
        height = min(loss[end - 1], top)
        axes.plot(end, height, "X", color=color, markersize=9, clip_on=False, zorder=20)


def _last_finite(loss: np.ndarray) -> int:
    """The last step, counted from 1, whose loss is finite; 0 if none is."""
    return int(np.max(np.flatnonzero(np.isfinite(loss)) + 1, initial=0))


def _draw_scale(axes: Axes, scale: np.ndarray, style: dict[str, Any]) -> None:
    # A step's scale holds until the next step, so the line moves at the next one.
    steps = np.arange(1, len(scale) + 1)
    axes.plot(steps, scale, drawstyle="steps-post", color=style["color"], linewidth=1.5)


def _draw_skips(axes: Axes, name: str, skipped: np.ndarray, row: int, color: str) -> None:
    """Draws a tick for each skipped step, above the panel, in a row for each run."""
    steps = np.flatnonzero(skipped) + 1
    label, height = f"{name}: {len(steps)} skipped", 1.04 + _RUG_ROW * row
    place = axes.get_xaxis_transform()  # steps, and shares of the panel's height
    style = dict(linestyle="none", marker="|", markersize=6, color=color, clip_on=False)
    axes.plot(steps, np.full(len(steps), height), transform=place, label=label, **style)
    axes.text(1.03, height, label, transform=axes.transAxes, va="center", fontsize=8, color=color)


def _switches(phase: np.ndarray) -> list[int]:
    """The last steps of all phases but the last, counted from 1."""
    return [int(step) for step in np.flatnonzero(np.diff(phase)) + 1]


def _mark_switches(panels: Sequence[Axes], phase: np.ndarray, color: str) -> None:
    for panel in panels:
        for step in _switches(phase):
            panel.axvline(step + 0.5, color=color, linestyle="--", linewidth=1, zorder=1)


def _name_switches(axes: Axes, phases: Sequence[np.ndarray]) -> None:
    """Writes a label once for each step after which a run switches, however many runs do."""
    # Beside the dashed line and along it, since switches may be close to each other.
    for step in sorted({step for phase in phases for step in _switches(phase)}):
        axes.annotate(
            f"precision switches after step {step}",
            (step + 0.5, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-2, -3),
            textcoords="offset points",
            rotation="vertical",
            ha="right",
            va="top",
            fontsize=8,
            color="0.3",
        )


def _moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the finite values within `width` steps; NaN where the value itself is none."""
    # Sums and counts of finite values by the same convolution: their quotient is a mean that leaves
    # out the others, also at the ends, where the window sticks out.
    finite = np.isfinite(values)
    kernel = np.ones(min(width, len(values)))
    sums = np.convolve(np.where(finite, values, 0.0), kernel, "same")
    counts = np.convolve(finite, kernel, "same")
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)
