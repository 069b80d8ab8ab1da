"""Turns a planned jaxpr into one that computes as planned.

Equations are copied in order, with their operands converted to what the plan says and their results
typed anew. `sum(square(x @ w) + b)` before and after, for x:f32[4,8], w:f32[8,8], b:f32[1,8]:

    c:f32[4,8] = dot_general x w        x1:bf16[4,8] = convert x
                                        w1:bf16[8,8] = convert w
                                        c:bf16[4,8] = dot_general x1 w1
                                        c1:f32[4,8] = convert c           (shared by all readers)
    d:f32[4,8] = square c               d:f32[4,8] = square c1
    e:f32[4,8] = add d b                e:f32[4,8] = add d b
    f:f32[] = reduce_sum e              f:f32[] = reduce_sum e

Conversions are shared, but cotangents are not added up in half. The transpose of a conversion
converts the cotangent back, and JAX adds up the cotangents of one variable in the dtype of that
variable. So c1 collects those of all float32 readers of c, and they are narrowed once. A float32
value that several readers narrow is converted once for all of them, while each keeps a cotangent
of its own: narrowing.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ampx.autocasting import custom_rules, float8_products, narrowing, tables
from ampx.autocasting.float8 import Float8, casts_of
from ampx.autocasting.marks import NATIVE_MARK, PROMOTE_MARK, RELABEL_MARK, tracing_for
from ampx.autocasting.planner import Planner, warn_of_hidden_functions
from ampx.autocasting.plans import Decision, PrecisionPlan, Settings
from ampx.autocasting.rules import NOWHERE, Surroundings
from ampx.autocasting.values import (
    IN_HALF,
    Demand,
    KnownValue,
    Vote,
    actual_aval,
    actual_dtype,
    describe_closed_over,
    describe_input,
    describe_literal,
    fits_in,
    have_same_shape,
    is_float32,
    saturate,
)
from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Jaxpr


class Rewriter:
    """Plans and rewrites jaxprs for one `Settings`; the same jaxpr always gives the same object.

    Outside of jit, JAX compiles each scan and each jitted function for itself, and finds the
    compiled program again by the identity of the body's jaxpr. A body that is rewritten once is
    compiled once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.planner = Planner(settings)

    def rewrite(self, jaxpr: Jaxpr, plan: PrecisionPlan) -> Jaxpr:
        """Rewrites a jaxpr as planned."""
        if plan.changes_nothing:
            return jaxpr
        if plan.rewritten is None:
            plan.rewritten = _BodyRewriter(self, jaxpr, plan).run()
        return plan.rewritten

    def run_autocast(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        operands: Sequence[Any],
        around: Surroundings = NOWHERE,
    ) -> list[Any]:
        """Traces `fun` at `avals`, plans its jaxpr and runs that on `operands`.

        An operand may be half where its type says float32: what computed it was rewritten, and
        `fun` is about to be.
        """
        # JAX hands on what is written into a jaxpr as Python numbers. A residual of a rule may be
        # such a number, and so may what a rule is called with.
        arrays = [
            operand if hasattr(operand, "dtype") else np.asarray(operand, aval.dtype)
            for operand, aval in zip(operands, avals, strict=True)
        ]
        known = [
            IN_HALF if array.dtype != aval.dtype else describe_input(aval)
            for array, aval in zip(arrays, avals, strict=True)
        ]
        with tracing_for(self.settings.half_dtype):
            jaxpr, _ = reading.trace(fun, *avals)
            demands = [Demand.KEEP] * len(reading.open_jaxpr(jaxpr).outvars)
            plan = self.planner.plan(jaxpr, known, demands, around)
            warn_of_hidden_functions(jaxpr, plan)
            return reading.evaluate(self.rewrite(jaxpr, plan), *arrays)


class _BodyRewriter:
    """Rewrites one jaxpr.

    Attributes:
      eqns: the new equations so far.
      atoms: the new variable or literal for each old variable.
      values: what is known of each old variable.
      widened: the float32 conversion of each new half variable that has one.
      narrowed: the half conversion of each new float32 variable that has one.
    """

    def __init__(self, rewriter: Rewriter, jaxpr: Jaxpr, plan: PrecisionPlan) -> None:
        self.rewriter = rewriter
        self.half = np.dtype(rewriter.settings.half_dtype)
        self.jaxpr = jaxpr
        self.opened = reading.open_jaxpr(jaxpr)
        self.plan = plan
        self.eqns: list[Any] = []
        self.atoms: dict[Any, Any] = {}
        self.values: dict[Any, KnownValue] = {}
        self.widened: dict[Any, Any] = {}
        self.narrowed: dict[Any, Any] = {}

    def run(self) -> Jaxpr:
        """The new jaxpr."""
        for var in self.opened.constvars:
            self._define(var, var, describe_closed_over(var.aval))
        invars = []  # half where the caller gives half
        for var, value in zip(self.opened.invars, self.plan.inputs, strict=True):
            new = (
                reading.new_variable(actual_aval(var.aval, value, self.half)) if value.half else var
            )
            self._define(var, new, value)
            invars.append(new)
        for eqn, decision in zip(self.opened.eqns, self.plan.decisions, strict=True):
            self._rewrite(eqn, decision)
        outvars = [
            self._convert(
                atom, self.plan.outputs[i].half if is_float32(atom) else None, self._last_equation()
            )
            for i, atom in enumerate(self.opened.outvars)
        ]
        return building.rebuild(self.jaxpr, invars, outvars, self.eqns)

    def _last_equation(self) -> Any:
        return self.opened.eqns[-1] if self.opened.eqns else None

    def _define(self, var: Any, atom: Any, value: KnownValue) -> None:
        self.atoms[var] = atom
        self.values[var] = value

    def _rewrite(self, eqn: Any, decision: Decision) -> None:
        """Appends what takes the place of one equation, and defines its outputs."""
        if self._is_alias(eqn, decision):
            for source, out, value in zip(eqn.invars, eqn.outvars, decision.outputs, strict=True):
                self._define(out, self._convert(source, None, eqn), value)
            return
        if decision.gives_float32(eqn):
            self._splice_product(eqn, decision)
            return
        dots = self.rewriter.settings.dots
        if dots is not None and decision.precision == "float8":
            self._splice_float8(eqn, decision, dots)
            return
        operands = [
            self._convert_operand(eqn, atom, target)
            for atom, target in zip(eqn.invars, decision.operands, strict=True)
        ]
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "shard_map"):
            if not all(body.changes_nothing for body in decision.bodies):
                self._splice(eqn, decision, operands)
                return
        if reading.call_name(eqn) in (NATIVE_MARK, PROMOTE_MARK):
            (body,) = self._rewrite_bodies(eqn, decision) or reading.bodies_of(eqn)
            if not reading.has_constants(body):
                # Each trace makes a new jitted function for a marked region. As a call it would be
                # compiled at each trace, so its equations are put into the jaxpr around it.
                opened = building.splice_jaxpr(body, operands, eqn, keep_lines=True)
                self._insert(eqn, decision, *opened)
                return
        outvars = [
            self._define_output(out, value)
            for out, value in zip(eqn.outvars, decision.outputs, strict=True)
        ]
        self.eqns.append(
            eqn.replace(invars=operands, outvars=outvars, params=self._change_params(eqn, decision))
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

    def _define_output(self, out: Any, value: KnownValue) -> Any:
        """Gives the new variable of an output; one that keeps its type is used again."""
        if not value.half:
            new = out
        elif reading.is_dropped(out):
            new = reading.new_dropped(actual_aval(out.aval, value, self.half))
        else:
            new = reading.new_variable(actual_aval(out.aval, value, self.half))
        self._define(out, new, value)
        return new

    def _known_value(self, atom: Any) -> KnownValue:
        return describe_literal(atom) if reading.is_literal(atom) else self.values[atom]

    def _convert_operand(self, eqn: Any, atom: Any, target: bool | None) -> Any:
        """Gives an operand in the dtype that the decision asks for (`Decision.operands`)."""
        is_broadcast = (
            target
            and eqn.primitive.name in (*tables.TAKING_BIAS_OR_SCALE, "max", "min")
            and self._known_value(atom).constant is None
            and not have_same_shape(atom, eqn.outvars[0])
        )
        if not is_broadcast:
            return self._convert(atom, target, eqn)
        # A bias b:f32[1,8] added to h:bf16[4,8]. Narrowed and then repeated, its cotangent would be
        # a bf16 sum over 4 rows (256 over 70,000 rows of ones). Repeated, then narrowed, it gives
        # the same forward, and the transpose widens before it sums:
        #   b1:f32[4,8] = broadcast_in_dim b;  b2:bf16[4,8] = convert b1;  add h b2
        self.eqns.append(
            building.make_broadcast(self._convert(atom, False, eqn), eqn.outvars[0].aval, eqn)
        )
        return self._narrow(self.eqns[-1].outvars[0], eqn)

    def _convert(self, atom: Any, target: bool | None, eqn: Any) -> Any:
        """Gives `atom` in half (True), in float32 (False), or as it is (None)."""
        new = atom if reading.is_literal(atom) else self.atoms[atom]
        value = self._known_value(atom)
        if target is None or target == value.half:
            return new
        if not target:
            # One conversion for all readers, whose cotangents then meet in float32.
            if new not in self.widened:
                self.eqns.append(building.make_conversion(new, np.float32, eqn))
                self.widened[new] = self.eqns[-1].outvars[0]
            return self.widened[new]
        if reading.is_literal(atom):
            number = saturate(float(atom.val), self.half)
            return reading.new_literal(number, reading.with_dtype(atom.aval, self.half))
        if value.vote is Vote.NEUTRAL:
            return self._narrow_constant(new, value, eqn)
        # One copy for all readers, whose cotangents meet in float32 (narrowing.py).
        if new not in self.narrowed:
            self.narrowed[new] = self._narrow(new, eqn)
            return self.narrowed[new]
        eqns, again = narrowing.make_again(new, self.narrowed[new], eqn)
        self.eqns.extend(eqns)
        return again

    def _narrow(self, atom: Any, eqn: Any) -> Any:
        self.eqns.append(building.make_conversion(atom, self.half, eqn))
        return self.eqns[-1].outvars[0]

    def _narrow_constant(self, atom: Any, value: KnownValue, eqn: Any) -> Any:
        """Narrows a constant array; what is finite stays finite."""
        if fits_in(value.span, self.half):
            return self._narrow(atom, eqn)
        eqns, (safe,) = building.splice_function(_make_saturate(self.half), [atom], eqn)
        self.eqns.extend(eqns)
        return self._narrow(safe, eqn)

    def _change_params(self, eqn: Any, decision: Decision) -> dict[str, Any]:
        if decision.bodies:
            if decision.precision == "as traced":
                return eqn.params
            return reading.with_bodies(eqn, self._rewrite_bodies(eqn, decision))
        # A product that was traced in float32 asks for a float32 result (preferred_element_type).
        # In half, with that result narrowed behind it, its transposes would multiply float32
        # cotangents with half operands.
        params = eqn.params
        if decision.precision != "half" or not any(v.half for v in decision.outputs):
            return params
        changed = {
            name: self.half
            for name in ("preferred_element_type", "new_dtype")
            if params.get(name) == np.float32
        }
        if params.get("update_jaxpr") is not None:
            changed["update_jaxpr"] = self._narrow_combiner(params["update_jaxpr"])
        return {**params, **changed} if changed else params

    def _narrow_combiner(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr by which a scatter combines two scalars, in half."""
        opened = reading.open_jaxpr(jaxpr)
        known = [IN_HALF] * len(opened.invars)
        plan = self.rewriter.planner.plan(jaxpr, known, [Demand.PIN_HALF] * len(opened.outvars))
        return self.rewriter.rewrite(jaxpr, plan)

    def _rewrite_bodies(self, eqn: Any, decision: Decision) -> list[Jaxpr]:
        if not decision.bodies:
            return []
        pairs = zip(reading.bodies_of(eqn), decision.bodies, strict=True)
        return [self.rewriter.rewrite(body, plan) for body, plan in pairs]

    def _insert(self, eqn: Any, decision: Decision, eqns: Sequence[Any], atoms: Any) -> None:
        self.eqns.extend(eqns)
        for out, atom, value in zip(eqn.outvars, atoms, decision.outputs, strict=True):
            self._define(out, atom, value)

    def _splice_product(self, eqn: Any, decision: Decision) -> None:
        """Puts in a product of half operands whose result is float32, with a rule for gradients.

        Left to JAX, its transposes would multiply the float32 cotangent with a half operand, and
        those of a convolution would fail. So it gets the rule of a custom_vjp: the transposes as
        traced in float32, under autocast, where they become products of the same kind. It narrows
        its operands itself, so that their gradients leave it in float32.
        """
        half, in_custom_jvp = self.half, self.plan.around.in_custom_jvp

        def product(*operands: Any) -> Any:
            narrowed = [x.astype(half) if x.dtype == np.float32 else x for x in operands]
            if in_custom_jvp and eqn.primitive.name != "dot_general":
                # JAX transposes no such product of two dtypes.
                narrowed = [x.astype(np.float32) if x.dtype == half else x for x in narrowed]
            params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}
            return tuple(reading.bind(eqn.replace(params=params), narrowed))

        operands = [self._convert(atom, None, eqn) for atom in eqn.invars]
        if in_custom_jvp:  # JAX transposes what its rule does with tangents: not a custom_vjp
            return self._insert(eqn, decision, *building.splice_function(product, operands, eqn))
        with eqn.ctx.manager:
            body, _ = reading.trace(product, *(operand.aval for operand in operands))
        run = functools.partial(
            self.rewriter.run_autocast, around=Surroundings(forced="half_to_float32")
        )
        fun = custom_rules.make_differentiable(eqn, self.opened, body, run)
        self._insert(eqn, decision, *building.splice_function(fun, operands, eqn))

    def _splice_float8(self, eqn: Any, decision: Decision, dots: Float8) -> None:
        """Puts in a product that casts its operands to float8, with a rule for its gradients."""
        operands = [
            self._convert(atom, target, eqn)
            for atom, target in zip(eqn.invars, decision.operands, strict=True)
        ]
        first, second = (self._known_value(atom).vote is Vote.PARAMETER for atom in eqn.invars)
        (value,) = decision.outputs
        product = float8_products.Float8Product(
            dots,
            casts_of(dots).forward,
            eqn.params["dimension_numbers"],
            eqn.params["out_sharding"],
            # Of two parameters it is the second: a batch that is an argument, too, stands first.
            weight=0 if first and not second else 1,
            half=self.half,
            result=actual_dtype(eqn.outvars[0].aval, value, self.half),
        )

        def fun(*operands: Any) -> Any:
            return (product(*operands),)

        self._insert(eqn, decision, *building.splice_function(fun, operands, eqn))

    def _splice(self, eqn: Any, decision: Decision, operands: Sequence[Any]) -> None:
        """Puts in equations that only their own public function can build.

        `fun` is traced with the new operands, and the equations of its jaxpr are put in.
        """
        if eqn.primitive.name == "shard_map":
            # The body is rewritten while shard_map traces it: only then is a mesh in context under
            # which conversions get types that say over which mesh axes their values vary.
            def fun(*operands: Any) -> Any:
                (body,) = self._rewrite_bodies(eqn, decision)
                return tuple(reading.evaluate(reading.as_closed(body), *operands))

            fun = building.wrap_in_shard_map(eqn, fun)
        else:
            (body,) = self._rewrite_bodies(eqn, decision)
            run = functools.partial(self.rewriter.run_autocast, around=_around_rule(eqn))
            fun = custom_rules.make_function(eqn, self.opened, body, run)
        self._insert(eqn, decision, *building.splice_function(fun, operands, eqn))


def _around_rule(eqn: Any) -> Surroundings:
    """Where the rule of a custom_jvp or custom_vjp stands."""
    return Surroundings(in_custom_jvp=eqn.primitive.name == "custom_jvp_call")


def _make_saturate(half: Any) -> Callable[..., Any]:
    """A function that clips what is finite to the range of `half` and leaves infinities alone."""
    largest = float(jnp.finfo(half).max)

    def saturate(x: Any) -> Any:
        bound = np.float32(largest)
        return jnp.where(jnp.isinf(x), x, jnp.clip(x, -bound, bound))

    return saturate
