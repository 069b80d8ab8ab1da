"""Adadelta: steps in units of past steps, which cancel the units of the gradient.

    g   = g + weight_decay p
    e_g = rho e_g + (1 - rho) g**2                  mean of squared gradients
    d   = sqrt(e_x + eps) / sqrt(e_g + eps) * g     with the *old* e_x
    e_x = rho e_x + (1 - rho) d**2                  mean of squared steps
    p   = p - learning_rate d

At first e_x is 0, and eps alone sets the size of the step. `e_x` is the mean of steps before the
learning rate, as in the paper, which has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.coefficients import check_decays, check_offsets, check_rate
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class AdadeltaCoefficients(NamedTuple):
    """The numbers of a step.

    Attributes:
      rho: decay of both means.
      rho_rest: 1 - rho, see `AdamCoefficients`.
      eps: added under both roots.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: None where nothing decays.
    """

    rho: Any
    rho_rest: Any
    eps: Any
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def adadelta_direction(
    g: jax.Array, p: Any, slots: Slots, h: AdadeltaCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The gradient in units of past steps; decay is a part of the gradient here."""
    e_g, e_x = slots
    # An L2 penalty, divided by the root like the gradient itself: not AdamW's decoupled decay.
    if h.weight_decay is not None:
        g = g + h.weight_decay * p
    e_g = ops.keep(h.rho * e_g + h.rho_rest * (g * g), e_g)
    # With the defaults the first step is sqrt(eps / (1 - rho)), 0.003, for all but tiny gradients.
    # Two roots, as optax takes them: the root of the ratio would round otherwise.
    direction = ops.sqrt(e_x + h.eps) / ops.sqrt(e_g + h.eps) * g
    e_x = ops.keep(h.rho * e_x + h.rho_rest * (direction * direction), e_x)
    return direction, (e_g, e_x)


ADADELTA_RULE = UpdateRule(adadelta_direction, ("e_g", "e_x"))


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
      TypeError: for a number that is none; in `update`, for complex parameters.
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
    check_rate(1.0 if learning_rate is None else learning_rate, weight_decay)
    check_decays(rho=rho)
    check_offsets(eps=eps)
    reference = optax.adadelta(learning_rate, rho, eps, weight_decay, per_buffer(weight_decay_mask))
    coefficients = AdadeltaCoefficients(rho, 1 - rho, eps)
    return fused_transformation(
        ADADELTA_RULE,
        reference,
        lambda count: coefficients,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decay_part=0,  # of (decay, means, rate)
        mask=weight_decay_mask,
    )
