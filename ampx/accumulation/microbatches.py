"""Batches divided into micro-batches, and padded where they do not divide evenly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ampx.checking import check_positive_int


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
    """Splits the leading axis of every leaf, B -> (k, B/k), with a stride: row i goes to i mod k.

    With a contiguous split each micro-batch of a sharded batch would sit on one device, and the
    compiler would copy the batch everywhere and compute everything on every device.

    Args:
      batch: a pytree of arrays of shape (B, ...).
      num_microbatches: k, a divisor of B.

    Returns:
      The same tree with leaves of shape (k, B/k, ...).

    Raises:
      TypeError: if `num_microbatches` is not an int.
      ValueError: if a leaf has no leading axis, or leading axes differ or are not divisible.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> ampx.split_microbatches(jnp.arange(6), 2)
      Array([[0, 2, 4],
             [1, 3, 5]], dtype=int32)
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1), reshape_into_microbatches(batch, num_microbatches)
    )


def reshape_into_microbatches(batch: Any, num_microbatches: int) -> Any:
    """The same split without moving anything: leaves of shape (B/k, k, ...)."""
    check_positive_int("num_microbatches", num_microbatches)
    size = batch_size(batch)
    if size % num_microbatches:
        raise ValueError(
            f"a batch of {size} rows is not divisible into {num_microbatches} micro-batches: "
            "choose a divisor, or remainder='mask' with a loss that uses the mask"
        )
    # Not optax.microbatching.reshape_batch_axis, which fails on Explicit meshes: it compares jax
    # versions as strings and takes 0.10 for older than 0.7.
    rows = size // num_microbatches
    return jax.tree.map(lambda x: jnp.reshape(x, (rows, num_microbatches, *x.shape[1:])), batch)


def batch_size(batch: Any) -> int:
    """The length of the leading axis that all leaves share."""
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.shape(leaf):
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(path)} is a scalar: every leaf needs a leading "
                "batch axis to be split into micro-batches"
            )
        sizes[jax.tree_util.keystr(path)] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        raise ValueError(f"batch leaves must share one leading axis, got {sizes or 'no leaves'}")
    return next(iter(sizes.values()))


def pad_and_mask(batch: Any, num_microbatches: int) -> tuple[Any, jax.Array]:
    """Repeats the last row up to a multiple of k; the mask is False on the repeats."""
    size = batch_size(batch)
    padding = -size % num_microbatches
    padded = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], padding, 0)]), batch)
    return padded, jnp.arange(size + padding) < size
