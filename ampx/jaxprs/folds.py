"""Walks over jaxprs that are not about arrays alone: one fold, and one list of all equations.

An analysis of a program knows a fact about each value: which parameter it is made of, which
reduction it waits for, along which axis it is divided. It also says how the facts of an equation's
results follow from those of its operands. `fold` does what all such analyses share:

    { lambda a b. let              facts = {a: fact of operand 0, b: fact of operand 1}
        c = mul a 2.0              facts[c], = apply(mul, [facts[a], literal(2.0)])
        d = jit[jaxpr=...] c b     facts[d], = apply(jit, [facts[c], facts[b]])
      in (d,) }                    -> [facts[d]]

It does not enter equations that hold jaxprs: for some analyses a loop is one step and for others it
is a program, so `apply` decides. `bodies_with_operands` tells it what it may enter and with what,
and `follow_bodies` enters it.

The facts may be arrays, real or traced: a fold then evaluates the program, each equation as `apply`
likes. `ampx.jaxprs.interpreter` evaluates, too, but is not a fold: it runs only what some outputs
need and drops each array after its last use, so that a whole training step fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ampx.jaxprs import reading
from ampx.jaxprs.reading import Equation, Jaxpr

Fact = TypeVar("Fact")


def fold(
    jaxpr: Jaxpr,
    operands: Sequence[Any],
    apply: Callable[[Equation, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any],
    literal: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Carries a fact for each variable of a jaxpr through its equations.

    Args:
      jaxpr: with or without constants attached.
      operands: the facts of its inputs.
      apply: the facts of an equation's outputs, from the equation and the facts of its operands.
      constant: the fact of an array that is attached to the jaxpr.
      literal: the fact of a number that is written into an equation; None: as `constant`.

    Returns:
      The facts of the outputs.
    """
    opened = reading.open_jaxpr(jaxpr)
    of_literal = constant if literal is None else literal
    facts: dict[Any, Any] = dict(zip(opened.invars, operands, strict=True))
    for variable, array in zip(opened.constvars, reading.constants_of(jaxpr), strict=True):
        facts[variable] = constant(array)

    def read(atom: Any) -> Any:
        return of_literal(atom.val) if reading.is_literal(atom) else facts[atom]

    for eqn in opened.eqns:
        results = apply(eqn, [read(atom) for atom in eqn.invars])
        facts.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def fold_inside(
    jaxpr: Jaxpr,
    operands: Sequence[Any],
    apply: Callable[[tuple[Equation, ...], list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any],
    literal: Callable[[Any], Any] | None = None,
    *,
    around: tuple[Equation, ...],
) -> list[Any]:
    """`fold` in a body: `apply` gets the equation and those `around` the body, innermost first."""

    def apply_inside(eqn: Equation, facts: list[Any]) -> Sequence[Any]:
        return apply((eqn, *around), facts)

    return fold(jaxpr, operands, apply_inside, constant, literal)


def bodies_with_operands(
    eqn: Equation, operands: Sequence[Any]
) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """The jaxprs that a call, a branch or a loop runs, each with the operands that it starts with.

    The body of a scan gets slices of its last operands; here it gets the whole in their places.
    The list is empty for all other equations, also for kernels, whose jaxprs take references.
    """
    name = eqn.primitive.name
    if name == "scan":
        return [(body, operands) for body in reading.bodies_of(eqn)]
    if name == "cond":  # its first operand is the number of the branch
        return [(body, operands[1:]) for body in reading.bodies_of(eqn)]
    if name == "while":
        of_condition, of_body, carry = reading.split_while(eqn, operands)
        condition, body = reading.bodies_of(eqn)
        return [(condition, [*of_condition, *carry]), (body, [*of_body, *carry])]
    body = reading.called_body(eqn)
    return [] if body is None else [(body, operands)]


def follow_bodies(
    eqn: Equation,
    operands: Sequence[Fact],
    follow: Callable[[Jaxpr, Sequence[Fact]], list[Fact]],
    unite: Callable[[Sequence[Fact], Sequence[Fact]], Fact],
) -> list[Fact] | None:
    """The facts of what a call, a branch or a loop gives; None for all other equations.

    The body of a loop is followed until the facts of its carry settle. So they must only grow.

    Args:
      eqn: the equation.
      operands: the facts of its operands.
      follow: the facts of a jaxpr's outputs, from those of its inputs.
      unite: the fact of what is one of several values, as of two branches, from the facts of these
        and of what decides which one it is.
    """
    name = eqn.primitive.name
    if name == "scan":
        (body,) = reading.bodies_of(eqn)
        consts, carry, xs = reading.split_scan(eqn, operands)

        def run(carry: list[Fact]) -> list[Fact]:
            return follow(body, [*consts, *carry, *xs])

    elif name == "while":
        condition, body = reading.bodies_of(eqn)
        of_condition, consts, carry = reading.split_while(eqn, operands)

        def run(carry: list[Fact]) -> list[Fact]:
            ends = follow(condition, [*of_condition, *carry])
            return [unite([result], ends) for result in follow(body, [*consts, *carry])]

    else:
        bodies = bodies_with_operands(eqn, operands)
        results = [follow(*pair) for pair in bodies]
        decides = operands[:1] if name == "cond" else []
        groups = zip(*results, strict=True)
        return [unite(group, decides) for group in groups] if bodies else None
    while True:
        results = run(carry)
        after = [unite(pair, ()) for pair in zip(carry, results, strict=False)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after


def equations_inside(
    jaxpr: Jaxpr, around: tuple[Equation, ...] = ()
) -> Iterator[tuple[Equation, tuple[Equation, ...]]]:
    """All equations of a jaxpr and of the jaxprs inside of them, in the order of the program.

    Each comes with the equations that it is inside of, outermost first, after those given as
    `around`. Both branches of a cond and the condition of a loop are among them.
    """
    for eqn in reading.open_jaxpr(jaxpr).eqns:
        yield eqn, around
        for inner in reading.inner_jaxprs(eqn):
            yield from equations_inside(inner, (*around, eqn))
