"""Pictures of training: losses above, loss scales and skipped steps below.

The two panels share the axis of steps. A jump of the loss, a fall of the scale and a change of the
precision can so be seen to belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ampx.checking import as_positive_int
from ampx.drawing import COLORS, check_axes, import_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_training(
    histories: Mapping[str, Any],
    *,
    smoothing: int | None = None,
    axes: Sequence[Axes] | None = None,
) -> tuple[Axes, Axes]:
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
      axes: two axes to draw on; a new figure by default.

    Returns:
      The axes of the losses and of the scales. Their `figure` has `savefig`.

    Raises:
      ImportError: if matplotlib is missing.
      ValueError: if there is no history, or one whose arrays do not fit together.

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
    runs = {name: _as_arrays(name, history) for name, history in histories.items()}
    if not runs:
        raise ValueError("histories is empty: give at least one run, as in {'O2': reports}")
    longest = max(len(run.loss) for run in runs.values())
    width = max(1, longest // 25) if smoothing is None else as_positive_int("smoothing", smoothing)
    panels = _new_axes() if axes is None else axes
    try:
        loss_axes, scale_axes = panels
    except (TypeError, ValueError):
        raise TypeError(f"axes must be a pair of matplotlib's, got {axes!r}") from None
    check_axes(loss_axes)
    check_axes(scale_axes)

    for index, (name, run) in enumerate(runs.items()):
        # The first run is the widest line and lies at the bottom.
        style = dict(
            color=COLORS[index % len(COLORS)],
            linewidth=1.0 + 3.2 * (1 - (index + 1) / len(runs)),
            zorder=2 + index,
        )
        _draw_loss(loss_axes, name, run.loss, width, style)
        if np.any(run.scale != 1) or np.any(run.skipped):  # else there is no loss scale to show
            _draw_scale(scale_axes, name, run.scale, run.skipped, style)
        _mark_switches((loss_axes, scale_axes), run.phase, style["color"])
    _name_switches(loss_axes, [run.phase for run in runs.values()])

    # Ends are marked once the limits are known: a loss that has left the picture ends at its top.
    bottom, top = _limits([run.loss for run in runs.values()], width)
    loss_axes.set_ylim(bottom, top)
    curves = {name: _moving_average(run.loss, width) for name, run in runs.items()}
    _mark_exits(loss_axes, curves, top)
    for index, run in enumerate(runs.values()):
        _mark_end(loss_axes, run.loss, top, COLORS[index % len(COLORS)])
    loss_axes.set_ylabel("training loss")
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylabel("loss scale")
    scale_axes.set_xlabel("step")
    for panel in (loss_axes, scale_axes):
        if panel.get_legend_handles_labels()[1]:
            panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return loss_axes, scale_axes


def _new_axes() -> tuple[Axes, Axes]:
    _, (loss_axes, scale_axes) = import_pyplot().subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
    )
    for axes in (loss_axes, scale_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    return loss_axes, scale_axes


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


def _as_arrays(name: str, history: Any) -> _Run:
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
    if not np.isfinite(loss[-1]):
        name += f" (not finite after step {_last_finite(loss)})"
    axes.plot(steps, _moving_average(loss, width), label=name, **style)
    if width > 1:
        axes.plot(steps, loss, color=style["color"], linewidth=0.5, alpha=0.2, zorder=1)


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


def _mark_exits(axes: Axes, runs: Mapping[str, np.ndarray], top: float) -> None:
    """Names each curve that has left the picture for good, and tells where and how high it ends."""
    below = 0
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
            xytext=(-6 if is_late else 6, -4 - 11 * below),  # below the last label, in points
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="top",
            fontsize=8,
            color=color,
            bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.5),
            zorder=21,
        )
        below += 1


def _mark_end(axes: Axes, loss: np.ndarray, top: float, color: str) -> None:
    end = _last_finite(loss)
    if 0 < end < len(loss):
        height = min(loss[end - 1], top)
        axes.plot(end, height, "X", color=color, markersize=9, clip_on=False, zorder=20)


def _last_finite(loss: np.ndarray) -> int:
    """The last step, counted from 1, whose loss is finite; 0 if none is."""
    return int(np.max(np.flatnonzero(np.isfinite(loss)) + 1, initial=0))


def _draw_scale(
    axes: Axes, name: str, scale: np.ndarray, skipped: np.ndarray, style: dict[str, Any]
) -> None:
    # A step's scale holds until the next step, so the line moves at the next one.
    steps = np.arange(1, len(scale) + 1)
    axes.plot(steps, scale, drawstyle="steps-post", color=style["color"], linewidth=1.5)
    if np.any(skipped):
        label = f"{name}: {np.sum(skipped)} skipped"
        axes.plot(
            steps[skipped],
            scale[skipped],
            linestyle="none",
            marker="x",
            markersize=6,
            color=style["color"],
            label=label,
        )


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
