"""A picture of which reductions of gradients hide behind computation.

Time runs to the right. Each bucket is a box in every lane; what stands above or below another box
happens at the same time. Stripes fill the time in which a device only waits:

    backward    |  0  |  1  |  2  |
    all-reduce                    |  0   |  1   |  2   |
    update                        |//////| 0 |//| 1 |//| 2 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ampx.checking import as_number_array, check_word
from ampx.diagnostics.bucket_timelines import BucketTimeline
from ampx.drawing import check_axes, make_axes, mix_colors, width_in_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name, and a light and a dark colour, of each lane; they are those of `plot_schedule`.
_LANES = (
    ("backward", "#F6CFA8", "#B8560B"),
    ("all-reduce", "#BBD9F0", "#1F5F99"),
    ("update", "#BFE3C8", "#1E7A3E"),
)
_FONT_SIZE = 9.0


def plot_buckets(
    timeline: BucketTimeline | Sequence[ArrayLike], *, unit: str = "s", axes: Axes | None = None
) -> Axes:
    """Draws when each bucket of gradients is computed, reduced and used, in three lanes.

    A box is a bucket with its number, where that fits; later buckets are darker. What lies below
    another box overlaps with it. Grey stripes are times in which a device computes nothing because
    it waits for a reduction.

    Args:
      timeline: from `ampx.bucket_timeline`; or bytes of shape
        (buckets,) and the starts and ends of backward passes, reductions and updates, each of shape
        (buckets, 2), as a profile gives them.
      unit: of time; `"s"` is written as ms or µs where that reads better, `""` is no unit.
      axes: where to draw; a new figure by default.

    Returns:
      The axes. Their `figure` has `savefig`.

    Raises:
      ImportError: if matplotlib is missing.
      ValueError: for arrays that do not fit together, or that hold an end before its start.

    Examples:
      >>> import ampx.plotting
      >>> from ampx import bucket_timeline
      >>> times = bucket_timeline(
      ...     [8e6] * 4, bandwidth=2e9, backward_seconds=8e-3, update_seconds=4e-3
      ... )
      >>> axes = ampx.plotting.plot_buckets(times)
      >>> axes.get_title(loc="left"), axes.get_title(loc="right")
      ('4 buckets, 32 MB', '19 ms, 36.8% idle')
    """
    # Four arrays of a profile become the same named tuple that a model of the times returns.
    bucket_bytes, *spans = _check_timeline(timeline)
    timeline = BucketTimeline(bucket_bytes, *spans)
    check_word("unit", unit)
    axes = make_axes(9, 2.4) if axes is None else axes
    check_axes(axes)
    start = min(lane.min() for lane in spans)
    axes.set_xlim(start, start + timeline.total_time)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)  # upside down: the first lane is at the top
    # Drawn first, so that boxes of reductions lie above the stripes.
    for low, high in timeline.idle_spans():
        axes.axvspan(low, high, facecolor="none", edgecolor="0.8", hatch="///", linewidth=0)
    points = width_in_points(axes) / timeline.total_time  # of the page, for a unit of time
    for row, ((_, light, dark), lane) in enumerate(zip(_LANES, spans, strict=True)):
        for number, (low, high) in enumerate(lane):
            shade = number / max(1, len(lane) - 1)
            axes.broken_barh(
                [(low, high - low)],
                (row - 0.4, 0.8),
                facecolor=mix_colors(light, dark, shade),
                edgecolor="white",
                # With hundreds of buckets edges of a fixed width would cover the boxes.
                linewidth=min(0.6, (high - low) * points / 8),
            )
            # A digit is about 0.65 of the font's size wide; 0.8 of a digit is left as a margin.
            if (high - low) * points > 0.65 * _FONT_SIZE * (len(str(number)) + 0.8):
                axes.text(
                    (low + high) / 2,
                    row,
                    str(number),
                    ha="center",
                    va="center_baseline",
                    fontsize=_FONT_SIZE,
                    color="white" if shade > 0.5 else "black",
                    clip_on=True,
                )
    axes.set_yticks(range(len(_LANES)), [name for name, *_ in _LANES])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _write_titles(axes, timeline, unit)
    return axes


def _write_titles(axes: Axes, timeline: BucketTimeline, unit: str) -> None:
    from matplotlib.ticker import EngFormatter

    size = EngFormatter("B", places=0)(float(np.sum(timeline.bucket_bytes)))
    count = len(np.atleast_1d(timeline.bucket_bytes))
    axes.set_title(f"{count} bucket{'s' if count > 1 else ''}, {size}", loc="left")
    times = EngFormatter(unit) if unit == "s" else lambda time, _=None: f"{time:g} {unit}".strip()
    axes.xaxis.set_major_formatter(times)
    # EngFormatter writes all digits of a number, so it is given three of them.
    total = timeline.total_time
    idle = timeline.idle_time / total if total else 0.0
    axes.set_title(f"{times(float(f'{total:.3g}'))}, {idle:.1%} idle", loc="right")
    axes.set_xlabel("time")


def _check_timeline(timeline: BucketTimeline | Sequence[ArrayLike]) -> list[np.ndarray]:
    """Checks a timeline and converts its parts: float64[buckets], then three [buckets, 2]."""
    parts = list(timeline) if isinstance(timeline, tuple | list) else []
    arrays = [as_number_array("timeline", part) for part in parts]
    count = arrays[0].size if arrays else 0
    shapes = [array.shape for array in arrays] if parts else timeline
    if not count or shapes != [(count,), (count, 2), (count, 2), (count, 2)]:
        raise ValueError(
            "timeline must be bytes of shape (buckets,), then starts and ends of backward passes, "
            f"reductions and updates, each of shape (buckets, 2), got {shapes}"
        )
    for (name, *_), lane in zip(_LANES, arrays[1:], strict=True):
        for number in np.flatnonzero(lane[:, 1] < lane[:, 0]):
            raise ValueError(
                f"bucket {number} has an end before its start in {name}: {lane[number].tolist()}"
            )
    return arrays
