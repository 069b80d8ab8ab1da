"""Moves elementwise work on what a branch returns anyway behind the branch.

An update is added to its parameter. Where that happens outside of the branch that makes the update,
XLA cannot fuse the two: the update is written by one loop and read by another. But most optimizers
make it of numbers that are known outside as well: new moments, gradients, parameters.

    cond                                     cond
      └─ g, m      ──► new m                   └─ g, m      ──► new m, step size
         new m, p  ──► u               ──►   new m, p, step size ──► u
    p + u                                    p + u                      one loop

What is moved is elementwise and cheap, and ends in results that may be moved. It reads operands of
the branch, what the branch returns in any case, and numbers, which the branch then returns, too. An
old moment it does not read: that would have to be kept beside the new one. Where something inside
needs a moved value as well, such as a norm, it is computed in both places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ampx.jaxprs import building, primitives, reading
from ampx.jaxprs.reading import Atom, Equation, Jaxpr

# What costs about as much as the reading of a number, or less: it may be computed twice.
_CHEAP = (
    primitives.CHEAP
    | primitives.IDENTITIES
    | primitives.AXIS_TYPE_CASTS
    | {"is_finite", "reciprocal", "sqrt", "rsqrt", "broadcast_in_dim"}
)
# A number in another dtype: that of each leaf need not leave the branch.
_RETYPING = primitives.IDENTITIES | primitives.AXIS_TYPE_CASTS | {"convert_element_type"}


class Parts(NamedTuple):
    """A program in two parts.

    Attributes:
      inside: from the operands to the results that stay, in their order, and then numbers.
      behind: from the values at `sources` to the results that were moved, in their order.
      moved: the places of these among the results of the whole.
      sources: places in the list of all operands and then all results of `inside`.
    """

    inside: Jaxpr
    behind: Jaxpr
    moved: tuple[int, ...]
    sources: tuple[int, ...]


def sink(jaxpr: Jaxpr, movable: Collection[int]) -> Parts:
    """Splits a program into what must run inside a branch and what may run behind it.

    It looks at each equation a fixed number of times, however many results there are.

    Args:
      jaxpr: the program. Its operands are known behind the branch. Arrays that are attached to it
        as constants are taken for old state, which is not.
      movable: places of results that may be computed behind the branch.
    """
    opened = reading.open_jaxpr(jaxpr)
    results, may_move = opened.outvars, frozenset(movable)
    known = set(opened.invars).union(
        atom for place, atom in enumerate(results) if place not in may_move and _is_variable(atom)
    )
    candidates = _find_movable(opened.eqns, known)
    reached = known.union(out for eqn in candidates for out in eqn.outvars)
    moved = [
        place
        for place in sorted(may_move)
        if _is_variable(results[place])
        and not _is_number(results[place])
        and results[place] in reached
    ]
    parts, made = _split(jaxpr, candidates, moved, known)
    # What something inside needs as well would be made twice, and to no avail.
    once = [place for place in moved if results[place] not in made]
    return parts if once == moved else _split(jaxpr, candidates, once, known)[0]


def _find_movable(eqns: Sequence[Equation], known: Collection[Atom]) -> list[Equation]:
    """The equations that may stand behind the branch: what they read is there, or can be."""
    found, reached = [], set(known)
    for eqn in eqns:
        arrays = [atom for atom in eqn.invars if not _is_number(atom)]
        if reached.issuperset(eqn.outvars) or not reached.issuperset(arrays):
            continue
        is_number = all(map(_is_number, eqn.outvars))
        if _is_cheap(eqn) and (not is_number or eqn.primitive.name in _RETYPING):
            found.append(eqn)
            reached.update(eqn.outvars)
    return found


def _split(
    jaxpr: Jaxpr, candidates: list[Equation], moved: list[int], known: Collection[Atom]
) -> tuple[Parts, set[Atom]]:
    """Moves some results; returns also what is still made inside and is no result of it."""
    opened = reading.open_jaxpr(jaxpr)
    last = [opened.outvars[place] for place in moved]
    movable = building.extract(jaxpr, opened.invars, last, candidates)
    behind = [candidates[number] for number in reading.find_equations_for(movable, last)]
    of_behind = {out for eqn in behind for out in eqn.outvars}
    read = [atom for eqn in behind for atom in eqn.invars if _is_variable(atom)]
    # Each once, and always in the same order: a set of variables has none.
    reads = [atom for atom in dict.fromkeys([*read, *last]) if atom not in of_behind]
    gone = set(moved)
    outputs = [atom for place, atom in enumerate(opened.outvars) if place not in gone]
    outputs += [atom for atom in reads if atom not in known]
    inside = [opened.eqns[number] for number in reading.find_equations_for(jaxpr, outputs)]
    values = enumerate([*opened.invars, *outputs])
    places = {atom: place for place, atom in values if _is_variable(atom)}
    parts = Parts(
        inside=building.rebuild(jaxpr, opened.invars, outputs, inside),
        behind=building.extract(jaxpr, reads, last, behind),
        moved=tuple(moved),
        sources=tuple(places[atom] for atom in reads),
    )
    return parts, {out for eqn in inside for out in eqn.outvars}.difference(known)


def _is_variable(atom: Atom) -> bool:
    return not reading.is_literal(atom)


def _is_number(atom: Atom) -> bool:
    return getattr(atom.aval, "shape", None) == ()  # a token has no shape


def _is_cheap(eqn: Equation) -> bool:
    if reading.has_effects(eqn):
        return False
    name = eqn.primitive.name
    if reading.call_name(eqn) is not None:  # a jitted function, such as that of `jnp.where`
        body = reading.called_body(eqn)
        return (
            body is not None
            and not reading.has_constants(body)
            and all(map(_is_cheap, reading.open_jaxpr(body).eqns))
        )
    # One number for a whole call, such as the correction of a bias, costs nothing.
    if name in primitives.ELEMENTWISE and all(map(_is_number, eqn.outvars)):
        return True
    # Of a number: a row that is repeated has the shape of no parameter.
    return name in _CHEAP and (name != "broadcast_in_dim" or _is_number(eqn.invars[0]))
