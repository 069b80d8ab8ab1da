"""What an interval analysis knows of an array, and how bounds are rounded.

An interval analysis (the simplest abstract interpretation) runs a program on bounds instead of
numbers. From `1 <= x <= 2` and `0 <= y <= 3` follows `0 <= x * y <= 6`, for all arrays x and y with
such numbers, so one run speaks for every run. It must never promise too much: each bound has to
hold for what a machine computes, rounding included. That is what `rounded` and `rounded_sum` are
for.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

INF = math.inf
TINY = 2.0**-126  # below lie float32's subnormal numbers, which some processors take for 0
SMALLEST = 2.0**-149  # the smallest of these


class Fact(NamedTuple):
    """What holds for every number of an array.

    Attributes:
      lo: no number is below.
      hi: no number is above; where `lo` or `hi` is infinite, a number may be.
      nan: whether a number may be NaN.
      l1: the sum of all absolute values is at most this.
      l2: the root of the sum of all squares is at most this. A gradient of a million numbers may
        have a norm of 1, and its sum of squares is then 1, not a million times 1.
      parts: a fact for each number of a short vector, where these differ much; or None.
    """

    lo: float
    hi: float
    nan: bool = False
    l1: float = INF
    l2: float = INF
    parts: tuple | None = None

    @property
    def largest(self):
        """No absolute value is above this."""
        return max(abs(self.lo), abs(self.hi))

    @property
    def is_finite(self):
        """Whether every number is finite for certain."""
        return not self.nan and self.largest < INF

    def norms(self, size):
        """The bounds on both norms, also by the number of numbers alone."""
        largest = self.largest
        by_size = (size * largest, math.sqrt(size) * largest) if largest else (0.0, 0.0)
        return min(self.l1, by_size[0]), min(self.l2, by_size[1])

    def holds_zero(self):
        """Whether a number may be 0."""
        return self.lo <= 0 <= self.hi


ANYTHING = Fact(-INF, INF, True)
TRUTH = Fact(0.0, 1.0)


def is_float(dtype):
    """Whether a dtype is one of floating point numbers, so that it has infinities."""
    return jnp.issubdtype(dtype, np.floating)


def is_integer(dtype):
    """Whether a dtype is one of integers."""
    return jnp.issubdtype(dtype, np.integer)


@functools.cache
def limits(dtype):
    """Of a floating point dtype: its precision, largest, smallest normal and smallest number."""
    info = jnp.finfo(dtype)
    return tuple(float(x) for x in (info.eps, info.max, info.tiny, info.smallest_subnormal))


def unknown(dtype):
    """All that a dtype can hold."""
    if is_integer(dtype):
        return Fact(float(jnp.iinfo(dtype).min), float(jnp.iinfo(dtype).max))
    return TRUTH if dtype == np.bool_ else ANYTHING


def of_array(array):
    """The fact of an array that is known."""
    if not (is_float(array.dtype) or is_integer(array.dtype) or array.dtype == np.bool_):
        return ANYTHING
    numbers = np.asarray(array).astype(np.float64)
    if not numbers.size:
        return Fact(0.0, 0.0)
    nan = np.isnan(numbers)
    kept = numbers[~nan]
    lo, hi = (float(kept.min()), float(kept.max())) if kept.size else (0.0, 0.0)
    if is_float(array.dtype):  # what is subnormal may be read as 0
        lo, hi = limited(lo, hi, array.dtype)
    return Fact(lo, hi, bool(nan.any()))


def of_literal(literal):
    """The fact of a number that is written into a program; Python's numbers are float64."""
    dtype = literal.aval.dtype
    if jnp.issubdtype(dtype, np.number) or dtype == np.bool_:
        return of_array(np.asarray(literal.val).astype(dtype))
    return ANYTHING


def consistent(fact, dtype):
    """The same fact, with bounds that follow from norms, and without norms that may be exceeded.

    Norms are found for exact numbers. They hold for what is computed unless that overflows.
    """
    if is_float(dtype) and fact.l2 < fact.largest and fact.l2 <= limits(dtype)[1]:
        fact = fact._replace(lo=max(fact.lo, -fact.l2), hi=min(fact.hi, fact.l2))
    return fact._replace(l1=INF, l2=INF) if fact.largest == INF else fact


def join(a, b):
    """What holds for the numbers of both: of either branch, of this step and of the next one."""
    parts = None
    if a.parts and b.parts and len(a.parts) == len(b.parts):
        parts = tuple(map(join, a.parts, b.parts))
    lo, hi, nan = min(a.lo, b.lo), max(a.hi, b.hi), a.nan or b.nan
    return Fact(lo, hi, nan, max(a.l1, b.l1), max(a.l2, b.l2), parts)


def meet(a, b):
    """What holds for numbers that both speak about; `lo > hi` where there can be none."""
    lo, hi, nan = max(a.lo, b.lo), min(a.hi, b.hi), a.nan and b.nan
    return Fact(lo, hi, nan, min(a.l1, b.l1), min(a.l2, b.l2), a.parts or b.parts)


def is_inside(inner, outer):
    """Whether all that `inner` allows is allowed by `outer`, too."""
    return (
        outer.lo <= inner.lo
        and inner.hi <= outer.hi
        and (outer.nan or not inner.nan)
        and inner.l1 <= outer.l1
        and inner.l2 <= outer.l2
    )


def rounded(lo, hi, dtype, roundings=2):
    """Bounds of exact results, moved outward by what a machine may add to or take from them.

    A rounding to the nearest moves a number by half its dtype's precision at most, relative to
    itself. XLA may divide by a constant as it multiplies by its inverse, which rounds twice, or
    leave out the rounding between a product and a sum. Functions such as `pow` are rounded with
    less care, and get more room. Results that underflow become 0 on some processors and not on
    others.
    """
    if not is_float(dtype):
        return wrapped(lo, hi, dtype)
    relative = roundings * limits(dtype)[0] * 0.5 + 1e-15  # the latter: our own rounding
    lo = lo - abs(lo) * relative if -INF < lo < INF else lo
    hi = hi + abs(hi) * relative if -INF < hi < INF else hi
    return limited(lo, hi, dtype)


def rounded_sum(lo, hi, dtype):
    """The same for one addition or subtraction: in float32 all machines round to the nearest.

    Rounding keeps the order of numbers, so bounds may be rounded as results are. That is not only
    tighter. A sum that takes up a small term at each step stops growing where the term is less than
    half an ulp of it, and nothing but this shows it.
    """
    if dtype != np.float32:
        return rounded(lo, hi, dtype)
    return limited(nearest(lo, dtype), nearest(hi, dtype), dtype)


def nearest(x, dtype):
    """The number of a dtype that is nearest to x; of two that are as near, the even one."""
    with np.errstate(over="ignore"):
        return float(np.asarray(x).astype(dtype))


def exact_sum(x, y, towards):
    """x + y, or the next float64 in this direction where that sum is not exact."""
    total = x + y
    exact = total - x == y and total - y == x
    return total if exact or math.isinf(total) else math.nextafter(total, towards)


def limited(lo, hi, dtype):
    """Overflow at the top of a floating point dtype, and whatever underflow does at its bottom."""
    _, largest, tiny, _ = limits(dtype)
    if 0 < abs(lo) < tiny:
        lo = 0.0 if lo > 0 else -tiny
    if 0 < abs(hi) < tiny:
        hi = tiny if hi > 0 else 0.0
    if lo == hi == INF or lo == hi == -INF:
        return lo, hi
    lo = -INF if lo < -largest else min(lo, largest)
    hi = INF if hi > largest else max(hi, -largest)
    return lo, hi


def wrapped(lo, hi, dtype):
    """Integers that leave their range come back at its other end: then nothing is known of them."""
    whole = unknown(dtype)
    return (lo, hi) if whole.lo <= lo and hi <= whole.hi else (whole.lo, whole.hi)


def growth(terms, dtype):
    """The factor by which rounding may enlarge a sum of that many terms, added in any order."""
    return math.exp(min(terms * limits(dtype)[0], 700.0)) * (1 + 1e-12)
