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

A leaf may be divided over some of the axes already, as experts are: a device's part of it is then a
leaf of its own, and n counts the devices along the other axes, which hold the same part. Where no
axis is left, the device keeps its part and its gradient, and nothing travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.data_parallel.gradient_shards import GradientShard, is_gradient_shard
from ampx.data_parallel.reduction import Reduction
from ampx.data_parallel.shard_layouts import choose_shard_dim, take_own_shard
from ampx.flat_buffers.buckets import bucket_layout
from ampx.mesh_axes import count_devices, explicit_axes, varying_axes
from ampx.trees import at_path


class ShardExchange:
    """Exchanges the leaves of a tree like `params`; made anew whenever an update is traced.

    Attributes:
      reduction: how gradients are widened, summed and put into buckets.
      own_axes: for each leaf the mapped axes over which it is divided already.
      axes: for each leaf the other axes of the reduction, over which it is summed and divided.
      counts: for each leaf the devices along these, the n of the picture above.
      shapes: whole shapes of the leaves.
      dims: for each leaf the axis along which it is divided; None for one that is not.
      divided: places and axes of those that are.
    """

    def __init__(
        self, reduction: Reduction, params: Any, own_axes: Sequence[Sequence[str]] | None = None
    ) -> None:
        leaves = jax.tree.leaves(params)
        _check_all_mapped(params)
        self.reduction = reduction
        self.own_axes = own_axes or [()] * len(leaves)
        self.axes = [tuple(a for a in reduction.axes if a not in own) for own in self.own_axes]
        self.counts = [count_devices(axes) for axes in self.axes]
        self.shapes = [jnp.shape(leaf) for leaf in leaves]
        self.dims = [
            choose_shard_dim(shape, count) if axes else None
            for shape, count, axes in zip(self.shapes, self.counts, self.axes, strict=True)
        ]
        self.divided = {i: dim for i, dim in enumerate(self.dims) if dim is not None}

    def take_own_shards(self, tree: Any) -> Any:
        """Cuts this device's shards out of a tree that all devices hold."""
        shards = map(take_own_shard, jax.tree.leaves(tree), self.dims, self.axes)
        return jax.tree.unflatten(jax.tree.structure(tree), list(shards))

    def cut_zeros(self, zeros: Any) -> Any:
        """Cuts zeros to the shapes of shards; those of one device are like those of any other."""
        leaves, structure = jax.tree.flatten(zeros)
        for i, dim in self.divided.items():
            size = self.shapes[i][dim] // self.counts[i]
            leaves[i] = lax.slice_in_dim(leaves[i], 0, size, axis=dim)
        return structure.unflatten(leaves)

    def scatter(self, grads: Any) -> tuple[Any, list[int]]:
        """Reduces gradients to this device's shards, and counts the bytes handed over for them.

        Leaves that are not divided are reduced as by `ampx.all_reduce`, and returned whole. What
        was scattered before is taken as it is.
        """
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_gradient_shard)
        if any(map(is_gradient_shard, leaves)):
            return structure.unflatten(self._scattered_before(grads)), []
        shards, sent = self.scatter_divided(grads)
        sums, sent_whole = self.sum_undivided(shards)
        return sums, [*sent, *sent_whole]

    def scatter_divided(self, grads: Any) -> tuple[Any, list[int]]:
        """Does what `scatter` does with leaves that are divided, and leaves others as they are."""
        given, structure = jax.tree.flatten(grads)
        wide = jax.tree.leaves(self.reduction.widen(grads))
        sent: list[int] = []

        # On one device nothing travels, and nothing is counted.
        def scatter_rows(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            if count_devices(axes) > 1:
                sent.append(rows.nbytes)
            return lax.psum_scatter(rows, axes)  # [n, width] -> this device's row, summed

        received = self._in_buckets([self._rows(wide[i], i) for i in self.divided], scatter_rows)
        for i, row in zip(self.divided, received, strict=True):
            shard = self._restore(row, i, self.counts[i])
            given[i] = self.reduction.narrow(shard, given[i])
        return structure.unflatten(given), sent

    def sum_undivided(self, grads: Any) -> tuple[Any, list[int]]:
        """Sums the leaves that are not divided over devices, and counts the bytes sent."""
        leaves, structure = jax.tree.flatten(grads)
        places = [i for i in range(len(leaves)) if i not in self.divided]
        whole = [leaves[i] for i in places]
        own_axes = [self.own_axes[i] for i in places]
        wide = self.reduction.widen(whole)
        sums, sent = self.reduction.sum_over_devices(wide, own_axes=own_axes)
        for i, leaf in zip(places, self.reduction.narrow(sums, whole), strict=True):
            leaves[i] = leaf
        return structure.unflatten(leaves), sent

    def sum_beyond(self, grads: Any, batch_axes: Sequence[str] | None) -> tuple[Any, list[int]]:
        """Sums shards over further axes that the batch is split over, and counts the bytes sent.

        After the scatter, which has made them 1/n as large.

        Args:
          grads: what `scatter` returned.
          batch_axes: all axes of the batch; None where nobody knows them but `self.reduction`.

        Raises:
          ValueError: if the batch is not split over an axis of the reduction.
        """
        axes = self.reduction.axes
        batch_axes = axes if batch_axes is None else tuple(batch_axes)
        if missing := [axis for axis in axes if axis not in batch_axes]:
            raise ValueError(
                f"zero1 divides its state over {missing}, and train_step was told that the batch "
                f"is split over {batch_axes}: train_step(axis_name=...) must name these axes too"
            )
        further = tuple(axis for axis in batch_axes if axis not in axes)
        if not further:
            return grads, []
        reduction = dataclasses.replace(self.reduction, axes=further)
        wide = reduction.widen(grads)
        sums, sent = reduction.sum_over_devices(wide, own_axes=self.own_axes)
        return reduction.narrow(sums, grads), sent

    def mark(self, grads: Any) -> Any:
        """Marks what `scatter` returned, so that nobody takes a shard for the whole."""
        leaves, structure = jax.tree.flatten(grads)
        marked = map(GradientShard, leaves, self.shapes, self.axes)
        return structure.unflatten(list(marked))

    def _scattered_before(self, grads: Any) -> list[jax.Array]:
        """The shards of marked gradients.

        Raises:
          ValueError: if they are divided in another way.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_gradient_shard)
        for (path, leaf), axes, shape in zip(paths, self.axes, self.shapes, strict=True):
            if not is_gradient_shard(leaf) or (leaf.axes, leaf.shape) != (axes, shape):
                found = f"over {leaf.axes}" if is_gradient_shard(leaf) else "over nothing"
                raise ValueError(
                    f"the gradient{at_path(path)} was scattered {found}, and "
                    f"zero1 divides its parameter over {axes}: give value_and_grad, or train_step, "
                    "and zero1 the same axis_name and the same model_axes"
                )
        return [leaf.value for _, leaf in paths]

    def gather(self, updates: Sequence[Any]) -> list[Any]:
        """Gathers whole updates from every device's shards, in the dtypes that updates have.

        The result is typed as the same on all devices ("invarying"), so that parameters stay so.
        """
        rows = [jnp.moveaxis(updates[i], dim, 0).reshape(-1) for i, dim in self.divided.items()]

        def gather_row(row: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            return lax.all_gather(row, axes, to="invarying")  # [width] -> [n, width]

        whole = dict(zip(self.divided, self._in_buckets(rows, gather_row), strict=True))
        return [
            leaf if dim is None else self._restore(whole[i], i, 1)
            for i, (leaf, dim) in enumerate(zip(updates, self.dims, strict=True))
        ]

    def _rows(self, leaf: jax.Array, place: int) -> jax.Array:
        """A matrix with a row for each device, which holds that device's shard: [n, size / n]."""
        return jnp.moveaxis(leaf, self.divided[place], 0).reshape(self.counts[place], -1)

    def _restore(self, flat: jax.Array, place: int, parts: int) -> jax.Array:
        """One of `parts` equal parts of a leaf, from its numbers with the divided axis first."""
        dim, shape = self.divided[place], list(self.shapes[place])
        length = shape.pop(dim) // parts
        return jnp.moveaxis(flat.reshape(length, *shape), 0, dim)

    def _in_buckets(
        self, rows: Sequence[jax.Array], move: Callable[[jax.Array, tuple[str, ...]], jax.Array]
    ) -> list[jax.Array]:
        """Applies `move` to the arrays of one bucket at a time, joined along the last axis."""
        axes = [self.axes[i] for i in self.divided]
        # The layout is that of one row of each matrix, the same for every device's row. In a list
        # the path of a leaf is its place: "0", "1" and so on.
        layout = bucket_layout(
            [jax.ShapeDtypeStruct(row.shape[-1:], row.dtype) for row in rows],
            bucket_bytes=self.reduction.bucket_bytes,
            group_of=lambda path, leaf: (varying_axes(rows[int(path)]), axes[int(path)]),
        )
        moved: dict[int, jax.Array] = {}
        for number, bucket in enumerate(layout.buckets):
            with jax.named_scope(f"ampx.bucket_{number}"):
                joined = jnp.concatenate([rows[i] for i in bucket.leaves], axis=-1)
                joined = move(joined, axes[bucket.leaves[0]])
            places = zip(bucket.leaves, bucket.offsets, bucket.sizes, strict=True)
            for i, offset, size in places:
                moved[i] = lax.slice_in_dim(joined, offset, offset + size, axis=-1)
        return [moved[i] for i in range(len(rows))]


def _check_all_mapped(params: Any) -> None:
    """Refuses parameters that axes divide which are not mapped here; on Auto axes no type tells."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if axes := sorted(explicit_axes(leaf)):
            raise ValueError(
                f"the parameter{at_path(path)} is divided over {axes}, which "
                "are not mapped here, and zero1 cannot divide its parts further: map these axes, "
                "too (shard_map without axis_names, and with their names in in_specs), or leave "
                "zero1 and shard_map out and divide the state by its shardings under plain jit"
            )
