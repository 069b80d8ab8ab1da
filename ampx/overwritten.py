"""Leaves that are no weights: their gradient is their new value.

flax's layers in 8 bits (`flax.linen.fp8_ops`) keep scales, and the maxima of their last operands,
in a collection of its own, `_overwrite_with_gradient`. A gradient is the only thing that leaves a
backward pass, so the backward pass of such a layer hands out what these variables are to be next:

    params  ──► loss ──► gradients          optimizer          next params
    kernel               dL/dkernel    ──►  kernel + update ──►  kernel
    input_scale          the next scale ──────────────────────►  input_scale

An optimizer must not see them: it would add a scale to a scale. Nor may they be averaged, clipped,
divided by a loss scale or counted in a norm. In ampx they are split off where gradients are made:

    value_and_grad     the maximum over micro-batches and devices, as far as it is finite; so do
                       pipelines
    train_step         gives the optimizer the other leaves alone, then replaces these; holds them
                       on a skip
    loss scales        do so, too, for what is inside them: `ampx.loss_scaling.new_values`
    fused.apply        does so, too
    policies           never cast them
    all else           refuses them, by name: `refuse_overwritten`

All else may stand in a chain behind transformations of optax, which would have clipped these leaves
before. A loss scale stands outermost.

flax marks them by a key in the path of the leaf, and so are they known here
(`ampx.trees.is_overwritten`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ampx.flax_modules import OVERWRITE
from ampx.mesh_axes import mark_varying, untracked_axes
from ampx.model_axes import ModelAxes
from ampx.trees import (
    is_marked,
    is_overwritten,
    keep_finite,
    merge_trainable,
    path_name,
    split_trainable,
)


def split_overwritten(tree: Any) -> tuple[Any, Any]:
    """Splits a tree of parameters, or of their gradients, into others and overwritten leaves.

    Returns:
      A tree of the others with None in the place of overwritten leaves, and one of these with None
      in the place of the others, which `merge_trainable` joins; the tree itself and None, if no
      leaf is overwritten.
    """
    # A marked shard of a gradient is one leaf here: where it is left out stands None, as in the
    # parameters, and not a node around None.
    is_shard = functools.partial(is_marked, mark="is_gradient_shard")
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    marks = [is_overwritten(path) for path, _ in pairs]
    if not any(marks):
        return tree, None
    leaves = [leaf for _, leaf in pairs]
    return (
        structure.unflatten([None if mark else x for x, mark in zip(leaves, marks, strict=True)]),
        structure.unflatten([x if mark else None for x, mark in zip(leaves, marks, strict=True)]),
    )


def split_optimized(params: Any) -> tuple[Any, Any]:
    """Splits parameters, or gradients like them, into what an optimizer sees and the rest.

    Not seen are overwritten leaves, and what `split_trainable` leaves out. Of flax's variables
    `{"params": ..., "_overwrite_with_gradient": ...}` an optimizer sees what is under `"params"`,
    as in flax's own `TrainState`: so both make the same optimizer state.

    Returns:
      What `merge_optimized` joins. The rest is None if there is none.
    """
    others, overwritten = split_overwritten(params)
    optimized, rest = split_trainable(others)
    if overwritten is not None:
        rest = merge_trainable(overwritten, rest)
    if _is_flax_pair(rest):
        optimized = optimized["params"]
    return optimized, rest


def leave_overwritten_out(tree: Any) -> Any:
    """Parameters, or gradients, without overwritten leaves alone: see `split_optimized`."""
    others, overwritten = split_overwritten(tree)
    return others["params"] if _is_flax_pair(overwritten) else others


def merge_optimized(optimized: Any, rest: Any) -> Any:
    """Joins what `split_optimized` has split; other parameters may stand in their places."""
    if _is_flax_pair(rest):
        inner = merge_trainable(optimized, rest["params"])
        return type(rest)({"params": inner, OVERWRITE: rest[OVERWRITE]})
    return merge_trainable(optimized, rest)


def _is_flax_pair(variables: Any) -> bool:
    return isinstance(variables, Mapping) and set(variables) == {"params", OVERWRITE}


def replace_overwritten(params: Any, new: Any) -> Any:
    """The parameters with the overwritten leaves of `new`, the second part of a split."""
    return params if new is None else merge_trainable(split_overwritten(params)[0], new)


class Replacement(NamedTuple):
    """The update of an overwritten leaf: what it adds up to with any old value is the new one.

    A difference of new and old would not do: added to the old one it rounds. So a sum with this
    node gives the value, and `optax.apply_updates`, which knows nothing of it, replaces the leaf.

    What else maps over updates sees the arrays inside: `optax.scale` would scale a scale. So they
    are two that no such function changes alike. If they do not fit each other any more, the sum is
    NaN.

    Attributes:
      value: floating array, the new value.
      seal: its bits, inverted, as an array of unsigned integers. Inverted, since zeros in the place
        of both would fit each other.
    """

    value: jax.Array
    seal: jax.Array

    # Without this NumPy would add each field of the tuple to its array.
    __array_ufunc__ = None

    def __radd__(self, old: Any) -> jax.Array:
        """The new value; of this old one only the dtype counts."""
        if self.seal.dtype != _bits_dtype(self.value.dtype):
            raise TypeError(
                f"the update of a leaf under {OVERWRITE!r} was changed after ampx had made it, to "
                f"{self.value.dtype} with {self.seal.dtype}: it is the new value of that leaf, so "
                "nothing may scale or clip it. Put what does so inside the loss scale"
            )
        is_whole = ~jax.lax.bitcast_convert_type(self.value, self.seal.dtype) == self.seal
        new = jnp.where(is_whole, self.value, jnp.full_like(self.value, jnp.nan))
        return new.astype(jnp.asarray(old).dtype)

    __add__ = __radd__  # type: ignore[assignment]


def _bits_dtype(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def make_replacement(value: jax.Array) -> Replacement:
    """The update that replaces a leaf by a value."""
    return Replacement(value, ~jax.lax.bitcast_convert_type(value, _bits_dtype(value.dtype)))


def is_replacement(node: Any) -> bool:
    """Whether a node of a tree of updates is a `Replacement`."""
    return isinstance(node, Replacement)


def add_replacements(updates: Any, new: Any) -> Any:
    """Joins updates of what an optimizer saw with a `Replacement` for each overwritten leaf."""
    return join_new_values(updates, jax.tree.map(make_replacement, new))


def join_new_values(others: Any, new: Any) -> Any:
    """Joins what `leave_overwritten_out` gave, or trees like it, with overwritten leaves.

    Args:
      others: such as updates, or new parameters.
      new: like the second part of `split_overwritten`; its leaves may be `Replacement`s.
    """
    if _is_flax_pair(new):
        return type(new)({"params": others, OVERWRITE: new[OVERWRITE]})
    return jax.tree.map(
        lambda node, other: other if node is None else node,
        new,
        others,
        is_leaf=lambda node: node is None or is_replacement(node),
    )


def keep_finite_overwritten(grads: Any, params: Any) -> Any:
    """Gradients in which overwritten leaves keep the old number where the new one is not finite.

    A layer that saw one infinity would keep it as the largest of its maxima, and hold its scale
    until the maximum leaves the history, 1024 steps later in flax.
    """
    others, new = split_overwritten(grads)
    if new is None:
        return grads
    return merge_trainable(others, keep_finite(new, split_overwritten(params)[1]))


def add_gradients(totals: Any, grads: Any) -> Any:
    """Adds the gradients of a micro-batch to totals; of overwritten leaves it keeps the larger.

    The largest of a batch is the largest of the largest of its parts.
    """

    def add(path: Any, total: jax.Array, grad: jax.Array) -> jax.Array:
        return jnp.maximum(total, grad) if is_overwritten(path) else total + grad

    return jax.tree_util.tree_map_with_path(add, totals, grads)


def lowest_overwritten(totals: Any) -> Any:
    """Totals to begin with: zeros, but in overwritten leaves what is below every number."""

    def lower(path: Any, total: jax.Array) -> jax.Array:
        return jnp.full_like(total, -jnp.inf) if is_overwritten(path) else total

    return jax.tree_util.tree_map_with_path(lower, totals)


def take_largest(overwritten: Any, axes: Sequence[str]) -> Any:
    """The maximum of overwritten leaves over mapped axes, the same on all devices."""
    if not axes:
        return overwritten
    return jax.tree.map(lambda x: jax.lax.pmax(mark_varying(x, axes), axes), overwritten)


def take_largest_of_shards(overwritten: Any, model_axes: ModelAxes) -> Any:
    """The maximum of overwritten leaves over axes that divide the weights, where types do not tell.

    Devices that hold shards of a layer's weights measure different parts of its operands. A scale
    that they share must fit all of them, and stay the same on all.

    Args:
      overwritten: the second part of a split.
      model_axes: over which axes parameters are divided. Along those that a tree names for an
        overwritten leaf itself, each device keeps its own.
    """
    untracked = untracked_axes(model_axes.names)

    def take(path: Any, leaf: jax.Array) -> jax.Array:
        own = model_axes.named_for(path_name(path))
        return take_largest(leaf, tuple(axis for axis in untracked if axis not in own))

    return jax.tree_util.tree_map_with_path(take, overwritten) if untracked else overwritten


def axes_of_optimized(model_axes: ModelAxes, params: Any) -> ModelAxes:
    """The setting for what an optimizer sees: of flax's variables what is under `"params"`.

    Args:
      model_axes: a tree like the variables, or like what is under `"params"`.
      params: the parameters.
    """
    tops = {path.split("/")[0] for path, _ in model_axes.entries}
    is_of_all = _is_flax_pair(params) and tops & set(params)
    return model_axes.below("params") if is_of_all else model_axes


def refuse_overwritten(name: str, tree: Any, fix: str = "") -> None:
    """Refuses a tree with a leaf that is to be replaced by its gradient.

    Args:
      name: of the argument, for the error.
      tree: what was given for it.
      fix: what to do.

    Raises:
      ValueError: if there is one.
    """
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        refuse_path(name, path, fix)


def refuse_path(name: str, path: Any, fix: str = "") -> None:
    """Refuses the path of one leaf; see `refuse_overwritten`."""
    if is_overwritten(path):
        raise ValueError(
            f"{name}: {path_name(path)!r} is no weight: its gradient is its new value, as in "
            "flax's layers in 8 bits, and an optimizer would train it wrongly. "
            + (
                fix
                or "Use ampx.train_step, or flax's TrainState; or put a loss scale around the "
                "whole optimizer, ampx.no_loss_scale(tx) if it needs none, which hides these "
                "leaves from it and replaces them; or give this the others alone, such as "
                f"params['params'], and replace what is under {OVERWRITE!r} by its gradients"
            )
        )
