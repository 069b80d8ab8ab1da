"""Which values of a forward are kept for its backward, and which are made again.

A backward reads residuals: values that its forward had. Some are at hand at the backward anyway
(inputs of the stage), some depend on no operand (a causal mask), and some are a sum, a product or
a broadcast of others. None of these need be kept. Of a normalization and a gated layer:

  y = x * r                    kept: x, r          made again: y
  h = y @ w                    kept: h
  t = tanh(h)                  kept: t             made again: 1 - t^2, which its derivative reads
  z = t * h                                        made again: z

An operation on each element for itself costs less than to write its result to memory and to read it
back. What takes a dozen instructions an element (tanh, exp), a sum over elements or a product of
matrices is kept.

A value is made again only from what is kept in any case, so nothing more is kept than JAX asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ampx.jaxprs import primitives, reading
from ampx.jaxprs.reading import Atom, Equation, Jaxpr

# A few instructions for each element at most, and no other traffic than that of its operands.
_CHEAP = (
    primitives.CHEAP
    | primitives.AXIS_TYPE_CASTS
    | {"stop_gradient", "one_minus_square", "broadcast_in_dim", "reshape", "squeeze"}
)


class Choice(NamedTuple):
    """What becomes of residuals.

    Attributes:
      kept: those that are kept, in the order in which they are made.
      remade: those that are made again.
      eqns: the equations that make those, from values at hand and from kept ones.
    """

    kept: list[Atom]
    remade: list[Atom]
    eqns: list[Equation]


def choose_kept(body: Jaxpr, wanted: Sequence[Atom], at_hand: Collection[Atom]) -> Choice:
    """Chooses which values of a forward to keep.

    Args:
      body: the forward, without calls.
      wanted: what the backward reads of the results of its equations, each once.
      at_hand: the inputs, and constants, that the backward has anyway.
    """
    free = find_free_equations(body)
    available, asked = set(at_hand), set(wanted)
    kept: list[Atom] = []
    remaking: list[Equation] = []
    # One pass in the order of the equations: what an equation reads has been decided before it.
    for number, eqn in enumerate(body.eqns):
        operands = reading.variables_in(eqn.invars)
        is_cheap = eqn.primitive.name in _CHEAP and available.issuperset(operands)
        if number in free or is_cheap:
            remaking.append(eqn)
            available.update(eqn.outvars)
        else:
            own = [out for out in eqn.outvars if out in asked]
            kept += own
            available.update(own)
    remade = [atom for atom in wanted if atom not in set(kept)]
    # Of all that could be made again what somebody reads.
    needed, eqns = set(remade), []
    for eqn in reversed(remaking):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(reading.variables_in(eqn.invars))
    return Choice(kept, remade, eqns[::-1])


def find_free_equations(body: Jaxpr) -> set[int]:
    """Finds the equations, by number, whose results are the same for all operands."""
    dependent = set(body.invars)
    free = set()
    for number, eqn in enumerate(body.eqns):
        if reading.has_effects(eqn) or not dependent.isdisjoint(reading.variables_in(eqn.invars)):
            dependent.update(eqn.outvars)
        else:
            free.add(number)
    return free
