"""Switches that each device starts only when it has ended those before.

Where switches read different values, nothing tells a compiler in which order they run. Their
branches may hold collectives, for which devices wait for each other; in a pipeline's tick:

  device 0    forward [all-reduce with 1]    exchange [permute with all]
  device 1    exchange [permute with all]    forward [all-reduce with 0]      wait for ever

XLA starts operations in one order on all devices. But on a CPU a switch that has begun may go on in
another thread, and the next one starts meanwhile: its collectives may come first on one device and
last on another. XLA keeps an order for sure only between a value and what is computed from it. So
each switch says which branch it ran, and the next one adds the high bits of that to its own number:
they are 0, but no compiler knows.

Where branches write a part of a large buffer, as those of a pipeline do, nothing else of it must be
touched: see `switch_in_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.mesh_axes import mark_varying, varying_axes

# Whether XLA lets several branches of a switch write one buffer where it is.
_WRITES_IN_PLACE = jax.__version_info__ >= (0, 11, 2)


def first_turn(axis_name: str) -> jax.Array:
    """Makes the turn of the first switch: int32[], 0."""
    return mark_varying(jnp.zeros((), jnp.int32), (axis_name,))


def switch_in_turn(
    turn: jax.Array, index: jax.Array, branches: Sequence[Callable[..., Any]], *operands: Any
) -> tuple[jax.Array, Any]:
    """Runs a `lax.switch` after that which returned `turn`.

    Args:
      turn: int32[], from `first_turn` or from the switch before: the number of a branch.
      index: int32[], which branch to run; it must be the number of one.
      branches: as `lax.switch` takes them.
      *operands: what the branches are called with.

    Returns:
      The turn of the next switch, and what the branch returned.
    """
    axes = sorted(varying_axes(index))

    def numbered(number: int, branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: (mark_varying(jnp.int32(number), axes), branch(*operands))

    branches = [numbered(number, branch) for number, branch in enumerate(branches)]
    # No switch has so many branches. The shift is here, and not where a turn is returned: so the
    # same operations are before every switch, and XLA compiles them once.
    return lax.switch(index + (turn >> 16), branches, *operands)


def switch_in_place(
    turn: jax.Array,
    numbers: np.ndarray,
    look_up: Callable[[np.ndarray], jax.Array],
    idle: Callable[[], Any],
    branches: Sequence[Callable[[Any], tuple[Any, Any]]],
    buffers: Any,
) -> tuple[jax.Array, Any, Any]:
    """Runs, after the switch that returned `turn`, a branch that writes into buffers, or none.

    With jax before 0.11.2 the compiler copies all buffers in each branch of a switch, and once more
    behind it. It does not if there are two branches and the first one hands the buffers on. So
    there each branch gets a switch of its own, with nothing to do as the other branch.

    Args:
      turn: int32[], from `first_turn` or from the switch before.
      numbers: a table, in which 0 stands for `idle`, else the number of a branch, counted from 1.
      look_up: finds the entry of such a table that is due, int32[].
      idle: makes in `idle()` the results of a device that has nothing to do.
      branches: each makes in `branch(buffers)` results of the same types, and the buffers anew.
      buffers: a pytree of arrays, read by nobody afterwards.

    Returns:
      The turn of the next switch, the results, and the buffers.
    """
    if _WRITES_IN_PLACE:
        choices = [lambda buffers: (idle(), buffers), *branches]
        turn, (results, buffers) = switch_in_turn(turn, look_up(numbers), choices, buffers)
        return turn, results, buffers

    def one(branch: Callable[[Any], tuple[Any, Any]]) -> list[Callable[..., Any]]:
        return [lambda results, buffers: (results, buffers), lambda _, buffers: branch(buffers)]

    results = idle()
    for number, branch in enumerate(branches, 1):
        # Compared in the table, so that all of these switches find their number in the same way.
        is_due = look_up((numbers == number).astype(np.int32))
        turn, (results, buffers) = switch_in_turn(turn, is_due, one(branch), results, buffers)
    return turn, results, buffers
