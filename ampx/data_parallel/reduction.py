"""One all-reduce for each bucket of gradients, once a step.

The gradients of a device are local until here: what judges them (the loss scale) has run, what
needs the whole of them (clipping, the optimizer) follows. Buckets are reduced in the order in which
a backward pass completes them, each waiting for the one before it, so that the optimizer may update
the first parameters while the last gradients are on their way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from ampx.checking import check_choice
from ampx.flat_buffers.buckets import Bucket, bucket_layout
from ampx.flat_buffers.flat_params import is_flat
from ampx.mesh_axes import (
    as_axes,
    count_devices,
    has_automatic_axes,
    tracks_varying,
    unreduced_axes,
    varying_axes,
)
from ampx.trees import is_float0, is_floating, path_name, wider_dtype

Op = Literal["mean", "sum"]


class ReductionState(NamedTuple):
    """The state of `ampx.all_reduce`: what the last update handed over to be reduced.

    Both are known when a step is traced, and 0 before the first update, and on one device, where
    nothing travels. A sum that takes several collectives is counted once. The state also tells
    others that a chain reduces by itself.

    Attributes:
      num_buckets: int32, reductions of gradients: one for each bucket; one for each array where the
        mesh has axes that are not mapped, or the gradients are unreduced over Explicit axes.
      reduced_bytes: float32, the bytes that each device hands to these reductions, padding
        included, in the dtype in which they travel: for floating buckets `wire_dtype`, if there is
        one; else `reduce_dtype`, or that of the gradients if it is wider; over Explicit axes that
        of the gradients. Arrays that axes which are not mapped divide are counted whole.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> print(*ampx.all_reduce("data").init(jnp.ones(2)))
      0 0.0
    """

    num_buckets: jax.Array
    reduced_bytes: jax.Array

    reduces_gradients = True


def reduction_state(sent: Sequence[int]) -> ReductionState:
    """The state after reductions of so many bytes each."""
    return ReductionState(
        jnp.asarray(len(sent), jnp.int32), jnp.asarray(float(sum(sent)), jnp.float32)
    )


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients are reduced; see `ampx.all_reduce`, whose arguments these are."""

    axes: tuple[str, ...]
    op: Op = "mean"
    reduce_dtype: Any = np.dtype(np.float32)
    wire_dtype: Any = None
    bucket_bytes: int | None = None
    tail_overlap: bool | None = None
    gradient_predivide_factor: float | None = None
    hierarchical: bool = False
    group_of: Callable[[str, Any], Hashable] | None = None
    order: tuple[int, ...] | None = None

    def __call__(self, grads: Any, first: jax.Array | None = None) -> Any:
        """The reduced gradients.

        Args:
          grads: local gradients, different on each device.
          first: a small integer array that is to be known before any gradient is sent.
        """
        return self.with_state(grads, first)[0]

    def with_state(self, grads: Any, first: jax.Array | None = None) -> tuple[Any, ReductionState]:
        """The reduced gradients, and what was handed over for them."""
        if any(self._is_due(leaf) for leaf in jax.tree.leaves(grads)):
            reduced, sent = self._resharded(grads)
        else:
            sums, sent = self.summed(self.widened(grads), first)
            reduced = self.narrowed(sums, grads)
        return reduced, reduction_state(sent)

    def by(self, op: Op | None) -> Reduction:
        """The same with another operation, if one is named: who made the gradients knows it."""
        if op in (None, self.op):
            return self
        return dataclasses.replace(self, op=op, gradient_predivide_factor=None)

    def widened(self, grads: Any) -> Any:
        """Gradients ready to be summed: in `reduce_dtype`, and divided for a mean."""
        size = count_devices(self.axes)
        _check_not_reduced(grads, self.axes)
        return jax.tree.map(lambda g: self._widened(g, self._factors(size)[0]), grads)

    def summed(self, grads: Any, first: jax.Array | None = None) -> tuple[Any, list[int]]:
        """The sums over all devices, bucket by bucket, and the bytes that went into each."""
        size = count_devices(self.axes)
        if size > 1 and not has_automatic_axes():
            return self._bucketed(grads, first)
        # With one device this only says that all agree. How axes that are not mapped shard a leaf
        # is not known here, and a flat buffer would undo it.
        sent = [leaf for leaf in jax.tree.leaves(grads) if size > 1 and not is_float0(leaf)]
        return jax.tree.map(self._summed_alone, grads), [leaf.nbytes for leaf in sent if leaf.size]

    def _summed_alone(self, leaf: Any) -> Any:
        return leaf if is_float0(leaf) else lax.psum(leaf, self.axes)

    def narrowed(self, sums: Any, like: Any) -> Any:
        """What `widened` did undone, once it is summed."""
        after = self._factors(count_devices(self.axes))[1]
        return jax.tree.map(lambda g, to: _narrowed(g, after, to), sums, like)

    def _factors(self, size: int) -> tuple[float, float]:
        """What to multiply gradients by before and after they are summed."""
        if self.op == "sum":
            return 1.0, 1.0
        predivide = self.gradient_predivide_factor or size
        return 1 / predivide, predivide / size

    def _widened(self, leaf: Any, factor: float) -> Any:
        if not is_floating(leaf):
            if not is_float0(leaf) and self.op == "mean":
                raise TypeError(
                    f"gradients of dtype {leaf.dtype} have no mean: reduce them with op='sum', or "
                    "leave them out with optax.masked"
                )
            return leaf
        wide = leaf.astype(wider_dtype(leaf.dtype, self.reduce_dtype))
        return wide if factor == 1 else wide * jnp.asarray(factor, wide.dtype)

    def _bucketed(self, tree: Any, first: jax.Array | None) -> tuple[Any, list[int]]:
        flat = _flat_places(tree)

        def group(path: str, leaf: Any) -> Hashable:
            own = None if self.group_of is None else self.group_of(path, leaf)
            return own, varying_axes(leaf), flat.get(path)

        layout = bucket_layout(
            tree,
            bucket_bytes=self.bucket_bytes,
            multiple_of=self._chunks(),
            group_of=group,
            order=self.order,
        )
        overlaps = self.tail_overlap
        if overlaps is None:
            overlaps = jax.default_backend() != "cpu"
        chained = overlaps and (len(layout.buckets) > 1 or first is not None)
        ready = set(flat.values())
        rooms = [b if b.leaves[0] in ready else self._with_room(b, chained) for b in layout.buckets]
        layout = dataclasses.replace(layout, buckets=tuple(rooms))
        reduced: list[jax.Array] = []
        sent: list[int] = []
        before = first
        for i, buffer in enumerate(layout.flatten(tree)):
            with jax.named_scope(f"ampx.bucket_{i}"):
                if not chained or before is None:
                    total = self._sum(buffer)
                else:
                    total = self._sum(_waiting_for(before, buffer))
                    if layout.buckets[i].leaves[0] in ready:
                        total = _without_last(total)
            before = total[:1]
            reduced.append(total)
            sent.append(buffer.size * (self._wire_dtype(buffer) or buffer.dtype).itemsize)
        empty = jax.tree.map(lambda leaf: leaf if leaf.size else self._summed_alone(leaf), tree)
        return layout.unflatten(reduced, empty), sent

    def _chunks(self) -> int:
        """How many equal parts a buffer is divided into on its way."""
        if self.wire_dtype is not None:
            return count_devices(self.axes)
        return count_devices(self.axes[1:]) if self.hierarchical else 1

    def _with_room(self, bucket: Bucket, chained: bool) -> Bucket:
        """A bucket with a spare element at its end, for what it has to wait for."""
        if not chained or bucket.size > sum(bucket.sizes):
            return bucket
        return dataclasses.replace(bucket, size=bucket.size + self._chunks())

    def _wire_dtype(self, buffer: jax.Array) -> Any:
        """What a buffer is cast to on its way, if it is."""
        return self.wire_dtype if is_floating(buffer) else None

    def _sum(self, buffer: jax.Array) -> jax.Array:
        if (wire_dtype := self._wire_dtype(buffer)) is not None:
            return _sum_of_narrow(buffer, self.axes, wire_dtype)
        if self.hierarchical:
            outer, inner = self.axes[:1], self.axes[1:]
            part = lax.psum_scatter(buffer, inner, tiled=True)
            return lax.all_gather(lax.psum(part, outer), inner, tiled=True, to="invarying")
        return lax.psum(buffer, self.axes)

    def _is_due(self, leaf: Any) -> bool:
        return bool(unreduced_axes(leaf) & set(self.axes))

    def _resharded(self, grads: Any) -> tuple[Any, list[int]]:
        """Under jit with Explicit axes JAX itself holds the sum that is due, and does it here."""
        axes = set(self.axes)
        size = 1
        sent: list[int] = []

        def reduce(leaf: Any) -> Any:
            nonlocal size
            sharding = jax.typeof(leaf).sharding
            size = math.prod(sharding.mesh.shape[axis] for axis in self.axes)
            spec = sharding.spec
            if size > 1 and leaf.size and self._is_due(leaf):
                sent.append(math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
            left = frozenset(unreduced_axes(leaf) - axes)
            return jax.reshard(leaf, jax.P(*spec.partitions, unreduced=left))

        reduced = jax.tree.map(reduce, grads)
        before, after = self._factors(size)
        narrowed = jax.tree.map(lambda g, like: _narrowed(g, before * after, like), reduced, grads)
        return narrowed, sent


def _flat_places(tree: Any) -> dict[str, int]:
    """Path and place of the buffers of flat parameters, each a bucket with room at its end."""
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    flags = [
        is_flat(node)
        for node in jax.tree.leaves(tree, is_leaf=is_flat)
        for _ in jax.tree.leaves(node)
    ]
    flagged = zip(paths, flags, strict=True)
    return {path: place for place, (path, flag) in enumerate(flagged) if flag}


def _check_not_reduced(grads: Any, axes: Sequence[str]) -> None:
    for axis in axes:
        if not tracks_varying(axis):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            if is_floating(leaf) and axis not in varying_axes(leaf):
                raise ValueError(
                    f"the gradient at {path_name(path) or 'the root'} is the same on all devices "
                    f"along {axis!r}: JAX has summed it already, and reducing it again would make "
                    "it n times too large. Take gradients with "
                    f"ampx.value_and_grad(..., axis_name={axis!r}), or of parameters that went "
                    f"through jax.lax.pcast(params, {axis!r}, to='varying')"
                )


def _narrowed(leaf: Any, factor: float, like: Any) -> Any:
    if not is_floating(like):
        return leaf
    leaf = leaf if factor == 1 else leaf * jnp.asarray(factor, leaf.dtype)
    return leaf.astype(like.dtype)


def _waiting_for(before: jax.Array, buffer: jax.Array) -> jax.Array:
    """The buffer, whose spare last element depends on `before` and lets no NaN of it through.

    A true dependence: nothing less keeps XLA from merging reductions that are independent.
    """
    token = jnp.sum(jnp.isnan(before) if is_floating(before) else before > 0)
    return buffer.at[-1].set(token.astype(buffer.dtype))


def _without_last(buffer: jax.Array) -> jax.Array:
    """Zero in the place of the last element; written in place, it would cost a copy."""
    last = buffer.size - 1
    return jnp.where(lax.iota(jnp.int32, buffer.size) < last, buffer, jnp.zeros_like(buffer))


def _sum_of_narrow(buffer: jax.Array, axes: tuple[str, ...], wire_dtype: Any) -> jax.Array:
    """A sum whose terms and result travel in `wire_dtype` and are added in the buffer's dtype."""
    parts = buffer.astype(wire_dtype).reshape(count_devices(axes), -1)
    received = lax.all_to_all(parts, axes, 0, 0)
    own = jnp.sum(received.astype(buffer.dtype), axis=0).astype(wire_dtype)
    return lax.all_gather(own, axes, tiled=True, to="invarying").astype(buffer.dtype)


def all_reduce(
    axis_name: str | Sequence[str],
    *,
    op: Op = "mean",
    reduce_dtype: DTypeLike = jnp.float32,
    wire_dtype: DTypeLike | None = None,
    bucket_bytes: int | None = None,
    tail_overlap: bool | None = None,
    gradient_predivide_factor: float | None = None,
    hierarchical: bool = False,
    group_of: Callable[[str, Any], Hashable] | None = None,
    order: Sequence[int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Reduces gradients over mapped axes, as one link of an optax chain.

    Inside `shard_map`, gradients are each device's own, and one all-reduce for each bucket sums
    them, once a step however many micro-batches there were. Inside a loss scale the verdict comes
    from the local gradients, and the buckets wait for it: name the axes there too, as in
    `dynamic_loss_scale(optax.chain(all_reduce("data"), optax.adamw(1e-3)), axis_names="data")`.

    Args:
      axis_name: the mapped axes that the batch is split over.
      op: `"mean"` for gradients of each device's mean loss; `"sum"` for those of
        `ampx.value_and_grad(axis_name=...)`, which are divided by the weight of all devices.
      reduce_dtype: half gradients are widened to this before they are summed. float64 stays.
      wire_dtype: with bfloat16, terms and sum travel in it and are added in `reduce_dtype`: half
        the bytes, and an error of at most 2**-7 of the sum of the terms' magnitudes.
      bucket_bytes: see `ampx.bucket_layout`.
      tail_overlap: make each bucket wait for the one before it, so that XLA keeps them apart and
        the first parameters can be updated before the last bucket has arrived. Off, XLA may merge
        them. None: on, except on CPUs, where nothing runs beside a reduction.
        `ampx.check_overlap` tells whether the rest of a step lets them.
      gradient_predivide_factor: a mean divides by this before the sum and by the rest after it.
        None: by all of the devices before, so that a sum of finite gradients is finite.
      hierarchical: with axes such as `("host", "device")`: scatter over the inner ones, sum over
        the first, gather over the inner ones, so that slow links carry 1/n.
      group_of: see `ampx.bucket_layout`.
      order: see `ampx.bucket_layout`.

    Returns:
      An optax transformation, the same for one device, many, and many processes.

    Raises:
      NameError: in `update`, outside of a `shard_map` that maps the axes. Under plain jit gradients
        are global and JAX reduces them, except along Explicit axes where they are unreduced: these
        are reduced here, one by one.
      ValueError: in `update`, for gradients that are reduced already; for an unknown `op`,
        `hierarchical` with one axis, or options that exclude each other.
      TypeError: in `update`, for the mean of integers.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704; Horovod's
      `gradient_predivide_factor`.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> tx = optax.chain(ampx.all_reduce("data"), optax.sgd(1.0))
      >>> def step(w, x):
      ...     grads = ampx.value_and_grad(lambda w, x: jnp.mean(w * x))(w, x).grads
      ...     updates, _ = tx.update(grads, tx.init(w), w)
      ...     return w + updates
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> step = jax.shard_map(
      ...     step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
      ... )
      >>> print(jax.jit(step)(jnp.array(3.0), jnp.ones(4)))
      2.0
    """
    reduction = checked_reduction(
        axis_name,
        op=op,
        reduce_dtype=reduce_dtype,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
        tail_overlap=tail_overlap,
        gradient_predivide_factor=gradient_predivide_factor,
        hierarchical=hierarchical,
        group_of=group_of,
        order=order,
    )

    def init(params: optax.Params) -> ReductionState:
        return reduction_state(())

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        overflow: jax.Array | None = None,
        reduce_op: Op | None = None,
        **extra_args: Any,
    ) -> tuple[Any, ReductionState]:
        return reduction.by(reduce_op).with_state(updates, overflow)

    return optax.GradientTransformationExtraArgs(init, update)


def checked_reduction(axis_name: str | Sequence[str], **options: Any) -> Reduction:
    """A `Reduction` with these settings.

    Raises:
      ValueError: for settings that have no meaning, alone or together.
    """
    axes = as_axes(axis_name)
    check_choice("op", options.get("op", "mean"), get_args(Op))
    for name in ("reduce_dtype", "wire_dtype"):
        if options.get(name) is not None:
            options[name] = np.dtype(options[name])
            if not jnp.issubdtype(options[name], jnp.floating):
                raise ValueError(f"{name} must be a floating dtype, got {options[name]}")
    if options.get("hierarchical") and len(axes) < 2:
        raise ValueError(
            f"hierarchical needs at least two axes, the slow one first, got {axes}: for example "
            "('host', 'device')"
        )
    if options.get("hierarchical") and options.get("wire_dtype") is not None:
        raise ValueError("hierarchical and wire_dtype exclude each other: leave out one of them")
    factor = options.get("gradient_predivide_factor")
    if factor is not None and not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, got {factor}")
    if factor is not None and options.get("op") == "sum":
        raise ValueError("gradient_predivide_factor is for op='mean': a sum divides by nothing")
    if options.get("order") is not None:
        options["order"] = tuple(options["order"])
    return Reduction(axes, **options)
