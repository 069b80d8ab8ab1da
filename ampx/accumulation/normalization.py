"""Losses and gradients of many micro-batches turned into those of one batch.

Micro-batch i gives a loss S_i, a weight w_i, a gradient g_i = dS_i/dp and auxiliary outputs. What
comes out depends on `normalize`, where n is the number of micro-batches on all devices together:

    normalize     S_i is                    loss                    gradient        weight
    "mean"        the mean of its rows      sum(S_i) / n            sum(g_i) / n    n
    "sum"         the sum of its rows       sum(S_i)                sum(g_i)        n
    "weights"     the sum of its rows       sum(S_i) / sum(w_i)     sum(g_i) / W    W = sum(w_i)

Loss and weight are summed over devices here. Gradients are divided by the total of all devices but
stay local, so that one plain sum over devices, in buckets or not, makes them exact:

    sum_d (g_d / W)  =  (sum_d g_d) / W

`ampx.value_and_grad` and `ampx.pipelining.value_and_grad` both end in `normalize_sums`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ampx.checking import check_hyperparameter
from ampx.mesh_axes import (
    add_over_devices,
    count_devices,
    divide_sum,
    mark_varying,
    untracked_axes,
    varying_axes,
)
from ampx.trees import at_path, is_floating, widen, wider_dtype

Normalize = Literal["mean", "sum", "weights"]
AuxReduction = Literal["auto", "mean", "sum", "stack", "concat", "last"]


def unpack_output(
    out: Any, has_aux: bool, has_state: bool, name: str = "loss_fn"
) -> tuple[Any, Any, Any]:
    """Splits what a loss function returned into value, auxiliary output (or None), state (or None).

    Raises:
      TypeError: if it is not the tuple that `has_aux` and `has_state` announce; `name` is how the
        message calls the function.
    """
    if not has_aux and not has_state:
        return out, None, None
    expected = ["value", *["aux"] * has_aux, *["new state"] * has_state]
    if not isinstance(out, tuple) or len(out) != len(expected):
        found = type(out).__name__ + (f" of {len(out)}" if isinstance(out, tuple) else "")
        if isinstance(out, jax.Array):
            found = f"one array of shape {out.shape}"
        raise TypeError(
            f"{name} must return a tuple ({', '.join(expected)}), got {found}. The value is one "
            "part of it, also where it is a pair (sum of losses, sum of weights)"
        )
    return out[0], out[1] if has_aux else None, out[-1] if has_state else None


def as_scale(loss_scale: ArrayLike) -> jax.Array:
    """Converts the factor for a loss to a float32 scalar.

    Raises:
      TypeError: if it is no number.
      ValueError: if it is not a scalar. A state with several losses has a vector of scales, of
        which each loss takes its own: `ampx.current_loss_scale(opt_state, loss_id)`.
    """
    if isinstance(loss_scale, tuple | list | dict):  # a state of an optimizer is a tuple
        raise TypeError(
            f"loss_scale must be a number, got {type(loss_scale).__name__}: give "
            "ampx.current_loss_scale(opt_state)"
        )
    if np.shape(loss_scale) == ():
        check_hyperparameter("loss_scale", loss_scale, above=0, may_be_infinite=True)
    scale = jnp.asarray(loss_scale, jnp.float32)
    if scale.shape:
        raise ValueError(
            f"loss_scale must be a scalar, got shape {scale.shape}: of several losses give the "
            "scale of this one, ampx.current_loss_scale(opt_state, loss_id)"
        )
    return scale


def as_loss_and_weight(
    value: Any, normalize: Normalize, function: str = "loss_fn"
) -> tuple[jax.Array, jax.Array]:
    """Checks the value of a loss function and converts it to (loss, weight), both scalars.

    The loss is float32, or float64 if it was, before any scaling; the weight is float32, and 1
    unless `normalize="weights"`.

    Raises:
      TypeError: for a loss or weight that is not a scalar, or a loss that is not floating.
    """
    if normalize == "weights":
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(
                f"normalize='weights': {function} must return the pair (sum of losses, sum of "
                f"weights) as its value, got {type(value).__name__}"
            )
        loss, weight = value
    else:
        loss, weight = value, jnp.ones((), jnp.float32)
    for name, number in (("loss", loss), ("weight", weight)):
        if isinstance(number, tuple | list | dict):
            raise TypeError(
                f"the {name} must be a scalar, got {type(number).__name__}: pass has_aux=True, or "
                f"model_state, if {function} returns more than its loss"
            )
        is_number = hasattr(number, "dtype") or type(number) in (int, float)
        if not is_number or jnp.iscomplexobj(number):
            raise TypeError(
                f"the {name} that {function} returns must be a real number, got {number!r}"
            )
        if not (jax.tree_util.all_leaves([number]) or hasattr(number, "__jax_array__")):
            raise TypeError(
                f"the {name} must be an array, got {type(number).__name__}, which holds one: "
                "return the array that is in it"
            )
        if jnp.shape(number):
            raise TypeError(f"the {name} must be a scalar, got shape {jnp.shape(number)}")
    if not is_floating(loss):
        raise TypeError(f"the loss must be floating, got {jnp.result_type(loss)}")
    loss = jnp.asarray(loss)
    # The weight is a count that happens to be computed beside the loss. If it depended on a
    # parameter, the quotient rule would add a term that sums of gradients cannot express.
    weight = jax.lax.stop_gradient(jnp.asarray(weight).astype(jnp.float32))
    return widen(loss), weight


def normalize_sums(
    grads: Any,
    losses: jax.Array,
    weights: jax.Array,
    auxes: Any,
    normalize: Normalize,
    aux_reduction: Any,
    axes: tuple[str, ...],
    num_rows: int | None,
    rows_each: int | None,
) -> tuple[jax.Array, Any, jax.Array, Any]:
    """Divides sums over micro-batches by the total weight of all devices.

    Args:
      grads: gradients, summed over the micro-batches of this device.
      losses: float32[k], one for each micro-batch of this device.
      weights: float32[k].
      auxes: auxiliary outputs, leaves of shape (k, ...).
      normalize: what to divide by.
      aux_reduction: how auxiliary outputs become one.
      axes: mapped axes that the batch is split over. Gradients stay local.
      num_rows: rows of the batch without padding; None where there is none.
      rows_each: rows of one micro-batch; None if that is not known.

    Returns:
      Loss and weight (float32 scalars, the same on all devices), gradients of this device, and
      auxiliary output, in the order (loss, gradients, weight, auxiliary output).
    """
    own_axes = _axes_to_sum(losses, normalize, axes)
    number = losses.size * count_devices(own_axes)
    totals = (jnp.sum(losses), jnp.sum(weights) if normalize == "weights" else None)
    totals = mark_varying(totals, own_axes)
    # By these scopes the linter knows what must not be a sum over devices yet: no type tells of a
    # weight, nor without `check_vma` of a loss. A mean divides what was summed.
    is_sum = normalize != "mean" and own_axes
    with jax.named_scope("ampx.loss_total") if is_sum else contextlib.nullcontext():
        loss = jax.lax.psum(totals[0], own_axes)
    with jax.named_scope("ampx.weight_total") if is_sum else contextlib.nullcontext():
        weight = jax.lax.psum(totals[1], own_axes)
    if weight is None:
        # Known while tracing: XLA may turn a division by a constant into a product, and products
        # are what it fuses and recomputes.
        weight = divisor = jnp.float32(number)
    else:
        divisor = jnp.where(weight == 0, 1.0, weight)

    def divide(total: jax.Array) -> jax.Array:
        if not is_floating(total):
            return total
        if normalize == "mean" and number == 1:
            return total  # no operation at all: the gradients of one batch stay bit for bit
        mean = divide_sum(total, number if normalize == "mean" else divisor.astype(total.dtype))
        if normalize == "mean":
            return mean
        # Without any weight the sum may be anything, NaN included, and what is wanted is zero.
        return jnp.where(weight == 0, jnp.zeros_like(mean), mean)

    kinds = choose_aux_reductions(aux_reduction, auxes, rows_each)
    # Auxiliary outputs are each device's own, also where the loss is not.
    of_all = divisor * count_devices([axis for axis in axes if axis not in own_axes])
    aux = reduce_aux(auxes, weights, of_all, kinds, axes, num_rows)
    if normalize != "sum":
        loss = divide(loss)
        # The linter knows by this scope that a sum over devices is due, and not a mean.
        with jax.named_scope("ampx.share") if axes else contextlib.nullcontext():
            grads = jax.tree.map(divide, grads)
    return loss, grads, weight, aux


def _axes_to_sum(losses: jax.Array, normalize: Normalize, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The mapped axes over which the losses of devices are still to be summed.

    Many programs average inside of the loss, by `lax.pmean`, and types tell it. Then each device
    has the loss of all: its gradient is this device's part of the exact one, as it is to be. Under
    `check_vma=False` nothing tells it, and JAX sums what the devices differentiate: the mean over
    devices divides that sum.

    Raises:
      ValueError: for losses that are not to be averaged. Of a weight that is the same on all
        devices nobody knows whether it is that of one or of all, and a sum of means is neither.
    """
    found = {*untracked_axes(axes), *varying_axes(losses)}
    own_axes = tuple(axis for axis in axes if axis in found)
    if own_axes != axes and normalize != "mean":
        summed = [axis for axis in axes if axis not in own_axes]
        raise ValueError(
            f"the loss is the same on all devices along {summed}, over which normalize="
            f"{normalize!r} sums: leave the psum or pmean out of loss_fn, and return the sum of "
            "the rows of this device"
        )
    return own_axes


def choose_aux_reductions(reduction: Any, auxes: Any, rows_each: int | None) -> Any:
    """What becomes of each auxiliary output, with `"auto"` decided by its shape.

    An output whose leading axis has as many entries as a micro-batch has rows is one for each row,
    and is joined; all others are averaged.

    Args:
      reduction: an `AuxReduction`, or a tree prefix of them.
      auxes: auxiliary outputs, leaves of shape (k, ...).
      rows_each: rows of one micro-batch; None if that is not known.

    Returns:
      A tree like `auxes` of `AuxReduction`s without `"auto"`.
    """

    def choose(kind: AuxReduction, stacked: jax.Array) -> AuxReduction:
        if kind != "auto":
            return kind
        return "concat" if rows_each is not None and stacked.shape[1:2] == (rows_each,) else "mean"

    def choose_all(kind: AuxReduction, subtree: Any) -> Any:
        return jax.tree.map(lambda leaf: choose(kind, leaf), subtree)

    try:
        return jax.tree.map(choose_all, reduction, auxes)
    except ValueError as error:
        raise TypeError(
            "aux_reduction must be a word, or a tree like the auxiliary output of loss_fn with a "
            f"word for each part of it: {error}"
        ) from None


def reduce_aux(
    auxes: Any,
    weights: jax.Array,
    divisor: jax.Array,
    reduction: Any,
    axes: tuple[str, ...],
    num_rows: int | None,
) -> Any:
    """Reduces the auxiliary outputs of k micro-batches to one; means and sums over devices, too.

    Args:
      auxes: auxiliary outputs, leaves of shape (k, ...).
      weights: float32[k].
      divisor: float32 scalar, the total weight over micro-batches and devices, never zero.
      reduction: a tree prefix of `AuxReduction`s, without `"auto"`.
      axes: mapped axes that means and sums also reduce over.
      num_rows: rows of the batch, if repeats were added at its end; else None.

    Returns:
      A tree like one micro-batch's output. Means and sums are float32 or wider, sums of integers
      int32 or wider; `"stack"`, `"concat"` and `"last"` keep the dtype and stay local.
    """

    def reduce_leaf(path: Any, kind: AuxReduction, stacked: jax.Array) -> jax.Array:
        if kind == "stack":
            return stacked
        if kind == "last":
            return stacked[-1]
        if kind == "concat":
            if stacked.ndim < 2:
                raise TypeError(
                    "aux_reduction='concat' needs leaves with a leading batch axis, got a scalar "
                    "for each micro-batch: take 'mean', 'sum' or 'stack' for this leaf"
                )
            # Row r of the batch is row r // k of micro-batch r % k (see `split_microbatches`), so
            # (k, B/k, ...) -> (B/k, k, ...) -> (B, ...) restores the order; then repeats are cut.
            rows = jnp.swapaxes(stacked, 0, 1)
            # Without jit, Explicit axes that divide the rows refuse `[:num_rows]`.
            return jax.lax.slice_in_dim(rows.reshape(-1, *rows.shape[2:]), 0, num_rows)
        if kind == "sum":
            least = jnp.float32 if is_floating(stacked) else jnp.int32
            dtype = wider_dtype(stacked.dtype, least)
            total = jnp.sum(stacked, axis=0, dtype=dtype)
            return add_over_devices(mark_varying(total, axes), axes)
        if not is_floating(stacked):
            raise TypeError(
                f"aux_reduction='mean', which 'auto' is for all but rows, needs floating leaves, "
                f"got {stacked.dtype}{at_path(path)}: give 'sum' or 'stack' "
                "for this leaf, in a tree of reductions like the auxiliary output"
            )
        wide = widen(stacked)
        per_row = weights.astype(wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
        # A micro-batch without weight may well report NaN, a mean over nothing, and 0 * NaN is NaN.
        weighted = jnp.sum(jnp.where(per_row == 0, jnp.zeros_like(wide), wide * per_row), axis=0)
        total = add_over_devices(mark_varying(weighted, axes), axes)
        return total / divisor.astype(wide.dtype)

    def reduce_subtree(path: Any, kind: AuxReduction, subtree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda below, leaf: reduce_leaf((*path, *below), kind, leaf), subtree
        )

    return jax.tree_util.tree_map_with_path(reduce_subtree, reduction, auxes)
