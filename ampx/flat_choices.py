"""What is said of parameters, one by one, said of the flat buffers that they live in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from ampx.flat_params import FlatParams, has_flat, is_flat
from ampx.flattening import laid_out
from ampx.trees import chosen, path_name


def per_buffer(choice: Any) -> Any:
    """A mask, or labels, of parameters as optax's own wrappers want it where these are flat.

    `optax.masked`, `optax.partition` and masks of optax's optimizers are shown buffers, where
    `p.ndim > 1` is False for all. Optimizers of `ampx.fused` need no such help.

    Args:
      choice: a tree of bools or labels, a prefix of one, or a function of the parameters, as
        optax takes it.

    Returns:
      A function of parameters, flat or not. For flat ones `choice` is shown the tree, as shapes
      and dtypes.

    Raises:
      ValueError: when it is called, if parameters of one buffer differ in it.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> def matrices(params):
      ...     return jax.tree.map(lambda p: p.ndim > 1, params)
      >>> params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
      >>> flat = ampx.fused.flatten(params, mask=matrices)
      >>> tx = optax.adamw(0.1, mask=ampx.fused.per_buffer(matrices))
      >>> updates, _ = tx.update(flat, tx.init(flat), flat)
      >>> updates.tree()["b"]
      Array([-0., -0., -0.], dtype=float32)
    """
    if choice is None:
        return None

    def of(params: Any) -> Any:
        if not has_flat(params) or has_flat(choice):
            return chosen(choice, params)
        view = jax.tree.map(
            lambda node: node.shapes() if is_flat(node) else node, params, is_leaf=is_flat
        )
        of_tree = jax.tree.broadcast(chosen(choice, view), view, is_leaf=_is_masked)
        nodes, structure = jax.tree.flatten(params, is_leaf=is_flat)
        parts = structure.flatten_up_to(of_tree)
        pairs = zip(nodes, parts, strict=True)
        return structure.unflatten(
            [_of_buffers(node, part) if is_flat(node) else part for node, part in pairs]
        )

    return of


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _of_buffers(flat: FlatParams, of_tree: Any) -> FlatParams:
    layout = flat.layout
    of_leaves = jax.tree.leaves(of_tree, is_leaf=_is_masked)
    values = []
    for name, bucket in zip(layout.names, layout.buckets, strict=True):
        first = bucket.leaves[0]
        for i in bucket.leaves:
            if of_leaves[i] != of_leaves[first]:
                paths = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(of_tree)]
                raise ValueError(
                    f"{paths[first]!r} has {of_leaves[first]!r} and {paths[i]!r} has "
                    f"{of_leaves[i]!r} in a mask or labels, but both lie in the flat buffer "
                    f"{name!r}: give flatten the same mask, flatten(params, mask=...), or a "
                    "group_of that keeps them apart"
                )
        values.append(of_leaves[first])
    return FlatParams(tuple(values), layout)


def on_tree(fun: Callable[[Any], Any], params: Any) -> Any:
    """`fun(params)` for a function that keeps shapes, with flat parameters as the tree they hold.

    A parameter whose dtype changes moves to another buffer of its group.
    """
    if not is_flat(params):
        return fun(params)
    own, tree = params.layout, fun(params.tree())
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    groups = {paths[i]: bucket.group for bucket in own.buckets for i in bucket.leaves}
    return laid_out(
        tree,
        lambda path, leaf: groups.get(path, ()),
        row=own.row,
        bucket_bytes=own.bucket_bytes,
        multiple_of=own.multiple_of,
    )
