"""The program of one device out of many, for a machine that has one.

What devices do together is replaced by stand-ins that take and give arrays of the same shapes. The
program computes nonsense and is never run, but it can be compiled, for meshes of any size: what the
compiler says of its memory is what it would say of the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx import jaxprs

_IDENTITIES = ("pvary", "pcast", "preduced")


def device_program(body: jaxprs.Jaxpr) -> Callable[..., list[Any]]:
    """A function of the device's number and the operands of the body of a `shard_map`.

    Args:
      body: the body, traced without `check_vma`.

    Returns:
      `program(device, *operands)`, to be compiled and not to be run.
    """

    def program(device: jax.Array, *operands: Any) -> list[Any]:
        return _evaluated(body, operands, device)

    return program


def _evaluated(jaxpr: jaxprs.Jaxpr, operands: Sequence[Any], device: jax.Array) -> list[Any]:
    opened = jaxprs.open_jaxpr(jaxpr)
    constants = getattr(jaxprs.closed(jaxpr), "consts", ())
    values: dict[Any, Any] = dict(zip(opened.constvars, constants, strict=True))
    values |= dict(zip(opened.invars, operands, strict=True))

    def of(atom: Any) -> Any:
        return atom.val if jaxprs.is_literal(atom) else values[atom]

    for eqn in opened.eqns:
        results = _results(eqn, [of(atom) for atom in eqn.invars], device)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in opened.outvars]


def _results(eqn: jaxprs.Equation, operands: list[Any], device: jax.Array) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [device]
    if name in _IDENTITIES:
        return operands
    if jaxprs.collective_axes(eqn):
        return _stand_in(operands, [out.aval for out in eqn.outvars])
    if not any(map(_is_mapped, jaxprs.inner_jaxprs(eqn))):
        return jaxprs.bound(eqn, operands)
    bodies = [
        lambda *values, body=body: _evaluated(body, values, device)
        for body in jaxprs.bodies_of(eqn)
    ]
    if name == "cond":
        return lax.switch(operands[0], bodies, *operands[1:])
    if name == "scan":
        return _scanned(eqn, bodies[0], operands)
    if jaxprs.called_body(eqn) is None:
        raise NotImplementedError(
            f"{name} with collectives inside, at {jaxprs.line_of(eqn)}, has no plan: give "
            "compile=False"
        )
    if name in ("remat2", "checkpoint"):
        return jax.checkpoint(bodies[0], prevent_cse=eqn.params["prevent_cse"])(*operands)
    return bodies[0](*operands)


def _scanned(eqn: jaxprs.Equation, body: Callable[..., Any], operands: list[Any]) -> list[Any]:
    num_consts, num_carry = jaxprs.scan_sizes(eqn)
    consts, rest = operands[:num_consts], operands[num_consts:]

    def step(carry: list[Any], x: list[Any]) -> Any:
        values = body(*consts, *carry, *x)
        return values[:num_carry], values[num_carry:]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, made = lax.scan(step, rest[:num_carry], rest[num_carry:], **params)
    return [*carry, *made]


def _is_mapped(jaxpr: jaxprs.Jaxpr) -> bool:
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("axis_index", *_IDENTITIES) or jaxprs.collective_axes(eqn):
            return True
        if any(map(_is_mapped, jaxprs.inner_jaxprs(eqn))):
            return True
    return False


def _stand_in(operands: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    """Arrays that the compiler can neither foresee nor share with others, as what arrives."""

    def never(*_: Any) -> Any:
        raise AssertionError("a plan is not to be run")

    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
    return jax.pure_callback(never, shapes, *map(jnp.asarray, operands))
