"""Sets of small numbers as the bits of an int: 0b101 holds 0 and 2.

A program has thousands of values, and a union of such sets is one `|`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable


def unite(sets: Iterable[int]) -> int:
    """The union of sets."""
    return functools.reduce(operator.or_, sets, 0)


def members_of(bits: int) -> tuple[int, ...]:
    """The members of a set, in order."""
    return tuple(place for place in range(bits.bit_length()) if bits >> place & 1)
