"""What `ampx.value_and_grad` and `ampx.pipelining.value_and_grad` return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ampx.data_parallel.reduction_states import ReductionState
from ampx.mesh_axes import AxisNames
from ampx.summaries import show_fields


class GradResult(NamedTuple):
    """What `ampx.value_and_grad` returns.

    Attributes:
      loss: float32 scalar (float64 for a float64 loss), never multiplied by the loss scale.
      grads: in the shapes of the parameters, float32 (float64 for float64 gradients), divided by
        the total weight, and still multiplied by the loss scale; of leaves that are replaced by
        their gradient, as the scales of flax's layers in 8 bits, the new value as it is; None if
        only the loss was asked for. With `scatter_gradients`, a `GradientShard` for each of these.
      weight: float32 scalar, the total weight over micro-batches and, with `axis_name`, devices.
      aux: auxiliary output, reduced over micro-batches; None without `has_aux`.
      model_state: the state after the last micro-batch; None where none was given.
      verdict: int32[2], what `ampx.count_nonfinite` found in the gradients before they were summed
        over devices: arrays with an infinity, arrays with a NaN. None where they have not been
        summed yet, so that the optimizer can still look for itself, and with `scatter_gradients`.
      reduction: with `scatter_gradients`, what each device handed to the reductions of all
        micro-batches; else None.
      loss_scale: float32 scalar, the scale that `grads` are still multiplied by; None if no
        `loss_scale` was given. A loss scale that is given the whole result,
        `tx.update(result, opt_state, params)`, reads it.
      shared_loss_axes: the mapped axes over which `loss` is one number and `grads` are each
        device's part of a sum, where no type tells it: under `check_vma=False`, in `jax.pmap` and
        in `vmap`. Else None. It has no leaves. A loss scale that is given the whole result lets
        `ampx.all_reduce` inside it sum over them, and warns where there is none; after a sum of
        your own take it away, `result._replace(grads=summed, shared_loss_axes=None)`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> result = ampx.value_and_grad(lambda w, x: jnp.mean(w * x))(jnp.array(2.0), jnp.ones(4))
      >>> float(result.loss), float(result.grads), float(result.weight)
      (2.0, 1.0, 1.0)
    """

    loss: jax.Array
    grads: Any
    weight: jax.Array
    aux: Any = None
    model_state: Any = None
    verdict: jax.Array | None = None
    reduction: ReductionState | None = None
    loss_scale: jax.Array | None = None
    shared_loss_axes: AxisNames | None = None

    # Read by loss scales, whose package this one imports.
    holds_scaled_gradients = True

    __repr__ = show_fields

    def with_scale(self, loss_scale: ArrayLike) -> GradResult:
        """The result of a loss that was multiplied by `loss_scale`; the number 1 counts as none."""
        is_one = isinstance(loss_scale, int | float) and loss_scale == 1
        return self._replace(loss_scale=None if is_one else jnp.asarray(loss_scale, jnp.float32))

    def with_parts_over(self, axes: tuple[str, ...]) -> GradResult:
        """The result where `grads` are parts of a sum over some axes, and no type tells it."""
        return self._replace(shared_loss_axes=AxisNames(axes)) if axes else self
