"""From an order of actions for each device to a schedule; what all generators share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from ampx.checking import as_positive_int
from ampx.pipelining.schedules.actions import Action, Kind
from ampx.pipelining.schedules.schedule import Schedule


def as_sizes(num_stages: int, num_microbatches: int) -> tuple[int, int]:
    """Converts the sizes of a schedule to Python's ints.

    Raises:
      TypeError: if one is not an int.
      ValueError: if one is not positive.
    """
    return (
        as_positive_int("num_stages", num_stages),
        as_positive_int("num_microbatches", num_microbatches),
    )


def as_chunks(chunks: int, instead: str) -> int:
    """Converts a number of chunks; refuses one, which is a schedule with another name."""
    chunks = as_positive_int("chunks", chunks)
    if chunks < 2:
        raise ValueError(f"chunks must be at least 2, got {chunks}: use {instead}")
    return chunks


def schedule_from_orders(
    name: str,
    order_of: Callable[[int], Iterable[Action]],
    device_of: Sequence[int],
    num_microbatches: int,
    *,
    has_backward: bool = True,
) -> Schedule:
    """Makes a schedule of what each device does, in its order; alignment finds the ticks.

    Args:
      name: what it is called.
      order_of: `order_of(device)`, all actions of a device.
      device_of: for each stage the device that runs it.
      num_microbatches: into how many parts the batch of a step is divided.
      has_backward: whether there are gradients.

    Raises:
      ValueError: if in these orders the devices wait for each other for ever.

    Examples:
      >>> from ampx.pipelining import Action
      >>> from ampx.pipelining.schedules.orders import schedule_from_orders
      >>> order = lambda device: [Action(device, "F", 0), Action(device, "B", 0)]
      >>> print(schedule_from_orders("own", order, (0, 1), num_microbatches=1))
      own: 2 stages on 2 devices, 1 micro-batches, 4 ticks, 50.0% idle
      tick      0  1  2  3
      device 0  F0 .  .  B0
      device 1  .  F0 B0 .
    """
    orders = tuple(tuple(order_of(device)) for device in range(max(device_of) + 1))
    return Schedule(name, orders, tuple(device_of), num_microbatches, has_backward).aligned()


def group_microbatches(num_stages: int, num_microbatches: int) -> list[range]:
    """Divides micro-batches into groups of `num_stages` or, with what is left over, a few more.

    A group is as many as fill the devices once: when its last micro-batch has gone through a chunk
    on device 0, its first one comes back from the last device for the next chunk.
    """
    count = max(1, num_microbatches // num_stages)
    size, left = divmod(num_microbatches, count)
    # 7 micro-batches on 3 devices: 2 groups, range(0, 4) and range(4, 7).
    starts = [group * size + min(group, left) for group in range(count + 1)]
    return [range(*bounds) for bounds in itertools.pairwise(starts)]


def list_forwards(
    device: int, num_stages: int, chunks: int, groups: Sequence[range]
) -> list[Action]:
    """Lists the forwards of a device: a group of micro-batches through all chunks, then the next.

    Args:
      device: which device.
      num_stages: devices along the stage axis.
      chunks: stages of the model on each device.
      groups: from `group_microbatches`, or one group of all.
    """
    return [
        Action(chunk * num_stages + device, "F", microbatch)
        for group in groups
        for chunk in range(chunks)
        for microbatch in group
    ]


def list_backwards(
    device: int, num_stages: int, chunks: int, groups: Sequence[range], kind: Kind
) -> list[Action]:
    """Lists the backwards of a device: micro-batches as in the forwards, the last chunk first.

    Where the forwards are `0F0 0F1 2F0 2F1`, the backwards are `2B0 2B1 0B0 0B1`.
    """
    return [
        Action((chunks - 1 - stage // num_stages) * num_stages + device, kind, microbatch)
        for stage, _, microbatch in list_forwards(device, num_stages, chunks, groups)
    ]
