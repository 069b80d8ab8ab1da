"""Marked functions: calls that autocast treats as whoever marked them asked for.

Outside of autocast a mark changes nothing. Under autocast the call is traced as a jitted function
whose name is the mark. grad, vmap, scan and remat keep the name of a jitted function, so the
planner finds it whatever is around it, and the rewriter opens the call again:

    mark            made by                                 what autocast does
    NATIVE_MARK     float_function, half_function,          leaves the region as it was traced
                    autocast(enabled=False) and nested
    PROMOTE_MARK    promote_function                        plans it with one precision for all
    RELABEL_MARK    half_function, around its results       drops the conversion to float32 inside

`half_function` needs the third because the program around it was traced in float32. Its operands
are converted to half while it is traced, so that a kernel sees half; its results are converted back
to float32, so that the program around type-checks. The rewriter drops that last conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.checking import as_dtype, check_word
from ampx.function_checks import check_callable
from ampx.jaxprs import pure_calls
from ampx.jaxprs.pure_calls import is_array, split_arrays
from ampx.tree_checks import check_memory

P = ParamSpec("P")
R = TypeVar("R")
# Names of jitted regions.
NATIVE_MARK = "ampx_as_written"
RELABEL_MARK = "ampx_half_under_the_name_of_float32"
PROMOTE_MARK = "ampx_widest"
# The dtype of the autocast that traces now. Part of jit's cache key, so that what was traced under
# one autocast is never reused under another or outside.
_tracing_for = jax.make_user_context(None)


def tracing_for(half_dtype: Any) -> Any:
    """Makes a context in which functions are traced for autocast to `half_dtype`."""
    return _tracing_for(half_dtype)


def active_half_dtype() -> Any:
    """The half dtype of the autocast that traces now, or None."""
    return _tracing_for.value


def as_written(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls `fun` in a region that autocast leaves alone; nothing inside sees an autocast."""
    with _tracing_for(None):
        return _call_marked(NATIVE_MARK, fun, args, kwargs)


def _call_marked(mark: str, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `fun` as a jitted region of this name, which the rewriter opens again.

    Arrays are the region's operands and results. Everything else among arguments and results goes
    around it; what nnx modules among the arguments write is written back.
    """
    call = pure_calls.as_pure_call(fun, args, kwargs)
    arrays, merge = split_arrays(call.operands)
    merge_results: Callable[[Any], Any] = lambda results: results  # noqa: E731

    def region(*arrays: Any) -> Any:
        nonlocal merge_results
        results, merge_results = split_arrays(call.fun(*merge(arrays)))
        return results

    region.__name__ = region.__qualname__ = mark
    results = jax.jit(region)(*arrays)
    result, state = merge_results(results)
    call.write_back(state)
    return result


def _cast_floating(tree: Any, dtype: Any, only: Any = None) -> Any:
    """Casts floating arrays, or only those of one dtype.

    nnx objects stay as they are: a cast makes a copy, and what is written to a copy is lost.
    """

    def cast_leaf(leaf: Any) -> Any:
        floating = is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not floating or (only is not None and leaf.dtype != only):
            return leaf
        return lax.convert_element_type(leaf, dtype)

    return jax.tree.map(cast_leaf, tree, is_leaf=flax_modules.is_nnx_object)


def _under_autocast(fun: Callable[P, R], run: Callable[[Any, Any, Any], Any]) -> Callable[P, R]:
    """`fun` outside of autocast, and `run(half_dtype, args, kwargs)` where autocast traces."""
    check_callable("fun", fun, "fun(*args)")

    @functools.wraps(fun)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        half = active_half_dtype()
        return fun(*args, **kwargs) if half is None else run(half, args, kwargs)

    return wrapped


def half_function(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, run in half under autocast: it gets its float32 arrays in half and is left as written.

    The function is traced with half arguments, so that a kernel that demands half gets it. Outside
    autocast nothing changes. As a decorator, or around a function of somebody else. It works under
    jit, grad, vmap, scan and remat, inside or outside of autocast.

    Args:
      fun: a function of pytrees of arrays (and anything else, which is passed on; nnx modules keep
        the dtypes that they hold).

    Returns:
      A function with the same signature. To code around it, half results look like float32.

    References:
      `apex.amp.half_function`, `torch.amp.custom_fwd(cast_inputs=...)`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> half_exp = ampx.half_function(jnp.exp)
      >>> ampx.autocast(half_exp)(jnp.ones(2)).dtype.name, half_exp(jnp.ones(2)).dtype.name
      ('bfloat16', 'float32')
    """

    def run_in_half(half: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _cast_floating((args, kwargs), half, only=jnp.float32)
        result = as_written(fun, *args, **kwargs)
        return jax.tree.map(
            lambda leaf: _relabel_half(leaf) if is_array(leaf) and leaf.dtype == half else leaf,
            result,
        )

    return _under_autocast(fun, run_in_half)


def _relabel(leaf: Any) -> Any:
    return lax.convert_element_type(leaf, jnp.float32)


_relabel.__name__ = _relabel.__qualname__ = RELABEL_MARK
_relabel_half = jax.jit(_relabel)


def float_function(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, run as written under autocast: with its arguments and all operations in float32.

    Args:
      fun: a function of pytrees of arrays (and anything else, which is passed on).

    Returns:
      A function with the same signature.

    References:
      `apex.amp.float_function`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> exact = ampx.float_function(jnp.matmul)
      >>> ampx.autocast(exact)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype.name
      'float32'
    """
    return _under_autocast(fun, lambda _half, args, kwargs: as_written(fun, *args, **kwargs))


def promote_function(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, run in the widest dtype of its arguments under autocast.

    With all of its float32 arrays in half it runs in half, whatever the rules say of the operations
    inside; with one of them in float32, all of it runs in float32.

    Args:
      fun: a function of pytrees of arrays (and anything else, which is passed on).

    Returns:
      A function with the same signature.

    References:
      `apex.amp.promote_function`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> distance = ampx.promote_function(lambda a, b: jnp.exp(a - b))
      >>> def f(x):
      ...     h = x @ x
      ...     return distance(h, h), distance(h, x)
      >>> [y.dtype.name for y in ampx.autocast(f)(jnp.ones((2, 2)))]
      ['bfloat16', 'float32']
    """
    return _under_autocast(
        fun, lambda _half, args, kwargs: _call_marked(PROMOTE_MARK, fun, args, kwargs)
    )


def banned_function(fun: Callable[P, R], instead: str = "") -> Callable[P, R]:
    """`fun`, refused under autocast.

    For functions that give wrong numbers in half, such as a cross entropy of probabilities.

    Args:
      fun: any function.
      instead: what to use in its place, for the error.

    Returns:
      A function with the same signature. It raises `RuntimeError` when autocast traces it.

    References:
      `apex/amp/lists/functional_overrides.py`, which bans `binary_cross_entropy`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> loss = ampx.banned_function(jnp.log, "use a loss of logits")
      >>> try:
      ...     ampx.autocast(loss)(jnp.ones(2))
      ... except RuntimeError as error:
      ...     print(error)
      log is banned under autocast: use a loss of logits
    """
    check_word("instead", instead)

    def refuse(_half: Any, _args: Any, _kwargs: Any) -> Any:
        name = getattr(fun, "__name__", repr(fun))
        advice = instead or "call it outside, or wrap it in ampx.float_function"
        raise RuntimeError(f"{name} is banned under autocast: {advice}")

    return _under_autocast(fun, refuse)


def cast(tree: Any, dtype: DTypeLike) -> Any:
    """Converts floating arrays to `dtype` and keeps autocast from changing that.

    In a program traced in float32, `x.astype(jnp.float32)` says nothing, since it already is. This
    says it: what reads the result gets `dtype`, under autocast too.

    Args:
      tree: pytree of arrays. Integers and booleans pass unchanged.
      dtype: a floating dtype.

    Returns:
      The same tree in `dtype`.

    Raises:
      ValueError: if `dtype` is not floating.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> f = ampx.autocast(lambda x: ampx.cast(x @ x, jnp.float32) * 2)
      >>> f(jnp.ones((2, 2))).dtype.name
      'float32'
    """
    dtype = as_dtype("dtype", dtype, "floating")
    check_memory("tree", tree)
    converted = _cast_floating(tree, dtype)
    if dtype != jnp.float32:
        return converted
    # A float32 -> float32 conversion would leave no equation. reduce_precision to float32's own
    # size (8 bits of exponent, 23 of mantissa) changes no number, leaves an equation, and is opaque
    # to autocast, so both sides of it are float32.
    return jax.tree.map(
        lambda leaf: (
            lax.reduce_precision(leaf, exponent_bits=8, mantissa_bits=23)
            if is_array(leaf) and leaf.dtype == jnp.float32
            else leaf
        ),
        converted,
    )
