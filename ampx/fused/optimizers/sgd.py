"""Stochastic gradient descent, with momentum or without.

The direction d is the gradient itself, or comes from a trace m of all gradients:

    d = g                                        without momentum, and without any state
    m = momentum m + g;    d = m                 with momentum ("heavy ball")
    m = momentum m + g;    d = g + momentum m    Nesterov: m as this gradient once more makes it
    p = p - learning_rate d
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from ampx.checking import as_bool, check_hyperparameter
from ampx.fused.coefficients import check_rate
from ampx.fused.moments.formats import SlotDtype, array_dtype, as_slot_dtype
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class SgdCoefficients(NamedTuple):
    """The numbers of a step.

    Attributes:
      momentum: decay of the trace; None without one.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: always None: SGD has none.
    """

    momentum: Any
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def sgd_direction(
    g: jax.Array,
    p: Any,
    slots: Slots,
    h: SgdCoefficients,
    ops: Operations,
    *,
    nesterov: bool = False,
) -> tuple[jax.Array, Slots]:
    """The gradient, or the trace of gradients, or Nesterov's look ahead of it."""
    del p
    # Static: which of the three it is, is known while tracing.
    if not slots:
        return g, ()
    # A sum and not a mean: with a momentum of 0.9 a gradient that stays the same counts ten times.
    trace = ops.keep(g + h.momentum * slots[0], slots[0])
    return g + h.momentum * trace if nesterov else trace, (trace,)


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: SlotDtype = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD in one pass: `optax.sgd` with its signature, its numbers and its state.

    Args:
      learning_rate: see `adam`.
      momentum: decay of the trace of gradients; None keeps no trace.
      nesterov: Nesterov's momentum.
      accumulator_dtype: dtype in which the trace is kept, or `"int8"`; see `mu_dtype` of `adam`.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: for a number that is none; in `update`, for complex parameters.

    References:
      Sutskever et al., On the importance of initialization and momentum, 2013; `optax.sgd`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.sgd(0.5, momentum=0.9)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> updates
      Array([-1.5,  2. ], dtype=float32)
    """
    check_rate(learning_rate)
    if momentum is not None:
        check_hyperparameter("momentum", momentum)
    nesterov = as_bool("nesterov", nesterov)
    accumulator_dtype = as_slot_dtype("accumulator_dtype", accumulator_dtype)
    reference = optax.sgd(learning_rate, momentum, nesterov, array_dtype(accumulator_dtype))
    # Made once for an optimizer: rules are static arguments of a `jit`, and no two partials are
    # equal.
    direction = functools.partial(sgd_direction, nesterov=nesterov)
    rule = UpdateRule(direction, () if momentum is None else ("trace",))
    coefficients = SgdCoefficients(momentum)
    return fused_transformation(
        rule,
        reference,
        lambda count: coefficients,
        learning_rate=learning_rate,
        slot_dtypes={} if momentum is None else {"trace": accumulator_dtype},
    )
