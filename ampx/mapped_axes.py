"""What is known, while tracing, of mesh axes and of how values vary over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


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
