"""Plans equations that hold jaxprs: calls, loops, branches and functions with rules of their own.

The body of such an equation is planned like the jaxpr around it, with one difference: its inputs
and outputs are borders, and dtypes on both sides of a border must agree. The body's plan is given
what is known of its inputs outside (`KnownValue`s) and what readers outside ask of its outputs
(`Demand`s). It returns what is known of the outputs and what the body asks of the inputs. Which
side decides about the dtypes at a border depends on the equation:

    equation                     inputs of the body        outputs of the body
    jit, remat, shard_map,
    custom rules                 as they come              as they are computed
    scan, while: carry           float32                   float32 (the next step's input)
    scan: constants              float32                   none
    while: constants             as they come              none
    scan: xs, stacked outputs    as they come, or half     as they are computed
    cond                         as they come              the same in every branch: the widest

A carry stays what was traced because its type must be the same before and after each step, and
because a sum that grows over many steps is what half swallows first.

Marked regions (`marks.py`) are jitted functions with known names; each has a plan of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ampx.autocasting import operations
from ampx.autocasting.marks import NATIVE_MARK, PROMOTE_MARK, RELABEL_MARK
from ampx.autocasting.plans import Decision, PrecisionPlan, Settings
from ampx.autocasting.rules import Surroundings
from ampx.autocasting.values import (
    AS_TRACED,
    COMPUTED,
    IN_HALF,
    Demand,
    KnownValue,
    Vote,
    is_float32,
)
from ampx.jaxprs import reading, source_info
from ampx.jaxprs.reading import Jaxpr

AS_WRITTEN = "left as written"  # the rule of a region that autocast does not enter


class PlansJaxprs(Protocol):
    """What this module needs of the planner, which imports this module."""

    settings: Settings

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[KnownValue],
        demands: Sequence[Demand],
        around: Surroundings = ...,
    ) -> PrecisionPlan:
        """Plans a jaxpr."""


class Site(NamedTuple):
    """An equation that holds jaxprs, with all that its plan depends on.

    Attributes:
      planner: plans the bodies.
      eqn: the equation.
      values: what is known of its operands.
      wanted: what readers ask of its outputs.
      rule: who decided its precision, for the report.
      around: where the equations of its bodies stand.
    """

    planner: PlansJaxprs
    eqn: Any
    values: tuple[KnownValue, ...]
    wanted: tuple[Demand, ...]
    rule: str
    around: Surroundings

    def plan(
        self, body: Jaxpr, inputs: Sequence[KnownValue], demands: Sequence[Demand]
    ) -> PrecisionPlan:
        """Plans one of the bodies."""
        around = self.around
        if self.planner.settings.rules.entries:
            # Only rules that name a Python function ask where a body was written. Without rules, a
            # body that several places share then has the same surroundings, and one plan, in all.
            around = around._replace(function=source_info.function_of(body))
        return self.planner.plan(body, inputs, demands, around)


def decide(site: Site) -> Decision:
    """Decides what becomes of an equation whose bodies autocast rewrites."""
    eqn, settings = site.eqn, site.planner.settings
    name, mark = eqn.primitive.name, reading.call_name(eqn)
    if name == "custom_jvp_call" and (settings.dots is not None or settings.rules.entries):
        site = site._replace(around=site.around._replace(in_custom_jvp=True))
    if mark == NATIVE_MARK:
        return operations.decide_opaque(eqn, AS_WRITTEN)
    if mark == RELABEL_MARK and relabels_half(eqn):
        return _decide_relabel(eqn)
    if mark == PROMOTE_MARK:
        return _decide_promote(site)
    if name == "scan":
        return _decide_scan(site)
    if name == "while":
        return _decide_while(site)
    if name == "cond":
        return _decide_cond(site)
    if name == "custom_vjp_call" and settings.custom_vjp == "opaque":
        return operations.decide_opaque(eqn, "custom_vjp='opaque'")
    return _decide_call(site)


def find_operand_demands(eqn: Any, decision: Decision) -> Sequence[Demand]:
    """What an equation with bodies asks of each operand: what its bodies ask of their inputs.

    Those that were not traced as float32 do not count.
    """
    name = eqn.primitive.name
    if name == "scan":
        consts, carry = reading.scan_sizes(eqn)
        (body,) = decision.bodies
        asked = list(body.input_demands)
        asked[consts : consts + carry] = [Demand.FLOAT32] * carry
        # xs are stacks of what all steps read. Whether they are narrowed before the loop is decided
        # in _decide_scan; to ask for FLOAT32 would have a whole stack computed in float32, where
        # each step can widen its own slice.
        asked[consts + carry :] = [Demand.KEEP] * (len(asked) - consts - carry)
        return asked
    if name == "while":
        condition, body = decision.bodies
        of_condition, of_body = reading.while_sizes(eqn)
        carry = len(eqn.invars) - of_condition - of_body
        return [
            *condition.input_demands[:of_condition],
            *body.input_demands[:of_body],
            *[Demand.FLOAT32] * carry,
        ]
    if name == "cond":
        each = zip(*(body.input_demands for body in decision.bodies), strict=True)
        merged = [demands[0] if len(set(demands)) == 1 else Demand.KEEP for demands in each]
        # Operand 0 is the index of the branch, which no branch sees.
        return [Demand.NONE, *merged]
    (body,) = decision.bodies
    return body.input_demands


def _keep_dtypes(eqn: Any, values: Sequence[KnownValue]) -> tuple[bool | None, ...]:
    """`Decision.operands` that give a body the dtypes it was planned for."""
    return tuple(
        value.half if is_float32(atom) else None
        for atom, value in zip(eqn.invars, values, strict=True)
    )


def _label_precision(*bodies: PrecisionPlan) -> str:
    return "recurse" if not all(body.changes_nothing for body in bodies) else "as traced"


def _decide_call(site: Site) -> Decision:
    (body,) = reading.bodies_of(site.eqn)
    plan = site.plan(body, site.values, site.wanted)
    operands = _keep_dtypes(site.eqn, site.values)
    return Decision(_label_precision(plan), site.rule, operands, plan.outputs, (plan,))


def relabels_half(eqn: Any) -> bool:
    """Whether a region with RELABEL_MARK gives half values the name float32.

    The transpose of such a region bears the mark too. It takes float32 cotangents to half, so its
    operands are float32, and it is planned like any other call.
    """
    return len(eqn.invars) == len(eqn.outvars) and not any(map(is_float32, eqn.invars))


def _decide_relabel(eqn: Any) -> Decision:
    """Half values that were given the name float32, so that the program around them type-checks.

    While it traces, `half_function` ends in half -> float32 conversions. The rewriter drops them,
    and the results are half values like those of a product.
    """
    outputs = tuple(IN_HALF if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision("half", "half_function", (None,) * len(eqn.invars), outputs)


def _decide_promote(site: Site) -> Decision:
    """A `promote_function`: all half if every float operand votes half or is a constant."""
    eqn = site.eqn
    floats = [v for a, v in zip(eqn.invars, site.values, strict=True) if is_float32(a)]
    half = any(v.vote is Vote.HALF for v in floats) and all(
        v.vote in (Vote.HALF, Vote.NEUTRAL) for v in floats
    )
    inputs = tuple(
        (IN_HALF if half else COMPUTED) if is_float32(atom) else AS_TRACED for atom in eqn.invars
    )
    (body,) = reading.bodies_of(eqn)
    # Everything inside takes the widest of its operands, which are all half or all float32.
    around = site.around._replace(forced="widest")
    plan = site.planner.plan(body, inputs, site.wanted, around)
    operands = tuple(half if is_float32(atom) else None for atom in eqn.invars)
    return Decision(_label_precision(plan), "promote_function", operands, plan.outputs, (plan,))


def _decide_scan(site: Site) -> Decision:
    eqn = site.eqn
    consts, carry = reading.scan_sizes(eqn)  # operands are [*consts, *carry, *xs]
    (body,) = reading.bodies_of(eqn)
    demands = _demand_float32_carry(carry) + [Demand.KEEP] * (len(eqn.outvars) - carry)
    inputs = [*map(_describe_widened, site.values[:consts]), *site.values[consts:]]
    inputs[consts : consts + carry] = _describe_carry(eqn.invars[consts : consts + carry])
    plan = site.plan(body, inputs, demands)
    # The weights of a scan over layers are xs of shape [num_layers, ...], of which each step reads
    # one layer. Where its only reader is a half product, the whole stack is converted once, before
    # the loop: the loop then reads half the bytes. Cotangents of xs are stacked, not summed, so
    # half does not cost accuracy here, as it would for constants.
    hoisted = [
        index
        for index in range(consts + carry, len(inputs))
        if plan.input_demands[index] is Demand.HALF and not inputs[index].half
    ]
    if hoisted:
        for index in hoisted:
            inputs[index] = IN_HALF
        plan = site.plan(body, inputs, demands)
    rule = "scan, weights cast before the loop" if hoisted else "scan"
    operands = _keep_dtypes(eqn, inputs)
    return Decision(_label_precision(plan), rule, operands, plan.outputs, (plan,))


def _describe_widened(value: KnownValue) -> KnownValue:
    """What is known of a scan's constant, which enters in float32.

    The transpose of a scan adds up a constant's cotangents, one per step, in the dtype in which the
    constant entered. A bfloat16 sum of ones stops at 256, so every step narrows for itself. The
    vote stays: what was half goes on as half inside.
    """
    return value._replace(half=False)


def _describe_carry(atoms: Sequence[Any]) -> list[KnownValue]:
    return [COMPUTED if is_float32(atom) else AS_TRACED for atom in atoms]


def _demand_float32_carry(number: int) -> list[Demand]:
    return [Demand.PIN_FLOAT32] * number


def _decide_while(site: Site) -> Decision:
    eqn, values = site.eqn, site.values
    of_condition, of_body = reading.while_sizes(eqn)
    consts = of_condition + of_body  # operands are [*consts of condition, *of body, *carry]
    carry = _describe_carry(eqn.invars[consts:])
    condition_jaxpr, body_jaxpr = reading.bodies_of(eqn)
    # A while loop has no transpose, so no cotangents are summed, and constants enter as they are.
    condition = site.plan(condition_jaxpr, [*values[:of_condition], *carry], [Demand.KEEP])
    body = site.plan(
        body_jaxpr, [*values[of_condition:consts], *carry], _demand_float32_carry(len(carry))
    )
    operands = _keep_dtypes(eqn, [*values[:consts], *carry])
    outputs = tuple(_describe_carry(eqn.outvars))
    precision = _label_precision(condition, body)
    return Decision(precision, "while", operands, outputs, (condition, body))


def _decide_cond(site: Site) -> Decision:
    eqn = site.eqn
    branches = reading.bodies_of(eqn)
    demands = list(site.wanted)
    # Branches must give the same types. Where they differ, the output is pinned and the branches
    # are planned again: to pin one output may lift what another shares with it, so all outputs are
    # compared anew. A pinned output cannot differ, so every round but the last pins one more.
    while True:
        plans = [site.plan(branch, site.values[1:], demands) for branch in branches]
        per_output = list(zip(*(plan.outputs for plan in plans), strict=True))
        agreed_on = [
            _agree_on_dtype(outputs, demand) if is_float32(out) else demand
            for out, outputs, demand in zip(eqn.outvars, per_output, demands, strict=True)
        ]
        if agreed_on == demands:
            break
        demands = agreed_on
    outputs = tuple(agreed[0] if len(set(agreed)) == 1 else COMPUTED for agreed in per_output)
    operands = _keep_dtypes(eqn, site.values)
    return Decision(_label_precision(*plans), "cond", operands, outputs, tuple(plans))


def _agree_on_dtype(outputs: Sequence[KnownValue], demand: Demand) -> Demand:
    """What to ask of an output of all branches, so that they give one type: the widest.

    A branch that gives a number (`lambda: 0.0`) does not make the others float32.
    """
    halves = [output.half for output in outputs]
    if all(halves) or not any(halves):
        return demand
    votes = {output.vote for output in outputs if not output.half}
    return Demand.PIN_HALF if votes <= {Vote.NEUTRAL, Vote.HALF} else Demand.PIN_FLOAT32
