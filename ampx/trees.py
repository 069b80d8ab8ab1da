"""Walks over pytrees: leaves by the path that names them, nodes by their type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Node = TypeVar("Node")


def path_name(path: Any) -> str:
    """A key path as names joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_by_path(tree: Any, fun: Callable[[str, Any], Any]) -> Any:
    """`jax.tree.map` of a function of (path joined by "/", leaf)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fun(path_name(path), leaf), tree)


def chosen(choice: Any, tree: Any) -> Any:
    """A choice for the parts of a tree, or what a function says of the tree.

    A module of bools that happens to be callable is a choice, as it is in optax.
    """
    leaves = jax.tree.leaves(choice)
    is_function = bool(leaves) and all(map(callable, leaves))
    return choice(tree) if is_function else choice


def find_nodes(tree: Any, kind: type[Node]) -> list[Node]:
    """All nodes of a type, outermost first; not the ones inside them."""

    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(tree, is_leaf=is_kind) if isinstance(node, kind)]
