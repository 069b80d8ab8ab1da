"""The state of a reduction over devices, and what its class tells those around it."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ampx.summaries import show_fields


class ReductionState(NamedTuple):
    """The state of `ampx.all_reduce`: what the last update handed over to be reduced.

    Both numbers are known when a step is traced. They are 0 before the first update, and on one
    device, where nothing travels. A sum that takes several collectives is counted once.

    Attributes:
      num_buckets: int32 scalar, reductions of gradients: one for each bucket; one for each array
        where the mesh has unmapped axes, or the gradients are unreduced over Explicit axes.
      reduced_bytes: float32 scalar, the bytes that each device hands to these reductions, padding
        included, in the dtype in which they travel: for floating buckets `wire_dtype`, if there is
        one; else `reduce_dtype`, or that of the gradients if it is wider; over Explicit axes that
        of the gradients. Arrays that are divided over axes which are not mapped count whole.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> print(*ampx.all_reduce("data").init(jnp.ones(2)))
      0 0.0
    """

    num_buckets: jax.Array
    reduced_bytes: jax.Array

    __repr__ = show_fields
    # Read by `trees.has_mark`: a loss scale and `multi_steps` must know that a reduction happens
    # inside them, and must not import this module, which stands beside theirs.
    reduces_gradients = True
    # Read likewise: behind an overlapped reduction no branch may tie all parameters together. A
    # state says what was asked for, and not on which device, so that another may go on with it.
    overlaps_by_device = True


class OverlappedReductionState(ReductionState):
    """The state of a reduction whose last bucket is to overlap with updates of the first."""

    __slots__ = ()

    overlaps_updates = True


class SeparateReductionState(ReductionState):
    """The state of a reduction that updates wait for."""

    __slots__ = ()

    overlaps_by_device = False


# From the setting `tail_overlap` to the class of the state.
STATE_OF_OVERLAP = {
    None: ReductionState,
    True: OverlappedReductionState,
    False: SeparateReductionState,
}
