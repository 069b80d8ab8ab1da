"""Layers of a checkpoint as one stack, and the stack as layers of a checkpoint again.

Models name their layers by number. A pipeline wants them in one tree, with a leading axis:

  flax linen     {"block_0": {"kernel": a}, "block_1": {"kernel": b}}      "block_{}"
  flax nnx       {"blocks": {0: {"kernel": a}, 1: {"kernel": b}}}          "blocks/{}"
  Haiku          {"net/h0_attn": {"w": a}, "net/h1_attn": {"w": b}}        "net/h{}_"
  a list         [{"kernel": a}, {"kernel": b}]                            no pattern

  stacked        {"kernel": [a, b]}; for Haiku {"attn": {"w": [a, b]}}

A pattern is the beginning of a path, names joined by "/", with {} for the number. Both directions
walk through the tree by the same rule (`_find_layers`), so whatever else is in it, and whatever its
containers are, comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.mesh_axes import take_index
from ampx.tree_checks import check_arrays
from ampx.trees import open_node, path_name

# What a layer has behind its number, such as "attn" of "net/h0_attn": "" if it is one subtree.
Rest = str


def stack_layers(params: Any, pattern: str | None = None) -> Any:
    """Stacks the layers of a model, as `params["stages"]` of a pipeline has them.

    Args:
      params: a tree that has the layers under numbered names, with anything else beside them. Or,
        without a pattern, a list or tuple of the layers alone.
      pattern: the beginning of the layers' paths, with {} for the number: `"block_{}"` for a dict
        with `"block_0"`, `"block_1"` and so on, `"decoder/block_{}"` for such a dict inside,
        `"blocks/{}"` for a list inside, `"net/h{}_"` for Haiku's `"net/h0_attn"`.

    Returns:
      A tree like one layer, whose leaves have a leading axis of layers in the order of their
      numbers. Leaves are numpy arrays where those of all layers are, and shapes where they are
      shapes (`jax.ShapeDtypeStruct`).

    Raises:
      TypeError: for a tree without a pattern, or a pattern without {}.
      ValueError: if no name fits the pattern, a number is missing or comes twice, or layers differ
        in structure, shapes or dtypes; it names the layer and the leaf.

    Examples:
      >>> import ampx, numpy as np
      >>> params = {
      ...     "embed": np.ones(3),
      ...     "block_0": {"w": np.zeros(2)},
      ...     "block_1": {"w": np.ones(2)},
      ... }
      >>> stages = ampx.pipelining.stack_layers(params, "block_{}")
      >>> print(stages["w"])
      [[0. 0.]
       [1. 1.]]
    """
    names, layers = _read_layers(params, pattern)
    check_arrays("params", layers, may_be_shapes=True)
    for name, layer in zip(names, layers, strict=True):
        _check_alike(names[0], layers[0], name, layer)
    return jax.tree.map(_stack, *layers)


def unstack_layers(stages: Any, into: Any = None, pattern: str | None = None) -> Any:
    """Undoes `stack_layers`.

    Args:
      stages: a tree whose leaves have a leading axis of layers.
      into: the tree that `stack_layers` was given, or one of the same names; its layers are
        replaced, all else stays. None makes a list of layers.
      pattern: see `stack_layers`.

    Returns:
      A tree like `into`, or a list of layers.

    Raises:
      TypeError: see `stack_layers`; also for a pattern without `into`.
      ValueError: see `stack_layers`; also if `into` has another number of layers, or they differ
        from those of `stages` in structure or shapes.

    Examples:
      >>> import ampx, numpy as np
      >>> params = {
      ...     "embed": np.ones(3),
      ...     "block_0": {"w": np.zeros(2)},
      ...     "block_1": {"w": np.ones(2)},
      ... }
      >>> stages = ampx.pipelining.stack_layers(params, "block_{}")
      >>> back = ampx.pipelining.unstack_layers({"w": 2 * stages["w"]}, params, "block_{}")
      >>> print(back["block_1"], sorted(back))
      {'w': array([2., 2.])} ['block_0', 'block_1', 'embed']
    """
    check_arrays("stages", stages, may_be_shapes=True)
    count = count_layers("stages", stages)
    layers = [jax.tree.map(lambda leaf, n=n: take_layer(leaf, n), stages) for n in range(count)]
    if into is None:
        if pattern is not None:
            raise TypeError(
                f"pattern={pattern!r} says where layers lie in a tree, and there is none: give "
                "into=, the tree that stack_layers was given"
            )
        return layers
    names, old = _read_layers(into, pattern)
    if len(old) != count:
        raise ValueError(f"stages has {count} layers, and into has {len(old)}")
    for name, layer, new in zip(names, old, layers, strict=True):
        _check_alike("stages", new, name, layer, with_dtypes=False)
    if pattern is None:
        return type(into)(layers)
    first = min(_group_by_number(into, pattern))

    def replace(number: int, rest: Rest, _: Any) -> Any:
        layer = layers[number - first]
        return layer[rest] if rest else layer

    return _find_layers(into, _as_regex(pattern), replace)


def _read_layers(params: Any, pattern: str | None) -> tuple[list[str], list[Any]]:
    """Finds the layers in the order of their numbers, and their names for errors."""
    if pattern is None:
        if type(params) not in (list, tuple) or not params:
            raise TypeError(
                f"without a pattern params must be a list of layers, got {type(params).__name__}: "
                "give the names of the layers with {} for the number, such as 'block_{}'"
            )
        return [f"layer {number}" for number in range(len(params))], list(params)
    by_number = _group_by_number(params, pattern)
    numbers = sorted(by_number)
    missing = sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers))
    if missing or numbers[0] > 1:
        wanted = missing[0] if missing else 0
        raise ValueError(
            f"{pattern.replace('{}', str(wanted))!r} is missing: numbers found are {numbers}, and "
            "layers are numbered from 0 or 1 without a gap"
        )
    groups = [by_number[number] for number in numbers]
    layers = [parts[""] if set(parts) == {""} else parts for parts in groups]
    return [pattern.replace("{}", str(number)) for number in numbers], layers


def _group_by_number(params: Any, pattern: str) -> dict[int, dict[Rest, Any]]:
    """Groups the subtrees whose paths fit the pattern by number."""
    found: dict[int, dict[Rest, Any]] = {}

    def note(number: int, rest: Rest, subtree: Any) -> Any:
        if rest in found.setdefault(number, {}):
            name = pattern.replace("{}", str(number)) + rest
            raise ValueError(f"{name!r} comes twice, as with a leading zero: give it one name")
        found[number][rest] = subtree
        return subtree

    _find_layers(params, _as_regex(pattern), note)
    if not found:
        names = [path_name(path) for path, _ in open_node(params)[0]]
        raise ValueError(
            f"no name fits the pattern {pattern!r}; the tree has {', '.join(names[:8]) or 'none'}"
            + (" and more" if len(names) > 8 else "")
        )
    return found


def _as_regex(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str) or pattern.count("{}") != 1:
        raise TypeError(
            f"pattern must be a string with one {{}} for the number, as in 'block_{{}}', got "
            f"{pattern!r}"
        )
    before, after = map(re.escape, pattern.split("{}"))
    # A name may go on behind the pattern only where the pattern goes on behind the number: "h{}_"
    # fits "h0_attn", and "h{}" does not.
    return re.compile(f"{before}([0-9]+){after}{'(.*)' if after else '()'}")


def _find_layers(
    node: Any, regex: re.Pattern[str], visit: Callable[[int, Rest, Any], Any], path: str = ""
) -> Any:
    """Rebuilds a tree with `visit(number, rest, subtree)` in the place of what fits."""
    children, structure = open_node(node)
    if len(children) == 1 and not children[0][0]:  # a leaf is its own only child
        return node

    def rebuild(key: Any, child: Any) -> Any:
        name = f"{path}/{path_name(key)}" if path else path_name(key)
        match = regex.fullmatch(name)
        if match:
            return visit(int(match[1]), match[2], child)
        return _find_layers(child, regex, visit, name)

    return jax.tree.unflatten(structure, [rebuild(key, child) for key, child in children])


def _check_alike(
    first_name: str, first: Any, name: str, layer: Any, with_dtypes: bool = True
) -> None:
    """Refuses layers that cannot be stacked, by the first leaf in which they differ."""

    def describe(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {path_name(path): _describe_type(leaf, with_dtypes) for path, leaf in leaves}

    ours, theirs = describe(first), describe(layer)
    for leaf in [*ours, *theirs]:
        if leaf not in theirs or leaf not in ours:
            has, lacks = (first_name, name) if leaf in ours else (name, first_name)
            raise ValueError(
                f"{has} has a leaf {leaf!r}, and {lacks} has none: layers must be alike"
            )
        if ours[leaf] != theirs[leaf]:
            raise ValueError(
                f"the leaf {leaf or 'itself'!r} is {ours[leaf]} in {first_name} and "
                f"{theirs[leaf]} in {name}: layers must be alike"
            )
    if jax.tree.structure(first) != jax.tree.structure(layer):
        raise ValueError(
            f"{first_name} and {name} have the same leaves in containers of other kinds, or with "
            f"other settings: {jax.tree.structure(first)} and {jax.tree.structure(layer)}"
        )


def _describe_type(leaf: Any, with_dtypes: bool) -> str:
    dtype = f"{jnp.result_type(leaf)}" if with_dtypes else "of shape "
    return f"{dtype}{list(np.shape(leaf))}"


def _stack(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
    # A checkpoint on the host stays there: the stack may be larger than one device.
    on_host = all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)


def count_layers(name: str, stages: Any, advice: str = "") -> int:
    """The length of the axis that all leaves share; an error of others ends in `advice`."""
    shapes = {
        path_name(path): np.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(stages)
    }
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) != 1 or () in counts:
        raise ValueError(
            f"all leaves of {name} need the same leading axis of layers, got "
            + (", ".join(f"{at} {shape}".strip() for at, shape in shapes.items()) or "none")
            + advice
        )
    ((count,),) = counts
    return count


def take_layer(leaf: Any, number: int) -> Any:
    """Takes one layer of a stacked leaf, which may be a shape, and divided over the stages."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return take_index(leaf, number)
