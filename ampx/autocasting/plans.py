"""What planning gives: a `Decision` for each equation of a jaxpr, and their `PrecisionPlan`.

`planner.py` makes a plan, `operations.py` and `calls.py` decide its equations, and the rewriter and
the report read it. It says everything about the new program but its equations: `explain` prints a
plan that was never rewritten.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ampx.autocasting.float8 import Float8
from ampx.autocasting.rules import Rules, Surroundings
from ampx.autocasting.tables import HALF_BY_DEFAULT
from ampx.autocasting.values import Demand, KnownValue, is_float32


@dataclasses.dataclass(frozen=True)
class Settings:
    """What autocast was asked for. Equal settings share a planner, and so plans and jaxprs.

    Attributes:
      half_dtype: float16 or bfloat16, as a numpy dtype.
      rules: the user's rules.
      custom_vjp: `"transform"` or `"opaque"`, as for `ampx.autocast`.
      dots: how matrix products run in float8; None if they do not.
    """

    half_dtype: Any
    rules: Rules
    custom_vjp: str = "transform"
    dots: Float8 | None = None


class Decision(NamedTuple):
    """What becomes of one equation.

    Attributes:
      precision: `"half"`, `"float32"`, `"float8"` for a product whose operands are cast to it, or
        `"as traced"` where no float32 value is involved. For an equation with bodies, `"recurse"`,
        or `"as traced"` where no body changes.
      rule: what decided, for the report.
      operands: for each operand whether it is cast to half (True), to float32 (False) or left.
      outputs: what is known of each output.
      bodies: plans of the jaxprs that it holds, in the order of its parameters.
      follows: whether it is in half only because its operands are. If all of its readers compute
        in float32, the next pass lifts it to float32.
      not_float8: why a product in half is not in float8, in a word, where products were to be.
    """

    precision: str
    rule: str
    operands: tuple[bool | None, ...]
    outputs: tuple[KnownValue, ...]
    bodies: tuple[PrecisionPlan, ...] = ()
    follows: bool = False
    not_float8: str = ""

    def gives_float32(self, eqn: Any) -> bool:
        """Whether a matrix product or convolution takes half operands and gives float32."""
        return (
            self.precision == "half"
            and eqn.primitive.name in HALF_BY_DEFAULT
            and any(map(is_float32, eqn.outvars))  # not one that asks for half itself
            and not any(output.half for output in self.outputs)
        )


@dataclasses.dataclass(eq=False)
class PrecisionPlan:
    """Decisions for the equations of one jaxpr, given its inputs and its readers.

    Attributes:
      inputs: what is known of each input.
      demands: what the readers of each output ask.
      decisions: one for each equation, in order.
      outputs: what is known of each output, once it meets its demand.
      input_demands: what the jaxpr's equations ask of each input.
      around: where the jaxpr stands.
      rewritten: the jaxpr that computes as planned, once the rewriter has made it. It is kept here
        so that one plan gives one object: jit looks programs up by the identity of their jaxprs.
    """

    inputs: tuple[KnownValue, ...]
    demands: tuple[Demand, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[KnownValue, ...]
    input_demands: tuple[Demand, ...]
    around: Surroundings
    rewritten: Any = None

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can stand as it was traced."""
        return not any(value.half for value in (*self.inputs, *self.outputs)) and not any(
            decision.precision == "half"
            or any(value.half for value in decision.outputs)
            or not all(body.changes_nothing for body in decision.bodies)
            for decision in self.decisions
        )
