"""Schedules that fill the bubble with gradients of weights, which nobody waits for.

A backward makes two things: the gradient of a stage's input, `I`, which the stage before is waiting
for, and the gradient of its weights, `W`, which is needed only by the optimizer. Done as one, `B`,
every stage waits for the `W` of all stages behind it. Done as two, the chain of waiting stages gets
shorter, and each `W` can go where its device would be idle::

  tick      0  1  2  3  4  5  6  7  8  9  10
  device 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2    I0 of device 0 waits for two I0, not for two B0
  device 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
  device 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2    W0 comes two micro-batches late: F and I first

Until its `W`, a device keeps the activations of a micro-batch, and what its `I` made for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampx.pipelining.schedules.actions import Action, parse_action
from ampx.pipelining.schedules.orders import as_sizes, schedule_from_orders
from ampx.pipelining.schedules.schedule import Schedule


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose backward is done in halves: gradients of weights fill the waiting at the end.

    This is ZB-H1 of the paper: no more memory than `one_f_one_b` has on its first device, and a
    third of its idle time where the three kinds of action take equally long. With times f, i and w
    a device of `one_f_one_b` is idle for (num_stages - 1) (f + i + w), here for
    (num_stages - 1) (f + i - w). Device d does the gradients of weights d micro-batches after those
    of inputs, so every device keeps min(num_microbatches, num_stages) micro-batches: num_stages - d
    that are between `F` and `I`, and d that wait for their `W`.

    Args:
      num_stages: devices along the stage axis, and stages of the model.
      num_microbatches: parts of a batch.

    Returns:
      A `Schedule` of `F`, `I` and `W`.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241.

    Examples:
      >>> from ampx.pipelining.schedules.zero_bubbles import zero_bubble
      >>> print(zero_bubble(num_stages=3, num_microbatches=3))
      zero-bubble: 3 stages on 3 devices, 3 micro-batches, 11 ticks, 18.2% idle
      tick      0  1  2  3  4  5  6  7  8  9  10
      device 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
      device 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
      device 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)

    def order(device: int) -> Iterator[Action]:
        # The order of 1F1B with `I` in the place of `B`, and behind each `I` the `W` of the
        # micro-batch that is `device` places back. What is then left of `W` comes last.
        ahead = min(num_microbatches, num_stages - device)
        yield from (Action(device, "F", m) for m in range(ahead))
        for m in range(num_microbatches):
            yield Action(device, "I", m)
            if m >= device:
                yield Action(device, "W", m - device)
            if m + ahead < num_microbatches:
                yield Action(device, "F", m + ahead)
        late = range(max(0, num_microbatches - device), num_microbatches)
        yield from (Action(device, "W", m) for m in late)

    return schedule_from_orders("zero-bubble", order, range(num_stages), num_microbatches)


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages a device, so placed that none waits from its first action to its last.

    Device d has the stages d and 2 * num_stages - 1 - d, so that the model goes down the devices
    and up again, like a V. The first device then has the loss, and begins backwards as early as it
    can. With at least 2 * num_stages - 1 micro-batches, and actions of equal length, no device
    waits between its first action and its last; device d only begins d ticks late, and ends as
    much later. Every device keeps up to 2 * num_stages activations of stages half as large.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch.

    Returns:
      A `Schedule` of `F`, `I` and `W` with 2 * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 6.

    Examples:
      >>> from ampx.pipelining.schedules.zero_bubbles import zero_bubble_v
      >>> print(zero_bubble_v(num_stages=2, num_microbatches=2))
      zero-bubble-v: 4 stages on 2 devices, 2 micro-batches, 14 ticks, 14.3% idle
      tick                    0   1   2   3   4   5   6   7   8   9   10  11  12  13
      device 0 (stages 0, 3)  0F0 0F1 .   3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 .   0I1 0W1
      device 1 (stages 1, 2)  .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 .
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)
    # The order is that of a full pipeline; micro-batches that there are not are left out.
    full = max(num_microbatches, 2 * num_stages - 1)

    def order(device: int) -> Iterator[Action]:
        behind = num_stages - device
        down, up = device, 2 * num_stages - 1 - device
        # Each word is a few actions; "d" is the stage on the way down, "u" that on the way up. The
        # first micro-batch is back from the turn after 2 * behind - 1 ticks; until then there are
        # only forwards down. It needs `device` ticks more to the last stage, on device 0, and as
        # many back as a cotangent: ticks for forwards up and down in turn.
        words = ["dF"] * (2 * behind - 1) + ["uF dF"] * device + ["uF uI uW"] * behind
        # Now every tick of six has one of the six actions of a micro-batch.
        words += ["dF dI dW uF uI uW"] * (full - num_stages - behind + 1)
        # There are no forwards down any more, then none at all. Input gradients come first, as
        # other devices wait for them, and what is left of the weights' last.
        words += ["dI dW uF uI uW"] * (behind - 1)
        words += ["dI uI"] * device + ["dI dW"] * behind + ["uW"] * device + ["dW"] * device
        next_of: dict[Action, int] = {}
        for place, kind in " ".join(words).split():
            stream = parse_action(f"{down if place == 'd' else up}{kind}0")
            microbatch = next_of.get(stream, 0)
            next_of[stream] = microbatch + 1
            if microbatch < num_microbatches:
                yield stream._replace(microbatch=microbatch)

    device_of = (*range(num_stages), *reversed(range(num_stages)))
    return schedule_from_orders("zero-bubble-v", order, device_of, num_microbatches)
