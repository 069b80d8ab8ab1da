"""Adam and AdamW."""

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


class AdamCoefficients(NamedTuple):
    """The numbers of a step; the rates' complements and the bias corrections are worked out."""

    factor: Any
    step_size: Any
    weight_decay: Any
    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any
    mu_correction: Any
    nu_correction: Any
    gradient_correction: Any
    eps: Any
    eps_root: Any


def adam_direction(
    g: jax.Array, p: Any, slots: Slots, h: AdamCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The ratio of corrected moments, with decoupled decay."""
    mu, nu = slots
    mu = ops.keep(h.b1 * mu + h.b1_rest * g, mu)
    nu = ops.keep(h.b2 * nu + h.b2_rest * (g * g), nu)
    mean = h.mu_correction * mu
    if h.gradient_correction is not None:
        mean = h.b1 * mean + h.gradient_correction * g
    return _ratio(mean, nu, p, h, ops), (mu, nu)


def adam_direction_again(p: Any, slots: Slots, h: AdamCoefficients, ops: Operations) -> jax.Array:
    """The same direction out of the new slots, without Nesterov's momentum."""
    mu, nu = slots
    return _ratio(h.mu_correction * mu, nu, p, h, ops)


def _ratio(mean: jax.Array, nu: jax.Array, p: Any, h: AdamCoefficients, ops: Operations) -> Any:
    direction = mean / (ops.sqrt(h.nu_correction * nu + h.eps_root) + h.eps)
    return direction if h.weight_decay is None else direction + h.weight_decay * p


ADAM_RULE = Rule(adam_direction, ("mu", "nu"))


def advance_adam(
    state: Any,
    learning_rate: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    *,
    weight_decay: Any = None,
    nesterov: bool = False,
) -> Advanced:
    """For a state of (moments, state of the decay's schedule unless it is None, ..., rate's)."""
    moments, *rest = state
    count = optax.safe_increment(moments.count)
    rate, rest[-1] = scheduled(learning_rate, rest[-1])
    if weight_decay is not None:
        weight_decay, rest[0] = scheduled(weight_decay, rest[0])
    coefficients = AdamCoefficients(
        factor=None,
        step_size=step_size(rate),
        weight_decay=unless_zero(weight_decay),
        b1=b1,
        b1_rest=1 - b1,
        b2=b2,
        b2_rest=1 - b2,
        mu_correction=_correction(b1, optax.safe_increment(count) if nesterov else count),
        nu_correction=_correction(b2, count),
        gradient_correction=(1 - b1) * _correction(b1, count) if nesterov else None,
        eps=eps,
        eps_root=eps_root,
    )
    return Advanced(coefficients, (moments._replace(count=count), *rest))


def _correction(decay: Any, count: Any) -> jax.Array:
    """What undoes the bias of a mean that began at zero, `count` steps ago."""
    dtype = jnp.result_type(float)
    return 1 / (1 - jnp.asarray(decay, dtype) ** count.astype(dtype))


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: SlotDtype = None,
    *,
    nesterov: bool = False,
    nu_dtype: SlotDtype = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam in one pass: `optax.adam` with its signature, its numbers and its state.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squared gradients.
      eps: added to the root.
      eps_root: added under the root.
      mu_dtype: dtype in which the mean of gradients is kept; None is that of the parameter, and
        `"int8"` is 1.02 bytes a number, in blocks of 256 along the last axis that share a scale,
        off by at most 1/16 of each number that is not far below its block's largest (see
        `ampx.fused.moments.int8_blocks`). Parameters of fewer than 4096 numbers, or in rows of
        fewer than 64, keep float32.
      nesterov: Nesterov's momentum.
      nu_dtype: the same for the mean of squares; `"int8"` rounds it stochastically. Beyond optax.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: in `update`, for complex parameters.

    References:
      Kingma and Ba, Adam, https://arxiv.org/abs/1412.6980; `optax.adam`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.adam(0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> updates.round(3)
      Array([-0.1,  0.1], dtype=float32)
    """
    reference = optax.adam(
        learning_rate, b1, b2, eps, eps_root, array_dtype(mu_dtype), nesterov=nesterov
    )

    def advance(state: Any) -> Advanced:
        return advance_adam(state, learning_rate, b1, b2, eps, eps_root, nesterov=nesterov)

    slot_dtypes = {"mu": mu_dtype, "nu": nu_dtype}
    return fused_transformation(ADAM_RULE, reference, advance, slot_dtypes=slot_dtypes)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: SlotDtype = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    nu_dtype: SlotDtype = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW in one pass: `optax.adamw` with its signature, its numbers and its state.

    Args:
      learning_rate: see `adam`.
      b1: see `adam`.
      b2: see `adam`.
      eps: see `adam`.
      eps_root: see `adam`.
      mu_dtype: see `adam`.
      weight_decay: a number or a schedule; multiplied by the learning rate.
      mask: which parameters decay: a tree of bools, a prefix of one, or a function of the
        parameters to one. None: all.
      nesterov: see `adam`.
      nu_dtype: see `adam`.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: in `update`, for complex parameters.
      ValueError: in `update`, without params.

    References:
      Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; `optax.adamw`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> def matrices(params):  # no decay for biases and norms
      ...     return {name: p.ndim > 1 for name, p in params.items()}
      >>> tx = ampx.fused.adamw(optax.linear_schedule(0.0, 3e-4, 100), mask=matrices)
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> optax.tree.get(state, "mu")["w"].shape
      (2, 2)
    """
    own_dtype = array_dtype(mu_dtype)
    reference = optax.adamw(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        own_dtype,
        weight_decay,
        per_buffer(mask),
        nesterov=nesterov,
    )

    def advance(state: Any) -> Advanced:
        return advance_adam(
            state,
            learning_rate,
            b1,
            b2,
            eps,
            eps_root,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    slot_dtypes = {"mu": mu_dtype, "nu": nu_dtype}
    return fused_transformation(ADAM_RULE, reference, advance, mask, slot_dtypes)
