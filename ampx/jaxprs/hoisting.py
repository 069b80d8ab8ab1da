"""Takes the sums that a program makes of its operands out of it.

A clip by a global norm reads all gradients before the update does. If the norm of the same
gradients is taken nearby, XLA merges the two, but not across the border of a branch:

    sum of squares: is it finite?           sum of squares: is it finite?
    cond                                    cond
      └─ sum of squares: the norm     ──►     └─ clip, update
         clip, update

What is taken out are numbers, and no arrays: sums over whole operands, and what is computed of such
sums alone. Elementwise equations in front of a sum are computed in both places, which costs nothing
where XLA fuses them with what reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ampx.jaxprs import building, primitives
from ampx.jaxprs.reading import (
    Jaxpr,
    evaluate,
    find_equations_for,
    is_dropped,
    is_literal,
    new_variable,
    open_jaxpr,
    variables_in,
)

_CHEAP = primitives.ELEMENTWISE | {"broadcast_in_dim", "reduce_sum", "optimization_barrier"}


def hoist_sums(
    jaxpr: Jaxpr,
    operands: Sequence[jax.Array],
    count: int,
    compute: Callable[..., list[Any]] = evaluate,
) -> Callable[[], list[Any]]:
    """Computes here what a program needs of sums of its first operands.

    Args:
      jaxpr: the program. Constants that are attached to it take no part in what is taken out.
      operands: arrays.
      count: how many of the operands, from the first, sums may be of.
      compute: what computes the numbers, of their program and these operands.

    Returns:
      A function without arguments to the results of the program, which computes the rest.
    """
    opened = open_jaxpr(jaxpr)
    known, sums, taken = set(opened.invars[:count]), set(), set()
    for number, eqn in enumerate(opened.eqns):
        atoms = variables_in(eqn.invars)
        if eqn.effects or eqn.primitive.name not in _CHEAP or not known.issuperset(atoms):
            continue
        known.update(eqn.outvars)
        is_sum = eqn.primitive.name == "reduce_sum" or not sums.isdisjoint(atoms)
        if is_sum and all(out.aval.shape == () for out in eqn.outvars):
            sums.update(eqn.outvars)
            taken.add(number)
    left = [eqn for number, eqn in enumerate(opened.eqns) if number not in taken]
    read = {*variables_in(opened.outvars), *(a for e in left for a in variables_in(e.invars))}
    wanted = [
        out
        for number in sorted(taken)
        for out in opened.eqns[number].outvars
        if out in read and not is_dropped(out)
    ]
    before = [opened.eqns[number] for number in find_equations_for(jaxpr, wanted)]
    # Equations with effects, which belong to every slice, stay where they are.
    before = [eqn for eqn in before if not eqn.effects and known.issuperset(eqn.outvars)]
    program = building.rebuild(jaxpr, opened.invars[:count], wanted, before)
    numbers = compute(program, *operands[:count]) if wanted else []
    rest = building.rebuild(jaxpr, [*opened.invars, *wanted], opened.outvars, left)
    needed = [left[number] for number in find_equations_for(rest, opened.outvars)]
    # Each equation reads a copy of its own, which only a barrier keeps apart. If the clips of all
    # leaves read one number, XLA's CPU backend writes each quotient out instead of dividing again
    # in every loop that reads it: 4 bytes a parameter.
    copies: list[tuple[Any, Any]] = []  # (a number of `wanted`, the variable in its place)
    places = {out: place for place, out in enumerate(wanted)}

    def own_copy(atom: Any) -> Any:
        if is_literal(atom) or atom not in places:
            return atom
        copies.append((atom, new_variable(atom.aval)))
        return copies[-1][1]

    needed = [eqn.replace(invars=[own_copy(atom) for atom in eqn.invars]) for eqn in needed]
    invars = [*opened.invars, *wanted, *(copy for _, copy in copies)]
    rest = building.rebuild(jaxpr, invars, opened.outvars, needed)

    def compute_rest() -> list[Any]:
        repeated = [lax.optimization_barrier(numbers[places[number]]) for number, _ in copies]
        return evaluate(rest, *operands, *numbers, *repeated)

    return compute_rest
