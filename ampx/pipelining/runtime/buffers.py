"""Values of different stages in the same buffers: on the wires between devices, and in memory.

In one program for all devices every stage sends and keeps arrays of the same shapes. Where stages
differ, what they send is packed into flat arrays as long as the longest (`Carrier`):

  to stage 1   f32[2, 3]  bf16[4]   ->   f32[6]: a a a a a a   bf16[4]: b b b b
  to stage 2   f32[5]               ->   f32[6]: c c c c c 0   bf16[4]: 0 0 0 0

What they keep goes to the first buffer of its type that is free (`Pool`), without packing:

  stage 1 keeps f32[8], f32[8]      ->   buffers 0, 1     buffers: 0 f32[8], 1 f32[8], 2 bf16[4]
  stage 2 keeps f32[8], bf16[4]     ->   buffers 0, 2     stage 1 leaves 2 as it is

Both are needed because a `ppermute`, and the branches of a `switch`, have one type for all. Values
that cross either are marked as varying over the same mapped axes, which is part of a type, too.
Random keys travel as their numbers, since a key has a dtype that packing could not join.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.mesh_axes import mark_varying


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array, and the mapped axes over which it may differ.

    Attributes:
      shape: its shape.
      dtype: its numpy dtype.
      axes: the axes of the `shard_map` around along which devices may have different values: what
        JAX calls the varying manual axes of a type.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]

    # Axes are marked in the order of their names. A set of strings has another order in every
    # process, and all processes of a mesh must trace the same program.
    def zeros(self, *leading: int) -> jax.Array:
        """Makes zeros of this type, with more axes in front."""
        return mark_varying(jnp.zeros((*leading, *self.shape), self.dtype), sorted(self.axes))

    def of(self, value: jax.Array) -> jax.Array:
        """Marks a value as possibly different wherever this type may be."""
        return mark_varying(value, sorted(self.axes))

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return int(np.prod(self.shape, dtype=int))


def type_of(leaf: Any) -> ArrayType:
    """Finds the type of an array, or of an abstract value; of a random key that of its numbers."""
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    axes = aval.manual_axis_type.varying
    if is_key(aval):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return ArrayType(tuple(aval.shape), np.dtype(aval.dtype), axes)


def as_varying_as(value: jax.Array, aval: Any) -> jax.Array:
    """Marks a value as possibly different wherever an abstract value may be."""
    return mark_varying(value, sorted(aval.manual_axis_type.varying))


def as_key_numbers(leaf: Any) -> Any:
    """Converts a random key to numbers; anything else stays as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_key_again(numbers: Any, aval: Any) -> Any:
    """Converts what `as_key_numbers` returned to a random key again, if it was one."""
    if not is_key(aval):
        return numbers
    # The implementation of a key's dtype is asked of a key, and there is none: only types. So it is
    # taken from a traced one.
    names: list[Any] = []
    jax.eval_shape(
        lambda key: names.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), aval.dtype)
    )
    return jax.random.wrap_key_data(numbers, impl=names[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredKey:
    """A random key that lies among arrays: its numbers are the leaf of this node.

    Attributes:
      numbers: unsigned integers, in the shape of the key with an axis more.
      dtype: of the key.
    """

    numbers: Any
    dtype: Any = dataclasses.field(metadata={"static": True})


def store_keys(tree: Any) -> Any:
    """Converts the random keys in a tree to numbers, which can be packed, stacked and sent."""
    return jax.tree.map(
        lambda leaf: StoredKey(jax.random.key_data(leaf), leaf.dtype) if is_key(leaf) else leaf,
        tree,
    )


def restore_keys(tree: Any) -> Any:
    """Undoes `store_keys`."""

    def is_stored(node: Any) -> bool:
        return isinstance(node, StoredKey)

    return jax.tree.map(
        lambda node: as_key_again(node.numbers, node) if is_stored(node) else node,
        tree,
        is_leaf=is_stored,
    )


def is_key(leaf: Any) -> bool:
    """Whether a value, or an abstract one, is a random key with a dtype of its own."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def read_at(array: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """Reads one entry along an axis; a negative index means the first one."""
    # Python's meaning of negative indices would be three operations more at each place.
    return lax.dynamic_index_in_dim(
        array, index, axis, keepdims=False, allow_negative_indices=False
    )


def write_at(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Writes one entry along the first axis; a negative index means the first one."""
    return lax.dynamic_update_index_in_dim(array, value, index, 0, allow_negative_indices=False)


def read_slot(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """Reads what lies in a slot; buffers of shape (slots, ...), values without that axis."""
    return [read_at(buffer, slot) for buffer in buffers]


def write_slot(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
) -> list[jax.Array]:
    """Writes values into a slot, in place where the buffers are the carry of a loop."""
    return [write_at(buffer, value, slot) for buffer, value in zip(buffers, values, strict=True)]


@dataclasses.dataclass(frozen=True)
class Carrier:
    """How the values on a wire travel.

    Attributes:
      types: what travels, for all senders and receivers.
      own: for each receiver what it gets; empty if all get the same.
      is_packed: whether values travel in flat arrays, one for each dtype.
    """

    types: tuple[ArrayType, ...]
    own: Mapping[int, tuple[ArrayType, ...]]
    is_packed: bool

    def pack(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Makes what a sender puts on the wire."""
        if not self.is_packed:
            return [t.of(leaf) for t, leaf in zip(self.types, leaves, strict=True)]
        return [self._flatten(t, [x for x in leaves if x.dtype == t.dtype]) for t in self.types]

    def _flatten(self, wire: ArrayType, leaves: Sequence[jax.Array]) -> jax.Array:
        parts = [jnp.ravel(leaf) for leaf in leaves]
        padding = wire.size - sum(part.size for part in parts)
        return wire.of(jnp.concatenate([*parts, jnp.zeros(padding, wire.dtype)]))

    def nothing(self) -> list[jax.Array]:
        """Makes what a sender without anything to send puts on the wire: zeros of these types."""
        return [t.zeros() for t in self.types]

    def unpack(self, receiver: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Makes what a receiver takes from the wire."""
        if not self.is_packed:
            return list(arrays)
        # Leaves of one dtype lie one after the other in their order; padding comes last.
        flat = {t.dtype: array for t, array in zip(self.types, arrays, strict=True)}
        offsets: Counter[Any] = Counter()
        leaves = []
        for t in self.own[receiver]:
            start = offsets[t.dtype]
            offsets[t.dtype] += t.size
            leaves.append(flat[t.dtype][start : start + t.size].reshape(t.shape))
        return leaves


def make_carrier(own: Mapping[int, Sequence[ArrayType]]) -> Carrier:
    """Makes a carrier for what each receiver gets."""
    # Only the axes over which they vary may differ: nothing is packed, and those axes are joined.
    kinds = {tuple((t.shape, t.dtype) for t in types) for types in own.values()}
    if len(kinds) <= 1:
        joined = [
            dataclasses.replace(t[0], axes=frozenset().union(*(x.axes for x in t)))
            for t in zip(*own.values(), strict=True)
        ]
        return Carrier(tuple(joined), {}, False)
    everything = [t for types in own.values() for t in types]
    axes = frozenset().union(*(t.axes for t in everything))
    # One array for each dtype, since casting to a common one would lose bits or send more.
    flat = []
    for dtype in sorted({t.dtype for t in everything}, key=str):
        longest = max(sum(t.size for t in ts if t.dtype == dtype) for ts in own.values())
        flat.append(ArrayType((longest,), dtype, axes))
    return Carrier(tuple(flat), {key: tuple(types) for key, types in own.items()}, True)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Buffers that several owners share. An owner need not use all of them.

    Attributes:
      types: of the buffers, whose shapes have no axes of size 1.
      places: for each owner, the buffers of its values.
      shapes: for each owner those of its values, with such axes.
    """

    types: tuple[ArrayType, ...]
    places: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    def write(
        self, owner: int, buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Writes the owner's values into a slot of its buffers; keys are written as numbers."""
        new = list(buffers)
        for place, value in zip(self.places[owner], values, strict=True):
            own = self.types[place]
            value = own.of(as_key_numbers(value).reshape(own.shape))
            new[place] = write_at(new[place], value, slot)
        return new

    def pick(self, owner: int, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Picks the owner's values out of those of all buffers."""
        places = zip(self.places[owner], self.shapes[owner], strict=True)
        return [values[place].reshape(shape) for place, shape in places]


def _squeezed(t: ArrayType) -> ArrayType:
    """Leaves axes of size 1 out of a type, so that more values of a stage have equal types."""
    return dataclasses.replace(t, shape=tuple(size for size in t.shape if size != 1))


def make_pool(owned: Sequence[Sequence[ArrayType]]) -> Pool:
    """Makes buffers for the values of each owner."""
    # A buffer's name is its type and a number: an owner's second value of a type goes to the second
    # buffer of that type, whoever asked for that first. So there are as many of a type as the owner
    # with the most needs.
    types: dict[tuple[Any, ...], ArrayType] = {}
    places = []
    for values in owned:
        seen: Counter[ArrayType] = Counter()
        own = []
        for t in map(_squeezed, values):
            own.append((t, seen[t]))
            types[own[-1]] = t
            seen[t] += 1
        places.append(own)
    number_of = {name: i for i, name in enumerate(types)}
    return Pool(
        tuple(types.values()),
        tuple(tuple(number_of[n] for n in own) for own in places),
        tuple(tuple(t.shape for t in values) for values in owned),
    )
