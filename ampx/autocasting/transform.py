"""autocast: per-operation mixed precision as a function transformation.

A call of `autocast(fun)` goes through three steps, which this module strings together:

    trace      fun and its arguments, as they are       ->  a jaxpr, all in float32
    plan       planner.py, by tables.py and rules.py    ->  a precision for each equation
    rewrite    rewriter.py                              ->  a jaxpr with conversions, which JAX runs

Because the result is a jaxpr, JAX's own evaluator runs it and `jit`, `grad`, `vmap` and `shard_map`
work on it as on any program; name scopes and source lines stay. `fun` is traced at every call, as
by `jax.grad`, since an earlier trace would hold the arrays that `fun` closed over then. What is
kept from call to call are plans and rewritten bodies, found by the jaxprs that JAX caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, ParamSpec, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ampx.autocasting.float8 import Dots, Float8, as_float8
from ampx.autocasting.marks import active_half_dtype, as_written, tracing_for
from ampx.autocasting.planner import warn_of_hidden_functions
from ampx.autocasting.plans import PrecisionPlan, Settings
from ampx.autocasting.rewriter import Rewriter
from ampx.autocasting.rules import DEFAULT_RULES, Rules, check_rules
from ampx.autocasting.values import Demand, describe_input
from ampx.checking import as_bool, as_dtype, check_choice
from ampx.function_checks import check_callable, takes_function_alone
from ampx.jaxprs import pure_calls, reading
from ampx.jaxprs.pure_calls import PureCall, as_function_of_arrays, unfix
from ampx.jaxprs.reading import Jaxpr
from ampx.jaxprs.sharing import is_differentiated, share_bodies

Output = Literal["as_is", "original"]
CustomVjp = Literal["transform", "opaque"]
P = ParamSpec("P")
R = TypeVar("R")


# One rewriter for equal settings, since it holds the plans. A program may make new rules at every
# call, so no more than 64 rewriters are kept alive.
@functools.lru_cache(maxsize=64)
def _make_rewriter(settings: Settings) -> Rewriter:
    return Rewriter(settings)


class Traced(NamedTuple):
    """A call of a function, traced and planned.

    Attributes:
      jaxpr: of the function, over its flat arrays, in the dtypes of the trace.
      plan: of that jaxpr.
      rewriter: makes the jaxpr that computes as planned.
      arrays: the arrays among the arguments, in the jaxpr's order.
      structure: tree structure of (result, state of nnx modules).
    """

    jaxpr: Jaxpr
    plan: PrecisionPlan
    rewriter: Rewriter
    arrays: list[Any]
    structure: Any

    def run(self) -> Any:
        """Computes the result and the new state of nnx modules, as planned."""
        rewritten = self.rewriter.rewrite(self.jaxpr, self.plan)
        if is_differentiated(self.arrays):
            rewritten = share_bodies(rewritten)
        results = reading.evaluate(rewritten, *self.arrays)
        # A result that is written into the jaxpr comes as a number, as Python's `True`.
        arrays = [r if isinstance(r, jax.Array) else jnp.asarray(r) for r in results]
        return unfix(jax.tree.unflatten(self.structure, arrays))


def trace_and_plan(call: PureCall, settings: Settings, output: Output) -> Traced:
    """Traces a call in the dtypes it is given and plans its precision."""
    of_arrays, arrays = as_function_of_arrays(call)
    # float64 arrays of numpy become float32 here, as in any JAX function.
    arrays = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
    with tracing_for(settings.half_dtype):
        jaxpr, shapes = reading.trace(of_arrays, *arrays)
    results, state = (jax.tree.leaves(part) for part in shapes)
    of_results = Demand.KEEP if output == "as_is" else Demand.PIN_FLOAT32
    # What a module writes, such as batch statistics, is stored between steps: in its own dtype.
    demands = [of_results] * len(results) + [Demand.PIN_FLOAT32] * len(state)
    inputs = [describe_input(var.aval) for var in reading.open_jaxpr(jaxpr).invars]
    rewriter = _make_rewriter(settings)
    plan = rewriter.planner.plan(jaxpr, inputs, demands)
    warn_of_hidden_functions(jaxpr, plan)
    return Traced(jaxpr, plan, rewriter, arrays, jax.tree.structure(shapes))


def make_settings(
    half_dtype: DTypeLike,
    rules: Rules,
    output: Output,
    custom_vjp: CustomVjp,
    dots: Float8 | Dots | None = None,
) -> Settings:
    """Checks what the user chose and makes settings of it.

    Raises:
      ValueError: for a dtype that is not half, an unknown choice, or rules about float8 without
        `dots`.
      TypeError: if `rules` are not rules, or `dots` is of another type.
    """
    half = as_dtype("half_dtype", half_dtype, "half")
    check_choice("output", output, get_args(Output))
    check_choice("custom_vjp", custom_vjp, get_args(CustomVjp))
    rules, float8 = check_rules(rules), as_float8(dots)
    if float8 is None and any(entry.precision == "float8" for entry in rules.entries):
        raise ValueError(
            "rules name products for float8, but dots is None: give dots='float8', or another "
            "recipe, beside them"
        )
    return Settings(half, rules, custom_vjp, float8)


class _Decorator(functools.partial[Any]):
    """Autocast with settings and no function yet; `with` is torch's way, and named as wrong."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "ampx.autocast is no context: it transforms a function. In the place of "
            "`with ampx.autocast(...): loss = loss_fn(params, batch)` write "
            "loss = ampx.autocast(loss_fn, ...)(params, batch)"
        )

    def __exit__(self, *error: object) -> None:
        """Is looked up by `with` before it enters, and never reached."""


@overload
def autocast(
    fun: Callable[P, R],
    *,
    half_dtype: DTypeLike = ...,
    rules: Rules = ...,
    enabled: bool = ...,
    output: Output = ...,
    custom_vjp: CustomVjp = ...,
    dots: Float8 | Dots | None = ...,
) -> Callable[P, R]: ...


@overload
def autocast(
    *,
    half_dtype: DTypeLike = ...,
    rules: Rules = ...,
    enabled: bool = ...,
    output: Output = ...,
    custom_vjp: CustomVjp = ...,
    dots: Float8 | Dots | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@takes_function_alone
def autocast(
    fun: Callable[..., Any] | None = None,
    *,
    half_dtype: DTypeLike = jnp.bfloat16,
    rules: Rules = DEFAULT_RULES,
    enabled: bool = True,
    output: Output = "as_is",
    custom_vjp: CustomVjp = "transform",
    dots: Float8 | Dots | None = None,
) -> Callable[..., Any]:
    """Runs each operation of `fun` in the precision that suits it: O1 as a transformation.

    `fun` is traced as it stands, in the dtypes of its arguments. Then each equation of its jaxpr is
    given a precision: matrix products and convolutions run in half, reductions, exponentials and
    roots in float32, an operation with several operands in the widest of them, and the rest follows
    its operand. What is only read in float32 is computed in float32, so softmax, norms and
    variances are exact from their inputs on. The rewrite enters jit, scan, while, cond, remat,
    shard_map, custom_jvp and custom_vjp. float32 arguments get float32 gradients.

    Args:
      fun: a function of pytrees; anything that is not an array is passed on as it is. Like `jit`,
        it must not branch in Python on the values of its arrays. Left out, as in
        `@ampx.autocast(half_dtype="fp16")`, a decorator with these settings is returned.
      half_dtype: bfloat16, or float16 (which needs a loss scale); also as a word, such as "bf16".
      rules: which operations run in what; see `ampx.Rules`.
      enabled: if False, `fun` runs as written, inside another autocast too.
      output: `"as_is"` gives outputs in the dtype they were computed in, `"original"` in the dtypes
        that `fun` has without autocast.
      custom_vjp: `"transform"` runs a custom rule, forward and backward, under autocast too;
        `"opaque"` calls functions with a custom_vjp in their traced dtypes.
      dots: `"float8"`, or an `ampx.Float8` with a recipe, runs the matrix products in float8 that
        rules do not keep in half, forward and backward. Batched ones stay half, such as attention
        scores, and those with a size that is no multiple of 16. Differentiate the function that
        autocast gives, in reverse mode; forward mode raises a TypeError.

    Returns:
      A function with the signature of `fun`. It composes with every transformation; jit it, or what
      it is part of, for speed: called alone it is traced at every call, as `jax.grad` does.
      Without `fun`, a decorator that makes such a function.

    Raises:
      ValueError: if `half_dtype` is not half, for an unknown choice, or for rules about float8
        without `dots`.
      TypeError: if `fun` is no function, `rules` are not rules, `enabled` is no bool, or `dots` is
        of another type.

    References:
      `torch.autocast`; Apex O1 (`apex.amp.initialize(opt_level="O1")`).

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
      >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
      >>> half_loss = ampx.autocast(loss)
      >>> half_loss(w, x).dtype.name, jax.jit(jax.grad(half_loss))(w, x).dtype.name
      ('float32', 'float32')
      >>> @ampx.autocast(half_dtype="fp16")
      ... def product(w, x):
      ...     return x @ w
      >>> product(w, x).dtype.name
      'float16'
    """
    settings = make_settings(half_dtype, rules, output, custom_vjp, dots)
    enabled = as_bool("enabled", enabled)
    if fun is None:
        return _Decorator(
            autocast,
            half_dtype=settings.half_dtype,
            rules=rules,
            enabled=enabled,
            output=output,
            custom_vjp=custom_vjp,
            dots=settings.dots,
        )
    check_callable("fun", fun, "fun(*args)")

    @functools.wraps(fun)
    def at_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        if not enabled:
            return (
                fun(*args, **kwargs)
                if active_half_dtype() is None
                else as_written(fun, *args, **kwargs)
            )

        call = pure_calls.as_pure_call(fun, args, kwargs)

        def run(*operands: Any) -> Any:
            return trace_and_plan(call._replace(operands=operands), settings, output).run()

        # The outer autocast traces this call now. What the inner one rewrote is marked as it is
        # written, so that the outer one leaves it alone: of two, the inner decides.
        nested = active_half_dtype() is not None
        result, state = as_written(run, *call.operands) if nested else run(*call.operands)
        call.write_back(state)
        return result

    return at_mixed_precision
