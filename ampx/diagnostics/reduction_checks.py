"""Checks of how a step makes one gradient out of those of all devices.

`ampx.value_and_grad(axis_name=...)` divides the gradients of a device by the weight of all devices,
so they are shares of the gradient and are to be summed. A mean over devices divides them once more.
No type tells: gradients of each device's own mean, for which a mean is right, vary over the devices
in the same way. But the program does, since a division as a share stands in a scope of that name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.step_programs import StepProgram, source_of
from ampx.jaxprs import folds, primitives, reading
from ampx.jaxprs.reading import Equation, Jaxpr

# What is known of a value: nothing, that it is made of shares, that it is a sum of shares over so
# many devices. Numbers that are written into the program are known, too, as floats.
_SHARE = "share"
_Fact = str | int | float | None


def find_means_of_shares(program: StepProgram) -> Iterator[LintFinding]:
    """Finds gradients that were divided by the weight of all devices, and are averaged over them.

    Both forms are known: `ampx.all_reduce(op="mean")`, and `jax.lax.pmean`.
    """
    found: list[tuple[Equation, ...]] = []
    _follow(program.jaxpr, [None] * len(program.inputs), (), found)
    for eqns in found:
        yield LintFinding(
            "reduction",
            "gradients are divided by the number of devices twice: value_and_grad(axis_name=...) "
            "has divided them by the weight of all devices, and this takes a mean over devices",
            source_of(eqns, program.jaxpr),
            'give the whole result to tx.update; or take the sum: op="sum", jax.lax.psum',
        )


def _follow(
    jaxpr: Jaxpr,
    operands: Sequence[_Fact],
    around: tuple[Equation, ...],
    found: list[tuple[Equation, ...]],
) -> list[_Fact]:
    def apply(eqns: tuple[Equation, ...], facts: list[_Fact]) -> Sequence[_Fact]:
        eqn = eqns[0]
        scopes = str(eqn.source_info.name_stack).split("/")
        if "ampx.share" in scopes:
            return [_SHARE] * len(eqn.outvars)
        is_share = _SHARE in facts
        if is_share and "ampx.mean" in scopes:
            found.append(eqns)
            return [None] * len(eqn.outvars)  # told once
        if is_share and eqn.primitive.name in primitives.PSUMS:
            return [_count_devices(eqn, around) if f == _SHARE else None for f in facts]
        if eqn.primitive.name == "div" and type(facts[0]) is int and facts[0] == facts[1]:
            found.append(eqns)
        if bodies := folds.bodies_with_operands(eqn, facts):
            results = [_follow(body, given, eqns, found) for body, given in bodies]
            # Of a while loop, whose condition gives one bool, the last is the body.
            groups = zip(*results[-1:] if eqn.primitive.name == "while" else results, strict=True)
            return [next((fact for fact in group if fact is not None), None) for group in groups]
        return [_SHARE if is_share else None] * len(eqn.outvars)

    return folds.fold_inside(
        jaxpr, operands, apply, lambda _: None, reading.number_of_constant, around=around
    )


def _count_devices(psum: Equation, around: Sequence[Equation]) -> int:
    """Over how many devices a sum goes, of axes that a shard_map around it maps."""
    sizes: dict[Any, int] = {}
    for outer in around:
        sizes = reading.mesh_sizes(outer) | sizes
    return math.prod(sizes.get(axis, 1) for axis in reading.axes_of_reduction(psum) or ())
