"""An optimizer from a rule that a user wrote: what `ampx.fused.adagrad` has, for other formulas.

    direction(grad, param, slots, numbers, operations) -> (direction, new slots)

is all that a rule has to say. `from_rule` puts it behind optax's interface, and what holds for the
optimizers of `ampx.fused` holds for it: one loop over memory, the tail of `ampx.fused.apply`, the
skip, masters, shards and Pallas kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_hyperparameter
from ampx.function_checks import check_callable
from ampx.fused.coefficients import SHARED, check_rate, numbers_class
from ampx.fused.transformation import FusedRuleState, fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule
from ampx.tree_checks import check_scalar


def from_rule(
    direction: Callable[..., tuple[jax.Array, Mapping[str, jax.Array]]],
    learning_rate: optax.ScalarOrSchedule,
    *,
    slots: Mapping[str, Any] | None = None,
    numbers: Mapping[str, Any] | Callable[[jax.Array], Mapping[str, Any]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer in one pass out of its arithmetic for one parameter.

    `direction(grad, param, slots, numbers, operations)` works element by element, in float32 or
    wider, on a whole parameter or on a block of one:

    - `grad`: the gradient, unscaled and clipped already.
    - `param`: the parameter; None where `update` was given none.
    - `slots`: from name to what the optimizer keeps for the parameter, of its shape.
    - `numbers`: scalars of this step, as attributes: `numbers.decay`.
    - `operations`: `operations.sqrt(x)`, a square root for kernels, too; and `operations.keep(new,
      old)`, which gives the slot that stays: the old one on a skipped step. Go on with what it
      returns, and no moment has to be copied.

    It returns what the step is minus `learning_rate` times of, and the new slots by the same names.
    Finite slots and numbers and a finite square of the gradient must give finite slots: a loss
    scale asks for finite squares before a step is taken, and nobody asks for finite slots after it.

    Args:
      direction: the arithmetic. It may be traced several times, so it must be a pure function.
      learning_rate: a number or a schedule, a function of the number of steps done.
      slots: the number that each slot begins with, by name. A slot has the dtype of its parameter.
      numbers: further scalars by name, such as decays; or a function to them of the number of the
        step, an int32 scalar that begins at 1. They are rounded to the dtype of the arithmetic, so
        give `1 - decay` as a number of its own.

    Returns:
      An optax transformation with the state `(FusedRuleState(count, slots), ...)`.

    Raises:
      TypeError: for a rule that cannot be called, or what is no number; in `update`, for a rule
        that does not return its slots.
      ValueError: for a name that is no identifier or has a meaning of its own; in `update`, for a
        direction or a slot of another shape than the parameter's.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> def momentum(grad, param, slots, numbers, operations):
      ...     mean = operations.keep(numbers.decay * slots["mean"] + grad, slots["mean"])
      ...     return mean, {"mean": mean}
      >>> tx = ampx.fused.from_rule(momentum, 0.1, slots={"mean": 0.0}, numbers={"decay": 0.9})
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0]), tx.init(params), params)
      >>> updates
      Array([-0.1,  0.2], dtype=float32)
    """
    check_callable("direction", direction, "(grad, param, slots, numbers, operations)")
    check_rate(learning_rate)
    first = _check_names("slots", {} if slots is None else slots)
    for name, value in first.items():
        check_hyperparameter(f"slots[{name!r}]", value)
    numbers_at: Any = numbers
    if not callable(numbers):
        fixed = _check_names("numbers", {} if numbers is None else numbers)
        for name, value in fixed.items():
            check_hyperparameter(f"numbers[{name!r}]", value)
        numbers_at = lambda count: fixed  # noqa: E731
    names = tuple(first)

    def direction_of_slots(
        g: jax.Array, p: Any, kept: Slots, h: Any, operations: Operations
    ) -> tuple[jax.Array, Slots]:
        old = dict(zip(names, kept, strict=True))
        step, new = direction(g, p, dict(old), h, operations)
        _check_result(step, new, old, g)
        # Once more, for a rule that has forgotten it: a skip must leave each slot as it was.
        return step, tuple(operations.keep(new[name], old[name]) for name in names)

    def coefficients_at(count: Any) -> Any:
        found = _check_names("numbers", numbers_at(count))
        for name, value in found.items():
            check_scalar(f"numbers[{name!r}]", value)
        return numbers_class(tuple(found))(**found, **dict.fromkeys(SHARED))

    def init(params: Any) -> Any:
        kept = {
            name: jax.tree.map(lambda p, value=value: jnp.full_like(p, value), params)
            for name, value in first.items()
        }
        own = FusedRuleState(jnp.zeros((), jnp.int32), kept)
        return own, optax.scale_by_learning_rate(learning_rate).init(params)

    # What optax has of this optimizer: its state. Updates are the rule's.
    reference = optax.GradientTransformation(init, optax.identity().update)
    rule = UpdateRule(direction_of_slots, names)
    return fused_transformation(rule, reference, coefficients_at, learning_rate=learning_rate)


def _check_names(argument: str, given: Any) -> dict[str, Any]:
    """A dict of what was given by name.

    Raises:
      TypeError: for what is no mapping.
      ValueError: for a name that cannot be an attribute, or that a vector of numbers has already.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a dict from names, got {type(given).__name__}")
    for name in given:
        if not (isinstance(name, str) and name.isidentifier()) or name.startswith("_"):
            raise ValueError(f"{argument}: {name!r} is no name of an attribute, such as 'decay'")
        if argument == "numbers" and name in SHARED:
            raise ValueError(f"numbers: {name!r} has a meaning of its own: choose another name")
    return dict(given)


def _check_result(step: Any, new: Any, old: dict[str, jax.Array], grad: jax.Array) -> None:
    """Refuses what a rule returned, unless it is a direction and the slots that it was given."""
    if not isinstance(new, Mapping) or set(new) != set(old):
        got = sorted(new) if isinstance(new, Mapping) else type(new).__name__
        raise TypeError(
            f"direction must return (direction, slots) with the slots {sorted(old)}, got {got}"
        )
    for name, array in {"a direction": step, **{f"the slot {n!r}": new[n] for n in new}}.items():
        if jnp.shape(array) != grad.shape:
            raise ValueError(
                f"direction returned {name} of shape {jnp.shape(array)} for a parameter of shape "
                f"{grad.shape}: it must work element by element"
            )
