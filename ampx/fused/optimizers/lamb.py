"""LAMB: AdamW whose step is in proportion to each parameter's norm.

With AdamW's direction d, decay included, and norms over one whole parameter:

    p = p - learning_rate * (|p| / |d|) * d        the ratio is 1 where a norm is 0

The ratio waits for every element of d, so a step is two passes over the parameter. The second
works d out again from the new moments instead of reading a stored copy: see `adam_direction_again`.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import ArrayLike

from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.coefficients import check_decays, check_offsets, check_rate
from ampx.fused.moments.formats import SlotDtype, as_slot_dtype
from ampx.fused.optimizers.adam import adam_coefficients, adam_direction, adam_direction_again
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import UpdateRule

# The direction is AdamW's. Having a `direction_again` is what makes it a multiple of the ratio: see
# `leaf_updates.compute_trust_ratio` and `KernelStep.update_param`.
LAMB_RULE = UpdateRule(adam_direction, ("mu", "nu"), adam_direction_again)


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

    Inside `shard_map`, norms of parameters that are divided over mapped axes are those of the
    whole; with `check_vma=False` give `update` the axes, `model_axes=`: see `ampx.train_step`.

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
      TypeError: for a number that is none; in `update`, for complex parameters.
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
    check_rate(learning_rate, weight_decay)
    check_decays(b1=b1, b2=b2, corrects_bias=True)
    check_offsets(eps=eps, eps_root=eps_root)
    mu_dtype, nu_dtype = as_slot_dtype("mu_dtype", mu_dtype), as_slot_dtype("nu_dtype", nu_dtype)
    # optax's LAMB takes no dtypes for moments: `slot_dtypes` alone decides.
    reference = optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, per_buffer(mask))
    return fused_transformation(
        LAMB_RULE,
        reference,
        lambda count: adam_coefficients(count, b1, b2, eps, eps_root),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decay_part=1,  # of (moments, decay, ratio, rate)
        mask=mask,
        slot_dtypes={"mu": mu_dtype, "nu": nu_dtype},
    )
