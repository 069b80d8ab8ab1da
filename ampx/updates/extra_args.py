"""optax's extra arguments: who takes which, and what its functions read of a state.

An optax transformation may take arguments beside gradients, state and parameters: the loss as
`value`, a function as `value_fn`. Wrappers hand all of them on, and each transformation takes its
own. Two of optax's conventions are kept only by most of its transformations:

    all extra arguments are accepted, unknown ones ignored    not by `optax.contrib.sam`
    a function of a state is given the state that it is for   a wrapper's state hides that state

`accept_extra_args` and `schedule_free_field` make up for these. Since unknown arguments are
ignored, a misspelled setting would be, too: `check_spelling` refuses it where ampx has settings.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import optax


def accept_extra_args(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`optax.with_extra_args_support`, which also heeds what `update` can take.

    A plain `GradientTransformation` gets no extra arguments. One that claims to take them gets
    those that the signature of its `update` names, and all of them if there is a `**`.

    Args:
      tx: any transformation, also an object of a class of one's own with `init` and `update`.
    """
    is_optax = isinstance(tx, optax.GradientTransformation)
    if is_optax and not isinstance(tx, optax.GradientTransformationExtraArgs):
        return optax.with_extra_args_support(tx)
    found = _find_argument_names(tx.update)
    if found is None:
        if is_optax:
            return tx
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    names: frozenset[str] = found

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        known = {name: value for name, value in extra_args.items() if name in names}
        return tx.update(updates, state, params, **known)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _find_argument_names(update: Any) -> frozenset[str] | None:
    """The names of the arguments beyond (updates, state, params); None if there is no limit."""
    try:
        parameters = list(inspect.signature(update).parameters.values())
    except (TypeError, ValueError):  # a callable that has no signature to read
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(p.name for p in parameters[3:] if p.kind in by_name)


def check_spelling(given: Iterable[str], settings: Iterable[str]) -> None:
    """Refuses extra arguments that are nearly called as a setting of the same function.

    Args:
      given: names of the extra arguments.
      settings: names of the function's own arguments.

    Raises:
      TypeError: for the first such name.
    """
    for name in given:
        if close := difflib.get_close_matches(name.lower(), list(settings), n=1, cutoff=0.7):
            raise TypeError(
                f"got the argument {name!r}, which is not known here: did you mean {close[0]!r}? "
                "What is given by another name is for the optimizer, which ignores what it does "
                "not know"
            )


@contextlib.contextmanager
def explain_refused(names: Iterable[str]) -> Iterator[None]:
    """Adds the way out to the error of a transformation, deep inside, that refuses an argument.

    Around the outermost transformation `accept_extra_args` sees its signature. One inside
    `optax.chain` is hidden in a closure, and optax hands it every argument.

    Args:
      names: the extra arguments that are handed in.
    """
    try:
        yield
    except TypeError as error:
        said = str(error)
        refused = [name for name in names if f"unexpected keyword argument '{name}'" in said]
        if not refused:
            raise
        raise TypeError(
            "a transformation inside the optimizer does not take the extra argument "
            f"{refused[0]!r}, which a GradResult or a train step hands in ({said}): give "
            "optax.GradientTransformation(inside.init, inside.update) in its place, or that of the "
            "whole optimizer if nothing in it takes extra arguments; it gets none then"
        ) from error


def schedule_free_field(name: str) -> Any:
    """A property of a wrapper's state: that field of the one `optax.contrib.schedule_free` inside.

    `optax.contrib.schedule_free_eval_params(state, params)` reads `state.b1` and `state.z`. With
    these properties it takes a wrapper's state as it takes that of the bare optimizer. They are no
    fields: `jax.tree` and checkpoints do not see them.
    """

    def find(state: Any) -> Any:
        found = optax.tree.get(state.inner_state, "ScheduleFreeState")
        if found is None:
            raise AttributeError(
                f"{type(state).__name__} has no {name!r}: there is no optax.contrib.schedule_free "
                "inside"
            )
        return getattr(found, name)

    return property(find)
