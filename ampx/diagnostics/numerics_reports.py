"""What `numerics_report` tells: the counts of a run, and what other formats would make of them.

A report holds histograms of binary exponents by scope and direction. All else follows from these
without another run: the shares of each scope that a format turns into zero, a subnormal number or
infinity, the loss scales at which gradients fit, and the precision to try first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ampx.autocasting.float8 import RecipeName, Sharing
from ampx.checking import join_first
from ampx.diagnostics import float8_shares
from ampx.diagnostics.exponents import EXPONENTS, FORMATS, Histogram
from ampx.diagnostics.float8_shares import Float8Row
from ampx.diagnostics.recommendations import (
    FORWARD,
    Findings,
    Key,
    Recommendation,
    collect_evidence,
    find_scale_range,
    recommend,
    sum_histograms,
)
from ampx.summaries import show_fields, show_table
from ampx.text_tables import Block, Table, show_blocks, show_rich


class NumericsRow(NamedTuple):
    """What becomes of the values of a scope in a format.

    Attributes:
      scope: name scopes joined by "/": with flax linen the path of the module; "" is the rest. For
        a parameter (`"forward"`) and its gradient (`"parameter"`), its path.
      direction: `"forward"`, `"backward"` for values that depend on the cotangent of the loss, or
        `"parameter"` for the gradient of a parameter.
      largest_exponent: the binary exponent of the largest finite value, for gradients without the
        loss scale; None if all are zero or not finite.
      values: how many finite nonzero values there are. The shares below are shares of these.
      zeros: how many values are zero.
      fills: how many are large numbers that are written into the program to mask something, as
        `jnp.finfo(x.dtype).min` is. They count nowhere else: half has such a number, too. A number
        that is picked, as by `jnp.where`, is one; one that is added only from -1e9 down.
      non_finite: how many values are infinite or NaN.
      underflow: share that becomes zero.
      subnormal: share that becomes subnormal, and so loses digits.
      overflow: share that becomes infinite, or NaN in a format without infinity.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import numerics_report
      >>> report = numerics_report(lambda w: jnp.sum(w * w))(jnp.array([2.0**-13, 2.0**9, 0.0]))
      >>> row = report.table("float16")[0]
      >>> row.direction, row.values, row.zeros, row.underflow, row.overflow
      ('forward', 5, 2, 0.2, 0.4)
    """

    scope: str
    direction: str
    largest_exponent: int | None
    values: int
    zeros: int
    fills: int
    non_finite: int
    underflow: float
    subnormal: float
    overflow: float

    __repr__ = show_fields


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport:
    """Binary exponents of the values of a loss and of its gradient; print it for a table.

    Attributes:
      histograms: of all values, by (scope, direction), in the order of the program; see
        `NumericsRow`.
      products: of the operands and results of matrix products and convolutions alone: only these
        are in half at O1.
      sums: of those forward values that are sums which are only scaled by a constant number, as in
        a mean. `jnp.mean` adds up half in float32 and divides before it rounds to half, so the
        advice leaves them out.
      float8: what casts to float8 leave of the operands of those matrix products that could be
        float8, by (scope, direction); see `float8_table`.
      float8_fitting: by scope, the recipes of `ampx.Float8` that lose no row or column of a product
        which others keep; none where the terms of one cancel, so that little but roundings is left.
      opaque: names of primitives, such as shard_map and kernels, inside of which nothing counts.
      is_finite: whether the loss and the gradients of the parameters are.
      loss_scale: what gradients are multiplied by, in `table`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import numerics_report
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> report = numerics_report(loss)(jnp.full((4, 4), 1e-3), jnp.full((8, 4), 1e-3))
      >>> report.loss_scales("float16")  # powers of two
      (16.0, 1048576.0)
      >>> report.recommended.level, report.recommended.loss_scale
      ('O2', 128.0)
    """

    histograms: Mapping[Key, Histogram]
    products: Mapping[Key, Histogram]
    sums: Mapping[Key, Histogram]
    float8: Mapping[Key, float8_shares.Shares]
    float8_fitting: Mapping[str, frozenset[RecipeName]]
    opaque: tuple[str, ...]
    is_finite: bool
    loss_scale: float

    __repr__ = show_fields
    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    @property
    def exponents(self) -> np.ndarray:
        """The binary exponents that `counts` are of, ``floor(log2(|value|))``."""
        return EXPONENTS.copy()

    @property
    def counts(self) -> Mapping[Key, np.ndarray]:
        """Finite nonzero values by exponent, for each (scope, direction)."""
        return MappingProxyType({key: h.counts for key, h in self.histograms.items()})

    def counts_of(self, direction: str) -> np.ndarray:
        """The sum of `counts` over the scopes of a direction."""
        found = [h for (_, own), h in self.histograms.items() if own == direction]
        return sum(found, Histogram()).counts

    def table(self, half_dtype: str) -> tuple[NumericsRow, ...]:
        """What a format would make of the values of each scope, gradients times `loss_scale`."""
        form, rows = FORMATS[_check_format(half_dtype)], []
        for (scope, direction), found in self.histograms.items():
            # Gradients are linear in the cotangent, so the scale multiplies each of them.
            shift = 0 if direction == FORWARD else round(math.log2(self.loss_scale))
            shares = (found.underflows, found.subnormals, found.overflows)
            rows.append(
                NumericsRow(
                    scope,
                    direction,
                    found.largest_exponent,
                    found.nonzero,
                    found.zeros,
                    found.fills,
                    found.non_finite,
                    *(found.share(count(form, shift)) for count in shares),
                )
            )
        return tuple(rows)

    def loss_scales(self, half_dtype: str) -> tuple[float, float]:
        """Finds the least and the largest loss scale for gradients in a format, as powers of two.

        At the largest no finite gradient overflows, without headroom; at the least, at most 0.1
        percentage points more of the nonzero ones become zero than at the largest.
        """
        evidence = collect_evidence(self.histograms, self.sums)
        low, high = find_scale_range(sum_histograms(evidence.gradients), _check_format(half_dtype))
        return 2.0**low, 2.0**high

    def float8_table(self, float8_dtype: str) -> tuple[Float8Row, ...]:
        """What `"float8_e4m3fn"` or `"float8_e5m2"` leaves of operands, by what shares a scale.

        There is a row for each scope and direction with matrix products that could be float8:
        neither batched nor of sizes that are no multiples of 16. Scales are powers of two, as those
        of `ampx.Float8`.
        """
        return float8_shares.make_rows(self.float8, float8_dtype)

    @property
    def float8_recipes(self) -> Mapping[str, RecipeName | None]:
        """By scope, the recipe with the fewest casts in `float8_fitting`; None stands for half.

        The order is `"tensorwise"`, `"rowwise"`, `"rowwise_half_dw"`, `"mxfp8"`.
        """
        fitting = self.float8_fitting.items()
        return MappingProxyType({s: float8_shares.choose_recipe(of) for s, of in fitting})

    @property
    def recommended(self) -> Recommendation:
        """The opt level, half dtype and loss scale to try first."""
        everything = collect_evidence(self.histograms, self.sums)
        products = collect_evidence(self.products, {})  # a sum that a product reads is in half
        return recommend(Findings(everything, products, self.is_finite, self.opaque))

    def _blocks(self) -> list[Block]:
        tables = [self.table(form) for form in FORMATS]
        rows = [("scope", "direction", "values", "exponent", *FORMATS)]
        # The tables have the same rows, one for each scope and direction; only shares differ.
        for same in zip(*tables, strict=True):
            row = same[0]
            exponent = "none" if row.largest_exponent is None else str(row.largest_exponent)
            shares = (
                "/".join(_format_percent(share) for share in (r.underflow, r.subnormal, r.overflow))
                for r in same
            )
            count = f"{row.values}" + (f" +{row.non_finite} bad" if row.non_finite else "")
            rows.append((row.scope or "(rest)", row.direction, count, exponent, *shares))
        return [
            Table(rows),
            "",
            f"% of nonzero values that become zero/subnormal/infinite, gradients times "
            f"{self.loss_scale:g}; exponent: the largest, unscaled",
            "loss scales that fit: "
            + ", ".join("{} {:g} to {:g}".format(f, *self.loss_scales(f)) for f in FORMATS),
            *([f"nothing counted inside: {', '.join(self.opaque)}"] if self.opaque else []),
            f"try first: {self.recommended}",
            *self._describe_float8(),
        ]

    def _describe_float8(self) -> list[Block]:
        """The blocks about float8; none where no product could be float8."""
        recipes = self.float8_recipes
        if not recipes:
            return []
        rows = [("product of", "direction", *_FLOAT8_COLUMNS, "recipe")]
        for (scope, direction), found in self.float8.items():
            shares = (found[name, per] for name, per in _FLOAT8_COLUMNS.values())
            cells = ("/".join(map(_format_percent, each)) for each in shares)
            rows.append((scope or "(rest)", direction, *cells, recipes[scope] or "half"))
        one = float8_shares.choose_for_all(self.float8_fitting.values())
        out = [scope for scope, of in self.float8_fitting.items() if one not in of]
        advice = "none" if one is None else f"dots={one!r}"
        return [
            "",
            Table(rows),
            "",
            "% of nonzero numbers of the worst operand that become zero/the largest of the format, "
            "with a scale for each tensor or row",
            f"float8 with the fewest casts that lose no row: {advice}"
            + (f", half for {join_first(out)}" if out and one else ""),
        ]


_FLOAT8_COLUMNS: dict[str, tuple[str, Sharing]] = {
    "e4m3 tensor": (float8_shares.E4M3, "tensor"),
    "e4m3 row": (float8_shares.E4M3, "row"),
    "e5m2 tensor": (float8_shares.E5M2, "tensor"),
    "e5m2 row": (float8_shares.E5M2, "row"),
}


def _format_percent(share: float) -> str:
    # A share that is not zero never prints as 0: a single overflow is enough to skip a step.
    return "0" if not share else "<.1" if share < 0.001 else f"{100 * share:.1f}"


def _check_format(name: str) -> str:
    """Raises a ValueError for the name of an unknown format, and gives back any other."""
    if name not in FORMATS:
        raise ValueError(f"half_dtype must be one of {', '.join(FORMATS)}, got {name!r}")
    return name
