"""Rules of operations on bits, types, places and sums; `rules` has those of arithmetic."""

import math

import numpy as np

from intervals.rules import rule, times
from intervals.values import (
    INF,
    TRUTH,
    Fact,
    growth,
    is_float,
    is_integer,
    join,
    limited,
    nearest,
    rounded,
    unknown,
)


@rule("and", "or", "xor")
def _logic(call):
    name, (a, b) = call.eqn.primitive.name, call.facts
    if call.dtype == np.bool_ and name != "xor":
        choose = min if name == "and" else max
        return Fact(choose(a.lo, b.lo), choose(a.hi, b.hi))
    for x, y in ((a, b), (b, a)):
        # Bits of a constant that lie above all bits of the other number: `or` adds them.
        apart = x.lo == x.hi >= 0 and y.lo >= 0 and x.lo % 2 ** math.ceil(math.log2(y.hi + 1)) == 0
        if name == "or" and apart:
            return Fact(x.lo + y.lo, x.hi + y.hi)
    return unknown(call.dtype)


@rule("not")
def _not(call):
    a = call.facts[0]
    return Fact(1 - a.hi, 1 - a.lo) if call.dtype == np.bool_ else unknown(call.dtype)


@rule("shift_right_logical")
def _shift_right(call):
    a, b = call.facts
    if a.lo < 0 or b.lo != b.hi or not 0 <= b.lo < 32:
        return unknown(call.dtype)
    return Fact(a.lo // 2**b.lo, a.hi // 2**b.lo)


@rule("bitcast_convert_type")
def _bitcast(call):
    a = call.facts[0]
    source = call.eqn.invars[0].aval.dtype
    if call.dtype != np.float32 or source.itemsize != 4 or not 0 <= a.lo <= a.hi < 0x7F800000:
        return unknown(call.dtype)
    # Positive floats have the order of their bits.
    return Fact(*(float(np.uint32(x).view(np.float32)) for x in (a.lo, a.hi)))


@rule("convert_element_type", "reduce_precision")
def _convert(call):
    a, source = call.facts[0], call.eqn.invars[0].aval.dtype
    if not (is_float(source) or is_integer(source) or source == np.bool_):
        return unknown(call.dtype)
    if call.dtype == source and call.eqn.primitive.name == "convert_element_type":
        return a
    if is_float(call.dtype):
        # XLA may also leave a number as it is, and compute with more precision than was asked for.
        lo, hi = min(a.lo, nearest(a.lo, call.dtype)), max(a.hi, nearest(a.hi, call.dtype))
        lo, hi = limited(lo, hi, call.dtype)
        return Fact(lo, hi, a.nan, *call.with_room(a.l1, a.l2))
    if call.dtype == np.bool_:
        return TRUTH
    whole = unknown(call.dtype)
    if a.nan or a.lo < whole.lo or a.hi > whole.hi:
        return whole
    return Fact(float(math.trunc(a.lo)), float(math.trunc(a.hi)))


@rule("copy", "name", "stop_gradient", "transpose", "slice", "squeeze", "reshape")
def _rearrange(call):
    a, params = call.facts[0], call.eqn.params
    if a.parts and call.eqn.primitive.name == "slice":
        start, stop = params["start_indices"][0], params["limit_indices"][0]
        parts = a.parts[start : stop : (params["strides"] or (1,))[0]]
        return _of_parts(parts)
    return a if call.size == call.eqn.invars[0].aval.size else a._replace(parts=None)


@rule("reduce_max", "reduce_min", "rev", "dynamic_slice", "expand_dims", "real", "unstack")
def _some(call):
    return call.facts[0]._replace(parts=None)


@rule("broadcast_in_dim", "broadcast_to")
def _broadcast(call):
    a, size = call.facts[0], call.eqn.invars[0].aval.size
    if size == call.size:
        return a
    repeats = call.size / max(size, 1)
    return Fact(a.lo, a.hi, a.nan, a.l1 * repeats, a.l2 * math.sqrt(repeats))


def _of_parts(parts):
    fact = parts[0]
    for part in parts[1:]:
        fact = join(fact, part)
    return Fact(fact.lo, fact.hi, fact.nan, parts=tuple(p._replace(parts=None) for p in parts))


@rule("concatenate", "stack")
def _concatenate(call):
    scalars = all(atom.aval.size == 1 for atom in call.eqn.invars)
    fact = _of_parts(call.facts)
    return fact if scalars and len(call.facts) <= 64 else fact._replace(parts=None)


@rule("iota")
def _iota(call):
    return Fact(0.0, float(max(call.eqn.params["shape"]) - 1))


@rule("reduce_and", "reduce_or")
def _reduce_logic(call):
    return Fact(call.facts[0].lo, call.facts[0].hi) if call.eqn.invars[0].aval.size else TRUTH


@rule("reduce_sum")
def _reduce_sum(call):
    a, size = call.facts[0], call.eqn.invars[0].aval.size
    terms = size // max(call.size, 1)
    if not is_float(call.dtype):
        return Fact(*rounded(min(terms * a.lo, a.lo), max(terms * a.hi, a.hi), call.dtype))
    room, l1 = growth(terms, call.dtype), a.norms(size)[0]
    most = min(times(terms, a.largest), l1) * room
    # A sum of numbers that are not negative is never below one of them, also after rounding.
    lo = a.lo if a.lo >= 0 else -most
    hi = a.hi if a.hi <= 0 else most
    lo, hi = rounded(lo, hi, call.dtype)
    # Parts of the sum may overflow to both sides, if it holds numbers of both signs.
    nan = a.nan or (max(-lo, hi) == INF and a.lo < 0 < a.hi)
    return Fact(lo, hi, nan, l1 * room)


@rule("dot_general")
def _dot(call):
    if not is_float(call.dtype):
        return unknown(call.dtype)
    (contracted, _), _ = call.eqn.params["dimension_numbers"]
    a, b = call.facts
    sizes = [atom.aval.size for atom in call.eqn.invars]
    terms = math.prod(call.eqn.invars[0].aval.shape[axis] for axis in contracted)
    l2 = times(a.norms(sizes[0])[1], b.norms(sizes[1])[1])  # by Cauchy and Schwarz
    room = growth(terms, call.dtype) * 1.02  # operands rounded to bfloat16 on the way
    most = min(times(terms, times(a.largest, b.largest)), l2) * room
    lo = 0.0 if a.lo >= 0 and b.lo >= 0 else -most
    nan = a.nan or b.nan or most == INF
    return Fact(*rounded(lo, most, call.dtype), nan, INF, l2 * room)


@rule("random_bits")
def _random_bits(call):
    return unknown(call.dtype)
