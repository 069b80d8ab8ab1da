"""Calls one of several functions, by the phase that a precision schedule is in.

Each phase of a schedule has a gradient function of its own, at its own precision. Here they become
one function with the argument `phase`, an int32 scalar on the device:

    phase --> lax.switch --+-- 0: gradients in half      --+
                           +-- 1: gradients in float32   --+--> GradResult, widest dtypes of all

So one compiled step holds all phases, the host need not know which is on, and a `lax.scan` over
steps can change the phase in the middle. The switch is around the gradients, not inside the loss:
differentiated through, a `cond` keeps in memory what each branch would save for its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.checking import as_int
from ampx.trees import wider_dtype


def switch_by_phase(each: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Makes one function of several, which calls that of the argument `phase`.

    Args:
      each: the function of each phase. Their results may differ in dtypes, and nothing else.

    Returns:
      A function of the arguments of each, and of `phase`. If that is an int, the function is chosen
      while tracing, and its result is returned as it is. If it is an array, the choice is made on
      the device, and results are cast to the widest dtype of all phases.
    """

    def at_phase(*args: Any, phase: jax.Array | int | None = None, **kwargs: Any) -> Any:
        if phase is None:
            raise TypeError(
                "with a PrecisionSchedule as its policy this function needs to know the phase: "
                "call it with phase=ampx.precision_phase(opt_state)"
            )
        phase = _as_phase(phase)
        if len(each) == 1:
            return each[0](*args, **kwargs)
        if isinstance(phase, int):
            if not 0 <= phase < len(each):
                raise ValueError(f"phase must be in [0, {len(each)}), got {phase}")
            return each[phase](*args, **kwargs)
        # Each function is traced twice, by eval_shape for its dtypes and by the switch. As jitted
        # functions of no arguments the second trace finds the first in JAX's cache; `inline` leaves
        # no call in the program. `fun=fun` binds the function of this iteration.
        calls = [jax.jit(lambda fun=fun: fun(*args, **kwargs), inline=True) for fun in each]
        results = [jax.eval_shape(call) for call in calls]
        first, *others = map(jax.tree.structure, results)
        for number, structure in enumerate(others, 1):
            if structure != first:
                raise ValueError(
                    f"the loss function returns {first} in phase 0 and {structure} in phase "
                    f"{number}: return one structure at every precision, only dtypes may differ"
                )
        # Branches of a switch must return one type.
        widest = jax.tree.map(lambda *leaves: _widest([leaf.dtype for leaf in leaves]), *results)

        def cast(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: jax.tree.map(lambda leaf, to: leaf.astype(to), call(), widest)

        return jax.lax.switch(phase, [cast(call) for call in calls])

    return at_phase


def as_number_of_phase(number: Any, count: int) -> int:
    """The number of one of `count` phases, of a schedule or of none, as Python's int.

    Raises:
      TypeError: for what is no int.
      IndexError: if there is no such phase.
    """
    number = as_int("number", number)
    if not 0 <= number < count:
        raise IndexError(f"number must be that of one of {count} phases, got {number}")
    return number


def _as_phase(phase: Any) -> Any:
    """A phase as Python's int, if it is known, or as an integer scalar.

    Raises:
      TypeError: for what is no integer scalar.
    """
    if isinstance(phase, jax.Array):
        if jnp.issubdtype(phase.dtype, np.integer) and phase.shape == ():
            return phase
        raise TypeError(f"phase must be an integer scalar, got {jax.typeof(phase)}")
    return as_int("phase", phase)


def _widest(dtypes: Sequence[Any]) -> Any:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = widest if dtype == widest else wider_dtype(widest, dtype)
    return widest
