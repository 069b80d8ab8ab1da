"""The result of planning: what becomes of each equation of a jaxpr."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ampx.autocasting.rules import Rules, Surroundings
from ampx.autocasting.values import Demand, Value


@dataclasses.dataclass(frozen=True)
class Settings:
    """What autocast was asked for; the identity of a plan together with a jaxpr."""

    half_dtype: Any
    rules: Rules
    custom_vjp: str = "transform"


class Decision(NamedTuple):
    """What becomes of one equation.

    Attributes:
      precision: `"half"`, `"float32"`, or `"as traced"` where no float32 value is involved.
      rule: what decided, for the report.
      operands: for each operand whether it is cast to half (True), to float32 (False) or left.
      outputs: what is known of each output.
      bodies: plans of the jaxprs that it holds, in the order of its parameters.
    """

    precision: str
    rule: str
    operands: tuple[bool | None, ...]
    outputs: tuple[Value, ...]
    bodies: tuple[Plan, ...] = ()
    follows: bool = False


@dataclasses.dataclass(eq=False)
class Plan:
    """Decisions for the equations of one jaxpr, given the types of its inputs."""

    inputs: tuple[Value, ...]
    demands: tuple[Demand, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[Value, ...]
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
