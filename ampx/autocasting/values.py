"""What the planner knows of a value, and what its readers ask of it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.jaxprs import reading


class Vote(enum.IntEnum):
    """What a float32 value asks of an operation that takes the widest of its operands."""

    NEUTRAL = 0  # a constant, or weakly typed: follows the others
    SPREAD = 1  # a parameter repeated for every example: yields to an activation in half
    PARAMETER = 2  # an input that nothing has computed on
    FLOAT32 = 3
    HALF = 4


class Value(NamedTuple):
    """What is known of a value that was traced as float32. Every other type is neutral.

    Attributes:
      half: whether it really is half. A value may vote half and still be float32.
      vote: see `Vote`.
      constant: the number it is filled with, where that is known.
      span: least and largest magnitude of its finite numbers other than zero, where that is known.
    """

    half: bool
    vote: Vote
    constant: float | None = None
    span: tuple[float, float] | None = None


AS_TRACED = Value(False, Vote.NEUTRAL)
COMPUTED = Value(False, Vote.FLOAT32)
IN_HALF = Value(True, Vote.HALF)


class Demand(enum.IntEnum):
    """What the readers of a value ask of it, all together."""

    NONE = 0  # nobody reads it, or whoever does is as happy with either
    FLOAT32 = 1  # every reader computes in float32
    HALF = 2  # one reader, which converts it to half
    KEEP = 3  # as its operation makes it
    PIN_FLOAT32 = 4  # a boundary that must be float32
    PIN_HALF = 5  # a boundary that must be half

    @property
    def is_float32(self) -> bool:
        """Whether making the value float32 loses nobody anything."""
        return self in (Demand.FLOAT32, Demand.PIN_FLOAT32)


def joined(first: Demand, second: Demand) -> Demand:
    """What two readers ask together."""
    if first is Demand.NONE or second is Demand.NONE:
        return max(first, second)
    if first.is_float32 and second.is_float32:
        return Demand.FLOAT32
    return Demand.KEEP


def pinned(value: Value, demand: Demand, float32: bool) -> Value:
    """What is known of an output of a jaxpr, once it meets what was asked of it."""
    if not float32:
        return AS_TRACED
    if demand is Demand.PIN_HALF:
        return IN_HALF
    if demand is Demand.PIN_FLOAT32 and (value.half or value.vote is Vote.HALF):
        return COMPUTED
    if demand is Demand.KEEP and value.vote is Vote.HALF:
        return IN_HALF
    return value


def is_float32(atom: Any) -> bool:
    """Whether autocast may touch an atom: whether it was traced as float32."""
    return getattr(atom.aval, "dtype", None) == np.float32


def input_value(aval: Any) -> Value:
    """What is known of an input of the whole function."""
    if getattr(aval, "dtype", None) != np.float32:
        return AS_TRACED
    # A weakly typed array came from somewhere; a weakly typed scalar is a number of the program.
    weak_number = aval.weak_type and aval.ndim == 0
    return Value(False, Vote.NEUTRAL if weak_number else Vote.PARAMETER)


def constant_value(aval: Any) -> Value:
    """What is known of an array that the function closes over."""
    if getattr(aval, "dtype", None) == np.float32 and aval.ndim == 0:
        return AS_TRACED
    return input_value(aval)


def literal_value(atom: Any) -> Value:
    """What is known of a constant written into an equation."""
    number = np.asarray(atom.val)
    if number.ndim or number.dtype.kind not in "fiub" or number != number:
        return AS_TRACED
    return filled_with(float(number))


def filled_with(constant: float) -> Value:
    """What is known of an array filled with a number."""
    return Value(False, Vote.NEUTRAL, constant, span_of(constant))


NOTHING = (np.inf, 0.0)  # the span of zeros


def span_of(constant: float) -> tuple[float, float]:
    """The span of one number."""
    counts = constant != 0 and np.isfinite(constant)
    return (abs(constant), abs(constant)) if counts else NOTHING


def fits(span: tuple[float, float] | None, dtype: Any, saturates: bool = False) -> bool:
    """Whether numbers of this span keep their kind in `dtype`: nonzero and finite stay so.

    With `saturates`, too large ones may become the largest one.
    """
    if span is None:
        return False
    least, largest = span
    limits = jnp.finfo(dtype)
    enough = saturates or largest <= float(limits.max)
    return enough and least >= float(limits.smallest_subnormal)


def saturated(constant: float, dtype: Any) -> np.ndarray:
    """A number in `dtype`, a finite one kept finite."""
    largest = float(jnp.finfo(dtype).max)
    if np.isfinite(constant):
        constant = min(max(constant, -largest), largest)
    return np.asarray(constant, dtype)


def moved(value: Value, spreads: bool) -> Value:
    """What is known of a value that was only moved, perhaps repeated for every example."""
    if spreads and value.vote is Vote.PARAMETER:
        return value._replace(vote=Vote.SPREAD)
    return value


def blended(values: Iterable[Value], picks: bool) -> Value:
    """What is known of a float32 result of these operands: constants make a constant.

    Args:
      values: of the float32 operands.
      picks: whether each number of the result is one of an operand.
    """
    values = list(values)
    if any(value.vote is not Vote.NEUTRAL for value in values):
        return COMPUTED
    spans = [value.span for value in values if value.span is not None]
    if not picks or len(spans) < len(values):
        return AS_TRACED
    return AS_TRACED._replace(span=(min(s[0] for s in spans), max(s[1] for s in spans)))


def same_shape(first: Any, second: Any) -> bool:
    """Whether two atoms have the same shape, whose sizes may be symbolic."""
    return tuple(first.aval.shape) == tuple(second.aval.shape)


def serves_every_example(first: Any, second: Any) -> bool:
    """Whether a smaller atom is repeated along the first axis of a larger one, as biases are."""
    small, large = first.aval.shape, second.aval.shape
    if not large or len(small) < len(large):
        return bool(large)
    return small[0] == 1 and large[0] != 1


def result(aval: Any, value: Value) -> Value:
    """What is known of an output, by its type: weakly typed numbers stay neutral."""
    if getattr(aval, "dtype", None) != np.float32:
        return value if value.vote is Vote.NEUTRAL else AS_TRACED
    if value.half or value.vote is not Vote.NEUTRAL:
        weak_number = aval.weak_type and aval.ndim == 0 and not value.half
        return value._replace(vote=Vote.NEUTRAL) if weak_number else value
    # Of an array of unknown numbers, only those written into the program are neutral.
    return COMPUTED if aval.ndim and value.span is None else value


def actual_dtype(aval: Any, value: Value, half_dtype: Any) -> Any:
    """The dtype a value really has."""
    return np.dtype(half_dtype) if value.half else aval.dtype


def actual_aval(aval: Any, value: Value, half_dtype: Any) -> Any:
    """The type a value really has."""
    return reading.with_dtype(aval, half_dtype) if value.half else aval
