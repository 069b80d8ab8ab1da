"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.moments.formats import SlotDtype, array_dtype
from ampx.fused.rules import Advanced, Operations, Rule, Slots, scheduled, step_size, unless_zero
from ampx.fused.transformation import fused_transformation


class LionCoefficients(NamedTuple):
    """The numbers of a step and the rates' complements."""

    factor: Any
    step_size: Any
    weight_decay: Any
    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any


def lion_direction(
    g: jax.Array, p: Any, slots: Slots, h: LionCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """A sign, with decoupled decay."""
    (mu,) = slots
    direction = jnp.sign(h.b1_rest * g + h.b1 * mu)
    if h.weight_decay is not None:
        direction = direction + h.weight_decay * p
    return direction, (ops.keep(h.b2 * mu + h.b2_rest * g, mu),)


LION_RULE = Rule(lion_direction, ("mu",))


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    mu_dtype: SlotDtype = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion in one pass: `optax.lion` with its signature, its numbers and its state.

    Args:
      learning_rate: see `adam`; a third to a tenth of what AdamW takes.
      b1: weight of the momentum in the sign.
      b2: decay of the momentum.
      mu_dtype: dtype in which the momentum is kept, or `"int8"`; see `adam`.
      weight_decay: see `adamw`.
      mask: see `adamw`.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: in `update`, for complex parameters.
      ValueError: in `update`, without params.

    References:
      Chen et al., https://arxiv.org/abs/2302.06675; `optax.lion`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.lion(0.1, weight_decay=0.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> updates
      Array([-0.1,  0.1], dtype=float32)
    """
    reference = optax.lion(
        learning_rate, b1, b2, array_dtype(mu_dtype), weight_decay, per_buffer(mask)
    )

    def advance(state: Any) -> Advanced:
        own, decay_state, rate_state = state
        rate, rate_state = scheduled(learning_rate, rate_state)
        decay, decay_state = scheduled(weight_decay, decay_state)
        coefficients = LionCoefficients(
            factor=None,
            step_size=step_size(rate),
            weight_decay=unless_zero(decay),
            b1=b1,
            b1_rest=1 - b1,
            b2=b2,
            b2_rest=1 - b2,
        )
        own = own._replace(count=optax.safe_increment(own.count))
        return Advanced(coefficients, (own, decay_state, rate_state))

    return fused_transformation(LION_RULE, reference, advance, mask, {"mu": mu_dtype})
