"""Lion: the sign of an interpolated momentum.

    d  = sign(b1 mu + (1 - b1) g) + weight_decay p
    mu = b2 mu + (1 - b2) g
    p  = p - learning_rate d

The sign looks at the old `mu` with b1, the state decays with b2 > b1: a gradient counts for more in
the step that it takes part in than in those after.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.coefficients import check_decays, check_rate
from ampx.fused.moments.formats import SlotDtype, array_dtype, as_slot_dtype
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class LionCoefficients(NamedTuple):
    """The numbers of a step.

    Attributes:
      b1: weight of the momentum in the sign.
      b1_rest: 1 - b1, see `AdamCoefficients`.
      b2: decay of the momentum.
      b2_rest: 1 - b2.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: None where nothing decays.
    """

    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def lion_direction(
    g: jax.Array, p: Any, slots: Slots, h: LionCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """A sign, with decoupled decay."""
    # One slot where Adam has two: 4 bytes a parameter less, and 8 less to move.
    (mu,) = slots
    # sign(0) is 0: an element that never had a gradient moves by its decay only.
    direction = jnp.sign(h.b1_rest * g + h.b1 * mu)
    if h.weight_decay is not None:
        direction = direction + h.weight_decay * p
    # The direction is of the old `mu`, and nothing goes on with the new one.
    return direction, (ops.keep(h.b2 * mu + h.b2_rest * g, mu),)


LION_RULE = UpdateRule(lion_direction, ("mu",))


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
      TypeError: for a number that is none; in `update`, for complex parameters.
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
    check_rate(learning_rate, weight_decay)
    check_decays(b1=b1, b2=b2)
    mu_dtype = as_slot_dtype("mu_dtype", mu_dtype)
    reference = optax.lion(
        learning_rate, b1, b2, array_dtype(mu_dtype), weight_decay, per_buffer(mask)
    )
    coefficients = LionCoefficients(b1, 1 - b1, b2, 1 - b2)
    return fused_transformation(
        LION_RULE,
        reference,
        lambda count: coefficients,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decay_part=1,  # of (momentum, decay, rate)
        mask=mask,
        slot_dtypes={"mu": mu_dtype},
    )
