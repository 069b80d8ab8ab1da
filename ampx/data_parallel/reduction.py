"""Gradients summed over devices: bucket by bucket, each waiting for the one before it.

Until here the gradients of a device are its own, scaled by the loss scale and not yet reduced. The
verdict (is everything finite?) has been taken from them; clipping and the optimizer follow.

    computes  |  backward pass          |  | update 0 | update 1 |   | update 2 |
    network                             |v | bucket 0 | bucket 1 | bucket 2 |
                                         └────►└──────────►└──────────►
    v         the verdict: three int32, agreed over all devices
    bucket i  one flat buffer with the gradients of some leaves, those of the last layers in
              bucket 0, since a backward pass completes them first
    update i  the optimizer's work on the leaves of bucket i: needs v and bucket i alone
    └──►      the chain: a true data dependence of each reduction on the one before it

The verdict comes first so that no update has to wait for all buckets: whether a step is skipped is
known before the first gradient travels. That is sound since sums are in float32 and a mean divides
before it sums, so that gradients which are finite on every device have a finite mean.

The chain keeps the reductions apart and in order. Without it XLA merges all-reduces that do not
depend on each other, and the first update then waits for the last gradient. With it the updates of
all buckets but the last hide behind reductions; `ampx.check_overlap` tells whether they do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.checking import as_bool, as_dtype, as_number, as_positive_int, check_choice
from ampx.data_parallel.reduction_states import STATE_OF_OVERLAP, ReductionState
from ampx.flat_buffers.buckets import as_order, bucket_layout
from ampx.flat_buffers.flat_params import is_flat
from ampx.function_checks import check_callable
from ampx.mesh_axes import (
    add_over_devices,
    as_axes,
    count_devices,
    has_automatic_axes,
    tracks_varying,
    unreduced_axes,
    varying_axes,
)
from ampx.trees import at_path, is_float0, is_floating, path_name, wider_dtype
from ampx.updates.devices import reduces_beside_updates

Op = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients are reduced; see `ampx.all_reduce`, whose arguments these are.

    A floating leaf goes through

        widen               g ─► reduce_dtype, times 1/n for a mean
        sum_over_devices    flat buffers, one sum each, in `wire_dtype` on the way if there is one
        narrow              the sum ─► the dtype of g

    `ampx.zero1` calls the three by themselves, with a reduce-scatter in the place of most sums.
    """

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
        """The gradients of `reduce`, without its state."""
        return self.reduce(grads, first)[0]

    def reduce(
        self,
        grads: Any,
        first: jax.Array | None = None,
        own_axes: Sequence[Sequence[str]] | None = None,
    ) -> tuple[Any, ReductionState]:
        """Reduces gradients; the state tells how much was sent for it.

        Args:
          grads: local gradients, different on each device.
          first: a small array of bools or integers, such as the verdict, that is to be known before
            any gradient is sent.
          own_axes: for each leaf the axes over which its parameter is divided, as experts may be.
            Along these no gradient is summed: elements of two shards are different parameters.
        """
        if any(self._is_unreduced(leaf) for leaf in jax.tree.leaves(grads)):
            reduced, sent = self._reshard(grads)
        else:
            sums, sent = self.sum_over_devices(self.widen(grads), first, own_axes)
            reduced = self.narrow(sums, grads)
        return reduced, self.state(sent)

    @property
    def overlaps(self) -> bool:
        """Whether each bucket waits for the one before, and the first updates do not wait."""
        if self.tail_overlap is None:
            return reduces_beside_updates()
        return self.tail_overlap

    def state(self, sent: Sequence[int] = ()) -> ReductionState:
        """Makes the state after an update; `sent` has the bytes of each of its reductions."""
        kind = STATE_OF_OVERLAP[self.tail_overlap]
        return kind(jnp.asarray(len(sent), jnp.int32), jnp.asarray(float(sum(sent)), jnp.float32))

    def with_op(self, op: Op | None, shared_loss_axes: Sequence[str] = ()) -> Reduction:
        """Makes a reduction by `op`, or a sum where all its axes share the loss; else this one."""
        # Who makes gradients knows whether they are divided: `train_step`, or a whole `GradResult`.
        if op is None and set(self.axes) <= set(shared_loss_axes):
            op = "sum"
        if op in (None, self.op):
            return self
        # The factor was meant for the mean that was asked for; a sum divides by nothing.
        return dataclasses.replace(self, op=op, gradient_predivide_factor=None)

    def widen(self, grads: Any) -> Any:
        """Makes gradients ready to be summed: in `reduce_dtype`, and divided for a mean."""
        before, _ = self._mean_factors(count_devices(self.axes))
        _check_not_reduced(grads, self.axes)
        return jax.tree.map(lambda leaf: self._widen_leaf(leaf, before), grads)

    def sum_over_devices(
        self,
        grads: Any,
        first: jax.Array | None = None,
        own_axes: Sequence[Sequence[str]] | None = None,
    ) -> tuple[Any, list[int]]:
        """Sums over all devices, bucket by bucket, and counts the bytes that went into each."""
        size = count_devices(self.axes)
        leaves, structure = jax.tree.flatten(grads)
        own = own_axes or [()] * len(leaves)
        axes = [tuple(axis for axis in self.axes if axis not in divided) for divided in own]
        if size > 1 and not has_automatic_axes():
            return self._sum_by_bucket(grads, first, axes)
        # With one device this only says that all agree. How axes that are not mapped shard a leaf
        # is not known here, and a flat buffer would undo it.
        sums = structure.unflatten(map(_sum_leaf, leaves, axes))
        pairs = zip(leaves, axes, strict=True)
        sent = [leaf for leaf, own in pairs if size > 1 and own and not is_float0(leaf)]
        return sums, [leaf.nbytes for leaf in sent if leaf.size]

    def narrow(self, sums: Any, like: Any) -> Any:
        """Casts sums back to the dtypes of `like`, and does what is left of a mean's division."""
        _, after = self._mean_factors(count_devices(self.axes))
        return jax.tree.map(lambda leaf, to: _narrow_leaf(leaf, after, to), sums, like)

    def _mean_factors(self, size: int) -> tuple[float, float]:
        """What to multiply gradients by before and after they are summed.

        Their product is 1/n for a mean of n devices. By default all of it comes before: then
        |Σ g/n| <= max |g|, so that no sum of finite gradients overflows, neither in `reduce_dtype`
        nor in a narrow `wire_dtype`. (In float16, whose largest number is 65504, gradients of 1e4
        on 8 devices have a mean of 1e4 and a sum of infinity.) The price is that small gradients
        come nearer to underflow on a narrow wire; a `gradient_predivide_factor` between 1 and n
        balances the two.
        """
        if self.op == "sum":
            return 1.0, 1.0
        predivide = self.gradient_predivide_factor or size
        return 1 / predivide, predivide / size

    def _widen_leaf(self, leaf: Any, factor: float) -> Any:
        if not is_floating(leaf):
            if not is_float0(leaf) and self.op == "mean":
                raise TypeError(
                    f"gradients of dtype {leaf.dtype} have no mean: reduce them with op='sum', or "
                    "leave them out with optax.masked"
                )
            return leaf
        wide = leaf.astype(wider_dtype(leaf.dtype, self.reduce_dtype))
        with jax.named_scope("ampx.mean"):  # for the linter
            return wide if factor == 1 else wide * jnp.asarray(factor, wide.dtype)

    def _sum_by_bucket(
        self, tree: Any, first: jax.Array | None, axes: Sequence[tuple[str, ...]]
    ) -> tuple[Any, list[int]]:
        places_of_flat = _find_flat_buffers(tree)
        paths = (path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        axes_at = dict(zip(paths, axes, strict=True))

        # One buffer must not hold leaves that vary over different axes: a concatenation varies over
        # all of them, and a leaf that is the same along, say, "model" would lose that type. A flat
        # buffer is a bucket by itself, as it is; joined with others it would be copied.
        def group(path: str, leaf: Any) -> Hashable:
            own = None if self.group_of is None else self.group_of(path, leaf)
            return own, varying_axes(leaf), axes_at[path], places_of_flat.get(path)

        layout = bucket_layout(
            tree,
            bucket_bytes=self.bucket_bytes,
            multiple_of=self._count_parts(),
            group_of=group,
            order=self.order,
        )
        chains = self.overlaps and (len(layout.buckets) > 1 or first is not None)
        flat = set(places_of_flat.values())
        if chains:
            spare = self._count_parts()
            buckets = (b if b.leaves[0] in flat else b.with_spare(spare) for b in layout.buckets)
            layout = dataclasses.replace(layout, buckets=tuple(buckets))
        reduced: list[jax.Array] = []
        sent: list[int] = []
        # Invariant of the loop: each of these depends on the verdict and on all earlier ones that
        # vary over no other axes, so what depends on it cannot be merged with them. (To wait for
        # one that varies over "model" would make a bucket vary, too, that is the same along it.)
        befores = [] if first is None else [first]
        for i, buffer in enumerate(layout.flatten(tree)):
            own = axes[layout.buckets[i].leaves[0]]
            if not own:  # nothing to sum, and so nothing to wait for
                reduced.append(buffer)
                continue
            before = [b for b in befores if varying_axes(b) <= varying_axes(buffer)][-1:]
            with jax.named_scope(f"ampx.bucket_{i}"):
                if not chains or not before:
                    total = self._sum(buffer, own)
                else:
                    total = self._sum(_make_wait(buffer, *before), own)
                    if layout.buckets[i].leaves[0] in flat:
                        total = _clear_last(total)
            befores.append(total[:1])  # a reduction yields all of its result at once
            reduced.append(total)
            sent.append(buffer.size * (self._wire_dtype(buffer) or buffer.dtype).itemsize)
        # Leaves without elements are in no bucket; this marks them as the same on all devices.
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, axes, strict=True)
        empty = structure.unflatten([x if x.size else _sum_leaf(x, own) for x, own in pairs])
        return layout.unflatten(reduced, empty), sent  # spare elements are left behind here

    def _count_parts(self) -> int:
        """How many equal parts a buffer is divided into on its way."""
        if self.wire_dtype is not None:
            return count_devices(self.axes)
        return count_devices(self.axes[1:]) if self.hierarchical else 1

    def _wire_dtype(self, buffer: jax.Array) -> Any:
        """What a buffer is cast to on its way, if it is."""
        return self.wire_dtype if is_floating(buffer) else None

    def _sum(self, buffer: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if (wire_dtype := self._wire_dtype(buffer)) is not None:
            return _sum_in_wire_dtype(buffer, axes, wire_dtype)
        if self.hierarchical and axes[1:]:
            # With k devices along the inner axes each of them sums 1/k of the buffer inside its
            # group, so that a slow link between groups carries 1/k of the bytes.
            outer, inner = axes[:1], axes[1:]
            part = lax.psum_scatter(buffer, inner, tiled=True)
            return lax.all_gather(lax.psum(part, outer), inner, tiled=True, to="invarying")
        return lax.psum(buffer, axes)

    def _is_unreduced(self, leaf: Any) -> bool:
        return bool(unreduced_axes(leaf) & set(self.axes))

    def _reshard(self, grads: Any) -> tuple[Any, list[int]]:
        """Reduces where, under jit with Explicit axes, JAX itself holds a sum that is still due.

        The type of such a gradient says `unreduced={"data"}`; a reshard to a type without it is the
        all-reduce. JAX sums in the dtype that the gradient has, so there is nothing to widen, and
        the whole mean is divided afterwards.
        """
        axes = set(self.axes)
        size = 1
        sent: list[int] = []

        def reduce(leaf: Any) -> Any:
            nonlocal size
            sharding = jax.typeof(leaf).sharding
            size = math.prod(sharding.mesh.shape[axis] for axis in self.axes)
            spec = sharding.spec
            if size > 1 and leaf.size and self._is_unreduced(leaf):
                sent.append(math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
            left = frozenset(unreduced_axes(leaf) - axes)
            return jax.reshard(leaf, jax.P(*spec.partitions, unreduced=left))

        reduced = jax.tree.map(reduce, grads)
        factor = math.prod(self._mean_factors(size))
        return jax.tree.map(lambda g, like: _narrow_leaf(g, factor, like), reduced, grads), sent


def make_reduction(axis_name: str | Sequence[str], **options: Any) -> Reduction:
    """Checks settings and makes a `Reduction` of them.

    Raises:
      TypeError: for settings of the wrong kind.
      ValueError: for settings that have no meaning, alone or together.
    """
    axes = as_axes(axis_name)
    check_choice("op", options.get("op", "mean"), get_args(Op))
    if "reduce_dtype" in options:
        options["reduce_dtype"] = as_dtype("reduce_dtype", options["reduce_dtype"], "sum")
    if options.get("wire_dtype") is not None:
        options["wire_dtype"] = as_dtype("wire_dtype", options["wire_dtype"], "floating")
    if options.get("bucket_bytes") is not None:
        options["bucket_bytes"] = as_positive_int("bucket_bytes", options["bucket_bytes"])
    for name in ("hierarchical", "tail_overlap"):
        if options.get(name) is not None:
            options[name] = as_bool(name, options[name])
    if options.get("group_of") is not None:
        check_callable("group_of", options["group_of"], "group_of(path, leaf)")
    if options.get("hierarchical") and len(axes) < 2:
        raise ValueError(
            f"hierarchical needs at least two axes, the slow one first, got {axes}: for example "
            "('host', 'device')"
        )
    if options.get("hierarchical") and options.get("wire_dtype") is not None:
        raise ValueError("hierarchical and wire_dtype exclude each other: leave out one of them")
    factor = options.get("gradient_predivide_factor")
    if factor is not None:
        factor = as_number("gradient_predivide_factor", factor, above=0)
        options["gradient_predivide_factor"] = factor
    if factor is not None and options.get("op") == "sum":
        raise ValueError("gradient_predivide_factor is for op='mean': a sum divides by nothing")
    if options.get("order") is not None:
        options["order"] = as_order(options["order"])
    return Reduction(axes, **options)


def _find_flat_buffers(tree: Any) -> dict[str, int]:
    """Finds the buffers of flat parameters: from the path of each to its place among the leaves.

    Such a buffer, of `ampx.fused.flatten`, is a bucket already, with a spare element at its end.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    flags = [
        is_flat(node)
        for node in jax.tree.leaves(tree, is_leaf=is_flat)
        for _ in jax.tree.leaves(node)
    ]
    flagged = zip(paths, flags, strict=True)
    return {path: place for place, (path, flag) in enumerate(flagged) if flag}


def _check_not_reduced(grads: Any, axes: Sequence[str]) -> None:
    """Refuses gradients that JAX has summed already, where types tell: under `check_vma=True`."""
    for axis in axes:
        if not tracks_varying(axis):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            if is_floating(leaf) and axis not in varying_axes(leaf):
                raise ValueError(
                    f"the gradient{at_path(path)} is the same on all devices "
                    f"along {axis!r}: JAX has summed it already, and reducing it again would make "
                    "it n times too large. Take gradients with op='sum' and ampx.value_and_grad("
                    f"..., axis_name={axis!r}), or with op='mean' of parameters that went through "
                    f"jax.lax.pcast(params, {axis!r}, to='varying')"
                )


def _sum_leaf(leaf: Any, axes: tuple[str, ...]) -> Any:
    return add_over_devices(leaf, axes) if axes and not is_float0(leaf) else leaf


def _narrow_leaf(leaf: Any, factor: float, like: Any) -> Any:
    if not is_floating(like):
        return leaf
    leaf = leaf if factor == 1 else leaf * jnp.asarray(factor, leaf.dtype)
    return leaf.astype(like.dtype)


def _make_wait(buffer: jax.Array, before: jax.Array) -> jax.Array:
    """Writes 0 or 1, computed from `before`, into the spare last element of a buffer.

    The sum of this buffer can then not start before `before` is known. Simpler ways fail:

    - `lax.optimization_barrier((buffer, before))` computes nothing, and XLA's CPU backend drops it
      before it merges all-reduces: four of them with barriers between compile to one.
    - Adding `0 * before` is either simplified away, or lets an infinity or NaN of one bucket into
      the next as 0 * inf = NaN. A comparison yields 0 or 1 whatever the value is, and the compiler
      cannot know which.

    Nobody reads the element: it lies behind the last leaf.
    """
    # For a reduced bucket: is its first element NaN? For a verdict: was anything found?
    found = jnp.sum(jnp.isnan(before) if is_floating(before) else before > 0)
    return buffer.at[-1].set(found.astype(buffer.dtype))


def _clear_last(buffer: jax.Array) -> jax.Array:
    """Puts a zero in the place of the last element, since the padding of flat parameters is zero.

    A select fuses with what reads the buffer; `at[-1].set(0)` would first copy it.
    """
    last = buffer.size - 1
    return jnp.where(lax.iota(jnp.int32, buffer.size) < last, buffer, jnp.zeros_like(buffer))


def _sum_in_wire_dtype(buffer: jax.Array, axes: tuple[str, ...], wire_dtype: Any) -> jax.Array:
    """Sums what travels in `wire_dtype` but is added in the dtype of the buffer.

    A plain all-reduce in bfloat16 would round after each of its n - 1 additions. Here it is a
    reduce-scatter by hand: each device gets its part of the buffer from all, adds in float32 and
    rounds once. In bfloat16 a rounding is off by at most 2**-8, first of each term, then of the
    sum: together 2**-7 of the sum of the magnitudes, for any n.
    """
    parts = buffer.astype(wire_dtype).reshape(count_devices(axes), -1)  # bf16[n, size / n]
    received = lax.all_to_all(parts, axes, 0, 0)  # row i: device i's term of this device's part
    own = jnp.sum(received.astype(buffer.dtype), axis=0).astype(wire_dtype)  # bf16[size / n]
    return lax.all_gather(own, axes, tiled=True, to="invarying").astype(buffer.dtype)
