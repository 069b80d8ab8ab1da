"""`ampx.all_reduce`: the reduction of gradients as one link of an optax chain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ampx.data_parallel.reduction import Op, make_reduction
from ampx.data_parallel.reduction_states import ReductionState
from ampx.model_axes import as_model_axes, find_own_axes
from ampx.overwritten import refuse_overwritten
from ampx.tree_checks import check_arrays, refuse_shards

# In a chain, what follows would train these leaves. So no maximum is taken here.
_FIX = (
    "Use ampx.train_step(axis_name=...); or take gradients by ampx.value_and_grad(axis_name=...), "
    "which takes the maximum over devices, and leave all_reduce out of the optimizer"
)


def all_reduce(
    axis_name: str | Sequence[str],
    *,
    op: Op = "mean",
    reduce_dtype: DTypeLike = jnp.float32,
    wire_dtype: DTypeLike | None = None,
    bucket_bytes: int | None = None,
    tail_overlap: bool | None = None,
    gradient_predivide_factor: float | None = None,
    hierarchical: bool = False,
    group_of: Callable[[str, Any], Hashable] | None = None,
    order: Sequence[int] | None = None,
    model_axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Reduces gradients over mapped axes, as one link of an optax chain.

    Inside `shard_map`, gradients are each device's own, and one all-reduce for each bucket sums
    them, once a step however many micro-batches there were. Inside a loss scale the verdict comes
    from the local gradients, and the buckets wait for it: name the axes there too, as in
    `dynamic_loss_scale(optax.chain(all_reduce("data"), optax.adamw(1e-3)), axis_names="data")`.

    Args:
      axis_name: the mapped axes that the batch is split over.
      op: `"mean"` for gradients of each device's mean loss; `"sum"` for those of
        `ampx.value_and_grad(axis_name=...)`, which are divided by the weight of all devices. Where
        a loss scale around this is given the whole `ampx.GradResult`, and `check_vma` is on, these
        are summed with either.
      reduce_dtype: half gradients are widened to this before they are summed. float64 stays.
      wire_dtype: with bfloat16, terms and sum travel in it and are added in `reduce_dtype`: half
        the bytes, and an error of at most 2**-7 of the sum of the terms' magnitudes.
      bucket_bytes: see `ampx.bucket_layout`.
      tail_overlap: make each bucket wait for the one before it, so that XLA keeps them apart and
        the first parameters can be updated before the last bucket has arrived. Off, XLA may merge
        them. None: on, except on CPUs, where nothing runs beside a reduction.
        `ampx.check_overlap` tells whether the rest of a step lets them.
      gradient_predivide_factor: a mean divides by this before the sum and by the rest after it.
        None: by all of the devices before, so that a sum of finite gradients is finite.
      hierarchical: with axes such as `("host", "device")`: scatter over the inner ones, sum over
        the first, gather over the inner ones, so that slow links carry 1/n.
      group_of: see `ampx.bucket_layout`.
      order: see `ampx.bucket_layout`.
      model_axes: the mapped axes over which parameters are divided, see `ampx.train_step`. Where
        one of them is in `axis_name`, as with experts on devices that hold parts of the batch too,
        gradients of the parameters that are divided over it are not summed over it. With
        `check_vma=True` types of the parameters tell it, if `update` is given them.

    Returns:
      An optax transformation, the same for one device, many, and many processes.

    Raises:
      NameError: in `update`, outside of a `shard_map` that maps the axes. Under plain jit gradients
        are global and JAX reduces them, except along Explicit axes where they are unreduced: these
        are reduced here, one by one.
      ValueError: in `update`, for gradients that are reduced already; for an unknown `op`,
        `hierarchical` with one axis, or options that exclude each other.
      TypeError: in `update`, for the mean of integers.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704; Horovod's
      `gradient_predivide_factor`.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> tx = optax.chain(ampx.all_reduce("data"), optax.sgd(1.0))
      >>> def step(w, x):
      ...     grads = ampx.value_and_grad(lambda w, x: jnp.mean(w * x))(w, x).grads
      ...     updates, _ = tx.update(grads, tx.init(w), w)
      ...     return w + updates
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> step = jax.shard_map(
      ...     step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
      ... )
      >>> print(jax.jit(step)(jnp.array(3.0), jnp.ones(4)))
      2.0
    """
    reduction = make_reduction(
        axis_name,
        op=op,
        reduce_dtype=reduce_dtype,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
        tail_overlap=tail_overlap,
        gradient_predivide_factor=gradient_predivide_factor,
        hierarchical=hierarchical,
        group_of=group_of,
        order=order,
    )

    divided = as_model_axes(model_axes)

    # Nothing is kept from step to step; the state is there to tell what the last update sent.
    def init(params: optax.Params) -> ReductionState:
        return reduction.state()

    # Extra arguments may be handed down. `overflow` is the verdict of a loss scale around this, for
    # which the first bucket waits. `reduce_op` overrides `op`: code that makes gradients knows
    # whether they were divided already. So may `shared_loss_axes`, see `Reduction.with_op`.
    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        overflow: jax.Array | None = None,
        reduce_op: Op | None = None,
        shared_loss_axes: Sequence[str] = (),
        model_axes: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, ReductionState]:
        check_arrays("updates", updates)
        refuse_shards("updates", updates)
        refuse_overwritten("updates", updates, _FIX)
        axes = as_model_axes(model_axes, divided)
        own_axes = find_own_axes(updates, params, axes)
        chosen = reduction.with_op(reduce_op, shared_loss_axes)
        return chosen.reduce(updates, overflow, own_axes)

    return optax.GradientTransformationExtraArgs(init, update)
