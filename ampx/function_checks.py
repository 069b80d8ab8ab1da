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
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import optax

from ampx.checking import describe, shorten
from ampx.flax_modules import is_unbound_linen

F = TypeVar("F", bound=Callable[..., Any])

_YIELDS = "whose body runs only when it is taken from: return the result, and yield nothing"
_AWAITS = "whose body runs only when it is awaited: write it with def, and without await"


def takes_function_alone(taker: F) -> F:
    """Words the error of `taker(fun, *args)`, where `taker(fun)(*args)` is right."""
    name = taker.__name__

    @functools.wraps(taker)
    def with_one_function(*args: Any, **settings: Any) -> Any:
        if len(args) > 1:
            raise TypeError(
                f"{name} takes a function, and what it gives takes the arguments of that: write "
                f"{name}(fun)(*args). Settings are given by name"
            )
        return taker(*args, **settings)

    return cast(F, with_one_function)


def check_callable(name: str, value: Any, call: str) -> None:
    """Refuses what is no function; `call` says how it is called, as in "loss_fn(params, batch)".

    Raises:
      TypeError: for what cannot be called; for dtypes and other classes; for what `refuse_lazy`
        refuses.
    """
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be a function, called as {call}, got an optax transformation: give the "
            "function first and the optimizer behind it"
        )
    if isinstance(value, str):
        raise TypeError(
            f"{name} must be a function, called as {call}, {describe(value)}: give a setting by "
            "the name of its argument, such as half_dtype="
        )
    if not callable(value):
        raise TypeError(f"{name} must be a function, called as {call}, {describe(value)}")
    if is_unbound_linen(value):
        raise TypeError(
            f"{name} must be a function, called as {call}, got a linen module of type "
            f"{type(value).__name__}, which holds no parameters: give a function that calls "
            'module.apply({"params": params}, x), or module.apply itself'
        )
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
