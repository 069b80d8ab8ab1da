"""trace_overflow: finds the equation where an infinity or a NaN in a result was born.

A loss scaler tells that a step overflowed, not where. Here the step is run up to three times:

    compiled               all results finite? Then there is nothing to report.
    equation by equation   what is not finite carries a blame (`overflow_blame`)
    the same, but calls compiled
                           for what is finite equation by equation, since the compiler joins
                           operations: what it does inside of a call shows at the end of that call

Results that are finite are left out of the second and third run, with all that only they need.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.autocasting.float8 import Dots, Float8
from ampx.autocasting.rules import DEFAULT_RULES, Rules
from ampx.autocasting.transform import CustomVjp, Output, make_settings, trace_and_plan
from ampx.diagnostics.overflow_blame import (
    COMPILED_ONLY,
    MASKING,
    BlamingWalk,
    CompiledWalk,
    choose_blame,
    find_flags,
)
from ampx.diagnostics.overflow_reports import OverflowReport
from ampx.function_checks import check_callable, takes_function_alone
from ampx.jaxprs import pure_calls, reading
from ampx.jaxprs.interpreter import Place
from ampx.jaxprs.pure_calls import PureCall, as_function_of_arrays, is_array
from ampx.jaxprs.reading import Jaxpr
from ampx.trees import path_name

P = ParamSpec("P")


@takes_function_alone
def trace_overflow(
    fun: Callable[P, Any],
    *,
    half_dtype: DTypeLike | None = None,
    rules: Rules = DEFAULT_RULES,
    output: Output = "as_is",
    custom_vjp: CustomVjp = "transform",
    dots: Float8 | Dots | None = None,
) -> Callable[P, OverflowReport]:
    """Finds the first equation whose infinity or NaN reached a result of a function.

    The call is compiled and run. If all of its results are finite, that is the report. Otherwise it
    is run again equation by equation, through jit, scan, while, cond, remat and custom
    derivatives. In loops every iteration is run compiled, and only the one in which something turns
    bad is looked into. Kernels and `shard_map` are blamed as a whole: of a data-parallel step trace
    what one device computes, `trace_overflow(jax.grad(loss_fn))(params, rows_of_one_device)`.

    Infinities that reach no result are not reported, nor are those that are written into the
    program, as a mask is; a NaN that is made of these is. An infinity that an operation such as
    `rsqrt` turned into 0 before something else went wrong is told beside it. What happens inside of
    a product in float8 is blamed on the line of the product, with a note. `fun` runs several
    times, with all of its prints and callbacks. No argument changes: what it writes to nnx modules
    is dropped.

    Args:
      fun: a loss, `jax.grad` of one, what `ampx.value_and_grad` or `ampx.train_step` gives, or any
        other function of pytrees. A train step that skips its update gives finite parameters; the
        `global_norm` in its report is still not finite, and is traced.
      half_dtype: run `fun` under `ampx.autocast` to this dtype; None runs it as it is.
      rules: as for `ampx.autocast`.
      output: as for `ampx.autocast`.
      custom_vjp: as for `ampx.autocast`.
      dots: as for `ampx.autocast`.

    Returns:
      A function with the signature of `fun` that gives an `OverflowReport`; print it. It runs the
      program, so it cannot be part of another: call it outside of jit.

    Raises:
      TypeError: for an argument that is traced or has no value.
      ValueError: for rules or `dots` without `half_dtype`, and as `ampx.autocast`.

    References:
      `transformers.debug_utils.DebugUnderflowOverflow`. `jax.debug_nans` stops at the first NaN,
      wanted or not.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> from ampx import trace_overflow
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         logits = x @ w
      ...     return jnp.sum(jax.nn.log_softmax(logits)[0])
      >>> w, x = jnp.full((8, 2), 100.0), jnp.full((4, 8), 100.0)
      >>> print(trace_overflow(jax.grad(loss))(w, x))
      All results are finite.
      >>> first = trace_overflow(loss, half_dtype=jnp.float16)(w, x).first
      >>> first.primitive, first.kind, first.scope, first.largest_inputs
      ('dot_general', 'inf', 'head', (100.0, 100.0))
    """
    check_callable("fun", fun, "fun(*args)")
    if half_dtype is None and rules != DEFAULT_RULES:
        raise ValueError("rules are those of autocast: give the half_dtype to cast to, too")
    if half_dtype is None and dots is not None:
        raise ValueError("dots is a setting of autocast: give the half_dtype of the rest, too")
    half = jnp.bfloat16 if half_dtype is None else half_dtype
    checked = make_settings(half, rules, output, custom_vjp, dots)
    settings = None if half_dtype is None else checked

    @functools.wraps(fun)
    def reported(*args: Any, **kwargs: Any) -> OverflowReport:
        with jax.debug_nans(False), jax.debug_infs(False):
            return _report(_trace_call(fun, args, kwargs, settings, output))

    return reported


class _Program(NamedTuple):
    """A call that was traced.

    Attributes:
      jaxpr: a function of the arrays among the arguments alone.
      arguments: name and array of each of its inputs.
      results: paths of its outputs: of the call's result, then of the nnx variables after it.
    """

    jaxpr: Jaxpr
    arguments: list[tuple[str, Any]]
    results: list[str]


def _trace_call(fun: Any, args: Any, kwargs: Any, settings: Any, output: Output) -> _Program:
    """Traces a call as a program.

    A Python number stays a number, which is written into the program: `f(x, inf)` would have a
    constant to blame. One that is not finite is made an array first, so that it is an argument with
    a name; unless the function needs a number.
    """
    # The arrays of a model are arguments, too, with names.
    fun, args = pure_calls.unbind(fun, args)
    call = pure_calls.as_pure_call(fun, args, kwargs)
    operands = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if _is_bad(leaf) else leaf, call.operands
    )
    names = _name_operands(fun, args, kwargs, call)
    if any(map(_is_bad, jax.tree.leaves(call.operands))):
        # A number may have to stay one: an order of a norm, what an `if` asks for, a static one.
        with contextlib.suppress(TypeError, ValueError):
            return _trace_program(call._replace(operands=operands), names, settings, output)
    return _trace_program(call, names, settings, output)


def _is_bad(leaf: Any) -> bool:
    return isinstance(leaf, float | complex | np.inexact) and not np.isfinite(leaf)


def _name_operands(fun: Any, args: Any, kwargs: Any, call: PureCall) -> list[str]:
    """Names the leaves of the operands of a call by the paths of its arguments."""
    leaves = jax.tree_util.tree_leaves_with_path(call.operands)
    if call.operands[0] is args:
        return [_name_argument(fun, path) for path, _ in leaves]
    # Before the arguments comes the state of the nnx objects among them.
    given, _ = jax.tree_util.tree_flatten_with_path(
        (args, kwargs), is_leaf=flax_modules.is_nnx_object
    )
    # Operand 0 is that state, with paths (place of the object, names of the variable ...); operand
    # i is leaf i - 1 of the arguments.
    return [
        _name_argument(fun, given[operand.idx - 1][0])
        if operand.idx
        else path_name(tuple(inside[1:]))
        for (operand, *inside), _ in leaves
    ]


def _trace_program(
    call: PureCall, leaf_names: Sequence[str], settings: Any, output: Output
) -> _Program:
    """Traces a call, under autocast if there are settings for it, and names its outputs."""
    leaves = jax.tree.leaves(call.operands)
    names = [name for name, leaf in zip(leaf_names, leaves, strict=True) if is_array(leaf)]
    of_arrays, arrays = as_function_of_arrays(call)
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"trace_overflow runs the program, so it needs the values of its arguments: {name} "
                f"is a {type(array).__name__}. Call it outside of jit, with arrays"
            )
    # JAX makes float32 of float64 here, as it does in the call itself.
    arrays = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
    if settings is None:
        jaxpr, shapes = reading.trace(of_arrays, *arrays)
    else:
        program = trace_and_plan(call, settings, output)
        jaxpr = program.rewriter.rewrite(program.jaxpr, program.plan)
        shapes = jax.tree.unflatten(program.structure, jaxpr.out_avals)
    result, state = map(jax.tree_util.tree_leaves_with_path, shapes)
    results = [path_name(path) for path, _ in result]
    results += [f"state/{path_name(path)}" for path, _ in state]
    return _Program(jaxpr, list(zip(names, arrays, strict=True)), results)


def _name_argument(fun: Any, path: Any) -> str:
    """Names a leaf of (positional arguments, keyword arguments): `"params/w"`.

    `path` begins with 0 and the place of a positional argument, or with 1 and a keyword. A builtin
    without a signature, and an argument of `*args`, has its place for a name.
    """
    kind, argument, *inside = path
    name = path_name((argument,))
    if not kind.idx:
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        if argument.idx < len(parameters):
            parameter = parameters[argument.idx]
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                name = parameter.name
    return "/".join(filter(None, (name, path_name(tuple(inside)))))


def _report(program: _Program) -> OverflowReport:
    """Runs a program, as often as need be, and reports on its results."""
    compiled = jax.jit(functools.partial(reading.evaluate, program.jaxpr))
    results = compiled(*(array for _, array in _copy_references(program.arguments)))
    is_bad = [any(find_flags(result)) for result in results]
    if not any(is_bad):
        return OverflowReport(None, has_float16=_has_float16(program.jaxpr))
    reached = tuple(itertools.compress(program.results, is_bad))
    for walk in (BlamingWalk(), CompiledWalk()):
        operands = [
            walk.take_argument(array, name) for name, array in _copy_references(program.arguments)
        ]
        values = walk.run(program.jaxpr, operands, Place(), is_bad)
        blame = choose_blame(value.remark for value in values)
        if blame is not None:
            break
    else:  # only the program as a whole overflows
        blame = walk.blame_here(Place(), [], results[is_bad.index(True)], COMPILED_ONLY)
    # The worst blame of all results is that of a mask: nothing has overflowed.
    if blame.rank <= MASKING:
        return OverflowReport(None, reached, blame.record)
    vanished = walk.find_vanished(blame)
    return OverflowReport(
        blame.record, reached, vanished=None if vanished is None else vanished.record
    )


def _has_float16(jaxpr: Jaxpr) -> bool:
    """Whether any equation of a program, or of a body in it, gives a float16 array."""
    eqns = reading.open_jaxpr(jaxpr).eqns
    return any(
        any(getattr(out.aval, "dtype", None) == jnp.float16 for out in eqn.outvars)
        or any(map(_has_float16, reading.inner_jaxprs(eqn)))
        for eqn in eqns
    )


def _copy_references(arguments: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Copies references among arguments, since a run writes to them and the caller has them too."""
    return [(name, jax.new_ref(a[...]) if isinstance(a, jax.Ref) else a) for name, a in arguments]
