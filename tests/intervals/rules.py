"""What follows for the result of each operation from what holds for its operands.

`RULES[name](call)` gives the `Fact` of the result. A rule that is missing costs nothing but proofs:
the result may then be anything. A rule that is wrong would cost soundness, so each one is tested
with numbers.

The bounds of a result are those of its exact value at the worst operands, moved outward (see
`values`). A product is largest at two ends of its operands' intervals, so four corners are enough;
a monotone function needs two. NaN comes of 0 * inf, 0 / 0, inf / inf, inf - inf and of roots and
powers of negative numbers, and nowhere else.
"""

import math
import operator
from typing import Any, NamedTuple

import numpy as np

from intervals.values import (
    ANYTHING,
    INF,
    TINY,
    TRUTH,
    Fact,
    consistent,
    exact_sum,
    is_float,
    is_integer,
    limited,
    limits,
    rounded,
    rounded_sum,
    unknown,
)

MANY = 128  # roundings, for powers, roots and exponentials


class Call(NamedTuple):
    """An equation with the facts of its operands."""

    eqn: Any
    facts: list

    @property
    def dtype(self):
        return self.eqn.outvars[0].aval.dtype

    @property
    def size(self):
        return self.eqn.outvars[0].aval.size

    def is_same(self):
        """Whether both operands are one variable, or one number."""
        return self.eqn.invars[0] is self.eqn.invars[1]

    def norms(self, i):
        """The norms of an operand of an elementwise operation."""
        if self.eqn.invars[i].aval.size == self.size:
            return self.facts[i].norms(self.size)
        return self.facts[i]._replace(l1=INF, l2=INF).norms(self.size)  # a scalar, repeated

    def with_room(self, *norms):
        """Norms of exact results, enlarged by what rounding may add to each number."""
        if not is_float(self.dtype):
            return norms
        eps, _, _, smallest = limits(self.dtype)
        return [norm * (1 + 16 * eps) + self.size * smallest for norm in norms]

    def neutral(self, number):
        """The other operand, where one is this very number, so that the other is the result."""
        for i in (0, 1):
            a, same_size = self.facts[i], self.eqn.invars[1 - i].aval.size == self.size
            if a.lo == a.hi == number and not a.nan and same_size:
                return self.facts[1 - i]
        return None


RULES = {}


def rule(*names):
    """Enters a function into `RULES`."""

    def enter(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def apply(eqn, facts):
    """The fact of the one result of an equation without bodies."""
    function = RULES.get(eqn.primitive.name)
    if function is None or eqn.outvars[0].aval.dtype == np.complex64:
        return unknown(eqn.outvars[0].aval.dtype)
    return consistent(function(Call(eqn, facts)), eqn.outvars[0].aval.dtype)


def times(a, b):
    return 0.0 if a == 0 or b == 0 else a * b  # the worst case of 0 * inf is a NaN, flagged apart


def _is_infinite(fact):
    return fact.largest == INF


@rule("add", "add_any")
def _add(call):
    a, b = call.facts
    if other := call.neutral(0.0):
        return other
    lo, hi = exact_sum(a.lo, b.lo, -INF), exact_sum(a.hi, b.hi, INF)
    lo, hi = (-INF if math.isnan(lo) else lo), (INF if math.isnan(hi) else hi)  # inf - inf
    opposite = (a.hi == INF and b.lo == -INF) or (a.lo == -INF and b.hi == INF)
    norms = call.with_room(*map(operator.add, call.norms(0), call.norms(1)))
    return Fact(*rounded_sum(lo, hi, call.dtype), a.nan or b.nan or opposite, *norms)


@rule("sub")
def _sub(call):
    if call.is_same() and call.facts[0].is_finite:
        return Fact(0.0, 0.0)
    a, b = call.facts
    return _add(Call(call.eqn, [a, Fact(-b.hi, -b.lo, b.nan, b.l1, b.l2)]))


@rule("mul")
def _mul(call):
    a, b = call.facts
    if other := call.neutral(1.0):
        return other
    if call.is_same():
        return _square(call)
    ends = [times(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    nan = (a.holds_zero() and _is_infinite(b)) or (b.holds_zero() and _is_infinite(a))
    (a1, a2), (b1, b2) = call.norms(0), call.norms(1)
    l1 = min(times(a1, b.largest), times(a.largest, b1), times(a2, b2))
    l2 = min(times(a2, b.largest), times(a.largest, b2))
    # A product with a power of two is exact.
    doubles = any(x.lo == x.hi and math.frexp(x.lo)[0] == 0.5 for x in (a, b))
    lo, hi = rounded(min(ends), max(ends), call.dtype, 0 if doubles else 2)
    return Fact(lo, hi, a.nan or b.nan or nan, *call.with_room(l1, l2))


@rule("square")
def _square(call):
    a = call.facts[0]
    squares = times(a.lo, a.lo), times(a.hi, a.hi)
    l2 = call.norms(0)[1]
    lo = 0.0 if a.holds_zero() else min(squares)  # what intervals alone do not see in x * x
    lo, hi = rounded(lo, max(squares), call.dtype)
    return Fact(lo, hi, a.nan, *call.with_room(times(l2, l2), times(l2, a.largest)))


@rule("integer_pow")
def _integer_pow(call):
    a, y = call.facts[0], call.eqn.params["y"]
    if y == 1:
        return a
    if y == 2:
        return _square(call)
    if y > 2:
        return Fact(*rounded(*_whole_power(a, y), call.dtype, 2 * y), a.nan)
    if a.lo > 0:
        return Fact(*rounded(0.0, _power(1 / a.lo, -y), call.dtype, 2 - 2 * y), a.nan)
    return ANYTHING


def _whole_power(a, y):
    ends = [math.copysign(_power(abs(x), y), x if y % 2 else 1.0) for x in (a.lo, a.hi)]
    return 0.0 if y % 2 == 0 and a.holds_zero() else min(ends), max(ends)


def _power(x, y):
    try:
        return x**y
    except OverflowError:
        return INF


@rule("div")
def _div(call):
    a, b = call.facts
    if not is_float(call.dtype):
        return _div_integers(call)
    if b.holds_zero():  # which may be -0 as well as +0
        return Fact(-INF, INF, True)
    ends = [_quotient(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    smallest = min(abs(b.lo), abs(b.hi))
    norms = call.with_room(*(_quotient(norm, smallest) for norm in call.norms(0)))
    nan = a.nan or b.nan or (_is_infinite(a) and _is_infinite(b))
    return Fact(*rounded(min(ends), max(ends), call.dtype, 8), nan, *norms)


def _quotient(x, y):
    if math.isinf(y):
        return 0.0
    try:
        return x / y
    except OverflowError:
        return math.copysign(INF, x) * math.copysign(1.0, y)


def _div_integers(call):
    a, b = call.facts
    if b.holds_zero() or not is_integer(call.dtype):
        return unknown(call.dtype)
    ends = [math.trunc(x / y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Fact(*rounded(float(min(ends)) - 1, float(max(ends)) + 1, call.dtype))


@rule("rem")
def _rem(call):
    a, b = call.facts
    if b.lo <= 0 or _is_infinite(a) or _is_infinite(b):
        return unknown(call.dtype)
    hi = min(b.hi, max(a.hi, 0.0))  # the sign is that of the dividend
    return Fact(0.0 if a.lo >= 0 else max(-b.hi, a.lo), hi, a.nan or b.nan)


@rule("neg")
def _neg(call):
    a = call.facts[0]
    return Fact(*limited_or_wrapped(-a.hi, -a.lo, call.dtype), a.nan, a.l1, a.l2)


@rule("abs")
def _abs(call):
    a = call.facts[0]
    lo = 0.0 if a.holds_zero() else min(abs(a.lo), abs(a.hi))
    return Fact(*limited_or_wrapped(lo, a.largest, call.dtype), a.nan, a.l1, a.l2)


def limited_or_wrapped(lo, hi, dtype):
    """Bounds of exact results that need no rounding."""
    return limited(lo, hi, dtype) if is_float(dtype) else rounded(lo, hi, dtype)


@rule("sign")
def _sign(call):
    a = call.facts[0]
    # A subnormal number may have sign 0, on processors that take it for 0.
    lo = -1.0 if a.lo < 0 else 1.0 if a.lo >= TINY else 0.0
    hi = 1.0 if a.hi > 0 else -1.0 if a.hi <= -TINY else 0.0
    return Fact(lo, hi, a.nan)


@rule("max")
def _max(call):
    a, b = call.facts
    return Fact(max(a.lo, b.lo), max(a.hi, b.hi), a.nan or b.nan)


@rule("min")
def _min(call):
    a, b = call.facts
    return Fact(min(a.lo, b.lo), min(a.hi, b.hi), a.nan or b.nan)


@rule("clamp")
def _clamp(call):
    low, x, high = call.facts
    lo, hi = min(max(low.lo, x.lo), high.lo), min(max(low.hi, x.hi), high.hi)
    return Fact(lo, hi, low.nan or x.nan or high.nan)


def _monotone(function, call, lowest=-INF, highest=INF):
    """A function that rises, on its domain; NaN is what there is outside of it."""
    a = call.facts[0]
    ends = [function(min(max(x, lowest), highest)) for x in (a.lo, a.hi)]
    nan = a.nan or a.lo < lowest or a.hi > highest
    return Fact(*rounded(*ends, call.dtype, MANY), nan)


@rule("sqrt")
def _sqrt(call):
    return _monotone(math.sqrt, call, lowest=0.0)


@rule("cbrt")
def _cbrt(call):
    fact = _monotone(lambda x: math.copysign(abs(x) ** (1 / 3), x), call)
    return Fact(fact.lo - 1e-12, fact.hi + 1e-12, fact.nan)  # of 0, jax 0.12 makes -5.6e-16 on CPUs


@rule("rsqrt")
def _rsqrt(call):
    a = call.facts[0]
    if a.lo <= 0:
        return Fact(-INF, INF, True)
    lo = 0.0 if a.hi == INF else a.hi**-0.5
    return Fact(*rounded(lo, a.lo**-0.5, call.dtype, MANY), a.nan)


@rule("exp")
def _exp(call):
    def exp(x):
        return INF if x > 700 else math.exp(x)

    fact = _monotone(exp, call)
    return fact._replace(lo=max(fact.lo, 0.0))


@rule("log")
def _log(call):
    return _monotone(lambda x: -INF if x == 0 else math.log(x), call, lowest=0.0)


@rule("tanh", "erf", "sin", "cos")
def _up_to_one(call):
    wild = call.eqn.primitive.name in ("sin", "cos") and _is_infinite(call.facts[0])
    return Fact(*rounded(-1.0, 1.0, call.dtype, MANY), call.facts[0].nan or wild)


@rule("erf_inv")
def _erf_inv(call):
    # The largest float32 below 1 has erf_inv 3.9; the polynomials that compute it stay below 6.
    return Fact(-6.0, 6.0, call.facts[0].nan) if call.facts[0].largest < 1 else ANYTHING


@rule("pow")
def _pow(call):
    x, y = call.facts
    if y.lo == y.hi > 0 and y.lo == int(y.lo):
        return Fact(*rounded(*_whole_power(x, int(y.lo)), call.dtype, MANY), x.nan or y.nan)
    # An exponent that is a step count: 1 or more keeps the result away from 1.
    if x.lo < 0 or (x.lo == 0 and y.lo < 0) or _is_infinite(x) or _is_infinite(y):
        return ANYTHING
    ends = [_power(p, q) for p in (x.lo, x.hi) for q in (y.lo, y.hi)]
    return Fact(*rounded(min(ends), max(ends), call.dtype, MANY), x.nan or y.nan)


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(call):
    name, (a, b) = call.eqn.primitive.name, call.facts
    if name in ("gt", "ge"):
        name, a, b = {"gt": "lt", "ge": "le"}[name], b, a
    nan = a.nan or b.nan  # every comparison with NaN is false, but for `ne`
    apart = a.hi < b.lo or b.hi < a.lo
    equal = not nan and (call.is_same() or a.lo == a.hi == b.lo == b.hi)
    if name in ("eq", "ne"):
        holds, fails = (equal, apart) if name == "eq" else (apart, equal)
    elif name == "lt":
        holds, fails = a.hi < b.lo and not nan, a.lo >= b.hi or call.is_same()
    else:
        holds, fails = (a.hi <= b.lo or call.is_same()) and not nan, a.lo > b.hi
    return Fact(1.0, 1.0) if holds else Fact(0.0, 0.0) if fails else TRUTH


@rule("is_finite")
def _is_finite(call):
    return Fact(1.0, 1.0) if call.facts[0].is_finite else TRUTH
