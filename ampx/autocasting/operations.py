"""Decides what becomes of one equation that holds no jaxprs.

A decision starts from the precision that the rule asks for. The operands can stand against it:

    rule            half if                                        otherwise
    half            the program asks for no other precision        float32
    half_to_float32 the same; the result is float32 all the same   float32
    float32         never                                          float32
    widest, pass    some operand votes half and none objects       float32
    opaque          never                                          the dtypes it was traced with

An equation with the rule widest or pass has one of three outcomes:

    half                the operands are narrowed, the result is held in half
    float32             the operands are widened, the result votes float32
    float32, as half    the operands are widened, the result is held in float32 and votes half

The third is for operations whose result belongs in half, but which lose something on the way there:
a scale that half may not be able to hold, or a transpose that sums. It costs no accuracy, and what
reads the result is half all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.autocasting import float8, tables
from ampx.autocasting.float8 import Float8
from ampx.autocasting.plans import Decision
from ampx.autocasting.values import (
    AS_TRACED,
    COMPUTED,
    IN_HALF,
    KnownValue,
    Vote,
    compute_span,
    describe_fill,
    describe_moved,
    describe_result_of,
    fits_in,
    is_float32,
    is_repeated_along_first_axis,
    restrict_to_type,
    rounds_to_one,
)
from ampx.jaxprs import building, primitives, reading

OUT_OF_RANGE = "a constant leaves the range of half"
AT_ONE = "half rounds a bound to 1"
NO_SUM = "a product without a sum"


def decide(
    eqn: Any,
    values: tuple[KnownValue, ...],
    precision: tables.Precision,
    rule: str,
    half: Any,
    lift: bool,
) -> Decision:
    """Decides for an equation whose rule gives it this precision.

    Args:
      eqn: the equation.
      values: what is known of its operands.
      precision: what its rule asks for.
      rule: who asks for it: the name of the primitive if only the default lists do, else a user's
        rule or a mark.
      half: the half dtype.
      lift: whether to compute in float32, because every reader does.
    """
    name = eqn.primitive.name
    forced = rule != name  # by a user's rule or a mark
    if name == "convert_element_type":
        return _decide_conversion(eqn, values, precision, rule, lift)
    if not any(map(is_float32, eqn.invars)):
        return decide_float32(eqn, values, rule)
    if precision == "half" and not forced and reading.multiplies_without_sum(eqn):
        return _decide_product_without_sum(eqn, values, half, lift)
    if precision == "float32" or lift:
        return decide_float32(eqn, values, "every reader is float32" if lift else rule)
    if not forced and _is_reciprocal(eqn, values):
        return decide_float32(eqn, values, "reciprocal")
    if not forced and _reduces_vmap_axis(eqn):
        return decide_float32(eqn, values, "a sum over an axis of vmap")
    if precision == "half":
        return _decide_requested_half(eqn, values, rule, half)
    if precision == "half_to_float32":
        decision = _decide_requested_half(eqn, values, rule, half)
        outputs = tuple(COMPUTED if value.half else value for value in decision.outputs)
        return decision._replace(outputs=outputs)
    # A collective or a barrier over a tuple: output i has the dtype of operand i, and operands do
    # not influence each other.
    if name in tables.ONE_TO_ONE and len(eqn.outvars) == len(eqn.invars):
        return Decision(
            "half" if any(v.half for v in values) else "float32",
            rule,
            (None,) * len(values),
            values,
            # Wires are slow and a transfer is exact: float32 readers do not make it float32.
            follows=name not in primitives.TRANSFERS,
        )
    return _decide_widest(eqn, values, rule, half)


def decide_float8(
    eqn: Any, values: tuple[KnownValue, ...], decision: Decision, dots: Float8, wanted: bool
) -> Decision:
    """Decides whether a product that is to be half runs in float8 instead.

    Args:
      eqn: the product.
      values: what is known of its operands.
      decision: for half.
      dots: which products can be float8.
      wanted: whether its rule leaves it to `dots`; False if the rule says half.
    """
    obstacle = "rule"
    if wanted:
        is_product = eqn.primitive.name == "dot_general"
        obstacle = float8.find_obstacle(dots, eqn) if is_product else "no matrix product"
        if not all(map(is_float32, (*eqn.invars, *eqn.outvars))):
            obstacle = "dtype"
    if obstacle:
        return decision._replace(not_float8=obstacle)
    # A parameter is cast from what is stored, not from a half copy: one rounding fewer.
    operands = tuple(None if value.vote is Vote.PARAMETER else True for value in values)
    return decision._replace(precision="float8", operands=operands)


def decide_opaque(eqn: Any, rule: str) -> Decision:
    """Decides that an equation gets and gives the dtypes it was traced with."""
    outputs = tuple(COMPUTED if is_float32(out) else AS_TRACED for out in eqn.outvars)
    operands = tuple(False if is_float32(atom) else None for atom in eqn.invars)
    involved = any(map(is_float32, (*eqn.invars, *eqn.outvars)))
    return Decision("float32" if involved else "as traced", rule, operands, outputs)


def decide_float32(eqn: Any, values: tuple[KnownValue, ...], rule: str) -> Decision:
    """Decides that an equation computes in float32; its half operands are widened."""
    name = eqn.primitive.name
    touched = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float32(atom)]
    involved = touched or any(is_float32(out) for out in eqn.outvars)
    precision = "float32" if involved else "as traced"
    operands = tuple(False if is_float32(atom) else None for atom in eqn.invars)
    if name in tables.MOVING:
        return Decision(precision, rule, operands, _describe_moved_results(eqn, values))
    if touched:
        known = _fold_constants(eqn, touched) or describe_result_of(touched, name in tables.PICKING)
    else:
        known = COMPUTED
    outputs = tuple(known if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision(precision, rule, operands, outputs)


def _describe_moved_results(eqn: Any, values: tuple[KnownValue, ...]) -> tuple[KnownValue, ...]:
    """Describes the results of an equation that moves its operands, held in float32.

    They are still what they were (parameters, constants), but half values were widened, so they no
    longer count as half.
    """
    count = len(eqn.outvars)
    # device_put moves operand i to result i. All others move operand 0, to one result (further
    # operands, of dynamic_slice, are indices) or to several (split, unstack).
    sources = values if len(values) == count else values[:1] * count
    moved = [describe_moved(source, _repeats_along_first_axis(eqn)) for source in sources]
    return tuple(COMPUTED if v.half or v.vote is Vote.HALF else v for v in moved)


def _fold_constants(eqn: Any, operands: Sequence[KnownValue]) -> KnownValue | None:
    """Computes a constant from constants, such as the root of a head's size.

    `h / jnp.sqrt(64.0)` must stay half like `h / 8.0`. The number is only used to see whether half
    can hold it; the program still computes it.
    """
    compute = tables.CONSTANT_FOLDING.get(eqn.primitive.name)
    constants = [value.constant for value in operands]
    if compute is None or None in constants or len(constants) != len(eqn.invars):
        return None
    with np.errstate(all="ignore"):
        number = compute(*map(np.float32, constants))
    return describe_fill(float(number)) if number == number else None  # NaN has no magnitude


def _decide_half(eqn: Any, rule: str) -> Decision:
    operands = tuple(True if is_float32(atom) else None for atom in eqn.invars)
    outputs = tuple(IN_HALF if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision("half", rule, operands, outputs)


def _decide_requested_half(
    eqn: Any, values: tuple[KnownValue, ...], rule: str, half: Any
) -> Decision:
    """Decides for an equation that a default or a user wants in half."""
    name = eqn.primitive.name
    if _requests_other_precision(eqn, half):
        return decide_float32(eqn, values, "precision asked for")
    if name not in tables.DEFAULTS:
        return _decide_unknown_in_half(eqn, rule, half)
    if name in tables.WITHOUT_HALF_FORM:
        return decide_float32(eqn, values, "has no half form")
    # A product with a constant array keeps its half form, with the constant rounded; torch does the
    # same. In what a user's rule makes half, `x + 1e-9` would silently become `x`.
    in_range = all(value.span is None or fits_in(value.span, half) for value in values)
    if name not in tables.HALF_BY_DEFAULT and not in_range:
        return decide_float32(eqn, values, OUT_OF_RANGE)
    return _decide_half(eqn, rule)


def _decide_product_without_sum(
    eqn: Any, values: tuple[KnownValue, ...], half: Any, lift: bool
) -> Decision:
    """Decides for a `dot_general` that multiplies and adds up nothing, as `mul` does.

    `einsum("i,j->ij", positions, frequencies)` is one. Matrix units are no faster at it, and angles
    near 1000 are 4 apart in bfloat16. Always under one rule, by which a report leaves it out where
    it counts matrix products.
    """
    if lift or _requests_other_precision(eqn, half):
        return decide_float32(eqn, values, NO_SUM)
    return _decide_widest(eqn, values, NO_SUM, half)._replace(rule=NO_SUM)


def _decide_unknown_in_half(eqn: Any, rule: str, half: Any) -> Decision:
    """Decides for a primitive that is in no table, by asking it what it gives for half operands."""
    made = building.infer_output_dtypes(eqn, [half if is_float32(a) else None for a in eqn.invars])
    outputs = []
    for out, dtype in zip(eqn.outvars, made, strict=True):
        if dtype not in (half, out.aval.dtype):
            raise TypeError(
                f"{eqn.primitive.name} gives {dtype} for operands in {half}, expected {half} "
                f"or {out.aval.dtype}: take the rule {rule} out of the rules"
            )
        if dtype != out.aval.dtype and not is_float32(out):
            raise TypeError(
                f"{eqn.primitive.name} gives {dtype} for operands in {half}, and {out.aval.dtype} "
                f"as it was traced; only float32 results may change: take the rule {rule} out of "
                "the rules"
            )
        outputs.append(IN_HALF if dtype != out.aval.dtype else restrict_to_type(out.aval, COMPUTED))
    return _decide_half(eqn, rule)._replace(outputs=tuple(outputs))


def _decide_widest(eqn: Any, values: tuple[KnownValue, ...], rule: str, half: Any) -> Decision:
    """Decides for half if some operand votes half and no other objects, otherwise for float32."""
    name = "mul" if reading.multiplies_without_sum(eqn) else eqn.primitive.name
    some_half = False
    reason = ""  # to compute in float32 although the result belongs in half
    for atom, value in zip(eqn.invars, values, strict=True):
        if not is_float32(atom):
            continue
        if value.vote is Vote.HALF:
            some_half = True
        elif value.vote is Vote.NEUTRAL:
            objection = _find_objection(name, atom, value, half)
            if objection is not None:
                return decide_float32(eqn, values, objection or rule)
            if value.span is None and name in tables.TAKING_BIAS_OR_SCALE:
                reason = "float32, for a number that is not known"
        elif not _is_bias_or_scale(eqn, atom, value):
            return decide_float32(eqn, values, rule)
        elif name in ("mul", "div"):
            # A scale of 1e-8 is 0 in float16, and a quotient by it infinite. A bias is harmless:
            # what half cannot hold of it would be lost in the sum as well.
            reason = "float32, for the range of a parameter"
    if not some_half or name in tables.WITHOUT_HALF_FORM:
        return decide_float32(eqn, values, rule)
    if _transpose_sums(eqn):
        fill = eqn.params.get("fill_value")  # of a gather, for indices out of bounds
        if fill is not None and not fits_in(compute_span(float(fill)), half):
            return decide_float32(eqn, values, OUT_OF_RANGE)
        reason = "float32, for the sum of its transpose"
    if reason:
        outputs = (KnownValue(False, Vote.HALF),)
        return decide_float32(eqn, values, reason)._replace(outputs=outputs, follows=True)
    return _decide_half(eqn, rule)._replace(follows=name not in primitives.TRANSFERS)


def _find_objection(name: str, atom: Any, constant: KnownValue, half: Any) -> str | None:
    """Finds why a constant operand must not become half.

    Returns:
      The reason for the report, `""` for the rule itself, or None where half can hold it.
    """
    if name in primitives.COMPARING:
        # `u < 0.1` makes the mask of a dropout: with 0.1 rounded, other elements would be dropped.
        number = constant.constant
        exact = number is not None and reading.round_number(number, half) == number
        return None if exact else ""
    # `jnp.zeros(shape).at[i].add(h)` has a float32 buffer so as to sum in float32.
    fill = not reading.is_literal(atom) and constant.constant == 0
    if fill and atom.aval.ndim and name in tables.ACCUMULATING:
        return "summed into zeros"
    if name in tables.TAKING_BIAS_OR_SCALE and constant.span is None:
        return None  # a number, or its operation would promote: computed in float32
    # Where a number is picked and not computed with, -1e9 may become the lowest half number: both
    # only have to lose against everything else.
    saturates = name in tables.SELECTING
    if saturates and rounds_to_one(constant.span, half):
        return AT_ONE
    return None if fits_in(constant.span, half, saturates) else OUT_OF_RANGE


def _is_bias_or_scale(eqn: Any, atom: Any, value: KnownValue) -> bool:
    """Whether a float32 operand is a bias or a scale that must not promote an activation.

    Torch has biases inside of its linear layers. In a jaxpr there is only `add h b`, and what tells
    a bias from a mask is that it is the same for every example.
    """
    if reading.multiplies_without_sum(eqn):
        repeated = _is_repeated_by_product(eqn, atom)
    elif eqn.primitive.name in tables.TAKING_BIAS_OR_SCALE:
        repeated = is_repeated_along_first_axis(atom, eqn.outvars[0])
    else:
        return False
    return value.vote is Vote.REPEATED or (value.vote is Vote.PARAMETER and repeated)


def _is_repeated_by_product(eqn: Any, atom: Any) -> bool:
    """Whether a product without a sum repeats an operand along the first axis of the other one."""
    _, (of_first, of_second) = eqn.params["dimension_numbers"]
    first, second = eqn.invars
    other, shared = (second, of_second) if atom is first else (first, of_first)
    return bool(other.aval.ndim) and 0 not in shared


def _transpose_sums(eqn: Any) -> bool:
    """Whether the transpose of an equation adds up several cotangents for one number.

    That of a broadcast that changes no size, such as one that adds an axis of size 1, does not.
    """
    name = eqn.primitive.name
    resized = name not in tables.MOVING or eqn.invars[0].aval.size != eqn.outvars[0].aval.size
    return name in tables.SUMMING_WHEN_TRANSPOSED and resized


def _decide_conversion(
    eqn: Any, values: tuple[KnownValue, ...], precision: str, rule: str, lift: bool
) -> Decision:
    """Decides for a conversion that is in the program.

    One from or to another dtype was asked for and stays. One from float32 to float32 only changes
    weak typing: it passes its operand on, so that a half value stays half.
    """
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
    # A mask as numbers is 0 or 1, which half holds exactly, so it does not promote.
    if source.aval.dtype == np.bool_:
        return Decision("float32", rule, (None,), (describe_fill(1.0)._replace(constant=None),))
    if value.constant is not None:
        return Decision("float32", rule, (None,), (value,))
    return Decision("float32", rule, (None,), (COMPUTED,))


def _is_reciprocal(eqn: Any, values: Sequence[KnownValue]) -> bool:
    """Whether an equation divides a constant: 1 / x leaves float16's range for x below 1.5e-5."""
    name = eqn.primitive.name
    return (name == "div" and values[0].constant is not None) or (
        name == "integer_pow" and eqn.params["y"] < 0
    )


def _reduces_vmap_axis(eqn: Any) -> bool:
    """Whether a collective reduces over an axis of its operand, as vmap makes it do."""
    return eqn.primitive.name in primitives.PSUMS and any(
        isinstance(axis, int) for axis in eqn.params["axes"]
    )


def _repeats_along_first_axis(eqn: Any) -> bool:
    """Whether an equation repeats its operand along the first axis of its result."""
    name = eqn.primitive.name
    if name == "broadcast_to":
        return is_repeated_along_first_axis(eqn.invars[0], eqn.outvars[0])
    if name != "broadcast_in_dim" or not eqn.outvars[0].aval.ndim:
        return False
    sizes = dict(zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True))
    # Repeated, unless axis 0 of the operand is axis 0 of the result. A new first axis of size 1 is
    # that of a bias in a batch of one, and counts as repeated.
    return 0 not in sizes or (sizes[0] == 1 and eqn.outvars[0].aval.shape[0] != 1)


def _requests_other_precision(eqn: Any, half_dtype: Any) -> bool:
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
    if precision == reading.find_default_precision():
        return False  # that of `jax_default_matmul_precision` is for float32 operands
    wanted = precision if isinstance(precision, tuple) else (precision,)
    return not all(
        p in (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT) for p in wanted
    )
