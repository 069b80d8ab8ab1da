"""Runs a function of whole arrays where each device holds but a shard of some of them.

The function, the update of an optimizer, is traced as if all arrays were whole. Its equations are
then executed one after the other on `Part`s, which know along which axis a value is a shard. Each
equation with a shard among its operands is one of four kinds:

    elementwise      a * b, sqrt(a)    on the shards; a whole operand is cut to a shard first
    moves the axis   transpose         on the shard; the result is divided along another axis
    reduction        sum(a * a)        on the shard; if it is over the divided axis, completed over
                                       the devices, and then every device holds the whole
    anything else    sort, a @ b       refused: it would see a part and take it for the whole

So `optax.clip_by_global_norm` gets the norm of all shards, and the trust ratio of LAMB that of the
whole parameter, though neither knows of devices. A mean is right as well: its divisor was traced
as the size of the whole array. Equations without a shard among their operands (step counts,
schedules) run as they are, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs import folds, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.mesh_axes import count_devices, mark_varying

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
      dim: the axis along which the devices hold equal shards; None: all hold the whole.
    """

    value: Any
    dim: int | None = None


def choose_shard_dim(shape: Sequence[int], count: int) -> int | None:
    """Chooses the axis along which an array is divided: the longest that `count` divides, or None.

    Of equally long axes it is the first. The choice depends on the shape alone. So a parameter, its
    gradient and its moments are divided alike, and nothing need record how.
    """
    divisible = [dim for dim, size in enumerate(shape) if size and size % count == 0]
    return max(divisible, key=lambda dim: (shape[dim], -dim)) if divisible else None


def take_own_shard(value: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    """Cuts this device's shard out of an array that every device holds whole."""
    if dim is None:
        return value
    size = value.shape[dim] // count_devices(axes)
    return lax.dynamic_slice_in_dim(
        mark_varying(value, axes), lax.axis_index(axes) * size, size, dim
    )


def run_on_shards(
    fun: Callable[..., Any], shapes: Any, parts: Sequence[Part], axes: tuple[str, ...]
) -> tuple[list[Part], Any]:
    """Calls `fun` with shards of its arguments.

    Args:
      fun: a function of whole arrays.
      shapes: a tuple of its arguments, whole, as shapes and dtypes.
      parts: what this device holds of each leaf of `shapes`.
      axes: the mapped axes over which arrays are divided.

    Returns:
      What this device holds of each leaf of the result, and the structure of the result.

    Raises:
      NotImplementedError: if an operation on a shard is neither elementwise nor a reduction.
    """
    jaxpr, out_shapes = reading.trace(fun, *shapes)
    return _Partition(axes).run(jaxpr, parts), jax.tree.structure(out_shapes)


class _Partition:
    """One run over a jaxpr; `axes` are the mapped axes over which shards are divided."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Part]) -> list[Part]:
        def apply(eqn: Equation, operands: list[Part]) -> Sequence[Part]:
            with eqn.ctx.manager:  # the mesh and metadata under which it was traced
                return self._apply(eqn, operands)

        return folds.fold(jaxpr, inputs, apply, constant=Part)

    def _apply(self, eqn: Equation, operands: Sequence[Part]) -> Sequence[Part]:
        name = eqn.primitive.name
        # What is called is entered rather than called: nothing is differentiated here, so custom
        # derivative rules do not matter, and a jitted norm is a norm.
        if name in primitives.CALLS | primitives.CUSTOM_RULES:
            (body,) = reading.bodies_of(eqn)
            return self.run(body, operands)
        if all(part.dim is None for part in operands):
            return [Part(value) for value in reading.bind(eqn, [p.value for p in operands])]
        if name in primitives.ELEMENTWISE:
            return self._elementwise(eqn, operands)
        if name in primitives.PLACEMENTS:  # of a whole array; a shard lies where it is
            return operands
        if name == "optimization_barrier":
            return self._barrier(eqn, operands)
        if name in _OVER_DEVICES:
            ((value, dim),) = operands
            return [self._reduce(eqn, value, dim)]
        if name == "broadcast_in_dim":
            return [self._broadcast(eqn, operands[0])]
        if name == "transpose":
            return [self._transpose(eqn, operands[0])]
        if name == "cond" and operands[0].dim is None:
            return self._branches(eqn, operands)
        raise NotImplementedError(
            f"{name} ({source_info.line_of(eqn)}) cannot be computed on shards: zero1 is for "
            "transformations that are elementwise, with norms and other reductions; take this one "
            "out of zero1, to run on whole gradients"
        )

    def _elementwise(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        dim = max(part.dim for part in operands if part.dim is not None)

        # Scalars need no cut. All other operands of an elementwise equation have the same whole
        # shape, so one that is whole here can be cut along the axis of the shards.
        def align(part: Part) -> Any:
            whole = part.dim is None and jnp.ndim(part.value) and part.value.shape[dim] != 1
            if part.dim not in (dim, None):
                raise NotImplementedError(
                    f"{eqn.primitive.name} ({source_info.line_of(eqn)}) takes shards along axes "
                    f"{part.dim} and {dim}, and zero1 does not move data between devices for it: "
                    "take this transformation out of zero1, to run on whole gradients"
                )
            value = take_own_shard(part.value, dim, self.axes) if whole else part.value
            return mark_varying(value, self.axes)

        return [Part(value, dim) for value in reading.bind(eqn, [align(p) for p in operands])]

    def _barrier(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        # Result i is operand i. All operands of a barrier must vary over the same axes, and shards
        # vary where whole values do not: each kind gets a barrier of its own.
        results = list(operands)
        for is_shard in (True, False):
            places = [i for i, part in enumerate(operands) if (part.dim is not None) == is_shard]
            values = reading.bind(eqn, [operands[i].value for i in places]) if places else []
            for i, value in zip(places, values, strict=True):
                results[i] = Part(value, operands[i].dim)
        return results

    def _reduce(self, eqn: Equation, shard: Any, dim: Any) -> Part:
        axes = eqn.params["axes"]
        (value,) = reading.bind(eqn, [shard])
        if dim in axes:
            return Part(_OVER_DEVICES[eqn.primitive.name](value, self.axes))
        return Part(value, dim - sum(axis < dim for axis in axes))  # axes before it are gone

    def _broadcast(self, eqn: Equation, part: Part) -> Part:
        # Axis i of the operand becomes axis broadcast_dimensions[i] of the result. The shape in the
        # equation is that of the whole result; along the divided axis it becomes the shard's.
        dim = eqn.params["broadcast_dimensions"][part.dim]
        shape = list(eqn.params["shape"])
        shape[dim] = part.value.shape[part.dim]
        dimensions = eqn.params["broadcast_dimensions"]
        return Part(lax.broadcast_in_dim(part.value, shape, dimensions), dim)

    def _transpose(self, eqn: Equation, part: Part) -> Part:
        permutation = eqn.params["permutation"]
        return Part(lax.transpose(part.value, permutation), permutation.index(part.dim))

    def _branches(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        """A `lax.cond` or `switch` whose index every device holds.

        All branches must return a result in one way, but one may return a shard where another
        returns a whole value, such as zeros. So they are traced twice: first to see along which
        axis each returns a result, then so that a result that any branch divides is divided by all.
        """
        (index, *others), dims = operands, []

        def branch(body: Jaxpr, dims_of_all: list[int | None] | None) -> Callable[..., Any]:
            """The function of a body; without `dims_of_all` it appends its axes to `dims`."""

            def run(*values: Any) -> list[Any]:
                inputs = [Part(v, p.dim) for v, p in zip(values, others, strict=True)]
                outputs = self.run(body, inputs)
                if dims_of_all is None:
                    dims.append([part.dim for part in outputs])
                    return [part.value for part in outputs]
                return [
                    mark_varying(part.value, self.axes)
                    if part.dim is not None
                    else take_own_shard(part.value, dim, self.axes)
                    for part, dim in zip(outputs, dims_of_all, strict=True)
                ]

            return run

        # eval_shape runs nothing; only `dims` is wanted of it.
        values = [part.value for part in others]
        bodies = reading.bodies_of(eqn)
        for body in bodies:
            jax.eval_shape(branch(body, None), *values)
        agreed = [
            next((d for d in each if d is not None), None) for each in zip(*dims, strict=True)
        ]
        results = lax.switch(index.value, [branch(body, agreed) for body in bodies], *values)
        return [Part(value, dim) for value, dim in zip(results, agreed, strict=True)]
