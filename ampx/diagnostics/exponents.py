"""Exact counts of binary exponents, and what they tell about narrower formats.

A number is m * 2**e with 1 <= m < 2. For most numbers e alone tells what a cast to a narrower
format gives. But a cast rounds to nearest, so near the ends of a range m decides, too. In float16:

    above 2**-25                a magnitude rounds to 2**-24 or more, no longer to zero
    from 2**-14 - 2**-25 on     to 2**-14 or more, the smallest normal number
    from 65520 on               to infinity: half way from 65504 to what would be next, 65536

So each exponent is counted in a few cells. The cuts between them are the mantissas of all such
thresholds of all formats, and a number lies at a cut or between two:

    m       1    ...   1.75   ...   1.8125   ...   1.875   ...   1.9921875   ...
    cell    1     2     3      4      5       6      7      8        9       10    and so on

There are 8 cuts and 17 cells. The last cut, 1.99951171875, is the mantissa of 65520 above.
A loss scale of 2**s shifts e by s and leaves m as it is. So one count gives the exact shares at
every loss scale and in every format.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# float32 has exponents from -149 (subnormal) to 127: the last row counts larger ones, of float64.
LOWEST, HIGHEST = -149, 128
EXPONENTS = np.arange(LOWEST, HIGHEST + 1)  # int64[278], the rows of a histogram
_BLOCK = 1 << 18  # numbers that are counted at once: 2 MiB in float64, which stays in cache
_MASK = -1e9  # of numbers that are added, smaller ones are masks, and so are the ends of a dtype
_ENDS = frozenset(float(jnp.finfo(dtype).max) for dtype in (jnp.float32, jnp.bfloat16))


class Threshold(NamedTuple):
    """A magnitude, `mantissa * 2**exponent`, from which on something holds.

    Attributes:
      exponent: the binary exponent.
      mantissa: at least 1 and less than 2.
      above: whether it holds only above this magnitude; otherwise it holds at it, too.
    """

    exponent: int
    mantissa: float
    above: bool


def _make_threshold(magnitude: float, above: bool) -> Threshold:
    # frexp gives a mantissa from 0.5 to 1.
    mantissa, exponent = math.frexp(magnitude)
    return Threshold(exponent - 1, 2 * mantissa, above)


class Format(NamedTuple):
    """A floating format, by the thresholds of a cast to it that rounds to nearest even.

    Attributes:
      name: the name of the dtype.
      largest: the largest finite number.
      nonzero: from here on a number is not rounded to zero.
      normal: from here on it is not subnormal.
      overflow: from here on it is not finite.
    """

    name: str
    largest: float
    nonzero: Threshold
    normal: Threshold
    overflow: Threshold


def _make_format(dtype: Any) -> Format:
    info = jnp.finfo(dtype)
    largest, least, normal = (
        float(number) for number in (info.max, info.smallest_subnormal, info.smallest_normal)
    )
    # Half way from the largest number to the next, if there were one: 65504 + 32 / 2 in float16. A
    # tie rounds to the even mantissa. IEEE formats end with an odd one, so the tie goes to
    # infinity; float8_e4m3fn ends with an even one, since its last pattern is NaN. So the cast
    # itself is asked.
    beyond = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    with np.errstate(over="ignore"):
        rounds_down = bool(np.isfinite(np.float32(beyond).astype(info.dtype)))
    return Format(
        np.dtype(dtype).name,
        largest,
        nonzero=_make_threshold(least / 2, above=True),  # the tie goes to zero, which is even
        normal=_make_threshold(normal - least / 2, above=False),  # and here to the normal number
        overflow=_make_threshold(beyond, above=rounds_down),
    )


FORMATS = MappingProxyType(
    {
        np.dtype(dtype).name: _make_format(dtype)
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    }
)
_CUTS = sorted({t.mantissa for form in FORMATS.values() for t in form[2:]})
_CELLS = 2 * len(_CUTS) + 1  # below, at and between the cuts


def _make_cell_table() -> np.ndarray:
    """The cell of each mantissa, int64[8192], by its first 12 bits and whether others follow.

    A cut has at most 12 bits after the point, so these 13 bits tell on which side of it a mantissa
    lies: code 2k stands for the mantissa 1 + k / 4096 itself, 2k + 1 for all up to the next.
    """
    codes = np.arange(1 << 13)
    mantissas = 1 + codes / 2.0**13
    # The number of cuts below, plus the number of cuts at or below: equal but at a cut, odd there.
    return np.searchsorted(_CUTS, mantissas, "left") + np.searchsorted(_CUTS, mantissas, "right")


_CELL_OF = _make_cell_table()


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the binary exponents of many numbers.

    Attributes:
      cells: int64[278, cells], nonzero finite numbers by exponent and by cell of the mantissa.
      zeros: how many numbers are zero.
      non_finite: how many are not finite.
      fills: how many are fills of masks, which count nowhere else.
    """

    cells: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((len(EXPONENTS), _CELLS), np.int64)
    )
    zeros: int = 0
    non_finite: int = 0
    fills: int = 0

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.cells + other.cells,
            self.zeros + other.zeros,
            self.non_finite + other.non_finite,
            self.fills + other.fills,
        )

    def __sub__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.cells - other.cells,
            self.zeros - other.zeros,
            self.non_finite - other.non_finite,
            self.fills - other.fills,
        )

    @property
    def counts(self) -> np.ndarray:
        """Nonzero finite numbers by exponent, in the order of `EXPONENTS`."""
        return self.cells.sum(axis=1)

    @property
    def nonzero(self) -> int:
        """How many numbers are neither zero nor non-finite."""
        return int(self.cells.sum())

    @property
    def largest_exponent(self) -> int | None:
        """The largest exponent; None where all numbers are zero or non-finite."""
        found = np.flatnonzero(self.counts)
        return int(EXPONENTS[found[-1]]) if found.size else None

    def reaching(self, threshold: Threshold, shift: int = 0) -> int:
        """Counts the numbers that, times 2**shift, reach a threshold."""
        # |x| * 2**shift >= m * 2**e if and only if |x| >= m * 2**(e - shift): another row, the same
        # cell. All rows above count, and of this row the cells from the threshold on.
        row = threshold.exponent - shift - LOWEST
        if row < 0:
            return self.nonzero
        # Cut i is alone in cell 2i + 1.
        cell = 2 * _CUTS.index(threshold.mantissa) + 1 + threshold.above
        return int(self.cells[row + 1 :].sum() + self.cells[row : row + 1, cell:].sum())

    def underflows(self, form: Format, shift: int = 0) -> int:
        """How many nonzero numbers, times 2**shift, become zero in a format."""
        return self.nonzero - self.reaching(form.nonzero, shift)

    def subnormals(self, form: Format, shift: int = 0) -> int:
        """How many numbers, times 2**shift, become subnormal in a format."""
        return self.reaching(form.nonzero, shift) - self.reaching(form.normal, shift)

    def overflows(self, form: Format, shift: int = 0) -> int:
        """How many finite numbers, times 2**shift, become non-finite in a format."""
        return self.reaching(form.overflow, shift)

    def share(self, count: int) -> float:
        """A count of nonzero numbers as a share of them all."""
        return count / max(1, self.nonzero)


class Fills(NamedTuple):
    """Which numbers are written into a program to mask something; half has such a number, too.

    `jnp.where(mask, scores, -1e30)` would be reported as an overflow in float16, although autocast
    and hand-written half code use the end of float16 in its place.

    Attributes:
      masks: from this magnitude on numbers are fills, and stay that when something is added, as
        scores are to a mask of 0 and -1e9.
      picked: magnitudes that are fills where they are picked, but numbers like others in sums.
    """

    masks: float = math.inf
    picked: frozenset[float] = frozenset()

    def __or__(self, other: Fills) -> Fills:
        return Fills(min(self.masks, other.masks), self.picked | other.picked)

    def among(self, numbers: np.ndarray) -> np.ndarray:
        """Which of some numbers are fills."""
        if self == NO_FILLS:
            return np.zeros(numbers.shape, bool)
        sizes = np.abs(numbers.astype(np.float64))
        return np.isfinite(sizes) & ((sizes >= self.masks) | np.isin(sizes, list(self.picked)))


NO_FILLS = Fills()


def find_fills(number: Any) -> Fills:
    """Finds which numbers a real number that is written into a program may make fills.

    What float16 can hold does not count as one. Half of a mask's magnitude is the limit for
    `masks`: what is added to it may bring it nearer to zero.
    """
    number = float(np.float32(number))
    if not FORMATS["float16"].largest < abs(number) < math.inf:
        return NO_FILLS
    if number <= _MASK or number in _ENDS:
        return Fills(masks=abs(number) / 2)
    return Fills(picked=frozenset((abs(number),)))


def count_exponents(array: Any, fills: Fills = NO_FILLS) -> Histogram:
    """Counts the numbers of an array by exponents, those that are fills apart.

    Args:
      array: of a floating dtype, or complex: real and imaginary parts are numbers of their own.
      fills: which of its numbers are fills.
    """
    numbers = np.ravel(np.asarray(array))
    if np.iscomplexobj(numbers):
        numbers = np.concatenate([numbers.real, numbers.imag])
    is_fill = fills.among(numbers)
    total, numbers = Histogram(fills=int(np.count_nonzero(is_fill))), numbers[~is_fill]
    for start in range(0, numbers.size, _BLOCK):
        total += _count_block(numbers[start : start + _BLOCK])
    return total


def _count_block(numbers: np.ndarray) -> Histogram:
    # A float64 is, from the top: 1 bit of sign, 11 of exponent + 1023, 52 of mantissa. A conversion
    # to it is exact, and every subnormal number of a narrower dtype is normal in it: the exponent
    # can be read off. Without the sign, the bits of larger numbers are larger integers; those of
    # infinity are 0x7FF << 52, and those of NaN above.
    bits = np.abs(numbers.astype(np.float64)).view(np.int64)
    zeros = bits == 0
    finite = bits < np.int64(0x7FF) << 52
    bits = bits[finite & ~zeros]
    rows = np.clip((bits >> 52) - 1023, LOWEST, HIGHEST) - LOWEST
    # The first 12 bits of the mantissa, bits 51 to 40, shifted up by one; below them whether any of
    # bits 39 to 0 is set.
    follows = (bits & ((1 << 40) - 1)) != 0
    places = rows * _CELLS + _CELL_OF[((bits >> 39) & 0x1FFE) | follows]
    cells = np.bincount(places, minlength=len(EXPONENTS) * _CELLS)
    return Histogram(
        cells.reshape(-1, _CELLS),
        int(np.count_nonzero(zeros)),
        int(numbers.size - np.count_nonzero(finite)),
    )
