"""Refuses arrays that are divided over devices, where they are to be put one behind the other.

A flat buffer has no axis along which all of its leaves are divided. XLA joins such leaves by
gathering them on every device, so whatever FSDP has divided would be whole again, in silence, with
all of the optimizer's state:

    w f32[8@data, 3], b f32[3]  ──►  buffer f32[27], whole on each device

Each device's own shards can be joined, inside `shard_map`: there nothing is divided any more.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax

from ampx.mesh_axes import axes_of_spec
from ampx.trees import path_name


def check_whole(owner: str, tree: Any) -> None:
    """Refuses a tree of which an array is divided over devices.

    Under plain `jit` on a mesh of Auto axes XLA decides how arrays are divided, after tracing.
    There a warning is all that is left, and comes while it compiles.

    Args:
      owner: what is to join them, for the error.
      tree: of arrays.

    Raises:
      ValueError: for the first such array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        message = functools.partial(_message, owner, path_name(path))
        if not isinstance(leaf, jax.core.Tracer):
            sharding = getattr(leaf, "sharding", None)
            if sharding is not None and not sharding.is_fully_replicated:
                raise ValueError(message(sharding))
            continue
        sharding = jax.typeof(leaf).sharding
        if axes_of_spec(sharding.spec):
            raise ValueError(message(sharding))
        mesh = sharding.mesh
        if not mesh.manual_axes and any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
            jax.debug.inspect_array_sharding(leaf, callback=functools.partial(_warn, message))


def _warn(message: Any, sharding: Any) -> None:
    if not sharding.is_fully_replicated:
        warnings.warn(message(sharding), stacklevel=2)


def _message(owner: str, name: str, sharding: Any) -> str:
    how = getattr(sharding, "spec", sharding)
    return (
        f"{owner} puts parameters one behind the other, and {name!r} is divided over devices as "
        f"{how}: it would become whole on each of them, and its moments too. Flat buffers are for "
        "small parameters: leave those out that are divided, as in {'small': flatten(small), "
        "'large': large}. Or call it inside jax.shard_map, on each device's own shards"
    )
