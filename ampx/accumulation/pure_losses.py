"""A loss as a pure function of the arrays to differentiate by.

Parameters may be an nnx module, flat buffers, or a tree with leaves that are not trained. A loss
function gets them as they are; JAX differentiates by arrays. So from the outside in, the function
that is made here puts the whole tree, the tree of a flat buffer, or an nnx module together of such
arrays, casts it to the computing dtype, and calls `loss_fn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ampx import flax_modules
from ampx.accumulation.normalization import unpack_output
from ampx.flat_buffers.flat_params import as_tree, has_flat
from ampx.overwritten import refuse_overwritten
from ampx.precision.opt_levels import Recipe
from ampx.tree_checks import check_arrays, check_trainable
from ampx.trees import merge_trainable, split_trainable


class PureLoss(NamedTuple):
    """A loss, and what it begins with.

    Attributes:
      fun: `fun(params, batch, ...)`; with a state `fun(..., model_state=state)`, which returns the
        new one last.
      params: the arrays to differentiate by.
      model_state: the caller's, or that of an nnx module; None without.
      measured: variables of an nnx model whose gradients are their new values; they are among
        `params` then, marked as linen marks them. None without any.
      is_nnx: whether the state is inside the module that the user's function gets.
    """

    fun: Callable[..., Any]
    params: Any
    model_state: Any
    measured: Any
    is_nnx: bool

    def take_measured(self, grads: Any, model_state: Any) -> tuple[Any, Any]:
        """Moves new values from the gradients, which may be None, to the state of an nnx model."""
        if self.measured is None:
            return grads, model_state
        # To whoever trains an nnx model these are a part of its state, which a step changes.
        measured = self.measured
        if grads is not None:
            grads, measured = grads["params"], grads[flax_modules.OVERWRITE]
        return grads, flax_modules.merge_states(model_state, measured)


def make_pure(
    loss_fn: Callable[..., Any],
    recipe: Recipe | None,
    params: Any,
    model_state: Any,
    has_aux: bool,
    wrt: Any,
) -> PureLoss:
    """Makes a loss pure, and checks what it is a function of.

    Args:
      loss_fn: the user's function.
      recipe: casts the parameters inside; None casts nothing.
      params: what the user has given as parameters.
      model_state: the user's, or None.
      has_aux: whether `loss_fn` returns auxiliary output.
      wrt: the nnx filter of what to differentiate by, or None.

    Raises:
      TypeError: for leaves that are no arrays or cannot be differentiated by.
      ValueError: for a state beside an nnx module, or one with overwritten leaves.
    """
    fun = functools.partial(recipe.call, loss_fn) if recipe else loss_fn
    measured = None
    is_nnx = flax_modules.is_nnx_module(params)
    if is_nnx:
        if model_state is not None:
            raise ValueError("an nnx module brings its own state: leave model_state out")
        fun, params, measured, model_state = _as_function(fun, params, has_aux, wrt)
    if has_flat(params):
        fun = functools.partial(_call_with_tree, fun)
    check_trainable("params", params)
    check_arrays("model_state", model_state)
    refuse_overwritten("model_state", model_state, "Give it as a part of the parameters")
    params, rest = split_trainable(params)  # nnx has its own filters: all it gives is trained
    if rest is not None:
        fun = functools.partial(_call_merged, fun, rest)
    return PureLoss(fun, params, model_state, measured, is_nnx)


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
