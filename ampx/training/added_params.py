"""Optimizer states for a model or an optimizer that has changed: parameters added, wrappers put on.

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
both if its names do. A wrapper that is around one of the two optimizers alone, such as a loss scale
that is switched on during training, is looked through: its state has that of another inside.

    LossScaleState                                                  new
        ClippedState                  ClippedState                  kept
            (ScaleByAdamState, ...)       (ScaleByAdamState, ...)   kept
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_transformation
from ampx.flat_buffers.flat_params import FlatParams, is_flat
from ampx.overwritten import split_optimized
from ampx.tree_checks import check_arrays, check_memory, check_opt_state, is_masked
from ampx.trees import open_node, without_marks

KeyPath = tuple[Any, ...]


def extend_state(
    tx: optax.GradientTransformation, opt_state: optax.OptState, params: optax.Params
) -> optax.OptState:
    """The state of a running optimizer for other parameters, or inside of other wrappers.

    Parameters may be added, thawed, frozen or removed. A loss scale, a clip, master weights,
    `multi_steps`, `zero1` or a precision schedule may be switched on or off.

    Parameters that `opt_state` knows keep their moments, master copies and sums. Those that it does
    not know start as `tx.init` starts them. What belongs to no parameter goes on: counts,
    schedules, the loss scale and its totals.

    A parameter is known by its path, so it must keep its name, and lists must grow at their end.
    Counts are shared: added parameters get the bias correction of a running Adam, so their first
    updates may be up to three times as large. In a group of their own in `optax.partition` they
    count for themselves.

    Args:
      tx: the transformation to go on with. It is the one that made `opt_state`, or differs from it
        in its groups and masks, such as the labels of `optax.partition`, and in its wrappers: what
        has the state of another transformation in a field `inner_state`. A wrapper that is new
        starts as it does at first; what one knew that is gone is lost.
      opt_state: the state so far.
      params: all parameters to go on with, old and new. `ampx.fused.FlatParams` may have grown:
        flatten the new tree with the same options.

    Returns:
      A state as `tx.init(params)` makes it.

    Raises:
      TypeError: if `tx` is not a gradient transformation, `opt_state` no optimizer state, or a
        leaf of `params` no array.
      ValueError: if another transformation made `opt_state`, if a wrapper that is gone holds the
        sums of an unfinished window of steps, or if a parameter has changed its shape or dtype.

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
    check_opt_state(opt_state)
    check_memory("opt_state", opt_state)
    trained, _ = split_optimized(params)
    check_arrays("params", trained if jax.tree.leaves(trained) else params, may_be_shapes=True)
    return _merge(opt_state, tx.init(trained), ())


def _merge(old: Any, fresh: Any, path: KeyPath) -> Any:
    """`fresh`, with all that `old` has at the same places."""
    if _is_nothing(old) or _is_nothing(fresh):
        return fresh
    if (is_flat(old) or is_flat(fresh)) and _layout_of(old) != _layout_of(fresh):
        return _merge_flat(old, fresh, path)
    if _class_of(old) is not _class_of(fresh) and not (_is_leaf(old) and _is_leaf(fresh)):
        return _merge_wrapped(old, fresh, path)
    if _is_leaf(fresh):
        return _keep(old, fresh, path)
    new_children, structure = open_node(fresh)
    old_children = dict(open_node(old)[0])
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
            _merge(old_children[key], child, (*path, *key)) if key in old_children else child
            for key, child in new_children
        ]
    )


def _merge_wrapped(old: Any, fresh: Any, path: KeyPath) -> Any:
    """The same for states of different classes: what is around one of them is looked through."""
    inside_old, inside_fresh = _classes_inside(old), _classes_inside(fresh)
    looks_into_fresh = _class_of(old) in inside_fresh or not inside_old
    if (name := _inner_field(fresh)) and looks_into_fresh:
        merged = _merge(old, getattr(fresh, name), (*path, jax.tree_util.GetAttrKey(name)))
        return fresh._replace(**{name: merged})
    if name := _inner_field(old):
        # Of two wrappers of which neither is inside of the other, one takes the other's place.
        _check_window(old, path)
        return _merge(getattr(old, name), fresh, path)
    raise ValueError(
        f"opt_state{_name(path)} is {_describe_node(old)}, and that of tx {_describe_node(fresh)}: "
        "opt_state must come from tx, or from one that differs in groups, masks and wrappers alone"
    )


def _layout_of(node: Any) -> Any:
    return node.layout if is_flat(node) else None


def _class_of(node: Any) -> type:
    return without_marks(type(node))


def _inner_field(node: Any) -> str | None:
    """The field of a wrapper's state that holds the state of what is inside; None of another."""
    fields = getattr(node, "_fields", ())
    # The second is that of `optax.MultiSteps`.
    return next((name for name in ("inner_state", "inner_opt_state") if name in fields), None)


def _classes_inside(node: Any) -> list[type]:
    """The classes of the states inside of a wrapper, outermost first; none of another state."""
    found = []
    while name := _inner_field(node):
        node = getattr(node, name)
        found.append(_class_of(node))
    return found


def _check_window(node: Any, path: KeyPath) -> None:
    """Refuses to leave the sums of an unfinished window behind, where they are known."""
    steps = getattr(node, "micro_step", getattr(node, "mini_step", 0))
    if not isinstance(steps, jax.core.Tracer | jax.ShapeDtypeStruct) and int(steps) > 0:
        raise ValueError(
            f"opt_state{_name(path)} holds the sum of {int(steps)} gradients of a window that is "
            "not full, and tx has no place for it: change the optimizer after a full window"
        )


def _merge_flat(old: Any, fresh: Any, path: KeyPath) -> Any:
    """The same where parameters lie in other places of flat buffers now, or did not lie in any."""
    flat = [tree for tree in (old, fresh) if is_flat(tree)]
    if not all(_is_leaf(buffer) for tree in flat for buffer in tree.buffers):
        kinds = ["flat" if is_flat(tree) else "a tree" for tree in (old, fresh)]
        changed = f"is {kinds[0]}, and that of tx {kinds[1]}: give params that are {kinds[0]}, too"
        if kinds[0] == kinds[1]:
            changed = (
                "is flat in another layout than that of tx: keep opt_state for the parameters that "
                "it has, and train added ones by an optimizer of their own"
            )
        raise ValueError(
            f"opt_state{_name(path)} {changed}. Numbers are moved into flat buffers, out of them "
            "and between them where these are plain arrays; moments of 8 bits are not, nor are the "
            "buffers of a masked group"
        )
    old, new = (tree.tree() if is_flat(tree) else tree for tree in (old, fresh))
    tree = _merge(old, new, path)
    if not is_flat(fresh):
        return tree
    leaves, buckets = jax.tree.leaves(tree), fresh.layout.buckets
    return FlatParams(
        tuple(bucket.join([leaves[i] for i in bucket.leaves]) for bucket in buckets), fresh.layout
    )


def _keep(old: Any, fresh: Any, path: KeyPath) -> Any:
    if jnp.shape(old) != jnp.shape(fresh) or jnp.result_type(old) != jnp.result_type(fresh):
        raise ValueError(
            f"opt_state{_name(path)} is {_describe_node(old)}, and for the new parameters "
            f"{_describe_node(fresh)}: a parameter that stays must keep its shape and dtype. Give "
            "one that has changed another name"
        )
    return old


def _is_nothing(node: Any) -> bool:
    # What optax puts in the place of a parameter that is not in a group, and what a state of ampx
    # has in the place of a part that its settings do not need.
    is_left_out = type(node) is tuple and not node
    return node is None or is_left_out or is_masked(node)


def _is_leaf(node: Any) -> bool:
    return jax.tree_util.all_leaves([node])


def _name(path: KeyPath) -> str:
    return jax.tree_util.keystr(path)


def _describe_node(node: Any) -> str:
    if _is_leaf(node) and hasattr(node, "dtype"):
        return f"an array {jnp.result_type(node)}{list(jnp.shape(node))}"
    return f"a {type(node).__name__}"
