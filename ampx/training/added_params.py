"""Optimizer states for a model that has changed: parameters added, thawed, or frozen.

torch adds parameters to a running optimizer by `add_param_group`. An optax state mirrors the
parameters it was made for, so for others it has to be made anew. What the old state knows is then
carried over, place by place:

    old state                      tx.init(new params)               result
    count          1000            count            0                1000            kept
    mu["body"]     moments         mu["body"]       zeros            moments         kept
    mu["head"]     MaskedNode      mu["head"]       zeros            zeros           thawed
                                   mu["adapter"]    zeros            zeros           added
    mu["stem"]     moments         mu["stem"]       MaskedNode       MaskedNode      frozen

A place is a path: the names and numbers that lead to a leaf. It stands for the same parameter in
both if its names do, whatever wrappers are around.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_transformation
from ampx.flat_buffers.flat_params import FlatParams, is_flat
from ampx.overwritten import split_optimized
from ampx.tree_checks import check_arrays, check_memory, check_opt_state
from ampx.trees import without_marks

Path = tuple[Any, ...]


def extend_state(
    tx: optax.GradientTransformation, opt_state: optax.OptState, params: optax.Params
) -> optax.OptState:
    """The state of a running optimizer for other parameters: added, thawed, frozen or removed ones.

    Parameters that `opt_state` knows keep their moments, master copies and sums. Those that it does
    not know start as `tx.init` starts them. What belongs to no parameter goes on: counts,
    schedules, the loss scale and its totals.

    A parameter is known by its path, so it must keep its name, and lists must grow at their end.
    Counts are shared: added parameters get the bias correction of a running Adam, so their first
    updates may be up to three times as large. In a group of their own in `optax.partition` they
    count for themselves.

    Args:
      tx: the transformation to go on with. It is the one that made `opt_state`, or differs from it
        in its groups and masks alone, such as the labels of `optax.partition`.
      opt_state: the state so far.
      params: all parameters to go on with, old and new. `ampx.fused.FlatParams` may have grown:
        flatten the new tree with the same options.

    Returns:
      A state as `tx.init(params)` makes it.

    Raises:
      TypeError: if `tx` is not a gradient transformation, `opt_state` no optimizer state, or a
        leaf of `params` no array.
      ValueError: if another transformation made `opt_state`, or a parameter has changed its shape
        or dtype.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), init_scale=8.0)
      >>> params = {"body": jnp.ones(2)}
      >>> _, state = tx.update({"body": jnp.array([8.0, 16.0])}, tx.init(params), params)
      >>> params["adapter"] = jnp.zeros(3)
      >>> state = ampx.extend_state(tx, state, params)
      >>> trace = optax.tree.get(state, "trace")
      >>> trace["body"], trace["adapter"]
      (Array([1., 2.], dtype=float32), Array([0., 0., 0.], dtype=float32))
    """
    check_transformation("tx", tx)
    check_opt_state("opt_state", opt_state)
    check_memory("opt_state", opt_state)
    trained, _ = split_optimized(params)
    check_arrays("params", trained if jax.tree.leaves(trained) else params, may_be_shapes=True)
    return _merge(opt_state, tx.init(trained), ())


def _merge(old: Any, fresh: Any, path: Path) -> Any:
    """`fresh`, with all that `old` has at the same places."""
    if _is_nothing(old) or _is_nothing(fresh):
        return fresh
    if is_flat(old) and is_flat(fresh) and old.layout != fresh.layout:
        return _merge_flat(old, fresh, path)
    if without_marks(type(old)) is not without_marks(type(fresh)) and not (
        _is_array(old) and _is_array(fresh)
    ):
        raise ValueError(
            f"opt_state{_name(path)} is {_describe(old)}, and that of tx {_describe(fresh)}: "
            "opt_state must come from tx, or from one that differs in groups and masks alone"
        )
    if _is_array(fresh):
        return _keep(old, fresh, path)
    new_children, structure = _flatten_once(fresh)
    old_children = dict(_flatten_once(old)[0])
    is_sequence = type(fresh) in (tuple, list)
    if is_sequence and len(new_children) != len(old_children):
        # Of parameters a sequence may grow. One of states is a chain, of other transformations.
        children = [child for _, child in new_children] + list(old_children.values())
        if any(hasattr(child, "_fields") for child in children):
            raise ValueError(
                f"opt_state{_name(path)} holds {len(old_children)} states, and that of tx "
                f"{len(new_children)}: opt_state must come from a chain of the same transformations"
            )
    return structure.unflatten(
        [
            _merge(old_children[key], child, (*path, key)) if key in old_children else child
            for key, child in new_children
        ]
    )


def _merge_flat(old: FlatParams, fresh: FlatParams, path: Path) -> FlatParams:
    """The same for flat buffers of which parameters lie in other places now."""
    if not all(map(_is_array, (*old.buffers, *fresh.buffers))):
        raise ValueError(
            f"opt_state{_name(path)} has flat buffers that do not hold plain arrays, such as "
            "moments of 8 bits or the buffers of a masked group: their layout cannot change. Train "
            "added parameters in a group of their own, or as a tree"
        )
    tree = _merge(old.tree(), fresh.tree(), path)
    leaves, buckets = jax.tree.leaves(tree), fresh.layout.buckets
    return FlatParams(
        tuple(bucket.join([leaves[i] for i in bucket.leaves]) for bucket in buckets), fresh.layout
    )


def _keep(old: Any, fresh: Any, path: Path) -> Any:
    if jnp.shape(old) != jnp.shape(fresh) or jnp.result_type(old) != jnp.result_type(fresh):
        raise ValueError(
            f"opt_state{_name(path)} is {_describe(old)}, and for the new parameters "
            f"{_describe(fresh)}: a parameter that stays must keep its shape and dtype. Give one "
            "that has changed another name"
        )
    return old


def _flatten_once(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their keys, and its structure."""
    children, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return [(path[0], child) for path, child in children], structure


def _is_nothing(node: Any) -> bool:
    # What optax puts in the place of a parameter that is not in a group.
    return node is None or isinstance(node, optax.MaskedNode)


def _is_array(node: Any) -> bool:
    return jax.tree_util.all_leaves([node])


def _name(path: Path) -> str:
    return jax.tree_util.keystr(path)


def _describe(node: Any) -> str:
    if _is_array(node) and hasattr(node, "dtype"):
        return f"an array {jnp.result_type(node)}{list(jnp.shape(node))}"
    return f"a {type(node).__name__}"
