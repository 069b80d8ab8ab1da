"""Axes of meshes and of shard_map: their names and sizes, and what varies over them.

JAX knows an axis of a mesh in three ways, and a program may use several at once:

    mapped     inside `shard_map`: arrays are this device's part, sums are written out. With
               `check_vma=True` the type of a value says over which axes it varies,
               `f32[4]{V:data}`; with False, and in `vmap`, no type says anything.
    Explicit   under `jit`: arrays are global, the type of an array says how it is divided,
               `f32[4@data]`, or along which axes it is a sum still due, `f32[4]{U:data}`.
    Auto       under `jit`: arrays are global, and the compiler alone knows how they are divided.

The functions here ask types what they say, and set it, so that other modules need not know how JAX
writes it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def as_axes(
    value: Any, argument: str = "axis_name", *, may_be_empty: bool = False
) -> tuple[str, ...]:
    """Converts what a caller gave for an axis argument to a tuple of names.

    Args:
      value: the name of an axis, or an iterable of names.
      argument: the name of the argument, for the errors.
      may_be_empty: whether None and an empty sequence are allowed, both as no axis.

    Raises:
      TypeError: if it is something else.
      ValueError: if it is an empty sequence where an axis is needed, or names one twice, over
        which sums would be taken twice.

    Examples:
      >>> from ampx import mesh_axes
      >>> mesh_axes.as_axes("data"), mesh_axes.as_axes(["host", "data"])
      (('data',), ('host', 'data'))
      >>> mesh_axes.as_axes(None, may_be_empty=True)
      ()
    """
    if value is None and may_be_empty:
        return ()
    # A name is iterable, too: tuple("data") would be four axes of one letter.
    axes = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, such as 'data', or a sequence of names, "
            f"such as ('host', 'data'), got {value!r}"
        )
    if not axes and not may_be_empty:
        raise ValueError(f"{argument} must name at least one mesh axis, such as 'data'")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{argument} must name each mesh axis once, got {axes}")
    return axes


def check_axes_of_mesh(argument: str, axes: Iterable[str], mesh: Any) -> None:
    """Refuses axes that a mesh lacks.

    Args:
      argument: the names of the arguments that name the axes, for the error.
      axes: names.
      mesh: a `Mesh` or an `AbstractMesh`.

    Raises:
      TypeError: if it is no mesh.
      ValueError: for the first axis that it lacks.
    """
    if not hasattr(mesh, "axis_names") or not hasattr(mesh, "shape"):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, as jax.make_mesh((4,), ('data',)) makes it, got "
            f"{mesh!r}"
        )
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"the mesh has axes {mesh.axis_names}, and none named {axis!r}, which {argument} "
                "asks for"
            )


def count_devices(axes: Sequence[str]) -> int:
    """Counts the devices along mapped axes together.

    Raises:
      NameError: if one of them is not mapped here.
    """
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError as error:
            raise NameError(
                f"no axis {axis!r} is mapped here: call it inside jax.shard_map over a mesh with "
                "that axis. Under plain jit arrays are global, and JAX reduces gradients itself"
            ) from error
    return math.prod(map(lax.axis_size, axes))


def varying_axes(tree: Any) -> frozenset[str]:
    """The mapped axes over which a value may differ; none where `shard_map` does not check it.

    Args:
      tree: an array, or a tree of arrays: then the axes over which any of them may differ.
    """
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*map(_varying_axes_of, leaves))


def _varying_axes_of(leaf: Any) -> frozenset[str]:
    # Where some axes of a mesh are mapped and others are not, `jax.typeof` fails for a shape.
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    kind = (leaf if is_shape else jax.typeof(leaf)).manual_axis_type
    return frozenset() if kind is None else kind.varying


def fold_in_device(key: jax.Array | None, axes: Sequence[str]) -> jax.Array | None:
    """Folds this device's place along mapped axes into a key, so that each has its own; None stays.

    The batch is split over these axes, and nothing else is: devices that hold parts of one model
    keep the same key, as they must to draw the same dropout mask.
    """
    if key is None:
        return None
    for axis in axes:
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AxisNames:
    """Names of axes as a tree without leaves, for a field of what passes through `jax.jit`."""

    names: tuple[str, ...]


def tracks_varying(axis: str) -> bool:
    """Whether the `shard_map` around checks what varies over this axis."""
    # JAX offers no way to ask. But a device's own index varies, if anything does.
    return axis in varying_axes(lax.axis_index(axis))


def untracked_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Those of some axes of which types do not tell what varies over them.

    Raises:
      NameError: if one of them is not mapped here.
    """
    count_devices(axes)  # its error says what to do
    return tuple(axis for axis in axes if not tracks_varying(axis))


def add_over_devices(tree: Any, axes: Sequence[str]) -> Any:
    """Sums arrays over mapped axes, and asks for no sum of one without elements.

    XLA of jaxlib 0.11 ends the process when it merges such a sum with another.
    """
    leaves, structure = jax.tree.flatten(tree)
    sums = iter(lax.psum([leaf for leaf in leaves if leaf.size], tuple(axes)))

    def without_elements(leaf: jax.Array) -> jax.Array:
        empty = jnp.zeros(leaf.shape, leaf.dtype)
        return mark_varying(empty, sorted(varying_axes(leaf).difference(axes)))

    return structure.unflatten(
        [next(sums) if leaf.size else without_elements(leaf) for leaf in leaves]
    )


def sum_over_shards(number: jax.Array, untracked: Sequence[str] = ()) -> jax.Array:
    """Sums what each device found in its shard.

    Args:
      number: summed over the mapped axes over which it varies by its type.
      untracked: axes of which types tell nothing, over which it is summed besides.
    """
    axes = tuple(sorted({*varying_axes(number), *untracked}))
    return lax.psum(mark_varying(number, axes), axes)  # over no axes psum does nothing


def _spec_of(leaf: Any) -> Any:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)  # see `_varying_axes_of`
    return getattr(getattr(leaf if is_shape else jax.typeof(leaf), "sharding", None), "spec", None)


def unreduced_axes(leaf: Any) -> frozenset[str]:
    """Explicit mesh axes along which a value is a sum that is still due."""
    return frozenset(getattr(_spec_of(leaf), "unreduced", ()))


def reduced_axes(leaf: Any) -> frozenset[str]:
    """Explicit mesh axes along which the gradient of a value will be a sum that is still due."""
    return frozenset(getattr(_spec_of(leaf), "reduced", ()))


def unreduced_zeros(leaf: Any, dtype: Any) -> jax.Array:
    """Makes zeros of the type that the gradient of a value with `reduced_axes` has.

    The carry of a scan keeps its type, so a sum of such gradients has to start from such zeros.
    """
    spec = jax.P(*_spec_of(leaf).partitions, unreduced=reduced_axes(leaf))
    return jax.reshard(jnp.zeros(leaf.shape, dtype), spec)


def can_add_divided(arrays: Sequence[jax.Array]) -> bool:
    """Whether types tell how arrays are divided, and one is, so that `add_divided` takes them."""
    return (
        any(map(explicit_axes, arrays))
        and all(isinstance(leaf, jax.core.Tracer) for leaf in arrays)
        and not any(jax.typeof(leaf).sharding.mesh.manual_axes for leaf in arrays)
    )


def explicit_axes(leaf: jax.Array) -> frozenset[str]:
    """The Explicit mesh axes that divide an array, of those that are not mapped here."""
    return frozenset(axes_of_spec(_spec_of(leaf) or P()))


def count_row_devices(leaf: Any) -> int:
    """Counts the devices along the Explicit mesh axes that divide the first axis of an array."""
    spec = tuple(_spec_of(leaf) or ())
    axes = axes_of_entry(spec[0]) if spec else ()
    return math.prod(jax.typeof(leaf).sharding.mesh.shape[axis] for axis in axes)


def take_rows(leaf: Any, rows: jax.Array) -> jax.Array:
    """`leaf[rows]`, laid out on Explicit axes as `leaf` is."""
    return jnp.asarray(leaf).at[rows].get(out_sharding=jax.typeof(leaf).sharding)


def lay_out_as_rows(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """Divides an array of one axis over Explicit mesh axes, as the rows of another are."""
    sharding = jax.typeof(like).sharding
    return jax.reshard(numbers, sharding.update(spec=P(sharding.spec[0])))


def add_divided(arrays: Sequence[jax.Array]) -> jax.Array:
    """Adds all elements of arrays that Explicit axes divide, with one sum over all devices.

    JAX completes each sum over a divided array before anything is added to it: as many sums over
    devices as there are arrays, and with some layouts more. Here every device adds what it has,
    with "unreduced" types, and the devices add once:

        Σ a, over "data"               f32[]{U:data}
        Σ b, over "data" and "model"   f32[]{U:(data,model)}
        both together                  f32[]{U:(data,model)}  ─►  f32[]

    Args:
      arrays: of one dtype, which `can_add_divided`.

    Returns:
      A scalar of that dtype.
    """
    own_axes = list(map(explicit_axes, arrays))
    divided = next(leaf for leaf, own in zip(arrays, own_axes, strict=True) if own)
    mesh = jax.typeof(divided).sharding.mesh

    def due(axes: frozenset[str]) -> NamedSharding:
        return NamedSharding(mesh, P(unreduced=axes))

    def add(arrays: Sequence[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.add, map(jnp.sum, arrays))

    def add_at_once(arrays: Sequence[jax.Array]) -> jax.Array:
        everywhere = due(frozenset().union(*own_axes))
        parts = [
            lax.reduce_sum(leaf, tuple(range(leaf.ndim)), out_sharding=due(own))
            for leaf, own in zip(arrays, own_axes, strict=True)
        ]
        parts = [jax.reshard(part, everywhere) for part in parts]
        return jax.reshard(functools.reduce(jnp.add, parts), due(frozenset()))

    # `vmap` knows no unreduced types, and what tells it so has no derivative of its own.
    unless_mapped = jax.custom_batching.custom_vmap(add_at_once)
    differentiable = jax.custom_jvp(unless_mapped)

    @unless_mapped.def_vmap
    def _(size: int, is_mapped: Any, arrays: Sequence[jax.Array]) -> Any:
        (mapped,) = (jax.tree.map(lambda own: 0 if own else None, each) for each in is_mapped)
        return jax.vmap(add, in_axes=(mapped,), axis_size=size)(arrays), True

    @differentiable.defjvp
    def _(arrays: Any, tangents: Any) -> Any:
        return differentiable(*arrays), add(*tangents)

    return differentiable(list(arrays))


def divide_sum(total: jax.Array, divisor: Any) -> jax.Array:
    """Divides a total, which may be a sum over devices that is still due.

    JAX refuses to divide such a sum, but multiplies it with a value whose type says "reduced",
    since a * Σ x = Σ a * x. Each device's part is multiplied, and the sum stays due.
    """
    axes = unreduced_axes(total)
    if not axes:
        return total / divisor
    factor = jnp.asarray(1 / divisor, total.dtype)
    return total * jax.reshard(factor, jax.P(reduced=axes))


def take_index(leaf: Any, number: int) -> Any:
    """`leaf[number]`, also of an array whose first dimension Explicit axes divide.

    JAX indexes such a dimension only where it is told how to lay out the result: as the rest of the
    array.
    """
    entries = tuple(_spec_of(leaf) or ())
    if not entries or entries[0] is None:
        return leaf[number]
    sharding = jax.typeof(leaf).sharding
    return jnp.asarray(leaf).at[number].get(out_sharding=sharding.update(spec=P(*entries[1:])))


def has_automatic_axes() -> bool:
    """Whether the mesh around has axes of several devices that are not mapped here."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(getattr(mesh, "manual_axes", ()))
    return any(size > 1 for name, size in mesh.shape.items() if name not in manual)


def mark_varying(tree: Any, axes: Sequence[str]) -> Any:
    """Marks values as possibly different on devices along `axes`; sets no marks in `vmap`.

    Nothing is computed: it changes types. The gradient of a marked value is each device's own,
    where that of an unmarked one is summed over the devices by JAX itself.

    `lax.psum(mark_varying(x, axes), axes)` is the sum of any value over mapped axes. psum alone
    refuses one that varies over some of these axes and not over the others.
    """
    # Under `jit`, pcast marks what `vmap` has mapped, too, and the mark makes `vmap` fail.
    axes = [axis for axis in axes if axis in jax.sharding.get_abstract_mesh().manual_axes]

    # One axis at a time: pcast refuses a tuple of axes over one of which the value varies already.
    def mark(leaf: Any) -> Any:
        for axis in axes:
            with contextlib.suppress(ValueError):  # marked already
                leaf = jax.lax.pcast(leaf, axis, to="varying")
        return leaf

    return jax.tree.map(mark, tree) if axes else tree


def join_shards(rows: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The rows of all devices along mapped axes, the first device's first: (n, ...) -> (B, ...).

    A sum of arrays that are zero but for each device's own rows. Unlike the result of a gather, it
    is for `check_vma` too the same on all devices.
    """
    axes = tuple(axes)
    if not axes:
        return rows
    parts = jnp.zeros((count_devices(axes), *rows.shape), rows.dtype)
    parts = lax.psum(parts.at[lax.axis_index(axes)].set(rows), axes)
    return parts.reshape(-1, *rows.shape[1:])


def match_type(value: jax.Array, like: jax.Array) -> jax.Array:
    """Gives a value the type of another: what it varies over, and its layout on Explicit axes.

    The branches of a `lax.cond` must return the same types, and JAX does not adjust them by itself.

    Args:
      value: an array of the shape and dtype of `like`.
      like: an array, of which the type alone is read. What `value` varies over already, it keeps.
    """
    value = mark_varying(value, sorted(varying_axes(like)))
    spec, wanted = _spec_of(value), _spec_of(like)
    mesh = jax.sharding.get_abstract_mesh()
    has_layout = any(kind == AxisType.Explicit for kind in mesh.axis_types)
    is_other = wanted is not None and spec != wanted
    return jax.reshard(value, wanted) if has_layout and is_other else value


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of `PartitionSpec`s is one."""
    return isinstance(node, P)


def axes_of_entry(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a `PartitionSpec`, those that divide one dimension."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_of_spec(spec: P) -> tuple[Any, ...]:
    """The mesh axes along which a `PartitionSpec` divides an array."""
    return tuple(axis for entry in spec for axis in axes_of_entry(entry))


def place(tree: Any, specs: Any, mesh: Mesh | None, axes: Sequence[str]) -> Any:
    """Lays arrays out along Explicit mesh axes; along Auto axes that is left to the compiler.

    Args:
      tree: global arrays.
      specs: a tree prefix of `PartitionSpec`s.
      mesh: None for the one of `jax.set_mesh`.
      axes: those that `specs` decide about. Along other axes arrays stay as they are.
    """
    known = mesh or jax.sharding.get_abstract_mesh()
    kinds = zip(known.axis_names, known.axis_types, strict=True)
    explicit = {axis for axis, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return tree

    # For each dimension: our axes as wanted, and those that others have divided it over.
    def entry(wanted: Any, held: Any) -> Any:
        ours = [axis for axis in axes_of_entry(wanted) if axis in explicit]
        others = [axis for axis in axes_of_entry(held) if axis not in axes]
        return (*ours, *others) or None

    def place_leaf(spec: P, leaf: Any) -> Any:
        held = tuple(jax.typeof(leaf).sharding.spec)
        wanted = (*spec, *[None] * (len(held) - len(spec)))
        merged = P(*map(entry, wanted, held))
        return jax.sharding.reshard(leaf, merged if mesh is None else NamedSharding(mesh, merged))

    def place_all(spec: P, part: Any) -> Any:
        return jax.tree.map(lambda leaf: place_leaf(spec, leaf), part)

    return jax.tree.map(place_all, specs, tree, is_leaf=is_spec)
