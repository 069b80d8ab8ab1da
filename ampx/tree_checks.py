"""Checks of trees: parameters, gradients, states and batches, before anything computes with them.

JAX and optax say of a wrong tree what went wrong inside them: "Dict key mismatch", "data type 'w'
not understood", an attribute that some object lacks. They say nothing at all where shapes can be
broadcast to each other, or where an array is closed over whose memory has been donated. The checks
here look at classes, structures and shapes alone, which are known while tracing. They cost nothing
in a compiled program.

    check_arrays       every leaf is a number or an array that still has its memory
    check_like         a tree has the paths and shapes of another one
    check_opt_state    a tree may be an optimizer's state, and is not the parameters
    check_gradients    gradients, and those of these parameters
    check_key          one random key

`ampx.updates.guards` puts them together for the `update` of a transformation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import check_hyperparameter, join_first, shorten
from ampx.overwritten import refuse_overwritten, refuse_path
from ampx.trees import (
    at_path,
    broadcast_prefix,
    has_mark,
    is_float0,
    is_floating,
    is_marked,
    path_name,
    split_trainable,
)

# What JAX has no arrays of: objects, words, dates and durations.
_FOREIGN_KINDS = "OSUmM"


def check_arrays(name: str, tree: Any, *, may_be_shapes: bool = False) -> None:
    """Refuses a tree with a leaf that is no array and no number, or whose memory is gone.

    Args:
      name: of the argument, for the error.
      tree: what was given for it.
      may_be_shapes: whether nothing but shapes and dtypes is needed. Then `jax.ShapeDtypeStruct`s
        and arrays that have been donated are right, too.

    Raises:
      TypeError: for a leaf that is no array, or one of another library.
      ValueError: for an array that was donated or deleted.
    """
    check_dtypes(name, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _may_be_array(leaf):
            raise TypeError(
                f"{name} must be a tree of arrays, got {shorten(leaf)} of type "
                f"{type(leaf).__name__}{at_path(path)}: leave it out of the tree, as "
                "equinox.filter(model, equinox.is_inexact_array) does, or convert it to an array"
            )
    if not may_be_shapes:
        check_memory(name, tree)


def check_dtypes(name: str, tree: Any) -> None:
    """Refuses arrays whose dtypes are no JAX's or NumPy's, such as the tensors of torch.

    Raises:
      TypeError: for such an array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            is_floating(leaf)
        except TypeError:
            raise TypeError(
                f"{name} must be a tree of JAX's or NumPy's arrays, got a "
                f"{type(leaf).__module__}.{type(leaf).__name__} of {leaf.dtype}{at_path(path)}: "
                "convert it, as jnp.asarray(tensor.detach().numpy()) does, or "
                "torchax.interop.jax_view(tree)"
            ) from None


def _may_be_array(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | bool | int | float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    # Shapes without values are arrays where nothing is computed, and JAX itself refuses them where
    # something is. Others may come that look like arrays, as `NarrowParam` does.
    return dtype is not None and getattr(dtype, "kind", "V") not in _FOREIGN_KINDS


def check_memory(name: str, tree: Any) -> None:
    """Refuses arrays whose memory is gone: what is closed over is read only when a program runs.

    Raises:
      ValueError: for an array that was donated or deleted.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if is_known and leaf.is_deleted():
            raise ValueError(
                f"{name}: the array{at_path(path)}, {leaf.dtype} of shape {leaf.shape}, has no "
                "memory any more: it was donated to a jitted function (donate_argnums), or "
                "deleted. Go on with what that function returned"
            )


def check_trainable(name: str, params: Any) -> None:
    """Refuses parameters of which none is trained, and arrays whose memory is gone.

    Raises:
      TypeError: if no leaf is an array of floating numbers, for one of another library, and for a
        whole training state.
      ValueError: for an array that was donated or deleted.
    """
    check_dtypes(name, params)
    check_memory(name, params)
    if hasattr(params, "opt_state") and hasattr(params, "params"):
        raise TypeError(
            f"{name} is a whole training state, a {type(params).__name__}: give the parameters in "
            "it, state.params. A train step alone takes the state, step(state, batch); flax's must "
            "have been made with tx=step.tx"
        )
    if jax.tree.leaves(params) and not jax.tree.leaves(split_trainable(params)[0]):
        raise TypeError(
            f"{name} must hold arrays of floating numbers, which alone are trained, got "
            f"{describe_tree(params)}"
        )


def check_like(
    name: str,
    tree: Any,
    like_name: str,
    like: Any,
    *,
    part: str = "array",
    partner: str = "",
    may_be_many: bool = False,
) -> list[tuple[Any, Any, Any]]:
    """Refuses a tree that differs in its paths or shapes from another one.

    JAX would broadcast an array to the shape of its partner, and a parameter would come out in
    another shape. A node in the place of a leaf is let through if it is more than a container, as
    `ampx.SparseRows` is; and so is None.

    Args:
      name: of the argument, for the error.
      tree: what was given for it.
      like_name: what it must be like.
      like: that tree. None in it, or `optax.MaskedNode`, stands for whatever the other one has.
      part: what a leaf of `tree` is, in a word.
      partner: what a leaf of `like` is to it.
      may_be_many: whether a leaf may have one axis more, the first.

    Returns:
      What `check_structure` does.

    Raises:
      ValueError: if they differ.
    """
    pairs = check_structure(name, tree, like_name, like)
    for path, own, other in pairs:
        shape, found = _shape(own), _shape(other)
        if may_be_many and found and found[1:] == shape:
            continue
        if None not in (shape, found) and shape != found:
            raise ValueError(
                f"{name}: the {part}{at_path(path)} has shape {found}, and "
                f"{partner or f'that of {like_name}'} has shape {shape}: give those that belong "
                "together"
            )
    return pairs


def check_structure(name: str, tree: Any, like_name: str, like: Any) -> list[tuple[Any, Any, Any]]:
    """Refuses a tree that differs in its paths from another one; see `check_like`.

    Returns:
      For each leaf of `like` its path, the leaf, and what `tree` has there.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_left_out)
    pairs: list[tuple[Any, Any, Any]] | None
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError):
        pairs = None
    else:
        pairs = [(path, own, part) for (path, own), part in zip(paths, parts, strict=True)]
    if like is None and tree is not None:
        pairs = None
    if pairs is None or any(_is_container(b) and not _is_left_out(a) for _, a, b in pairs):
        is_result = has_mark(tree, "holds_scaled_gradients")
        advice = (
            "give the grads of a GradResult" if is_result else "give those that belong together"
        )
        raise ValueError(
            f"{name} must be a tree like {like_name}, which has {_list_paths(like)}, got "
            f"{describe_tree(tree)}: {advice}"
        ) from None
    return pairs


def _shape(leaf: Any) -> Any:
    return () if isinstance(leaf, bool | int | float | complex) else getattr(leaf, "shape", None)


def is_masked(node: Any) -> bool:
    """Whether a node stands for a parameter that `optax.masked` leaves out."""
    return isinstance(node, optax.MaskedNode)


def _is_left_out(node: Any) -> bool:
    return node is None or is_masked(node)


def _is_container(node: Any) -> bool:
    # Other classes may hold one leaf, as sparse rows do; of these a `GradResult` is none, which
    # loss scales alone take whole.
    is_tree = isinstance(node, Mapping | list) or type(node) is tuple
    return is_tree or is_marked(node, "holds_scaled_gradients")


def _list_paths(tree: Any) -> str:
    """The paths of the leaves of a tree, a few of them."""
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if names == [""]:
        return "nothing but one array"
    return join_first(map(repr, names), most=6) or "no leaves"


def describe_tree(tree: Any) -> str:
    """What a tree is, for the error about one of another structure."""
    if isinstance(tree, jax.Array | np.ndarray):
        return f"one array of shape {tree.shape}"
    if jax.tree_util.all_leaves([tree]):
        return f"{shorten(tree)} of type {type(tree).__name__}"
    if tree is None:
        return "None"
    return f"a {type(tree).__name__} with {_list_paths(tree)}"


def check_opt_state(opt_state: Any) -> None:
    """Raises a TypeError for what is no optimizer state: no tree of arrays, or the parameters."""
    check_arrays("opt_state", opt_state, may_be_shapes=True)
    is_leaf = jax.tree_util.all_leaves([opt_state])
    if is_leaf or _holds_arrays_alone(opt_state):
        found = "a tree of nothing but arrays, which looks like parameters"
        if is_leaf and not hasattr(opt_state, "dtype"):
            found = describe_tree(opt_state)
        raise TypeError(
            f"opt_state must be an optimizer state, got {found}: give the state that "
            "tx.init(params) or tx.update(...) returned"
        )


def _holds_arrays_alone(tree: Any) -> bool:
    """Whether a tree has arrays in nothing but dicts, lists and plain tuples, as parameters do.

    States of optax are NamedTuples, and so are ampx's; those without any array are empty ones.
    """

    def is_inside(node: Any) -> bool:
        is_plain_tuple = type(node) is tuple
        return not (node is None or is_plain_tuple or isinstance(node, list | Mapping))

    leaves = jax.tree.leaves(tree, is_leaf=is_inside)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def check_key(name: str, key: Any) -> None:
    """Refuses what is no single random key; None, where there is none, is right.

    Raises:
      TypeError: for a seed, a word, floats, and for several keys.
    """
    if key is None:
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # A key of the old kind, `jax.random.PRNGKey(0)`, is a vector of two or four uint32.
    is_raw = dtype == np.uint32 and shape in ((2,), (4,))
    if not ((is_typed and shape == ()) or is_raw):
        single = f"{shorten(key)} of type {type(key).__name__}"
        raise TypeError(
            f"{name} must be one random key, such as jax.random.key(0), got "
            f"{f'keys of shape {shape}' if is_typed else single}"
        )
    check_memory(name, key)


def check_scalar(name: str, value: Any) -> None:
    """Raises a TypeError for words, bools and arrays with axes; a number may be traced."""
    check_hyperparameter(name, value, may_be_infinite=True)
    if jnp.shape(value):
        raise TypeError(f"{name} must be a scalar, got an array of shape {jnp.shape(value)}")


def broadcast_choice(name: str, choice: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """What a tree prefix, such as a mask, chooses for each leaf: `broadcast_prefix` with its error.

    Raises:
      ValueError: if it is no prefix of the tree.
    """
    try:
        return broadcast_prefix(choice, tree, is_leaf)
    except ValueError:
        raise ValueError(
            f"{name} must be a tree like the parameters, or like the beginning of their tree, "
            f"which has {_list_paths(tree)}, got {describe_tree(choice)}"
        ) from None


def check_gradients(
    name: str,
    grads: Any,
    params: Any,
    part: str = "gradient",
    *,
    may_be_many: bool = False,
    may_be_shards: bool = False,
) -> None:
    """Refuses what are no gradients, or not those of `params`, if these are given.

    Args:
      name: of the argument, for the errors.
      grads: what was given for it.
      params: parameters, or None.
      part: what a leaf of `grads` is called.
      may_be_many: whether a gradient may be those of single examples, along a first axis.
      may_be_shards: whether gradients may be `ampx.GradientShard` leaves, of the whole `shape`.

    Raises:
      TypeError: for what are no arrays, and for bools and random keys.
      ValueError: for another structure or other shapes than those of the parameters, and for a
        leaf that is to be replaced by its gradient.
    """
    if grads is None:
        raise TypeError(f"{name} must be a tree of arrays like the parameters, got None")
    check_arrays(name, grads)
    if not may_be_shards:
        refuse_shards(name, grads)
    if params is None:
        refuse_overwritten(name, grads)
        return
    words = {"part": part, "partner": "its parameter"}
    pairs = check_like(name, grads, "params", params, **words, may_be_many=may_be_many)
    # What has no gradient is not looked at: users of Equinox give whole modules, functions in them.
    check_arrays("params", [own for _, own, found in pairs if found is not None])
    for path, own, found in pairs:
        if not isinstance(found, optax.MaskedNode | None):
            refuse_path(name, path)
        dtypes = [getattr(x, "dtype", None) for x in (found, own)]
        is_number = dtypes[0] is None or jnp.issubdtype(dtypes[0], np.number)
        # The gradient that is no number is that of a parameter that is none, as optax makes it.
        if not is_number and not is_float0(found) and dtypes[0] != dtypes[1]:
            raise TypeError(
                f"{name}: the {part}{at_path(path)} has dtype {dtypes[0]}, and is no number: leave "
                "its parameter out, with optax.masked or optax.partition"
            )


def refuse_shards(name: str, grads: Any) -> None:
    """Raises a ValueError for gradients of which each device holds its shard."""
    if has_mark(grads, "is_gradient_shard"):
        raise ValueError(
            f"{name} are ampx.GradientShards, this device's shards of summed gradients, and only "
            "ampx.zero1 takes these: put zero1 around this transformation, or leave out "
            "scatter_gradients"
        )
