"""ZeRO-2: the gradients of each micro-batch go to the devices that hold their shards, at once.

For k micro-batches on n devices the sums of gradients of P parameters take

    without     P numbers on each device, and one reduction of P numbers after the last micro-batch
    with it     P / n numbers, and k reductions: after each micro-batch its gradients are
                reduce-scattered, bucket by bucket, and this device adds up its shards

Memory is bought with traffic: k times the bytes. A leaf that the devices do not divide is added up
whole, and summed over devices once, after the last micro-batch. Of leaves that are replaced by
their gradient the maximum is taken (`ampx.overwritten`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ampx.checking import as_bool
from ampx.data_parallel.reduction import Reduction, make_reduction
from ampx.data_parallel.reduction_states import ReductionState
from ampx.data_parallel.shard_exchange import ShardExchange
from ampx.model_axes import ModelAxes, as_model_axes, axes_of_leaves
from ampx.overwritten import split_optimized, split_overwritten
from ampx.trees import merge_trainable


@dataclasses.dataclass(frozen=True)
class Scattering:
    """How gradients are scattered: settings alone."""

    reduction: Reduction
    model_axes: ModelAxes

    def begin(self, params: Any) -> GradientScatter:
        """Begins the sum of the gradients of these parameters, as they are before any pcast."""
        optimized = split_optimized(params)[0]  # the paths in `model_axes` are those of this tree
        own_axes = axes_of_leaves(optimized, self.model_axes)
        return GradientScatter(ShardExchange(self.reduction, optimized, own_axes))


class GradientScatter:
    """Scatters the gradients of micro-batches; made anew whenever gradients are traced."""

    def __init__(self, exchange: ShardExchange) -> None:
        self.exchange = exchange
        self.sent: list[int] = []

    def cut_zeros(self, zeros: Any) -> Any:
        """Cuts the zeros that sums begin with to the shapes of shards."""
        others, overwritten = split_overwritten(zeros)
        return merge_trainable(self.exchange.cut_zeros(others), overwritten)

    def scatter(self, grads: Any) -> Any:
        """Sums the gradients of one micro-batch over devices, and returns this device's shards."""
        others, overwritten = split_overwritten(grads)
        # Kept, not counted up: the body of a scan may be traced several times.
        shards, self.sent = self.exchange.scatter_divided(others)
        return merge_trainable(shards, overwritten)

    def finish(self, sums: Any, num_microbatches: int) -> tuple[Any, ReductionState]:
        """Sums what is not divided over devices, and marks all leaves; none is an overwritten one.

        Returns:
          A tree with `GradientShard` leaves, and what all micro-batches together have sent.
        """
        grads, sent = self.exchange.sum_undivided(sums)
        state = self.exchange.reduction.state([*self.sent * num_microbatches, *sent])
        return self.exchange.mark(grads), state


def make_scattering(
    scatter_gradients: Any, axes: tuple[str, ...], bucket_bytes: Any, model_axes: Any, tables: Any
) -> Scattering | None:
    """Checks the settings of `ampx.value_and_grad` that are about this; None where it is off.

    Raises:
      TypeError: for settings of the wrong kind.
      ValueError: for settings that have no meaning together.
    """
    is_on, setting = as_bool("scatter_gradients", scatter_gradients), as_model_axes(model_axes)
    reduction = make_reduction(axes or "none", op="sum", bucket_bytes=bucket_bytes)
    if not is_on:
        for name, value in (("bucket_bytes", bucket_bytes), ("model_axes", model_axes)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} without scatter_gradients: nothing is reduced here. Give it "
                    "to what reduces the gradients, such as ampx.all_reduce"
                )
        return None
    if not axes:
        raise ValueError(
            "scatter_gradients=True without axis_name: there are no devices to divide gradients "
            "over; name the mapped axes that the batch is split over"
        )
    if tables:
        raise ValueError(
            "scatter_gradients=True with sparse_rows: rows of different indices cannot be summed "
            "over devices; leave out one of them"
        )
    return Scattering(reduction, setting)
