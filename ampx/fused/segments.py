"""The parameters in a flat buffer, for what an optimizer works out once for each of them.

LAMB's trust ratio and NovoGrad's second moment are sums over one parameter. In a flat buffer each
parameter begins at a new row, so every row belongs to one parameter. With rows of 4 elements, `a`
of 6 elements, `b` of 3, and padding `.`:

    buffer    a a a a | a a . . | b b b .
    rows         0    |    1    |    2
    owners       0    |    0    |    1        the parameter that a row belongs to

    sums      sum each row, then the rows of each owner      f32[rows * 4] -> f32[2]
    spread    one number to all elements of its rows         f32[2] -> f32[rows * 4]

Layouts are static, so owners are constants: no search at run time, only a sum over equal rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.flat_buffers.buckets import Bucket
from ampx.flat_buffers.flat_params import FlatParams, check_is_whole, is_flat


class Segments(NamedTuple):
    """Sums over the parameters of a buffer, by rows: none holds elements of two parameters.

    Attributes:
      bucket: where the parameters lie in the buffer.
      row: how many elements a row has.
    """

    bucket: Bucket
    row: int

    def sums(self, x: jax.Array) -> jax.Array:
        """The sum over each parameter: from shape (elements,) to (parameters,), without padding."""
        check_is_whole(self.bucket, x)
        of_rows = jnp.sum(self.without_padding(x).reshape(-1, self.row), axis=1)
        # Rows first, a dense reduction: what is scattered are sums, `row` times fewer.
        return jax.ops.segment_sum(
            of_rows, self._owners(), len(self.bucket.leaves), indices_are_sorted=True
        )

    def spread(self, numbers: jax.Array) -> jax.Array:
        """A parameter's number for each of its elements: from (parameters,) to (elements,)."""
        # A gather of rows, then a broadcast along each: not one gathered index an element.
        of_rows = numbers[self._owners()]
        return lax.broadcast_in_dim(of_rows, (len(of_rows), self.row), (0,)).reshape(-1)

    def without_padding(self, x: jax.Array) -> jax.Array:
        """Replaces whatever lies in the padding between parameters by zeros.

        Padding is zero in gradients and parameters, but 0 / 0 in a direction without epsilon.
        """
        # Elements of each row that belong to a parameter: i32[rows], from 0 to `row`.
        held = np.concatenate(
            [
                np.clip(size - self.row * np.arange(rows), 0, self.row)
                for size, rows in zip(self.bucket.sizes, self._rows(), strict=True)
            ]
        )
        rows = x.reshape(-1, self.row)
        is_held = lax.broadcasted_iota(jnp.int32, rows.shape, 1) < held.astype(np.int32)[:, None]
        return jnp.where(is_held, rows, jnp.zeros_like(rows)).reshape(-1)

    def _rows(self) -> np.ndarray:
        """How many rows each parameter has; trailing padding is the last one's."""
        return np.diff(self.bucket.offsets, append=self.bucket.size) // self.row

    def _owners(self) -> np.ndarray:
        """The place of the parameter that each row belongs to."""
        rows = self._rows()
        return np.repeat(np.arange(len(rows), dtype=np.int32), rows)


def find_segments(tree: Any) -> list[Segments | None]:
    """For each leaf of a tree, the parameters in it; None for a leaf that is one parameter."""
    found: list[Segments | None] = []
    for node in jax.tree.leaves(tree, is_leaf=is_flat):
        if not is_flat(node):
            found.append(None)  # an array is one parameter: plain sums do
            continue
        for bucket, buffer in zip(node.layout.buckets, node.buffers, strict=True):
            found += [Segments(bucket, node.layout.row)] * len(jax.tree.leaves(buffer))
    return found


def as_per_parameter(slots: Any) -> Any:
    """Turns slots of one number for an array into one for each parameter of a flat buffer."""

    def of(node: Any) -> Any:
        if not is_flat(node):
            return node
        pairs = zip(node.layout.buckets, node.buffers, strict=True)
        return FlatParams(tuple(_numbers(*pair) for pair in pairs), node.layout)

    return jax.tree.map(of, slots, is_leaf=is_flat)


def _numbers(bucket: Bucket, slot: Any) -> Any:
    """A slot of shape () as (parameters,): optax took the whole buffer for one parameter."""
    if not isinstance(slot, jax.Array) or slot.ndim:
        return slot
    return jnp.broadcast_to(slot, len(bucket.leaves))
