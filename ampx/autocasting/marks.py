"""Marks that a traced function carries: regions that autocast treats as their owner said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.jaxprs import pure_calls
from ampx.jaxprs.pure_calls import is_array, split_arrays

# Names of jitted regions: grad, vmap, scan and remat all keep them.
NATIVE_MARK = "ampx_as_written"
RELABEL_MARK = "ampx_half_under_the_name_of_float32"
PROMOTE_MARK = "ampx_widest"
# The dtype of the autocast that traces now. Part of jit's cache key, so that what was traced under
# one autocast is never reused under another or outside.
_tracing_for = jax.make_user_context(None)


def tracing_for(half_dtype: Any) -> Any:
    """A context in which functions are traced for autocast to `half_dtype`."""
    return _tracing_for(half_dtype)


def active_half_dtype() -> Any:
    """The half dtype of the autocast that traces now, or None."""
    return _tracing_for.value


def as_written(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fun` in a region that autocast leaves alone; nothing inside sees an autocast."""
    with _tracing_for(None):
        return _marked(NATIVE_MARK, fun, args, kwargs)


def _marked(mark: str, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `fun` as a jitted region of this name, which the rewriter opens again."""
    call = pure_calls.pure_call(fun, args, kwargs)
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


def _cast(tree: Any, dtype: Any, only: Any = None) -> Any:
    """Casts floating arrays; nnx objects stay, for a copy would lose what is written to it."""

    def cast_leaf(leaf: Any) -> Any:
        floating = is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not floating or (only is not None and leaf.dtype != only):
            return leaf
        return lax.convert_element_type(leaf, dtype)

    return jax.tree.map(cast_leaf, tree, is_leaf=flax_modules.is_nnx_object)


def half_function(fun: Callable[..., Any]) -> Callable[..., Any]:
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

    @functools.wraps(fun)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        half = active_half_dtype()
        if half is None:
            return fun(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), half, only=jnp.float32)
        result = as_written(fun, *args, **kwargs)
        return jax.tree.map(
            lambda leaf: _relabelled(leaf) if is_array(leaf) and leaf.dtype == half else leaf,
            result,
        )

    return in_half


def _relabel(leaf: Any) -> Any:
    return lax.convert_element_type(leaf, jnp.float32)


_relabel.__name__ = _relabel.__qualname__ = RELABEL_MARK
_relabelled = jax.jit(_relabel)


def float_function(fun: Callable[..., Any]) -> Callable[..., Any]:
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

    @functools.wraps(fun)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        if active_half_dtype() is None:
            return fun(*args, **kwargs)
        return as_written(fun, *args, **kwargs)

    return in_float32


def promote_function(fun: Callable[..., Any]) -> Callable[..., Any]:
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

    @functools.wraps(fun)
    def in_widest(*args: Any, **kwargs: Any) -> Any:
        if active_half_dtype() is None:
            return fun(*args, **kwargs)

        return _marked(PROMOTE_MARK, fun, args, kwargs)

    return in_widest


def banned_function(fun: Callable[..., Any], instead: str = "") -> Callable[..., Any]:
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

    @functools.wraps(fun)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if active_half_dtype() is None:
            return fun(*args, **kwargs)
        name = getattr(fun, "__name__", repr(fun))
        advice = instead or "call it outside, or wrap it in ampx.float_function"
        raise RuntimeError(f"{name} is banned under autocast: {advice}")

    return refused


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
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating, got {dtype}")
    converted = _cast(tree, dtype)
    if dtype != jnp.float32:
        return converted
    # reduce_precision to float32's own size changes no number, and is opaque to autocast.
    return jax.tree.map(
        lambda leaf: (
            lax.reduce_precision(leaf, exponent_bits=8, mantissa_bits=23)
            if is_array(leaf) and leaf.dtype == jnp.float32
            else leaf
        ),
        converted,
    )
