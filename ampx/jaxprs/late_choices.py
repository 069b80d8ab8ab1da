"""Takes a norm once where it is written with two sums.

To have a derivative where it is zero, a norm is often written so (`optax.safe_norm`):

    n = sqrt(sum(x * x))                         n = sqrt(sum(x * x))
    y = where(n <= 0, 1, x)              ──►     s = where(n <= 0, size * 1, sum(x * x))
    norm = where(n <= 0, 0, sqrt(sum(y * y)))    norm = where(n <= 0, 0, sqrt(s))

On the left side `y` waits for the first sum, so `x` is read twice, and a compiler may write `y` in
between. On the right side both sums of squares are one, and the choice is between two numbers.

The derivative stays what it is, too. Behind the choice stands 0 times the derivative of x * x where
`x` was not chosen, which is 0 only if `x` is finite. It is: `x` is not chosen where its own norm is
small. So this is done for choices by such a number alone, and not for where(isfinite(n), x, 0).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.jaxprs import building, primitives, reading
from ampx.jaxprs.reading import Atom, Equation, Jaxpr

# They keep numbers, or give each of them another place.
_SHAPING = (
    primitives.IDENTITIES | primitives.AXIS_TYPE_CASTS | {"broadcast_in_dim", "reshape", "squeeze"}
)


class _Choice(NamedTuple):
    """An array that is made of another one, or of a number, which a condition decides.

    Attributes:
      is_small: the condition, an array of one element.
      array: what it is made of, if the condition is false.
      eqns: by which equations.
      number: what all of its elements are, if the condition is true.
    """

    is_small: Atom
    array: Atom
    eqns: tuple[Equation, ...]
    number: float


def choose_late(jaxpr: Jaxpr) -> Jaxpr:
    """Moves choices behind sums; the jaxpr itself, where none is to be moved.

    Where one is, calls of functions become the equations that they run.
    """
    mover = _Mover()
    inlined = building.inline_calls(jaxpr)
    opened = reading.open_jaxpr(inlined)
    for eqn in opened.eqns:
        mover.add(eqn)
    if not mover.names:
        return jaxpr
    outvars = list(map(mover.rename, opened.outvars))
    moved = building.rebuild(inlined, opened.invars, outvars, mover.eqns)
    needed = [mover.eqns[number] for number in reading.find_equations_for(moved, outvars)]
    return building.rebuild(inlined, opened.invars, outvars, needed)


class _Mover:
    """Equations, one after the other, and what is known of their results.

    Attributes:
      eqns: the new ones.
      names: what stands in the place of a result.
      numbers: of an array of equal elements, which a program has as a constant, that number.
      magnitudes: of squares or absolute values, what they are of.
      norms: of a number that is small only if all elements of an array are, the array.
      small: of a condition that such a number is small, the array, and the condition as one bool.
      choices: of an array that a condition chose, between what and which number.
    """

    def __init__(self) -> None:
        self.eqns: list[Equation] = []
        self.names: dict[Atom, Atom] = {}
        self.numbers: dict[Atom, float] = {}
        self.magnitudes: dict[Atom, Atom] = {}
        self.norms: dict[Atom, Atom] = {}
        self.small: dict[Atom, tuple[Atom, Atom]] = {}
        self.choices: dict[Atom, _Choice] = {}

    def rename(self, atom: Atom) -> Atom:
        return reading.rename(self.names, atom)

    def add(self, eqn: Equation) -> None:
        renamed = list(map(self.rename, eqn.invars))
        if renamed != list(eqn.invars):
            eqn = eqn.replace(invars=renamed)
        self.eqns.append(eqn)
        if len(eqn.outvars) == 1 and eqn.invars:
            self._learn(eqn, eqn.primitive.name, eqn.outvars[0])

    def _learn(self, eqn: Equation, name: str, out: Atom) -> None:
        first, *others = eqn.invars
        number = self._find_number(first)
        if number is not None and name in _SHAPING | {"convert_element_type"}:
            self.numbers[out] = reading.round_number(number, out.aval.dtype)
        if reading.is_literal(first):
            return
        if _is_magnitude(eqn):
            self.magnitudes[out] = first
        if name == "convert_element_type" and first in self.magnitudes:
            self.magnitudes[out] = self.magnitudes[first]
        if name == "reduce_sum" and _size(out) == 1 and first in self.magnitudes:
            self.norms[out] = self.magnitudes[first]
        if first in self.norms and _size(out) == 1:
            other = self._find_number(others[0]) if others else None
            is_scaled = name in ("mul", "div") and other is not None and 0 < other < math.inf
            if is_scaled or name in _SHAPING | {"sqrt", "convert_element_type"}:
                self.norms[out] = self.norms[first]
            elif name in ("le", "lt") and other is not None and other < math.inf:
                self.small[out] = self.norms[first], out
        if name in _SHAPING and first in self.small:
            self.small[out] = self.small[first]
        if name == "select_n" and first in self.small and len(others) == 2:
            array, is_small = self.small[first]
            number = self._find_number(others[1])
            if others[0] is array and number is not None:
                self.choices[out] = _Choice(is_small, array, (), number)
        if first in self.choices:
            choice = self.choices[first]
            # One square alone: that of another might be infinite, and so its derivative.
            is_squared = any(_is_magnitude(e) and e.primitive.name != "abs" for e in choice.eqns)
            is_magnitude = _is_magnitude(eqn) and not is_squared
            if is_magnitude or name == "convert_element_type":
                number = _magnitude(name, choice.number) if is_magnitude else choice.number
                number = reading.round_number(number, out.aval.dtype)
                self.choices[out] = choice._replace(eqns=(*choice.eqns, eqn), number=number)
            elif name == "reduce_sum" and choice.eqns and _size(out) == 1:
                self.names[out] = self._reduce(eqn, choice)

    def _find_number(self, atom: Atom) -> float | None:
        """What all elements are, if that is a real number and known."""
        if not _is_real(atom):
            return None
        return float(atom.val) if reading.is_literal(atom) else self.numbers.get(atom)

    def _reduce(self, eqn: Equation, choice: _Choice) -> Atom:
        """The choice between the sum of the array and that of so many equal numbers."""
        made = choice.array
        for step in (*choice.eqns, eqn):
            result = reading.new_variable(step.outvars[0].aval)
            operands = [made] * len(step.invars)  # a product is one of two equal operands
            self.eqns.append(step.replace(invars=operands, outvars=[result]))
            made = result
        number = choice.number * _size(eqn.invars[0])
        with eqn.ctx.manager:
            mesh = jax.sharding.get_abstract_mesh()
            traced = _trace_choice(number, choice.is_small.aval, made.aval, mesh)
        behind, (result,) = building.splice_jaxpr(traced, [choice.is_small, made], eqn)
        self.eqns += behind
        return result


def _is_real(atom: Atom) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.floating)


def _is_magnitude(eqn: Equation) -> bool:
    """Whether an equation squares numbers, or takes their absolute values."""
    name = eqn.primitive.name
    if not _is_real(eqn.invars[0]):
        return False
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name in ("abs", "square") or (name == "integer_pow" and eqn.params["y"] == 2)


def _magnitude(name: str, number: float) -> float:
    return abs(number) if name == "abs" else number**2


# An optimizer takes the same norm of each parameter. The mesh is part of what a trace depends on.
@functools.lru_cache(maxsize=256)
def _trace_choice(number: float, is_small: Any, total: Any, mesh: Any) -> Jaxpr:
    def choose(is_small: jax.Array, total: jax.Array) -> jax.Array:
        instead = jnp.full(total.shape, np.asarray(number, total.dtype))
        return lax.select_n(is_small.reshape(()), total, instead)

    return reading.trace(choose, is_small, total)[0]


def _size(atom: Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
