"""Leaves whose gradient is their new value, under a loss scale: hidden from what is inside.

Of flax's layers in 8 bits (`ampx.overwritten`) a loss scale gets gradients and parameters with
these leaves in them. It stands outermost, so nothing has touched them before:

    grads   others ──► judge, unscale, clip, moments, decay ... ──► of the others ─┐
            new values ── as far as finite ── largest over devices ── held on a skip ┴► updates

Their update is a `Replacement`, whose sum with any old value is the new one. So both
`ampx.apply_updates` and `optax.apply_updates` replace them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import as_positive_int
from ampx.flax_modules import OVERWRITE
from ampx.loss_scaling.calls import split_by_loss
from ampx.loss_scaling.outcomes import compare_states
from ampx.loss_scaling.state import OptimizersState, find_outermost_loss_scale
from ampx.mesh_axes import varying_axes
from ampx.model_axes import NOT_DIVIDED, ModelAxes, as_model_axes
from ampx.overwritten import (
    add_replacements,
    axes_of_optimized,
    join_new_values,
    leave_overwritten_out,
    split_overwritten,
    take_largest,
    take_largest_of_shards,
)
from ampx.tree_checks import check_like
from ampx.trees import convert_numbers, has_mark, hold, keep_finite, map_by_path, path_name
from ampx.updates.tails import Applied


class Hidden(NamedTuple):
    """The arguments of an update without overwritten leaves, and these.

    Attributes:
      grads: of the others; a tuple of such trees where there are several losses.
      params: the others, as `ampx.overwritten.split_optimized` takes flax's variables apart.
      extra_args: of the update, made for the others.
      new: new values, the same on all devices, with None in the place of the others.
      old: the values so far, like `new`.
    """

    grads: Any
    params: Any
    extra_args: dict[str, Any]
    new: Any
    old: Any

    def held(self, old_state: optax.OptState, new_state: optax.OptState) -> Any:
        """The new values; on a skip the old ones, of several optimizers for each its own."""
        scale = find_outermost_loss_scale(new_state)
        if scale is None or not isinstance(scale.inner_state, OptimizersState):
            return hold(compare_states(old_state, new_state).skipped, self.new, self.old)
        skipped = scale.inner_state.optimizer_skipped
        return {name: hold(skipped[name], own, self.old[name]) for name, own in self.new.items()}


def hide_new_values(
    tx: optax.GradientTransformationExtraArgs, model_axes: Any = None, num_losses: Any = 1
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which replaces overwritten leaves and shows `tx` the others alone.

    Args:
      tx: a loss scale, or what stands in its place.
      model_axes: what it was given as that.
      num_losses: for how many losses an update has gradients.
    """
    num_losses = as_positive_int("num_losses", num_losses)
    own_axes = as_model_axes(model_axes)

    def init(params: optax.Params) -> Any:
        return tx.init(leave_overwritten_out(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        hidden = hide(updates, state, params, extra_args, own_axes, num_losses)
        if hidden is None:
            return tx.update(updates, state, params, **extra_args)
        results, new_state = tx.update(hidden.grads, state, hidden.params, **hidden.extra_args)
        held = hidden.held(state, new_state)
        if isinstance(results, Applied):  # `ampx.fused.apply` asks for new parameters
            return results._replace(params=join_new_values(results.params, held)), new_state
        return add_replacements(results, held), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def hide(
    grads: Any,
    state: optax.OptState,
    params: Any,
    extra_args: dict[str, Any],
    own_axes: ModelAxes = NOT_DIVIDED,
    num_losses: int = 1,
) -> Hidden | None:
    """Takes overwritten leaves out of the arguments of an update; None if there are none.

    Args:
      grads: gradients and new values, with several losses a tuple of trees.
      state: of the optimizer.
      params: parameters.
      extra_args: further arguments; `model_axes` is used in the place of `own_axes`.
      own_axes: over which axes parameters are divided.
      num_losses: how many there are.

    Raises:
      ValueError: without parameters, for new values that they have no leaf for, for an argument
        that is a function of parameters, and for a reduction inside that would not see new values.
    """
    measured: dict[str, jax.Array] = {}
    for own in split_by_loss(grads, num_losses):
        for path, leaf in jax.tree_util.tree_leaves_with_path(split_overwritten(own)[1]):
            name, leaf = path_name(path), jnp.asarray(leaf)
            measured[name] = jnp.maximum(measured.get(name, leaf), leaf)
    if not measured:
        return None
    if params is None:
        raise ValueError(
            f"gradients have leaves under {OVERWRITE!r}, which are new values of parameters, and a "
            "skip must hold the old ones: give the parameters, tx.update(grads, state, params)"
        )
    # Several optimizers need not all take part in an update; then the others' leaves stay.
    old = convert_numbers(split_overwritten(params)[1])
    new = map_by_path(old, lambda name, leaf: measured.pop(name, leaf))
    if measured:
        raise ValueError(
            f"updates: {next(iter(measured))!r} is the new value of a leaf that params lacks: give "
            "the variables that gradients were taken of"
        )
    check_like("updates", new, "params", old, part="new value")
    for name, value in extra_args.items():
        if callable(value):
            raise ValueError(
                f"{name} is a function of all parameters, and the optimizer does not see those "
                f"under {OVERWRITE!r}: use ampx.train_step, which makes it"
            )
    axes = as_model_axes(extra_args.get("model_axes"), own_axes)
    new = _agree(keep_finite(new, old), old, grads, state, axes)
    others = tuple(map(leave_overwritten_out, split_by_loss(grads, num_losses)))
    about: dict[str, Any] = {}
    if axes.names:
        about["model_axes"] = axes_of_optimized(axes, params)
    if "grad" in extra_args:
        about["grad"] = leave_overwritten_out(extra_args["grad"])
    return Hidden(
        others if num_losses > 1 else others[0],
        leave_overwritten_out(params),
        {**extra_args, **about},
        new,
        old,
    )


def _agree(new: Any, old: Any, grads: Any, state: Any, model_axes: ModelAxes) -> Any:
    """The largest new value over the devices that hold the same old one.

    Raises:
      ValueError: where no type tells which these are, and gradients are not summed yet.
    """
    if has_mark(state, "reduces_gradients") and not varying_axes(grads):
        raise ValueError(
            f"tx reduces gradients over devices, and those under {OVERWRITE!r} are new values, of "
            "which the maximum is due; without check_vma no type tells over which axes: use "
            "ampx.train_step(axis_name=...), or take gradients by ampx.value_and_grad(axis_name="
            "...) and leave the reduction out of tx"
        )

    def take(leaf: jax.Array, held: Any) -> jax.Array:
        return take_largest(leaf, tuple(sorted(varying_axes(leaf) - varying_axes(held))))

    return take_largest_of_shards(jax.tree.map(take, new, old), model_axes)
