"""ZeRO-1: each device keeps and updates its share of the optimizer's state.

For n devices that hold the same parameters, one update goes

    gradients     each device's own, whole      f32 or narrower
        │  reduce-scatter, by the bucket        (`shard_exchange`)
    gradients     1/n of each leaf, summed
        │  inner.update on shards of gradients, state and parameters   (`sharded_updates`)
    updates       1/n of each leaf              the state stays divided: it never travels
        │  all-gather, by the bucket            (`shard_exchange`)
    updates       whole, the same everywhere

A reduce-scatter and an all-gather move the bytes of one all-reduce, so the memory of the moments is
divided by n at no cost in traffic.

Leaves are divided, not flat buffers: the shards of a flat buffer would need padding that depends on
the number of devices, and with it the layout of checkpoints. So outside of `shard_map` every array
of the state has the shape that `inner` gave it, whatever n is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ampx.checking import check_transformation
from ampx.data_parallel.reduction import (
    Op,
    ReductionState,
    make_reduction,
)
from ampx.data_parallel.shard_exchange import ShardExchange
from ampx.data_parallel.sharded_updates import Part, choose_shard_dim, run_on_shards, take_own_shard
from ampx.mesh_axes import as_axes, check_axes_of_mesh
from ampx.tree_checks import check_arrays
from ampx.trees import find_nodes, path_name
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_made_by, check_update, guard


class Zero1State(NamedTuple):
    """The state of `ampx.zero1`.

    Attributes:
      reduction: what the last update handed to its reduce-scatters, and to the all-reduces of
        parameters that are not divided; see `ReductionState`. The gather of the updates, which
        travel in their own dtype, is not in it.
      inner_state: the state of the wrapped transformation, in the shapes and dtypes that it has
        without sharding: outside of `shard_map` whole arrays, inside this device's shards.
      gradient_norm: float32 scalar, norm of the reduced gradients that the last update took; 0
        before the first.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> ampx.zero1(optax.adam(1e-3), "data").init(jnp.ones(4)).inner_state[0].mu.shape
      (4,)
    """

    reduction: ReductionState
    inner_state: Any
    gradient_norm: jax.Array

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    holds_shards = True  # of the inner state, inside `shard_map`


def zero1(
    inner: optax.GradientTransformation,
    axis_name: str | Sequence[str],
    *,
    op: Op = "mean",
    reduce_dtype: DTypeLike = jnp.float32,
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shards the state and the update of an optimizer over devices that hold the same parameters.

    Use it in the place of `ampx.all_reduce` and an optimizer. Gradients are reduce-scattered, each
    device updates its shard of every parameter with its shard of the moments, and the updates are
    gathered, bucket by bucket. The bytes on the wire are those of an all-reduce; the state takes
    1/n of the memory.

    `inner` may be any transformation that works element by element and by reductions: AdamW, LAMB,
    `clip_by_global_norm`, `ampx.master_weights`, schedules. It is traced as if it saw whole arrays,
    and its sums over a parameter are completed over the devices, so that norms are those of the
    whole. An operation that cannot be computed on shards, such as a matrix product, is refused.
    Clipping belongs inside: before `zero1` gradients are each device's own.

    A parameter is divided along its longest axis that n divides; one without such an axis is
    updated on every device. The state keeps the shapes that `inner` gives it, so a checkpoint does
    not know how many devices there were. Give it its shardings with `ampx.zero1_specs`.

    Args:
      inner: an optax transformation.
      axis_name: the mapped axes that the batch is split over.
      op: see `ampx.all_reduce`.
      reduce_dtype: see `ampx.all_reduce`.
      bucket_bytes: see `ampx.bucket_layout`.

    Returns:
      An optax transformation whose state is a `Zero1State`, for use inside `shard_map`.

    Raises:
      TypeError: if `inner` is not a gradient transformation.
      NameError: in `update`, outside of `shard_map`.
      ValueError: in `update`, without parameters, for gradients that are reduced already, or for a
        state that is not sharded.
      NotImplementedError: in `update`, for an operation that shards do not allow.

    References:
      Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054.

    Examples:
      >>> import ampx, functools, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> tx = ampx.zero1(optax.adamw(0.1), "data")
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> w = jnp.ones(4)
      >>> specs = ampx.zero1_specs(tx, w, mesh)
      >>> def step(w, state, x):
      ...     grads = ampx.value_and_grad(lambda w, x: jnp.mean((w * x) ** 2), axis_name="data")
      ...     updates, state = tx.update(grads(w, x).grads, state, w)
      ...     return w + updates, state
      >>> step = jax.jit(
      ...     jax.shard_map(
      ...         step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
      ...     )
      ... )
      >>> w, state = step(w, tx.init(w), jnp.ones((8, 4)))
      >>> w.shape, bool(jnp.allclose(w, 0.9, atol=1e-4))
      ((4,), True)
    """
    check_transformation("inner", inner)
    inner = guard("zero1", accept_extra_args(inner))
    reduction = make_reduction(
        axis_name, op=op, reduce_dtype=reduce_dtype, bucket_bytes=bucket_bytes, tail_overlap=False
    )
    axes = reduction.axes

    # Whole shapes: `jax.jit(tx.init, out_shardings=...)` divides them as `zero1_specs` says.
    def init(params: optax.Params) -> Zero1State:
        return Zero1State(reduction.state(), inner.init(params), jnp.zeros((), jnp.float32))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        overflow: jax.Array | None = None,
        reduce_op: Op | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Zero1State]:
        if params is None:
            raise ValueError("zero1 needs the parameters: tx.update(grads, state, params)")
        check_update("zero1", Zero1State, updates, state, params)
        exchange = ShardExchange(reduction.with_op(reduce_op), params)
        # What a checkpoint holds. Shapes alone: nothing is allocated for it.
        whole_state = jax.eval_shape(inner.init, params)
        maker = "init(params) of the same transformation"
        check_made_by("ampx.zero1", maker, whole_state, state.inner_state, shapes=False)
        state_dims = _choose_state_dims(whole_state, params, exchange.count)
        _check_state(state.inner_state, whole_state, state_dims, exchange.count)
        grads, sent = exchange.scatter(updates)
        # What this device holds of the arguments of inner.update, along which axis each leaf is
        # divided, and the whole shapes with which it is traced.
        held = (grads, state.inner_state, exchange.take_own_shards(params))
        dims = (*exchange.dims, *state_dims, *exchange.dims)
        whole = (
            _whole_shapes(updates, dtypes_of=grads),
            # An update may have given the state another dtype than `init` did.
            _whole_shapes(whole_state, dtypes_of=state.inner_state),
            _whole_shapes(params),
        )

        # The extra arguments are constants of the trace: values that every device holds whole.
        def inner_update(grads: Any, inner_state: Any, params: Any) -> Any:
            about = {**extra_args, "grad": grads} if "grad" in extra_args else extra_args
            return inner.update(grads, inner_state, params, **about)

        parts, structure = run_on_shards(
            inner_update, whole, list(map(Part, jax.tree.leaves(held), dims)), axes
        )
        count = len(exchange.dims)
        new_updates, new_state = (
            # An update that does not depend on the gradient comes out whole, for example zeros.
            [_as_divided(*pair, axes) for pair in zip(some, wanted, strict=True)]
            for some, wanted in ((parts[:count], exchange.dims), (parts[count:], state_dims))
        )
        gathered = exchange.gather(new_updates)
        result, inner_state = jax.tree.unflatten(structure, [*gathered, *new_state])
        return result, Zero1State(reduction.state(sent), inner_state, exchange.compute_norm(grads))

    return optax.GradientTransformationExtraArgs(init, update)


def _whole_shapes(tree: Any, dtypes_of: Any = None) -> Any:
    """The whole shapes of `tree`, with the dtypes of another tree if one is given."""
    dtypes_of = tree if dtypes_of is None else dtypes_of
    return jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(jnp.shape(leaf), like.dtype), tree, dtypes_of
    )


def _choose_state_dims(state: Any, params: Any, count: int) -> list[int | None]:
    """Chooses the axis along which each leaf of an optimizer state is divided.

    It is that of the parameter which the leaf belongs to. A leaf at `0/mu/dense/kernel` belongs to
    the parameter `dense/kernel`, whose path ends its own, if it has the same shape. Others, such as
    counts or factored moments of another shape, are whole on every device.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shapes.setdefault(path_name(path), []).append(jnp.shape(leaf))

    def dim_of(path: Any, leaf: Any) -> int | None:
        names = [path_name(path[i:]) for i in range(len(path) + 1)]
        own = any(jnp.shape(leaf) in shapes.get(name, ()) for name in names)
        return choose_shard_dim(jnp.shape(leaf), count) if own else None

    return [dim_of(*item) for item in jax.tree_util.tree_leaves_with_path(state)]


def _shard_shape(shape: Sequence[int], dim: int | None, count: int) -> tuple[int, ...]:
    return tuple(size // count if at == dim else size for at, size in enumerate(shape))


def _check_state(state: Any, whole: Any, dims: Sequence[int | None], count: int) -> None:
    """Refuses a state that is not divided: it was given to `shard_map` without its specs."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), like, dim in zip(paths, jax.tree.leaves(whole), dims, strict=True):
        expected = _shard_shape(like.shape, dim, count)
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"the state at {path_name(path)} has shape {jnp.shape(leaf)} on this device, "
                f"expected {expected}, 1/{count} of {like.shape}: give shard_map the specs of "
                "ampx.zero1_specs(tx, params, mesh) for the state, in and out"
            )


def _as_divided(part: Part, dim: int | None, axes: tuple[str, ...]) -> Any:
    """Converts a value to a shard along `dim`, or to the whole if that is None."""
    if part.dim == dim:
        return part.value
    if part.dim is not None:
        whole = lax.all_gather(part.value, axes, axis=part.dim, tiled=True, to="invarying")
        return take_own_shard(whole, dim, axes)
    return take_own_shard(part.value, dim, axes)


def zero1_specs(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Any,
    axis_name: str | Sequence[str] = "data",
) -> Any:
    """The partition specs of an optimizer state that holds an `ampx.zero1`.

    Args:
      tx: the whole transformation, whatever is around `zero1` in it.
      params: parameters, or their shapes and dtypes.
      mesh: the mesh of the step.
      axis_name: the axes that `zero1` was given.

    Returns:
      A tree like `tx.init(params)` of `PartitionSpec`: for the in_specs and out_specs of
      `shard_map`, and with the mesh for the shardings of `jax.jit(tx.init, out_shardings=...)`.

    Raises:
      TypeError: if `tx` is not a gradient transformation or `mesh` no mesh.
      ValueError: if there is no `zero1` in `tx`, or the mesh has no such axis.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> specs = ampx.zero1_specs(ampx.zero1(optax.adam(0.1), "data"), jnp.ones((4, 8)), mesh)
      >>> tuple(specs.inner_state[0].mu), tuple(specs.inner_state[0].count)
      ((None, 'data'), ())
    """
    check_transformation("tx", tx)
    axes = as_axes(axis_name)
    check_axes_of_mesh("axis_name", axes, mesh)
    count = math.prod(mesh.shape[axis] for axis in axes)
    check_arrays("params", params, may_be_shapes=True)
    state = jax.eval_shape(tx.init, params)
    if not find_nodes(state, Zero1State):
        raise ValueError("there is no ampx.zero1 in this transformation: its state is not divided")

    def specs_of(node: Any) -> Any:
        if not isinstance(node, Zero1State):  # around zero1: loss scales, counts
            return PartitionSpec()
        dims = iter(_choose_state_dims(node.inner_state, params, count))
        inner = jax.tree.map(lambda leaf: _spec(next(dims), axes), node.inner_state)
        everywhere: Any = PartitionSpec()
        reduction = jax.tree.map(lambda _: everywhere, node.reduction)
        return Zero1State(reduction, inner, everywhere)

    return jax.tree.map(specs_of, state, is_leaf=lambda node: isinstance(node, Zero1State))


def _spec(dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axes[0] if len(axes) == 1 else axes)
