"""What makes a step bad, and how what it did is undone.

A verdict is a pair of small integers, so that it can be agreed upon by one tiny reduction that
neither loses a NaN nor waits for the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.mesh_axes import as_axes, mark_varying
from ampx.trees import is_floating, wider_dtype


class Verdict(NamedTuple):
    """A verdict that was taken and agreed on before the gradients were reduced.

    Attributes:
      counts: int32 of shape (2,), as from `count_nonfinite`, the same on all devices.
      axes: the mapped axes that it was agreed over.
    """

    counts: jax.Array
    axes: tuple[str, ...]


def _leaf_verdict(leaf: jax.Array, saturation_dtype: DTypeLike | None) -> jax.Array:
    """Two bools: has an infinity, has a NaN."""
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    inf = jnp.isinf(leaf)
    if saturation_dtype is not None:
        inf |= jnp.abs(leaf) >= jnp.asarray(jnp.finfo(saturation_dtype).max).astype(leaf.dtype)
    # Extremes, not a bitwise "or": sharded over CPU devices, that one does not compile.
    code = jnp.where(inf, 1, jnp.where(jnp.isnan(leaf), -1, 0)).astype(jnp.int8)
    return jnp.stack([jnp.max(code) > 0, jnp.min(code) < 0])


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
    if not leaves:
        return jnp.zeros(2, jnp.int32)
    with jax.named_scope("ampx.verdict"):
        found = jnp.stack([_leaf_verdict(leaf, saturation_dtype) for leaf in leaves])
        counts = jnp.sum(found, axis=0, dtype=jnp.int32)
    return agree_on(counts, axis_names)


def agree_on(counts: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """The sum of each device's counts over mapped axes."""
    axes = as_axes(axis_names, "axis_names", may_be_empty=True)
    with jax.named_scope("ampx.verdict"):
        return jax.lax.psum(mark_varying(counts, axes), axes)


def mark_overflowing(updates: Any, params: Any) -> Any:
    """Updates, infinite where a half parameter would become so by adding a finite one."""

    def land(param: Any, update: Any) -> Any:
        if param is None or not is_floating(update):
            return update
        param = jnp.asarray(param)
        if param.dtype.itemsize > 2:
            return update
        wide = wider_dtype(param.dtype, update.dtype)
        total = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
        fits = jnp.isfinite(total) | ~jnp.isfinite(param)
        return jnp.where(fits, update, jnp.full_like(update, jnp.inf))

    if params is None:
        return updates
    return jax.tree.map(land, params, updates, is_leaf=lambda leaf: leaf is None)


def unscale(tree: Any, loss_scale: jax.Array) -> Any:
    """Gradients over their loss scale, in float32 or wider; leaves that are not floating stay."""

    def divide(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        wide = wider_dtype(leaf.dtype, jnp.float32)
        # A product, not a quotient: the compiler may recompute it instead of storing it.
        return leaf.astype(wide) * (1 / loss_scale).astype(wide)

    return jax.tree.map(divide, tree)
