r"""How a loss scale flows through a step, by the power in which each value holds it.

A value that is multiplied by the loss scale S has the power 1, its square the power 2, and what has
nothing to do with S the power 0. Powers follow through a program as units do through physics:

    operation                 power of its result
    a * b, dot(a, b)          power(a) + power(b)
    a / b                     power(a) - power(b)
    x of a @ x = b            power(b) - power(a)
    a + b, max, select        that of both; a conflict, where they differ
    sqrt(a), a ** k           power(a) / 2, k power(a)
    sums, casts, transposes   power(a)
    a < b, isfinite(a)        0

In a sound step every conflict stays with the scale itself, such as the bound in min(2 S, 2**24):

    loss (0) -> * S (1) -> gradients (1) -> * 1/S (0) -> optimizer (0) -> params + update (0)

A conflict that reaches the parameters or the optimizer's state is a fault, and the powers that met
tell which. Where the scale was forgotten, gradients are divided by it and were never multiplied:
update (-1) meets params (0). Where they are clipped too early, 1/norm (-1) meets the bound (0).

Zeros, infinities and the largest numbers of formats have every power: what is masked, or held
within the range of a dtype, keeps its own. So do numbers of at most 1e-6 that are added or are a
lower bound: they keep a norm from being 0 in a denominator, g / (norm(g) + 1e-12). A constant that
is taken in the place of zero does the same: g / where(norm(g) == 0, 1, norm(g)).

A value whose power nobody can know (that of a kernel, of a logarithm of S) is in no conflict: this
finds less than there is, and nothing that is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.diagnostics import bit_sets
from ampx.diagnostics.power_arithmetic import (
    FAR_FROM_ZERO,
    FREE,
    INHERITED,
    NEAR_ZERO,
    PURE,
    READS,
    TINY,
    Power,
    as_read,
    is_guard,
    keep_common,
    multiply,
    of_constant,
    of_unknown_function,
    raise_to,
    unite_marks,
)
from ampx.jaxprs import folds, primitives, reading
from ampx.jaxprs.primitives import names
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.trees import is_floating

_SUMS = primitives.ADDING | primitives.CHOOSING | names("nextafter rem complex")
# They put values side by side, which need not have one power.
_GATHERING = names("concatenate stack pad")
_PRODUCTS = names("mul ragged_dot") | primitives.CONTRACTIONS
# Among indices, which are integers, sparse arrays have one operand of numbers, products have two.
_SPARSE = names(
    """bcoo_extract bcoo_fromdense bcoo_todense bcoo_transpose bcsr_extract bcsr_fromdense
    bcsr_todense coo_fromdense coo_todense csr_fromdense csr_todense"""
)
_SPARSE_PRODUCTS = names(
    """bcoo_dot_general bcoo_dot_general_sampled bcsr_dot_general coo_matmat coo_matvec
    csr_matmat csr_matvec"""
)
# The last operand of numbers is the right-hand side, those before it make the matrix.
_SOLVES = names("triangular_solve tridiagonal_solve spsolve")
# The result has the power of the first operand, or operand i that of result i.
_KEEPING = (
    primitives.IDENTITIES
    | primitives.REARRANGING
    | primitives.PLACEMENTS
    | primitives.AXIS_TYPE_CASTS
    | primitives.ALL_REDUCTIONS
    | primitives.TRANSFERS
    | primitives.SCATTERING_COLLECTIVES
    | names(
        """neg abs real imag conj convert_element_type reduce_precision
        reduce_sum reduce_max reduce_min cumsum cummax cummin gather sort top_k
        reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add
        optimization_barrier fft"""
    )
)
_GUARDS = primitives.ADDING | {"max", "select_n"}  # what puts a tiny number into a denominator
# Comparisons of a value with zero: true where it is zero, and false there.
_NEAR_ZERO, _FAR_FROM_ZERO = names("eq lt le"), names("ne gt ge")
_BOUNDS = primitives.CHOOSING | {"cond"}
# Operand 0 and the last are joined; what lies between them are indices.
_WRITES = names(
    "scatter-add scatter_add scatter-sub scatter_min scatter_max scatter-min scatter-max"
)
_EXPONENTS = {
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "cbrt": Fraction(1, 3),
    "square": Fraction(2),
    "reciprocal": Fraction(-1),
    "sign": Fraction(0),
}


class Conflict(NamedTuple):
    """An equation whose operands should have had one power.

    Attributes:
      powers: those that met.
      marks: of the operand that should not have been there, that of a power other than 0.
      eqns: the equation and those around it, innermost first.
    """

    powers: tuple[Fraction, ...]
    marks: int
    eqns: tuple[Equation, ...]


class Powers:
    """The powers of a program's values.

    Attributes:
      conflicts: in the order in which they were found.
      suspected: inputs that would be in no conflict if they had another power, and that one.
    """

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self.suspected: dict[int, Fraction] = {}
        # A loop's body is followed until its carry settles: an equation conflicts once.
        self._places: dict[tuple[int, ...], int] = {}
        # Then what should have one power and has several has the lowest, and no conflict is noted.
        self._is_lenient = False

    def follow(
        self, jaxpr: Jaxpr, operands: Sequence[Power], around: tuple[Equation, ...] = ()
    ) -> list[Power]:
        """The powers of a jaxpr's results, from those of its inputs."""
        return folds.fold_inside(jaxpr, operands, self._apply, of_constant, around=around)

    def _apply(self, eqns: tuple[Equation, ...], inputs: list[Power]) -> Sequence[Power]:
        eqn = eqns[0]

        def unite(values: Sequence[Power], decides: Sequence[Power]) -> Power:
            if eqn.primitive.name == "cond":
                return self._choose(values, decides[0], eqns)
            return functools.reduce(keep_common, values)

        def follow_inside(operands: Sequence[Power]) -> list[Power] | None:
            # A carry only becomes known, then unknown, and gains marks, so a loop settles.
            return folds.follow_bodies(
                eqn, operands, lambda body, own: self.follow(body, own, eqns), unite
            )

        before, suspected = len(self.conflicts), dict(self.suspected)
        inside = follow_inside(inputs)
        if inside is not None:
            if eqn.primitive.name not in ("scan", "while") or len(self.conflicts) == before:
                return inside
            # A part of the carry may be unknown in the end without a fault, such as a buffer that
            # holds activations and cotangents by turns. A conflict with what an early iteration
            # took it for is none.
            unknown = self._find_unknown(eqn, inputs, follow_inside)
            if unknown != inputs:
                self._forget(before, suspected)
                return follow_inside(unknown) or inside
            return inside
        results = self._compute(eqns, inputs)
        return [
            value if is_floating(out.aval) else _as_integer(eqn, inputs)
            for value, out in zip(results, eqn.outvars, strict=True)
        ]

    def _find_unknown(
        self,
        eqn: Equation,
        inputs: list[Power],
        follow_inside: Callable[[Sequence[Power]], list[Power] | None],
    ) -> list[Power]:
        """A loop's operands, unknown where its carry will be for another reason than a conflict."""
        was, self._is_lenient = self._is_lenient, True
        ends, values = follow_inside(inputs) or [], list(inputs)
        self._is_lenient = was
        is_scan = eqn.primitive.name == "scan"
        start = reading.scan_sizes(eqn)[0] if is_scan else sum(reading.while_sizes(eqn))
        size = reading.scan_sizes(eqn)[1] if is_scan else len(ends)
        for place, end in enumerate(ends[:size], start):
            if end.power is None and not end.marks & FREE:
                values[place] = end._replace(conflicts=values[place].conflicts)
        return values

    def _forget(self, count: int, suspected: dict[int, Fraction]) -> None:
        """Forgets all conflicts but the first, and what was suspected since."""
        del self.conflicts[count:]
        self._places = {key: place for key, place in self._places.items() if place < count}
        self.suspected = suspected

    def _compute(self, eqns: tuple[Equation, ...], inputs: list[Power]) -> Sequence[Power]:
        """The powers of an equation's results, as if all were floating."""
        eqn = eqns[0]
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in _KEEPING and len(inputs) == count:
            if name == "slice":
                return [_slice(eqn, value) for value in inputs]
            is_same = name == "optimization_barrier"
            return inputs if is_same else [value._replace(parts=()) for value in inputs]
        if name == "unstack" and len(inputs[0].parts) == count:
            return inputs[0].parts
        if name in _KEEPING:
            return [as_read(inputs[0], inputs)._replace(parts=())] * count
        if name in _PRODUCTS:
            return [multiply(inputs[0], inputs[1], 1)]
        if name == "div":
            return [multiply(inputs[0], inputs[1], -1)]
        if name in _SPARSE or name in _SPARSE_PRODUCTS or name in _SOLVES:
            return [self._combine(eqns, inputs)] * count
        if name in ("custom_linear_solve", "linear_solve"):
            return _solve(eqn, inputs)
        if name == "select_n":
            return [self._choose(inputs[1:], inputs[0], eqns)]
        if name in _SUMS:
            return [self._join(inputs, eqns)]
        if name in _WRITES:
            return [as_read(self._join([inputs[0], inputs[-1]], eqns), inputs)]
        if name in _GATHERING:
            return [_gather(eqn, inputs)]
        if name == "scatter":
            return [as_read(_gather(eqn, [inputs[0], inputs[-1]]), inputs)]
        if name == "dynamic_update_slice":
            return [as_read(_gather(eqn, inputs[:2]), inputs)]
        exponent = _EXPONENTS.get(name)
        if name == "integer_pow":
            exponent = Fraction(eqn.params["y"])
        elif name == "pow" and (number := reading.number_of(eqn.invars[1])) is not None:
            exponent = Fraction(number).limit_denominator(64)
        if exponent is not None:
            number = reading.number_of(eqn.invars[0]) or 0.0
            raised = raise_to(inputs[0], exponent)
            is_tiny = is_guard(abs(number) ** float(exponent) if number else 0.0)
            return [raised._replace(marks=raised.marks | TINY * is_tiny)]
        return [of_unknown_function(inputs)] * count

    def _combine(self, eqns: tuple[Equation, ...], inputs: list[Power]) -> Power:
        """The power of a sparse array, of a product with one, or of what solves a system."""
        pairs = zip(inputs, eqns[0].invars, strict=True)
        numbers = [value for value, atom in pairs if is_floating(atom.aval)]
        name = eqns[0].primitive.name
        if name in _SPARSE:
            return numbers[0]._replace(parts=())
        if name in _SPARSE_PRODUCTS:
            return multiply(numbers[0], numbers[1], 1)
        return multiply(numbers[-1], self._join(numbers[:-1], eqns), -1)

    def _choose(self, values: Sequence[Power], decides: Power, eqns: tuple[Equation, ...]) -> Power:
        """The power of one of two values or more, of which `decides` tells the number."""
        if len(values) == 2 and decides.marks & (NEAR_ZERO | FAR_FROM_ZERO):
            kept, spare = values if decides.marks & NEAR_ZERO else reversed(values)
            if spare.marks & PURE and not kept.marks & FREE:
                values = [kept]  # the other one only takes the place of zero
        return as_read(self._join(list(values), eqns), [decides])

    def _join(self, values: list[Power], eqns: tuple[Equation, ...]) -> Power:
        """The power of what is made of values that should have one power; or a conflict."""
        known = [v for v in values if not v.marks & FREE]
        if eqns[0].primitive.name in _GUARDS and any(v.power for v in known):
            known = [v for v in known if not v.marks & (TINY | NEAR_ZERO)]
        if not known:
            return values[0]._replace(marks=unite_marks(values) | FREE, origin=-1)
        conflicts = bit_sets.unite(v.conflicts for v in known)
        origins = {v.origin for v in known}
        origin = origins.pop() if len(origins) == 1 else -1
        joined = Power(known[0].power, unite_marks(values), conflicts, origin)
        powers = {v.power for v in known}
        if None in powers:
            return joined._replace(power=None)
        if len(powers) == 1:
            return joined
        scales = {p for p in powers if p}
        if joined.marks & PURE and len(scales) == 1 and eqns[0].primitive.name in _BOUNDS:
            return joined._replace(power=scales.pop())  # such as min(2 S, 2**24): the next scale
        if self._is_lenient:
            return joined._replace(power=min((p for p in powers if p is not None), key=abs))
        self._suspect(known)
        place = self._places.setdefault(tuple(map(id, eqns)), len(self.conflicts))
        if place == len(self.conflicts):
            marks = unite_marks([v for v in known if v.power]) & INHERITED
            met = tuple(sorted(p for p in powers if p is not None))
            self.conflicts.append(Conflict(met, marks, eqns))
        return joined._replace(power=None, conflicts=conflicts | 1 << place)

    def _suspect(self, values: list[Power]) -> None:
        """Notes inputs that gradients times the scale are added to, such as a sum over calls."""
        own = [v for v in values if v.power == 0]
        if all(v.origin >= 0 for v in own) and all(v.power in (0, 1) for v in values):
            self.suspected.update((v.origin, Fraction(1)) for v in own)


def _gather(eqn: Equation, values: Sequence[Power]) -> Power:
    """What is known of values side by side: their power, if they have one."""
    known = [v for v in values if not v.marks & FREE]
    conflicts = bit_sets.unite(v.conflicts for v in known)
    powers = {v.power for v in known}
    marks = unite_marks(values)
    # The coefficients of an optimizer may travel as one vector, and 1/scale among them.
    vector: Any = eqn.outvars[0].aval
    is_vector = eqn.primitive.name in ("stack", "concatenate") and vector.shape == (len(values),)
    parts = tuple(values) if is_vector else ()
    if not known:
        return Power(Fraction(0), marks | FREE)
    return Power(powers.pop() if len(powers) == 1 else None, marks, conflicts, -1, parts)


def _slice(eqn: Equation, value: Power) -> Power:
    """What is known of a slice: if it is one scalar of several, what is known of that."""
    start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
    if not value.parts:
        return value
    return value.parts[start] if stop == start + 1 else value._replace(parts=())


def _solve(eqn: Equation, inputs: list[Power]) -> list[Power]:
    """The powers of what a solver of linear systems returns: those of the right-hand sides.

    The solver may do anything with the matrix and what else it is given, so no scale may be in
    that. It comes first. In the `linear_solve` of lineax nothing tells how much of it there is.
    """
    scaled = [i for i, value in enumerate(inputs) if value.power != 0]
    if eqn.primitive.name == "custom_linear_solve":
        first = sum(eqn.params["const_lengths"])
        is_known = min(scaled, default=first) >= first
    else:
        first = min(scaled, default=0)
        is_known = first > 0
    if not is_known:
        return [of_unknown_function(inputs)] * len(eqn.outvars)
    solution = _gather(eqn, inputs[first:])
    marks = unite_marks(inputs) | solution.marks & FREE
    solution = solution._replace(marks=marks, parts=())
    others = max(0, len(eqn.outvars) - len(inputs[first:]))
    return [solution] * (len(eqn.outvars) - others) + [of_unknown_function(inputs)] * others


def _as_integer(eqn: Equation, inputs: Sequence[Power]) -> Power:
    """The power of integers and bools: 0, unless they are the bits or a rounding of others."""
    marks = unite_marks(inputs) & (READS | PURE) | _tells_of_zero(eqn, inputs)
    if all(v.marks & FREE for v in inputs) and eqn.primitive.name in _KEEPING | _SUMS:
        marks |= FREE  # the integer 0 that becomes 0.0
    is_unknown = any(
        value.power is None or (value.power and eqn.primitive.name not in names("sign is_finite"))
        for value, atom in zip(inputs, eqn.invars, strict=True)
        if eqn.primitive.name in ("bitcast_convert_type", "convert_element_type")
        or not is_floating(atom.aval)
    )
    result: Any = eqn.outvars[0].aval
    is_bool = jnp.issubdtype(result.dtype, np.bool_)
    return Power(None if is_unknown and not is_bool else Fraction(0), marks)


def _tells_of_zero(eqn: Equation, inputs: Sequence[Power]) -> int:
    """`NEAR_ZERO` or `FAR_FROM_ZERO`, if an equation gives such a predicate of numbers; else 0."""
    name = eqn.primitive.name
    marks = inputs[0].marks & (NEAR_ZERO | FAR_FROM_ZERO) if inputs else 0
    if name in _KEEPING:
        return marks
    if name == "not":
        return {NEAR_ZERO: FAR_FROM_ZERO, FAR_FROM_ZERO: NEAR_ZERO}.get(marks, 0)
    if name not in _NEAR_ZERO | _FAR_FROM_ZERO or not is_floating(eqn.invars[0].aval):
        return 0  # a counter that is 0 says nothing of gradients
    is_end = [bool(value.marks & (TINY | FREE)) for value in inputs]
    if sum(is_end) != 1:
        return 0
    is_turned = is_end[0] and name not in ("eq", "ne")  # 0 < n says what n > 0 does
    return NEAR_ZERO if (name in _NEAR_ZERO) != is_turned else FAR_FROM_ZERO
