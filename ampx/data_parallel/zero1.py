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

Parameters may be parts already, divided over "model", "expert" or "stage". Then n is the number of
devices that hold the same part. Each part is divided as above, and with it its state:

    a parameter                 f32[12, 16]    P(None, "model"), on a mesh of data=4, model=2
    a device's part of it       f32[12, 8]     whole for the picture above
    a device's moments          f32[3, 8]      P("data", "model")

`inner` is traced with shapes of whole parameters all the same, so that its means divide by the
number of all elements.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ampx.checking import check_transformation
from ampx.data_parallel.reduction import Op, make_reduction
from ampx.data_parallel.reduction_states import ReductionState
from ampx.data_parallel.shard_exchange import ShardExchange
from ampx.data_parallel.shard_layouts import WHOLE, ShardLayout, layout_of_spec, match_parameters
from ampx.data_parallel.sharded_updates import Part, convert_part, run_on_shards
from ampx.mesh_axes import count_devices, varying_axes
from ampx.model_axes import ModelAxes, add_over_shards, as_model_axes, axes_of_leaves
from ampx.summaries import show_fields
from ampx.trees import at_path, is_marked, leave_untrained_out, path_name
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_made_by, check_update, guard

# The axes of all that are initialized while `record_axes` asks: a state does not tell them.
_recorded_axes: ContextVar[list[tuple[str, ...]] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def record_axes() -> Iterator[list[tuple[str, ...]]]:
    """Fills a list with the axes of each `zero1` whose `init` runs inside."""
    found: list[tuple[str, ...]] = []
    token = _recorded_axes.set(found)
    try:
        yield found
    finally:
        _recorded_axes.reset(token)


class Zero1State(NamedTuple):
    """The state of `ampx.zero1`.

    Attributes:
      reduction: what the last update handed to its reduce-scatters, and to the all-reduces of
        parameters that are not divided; see `ReductionState`. Nothing, if gradients came as
        `GradientShard` leaves. The gather of the updates, which travel in their own dtype, is not
        in it.
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

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    holds_shards = True  # of the inner state, inside `shard_map`
    takes_gradient_shards = True  # see `tree_checks.check_gradients`


def zero1(
    inner: optax.GradientTransformation,
    axis_name: str | Sequence[str],
    *,
    op: Op = "mean",
    reduce_dtype: DTypeLike = jnp.float32,
    bucket_bytes: int | None = None,
    model_axes: Any = None,
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

    Parameters may be divided over further mapped axes, such as "model" or "stage". Their state is
    divided over `axis_name` in addition, norms and other sums run over all parts, and a parameter
    that the devices along "model" share counts once. With `check_vma=True` types say which
    parameters are divided. With `check_vma=False`, and in `vmap`, name the axes as `model_axes`.
    Adafactor and others that sum over some axes of an array and not over all need to know which
    of them is divided: give them a tree of `PartitionSpec` in both cases. So do experts that are
    divided over one of `axis_name`: they are summed and divided over the others alone.

    Gradients may be `GradientShard` leaves, as `ampx.value_and_grad(scatter_gradients=True)` makes
    them: that is ZeRO-2.

    Args:
      inner: an optax transformation.
      axis_name: the mapped axes that state and update are divided over; the batch is split over
        them. If `ampx.train_step(axis_name=...)` names more axes, shards of gradients are summed
        over those, too: state divided within a host, and repeated on each host, for example.
      op: see `ampx.all_reduce`.
      reduce_dtype: see `ampx.all_reduce`.
      bucket_bytes: see `ampx.bucket_layout`.
      model_axes: further axes over which parameters are divided: a name or names, for every
        parameter; or a tree prefix of the parameters of `PartitionSpec`s, names and None, such as
        their in_specs. Where types tell (`check_vma=True`) they decide, and specs only tell which
        axis of an array is divided. None: what `ampx.train_step` was given, or nothing.

    Returns:
      An optax transformation whose state is a `Zero1State`, for use inside `shard_map`.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or `model_axes` names no axes.
      NameError: in `update`, outside of `shard_map`.
      ValueError: in `update`, without parameters, for gradients that are reduced already, for a
        state that is not sharded, for a parameter that differs along `axis_name` by its type and
        not by `model_axes`, or if `train_step` names fewer axes than `zero1`.
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
    axes, own_setting = reduction.axes, as_model_axes(model_axes)

    # Whole shapes: `jax.jit(tx.init, out_shardings=...)` divides them as `zero1_specs` says.
    def init(params: optax.Params) -> Zero1State:
        if (recorded := _recorded_axes.get()) is not None:
            recorded.append(axes)
        return Zero1State(reduction.state(), inner.init(params), jnp.zeros((), jnp.float32))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        overflow: jax.Array | None = None,
        reduce_op: Op | None = None,
        reduce_axes: Sequence[str] | None = None,
        shared_loss_axes: Sequence[str] = (),
        model_axes: ModelAxes | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Zero1State]:
        if params is None:
            raise ValueError("zero1 needs the parameters: tx.update(grads, state, params)")
        params = leave_untrained_out(params, updates)
        check_update("zero1", Zero1State, updates, state, params)
        # `train_step` hands its own setting down. `inner` gets none: it sees whole arrays.
        setting = as_model_axes(model_axes, own_setting)
        model_layouts = _model_layouts(params, setting, axes)
        own_axes = [layout.axes for layout in model_layouts]
        exchange = ShardExchange(reduction.with_op(reduce_op, shared_loss_axes), params, own_axes)
        division = _divide(inner, params, model_layouts, exchange, axes)
        _check_inner_state(state.inner_state, division)
        grads, sent = exchange.scatter(updates)
        grads, sent_beyond = exchange.sum_beyond(grads, reduce_axes)
        held = grads, state.inner_state, exchange.take_own_shards(params)
        shards, inner_state = _update_shards(inner, division, held, extra_args)
        leaves, structure = jax.tree.flatten(shards)
        result = jax.tree.unflatten(structure, exchange.gather(leaves))
        squares = [optax.tree.norm(leaf, squared=True) for leaf in jax.tree.leaves(grads)]
        norm = jnp.sqrt(add_over_shards(squares, [layout.axes for layout in division.layouts]))
        return result, Zero1State(reduction.state([*sent, *sent_beyond]), inner_state, norm)

    return optax.GradientTransformationExtraArgs(init, update)


class _Division(NamedTuple):
    """How parameters and the state of `inner` are divided.

    Attributes:
      layouts: of each leaf of the parameters, in the end: over "model" and by `zero1`.
      state_layouts: of each leaf of the state.
      sizes: of all mapped axes that are in a layout.
      whole_params: the shapes with which `inner` is traced: whole ones, with all that "model" has
        divided.
      whole_state: what a checkpoint holds, as shapes: nothing is allocated for it.
    """

    layouts: list[ShardLayout]
    state_layouts: list[ShardLayout]
    sizes: dict[str, int]
    whole_params: Any
    whole_state: Any


def _divide(
    inner: optax.GradientTransformation,
    params: Any,
    model_layouts: Sequence[ShardLayout],
    exchange: ShardExchange,
    axes: Sequence[str],
) -> _Division:
    """Divides parameters, which `model_layouts` has divided, by the axes of `zero1` as well."""
    all_axes = itertools.chain(axes, *(layout.axes for layout in model_layouts))
    sizes = {axis: count_devices([axis]) for axis in all_axes}
    layouts = [
        layout.divided_by(left, dim)
        for layout, left, dim in zip(model_layouts, exchange.axes, exchange.dims, strict=True)
    ]
    whole_params = _whole_shapes(params, model_layouts, sizes)
    whole_state = jax.eval_shape(inner.init, whole_params)
    layout_of = match_parameters(whole_params, layouts)
    _refuse_blocks(whole_state, layout_of)
    with_paths = jax.tree_util.tree_leaves_with_path(whole_state)
    state_layouts = [layout_of(path, leaf.shape) for path, leaf in with_paths]
    return _Division(layouts, state_layouts, sizes, whole_params, whole_state)


def _update_shards(
    inner: optax.GradientTransformationExtraArgs,
    division: _Division,
    held: tuple[Any, Any, Any],
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs `inner.update` on what this device holds of gradients, state and parameters."""

    # The extra arguments are constants of the trace: values that every device holds whole.
    def update(grads: Any, inner_state: Any, params: Any) -> Any:
        about = {**extra_args, "grad": grads} if "grad" in extra_args else extra_args
        return inner.update(grads, inner_state, params, **about)

    layouts, state_layouts, _, whole_params, whole_state = division
    # Gradients and state may have other dtypes than parameters, and than `init` gives the state.
    whole = (
        _with_dtypes(whole_params, held[0]),
        _with_dtypes(whole_state, held[1]),
        whole_params,
    )
    held_layouts = (*layouts, *state_layouts, *layouts)
    parts, structure = run_on_shards(
        update, whole, list(map(Part, jax.tree.leaves(held), held_layouts))
    )
    # An update that does not depend on the gradient comes out whole, for example zeros.
    results = [
        convert_part(part, layout, "the result of the transformation inside zero1")
        for part, layout in zip(parts, [*layouts, *state_layouts], strict=True)
    ]
    return jax.tree.unflatten(structure, results)


def _whole_shapes(parts: Any, layouts: Sequence[ShardLayout], sizes: Mapping[str, int]) -> Any:
    """The whole shapes of a tree of parts."""
    leaves, structure = jax.tree.flatten(parts)
    shapes = [
        jax.ShapeDtypeStruct(layout.whole_shape(jnp.shape(leaf), sizes), leaf.dtype)
        for leaf, layout in zip(leaves, layouts, strict=True)
    ]
    return jax.tree.unflatten(structure, shapes)


def _with_dtypes(shapes: Any, like: Any) -> Any:
    """The same shapes with the structure and the dtypes of another tree."""
    kinds, structure = jax.tree.flatten(like)
    pairs = zip(jax.tree.leaves(shapes), kinds, strict=True)
    return jax.tree.unflatten(
        structure, [jax.ShapeDtypeStruct(leaf.shape, kind.dtype) for leaf, kind in pairs]
    )


def _model_layouts(params: Any, setting: ModelAxes, axes: Sequence[str]) -> list[ShardLayout]:
    """How each parameter is divided before `zero1` divides it over the rest of `axes`.

    Raises:
      ValueError: for a parameter whose type says that it may differ along `axes` where the setting
        does not, since a pcast makes such of any; and for a scalar that differs between the devices
        along some axis: the whole of which it is a part has no shape.
    """
    layouts = []
    of_leaves = axes_of_leaves(params, setting)
    with_paths = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), further in zip(with_paths, of_leaves, strict=True):
        name = path_name(path)
        if unnamed := sorted(varying_axes(leaf) & set(axes) - set(setting.of_path(name))):
            raise ValueError(
                f"the parameter{at_path(path)} may differ along {unnamed} by its type, "
                "and zero1 is for parameters that are the same along its axes. If they divide this "
                "one, as they do experts, name them for it in model_axes. Otherwise give zero1 the "
                "parameters as they were before any lax.pcast"
            )
        if further and not jnp.ndim(leaf):
            raise ValueError(
                f"the parameter{at_path(path)} is a scalar that is divided over "
                f"{further}: give it an axis, so that it has shape (1,) on each device, or name "
                "its axes as None in model_axes if all devices hold the same"
            )
        layouts.append(layout_of_spec(setting.spec_of_path(name), further, jnp.ndim(leaf)))
    return layouts


def _refuse_blocks(state: Any, layout_of: Callable[[Any, Sequence[int]], ShardLayout]) -> None:
    """Refuses moments of 8 bits of a parameter that is divided: a shard would cut their blocks.

    Raises:
      NotImplementedError: for the first.
    """

    def is_blocks(node: Any) -> bool:
        return is_marked(node, "stores_blocks")

    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_blocks):
        if is_blocks(node) and layout_of(path, node.codes.shape) != WHOLE:
            raise NotImplementedError(
                f"the moment{at_path(path)} is stored in 8 bits, in blocks that zero1 would "
                "cut: give the optimizer inside it mu_dtype=jnp.bfloat16, and second moments in "
                "float32, since those in bfloat16 stand still with b2=0.999. Under plain jit "
                "shardings divide moments of 8 bits, too"
            )


def _check_inner_state(state: Any, division: _Division) -> None:
    """Refuses a state of another structure, and one that is not divided.

    The second was given to `shard_map` without its specs.
    """
    maker = "init(params) of the same transformation"
    check_made_by("ampx.zero1", maker, division.whole_state, state, shapes=False)
    paths = jax.tree_util.tree_leaves_with_path(state)
    likes = jax.tree.leaves(division.whole_state)
    for (path, leaf), like, layout in zip(paths, likes, division.state_layouts, strict=True):
        expected = layout.part_shape(like.shape, division.sizes)
        if jnp.shape(leaf) != expected:
            count = math.prod(division.sizes[axis] for axis in layout.axes)
            raise ValueError(
                f"the state{at_path(path)} has shape {jnp.shape(leaf)} on this device, "
                f"expected {expected}, 1/{count} of {like.shape}: give shard_map the specs of "
                "ampx.zero1_specs(tx, params, mesh) for the state, in and out. Where parameters "
                "are divided over further axes, it and zero1 need their specs as model_axes"
            )
