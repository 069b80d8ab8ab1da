"""Leaves divided over devices: gradients travel to their shards, updates back, in buckets.

Each leaf is divided along one axis, `choose_shard_dim` of its shape. For the exchange that axis
goes to the front and the leaf becomes a matrix with one row a device. The matrices of a bucket are
joined side by side, so that one collective moves many leaves (here n = 2 devices):

        leaf A [3, 4], divided along axis 1      leaf B [2], along axis 0

    row 0   A[:, 0:2] as 6 numbers               B[0:1]           shards of device 0
    row 1   A[:, 2:4] as 6 numbers               B[1:2]           shards of device 1
            └──────────── one bucket, f32[2, 7] ──────┘

    reduce-scatter    f32[2, 7] on each device  ->  the sum of all devices' row i on device i
    all-gather        f32[7] on device i        ->  row i of f32[2, 7] on each device

No padding is needed, since n divides the axis. A leaf without such an axis stays whole everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.data_parallel.reduction import Reduction
from ampx.data_parallel.shard_layouts import choose_shard_dim, take_own_shard
from ampx.flat_buffers.buckets import bucket_layout
from ampx.mesh_axes import count_devices, varying_axes


class ShardExchange:
    """Exchanges the leaves of a tree like `params`; made anew whenever an update is traced.

    Attributes:
      reduction: how gradients are widened, summed and put into buckets.
      axes: the mapped axes over which leaves are divided.
      count: devices along them, the n of the picture above.
      shapes: whole shapes of the leaves.
      dims: for each leaf the axis along which it is divided; None for one that is not.
      divided: places and axes of those that are.
    """

    def __init__(self, reduction: Reduction, params: Any) -> None:
        self.reduction = reduction
        self.axes = reduction.axes
        self.count = count_devices(self.axes)
        self.shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        self.dims = [choose_shard_dim(shape, self.count) for shape in self.shapes]
        self.divided = {i: dim for i, dim in enumerate(self.dims) if dim is not None}

    def take_own_shards(self, tree: Any) -> Any:
        """Cuts this device's shards out of a tree that all devices hold."""
        shards = map(take_own_shard, jax.tree.leaves(tree), self.dims, [self.axes] * len(self.dims))
        return jax.tree.unflatten(jax.tree.structure(tree), list(shards))

    def scatter(self, grads: Any) -> tuple[Any, list[int]]:
        """Reduces gradients to this device's shards, and counts the bytes handed over for them.

        Leaves that are not divided are reduced as by `ampx.all_reduce`, and returned whole.
        """
        leaves, structure = jax.tree.flatten(self.reduction.widen(grads))
        rows = [self._rows(leaves[i], i) for i in self.divided]
        whole = [leaf for leaf, dim in zip(leaves, self.dims, strict=True) if dim is None]

        sent: list[int] = []

        # On one device nothing travels, and nothing is counted.
        def scatter_rows(rows: jax.Array) -> jax.Array:
            if self.count > 1:
                sent.append(rows.nbytes)
            return lax.psum_scatter(rows, self.axes)  # [n, width] -> this device's row, summed

        received = self._in_buckets(rows, scatter_rows)
        shards = dict(zip(self.divided, received, strict=True))
        sums, sent_whole = self.reduction.sum_over_devices(whole)
        rest = iter(sums)  # the sums of `whole`, in its order
        parts = [
            next(rest) if dim is None else self._shard(shards[i], i)
            for i, dim in enumerate(self.dims)
        ]
        shards_of_tree = jax.tree.unflatten(structure, parts)
        return self.reduction.narrow(shards_of_tree, grads), [*sent, *sent_whole]

    def gather(self, updates: Sequence[Any]) -> list[Any]:
        """Gathers whole updates from every device's shards, in the dtypes that updates have.

        The result is typed as the same on all devices ("invarying"), so that parameters stay so.
        """
        rows = [jnp.moveaxis(updates[i], dim, 0).reshape(-1) for i, dim in self.divided.items()]

        def gather_row(row: jax.Array) -> jax.Array:
            return lax.all_gather(row, self.axes, to="invarying")  # [width] -> [n, width]

        whole = dict(zip(self.divided, self._in_buckets(rows, gather_row), strict=True))
        return [
            leaf if dim is None else self._whole(whole[i], i)
            for i, (leaf, dim) in enumerate(zip(updates, self.dims, strict=True))
        ]

    def _rows(self, leaf: jax.Array, place: int) -> jax.Array:
        """A matrix with a row for each device, which holds that device's shard: [n, size / n]."""
        return jnp.moveaxis(leaf, self.divided[place], 0).reshape(self.count, -1)

    def _shard(self, row: jax.Array, place: int) -> jax.Array:
        return self._restore(row, place, self.count)

    def _whole(self, rows: jax.Array, place: int) -> jax.Array:
        return self._restore(rows, place, 1)

    def _restore(self, flat: jax.Array, place: int, parts: int) -> jax.Array:
        """One of `parts` equal parts of a leaf, from its numbers with the divided axis first."""
        dim, shape = self.divided[place], list(self.shapes[place])
        length = shape.pop(dim) // parts
        return jnp.moveaxis(flat.reshape(length, *shape), 0, dim)

    def _in_buckets(self, rows: Sequence[jax.Array], move: Any) -> list[jax.Array]:
        """Applies `move` to the arrays of one bucket at a time, joined along the last axis."""
        # The layout is that of one row of each matrix, the same for every device's row. In a list
        # the path of a leaf is its place: "0", "1" and so on.
        layout = bucket_layout(
            [jax.ShapeDtypeStruct(row.shape[-1:], row.dtype) for row in rows],
            bucket_bytes=self.reduction.bucket_bytes,
            group_of=lambda path, leaf: varying_axes(rows[int(path)]),
        )
        moved: dict[int, jax.Array] = {}
        for number, bucket in enumerate(layout.buckets):
            with jax.named_scope(f"ampx.bucket_{number}"):
                joined = move(jnp.concatenate([rows[i] for i in bucket.leaves], axis=-1))
            places = zip(bucket.leaves, bucket.offsets, bucket.sizes, strict=True)
            for i, offset, size in places:
                moved[i] = lax.slice_in_dim(joined, offset, offset + size, axis=-1)
        return [moved[i] for i in range(len(rows))]
