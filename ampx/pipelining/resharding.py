"""Arrays on meshes with Explicit axes, where `shard_map` takes only what lies as it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of `PartitionSpec`s is one."""
    return isinstance(node, P)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def placed(tree: Any, specs: Any, mesh: Mesh | None, axes: Sequence[str]) -> Any:
    """The arrays laid out along Explicit mesh axes; along Auto axes that is left to the compiler.

    Args:
      tree: global arrays.
      specs: a tree prefix of `PartitionSpec`s.
      mesh: None for the one of `jax.set_mesh`.
      axes: those that `specs` decide about. Along other axes arrays stay as they are.
    """
    known = mesh or jax.sharding.get_abstract_mesh()
    kinds = zip(known.axis_names, known.axis_types, strict=True)
    explicit = {axis for axis, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return tree

    def entry(wanted: Any, held: Any) -> Any:
        ours = [axis for axis in axes_of(wanted) if axis in explicit]
        others = [axis for axis in axes_of(held) if axis not in axes]
        return (*ours, *others) or None

    def place(spec: P, leaf: Any) -> Any:
        held = tuple(jax.typeof(leaf).sharding.spec)
        wanted = (*spec, *[None] * (len(held) - len(spec)))
        merged = P(*map(entry, wanted, held))
        return jax.sharding.reshard(leaf, merged if mesh is None else NamedSharding(mesh, merged))

    def place_all(spec: P, part: Any) -> Any:
        return jax.tree.map(lambda leaf: place(spec, leaf), part)

    return jax.tree.map(place_all, specs, tree, is_leaf=is_spec)
