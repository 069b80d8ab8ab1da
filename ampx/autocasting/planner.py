"""Decides, before anything runs, which precision every equation of a jaxpr computes in.

Two passes alternate until they agree. The forward pass walks from the inputs to the outputs. Each
equation decides from the rule of its primitive and from what is known of its operands (a
`KnownValue`, with its `Vote`). The backward pass walks from the outputs to the inputs and collects
what the readers of each value ask of it (a `Demand`). An equation that would follow its operands
into half, although every reader computes in float32, is *lifted*: it computes in float32 itself. A
lifted equation is a float32 reader of its own operands, so whole chains are lifted. Without that,
softmax, norms and variances would round in half between their input and their sum.

An example, for `sum(square(x @ w))`:

    equation                  forward 1        backward 1        forward 2
    c = dot_general x w       half             reads x, w: HALF  half
    d = square c              half, follows    reads c: FLOAT32  float32, lifted
    e = reduce_sum d          float32          reads d: FLOAT32  float32

`dot_general` runs in half by its rule. `square` has the rule "pass" and follows c. The one reader
of d is a float32 sum, so `square` is lifted, and c is widened before it. c is read in float32 alone
as well, but a product does not follow its operands: it stays half. The second backward pass finds
nothing more to lift, and the plan is done.

Why this ends: no pass takes a lifting back. The set of lifted equations only grows, and each
equation can join it once. What is asked of a call's outputs is derived from the decisions of their
readers, and moves with these towards float32.

Calls, loops and branches are planned by `calls.py`, which asks this planner for plans of their
bodies; equations without bodies are decided by `operations.py`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ampx.autocasting import calls, operations, tables
from ampx.autocasting.plans import Decision, PrecisionPlan, Settings
from ampx.autocasting.rules import NOWHERE, Surroundings
from ampx.autocasting.values import (
    Demand,
    KnownValue,
    apply_demand,
    describe_closed_over,
    describe_literal,
    is_float32,
    join_demands,
    restrict_to_type,
)
from ampx.jaxprs import reading, source_info
from ampx.jaxprs.reading import Jaxpr

HIDDEN_FUNCTION = "unknown function inside, left as traced"


class _KnownValues:
    """What is known of a jaxpr's variables and literals during a forward pass."""

    def __init__(self, jaxpr: Any, inputs: Sequence[KnownValue]) -> None:
        self.of_variable = dict(zip(jaxpr.invars, inputs, strict=True))
        self.of_variable.update((var, describe_closed_over(var.aval)) for var in jaxpr.constvars)

    def __getitem__(self, atom: Any) -> KnownValue:
        return describe_literal(atom) if reading.is_literal(atom) else self.of_variable[atom]


class Planner:
    """Plans jaxprs for one `Settings`, each once for what is known of its inputs and readers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plans: weakref.WeakKeyDictionary[Any, dict[Any, PrecisionPlan]] = (
            weakref.WeakKeyDictionary()
        )

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[KnownValue],
        demands: Sequence[Demand],
        around: Surroundings = NOWHERE,
    ) -> PrecisionPlan:
        """Plans a jaxpr.

        Args:
          jaxpr: what to plan.
          inputs: what is known of each of its inputs.
          demands: what the readers of each of its outputs ask.
          around: where it stands.
        """
        # JAX caches the jaxprs of jitted functions and of loop bodies, so the same object comes
        # back at the next trace and finds its plan, and with it the rewritten jaxpr, again. Weak
        # keys let both go when JAX drops the jaxpr.
        plans = self._plans.setdefault(jaxpr, {})
        key = (tuple(inputs), tuple(demands), around)
        if key not in plans:
            plans[key] = self._compute_plan(reading.open_jaxpr(jaxpr), *key)
        return plans[key]

    def _compute_plan(
        self, jaxpr: Any, inputs: tuple[KnownValue, ...], demands: tuple[Demand, ...], around: Any
    ) -> PrecisionPlan:
        lifted: set[int] = set()  # indices of equations
        asked: dict[int, tuple[Demand, ...]] = {}  # by equation with bodies: per output
        known = _KnownValues(jaxpr, inputs)
        decided: list[tuple[Any, Decision] | None] = [None] * len(jaxpr.eqns)
        while True:
            decisions = self._decide_forward(jaxpr, known, lifted, asked, around, decided)
            more, now_asked, readers = _lift_backward(jaxpr, decisions, demands)
            if more <= lifted and now_asked == asked:
                break
            lifted |= more
            asked = now_asked
        outputs = tuple(
            apply_demand(restrict_to_type(atom.aval, known[atom]), demand, is_float32(atom))
            for atom, demand in zip(jaxpr.outvars, demands, strict=True)
        )
        input_demands = tuple(readers.get(var, Demand.NONE) for var in jaxpr.invars)
        return PrecisionPlan(inputs, demands, tuple(decisions), outputs, input_demands, around)

    def _decide_forward(
        self,
        jaxpr: Any,
        known: _KnownValues,
        lifted: set[int],
        asked: dict[int, tuple[Demand, ...]],
        around: Surroundings,
        decided: list[tuple[Any, Decision] | None],
    ) -> list[Decision]:
        """Decides every equation; what an earlier pass decided on the same grounds stands.

        `decided` holds, for each equation, the grounds and the decision of the pass before. Since a
        lifting changes few equations, later passes look at few, and bodies are not planned anew.
        """
        decisions = []
        for index, eqn in enumerate(jaxpr.eqns):
            values = tuple([known[atom] for atom in eqn.invars])
            grounds = (values, asked.get(index), index in lifted)
            before = decided[index]
            if before is not None and before[0] == grounds:
                decisions.append(before[1])
                continue
            wanted = asked.get(index) or (Demand.KEEP,) * len(eqn.outvars)
            decision = self._decide(eqn, values, wanted, index in lifted, around)
            for out, value in zip(eqn.outvars, decision.outputs, strict=True):
                known.of_variable[out] = restrict_to_type(out.aval, value)
            decided[index] = grounds, decision
            decisions.append(decision)
        return decisions

    def _decide(
        self,
        eqn: Any,
        values: tuple[KnownValue, ...],
        wanted: tuple[Demand, ...],
        lift: bool,
        around: Surroundings,
    ) -> Decision:
        name = eqn.primitive.name
        precision, rule, inside = self._find_precision(eqn, around)
        if precision == "banned":
            raise RuntimeError(
                f"{rule} is banned under autocast: call it outside, or in ampx.float_function, or "
                "take the ban out of the rules"
            )
        if tables.DEFAULTS.get(name) == "recurse":
            return calls.decide(calls.Site(self, eqn, values, wanted, rule, inside))
        if precision == "opaque":
            if not _hides_a_function(eqn):
                rule = name
            elif rule == name:  # no rule says that float32 is meant
                rule = HIDDEN_FUNCTION
            return operations.decide_opaque(eqn, rule)
        dots, half = self.settings.dots, self.settings.half_dtype
        in_float8 = precision == "float8"
        decision = operations.decide(
            eqn, values, "half" if in_float8 else precision, rule, half, lift
        )
        if dots is None or decision.precision != "half" or name not in tables.HALF_BY_DEFAULT:
            return decision
        if decision.rule == operations.NO_SUM:
            return decision
        if around.in_custom_jvp:
            # The rule's tangents run through its products, and JAX transposes these for reverse
            # mode. A product in float8 has a rule for its gradients and cannot be transposed.
            return decision._replace(not_float8="custom_jvp")
        return operations.decide_float8(eqn, values, decision, dots, in_float8 or rule == name)

    def _find_precision(
        self, eqn: Any, around: Surroundings
    ) -> tuple[tables.Precision, str, Surroundings]:
        """Finds the precision that rules and marks give an equation.

        Returns:
          The precision, who gave it (for the report), and the surroundings of the equation's body.
        """
        name = eqn.primitive.name
        rules = self.settings.rules
        inside = around
        default = tables.DEFAULTS.get(name, "opaque")
        if around.forced is not None:
            # Inside a promote_function, or of the backward pass of a product.
            fixed = default in ("opaque", "recurse")
            fixed |= around.forced == "half_to_float32" and default != "half"
            if fixed:
                return default, name, around
            return around.forced, f"{around.forced} region", around
        if not rules.entries:
            return default, name, around
        index = rules.match(eqn, around, for_products=default == "half")
        if default == "recurse":
            call = reading.call_name(eqn)
            scopes = (*around.scopes, *source_info.scope_of(eqn), *((call,) if call else ()))
            # A rule that covers a call covers its body: the body's equations inherit its index, and
            # only later rules can decide otherwise.
            of_products = rules.match(eqn, around, for_products=True)
            inside = around._replace(
                scopes=scopes, function=None, inherited=index, inherited_by_products=of_products
            )
        if index < 0:
            return default, name, inside
        entry = rules.entries[index]
        by_name = entry.name == name
        # A rule for a module or a function covers all that is inside, except equations that cannot
        # run in another dtype, such as random bits. A rule for these has to name their primitive.
        if default == "opaque" and not by_name and entry.precision != "banned":
            return default, entry.description if entry.precision == "float32" else name, inside
        if default == "opaque" and entry.precision != "banned":
            if reading.has_bodies(eqn) or name in tables.DEFAULTS:
                if entry.precision != "float32":
                    raise ValueError(
                        f"{name} cannot be retraced in another dtype, so a rule cannot make it "
                        f"{entry.precision}: wrap the call in ampx.half_function instead"
                    )
        return entry.precision, entry.description, inside


def _hides_a_function(eqn: Any) -> bool:
    """Whether an equation computes on float32 by a function that autocast cannot rewrite."""
    name = eqn.primitive.name
    unknown = name not in tables.DEFAULTS and reading.has_bodies(eqn)
    known = name in tables.HIDING_FUNCTIONS and any(map(is_float32, eqn.outvars))
    return (unknown or known) and any(map(is_float32, eqn.invars))


def warn_of_hidden_functions(jaxpr: Jaxpr, plan: PrecisionPlan) -> None:
    """Warns of functions that autocast cannot rewrite, once for each place that calls one.

    It looks at a finished plan: on the way to it, a body may be planned many times.
    """
    for name, line in dict.fromkeys(_find_hidden_functions(jaxpr, plan)):
        # Who uses a library cannot change its calls, but can name its primitive in a rule.
        warnings.warn(
            f"autocast cannot rewrite the function inside {name} ({line}) and runs it in float32. "
            f"If float32 is meant, say so by the rule ampx.DEFAULT_RULES.float32({name!r}), given "
            "as rules=; to run it in half, wrap the call in ampx.half_function",
            stacklevel=2,
        )


def _find_hidden_functions(jaxpr: Jaxpr, plan: PrecisionPlan) -> Iterator[tuple[str, str]]:
    """Finds the primitives that hold one, and the line of each, also inside calls and loops."""
    for eqn, decision in zip(reading.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True):
        if decision.rule == HIDDEN_FUNCTION:
            yield eqn.primitive.name, source_info.line_of(eqn)
        if decision.bodies:
            for body, body_plan in zip(reading.bodies_of(eqn), decision.bodies, strict=True):
                yield from _find_hidden_functions(body, body_plan)


# A pin is a border's order for the value that crosses it. To the equation that computes the value,
# a float32 border is one more float32 reader; a half border changes nothing.
_DEMAND_OF_A_PIN = {Demand.PIN_FLOAT32: Demand.FLOAT32, Demand.PIN_HALF: Demand.KEEP}


def _lift_backward(
    jaxpr: Any, decisions: Sequence[Decision], demands: Sequence[Demand]
) -> tuple[set[int], dict[int, tuple[Demand, ...]], dict[Any, Demand]]:
    """Collects what readers ask of every value, from the outputs to the inputs.

    Returns:
      The equations that can be lifted, by index; what is asked of the outputs of each equation with
      bodies; and what is asked of every variable, the jaxpr's inputs among them.
    """
    readers: dict[Any, Demand] = {}
    lifted: set[int] = set()
    asked: dict[int, tuple[Demand, ...]] = {}

    def ask(atom: Any, demand: Demand) -> None:
        demand = _DEMAND_OF_A_PIN.get(demand, demand)
        if not reading.is_literal(atom) and demand is not Demand.NONE:
            readers[atom] = join_demands(readers.get(atom, Demand.NONE), demand)

    for atom, demand in zip(jaxpr.outvars, demands, strict=True):
        ask(atom, demand)
    # Backwards, all readers of an equation's outputs have been seen before the equation itself.
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn, decision = jaxpr.eqns[index], decisions[index]
        wanted = tuple([readers.get(out, Demand.NONE) for out in eqn.outvars])
        operand_demands = _find_operand_demands(eqn, decision, wanted)
        for atom, demand in zip(eqn.invars, operand_demands, strict=True):
            if is_float32(atom):
                ask(atom, demand)
        if decision.bodies:
            asked[index] = wanted
        if decision.follows and decision.precision == "half" and _is_read_in_float32(wanted):
            lifted.add(index)
    return lifted, asked, readers


def _is_read_in_float32(wanted: Sequence[Demand]) -> bool:
    """Whether outputs have readers, and all of these compute in float32."""
    return any(d.is_float32 for d in wanted) and all(
        d.is_float32 or d is Demand.NONE for d in wanted
    )


def _find_operand_demands(
    eqn: Any, decision: Decision, wanted: Sequence[Demand]
) -> Sequence[Demand]:
    """Finds what an equation asks of each float32 operand, given what is asked of its outputs."""
    name = eqn.primitive.name
    if decision.bodies:
        return calls.find_operand_demands(eqn, decision)
    if name in tables.MOVING and len(eqn.outvars) == 1 and is_float32(eqn.outvars[0]):
        # A reshape, slice or broadcast computes nothing, so its readers are its operand's readers.
        # But a broadcast whose reader wants half must not hand that on: narrowed before it is
        # repeated, the operand would have the cotangents of all repetitions summed in half.
        sums = name in tables.SUMMING_WHEN_TRANSPOSED and wanted[0] is Demand.HALF
        return [Demand.KEEP if sums else wanted[0]] * len(eqn.invars)
    if decision.follows and _is_read_in_float32(wanted):
        demand = Demand.FLOAT32  # about to be lifted
    elif decision.precision == "float32" and not decision.follows:
        demand = Demand.FLOAT32
    elif decision.follows and not any(is_float32(out) for out in eqn.outvars):
        demand = Demand.NONE  # a comparison or an argmax takes either
    elif decision.precision == "half" and name in tables.HALF_BY_DEFAULT:
        # One with a float32 result gives float32 cotangents, which a half operand would round.
        demand = Demand.KEEP if decision.gives_float32(eqn) else Demand.HALF
    else:
        demand = Demand.KEEP
    return [demand] * len(eqn.invars)
