"""Auxiliary outputs of k micro-batches as one, by a rule that the caller states."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ampx.precision import wider_dtype
from ampx.verdicts import is_floating

AuxReduction = Literal["mean", "sum", "stack", "concat", "last"]


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

    def over_devices(leaf: jax.Array) -> jax.Array:
        return jax.lax.psum(leaf, axes) if axes else leaf

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
            return over_devices(jnp.sum(stacked, axis=0, dtype=dtype))
        if not is_floating(stacked):
            raise TypeError(
                f"aux_reduction='mean' needs floating leaves, got {stacked.dtype}: give 'sum' or "
                "'stack' for this leaf, as a tree that matches the auxiliary output"
            )
        wide = stacked.astype(wider_dtype(stacked.dtype, jnp.float32))
        per_row = weights.astype(wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
        weighted = jnp.sum(jnp.where(per_row == 0, jnp.zeros_like(wide), wide * per_row), axis=0)
        return over_devices(weighted) / divisor.astype(wide.dtype)

    def reduce_subtree(kind: AuxReduction, subtree: Any) -> Any:
        return jax.tree.map(lambda leaf: reduce_leaf(kind, leaf), subtree)

    return jax.tree.map(reduce_subtree, reduction, auxes)
