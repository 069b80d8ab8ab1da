"""Planning of equations that hold jaxprs: calls, loops, branches and functions with own rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ampx.autocasting import operations
from ampx.autocasting.decisions import Decision, Plan, Settings
from ampx.autocasting.marks import NATIVE_MARK, PROMOTE_MARK, RELABEL_MARK
from ampx.autocasting.rules import Surroundings
from ampx.autocasting.values import AS_TRACED, COMPUTED, IN_HALF, Demand, Value, Vote, is_float32
from ampx.jaxprs import reading, source_info
from ampx.jaxprs.reading import Jaxpr


class PlansJaxprs(Protocol):
    """What this module needs of the planner."""

    settings: Settings

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Value],
        demands: Sequence[Demand],
        around: Surroundings = ...,
    ) -> Plan:
        """The plan of a jaxpr."""


def decide(
    planner: PlansJaxprs,
    eqn: Any,
    values: tuple[Value, ...],
    wanted: tuple[Demand, ...],
    rule: str,
    around: Surroundings,
) -> Decision:
    """What becomes of an equation with bodies that autocast rewrites."""
    name = eqn.primitive.name
    mark = reading.call_name(eqn)
    if mark == NATIVE_MARK:
        return operations.opaque(eqn, "left as written")
    if mark == RELABEL_MARK and is_relabelling(eqn):
        return _relabel(eqn)
    if mark == PROMOTE_MARK:
        return _promote(planner, eqn, values, wanted, around)
    if name == "scan":
        return _scan(planner, eqn, values, around)
    if name == "while":
        return _while(planner, eqn, values, around)
    if name == "cond":
        return _cond(planner, eqn, values, wanted, around)
    if name == "custom_vjp_call" and planner.settings.custom_vjp == "opaque":
        return operations.opaque(eqn, "custom_vjp='opaque'")
    return _call(planner, eqn, values, wanted, around, rule)


def asks(eqn: Any, decision: Decision) -> Sequence[Demand]:
    """What an equation with bodies asks of its operands."""
    name = eqn.primitive.name
    if name == "scan":
        consts, carry = reading.scan_sizes(eqn)
        (body,) = decision.bodies
        asked = list(body.input_demands)
        asked[consts : consts + carry] = [Demand.FLOAT32] * carry
        asked[consts + carry :] = [Demand.KEEP] * (len(asked) - consts - carry)
        return _touching_float32(eqn.invars, asked)
    if name == "while":
        condition, body = decision.bodies
        of_condition, of_body = reading.while_sizes(eqn)
        carry = len(eqn.invars) - of_condition - of_body
        asked = [
            *condition.input_demands[:of_condition],
            *body.input_demands[:of_body],
            *[Demand.FLOAT32] * carry,
        ]
        return _touching_float32(eqn.invars, asked)
    if name == "cond":
        each = zip(*(body.input_demands for body in decision.bodies), strict=True)
        merged = [demands[0] if len(set(demands)) == 1 else Demand.KEEP for demands in each]
        return _touching_float32(eqn.invars, [Demand.NONE, *merged])
    (body,) = decision.bodies
    return _touching_float32(eqn.invars, body.input_demands)


def _touching_float32(atoms: Sequence[Any], demands: Sequence[Demand]) -> list[Demand]:
    return [
        demand if is_float32(atom) else Demand.NONE
        for atom, demand in zip(atoms, demands, strict=True)
    ]


def _as_are(eqn: Any, values: Sequence[Value]) -> tuple[bool | None, ...]:
    """Operands in the dtype that the body expects of them."""
    return tuple(
        value.half if is_float32(atom) else None
        for atom, value in zip(eqn.invars, values, strict=True)
    )


def _inside(planner: PlansJaxprs, around: Surroundings, body: Jaxpr) -> Surroundings:
    if not planner.settings.rules.entries:
        return around
    return around._replace(function=source_info.function_of(body))


def _precision_of(*bodies: Plan) -> str:
    return "recurse" if not all(body.changes_nothing for body in bodies) else "as traced"


def _call(
    planner: PlansJaxprs,
    eqn: Any,
    values: tuple[Value, ...],
    wanted: tuple[Demand, ...],
    around: Surroundings,
    rule: str,
) -> Decision:
    (body,) = reading.bodies_of(eqn)
    plan = planner.plan(body, values, wanted, _inside(planner, around, body))
    return Decision(_precision_of(plan), rule, _as_are(eqn, values), plan.outputs, (plan,))


def is_relabelling(eqn: Any) -> bool:
    """Whether a marked region gives half values the name float32; its transpose does not."""
    return len(eqn.invars) == len(eqn.outvars) and not any(map(is_float32, eqn.invars))


def _relabel(eqn: Any) -> Decision:
    """Half values that were given the name float32, so that the program around them type-checks."""
    outputs = tuple(IN_HALF if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision("half", "half_function", (None,) * len(eqn.invars), outputs)


def _promote(
    planner: PlansJaxprs,
    eqn: Any,
    values: tuple[Value, ...],
    wanted: tuple[Demand, ...],
    around: Surroundings,
) -> Decision:
    floats = [v for a, v in zip(eqn.invars, values, strict=True) if is_float32(a)]
    half = any(v.vote is Vote.HALF for v in floats) and all(
        v.vote in (Vote.HALF, Vote.NEUTRAL) for v in floats
    )
    inputs = tuple(
        (IN_HALF if half else COMPUTED) if is_float32(atom) else AS_TRACED for atom in eqn.invars
    )
    (body,) = reading.bodies_of(eqn)
    plan = planner.plan(body, inputs, wanted, around._replace(forced="widest"))
    operands = tuple(half if is_float32(atom) else None for atom in eqn.invars)
    return Decision(_precision_of(plan), "promote_function", operands, plan.outputs, (plan,))


def _scan(
    planner: PlansJaxprs, eqn: Any, values: tuple[Value, ...], around: Surroundings
) -> Decision:
    consts, carry = reading.scan_sizes(eqn)
    (body,) = reading.bodies_of(eqn)
    demands = _carry_demands(carry) + [Demand.KEEP] * (len(eqn.outvars) - carry)
    inputs = [*map(_widened, values[:consts]), *values[consts:]]
    inputs[consts : consts + carry] = _carried(eqn.invars[consts : consts + carry])
    around = _inside(planner, around, body)
    plan = planner.plan(body, inputs, demands, around)
    hoisted = [
        index
        for index in range(consts + carry, len(inputs))
        if plan.input_demands[index] is Demand.HALF and not inputs[index].half
    ]
    if hoisted:
        # What each step converts to half is converted once, before the loop.
        for index in hoisted:
            inputs[index] = IN_HALF
        plan = planner.plan(body, inputs, demands, around)
    rule = "scan, weights cast before the loop" if hoisted else "scan"
    return Decision(_precision_of(plan), rule, _as_are(eqn, inputs), plan.outputs, (plan,))


def _widened(value: Value) -> Value:
    """A value that every step reads: in float32, so that its cotangents are summed in float32."""
    return value._replace(half=False)


def _carried(atoms: Sequence[Any]) -> list[Value]:
    return [COMPUTED if is_float32(atom) else AS_TRACED for atom in atoms]


def _carry_demands(number: int) -> list[Demand]:
    return [Demand.PIN_FLOAT32] * number


def _while(
    planner: PlansJaxprs, eqn: Any, values: tuple[Value, ...], around: Surroundings
) -> Decision:
    of_condition, of_body = reading.while_sizes(eqn)
    consts = of_condition + of_body
    carried = _carried(eqn.invars[consts:])
    condition_jaxpr, body_jaxpr = reading.bodies_of(eqn)
    condition = planner.plan(
        condition_jaxpr,
        [*values[:of_condition], *carried],
        [Demand.KEEP],
        _inside(planner, around, condition_jaxpr),
    )
    body = planner.plan(
        body_jaxpr,
        [*values[of_condition:consts], *carried],
        _carry_demands(len(carried)),
        _inside(planner, around, body_jaxpr),
    )
    inputs = [*values[:consts], *carried]
    outputs = tuple(_carried(eqn.outvars))
    precision = _precision_of(condition, body)
    return Decision(precision, "while", _as_are(eqn, inputs), outputs, (condition, body))


def _cond(
    planner: PlansJaxprs,
    eqn: Any,
    values: tuple[Value, ...],
    wanted: tuple[Demand, ...],
    around: Surroundings,
) -> Decision:
    branches = reading.bodies_of(eqn)

    def planned(demands: Sequence[Demand]) -> list[Plan]:
        return [
            planner.plan(branch, values[1:], demands, _inside(planner, around, branch))
            for branch in branches
        ]

    demands = list(wanted)
    while True:
        plans = planned(demands)
        per_output = list(zip(*(plan.outputs for plan in plans), strict=True))
        # To pin one output may lift what another shares with it, so all are looked at again.
        agreed_on = [
            _agreement(outputs, demand) if is_float32(out) else demand
            for out, outputs, demand in zip(eqn.outvars, per_output, demands, strict=True)
        ]
        if agreed_on == demands:
            break
        demands = agreed_on
    outputs = tuple(agreed[0] if len(set(agreed)) == 1 else COMPUTED for agreed in per_output)
    return Decision(_precision_of(*plans), "cond", _as_are(eqn, values), outputs, tuple(plans))


def _agreement(outputs: Sequence[Value], demand: Demand) -> Demand:
    """What to ask of an output of all branches, so that they give one type: the widest."""
    halves = [output.half for output in outputs]
    if all(halves) or not any(halves):
        return demand
    votes = {output.vote for output in outputs if not output.half}
    return Demand.PIN_HALF if votes <= {Vote.NEUTRAL, Vote.HALF} else Demand.PIN_FLOAT32
