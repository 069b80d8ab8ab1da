"""Parameters as they are stored, and as the stages of a schedule see them.

They are stored as a model has them: with a leading axis of layers, or one tree for each stage. What
a schedule needs is a view, made anew in every step, so that a checkpoint knows nothing of stages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.pipelining.layer_exchange import Place, exchange_rounds, exchanged
from ampx.pipelining.schedules import Schedule
from ampx.trees import path_name


class Layout(Protocol):
    """How the parameters of the stages are stored and seen."""

    @property
    def is_divided(self) -> bool:
        """Whether what is stored can be divided over the devices as it is."""
        ...

    def local(self, stored: Any, axis_name: str) -> Any:
        """What the stages of a device read, with a leading axis of chunks."""
        ...

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """The parameters of one stage, which is one of those that compute as `stage` does."""
        ...

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """`total`, in the shape of the view, with the gradients of one stage added."""
        ...

    def returned(self, total: Any, axis_name: str) -> Any:
        """What `local` did undone, for gradients."""
        ...


def chunk_numbers(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, which of its device's chunks it is."""
    return tuple(
        schedule.stages_on(device).index(stage) for stage, device in enumerate(schedule.device_of)
    )


def _slots(schedule: Schedule) -> list[int | None]:
    """The stages of all devices in turn, with None where a device has fewer than others."""
    stages = [schedule.stages_on(device) for device in range(schedule.num_devices)]
    chunks = max(map(len, stages))
    return [stage for own in stages for stage in (*own, *[None] * (chunks - len(own)))]


def _of_all_devices(leaf: jax.Array, axis_name: str) -> jax.Array:
    """The chunks of all devices in turn, the same everywhere."""
    return lax.all_gather(leaf, axis_name, tiled=True, to="invarying")


def stacked_layout(
    schedule: Schedule, stages: Any, layers_per_stage: tuple[int, ...] | None
) -> StackedLayers:
    """The layout of layers that are stacked.

    Raises:
      ValueError: if leaves have different numbers of layers, or the stages cannot share them so.
    """
    if isinstance(stages, list | tuple):
        raise TypeError(
            "stage is one function, and params['stages'] a list: stack the layers, as in "
            "jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)"
        )
    shapes = {
        path_name(path): np.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(stages)
    }
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        raise ValueError(
            "all leaves of params['stages'] need the same leading axis of layers, got "
            + ", ".join(f"{name or 'the root'} {shape}" for name, shape in shapes.items())
        )
    number, count = next(iter(shapes.values()))[0], schedule.num_stages
    if number < count:
        raise ValueError(
            f"{number} layers cannot fill the {count} stages of {schedule.name!r} on "
            f"{schedule.num_devices} devices: use fewer devices or chunks"
        )
    if layers_per_stage is None:
        if number % count:
            raise ValueError(
                f"{number} layers have no {count} equal parts: use a multiple of {count}, or give "
                f"layers_per_stage, such as balance([1] * {number}, {count})"
            )
        layers_per_stage = (number // count,) * count
    if len(layers_per_stage) != count or sum(layers_per_stage) != number:
        raise ValueError(
            f"layers_per_stage must be {count} numbers that add up to {number}, got "
            f"{layers_per_stage}"
        )
    if min(layers_per_stage) < 1:
        raise ValueError(f"every stage needs a layer, got layers_per_stage={layers_per_stage}")
    unrolled = schedule.splits_backward or max(layers_per_stage) == 1
    return StackedLayers(schedule, layers_per_stage, unrolled)


def separate_layout(schedule: Schedule, stages: Any) -> SeparateStages:
    """The layout of stages that differ.

    Raises:
      TypeError: if there is not one tree for each stage.
    """
    if not isinstance(stages, list | tuple) or len(stages) != schedule.num_stages:
        raise TypeError(
            "stage is a sequence, so params['stages'] must be a list of trees, one for each of "
            f"{schedule.num_stages} stages, got {type(stages).__name__}"
        )
    types = [
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree) for tree in stages
    ]
    return SeparateStages(schedule, tuple(types))


@dataclasses.dataclass(frozen=True)
class StackedLayers:
    """Parameters of layers of one kind, with a leading axis of layers.

    Attributes:
      schedule: gives stages and devices.
      counts: how many layers each stage has.
      unrolled: whether a stage gets a list of layers instead of stacked ones.
    """

    schedule: Schedule
    counts: tuple[int, ...]
    unrolled: bool

    @property
    def is_divided(self) -> bool:
        """See `Layout`."""
        return sum(self.counts) % self.schedule.num_devices == 0

    @property
    def first_layer(self) -> np.ndarray:
        """The number of each stage's first layer."""
        return np.cumsum([0, *self.counts[:-1]]).astype(np.int32)

    def local(self, stored: Any, axis_name: str) -> Any:
        """Layers with a leading axis of chunks, from wherever they are stored."""
        chunks = len(_slots(self.schedule)) // self.schedule.num_devices
        shape = chunks, max(self.counts)
        if self.is_divided:
            size, sources, targets = self._blocks()
            blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), stored)
            if sources != targets or len(set(self.counts)) > 1:
                rounds = exchange_rounds(sources, targets, self.schedule.num_devices)
                blocks = exchanged(blocks, rounds, math.prod(shape) // size, axis_name)
            return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[2:]), blocks)
        order = np.zeros(len(_slots(self.schedule)) * max(self.counts), np.int32)
        order[self._places()] = np.arange(sum(self.counts))
        own = jnp.asarray(order.reshape(-1, *shape))[lax.axis_index(axis_name)]
        return jax.tree.map(lambda leaf: leaf[own], stored)

    def returned(self, total: Any, axis_name: str) -> Any:
        """Sent back to where they are stored."""
        if self.is_divided:
            size, sources, targets = self._blocks()
            blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[2:]), total)
            if sources != targets or len(set(self.counts)) > 1:
                rounds = exchange_rounds(sources, targets, self.schedule.num_devices)
                back = [each.reversed() for each in rounds]
                stored = sum(self.counts) // self.schedule.num_devices // size
                blocks = exchanged(blocks, back, stored, axis_name)
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), blocks)

        def gather(leaf: jax.Array) -> jax.Array:
            rows = _of_all_devices(leaf, axis_name)
            return rows.reshape(-1, *rows.shape[2:])[self._places()]

        return jax.tree.map(gather, total)

    def _blocks(self) -> tuple[int, list[Place], list[Place]]:
        """Layers that stay together: how many, where they are stored, and where they are run."""
        stored = sum(self.counts) // self.schedule.num_devices
        size = math.gcd(stored, *self.counts)
        places = [
            divmod(layer // size, stored // size) for layer in range(0, sum(self.counts), size)
        ]
        chunks = chunk_numbers(self.schedule)
        targets = [
            (self.schedule.device_of[stage], chunks[stage] * max(self.counts) // size + block)
            for stage, count in enumerate(self.counts)
            for block in range(count // size)
        ]
        return size, places, targets

    def _places(self) -> np.ndarray:
        """Where each layer lies when all stages are padded to the longest."""
        slots = _slots(self.schedule)
        return np.concatenate(
            [
                slots.index(stage) * max(self.counts) + np.arange(count)
                for stage, count in enumerate(self.counts)
            ]
        )

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """The layers of a stage, stacked or as a list."""
        count = self.counts[stage]

        def own(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(leaf, chunk, keepdims=False)[:count]

        layers = jax.tree.map(own, view)
        if not self.unrolled:
            return layers
        return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count)]

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """Adds to the layers of one chunk."""
        if self.unrolled:
            gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)

        def add(sums: jax.Array, gradient: jax.Array) -> jax.Array:
            start = (chunk, *[jnp.zeros_like(chunk)] * gradient.ndim)
            old = lax.dynamic_slice(sums, start, (1, *gradient.shape))
            return lax.dynamic_update_slice(sums, old + gradient.astype(sums.dtype), start)

        return jax.tree.map(add, total, gradients)


@dataclasses.dataclass(frozen=True)
class SeparateStages:
    """Parameters of stages that differ, one tree for each.

    Every stage's are packed into flat arrays, one for each dtype, as long as the longest.

    Attributes:
      schedule: gives stages and devices.
      types: for each stage its parameters, as types.
    """

    schedule: Schedule
    types: tuple[Any, ...]

    @property
    def is_divided(self) -> bool:
        """See `Layout`."""
        return False

    def local(self, stored: Any, axis_name: str) -> Any:
        """Flat arrays with a row for each stage of the device."""
        rows = self._rows()

        def pack(device: int) -> dict[str, jax.Array]:
            flat = [self._flat(stage, jax.tree.leaves(stored[stage])) for stage in rows[device]]
            return {dtype: jnp.stack([row[dtype] for row in flat]) for dtype in self._dtypes}

        packs = [functools.partial(pack, device) for device in range(len(rows))]
        return lax.switch(lax.axis_index(axis_name), packs)

    def returned(self, total: Any, axis_name: str) -> Any:
        """One tree for each stage, on all devices."""
        everywhere = {d: _of_all_devices(sums, axis_name) for d, sums in total.items()}
        slots = _slots(self.schedule)
        return [
            self._unflat(stage, {d: rows[slots.index(stage)] for d, rows in everywhere.items()})
            for stage in range(self.schedule.num_stages)
        ]

    def _rows(self) -> list[list[int]]:
        """The stages of each device; one that has fewer repeats the first."""
        slots = [stage or 0 for stage in _slots(self.schedule)]
        chunks = len(slots) // self.schedule.num_devices
        return [slots[start : start + chunks] for start in range(0, len(slots), chunks)]

    @property
    def _dtypes(self) -> list[str]:
        return sorted({str(leaf.dtype) for leaf in jax.tree.leaves(self.types)})

    def _sizes(self, stage: int, dtype: str) -> list[int]:
        leaves = jax.tree.leaves(self.types[stage])
        return [int(np.prod(leaf.shape, dtype=int)) for leaf in leaves if str(leaf.dtype) == dtype]

    def _flat(self, stage: int, leaves: Sequence[Any]) -> dict[str, jax.Array]:
        """One array for each dtype of the parameters; gradients may have another dtype."""
        types = jax.tree.leaves(self.types[stage])
        flat = {}
        for dtype in self._dtypes:
            longest = max(sum(self._sizes(s, dtype)) for s in range(len(self.types)))
            parts = [
                jnp.ravel(leaf)
                for leaf, like in zip(leaves, types, strict=True)
                if str(like.dtype) == dtype
            ]
            kind = parts[0].dtype if parts else dtype
            padding = jnp.zeros(longest - sum(part.size for part in parts), kind)
            flat[dtype] = jnp.concatenate([*parts, padding])
        return flat

    def _unflat(self, stage: int, flat: dict[str, jax.Array]) -> Any:
        leaves, offsets = [], dict.fromkeys(flat, 0)
        for like in jax.tree.leaves(self.types[stage]):
            dtype, size = str(like.dtype), int(np.prod(like.shape, dtype=int))
            start = offsets[dtype]
            offsets[dtype] += size
            leaves.append(flat[dtype][start : start + size].reshape(like.shape))
        return jax.tree.unflatten(jax.tree.structure(self.types[stage]), leaves)

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """The tree of a stage, from its row."""
        row: dict[str, jax.Array] = {
            k: lax.dynamic_index_in_dim(v, chunk, keepdims=False) for k, v in view.items()
        }
        return self._unflat(stage, row)

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """Adds to a row."""
        flat = self._flat(stage, jax.tree.leaves(gradients))
        return {
            dtype: sums.at[chunk].add(flat[dtype].astype(sums.dtype))
            for dtype, sums in total.items()
        }
