"""Batches divided into micro-batches, and padded where they do not divide evenly.

Row r of a batch goes to micro-batch r mod k: a stride, not a slice. The reason is a batch that is
sharded over devices along its rows. Here B = 8 rows on two devices and k = 2 micro-batches:

    device           0  0  0  0  1  1  1  1
    row              0  1  2  3  4  5  6  7
    with a stride    0  1  0  1  0  1  0  1    each micro-batch has two rows on each device
    with a slice     0  0  0  0  1  1  1  1    micro-batch 0 lies on device 0 alone

In the second case the compiler would gather the batch and compute everything on every device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ampx.checking import as_int, as_positive_int
from ampx.mesh_axes import count_row_devices, lay_out_as_rows, take_rows
from ampx.tree_checks import check_arrays
from ampx.trees import broadcast_prefix, split_leaves

_IF_SCALAR = "a tree of batch_axes with None for this leaf hands it whole to each of them"


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
    """Splits the leading axis of every leaf, B -> (k, B/k), with a stride: row i goes to i mod k.

    With contiguous slices each micro-batch of a sharded batch would lie on only some devices, and
    the compiler would copy the batch to all devices and compute everything on each.

    Args:
      batch: a pytree of arrays of shape (B, ...).
      num_microbatches: k, a divisor of B.

    Returns:
      The same tree with leaves of shape (k, B/k, ...).

    Raises:
      TypeError: if `num_microbatches` is not an int, or a leaf no array.
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
    """Splits as `split_microbatches` does, but moves nothing: leaves of shape (B/k, k, ...).

    Element [r, i] is row r * k + i, so column i is micro-batch i. The rows stay the major axis, and
    the reshape keeps the sharding along them.
    """
    num_microbatches = as_positive_int("num_microbatches", num_microbatches)
    size = batch_size(batch)
    if size % num_microbatches:
        raise ValueError(
            f"a batch of {size} rows is not divisible into {num_microbatches} micro-batches: "
            "choose a divisor, or remainder='mask' with a loss that uses the mask"
        )
    # Not optax.microbatching.reshape_batch_axis, which fails on Explicit meshes: it compares jax
    # versions as strings and takes 0.10 for older than 0.7.
    rows = size // num_microbatches
    if rows % (devices := _count_row_devices(batch)):
        raise ValueError(
            f"{num_microbatches} micro-batches of {rows} rows each cannot be divided over the "
            f"{devices} devices that Explicit mesh axes divide the {size} rows of the batch over: "
            f"take fewer micro-batches, so that each has a multiple of {devices} rows, or "
            "remainder='mask' with a loss that uses the mask"
        )
    return jax.tree.map(lambda x: jnp.reshape(x, (rows, num_microbatches, *x.shape[1:])), batch)


def batch_size(batch: Any, if_scalar: str = _IF_SCALAR) -> int:
    """The length of the leading axis that all leaves share.

    Args:
      batch: a pytree of arrays.
      if_scalar: what the error for a scalar says that there is to do.
    """
    check_arrays("batch", batch)
    _check_containers(batch)
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.shape(leaf):
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(path)} is a scalar, and micro-batches are split "
                f"along a leading axis: {if_scalar}"
            )
        sizes[jax.tree_util.keystr(path)] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        raise ValueError(f"batch leaves must share one leading axis, got {sizes or 'no leaves'}")
    return next(iter(sizes.values()))


def _check_containers(batch: Any) -> None:
    """Refuses containers of arrays that keep the shape of the whole, such as sparse arrays.

    Rows of the arrays in them are no rows of the whole: those of a BCOO are its nonzero numbers.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_wraps_array):
        if _wraps_array(node) and _keeps_its_shape(node):
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(path)} is a {type(node).__name__}, which keeps "
                f"a shape of its own beside its arrays, {node.shape}, and cannot be split into "
                "rows: give arrays, and make it of them in the loss; or hand it whole to each "
                "micro-batch, by None in its place in batch_axes"
            )


def _wraps_array(node: Any) -> bool:
    """Whether a node is no leaf, and behaves as an array."""
    is_array_like = hasattr(node, "shape") and hasattr(node, "dtype")
    return is_array_like and not jax.tree_util.all_leaves([node])


def _keeps_its_shape(node: Any) -> bool:
    """Whether a container has the same shape without the rows of its arrays, or cannot be so."""
    leaves, structure = jax.tree.flatten(node)

    def without_rows(*leaves: Any) -> None:
        rowless = [leaf[:0] if jnp.ndim(leaf) else leaf for leaf in leaves]
        if jax.tree.unflatten(structure, rowless).shape == node.shape:
            raise ValueError

    try:
        jax.eval_shape(without_rows, *leaves)
    except Exception:  # whatever a class of others raises
        return True
    return False


def pad_and_mask(batch: Any, num_microbatches: int) -> tuple[Any, jax.Array]:
    """Repeats the last row up to a multiple of k; the mask is False on the repeats.

    Where d devices divide the rows by type, each of the k micro-batches gets a multiple of d rows.

    Returns:
      The batch with leaves of shape (n * k, ...), and the mask, bool[n * k].
    """
    size = batch_size(batch)
    devices = _count_row_devices(batch)
    # -10 % 4 == 2: 10 rows and 2 more are 3 for each of 4
    padding = -size % (num_microbatches * devices)
    mask = jnp.arange(size + padding) < size
    # A real row and not zeros: on a row of zeros a model may divide by zero, and a NaN times a mask
    # of 0 is still NaN.
    if devices == 1:
        last = jax.tree.map(lambda x: jnp.repeat(x[-1:], padding, 0), batch)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), batch, last), mask
    numbers = jnp.minimum(jnp.arange(size + padding), size - 1)
    padded = jax.tree.map(lambda x: take_rows(x, numbers), batch)
    divided = next(leaf for leaf in jax.tree.leaves(padded) if count_row_devices(leaf) > 1)
    return padded, lay_out_as_rows(mask, divided)


def _count_row_devices(batch: Any) -> int:
    """How many devices divide the rows of a batch, as far as types tell."""
    return math.lcm(*map(count_row_devices, jax.tree.leaves(batch)))


def separate_whole(batch: Any, batch_axes: Any) -> tuple[Any, Any]:
    """Separates the leaves of a batch that are split from those that every micro-batch gets whole.

    Args:
      batch: any pytree.
      batch_axes: 0 for what is split, None for what is not; or a tree prefix of these.

    Returns:
      Two trees like the batch, with None in the places of the other's leaves; see `join_whole`.

    Raises:
      ValueError: if `batch_axes` is no tree prefix of the batch.
    """
    try:
        axes = broadcast_prefix(batch_axes, batch, is_leaf=_is_none)
    except ValueError as error:
        raise ValueError(
            f"batch_axes={batch_axes!r} does not fit the batch ({error}): give 0 for what is split "
            "and None for what is not, in a tree like the batch or the upper part of one"
        ) from None
    return split_leaves(batch, [axis is not None for axis in axes])


def join_whole(split: Any, whole: Any) -> Any:
    """Joins the two trees of `separate_whole`."""
    return jax.tree.map(lambda s, w: w if s is None else s, split, whole, is_leaf=_is_none)


def check_batch_axes(batch_axes: Any) -> None:
    """Refuses what is neither 0 nor None, nor a tree of these.

    Raises:
      TypeError: for an entry that is no int.
      ValueError: for another axis.
    """
    for axis in jax.tree.leaves(batch_axes):
        if as_int("batch_axes", axis) != 0:
            raise ValueError(
                f"batch_axes must be 0, None or a tree of these, got {axis}: batches are split "
                "along their first axis; move it there with jnp.moveaxis"
            )


def find_rows(batch: Any) -> int | None:
    """The length of the leading axis that all arrays of a batch share; None if they share none."""
    lengths = {getattr(leaf, "shape", ())[:1] for leaf in jax.tree.leaves(batch)}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def _is_none(node: Any) -> bool:
    return node is None
