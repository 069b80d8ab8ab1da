"""Computes once what a program computes for each element of an array that is one number.

    a = broadcast(n, (3, 4))                  m = sqrt(n)
    b = sqrt(a)                     ──►       b = broadcast(m, (3, 4))
    c = b * x                                 c = b * x

So are learning rates often written: `jnp.full_like(x, rate)`. Of an array without elements JAX
makes such a number, too: `jnp.where(is_first, 0, x)` is 0 there.
"""

from __future__ import annotations

from ampx.jaxprs import building, primitives, reading
from ampx.jaxprs.reading import Atom, Jaxpr


def spread_late(jaxpr: Jaxpr) -> Jaxpr:
    """Moves elementwise operations in front of the broadcasts of all that they read.

    Args:
      jaxpr: of which calls have been inlined.

    Returns:
      A program of the same results; the jaxpr itself, where nothing is to be moved.
    """
    opened = reading.open_jaxpr(jaxpr)
    numbers: dict[Atom, Atom] = {}  # by the array that is made of it
    eqns, is_changed = [], False
    for eqn in opened.eqns:
        name, operands = eqn.primitive.name, eqn.invars
        if name == "broadcast_in_dim" and operands[0].aval.shape == ():
            numbers[eqn.outvars[0]] = operands[0]
        elif name in primitives.ELEMENTWISE and eqn.outvars[0].aval.shape:
            read = [a if not a.aval.shape else numbers.get(a) for a in operands]
            if None not in read:
                own, (number,) = building.splice_function(
                    lambda *values, eqn=eqn: reading.bind(eqn, values), read, eqn
                )
                (out,) = eqn.outvars
                spread = building.make_broadcast(number, out.aval, eqn).replace(outvars=[out])
                eqns += [*own, spread]
                numbers[out], is_changed = number, True
                continue
        eqns.append(eqn)
    if not is_changed:
        return jaxpr
    return building.rebuild(jaxpr, opened.invars, opened.outvars, eqns)
