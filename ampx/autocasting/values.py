"""What the planner knows of a value, and what its readers ask of it.

Forward, knowledge of operands becomes knowledge of results: a `KnownValue`. Backward, readers ask
things of the values that they read: a `Demand`.

A `KnownValue` says two things that are easily taken for one. `half` is the dtype in which the value
will be held. `vote` is what it stands for when operands must agree on a dtype. They differ where an
operation on half values runs in float32 for its accuracy alone: `h / s` with a half activation `h`
and a scale `s` that is known only when it runs. The quotient is held in float32, since to narrow
`s` = 1e-8 first would make it 0 in float16. But it votes half: it is an activation like `h`, and a
reader with several operands must not become float32 because of it.

Numbers written into the program have no dtype of their own: JAX traced them as float32 because
everything was. They are NEUTRAL, whatever array they fill, and what is known of their magnitude
tells whether half can hold them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.jaxprs import reading


class Vote(enum.IntEnum):
    """How a value counts in an operation that takes the widest dtype of its operands.

    HALF operands make the operation half unless another operand objects. FLOAT32 objects always.
    PARAMETER and REPEATED object unless the operation uses them as a bias or a scale, since a
    float32 bias would otherwise make everything after a layer float32. NEUTRAL never objects.
    """

    NEUTRAL = 0  # a constant, or weakly typed: follows the others
    REPEATED = 1  # a parameter that was broadcast, the same for every example: a bias or a scale
    PARAMETER = 2  # an input of the function that nothing has computed on
    FLOAT32 = 3  # computed in float32
    HALF = 4  # computed in half, or a result that belongs in half


class KnownValue(NamedTuple):
    """What is known of a value that was traced as float32. Every other type is neutral.

    Attributes:
      half: whether it is held in half. A value may vote half and still be held in float32.
      vote: see `Vote`.
      constant: the number it is filled with, where that is known.
      span: least and largest magnitude of its finite numbers other than zero, where that is known.
    """

    half: bool
    vote: Vote
    constant: float | None = None
    span: tuple[float, float] | None = None


# Three values that most results have: of a type that autocast does not touch, or a number of which
# nothing is known; computed in float32; computed in half.
AS_TRACED = KnownValue(False, Vote.NEUTRAL)
COMPUTED = KnownValue(False, Vote.FLOAT32)
IN_HALF = KnownValue(True, Vote.HALF)


class Demand(enum.IntEnum):
    """What the readers of a value ask of it, all together.

    FLOAT32 lifts what computes the value. HALF lets a scan convert the value once, before the loop.
    The two pins are not requests of readers but orders at a border: the outputs of a body.
    """

    NONE = 0  # nobody reads it, or its readers take either dtype
    FLOAT32 = 1  # every reader computes in float32
    HALF = 2  # there is exactly one reader, and it converts the value to half
    KEEP = 3  # readers differ, or follow: the value stays as its operation makes it
    PIN_FLOAT32 = 4  # a border that must be float32
    PIN_HALF = 5  # a border that must be half

    @property
    def is_float32(self) -> bool:
        """Whether every reader computes in float32, so that it may as well be float32."""
        return self in (Demand.FLOAT32, Demand.PIN_FLOAT32)


def join_demands(first: Demand, second: Demand) -> Demand:
    """Joins what two readers ask of one value.

    HALF and HALF give KEEP. Two readers that narrow a value do so each for itself: one conversion
    for both would add their two cotangents in half.
    """
    if first is Demand.NONE or second is Demand.NONE:
        return max(first, second)
    if first.is_float32 and second.is_float32:
        return Demand.FLOAT32
    return Demand.KEEP


def apply_demand(value: KnownValue, demand: Demand, float32: bool) -> KnownValue:
    """Computes what is known of an output of a jaxpr, once it meets what was asked of it.

    Args:
      value: what is known of it inside.
      demand: what is asked of it outside.
      float32: whether it was traced as float32.
    """
    if not float32:
        return AS_TRACED
    if demand is Demand.PIN_HALF:
        return IN_HALF
    if demand is Demand.PIN_FLOAT32 and (value.half or value.vote is Vote.HALF):
        return COMPUTED
    # It belongs in half and was held in float32 for accuracy: narrowed where it leaves the jaxpr.
    if demand is Demand.KEEP and value.vote is Vote.HALF:
        return IN_HALF
    return value


def is_float32(atom: Any) -> bool:
    """Whether an atom was traced as float32. Autocast touches no other type.

    A float16 or float64 in a program was asked for, and tokens and references have no dtype.
    """
    return getattr(atom.aval, "dtype", None) == np.float32


def describe_input(aval: Any) -> KnownValue:
    """Describes an input of the whole function."""
    if getattr(aval, "dtype", None) != np.float32:
        return AS_TRACED
    # JAX marks Python numbers as weakly typed, so a weak scalar is a number of the program. A weak
    # array is the result of some operation on numbers, such as `jnp.full`, and is data like others.
    weak_number = aval.weak_type and aval.ndim == 0
    return KnownValue(False, Vote.NEUTRAL if weak_number else Vote.PARAMETER)


def describe_closed_over(aval: Any) -> KnownValue:
    """Describes an array that the function closes over.

    A scalar is taken for a number of the program (`jnp.sqrt(d)`, computed before), a larger array
    for a parameter.
    """
    if getattr(aval, "dtype", None) == np.float32 and aval.ndim == 0:
        return AS_TRACED
    return describe_input(aval)


def describe_literal(atom: Any) -> KnownValue:
    """Describes a constant written into an equation."""
    number = np.asarray(atom.val)
    if number.ndim or number.dtype.kind not in "fiub" or number != number:
        return AS_TRACED
    return describe_fill(float(number))


def describe_fill(constant: float) -> KnownValue:
    """Describes an array filled with a number."""
    return KnownValue(False, Vote.NEUTRAL, constant, compute_span(constant))


# No number but zeros and infinities: an empty range, so that the union of spans is (min, max).
SPAN_OF_ZEROS = (np.inf, 0.0)


def compute_span(constant: float) -> tuple[float, float]:
    """Computes the span of one number: half has zeros and infinities, so these have none."""
    counts = constant != 0 and np.isfinite(constant)
    return (abs(constant), abs(constant)) if counts else SPAN_OF_ZEROS


def fits_in(span: tuple[float, float] | None, dtype: Any, saturates: bool = False) -> bool:
    """Whether numbers of this span keep their kind in `dtype`: nonzero and finite stay so.

    Rounding is not asked about. 0.1 fits in float16, 1e6 (infinite) and 1e-9 (zero) do not.

    Args:
      span: least and largest magnitude, or None where it is not known, which fits in nothing.
      dtype: the half dtype.
      saturates: whether numbers that are too large may become the largest one.
    """
    if span is None:
        return False
    least, largest = span
    limits = jnp.finfo(dtype)
    enough = saturates or largest <= float(limits.max)
    return enough and least >= float(limits.smallest_subnormal)


def rounds_to_one(span: tuple[float, float] | None, dtype: Any) -> bool:
    """Whether a number at an end of this span becomes 1 or -1 in `dtype` and is none.

    `clip(p, 1e-7, 1 - 1e-7)` guards what ends at 1: `log(1 - p)`, `arctanh(p)`, `sqrt(1 - p**2)`.
    """
    distance = float(jnp.finfo(dtype).eps)  # from 1 to the next number above it
    return span is not None and any(
        0 < abs(number - 1) < distance and reading.round_number(number, dtype) == 1
        for number in span
    )


def saturate(constant: float, dtype: Any) -> np.ndarray:
    """Converts a number to `dtype`, and keeps it finite if it was.

    A mask's fill of -1e9 becomes -65504 in float16, not -inf: softmax over a row that is masked out
    altogether is then uniform, and not NaN.
    """
    largest = float(jnp.finfo(dtype).max)
    if np.isfinite(constant):
        constant = min(max(constant, -largest), largest)
    return np.asarray(constant, dtype)


def describe_moved(value: KnownValue, spreads: bool) -> KnownValue:
    """Describes a value that was only moved, perhaps repeated for every example."""
    if spreads and value.vote is Vote.PARAMETER:
        return value._replace(vote=Vote.REPEATED)
    return value


def describe_result_of(values: Iterable[KnownValue], picks: bool) -> KnownValue:
    """Describes a float32 result of these operands: constants make a constant.

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


def have_same_shape(first: Any, second: Any) -> bool:
    """Whether two atoms have the same shape, whose sizes may be symbolic."""
    return tuple(first.aval.shape) == tuple(second.aval.shape)


def is_repeated_along_first_axis(first: Any, second: Any) -> bool:
    """Whether a smaller atom is repeated along the first axis of a larger one, as biases are.

    By convention the first axis counts examples. f32[8] or f32[1, 8] added to f32[4, 8] is the same
    for all four; f32[4, 1] is a weight for each example, and f32[4, 8] may be a mask.
    """
    small, large = first.aval.shape, second.aval.shape
    if not large or len(small) < len(large):
        return bool(large)
    return small[0] == 1 and large[0] != 1


def restrict_to_type(aval: Any, value: KnownValue) -> KnownValue:
    """Restricts what is known of an output to what its type allows.

    A scalar that is still weakly typed is a number, whatever computed it, and stays neutral.
    """
    if getattr(aval, "dtype", None) != np.float32:
        return value if value.vote is Vote.NEUTRAL else AS_TRACED
    if value.half or value.vote is not Vote.NEUTRAL:
        weak_number = aval.weak_type and aval.ndim == 0 and not value.half
        return value._replace(vote=Vote.NEUTRAL) if weak_number else value
    # Nothing is known of the numbers in this array but that constants went into it. Only arrays
    # filled with numbers of the program stay neutral; this one is data, computed in float32.
    return COMPUTED if aval.ndim and value.span is None else value


def actual_dtype(aval: Any, value: KnownValue, half_dtype: Any) -> Any:
    """The dtype in which a value is held."""
    return np.dtype(half_dtype) if value.half else aval.dtype


def actual_aval(aval: Any, value: KnownValue, half_dtype: Any) -> Any:
    """The type with which a value is held."""
    return reading.with_dtype(aval, half_dtype) if value.half else aval
