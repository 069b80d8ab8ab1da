"""What a loss function is called with, told where the call fails.

Which arguments a loss gets depends on what its caller was given: a key, a mask, a model state. The
error of Python or flax names a function of the user's alone, and not what was left out above.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ampx.flax_modules import is_nnx_object


@contextlib.contextmanager
def explain_failed_call(
    loss_fn: Callable[..., Any], batch: Any, named: Sequence[str], *, has_key: bool
) -> Iterator[None]:
    """Adds to an error what `loss_fn` was called with, if it does not take that.

    Args:
      loss_fn: the user's function.
      batch: what it gets as the batch.
      named: the names of what it gets by name.
      has_key: whether it gets a random key behind the batch.

    Raises:
      TypeError: if the loss takes other arguments than these, or has changed an nnx object in the
        batch.
    """
    try:
        yield
    except TypeError as error:
        names = ["params", "batch", *["key"] * has_key]
        if (mismatch := _find_mismatch(loss_fn, names, named)) is None:
            raise
        words = ", ".join([*names, *(f"{name}={name}" for name in named)])
        raise TypeError(
            f"the loss is called as loss_fn({words}), and does not take that ({mismatch})"
            f"{_find_remedy(loss_fn, batch, named, has_key)}"
        ) from error
    except Exception as error:
        # flax's own class, which is looked at by name since flax may be missing.
        if type(error).__name__ != "TraceContextError" or not _holds_nnx_object(batch):
            raise
        raise TypeError(
            "the loss changes an nnx object in the batch, such as the counts of an nnx.Rngs, which "
            "would be lost: keep it in the model, whose state comes back, or give key=, and make "
            "nnx.Rngs(key) in the loss"
        ) from error


def _find_mismatch(
    loss_fn: Callable[..., Any], names: list[str], named: Sequence[str]
) -> str | None:
    """Why a function does not take as many arguments, and these by name; None if it does."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a callable that has no signature to read
        return None
    try:
        signature.bind(*names, **dict.fromkeys(named))
    except TypeError as mismatch:
        return str(mismatch)
    return None


def _find_remedy(
    loss_fn: Callable[..., Any], batch: Any, named: Sequence[str], has_key: bool
) -> str:
    if isinstance(batch, tuple | list | dict) and _takes_parts(loss_fn, batch, named, has_key):
        first = "x = batch['x']" if isinstance(batch, dict) else "x, y = batch"
        return f": the batch is one argument, so take its parts inside of the loss, as in {first}"
    other = ["params", "batch", *["key"] * (not has_key)]
    if _find_mismatch(loss_fn, other, named) is not None:
        return ""
    if has_key:
        return ": leave key= out, or let it take a key"
    return (
        ": to give it a key, call the gradient, or init of a train step, with "
        "key=jax.random.key(0); a step with a state of flax takes key= itself"
    )


def _takes_parts(
    loss_fn: Callable[..., Any], batch: Any, named: Sequence[str], has_key: bool
) -> bool:
    """Whether a loss takes each part of a batch as an argument, and none that is called a key."""
    names = ["params", *batch, *["key"] * has_key]
    if len(batch) < 2 or _find_mismatch(loss_fn, names, named) is not None:
        return False
    last = list(inspect.signature(loss_fn).parameters)[len(names) - 1]
    return has_key or not any(word in last for word in ("key", "rng", "seed"))


def _holds_nnx_object(tree: Any) -> bool:
    return any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)))
