"""Checks of what a step keeps, sums or multiplies in half precision.

bfloat16 has 8 significant bits: between a number and the next one lies 1/128 to 1/256 of it, and a
sum that should move it by less than half of that leaves it where it is. For float16 it is 1/1024 to
1/2048. So a number that many small steps should move must be wider, or be rounded at random, or
keep its rounding error beside it.

Two questions are asked of the program. What multiple of itself is an array after the step?

    p + u                       1 p + more          a parameter, or a total
    p + (master - p)            0 p + more          a copy of what is kept elsewhere: sound
    p + gathered(master - p)    1 p + a difference  the same, from shards or by a choice: sound
    0.999 nu + 0.001 g**2       0.999 nu + more     an average; 0.999 is 1 in bfloat16
    0.9 mu + 0.1 g              0.9 mu + more       a short average, which moves: sound

And what does a loop add up, outside of what is differentiated?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.step_programs import StepProgram, source_of, source_of_output
from ampx.jaxprs import folds, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr

_HALF = ("float16", "bfloat16")
_ADDED = (
    "each step adds to {} arrays that have no wider copy, and what is below half of their spacing "
    "is lost: {}",
    "keep them in float32. Parameters may still compute in half (ampx.opt_level), or have float32 "
    "copies (ampx.master_weights)",
)
_AVERAGED = (
    "averages in {} decay by less than it resolves, and stand still: {}",
    'keep them in float32; or second moments of ampx.fused by nu_dtype="int8", which are rounded '
    "at random",
)


class _Multiple(NamedTuple):
    """A value as a sum of multiples of carried inputs, and more.

    Attributes:
      terms: from the number of an input to its factor, and whether it is there in its own right: as
        itself, not only multiplied by a number.
      is_more: whether there is more than these terms.
      number: the value, where it is a known number; then there is nothing else.
      is_scale: whether the number is made of a loss scale.
      moved: inputs that are in it at other places, or where elements were chosen, and the factor
        of each.
    """

    terms: dict[int, tuple[float, bool]]
    is_more: bool
    number: float | None = None
    is_scale: bool = False
    moved: frozenset[tuple[int, float]] = frozenset()


_OTHER = _Multiple({}, True)
# Numbers come out as they went in, or added over devices, at other places. zero1 slices, packs,
# scatters and gathers so.
_MOVING = (
    primitives.REARRANGING
    | primitives.TRANSFERS
    | primitives.SCATTERING_COLLECTIVES
    | primitives.PSUMS
    | {"concatenate", "pad", "stack", "dynamic_update_slice", "gather"}
)


class _Multiples:
    """The multiples in a program, and the numbers in it that half precision cannot hold."""

    def __init__(self) -> None:
        self.too_large: list[tuple[bool, tuple[Equation, ...]]] = []

    def follow(
        self, jaxpr: Jaxpr, operands: Sequence[_Multiple], around: tuple[Equation, ...] = ()
    ) -> list[_Multiple]:
        return folds.fold_inside(jaxpr, operands, self._apply, _of_constant, around=around)

    def _apply(self, eqns: tuple[Equation, ...], inputs: list[_Multiple]) -> Sequence[_Multiple]:
        eqn = eqns[0]
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in primitives.LOOPS:
            self._enter_loop(eqns, inputs)
            return [_OTHER] * count
        bodies = folds.bodies_with_operands(eqn, inputs)
        if bodies:
            results = [self.follow(body, operands, eqns) for body, operands in bodies]
            return [_choose(group) for group in zip(*results, strict=True)]
        self._look_for_infinities(eqns)
        if name in primitives.SAME_NUMBERS and len(inputs) == count:
            return inputs
        if name == "convert_element_type":
            return [self._convert(eqns, inputs[0])]
        if name in primitives.REARRANGING and inputs[0].number is not None:
            return inputs[:1] * count
        if name in _MOVING:
            return [_blur(inputs)] * count
        if name == "integer_pow" and eqn.params["y"] == 1:
            return inputs
        if name == "select_n":
            return [_choose(inputs[1:])]
        if name == "neg":
            return [_scale(inputs[0], -1.0)]
        if name in primitives.ADDING:
            return [_add(inputs[0], _scale(inputs[1], -1.0) if name == "sub" else inputs[1])]
        if name == "mul":
            one, other = inputs if inputs[1].number is None else inputs[::-1]
            return [_OTHER if one.number is None else _weigh(other, one)]
        if name == "div" and inputs[1].number:
            divisor = inputs[1]._replace(number=1 / inputs[1].number)
            return [_weigh(inputs[0], divisor)]
        return [_OTHER] * count

    def _enter_loop(self, eqns: tuple[Equation, ...], inputs: list[_Multiple]) -> None:
        """Looks at the numbers in a loop's body; what goes round in it is not followed."""
        eqn = eqns[0]
        for body, operands in folds.bodies_with_operands(eqn, inputs):
            known = [v if v.number is not None else _OTHER for v in operands]
            consts = reading.scan_sizes(eqn)[0] if eqn.primitive.name == "scan" else 0
            self.follow(body, [v if i < consts else _OTHER for i, v in enumerate(known)], eqns)

    def _convert(self, eqns: tuple[Equation, ...], value: _Multiple) -> _Multiple:
        dtype = eqns[0].params["new_dtype"]
        if not jnp.issubdtype(dtype, np.floating):
            return _OTHER
        if value.number is None or dtype != np.float16:
            return value
        if value.is_scale and 65504 < abs(value.number) < math.inf:
            self.too_large.append((True, eqns))
            return _OTHER
        return value

    def _look_for_infinities(self, eqns: tuple[Equation, ...]) -> None:
        """Notes a product or a sum with an infinity that is written into it in half precision.

        JAX converts a Python number to the dtype of the array beside it, where 1e6 is infinite.
        Choices are left out: an infinity there is a mask.
        """
        if eqns[0].primitive.name not in ("mul", "add", "sub", "div"):
            return
        for atom in eqns[0].invars:
            number = reading.number_of(atom)
            if number is not None and math.isinf(number) and _dtype_of(atom) in _HALF:
                self.too_large.append((False, eqns))


def _of_constant(value: Any) -> _Multiple:
    dtype = getattr(value, "dtype", None)
    is_number = dtype is None or any(
        jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer)
    )
    if not is_number or np.ndim(value):
        return _OTHER
    return _Multiple({}, False, float(value))


def _add(first: _Multiple, second: _Multiple) -> _Multiple:
    for one, other in ((first, second), (second, first)):
        if one.number is not None:
            if one.number == 0:
                return other
            return other._replace(is_more=True) if other.number is None else _OTHER
    terms = dict(first.terms)
    for i, (factor, is_own) in second.terms.items():
        before, was_own = terms.get(i, (0.0, False))
        terms[i] = (before + factor, was_own or is_own)
    terms = {i: term for i, term in terms.items() if abs(term[0]) > 1e-9}
    is_more = first.is_more or second.is_more
    return _Multiple(terms, is_more, moved=first.moved | second.moved)


def _scale(value: _Multiple, factor: float) -> _Multiple:
    if value.number is not None:
        return value._replace(number=value.number * factor)
    terms = {i: (factor * own, is_own) for i, (own, is_own) in value.terms.items()}
    moved = frozenset((i, factor * own) for i, own in value.moved)
    return value._replace(terms=terms, moved=moved)


def _weigh(value: _Multiple, weight: _Multiple) -> _Multiple:
    """The product with a known number."""
    factor = weight.number or 0.0
    if value.number is not None:
        is_scale = value.is_scale or weight.is_scale
        return value._replace(number=value.number * factor, is_scale=is_scale)
    value = _scale(value, factor)
    return value._replace(terms={i: (own, False) for i, (own, _) in value.terms.items()})


def _choose(values: Sequence[_Multiple]) -> _Multiple:
    """What is chosen among several; where one is what a skip leaves, it is the other."""
    left = [v for v in values if not _is_untouched(v)]
    if not left:
        return values[0] if all(v == values[0] for v in values) else _OTHER
    return left[0] if all(v == left[0] for v in left) else _blur(left)


def _blur(values: Sequence[_Multiple]) -> _Multiple:
    """What is left to know of numbers of several values, or at other places."""
    terms = ((i, factor) for v in values for i, (factor, _) in v.terms.items())
    return _OTHER._replace(moved=frozenset(terms).union(*(v.moved for v in values)))


def _is_untouched(value: _Multiple) -> bool:
    """Whether a value is an input as it came, or an update of nothing."""
    if value.number is not None:
        return value.number == 0
    return not value.is_more and list(value.terms.values()) == [(1.0, True)]


def _follow(program: StepProgram) -> tuple[_Multiples, list[_Multiple]]:
    carried = set(program.carried.values())

    def multiple_of(i: int) -> _Multiple:
        leaf = program.inputs[i]
        if i in program.scales:
            known = leaf.number
            return _OTHER if known is None else _Multiple({}, False, known, True)
        is_floating = jnp.issubdtype(leaf.aval.dtype, np.floating)
        return _Multiple({i: (1.0, True)}, False) if i in carried and is_floating else _OTHER

    multiples = _Multiples()
    operands = [multiple_of(i) for i in range(len(program.inputs))]
    return multiples, multiples.follow(program.jaxpr, operands)


def find_half_states(program: StepProgram) -> list[LintFinding]:
    """Finds arrays in half precision that a step moves by less than it can, and large numbers."""
    multiples, outputs = _follow(program)
    findings = list(_tell_large_numbers(multiples, program))
    found: dict[tuple[bool, str], list[int]] = {}
    for number, i in program.carried.items():
        dtype = str(program.inputs[i].aval.dtype)
        if dtype not in _HALF or i not in outputs[number].terms:
            continue
        factor, is_own = outputs[number].terms[i]
        others = [term for j, term in outputs[number].terms.items() if j != i]
        if any(own and abs(f) == 1 for f, own in others):
            continue  # its rounding error is kept beside it, and added again
        if (i, -1.0) in outputs[number].moved:
            continue  # a difference from it is added to it: a copy of what is kept elsewhere
        # Half of the spacing below 1: what is farther from 1 than that changes the number.
        is_stuck = abs(factor - 1) < float(jnp.finfo(dtype).eps) / 4
        if outputs[number].is_more and is_stuck:
            found.setdefault((is_own, dtype), []).append(number)
    for (is_own, dtype), numbers in found.items():
        names = program.carried_names(numbers)
        message, fix = _ADDED if is_own else _AVERAGED
        source = source_of_output(program, numbers[0])
        findings.append(LintFinding("half_state", message.format(dtype, names), source, fix))
    return findings


def _tell_large_numbers(multiples: _Multiples, program: StepProgram) -> Iterator[LintFinding]:
    for is_scale, eqns in multiples.too_large:
        source = source_of(eqns, program.jaxpr)
        if is_scale:
            yield LintFinding(
                "half_constant",
                "the loss scale is converted to float16, which ends at 65504",
                source,
                "keep it in float32, and what it multiplies or divides: the loss, as of "
                "logits.astype(jnp.float32), or the gradients",
            )
        else:
            yield LintFinding(
                "half_constant",
                f"a number is infinite in {_dtype_of(eqns[0].invars[0])}",
                source,
                "write one that the dtype holds, or compute in float32",
            )


def find_half_sums(program: StepProgram) -> list[LintFinding]:
    """Finds totals in half precision that a loop adds to: gradients of micro-batches, positions."""
    findings = []
    for eqn, around in folds.equations_inside(program.jaxpr):
        # Inside of what is differentiated, a model may add up what it likes, as a residual stream.
        is_inside = source_info.is_differentiated((eqn, *around))
        if eqn.primitive.name not in primitives.LOOPS or is_inside:
            continue
        dtypes = sorted(set(_totals(eqn)))
        if dtypes:
            findings.append(
                LintFinding(
                    "half_sum",
                    f"a loop adds up in {' and '.join(dtypes)}",
                    source_of((eqn, *reversed(around)), program.jaxpr),
                    "carry the total in float32, and round it after the loop",
                )
            )
    return findings


def _totals(eqn: Equation) -> Iterator[str]:
    """The dtypes of what is carried through a loop as itself plus what does not depend on it."""
    if eqn.primitive.name == "scan":
        (body,) = reading.bodies_of(eqn)
        first, size = reading.scan_sizes(eqn)
    else:
        body = reading.bodies_of(eqn)[1]
        first = reading.while_sizes(eqn)[1]
        size = len(eqn.outvars)
    opened = reading.open_jaxpr(body)
    makers = {out: each for each in opened.eqns for out in each.outvars}
    for before, after in zip(opened.invars[first : first + size], opened.outvars, strict=False):
        maker = None if reading.is_literal(after) else makers.get(after)
        if _dtype_of(before) not in _HALF or maker is None:
            continue
        if maker.primitive.name not in ("add", "add_any") or before not in maker.invars:
            continue
        others = [atom for atom in maker.invars if atom is not before]
        if len(others) == 1 and not reading.is_literal(others[0]):
            if not _depends(opened, others[0], before):
                yield _dtype_of(before)


def _dtype_of(atom: reading.Atom) -> str:
    return str(atom.aval.dtype)


def _depends(jaxpr: Jaxpr, value: Any, on: Any) -> bool:
    chosen = reading.find_equations_for(jaxpr, [value])
    return value is on or any(on in jaxpr.eqns[i].invars for i in chosen)
