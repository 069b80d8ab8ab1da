"""Checks of how a step uses its loss scale: once, before all else, and with all that a skip undoes.

All three read one fact about each value, its power of the loss scale (`scale_powers`):

    loss_scale      gradients are divided by the scale, and were multiplied by it 0 times, or 2
    unscale_order   gradients times the scale meet numbers without it: a bound, a decay, a noise
    schedule, batch_stats
                    what a skipped step must keep does not depend on the scale at all, and so not
                    on the verdict either

A verdict is taken from scaled gradients, and all that it holds back depends on it. So does not what
is computed before the backward pass, or beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.diagnostics import bit_sets
from ampx.diagnostics.dataflow import name_culprit
from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.power_arithmetic import (
    DIVIDED,
    FREE,
    MULTIPLIED,
    PURE,
    READS,
    Power,
)
from ampx.diagnostics.scale_powers import Conflict, Powers
from ampx.diagnostics.step_programs import (
    StepArray,
    StepProgram,
    is_chain,
    is_of_library,
    place_of,
    source_of,
    source_of_output,
)
from ampx.jaxprs import folds, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.trees import is_floating, is_named_tuple

_ONCE = (
    "multiply the loss by ampx.current_loss_scale(opt_state) once: give it to "
    "ampx.value_and_grad as loss_scale="
)
# From a diagnosis to the name of its check, what is wrong, and what to do.
_DIAGNOSES = {
    "forgotten": (
        "loss_scale",
        "the loss scale does not reach the gradients: they are divided by it, and nothing "
        "multiplied them",
        _ONCE,
    ),
    "multiplied twice": (
        "loss_scale",
        "the loss scale reaches the gradients more than once, and they are divided by it once",
        _ONCE,
    ),
    "divided twice": (
        "loss_scale",
        "gradients are divided by the loss scale more than once",
        "give the gradients to the optimizer as value_and_grad returns them: its loss scale "
        "divides them",
    ),
    "early": (
        "unscale_order",
        "gradients that are still multiplied by the loss scale meet numbers that are not",
        "put it inside of the loss scale, as in ampx.dynamic_loss_scale(optax.chain(...))",
    ),
    "early in a rule": (
        "unscale_order",
        "a backward rule of the function's own gets gradients that are multiplied by the loss "
        "scale, and they meet numbers that are not",
        "give the custom_vjp function ampx.current_loss_scale(opt_state) as an argument, keep it "
        "for the backward rule, and multiply the bound, or what is added, by it there; or do it to "
        "the gradients of parameters, by the optimizer inside of the loss scale",
    ),
    "other scale": (
        "loss_scale",
        "gradients are divided by one loss scale, and were multiplied by another",
        "multiply each loss by the scale of the state whose update gets its gradients; of several "
        "losses each by its own: ampx.current_loss_scale(opt_state, loss_id)",
    ),
    "part": (
        "unscale_order",
        "the loss scale multiplies a part of the loss, which meets another that it does not",
        "multiply every term of the loss by the loss scale: the loss as a whole, once",
    ),
}
# Of these it matters where they are.
_PLACED = ("early", "early in a rule", "part")

# The number of an input that holds loss scales, and which of them; None for all, or the only one.
Scale = tuple[int, int | None]


class ScaleFlow(NamedTuple):
    """What is known of the loss scale in a step.

    Attributes:
      conflicts: those that reach what the step carries.
      beside: the others.
      outputs: the power of each output.
    """

    conflicts: list[Conflict]
    beside: list[Conflict]
    outputs: list[Power]


def follow_scale(program: StepProgram, scales: Sequence[Scale] | None = None) -> ScaleFlow:
    """Follows the loss scales of a step to all of its results.

    Args:
      program: the step.
      scales: those that count, as if all were one; None: all that there are.
    """
    chosen = dict([(i, None) for i in program.scales] if scales is None else scales)
    flow, suspected = _follow(program, chosen, {})
    # An array that gradients are summed in over several calls holds them times the scale. No name
    # tells; but if all conflicts vanish once it has that power, before the step and after it, then
    # there were none.
    bound: dict[int, Fraction] = {}
    again = flow
    while again.conflicts and not suspected.keys() <= bound.keys():
        bound |= suspected
        again, suspected = _follow(program, chosen, bound)
        stays = all(
            power.power == bound[i] or power.marks & FREE
            for number, i in program.carried.items()
            if i in bound
            for power in [again.outputs[number]]
        )
        if not again.conflicts and stays:
            return again
    return flow


def _follow(
    program: StepProgram, scales: dict[int, int | None], bound: dict[int, Fraction]
) -> tuple[ScaleFlow, dict[int, Fraction]]:
    carried = set(program.carried.values())

    def power_of(i: int) -> Power:
        if i in scales:
            whole = Power(Fraction(1), READS | PURE, 0, i)
            if (chosen := scales[i]) is None:
                return whole
            # What an operation on the whole array makes of it is not known.
            places = range(program.inputs[i].aval.shape[0])
            parts = tuple(whole if place == chosen else Power(Fraction(0)) for place in places)
            return Power(None, READS, 0, i, parts)
        return Power(bound.get(i, Fraction(0)), 0, 0, i if i in carried else -1)

    powers = Powers()
    outputs = powers.follow(program.jaxpr, [power_of(i) for i in range(len(program.inputs))])
    reached = bit_sets.unite(
        outputs[number].conflicts
        for number, i in program.carried.items()
        if i not in program.scales
    )
    parts: tuple[list[Conflict], list[Conflict]] = ([], [])
    for place, conflict in enumerate(powers.conflicts):
        parts[reached >> place & 1].append(conflict)
    beside, chosen = parts
    return ScaleFlow(chosen, beside, outputs), powers.suspected


def find_scale_faults(program: StepProgram, flow: ScaleFlow) -> list[LintFinding]:
    """Finds where the loss scale is missing, is there too often, or is met too early."""
    found: dict[tuple[str, str], list[Conflict]] = {}
    for conflict in flow.conflicts:
        kind = _diagnose(conflict)
        sums = [c for c in (conflict, *flow.beside) if _is_in_loss(c, program.jaxpr)]
        if sums and (kind == "forgotten" or _is_sum_of_gradients(conflict) or sums[0] is conflict):
            kind, conflict = "part", sums[0]
        elif kind == "early" and place_of(conflict.eqns, program.jaxpr).is_backward:
            kind = "early in a rule"
        # A place tells nothing of a missing factor: each parameter has its own.
        name = name_culprit(conflict.eqns).name if kind in _PLACED else ""
        found.setdefault((kind, name), []).append(conflict)
    if _is_written_as_number(program, flow):
        found = {key: own for key, own in found.items() if key[0] != "forgotten"}
    findings = []
    if exchanged := [] if flow.conflicts else _find_exchanged(program):
        found["other scale", ""] = exchanged
    for (kind, name), conflicts in found.items():
        check, message, fix = _DIAGNOSES[kind]
        where = f": in {name}" if name else ""
        source = source_of(conflicts[0].eqns, program.jaxpr)
        findings.append(LintFinding(check, message + where, source, fix))  # type: ignore[arg-type]
    return findings


def _find_exchanged(program: StepProgram) -> list[Conflict]:
    """Finds where a scale divides what another has multiplied: together they looked right."""
    each: list[Scale] = []
    for i in program.scales:
        shape = program.inputs[i].aval.shape
        each += [(i, place) for place in range(shape[0])] if len(shape) == 1 else [(i, None)]
    if len(each) < 2:
        return []
    alone = [follow_scale(program, (one,)).conflicts for one in each]
    return [
        c
        for conflicts in alone
        for c in conflicts
        if _diagnose(c) == "forgotten" or min(c.powers) < 0 < max(c.powers)
    ]


def _is_in_loss(conflict: Conflict, jaxpr: Jaxpr) -> bool:
    """Whether a conflict is a sum in the forward pass of what is differentiated, of its terms."""
    return (
        conflict.powers == (0, 1)
        and conflict.eqns[0].primitive.name in primitives.ADDING
        and source_info.is_differentiated(conflict.eqns)
        and not place_of(conflict.eqns, jaxpr).is_backward
    )


def _is_sum_of_gradients(conflict: Conflict) -> bool:
    """Whether a conflict is where two terms of a loss, read from the same array, meet again."""
    return conflict.powers == (0, 1) and conflict.eqns[0].primitive.name == "add_any"


def _diagnose(conflict: Conflict) -> str:
    is_negative = min(conflict.powers) < 0
    if not conflict.marks & DIVIDED:
        return "early" if conflict.marks & MULTIPLIED or not is_negative else "forgotten"
    if not is_negative:
        return "multiplied twice"
    return "divided twice" if conflict.marks & MULTIPLIED else "forgotten"


def _is_written_as_number(program: StepProgram, flow: ScaleFlow) -> bool:
    """Whether a scale that never moves also stands in the program as a number."""
    values = set()
    for number, i in program.carried.items():
        value = program.inputs[i].number
        if i in program.scales and value is not None and flow.outputs[number].origin == i:
            values.add(value)
    return bool(values) and any(
        reading.number_of(atom) in values
        for eqn, _ in folds.equations_inside(program.jaxpr)
        for atom in eqn.invars
    )


def find_unfrozen_statistics(program: StepProgram, flow: ScaleFlow) -> list[LintFinding]:
    """Finds batch statistics of flax that a skipped step changes."""
    if not program.has_skips or _is_forgotten(flow):
        return []
    numbers = [
        number
        for number, i in program.carried.items()
        if "batch_stats" in program.inputs[i].path and _is_always_new(program, flow, number)
    ]
    if not numbers:
        return []
    return [
        LintFinding(
            "batch_stats",
            f"a skipped step changes batch statistics: {program.carried_names(numbers)}",
            source_of_output(program, numbers[0]),
            "keep the old ones with ampx.select_if_finite(opt_state, new, old)",
        )
    ]


def find_counting_schedules(program: StepProgram, flow: ScaleFlow) -> list[LintFinding]:
    """Finds counters of optax that count skipped steps and from which a rate is computed."""
    if not program.has_skips or _is_forgotten(flow):
        return []
    counters = {
        i: number
        for number, i in program.carried.items()
        if _is_count_of_optimizer(program.inputs[i])
        and program.inputs[i].aval.shape == ()
        and jnp.issubdtype(program.inputs[i].aval.dtype, np.integer)
        and _is_always_new(program, flow, number)
    }
    if not counters:
        return []
    bits = {i: 1 << place for place, i in enumerate(counters)}
    operands = [_Counts(bits.get(i, 0), 0) for i in range(len(program.inputs))]
    outputs = _follow_counts(program.jaxpr, operands)
    # A rate counts only on its way into what a verdict holds back, such as the parameters.
    reached = bit_sets.unite(
        outputs[number].numbers for number in program.carried if flow.outputs[number].marks & READS
    )
    return [
        LintFinding(
            "schedule",
            f"a schedule counts skipped steps, too: {program.inputs[i].name}",
            source_of_output(program, counters[i]),
            "put it inside of the loss scale, whose skips leave the whole inner state as it was",
        )
        for i in counters
        if reached & bits[i]
    ]


def _is_count_of_optimizer(leaf: StepArray) -> bool:
    """Whether a leaf is the field `count` of an optimizer's state.

    A count of samples that someone keeps beside his parameters must not stop at a skipped step.
    """
    if "count" not in leaf.path[-2:]:
        return False
    at = leaf.path.index("count", max(0, len(leaf.path) - 2))
    # flax nnx knows the classes of states no more, but keeps them under this name.
    if "opt_state" in leaf.path[:at]:
        return True
    *around, state = leaf.nodes[: at + 1]
    if not is_named_tuple(state):
        return False
    return is_of_library(state) or any(is_of_library(n) or is_chain(n) for n in around)


def _is_always_new(program: StepProgram, flow: ScaleFlow, number: int) -> bool:
    """Whether an output is computed, and nothing of the loss scale goes into it."""
    variables = reading.open_jaxpr(program.jaxpr)
    is_new = variables.outvars[number] is not variables.invars[program.carried[number]]
    return is_new and not flow.outputs[number].marks & READS


def _is_forgotten(flow: ScaleFlow) -> bool:
    """Whether no verdict can depend on the scale, since the gradients do not."""
    return any(_diagnose(conflict) == "forgotten" for conflict in flow.conflicts)


class _Counts(NamedTuple):
    """Which counters a value is made of, as bits.

    Attributes:
      integers: those that it is computed from in integers or bools.
      numbers: those that were converted to a floating number on the way to it, as by a schedule.
    """

    integers: int
    numbers: int


def _follow_counts(jaxpr: Jaxpr, operands: Sequence[_Counts]) -> list[_Counts]:
    def apply(eqn: Equation, inputs: list[_Counts]) -> Sequence[_Counts]:
        # What decides between values makes none of them. Bits are only added, so a loop settles.
        results = folds.follow_bodies(eqn, inputs, _follow_counts, lambda own, _: _unite(own))
        if results is not None:
            return results
        # A random key that is made of a counter is no rate.
        if eqn.primitive.name.startswith(("random_", "threefry", "bitcast")):
            return [_Counts(0, 0)] * len(eqn.outvars)
        both = _unite(inputs)
        return [
            _Counts(0, both.numbers | both.integers)
            if is_floating(out.aval)
            else _Counts(both.integers, both.numbers)
            for out in eqn.outvars
        ]

    return folds.fold(jaxpr, operands, apply, lambda _: _Counts(0, 0))


def _unite(values: Sequence[_Counts]) -> _Counts:
    return _Counts(*(bit_sets.unite(value[field] for value in values) for field in (0, 1)))
