"""The program of one device out of many, for a machine that has one.

What devices do together is replaced by stand-ins that take and give arrays of the same shapes. The
program computes nonsense and is never run, but it can be compiled, for meshes of any size: what the
compiler says of its memory is what it would say of the real one.

  shard_map body                     program for one device
  ppermute, psum, all_gather, ...    a callback to the host with results of the same types
  axis_index                         an operand
  pvary, sharding_constraint, ...    nothing
  loops, branches, checkpoints       the same, with bodies that are rewritten likewise
  all else                           the same

A callback is opaque: the compiler can neither foresee its results, nor put them where its operands
are. That is how it treats what arrives from other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs import folds, primitives, reading
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.trees import size_in_bytes

# What says over which axes a value varies, or where it lies, does nothing on one device.
_IDENTITIES = primitives.AXIS_TYPE_CASTS | primitives.PLACEMENTS


def make_device_program(
    body: Jaxpr,
    constants: Mapping[int, Any],
    made: Collection[int],
    used: Mapping[int, Any],
) -> Callable[..., Any]:
    """Makes a function of the body of a `shard_map`, to be compiled for one device, not run.

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
        # What the program around makes, such as casts of parameters, comes from a stand-in: given
        # as an operand it would count as an argument of the step, and it is temporary.
        order = sorted(made)
        values = dict(zip(order, _make_stand_ins([device], [types[i] for i in order]), strict=True))
        values |= constants
        given = iter(operands)
        values |= {i: next(given) for i in range(len(types)) if i not in values}
        results = _evaluate(body, [values[i] for i in range(len(types))], device)
        # Results that the program around uses go to a stand-in that gives what becomes of them: for
        # a moment both are in memory. The last stand-in makes a number of it, which is returned, so
        # that nothing is left out.
        kept = [result for i, result in enumerate(results) if i not in used]
        left = _make_stand_ins([results[i] for i in used], list(used.values()))
        return kept, _make_stand_ins(_make_stand_ins(left, list(used.values())), [device])

    return program


def _evaluate(jaxpr: Jaxpr, operands: Sequence[Any], device: jax.Array) -> list[Any]:
    def apply(eqn: Equation, values: list[Any]) -> Sequence[Any]:
        return _apply_equation(eqn, values, device)

    return folds.fold(jaxpr, operands, apply, constant=lambda array: array)


def _apply_equation(eqn: Equation, operands: list[Any], device: jax.Array) -> Sequence[Any]:
    """Applies an equation, or what stands in for it."""
    name = eqn.primitive.name
    if name == "axis_index":
        # An operand, so that no branch on the device's number is decided while compiling: the
        # program is that of all devices.
        return [device]
    if name in _IDENTITIES:
        return operands
    if reading.collective_axes(eqn):
        return _make_stand_ins(operands, [out.aval for out in eqn.outvars])
    if not folds.bodies_with_operands(eqn, operands):
        return reading.bind(eqn, operands)
    # Traced anew, since types say over which mapped axes values vary, and here is none.
    bodies = [
        lambda *values, body=body: _evaluate(body, values, device)
        for body in reading.bodies_of(eqn)
    ]
    if name == "cond":
        return lax.switch(operands[0], bodies, *operands[1:])
    if name == "scan":
        return _run_scan(eqn, bodies[0], operands)
    if name == "while":
        return _run_while(eqn, bodies[0], bodies[1], operands)
    # A checkpoint may put a barrier around what it recomputes (`prevent_cse`), which decides what
    # is kept in memory. Other calls are opened.
    if name in ("remat2", "checkpoint"):
        return jax.checkpoint(bodies[0], prevent_cse=eqn.params["prevent_cse"])(*operands)
    return bodies[0](*operands)


def _run_scan(eqn: Equation, body: Callable[..., Any], operands: list[Any]) -> list[Any]:
    consts, first, scanned = reading.split_scan(eqn, operands)

    def step(carry: list[Any], x: list[Any]) -> Any:
        values = body(*consts, *carry, *x)
        return values[: len(first)], values[len(first) :]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, made = lax.scan(step, first, scanned, **params)
    return [*carry, *made]


def _run_while(
    eqn: Equation,
    condition: Callable[..., Any],
    body: Callable[..., Any],
    operands: list[Any],
) -> Sequence[Any]:
    read, consts, carry = reading.split_while(eqn, operands)
    return lax.while_loop(
        lambda carry: condition(*read, *carry)[0], lambda carry: body(*consts, *carry), carry
    )


def _make_stand_ins(operands: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    """Makes arrays that the compiler can neither foresee nor put where the operands are."""

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


def find_traffic(
    jaxpr: Jaxpr, sizes: Mapping[str, int], *, loops: bool = True
) -> Iterator[Traffic]:
    """Finds what a program sends, each time that it runs.

    Args:
      jaxpr: inside `shard_map`.
      sizes: the devices along each mapped axis.
      loops: whether what loops send counts, as often as they say that they run.
    """
    for eqn, around in folds.equations_inside(jaxpr):
        axes = reading.collective_axes(eqn)
        around_it = [outer for outer in around if outer.primitive.name in primitives.LOOPS]
        if not axes or (around_it and not loops):
            continue
        pairs = eqn.params.get("perm")
        number = math.prod(sizes[axis] for axis in axes)
        rounds = _count_rounds(eqn.primitive.name, number, pairs is not None)
        size = sum(size_in_bytes(atom.aval) for atom in eqn.invars)
        # How often a while loop runs is not in the program: it counts as one iteration.
        times = math.prod(loop.params.get("length", 1) for loop in around_it)
        yield Traffic(axes, None if pairs is None else tuple(pairs), rounds * size * times)


def _count_rounds(name: str, number: int, is_exchange: bool) -> float:
    """Counts how often a device sends as much as it holds, with the best algorithms on a ring.

    Take n devices, each with an array of s bytes. In a reduce-scatter a device passes on n - 1
    parts of s / n bytes each. An all-reduce is that and an all-gather of the parts, 2 (n - 1) s / n
    bytes together. An all-gather of whole arrays passes on n - 1 of them.
    """
    if is_exchange:
        return 1.0
    if name.startswith("all_gather"):
        return number - 1.0
    halves = 1 if name in primitives.SCATTERING_COLLECTIVES else 2
    return halves * (number - 1) / number
