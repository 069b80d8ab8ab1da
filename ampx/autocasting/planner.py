"""Decides, before anything runs, which precision every equation of a jaxpr computes in.

Two passes alternate until they agree. Forward, each equation decides from its rule and from what is
known of its operands. Backward, an equation all of whose readers compute in float32 is lifted to
float32 itself: only so are softmax, norms and variances exact from their inputs on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from ampx.autocasting import calls, operations, tables
from ampx.autocasting.decisions import Decision, Plan, Settings
from ampx.autocasting.rules import NOWHERE, Surroundings
from ampx.autocasting.values import (
    Demand,
    Value,
    constant_value,
    is_float32,
    joined,
    literal_value,
    pinned,
    result,
)
from ampx.jaxprs import reading, source_info
from ampx.jaxprs.reading import Jaxpr

CLOSED_BOOK = "unknown function inside, left as traced"


class _Knowledge:
    """The values of a jaxpr's variables during a forward pass."""

    def __init__(self, jaxpr: Any, inputs: Sequence[Value]) -> None:
        self.of_variable = dict(zip(jaxpr.invars, inputs, strict=True))
        self.of_variable.update((var, constant_value(var.aval)) for var in jaxpr.constvars)

    def __getitem__(self, atom: Any) -> Value:
        return literal_value(atom) if reading.is_literal(atom) else self.of_variable[atom]


class Planner:
    """Plans jaxprs for one `Settings`, each once for what is known of its inputs and readers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plans: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Value],
        demands: Sequence[Demand],
        around: Surroundings = NOWHERE,
    ) -> Plan:
        """The plan of `jaxpr`, whose inputs are as told and whose outputs serve these demands."""
        plans = self._plans.setdefault(jaxpr, {})
        key = (tuple(inputs), tuple(demands), around)
        if key not in plans:
            plans[key] = self._plan(reading.open_jaxpr(jaxpr), *key)
        return plans[key]

    def _plan(
        self, jaxpr: Any, inputs: tuple[Value, ...], demands: tuple[Demand, ...], around: Any
    ) -> Plan:
        lifted: set[int] = set()
        asked: dict[int, tuple[Demand, ...]] = {}
        known = _Knowledge(jaxpr, inputs)
        decided: list[tuple[Any, Decision] | None] = [None] * len(jaxpr.eqns)
        while True:
            decisions = self._forward(jaxpr, known, lifted, asked, around, decided)
            more, now_asked, readers = _backward(jaxpr, decisions, demands)
            if more <= lifted and now_asked == asked:
                break
            lifted |= more
            asked = now_asked
        outputs = tuple(
            pinned(result(atom.aval, known[atom]), demand, is_float32(atom))
            for atom, demand in zip(jaxpr.outvars, demands, strict=True)
        )
        _warn_of_closed_books(jaxpr, decisions)
        input_demands = tuple(readers.get(var, Demand.NONE) for var in jaxpr.invars)
        return Plan(inputs, demands, tuple(decisions), outputs, input_demands, around)

    def _forward(
        self,
        jaxpr: Any,
        known: _Knowledge,
        lifted: set[int],
        asked: dict[int, tuple[Demand, ...]],
        around: Surroundings,
        decided: list[tuple[Any, Decision] | None],
    ) -> list[Decision]:
        """Decides every equation; what an earlier pass decided on the same grounds stands."""
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
                known.of_variable[out] = result(out.aval, value)
            decided[index] = grounds, decision
            decisions.append(decision)
        return decisions

    def _decide(
        self,
        eqn: Any,
        values: tuple[Value, ...],
        wanted: tuple[Demand, ...],
        lift: bool,
        around: Surroundings,
    ) -> Decision:
        name = eqn.primitive.name
        precision, rule, inside = self._precision(eqn, around)
        if precision == "banned":
            raise RuntimeError(
                f"{rule} is banned under autocast: call it outside, or in ampx.float_function, or "
                "take the ban out of the rules"
            )
        if tables.DEFAULTS.get(name) == "recurse":
            return calls.decide(self, eqn, values, wanted, rule, inside)
        if precision == "opaque":
            rule = CLOSED_BOOK if _is_closed_book(eqn) else rule
            return operations.opaque(eqn, rule)
        return operations.decide(eqn, values, precision, rule, self.settings.half_dtype, lift)

    def _precision(
        self, eqn: Any, around: Surroundings
    ) -> tuple[tables.Precision, str, Surroundings]:
        """The precision that rules and marks give an equation, who gave it, and for its body."""
        name = eqn.primitive.name
        rules = self.settings.rules
        inside = around
        default = tables.DEFAULTS.get(name, "opaque")
        if around.forced is not None:
            fixed = default in ("opaque", "recurse")
            return default if fixed else around.forced, f"{around.forced} region", around
        if not rules.entries:
            return default, name, around
        index = rules.match(eqn, around)
        if default == "recurse":
            call = reading.call_name(eqn)
            scopes = (*around.scopes, *source_info.scope_of(eqn), *((call,) if call else ()))
            inside = Surroundings(scopes, None, index)
        if index < 0:
            return default, name, inside
        entry = rules.entries[index]
        by_name = entry.name == name
        if default == "opaque" and not by_name and entry.precision != "banned":
            return default, name, inside
        if default == "opaque" and entry.precision != "banned":
            if reading.has_bodies(eqn) or name in tables.DEFAULTS:
                if entry.precision != "float32":
                    raise ValueError(
                        f"{name} cannot be retraced in another dtype, so a rule cannot make it "
                        f"{entry.precision}: wrap the call in ampx.half_function instead"
                    )
        return entry.precision, entry.description, inside


def _is_closed_book(eqn: Any) -> bool:
    name = eqn.primitive.name
    unknown = name not in tables.DEFAULTS and reading.has_bodies(eqn)
    known = name in tables.CLOSED_BOOKS and any(map(is_float32, eqn.outvars))
    return (unknown or known) and any(map(is_float32, eqn.invars))


def _warn_of_closed_books(jaxpr: Any, decisions: Sequence[Decision]) -> None:
    for eqn, decision in zip(jaxpr.eqns, decisions, strict=True):
        if decision.rule == CLOSED_BOOK:
            warnings.warn(
                f"autocast cannot rewrite the function inside {eqn.primitive.name} "
                f"({source_info.line_of(eqn)}) and runs it in float32: wrap the call in "
                "ampx.half_function to run it in half, or in ampx.float_function to say that "
                "float32 is meant",
                stacklevel=2,
            )


_ASKED_BY_A_PIN = {Demand.PIN_FLOAT32: Demand.FLOAT32, Demand.PIN_HALF: Demand.KEEP}


def _backward(
    jaxpr: Any, decisions: Sequence[Decision], demands: Sequence[Demand]
) -> tuple[set[int], dict[int, tuple[Demand, ...]], dict[Any, Demand]]:
    """Who can be lifted, what is asked of each call's outputs, and of the jaxpr's inputs."""
    readers: dict[Any, Demand] = {}
    lifted: set[int] = set()
    asked: dict[int, tuple[Demand, ...]] = {}

    def ask(atom: Any, demand: Demand) -> None:
        demand = _ASKED_BY_A_PIN.get(demand, demand)
        if not reading.is_literal(atom) and demand is not Demand.NONE:
            readers[atom] = joined(readers.get(atom, Demand.NONE), demand)

    for atom, demand in zip(jaxpr.outvars, demands, strict=True):
        ask(atom, demand)
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn, decision = jaxpr.eqns[index], decisions[index]
        wanted = tuple([readers.get(out, Demand.NONE) for out in eqn.outvars])
        for atom, demand in zip(eqn.invars, _asks(eqn, decision, wanted), strict=True):
            ask(atom, demand)
        if decision.bodies:
            asked[index] = wanted
        if decision.follows and decision.precision == "half" and _serves_float32(wanted):
            lifted.add(index)
    return lifted, asked, readers


def _serves_float32(wanted: Sequence[Demand]) -> bool:
    return any(d.is_float32 for d in wanted) and all(
        d.is_float32 or d is Demand.NONE for d in wanted
    )


def _asks(eqn: Any, decision: Decision, wanted: Sequence[Demand]) -> Sequence[Demand]:
    """What an equation asks of its operands."""
    name = eqn.primitive.name
    if decision.bodies:
        return calls.asks(eqn, decision)
    if name in tables.MOVING and len(eqn.outvars) == 1 and is_float32(eqn.outvars[0]):
        # What is narrowed before it is repeated has its cotangents summed in half.
        sums = name in tables.SUMMING_WHEN_TRANSPOSED and wanted[0] is Demand.HALF
        passed = Demand.KEEP if sums else wanted[0]
        return [passed if is_float32(atom) else Demand.NONE for atom in eqn.invars]
    if decision.follows and _serves_float32(wanted):
        demand = Demand.FLOAT32
    elif decision.precision == "float32" and not decision.follows:
        demand = Demand.FLOAT32
    elif decision.follows and not any(is_float32(out) for out in eqn.outvars):
        demand = Demand.NONE
    elif decision.precision == "half" and name in tables.HALF_BY_DEFAULT:
        demand = Demand.HALF
    else:
        demand = Demand.KEEP
    return [demand if is_float32(atom) else Demand.NONE for atom in eqn.invars]
