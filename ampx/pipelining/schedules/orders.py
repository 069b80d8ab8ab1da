"""From an order of actions for each device to a schedule; what all generators share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ampx.checking import as_positive_int
from ampx.pipelining.schedules.actions import Action
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
      >>> from ampx.pipelining.schedules.actions import Action
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
