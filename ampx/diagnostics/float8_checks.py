"""Checks of a step that multiplies in float8: heads that should not, and products that could.

Both follow results of products forward through the program. A head is known by what reads it: a
softmax, which takes the exponential of scores less their maximum.

    y = x . w            scores of this product
    z = y + b            still its scores; so are they moved, scaled or masked
    m = max(z)           their maximum
    exp(z - m)           a softmax of that product

So no names are looked for, and the head of a classifier, of a language model and the router of a
mixture of experts are found alike. Attention scores are batched, and so never in float8.

A product stays in half if a size of it is no multiple of 16. Where such a size is large, as one of
1000, a few zeros more make it float8. Small ones are left in peace, and so are heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ampx.autocasting import float8
from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.step_programs import StepProgram, place_of
from ampx.jaxprs import folds, primitives, source_info
from ampx.jaxprs.reading import Equation, Jaxpr

_HALF = ("float16", "bfloat16")
# Sizes from here on are worth filling up: it takes at most an eighth more.
_WORTH_FILLING = 8 * float8.MULTIPLE
_KEEPING = (
    primitives.IDENTITIES
    | primitives.PLACEMENTS
    | primitives.AXIS_TYPE_CASTS
    | primitives.REARRANGING
    | primitives.ADDING
    | {"convert_element_type", "mul", "div", "neg", "tanh", "select_n", "max", "slice"}
    | {"optimization_barrier", "reduce_precision"}
)


class _Fact(NamedTuple):
    """What a value is of a product.

    Attributes:
      product: its number.
      kind: its scores, their maximum, or scores less their maximum.
    """

    product: int
    kind: Literal["scores", "maximum", "shifted"]


Facts = frozenset[_Fact]
_NONE: Facts = frozenset()


class _Products:
    """The products of a program that matter here, and which of them a softmax reads."""

    def __init__(self) -> None:
        self.found: list[tuple[Equation, ...]] = []  # each with those around it, innermost first
        self.of_softmax: set[int] = set()

    def follow(
        self, jaxpr: Jaxpr, operands: Sequence[Facts], around: tuple[Equation, ...] = ()
    ) -> list[Facts]:
        return folds.fold_inside(jaxpr, operands, self._apply, lambda _: _NONE, around=around)

    def _apply(self, eqns: tuple[Equation, ...], inputs: list[Facts]) -> Sequence[Facts]:
        eqn = eqns[0]
        name, count = eqn.primitive.name, len(eqn.outvars)
        bodies = folds.bodies_with_operands(eqn, inputs)
        if bodies:
            results = [self.follow(body, operands, eqns) for body, operands in bodies]
            # The condition of a while loop gives one bool and no result of the loop.
            groups = [group for group in results if len(group) == count]
            return [_NONE.union(*facts) for facts in zip(*groups, strict=True)] or [_NONE] * count
        if name == "dot_general":
            if source_info.is_backward(eqns):
                return [_NONE]
            self.found.append(eqns)
            return [frozenset((_Fact(len(self.found) - 1, "scores"),))]
        facts = _NONE.union(*inputs)
        if name == "exp":
            self.of_softmax |= {fact.product for fact in facts if fact.kind == "shifted"}
        if name == "reduce_max":
            return [frozenset(_Fact(f.product, "maximum") for f in facts if f.kind == "scores")]
        if name == "sub":
            scores, maxima = (
                {fact.product for fact in own if fact.kind == kind}
                for own, kind in zip(inputs, ("scores", "maximum"), strict=True)
            )
            facts |= {_Fact(product, "shifted") for product in scores & maxima}
        return [facts if name in _KEEPING else _NONE] * count


def _is_float8(eqns: tuple[Equation, ...]) -> bool:
    return any(float8.SCOPE in source_info.scope_of(eqn) for eqn in eqns)


def find_float8_faults(program: StepProgram) -> Iterator[LintFinding]:
    """Finds heads in float8, and large products that a size alone keeps in half."""
    products = _Products()
    products.follow(program.jaxpr, [_NONE] * len(program.inputs))
    if not any(map(_is_float8, products.found)):
        return
    for number, eqns in enumerate(products.found):
        place = place_of(eqns, program.jaxpr)
        if _is_float8(eqns):
            if number in products.of_softmax:
                name = place.scope or "name of the layer"
                yield LintFinding(
                    "float8_head",
                    "a softmax reads a product in float8: each score is off by some percent, and "
                    "probabilities by more",
                    place.source,
                    f"leave heads and routers in half: rules=ampx.DEFAULT_RULES.half({name!r})",
                )
        elif number not in products.of_softmax:
            sizes = _sizes_to_fill(eqns[0])
            if sizes:
                changes = ", ".join(f"{size} to {_fill(size)}" for size in sizes)
                yield LintFinding(
                    "float8_size",
                    "a product stays in half beside others in float8: it has a size of "
                    f"{' and of '.join(map(str, sizes))}, which must be multiples of "
                    f"{float8.MULTIPLE}",
                    place.source,
                    f"widen the layer: {changes}",
                )


def _fill(size: int) -> int:
    return -(-size // float8.MULTIPLE) * float8.MULTIPLE


def _sizes_to_fill(eqn: Equation) -> list[int]:
    """The sizes that keep a product in half, if all of them are large; else none."""
    operands: list[Any] = list(eqn.invars)
    dtypes = {str(atom.aval.dtype) for atom in operands}
    if not dtypes <= {*_HALF} or float8.find_obstacle(float8.Float8(), eqn) != "size":
        return []
    wrong = [size for size in float8.find_sizes(eqn) if size % float8.MULTIPLE]
    # None is wrong where a size is 0.
    return wrong if min(wrong, default=0) >= _WORTH_FILLING else []
