"""Adadelta."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.rules import Advanced, Operations, Rule, Slots, scheduled, step_size, unless_zero
from ampx.fused.transformation import fused_transformation


class AdadeltaCoefficients(NamedTuple):
    """The numbers of a step and the rate's complement."""

    factor: Any
    step_size: Any
    weight_decay: Any
    rho: Any
    rho_rest: Any
    eps: Any


def adadelta_direction(
    g: jax.Array, p: Any, slots: Slots, h: AdadeltaCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The gradient in units of past steps; decay is a part of the gradient here."""
    e_g, e_x = slots
    if h.weight_decay is not None:
        g = g + h.weight_decay * p
    e_g = ops.keep(h.rho * e_g + h.rho_rest * (g * g), e_g)
    direction = ops.sqrt(e_x + h.eps) / ops.sqrt(e_g + h.eps) * g
    e_x = ops.keep(h.rho * e_x + h.rho_rest * (direction * direction), e_x)
    return direction, (e_g, e_x)


ADADELTA_RULE = Rule(adadelta_direction, ("e_g", "e_x"))


def adadelta(
    learning_rate: optax.ScalarOrSchedule | None = None,
    rho: ArrayLike = 0.9,
    eps: ArrayLike = 1e-6,
    weight_decay: ArrayLike | optax.Schedule = 0.0,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adadelta in one pass: `optax.adadelta` with its signature, its numbers and its state.

    Args:
      learning_rate: see `adam`. With None the update has the sign of the gradient, as in optax,
        and is to be negated.
      rho: decay of both means of squares.
      eps: added under both roots.
      weight_decay: a number or a schedule; added to the gradient, not decoupled.
      weight_decay_mask: as `mask` of `adamw`.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: in `update`, for complex parameters.
      ValueError: in `update`, without params where they decay.

    References:
      Zeiler, https://arxiv.org/abs/1212.5701; `optax.adadelta`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.adadelta(1.0, eps=0.01)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> print(f"{updates[0]:.3f}, {updates[1]:.3f}")
      -0.314, 0.315
    """
    reference = optax.adadelta(learning_rate, rho, eps, weight_decay, per_buffer(weight_decay_mask))

    def advance(state: Any) -> Advanced:
        decay_state, own, rate_state = state
        rate, rate_state = scheduled(learning_rate, rate_state)
        decay, decay_state = scheduled(weight_decay, decay_state)
        coefficients = AdadeltaCoefficients(
            factor=None,
            step_size=step_size(rate),
            weight_decay=unless_zero(decay),
            rho=rho,
            rho_rest=1 - rho,
            eps=eps,
        )
        return Advanced(coefficients, (decay_state, own, rate_state))

    return fused_transformation(ADADELTA_RULE, reference, advance, weight_decay_mask)
