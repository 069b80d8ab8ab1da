"""Adagrad: each element's rate falls with all the squares that it has seen.

The sum s never forgets, unlike the means of Adam, so steps shrink as 1 / sqrt(t):

    s = s + g**2                 from `initial_accumulator_value` on
    d = g / sqrt(s + eps)
    p = p - learning_rate d
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ampx.fused.coefficients import check_offsets, check_rate
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class AdagradCoefficients(NamedTuple):
    """The numbers of a step.

    Attributes:
      eps: added under the root.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: None where nothing decays.
    """

    eps: Any
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def adagrad_direction(
    g: jax.Array, p: Any, slots: Slots, h: AdagradCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The gradient over the root of all squares so far."""
    del p
    # sum_of_squares: of the parameter's shape, never smaller than it was.
    # The sum ends at the largest number instead of infinity, where g / sqrt(inf) is 0 as well.
    # A select and no minimum, for which XLA on CPUs sums twice, out of a copy of the old slot.
    total = slots[0] + g * g
    total = jnp.where(total == jnp.inf, jnp.finfo(g.dtype).max, total)
    squares = ops.keep(total, slots[0])
    # An element that has seen no gradient, with eps = 0, would be 0 / 0.
    return jnp.where(squares > 0, g / ops.sqrt(squares + h.eps), jnp.zeros_like(g)), (squares,)


ADAGRAD_RULE = UpdateRule(adagrad_direction, ("sum_of_squares",))


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: ArrayLike = 0.1,
    eps: ArrayLike = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad in one pass: `optax.adagrad` with its signature, its numbers and its state.

    Args:
      learning_rate: see `adam`.
      initial_accumulator_value: what the sum of squares begins with.
      eps: added under the root.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: for a number that is none; in `update`, for complex parameters.

    References:
      Duchi et al., JMLR 12, 2011; `optax.adagrad`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.adagrad(1.0, initial_accumulator_value=0.0, eps=0.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> updates
      Array([-1.,  1.], dtype=float32)
    """
    check_rate(learning_rate)
    check_offsets(initial_accumulator_value=initial_accumulator_value, eps=eps)
    reference = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    coefficients = AdagradCoefficients(eps)
    return fused_transformation(
        ADAGRAD_RULE, reference, lambda count: coefficients, learning_rate=learning_rate
    )
