"""What two values have to do with each other, which an interval for each cannot say.

A quotient by a norm, u / sqrt(sum(u * u)): both may be as small as they like, and still no number
of the quotient is above 1, because the sum holds the square of each number of u. Squares that
underflow add a little to that, see `_ratio`. Two more are recognized: (c * g) * g is not negative,
and x + c * (y - x) lies between x and y.

All of it is about the form of the program: from the factors of a product back to what made them.
"""

import math

import numpy as np

from intervals.scopes import MOVES, Impossible
from intervals.values import INF, SMALLEST, TINY, Fact, is_float, join, limited


def have_one_sign(scope, x, y):
    """Whether one factor is a multiple of the other, by a number that is not negative."""
    for a, b in ((x, y), (y, x)):
        eqn = scope.program.maker(_in_place(scope, a))
        if eqn is not None and eqn.primitive.name == "mul":
            for c, g in (eqn.invars, eqn.invars[::-1]):
                if _in_place(scope, g) is _in_place(scope, b) and scope.read(c).lo >= 0:
                    return True
    return False


def mixed(scope, eqn):
    """The bounds of x + c * (y - x), which lies between x and y where c is between 0 and 1.

    With c well below 1, rounding cannot carry it over y: c * (y - x) is no larger than y - x, also
    after rounding, and a sum rounded to the nearest does not pass by the number y.
    """
    for x, moved in (eqn.invars, eqn.invars[::-1]):
        product = scope.program.maker(moved)
        if product is None or product.primitive.name != "mul":
            continue
        for c, difference in (product.invars, product.invars[::-1]):
            minus = scope.program.maker(difference)
            if minus is None or minus.primitive.name != "sub" or minus.invars[1] is not x:
                continue
            float32 = eqn.outvars[0].aval.dtype == np.float32
            finite = float32 and all(
                scope.read(atom).is_finite for atom in (*minus.invars, difference, moved)
            )
            if finite and 0 <= scope.read(c).lo <= scope.read(c).hi <= 0.999:
                y = scope.read(minus.invars[0])
                both = join(scope.read(x), y)
                return Fact(*limited(both.lo, both.hi, np.dtype(np.float32)))
    return None


def related(scope, eqn, fact):
    """A product or quotient whose factors alone may be too large, but not together."""
    u, t = eqn.invars
    if eqn.primitive.name == "div":
        bound = _quotient_bound(scope, u, t)
    else:
        bound = min(_weight(scope, u, t), _weight(scope, t, u))
    bound *= 1.001
    if bound > 3.4e38 or not is_float(eqn.outvars[0].aval.dtype):
        return fact
    return Fact(-bound, bound)


def _weight(scope, u, t):
    """A bound for |u| * |t|, where t may hold a quotient by a norm of u."""
    plain = scope.read(u).largest * (scope.read(t).largest or 0.0)
    best = plain if plain == plain and not (scope.read(u).nan or scope.read(t).nan) else INF
    t = _resolved(scope, t)
    eqn = scope.program.maker(t)
    name = eqn.primitive.name if eqn else ""
    if name == "div":
        p, n = eqn.invars
        best = min(best, _bounded(scope, p) * _ratio(scope, u, n))
    elif name == "mul":
        x, y = eqn.invars
        best = min(best, _weight(scope, u, x) * _bounded(scope, y))
        best = min(best, _weight(scope, u, y) * _bounded(scope, x))
    elif name == "select_n" and len(eqn.invars) == 3 and eqn.invars[0].aval.size == 1:
        best = min(best, _over_cases(scope, eqn, lambda inside, case: _weight(inside, u, case)))
    return best if best == best else INF


def _over_cases(scope, eqn, bound):
    worst = 0.0
    for k, case in enumerate(eqn.invars[1:]):
        try:
            worst = max(worst, bound(scope.assume(eqn.invars[0], float(k)), case))
        except Impossible:
            continue
    return worst


def _bounded(scope, atom):
    fact = scope.read(atom)
    return INF if fact.nan else fact.largest or SMALLEST


def _quotient_bound(scope, u, n):
    """A bound for |u / n|, where u may be a multiple of what n is a norm of."""
    best = _ratio(scope, u, n)
    source = _resolved(scope, u)
    eqn = scope.program.maker(source)
    if eqn and eqn.primitive.name == "mul":
        x, y = eqn.invars
        best = min(best, _quotient_bound(scope, x, n) * _bounded(scope, y))
        best = min(best, _quotient_bound(scope, y, n) * _bounded(scope, x))
    return best


def _ratio(scope, u, n):
    """A bound for |u / n| where n is above 0 and no less than a root of the sum of u's squares.

    A square below 2**-126 may have become 0, so a number of u is at most n plus 2**-63, about
    1e-19. If n is the root of float32's smallest number, that is still only 2900 times n.
    """
    lo = scope.read(n).lo
    if not lo > 0 or scope.read(n).nan or scope.read(u).nan or n.aval.dtype != np.float32:
        return INF
    return 1.001 + math.sqrt(TINY) * 1.001 / lo if dominates(scope, n, u) else INF


def _in_place(scope, atom):
    """Where a value comes from, as far as each number has stayed at its place."""
    while (eqn := scope.program.maker(atom)) is not None:
        source = scope.moved(eqn)
        if source is None or eqn.primitive.name in MOVES - {"copy", "optimization_barrier"}:
            return atom
        atom = source
    return atom


def _resolved(scope, atom):
    """Where a value comes from, through copies and through selects that are decided here."""
    while (eqn := scope.program.maker(atom)) is not None:
        source = scope.moved(eqn)
        if eqn.primitive.name == "select_n" and _is_uniform(scope, eqn.invars[0]):
            chosen = scope.read(eqn.invars[0])
            source = eqn.invars[1 + int(chosen.lo)] if chosen.lo == chosen.hi else None
        if source is None:
            return atom
        atom = source
    return atom


def _is_uniform(scope, condition):
    """Whether a condition is one for all numbers of an array."""
    eqn = scope.program.maker(condition)
    spread = eqn and eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1
    return condition.aval.size == 1 or bool(spread)


def dominates(scope, n, u, squared=False):
    """Whether n is at least |u|, or its square at least u * u, but for underflow and rounding."""
    n = _resolved(scope, n)
    eqn = scope.program.maker(n)
    if eqn is None:
        return False
    name = eqn.primitive.name
    if name in ("add", "max") and (name == "max" or all(scope.read(x).lo >= 0 for x in eqn.invars)):
        return any(dominates(scope, x, u, squared) for x in eqn.invars)
    if not squared:
        return name == "sqrt" and dominates(scope, eqn.invars[0], u, True)
    if name != "reduce_sum" or n.aval.size != 1:
        return False
    square = _resolved(scope, eqn.invars[0])
    eqn = scope.program.maker(square)
    if eqn is None:
        return False
    name = eqn.primitive.name
    is_square = (
        name == "square"
        or (name == "integer_pow" and eqn.params["y"] == 2)
        or (name == "mul" and eqn.invars[0] is eqn.invars[1])
    )
    return is_square and _resolved(scope, eqn.invars[0]) is _resolved(scope, u)
