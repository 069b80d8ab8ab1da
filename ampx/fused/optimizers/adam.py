"""Adam and AdamW.

With t counting steps from 1, all elementwise, and decay only in AdamW (and LAMB):

    mu  = b1 mu + (1 - b1) g                          mean of gradients
    nu  = b2 nu + (1 - b2) g**2                       mean of squared gradients
    mu^ = mu / (1 - b1**t)    nu^ = nu / (1 - b2**t)  both began at 0: undo that bias
    d   = mu^ / (sqrt(nu^ + eps_root) + eps) + weight_decay p
    p   = p - learning_rate d
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ampx.checking import as_bool
from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.coefficients import check_decays, check_offsets, check_rate
from ampx.fused.moments.formats import SlotDtype, array_dtype, as_slot_dtype
from ampx.fused.transformation import fused_transformation
from ampx.fused.update_rules import Operations, Slots, UpdateRule


class AdamCoefficients(NamedTuple):
    """The numbers of step t.

    Attributes:
      b1: decay of the mean of gradients.
      b1_rest: 1 - b1, taken before b1 is rounded to float32. float32(1) - float32(0.999) would be
        0.00099998713, wrong in the fifth digit.
      b2: decay of the mean of squares.
      b2_rest: 1 - b2, likewise.
      mu_correction: 1 / (1 - b1**t); with Nesterov's momentum of the step after, t + 1.
      nu_correction: 1 / (1 - b2**t).
      gradient_correction: (1 - b1) / (1 - b1**t) with Nesterov's momentum, otherwise None.
      eps: added to the root.
      eps_root: added under the root.
      factor: see `coefficients`, as for the next two.
      step_size: minus the learning rate.
      weight_decay: None where nothing decays.
    """

    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any
    mu_correction: Any
    nu_correction: Any
    gradient_correction: Any
    eps: Any
    eps_root: Any
    factor: Any = None
    step_size: Any = None
    weight_decay: Any = None


def adam_direction(
    g: jax.Array, p: Any, slots: Slots, h: AdamCoefficients, ops: Operations
) -> tuple[jax.Array, Slots]:
    """The ratio of corrected moments, with decoupled decay."""
    # In the first step mu^ is g and nu^ is g**2, whatever b1 and b2: d is the sign of g.
    # g, p, mu and nu: one wide dtype, one shape, of a parameter or of a block of it in a kernel.
    # `keep` comes before anything is read from a moment: on a skip what follows sees the old one.
    mu, nu = slots
    mu = ops.keep(h.b1 * mu + h.b1_rest * g, mu)
    nu = ops.keep(h.b2 * nu + h.b2_rest * (g * g), nu)
    mean = h.mu_correction * mu
    if h.gradient_correction is not None:
        # Nesterov: the mean as the next step will begin with it, one decay further, plus this
        # gradient once more:  b1 mu / (1 - b1**(t + 1)) + (1 - b1) g / (1 - b1**t).
        mean = h.b1 * mean + h.gradient_correction * g
    return _ratio(mean, nu, p, h, ops), (mu, nu)


def adam_direction_again(p: Any, slots: Slots, h: AdamCoefficients, ops: Operations) -> jax.Array:
    """The same direction out of the new slots, without Nesterov's momentum; for LAMB."""
    mu, nu = slots
    return _ratio(h.mu_correction * mu, nu, p, h, ops)


def _ratio(mean: jax.Array, nu: jax.Array, p: Any, h: AdamCoefficients, ops: Operations) -> Any:
    """The direction d of this module's formulas, from the corrected mean and the second moment."""
    # Decay is added behind the ratio and not to the gradient, where it would be divided by the root
    # of the second moment too: that is AdamW's difference from Adam with an L2 penalty.
    direction = mean / (ops.sqrt(h.nu_correction * nu + h.eps_root) + h.eps)
    return direction if h.weight_decay is None else direction + h.weight_decay * p


ADAM_RULE = UpdateRule(adam_direction, ("mu", "nu"))


def adam_coefficients(
    count: jax.Array, b1: Any, b2: Any, eps: Any, eps_root: Any, *, nesterov: bool = False
) -> AdamCoefficients:
    """The numbers of step `count`, an int32 scalar that begins at 1."""
    return AdamCoefficients(
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


def _correction(decay: Any, count: Any) -> jax.Array:
    """What undoes the bias of a mean that began at zero, `count` steps ago.

    If all gradients were the same g, the mean would be (1 - decay**count) g. As a factor it costs
    an element one multiplication and no division.
    """
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
        `ampx.fused.Int8Blocks`). Parameters of fewer than 4096 numbers, or in rows of fewer than
        64, keep float32.
      nesterov: Nesterov's momentum.
      nu_dtype: the same for the mean of squares; `"int8"` rounds it stochastically. In bfloat16 it
        stands still with `b2` of 0.999, which that does not resolve. Beyond optax.

    Returns:
      An optax transformation; see `ampx.fused.apply` for the whole tail in one pass.

    Raises:
      TypeError: for a number that is none; in `update`, for complex parameters.

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
    check_rate(learning_rate)
    check_decays(b1=b1, b2=b2, corrects_bias=True)
    check_offsets(eps=eps, eps_root=eps_root)
    mu_dtype, nu_dtype = as_slot_dtype("mu_dtype", mu_dtype), as_slot_dtype("nu_dtype", nu_dtype)
    nesterov = as_bool("nesterov", nesterov)
    # Only `reference.init` is ever called. optax takes no dtype for `nu`: it has the parameter's,
    # or what `slot_dtypes` says.
    reference = optax.adam(
        learning_rate, b1, b2, eps, eps_root, array_dtype(mu_dtype), nesterov=nesterov
    )

    return fused_transformation(
        ADAM_RULE,
        reference,
        lambda count: adam_coefficients(count, b1, b2, eps, eps_root, nesterov=nesterov),
        learning_rate=learning_rate,
        slot_dtypes={"mu": mu_dtype, "nu": nu_dtype},
    )


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
      TypeError: for a number that is none; in `update`, for complex parameters.
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
    check_rate(learning_rate, weight_decay)
    check_decays(b1=b1, b2=b2, corrects_bias=True)
    check_offsets(eps=eps, eps_root=eps_root)
    mu_dtype, nu_dtype = as_slot_dtype("mu_dtype", mu_dtype), as_slot_dtype("nu_dtype", nu_dtype)
    nesterov = as_bool("nesterov", nesterov)
    reference = optax.adamw(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        array_dtype(mu_dtype),
        weight_decay,
        per_buffer(mask),
        nesterov=nesterov,
    )
    return fused_transformation(
        ADAM_RULE,
        reference,
        lambda count: adam_coefficients(count, b1, b2, eps, eps_root, nesterov=nesterov),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decay_part=1,  # of (moments, decay, rate)
        mask=mask,
        slot_dtypes={"mu": mu_dtype, "nu": nu_dtype},
    )
