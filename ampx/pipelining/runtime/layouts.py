"""Parameters as they are stored, and as the stages of a schedule see them.

They are stored as a model has them: with a leading axis of layers, or one tree for each stage. What
a schedule needs is a view, made anew in every step, so that a checkpoint knows nothing of stages.
Shapes of one leaf, on one of D devices:

                   stored                        view                          gradients
  StackedLayers    (layers / D, ...), divided    (chunks, longest, ...)        as the view
                   (layers, ...), if D does not divide the layers
  SeparateStages   a tree for each stage         [(chunks, longest), ...],     as the view
                                                 an array for each dtype,
                                                 floating ones and others

`longest` is the number of layers of the longest stage, or of the numbers in its parameters; shorter
stages are padded, and one without layers is all padding. Separate stages whose trees are alike keep
their arrays. `as_view` makes the view, `as_stored` brings gradients from there to where the
parameters are stored. In between, `select` and `add` look at one stage.

Leaves that are not floating are there to be read: counters, flags, random keys as their numbers.
They have no gradients, so trees of gradients have None in their places.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.mesh_axes import mark_varying
from ampx.overwritten import add_gradients
from ampx.pipelining.layer_stacks import count_layers
from ampx.pipelining.runtime.buffers import ArrayType, Carrier, make_carrier, read_at, read_slot
from ampx.pipelining.runtime.layer_exchange import BlockPlace, Round, exchange_blocks, plan_exchange
from ampx.pipelining.schedules.grid import number_chunks
from ampx.pipelining.schedules.schedule import Schedule
from ampx.trees import cast_like, is_floating


class Layout(Protocol):
    """How the parameters of the stages are stored and seen."""

    @property
    def is_divided(self) -> bool:
        """Whether what is stored can be divided over the devices as it is."""
        ...

    def as_view(self, stored: Any, axis_name: str) -> Any:
        """Makes what the stages of a device read, with a leading axis of chunks."""
        ...

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """Takes the parameters of one stage, one of those that compute as `stage` does."""
        ...

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """Adds the gradients of one stage to `total`, which has the shape of the view."""
        ...

    def as_stored(self, total: Any, axis_name: str) -> Any:
        """Undoes `as_view`, for gradients."""
        ...


def _count_chunks(schedule: Schedule) -> int:
    """Counts the stages of the device that has most."""
    return max(number_chunks(schedule)) + 1


def _gather_from_devices(leaf: jax.Array, axis_name: str) -> jax.Array:
    """Gathers the chunks of all devices, one device after the other, on every device."""
    # To a value that `shard_map` knows to be the same on all devices, as its result must be.
    return lax.all_gather(leaf, axis_name, tiled=True, to="invarying")


def make_stacked_layout(
    schedule: Schedule, stages: Any, layers_per_stage: tuple[int, ...] | None
) -> StackedLayers:
    """Makes the layout of layers that are stacked.

    Raises:
      ValueError: if leaves have different numbers of layers, or the stages cannot share them so.
    """
    if isinstance(stages, list | tuple):
        raise TypeError(
            "stage is one function, and params['stages'] a list: stack the layers by "
            "ampx.pipelining.stack_layers"
        )
    number, count = count_layers("params['stages']", stages), schedule.num_stages
    if number < 1:
        raise ValueError("the leaves of params['stages'] have 0 layers: a model needs at least one")
    if layers_per_stage is None:
        if number < count:
            raise ValueError(
                f"{number} layers cannot fill the {count} stages of {schedule.name!r} on "
                f"{schedule.num_devices} devices: use fewer devices or chunks, or leave stages "
                f"empty, as in layers_per_stage={(1,) * number + (0,) * (count - number)}"
            )
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
    if min(layers_per_stage) < 0:
        raise ValueError(
            f"layers_per_stage must not be negative, got {layers_per_stage}: 0 is a stage that "
            "hands on what it is given"
        )
    # A backward in halves needs its layers one by one: a scan over them cannot be divided. One or
    # two are written out, too: the code that slices and stacks for a scan takes longer to compile.
    unrolled = schedule.splits_backward or max(layers_per_stage) <= 2
    return StackedLayers(schedule, layers_per_stage, unrolled)


def make_separate_layout(schedule: Schedule, stages: Any) -> SeparateStages:
    """Makes the layout of stages that differ.

    Raises:
      TypeError: if there is not one tree for each stage.
    """
    if not isinstance(stages, list | tuple) or len(stages) != schedule.num_stages:
        raise TypeError(
            "stage is a sequence, so params['stages'] must be a list of trees, one for each of "
            f"{schedule.num_stages} stages, got {type(stages).__name__}"
        )
    leaves = list(map(jax.tree.leaves, stages))
    trained = tuple(tuple(map(is_floating, own)) for own in leaves)

    def make_carrier_of(kind: bool) -> Carrier:
        types = [
            [
                ArrayType(np.shape(leaf), np.dtype(leaf.dtype), frozenset())
                for leaf, is_trained in zip(own, mask, strict=True)
                if is_trained == kind
            ]
            for own, mask in zip(leaves, trained, strict=True)
        ]
        return make_carrier(dict(enumerate(types)))

    structures = tuple(map(jax.tree.structure, stages))
    return SeparateStages(
        schedule, structures, trained, make_carrier_of(True), make_carrier_of(False)
    )


@dataclasses.dataclass(frozen=True)
class StackedLayers:
    """Parameters of layers of one kind, with a leading axis of layers.

    Attributes:
      schedule: gives stages and devices.
      counts: how many layers each stage has.
      unrolled: whether a stage gets a list of layers instead of stacked ones. A stage without
        layers gets an empty list.
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

    def as_view(self, stored: Any, axis_name: str) -> Any:
        """Brings layers from where they are stored to their stages, as (chunks, longest, ...)."""
        shape = _count_chunks(self.schedule), max(self.counts)
        if self.is_divided:
            # (layers / D, ...) -> (blocks, size, ...) -> (chunks, longest, ...)
            size, rounds = self._plan_exchange()
            blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), stored)
            if rounds:
                blocks = exchange_blocks(blocks, rounds, math.prod(shape) // size, axis_name)
            return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[2:]), blocks)
        # Every device holds all layers. It takes its own by their numbers; padding takes layer 0,
        # whose copy no stage reads.
        order = np.zeros((self.schedule.num_devices, math.prod(shape)), np.int32)
        order[*zip(*self._find_places(), strict=True)] = np.arange(sum(self.counts))
        own = jnp.asarray(order.reshape(-1, *shape))[lax.axis_index(axis_name)]
        return jax.tree.map(lambda leaf: leaf[own], stored)

    def as_stored(self, total: Any, axis_name: str) -> Any:
        """Sends gradients of layers to where the layers are stored."""
        if self.is_divided:
            size, rounds = self._plan_exchange()
            blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[2:]), total)
            if rounds:
                stored = sum(self.counts) // self.schedule.num_devices // size
                blocks = exchange_blocks(blocks, [r.reversed() for r in rounds], stored, axis_name)
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), blocks)

        # Each device has gradients for its layers alone, and all devices store all layers.
        def gather(leaf: jax.Array) -> jax.Array:
            rows = _gather_from_devices(leaf, axis_name)
            rows = rows.reshape(self.schedule.num_devices, -1, *rows.shape[2:])
            return rows[*map(np.array, zip(*self._find_places(), strict=True))]

        return jax.tree.map(gather, total)

    def _plan_exchange(self) -> tuple[int, list[Round]]:
        """Finds how many layers stay together, and the rounds in which they reach their devices."""
        # The largest blocks that cross no border between devices or stages: fewer, larger messages.
        stored = sum(self.counts) // self.schedule.num_devices
        size = math.gcd(stored, *self.counts)
        sources = [divmod(block, stored // size) for block in range(sum(self.counts) // size)]
        targets = self._find_places(size)
        # In place only if nothing is padded, either: then stored and seen layers are the same
        # array.
        if sources == targets and len(set(self.counts)) == 1:
            return size, []
        return size, plan_exchange(sources, targets, self.schedule.num_devices)

    def _find_places(self, size: int = 1) -> list[BlockPlace]:
        """Finds where blocks of `size` layers are run, with all stages padded to the longest."""
        chunks = number_chunks(self.schedule)
        return [
            (self.schedule.device_of[stage], chunks[stage] * max(self.counts) // size + block)
            for stage, count in enumerate(self.counts)
            for block in range(count // size)
        ]

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """Takes the layers of a stage, stacked or as a list."""
        count = self.counts[stage]
        if not count:
            return []

        # The chunk is known only when the program runs, since stages of a kind share it. How many
        # layers there are is the same for all of a kind, and static.
        if not self.unrolled:  # leaves of shape (count, ...), for a scan over the layers
            return jax.tree.map(lambda leaf: read_at(leaf, chunk)[:count], view)
        return [
            jax.tree.map(lambda leaf, at=at: read_at(leaf.reshape(-1, *leaf.shape[2:]), at), view)
            for at in (self._find_layer(chunk, number) for number in range(count))
        ]

    def _find_layer(self, chunk: jax.Array, number: int) -> jax.Array:
        """Finds a layer of a chunk in a view whose axes of chunks and layers are joined."""
        longest = max(self.counts)
        if longest == 1:
            return chunk
        # Looked up, not computed: of static slices XLA would make a kernel for each layer, where
        # one that is told the place can read them all.
        places = [of_chunk * longest + number for of_chunk in range(_count_chunks(self.schedule))]
        return read_at(jnp.asarray(places, jnp.int32), chunk)

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """Adds to the layers of one chunk."""
        if not self.counts[stage]:
            return total
        # Gradients come in the form in which `select` gave the layers.
        if self.unrolled:
            gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)

        # (layers of the stage, ...) into (chunks, longest, ...); padding stays as it is. The axis
        # of chunks is written out: `jax_numpy_rank_promotion` may forbid to leave it away.
        gradients = jax.tree.map(lambda gradient: gradient[None], gradients)

        def start_of(gradient: jax.Array) -> tuple[Any, ...]:
            return (chunk, *[jnp.zeros_like(chunk)] * (gradient.ndim - 1))

        old = jax.tree.map(
            lambda sums, g: lax.dynamic_slice(sums, start_of(g), g.shape), total, gradients
        )
        new = add_gradients(old, cast_like(gradients, total))
        return jax.tree.map(
            lambda sums, g, own: lax.dynamic_update_slice(sums, own, start_of(g)),
            total,
            gradients,
            new,
        )


@dataclasses.dataclass(frozen=True)
class SeparateStages:
    """Parameters of stages that differ, one tree for each.

    Attributes:
      schedule: gives stages and devices.
      structures: for each stage that of its parameters.
      trained: for each leaf of each stage whether it is floating, and has a gradient.
      carrier: packs those that are into arrays that are alike for all stages.
      others: packs the rest.
    """

    schedule: Schedule
    structures: tuple[Any, ...]
    trained: tuple[tuple[bool, ...], ...]
    carrier: Carrier
    others: Carrier

    @property
    def is_divided(self) -> bool:
        """See `Layout`."""
        return False

    def as_view(self, stored: Any, axis_name: str) -> Any:
        """Packs the parameters of the device's stages, with a row for each."""

        def pack(device: int) -> tuple[list[jax.Array], list[jax.Array]]:
            stages = self.schedule.stages_on(device)
            # Rows that no stage of this device reads, as all devices need equally many.
            padding = [0] * (_count_chunks(self.schedule) - len(stages))
            leaves = [jax.tree.leaves(stored[s]) for s in (*stages, *padding)]
            floating = [self.carrier.pack(list(filter(is_floating, own))) for own in leaves]
            rest = [self.others.pack([x for x in own if not is_floating(x)]) for own in leaves]
            return _stack_rows(floating), _stack_rows(rest)

        # All devices hold the parameters of all stages; each packs its own.
        packs = [functools.partial(pack, device) for device in range(self.schedule.num_devices)]
        # Branches need one type. A device whose stages have no parameters packs zeros alone, which
        # are the same on all devices unless they are marked.
        given = [jax.make_jaxpr(own)().out_avals for own in packs]
        axes = [
            frozenset().union(*(aval.manual_axis_type.varying for aval in avals))
            for avals in zip(*given, strict=True)
        ]

        def mark(own: Callable[[], Any]) -> Any:
            leaves, structure = jax.tree.flatten(own())
            marked = [mark_varying(x, sorted(over)) for x, over in zip(leaves, axes, strict=True)]
            return jax.tree.unflatten(structure, marked)

        branches = [functools.partial(mark, own) for own in packs]
        return lax.switch(lax.axis_index(axis_name), branches)

    def as_stored(self, total: Any, axis_name: str) -> Any:
        """Unpacks one tree of gradients for each stage, on all devices."""
        # (chunks, longest) -> (devices * chunks, longest): a row for each stage, and padding.
        everywhere = [_gather_from_devices(sums, axis_name) for sums in total[0]]
        chunks, count = number_chunks(self.schedule), _count_chunks(self.schedule)
        return [
            self._as_tree(stage, [rows[device * count + chunks[stage]] for rows in everywhere])
            for stage, device in enumerate(self.schedule.device_of)
        ]

    def select(self, view: Any, stage: int, chunk: Any) -> Any:
        """Takes the tree of a stage from its row."""
        return self._as_tree(stage, *(read_slot(arrays, chunk) for arrays in view))

    def _as_tree(
        self, stage: int, floating: Sequence[jax.Array], rest: Sequence[jax.Array] | None = None
    ) -> Any:
        """Unpacks a tree; with None in the place of what is not floating if there is no rest."""
        trained = iter(self.carrier.unpack(stage, floating))
        others = itertools.repeat(None) if rest is None else iter(self.others.unpack(stage, rest))
        leaves = [next(trained) if kind else next(others) for kind in self.trained[stage]]
        return jax.tree.unflatten(self.structures[stage], leaves)

    def add(self, total: Any, stage: int, chunk: Any, gradients: Any) -> Any:
        """Adds to the row of one chunk."""
        sums, others = total
        packed = self.carrier.pack(jax.tree.leaves(gradients))
        return [
            old.at[chunk].add(gradient.astype(old.dtype))
            for old, gradient in zip(sums, packed, strict=True)
        ], others


def _stack_rows(rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [jnp.stack(arrays) for arrays in zip(*rows, strict=True)]
