"""LAMB: AdamW with a step in proportion to each parameter's norm."""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.moments.formats import SlotDtype
from ampx.fused.optimizers.adam import adam_direction, adam_direction_again, advance_adam
from ampx.fused.rules import Advanced, Rule
from ampx.fused.transformation import fused_transformation

LAMB_RULE = Rule(adam_direction, ("mu", "nu"), adam_direction_again)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    eps_root: ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    mu_dtype: SlotDtype = None,
    nu_dtype: SlotDtype = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB with one pass for moments and norms: `optax.lamb`'s signature, numbers and state.

    Inside `shard_map`, norms of parameters that vary over mapped axes are those of the whole.

    Args:
      learning_rate: see `adam`.
      b1: see `adam`.
      b2: see `adam`.
      eps: see `adam`.
      eps_root: see `adam`.
      weight_decay: see `adamw`.
      mask: see `adamw`.
      mu_dtype: see `adam`; beyond optax.
      nu_dtype: see `adam`; beyond optax.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: in `update`, for complex parameters.
      ValueError: in `update`, without params.

    References:
      You et al., https://arxiv.org/abs/1904.00962; `optax.lamb`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.lamb(0.1)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, state = tx.update(jnp.array([1.0, 1.0]), tx.init(params), params)
      >>> updates.round(3)  # 0.1 of the norm of the parameter, 5
      Array([-0.354, -0.354], dtype=float32)
    """
    reference = optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, per_buffer(mask))

    def advance(state: Any) -> Advanced:
        return advance_adam(state, learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay)

    slot_dtypes = {"mu": mu_dtype, "nu": nu_dtype}
    return fused_transformation(LAMB_RULE, reference, advance, mask, slot_dtypes)
