"""Lets equations that are the same share one body, so that JAX differentiates it once.

JAX differentiates a jaxpr equation by equation, and what it finds for one it does not know again at
the next. The functions of `jax.numpy` are jitted: JAX keeps the derivative of such a body, and a
transformer's twelve additions of one shape cost one. A traced program has lost these bodies, since
they are written out in place:

    c = add a b                       c = jit[jaxpr={ x y -> add x y }  inline=True] a b
    d = mul c 2.0          becomes    d = mul c 2.0
    e = add d b                       e = jit[the same jaxpr            inline=True] d b

Here they get them back. `inline=True` means that the body is written out again where the program
is traced at last, so nothing changes in what is compiled. Where nothing is differentiated the calls
only cost time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from ampx.jaxprs.building import extract, rebuild
from ampx.jaxprs.reading import (
    Equation,
    Jaxpr,
    is_literal,
    new_variable,
    open_jaxpr,
    trace,
    variables_in,
)


def is_differentiated(values: Any) -> bool:
    """Whether one of these arrays is traced, and the innermost transformation differentiates it."""
    # The classes of tracers have no public names. Those that carry a tangent have both of these.
    # The class is asked, since a tracer answers for its type, too, and takes long over an error.
    differentiated = [
        value
        for value in values
        if hasattr(type(value), "primal") and hasattr(type(value), "tangent")
    ]
    return any(isinstance(value.primal, jax.core.Tracer) for value in differentiated)


@dataclasses.dataclass(frozen=True)
class _Described:
    """An equation that is equal to all that can share its body.

    Attributes:
      key: what they have in common.
      eqn: one of them.
    """

    key: Hashable
    eqn: Equation = dataclasses.field(compare=False)


def share_bodies(jaxpr: Jaxpr) -> Jaxpr:
    """Puts each equation that occurs more than once into a body that its repetitions share.

    Two are the same if primitive, parameters, literal operands, context, and shapes and dtypes of
    the others are. Equations that hold bodies, or have effects, stay as they are.
    """
    opened = open_jaxpr(jaxpr)
    described = list(map(_describe_equation, opened.eqns))
    numbers = collections.Counter(described)
    eqns = []
    for eqn, own in zip(opened.eqns, described, strict=True):
        if own is None or numbers[own] == 1:
            eqns.append(eqn)
            continue
        call, operands = _make_call(own), variables_in(eqn.invars)
        eqns.append(eqn.replace(primitive=call.primitive, params=call.params, invars=operands))
    return rebuild(jaxpr, opened.invars, opened.outvars, eqns)


def _describe_equation(eqn: Equation) -> _Described | None:
    """What an equation may share a body by; None for one that shares none."""
    has_body = any(map(_holds_program, eqn.params.values()))
    if has_body or eqn.effects or not variables_in(eqn.invars):
        return None
    operands = tuple((atom.aval, _bits_of(atom)) for atom in eqn.invars)
    key = (eqn.primitive, tuple(sorted(eqn.params.items())), operands, eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return _Described(key, eqn)


def _bits_of(operand: Any) -> bytes | None:
    """The bits of a literal, since 0.0 and -0.0 are equal and yet two; None for a variable."""
    return np.asarray(operand.val).tobytes() if is_literal(operand) else None


def _holds_program(param: Any) -> bool:
    """Whether a parameter is a jaxpr or a function, or several."""
    if isinstance(param, tuple | list):
        return any(map(_holds_program, param))
    return callable(param) and not isinstance(param, type) or hasattr(param, "eqns")


# Kept from trace to trace, since JAX knows a body by its identity: where each operation is compiled
# on its own, a new body would be compiled anew in every call.
@functools.lru_cache(maxsize=4096)
def _make_call(described: _Described) -> Equation:
    """Makes a call of a body that runs this equation on its operands that are no literals."""
    eqn = described.eqn
    own = [new_variable(atom.aval) for atom in variables_in(eqn.invars)]
    outvars = [new_variable(out.aval) for out in eqn.outvars]
    rest = iter(own)
    operands = [atom if is_literal(atom) else next(rest) for atom in eqn.invars]
    # The place in the program is that of each call.
    nowhere = eqn.source_info.replace(name_stack=source_info_util.new_name_stack())
    body = eqn.replace(invars=operands, outvars=outvars, source_info=nowhere)
    template = _trace_template(len(own), len(outvars), eqn.ctx)
    own_params = {
        "jaxpr": extract(template.params["jaxpr"], own, outvars, [body]),
        "name": eqn.primitive.name,
        # What `jax.jit(inline=True)` means: a bool in jax 0.10, one of an enum later.
        "inline": getattr(type(template.params["inline"]), "JAX_EARLY", True),
    }
    return template.replace(params={**template.params, **own_params})


@functools.lru_cache(maxsize=256)
def _trace_template(num_operands: int, num_results: int, context: Any) -> Equation:
    """A call of some jitted function, for those parameters that are JAX's own affair."""

    def call(*operands: jax.Array) -> list[jax.Array]:
        return [operands[0] + k for k in range(1, 1 + num_results)]

    shapes = [jax.ShapeDtypeStruct((), np.float32)] * num_operands
    with context.manager:
        traced, _ = trace(jax.jit(call, keep_unused=True), *shapes)
    return open_jaxpr(traced).eqns[0]
