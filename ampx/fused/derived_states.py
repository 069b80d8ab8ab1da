"""The states of `ampx.fused.fuse`: optax's own, of which one part bears a mark.

    state of optax.rmsprop(...):        (ScaleByRmsState(nu), EmptyState())
    state of fuse(optax.rmsprop(...)):  (DerivedScaleByRmsState(nu), EmptyState())

The marked class is made out of the one at hand, and has its fields. So both states have the same
leaves at the same paths, and checkpoints go both ways. The mark also tells how many tuples around
it belong to the same transformation (see `ampx.updates.tails.takes_tail`).
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ampx.trees import is_named_tuple
from ampx.updates.tails import find_tail_mark


class BareState(NamedTuple):
    """Around a bare state, in which nothing can be marked: it has no NamedTuple.

    `inner_state`: that of the transformation which `fuse` was given.
    """

    inner_state: Any


class _MarkedClass(type):
    """The class of all marked classes, by which pickles know them: no module has them by name."""


class _Marked(metaclass=_MarkedClass):
    """What all marked classes have in common.

    Attributes:
      unmarked: the class that was marked.
      tail_levels: see `ampx.updates.tails.TakesTail`.
      prefers_branch: whether XLA runs the transformation with fewer bytes as it is written.
    """

    __slots__ = ()
    unmarked: Any
    tail_levels: int
    prefers_branch: bool


def mark_derived(state: Any, *, prefers_branch: bool) -> Any:
    """Marks the first NamedTuple in the state of a whole transformation that was given to `fuse`.

    It is looked for in the tuples that chains make, and nowhere else.
    """

    def mark(part: Any, level: int) -> Any:
        if not is_named_tuple(part):
            return None
        return _marked_class(type(part), level, prefers_branch)._make(part)

    marked = _change_first(state, mark)
    return mark(BareState(state), 0) if marked is None else marked


def find_derived(state: Any) -> _Marked | None:
    """The marked part of the state of a whole transformation in `fuse`; None if it has no rules."""
    part = find_tail_mark(state)
    return part if isinstance(part, _Marked) else None


def unmark_derived(state: Any) -> Any:
    """The state as it was before `mark_derived`."""

    def unmark(part: Any, level: int) -> Any:
        is_mark = isinstance(part, _Marked) and part.tail_levels == level
        return part.unmarked._make(part) if is_mark else None

    plain = _change_first(state, unmark)
    if plain is None:
        return state
    return plain.inner_state if type(plain) is BareState else plain


def _change_first(node: Any, change: Callable[[Any, int], Any], level: int = 0) -> Any:
    """The node with one part changed, the first of which `change(part, level)` is not None.

    `level` counts the tuples around it. None if there is none.
    """
    changed = change(node, level)
    if changed is not None or type(node) is not tuple:
        return changed
    for place, part in enumerate(node):
        changed = _change_first(part, change, level + 1)
        if changed is not None:
            return (*node[:place], changed, *node[place + 1 :])
    return None


@functools.cache  # to JAX, states of two classes are two structures
def _marked_class(kind: Any, levels: int, prefers_branch: bool) -> Any:
    marks = {"unmarked": kind, "tail_levels": levels, "prefers_branch": prefers_branch}
    own = {"__slots__": (), "__module__": __name__, "__doc__": kind.__doc__}
    bases = (kind,) if issubclass(kind, _Marked) else (_Marked, kind)  # `fuse` inside of `fuse`
    return type(f"Derived{kind.__name__}", bases, own | marks)


def _reduce(kind: Any) -> tuple[Any, ...]:
    return _marked_class, (kind.unmarked, kind.tail_levels, kind.prefers_branch)


copyreg.pickle(_MarkedClass, _reduce)
