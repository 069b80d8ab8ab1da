"""Gradients of which a device holds its shard alone, marked as such: `GradientShard`.

A shard is an array like any other. An optimizer would take it for the gradient of a smaller
parameter, and a sum over devices would add up shards of different places. So each is wrapped in a
node of its own, which only `ampx.zero1` opens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from ampx.summaries import show_fields


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["shape", "axes"]
)
@dataclasses.dataclass(frozen=True, repr=False)
class GradientShard:
    """A gradient that is summed over devices, and of which this device holds its shard.

    `ampx.value_and_grad(scatter_gradients=True)` returns such, and `ampx.zero1` takes them. To
    `jax.tree.map` it is a node with one leaf, the shard.

    Attributes:
      value: the shard; the whole sum, if no axis of the gradient can be divided.
      shape: the shape that the gradient has before it is divided.
      axes: the mapped axes over which it was summed and divided.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> shard = ampx.GradientShard(jnp.ones(2), shape=(8,), axes=("data",))
      >>> jax.tree.map(lambda x: 2 * x, shard).value
      Array([2., 2.], dtype=float32)
    """

    value: Any
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    # Read by `tree_checks.check_gradients`, which stands below this module.
    is_gradient_shard = True

    __repr__ = show_fields

    @property
    def dtype(self) -> Any:
        """The dtype of the shard."""
        return self.value.dtype


def is_gradient_shard(node: Any) -> bool:
    """Whether a node of a tree is a `GradientShard`."""
    return isinstance(node, GradientShard)
