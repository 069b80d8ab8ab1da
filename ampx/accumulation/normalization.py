"""Losses and gradients of many micro-batches as those of one batch."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ampx.mesh_axes import count_devices, divide_sum, mark_varying
from ampx.trees import is_floating, wider_dtype

Normalize = Literal["mean", "sum", "weights"]
AuxReduction = Literal["mean", "sum", "stack", "concat", "last"]


def unpack_output(
    out: Any, has_aux: bool, has_state: bool, name: str = "loss_fn"
) -> tuple[Any, Any, Any]:
    """Value, auxiliary output and new state of a loss function, each None where there is none."""
    if not has_aux and not has_state:
        return out, None, None
    expected = ["value", *["aux"] * has_aux, *["new state"] * has_state]
    if not isinstance(out, tuple) or len(out) != len(expected):
        raise TypeError(
            f"{name} must return a tuple ({', '.join(expected)}), got {type(out).__name__}"
        )
    return out[0], out[1] if has_aux else None, out[-1] if has_state else None


def as_scale(loss_scale: ArrayLike) -> jax.Array:
    """The factor for a loss as a float32 scalar.

    Raises:
      ValueError: if it is no scalar: a state with several losses has a scale for each.
    """
    scale = jnp.asarray(loss_scale, jnp.float32)
    if scale.shape:
        raise ValueError(f"loss_scale must be a scalar, got shape {scale.shape}")
    return scale


def as_loss_and_weight(
    value: Any, normalize: Normalize, function: str = "loss_fn"
) -> tuple[jax.Array, jax.Array]:
    """Loss in float32 or wider, before any scaling, and its weight."""
    if normalize == "weights":
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(
                f"normalize='weights': {function} must return the pair (sum of losses, sum of "
                f"weights) as its value, got {type(value).__name__}"
            )
        loss, weight = value
    else:
        loss, weight = value, jnp.ones((), jnp.float32)
    for name, number in (("loss", loss), ("weight", weight)):
        if isinstance(number, tuple | list | dict):
            raise TypeError(
                f"the {name} must be a scalar, got {type(number).__name__}: pass has_aux=True, or "
                f"model_state, if {function} returns more than its loss"
            )
        if jnp.shape(number):
            raise TypeError(f"the {name} must be a scalar, got shape {jnp.shape(number)}")
    if not is_floating(loss):
        raise TypeError(f"the loss must be floating, got {jnp.result_type(loss)}")
    loss = jnp.asarray(loss)
    weight = jax.lax.stop_gradient(jnp.asarray(weight).astype(jnp.float32))
    return loss.astype(wider_dtype(loss.dtype, jnp.float32)), weight


def normalize_sums(
    grads: Any,
    losses: jax.Array,
    weights: jax.Array,
    auxes: Any,
    normalize: Normalize,
    aux_reduction: Any,
    axes: tuple[str, ...],
    num_rows: int | None,
) -> tuple[jax.Array, Any, jax.Array, Any]:
    """Loss, gradients, weight and auxiliary output of all micro-batches, over devices.

    Args:
      grads: summed over micro-batches.
      losses: with a leading axis of micro-batches.
      weights: likewise.
      auxes: likewise.
      normalize: what to divide by.
      aux_reduction: how auxiliary outputs become one.
      axes: mapped axes that the batch is split over. Gradients stay local.
      num_rows: rows of the batch without padding; None where there is none.
    """
    number = losses.size * count_devices(axes)
    totals = (jnp.sum(losses), jnp.sum(weights) if normalize == "weights" else None)
    loss, weight = jax.lax.psum(mark_varying(totals, axes), axes)
    if weight is None:
        # Known while tracing, so that the compiler may turn the division into a product.
        weight = divisor = jnp.float32(number)
    else:
        divisor = jnp.where(weight == 0, 1.0, weight)

    def divide(total: jax.Array) -> jax.Array:
        if not is_floating(total):
            return total
        if normalize == "mean" and number == 1:
            return total
        mean = divide_sum(total, number if normalize == "mean" else divisor.astype(total.dtype))
        if normalize == "mean":
            return mean
        return jnp.where(weight == 0, jnp.zeros_like(mean), mean)

    aux = reduce_aux(auxes, weights, divisor, aux_reduction, axes, num_rows)
    if normalize != "sum":
        loss, grads = jax.tree.map(divide, (loss, grads))
    return loss, grads, weight, aux


def reduce_aux(
    auxes: Any,
    weights: jax.Array,
    divisor: jax.Array,
    reduction: Any,
    axes: tuple[str, ...],
    num_rows: int | None,
) -> Any:
    """Reduces leaves with a leading axis of k.

    Args:
      auxes: stacked auxiliary outputs.
      weights: float32 of shape (k,).
      divisor: float32 scalar, the total weight over micro-batches and devices, never zero.
      reduction: an `AuxReduction`, or a tree prefix of them.
      axes: mapped axes that means and sums also reduce over.
      num_rows: rows of the batch, if repeats were added at its end; else None.
    """

    def reduce_leaf(kind: AuxReduction, stacked: jax.Array) -> jax.Array:
        if kind == "stack":
            return stacked
        if kind == "last":
            return stacked[-1]
        if kind == "concat":
            if stacked.ndim < 2:
                raise TypeError("aux_reduction='concat' needs leaves with a leading batch axis")
            rows = jnp.swapaxes(stacked, 0, 1)
            return rows.reshape(-1, *rows.shape[2:])[:num_rows]
        if kind == "sum":
            least = jnp.float32 if is_floating(stacked) else jnp.int32
            dtype = wider_dtype(stacked.dtype, least)
            total = jnp.sum(stacked, axis=0, dtype=dtype)
            return jax.lax.psum(mark_varying(total, axes), axes)
        if not is_floating(stacked):
            raise TypeError(
                f"aux_reduction='mean' needs floating leaves, got {stacked.dtype}: give 'sum' or "
                "'stack' for this leaf, as a tree that matches the auxiliary output"
            )
        wide = stacked.astype(wider_dtype(stacked.dtype, jnp.float32))
        per_row = weights.astype(wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
        weighted = jnp.sum(jnp.where(per_row == 0, jnp.zeros_like(wide), wide * per_row), axis=0)
        total = jax.lax.psum(mark_varying(weighted, axes), axes)
        return total / divisor.astype(wide.dtype)

    def reduce_subtree(kind: AuxReduction, subtree: Any) -> Any:
        return jax.tree.map(lambda leaf: reduce_leaf(kind, leaf), subtree)

    return jax.tree.map(reduce_subtree, reduction, auxes)
