"""The scalars of one step (decays, bias corrections, learning rate), packed into one vector.

An optimizer declares its scalars as a NamedTuple. The last three fields are the same everywhere:

    factor        multiplies the gradient first: 1 / loss scale, times a clip
    step_size     multiplies the direction last: minus the learning rate
    weight_decay  of this parameter

A field of None takes no part in the arithmetic: without weight decay, for example, the parameter
is not read at all to compute an update.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ampx.checking import check_hyperparameter
from ampx.tree_checks import check_scalar

# From the number of the step, int32 from 1 on, or None where the optimizer does not count, to a
# NamedTuple of the optimizer's own numbers; the three shared fields are filled in later.
CoefficientsAt = Callable[[Any], Any]

# What every vector of coefficients ends with.
SHARED = ("factor", "step_size", "weight_decay")


@functools.cache
def numbers_class(names: tuple[str, ...]) -> Any:
    """A NamedTuple of coefficients by these names and the shared ones.

    One class for the same names: to JAX an instance of another class is another tree, for which a
    jitted function is compiled anew.
    """
    return collections.namedtuple("Numbers", [*names, *SHARED])  # noqa: PYI024


def check_decays(*, corrects_bias: bool = False, **decays: Any) -> None:
    """Refuses decays that are not from 0 to 1, or to below 1 where a bias is corrected.

    With a decay of 1 a mean stays 0 for ever, and what undoes its bias is 1 / (1 - 1**t), infinite.
    """
    for name, decay in decays.items():
        if corrects_bias:
            check_hyperparameter(name, decay, least=0, below=1)
        else:
            check_hyperparameter(name, decay, least=0, most=1)


def check_offsets(**offsets: Any) -> None:
    """Refuses what is added to a root, or under it, unless it is finite and not negative."""
    for name, offset in offsets.items():
        check_hyperparameter(name, offset, least=0)


def check_rate(learning_rate: Any, weight_decay: Any = 0.0) -> None:
    """Refuses a learning rate or a weight decay that is neither a finite number nor a schedule."""
    check_hyperparameter("learning_rate", learning_rate, may_be_schedule=True)
    check_hyperparameter("weight_decay", weight_decay, may_be_schedule=True)


def advance(
    state: tuple[Any, ...],
    own_part: int,
    coefficients_at: CoefficientsAt,
    *,
    learning_rate: Any,
    weight_decay: Any = None,
    decay_part: int | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """All that an optimizer knows before it sees a gradient.

    Args:
      state: that of optax's chain, whose last part belongs to the learning rate.
      own_part: the place in it of the optimizer's own part: the slots, and perhaps a count.
      coefficients_at: the optimizer's own numbers in a step.
      learning_rate: a number, a schedule, or None for a step of plus the direction, as in optax.
      weight_decay: a number, a schedule, or None.
      decay_part: the place of the part that belongs to the weight decay; None if none does.

    Returns:
      The coefficients, and the state after the step, its slots still the old ones.
    """
    parts = list(state)
    own = parts[own_part]
    count = None
    # `hasattr` would not do: every tuple has a method of this name.
    if "count" in own._fields:
        count = optax.safe_increment(own.count)
        parts[own_part] = own._replace(count=count)
    rate, parts[-1] = _scheduled(learning_rate, parts[-1])
    if decay_part is not None:
        weight_decay, parts[decay_part] = _scheduled(weight_decay, parts[decay_part])
    # Schedules take part as traced scalars; a plain number stays a Python float, in double
    # precision until it is packed.
    coefficients = coefficients_at(count)._replace(
        step_size=None if rate is None else -rate, weight_decay=_unless_zero(weight_decay)
    )
    return coefficients, tuple(parts)


def _scheduled(value: Any, state: Any) -> tuple[Any, Any]:
    """A number that may be a schedule, and the state of that schedule one step later."""
    if not callable(value):
        return value, state
    # `add_decayed_weights` with a mask keeps its schedule's count in an `optax.masked`.
    if isinstance(state, optax.MaskedState):
        number, inner = _scheduled(value, state.inner_state)
        return number, optax.MaskedState(inner)
    # optax's schedules count from 0: the first step sees `value(0)`.
    number = value(state.count)
    check_scalar("what learning_rate or weight_decay returns", number)
    return number, state._replace(count=optax.safe_increment(state.count))


def _unless_zero(weight_decay: Any) -> Any:
    """The decay, or None where it is known to be none and parameters need not be read."""
    is_number = isinstance(weight_decay, int | float)
    return None if is_number and weight_decay == 0 else weight_decay


class PackedCoefficients(NamedTuple):
    """The coefficients of a step, shared by all parameters that have the same.

    Those that are computed in the step stand in a vector. XLA merges the loops over parameters that
    share an operand that is an array. It does not merge those that share nothing but scalars. A
    kernel takes the vector as it is.

    Attributes:
      vector: float32 or float64 of shape (numbers,), those that are not None, in the order of the
        fields.
      numbers: the NamedTuple of coefficients again, each a scalar of the vector's dtype. What is
        known while tracing is a constant there, which costs the compiler less to read than an
        element of a vector. All else is read out of the vector, and so is `step_size`: each
        parameter's loop reads it, so all these loops share the vector. Where they are not to be
        merged, all are scalars of their own.
      is_bad: bool scalar, whether one of them is not finite; False where nobody is to know.
    """

    vector: jax.Array
    numbers: Any
    is_bad: jax.Array


def pack_coefficients(
    coefficients: Any, dtype: Any, *, is_guarded: bool = True, are_merged: bool = True
) -> PackedCoefficients:
    """Puts the coefficients that are not None into one vector.

    Args:
      coefficients: the optimizer's NamedTuple of them.
      dtype: that of the arithmetic.
      is_guarded: whether one that is not finite is told, see `UpdateRule`.
      are_merged: whether XLA is to merge the loops over parameters. Where they end in reductions it
        should not: on GPUs it writes what is to be reduced out, for all parameters at once.
    """
    # Which fields are None is static: it decides what is traced.
    given = [number for number in coefficients if number is not None]
    scalars = [jnp.asarray(number, dtype) for number in given]
    # XLA simplifies a slice of a concatenation to the operand that it cuts out, and would see
    # scalars again. The barrier hides the concatenation from it.
    vector = lax.optimization_barrier(jnp.stack(scalars))
    # As arrays they are constants once. As plain numbers each parameter would have its own.
    known = {
        name: lax.full((), number, dtype)
        for name, number in coefficients._asdict().items()
        if isinstance(number, int | float) and name != "step_size"
    }
    numbers = unpack_coefficients(coefficients, vector if are_merged else scalars)
    numbers = numbers._replace(**known)
    is_bad = jnp.any(~jnp.isfinite(vector)) if is_guarded else jnp.zeros((), bool)
    return PackedCoefficients(vector, numbers, is_bad)


def unpack_coefficients(coefficients: Any, vector: Iterable[Any]) -> Any:
    """The NamedTuple with numbers of a vector in the places of those that are not None."""
    numbers = iter(vector)
    return type(coefficients)(*[None if n is None else next(numbers) for n in coefficients])
