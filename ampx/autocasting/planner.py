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

import jax
import numpy as np

from ampx import jaxprs
from ampx.autocasting import calls, tables
from ampx.autocasting.decisions import Decision, Plan, Settings
from ampx.autocasting.rules import NOWHERE, Surroundings
from ampx.autocasting.values import (
    AS_TRACED,
    COMPUTED,
    IN_HALF,
    Demand,
    Value,
    Vote,
    blended,
    constant_value,
    is_float32,
    joined,
    literal_value,
    moved,
    outlives,
    pinned,
    result,
    same_shape,
)

CLOSED_BOOK = "unknown function inside, left as traced"


class _Knowledge:
    """The values of a jaxpr's variables during a forward pass."""

    def __init__(self, jaxpr: Any, inputs: Sequence[Value]) -> None:
        self.of_variable = dict(zip(jaxpr.invars, inputs, strict=True))
        self.of_variable.update((var, constant_value(var.aval)) for var in jaxpr.constvars)

    def __getitem__(self, atom: Any) -> Value:
        return literal_value(atom) if jaxprs.is_literal(atom) else self.of_variable[atom]


class Planner:
    """Plans jaxprs for one `Settings`, each once for what is known of its inputs and readers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plans: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()

    def plan(
        self,
        jaxpr: jaxprs.Jaxpr,
        inputs: Sequence[Value],
        demands: Sequence[Demand],
        around: Surroundings = NOWHERE,
    ) -> Plan:
        """The plan of `jaxpr`, whose inputs are as told and whose outputs serve these demands."""
        plans = self._plans.setdefault(jaxpr, {})
        key = (tuple(inputs), tuple(demands), around)
        if key not in plans:
            plans[key] = self._plan(jaxprs.open_jaxpr(jaxpr), *key)
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
        if name == "convert_element_type":
            return self._decide_conversion(eqn, values, precision, rule, lift)
        forced = rule != name
        touches = [is_float32(atom) for atom in eqn.invars]
        if precision == "opaque":
            return _full(eqn, values, CLOSED_BOOK if _is_closed_book(eqn) else rule, opaque=True)
        if not any(touches):
            return _full(eqn, values, rule)
        if precision == "float32" or lift:
            return _full(eqn, values, "every reader is float32" if lift else rule)
        if name == "div" and not forced and values[0].constant is not None:
            return _full(eqn, values, "reciprocal")
        if precision == "half":
            return self._decide_half(eqn, values, rule, forced)
        if name in tables.ONE_TO_ONE and len(eqn.outvars) == len(eqn.invars):
            return Decision(
                "half" if any(v.half for v in values) else "float32",
                rule,
                (None,) * len(values),
                values,
                follows=name not in tables.TRANSFERS,
            )
        return self._decide_widest(eqn, values, rule)

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
            call = jaxprs.call_name(eqn)
            scopes = (*around.scopes, *jaxprs.scope_of(eqn), *((call,) if call else ()))
            inside = Surroundings(scopes, None, index)
        if index < 0:
            return default, name, inside
        entry = rules.entries[index]
        by_name = entry.name == name
        if default == "opaque" and not by_name and entry.precision != "banned":
            return default, name, inside
        if default == "opaque" and entry.precision != "banned":
            if jaxprs.has_bodies(eqn) or name in tables.DEFAULTS:
                if entry.precision != "float32":
                    raise ValueError(
                        f"{name} cannot be retraced in another dtype, so a rule cannot make it "
                        f"{entry.precision}: wrap the call in ampx.half_function instead"
                    )
        return entry.precision, f"{entry.precision}({entry.label})", inside

    def _decide_half(
        self, eqn: Any, values: tuple[Value, ...], rule: str, forced: bool
    ) -> Decision:
        if _opts_out(eqn, self.settings.half_dtype):
            return _full(eqn, values, "precision asked for")
        if eqn.primitive.name not in tables.DEFAULTS:
            return self._decide_unknown_in_half(eqn, rule)
        if eqn.primitive.name in tables.WITHOUT_HALF_FORM:
            return _full(eqn, values, "has no half form")
        if eqn.primitive.name not in tables.HALF_BY_DEFAULT:
            half = self.settings.half_dtype
            if not all(outlives(value.constant, half) for value in values):
                return _full(eqn, values, "a constant leaves the range of half")
        return _half(eqn, rule)

    def _decide_unknown_in_half(self, eqn: Any, rule: str) -> Decision:
        half = np.dtype(self.settings.half_dtype)
        made = jaxprs.output_dtypes(eqn, [half if is_float32(a) else None for a in eqn.invars])
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

    def _decide_widest(self, eqn: Any, values: tuple[Value, ...], rule: str) -> Decision:
        name = eqn.primitive.name
        half = self.settings.half_dtype
        some_half = False
        for atom, value in zip(eqn.invars, values, strict=True):
            if not is_float32(atom):
                continue
            if value.vote is Vote.HALF:
                some_half = True
            elif value.vote is Vote.NEUTRAL:
                fill = not jaxprs.is_literal(atom) and value.constant is not None
                if fill and atom.aval.ndim and name in tables.ACCUMULATING:
                    return _full(eqn, values, "summed into a constant array")
                if name in tables.COMPARING:
                    if value.constant is None or float(np.asarray(value.constant, half)) != (
                        value.constant
                    ):
                        return _full(eqn, values, rule)
                elif not outlives(value.constant, half) and not (
                    name in tables.SELECTING and abs(value.constant) > 1
                ):
                    return _full(eqn, values, "a constant leaves the range of half")
            elif not self._yields(name, eqn, atom, value):
                return _full(eqn, values, rule)
        if not some_half:
            return _full(eqn, values, rule)
        if name in tables.SUMMING_WHEN_TRANSPOSED and not (
            name in tables.MOVING and _same_size(eqn.invars[0], eqn.outvars[0])
        ):
            return _full(eqn, values, "float32, for the sum of its transpose")._replace(
                outputs=(Value(False, Vote.HALF),), follows=True
            )
        return _half(eqn, rule)._replace(follows=name not in tables.TRANSFERS)

    def _yields(self, name: str, eqn: Any, atom: Any, value: Value) -> bool:
        """Whether a float32 operand is a bias or a scale that must not promote an activation."""
        if name not in tables.SPREADING:
            return False
        return value.vote is Vote.SPREAD or (
            value.vote is Vote.PARAMETER and not same_shape(atom, eqn.outvars[0])
        )

    def _decide_conversion(
        self, eqn: Any, values: tuple[Value, ...], precision: str, rule: str, lift: bool
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
        if value.constant is not None or source.aval.dtype == np.bool_:
            return Decision("float32", rule, (None,), (value,))
        return Decision("float32", rule, (None,), (COMPUTED,))


def _is_closed_book(eqn: Any) -> bool:
    name = eqn.primitive.name
    unknown = name not in tables.DEFAULTS and jaxprs.has_bodies(eqn)
    return (unknown or name in tables.CLOSED_BOOKS) and any(map(is_float32, eqn.invars))


def _warn_of_closed_books(jaxpr: Any, decisions: Sequence[Decision]) -> None:
    for eqn, decision in zip(jaxpr.eqns, decisions, strict=True):
        if decision.rule == CLOSED_BOOK:
            warnings.warn(
                f"autocast cannot rewrite the function inside {eqn.primitive.name} "
                f"({jaxprs.line_of(eqn)}) and runs it in float32: wrap the call in "
                "ampx.half_function to run it in half, or in ampx.float_function to say that "
                "float32 is meant",
                stacklevel=2,
            )


def _full(eqn: Any, values: tuple[Value, ...], rule: str, opaque: bool = False) -> Decision:
    touched = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float32(atom)]
    name = eqn.primitive.name
    if name in tables.MOVING and not touched:
        return Decision("as traced", rule, (None,) * len(values), values * len(eqn.outvars))
    if opaque or not touched:
        known = COMPUTED
    elif name in tables.MOVING:
        (out, *_) = eqn.outvars
        known = moved(touched[0], grows=not _same_size(eqn.invars[0], out))
        if known.half or known.vote is Vote.HALF:
            known = COMPUTED
    else:
        known = blended(touched)
    outputs = tuple(known if is_float32(out) else AS_TRACED for out in eqn.outvars)
    involved = touched or any(is_float32(out) for out in eqn.outvars)
    operands = tuple(False if is_float32(atom) else None for atom in eqn.invars)
    return Decision("float32" if involved else "as traced", rule, operands, outputs)


def _same_size(first: Any, second: Any) -> bool:
    return first.aval.size == second.aval.size


def _half(eqn: Any, rule: str) -> Decision:
    operands = tuple(True if is_float32(atom) else None for atom in eqn.invars)
    outputs = tuple(IN_HALF if is_float32(out) else AS_TRACED for out in eqn.outvars)
    return Decision("half", rule, operands, outputs)


def _opts_out(eqn: Any, half_dtype: Any) -> bool:
    """Whether the program asks for a precision that half does not have."""
    for atom in eqn.invars:
        dtype = getattr(atom.aval, "dtype", None)
        floating = dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)
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
        if not jaxprs.is_literal(atom) and demand is not Demand.NONE:
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
        return [wanted[0] if is_float32(atom) else Demand.NONE for atom in eqn.invars]
    if decision.follows and _serves_float32(wanted):
        demand = Demand.FLOAT32
    elif decision.precision == "float32":
        demand = Demand.FLOAT32
    elif decision.follows and not any(is_float32(out) for out in eqn.outvars):
        demand = Demand.NONE
    elif decision.precision == "half" and name in tables.HALF_BY_DEFAULT:
        demand = Demand.HALF
    else:
        demand = Demand.KEEP
    return [demand if is_float32(atom) else Demand.NONE for atom in eqn.invars]
