"""Clipping that needs one bucket of gradients, where a global norm needs all of them.

A clip by the global norm multiplies every gradient by a factor that depends on all of them. Then
the first update waits for the last bucket, and no reduction hides behind an update. A factor for
each bucket keeps the buckets independent. It is another algorithm, not an approximation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import as_number, as_positive_int
from ampx.flat_buffers.buckets import as_order, bucket_layout
from ampx.function_checks import check_callable
from ampx.model_axes import as_model_axes, untracked_of_leaves
from ampx.tree_checks import check_gradients
from ampx.trees import convert_numbers, is_floating
from ampx.updates.gradient_norms import add_up, compute_clip_factor


def clip_by_bucket_norm(
    max_norm: float,
    *,
    bucket_bytes: int | None = None,
    group_of: Callable[[str, Any], Hashable] | None = None,
    order: Sequence[int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clips the gradients of each bucket by their own norm.

    Not the same as `optax.clip_by_global_norm`: each bucket has its own factor, so the direction of
    the whole gradient changes. But a bucket does not wait for the others, and the optimizer goes on
    with the first while the last is being reduced. Give it the arguments of `ampx.all_reduce`.
    Where parameters are divided, norms are those of the whole: see `model_axes` in
    `ampx.train_step`.

    Args:
      max_norm: largest norm of a bucket.
      bucket_bytes: see `ampx.bucket_layout`.
      group_of: see `ampx.bucket_layout`.
      order: see `ampx.bucket_layout`.

    Returns:
      An optax transformation without state.

    Raises:
      TypeError: for an argument of the wrong kind.
      ValueError: if a number is not positive.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.clip_by_bucket_norm(1.0, bucket_bytes=8)
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([0.3, 0.4])]
      >>> print(*(g.round(3) for g in tx.update(grads, tx.init(grads))[0]))
      [0.6 0.8] [0.3 0.4]
    """
    max_norm = as_number("max_norm", max_norm, above=0, may_be_infinite=True)
    if bucket_bytes is not None:
        bucket_bytes = as_positive_int("bucket_bytes", bucket_bytes)
    if group_of is not None:
        check_callable("group_of", group_of, "group_of(path, leaf)")
    order = None if order is None else as_order(order)

    def init(params: optax.Params) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, model_axes: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_gradients("updates", updates, params)
        updates = convert_numbers(updates)
        # From shapes alone. They are the buckets of an `ampx.all_reduce` with equal arguments where
        # all parameters are divided alike, and none lies in flat buffers.
        layout = bucket_layout(updates, bucket_bytes=bucket_bytes, group_of=group_of, order=order)
        leaves, structure = jax.tree.flatten(updates)
        untracked = untracked_of_leaves(updates, as_model_axes(model_axes))
        for bucket in layout.buckets:
            numbers = [i for i in bucket.leaves if is_floating(leaves[i])]
            norm = jnp.sqrt(add_up([leaves[i] for i in numbers], [untracked[i] for i in numbers]))
            factor = compute_clip_factor(norm, max_norm)
            for i in numbers:
                leaves[i] = leaves[i] * factor.astype(leaves[i].dtype)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformationExtraArgs(init, update)
