"""What a fused optimizer is: the arithmetic of one parameter, and where its numbers come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

Slots = tuple[jax.Array, ...]


class Operations(NamedTuple):
    """What a rule cannot say in the same way everywhere.

    Attributes:
      sqrt: a square root; not every kernel language has one.
      keep: a function of (new slot, old slot), the one that stays. A rule must go on with what it
        returns. If it went on with the new one, both would have to be in memory at once, and XLA
        would copy every moment.
      spread: from slots and coefficients that are one number a parameter to what the arrays of a
        parameter are combined with; in a flat buffer there is one number for each parameter.
    """

    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt
    keep: Callable[[jax.Array, jax.Array], jax.Array] = lambda new, old: new
    spread: Callable[[jax.Array], jax.Array] = lambda numbers: numbers


# (gradient, parameter or None, slots, coefficients, operations) -> (direction, new slots)
Direction = Callable[..., tuple[jax.Array, Slots]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The arithmetic of an optimizer for one parameter: a pure function, the same everywhere.

    XLA and the Pallas kernels run this one function.

    Attributes:
      direction: a function of (gradient, parameter, slots, coefficients, operations), all in one
        wide dtype, to what the step is a multiple of and the new slots. Element by element, but
        for slots that are one number a parameter. The parameter may be None if nothing decays.
      slots: names of the state that a parameter has, as optax names it.
      direction_again: a function of (parameter, new slots, coefficients, operations) to the same
        direction. A rule that has one multiplies its direction by the trust ratio, the norm of the
        parameter over that of the direction: norms are known only after all else is written, and
        to work the direction out twice costs no more memory traffic than to keep it.
      needs_squares: give `direction` the sum of the parameter's squared gradients, as the
        coefficient `squares`.
    """

    direction: Direction
    slots: tuple[str, ...] = ()
    direction_again: Callable[..., jax.Array] | None = None
    needs_squares: bool = False


class Advanced(NamedTuple):
    """What an optimizer knows before it sees a gradient.

    Attributes:
      coefficients: a NamedTuple of numbers. `step_size` is what the direction is multiplied by;
        `factor` multiplies the gradient first; None is left out of the arithmetic.
      state: the state after the step, its slots still the old ones.
    """

    coefficients: Any
    state: Any


def scheduled(value: Any, state: Any) -> tuple[Any, Any]:
    """A number that may be a schedule, and the state of that schedule one step later."""
    if not callable(value):
        return value, state
    if isinstance(state, optax.MaskedState):
        number, inner = scheduled(value, state.inner_state)
        return number, optax.MaskedState(inner)
    return value(state.count), state._replace(count=optax.safe_increment(state.count))


def unless_zero(weight_decay: Any) -> Any:
    """The decay, or None where there is none and parameters need not be read."""
    is_number = isinstance(weight_decay, int | float)
    return None if is_number and weight_decay == 0 else weight_decay


def step_size(rate: Any) -> Any:
    """What a direction is multiplied by; optax takes a rate of None as none at all."""
    return None if rate is None else -rate


class Packed(NamedTuple):
    """The coefficients of a step in one vector, shared by all parameters that have the same.

    XLA merges the loops of parameters that share an operand, one vector, but not of those that
    share nothing but many scalars; a kernel takes it as it is.

    Attributes:
      vector: the numbers that are not None.
      numbers: the NamedTuple of coefficients, read out of the vector.
      is_bad: bool scalar, whether one of them is not finite.
    """

    vector: jax.Array
    numbers: Any
    is_bad: jax.Array


def packed(coefficients: Any, dtype: Any) -> Packed:
    """Puts coefficients into one vector."""
    given = [number for number in coefficients if number is not None]
    vector = lax.optimization_barrier(jnp.stack([jnp.asarray(n, dtype) for n in given]))
    return Packed(vector, read(coefficients, vector), ~jnp.all(jnp.isfinite(vector)))


def read(coefficients: Any, vector: Iterable[Any]) -> Any:
    """A NamedTuple with the numbers of a vector in the places of those that are not None."""
    numbers = iter(vector)
    return type(coefficients)(*[None if n is None else next(numbers) for n in coefficients])
