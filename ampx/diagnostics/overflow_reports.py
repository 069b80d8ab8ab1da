"""What is reported about an infinity or a NaN: the equation that made it, and what it reached.

A record holds what was seen; its hint says what usually helps. Hints depend on what the operation
can do wrong (a division by zero, a logarithm of zero), on the dtype (in float16 too large a number
is likely, in float32 a mistake is) and on the pass: gradients overflow with too high a loss scale.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Literal

from ampx.checking import join_first
from ampx.summaries import show_fields, show_table
from ampx.text_tables import show_rich

# Stand where else the name of a primitive does: for what comes from outside of all equations.
ARGUMENT, PROGRAM = "argument", "program"
TOO_LARGE = "a constant is inf in"  # how the note of such a record begins
POLE = "infinite where the operand is"  # and this is how the note of a pole begins
OPAQUE = "what happens inside was not looked into"
_CALLBACKS = ("pure_callback", "io_callback")
_GUARD = "jnp.where(ok, f(jnp.where(ok, x, safe)), 0.0)"
# How each operation makes a NaN of numbers.
_WITHOUT_ANSWER = {
    **dict.fromkeys(("add", "add_any", "sub", "reduce_sum"), "inf - inf"),
    **dict.fromkeys(("log", "log1p", "log2"), "the logarithm of a negative number"),
    **dict.fromkeys(("sqrt", "rsqrt"), "the root of a negative number"),
    "div": "0/0 or inf/inf",
    "dot_general": "0 * inf or inf - inf",
    "mul": "0 * inf",
    "pow": "a broken power of a negative number",
    **dict.fromkeys(("lgamma", "digamma"), "a pole, at 0 or at a negative integer"),
}
# How each operation makes an infinity of numbers that are not large.
_WITHOUT_BOUND = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt"), "a division by zero"),
    **dict.fromkeys(("log", "log1p", "log2"), "the logarithm of zero"),
}


@dataclasses.dataclass(frozen=True)
class OverflowRecord:
    """An equation that made an infinity or a NaN which its operands do not explain.

    Attributes:
      primitive: the name of the primitive; `"argument"` for an array that was not finite when it
        came in, `"program"` where no single equation can be named.
      kind: `"nan"` if the result holds one, else `"inf"`.
      direction: `"forward"` or `"backward"`. What only a derivative needs is `"backward"`, also
        where JAX computes it during the forward pass.
      scope: name scopes around it, joined by "/": with flax linen the path of the module.
      source: the innermost line of the user's own, as `"model.py:12 (loss)"` with the whole path;
        `""` for what a library does around the user's functions.
      iterations: the number of the iteration of each loop around it, from 0, outermost first; for a
        scan, the index into what it scans.
      input_types: dtype and shape of each operand, as `"float16[4,8]"`.
      output_type: dtype and shape of the result.
      largest_inputs: the largest finite absolute value of each operand; None where there is none.
      largest_output: the same of the result.
      note: what else there is to say, or `""`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import trace_overflow
      >>> first = trace_overflow(lambda x: jnp.sum(x * x))(jnp.full(2, 300, jnp.float16)).first
      >>> first.primitive, first.kind, first.input_types, first.largest_inputs
      ('mul', 'inf', ('float16[2]', 'float16[2]'), (300.0, 300.0))
    """

    primitive: str
    kind: Literal["inf", "nan"]
    direction: Literal["forward", "backward"]
    scope: str
    source: str
    iterations: tuple[int, ...]
    input_types: tuple[str, ...]
    output_type: str
    largest_inputs: tuple[float | None, ...]
    largest_output: float | None
    note: str = ""

    __repr__ = show_fields

    @property
    def hint(self) -> str:
        """What usually helps."""
        if self.primitive == ARGUMENT:
            return "It came in like that: trace the call that made it."
        if self.primitive in _CALLBACKS:
            return "It came out of a Python callback: look into the function that it calls."
        if self.note == OPAQUE:
            # Of its operands' sizes nothing follows: they are those of a whole step.
            if self.primitive == "shard_map":
                return (
                    "trace_overflow cannot look inside of shard_map. Trace what one device "
                    "computes: trace_overflow(jax.grad(loss_fn))(params, rows_of_one_device)."
                )
            return "trace_overflow cannot look inside. Trace the same computation without it."
        if self.kind == "nan" and self.primitive == "gather":
            return (
                "Usually an index out of bounds, which gather fills with NaN: check the indices, "
                'or give jnp.take a mode, such as "clip".'
            )
        is_too_large = self.note.startswith(TOO_LARGE) or self.primitive == "convert_element_type"
        if self.kind == "nan" and not is_too_large:
            kind = _WITHOUT_ANSWER.get(self.primitive, "an operation without an answer")
            return (
                f"Usually {kind}. Guard the operand, not the result: the gradient of jnp.where "
                f"passes a NaN of the branch not taken on. Write {_GUARD}."
            )
        dtype, cause = self.output_type.split("[")[0], _WITHOUT_BOUND.get(self.primitive)
        is_pole = self.note.startswith(POLE)
        # d sqrt(x) = 0.5 / sqrt(x): the division stands in no line of the user's.
        is_derived = self.direction == "backward" and (cause or is_pole)
        if is_derived and not is_too_large:
            return (
                "The derivative of this line is infinite there: guard the operand, not the result; "
                f"jnp.where passes a NaN of the branch not taken on. Write {_GUARD}."
            )
        if is_pole:
            kind = "A division by zero" if "pow" in self.primitive else "A pole of this function"
            return f"{kind}: guard the operand, not the result. Write {_GUARD}."
        if cause is not None and not is_too_large:
            return (
                f"Usually {cause}: bound the operand, as by adding a small number, or guard it: "
                f"{_GUARD}."
            )
        # From here on the number was too large, which a wider dtype or a smaller scale cures.
        if dtype not in ("float16", "bfloat16") and not dtype.startswith("float8"):
            return f"Too large for {dtype}: bound the operands."
        if self.direction == "backward":
            if not self.source and self.output_type == f"{dtype}[]":
                # The cast to float32 that ampx puts behind a loss, turned round.
                return (
                    f"The loss is {dtype}. Its backward pass begins with the loss scale in that "
                    "dtype: compute the loss in float32."
                )
            return "Lower the loss scale, or keep this operation in float32."
        return "Keep this operation in float32 (ampx.float_function, ampx.Rules) or scale down."

    def __str__(self) -> str:
        if self.primitive in (ARGUMENT, PROGRAM):
            return self.note
        sizes = zip(self.input_types, self.largest_inputs, strict=True)
        lines = [
            f"{self.primitive} gives {self.kind} in the {self.direction} pass",
            f"  written in  {self.source and PurePath(self.source).name or 'no line of your own'}",
            self.scope and f"  scope       {self.scope}",
            f"  iteration   {', '.join(map(str, self.iterations))}" if self.iterations else "",
            *(f"  operand     {kind}, {_format_largest('', size)}" for kind, size in sizes),
            f"  result      {self.output_type}, {_format_largest('finite ', self.largest_output)}",
            self.note and f"  note        {self.note}",
        ]
        return "\n".join(line for line in lines if line)


def _format_largest(finite: str, size: float | None) -> str:
    return "nothing finite" if size is None else f"{finite}up to {size:.6g}"


@dataclasses.dataclass(frozen=True)
class OverflowReport:
    """Where the infinities and NaNs in the results of a call come from; print it.

    It is true if there is an equation, or an argument, to blame.

    Attributes:
      first: the first of those; None if there is none.
      reached: paths of the results that are not finite.
      written: where the program wrote the first infinity itself, such as a mask, if nothing else
        reached the results; else None. That is not an overflow, so `first` is None then.
      has_float16: whether the program computes in float16, where small numbers become zero.
      vanished: an infinity that an equation made before `first`, and that became finite again, such
        as `rsqrt(inf)`, which is 0; None if there was none. It reached no result by itself, but
        `first` may come of it.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import trace_overflow
      >>> print(trace_overflow(lambda x: {"y": 2 * x})(jnp.ones(2)))
      All results are finite.
      >>> trace_overflow(lambda x: {"y": 1 / x})(jnp.zeros(2)).reached
      ('y',)
    """

    first: OverflowRecord | None
    reached: tuple[str, ...] = ()
    written: OverflowRecord | None = None
    has_float16: bool = False
    vanished: OverflowRecord | None = None

    __repr__ = show_fields
    _repr_html_ = show_table
    __rich_console__ = show_rich

    def __bool__(self) -> bool:
        return self.first is not None

    def __str__(self) -> str:
        if not self.reached:
            # A run that does not learn may underflow, or divide by an infinity: zeros are finite.
            more = (
                " The program computes in float16, which rounds numbers below 3e-8 to zero, and an "
                "infinity on the way may have become zero, as in a norm layer: "
                "ampx.numerics_report counts both."
            )
            return "All results are finite." + (more if self.has_float16 else "")
        reached = join_first((path or "the result" for path in self.reached), most=3)
        if self.first is not None:
            told = f"{self.first}\n  reaches     {reached}\n{self.first.hint}"
            if self.vanished is None:
                return told
            begin = "Begin here. This came first, became finite again, and may be the cause:"
            return f"{told}\n\n{begin}\n{self.vanished}\n{self.vanished.hint}"
        source = self.written and PurePath(self.written.source).name
        place = f"in {source}" if source else "into the program"
        return f"No overflow: infinities that are written {place} reach {reached}."
