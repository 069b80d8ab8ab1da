"""Checks of functions that a caller gives: called, they run, and give what they compute.

A generator, or a coroutine, does nothing when it is called: its body runs later, out of reach of
autocast and of the trace of a report. Whoever asked would be told that nothing was found.

    called          gives                    its body runs
    def             the result               now
    def with yield  a generator              when that is taken from, if ever
    async def       a coroutine              when that is awaited, if ever
    class           an object                not at all: its `__call__` is another call's
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import numpy as np

from ampx.checking import describe, shorten

_YIELDS = "whose body runs only when it is taken from: return the result, and yield nothing"
_AWAITS = "whose body runs only when it is awaited: write it with def, and without await"


def check_callable(name: str, value: Any, call: str) -> None:
    """Refuses what is no function; `call` says how it is called, as in "loss_fn(params, batch)".

    Raises:
      TypeError: for what cannot be called; for dtypes and other classes; for what `refuse_lazy`
        refuses.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, called as {call}, {describe(value)}")
    # jnp.bfloat16 can be called, but is meant as a dtype, as in `@ampx.autocast(jnp.bfloat16)`.
    # A class of flax's layers has a field of that name.
    has_dtype = isinstance(getattr(value, "dtype", None), np.dtype)
    if isinstance(value, type) and (has_dtype or issubclass(value, np.generic)):
        raise TypeError(
            f"{name} must be a function, called as {call}, got the dtype {value.__name__}: give a "
            "dtype by the name of its argument, such as half_dtype="
        )
    refuse_lazy(name, value)
    if isinstance(inner := _without_partials(value), type):
        raise TypeError(
            f"{name} must be a function, called as {call}, got the class {inner.__qualname__}, "
            "whose call makes an object and runs none of its methods: give a method, or an object "
            "that can be called"
        )


def refuse_lazy(name: str, value: Any) -> None:
    """Refuses a function whose call runs nothing: one with `yield`, or with `async`.

    Partial functions, methods and objects that can be called are looked into.

    Raises:
      TypeError: for such a function.
    """
    inner = _without_partials(value)
    # Of an object its class decides what a call runs.
    for fun in (inner, inspect.getattr_static(type(inner), "__call__", None)):
        if inspect.isgeneratorfunction(fun) or inspect.isasyncgenfunction(fun):
            raise TypeError(f"{name} must run when it is called, got {shorten(value)}, {_YIELDS}")
        if inspect.iscoroutinefunction(fun):
            raise TypeError(f"{name} must run when it is called, got {shorten(value)}, {_AWAITS}")


def refuse_lazy_result(fun: Any, result: Any) -> None:
    """Refuses what has run nothing yet, as the result of a function that nobody could look into.

    Raises:
      TypeError: for a generator or a coroutine.
    """
    advice = _AWAITS if isinstance(result, types.CoroutineType) else _YIELDS
    if isinstance(result, types.CoroutineType | types.GeneratorType | types.AsyncGeneratorType):
        raise TypeError(
            f"{getattr(fun, '__qualname__', fun)} must run when it is called, and returned "
            f"{shorten(result)}, {advice}"
        )


def _without_partials(value: Any) -> Any:
    while isinstance(value, functools.partial):
        value = value.func
    return value
