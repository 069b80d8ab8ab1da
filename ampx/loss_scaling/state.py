"""The state of a loss scale, and what a training loop reads out of it.

The state is a part of the optimizer's state, at whatever depth wrappers have put it. The functions
here take the whole optimizer state and search it, so a training loop need not know where it is.
All but `raise_if_exhausted` work under `jit`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx import trees
from ampx.checking import as_int, suggest
from ampx.summaries import show_fields
from ampx.tree_checks import check_arrays, check_like, check_opt_state, check_structure
from ampx.trees import find_nodes
from ampx.updates.extra_args import schedule_free_field


class GrowthIntervalState(NamedTuple):
    """Where the growth interval of a loss scale stands that adapts; see `loss_scaling.dynamics`.

    Attributes:
      growth_interval: int32[losses], finite steps in a row after which the scale grows.
      growths_at_interval: int32[losses], how often it has grown at this interval, up to 3.
      falls_in_a_row: int32[losses], how often it has fallen since it last grew, up to 3.
    """

    growth_interval: jax.Array
    growths_at_interval: jax.Array
    falls_in_a_row: jax.Array

    __repr__ = show_fields


class LossScaleState(NamedTuple):
    """State of a loss-scaled transformation.

    With one loss all fields are scalars. With n losses those marked [losses] have shape (n,).

    Attributes:
      loss_scale: float32[losses], the factor for the next loss.
      growth_tracker: int32[losses], finite steps in a row since the scale last moved or overflowed.
      hysteresis_tracker: int32[losses], how many overflows it takes until the scale falls; at 0 and
        1 the next one lowers it.
      inf_total: int32[losses], updates so far where an array of gradients held an infinity and no
        NaN; under `saturation_dtype` it may hold a NaN, too.
      nan_total: int32[losses], updates so far whose gradients held a NaN.
      floor_hits: int32[losses], falls that found the scale at `min_scale` already; an overflow that
        hysteresis tolerates is none.
      ceiling_hits: int32[losses], growths that found the scale at `max_scale` already. If it rises
        and neither `inf_total` nor `nan_total` does, the scale may reach no gradient.
      overflow: bool, whether the last update was skipped, because of an overflow or of a bad
        update; the totals tell which.
      skipped_total: int32, updates skipped so far.
      bad_update_total: int32, updates that were undone because finite gradients were too large:
        their squares do not add up in float32; and those that came out non-finite, as far as
        `nonfinite_updates` has them looked at.
      nonfinite_loss_total: int32, updates so far whose loss, the extra argument `value`, was not
        finite, whether they were skipped or not.
      floor_flag: bool, whether there has been a floor hit; stays False unless
        `on_floor="raise-flag"`.
      inner_state: the wrapped transformation's state.
      interval: a `GrowthIntervalState` where the growth interval adapts; else ().

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> state = ampx.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
      >>> float(state.loss_scale), int(state.skipped_total)
      (65536.0, 0)
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    inf_total: jax.Array
    nan_total: jax.Array
    floor_hits: jax.Array
    ceiling_hits: jax.Array
    overflow: jax.Array
    skipped_total: jax.Array
    bad_update_total: jax.Array
    nonfinite_loss_total: jax.Array
    floor_flag: jax.Array
    inner_state: optax.OptState
    interval: Any = ()

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")


class OptimizersState(NamedTuple):
    """The state of several optimizers that share a loss scale, and skip each for itself.

    It is the `inner_state` of the `LossScaleState`. A *step* is what happens between two moves of
    the scale: one update, or several of which all but the last say `move_scale=False`. The fields
    `pending_...` gather what the earlier updates of the step found; a move clears them.

    Attributes:
      optimizer_skipped: from each optimizer's name to a bool scalar, whether the last update that
        it took part in was skipped.
      optimizer_skipped_total: from name to an int32 scalar, its updates skipped so far.
      pending_found: bool[*losses, 2], whether there was an infinity, and a NaN.
      pending_seen: bool[*losses], which losses took part.
      pending_skip: bool scalar, whether any optimizer was skipped.
      pending_bad_update: bool scalar, whether finite gradients gave an update that was not.
      pending_bad_loss: bool scalar, whether a loss was not finite.
      inner_states: from name to the state of the optimizer.
    """

    optimizer_skipped: dict[str, jax.Array]
    optimizer_skipped_total: dict[str, jax.Array]
    pending_found: jax.Array
    pending_seen: jax.Array
    pending_skip: jax.Array
    pending_bad_update: jax.Array
    pending_bad_loss: jax.Array
    inner_states: dict[str, optax.OptState]

    __repr__ = show_fields


def find_loss_scale_state(opt_state: optax.OptState) -> LossScaleState | None:
    """The loss-scale state inside any optimizer state, or None.

    Args:
      opt_state: an optimizer state, however nested; flax's `nnx.Optimizer.opt_state` too.

    Returns:
      The `LossScaleState` or None.

    Raises:
      TypeError: if `opt_state` is no optimizer state.
      ValueError: if there are several: pass the part of the state that is meant.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = optax.chain(ampx.static_loss_scale(optax.sgd(0.1), 8.0))
      >>> float(ampx.find_loss_scale_state(tx.init(jnp.ones(2))).loss_scale)
      8.0
    """
    check_opt_state(opt_state)
    return find_scale(opt_state)


def find_scale(opt_state: optax.OptState) -> LossScaleState | None:
    """`find_loss_scale_state` of what is known to be an optimizer state."""
    states = find_nodes(opt_state, LossScaleState)
    if len(states) > 1:
        raise ValueError(f"found {len(states)} loss scales in the state: pass the one meant")
    return _as_arrays(states[0]) if states else None


def find_outermost_loss_scale(opt_state: optax.OptState) -> LossScaleState | None:
    """The loss-scale state that is outermost in an optimizer's state, or None.

    Only such a scale sees the whole gradient and can undo the whole step. A wrapper around it
    counts as none if its state says `wraps_loss_scale`, as that of a precision schedule does.
    """
    state: Any = opt_state
    while getattr(state, "wraps_loss_scale", False):
        state = state.inner_state
    return state if isinstance(state, LossScaleState) else None


def _as_arrays(state: LossScaleState) -> LossScaleState:
    """Replaces the variables in which flax nnx keeps every array of a state by plain arrays."""
    nested = ("inner_state", "interval")
    own = {name: value for name, value in state._asdict().items() if name not in nested}
    return state._replace(**{name: jax.tree.leaves(value)[0] for name, value in own.items()})


def current_loss_scale(opt_state: optax.OptState, loss_id: int = 0) -> jax.Array:
    """The factor by which to multiply the next loss.

    Args:
      opt_state: an optimizer state, however nested.
      loss_id: which loss, from 0, where there are several.

    Returns:
      float32 scalar; 1.0 where the optimizer has no loss scale, as with `ampx.no_loss_scale`.

    Raises:
      TypeError: if `opt_state` is no optimizer state but a tree of nothing but arrays, such as the
        parameters, or `loss_id` is no int.
      IndexError: if `loss_id` is not one of the losses.
      ValueError: if the loss scale is inside `optax.MultiSteps`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> state = ampx.dynamic_loss_scale(optax.adam(1e-3)).init(jnp.ones(2))
      >>> ampx.current_loss_scale(state)
      Array(65536., dtype=float32)
    """
    check_opt_state(opt_state)
    # It empties its sum by a product with 0, and infinity times 0 is NaN: no step would ever be
    # good again.
    for accumulator in find_nodes(opt_state, optax.MultiStepsState):
        if find_nodes(accumulator.inner_opt_state, LossScaleState):
            raise ValueError(
                "the loss scale is inside optax.MultiSteps, whose sum of gradients stays NaN after "
                "the first overflow: put it around, as in dynamic_loss_scale(optax.MultiSteps("
                "optimizer, k)), or take ampx.multi_steps(dynamic_loss_scale(optimizer), k)"
            )
    return scale_or_one(opt_state, loss_id)


def scale_or_one(opt_state: optax.OptState, loss_id: int = 0) -> jax.Array:
    """`current_loss_scale` of what is known to be an optimizer state, whatever it consists of."""
    loss_id = as_int("loss_id", loss_id)
    state = find_scale(opt_state)
    scales = jnp.ones(1, jnp.float32) if state is None else jnp.atleast_1d(state.loss_scale)
    if not 0 <= loss_id < scales.shape[0]:
        raise IndexError(f"loss_id must be in [0, {scales.shape[0]}), got {loss_id}")
    return scales[loss_id]


def is_skipped(opt_state: optax.OptState, optimizer: str | None = None) -> jax.Array:
    """Whether the last update was skipped.

    Args:
      opt_state: an optimizer state, however nested.
      optimizer: of several that share a loss scale, the name of the one that is meant: whether the
        last update that it took part in was skipped. Without it: whether any was, in this step.

    Returns:
      bool scalar; False where the state has no loss scale.

    Raises:
      TypeError: if `opt_state` is no optimizer state.
      ValueError: if there is no optimizer of that name.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(0.1))
      >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
      >>> bool(ampx.is_skipped(state))
      True
    """
    check_opt_state(opt_state)
    return has_skipped(opt_state, optimizer)


def has_skipped(opt_state: optax.OptState, optimizer: str | None = None) -> jax.Array:
    """`is_skipped` of what is known to be an optimizer state."""
    state = find_scale(opt_state)
    if state is None:
        return jnp.zeros((), bool)
    if optimizer is None:
        return state.overflow
    inside = state.inner_state
    skipped = inside.optimizer_skipped if isinstance(inside, OptimizersState) else {}
    if optimizer not in skipped:
        known = f"its optimizers are {sorted(skipped)}" if skipped else "it has one optimizer alone"
        raise ValueError(
            f"optimizer={optimizer!r} is none of those in this loss scale: {known}"
            f"{suggest(optimizer, skipped)}"
        )
    return jax.tree.leaves(skipped[optimizer])[0]  # flax nnx keeps it in a variable


def select_if_finite(
    opt_state: optax.OptState, new_tree: Any, old_tree: Any, optimizer: str | None = None
) -> Any:
    """`new_tree`, or `old_tree` if the last update was skipped.

    For whatever must not change on a skip and lives outside the optimizer state: batch statistics,
    an exponential moving average, a step counter. Not for random keys or data: the same batch with
    the same dropout mask would overflow again.

    Args:
      opt_state: the state after the update.
      new_tree: values to keep after a good step.
      old_tree: values to keep after a skip; same structure and shapes, and its dtypes win.
      optimizer: whose skip it is about, see `ampx.is_skipped`.

    Returns:
      One of the two, chosen leaf by leaf on the device.

    Raises:
      TypeError: if `opt_state` is no optimizer state, or a tree holds what is no array.
      ValueError: if the trees differ in their structure or shapes, or there is no optimizer of that
        name.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(0.1))
      >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
      >>> ampx.select_if_finite(state, {"step": jnp.array(8)}, {"step": jnp.array(7)})
      {'step': Array(7, dtype=int32, weak_type=True)}
    """
    skipped = is_skipped(opt_state, optimizer)
    for name, tree in (("new_tree", new_tree), ("old_tree", old_tree)):
        check_arrays(name, tree)
    check_like("new_tree", new_tree, "old_tree", old_tree)
    check_structure("old_tree", old_tree, "new_tree", new_tree)
    return trees.hold(skipped, new_tree, old_tree)


def raise_if_exhausted(opt_state: optax.OptState) -> None:
    """Raises if `on_floor="raise-flag"` saw an overflow at the smallest scale. Not under `jit`.

    Args:
      opt_state: an optimizer state, however nested; read from the device.

    Raises:
      FloatingPointError: with the counts that tell a scale problem from a broken model.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(0.1), init_scale=1.0, on_floor="raise-flag")
      >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
      >>> ampx.raise_if_exhausted(state)
      Traceback (most recent call last):
      ...
      FloatingPointError: ... the model itself produces them...
    """
    state = find_loss_scale_state(opt_state)
    if state is None or not bool(state.floor_flag):
        return
    # An infinity comes from a scale that is too high, or from gradients that are too large. A NaN
    # needs inf - inf, 0 * inf or 0 / 0 in the model, which lowering the scale does not cure.
    # Over the losses, as Python ints: two counts of 2**31 - 1 do not add up in int32.
    nans, infs, hits = (
        sum(np.atleast_1d(count).tolist())
        for count in (state.nan_total, state.inf_total, state.floor_hits)
    )
    advice = (
        "NaN gradients do not come from the scale: the model itself produces them"
        if nans >= infs
        else "gradients overflow even unscaled: lower the learning rate, clip, or use bfloat16"
    )
    raise FloatingPointError(
        f"overflow at the smallest loss scale {state.loss_scale}: {hits} "
        f"floor hits, {infs} steps with inf, {nans} with NaN; {advice}"
    )
