"""Arithmetic of powers of the loss scale: what is known of a product, a root, a constant.

A value's `Power` is the exponent of the scale in it, and some marks. The rules here are those of
arithmetic; which operation of a program follows which of them stands in `scale_powers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.diagnostics import bit_sets
from ampx.jaxprs import reading

# What is known of a value besides its power, as bits. The first three it has from any operand, the
# next two only if all of them have it. What a predicate chooses among scales is a scale.
READS = 1  # it depends on the loss scale
MULTIPLIED = 2  # it was multiplied by the scale
DIVIDED = 4  # it was divided by the scale
PURE = 8  # it is made of the scale and constants alone
FREE = 16  # it has every power
TINY = 32  # it is a number that only keeps a denominator from being 0
NEAR_ZERO = 64  # it is true, or 1, where some value is zero or nearly so
FAR_FROM_ZERO = 128  # it is false, or 0, there
INHERITED = READS | MULTIPLIED | DIVIDED

_FORMATS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
_EXTREMES = frozenset(
    float(sign * jnp.finfo(name).max) for name in _FORMATS for sign in (1, -1)
) | {0.0, float("inf"), float("-inf")}
_LARGEST_GUARD = 1e-6
_LARGEST_CONSTANT = 1 << 16  # elements: larger ones are not looked at, and have the power 0


class Power(NamedTuple):
    """The power of the loss scale in a value.

    Attributes:
      power: None where it is not known.
      marks: bits, see `READS` and the others.
      conflicts: the conflicts that made it unknown; bit i is conflict i.
      origin: the carried input that it is a multiple of, or -1.
      parts: of a vector that scalars were stacked to, what is known of each; else ().
    """

    power: Fraction | None
    marks: int = 0
    conflicts: int = 0
    origin: int = -1
    parts: tuple[Any, ...] = ()


CONSTANT = Power(Fraction(0), PURE)
ZERO = Power(Fraction(0), PURE | FREE)


def keep_common(old: Power, new: Power) -> Power:
    """What is true of a value before and after an iteration."""
    marks = unite_marks([old, new])
    conflicts = old.conflicts | new.conflicts
    if old.marks & FREE or new.marks & FREE:
        known = new if old.marks & FREE else old
        marks |= known.marks & FREE
        return Power(known.power, marks, conflicts)
    origin = old.origin if old.origin == new.origin else -1
    return Power(old.power if old.power == new.power else None, marks, conflicts, origin)


def unite_marks(values: Sequence[Power]) -> int:
    """The marks of what several values go into, without `FREE`."""
    given, pure = 0, PURE
    for value in values:
        given |= value.marks & INHERITED
        pure &= value.marks
    return given | pure


def as_read(value: Power, read: Sequence[Power]) -> Power:
    """A value that also depends on others, such as the predicate of a choice."""
    return value._replace(marks=value.marks | unite_marks(read) & READS)


def multiply(first: Power, second: Power, sign: int) -> Power:
    """The power of a product (sign 1) or a quotient (sign -1)."""
    conflicts, marks = first.conflicts | second.conflicts, unite_marks([first, second])
    if (first.marks | second.marks) & FREE:
        # A product with zero is zero. One with an infinity is no number worth following.
        return Power(Fraction(0), marks | FREE, conflicts)
    if first.power is None or second.power is None:
        return Power(None, marks, conflicts)
    for scale, other, power in (
        (first, second, first.power),
        (second, first, sign * second.power),
    ):
        if scale.marks & PURE and not other.marks & PURE and power:
            marks |= MULTIPLIED if power > 0 else DIVIDED
    # A multiple of a carried input by what no scale is in is still one of it.
    origin = -1
    if second.power == 0 and second.origin < 0:
        origin = first.origin
    elif first.power == 0 and first.origin < 0 and sign > 0:
        origin = second.origin
    return Power(first.power + sign * second.power, marks, conflicts, origin)


def raise_to(value: Power, exponent: Fraction) -> Power:
    """The power of a value to an exponent, such as 1/2 for a root."""
    power = None if value.power is None else value.power * exponent
    marks = value.marks & ~TINY if exponent > 0 else value.marks & ~(FREE | TINY)
    return Power(power, marks, value.conflicts)


def of_unknown_function(inputs: Sequence[Power]) -> Power:
    """The power of a function that nothing is known of: 0, if all that it reads has the power 0."""
    conflicts = bit_sets.unite(v.conflicts for v in inputs)
    is_plain = all(v.power == 0 for v in inputs)
    return Power(Fraction(0) if is_plain else None, unite_marks(inputs), conflicts)


def of_constant(value: Any) -> Power:
    """The power of a constant: every one for zeros, infinities and the ends of formats."""
    if getattr(value, "size", 1) > _LARGEST_CONSTANT:
        return CONSTANT
    if np.iscomplexobj(value):
        value = np.stack([np.real(value), np.imag(value)])
    if not reading.is_numeric(value):
        return CONSTANT
    numbers = np.unique(np.asarray(value, np.float64))
    is_free = all(number in _EXTREMES or np.isnan(number) for number in numbers.tolist())
    is_tiny = numbers.size == 1 and is_guard(numbers[0])
    return ZERO if is_free else CONSTANT._replace(marks=PURE | (TINY if is_tiny else 0))


def is_guard(number: float) -> bool:
    """Whether a number is so small that it only keeps a denominator from being 0."""
    return 0 < abs(number) <= _LARGEST_GUARD
