"""Narrows one float32 value for several readers: one half copy, and a cotangent for each reader.

The transpose of a conversion converts the cotangent back, and JAX adds up the cotangents of one
variable in the dtype of that variable. Take a value y that n products read, each with a cotangent
g_i for it:

    one narrowing for all         y1 = convert(y)     grad = f32(g_1 + ... + g_n)         bf16 sum
    one narrowing for each        y_i = convert(y)    grad = f32(g_1) + ... + f32(g_n)    f32 sum

With n = 512 and every g_i = 1 the first gives 256, because 256 + 1 = 256 in bfloat16, and the
second 512. The cache of casts of Apex and torch has this fault. But n narrowings are n variables,
and a product keeps its operand for the backward pass: n equal copies.

So only the first reader gets a conversion, y1. Each later one reads `narrow_again(y, y1)`. That is
a conversion of y as well, and JAX is told by a rule how to differentiate it: the value is y1, which
is kept anyway, and the tangent is that of y, converted. Nothing flows back into y1, so the n
cotangents meet at y, in float32. The two readings of the value are equal bit by bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Atom, Equation, Jaxpr


@jax.custom_jvp
def narrow_again(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """Converts `wide` to the dtype of `narrow`, which is a conversion of it already."""
    # Not `return narrow`: where JAX transposes this without its rule (`jax.linear_transpose`), the
    # cotangent has to go to `wide`.
    return wide.astype(narrow.dtype)


@narrow_again.defjvp
def _differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (_, narrow), (tangent, _) = primals, tangents
    # `narrow` has a tangent of its own, the same one, so that derivatives of this are right too.
    return narrow, tangent.astype(narrow.dtype)


def make_again(wide: Atom, narrow: Atom, near: Equation) -> tuple[list[Equation], Atom]:
    """Makes the equation of `narrow_again`, in the scope, line and context of the one nearby."""
    with near.ctx.manager:
        jaxpr = _trace_again(wide.aval, narrow.aval.dtype)
    eqns, (out,) = building.splice_jaxpr(jaxpr, [wide, narrow], near)
    return eqns, out


# Traced once for a type: the rule is then traced once, too.
@functools.lru_cache(maxsize=1024)
def _trace_again(aval: Any, half: np.dtype) -> Jaxpr:
    return reading.trace(narrow_again, aval, reading.with_dtype(aval, half))[0]
