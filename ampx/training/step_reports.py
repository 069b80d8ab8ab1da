"""What one training step reports, as arrays on the device.

A report is returned from a jitted step like any other result. Nothing in it makes the host wait
until somebody reads a field, so a loop that reads reports a few steps late costs no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_word
from ampx.flat_buffers.flat_params import as_tree
from ampx.mesh_axes import count_devices
from ampx.model_axes import (
    NOT_DIVIDED,
    ModelAxes,
    axes_of_leaves,
    untracked_of_leaves,
)
from ampx.summaries import show_fields
from ampx.training.monitoring import find_figures
from ampx.tree_checks import check_scalar
from ampx.trees import path_name
from ampx.updates.gradient_norms import add_up

Rate = optax.ScalarOrSchedule


class StepReport(NamedTuple):
    """What one step reports. All fields are on the device; reading one waits for the step.

    Attributes:
      loss: float32 scalar (float64 for a float64 loss), unscaled, over all micro-batches and, with
        `axis_name`, devices.
      overflow: bool scalar, whether the step was skipped, because of an overflow or of a bad update
        (`bad_update_total` in the state counts these); with several optimizers, whether any of
        them was. Inside a window of `ampx.multi_steps`: whether the window, or the micro-step, is
        dropped.
      loss_scale: float32 scalar, the scale that this step used; 1 without a loss scale.
      learning_rate: float32 scalar, the rate of the last update that was applied: this step's, or,
        if it was skipped or its window of `ampx.multi_steps` goes on, that of an earlier one.
        Before any update it is the rate of the first. Where there are several, a dict from group to
        rate. None where it is not known.
      global_norm: float32 scalar, norm of the unscaled, reduced gradients before any clipping;
        inf or NaN after an overflow. With `ampx.zero1`, which reduces inside of the optimizer, that
        of the last update, and NaN where the step was skipped.
      local_norm: dict from parameter group to its norm, a float32 scalar; None unless asked for.
      size: dict from parameter group to its number of elements, an int32 scalar, or from 2**31 on
        a float32 scalar; None unless asked for.
      aux: the loss function's auxiliary output, or None.
      phase: int32 scalar, the phase of the precision schedule that this step was in, from 0; None
        without one.
      num_buckets: int32 scalar, the reductions of gradients over `axis_name`, see
        `ampx.ReductionState`; None where the step does none itself: without `axis_name`, or with
        `ampx.zero1`, whose state has it. With `scatter_gradients` those of all micro-batches.
      reduced_bytes: float32 scalar, the bytes that each device handed to them; None as
        `num_buckets`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> step = ampx.train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.5))
      >>> _, report = step(step.init(jnp.array(2.0)), jnp.ones(4))
      >>> print(report.loss, report.global_norm, report.overflow)
      4.0 4.0 False
    """

    loss: jax.Array
    overflow: jax.Array
    loss_scale: jax.Array
    learning_rate: jax.Array | dict[str, jax.Array] | None
    global_norm: jax.Array
    local_norm: dict[str, jax.Array] | None = None
    size: dict[str, jax.Array] | None = None
    aux: Any = None
    phase: jax.Array | None = None
    num_buckets: jax.Array | None = None
    reduced_bytes: jax.Array | None = None

    __repr__ = show_fields


def measure_groups(
    grads: Any, group_of: Callable[[str], str], model_axes: ModelAxes = NOT_DIVIDED
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Measures every parameter group.

    Args:
      grads: unscaled gradients, float32 or wider.
      group_of: from a parameter's path, joined by "/", to its group.
      model_axes: over which axes parameters are divided; norm and number are those of the whole.

    Returns:
      Two dicts from group: to its norm, a float32 scalar, and to its number of elements, an int32
      scalar, or a float32 scalar where it does not fit.
    """
    # Flat parameters are seen as the tree that lies in them, so groups are named alike.
    tree = as_tree(grads)
    groups: dict[str, list[int]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for place, (path, _) in enumerate(leaves):
        name = group_of(path_name(path))
        check_word("what local_norm returns", name)
        groups.setdefault(name, []).append(place)
    untracked = untracked_of_leaves(tree, model_axes)
    wholes = [
        leaf.size * count_devices(axes)
        for (_, leaf), axes in zip(leaves, axes_of_leaves(tree, model_axes), strict=True)
    ]
    norms, sizes = {}, {}
    for name, places in groups.items():
        total = add_up([leaves[i][1] for i in places], [untracked[i] for i in places])
        norms[name], sizes[name] = jnp.sqrt(total), as_size(sum(wholes[i] for i in places))
    return norms, sizes


def _is_rate(path: Any, value: Any) -> bool:
    # A field of a state, or among its hyperparameters. A parameter of this name is in the moments.
    fields = [key for key in path[-2:] if isinstance(key, optax.tree_utils.NamedTupleKey)]
    is_field = any(key.name in ("learning_rate", "hyperparams") for key in fields)
    return is_field and isinstance(value, jax.Array)


def find_learning_rate(
    given: Rate | tuple[tuple[str, Rate], ...] | None,
    step: jax.Array,
    applied: jax.Array,
    opt_state: optax.OptState,
) -> jax.Array | dict[str, jax.Array] | None:
    """Finds the rate of the last update that was applied; before any, that of the first.

    Args:
      given: a number or schedule, or pairs of a group and its own; None where none was given.
      step: int32 scalar, the updates that were applied before this step.
      applied: bool scalar, whether this step's was.
      opt_state: the state after this step.

    Returns:
      A float32 scalar, or a dict from group to rate where there are several; None if it is not
      known.
    """
    if given is None:
        # inject_hyperparams stores the rate it has just used, beside the schedule's own state;
        # on a skip its state stands still.
        found = optax.tree.get_all_with_path(opt_state, "learning_rate", _is_rate)
        if len(found) == 1:
            return found[0][1]
        named = find_figures(opt_state).items()
        ending = "/learning_rate"
        rates = {name.removesuffix(ending): r for name, r in named if name.endswith(ending)}
        return rates or None
    # `step` updates were applied before this call; the last of them had number step - 1.
    last = jnp.where(applied, step, jnp.maximum(step, 1) - 1)

    def evaluate(rate: Any) -> jax.Array:
        if callable(rate):
            rate = rate(last)
            check_scalar("what learning_rate returns", rate)
        return jnp.asarray(rate, jnp.float32)

    if isinstance(given, tuple):
        return {group: evaluate(rate) for group, rate in given}
    return evaluate(given)


def as_group_function(groups: Any) -> Callable[[str], str]:
    """From a tree of group names, as the labels of `optax.partition`, to a function of paths.

    Args:
      groups: a tree prefix of the parameters with a string for each parameter or part.

    Returns:
      A function from a parameter's path, joined by "/", to its group. It raises a ValueError for a
      path that the tree does not reach.
    """
    named = {path_name(path): group for path, group in jax.tree_util.tree_leaves_with_path(groups)}

    def group_of(path: str) -> str:
        parts = path.split("/")
        for end in range(len(parts), 0, -1):
            if (prefix := "/".join(parts[:end])) in named:
                return named[prefix]
        raise ValueError(
            f"local_norm names no group for the parameter {path!r}, and has {sorted(named)}: give "
            "a group to each parameter, or to the part of the tree that it is in"
        )

    return group_of


def as_size(number: int) -> jax.Array:
    """A number of elements as a scalar: int32 if it fits, else float32."""
    # All stages of a pipeline are one group, and 41 billion does not fit into int32. JAX has no
    # int64 by default; float32 holds the first seven digits.
    return jnp.asarray(number, jnp.int32 if number < 2**31 else jnp.float32)
