"""What a condition tells: guards.

In `where(n > 0, 1 / n, 0)` the quotient alone may be infinite. It is chosen only where n is above
0, so it is computed once more in a `Scope` in which that holds. A condition narrows what it
compares, and what these values are made of; what depends on them is computed again, and no more.

A condition that is a scalar is about whole arrays. One that is an array tells something about the
numbers at the same place, and only elementwise operations hand that on: where some numbers of x are
above 1, nothing is known of the least number of x.
"""

import math

import numpy as np

from ampx.jaxprs import reading
from ampx.jaxprs.primitives import ELEMENTWISE
from intervals.values import INF, SMALLEST, Fact, is_float, join, limits, meet

WHOLE, POINTWISE = 1, 2  # what a condition is about: a whole value, or each number of an array
DEEPEST = 6  # scopes within scopes
MOVES = {"copy", "reshape", "squeeze", "broadcast_in_dim", "optimization_barrier", "transpose"}
_REVERSED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


class Impossible(Exception):
    """A condition that cannot hold."""


class Scope:
    """Facts of the variables of a program, perhaps under a condition."""

    def __init__(self, program, given, extents=(), parent=None):
        self.program, self.parent = program, parent
        self.known = given
        self.depth = parent.depth + 1 if parent else 0
        # What the condition tells something about: variable -> WHOLE or POINTWISE, and as sets.
        self.extents = dict(extents)
        self.sources = {WHOLE: 0, POINTWISE: 0}
        for variable, extent in self.extents.items():
            self.sources[extent] |= program.bit[variable]

    def extent(self, atom):
        """WHOLE or POINTWISE for a value that the condition tells something about; else 0."""
        if self.parent is None or reading.is_literal(atom):
            return 0
        if atom in self.extents:
            return self.extents[atom]
        if self.program.made_elementwise_of[atom] & self.sources[POINTWISE]:
            return POINTWISE
        return WHOLE if self.program.made_of[atom] & self.sources[WHOLE] else 0

    def read(self, atom):
        """The fact of an operand or a result."""
        if reading.is_literal(atom):
            return self.program.literals[id(atom)]
        if atom not in self.known:
            if not self.extent(atom):
                return self.parent.read(atom)
            self.compute(self.program.maker(atom))
        return self.known[atom]

    def compute(self, eqn):
        """Computes the facts of an equation's results."""
        results = self.program.apply(self, eqn)
        for out, fact in zip(eqn.outvars, results, strict=True):
            if self.parent:
                known = meet(fact, self.parent.read(out))
                fact = known if known.lo <= known.hi else fact
            self.known[out] = fact

    def operands(self, eqn):
        """The facts of an equation's operands, as far as it may make use of the condition."""
        local = is_elementwise(eqn)
        return [
            self.parent.read(x) if self.extent(x) == POINTWISE and not local else self.read(x)
            for x in eqn.invars
        ]

    def moved(self, eqn):
        """The operand whose numbers are the result's, where an equation only moves them."""
        name, operands = eqn.primitive.name, eqn.invars
        if name in MOVES and len(operands) == 1:
            return operands[0]
        if name == "convert_element_type":
            return operands[0] if operands[0].aval.dtype == eqn.outvars[0].aval.dtype else None
        if name == "integer_pow" and eqn.params["y"] == 1:
            return operands[0]
        if name in ("add", "mul", "sub"):
            neutral = Fact(1.0, 1.0) if name == "mul" else Fact(0.0, 0.0)
            for i in (1,) if name == "sub" else (0, 1):
                if self.read(operands[i])[:3] == neutral[:3]:
                    return operands[1 - i]
        return None

    def assume(self, condition, holds):
        """The scope in which a condition holds, or does not hold; may raise `Impossible`."""
        given, extents = {}, {}
        extent = WHOLE if condition.aval.size == 1 else POINTWISE
        if self.depth < DEEPEST:
            self._learn(condition, holds, extent, given, extents)
        return Scope(self.program, given, extents, self)

    def _learn(self, condition, holds, extent, given, extents):
        if reading.is_literal(condition):
            return
        if self._narrow(condition, Fact(holds, holds), extent, given, extents) is None:
            return
        eqn = self.program.maker(condition)
        name = eqn.primitive.name if eqn else ""
        if name == "not":
            self._learn(eqn.invars[0], 1 - holds, extent, given, extents)
        elif (name, holds) in (("and", 1), ("or", 0)):
            for atom in eqn.invars:
                self._learn(atom, holds, extent, given, extents)
        elif name in OPPOSITE:
            a, b = eqn.invars
            gap = 0 if is_float(a.aval.dtype) else 1  # between one integer and the next
            # A comparison with NaN is false, and `ne` true. If it turned out so, NaN on one side
            # leaves the other side as it was.
            may_be_nan = holds == (name == "ne")
            name = name if holds else OPPOSITE[name]
            facts = self.read(a), self.read(b)
            for atom, fact, other, relation in (
                (a, *facts, name),
                (b, *facts[::-1], _REVERSED[name]),
            ):
                if not (may_be_nan and other.nan):
                    told = _side(relation, fact, other, gap)
                    self._narrow(atom, told, extent, given, extents)
        elif name == "is_finite" and holds and is_float(eqn.invars[0].aval.dtype):
            self._narrow(eqn.invars[0], _finite(eqn.invars[0]), extent, given, extents)

    def _narrow(self, atom, fact, extent, given, extents):
        """Puts down what is known of a value besides, and what follows for what it is made of."""
        if not reading.is_literal(atom):
            fact = meet(given.get(atom) or self.read(atom), fact)
        if fact.lo > fact.hi:
            if not fact.nan:
                raise Impossible
            return None
        if reading.is_literal(atom):
            return fact
        eqn = self.program.maker(atom)
        name = eqn.primitive.name if eqn else ""
        source = self.moved(eqn) if eqn else None
        if source is not None and source.aval.size == 1:
            if atom.aval.dtype == np.bool_ and fact.lo == fact.hi:
                self._learn(source, fact.lo, WHOLE, given, extents)
            else:
                fact = self._narrow(source, fact, WHOLE, given, extents) or fact
        elif name == "sqrt" and 0 < fact.lo < 0.99 * math.sqrt(SMALLEST):
            fact = fact._replace(lo=0.99 * math.sqrt(SMALLEST))  # no root lies between 0 and this
        elif name == "select_n" and len(eqn.invars) == 3 and eqn.invars[0].aval.size == 1:
            possible = [k for k in (0, 1) if _overlap(self.read(eqn.invars[k + 1]), fact)]
            if len(possible) == 2:  # as for either of them alone
                fact = meet(fact, join(*(self._of_case(x, fact, extent) for x in eqn.invars[1:])))
            elif possible:
                (k,) = possible
                self._learn(eqn.invars[0], k, WHOLE, given, extents)
                if eqn.invars[k + 1].aval.size == atom.aval.size:
                    fact = self._narrow(eqn.invars[k + 1], fact, extent, given, extents) or fact
        given[atom] = fact
        extents[atom] = max(extent, extents.get(atom, 0))
        return fact

    def _of_case(self, atom, fact, extent):
        """What a value is known to be, if it is one of two, and the other one is not chosen."""
        try:
            return self._narrow(atom, meet(self.read(atom), fact), extent, {}, {}) or fact
        except Impossible:
            return fact


def _overlap(a, b):
    return max(a.lo, b.lo) <= min(a.hi, b.hi) or (a.nan and b.nan)


def _finite(atom):
    largest = limits(atom.aval.dtype)[1]
    return Fact(-largest, largest)


def is_elementwise(eqn):
    """Whether each number of the result depends on the operands' numbers at its place alone."""
    return eqn.primitive.name in ELEMENTWISE


def _side(name, a, b, gap):
    """What `a <name> b` tells of a. NaN remains possible where the comparison may be a negation."""
    if name in ("lt", "le"):
        return Fact(-INF, b.hi if name == "le" else _next(b.hi, -INF, gap), a.nan)
    if name in ("gt", "ge"):
        return Fact(b.lo if name == "ge" else _next(b.lo, INF, gap), INF, a.nan)
    if name == "eq":
        return Fact(b.lo, b.hi, a.nan)
    lo = _next(a.lo, INF, gap) if a.lo == b.lo == b.hi else a.lo
    hi = _next(a.hi, -INF, gap) if a.hi == b.lo == b.hi else a.hi
    return Fact(lo, hi, a.nan)


def _next(x, towards, gap):
    """The next number in this direction, of integers or of float32, which is the finest here."""
    if gap:
        return x + math.copysign(gap, towards)
    with np.errstate(over="ignore"):
        return float(np.nextafter(np.float32(x), np.float32(towards)))
