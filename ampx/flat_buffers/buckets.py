"""Leaves of a tree in a few flat buffers, so that a collective or a kernel runs once for many.

Leaves are taken in reverse: the backward pass begins with what the forward pass used last. Take a
tree with leaves 0 to 3 of 5, 6, 3 and 4 elements, and buckets of at least 8 elements. Every leaf
begins at a multiple of 4 (`align`), and every bucket ends at a multiple of 8 (`multiple_of`)::

    bucket 0:  3 3 3 3  2 2 2 .  1 1 1 1  1 1 . .      leaves (3, 2, 1), offsets (0, 4, 8)
    bucket 1:  0 0 0 0  0 . . .                        leaves (0,), offsets (0,)

A dot is padding, 0. Bucket 0 is closed by leaf 1, which filled it; only elements count for that,
and no leaf is divided. Its gradients are the first to be complete, so its reduction can run while
the backward pass still works on leaf 0.

A layout is made from shapes and dtypes alone, so it is the same on every device and process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.checking import as_int, as_positive_int
from ampx.function_checks import check_callable
from ampx.summaries import show_fields, show_table
from ampx.text_tables import Block, Table, show_blocks, show_rich
from ampx.tree_checks import check_arrays, check_memory, describe_tree
from ampx.trees import is_float0, path_name

# What a link carries in the time that it takes to start a reduction: 50 microseconds at 10 GB/s.
_BYTES_PER_START = 2**19
_LEAST_BYTES = 2**20  # of a bucket: below, starts outweigh the transfer


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that lie in one flat buffer; all of it static.

    Attributes:
      dtype: of the buffer and of all of its leaves.
      group: what else the leaves have in common, see `bucket_layout`.
      leaves: places of the leaves in the flattened tree, in the order in which they lie.
      offsets: where each begins, in elements, ascending.
      sizes: elements of each, without padding.
      size: elements of the buffer, padding included.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> (bucket,) = ampx.bucket_layout({"a": jnp.ones(3), "b": jnp.ones((2, 2))}).buckets
      >>> bucket.leaves, bucket.offsets, bucket.size
      ((1, 0), (0, 4), 7)
    """

    dtype: np.dtype
    group: Hashable
    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int

    __repr__ = show_fields

    def join(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The buffer of shape (size,) with these leaves in it, and zeros in between.

        One concatenation, which XLA does in one pass. Writing leaf by leaf into zeros would read
        and write the whole buffer for each of them where XLA does not update it in place.
        """
        pieces = []
        end = 0  # of what `pieces` hold so far, in elements
        for leaf, offset, size in zip(leaves, self.offsets, self.sizes, strict=True):
            if offset > end:
                pieces.append(jnp.zeros(offset - end, leaf.dtype))
            pieces.append(leaf.reshape(-1))
            end = offset + size
        if self.size > end:
            pieces.append(jnp.zeros(self.size - end, leaves[0].dtype))
        # A lone leaf without padding is its own buffer: no copy at all.
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)

    def with_spare(self, multiple_of: int) -> Bucket:
        """The same bucket with an element at its end, at least, that belongs to no leaf.

        To make a reduction of this bucket wait for another one, a number that depends on the other
        is written into that element. No leaf changes by it.

        Args:
          multiple_of: elements that a full buffer grows by.
        """
        is_full = self.offsets[-1] + self.sizes[-1] == self.size
        return dataclasses.replace(self, size=self.size + multiple_of) if is_full else self

    def split(self, buffer: jax.Array) -> list[jax.Array]:
        """The leaves that lie in a buffer, each of shape (its size,)."""
        places = zip(self.offsets, self.sizes, strict=True)
        return [jax.lax.slice(buffer, (start,), (start + size,)) for start, size in places]


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Where each leaf of a tree lies; made by `ampx.bucket_layout`.

    Attributes:
      buckets: in the order in which a backward pass completes them.
      structure: of the tree.
      shapes: of its leaves, those without elements included.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tree = {"a": jnp.zeros(3), "b": jnp.ones((2, 2))}
      >>> layout = ampx.bucket_layout(tree, multiple_of=8)
      >>> (buffer,) = layout.flatten(tree)
      >>> buffer
      Array([1., 1., 1., 1., 0., 0., 0., 0.], dtype=float32)
      >>> layout.unflatten([buffer + 1], tree)["a"]
      Array([1., 1., 1.], dtype=float32)
    """

    buckets: tuple[Bucket, ...]
    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    __repr__ = show_fields
    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    def _blocks(self) -> list[Block]:
        """A table with a row for each bucket."""
        head = ("bucket", "dtype", "leaves", "numbers", "padding", "bytes")
        rows = [
            (
                b.dtype.name,
                len(b.leaves),
                sum(b.sizes),
                b.size - sum(b.sizes),
                b.size * b.dtype.itemsize,
            )
            for b in self.buckets
        ]
        cells = ([str(i), row[0], *map("{:,}".format, row[1:])] for i, row in enumerate(rows))
        return [Table([head, *cells])]

    def flatten(self, tree: Any) -> list[jax.Array]:
        """A flat buffer for each bucket, padded with zeros.

        Args:
          tree: of the structure, shapes and dtypes of the layout.

        Returns:
          Arrays of shape (bucket.size,).

        Raises:
          ValueError: if `tree` does not fit.
        """
        leaves = self._leaves(tree)
        check_memory("tree", tree)
        return [_joined([leaves[i] for i in bucket.leaves], bucket) for bucket in self.buckets]

    def unflatten(self, buffers: Sequence[jax.Array], like: Any) -> Any:
        """The tree whose leaves lie in `buffers`, in the dtypes that the buffers have.

        Args:
          buffers: as `flatten` gives them.
          like: a tree of the layout; leaves that lie in no bucket, as they hold nothing, are its.

        Returns:
          A tree of the structure of `like`.

        Raises:
          ValueError: if `like` does not fit.
        """
        _check_buffers(buffers, self.buckets)
        # Slices and reshapes, which XLA fuses into whatever reads the leaves.
        leaves = self._leaves(like)
        for buffer, bucket in zip(buffers, self.buckets, strict=True):
            for leaf, piece in zip(bucket.leaves, bucket.split(buffer), strict=True):
                leaves[leaf] = piece.reshape(self.shapes[leaf])
        return jax.tree.unflatten(self.structure, leaves)

    def _leaves(self, tree: Any) -> list[Any]:
        check_arrays("tree", tree, may_be_shapes=True)
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(jnp.shape(leaf) for leaf in leaves)
        if (structure, shapes) != (self.structure, self.shapes):
            raise ValueError(
                f"the layout is for {self.structure} with shapes {self.shapes}, got {structure} "
                f"with shapes {shapes}: make the layout from a tree of the same kind"
            )
        return leaves


def _check_buffers(buffers: Any, buckets: Sequence[Bucket]) -> None:
    """Refuses buffers that are not one for each bucket, of its size."""
    found = [jnp.shape(b) for b in buffers] if isinstance(buffers, list | tuple) else None
    due = [(bucket.size,) for bucket in buckets]
    if found != due:
        raise ValueError(
            f"buffers must be a list of arrays of shapes {due}, as flatten gives it, got "
            f"{describe_tree(buffers) if found is None else f'shapes {found}'}"
        )
    check_arrays("buffers", buffers)


def _joined(leaves: Sequence[jax.Array], bucket: Bucket) -> jax.Array:
    for leaf in leaves:
        if leaf.dtype != bucket.dtype:
            raise ValueError(
                f"the layout has {bucket.dtype} where the tree has {leaf.dtype}: make the layout "
                "from a tree of the same dtypes, or cast the leaf"
            )
    return bucket.join(leaves)


def default_bucket_bytes(total_bytes: int) -> int:
    """The size that leaves the shortest tail.

    The tail is what remains of the reductions after the last gradient is known. Say M bytes in all,
    buckets of s bytes, a link of b bytes a second and L seconds to start a reduction. The last
    bucket is on its way for s / b, and M / s starts take L each::

        tail(s) = s / b + L M / s        tail'(s) = 1 / b - L M / s**2 = 0  at  s = sqrt(M L b)

    L b, the bytes that a link carries during a start, is taken as 512 KiB. 100 MB then make 14
    buckets of 7 MB.
    """
    return max(_LEAST_BYTES, math.isqrt(total_bytes * _BYTES_PER_START))


def bucket_layout(
    tree: Any,
    *,
    bucket_bytes: int | None = None,
    multiple_of: int = 1,
    align: int = 1,
    group_of: Callable[[str, Any], Hashable] | None = None,
    order: Sequence[int] | None = None,
) -> BucketLayout:
    """Assigns the leaves of a tree to buckets of one dtype and group.

    A bucket is closed by the leaf that fills it, as in torch's DDP and Megatron, so it may be
    larger than `bucket_bytes`, and a leaf is never divided. Leaves are taken in reverse, the last
    used first, as their gradients become known.

    Args:
      tree: a pytree of arrays or of shapes with dtypes. Leaves without elements lie in no bucket,
        nor do the float0 gradients of integers.
      bucket_bytes: when a bucket is full. None: the square root of the tree's bytes times 512 KiB,
        and at least 1 MiB; see `default_bucket_bytes`.
      multiple_of: elements that each buffer is padded to a multiple of.
      align: elements that each leaf begins at a multiple of.
      group_of: a function of (path joined by "/", leaf). Leaves of different groups do not share
        a bucket.
      order: places of the leaves in the order in which the forward pass uses them, from
        `ampx.forward_order`; without it, the order of the tree.

    Returns:
      A `BucketLayout`.

    Raises:
      TypeError: if a size is not an int, or a leaf no array.
      ValueError: if a size is not positive, or `order` is not a permutation of the leaves.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tree = {"a": jnp.zeros(3), "b": jnp.ones((2, 2)), "n": jnp.arange(2)}
      >>> [(b.dtype.name, b.size) for b in ampx.bucket_layout(tree, bucket_bytes=16).buckets]
      [('int32', 2), ('float32', 4), ('float32', 3)]
    """
    multiple_of = as_positive_int("multiple_of", multiple_of)
    align = as_positive_int("align", align)
    check_arrays("tree", tree, may_be_shapes=True)
    leaves, structure = jax.tree.flatten(tree)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shapes = tuple(jnp.shape(leaf) for leaf in leaves)
    sizes = [math.prod(shape) for shape in shapes]
    dtypes: list[Any] = [
        None if is_float0(leaf) else np.dtype(jnp.result_type(leaf)) for leaf in leaves
    ]
    # JAX gives an integer parameter a gradient of dtype float0, which holds nothing.
    held = {i for i, size in enumerate(sizes) if size and dtypes[i] is not None}
    if bucket_bytes is None:
        bucket_bytes = default_bucket_bytes(sum(sizes[i] * dtypes[i].itemsize for i in held))
    bucket_bytes = as_positive_int("bucket_bytes", bucket_bytes)
    order = None if order is None else as_order(order, len(leaves))
    if group_of is not None:
        check_callable("group_of", group_of, "group_of(path, leaf)")

    # One bucket is open for each dtype and group; a leaf goes into that of its own.
    open_buckets: dict[Any, list[int]] = {}
    closed: list[tuple[Any, list[int]]] = []
    for i in reversed(range(len(leaves)) if order is None else order):
        if i not in held:
            continue
        group = None if group_of is None else group_of(paths[i], leaves[i])
        try:
            hash(group)
        except TypeError:
            raise TypeError(
                f"group_of must return something hashable, such as a name, got {group!r}"
            ) from None
        key = (dtypes[i], group)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(i)
        # Counted without padding. The leaf that fills a bucket closes it, so a bucket may be larger
        # than was asked for, but no leaf is ever divided.
        if sum(sizes[j] for j in bucket) * key[0].itemsize >= bucket_bytes:
            closed.append((key, open_buckets.pop(key)))
    closed.extend(open_buckets.items())
    # A bucket is complete with the gradient of its last leaf, the first one in the forward pass.
    place = {leaf: at for at, leaf in enumerate(order or range(len(leaves)))}
    closed.sort(key=lambda item: -place[item[1][-1]])
    buckets = tuple(_bucket(key, places, sizes, multiple_of, align) for key, places in closed)
    return BucketLayout(buckets, structure, shapes)


def as_order(order: Any, count: int | None = None) -> tuple[int, ...]:
    """Converts the argument `order` of `bucket_layout` to a tuple of Python's ints.

    Args:
      order: places of leaves.
      count: how many leaves there are; None where no tree is at hand yet.

    Raises:
      TypeError: if it is no sequence of ints.
      ValueError: if it is no permutation of the leaves.
    """
    if isinstance(order, str) or not isinstance(order, Iterable):
        raise TypeError(
            f"order must be a sequence of ints, as ampx.forward_order gives it, got {order!r}"
        )
    places = tuple(as_int("order", place) for place in order)
    count = len(places) if count is None else count
    if sorted(places) != list(range(count)):
        raise ValueError(f"order must be a permutation of the {count} leaves, got {list(places)}")
    return places


def _bucket(
    key: Any, leaves: Sequence[int], sizes: Sequence[int], multiple_of: int, align: int
) -> Bucket:
    dtype, group = key
    own = tuple(sizes[i] for i in leaves)
    # -(-n // k) is n / k rounded up.
    aligned = [-(-size // align) * align for size in own]
    offsets = tuple(itertools.accumulate(aligned[:-1], initial=0))
    size = -(-(offsets[-1] + own[-1]) // multiple_of) * multiple_of
    return Bucket(dtype, group, tuple(leaves), offsets, own, size)
