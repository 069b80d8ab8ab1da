"""NovoGrad: a second moment that is one number a parameter.

    nu = b2 nu + (1 - b2) |g|**2               |g| over the whole parameter; nu = |g|**2 at first
    mu = b1 mu + g / (sqrt(nu + eps_root) + eps) + weight_decay p
    p  = p - learning_rate mu

The norm of a gradient is needed before anything else can be done with it, so a step reads the
gradient twice, and kernels leave it to XLA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ampx.checking import check_hyperparameter
from ampx.fused.coefficients import check_decays, check_offsets, check_rate
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class NovogradCoefficients(NamedTuple):
    """The numbers of a step.

    Attributes:
      b1: decay of the trace.
      b2: decay of the mean of squared norms; 0 in the first step, which so begins at |g|**2.
      b2_rest: 1 - b2, and 1 in the first step.
      eps: added to the root.
      eps_root: added under the root.
      squares: |g|**2, filled in parameter by parameter; of shape (parameters,) in a flat buffer.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: None where nothing decays.
    """

    b1: Any
    b2: Any
    b2_rest: Any
    eps: Any
    eps_root: Any
    squares: Any = None
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def novograd_direction(
    g: jax.Array, p: Any, slots: Slots, h: NovogradCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The trace of gradients that are divided by their norm, with decay inside the trace."""
    mu, nu = slots
    # mu: of the parameter's shape. nu and squares: one number a parameter, so `spread` before they
    # meet elements.
    nu = ops.keep(h.b2 * nu + h.b2_rest * h.squares, nu)
    normal = g / ops.spread(ops.sqrt(nu + h.eps_root) + h.eps)
    # Decay goes through the trace, but not through the division by the norm.
    if h.weight_decay is not None:
        normal = normal + h.weight_decay * p
    # A sum, as in SGD with momentum, and not a mean as in Adam: there is no 1 - b1.
    mu = ops.keep(h.b1 * mu + normal, mu)
    return mu, (mu, nu)


NOVOGRAD_RULE = UpdateRule(novograd_direction, ("mu", "nu"), needs_squares=True)


def novograd(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.25,
    eps: ArrayLike = 1e-6,
    eps_root: ArrayLike = 0.0,
    weight_decay: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """NovoGrad with `optax.novograd`'s signature, numbers and state.

    Inside `shard_map`, norms of gradients that are divided over mapped axes are those of the whole;
    with `check_vma=False` give `update` the axes, `model_axes=`: see `ampx.train_step`.

    Args:
      learning_rate: see `adam`.
      b1: decay of the trace.
      b2: decay of the mean of squared norms.
      eps: added to the root.
      eps_root: added under the root.
      weight_decay: a number; added to the normalised gradient.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: for a number that is none; in `update`, for complex parameters.
      ValueError: in `update`, without params where they decay.

    References:
      Ginsburg et al., https://arxiv.org/abs/1905.11286; `optax.novograd`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.novograd(1.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> updates.round(3)
      Array([-0.6,  0.8], dtype=float32)
    """
    check_rate(learning_rate)
    check_hyperparameter("weight_decay", weight_decay)
    check_decays(b1=b1, b2=b2)
    check_offsets(eps=eps, eps_root=eps_root)
    decay: Any = weight_decay
    reference = optax.novograd(learning_rate, b1, b2, eps, eps_root, decay)

    def coefficients_at(count: jax.Array) -> NovogradCoefficients:
        # The first norm is taken whole. A mean that began at 0 would have 1 - b2 of its square, and
        # the first step would be too large by 1 / sqrt(1 - b2).
        is_first = count == 1
        return NovogradCoefficients(
            b1=b1,
            b2=jnp.where(is_first, 0.0, b2),
            b2_rest=jnp.where(is_first, 1.0, 1 - b2),
            eps=eps,
            eps_root=eps_root,
        )

    return fused_transformation(
        NOVOGRAD_RULE,
        reference,
        coefficients_at,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )
