"""Turns a planned jaxpr into one that computes as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ampx.autocasting import custom_rules, tables
from ampx.autocasting.decisions import Decision, Plan, Settings
from ampx.autocasting.marks import NATIVE_MARK, PROMOTE_MARK, RELABEL_MARK
from ampx.autocasting.planner import Planner
from ampx.autocasting.values import (
    IN_HALF,
    Demand,
    Value,
    Vote,
    actual_aval,
    actual_dtype,
    constant_value,
    fits,
    input_value,
    is_float32,
    literal_value,
    same_shape,
    saturated,
)
from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Jaxpr


class Rewriter:
    """Plans and rewrites jaxprs for one `Settings`; the same jaxpr always gives the same object.

    That a body is rewritten once is what keeps jit from compiling it anew at every call.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.planner = Planner(settings)

    def rewritten(self, jaxpr: Jaxpr, plan: Plan) -> Jaxpr:
        """The jaxpr as planned."""
        if plan.changes_nothing:
            return jaxpr
        if plan.rewritten is None:
            plan.rewritten = _Rewriting(self, jaxpr, plan).result()
        return plan.rewritten

    def transformed(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        operands: Sequence[Any],
        demands: Callable[[Sequence[Any]], Sequence[Demand]],
    ) -> list[Any]:
        """Traces `fun` at `avals`, and runs it as planned on operands in their actual dtypes."""
        jaxpr, _ = reading.trace(fun, *avals)
        known = [
            IN_HALF if operand.dtype != aval.dtype else input_value(aval)
            for aval, operand in zip(avals, operands, strict=True)
        ]
        plan = self.planner.plan(jaxpr, known, demands(reading.open_jaxpr(jaxpr).outvars))
        return reading.evaluate(self.rewritten(jaxpr, plan), *operands)


class _Rewriting:
    def __init__(self, rewriter: Rewriter, jaxpr: Jaxpr, plan: Plan) -> None:
        self.rewriter = rewriter
        self.half = np.dtype(rewriter.settings.half_dtype)
        self.jaxpr = jaxpr
        self.opened = reading.open_jaxpr(jaxpr)
        self.plan = plan
        self.eqns: list[Any] = []
        self.atoms: dict[Any, Any] = {}
        self.values: dict[Any, Value] = {}
        self.widened: dict[Any, Any] = {}

    def result(self) -> Jaxpr:
        for var in self.opened.constvars:
            self._define(var, var, constant_value(var.aval))
        invars = []
        for var, value in zip(self.opened.invars, self.plan.inputs, strict=True):
            new = reading.variable(actual_aval(var.aval, value, self.half)) if value.half else var
            self._define(var, new, value)
            invars.append(new)
        for eqn, decision in zip(self.opened.eqns, self.plan.decisions, strict=True):
            self._rewrite(eqn, decision)
        outvars = [
            self._as(atom, self.plan.outputs[i].half if is_float32(atom) else None, self._last())
            for i, atom in enumerate(self.opened.outvars)
        ]
        return building.rebuilt(self.jaxpr, invars, outvars, self.eqns)

    def _last(self) -> Any:
        return self.opened.eqns[-1] if self.opened.eqns else None

    def _define(self, var: Any, atom: Any, value: Value) -> None:
        self.atoms[var] = atom
        self.values[var] = value

    def _rewrite(self, eqn: Any, decision: Decision) -> None:
        if self._is_alias(eqn, decision):
            for source, out, value in zip(eqn.invars, eqn.outvars, decision.outputs, strict=True):
                self._define(out, self._as(source, None, eqn), value)
            return
        operands = [
            self._operand(eqn, atom, target)
            for atom, target in zip(eqn.invars, decision.operands, strict=True)
        ]
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "shard_map"):
            if not all(body.changes_nothing for body in decision.bodies):
                self._splice(eqn, decision, operands)
                return
        if reading.call_name(eqn) in (NATIVE_MARK, PROMOTE_MARK):
            (body,) = self._rewritten_bodies(eqn, decision) or reading.bodies_of(eqn)
            if not reading.has_constants(body):
                # Left a call, it would be compiled anew each time.
                self._insert(eqn, decision, *building.opened_call(body, operands, eqn))
                return
        outvars = [
            self._output(out, value)
            for out, value in zip(eqn.outvars, decision.outputs, strict=True)
        ]
        self.eqns.append(
            eqn.replace(invars=operands, outvars=outvars, params=self._params(eqn, decision))
        )

    def _is_alias(self, eqn: Any, decision: Decision) -> bool:
        """Whether an equation only renames a value that already has the dtype it converts to."""
        if reading.call_name(eqn) == RELABEL_MARK and not decision.bodies:
            return True
        if eqn.primitive.name != "convert_element_type":
            return False
        (source,), (out,) = eqn.invars, eqn.outvars
        if reading.is_literal(source) or not self.values[source].half:
            return False
        wanted = actual_dtype(out.aval, decision.outputs[0], self.half)
        return wanted == self.half

    def _output(self, out: Any, value: Value) -> Any:
        if not value.half:
            new = out
        elif reading.is_dropped(out):
            new = reading.dropped(actual_aval(out.aval, value, self.half))
        else:
            new = reading.variable(actual_aval(out.aval, value, self.half))
        self._define(out, new, value)
        return new

    def _value(self, atom: Any) -> Value:
        return literal_value(atom) if reading.is_literal(atom) else self.values[atom]

    def _operand(self, eqn: Any, atom: Any, target: bool | None) -> Any:
        spreads = (
            target
            and eqn.primitive.name in (*tables.SPREADING, "max", "min")
            and not reading.is_literal(atom)
            and not same_shape(atom, eqn.outvars[0])
        )
        if not spreads:
            return self._as(atom, target, eqn)
        # Spread in float32, so that its cotangent is summed in float32.
        self.eqns.append(building.spread(self._as(atom, False, eqn), eqn.outvars[0].aval, eqn))
        return self._converted(self.eqns[-1].outvars[0], eqn)

    def _as(self, atom: Any, target: bool | None, eqn: Any) -> Any:
        """`atom` in half (True), in float32 (False), or as it is (None)."""
        new = atom if reading.is_literal(atom) else self.atoms[atom]
        value = self._value(atom)
        if target is None or target == value.half:
            return new
        if not target:
            # One conversion for all readers: their cotangents then meet in float32.
            if new not in self.widened:
                self.eqns.append(building.conversion(new, np.float32, eqn))
                self.widened[new] = self.eqns[-1].outvars[0]
            return self.widened[new]
        # One conversion for each reader: a shared one would sum their cotangents in half.
        if reading.is_literal(atom):
            number = saturated(float(atom.val), self.half)
            return reading.literal(number, reading.with_dtype(atom.aval, self.half))
        if value.vote is Vote.NEUTRAL:
            return self._narrowed_constant(new, value, eqn)
        return self._converted(new, eqn)

    def _converted(self, atom: Any, eqn: Any) -> Any:
        self.eqns.append(building.conversion(atom, self.half, eqn))
        return self.eqns[-1].outvars[0]

    def _narrowed_constant(self, atom: Any, value: Value, eqn: Any) -> Any:
        """A constant in half: what is finite stays finite."""
        if fits(value.span, self.half):
            return self._converted(atom, eqn)
        eqns, (safe,) = building.spliced(_saturate(self.half), [atom], eqn)
        self.eqns.extend(eqns)
        return self._converted(safe, eqn)

    def _params(self, eqn: Any, decision: Decision) -> dict[str, Any]:
        if decision.bodies:
            if decision.precision == "as traced":
                return eqn.params
            return reading.with_bodies(eqn, self._rewritten_bodies(eqn, decision))
        params = eqn.params
        if decision.precision != "half" or not any(v.half for v in decision.outputs):
            return params
        changed = {
            name: self.half
            for name in ("preferred_element_type", "new_dtype")
            if params.get(name) == np.float32
        }
        if params.get("update_jaxpr") is not None:
            changed["update_jaxpr"] = self._combiner(params["update_jaxpr"])
        return {**params, **changed} if changed else params

    def _combiner(self, jaxpr: Jaxpr) -> Jaxpr:
        opened = reading.open_jaxpr(jaxpr)
        known = [IN_HALF] * len(opened.invars)
        plan = self.rewriter.planner.plan(jaxpr, known, [Demand.PIN_HALF] * len(opened.outvars))
        return self.rewriter.rewritten(jaxpr, plan)

    def _rewritten_bodies(self, eqn: Any, decision: Decision) -> list[Jaxpr]:
        if not decision.bodies:
            return []
        pairs = zip(reading.bodies_of(eqn), decision.bodies, strict=True)
        return [self.rewriter.rewritten(body, plan) for body, plan in pairs]

    def _insert(self, eqn: Any, decision: Decision, eqns: Sequence[Any], atoms: Any) -> None:
        self.eqns.extend(eqns)
        for out, atom, value in zip(eqn.outvars, atoms, decision.outputs, strict=True):
            self._define(out, atom, value)

    def _splice(self, eqn: Any, decision: Decision, operands: Sequence[Any]) -> None:
        """Equations that only their own public function can build."""
        if eqn.primitive.name == "shard_map":
            # Its body is rewritten where the axes that values vary over are part of their types.
            def fun(*operands: Any) -> Any:
                (body,) = self._rewritten_bodies(eqn, decision)
                return tuple(reading.evaluate(reading.closed(body), *operands))

            fun = building.shard_mapped(eqn, fun)
        else:
            (body,) = self._rewritten_bodies(eqn, decision)
            fun = custom_rules.transformed(eqn, self.opened, body, self.rewriter)
        self._insert(eqn, decision, *building.spliced(fun, operands, eqn))


def _saturate(half: Any) -> Callable[..., Any]:
    largest = float(jnp.finfo(half).max)

    def saturate(x: Any) -> Any:
        bound = np.float32(largest)
        return jnp.where(jnp.isinf(x), x, jnp.clip(x, -bound, bound))

    return saturate
