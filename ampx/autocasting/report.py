"""Shows what autocast does to a function, equation by equation.

`print(ampx.explain(f)(w, x))` for `f = lambda w, x: jnp.sum(lax.square(x @ w))` gives

    equation     rule                     operands           results   written in
    dot_general  half                     f32>bf16 f32>bf16  f32>bf16  model.py:4:8 (f)
    square       every reader is float32  f32                f32       model.py:5:11 (f)
    reduce_sum   float32                  f32                f32       model.py:5:3 (f)
    1 of 1 matrix products and convolutions in bfloat16

One row for each equation of the traced function, in the order in which it computes; equations
inside a call or a loop stand below it, indented. "rule" is the table in `tables.py` that decided, a
rule of the user's, or the reason why the table was overruled. "f32>bf16" is a float32 of the trace
that is bfloat16 under autocast. The conversions themselves have no rows: where an operand's dtype
differs from that of the result it comes from, there is one. With `dots`, a product in float8 has
operands "f32>f8_e4m3fn", and one that is half has the reason behind its rule: "half, not float8:
batched".

The report reads the plan and the traced jaxpr. Nothing is rewritten or run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ampx.autocasting.calls import AS_WRITTEN
from ampx.autocasting.float8 import Dots, Float8, casts_of, find_fallback
from ampx.autocasting.operations import NO_SUM
from ampx.autocasting.planner import HIDDEN_FUNCTION
from ampx.autocasting.plans import Decision, PrecisionPlan, Settings
from ampx.autocasting.rules import DEFAULT_RULES, Rules
from ampx.autocasting.tables import DEFAULTS, HALF_BY_DEFAULT
from ampx.autocasting.transform import CustomVjp, Output, make_settings, trace_and_plan
from ampx.autocasting.values import AS_TRACED, is_float32
from ampx.function_checks import check_callable, takes_function_alone
from ampx.jaxprs import pure_calls, reading, source_info
from ampx.jaxprs.interpreter import Place
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.summaries import show_fields, show_table
from ampx.text_tables import SOURCE, Block, Table, show_blocks, show_rich

P = ParamSpec("P")

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class ExplainedEquation(NamedTuple):
    """One equation of a function under autocast.

    Attributes:
      inside: the calls and loops around it, outermost first, e.g. `("jit:silu", "scan")`.
      primitive: name of the primitive.
      rule: what decided: the name of a list, a rule of the user's, or a reason.
      operands: (dtype as traced, dtype under autocast) of each operand.
      results: the same of each result.
      source: file, line and function it was written in.
      not_float8: why a product that is half is not float8, if `dots` was given: `"batched"`,
        `"size"`, `"rule"`, `"dtype"`, `"custom_jvp"` or `"no matrix product"`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> (row,) = ampx.explain(jnp.exp)(jnp.ones(8)).equations
      >>> row.primitive, row.rule, row.results
      ('exp', 'float32', (('float32', 'float32'),))
    """

    inside: tuple[str, ...]
    primitive: str
    rule: str
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    source: str
    not_float8: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast does to one call of a function; print it for a table.

    Attributes:
      equations: every equation in order, those inside a call or loop after it.
      half_dtype: name of the half dtype.
      idle_rules: rules of the user's that decided nothing, as `"float32('head')"`.
      dots: how matrix products run in float8, or None.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> explanation = ampx.explain(lambda w, x: jnp.sum(x @ w))(jnp.ones((8, 8)), jnp.ones(8))
      >>> [row.primitive for row in explanation.equations], explanation.products_in_half()
      (['dot_general', 'reduce_sum'], (1, 1))
      >>> explanation.unknown
      ()
    """

    equations: tuple[ExplainedEquation, ...]
    half_dtype: str
    idle_rules: tuple[str, ...] = ()
    dots: Float8 | None = None

    __repr__ = show_fields
    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    @property
    def unknown(self) -> tuple[ExplainedEquation, ...]:
        """Equations that hold a function which autocast could not rewrite."""
        return tuple(row for row in self.equations if row.rule == HIDDEN_FUNCTION)

    def products_in_half(self) -> tuple[int, int]:
        """How many matrix products and convolutions run in half, and how many there are."""
        products = self._list_products()
        # Behind the two operands a product of groups has their sizes.
        half = sum(all(after == self.half_dtype for _, after in r.operands[:2]) for r in products)
        return half, len(products)

    def products_in_float8(self) -> tuple[int, int]:
        """How many matrix products and convolutions run in float8, and how many there are."""
        products = self._list_products()
        return sum(map(_is_float8, products)), len(products)

    def _list_products(self) -> list[ExplainedEquation]:
        return [
            row for row in self.equations if row.primitive in HALF_BY_DEFAULT and row.rule != NO_SUM
        ]

    def _describe_float8(self, dots: Float8) -> str:
        float8, products = self.products_in_float8()
        others = [row for row in self._list_products() if not _is_float8(row)]
        reasons = collections.Counter(row.not_float8 or row.rule for row in others)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        line = f"{float8} of {products} in float8, {dots.recipe}"
        line = f"{line}; not: {why}" if why else line
        fallback = find_fallback(dots, jax.devices()[0]) if float8 else ""
        return f"{line}\nno faster here: {fallback}" if fallback else line

    def _blocks(self) -> list[Block]:
        rows = [("equation", "rule", "operands", "results", SOURCE)]
        rows += [
            (
                "  " * len(row.inside) + row.primitive,
                f"{row.rule}, not float8: {row.not_float8}" if row.not_float8 else row.rule,
                _format_dtypes(row.operands),
                _format_dtypes(row.results),
                PurePath(row.source).name,
            )
            for row in self.equations
        ]
        blocks: list[Block] = [Table(rows)]
        half, products = self.products_in_half()
        blocks.append(f"{half} of {products} matrix products and convolutions in {self.half_dtype}")
        if self.dots is not None:
            blocks.append(self._describe_float8(self.dots))
        if as_written := sum(row.rule == AS_WRITTEN for row in self.equations):
            blocks.append(
                f"{as_written} {AS_WRITTEN}: an autocast of its own, float_function or "
                "half_function decides inside; explain what that was given"
            )
        if self.unknown:
            names = ", ".join(sorted({row.primitive for row in self.unknown}))
            blocks.append(f"functions that could not be rewritten: {names}")
        if self.idle_rules:
            blocks.append(f"rules that decided nothing: {', '.join(self.idle_rules)}")
        return blocks


def _abbreviate(dtype: str) -> str:
    """`float32` as `f32`, as in a printed jaxpr."""
    letters = re.split("[^a-z]", dtype)[0]
    return _SHORT.get(letters, letters) + dtype[len(letters) :]


def _is_float8(row: ExplainedEquation) -> bool:
    return all(after.startswith("float8") for _, after in row.operands)


def _format_dtypes(dtypes: Iterable[tuple[str, str]]) -> str:
    return " ".join(
        _abbreviate(before) if before == after else f"{_abbreviate(before)}>{_abbreviate(after)}"
        for before, after in dtypes
    )


def _name_rule(primitive: str, decision: Decision) -> str:
    # A decision that nothing overruled names its own primitive; the reader wants the table.
    if decision.rule != primitive:
        return decision.rule
    return DEFAULTS.get(primitive, "opaque")


def _pair_dtypes(atom: Any, in_half: bool, half: Any) -> tuple[str, str]:
    dtype = getattr(atom.aval, "dtype", type(atom.aval).__name__)
    before = "float0" if dtype == jax.dtypes.float0 else str(dtype)  # it is a record to numpy
    return before, half.name if in_half and is_float32(atom) else before


@takes_function_alone
def explain(
    fun: Callable[P, Any],
    *,
    half_dtype: DTypeLike = jnp.bfloat16,
    rules: Rules = DEFAULT_RULES,
    output: Output = "as_is",
    custom_vjp: CustomVjp = "transform",
    dots: Float8 | Dots | None = None,
) -> Callable[P, Explanation]:
    """Shows what `ampx.autocast` makes of each equation of a function, without running it.

    Args:
      fun: what would be given to `autocast`; `jax.grad(fun)` to see a backward pass.
      half_dtype: as for `autocast`.
      rules: as for `autocast`.
      output: as for `autocast`.
      custom_vjp: as for `autocast`.
      dots: as for `autocast`.

    Returns:
      A function with the signature of `fun` that gives an `Explanation`. Print it: one row for each
      equation with the rule that decided, the dtypes of operands and results as traced and, after
      `>`, under autocast, and the line of the program. Nothing runs and no argument changes.

    Raises:
      ValueError: as `autocast`.
      TypeError: as `autocast`.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> def f(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> explanation = ampx.explain(f)(jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> row = explanation.equations[0]
      >>> row.primitive, row.rule, row.operands[0]
      ('dot_general', 'half', ('float32', 'bfloat16'))
      >>> explanation.products_in_half()
      (1, 1)
    """
    settings = make_settings(half_dtype, rules, output, custom_vjp, dots)
    check_callable("fun", fun, "fun(*args)")

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        call = trace_and_plan(pure_calls.as_pure_call(fun, args, kwargs), settings, output)
        half = np.dtype(settings.half_dtype)
        rows = tuple(_list_equations(call.jaxpr, call.plan, settings, ()))
        deciding = {row.rule for row in rows}
        idle = tuple(rule for rule in rules.descriptions() if rule not in deciding)
        return Explanation(rows, half.name, idle, settings.dots)

    return explained


def _list_equations(
    jaxpr: Jaxpr, plan: PrecisionPlan, settings: Settings, inside: tuple[str, ...]
) -> Iterator[ExplainedEquation]:
    """Gives a row for each equation of a jaxpr and of the jaxprs that its equations hold."""
    opened = reading.open_jaxpr(jaxpr)
    known = dict(zip(opened.invars, plan.inputs, strict=True))
    half = np.dtype(settings.half_dtype)

    # An operand that is neither widened nor narrowed (None) is read as it is held.
    def dtypes(atom: Any, target: bool | None) -> tuple[str, str]:
        value = AS_TRACED if reading.is_literal(atom) else known.get(atom, AS_TRACED)
        return _pair_dtypes(atom, value.half if target is None else target, half)

    for eqn, decision in zip(opened.eqns, plan.decisions, strict=True):
        known.update(zip(eqn.outvars, decision.outputs, strict=True))
        name = eqn.primitive.name
        operands = tuple(map(dtypes, eqn.invars, decision.operands))
        if decision.precision == "float8" and settings.dots is not None:
            casts = casts_of(settings.dots).forward
            operands = tuple(
                (before, str(cast.dtype)) for (before, _), cast in zip(operands, casts, strict=True)
            )
        yield ExplainedEquation(
            inside,
            name,
            _name_rule(name, decision),
            operands,
            tuple(dtypes(out, None) for out in eqn.outvars),
            _find_source(eqn, jaxpr),
            decision.not_float8,
        )
        if not decision.bodies:
            continue
        call = reading.call_name(eqn)
        around = (*inside, f"{name}:{call}" if call else name)
        for body, body_plan in zip(reading.bodies_of(eqn), decision.bodies, strict=True):
            yield from _list_equations(body, body_plan, settings, around)


def _find_source(eqn: Equation, jaxpr: Jaxpr) -> str:
    """The line that an equation comes from; of a jitted function that ampx calls, its first."""
    if not source_info.is_of_ampx(source_info.line_of(eqn)):
        return source_info.line_of(eqn)
    functions = filter(None, map(source_info.function_of, reading.inner_jaxprs(eqn)))
    name = reading.call_name(eqn)
    for file, line in functions:
        if name and not source_info.is_of_ampx(file):
            return f"{file}:{line} ({name})"
    return Place().at(eqn, jaxpr).source
