"""The global norm of gradients, and whether they are finite, from one pass over them.

A clip needs the norm, the square root of the sum of squares of all gradients. A loss scale needs a
verdict: is every gradient finite? One sum S of squares answers both, nearly always:

    S is finite      =>  all its terms are, so all gradients are finite, and the norm is sqrt(S)
    S is not finite  =>  some gradient is not finite, or finite squares overflowed: look again

The square of 1.9e19 overflows float32, and a step with large finite gradients must not be skipped.
So the second look, under a `lax.cond`, sums the squares of g / 2**90. It tells the two cases apart,
and costs a second pass over memory only in the rare step that needs it. On a GPU a branch costs
more than the second sum, which one kernel computes beside the first: XLA has no branch there.

Where a gradient is divided over mapped axes, each device sums the squares of its shard, and the
sums are added over exactly those axes. A replicated gradient is the same on all devices and is
counted once. `ampx.model_axes` knows which is which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.mesh_axes import add_divided, can_add_divided, mark_varying, varying_axes
from ampx.model_axes import NOT_DIVIDED, ModelAxes, add_over_shards, untracked_of_leaves
from ampx.trees import is_floating, widen
from ampx.updates.devices import chooses_behind_updates
from ampx.updates.skipped_derivatives import stop_gradient_if
from ampx.updates.tails import Tail

# A float32 g is below 2**128, so (g / 2**90)**2 is below 2**76, and 2**51 of these add up to less
# than 2**127: finite gradients of any model have a finite sum in this unit. A g below 2**27 may
# vanish in it, its square being below 2**-126. That does not matter: 2**40 of them contribute 2**94
# to a sum of squares that was found to be at least 2**128.
_LARGE_UNIT = 2.0**90
# The second look stacks arrays that are alike, up to a fortieth of all elements (0.1 bytes a
# parameter), but at least half a MiB and at most 16 MiB: the compiler may have chosen layouts that
# types do not tell, and must gather a stack then. Fewer than `_SMALLEST_GROUP` gain nothing.
_STACKED = (2**17, 2**22)  # elements
_SMALLEST_GROUP = 8
# Gradients of this norm have squares that add up in float32, also where rounding doubles the sum.
_LARGEST_CLIP = 2.0**63


class JudgedNorm(NamedTuple):
    """What one pass over gradients tells.

    Attributes:
      norm: float32 scalar, global norm of the gradients times their factor, over all shards.
      counts: int32[2], how many arrays of this device hold an infinity, and how many a NaN. An
        array with both counts as one with a NaN.
    """

    norm: jax.Array
    counts: jax.Array


@jax.named_scope("ampx.verdict")
def measure_and_judge(
    grads: Any,
    factor: jax.Array | None = None,
    squares: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None,
    model_axes: ModelAxes = NOT_DIVIDED,
) -> JudgedNorm:
    """Measures the norm and takes the verdict in one pass; the module's docstring says how.

    Args:
      grads: any pytree of arrays; leaves that are not floating are left out. Along mapped axes over
        which a leaf varies, it is taken as a shard.
      factor: float32 scalar that multiplies the norm, as if every gradient had been multiplied.
      squares: see `Tail`.
      model_axes: over which axes leaves are divided besides.

    Returns:
      A `JudgedNorm`. Its counts are those of this device, not yet agreed on.
    """
    leaves, untracked = _find_floating(grads, model_axes)
    if not leaves:
        return JudgedNorm(jnp.zeros((), jnp.float32), jnp.zeros(2, jnp.int32))
    # XLA sees the same cast of a half gradient to float32 here and in the update. Without a
    # barrier it casts once and keeps the result in memory, 4 bytes a parameter to write and to
    # read again, though casting twice would cost nothing. One barrier for each leaf: in jax 0.10 a
    # joint one makes all leaves vary over every mapped axis that any of them varies over.
    leaves = [lax.optimization_barrier(leaf) for leaf in leaves]
    axes = sorted(varying_axes(leaves))
    multiplier = jnp.asarray(1 if factor is None else factor, jnp.float32)
    total = add_over_shards(squares(leaves), untracked) if squares else add_up(leaves, untracked)

    def all_is_well() -> tuple[jax.Array, ...]:
        # Branches of a cond must return the same types, and what a value varies over is in its
        # type: the other branch's counts come from the leaves, so these zeros are marked alike.
        none = mark_varying(jnp.zeros((), jnp.int32), axes)
        return total, jnp.float32(1), none, none

    chooses = squares is None and chooses_behind_updates()

    def second_look() -> tuple[jax.Array, ...]:
        groups = _group_singly(leaves, untracked) if chooses else _group_alike(leaves, untracked)
        large = _sum_large_squares(groups)
        total = add_over_shards(list(map(jnp.sum, large)), [group.untracked for group in groups])
        return total, jnp.float32(_LARGE_UNIT), *mark_varying(_count_sums(large), axes)

    # The counts leave the branch as scalars. Out of a vector, each loop that reads one would slice
    # it at another place, and XLA compiles each such loop for itself.
    is_well = jnp.isfinite(total)
    if chooses:
        pairs = zip(all_is_well(), second_look(), strict=True)
        total, unit, infinities, nans = [jnp.where(is_well, *pair) for pair in pairs]
    else:
        total, unit, infinities, nans = lax.cond(is_well, all_is_well, second_look)
    return JudgedNorm(jnp.sqrt(total) * multiplier * unit, jnp.stack([infinities, nans]))


def count_again(leaves: Sequence[jax.Array]) -> jax.Array:
    """Counts arrays with an infinity and arrays with a NaN: the second look by itself; int32[2].

    An array with both counts as one with a NaN.
    """
    if not leaves:
        return jnp.zeros(2, jnp.int32)
    # Without a barrier XLA multiplies a loss scale that is a constant by 1/unit first, and what has
    # overflowed is finite again.
    leaves = [lax.optimization_barrier(leaf) for leaf in leaves]
    group = _group_singly if chooses_behind_updates() else _group_alike
    return jnp.stack(_count_sums(_sum_large_squares(group(leaves, [()] * len(leaves)))))


def sum_squares(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the sum of squares of each array, a scalar in float32 or wider.

    A sum and not a maximum of absolute values: XLA's maximum on CPUs loses a NaN (it returns the
    other operand inside a reduction of some thousand elements), and a sum does not.
    """
    return [jnp.sum(_wide_squares(leaf)) for leaf in leaves]


def add_up(leaves: Sequence[jax.Array], untracked: Sequence[Sequence[str]]) -> jax.Array:
    """Computes the sum of squares of all arrays together, over all shards; float32 scalar.

    Args:
      leaves: floating arrays.
      untracked: for each the axes over which it is divided and of which types do not tell.
    """
    total = sum_at_once(leaves)
    if total is None:
        return add_over_shards(sum_squares(leaves), untracked)
    return total.astype(jnp.float32)


def sum_at_once(leaves: Sequence[jax.Array]) -> jax.Array | None:
    """Computes the sum of squares of all arrays, for which devices on an Explicit mesh add once.

    Returns:
      A scalar in float32 or wider; None where no type says that an array is divided so, and where
      arrays need sums of different dtypes.
    """
    if not can_add_divided(leaves):
        return None
    squares = [_wide_squares(leaf) for leaf in leaves]
    return add_divided(squares) if len({each.dtype for each in squares}) == 1 else None


def _wide_squares(leaf: jax.Array) -> jax.Array:
    """|x|**2 of each element, in float32 or wider."""
    wide = widen(leaf)
    # This is traced for each array, and `x**2` takes longer to trace.
    if jnp.iscomplexobj(wide):
        return lax.square(wide.real) + lax.square(wide.imag)
    return lax.square(wide)


class _Group(NamedTuple):
    """Arrays of one shape, dtype and layout, divided over the same axes of which no type tells."""

    leaves: list[jax.Array]
    untracked: tuple[str, ...]


def _group_singly(leaves: Sequence[jax.Array], untracked: Sequence[Sequence[str]]) -> list[_Group]:
    return [_Group([leaf], tuple(axes)) for leaf, axes in zip(leaves, untracked, strict=True)]


def _group_alike(leaves: Sequence[jax.Array], untracked: Sequence[Sequence[str]]) -> list[_Group]:
    """Groups arrays that can be stacked, for one reduction instead of one each.

    The compiler's time grows with the number of operations, and in most models many arrays are
    alike. A stack is a copy, so a group is kept small beside what there is anyway.
    """
    kinds: dict[Any, list[jax.Array]] = {}
    for leaf, axes in zip(leaves, untracked, strict=True):
        kinds.setdefault((jax.typeof(leaf), tuple(axes)), []).append(leaf)
    most = int(np.clip(sum(leaf.size for leaf in leaves) // 40, *_STACKED))
    groups = []
    for (kind, axes), alike in kinds.items():
        size = most // max(kind.size, 1)
        size = size if min(size, len(alike)) >= _SMALLEST_GROUP else 1
        # As many in one group as in another, as nearly as may be: equal loops are compiled once.
        number = math.ceil(len(alike) / size)
        size = math.ceil(len(alike) / number)
        groups += [_Group(alike[k : k + size], axes) for k in range(0, len(alike), size)]
    return groups


def _sum_large_squares(groups: Sequence[_Group]) -> list[jax.Array]:
    """The sums of squares of each array in the large unit, of shape (arrays,) for each group."""
    # Each reduction gets a scalar of its own, which only a barrier keeps apart. If several
    # reductions share one scalar, XLA's CPU backend broadcasts it to an array in memory, and
    # reserves that memory whether the branch is taken or not.
    inverses = lax.optimization_barrier([jnp.float32(1 / _LARGE_UNIT)] * len(groups))
    large: list[jax.Array] = []
    # What was summed last, of leaves that vary over the same axes: a number that varies would make
    # all that waits for it vary as well, and a replicated leaf would be counted twice.
    before: dict[frozenset[str], jax.Array] = {}
    for group, inverse in zip(groups, inverses, strict=True):
        varying = varying_axes(group.leaves)
        large.append(_large_squares(before.get(varying), group.leaves, inverse))
        before[varying] = large[-1][0]
    return large


def _count_sums(large: Sequence[jax.Array]) -> list[jax.Array]:
    """How many sums in the large unit are infinite, and how many NaN: two int32 scalars.

    Those of finite arrays are finite. NaN + inf is NaN: an array with both shows its NaN alone.
    """
    widest = max((s.dtype for s in large), key=lambda dtype: dtype.itemsize)
    sums = jnp.concatenate([s.astype(widest) for s in large])
    return [jnp.sum(found, dtype=jnp.int32) for found in (jnp.isinf(sums), jnp.isnan(sums))]


def _large_squares(
    before: jax.Array | None, alike: list[jax.Array], inverse_unit: jax.Array
) -> jax.Array:
    """The sums of squares of a group in the large unit; shape (arrays,).

    XLA would make all stacks before it reduces the first, as nothing says otherwise, and reserve
    memory for all of them. So each stack waits for a sum of the one before, and all use the same
    memory: its first array is multiplied by a 1 that is 0 if that sum is negative. No sum of
    squares is, but no compiler knows. A barrier would not do: in jax 0.10 nothing is left of it
    when XLA puts operations in order. A branch for each stack would do, at the price of handing
    each array into two branches.

    Args:
      before: a sum of the stack before; None for the first one.
      alike: arrays of one type.
      inverse_unit: float32 scalar, 1 over the unit.
    """
    first, *others = alike
    if others and before is not None:
        one = lax.select(before < 0, jnp.zeros_like(before), jnp.ones_like(before))
        first = first * one.astype(first.dtype)
    stack = jnp.stack([first, *others])
    wide = widen(stack)
    squares = _wide_squares(wide * inverse_unit.astype(wide.dtype))
    # The barrier keeps XLA from adding up the whole stack a second time, for the sum of these sums.
    return lax.optimization_barrier(jnp.sum(squares, axis=range(1, squares.ndim)))


def _find_floating(
    grads: Any, model_axes: ModelAxes
) -> tuple[list[jax.Array], list[tuple[str, ...]]]:
    """The floating leaves, and the axes of each that types do not tell."""
    pairs = zip(jax.tree.leaves(grads), untracked_of_leaves(grads, model_axes), strict=True)
    own = [(leaf, axes) for leaf, axes in pairs if is_floating(leaf)]
    return [leaf for leaf, _ in own], [axes for _, axes in own]


def compute_norm(grads: Any, model_axes: ModelAxes = NOT_DIVIDED) -> jax.Array:
    """Computes the norm of `measure_and_judge` without a verdict; float32 scalar.

    It has no barrier, so XLA can merge it with the norm that a clip computes nearby.
    """
    leaves, untracked = _find_floating(grads, model_axes)
    return jnp.sqrt(add_up(leaves, untracked))


def compute_clip_factor(norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """Computes what gradients of this norm are multiplied by to have at most `max_norm`; float32.

    A norm of NaN is not above `max_norm` and gives 1, one of infinity gives 0. Neither mends
    gradients: to skip such a step is the task of a loss scale.
    """
    return jnp.where(norm > max_norm, max_norm / norm, jnp.ones_like(norm))


def measure_norm(tail: Tail, grads: Any, model_axes: ModelAxes = NOT_DIVIDED) -> jax.Array:
    """The norm of gradients times the tail's factor, measured here if nobody has done so."""
    factor = tail.factor
    if tail.skip is not None:
        factor, grads = stop_gradient_if(tail.skip, (factor, grads))
    if tail.norm is None:
        return measure_and_judge(grads, factor, tail.squares, model_axes).norm
    return tail.norm if tail.skip is None else _derive_norm(tail.norm, factor, grads, model_axes)


def _derive_norm(norm: jax.Array, factor: Any, grads: Any, model_axes: ModelAxes) -> jax.Array:
    """A norm that was measured before; its derivative is taken of `factor` and `grads` anew.

    The one that it has may be NaN on a skip: nobody knew of the skip when it was measured.
    """
    if factor is None:
        factor = jnp.ones((), jnp.float32)

    @jax.custom_jvp
    def known(norm: jax.Array, factor: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        del factor, leaves
        return norm

    @known.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        norm = known(*primals)  # so derivatives of second order go this way, too
        _, factor, leaves = primals
        _, of_factor, changes = tangents
        wide = [*map(widen, leaves)]
        # Of |f g| it is f**2 (g, dg) / |f g| + |f g| df / f. Nothing but gradients is in what is
        # summed over shards: f differs where devices have loss scales of their own.
        parts = [
            jnp.sum(jnp.real(jnp.conj(x) * change.astype(x.dtype)))
            for x, change in zip(wide, changes, strict=True)
        ]
        size = jnp.where(norm == 0, jnp.ones_like(norm), norm)
        change = add_over_shards(parts, untracked) * (factor / size) * factor
        return norm, (change + norm * of_factor / factor).astype(norm.dtype)

    leaves, untracked = _find_floating(grads, model_axes)
    return known(norm, factor, leaves) if leaves else norm


def fold_clip(tail: Tail, grads: Any, model_axes: ModelAxes = NOT_DIVIDED) -> Tail:
    """Folds the clip of a tail into its factor, so that both cost one multiplication.

    g * (1/scale) * clip = g * (1/scale * clip). The norm that the new tail carries is that of the
    clipped gradients. Where 1/scale * clip is below 2**-126 the factor underflows to zero, and the
    gradients are clipped to nothing.
    """
    if tail.max_norm is None:
        return tail
    norm = measure_norm(tail, grads, model_axes)
    # A loss scale asks nothing of what is clipped but that its norm is finite, so what comes out
    # must have squares that add up.
    is_number = isinstance(tail.max_norm, int | float)
    limit = (min if is_number else jnp.minimum)(tail.max_norm, _LARGEST_CLIP)
    if tail.skip is not None:
        limit = stop_gradient_if(tail.skip, limit)
    clip = compute_clip_factor(norm, limit)
    factor = clip if tail.factor is None else tail.factor * clip
    return dataclasses.replace(tail, factor=factor, max_norm=None, norm=norm * clip)
