"""Values that can be differentiated in reverse mode alone, with an error of one's own otherwise.

A function with a `custom_vjp` has no forward mode, and JAX says so in words that name neither the
function nor what a caller could change. Here the error is raised by a value instead. Of

    y = reverse_only(x, message)

the value is x, and the tangent passes a primitive of its own. Reverse mode transposes that one,
which leaves the cotangent as it is, and never runs it. Forward mode runs it: the error comes when
it is evaluated or mapped, or under `jit` when it is compiled.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir


def reverse_only(x: jax.Array, message: str) -> jax.Array:
    """Gives `x`, which raises a TypeError of this message where it is differentiated forward."""
    return _identity_p.bind(x, message=message)


def _differentiate(primals: Any, tangents: Any, *, message: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents  # JAX does not ask for the derivative of a zero tangent
    return reverse_only(x, message), _tangent_p.bind(tangent, message=message)


def _refuse(*_operands: Any, message: str, **_params: Any) -> Any:
    raise TypeError(message)


_identity_p = core.Primitive("ampx_reverse_only")
_identity_p.def_impl(lambda x, *, message: x)
_identity_p.def_abstract_eval(lambda aval, *, message: aval)
ad.primitive_jvps[_identity_p] = _differentiate
batching.defvectorized(_identity_p)
mlir.register_lowering(_identity_p, lambda _context, x, *, message: [x])

_tangent_p = core.Primitive("ampx_reverse_only_tangent")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda aval, *, message: aval)
ad.deflinear2(_tangent_p, lambda cotangent, _operand, *, message: [cotangent])
batching.primitive_batchers[_tangent_p] = _refuse
mlir.register_lowering(_tangent_p, _refuse)
