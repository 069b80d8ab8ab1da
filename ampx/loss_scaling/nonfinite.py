"""What makes a step bad: infinities and NaN in gradients, counted; and the division by the scale.

The verdict on a step is three integers: how many arrays hold an infinity, how many a NaN, and
whether finite gradients are too large: their squares do not add up to a finite number. Devices
agree on it by one sum of three int32, twelve bytes, before any gradient is sent:

    device 0:  [0, 0, 0]  --+
    device 1:  [0, 1, 0]  --+--> psum: [2, 1, 1], on every device: all skip this step
    device 2:  [2, 0, 1]  --+

Each device looks at its own gradients only, before they are summed over devices. That is sound. If
one of them holds an infinity or a NaN, so does the sum. And if the squares of each of n devices add
up to less than the largest float32 over n**2, the gradients that are summed over devices have a
finite norm too, in float32: by the triangle inequality it is at most n times the largest of theirs.

Arrays are counted and not elements because int32 must not wrap. A model of 2**32 parameters that
are all NaN has 2**32 bad elements, which is 0 in int32: a perfect step. Arrays times devices stay
below 2**31 with ten thousand arrays on two hundred thousand devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from ampx.checking import as_dtype
from ampx.mesh_axes import as_axes, count_devices, mark_varying, tracks_varying, varying_axes
from ampx.tree_checks import check_arrays
from ampx.trees import is_floating, wider_dtype
from ampx.updates.branching import run_unless
from ampx.updates.gradient_norms import count_again, sum_at_once, sum_squares


class Verdict(NamedTuple):
    """A verdict that was taken and agreed on before the gradients were reduced.

    Attributes:
      counts: int32[2], as from `count_nonfinite`, the same on all devices.
      axes: the mapped axes over which devices agreed on it.
      is_too_large: bool scalar, as from `judge`; None if nobody has measured that.
      overlaps: whether the reduction of the gradients is to overlap with their updates. Static.
    """

    counts: jax.Array
    axes: tuple[str, ...]
    is_too_large: jax.Array | None = None
    overlaps: bool = False


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
    leaves = _floating(tree)
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
    count_devices(axes)  # for its error
    with jax.named_scope("ampx.verdict"):
        return jax.lax.psum(mark_varying(counts, axes), axes)


def find_verdict_axes(grads: Any, scale: jax.Array, named: Sequence[str]) -> tuple[str, ...]:
    """The axes over which devices must agree on a verdict: those that are named, and by types.

    By its type a gradient varies over the axes that it was not summed over, and over those that
    divide its parameter. Devices that share one loss scale must come to one verdict along all of
    them. Only where the scale varies, too, has each device a model and a scale of its own.

    Args:
      grads: gradients of this device.
      scale: their loss scale.
      named: axes that a caller has named.
    """
    by_type = varying_axes(_floating(grads)) - varying_axes(scale)
    return tuple(dict.fromkeys([*named, *sorted(by_type)]))


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


def judge(
    per_loss: Sequence[Any],
    loss_scales: Sequence[jax.Array],
    axis_names: Sequence[str] = (),
    *,
    saturation_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Judges gradients, reading each of them once if all is well.

    Args:
      per_loss: for each loss the gradients of this device, times its scale; or None.
      loss_scales: float32 scalars, one for each loss.
      axis_names: mapped axes whose devices are to agree.
      saturation_dtype: see `count_nonfinite`.

    Returns:
      int32[losses, 2], arrays with an infinity and with a NaN; a bool scalar, whether the sum
      of the squares of finite, unscaled gradients, over devices and losses, may not be finite; and
      a scalar in float32 or wider, the sum of the squares of what this device has of them.
    """
    given = [
        (grads, scale)
        for grads, scale in zip(per_loss, loss_scales, strict=True)
        if grads is not None
    ]
    with jax.named_scope("ampx.verdict"):
        # Multiplied in the same fusion that squares and adds. A report of the norm is the same sum.
        unscaled = [leaf for grads, scale in given for leaf in _floating(unscale(grads, scale))]
        total = sum_at_once(unscaled)
        if total is None:
            every = sum_squares(unscaled)
            widest = max((s.dtype for s in every), key=lambda dtype: dtype.itemsize, default=None)
            same = [s.astype(widest) for s in every] or [jnp.zeros((), jnp.float32)]
            total = functools.reduce(lax.add, same)
        is_fine = jnp.isfinite(total * _headroom(axis_names, len(given)))
        # `vmap` makes all that a branch reads vary as its predicate does, and JAX refuses to mark
        # inside what varies already: so all gets the marks in front of it.
        axes = sorted(varying_axes(is_fine))
        read = [[mark_varying(leaf, axes) for leaf in _floating(grads)] for grads in per_loss]

        def look() -> list[jax.Array]:
            if saturation_dtype is None:
                counts = list(map(count_again, read))
            else:
                counts = [count_nonfinite(own, saturation_dtype=saturation_dtype) for own in read]
            return [*(count[place] for count in counts for place in (0, 1)), jnp.ones((), bool)]

        # A finite sum has finite terms. Saturated numbers are finite, too, and are looked for.
        # Outside of `jit` a branch would be compiled anew in every call. What leaves the branch are
        # scalars, one of which says that there was no finite sum: XLA compiles a loop for each
        # counter of the state, and would repeat in many of them the sum over all gradients.
        if saturation_dtype is None and isinstance(is_fine, jax.core.Tracer):
            *counts, is_large = run_unless(is_fine, look, optax.tree.zeros_like, may_choose=True)
        else:
            *counts, _ = look()
            is_large = ~is_fine
    found = agree_on(jnp.stack([*counts, is_large.astype(jnp.int32)]), axis_names)
    return found[:-1].reshape(len(per_loss), 2), found[-1] > 0, total


def largest_norm(axis_names: Sequence[str]) -> float:
    """The bound of the norm of one device's gradients: below it no sum of squares overflows."""
    return math.sqrt(float(jnp.finfo(jnp.float32).max) / _headroom(axis_names, 1))


def _headroom(axis_names: Sequence[str], terms: int) -> float:
    """What a sum of squares is multiplied by before it is asked whether it is finite.

    If k vectors are added, the squared norm of the sum is at most k**2 times the largest of theirs.
    The 2 makes up for rounding: other code adds the same squares in another order.
    """
    axes = as_axes(axis_names, "axis_names", may_be_empty=True)
    return 2.0 * (terms * count_devices(axes)) ** 2


def _floating(tree: Any) -> list[jax.Array]:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return [leaf for leaf in leaves if leaf.size]


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
    # A product, not a quotient. XLA recomputes a product in each fusion that reads it, while it
    # stores a quotient, which is expensive to compute: 4 bytes a parameter more. And a scalar for
    # each leaf, which only a barrier keeps apart: one that several reductions share XLA's CPU
    # backend writes out as an array.
    leaves, structure = jax.tree.flatten(tree)
    inverses = jax.lax.optimization_barrier([1 / loss_scale] * len(leaves))

    def divide(leaf: Any, inverse: jax.Array) -> Any:
        if not is_floating(leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        wide = wider_dtype(leaf.dtype, jnp.float32)
        return leaf.astype(wide) * inverse.astype(wide)

    return structure.unflatten(map(divide, leaves, inverses))


def unscale_and_sum(per_loss: Sequence[Any], scales: Sequence[jax.Array]) -> Any:
    """Divides each loss's gradients by its own scale, then adds them.

    g_1 / S_1 + g_2 / S_2, since a sum of g_1 and g_2 cannot be divided by two scales. It is
    float32, though the gradients may be half: unscaled, most of them are too small for float16.
    """
    unscaled = [unscale(grads, scales[i]) for i, grads in enumerate(per_loss) if grads is not None]
    return jax.tree.map(lambda first, *rest: sum(rest, first), *unscaled)
