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
from typing import Any, Literal, get_args

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
from ampx.accumulation.results import GradResult
from ampx.accumulation.scattering import GradientScatter, make_scattering
from ampx.accumulation.sparse_rows import (
    as_tables,
    densify,
    merge_sparse,
    read_tables,
    split_sparse,
)
from ampx.checking import as_bool, as_dtype, as_positive_int, check_choice
from ampx.flat_buffers.flat_params import as_tree, has_flat
from ampx.function_checks import check_callable
from ampx.mesh_axes import as_axes, fold_in_device, mark_varying, reduced_axes, unreduced_zeros
from ampx.overwritten import (
    add_gradients,
    keep_finite_overwritten,
    lowest_overwritten,
    refuse_overwritten,
    split_overwritten,
    take_largest,
)
from ampx.precision.opt_levels import Recipe
from ampx.precision.phase_switch import switch_by_phase
from ampx.precision.policies import Policy
from ampx.precision.precision_schedules import PrecisionSchedule
from ampx.precision.recipe_names import as_recipe
from ampx.tree_checks import check_arrays, check_key, check_trainable
from ampx.trees import (
    cast_like,
    map_by_path,
    merge_trainable,
    split_trainable,
    wider_dtype,
)

Remainder = Literal["error", "mask"]


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

    def grads_at(
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
        if others:
            raise TypeError(
                f"the loss takes parameters and one batch, got {2 + len(others)} arguments without "
                "a name: give what belongs to the batch as one tree, such as (x, y)"
            )
        # `params` become the arrays to differentiate by, and `fun` a function of them. From the
        # outside in it makes an nnx module, or the tree of a flat buffer, of these arrays, casts
        # it to the computing dtype, and calls `loss_fn`.
        fun = functools.partial(recipe.call, loss_fn) if recipe else loss_fn
        check_key("key", key)
        measured = None  # variables of an nnx model whose gradients are their new values
        differentiate = as_bool("differentiate", differentiate)
        is_nnx = flax_modules.is_nnx_module(params)
        if is_nnx:
            if model_state is not None:
                raise ValueError("an nnx module brings its own state: leave model_state out")
            if tables or scattering:
                name = "sparse_rows" if tables else "scatter_gradients"
                raise ValueError(f"{name} needs a tree of parameters, not an nnx module")
            fun, params, measured, model_state = _as_function(fun, params, has_aux, wrt)
        if has_flat(params):
            if tables:
                raise ValueError("sparse_rows needs a tree of parameters, not flat ones")
            fun = functools.partial(_call_with_tree, fun)
        check_trainable("params", params)
        check_arrays("model_state", model_state)
        refuse_overwritten("model_state", model_state, "Give it as a part of the parameters")
        params, rest = split_trainable(params)  # nnx has its own filters: all it gives is trained
        if rest is not None:
            fun = functools.partial(_call_merged, fun, rest)
        scale = as_scale(loss_scale)
        key = fold_in_device(key, axes)
        scatter = scattering.begin(params) if scattering and differentiate else None
        # Under check_vma=True JAX sums the gradient of a replicated parameter over the devices by
        # itself, once a micro-batch; a sum by the caller would count every device n times.
        params = mark_varying(params, axes)
        has_state = model_state is not None

        def scaled_loss(params: Any, microbatch: Any, mask: Any, index: Any, state: Any) -> Any:
            args = () if key is None else (jax.random.fold_in(key, index),)
            kwargs = {} if mask is None else {"mask": mask}
            if has_state:
                kwargs["model_state"] = state
            # The state of an nnx module is inside of it.
            named = [name for name in kwargs if not (is_nnx and name == "model_state")]
            with explain_failed_call(loss_fn, microbatch, named, has_key=key is not None):
                output = fun(params, microbatch, *args, **kwargs)
            value, aux, state = unpack_output(output, has_aux, has_state)
            loss, weight = as_loss_and_weight(value, normalize)
            check_arrays("the auxiliary output of loss_fn", aux)
            # In float32, where 65536 times a loss fits. (A loss that was computed in float16
            # still gets the scale as its first cotangent, and 65536 is infinite there.) The loss
            # before scaling goes out beside it, for the report.
            with jax.named_scope("ampx.scale"):
                return loss * scale.astype(loss.dtype), (loss, weight, aux, state)

        batch, whole = separate_whole(batch, batch_axes)

        @jax.named_scope("ampx.micro_batch")
        def one(microbatch: Any, mask: Any, index: Any, state: Any) -> tuple[Any, ...]:
            microbatch = join_whole(microbatch, whole)
            read, collect = read_tables(params, microbatch, tables)
            if differentiate:
                (_, (loss, weight, aux, new_state)), grads = jax.value_and_grad(
                    scaled_loss, has_aux=True
                )(read, microbatch, mask, index, state)
                grads = keep_finite_overwritten(grads, read)
                grads = collect(jax.tree.map(lambda g: _widen(g, accumulator_dtype), grads))
            else:
                _, (loss, weight, aux, new_state) = scaled_loss(
                    read, microbatch, mask, index, state
                )
                grads = None
            _check_same_structure(new_state, state)
            return grads, cast_like(new_state, state), (loss, weight, aux)

        # bool[k * n] of the rows, then bool[k, n] like all leaves of the batch.
        mask = num_rows = None
        if remainder == "mask":
            num_rows = batch_size(batch)
            batch, mask = pad_and_mask(batch, num_microbatches)
        rows = find_rows(batch)
        rows_each = None if rows is None else rows // num_microbatches
        if num_microbatches == 1:
            # No scan and no accumulator of zeros: bit for bit what jax.value_and_grad gives.
            grads, model_state, (loss, weight, aux) = one(batch, mask, 0, model_state)
            grads = grads if scatter is None else scatter.scatter(grads)
            per_microbatch = jax.tree.map(lambda x: jnp.asarray(x)[None], (loss, weight, aux))
        else:
            split = split_microbatches((batch, mask), num_microbatches)
            zeros = None
            if differentiate:
                zeros = map_by_path(
                    params,
                    lambda name, leaf: None if name in tables else _zeros(leaf, accumulator_dtype),
                )
                zeros = lowest_overwritten(zeros if scatter is None else scatter.cut_zeros(zeros))
            grads, model_state, per_microbatch = _scan(
                one, zeros, split, num_microbatches, model_state, scatter
            )
        if axes:
            # A sum over devices adds arrays element by element. Rows of different indices must not
            # be added, so from here on the table's gradient is dense.
            grads = densify(grads)
        losses, weights, auxes = per_microbatch
        grads, overwritten = split_overwritten(grads)
        loss, grads, weight, aux = normalize_sums(
            grads, losses, weights, auxes, normalize, aux_reduction, axes, num_rows, rows_each
        )
        sent = None
        if scatter is not None:
            grads, sent = scatter.finish(grads, num_microbatches)
        grads = merge_trainable(grads, take_largest(overwritten, axes))
        if measured is not None:
            # To whoever trains an nnx model these are a part of its state, which a step changes.
            if differentiate:
                grads, measured = grads["params"], grads[flax_modules.OVERWRITE]
            model_state = flax_modules.merge_states(model_state, measured)
        result = GradResult(loss, grads, weight, aux, model_state, reduction=sent)
        return result.with_scale(loss_scale)

    if isinstance(policy, PrecisionSchedule):
        return switch_by_phase([functools.partial(grads_at, recipe) for recipe in policy.recipes])
    return functools.partial(grads_at, as_recipe(policy))


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


def _as_function(
    fun: Callable[..., Any], model: Any, has_aux: bool, wrt: Any
) -> tuple[Callable[..., Any], Any, Any, Any]:
    """Turns an nnx loss into a pure function of (parameters, ..., model_state).

    Returns:
      The function, the parameters, variables that are to be replaced by their gradients (None
      without any; they are then among the parameters, marked as linen marks them), and the state.
    """
    graphdef, params, rest = flax_modules.split_nnx(model, wrt)
    measured, rest = flax_modules.split_overwritten_nnx(params, rest)
    if measured is not None:
        params = {"params": params, flax_modules.OVERWRITE: measured}

    def pure(params: Any, *args: Any, model_state: Any, **kwargs: Any) -> Any:
        # A fresh copy for each call. What `fun` changes in it (batch statistics, random counters)
        # comes out as a value, and no tracer leaks into the caller's module.
        if measured is not None:
            params, own = params["params"], params[flax_modules.OVERWRITE]
            model_state = flax_modules.merge_states(model_state, own)
        copy = flax_modules.merge_nnx(graphdef, params, model_state)
        value, aux, _ = unpack_output(fun(copy, *args, **kwargs), has_aux, has_state=False)
        rest = flax_modules.select_nnx_rest(copy, wrt)
        if measured is not None:
            _, rest = flax_modules.split_overwritten_nnx(params, rest)
        return (value, aux, rest) if has_aux else (value, rest)

    return pure, params, measured, rest


def _call_with_tree(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    return fun(as_tree(params), *args, **kwargs)


def _call_merged(fun: Callable[..., Any], rest: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    return fun(merge_trainable(params, rest), *args, **kwargs)


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
