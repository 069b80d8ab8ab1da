"""Gradients that are reduced where the backward pass makes them, not after it.

An identity with a derivative of its own: forward it returns the parameter, backward it sums the
parameter's gradient over devices before it hands it on.

    forward     w ──────────────► layer
    backward    psum(g) ◄── g ◄── layer     the sum of this layer runs beside the backward pass of
                                            the layers before it

`ampx.all_reduce` begins only when the whole backward pass is done, since the verdict needs all
local gradients. Here communication hides behind the backward pass as well, at two prices: the
verdict sees reduced gradients, and each leaf is reduced by itself, without buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ampx.mesh_axes import (
    add_over_devices,
    as_axes,
    count_devices,
    mark_varying,
    varying_axes,
)
from ampx.overwritten import take_largest
from ampx.tree_checks import check_arrays, check_like
from ampx.trees import (
    at_path,
    is_float0,
    is_floating,
    is_overwritten,
    keep_finite,
    widen,
)


def reduce_in_backward(params: Any, axis_name: str | Sequence[str], accumulator: Any = None) -> Any:
    """Marks parameters, so that their gradients are summed over devices as soon as they are known.

    Call it inside the loss, on what a layer reads: on all parameters, or inside a scan over layers
    on the slice of one. The sum then starts in the backward pass while earlier layers are still at
    work. Everything else, the verdict too, sees reduced gradients; so leave out `ampx.all_reduce`.

    Called in every micro-batch it reduces in every one. Sum all micro-batches but the last without
    it, and give the sum to the last as `accumulator`: one reduction, of the whole.

    Args:
      params: a pytree of parameters.
      axis_name: the mapped axes that the batch is split over.
      accumulator: a tree like `params` of sums from earlier micro-batches, added to the gradient
        before it is reduced; float32, or wider than the parameters.

    Returns:
      `params`. Their gradients are sums over the devices, in the dtype of the parameters: for half
      parameters cast to half inside the loss, after this. Of leaves whose gradient is their new
      value, as flax's layers in 8 bits have them, the gradient is the largest of the devices.

    Raises:
      NameError: outside of a `shard_map` that maps the axes.
      TypeError: for what is no array.
      ValueError: if `accumulator` has another structure or other shapes than `params`, or the
        parameters vary over the axes already, as those do that `ampx.value_and_grad(axis_name=...)`
        gives to a loss: take `jax.value_and_grad` of each device's share of the loss instead.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704; accumulators that are added
      before the reduction: pytorch#125484.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> def loss(w, x):
      ...     return jnp.mean(ampx.reduce_in_backward(w, "data") * x)
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
      >>> print(jax.jit(grad)(jnp.array(2.0), jnp.arange(4.0)))
      1.5
    """
    axes = as_axes(axis_name)
    count_devices(axes)  # raises where they are not mapped
    check_arrays("params", params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if varying_axes(leaf) & set(axes):
            raise ValueError(
                f"the parameter{at_path(path)} may differ over {axes}, so that "
                "its gradient is each device's own: take jax.value_and_grad of each device's share "
                "of the loss, with parameters that are the same everywhere"
            )
    if accumulator is not None:
        check_arrays("accumulator", accumulator)
        check_like("accumulator", accumulator, "params", params)

    def reduce(path: Any, leaf: Any, added: Any = None) -> Any:
        return _make_identity(axes, is_overwritten(path))(leaf, added)

    trees = (params,) if accumulator is None else (params, accumulator)
    return jax.tree_util.tree_map_with_path(reduce, *trees)


def _make_identity(axes: tuple[str, ...], takes_largest: bool) -> Any:
    """An identity whose cotangent is summed over `axes`, an accumulator added before.

    Or, for a leaf whose cotangent is its new value (`ampx.overwritten`), the largest is taken.
    """

    # Forward it must return a value that varies over the axes. With `check_vma=True` JAX itself
    # sums the cotangent of a value that does not, and the sum below would count it n times.
    @jax.custom_vjp
    def identity(leaf: Any, added: Any) -> Any:
        return mark_varying(leaf, axes)

    def forward(leaf: Any, added: Any) -> Any:
        return identity(leaf, added), (leaf if takes_largest else None, added)

    def backward(kept: Any, cotangent: Any) -> Any:
        old, added = kept
        # The accumulator is data: nobody differentiates by it, but custom_vjp wants a cotangent.
        none = None if added is None else jnp.zeros_like(added)
        if is_float0(cotangent) or not is_floating(cotangent):
            return cotangent, none
        if takes_largest:
            new = keep_finite(cotangent, old)
            return take_largest(new if added is None else jnp.maximum(new, added), axes), none
        wide = widen(cotangent)  # summed in float32
        if added is not None:
            wide = wide + added.astype(wide.dtype)
        return add_over_devices(mark_varying(wide, axes), axes).astype(cotangent.dtype), none

    identity.defvjp(forward, backward)
    return identity
