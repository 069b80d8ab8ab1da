"""Runs a function of whole arrays where each device holds but a shard of some of them.

The function, the update of an optimizer, is traced as if all arrays were whole. Its equations are
then executed one after the other on `Part`s, which know how a value is divided. Each equation with
a shard among its operands is one of four kinds:

    elementwise      a * b, sqrt(a)    on the shards; a whole operand is cut to a shard first
    moves axes       transpose, ravel  on the shard; the result is divided along other axes
    reduction        sum(a * a), vdot  on the shard; if it is over a divided axis, completed over
                                       the devices, and then every device holds the whole
    anything else    sort, a @ b       refused: it would see a part and take it for the whole

So `optax.clip_by_global_norm` gets the norm of all shards, and the trust ratio of LAMB that of the
whole parameter, though neither knows of devices. A mean is right as well: its divisor was traced
as the size of the whole array. Equations without a shard among their operands (step counts,
schedules) run as they are, on every device.

Sums are completed here and nowhere else. So a function that itself sums floating numbers over the
axes of a shard is refused: its sum would count every shard several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.data_parallel.shard_layouts import WHOLE, ShardLayout, convert, cut, find_common_layout
from ampx.flat_buffers.flat_params import is_flat
from ampx.jaxprs import folds, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.mesh_axes import mark_varying, varying_axes
from ampx.trees import is_floating

# How a reduction over a divided axis is completed over the devices. There is no collective for
# bools: as 0 and 1, "and" is the least and "or" the largest.
_OVER_DEVICES: dict[str, Callable[..., Any]] = {
    "reduce_sum": lax.psum,
    "reduce_max": lax.pmax,
    "reduce_min": lax.pmin,
    "reduce_and": lambda x, axes: lax.pmin(x.astype(jnp.int32), axes).astype(x.dtype),
    "reduce_or": lambda x, axes: lax.pmax(x.astype(jnp.int32), axes).astype(x.dtype),
}


class Part(NamedTuple):
    """A value as this device holds it.

    Attributes:
      value: an array: this device's shard, or the whole.
      layout: how the devices divide it.
      is_uniform: whether all its numbers are known to be one number, so that any part is like any
        other.
    """

    value: Any
    layout: ShardLayout = WHOLE
    is_uniform: bool = False


def run_on_shards(
    fun: Callable[..., Any], shapes: Any, parts: Sequence[Part]
) -> tuple[list[Part], Any]:
    """Calls `fun` with shards of its arguments.

    Args:
      fun: a function of whole arrays.
      shapes: a tuple of its arguments, whole, as shapes and dtypes.
      parts: what this device holds of each leaf of `shapes`.

    Returns:
      What this device holds of each leaf of the result, and the structure of the result.

    Raises:
      NotImplementedError: if an operation on a shard is neither elementwise nor a reduction, or if
        it depends on where the numbers of a shard lie and that is not known.
    """
    jaxpr, out_shapes = reading.trace(fun, *shapes)
    axes = frozenset(axis for part in parts for axis in part.layout.axes)
    instead = "take this one out of zero1, to run on whole gradients"
    if any(map(is_flat, jax.tree.leaves(shapes, is_leaf=is_flat))):
        # Of a buffer, norms are sums over pieces that no device has whole.
        instead = "give zero1 the tree, params.tree(): here parameters share flat buffers"
    return _Partition(axes, instead).run(jaxpr, parts), jax.tree.structure(out_shapes)


def convert_part(part: Part, wanted: ShardLayout, name: str) -> Any:
    """Converts a value to another layout; `name` says for an error which value it is."""
    if part.layout == wanted:
        return part.value
    if not part.is_uniform:
        _check_is_known(name, part.layout, wanted)
    return convert(part.value, part.layout, wanted)


def _check_is_known(name: str, *layouts: ShardLayout) -> None:
    for layout in layouts:
        if layout.flat_of is not None:
            raise NotImplementedError(
                f"{name} depends on the order of the numbers of a flattened parameter, of which "
                "zero1 gives a device some: take this transformation out of zero1, to run on whole "
                "gradients"
            )
        if not layout.is_known:
            raise NotImplementedError(
                f"{name} depends on how a parameter is divided, and along which of its axes "
                f"{layout.axes} divide it is not known: give zero1 a tree of PartitionSpecs as "
                "model_axes, those that in_specs of shard_map has for the parameters"
            )


def _multiplies_all(eqn: Equation) -> bool:
    """Whether a product sums over all axes of two arrays of one shape, each with its like."""
    (left, right), _ = eqn.params["dimension_numbers"]
    results: Sequence[Any] = eqn.outvars
    return left == right and not results[0].aval.shape


def _reads_bits(eqn: Equation) -> bool:
    """Whether the bits of each number are read as another number, of as many bits."""
    if eqn.primitive.name != "bitcast_convert_type":
        return False
    atoms: Sequence[Any] = (*eqn.invars, *eqn.outvars)
    operand, result = (atom.aval.shape for atom in atoms)
    return operand == result


class _Partition:
    """One run over a jaxpr.

    Attributes:
      axes: the mapped axes over which any shard is divided.
      instead: what to do where an operation cannot be computed, for the error.
    """

    def __init__(self, axes: frozenset[str], instead: str) -> None:
        self.axes, self.instead = axes, instead
        self.line = ""  # of the call that is being entered; JAX's own functions have no lines

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Part]) -> list[Part]:
        def apply(eqn: Equation, operands: list[Part]) -> Sequence[Part]:
            with eqn.ctx.manager:  # the mesh and metadata under which it was traced
                return self._apply(eqn, operands)

        return folds.fold(jaxpr, inputs, apply, constant=Part)

    def _describe(self, eqn: Equation) -> str:
        return f"{eqn.primitive.name} ({source_info.line_of(eqn) or self.line})"

    def _apply(self, eqn: Equation, operands: Sequence[Part]) -> Sequence[Part]:
        name = eqn.primitive.name
        # What is called is entered rather than called: nothing is differentiated here, so custom
        # derivative rules do not matter, and a jitted norm is a norm.
        if name in primitives.CALLS | primitives.CUSTOM_RULES:
            (body,) = reading.bodies_of(eqn)
            outer, self.line = self.line, source_info.line_of(eqn) or self.line
            results = self.run(body, operands)
            self.line = outer
            return results
        if all(part.layout == WHOLE for part in operands):
            return self._whole(eqn, operands)
        if name in primitives.ELEMENTWISE or _reads_bits(eqn):
            return self._elementwise(eqn, operands)
        if name in primitives.PLACEMENTS:  # of a whole array; a shard lies where it is
            return operands
        if name == "optimization_barrier":
            return self._barrier(eqn, operands)
        if name in _OVER_DEVICES:
            return [self._reduce(eqn, operands[0])]
        if name == "broadcast_in_dim":
            return [self._broadcast(eqn, operands[0])]
        if name == "transpose":
            return [self._transpose(eqn, operands[0])]
        if name == "reshape" and (flat := self._reshape(eqn, operands[0])) is not None:
            return [flat]
        if name == "dot_general" and _multiplies_all(eqn):
            return [self._multiply_all(eqn, operands)]
        if name == "cond" and operands[0].layout == WHOLE:
            return self._branches(eqn, operands)
        raise NotImplementedError(
            f"{self._describe(eqn)} cannot be computed on shards: zero1 is for transformations "
            f"that are elementwise, with norms and other reductions; {self.instead}"
        )

    def _whole(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        values = [part.value for part in operands]
        summed = self.axes.intersection(reading.collective_axes(eqn))
        if summed and eqn.primitive.name in primitives.PSUMS and any(map(is_floating, values)):
            raise NotImplementedError(
                f"{self._describe(eqn)} sums over {sorted(summed)} inside zero1, which completes "
                "every sum over a parameter by itself: the result would be several times too "
                "large. Give zero1 the model_axes, and no axes to the transformation inside it"
            )
        fills = eqn.primitive.name in ("broadcast_in_dim", "reshape")
        is_uniform = (fills or eqn.primitive.name in primitives.ELEMENTWISE) and all(
            part.is_uniform or not jnp.ndim(part.value) for part in operands
        )
        return [Part(value, WHOLE, is_uniform) for value in reading.bind(eqn, values)]

    def _elementwise(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        values, layout = self._align(eqn, operands)
        return [Part(value, layout) for value in reading.bind(eqn, values)]

    def _align(self, eqn: Equation, operands: Sequence[Part]) -> tuple[list[Any], ShardLayout]:
        """The operands as shards that lie alike, and how."""
        layout = find_common_layout([part.layout for part in operands])
        if layout is None:
            flat = [part.layout for part in operands if part.layout.flat_of is not None]
            _check_is_known(self._describe(eqn), *flat)
            entries = sorted({part.layout.entries for part in operands if part.layout != WHOLE})
            raise NotImplementedError(
                f"{self._describe(eqn)} takes shards divided as "
                f"{' and '.join(map(str, entries))}, and zero1 does not move data between devices "
                "for it: take this transformation out of zero1, to run on whole gradients"
            )

        # Scalars need no cut. All other operands have the same whole shape, so one that is whole
        # here can be cut along the axes of the shards.
        def align(part: Part) -> Any:
            if not jnp.ndim(part.value):
                return part.value
            if not part.is_uniform and part.layout != layout:
                _check_is_known(self._describe(eqn), layout)
            return cut(part.value, part.layout, layout)

        values = [align(part) for part in operands]
        varying = sorted({*layout.axes, *varying_axes(values)})
        return mark_varying(values, varying), layout

    def _barrier(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        # Result i is operand i. All operands of a barrier must vary over the same axes, so those
        # that are divided over the same axes get a barrier of their own.
        results = list(operands)
        for axes in {frozenset(part.layout.axes) for part in operands}:
            places = [i for i, p in enumerate(operands) if frozenset(p.layout.axes) == axes]
            values = reading.bind(eqn, [operands[i].value for i in places])
            for i, value in zip(places, values, strict=True):
                results[i] = operands[i]._replace(value=value)
        return results

    def _reduce(self, eqn: Equation, part: Part) -> Part:
        (value,) = reading.bind(eqn, [part.value])
        entries = part.layout.of_rank(part.value.ndim)
        gone = eqn.params["axes"]
        left = ShardLayout(tuple(entry for dim, entry in enumerate(entries) if dim not in gone))
        if len(gone) < len(entries):
            _check_is_known(self._describe(eqn), part.layout)
        if axes := tuple(axis for dim in gone for axis in entries[dim]):
            value = _OVER_DEVICES[eqn.primitive.name](value, axes)
        return Part(value, left)

    def _broadcast(self, eqn: Equation, part: Part) -> Part:
        # Axis i of the operand becomes axis broadcast_dimensions[i] of the result. The shape in the
        # equation is that of the whole result; along a divided axis it becomes the shard's.
        dimensions = eqn.params["broadcast_dimensions"]
        if part.layout.flat_of is not None:
            _check_is_known(self._describe(eqn), part.layout)
        shape, layout = list(eqn.params["shape"]), ShardLayout(is_known=part.layout.is_known)
        for dim, entry in enumerate(part.layout.entries):
            if entry:
                shape[dimensions[dim]] = part.value.shape[dim]
                layout = layout.divided_by(entry, dimensions[dim])
        return Part(lax.broadcast_in_dim(part.value, shape, dimensions), layout)

    def _transpose(self, eqn: Equation, part: Part) -> Part:
        permutation = eqn.params["permutation"]
        entries = part.layout.of_rank(part.value.ndim)
        layout = ShardLayout(tuple(entries[dim] for dim in permutation), part.layout.is_known)
        return Part(lax.transpose(part.value, permutation), layout)

    def _reshape(self, eqn: Equation, part: Part) -> Part | None:
        """Flattens a parameter, as norms and inner products do, or takes that back; else None."""
        new, layout = eqn.params["new_sizes"], part.layout
        if layout.flat_of is not None:
            whole, own, before = layout.flat_of
            return Part(part.value.reshape(own), before) if new == whole else None
        if len(new) > 1:
            return None
        operands: Sequence[Any] = eqn.invars
        whole = operands[0].aval.shape
        return Part(part.value.reshape(-1), layout.flattened(whole, part.value.shape))

    def _multiply_all(self, eqn: Equation, operands: Sequence[Part]) -> Part:
        """The inner product of two arrays: that of two shards, added up over the devices."""
        values, layout = self._align(eqn, operands)
        (product,) = reading.bind(eqn, values)
        return Part(lax.psum(product, layout.axes))

    def _branches(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        """A `lax.cond` or `switch` whose index every device holds.

        All branches must return a result in one way, but one may return a shard where another
        returns a whole value, such as zeros. So they are traced twice: first to see how each
        divides a result, then so that a result that any branch divides is divided by all.
        """
        (index, *others), found = operands, []

        def branch(body: Jaxpr, agreed: list[ShardLayout] | None) -> Callable[..., Any]:
            """The function of a body; without `agreed` it appends its results to `found`."""

            def run(*values: Any) -> list[Any]:
                inputs = [p._replace(value=v) for v, p in zip(values, others, strict=True)]
                outputs = self.run(body, inputs)
                if agreed is None:
                    found.append([part.layout for part in outputs])
                    return [part.value for part in outputs]
                return [
                    mark_varying(convert_part(part, layout, self._describe(eqn)), layout.axes)
                    for part, layout in zip(outputs, agreed, strict=True)
                ]

            return run

        # eval_shape runs nothing; only `found` is wanted of it.
        values = [part.value for part in others]
        bodies = reading.bodies_of(eqn)
        for body in bodies:
            jax.eval_shape(branch(body, None), *values)
        # Layouts that cannot be merged are converted to that of the first branch.
        agreed = [find_common_layout(layouts) or layouts[0] for layouts in zip(*found, strict=True)]
        results = lax.switch(index.value, [branch(body, agreed) for body in bodies], *values)
        return [Part(value, layout) for value, layout in zip(results, agreed, strict=True)]
