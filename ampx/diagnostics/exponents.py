"""Exact counts of binary exponents, and what they tell of narrower formats.

A cast rounds, so the exponent alone does not say what becomes of a number near the end of a range.
Each exponent is therefore counted in a few cells, divided at the mantissas where some format rounds
to zero, to its first normal number, or beyond its last. Powers of two move all of them alike: from
one count follow the shares at every loss scale.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

LOWEST, HIGHEST = -149, 128  # float32 ends at 127: the last counts what is larger, in float64
EXPONENTS = np.arange(LOWEST, HIGHEST + 1)
_BLOCK = 1 << 18  # numbers that are counted at once
_MASK = -1e9  # of numbers that are added, smaller ones are masks, and so are the ends of a dtype
_ENDS = frozenset(float(jnp.finfo(dtype).max) for dtype in (jnp.float32, jnp.bfloat16))


class Threshold(NamedTuple):
    """The least magnitude of which something holds; for `above`, the last of which it does not."""

    exponent: int
    mantissa: float
    above: bool


def _threshold(magnitude: float, above: bool) -> Threshold:
    mantissa, exponent = math.frexp(magnitude)
    return Threshold(exponent - 1, 2 * mantissa, above)


class Format(NamedTuple):
    """A floating format, by the thresholds of a cast to it that rounds to nearest even.

    Attributes:
      name: of the dtype.
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


def _format(dtype: Any) -> Format:
    info = jnp.finfo(dtype)
    largest, least, normal = (
        float(number) for number in (info.max, info.smallest_subnormal, info.smallest_normal)
    )
    # Half way to what would be the next number. Whether that rounds up depends on the last digit.
    beyond = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    with np.errstate(over="ignore"):
        rounds_down = bool(np.isfinite(np.float32(beyond).astype(info.dtype)))
    return Format(
        np.dtype(dtype).name,
        largest,
        nonzero=_threshold(least / 2, above=True),
        normal=_threshold(normal - least / 2, above=False),
        overflow=_threshold(beyond, above=rounds_down),
    )


FORMATS = MappingProxyType(
    {
        np.dtype(dtype).name: _format(dtype)
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    }
)
_CUTS = sorted({t.mantissa for form in FORMATS.values() for t in form[2:]})
_CELLS = 2 * len(_CUTS) + 1  # below, at and between the cuts


def _cell_table() -> np.ndarray:
    """The cell of a mantissa, by its first 12 bits and whether others follow."""
    codes = np.arange(1 << 13)
    mantissas = 1 + codes / 2.0**13
    return np.searchsorted(_CUTS, mantissas, "left") + np.searchsorted(_CUTS, mantissas, "right")


_CELL_OF = _cell_table()


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the binary exponents of many numbers.

    Attributes:
      cells: of nonzero finite numbers, by exponent and by cell of the mantissa.
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
        """How many numbers, times 2**shift, reach a threshold."""
        row = threshold.exponent - shift - LOWEST
        if row < 0:
            return self.nonzero
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

    Attributes:
      masks: from this magnitude on numbers are fills, and stay that when something is added.
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
    """What a real number that is written into a program may fill in."""
    number = float(np.float32(number))
    if not FORMATS["float16"].largest < abs(number) < math.inf:
        return NO_FILLS
    if number <= _MASK or number in _ENDS:
        return Fills(masks=abs(number) / 2)
    return Fills(picked=frozenset((abs(number),)))


def count_exponents(array: Any, fills: Fills = NO_FILLS) -> Histogram:
    """Counts the numbers of a floating or complex array, those that are fills apart."""
    numbers = np.ravel(np.asarray(array))
    if np.iscomplexobj(numbers):
        numbers = np.concatenate([numbers.real, numbers.imag])
    is_fill = fills.among(numbers)
    total, numbers = Histogram(fills=int(np.count_nonzero(is_fill))), numbers[~is_fill]
    for start in range(0, numbers.size, _BLOCK):
        total += _of_block(numbers[start : start + _BLOCK])
    return total


def _of_block(numbers: np.ndarray) -> Histogram:
    # In float64 every subnormal number of a narrower dtype is normal.
    bits = np.abs(numbers.astype(np.float64)).view(np.int64)
    zeros = bits == 0
    finite = bits < np.int64(0x7FF) << 52
    bits = bits[finite & ~zeros]
    rows = np.clip((bits >> 52) - 1023, LOWEST, HIGHEST) - LOWEST
    follows = (bits & ((1 << 40) - 1)) != 0
    places = rows * _CELLS + _CELL_OF[((bits >> 39) & 0x1FFE) | follows]
    cells = np.bincount(places, minlength=len(EXPONENTS) * _CELLS)
    return Histogram(
        cells.reshape(-1, _CELLS),
        int(np.count_nonzero(zeros)),
        int(numbers.size - np.count_nonzero(finite)),
    )
