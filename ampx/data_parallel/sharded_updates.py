"""Runs a function of whole arrays where each device holds but a shard of them.

The function is traced as if all were whole. What is computed element by element is computed on
shards; what sums over a divided axis is summed over the devices too, so that a norm is that of the
whole array. Anything else that touches a shard is refused: nothing is computed on a part in the
belief that it is the whole.
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

# How a reduction over a divided axis goes on over the devices.
_OVER_DEVICES: dict[str, Callable[..., Any]] = {
    "reduce_sum": lax.psum,
    "reduce_max": lax.pmax,
    "reduce_min": lax.pmin,
    "reduce_and": lambda x, axes: lax.pmin(x.astype(jnp.int32), axes).astype(x.dtype),
    "reduce_or": lambda x, axes: lax.pmax(x.astype(jnp.int32), axes).astype(x.dtype),
}


class Part(NamedTuple):
    """A value and the axis along which the devices hold shards of it; None: all hold the whole."""

    value: Any
    dim: int | None = None


def shard_dim(shape: Sequence[int], count: int) -> int | None:
    """The axis along which an array of this shape is divided: the longest that can be, or None."""
    divisible = [dim for dim, size in enumerate(shape) if size and size % count == 0]
    return max(divisible, key=lambda dim: (shape[dim], -dim)) if divisible else None


def own_shard(value: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    """This device's shard of an array that every device holds whole."""
    if dim is None:
        return value
    size = value.shape[dim] // count_devices(axes)
    return lax.dynamic_slice_in_dim(
        mark_varying(value, axes), lax.axis_index(axes) * size, size, dim
    )


def partitioned(
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
    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Part]) -> list[Part]:
        def apply(eqn: Equation, operands: list[Part]) -> Sequence[Part]:
            with eqn.ctx.manager:
                return self._apply(eqn, operands)

        return folds.fold(jaxpr, inputs, apply, constant=Part)

    def _apply(self, eqn: Equation, operands: Sequence[Part]) -> Sequence[Part]:
        name = eqn.primitive.name
        if name in primitives.CALLS | primitives.CUSTOM_RULES:
            (body,) = reading.bodies_of(eqn)
            return self.run(body, operands)
        if all(part.dim is None for part in operands):
            return [Part(value) for value in reading.bound(eqn, [p.value for p in operands])]
        if name in primitives.ELEMENTWISE:
            return self._elementwise(eqn, operands)
        if name in primitives.PLACEMENTS:  # of a whole array; a shard lies where it is
            return operands
        if name == "optimization_barrier":
            return self._barrier(eqn, operands)
        if name in _OVER_DEVICES:
            ((value, dim),) = operands
            return [self._reduced(eqn, value, dim)]
        if name == "broadcast_in_dim":
            return [self._broadcast(eqn, operands[0])]
        if name == "transpose":
            return [self._transposed(eqn, operands[0])]
        if name == "cond" and operands[0].dim is None:
            return self._branches(eqn, operands)
        raise NotImplementedError(
            f"{name} ({source_info.line_of(eqn)}) cannot be computed on shards: zero1 is for "
            "transformations that are elementwise, with norms and other reductions; take this one "
            "out of zero1, to run on whole gradients"
        )

    def _elementwise(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        dim = max(part.dim for part in operands if part.dim is not None)

        def aligned(part: Part) -> Any:
            whole = part.dim is None and jnp.ndim(part.value) and part.value.shape[dim] != 1
            if part.dim not in (dim, None):
                raise NotImplementedError(
                    f"{eqn.primitive.name} ({source_info.line_of(eqn)}) takes shards along axes "
                    f"{part.dim} and {dim}"
                )
            value = own_shard(part.value, dim, self.axes) if whole else part.value
            return mark_varying(value, self.axes)

        return [Part(value, dim) for value in reading.bound(eqn, [aligned(p) for p in operands])]

    def _barrier(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        # Result i is operand i. All operands of a barrier must vary over the same axes, and shards
        # vary where whole values do not: each kind gets a barrier of its own.
        results = list(operands)
        for is_shard in (True, False):
            places = [i for i, part in enumerate(operands) if (part.dim is not None) == is_shard]
            values = reading.bound(eqn, [operands[i].value for i in places]) if places else []
            for i, value in zip(places, values, strict=True):
                results[i] = Part(value, operands[i].dim)
        return results

    def _reduced(self, eqn: Equation, shard: Any, dim: Any) -> Part:
        axes = eqn.params["axes"]
        (value,) = reading.bound(eqn, [shard])
        if dim in axes:
            return Part(_OVER_DEVICES[eqn.primitive.name](value, self.axes))
        return Part(value, dim - sum(axis < dim for axis in axes))

    def _broadcast(self, eqn: Equation, part: Part) -> Part:
        dim = eqn.params["broadcast_dimensions"][part.dim]
        shape = list(eqn.params["shape"])
        shape[dim] = part.value.shape[part.dim]
        dimensions = eqn.params["broadcast_dimensions"]
        return Part(lax.broadcast_in_dim(part.value, shape, dimensions), dim)

    def _transposed(self, eqn: Equation, part: Part) -> Part:
        permutation = eqn.params["permutation"]
        return Part(lax.transpose(part.value, permutation), permutation.index(part.dim))

    def _branches(self, eqn: Equation, operands: Sequence[Part]) -> list[Part]:
        (index, *others), dims = operands, []

        def branch(body: Jaxpr, dims_of_all: list[int | None] | None) -> Callable[..., Any]:
            def run(*values: Any) -> list[Any]:
                inputs = [Part(v, p.dim) for v, p in zip(values, others, strict=True)]
                outputs = self.run(body, inputs)
                if dims_of_all is None:
                    dims.append([part.dim for part in outputs])
                    return [part.value for part in outputs]
                return [
                    mark_varying(part.value, self.axes)
                    if part.dim is not None
                    else own_shard(part.value, dim, self.axes)
                    for part, dim in zip(outputs, dims_of_all, strict=True)
                ]

            return run

        values = [part.value for part in others]
        bodies = reading.bodies_of(eqn)
        for body in bodies:
            jax.eval_shape(branch(body, None), *values)
        agreed = [
            next((d for d in each if d is not None), None) for each in zip(*dims, strict=True)
        ]
        results = lax.switch(index.value, [branch(body, agreed) for body in bodies], *values)
        return [Part(value, dim) for value, dim in zip(results, agreed, strict=True)]
