"""Parameters into flat buffers, and masks and labels that fit them.

`flatten` decides which parameters share a buffer: those of one dtype that agree in everything that
an optimizer must know of a whole buffer. optax asks masks and labels about leaves, and in flat mode
a leaf is a buffer. So what differs in a mask lies in different buffers, and `per_buffer` turns a
mask of the tree into one of buffers:

    tree       {"w": True, "b": False, "v": True}
    buffers    float32/decay: w, v -> True        float32/no_decay: b -> False
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ampx.checking import as_positive_int
from ampx.flat_buffers.buckets import bucket_layout
from ampx.flat_buffers.flat_params import FlatLayout, FlatParams, has_flat, is_flat
from ampx.flat_buffers.whole_arrays import check_whole
from ampx.function_checks import check_callable
from ampx.mesh_axes import varying_axes
from ampx.overwritten import refuse_overwritten
from ampx.tree_checks import broadcast_choice, check_arrays, is_masked
from ampx.trees import path_name, resolve_choice


def flatten(
    params: Any,
    *,
    mask: Any = None,
    group_of: Callable[[str, Any], Hashable] | None = None,
    row: int = 256,
    bucket_bytes: int | None = None,
    multiple_of: int = 1,
) -> FlatParams:
    """Puts parameters into flat buffers, one for each dtype and group, to train them there.

    Give the result to `train_step(...).init`, `ampx.value_and_grad` and optimizers in the place of
    the tree. Loss functions get the tree, gradients and moments are flat too. Masks of `ampx.fused`
    optimizers, `local_norm` and the norms in LAMB and NovoGrad mean single parameters, as in the
    tree. Optax's own wrappers and optimizers see buffers: give their masks and labels through
    `per_buffer`, and do not use those that work by parameter, such as `optax.lamb`. An `eps` of 0
    divides 0 by 0 in padding, which norms of single parameters leave out.

    Worth it for many small parameters, up to some 64 thousand elements. The tail of a step compiles
    faster, too: with hundreds of parameters, in a quarter of the time. A parameter costs row / 2
    elements of padding on average, and the forward pass reads it out of its buffer.

    Args:
      params: a pytree of arrays, each whole on all devices. Those that FSDP divides are refused:
        leave them beside the result, `{"small": flatten(small), "large": large}`. Inside
        `shard_map` shards may be joined; those that vary over other mesh axes get other buffers.
        With `check_vma=False` no type tells shards apart, so join only parameters that are divided
        over the same axes there, and give these axes by name as `model_axes`: the paths of a tree
        of specs are those of parameters, and a buffer is none of them.
      mask: which parameters decay, as the optimizer takes it, or labels as `optax.partition` takes
        them: parameters that differ in it get different buffers.
      group_of: a function of (path joined by "/", leaf): what else parameters of a buffer share.
      row: elements that every parameter begins at a multiple of. Best a multiple of what the
        hardware reads at once, and of the blocks of int8 moments.
      bucket_bytes: close a buffer once it holds so many, so that the reduction of the last ones may
        begin before the gradients of the first are known. None: one buffer, however large.
      multiple_of: elements that each buffer is padded to a multiple of, for `ampx.zero1` on a
        number of devices that is not a power of two.

    Returns:
      A `FlatParams`. Jitted it is one concatenation a buffer.

    Raises:
      TypeError: if a size is not an int.
      ValueError: if a size is not positive, `params` are flat already, or one of them is divided
        over devices. Under `jit` with Auto mesh axes that is a warning, while XLA compiles.

    References:
      `combine_grad` of Ascend's apex; Megatron-LM's ParamAndGradBuffer.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
      >>> def matrices(params):
      ...     return jax.tree.map(lambda p: p.ndim > 1, params)
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"] + params["b"]) ** 2)
      >>> step = ampx.train_step(loss_fn, ampx.fused.adamw(0.1, mask=matrices))
      >>> state = step.init(ampx.fused.flatten(params, mask=matrices))
      >>> state.params
      FlatParams({'float32/no_decay': float32[256], 'float32/decay': float32[256]}, 2 parameters)
      >>> state, report = jax.jit(step, donate_argnums=0)(state, jnp.ones((4, 2)))
      >>> print(*[f"{b:.2f}" for b in state.params.tree()["b"]])
      -0.10 -0.10 -0.10
    """
    # A buffer in a buffer would lose which parameters lie in it.
    if has_flat(params):
        raise ValueError("these parameters are flat already: flatten the tree, flat.tree()")
    row, multiple_of = as_positive_int("row", row), as_positive_int("multiple_of", multiple_of)
    if bucket_bytes is not None:
        bucket_bytes = as_positive_int("bucket_bytes", bucket_bytes)
    if group_of is not None:
        check_callable("group_of", group_of, "group_of(path, leaf)")
    check_arrays("params", params)
    refuse_overwritten("params", params, "Flatten the others alone, such as params['params']")
    params = jax.tree.map(jnp.asarray, params)
    check_whole("fused.flatten", params)
    # By path, since `bucket_layout` asks for the group of a path.
    choices: dict[str, Any] = {}
    if mask is not None:
        labels = broadcast_choice("mask", resolve_choice(mask, params), params)
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        choices = dict(zip(paths, labels, strict=True))

    def group(path: str, leaf: Any) -> tuple[Hashable, ...]:
        # What the caller says first, then the mask; the group becomes the name of the buffer.
        own = () if group_of is None else (group_of(path, leaf),)
        # Inside `shard_map`: a norm sums over the axes over which all of a buffer varies.
        own += tuple(sorted(varying_axes(leaf)))
        if mask is None:
            return own
        label = choices[path]
        return (*own, ("decay" if label else "no_decay") if isinstance(label, bool) else label)

    return lay_out(params, group, row=row, bucket_bytes=bucket_bytes, multiple_of=multiple_of)


def lay_out(
    params: Any,
    group_of: Callable[[str, Any], tuple[Hashable, ...]],
    *,
    row: int,
    bucket_bytes: int | None,
    multiple_of: int,
) -> FlatParams:
    """Does what `flatten` does; `group_of(path, leaf)` gives the words that name a leaf's group."""
    leaves = jax.tree.leaves(params)
    # One buffer for each dtype and group unless told otherwise: no bucket is full before all is in.
    everything = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # Whole rows, and equal parts for each device of ZeRO-1.
    padded_to = math.lcm(row, multiple_of)
    layout = bucket_layout(
        params,
        bucket_bytes=max(everything, 1) if bucket_bytes is None else bucket_bytes,
        multiple_of=padded_to,
        align=row,
        group_of=group_of,
    )
    # Layouts are in the order of the backward pass, these buffers in that of the forward pass.
    buckets = tuple(bucket.with_spare(padded_to) for bucket in reversed(layout.buckets))
    layout = dataclasses.replace(layout, buckets=buckets)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    flat_layout = FlatLayout(layout, dtypes, _name_buffers(buckets), row, bucket_bytes, multiple_of)
    return FlatParams(tuple(layout.flatten(params)), flat_layout)


def _name_buffers(buckets: Sequence[Any]) -> tuple[str, ...]:
    """A name for each buffer, such as "float32/decay"; several of one kind are numbered from 0."""
    names = ["/".join(map(str, (bucket.dtype, *bucket.group))) for bucket in buckets]
    return tuple(
        name if names.count(name) == 1 else f"{name}/{names[:i].count(name)}"
        for i, name in enumerate(names)
    )


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
        # A choice that is flat already has an answer for each buffer.
        if not has_flat(params) or has_flat(choice):
            return resolve_choice(choice, params)
        view = jax.tree.map(
            lambda node: node.shapes() if is_flat(node) else node, params, is_leaf=is_flat
        )
        # optax masks out what is not in a group: a `MaskedNode` has no leaves, but is one here.
        chosen = broadcast_choice("choice", resolve_choice(choice, view), view, is_masked)
        of_tree = jax.tree.unflatten(jax.tree.structure(view), chosen)
        nodes, structure = jax.tree.flatten(params, is_leaf=is_flat)
        parts = structure.flatten_up_to(of_tree)
        pairs = zip(nodes, parts, strict=True)
        return structure.unflatten(
            [_of_buffers(node, part) if is_flat(node) else part for node, part in pairs]
        )

    return of


def _of_buffers(flat: FlatParams, of_tree: Any) -> FlatParams:
    layout = flat.layout
    of_leaves = jax.tree.leaves(of_tree, is_leaf=is_masked)
    values = []
    for name, bucket in zip(layout.names, layout.buckets, strict=True):
        # All parameters of a buffer must agree; the first speaks for them.
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
    # Laid out anew, with the old groups by path: what the function changes is a dtype at most.
    own, tree = params.layout, fun(params.tree())
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    groups = {paths[i]: bucket.group for bucket in own.buckets for i in bucket.leaves}
    return lay_out(
        tree,
        lambda path, leaf: groups.get(path, ()),
        row=own.row,
        bucket_bytes=own.bucket_bytes,
        multiple_of=own.multiple_of,
    )
