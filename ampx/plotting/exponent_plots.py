"""A picture of how large values are, beside what number formats can hold.

The horizontal axis is the binary logarithm of magnitudes. A format with m bits of mantissa whose
smallest normal number is 2**e divides it in four; for float16, m = 10 and e = -14:

    too small  |   subnormal    |             normal              |  too large
             2**(e - m)        2**e                         the largest number
               -24             -14                             16

In the subnormal part precision is lost bit by bit; what is too small becomes zero, and what is too
large becomes infinite. A loss scale moves all values to the right by its binary logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ampx.checking import as_dtype, as_number, as_number_array
from ampx.drawing import COLORS, check_axes, format_scale, make_axes, width_in_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NORMAL, _SUBNORMAL, _OUTSIDE = "#CBE8D3", "#FBE7B0", "#F3C3B2"
_LANE = 0.075  # height of the strip of a format, in heights of the axes
_MARGIN = 3.0  # exponents to show beyond what there is to see


class _Range(NamedTuple):
    """Binary logarithms of the smallest subnormal, the smallest normal and the largest number."""

    name: str
    subnormal: float
    normal: float
    largest: float


def plot_exponents(
    exponents: ArrayLike,
    counts: Mapping[str, ArrayLike],
    *,
    formats: Sequence[DTypeLike] = ("float16",),
    loss_scale: float = 1.0,
    axes: Axes | None = None,
) -> Axes:
    """Draws how the magnitudes of values are spread, and which of them a number format can hold.

    A line is a histogram of binary exponents. Above it a strip for each format shows where its
    normal and subnormal numbers lie and what is too small or too large for it. The first format is
    the one that the picture is about: the background is shaded and the legend counts for it. Too
    small is what lies below the smallest subnormal; down to half of it numbers still round up.

    Args:
      exponents: integers of shape (E,), each one more than the one before. Exponent e stands for
        the values with 2**e <= ``|value|`` < 2**(e + 1); zeros are not in the picture.
      counts: from a name to numbers of values of shape (E,), one line each.
      formats: floating dtypes.
      loss_scale: what the values will be multiplied by: moves them by its binary logarithm.
      axes: where to draw; a new figure by default.

    Returns:
      The axes. Their `figure` has `savefig`.

    Raises:
      ImportError: if matplotlib is missing.
      TypeError: for a format that is not floating.
      ValueError: for exponents that are not consecutive integers, counts of another shape, no
        counts or formats at all, or a `loss_scale` that is not positive.

    References:
      Micikevicius et al., Mixed Precision Training, figure 3, https://arxiv.org/abs/1710.03740.

    Examples:
      >>> import ampx.plotting
      >>> gradients = {"output": [0, 4, 12, 4], "embedding": [9, 9, 2, 0]}
      >>> axes = ampx.plotting.plot_exponents([-26, -25, -24, -23], gradients)
      >>> for label in axes.get_legend_handles_labels()[1]:
      ...     print(label)
      output: 20.0% too small, 80.0% subnormal
      embedding: 90.0% too small, 10.0% subnormal
      >>> scaled = ampx.plotting.plot_exponents([-26, -25, -24, -23], gradients, loss_scale=2**12)
      >>> scaled.get_legend_handles_labels()[1]
      ['output', 'embedding']
    """
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts must be a mapping, as in {{'gradients': counts}}, got {counts!r}")
    if not counts:
        raise ValueError("counts is empty: give at least one line, as in {'gradients': counts}")
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise TypeError(f"formats must be a sequence, as in ('float16',), got {formats!r}")
    if not formats:
        raise ValueError("formats is empty: name at least one, as in ('float16',)")
    loss_scale = as_number("loss_scale", loss_scale, above=0)
    edges = _edges(exponents) + math.log2(loss_scale)
    shares = {name: _shares(name, own, len(edges) - 1) for name, own in counts.items()}
    ranges = [_range_of(dtype) for dtype in formats]
    axes = make_axes(8, 4.2) if axes is None else axes
    check_axes(axes)
    _set_limits(axes, edges, shares, ranges[0])
    for lane, own in enumerate(ranges):
        _draw_lane(axes, own, lane)
    # The part of normal numbers stays white: what is shaded is what the first format loses.
    for low, high, color, kind in _bands(axes, ranges[0]):
        if kind != "normal":
            axes.axvspan(low, high, color=color, alpha=0.35, linewidth=0, zorder=0)
    for index, (name, own) in enumerate(shares.items()):
        color = COLORS[index % len(COLORS)]
        # Each edge twice, from the height of the bin before it to that of the bin after it.
        outline = np.repeat(edges, 2), np.concatenate([[0], np.repeat(own, 2), [0]])
        axes.plot(*outline, color=color, linewidth=1.6, label=_label(name, own, edges, ranges[0]))
        axes.fill_between(*outline, color=color, alpha=0.08, linewidth=0)
    axes.set_ylabel("share of values")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    # matplotlib sets what stands between dollar signs as mathematics: 2$^{16}$.
    base, _, power = format_scale(float(loss_scale)).partition("^")
    times = "" if loss_scale == 1 else f" × {base}$^{{{power}}}$"
    axes.set_xlabel(f"log$_2$ |value{times}|")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.02 + _LANE * len(ranges)),
        borderaxespad=0,
        frameon=False,
    )
    return axes


def _edges(exponents: ArrayLike) -> np.ndarray:
    """The E + 1 edges of E bins: exponent e stands for magnitudes from 2**e up to 2**(e + 1)."""
    found = np.asarray(exponents)
    is_integer = np.issubdtype(found.dtype, np.integer)
    if found.ndim != 1 or not found.size or not is_integer or np.any(np.diff(found) != 1):
        raise ValueError(
            "exponents must be consecutive integers, such as np.arange(-40, 16), got "
            f"{np.array2string(found, threshold=8)} of dtype {found.dtype}"
        )
    return np.append(found, found[-1] + 1).astype(float)


def _shares(name: str, counts: ArrayLike, size: int) -> np.ndarray:
    """Counts of a line as shares of their sum; zeros where nothing was counted."""
    found = as_number_array(f"counts[{name!r}]", counts)
    if not np.all(found >= 0):
        raise ValueError(f"counts[{name!r}] must be at least 0, got {counts!r}")
    if found.shape != (size,):
        raise ValueError(
            f"the counts of {name!r} must be one for each of the {size} exponents, got shape "
            f"{found.shape}"
        )
    return found / max(found.sum(), 1e-300)


def _range_of(dtype: DTypeLike) -> _Range:
    dtype = as_dtype("formats", dtype, "floating")
    # jnp.finfo knows bfloat16 and float8, too. A float is large enough for their largest numbers.
    info: Any = jnp.finfo(dtype)
    largest = math.log2(float(info.max))
    return _Range(jnp.dtype(dtype).name, info.minexp - info.nmant, info.minexp, largest)


def _set_limits(
    axes: Axes, edges: np.ndarray, shares: Mapping[str, np.ndarray], first: _Range
) -> None:
    """The values that there are and the range of the first format, and a little more."""
    seen = np.flatnonzero(sum(shares.values()))
    ends = [edges[seen[0]], edges[seen[-1] + 1]] if seen.size else []
    low, high = min([*ends, first.subnormal]), max([*ends, first.largest])
    axes.set_xlim(low - _MARGIN, high + _MARGIN)
    # Some room above the highest line; up to 1 if there is nothing to see.
    axes.set_ylim(0, 1.08 * max([share.max() for share in shares.values()]) or 1.0)


def _bands(axes: Axes, own: _Range) -> Iterator[tuple[float, float, str, str]]:
    """Ends, colour and name of the parts of the horizontal axis that a format divides it into."""
    low, high = axes.get_xlim()
    # A part that lies outside of the picture shrinks to nothing here, and is left out below.
    ends = np.clip([low, own.subnormal, own.normal, own.largest, high], low, high)
    kinds = ("too small", "subnormal", "normal", "too large")
    colors = (_OUTSIDE, _SUBNORMAL, _NORMAL, _OUTSIDE)
    for start, end, color, kind in zip(ends[:-1], ends[1:], colors, kinds, strict=True):
        if start < end:
            yield float(start), float(end), color, kind


def _draw_lane(axes: Axes, own: _Range, lane: int) -> None:
    """Draws the strip of a format above the axes; the first format's is the lowest."""
    low, high = axes.get_xlim()
    bottom = 1.02 + _LANE * lane
    points = width_in_points(axes) / (high - low)
    for start, end, color, kind in _bands(axes, own):
        axes.broken_barh(
            [(start, end - start)],
            (bottom, 0.85 * _LANE),
            transform=axes.get_xaxis_transform(),  # x in exponents, y in heights of the axes
            facecolor=color,
            edgecolor="white",
            linewidth=0.8,
            clip_on=False,
        )
        # The longest text that fits, at 4.6 points for a letter of size 8.
        texts = (f"{own.name}: normal", own.name) if kind == "normal" else (kind,)
        fitting = [text for text in texts if 4.6 * len(text) < (end - start) * points]
        if fitting:
            axes.text(
                (start + end) / 2,
                bottom + 0.425 * _LANE,
                fitting[0],
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                fontsize=8,
            )


def _label(name: str, shares: np.ndarray, edges: np.ndarray, own: _Range) -> str:
    # A bin counts by its lower edge: 65504, the largest float16, lies inside the bin of 2**15.
    lower = edges[:-1]
    parts = {
        "too small": lower < own.subnormal,
        "subnormal": (own.subnormal <= lower) & (lower < own.normal),
        "too large": lower >= own.largest,
    }
    told = {kind: float(shares[where].sum()) for kind, where in parts.items()}
    # A share is named however small it is: a few infinite gradients are enough to skip a step.
    named = ", ".join(
        f"{f'{share:.1%}' if share >= 5e-4 else '<0.1%'} {kind}"
        for kind, share in told.items()
        if share
    )
    return f"{name}: {named}" if named else name
