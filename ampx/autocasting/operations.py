"""What becomes of one equation that holds no jaxprs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.autocasting import tables
from ampx.autocasting.decisions import Decision
from ampx.autocasting.values import (
    AS_TRACED,
    COMPUTED,
    IN_HALF,
    Value,
    Vote,
    blended,
    filled_with,
    fits,
    is_float32,
    moved,
    result,
    serves_every_example,
    span_of,
)
from ampx.jaxprs import building, reading

OUT_OF_RANGE = "a constant leaves the range of half"


def decide(
    eqn: Any,
    values: tuple[Value, ...],
    precision: tables.Precision,
    rule: str,
    half: Any,
    lift: bool,
) -> Decision:
    """The decision for an equation whose rule gives it this precision.

    Args:
      eqn: the equation.
      values: what is known of its operands.
      precision: what its rule asks for.
      rule: who asks: the name of its primitive, where nothing but the defaults does.
      half: the half dtype.
      lift: whether to compute in float32, because every reader does.
    """
    name = eqn.primitive.name
    forced = rule != name
    if name == "convert_element_type":
        return _conversion(eqn, values, precision, rule, lift)
    if not any(map(is_float32, eqn.invars)):
        return full(eqn, values, rule)
    if precision == "float32" or lift:
        return full(eqn, values, "every reader is float32" if lift else rule)
    if not forced and _is_reciprocal(eqn, values):
        return full(eqn, values, "reciprocal")
    if not forced and _sums_over_vmap(eqn):
        return full(eqn, values, "a sum over an axis of vmap")
    if precision == "half":
        return _asked_for_half(eqn, values, rule, half)
    if name in tables.ONE_TO_ONE and len(eqn.outvars) == len(eqn.invars):
        return Decision(
            "half" if any(v.half for v in values) else "float32",
            rule,
            (None,) * len(values),
            values,
            follows=name not in tables.TRANSFERS,
        )
    return _widest(eqn, values, rule, half)


def opaque(eqn: Any, rule: str) -> Decision:
    """An equation that gets and gives the dtypes it was traced with."""
    outputs = tuple(COMPUTED if is_float32(out) else AS_TRACED for out in eqn.outvars)
    operands = tuple(False if is_float32(atom) else None for atom in eqn.invars)
    involved = any(map(is_float32, (*eqn.invars, *eqn.outvars)))
    return Decision("float32" if involved else "as traced", rule, operands, outputs)


def full(eqn: Any, values: tuple[Value, ...], rule: str) -> Decision:
    """An equation whose float32 operands are float32 indeed."""
    touched = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float32(atom)]
    name = eqn.primitive.name
    if name in tables.MOVING and not touched:
        return Decision("as traced", rule, (None,) * len(values), values * len(eqn.outvars))
    if not touched:
        known = COMPUTED
    elif name in tables.MOVING:
        known = moved(touched[0], spreads=_spreads(eqn))
        if known.half or known.vote is Vote.HALF:
            known = COMPUTED
    else:
        known = _folded(eqn, touched) or blended(touched, name in tables.PICKING)
    outputs = tuple(known if is_float32(out) else AS_TRACED for out in eqn.outvars)
    involved = touched or any(is_float32(out) for out in eqn.outvars)
    operands = tuple(False if is_float32(atom) else None for atom in eqn.invars)
    return Decision("float32" if involved else "as traced", rule, operands, outputs)


def _folded(eqn: Any, operands: Sequence[Value]) -> Value | None:
    """A constant computed from constants, such as the root of a head's size."""
    compute = tables.FOLDED.get(eqn.primitive.name)
    constants = [value.constant for value in operands]
    if compute is None or None in constants or len(constants) != len(eqn.invars):
        return None
    with np.errstate(all="ignore"):
        number = compute(*map(np.float32, constants))
    return filled_with(float(number)) if number == number else None


def _half(eqn: Any, rule: str) -> Decision:
    operands = tuple(True if is_float32(atom) else None for atom in eqn.invars)
    outputs = tuple(IN_HALF if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision("half", rule, operands, outputs)


def _asked_for_half(eqn: Any, values: tuple[Value, ...], rule: str, half: Any) -> Decision:
    name = eqn.primitive.name
    if _opts_out(eqn, half):
        return full(eqn, values, "precision asked for")
    if name not in tables.DEFAULTS:
        return _unknown_in_half(eqn, rule, half)
    if name in tables.WITHOUT_HALF_FORM:
        return full(eqn, values, "has no half form")
    in_range = all(value.span is None or fits(value.span, half) for value in values)
    if name not in tables.HALF_BY_DEFAULT and not in_range:
        return full(eqn, values, OUT_OF_RANGE)
    return _half(eqn, rule)


def _unknown_in_half(eqn: Any, rule: str, half: Any) -> Decision:
    made = building.output_dtypes(eqn, [half if is_float32(a) else None for a in eqn.invars])
    outputs = []
    for out, dtype in zip(eqn.outvars, made, strict=True):
        if dtype not in (half, out.aval.dtype):
            raise TypeError(
                f"{eqn.primitive.name} gives {dtype} for operands in {half}, expected {half} "
                f"or {out.aval.dtype}: it cannot have the rule {rule}"
            )
        if dtype != out.aval.dtype and not is_float32(out):
            raise TypeError(f"{eqn.primitive.name} changes {out.aval.dtype} to {dtype}")
        outputs.append(IN_HALF if dtype != out.aval.dtype else result(out.aval, COMPUTED))
    return _half(eqn, rule)._replace(outputs=tuple(outputs))


def _widest(eqn: Any, values: tuple[Value, ...], rule: str, half: Any) -> Decision:
    """Half if some operand is and all others agree, otherwise float32."""
    name = eqn.primitive.name
    some_half, reason = False, ""
    for atom, value in zip(eqn.invars, values, strict=True):
        if not is_float32(atom):
            continue
        if value.vote is Vote.HALF:
            some_half = True
        elif value.vote is Vote.NEUTRAL:
            objection = _objection(name, atom, value, half)
            if objection is not None:
                return full(eqn, values, objection or rule)
            if value.span is None and name in tables.SPREADING:
                reason = "float32, for a number that is not known"
        elif not _yields(eqn, atom, value):
            return full(eqn, values, rule)
        elif name in ("mul", "div"):
            reason = "float32, for the range of a parameter"
    if not some_half:
        return full(eqn, values, rule)
    if _sums_when_transposed(eqn):
        fill = eqn.params.get("fill_value")
        if fill is not None and not fits(span_of(float(fill)), half):
            return full(eqn, values, OUT_OF_RANGE)
        reason = "float32, for the sum of its transpose"
    if reason:
        outputs = (Value(False, Vote.HALF),)
        return full(eqn, values, reason)._replace(outputs=outputs, follows=True)
    return _half(eqn, rule)._replace(follows=name not in tables.TRANSFERS)


def _objection(name: str, atom: Any, constant: Value, half: Any) -> str | None:
    """Why a constant operand must not become half, if so."""
    if name in tables.COMPARING:
        number = constant.constant
        exact = number is not None and float(np.asarray(number, half)) == number
        return None if exact else ""
    fill = not reading.is_literal(atom) and constant.constant == 0
    if fill and atom.aval.ndim and name in tables.ACCUMULATING:
        return "summed into zeros"
    if name in tables.SPREADING and constant.span is None:
        return None  # a number, or its operation would promote: computed in float32
    saturates = name in tables.SELECTING
    return None if fits(constant.span, half, saturates) else OUT_OF_RANGE


def _yields(eqn: Any, atom: Any, value: Value) -> bool:
    """Whether a float32 operand is a bias or a scale that must not promote an activation."""
    if eqn.primitive.name not in tables.SPREADING:
        return False
    return value.vote is Vote.SPREAD or (
        value.vote is Vote.PARAMETER and serves_every_example(atom, eqn.outvars[0])
    )


def _sums_when_transposed(eqn: Any) -> bool:
    name = eqn.primitive.name
    resized = name not in tables.MOVING or eqn.invars[0].aval.size != eqn.outvars[0].aval.size
    return name in tables.SUMMING_WHEN_TRANSPOSED and resized


def _conversion(
    eqn: Any, values: tuple[Value, ...], precision: str, rule: str, lift: bool
) -> Decision:
    """A conversion in the program was asked for; one that changes only weak typing was not."""
    (value,), (source,), (out,) = values, eqn.invars, eqn.outvars
    if is_float32(source) and is_float32(out):
        if lift or not value.half:
            kept = COMPUTED if value.vote is Vote.HALF else value
            return Decision("float32", rule, (False,), (kept,))
        return Decision("half", rule, (None,), (value,), follows=True)
    if not is_float32(out):
        return Decision("as traced", rule, (None,), (AS_TRACED,))
    if precision == "half" and rule != eqn.primitive.name:
        return Decision("half", rule, (None,), (IN_HALF,))
    if source.aval.dtype == np.bool_:
        return Decision("float32", rule, (None,), (filled_with(1.0)._replace(constant=None),))
    if value.constant is not None:
        return Decision("float32", rule, (None,), (value,))
    return Decision("float32", rule, (None,), (COMPUTED,))


def _is_reciprocal(eqn: Any, values: Sequence[Value]) -> bool:
    name = eqn.primitive.name
    return (name == "div" and values[0].constant is not None) or (
        name == "integer_pow" and eqn.params["y"] < 0
    )


def _sums_over_vmap(eqn: Any) -> bool:
    """Whether a collective reduces over an axis of its operand, as vmap makes it do."""
    return eqn.primitive.name in tables.SUMMING_COLLECTIVES and any(
        isinstance(axis, int) for axis in eqn.params["axes"]
    )


def _spreads(eqn: Any) -> bool:
    """Whether an equation repeats its operand along the first axis of its result."""
    name = eqn.primitive.name
    if name == "broadcast_to":
        return serves_every_example(eqn.invars[0], eqn.outvars[0])
    if name != "broadcast_in_dim" or not eqn.outvars[0].aval.ndim:
        return False
    sizes = dict(zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True))
    # A new first axis of size 1 is that of a bias in a batch of one.
    return 0 not in sizes or (sizes[0] == 1 and eqn.outvars[0].aval.shape[0] != 1)


def _opts_out(eqn: Any, half_dtype: Any) -> bool:
    """Whether the program asks for a precision that half does not have."""
    for atom in eqn.invars:
        dtype = getattr(atom.aval, "dtype", None)
        floating = dtype is not None and jnp.issubdtype(dtype, np.inexact)
        if floating and dtype not in (np.float32, half_dtype):
            return True
    preferred = eqn.params.get("preferred_element_type")
    if preferred is not None and preferred not in (np.float32, half_dtype):
        return True
    precision = eqn.params.get("precision")
    wanted = precision if isinstance(precision, tuple) else (precision,)
    return not all(
        p in (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT) for p in wanted
    )
