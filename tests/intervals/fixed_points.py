"""Bounds that hold after any number of steps: a fixed point of a step, found by widening.

Let F be a step, as it acts on facts, and S the facts of the state. If the first state is inside S
and F(S) is inside S, then by induction every state is, however many steps there are. So the proof
is that one check; how S was found does not matter. It is found by trying: S becomes what holds of S
and of F(S) both, until nothing changes. A mean of squares would approach its bound for ever. So a
bound that moves goes to the next power of two (widening): there are some 250 of these, so it ends,
and the room above the true bound is what makes F(S) fit inside. A step may raise to end the search.
"""

import math

from intervals.values import INF, Fact, is_float, is_inside, is_integer, join, limits, unknown


class Unbounded(Exception):
    """No fixed point was found within the finite numbers."""


def find(step, start, avals, rounds=3000):
    """Facts that hold at the start and after any number of steps.

    Args:
      step: the facts after a step, from those before.
      start: the facts at the start.
      avals: the abstract values of the state.
      rounds: how often to try.

    Returns:
      Facts S, such that `start` and `step(S)` are inside S.

    Raises:
      Unbounded: if there are none to be found.
    """
    facts = [fact._replace(parts=None) for fact in start]
    for _ in range(rounds):
        after = step(facts)
        if all(map(is_inside, after, facts)):
            return facts
        both = list(map(join, facts, after))
        facts = [widened(*moved) for moved in zip(facts, both, avals, strict=True)]
    raise Unbounded


def widened(old, new, aval):
    """Facts that allow what `new` does, with each bound that has moved at the next threshold."""
    if not (is_float(aval.dtype) or is_integer(aval.dtype)):
        return unknown(aval.dtype)
    lo = old.lo if new.lo >= old.lo else -_threshold(-new.lo, aval.dtype)
    hi = old.hi if new.hi <= old.hi else _threshold(new.hi, aval.dtype)
    l1, l2 = (
        a if b <= a or a == INF else _norm_threshold(b)
        for a, b in ((old.l1, new.l1), (old.l2, new.l2))
    )
    return Fact(lo, hi, new.nan, l1, l2)


def _threshold(x, dtype):
    """The next power of two, or zero or one of their negatives, that is not below x."""
    if math.isinf(x):
        return x
    if is_integer(dtype):
        return max(x, unknown(dtype).hi) if x > 1 else 1.0 if x > 0 else 0.0 if x > -1 else x
    largest, tiny = limits(dtype)[1:3]
    if 0 <= x <= tiny:
        return 0.0 if x == 0 else tiny
    power = 2.0 ** (math.ceil(math.log2(x)) if x > 0 else math.floor(math.log2(-x)))
    power = math.copysign(power, x)
    return min(power, largest) if x <= largest else INF


def _norm_threshold(x):
    """The norms of what grows for ever are given up early: they only help with sums."""
    return INF if x > 1e60 else 2.0 ** (8 * math.ceil(math.log2(x) / 8)) if x else 0.0
