"""Trees: walks, casts, and choices between two of them.

Some kinds of leaves need care wherever a tree is mapped, and have a predicate or a dtype here:

    float0     what JAX returns as the gradient of an integer parameter: a NumPy array of an empty
               dtype, with which nothing can be computed (`is_float0`)
    integers   step counts, random keys: no cast to half, no NaN (`is_floating`)
    float8     and float64: floating, but a policy does not cast them (`CASTABLE`)
    others     functions, strings and numbers inside a module: not trained (`split_trainable`)
    scales     of flax's layers in 8 bits: their gradient is their new value (`is_overwritten`)
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ampx.flax_modules import OVERWRITE

# Policies cast between these. Leaves in float64 or float8 stay as they are.
CASTABLE = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))
Node = TypeVar("Node")


def cast_castable(tree: Any, dtype: DTypeLike) -> Any:
    """Casts the leaves that can be cast to `dtype`, unchecked; see `ampx.cast_floating`."""

    def cast(path: Any, leaf: Any) -> Any:
        return leaf if is_overwritten(path) else cast_leaf(leaf, dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)


def cast_leaf(leaf: Any, dtype: DTypeLike) -> Any:
    """The leaf in `dtype` if it is floating and can be cast, else as it is.

    NumPy computes in float64 unless it is told otherwise. Without `jax_enable_x64` such an array is
    float32 to JAX, so it is one here.
    """
    if not _is_array(leaf) or leaf.dtype == dtype:
        return leaf
    held = leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic) and held == np.float64:
        held = jnp.result_type(leaf)
    if held not in CASTABLE:
        return leaf
    return leaf.astype(dtype)


def split_trainable(tree: Any) -> tuple[Any, Any]:
    """Splits a tree of parameters into what is trained and the rest.

    Trained are arrays of floating numbers. Not trained are integers and bools, random keys,
    functions, strings, and whatever else is a leaf. A Python float is a parameter in a plain tree,
    as it is to `jax.grad`; inside an Equinox module it is a setting, such as a dropout rate.

    Returns:
      A tree of the trained leaves with None in the place of others, and one of the others with None
      in the place of these; the tree itself and None, if all leaves are trained.
    """
    numbers = () if _has_equinox_module(tree) else (float, complex)
    leaves = jax.tree.leaves(tree)
    trained = [_is_inexact_array(leaf) or isinstance(leaf, numbers) for leaf in leaves]
    return (tree, None) if all(trained) else split_leaves(tree, trained)


def split_leaves(tree: Any, chosen: Sequence[bool]) -> tuple[Any, Any]:
    """A tree of the chosen leaves, and one of the others, each with None for those of the other."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = list(zip(leaves, chosen, strict=True))
    return (
        structure.unflatten([leaf if own else None for leaf, own in pairs]),
        structure.unflatten([None if own else leaf for leaf, own in pairs]),
    )


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """What a tree prefix has for each leaf of a tree, in their order.

    A list and no tree: a container of others may make an array of a bool that it is given.

    Raises:
      ValueError: if it is no prefix of the tree.
    """
    own, structure = jax.tree.flatten(prefix, is_leaf=is_leaf)
    parts = zip(own, structure.flatten_up_to(tree), strict=True)
    return [value for value, part in parts for _ in jax.tree.leaves(part)]


def merge_trainable(trainable: Any, rest: Any) -> Any:
    """Joins what `split_trainable` has split; other parameters may stand in their places."""
    if rest is None:
        return trainable
    return jax.tree.map(
        lambda other, own: own if other is None else other,
        rest,
        trainable,
        is_leaf=lambda node: node is None,
    )


def leave_untrained_out(params: Any, grads: Any) -> Any:
    """Puts None in the place of parameters without a gradient, if an Equinox module holds them.

    Gradients of a module are None for its functions and settings. What maps over both trees needs
    the same in the parameters, which callers hold as a whole.
    """
    if params is None or not _has_equinox_module(params):
        return params
    trained = split_trainable(params)[0]
    return trained if jax.tree.structure(trained) == jax.tree.structure(grads) else params


def fill_floating(tree: Any, values: Iterable[Any]) -> Any:
    """Puts values in the places of the floating leaves of a tree, in order; None in others."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(values)
    return structure.unflatten([next(rest) if is_floating(leaf) else None for leaf in leaves])


def copy_arrays(tree: Any) -> Any:
    """Copies the arrays of a tree; Python's numbers become arrays, but not inside a module."""
    numbers = () if _has_equinox_module(tree) else (bool, int, float, complex)

    def copy(leaf: Any) -> Any:
        return jnp.copy(leaf) if _is_array(leaf) or isinstance(leaf, numbers) else leaf

    return jax.tree.map(copy, tree)


def _has_equinox_module(tree: Any) -> bool:
    # Whoever holds such a module has imported Equinox; ampx itself never does.
    equinox = sys.modules.get("equinox")
    return equinox is not None and bool(find_nodes(tree, equinox.Module))


def _is_array(leaf: Any) -> bool:
    # Types such as `jnp.float32` have a dtype, too.
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, type)


def _is_inexact_array(leaf: Any) -> bool:
    return _is_array(leaf) and is_floating(leaf)


def wider_dtype(first: DTypeLike, second: DTypeLike) -> np.dtype:
    """The dtype that holds both, whatever the promotion mode of the caller.

    For float16 and bfloat16 it is float32: neither holds the other.
    """
    # Under `jax_numpy_dtype_promotion="strict"` any two unequal dtypes are an error.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


def widen(leaf: jax.Array) -> jax.Array:
    """A floating array in float32, or in its own dtype if that is wider; others as they are."""
    return leaf.astype(wider_dtype(leaf.dtype, jnp.float32)) if is_floating(leaf) else leaf


def size_in_bytes(leaf: Any) -> int:
    """Counts the bytes of an array or of its type."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def open_node(node: Any) -> tuple[Sequence[tuple[Any, Any]], Any]:
    """Takes one node of a tree apart, and nothing inside it: pairs (path, child), and structure."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)


def path_name(path: Any) -> str:
    """A key path as names joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def at_path(path: Any) -> str:
    """Where a leaf is, for an error: `" at 'a/b'"`; empty for a tree that is one leaf.

    The path is one of keys, or what `path_name` made of it.
    """
    name = path if isinstance(path, str) else path_name(path)
    return f" at {name!r}" if name else ""


def is_overwritten(path: Any) -> bool:
    """Whether the leaf at a key path is to be replaced by its gradient: see `ampx.overwritten`."""
    return any(getattr(key, "key", getattr(key, "name", None)) == OVERWRITE for key in path)


def map_by_path(tree: Any, fun: Callable[[str, Any], Any]) -> Any:
    """`jax.tree.map` of a function of (path joined by "/", leaf)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fun(path_name(path), leaf), tree)


def resolve_choice(choice: Any, tree: Any) -> Any:
    """Finds what is chosen for the parts of a tree: `choice`, or what it returns of the tree.

    optax takes masks and labels both as trees and as functions of the parameters. A pytree of bools
    that happens to be callable, such as a module, is a choice, as it is in optax.
    """
    # A function is a leaf; a callable pytree has its bools as leaves.
    leaves = jax.tree.leaves(choice)
    is_function = bool(leaves) and all(map(callable, leaves))
    return choice(tree) if is_function else choice


def count_up(count: jax.Array, by: Any = None) -> jax.Array:
    """A counter plus one, or plus the bool array `by`; at the largest number it stays.

    An int32 that went on counting after 2**31 - 1 would turn to -2**31.
    """
    has_room = count != _largest(count)
    return count + (has_room if by is None else by & has_room).astype(count.dtype)


def is_largest(count: jax.Array) -> jax.Array:
    """Whether an integer is the largest of its dtype; bool, elementwise."""
    return count == _largest(count)


def _largest(count: jax.Array) -> np.ndarray:
    # In the array's own dtype: nnx counts in uint32, whose largest number is no int32.
    return np.array(jnp.iinfo(count.dtype).max, count.dtype)


def find_nodes(tree: Any, kind: type[Node]) -> list[Node]:
    """All nodes of a type, outermost first; not the ones inside them."""

    # The walk stops at a node of the kind, so what is inside it is never seen.
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(tree, is_leaf=is_kind) if isinstance(node, kind)]


def is_named_tuple(node: Any) -> bool:
    """Whether a node is a NamedTuple, as the states of optax are."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_marked(node: Any, mark: str) -> bool:
    """Whether the class of a node of a tree sets the attribute `mark` to True.

    So states tell what their transformation does (`reduces_gradients`) to modules that must not
    import their classes.
    """
    return getattr(type(node), mark, False) is True


def without_marks(kind: type) -> type:
    """The class itself; of one that only adds marks to a NamedTuple, that NamedTuple."""
    return next((base for base in kind.__mro__ if "_fields" in vars(base)), kind)


def has_mark(tree: Any, mark: str) -> bool:
    """Whether a node of a tree, leaves included, is marked: see `is_marked`."""
    return bool(find_marked(tree, mark))


def find_marked(tree: Any, mark: str) -> list[Any]:
    """All nodes of a tree that are marked, outermost first; not the ones inside them."""
    of_mark = functools.partial(is_marked, mark=mark)
    return list(filter(of_mark, jax.tree.leaves(tree, is_leaf=of_mark)))


def is_float0(leaf: Any) -> bool:
    """Whether a leaf is the empty gradient that JAX gives integer parameters."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_floating(leaf: Any) -> bool:
    """Whether a leaf holds real or complex floating numbers; not functions and names of modules."""
    dtype = getattr(leaf, "dtype", None)
    return (
        isinstance(leaf, float | complex) if dtype is None else jnp.issubdtype(dtype, jnp.inexact)
    )


def convert_numbers(tree: Any) -> Any:
    """The tree with arrays of JAX in the place of Python's numbers and NumPy's arrays.

    `jax.jit` does so with its arguments. Outside of it an optax transformation takes these, too.
    """

    def convert(leaf: Any) -> Any:
        is_foreign = isinstance(leaf, int | float | complex | np.ndarray | np.generic)
        return jnp.asarray(leaf) if is_foreign and not is_float0(leaf) else leaf

    return jax.tree.map(convert, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Casts the leaves of `tree`, as arrays, to the dtypes of `like`."""

    def cast(leaf: Any, like_leaf: Any) -> Any:
        leaf, dtype = jnp.asarray(leaf), jnp.asarray(like_leaf).dtype
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree.map(cast, tree, like)


def hold(skip: jax.Array, new: Any, old: Any) -> Any:
    """Holds `old` where `skip`, a bool scalar, is true; else `new`; in the dtypes of `old`.

    A select, not a product with 0 or 1: infinity times zero is NaN.
    """

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        return new_leaf if is_float0(new_leaf) else jnp.where(skip, old_leaf, new_leaf)

    return jax.tree.map(choose, cast_like(new, old), old)


def null_updates(tree: Any) -> Any:
    """Makes updates in the shapes and dtypes of `tree` that change nothing when they are added.

    They are negative zeros: x + -0.0 is x for every x, bit by bit, but -0.0 + 0.0 is 0.0.
    """

    def null(leaf: Any) -> Any:
        if is_float0(leaf):
            return leaf
        # Not `full`, which is whole on Explicit axes: a select takes no such array beside shards.
        return jnp.full_like(leaf, -0.0 if is_floating(leaf) else 0, leaf.dtype)

    return jax.tree.map(null, tree)


def zero_where_old_is_not_finite(new: Any, old: Any) -> Any:
    """Returns `new` with zeros where `old` was not finite already, for a count of what turned bad.

    Some optimizers start from infinity, such as a least loss seen so far. The step is not to blame
    for that.
    """

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not is_floating(new_leaf):
            return new_leaf
        return jnp.where(jnp.isfinite(old_leaf), new_leaf, jnp.zeros_like(new_leaf))

    return jax.tree.map(choose, cast_like(new, old), old)


def keep_finite(new: Any, old: Any) -> Any:
    """Returns `new`, but `old` in each element that would turn from finite to non-finite."""

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not is_floating(new_leaf):
            return new_leaf
        return jnp.where(jnp.isfinite(new_leaf) | ~jnp.isfinite(old_leaf), new_leaf, old_leaf)

    return jax.tree.map(choose, cast_like(new, old), old)
