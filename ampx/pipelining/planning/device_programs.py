"""The program of one device out of many, for a machine that has one.

What devices do together is replaced by stand-ins that take and give arrays of the same shapes. The
program computes nonsense and is never run, but it can be compiled, for meshes of any size: what the
compiler says of its memory is what it would say of the real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs import reading
from ampx.jaxprs.reading import Equation, Jaxpr

# What says over which axes a value varies, or where it lies, does nothing on one device.
_IDENTITIES = ("pvary", "pcast", "preduced", "sharding_constraint", "reshard", "layout_constraint")
_LOOPS = ("scan", "while")
_HALF_REDUCTIONS = ("reduce_scatter", "unreduced_reduce_scatter", "all_to_all")


def device_program(
    body: Jaxpr,
    constants: Mapping[int, Any],
    made: Collection[int],
    used: Mapping[int, Any],
) -> Callable[..., Any]:
    """The body of a `shard_map`, to be compiled for one device and not to be run.

    Args:
      body: the body.
      constants: operands, by number, that are known.
      made: operands, by number, that the program around it makes: they are temporary.
      used: results, by number, that the program around it uses: they are temporary, too; each with
        the type of what it makes of them.

    Returns:
      A function of the device's number and the other operands.
    """
    types = [variable.aval for variable in reading.open_jaxpr(body).invars]

    def program(device: jax.Array, *operands: Any) -> Any:
        order = sorted(made)
        values = dict(zip(order, _stand_in([device], [types[i] for i in order]), strict=True))
        values |= constants
        given = iter(operands)
        values |= {i: next(given) for i in range(len(types)) if i not in values}
        results = _evaluated(body, [values[i] for i in range(len(types))], device)
        kept = [result for i, result in enumerate(results) if i not in used]
        left = _stand_in([results[i] for i in used], list(used.values()))
        return kept, _stand_in(_stand_in(left, list(used.values())), [device])

    return program


def _evaluated(jaxpr: Jaxpr, operands: Sequence[Any], device: jax.Array) -> list[Any]:
    opened = reading.open_jaxpr(jaxpr)
    constants = getattr(reading.closed(jaxpr), "consts", ())
    values: dict[Any, Any] = dict(zip(opened.constvars, constants, strict=True))
    values |= dict(zip(opened.invars, operands, strict=True))

    def of(atom: Any) -> Any:
        return atom.val if reading.is_literal(atom) else values[atom]

    for eqn in opened.eqns:
        results = _results(eqn, [of(atom) for atom in eqn.invars], device)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in opened.outvars]


def _results(eqn: Equation, operands: list[Any], device: jax.Array) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [device]
    if name in _IDENTITIES:
        return operands
    if reading.collective_axes(eqn):
        return _stand_in(operands, [out.aval for out in eqn.outvars])
    if name not in ("cond", *_LOOPS) and reading.called_body(eqn) is None:
        return reading.bound(eqn, operands)
    # Traced anew, since types say over which mapped axes values vary, and here is none.
    bodies = [
        lambda *values, body=body: _evaluated(body, values, device)
        for body in reading.bodies_of(eqn)
    ]
    if name == "cond":
        return lax.switch(operands[0], bodies, *operands[1:])
    if name == "scan":
        return _scanned(eqn, bodies[0], operands)
    if name == "while":
        return _repeated(eqn, bodies[0], bodies[1], operands)
    if name in ("remat2", "checkpoint"):
        return jax.checkpoint(bodies[0], prevent_cse=eqn.params["prevent_cse"])(*operands)
    return bodies[0](*operands)


def _scanned(eqn: Equation, body: Callable[..., Any], operands: list[Any]) -> list[Any]:
    num_consts, num_carry = reading.scan_sizes(eqn)
    consts, rest = operands[:num_consts], operands[num_consts:]

    def step(carry: list[Any], x: list[Any]) -> Any:
        values = body(*consts, *carry, *x)
        return values[:num_carry], values[num_carry:]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, made = lax.scan(step, rest[:num_carry], rest[num_carry:], **params)
    return [*carry, *made]


def _repeated(
    eqn: Equation,
    condition: Callable[..., Any],
    body: Callable[..., Any],
    operands: list[Any],
) -> Sequence[Any]:
    of_condition, of_body = reading.while_sizes(eqn)
    read, rest = operands[:of_condition], operands[of_condition:]
    consts, carry = rest[:of_body], rest[of_body:]
    return lax.while_loop(
        lambda carry: condition(*read, *carry)[0], lambda carry: body(*consts, *carry), carry
    )


def _stand_in(operands: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    """Arrays that the compiler can neither foresee nor put where others are, as what arrives."""

    def never(*_: Any) -> Any:
        raise AssertionError("the program of one device is for the compiler alone")

    if not types:
        return []
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
    return jax.pure_callback(never, shapes, *map(jnp.asarray, operands))


class Traffic(NamedTuple):
    """What a collective sends.

    Attributes:
      axes: the mapped axes that it runs over.
      pairs: for an exchange of neighbours (sender, receiver) along the axis; else None.
      bytes: what each sender sends, with a ring where all take part.
    """

    axes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...] | None
    bytes: float


def traffic(jaxpr: Jaxpr, sizes: Mapping[str, int], *, loops: bool = True) -> Iterator[Traffic]:
    """What a program sends, each time that it runs.

    Args:
      jaxpr: inside `shard_map`.
      sizes: the devices along each mapped axis.
      loops: whether what loops send counts, as often as they say that they run.
    """
    for eqn in reading.open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        axes = reading.collective_axes(eqn)
        if axes:
            pairs = eqn.params.get("perm")
            number = math.prod(sizes[axis] for axis in axes)
            rounds = _rounds(name, number, pairs is not None)
            size = sum(size_in_bytes(atom.aval) for atom in eqn.invars)
            yield Traffic(axes, None if pairs is None else tuple(pairs), rounds * size)
        elif loops or name not in _LOOPS:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in reading.inner_jaxprs(eqn):
                for found in traffic(inner, sizes, loops=loops):
                    yield found._replace(bytes=found.bytes * times)


def _rounds(name: str, number: int, is_exchange: bool) -> float:
    """How often a device sends as much as it holds, with the best algorithms that use a ring."""
    if is_exchange:
        return 1.0
    if name.startswith("all_gather"):
        return number - 1.0
    halves = 1 if name in _HALF_REDUCTIONS else 2
    return halves * (number - 1) / number


def size_in_bytes(leaf: Any) -> int:
    """Of an array or a type."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize
