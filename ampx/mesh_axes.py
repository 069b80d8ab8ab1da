"""Axes of meshes and of shard_map: their sizes, and what varies over them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def as_axes(axis_name: str | Sequence[str]) -> tuple[str, ...]:
    """One axis or several, as a tuple.

    Raises:
      ValueError: if there is none.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not axes:
        raise ValueError("axis_name must name at least one mesh axis, such as 'data'")
    return axes


def bound_size(axes: Sequence[str]) -> int:
    """How many devices there are along mapped axes together.

    Raises:
      NameError: if one of them is not mapped here.
    """
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError as error:
            raise NameError(
                f"no axis {axis!r} is mapped here: call it inside jax.shard_map over a mesh with "
                "that axis. Under plain jit arrays are global, and JAX reduces gradients itself"
            ) from error
    return int(np.prod([lax.axis_size(axis) for axis in axes], dtype=int))


def varying_over(leaf: Any) -> frozenset[str]:
    """The mapped axes over which a value may differ; none where `shard_map` does not check it."""
    return jax.typeof(leaf).manual_axis_type.varying


def sum_over_shards(number: jax.Array) -> jax.Array:
    """What each device found in its shard, summed over the mapped axes over which it varies."""
    axes = tuple(sorted(varying_over(number)))
    return lax.psum(number, axes) if axes else number


def tracks_varying(axis: str) -> bool:
    """Whether the `shard_map` around checks what varies over this axis."""
    return axis in varying_over(lax.axis_index(axis))


def _spec_of(leaf: Any) -> Any:
    return getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)


def unreduced_axes(leaf: Any) -> frozenset[str]:
    """Explicit mesh axes along which a value is a sum that is still due."""
    return frozenset(getattr(_spec_of(leaf), "unreduced", ()))


def reduced_axes(leaf: Any) -> frozenset[str]:
    """Explicit mesh axes along which the gradient of a value will be a sum that is still due."""
    return frozenset(getattr(_spec_of(leaf), "reduced", ()))


def unreduced_zeros(leaf: Any, dtype: Any) -> jax.Array:
    """Zeros of the type that the gradient of a value with `reduced_axes` has."""
    spec = jax.P(*_spec_of(leaf).partitions, unreduced=reduced_axes(leaf))
    return jax.reshard(jnp.zeros(leaf.shape, dtype), spec)


def divided(total: jax.Array, divisor: Any) -> jax.Array:
    """A quotient, also of a sum that is still due, which only a product can scale."""
    axes = unreduced_axes(total)
    if not axes:
        return total / divisor
    factor = jnp.asarray(1 / divisor, total.dtype)
    return total * jax.reshard(factor, jax.P(reduced=axes))


def has_automatic_axes() -> bool:
    """Whether the mesh around has axes of several devices that are not mapped here."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(getattr(mesh, "manual_axes", ()))
    return any(size > 1 for name, size in mesh.shape.items() if name not in manual)


def varying(tree: Any, axes: Sequence[str]) -> Any:
    """The same values, marked as possibly different on devices along `axes`; no marks in `vmap`."""

    def mark(leaf: Any) -> Any:
        for axis in axes:
            with contextlib.suppress(ValueError):  # marked already, or not under shard_map
                leaf = jax.lax.pcast(leaf, axis, to="varying")
        return leaf

    return jax.tree.map(mark, tree) if axes else tree


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
