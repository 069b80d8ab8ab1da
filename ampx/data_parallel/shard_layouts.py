"""How arrays lie on devices: which mesh axes divide which axis of an array.

A parameter may be divided before `zero1` sees it, over "model" for example, and `zero1` divides
what is left over "data" in addition. A `ShardLayout` names both, axis by axis of the array, as a
`PartitionSpec` does:

    whole array      f32[8, 32]
    this device's    f32[4, 8]      mesh: model=2, data=4
    ShardLayout      (("model",), ("data",))

Where several mesh axes divide one axis of the array, the first of them divides it first: with
(("model", "data"), ()) each device along "model" has a half of the rows, and each along "data" a
quarter of that half.

A sum over a whole array is completed over all axes of its layout. So the squares of a divided
parameter are added over "data" and "model", and those of a parameter that the devices along "model"
share over "data" alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ampx.mesh_axes import axes_of_entry, count_devices, mark_varying
from ampx.trees import path_name

Entries = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How the devices divide an array; without arguments: all of them hold the whole.

    Attributes:
      entries: for each axis of the array the mesh axes that divide it, the first of which divides
        it first. Axes that are not named are not divided, so () fits an array of any rank.
      is_known: whether the entries are. If only the names of the mesh axes are known, they stand at
        the first axis of the array. That is as good as the truth for all that is elementwise and
        for sums over the whole array, and for nothing else.
      flat_of: of an array that was flattened, what it was before: its shape, that of the part, and
        its layout. A device holds numbers that are no neighbours, so nothing is known about where
        they lie, and only what was flattened alike lies alike.
    """

    entries: Entries = ()
    is_known: bool = True
    flat_of: tuple[tuple[int, ...], tuple[int, ...], ShardLayout] | None = None

    def __post_init__(self) -> None:
        entries = self.entries
        while entries and not entries[-1]:  # so that equal layouts compare equal
            entries = entries[:-1]
        object.__setattr__(self, "entries", entries)

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that divide the array."""
        return tuple(itertools.chain(*self.entries))

    @property
    def spec(self) -> PartitionSpec:
        """The layout for `in_specs` and `out_specs`."""
        return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in self.entries))

    def of_rank(self, rank: int) -> Entries:
        """One entry for each axis of an array."""
        return (*self.entries, *[()] * (rank - len(self.entries)))

    def divided_by(self, axes: tuple[str, ...], dim: int | None) -> ShardLayout:
        """The layout of the parts into which `axes` divide each part; None divides nothing."""
        if dim is None or not axes:
            return self
        entries = list(self.of_rank(max(dim + 1, len(self.entries))))
        entries[dim] = (*entries[dim], *axes)
        return dataclasses.replace(self, entries=tuple(entries))

    def flattened(self, whole: tuple[int, ...], part: tuple[int, ...]) -> ShardLayout:
        """The layout when every device flattens its part, from the shapes before."""
        return ShardLayout((self.axes,), is_known=False, flat_of=(whole, part, self))

    def divided_further(
        self, shape: Sequence[int], axes: Sequence[str], sizes: Mapping[str, int]
    ) -> ShardLayout:
        """The layout of a whole array of this shape, after `zero1` over `axes` has divided it.

        Devices along those of `axes` that divide it already hold different parts: these are divided
        over the others alone.
        """
        left = tuple(axis for axis in axes if axis not in self.axes)
        part = self.part_shape(shape, sizes)
        return self.divided_by(left, choose_shard_dim(part, math.prod(sizes[a] for a in left)))

    def whole_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole array, from that of a part and the sizes of the mesh axes."""
        entries = self.of_rank(len(shape))
        return tuple(
            size * math.prod(sizes[axis] for axis in entry)
            for size, entry in zip(shape, entries, strict=True)
        )

    def part_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a part, from that of the whole array and the sizes of the mesh axes."""
        entries = self.of_rank(len(shape))
        return tuple(
            size // math.prod(sizes[axis] for axis in entry)
            for size, entry in zip(shape, entries, strict=True)
        )


WHOLE = ShardLayout()


def layout_of_spec(spec: PartitionSpec | None, axes: Sequence[str], rank: int) -> ShardLayout:
    """The layout of an array that is divided over `axes`, as far as a spec tells along which axis.

    Args:
      spec: may name other mesh axes, which are left out; None where nothing is known.
      axes: the mesh axes that divide the array.
      rank: of the array.
    """
    entries = [tuple(axis for axis in axes_of_entry(entry) if axis in axes) for entry in spec or ()]
    unplaced = tuple(axis for axis in axes if axis not in itertools.chain(*entries))
    known = ShardLayout(tuple(entries))
    if not unplaced:
        return known
    guess = known.divided_by(unplaced, 0)
    return guess if rank == 1 else dataclasses.replace(guess, is_known=False)


def find_common_layout(layouts: Sequence[ShardLayout]) -> ShardLayout | None:
    """The coarsest layout that values of all these layouts can be cut to; None if there is none."""
    entries = []
    for parts in itertools.zip_longest(*(each.entries for each in layouts), fillvalue=()):
        longest = max(parts, key=len)
        if any(longest[: len(part)] != part for part in parts):
            return None
        entries.append(longest)
    flat_of = {each.flat_of for each in layouts if each != WHOLE}
    if len(flat_of) > 1:
        return None
    merged = ShardLayout(tuple(entries), all(each.is_known for each in layouts), *flat_of)
    return None if len(set(merged.axes)) < len(merged.axes) else merged


def choose_shard_dim(shape: Sequence[int], count: int) -> int | None:
    """Chooses the axis along which an array is divided: the longest that `count` divides, or None.

    Of equally long axes it is the first. The choice depends on the shape alone. So a parameter, its
    gradient and its moments are divided alike, and nothing need record how.
    """
    divisible = [dim for dim, size in enumerate(shape) if size and size % count == 0]
    return max(divisible, key=lambda dim: (shape[dim], -dim)) if divisible else None


def take_own_shard(value: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    """Cuts this device's shard out of an array that every device along `axes` holds whole."""
    if dim is None or not axes:
        return value
    size = value.shape[dim] // count_devices(axes)
    return lax.dynamic_slice_in_dim(
        mark_varying(value, axes), lax.axis_index(axes) * size, size, dim
    )


def cut(value: Any, held: ShardLayout, wanted: ShardLayout) -> Any:
    """Cuts a part in one layout to a part in a finer one."""
    rank = jnp.ndim(value)
    pairs = zip(held.of_rank(rank), wanted.of_rank(rank), strict=True)
    for dim, (had, entry) in enumerate(pairs):
        # An axis of length 1 is not divided: an elementwise operation repeats it.
        value = value if value.shape[dim] == 1 else take_own_shard(value, dim, entry[len(had) :])
    return value


def convert(value: Any, held: ShardLayout, wanted: ShardLayout) -> Any:
    """Converts a part in one layout to a part in any other: gathers what it must, and cuts."""
    rank, left = jnp.ndim(value), []
    pairs = zip(held.of_rank(rank), wanted.of_rank(rank), strict=True)
    for dim, (had, entry) in enumerate(pairs):
        if entry[: len(had)] != had:
            value = lax.all_gather(value, had, axis=dim, tiled=True, to="invarying")
            had = ()
        left.append(had)
    return cut(value, ShardLayout(tuple(left)), wanted)


def match_parameters(
    params: Any, layouts: Sequence[ShardLayout]
) -> Callable[[Any, Sequence[int]], ShardLayout]:
    """Makes a function from the path and the shape of a leaf of an optimizer state to its layout.

    It is that of the parameter which the leaf belongs to. A leaf at `0/mu/dense/kernel` belongs to
    the parameter `dense/kernel`, whose path ends its own, if it has the same shape. Others, such as
    counts or factored moments of another shape, are whole on every device.
    """
    known: dict[tuple[str, tuple[int, ...]], ShardLayout] = {}
    with_paths = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), layout in zip(with_paths, layouts, strict=True):
        known.setdefault((path_name(path), tuple(jnp.shape(leaf))), layout)

    def layout_of(path: Any, shape: Sequence[int]) -> ShardLayout:
        # The longest path first: "a/w" is more of a name than "w".
        names = (path_name(path[i:]) for i in range(len(path) + 1))
        found = (known.get((name, tuple(shape))) for name in names)
        return next((layout for layout in found if layout is not None), WHOLE)

    return layout_of
