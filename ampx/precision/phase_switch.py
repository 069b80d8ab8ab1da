"""One of several functions, chosen by the phase of a precision schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ampx.trees import wider_dtype


def switch_by_phase(each: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One function of several: that of the argument `phase`, chosen while tracing if it is an int.

    Args:
      each: the function of each phase. Their results differ in dtypes at most, and are then given
        the widest.
    """

    def at_phase(*args: Any, phase: jax.Array | int | None = None, **kwargs: Any) -> Any:
        if phase is None:
            raise TypeError(
                "with a PrecisionSchedule as its policy this function needs to know the phase: "
                "call it with phase=ampx.precision_phase(opt_state)"
            )
        if len(each) == 1:
            return each[0](*args, **kwargs)
        if isinstance(phase, int):
            if not 0 <= phase < len(each):
                raise ValueError(f"phase must be that of one of {len(each)} phases, got {phase}")
            return each[phase](*args, **kwargs)
        # With jit the switch finds what eval_shape has traced.
        calls = [jax.jit(lambda fun=fun: fun(*args, **kwargs), inline=True) for fun in each]
        results = [jax.eval_shape(call) for call in calls]
        first, *others = map(jax.tree.structure, results)
        for number, structure in enumerate(others, 1):
            if structure != first:
                raise ValueError(
                    f"the loss function returns {first} in phase 0 and {structure} in phase "
                    f"{number}: what it returns may depend on the precision in dtypes only"
                )
        widest = jax.tree.map(lambda *leaves: _widest([leaf.dtype for leaf in leaves]), *results)

        def cast(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: jax.tree.map(lambda leaf, to: leaf.astype(to), call(), widest)

        return jax.lax.switch(phase, [cast(call) for call in calls])

    return at_phase


def _widest(dtypes: Sequence[Any]) -> Any:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = widest if dtype == widest else wider_dtype(widest, dtype)
    return widest
