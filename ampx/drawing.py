"""What pictures share: colours, axes, scales as text; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people of any colour vision can tell apart.
COLORS = ("#000000", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")


def format_scale(scale: float) -> str:
    """A loss scale as people say it.

    Args:
      scale: a positive number.

    Returns:
      A power of two as such, anything else as a number.

    Examples:
      >>> from ampx.training import monitoring
      >>> [monitoring.format_scale(scale) for scale in (1.0, 65536.0, 1000.0)]
      ['1', '2^16', '1000']
    """
    exponent = math.log2(scale)
    return f"2^{exponent:.0f}" if exponent == round(exponent) and exponent else f"{scale:g}"


def import_pyplot() -> Any:
    """`matplotlib.pyplot`.

    Raises:
      ImportError: if matplotlib is missing.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plotting needs matplotlib, which comes with the extra ampx-jax[examples]"
        ) from error
    return plt


def make_axes(width: float, height: float) -> Axes:
    """Axes in a figure of their own, without a frame at the top and on the right."""
    _, axes = import_pyplot().subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def width_in_points(axes: Axes) -> float:
    """How wide axes are, to see which texts fit into them."""
    return axes.bbox.width / axes.figure.dpi * 72


def mix_colors(light: str, dark: str, shade: float) -> tuple[float, ...]:
    """A colour between two, given as "#RRGGBB"; a shade of 0 is the light one."""
    pairs = ((int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5))
    return tuple((a + (b - a) * shade) / 255 for a, b in pairs)
