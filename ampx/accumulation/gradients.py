"""Micro-batches inside one step: split, scan, sum in float32, divide once.

The gradient of a large batch is a sum over its rows, so it can be taken one micro-batch at a time,
in the memory of one. Micro-batch i returns a sum of losses S_i and a sum of weights w_i (its number
of tokens, say). The loss of the whole batch and its gradient are

    L = (S_1 + ... + S_k) / W     dL/dp = (dS_1/dp + ... + dS_k/dp) / W     W = w_1 + ... + w_k

because W does not depend on the parameters p. So gradients of sums are added and divided once, at
the end: the mean is exact however unequal the weights are. A mean of the k means S_i / w_i would
count a token in a micro-batch of 7 as much as 73 tokens in one of 512.

    params, batch [B, ...] --- split --- k micro-batches [B/k, ...]
                                            |  lax.scan
      one:  cast, loss_fn, loss * scale, gradient, widen to float32
                                            |  the carry adds gradients, and threads model_state
      normalize_sums: divide by W, over all devices
                                            |
                                        GradResult     gradients still times the loss scale

The loss scale is applied inside each micro-batch, since it must be there when the backward pass
runs in half precision. The optimizer's wrapper takes it out again (`ampx.loss_scaling`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ampx import flax_modules
from ampx.accumulation.loss_calls import explain_failed_call
from ampx.accumulation.microbatches import (
    batch_size,
    check_batch_axes,
    find_rows,
    join_whole,
    pad_and_mask,
    separate_whole,
    split_microbatches,
)
from ampx.accumulation.normalization import (
    AuxReduction,
    Normalize,
    as_loss_and_weight,
    as_scale,
    normalize_sums,
    unpack_output,
)
from ampx.accumulation.pure_losses import PureLoss, make_pure
from ampx.accumulation.results import GradResult
from ampx.accumulation.scattering import GradientScatter, Scattering, make_scattering
from ampx.accumulation.sparse_rows import (
    as_tables,
    densify,
    merge_sparse,
    read_tables,
    split_sparse,
)
from ampx.checking import as_bool, as_dtype, as_positive_int, check_choice
from ampx.flat_buffers.flat_params import has_flat
from ampx.function_checks import check_callable, takes_function_alone
from ampx.mesh_axes import (
    as_axes,
    fold_in_device,
    mark_varying,
    reduced_axes,
    unreduced_zeros,
    untracked_axes,
)
from ampx.overwritten import (
    add_gradients,
    keep_finite_overwritten,
    lowest_overwritten,
    split_overwritten,
    take_largest,
)
from ampx.precision.opt_levels import Recipe
from ampx.precision.phase_switch import switch_by_phase
from ampx.precision.policies import Policy
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.precision.recipe_names import as_recipe
from ampx.tree_checks import check_arrays, check_key
from ampx.trees import cast_like, map_by_path, merge_trainable, wider_dtype

Remainder = Literal["error", "mask"]


@takes_function_alone
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    num_microbatches: int = 1,
    batch_axes: Any = 0,
    policy: Policy | Recipe | PrecisionSchedule | str | None = None,
    normalize: Normalize = "mean",
    has_aux: bool = False,
    aux_reduction: Any = "auto",
    accumulator_dtype: DTypeLike = jnp.float32,
    axis_name: str | Sequence[str] | None = None,
    remainder: Remainder = "error",
    sparse_rows: Mapping[str, Callable[[Any], jax.Array]] | None = None,
    scatter_gradients: bool = False,
    bucket_bytes: int | None = None,
    model_axes: Any = None,
) -> Callable[..., GradResult]:
    """`jax.value_and_grad` at a precision, with a loss scale, over micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch)`; with `key`, `loss_fn(params, batch, key)`; with a state,
        `loss_fn(..., model_state=state)`. It returns `value`, followed in a tuple by the auxiliary
        output if `has_aux` and by the new state if there is one. `value` is the scalar loss of its
        rows, or for `normalize="weights"` the pair (sum of losses, sum of weights).
        Leaves that are no floating arrays, such as the functions and settings of an Equinox module,
        are handed on as they are; their gradient is None.
        `params` may be an nnx module: `loss_fn` then gets a copy to call and change. They may be
        `ampx.fused.FlatParams`: `loss_fn` gets the tree, and `grads` are flat.
      num_microbatches: k; the leading axis of the batch is split by `split_microbatches`.
      batch_axes: which leaves of the batch are split: 0 splits along the leading axis, None hands
        the leaf whole to every micro-batch. Or a tree prefix of these, as `in_axes` of `jax.vmap`:
        `{"images": 0, "discriminator": None}`.
      policy: the precision of the parameters inside `loss_fn`: see `Recipe.call`. The batch is not
        cast: flax models cast their own inputs. With a `PrecisionSchedule`, `g` takes the argument
        `phase=ampx.precision_phase(opt_state)`.
      normalize: `"mean"` divides the sum over micro-batches by k, `"sum"` by nothing, `"weights"`
        by the sum of all weights, so that every token counts the same. If all weights are zero,
        loss and gradients are zero, not NaN.
      has_aux: whether `loss_fn` returns auxiliary output.
      aux_reduction: how the auxiliary leaves of k micro-batches become one: `"mean"` (weighted as
        the loss is), `"sum"`, `"stack"` (new leading axis of k), `"concat"` (the rows of the batch
        in their order), `"last"`; or a tree prefix of these. `"auto"` is `"concat"` for a leaf
        whose leading axis has as many entries as a micro-batch has rows, else `"mean"`. `"mean"`
        and `"sum"` also reduce over `axis_name`; the others stay local to the device.
      accumulator_dtype: dtype of the sums. A gradient of a wider dtype is summed in its own.
      axis_name: inside `shard_map`, the mapped axes that the batch is split over. The weight and
        the loss are then those of all devices, `grads` are this device's part, and their plain sum
        over the axes is the exact gradient. Each device gets its own key.
      remainder: for a batch that k does not divide: an error, or `"mask"`: the last row is
        repeated and `loss_fn` gets `mask=`, bool of shape (rows,), False on the repeats.
      sparse_rows: for lookup tables: from the parameter's path (names joined by "/") to a function
        from the batch to the indices it reads. In the place of that parameter `loss_fn` then gets
        the rows already read, `table[indices]`, and the gradient is a `SparseRows`. With
        `axis_name` it is dense, because a sum over devices would add up the indices too.
      scatter_gradients: with `axis_name`, reduce-scatter the gradients of each micro-batch, bucket
        by bucket, and add up shards (ZeRO-2): sums take 1/n of the memory on n devices, and k times
        the bytes travel. `grads` are then `GradientShard` leaves, for `ampx.zero1` alone.
      bucket_bytes: see `ampx.bucket_layout`; for `scatter_gradients`.
      model_axes: as for `ampx.zero1`; for `scatter_gradients`.

    Returns:
      `g(params, batch, *, loss_scale=1.0, key=None, model_state=None) -> GradResult`. Micro-batch
      i gets the key `fold_in(key, i)`. The state that one micro-batch returns is given to the next.
      With `differentiate=False` it computes the loss alone, and `grads` is None.
      For an nnx module, `wrt=` takes the filter of what to differentiate, `nnx.Param` by default;
      the rest comes back as `model_state`.

    Raises:
      TypeError: for an argument, or an auxiliary leaf, of the wrong kind.
      ValueError: for an argument outside its choices, a dtype that is not floating, or a batch that
        cannot be split.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> def loss_fn(w, batch):
      ...     errors = (w * batch["x"] - 1.0) ** 2
      ...     return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> grads_of = ampx.value_and_grad(loss_fn, num_microbatches=2, normalize="weights")
      >>> batch = {"x": jnp.array([1.0, 2.0, 3.0, 4.0]), "mask": jnp.array([1.0, 1.0, 1.0, 0.0])}
      >>> result = grads_of(jnp.array(1.0), batch, loss_scale=8.0)
      >>> print(result.loss, result.grads / 8.0, result.weight)
      1.6666666 5.3333335 3.0
    """
    check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
    _check_choices(normalize, remainder, aux_reduction)
    num_microbatches = as_positive_int("num_microbatches", num_microbatches)
    check_batch_axes(batch_axes)
    has_aux = as_bool("has_aux", has_aux)
    accumulator_dtype = as_dtype("accumulator_dtype", accumulator_dtype, "sum")
    axes = as_axes(axis_name, may_be_empty=True)
    tables = as_tables(sparse_rows)
    scattering = make_scattering(scatter_gradients, axes, bucket_bytes, model_axes, tables)

    options = _Options(
        loss_fn,
        num_microbatches,
        batch_axes,
        normalize,
        has_aux,
        aux_reduction,
        accumulator_dtype,
        axes,
        remainder,
        tables,
        scattering,
    )
    if isinstance(policy, PrecisionSchedule):
        return switch_by_phase(
            [functools.partial(_grads_at, options, recipe) for recipe in policy.recipes]
        )
    return functools.partial(_grads_at, options, as_recipe(policy))


class _Options(NamedTuple):
    """The arguments of `value_and_grad`, checked."""

    loss_fn: Callable[..., Any]
    num_microbatches: int
    batch_axes: Any
    normalize: Normalize
    has_aux: bool
    aux_reduction: Any
    accumulator_dtype: DTypeLike
    axes: tuple[str, ...]
    remainder: Remainder
    tables: Mapping[str, Callable[[Any], jax.Array]]
    scattering: Scattering | None


def _grads_at(
    options: _Options,
    recipe: Recipe | None,
    params: Any,
    batch: Any,
    *others: Any,
    loss_scale: ArrayLike = 1.0,
    key: jax.Array | None = None,
    model_state: Any = None,
    wrt: Any = None,
    differentiate: bool = True,
) -> GradResult:
    """What `value_and_grad` returns, at the precision of `recipe`."""
    if others:
        raise TypeError(
            f"the loss takes parameters and one batch, got {2 + len(others)} arguments without "
            "a name: give what belongs to the batch as one tree, such as (x, y)"
        )
    check_key("key", key)
    differentiate = as_bool("differentiate", differentiate)
    _check_is_tree(options, params)
    k, axes = options.num_microbatches, options.axes
    pure = make_pure(options.loss_fn, recipe, params, model_state, options.has_aux, wrt)
    key = fold_in_device(key, axes)
    scatter = None
    if options.scattering and differentiate:
        scatter = options.scattering.begin(pure.params)
    # Under check_vma=True JAX sums the gradient of a replicated parameter over the devices by
    # itself, once a micro-batch; a sum by the caller would count every device n times.
    pure = pure._replace(params=mark_varying(pure.params, axes))
    batch, whole = separate_whole(batch, options.batch_axes)
    scaled_loss = _make_scaled_loss(options, pure, as_scale(loss_scale), key)
    one = _make_one(options, pure, scaled_loss, whole, differentiate)

    # bool[k * n] of the rows, then bool[k, n] like all leaves of the batch.
    mask = num_rows = None
    if options.remainder == "mask":
        num_rows = batch_size(batch)
        batch, mask = pad_and_mask(batch, k)
    rows = find_rows(batch)
    rows_each = None if rows is None else rows // k
    if k == 1:
        # No scan and no accumulator of zeros: bit for bit what jax.value_and_grad gives.
        grads, model_state, outputs = one(batch, mask, 0, pure.model_state)
        grads = grads if scatter is None else scatter.scatter(grads)
        outputs = jax.tree.map(lambda x: jnp.asarray(x)[None], outputs)
    else:
        split = split_microbatches((batch, mask), k)
        zeros = _make_zeros(options, pure.params, scatter) if differentiate else None
        grads, model_state, outputs = _scan(one, zeros, split, k, pure.model_state, scatter)
    if axes:
        # A sum over devices adds arrays element by element. Rows of different indices must not
        # be added, so from here on the table's gradient is dense.
        grads = densify(grads)
    grads, overwritten = split_overwritten(grads)
    losses, weights, auxes = outputs
    loss, grads, weight, aux = normalize_sums(
        grads,
        losses,
        weights,
        auxes,
        options.normalize,
        options.aux_reduction,
        axes,
        num_rows,
        rows_each,
    )
    sent = None
    if scatter is not None:
        grads, sent = scatter.finish(grads, k)
    grads = merge_trainable(grads, take_largest(overwritten, axes))
    grads, model_state = pure.take_measured(grads, model_state)
    result = GradResult(loss, grads, weight, aux, model_state, reduction=sent)
    parts_over = untracked_axes(axes) if differentiate and scatter is None else ()
    return result.with_scale(loss_scale).with_parts_over(parts_over)


def _make_scaled_loss(
    options: _Options, pure: PureLoss, scale: jax.Array, key: jax.Array | None
) -> Callable[..., Any]:
    """The function to differentiate: loss times scale, and (loss, weight, aux, state) beside it."""
    has_state = pure.model_state is not None

    def scaled_loss(params: Any, microbatch: Any, mask: Any, index: Any, state: Any) -> Any:
        args = () if key is None else (jax.random.fold_in(key, index),)
        kwargs = {} if mask is None else {"mask": mask}
        if has_state:
            kwargs["model_state"] = state
        # The state of an nnx module is inside of it.
        named = [name for name in kwargs if not (pure.is_nnx and name == "model_state")]
        has_key = key is not None
        with explain_failed_call(options.loss_fn, microbatch, named, has_key=has_key):
            output = pure.fun(params, microbatch, *args, **kwargs)
        value, aux, state = unpack_output(output, options.has_aux, has_state)
        loss, weight = as_loss_and_weight(value, options.normalize)
        check_arrays("the auxiliary output of loss_fn", aux)
        # In float32, where 65536 times a loss fits. (A loss that was computed in float16
        # still gets the scale as its first cotangent, and 65536 is infinite there.) The loss
        # before scaling goes out beside it, for the report.
        with jax.named_scope("ampx.scale"):
            return loss * scale.astype(loss.dtype), (loss, weight, aux, state)

    return scaled_loss


def _make_one(
    options: _Options,
    pure: PureLoss,
    scaled_loss: Callable[..., Any],
    whole: Any,
    differentiate: bool,
) -> Callable[..., tuple[Any, Any, Any]]:
    """The function of one micro-batch: (gradients, new state, (loss, weight, aux))."""

    @jax.named_scope("ampx.micro_batch")
    def one(microbatch: Any, mask: Any, index: Any, state: Any) -> tuple[Any, Any, Any]:
        microbatch = join_whole(microbatch, whole)
        read, collect = read_tables(pure.params, microbatch, options.tables)
        args = (read, microbatch, mask, index, state)
        grads = None
        if differentiate:
            (_, outputs), grads = jax.value_and_grad(scaled_loss, has_aux=True)(*args)
            grads = keep_finite_overwritten(grads, read)
            grads = jax.tree.map(lambda g: _widen(g, options.accumulator_dtype), grads)
            grads = collect(grads)
        else:
            _, outputs = scaled_loss(*args)
        loss, weight, aux, new_state = outputs
        _check_same_structure(new_state, state)
        return grads, cast_like(new_state, state), (loss, weight, aux)

    return one


def _scan(
    one: Callable[..., Any],
    zeros: Any,
    split: Any,
    num_microbatches: int,
    model_state: Any,
    scatter: GradientScatter | None = None,
) -> tuple[Any, Any, Any]:
    """Runs `one` on each micro-batch in turn, and adds its gradients, or shards, to `zeros`.

    Returns:
      Gradients, the last model state, and (losses, weights, auxiliary outputs) with a leading axis
      of k.
    """

    # After micro-batch i the carry holds g_0 + ... + g_i in float32, and the state that i returned.
    # Dense gradients are added there, so one copy of them is alive at a time. What is stacked is
    # small, f32[k] mostly, and how to reduce it is decided later. Sparse gradients are stacked too:
    # the k lists of rows need only be joined.
    def body(carry: Any, xs: Any) -> Any:
        sums, state = carry
        (microbatch, mask), index = xs
        grads, state, outputs = one(microbatch, mask, index, state)
        dense, sparse = split_sparse(grads)
        dense = dense if scatter is None else scatter.scatter(dense)
        sums = add_gradients(sums, dense)
        return (sums, state), (sparse, outputs)

    (sums, model_state), (sparse, outputs) = jax.lax.scan(
        body, (zeros, model_state), (split, jnp.arange(num_microbatches))
    )
    return merge_sparse(sums, sparse), model_state, outputs


def _widen(grad: jax.Array, accumulator_dtype: DTypeLike) -> jax.Array:
    # bfloat16 has 8 significant bits: from 256 on, adding 1 changes nothing. So 512 equal gradients
    # would sum to half of what they should.
    return grad.astype(wider_dtype(grad.dtype, accumulator_dtype))


def _make_zeros(options: _Options, params: Any, scatter: GradientScatter | None) -> Any:
    """What the sums of dense gradients begin with; rows of tables are not summed."""
    zeros = map_by_path(
        params,
        lambda name, leaf: (
            None if name in options.tables else _zeros(leaf, options.accumulator_dtype)
        ),
    )
    return lowest_overwritten(zeros if scatter is None else scatter.cut_zeros(zeros))


def _zeros(param: Any, accumulator_dtype: DTypeLike) -> jax.Array:
    """Zeros of the type that the gradient of a parameter has."""
    # The type of a scan's carry must not change from one iteration to the next. In JAX it includes
    # an array's sharding along Explicit axes and the mapped axes it varies over. `zeros_like` keeps
    # both. The gradient of a parameter in a "reduced" layout is an "unreduced" one: each device has
    # its part of a sum that is still due, and so must the zeros.
    param = jnp.asarray(param)
    dtype = wider_dtype(param.dtype, accumulator_dtype)
    if reduced_axes(param):
        return unreduced_zeros(param, dtype)
    return jnp.zeros_like(param, dtype=dtype)


def _check_is_tree(options: _Options, params: Any) -> None:
    """Refuses settings that go by the paths of parameters, where these have none."""
    if flax_modules.is_nnx_module(params) and (options.tables or options.scattering):
        name = "sparse_rows" if options.tables else "scatter_gradients"
        raise ValueError(f"{name} needs a tree of parameters, not an nnx module")
    if options.tables and has_flat(params):
        raise ValueError("sparse_rows needs a tree of parameters, not flat ones")


def _check_same_structure(new_state: Any, state: Any) -> None:
    new, old = jax.tree.structure(new_state), jax.tree.structure(state)
    if new != old:
        raise ValueError(
            f"loss_fn returned a model_state of structure {new}, but was given {old}: return every "
            "entry that came in, and no other"
        )


def _check_choices(normalize: Any, remainder: Any, aux_reduction: Any) -> None:
    check_choice("normalize", normalize, get_args(Normalize))
    check_choice("remainder", remainder, get_args(Remainder))
    for kind in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", kind, get_args(AuxReduction))
    if remainder == "mask" and normalize == "mean":
        raise ValueError(
            "remainder='mask' needs normalize='weights' or 'sum': micro-batches then hold unequal "
            "numbers of real rows, and a mean of their means would weigh rows unequally"
        )
