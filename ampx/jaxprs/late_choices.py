"""Makes choices by one number behind the sum of what was chosen.

To be differentiable where it is zero, a norm is often written with two sums:

    n = sqrt(sum(x * x))                         n = sqrt(sum(x * x))
    y = where(n <= 0, 1, x)              ──►     s = where(n <= 0, size * 1, sum(x * x))
    norm = where(n <= 0, 0, sqrt(sum(y * y)))    norm = where(n <= 0, 0, sqrt(s))

On the left side `y` waits for the first sum, so `x` is read twice, and a compiler may write `y` in
between. On the right side both sums of squares are one, and the choice is between two numbers.

All but one of what is chosen between must be one number for all elements, whose sum costs nothing.
What lies between the choice and the reduction must work element by element, with derivatives that
are finite where its operands are. A root stays behind its choice: people choose in front of it lest
its infinite derivative at 0 is multiplied by the 0 of a number that was not chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from ampx.jaxprs import building, primitives, reading
from ampx.jaxprs.reading import Atom, Equation, Jaxpr

_SPREADING = primitives.IDENTITIES | primitives.AXIS_TYPE_CASTS | {"broadcast_in_dim"}
# Element by element, and of finite numbers the derivatives are finite.
_FINITE_DERIVATIVES = (
    primitives.ADDING
    | primitives.IDENTITIES
    | primitives.AXIS_TYPE_CASTS
    | frozenset("neg abs mul square integer_pow max min convert_element_type".split())
)
# What they make of so many equal numbers.
_REDUCTIONS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "reduce_sum": lambda number, count: number * count,
    "reduce_max": lambda number, count: number,
    "reduce_min": lambda number, count: number,
}


class _Choice(NamedTuple):
    """An array that is one of several.

    Attributes:
      which: the number that says which one.
      cases: one array, and numbers that each stand for an array of equal elements.
      place: that of the array among them.
    """

    which: Atom
    cases: tuple[Atom, ...]
    place: int


def choose_late(jaxpr: Jaxpr) -> Jaxpr:
    """Moves choices behind reductions; the jaxpr itself, where none is to be moved.

    Where one is, calls of functions become the equations that they run.
    """
    mover = _Mover()
    opened = reading.open_jaxpr(building.inline_calls(jaxpr))
    for eqn in opened.eqns:
        mover.add(eqn)
    if not mover.names:
        return jaxpr
    outvars = list(map(mover.rename, opened.outvars))
    moved = building.rebuild(jaxpr, opened.invars, outvars, mover.eqns)
    needed = [mover.eqns[number] for number in reading.find_equations_for(moved, outvars)]
    return building.rebuild(jaxpr, opened.invars, outvars, needed)


class _Mover:
    """Equations, one after the other.

    Attributes:
      eqns: the new ones.
      names: what stands in the place of a result.
      numbers: for an array of equal elements the number that it was made of.
      choices: what is known of arrays that were chosen.
    """

    def __init__(self) -> None:
        self.eqns: list[Equation] = []
        self.names: dict[Atom, Atom] = {}
        self.numbers: dict[Atom, Atom] = {}
        self.choices: dict[Atom, _Choice] = {}

    def rename(self, atom: Atom) -> Atom:
        return atom if reading.is_literal(atom) else self.names.get(atom, atom)

    def add(self, eqn: Equation) -> None:
        renamed = list(map(self.rename, eqn.invars))
        if renamed != list(eqn.invars):
            eqn = eqn.replace(invars=renamed)
        self.eqns.append(eqn)
        if len(eqn.outvars) != 1:
            return
        name, (out,) = eqn.primitive.name, eqn.outvars
        arrays = {atom for atom in eqn.invars if self._find_number(atom) is None}
        if not arrays and name in _SPREADING:
            self.numbers[out] = self._find_number(eqn.invars[0])
        if len(arrays) != 1:
            return
        (array,) = arrays
        choice = self.choices.get(array)
        if name == "select_n":
            which, *cases = map(self._find_number, eqn.invars)
            if which is not None and cases.count(None) == 1:
                place = cases.index(None)
                cases[place] = array
                self.choices[out] = _Choice(which, tuple(cases), place)
        elif (
            choice is not None and name in _FINITE_DERIVATIVES and eqn.params.get("y", 2) in (1, 2)
        ):
            cases = (self._apply(eqn, array, choice, place) for place in range(len(choice.cases)))
            self.choices[out] = choice._replace(cases=tuple(cases))
        elif choice is not None and name in _REDUCTIONS and _size(out) == 1:
            cases = list(choice.cases)
            cases[choice.place] = self._apply(eqn, array, choice, choice.place)
            step = _Reduction(name, _size(array), choice.place)
            self.names[out] = self._splice(step, [choice.which, *cases], eqn)

    def _find_number(self, atom: Atom) -> Atom | None:
        """What all elements are equal to; None for an array of which that is not known."""
        if reading.is_literal(atom) or _size(atom) == 1:
            return atom
        return self.numbers.get(atom)

    def _apply(self, eqn: Equation, array: Atom, choice: _Choice, place: int) -> Atom:
        """What an equation makes of one of the cases."""
        case = choice.cases[place]
        if place == choice.place:
            operands = [case if atom is array else atom for atom in eqn.invars]
            result = reading.new_variable(eqn.outvars[0].aval)
            self.add(eqn.replace(invars=operands, outvars=[result]))
            return self.rename(result)  # the array may have been chosen, too
        numbers = [case if atom is array else self._find_number(atom) for atom in eqn.invars]
        return self._splice(_Elementwise(eqn.primitive.name, str(eqn.params), eqn), numbers, eqn)

    def _splice(
        self, step: _Elementwise | _Reduction, operands: Sequence[Atom], near: Equation
    ) -> Atom:
        with near.ctx.manager:
            traced = _trace(step, tuple(atom.aval for atom in operands))
        made, (result,) = building.splice_jaxpr(traced, operands, near)
        self.eqns += made
        return result


@dataclasses.dataclass(frozen=True)
class _Elementwise:
    """An equation on numbers in the place of arrays."""

    name: str
    params: str
    eqn: Equation = dataclasses.field(compare=False)

    def __call__(self, *numbers: jax.Array) -> jax.Array:
        (result,) = reading.bind(self.eqn, [number.reshape(()) for number in numbers])
        return result


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The choice between one array's reduction, which is given, and those of equal numbers."""

    name: str
    count: int
    place: int

    def __call__(self, which: jax.Array, *cases: jax.Array) -> jax.Array:
        reduced = cases[self.place]
        reduce = _REDUCTIONS[self.name]
        pairs = enumerate(cases)
        results = [
            reduced if place == self.place else reduce(case.reshape(reduced.shape), self.count)
            for place, case in pairs
        ]
        return lax.select_n(which.reshape(()), *results)


# An optimizer takes the same norm of each parameter.
@functools.lru_cache(maxsize=256)
def _trace(step: _Elementwise | _Reduction, types: tuple[Any, ...]) -> Jaxpr:
    return reading.trace(step, *types)[0]


def _size(atom: Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
