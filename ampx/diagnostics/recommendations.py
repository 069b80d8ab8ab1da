"""Which opt level, half dtype and loss scale to try first, by what a float32 run shows.

The choices stand on a ladder, whose order is the advice of Ascend's Apex: the fastest first, each
next one with more room for large or small numbers.

    O2 float16, scale 128        all values in float16, gradients times 128
    O1 float16, scale 128        matrix products and convolutions alone
    O1 float16, dynamic scale    the same at some scale from 1 to 2**24
    O2 bfloat16                  all values, with the range of float32
    O0                           float32

A rung is refused by an objection: forward values that overflow, gradients that overflow or vanish
at the scales that it allows. The first rung without an objection is recommended, and the objections
to those before it are the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ampx.diagnostics.exponents import FORMATS, Histogram
from ampx.summaries import show_fields

FORWARD, BACKWARD, PARAMETER = "forward", "backward", "parameter"
Key = tuple[str, str]  # scope and direction
# Exponents of loss scales. Within them the reciprocal, by which gradients are unscaled, is a normal
# number of float32, too.
SHIFTS = range(-126, 127)
# Shares of the nonzero gradients. A range of scales ends where more than TOLERANCE are lost that
# the best scale keeps; a rung is refused where even that loses more than LARGEST_LOSS.
TOLERANCE = 0.001
LARGEST_LOSS = 0.05
_DYNAMIC = (0, 24)  # exponents of the scales that ampx.dynamic_loss_scale stays between


class Evidence(NamedTuple):
    """What a level would have in half: histograms of its values by scope.

    Attributes:
      forward: values of the forward pass.
      gradients: values that depend on the cotangent of the loss, as they are without a scale.
    """

    forward: Mapping[str, Histogram]
    gradients: Mapping[str, Histogram]


def collect_evidence(
    histograms: Mapping[Key, Histogram], spared: Mapping[Key, Histogram]
) -> Evidence:
    """Collects histograms by scope, without the spared values."""
    forward: dict[str, Histogram] = {}
    gradients: dict[str, Histogram] = {}
    for key, found in histograms.items():
        scope, direction = key
        # Gradients of parameters have a direction of their own, but are gradients like others.
        side = forward if direction == FORWARD else gradients
        known = found - spared[key] if key in spared else found
        side[scope] = side.get(scope, Histogram()) + known
    return Evidence(forward, gradients)


class Findings(NamedTuple):
    """What a run has shown, as far as rungs ask for it.

    Attributes:
      everything: all values, as O2 has them in half.
      products: operands and results of matrix products and convolutions, as O1 has them.
      is_finite: whether the loss and the gradients of the parameters are finite in float32.
      opaque: primitives inside of which nothing was counted.
    """

    everything: Evidence
    products: Evidence
    is_finite: bool = True
    opaque: tuple[str, ...] = ()


class Rung(NamedTuple):
    """A precision to try.

    Attributes:
      level: for `ampx.opt_level`.
      half_dtype: for `ampx.opt_level`; None for O0, which has none.
      loss_scale: for `ampx.opt_level`.
      objection: tells why it does not fit what was found, or nothing.

    Examples:
      >>> from ampx.diagnostics.recommendations import LADDER
      >>> for rung in LADDER:
      ...     print(rung)
      O2 in float16 with loss_scale=128.0
      O1 in float16 with loss_scale=128.0
      O1 in float16 with loss_scale='dynamic'
      O2 in bfloat16
      O0
    """

    level: str
    half_dtype: str | None
    loss_scale: float | str | None
    objection: Callable[[Findings], str]

    def __str__(self) -> str:
        return _format_choice(self.level, self.half_dtype, self.loss_scale)


def _format_choice(level: str, half_dtype: str | None, loss_scale: float | str | None) -> str:
    half = f" in {half_dtype}" if half_dtype else ""
    return level + half + (f" with loss_scale={loss_scale!r}" if loss_scale else "")


def sum_histograms(histograms: Mapping[str, Histogram]) -> Histogram:
    """Adds up the histograms of all scopes."""
    return sum(histograms.values(), Histogram())


def find_scale_range(gradients: Histogram, half_dtype: str) -> tuple[int, int]:
    """Finds the least and the largest exponent of a power of two to scale gradients by.

    At the largest nothing overflows, but would at twice as much; from the least on, no more than
    `TOLERANCE` of the nonzero gradients become zero that do not at the largest.
    """
    # Overflows only grow with the scale, underflows only shrink: both ends are found by scanning.
    form = FORMATS[half_dtype]
    high = max((s for s in SHIFTS if not gradients.overflows(form, s)), default=SHIFTS[0])
    most = gradients.underflows(form, high) + TOLERANCE * gradients.nonzero
    low = min(s for s in SHIFTS if s <= high and gradients.underflows(form, s) <= most)
    return low, high


# The objections below are functions from evidence to a reason in words, or "" where there is none.


def _object_to_forward_overflow(evidence: Evidence, half_dtype: str) -> str:
    form = FORMATS[half_dtype]
    found = {scope: h.overflows(form) for scope, h in evidence.forward.items()}
    # All of them matter, not a share: one infinity in the forward pass spoils the loss.
    worst = max(found, key=found.__getitem__, default="")
    count = sum(found.values())
    if not count:
        return ""
    where = f", most of them in {worst}" if worst else ""
    return f"{count} forward values exceed {form.largest:.6g}{where}"


def _object_to_lost_gradients(evidence: Evidence, half_dtype: str) -> str:
    # A few gradients may vanish, but where many do, parameters stop learning.
    gradients = sum_histograms(evidence.gradients)
    _, high = find_scale_range(gradients, half_dtype)
    lost = gradients.share(gradients.underflows(FORMATS[half_dtype], high))
    if lost <= LARGEST_LOSS:
        return ""
    return f"{lost:.1%} of the gradients underflow even at the largest loss scale, 2**{high}"


def _object_to_128(evidence: Evidence) -> str:
    low, high = find_scale_range(sum_histograms(evidence.gradients), "float16")
    if high < math.log2(128):
        return f"gradients overflow at a loss scale of 128: 2**{high} is the largest"
    if low > math.log2(128):
        return f"gradients underflow at a loss scale of 128: it takes 2**{low}"
    return ""


def _object_to_dynamic(evidence: Evidence) -> str:
    low, high = find_scale_range(sum_histograms(evidence.gradients), "float16")
    least, most = _DYNAMIC
    if high < least:
        return f"gradients overflow at every loss scale from 1 on: 2**{high} is the largest"
    if low > most:
        return f"gradients underflow at every loss scale up to 2**{most}: it takes 2**{low}"
    return ""


def _object_to_no_scale(evidence: Evidence) -> str:
    # bfloat16 goes without a loss scale: its exponents are those of float32.
    count = sum_histograms(evidence.gradients).overflows(FORMATS["bfloat16"])
    return f"{count} gradients overflow in bfloat16" if count else ""


def _object_to_overflow(found: Findings, half_dtype: str) -> str:
    # No equation makes an argument: where one overflows, only a product that reads it shows it.
    everything, products = found.everything, found.products
    return _object_to_forward_overflow(everything, half_dtype) or _object_to_forward_overflow(
        products, half_dtype
    )


def _object_to_o2(
    found: Findings, half_dtype: str, scale_objection: Callable[[Evidence], str]
) -> str:
    of = found.everything
    return (
        _object_to_overflow(found, half_dtype)
        or _object_to_lost_gradients(of, half_dtype)
        or scale_objection(of)
    )


def _object_to_o1(found: Findings, scale_objection: Callable[[Evidence], str]) -> str:
    of = found.products
    return (
        _object_to_forward_overflow(of, "float16")
        or _object_to_lost_gradients(of, "float16")
        or scale_objection(of)
    )


LADDER = (
    Rung("O2", "float16", 128.0, lambda f: _object_to_o2(f, "float16", _object_to_128)),
    Rung("O1", "float16", 128.0, lambda f: _object_to_o1(f, _object_to_128)),
    Rung("O1", "float16", "dynamic", lambda f: _object_to_o1(f, _object_to_dynamic)),
    Rung("O2", "bfloat16", None, lambda f: _object_to_o2(f, "bfloat16", _object_to_no_scale)),
    Rung("O0", None, None, lambda f: ""),
)


class Recommendation(NamedTuple):
    """What `ampx.numerics_report` says to try: the cheapest choice that holds all values.

    The choices, cheapest first: O2 in float16 with a loss scale of 128, O1 with 128, O1 with a
    dynamic scale, O2 in bfloat16, float32 (O0).

    Attributes:
      level: for `ampx.opt_level`.
      half_dtype: for `ampx.opt_level`; None for O0.
      loss_scale: for `ampx.opt_level`.
      reason: what is wrong with each cheaper choice, in words, and what could not be looked into.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import numerics_report
      >>> advice = numerics_report(lambda w: jnp.sum(w * 1e5) * 1e-6)(jnp.ones(3)).recommended
      >>> advice.level, advice.half_dtype, advice.loss_scale
      ('O1', 'float16', 128.0)
      >>> print(advice.reason)
      not O2 in float16 with loss_scale=128.0: 3 forward values exceed 65504
    """

    level: str
    half_dtype: str | None
    loss_scale: float | str | None
    reason: str

    __repr__ = show_fields

    def __str__(self) -> str:
        return f"{_format_choice(self.level, self.half_dtype, self.loss_scale)}: {self.reason}"


def recommend(found: Findings) -> Recommendation:
    """Climbs down the ladder to the first rung that holds.

    A loss that is not finite in float32 shows nothing of other formats: then it is the last rung.
    """
    if not found.is_finite:
        last, reason = LADDER[-1], "not finite in float32 already: ampx.trace_overflow tells where"
        return Recommendation(last.level, last.half_dtype, last.loss_scale, reason)
    refused = []
    for rung in LADDER:  # the last has no objection
        objection = rung.objection(found)
        if not objection:
            break
        refused.append(f"not {rung}: {objection}")
    reason = "; ".join(refused) or "the cheapest choice holds all values"
    if found.opaque:
        reason += f"; unknown: what happens inside {', '.join(found.opaque)}"
    return Recommendation(rung.level, rung.half_dtype, rung.loss_scale, reason)
