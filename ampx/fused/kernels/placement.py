"""Where the arrays of a kernel lie: on one device, as shards in `shard_map`, or where XLA says.

XLA's partitioner divides its own operations over a mesh, but it knows nothing of what a kernel
does. On CPUs and GPUs it would silently gather whole arrays on every device for it. So a kernel is
called only where one of these holds:

    one device                      the arrays are whole
    inside the caller's shard_map   the arrays are this device's shards already
    a mesh of Explicit axes         types tell how arrays are divided: a `shard_map` by the same
                                    specs, put around the kernel here, moves nothing
    Auto axes, or no mesh at all    XLA decides after tracing, and asks the kernel then, see
                                    `auto_axes`

It is refused where two of these are mixed: axes of one mesh, some mapped and others not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.fused.kernels.auto_axes import run_on_auto_shards
from ampx.mesh_axes import varying_axes


class Shard(NamedTuple):
    """Which part of a leaf this device has.

    Attributes:
      axes: the mesh axes along which the leaf is divided; sums go over these.
      start: uint32 `(row, column)` of its first element in the whole, see `rounding.element_index`;
        known where no axis but the first and the last is divided, and where JAX knows the whole.
    """

    axes: tuple[str, ...]
    start: tuple[jax.Array, jax.Array]


Update = Callable[[Any, Any, list[Shard]], Any]


def run_in_place(update: Update, shared: Any, leaves: Sequence[Any]) -> list[Any]:
    """`update(shared, leaves, shards)`, called where every array is whole or one device's shard.

    Args:
      update: what calls kernels. For each leaf it returns an array and a tuple of arrays, all
        divided as the leaf is, and one number that is the same on all devices.
      shared: a tree of arrays that are the same everywhere.
      leaves: trees of arrays, the first with the shape and the others divided as it is.

    Returns:
      What `update` returns.

    Raises:
      ValueError: if that cannot be known here, or the arrays of a leaf are divided differently.
    """
    if not leaves:
        return []
    if reason := why_place_unknown(leaves):
        raise ValueError(
            "a kernel updates arrays where they lie, and where parameters, gradients and state lie "
            f"is not known here: {reason}. Map all axes of the mesh in jax.shard_map, or none; or "
            "give backend='xla'"
        )
    if decided_by_xla(leaves):
        on_shards = functools.partial(_update_places, update)
        return jax.jit(functools.partial(run_on_auto_shards, on_shards), inline=True)(
            shared, list(leaves)
        )
    # Whole arrays, or the caller's `shard_map`: the kernel may run right here. Kernels need a `jit`
    # around them; within a caller's, `inline` leaves no trace of this one.
    meshes = _meshes(leaves)
    if not any(m.explicit_axes for m in meshes):
        zero = jnp.uint32(0), jnp.uint32(0)
        shards = [Shard(tuple(sorted(varying_axes(leaf))), zero) for leaf in leaves]
        return jax.jit(lambda s, all_: update(s, all_, shards), inline=True)(shared, list(leaves))
    # Explicit axes: the types of the arrays say how they are divided.
    specs = [_spec(leaf) for leaf in leaves]
    shapes = [jax.tree.leaves(leaf)[0].shape for leaf in leaves]

    def update_shards(shared: Any, leaves: Sequence[Any]) -> list[Any]:
        return update(shared, leaves, list(map(_shard, specs, shapes)))

    mapped_update = jax.shard_map(
        update_shards,
        mesh=meshes.pop() if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(jax.P(), specs),
        out_specs=[(spec, spec, jax.P()) for spec in specs],
        check_vma=False,  # a GPU kernel that updates in place takes no arrays of checked axes
    )
    return jax.jit(mapped_update, inline=True)(shared, list(leaves))


def why_place_unknown(arrays: Any) -> str | None:
    """Why kernels cannot work where the arrays of a tree lie; None if they can."""
    meshes = _meshes(arrays)
    mapped = sorted({axis for m in meshes for axis in m.manual_axes})
    explicit = sorted({axis for m in meshes for axis in m.explicit_axes})
    automatic = _automatic_axes(meshes)
    if mapped and (explicit or automatic):
        return f"shard_map has mapped {mapped} here, and not {explicit + automatic}"
    if explicit and automatic:
        return f"of the mesh axes {automatic} are in Auto mode and {explicit} are Explicit"
    return None


def decided_by_xla(arrays: Any) -> bool:
    """Whether XLA decides where the arrays of a tree lie, after tracing."""
    meshes = _meshes(arrays)
    if _automatic_axes(meshes):
        return True
    leaves = jax.tree.leaves(arrays)
    return not meshes and jax.device_count() > 1 and not all(map(_on_one_device, leaves))


def is_on_one_device(arrays: Any) -> bool:
    """Whether the arrays of a tree lie whole on one device, so far as is known while tracing."""
    return not decided_by_xla(arrays) and all(mesh.size == 1 for mesh in _meshes(arrays))


def _automatic_axes(meshes: set[Any]) -> list[str]:
    # An axis of one device divides nothing, whoever decides.
    return sorted({axis for m in meshes for axis in m.auto_axes if m.shape[axis] > 1})


def _update_places(
    update: Update, shared: Any, leaves: Sequence[Any], places: Sequence[tuple[Any, Any]]
) -> list[Any]:
    return update(shared, leaves, [_shard(*place) for place in places])


def _meshes(arrays: Any) -> set[Any]:
    """The mesh that was entered, or else those that the arrays bring along."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return {mesh}
    meshes = {jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arrays)}
    return {mesh for mesh in meshes if not mesh.empty}


def _on_one_device(array: Any) -> bool:
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1


def _spec(leaf: Any) -> Any:
    """How all arrays of a leaf are divided."""
    specs = {jax.typeof(array).sharding.spec for array in jax.tree.leaves(leaf)}
    if len(specs) > 1:
        raise ValueError(
            "a kernel needs a parameter, its gradient and its state divided in the same way over "
            f"devices, got {' and '.join(sorted(map(str, specs)))}: bring them together with "
            "jax.reshard, or give backend='xla'"
        )
    return specs.pop()


def _shard(spec: Any, shape: tuple[int, ...]) -> Shard:
    """Finds this device's part of an array, in `shard_map`; `shape` is that of the whole."""
    parts = [part if isinstance(part, tuple) else (part,) * (part is not None) for part in spec]
    parts += [()] * (len(shape) - len(parts))

    # Along one axis of the array: the number of the shard times its size.
    def first(axis: int) -> jax.Array:
        if not parts[axis]:
            return jnp.uint32(0)
        own_size = shape[axis] // lax.axis_size(parts[axis])
        return (lax.axis_index(parts[axis]) * own_size).astype(jnp.uint32)

    # Rows are ranks over all axes but the last. With only the first of them divided, a shard's
    # first row is its first index there times the rows within one such index.
    column = first(-1) if shape else jnp.uint32(0)
    row = first(0) * jnp.uint32(math.prod(shape[1:-1])) if len(shape) > 1 else jnp.uint32(0)
    return Shard(tuple(axis for part in parts for axis in part), (row, column))
