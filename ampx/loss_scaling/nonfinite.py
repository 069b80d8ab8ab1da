"""What makes a step bad: infinities and NaN in gradients, counted; and the division by the scale.

The verdict on a step is a pair of integers: how many arrays hold an infinity, and how many a NaN.
Devices agree on it by one sum of two int32, eight bytes, before any gradient is sent:

    device 0:  [0, 0]  --+
    device 1:  [0, 1]  --+--> psum: [2, 1], on every device: all skip this step
    device 2:  [2, 0]  --+

Each device looks at its own gradients only, before they are summed over devices. That is sound. If
one of them holds an infinity or a NaN, so does the sum. If all are finite, so is their mean: it is
computed in float32, and each gradient is divided by the number of devices before they are added.
Only a plain sum could overflow, beyond 3.4e38. Then the update is not finite, and updates are
looked at too (`nonfinite_updates` of `ampx.dynamic_loss_scale`).

Arrays are counted and not elements because int32 must not wrap. A model of 2**32 parameters that
are all NaN has 2**32 bad elements, which is 0 in int32: a perfect step. Arrays times devices stay
below 2**31 with ten thousand arrays on two hundred thousand devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.checking import as_dtype
from ampx.mesh_axes import as_axes, mark_varying, tracks_varying, varying_axes
from ampx.tree_checks import check_arrays
from ampx.trees import is_floating, wider_dtype


class Verdict(NamedTuple):
    """A verdict that was taken and agreed on before the gradients were reduced.

    Attributes:
      counts: int32[2], as from `count_nonfinite`, the same on all devices.
      axes: the mapped axes over which devices agreed on it.
    """

    counts: jax.Array
    axes: tuple[str, ...]


def _leaf_verdict(leaf: jax.Array, saturation_dtype: DTypeLike | None) -> jax.Array:
    """Whether an array has an infinity, and whether it has a NaN: bool[2]."""
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    inf = jnp.isinf(leaf)
    if saturation_dtype is not None:
        inf |= jnp.abs(leaf) >= jnp.asarray(jnp.finfo(saturation_dtype).max).astype(leaf.dtype)
    # One int8 code for each element, 1 for an infinity and -1 for a NaN, so that one read of the
    # array finds both. Its extremes are taken, not a bitwise "or", because a reduction by "or" of
    # an array sharded over CPU devices does not compile; and of integers, because XLA's maximum of
    # floats on CPUs can lose a NaN.
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
      int32[2]: arrays with an infinity, arrays with a NaN. An array with both counts in both.

    Raises:
      TypeError: if a leaf is no array.
      ValueError: if `saturation_dtype` is not floating, or an array was donated.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> ampx.count_nonfinite({"a": jnp.array([jnp.inf, jnp.nan]), "b": jnp.ones(3)})
      Array([1, 1], dtype=int32)
    """
    if saturation_dtype is not None:
        saturation_dtype = as_dtype("saturation_dtype", saturation_dtype, "floating")
    check_arrays("tree", tree)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    leaves = [leaf for leaf in leaves if leaf.size]
    if not leaves:
        return jnp.zeros(2, jnp.int32)
    with jax.named_scope("ampx.verdict"):
        found = jnp.stack([_leaf_verdict(leaf, saturation_dtype) for leaf in leaves])
        counts = jnp.sum(found, axis=0, dtype=jnp.int32)
    return agree_on(counts, axis_names)


def agree_on(counts: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Sums each device's counts over mapped axes, so that all devices hold the same; int32[2].

    A sum of integers loses nothing. `pmax` of floats could return the other operand for a NaN.
    """
    axes = as_axes(axis_names, "axis_names", may_be_empty=True)
    with jax.named_scope("ampx.verdict"):
        return jax.lax.psum(mark_varying(counts, axes), axes)


def is_bad_loss(value: Any, axis_names: Sequence[str], *, must_agree: bool) -> jax.Array:
    """Whether a loss is not finite; bool scalar.

    Args:
      value: the loss, or an array or tree of losses; None is no loss.
      axis_names: mapped axes over which devices may have losses of their own.
      must_agree: whether the answer must be the same on all devices also where types do not tell
        whether losses are, which costs a sum of one integer over them.
    """
    leaves = [leaf for leaf in jax.tree.leaves(value) if is_floating(leaf)]
    if not leaves:
        return jnp.zeros((), bool)
    is_bad = jnp.any(jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves]))
    own = varying_axes(is_bad)
    # A loss that was summed over an axis does not vary over it. Unchecked, any loss might.
    axes = [a for a in axis_names if a in own or (must_agree and not tracks_varying(a))]
    return agree_on(is_bad.astype(jnp.int32), axes) > 0


def is_infinite(norm: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Whether the norm of gradients is not finite on any device; bool scalar."""
    return agree_on((~jnp.isfinite(norm)).astype(jnp.int32), axes) > 0


def mark_overflowing(updates: Any, params: Any) -> Any:
    """Makes finite updates infinite where they would make a half parameter overflow.

    65000 + 1000 fits float32, where the sum is computed, and becomes infinite when it is rounded to
    the parameter's float16. The update is the only thing that is looked at later, so it has to show
    that. Parameters that are infinite already are left alone.

    Args:
      updates: what the inner transformation returned.
      params: the parameters, or None: then nothing is marked.
    """

    def land(param: Any, update: Any) -> Any:
        if param is None or not is_floating(update):
            return update
        param = jnp.asarray(param)
        if param.dtype.itemsize > 2:
            return update  # added in float32 or wider: an overflow would be the optimizer's own
        wide = wider_dtype(param.dtype, update.dtype)
        total = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
        fits = jnp.isfinite(total) | ~jnp.isfinite(param)
        return jnp.where(fits, update, jnp.full_like(update, jnp.inf))

    if params is None:
        return updates
    return jax.tree.map(land, params, updates, is_leaf=lambda leaf: leaf is None)


def unscale(tree: Any, loss_scale: jax.Array) -> Any:
    """Divides gradients by their loss scale, in float32 or wider; other leaves stay as they are.

    With a power of two this is exact: for S = 2**k, 1/S = 2**-k is a float32 number, and g * 2**-k
    has the digits of g with k less in the exponent. Only a result below 2**-126 could lose digits,
    and then g / S would lose the same. With another S both 1/S and the product are rounded, which
    makes an error of at most one part in 2**23.
    """

    def divide(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        wide = wider_dtype(leaf.dtype, jnp.float32)
        # A product, not a quotient. XLA recomputes a product in each fusion that reads it, while it
        # stores a quotient, which is expensive to compute: 4 bytes a parameter more.
        return leaf.astype(wide) * (1 / loss_scale).astype(wide)

    return jax.tree.map(divide, tree)


def unscale_and_sum(per_loss: Sequence[Any], scales: jax.Array) -> Any:
    """Divides each loss's gradients by its own scale, then adds them.

    g_1 / S_1 + g_2 / S_2, since a sum of g_1 and g_2 cannot be divided by two scales. It is
    float32, though the gradients may be half: unscaled, most of them are too small for float16.
    """
    unscaled = [unscale(grads, scales[i]) for i, grads in enumerate(per_loss) if grads is not None]
    return jax.tree.map(lambda first, *rest: sum(rest, first), *unscaled)
