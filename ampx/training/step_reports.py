"""What one training step tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.flat_buffers.flat_params import as_tree
from ampx.trees import path_name


class StepReport(NamedTuple):
    """What one step tells. All on the device; reading a field waits for it.

    Attributes:
      loss: float32 (float64 for a float64 loss), unscaled.
      overflow: bool, whether the step was skipped. Inside a window of `ampx.multi_steps`: whether
        the window, or the micro-step, is dropped.
      loss_scale: float32, the scale that this step used.
      learning_rate: float32, the rate that this step used; None where it is not known. A skipped
        step moves no schedule.
      global_norm: float32, norm of the unscaled gradients before any clipping.
      local_norm: dict from parameter group to float32 norm; None unless asked for.
      size: dict from parameter group to int32 number of elements; None unless asked for.
      aux: the loss function's auxiliary output, or None.
      phase: int32, the phase of the precision schedule that this step was in; None without one.
      num_buckets: int32, the reductions of gradients over `axis_name`, see `ampx.ReductionState`;
        None where the step does none itself: without `axis_name`, or with `ampx.zero1`, whose state
        has it.
      reduced_bytes: float32, the bytes that each device handed to them; None as `num_buckets`.

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
    learning_rate: jax.Array | None
    global_norm: jax.Array
    local_norm: dict[str, jax.Array] | None = None
    size: dict[str, jax.Array] | None = None
    aux: Any = None
    phase: jax.Array | None = None
    num_buckets: jax.Array | None = None
    reduced_bytes: jax.Array | None = None


def measure_groups(
    grads: Any, group_of: Callable[[str], str]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Norm and size of every parameter group.

    Args:
      grads: unscaled gradients.
      group_of: from a parameter's path, joined by "/", to its group.
    """
    groups: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(as_tree(grads)):
        name = group_of(path_name(path))
        groups.setdefault(name, []).append(leaf)
    norms = {name: optax.tree.norm(leaves) for name, leaves in groups.items()}
    sizes = {
        name: jnp.asarray(sum(leaf.size for leaf in leaves), jnp.int32)
        for name, leaves in groups.items()
    }
    return norms, sizes
