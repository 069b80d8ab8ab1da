"""What pictures share: colours, axes, scales as text.

matplotlib is imported when a picture is drawn. A program without pictures does not pay for the
import and need not have matplotlib installed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people of any colour vision can tell apart.
COLORS = ("#000000", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")


def format_scale(scale: float) -> str:
    """Writes a loss scale as people say it.

    Args:
      scale: a positive number.

    Returns:
      A power of two as such, anything else as a number.

    Examples:
      >>> from ampx import drawing
      >>> [drawing.format_scale(scale) for scale in (1.0, 65536.0, 1000.0)]
      ['1', '2^16', '1000']
    """
    exponent = math.log2(scale)
    return f"2^{exponent:.0f}" if exponent == round(exponent) and exponent else f"{scale:g}"


def import_pyplot() -> Any:
    """Imports `matplotlib.pyplot`.

    Raises:
      ImportError: if matplotlib is missing; the message names the extra that brings it.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plotting needs matplotlib, which comes with the extra ampx-jax[examples]"
        ) from error
    return plt


def check_axes(axes: Any) -> None:
    """Refuses what nothing can be drawn into.

    Raises:
      TypeError: for what is no `matplotlib.axes.Axes`.
    """
    if not (hasattr(axes, "plot") and hasattr(axes, "set_xlim")):
        raise TypeError(
            f"axes must be matplotlib's, as plt.subplots() gives them, got {axes!r} of type "
            f"{type(axes).__name__}"
        )


def make_axes(width: float, height: float) -> Axes:
    """Makes axes in a figure of their own, without a frame at the top and on the right.

    Args:
      width: of the figure, in inches.
      height: of the figure, in inches.
    """
    _, axes = import_pyplot().subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def width_in_points(axes: Axes) -> float:
    """How wide axes are in points, 1/72 of an inch, as font sizes are: to see which texts fit."""
    return axes.bbox.width / axes.figure.dpi * 72  # pixels, inches, points


def mix_colors(light: str, dark: str, shade: float) -> tuple[float, ...]:
    """Mixes two colours, given as "#RRGGBB"; a shade of 0 is the light one, 1 the dark one."""
    pairs = ((int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5))
    return tuple((a + (b - a) * shade) / 255 for a, b in pairs)
