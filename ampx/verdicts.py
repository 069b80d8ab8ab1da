"""What makes a step bad, and how what it did is undone.

A verdict is a pair of small integers, so that it can be agreed upon by one tiny reduction that
neither loses a NaN nor waits for the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.precision import wider_dtype

_INF, _NAN = 1, 2


def is_floating(leaf: Any) -> bool:
    """Whether a leaf holds real or complex floating numbers."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _leaf_verdict(leaf: jax.Array, saturation_dtype: DTypeLike | None) -> jax.Array:
    """A bit mask: has an infinity (1), has a NaN (2). One pass over the leaf."""
    inf = jnp.isinf(leaf)
    if saturation_dtype is not None:
        inf |= jnp.abs(leaf) >= jnp.asarray(jnp.finfo(saturation_dtype).max).astype(leaf.dtype)
    code = inf.astype(jnp.uint8) * jnp.uint8(_INF)
    code |= jnp.isnan(leaf).astype(jnp.uint8) * jnp.uint8(_NAN)
    return jnp.bitwise_or.reduce(code, axis=None)


def count_nonfinite(
    tree: Any, *, axis_names: Sequence[str] = (), saturation_dtype: DTypeLike | None = None
) -> jax.Array:
    """Counts the arrays of a tree that hold an infinity, and those that hold a NaN.

    Arrays are counted, not elements: the sum stays small on any model and any number of devices,
    and integers, unlike `pmax` of floats, cannot lose a NaN on the way.

    Args:
      tree: any pytree; leaves that are not floating or complex are ignored.
      axis_names: mapped axes to sum over, so that all devices get the same answer.
      saturation_dtype: also count ``|x|`` >= the largest finite number of this dtype as an
        infinity, for hardware that saturates instead of overflowing.

    Returns:
      int32 of shape (2,): arrays with an infinity, arrays with a NaN.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> ampx.count_nonfinite({"a": jnp.array([jnp.inf, jnp.nan]), "b": jnp.ones(3)})
      Array([1, 1], dtype=int32)
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf) and leaf.size]
    codes = [_leaf_verdict(leaf, saturation_dtype).astype(jnp.int32) for leaf in leaves]
    if not codes:
        return jnp.zeros(2, jnp.int32)
    packed = jnp.stack(codes)
    counts = jnp.stack([jnp.sum(packed & _INF), jnp.sum((packed & _NAN) // _NAN)])
    counts = counts.astype(jnp.int32)
    return jax.lax.psum(counts, tuple(axis_names)) if axis_names else counts


def unscale(tree: Any, loss_scale: jax.Array) -> Any:
    """Gradients over their loss scale, in float32 or wider; leaves that are not floating stay."""

    def divide(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        wide = wider_dtype(leaf.dtype, jnp.float32)
        # A product, not a quotient: the compiler may recompute it instead of storing it.
        return leaf.astype(wide) * (1 / loss_scale).astype(jnp.finfo(wide).dtype)

    return jax.tree.map(divide, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` as arrays in the dtypes of `like`."""

    def cast(leaf: Any, like_leaf: Any) -> Any:
        leaf, dtype = jnp.asarray(leaf), jnp.asarray(like_leaf).dtype
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree.map(cast, tree, like)


def hold(skip: jax.Array, new: Any, old: Any) -> Any:
    """`old` where `skip`, else `new`, leaf by leaf, in the dtypes of `old`."""
    return jax.tree.map(
        lambda new_leaf, old_leaf: jnp.where(skip, old_leaf, new_leaf), cast_like(new, old), old
    )


def finite_or(new: Any, old: Any) -> Any:
    """`new`, element by element, except where a finite number of `old` would turn non-finite."""

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not is_floating(new_leaf):
            return new_leaf
        return jnp.where(jnp.isfinite(new_leaf) | ~jnp.isfinite(old_leaf), new_leaf, old_leaf)

    return jax.tree.map(choose, cast_like(new, old), old)
