"""Schedules that fill the bubble with gradients of weights, which nobody waits for.

A backward makes two things: the gradient of a stage's input, `I`, which the stage before is waiting
for, and the gradient of its weights, `W`, which is needed only by the optimizer. Done as one, `B`,
every stage waits for the `W` of all stages behind it. Done as two, the chain of waiting stages gets
shorter, and each `W` can go where its device would be idle::

  tick      0  1  2  3  4  5  6  7  8  9  10
  device 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2    I0 of device 0 waits for two I0, not for two B0
  device 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
  device 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2    W0 comes two micro-batches late: F and I first

`zero_bubble` does so for a stage on each device, `interleaved_zero_bubble` for several in a ring.
In `zero_bubble_v` and `dualpipe_v` each device has two stages, on the way down the devices and up
again, so that the first device has the loss and begins backwards early.

Until its `W`, a device keeps the activations of a micro-batch, and what its `I` made for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from ampx.pipelining.schedules.actions import Action, Kind
from ampx.pipelining.schedules.orders import (
    as_chunks,
    as_sizes,
    group_microbatches,
    list_backwards,
    list_forwards,
    schedule_from_orders,
)
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
      >>> from ampx.pipelining import zero_bubble
      >>> print(zero_bubble(num_stages=3, num_microbatches=3))
      zero-bubble: 3 stages on 3 devices, 3 micro-batches, 11 ticks, 18.2% idle
      tick      0  1  2  3  4  5  6  7  8  9  10
      device 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
      device 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
      device 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    return _delay_weights("zero-bubble", *as_sizes(num_stages, num_microbatches), chunks=1)


def interleaved_zero_bubble(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """`zero_bubble` with several stages a device: what is left of its bubble, divided by `chunks`.

    Stages lie as in `interleaved`. Actions are in the order of `zero_bubble`, with the forwards and
    backwards of all chunks in the place of those of one. With times f, i and w of a stage, each
    device is idle for (num_stages - 1) (f + i - w), and such a stage is a part of what a device
    has. With num_microbatches a multiple of num_stages, every device keeps up to
    chunks * num_stages activations of stages that are `chunks` times smaller: as many bytes as
    `zero_bubble` does, and less than `interleaved` on its first device.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch; a multiple of `num_stages` needs least memory.
      chunks: stages of the model on each device.

    Returns:
      A `Schedule` of `F`, `I` and `W` with chunks * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive, or there is only one chunk.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, with the stages
      of Narayanan et al., https://arxiv.org/abs/2104.04473; torch's ScheduleInterleavedZeroBubble.

    Examples:
      >>> from ampx.pipelining import interleaved_zero_bubble
      >>> print(interleaved_zero_bubble(num_stages=2, num_microbatches=2))
      interleaved-zero-bubble: 4 stages on 2 devices, 2 micro-batches, 13 ticks, 7.7% idle
      tick                    0   1   2   3   4   5   6   7   8   9   10  11  12
      device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
      device 1 (stages 1, 3)  .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)
    chunks = as_chunks(chunks, "zero_bubble")
    return _delay_weights("interleaved-zero-bubble", num_stages, num_microbatches, chunks)


def _delay_weights(name: str, num_stages: int, num_microbatches: int, chunks: int) -> Schedule:
    """Makes a schedule of 1F1B's order whose gradients of weights come `device` places late.

    With warm-up forwards w, and F[k], I[k] the k-th of a device, the order of device 2 is

      F[0] ... F[w-1]   I[0] F[w]   I[1] F[w+1]   I[2] W[0] F[w+2]   I[3] W[1] F[w+3]   ...

    What is left of `W` at the end comes last.
    """
    groups = group_microbatches(num_stages, num_microbatches)

    def order(device: int) -> Iterator[Action]:
        taken = device, num_stages, chunks, groups
        forwards, inputs = list_forwards(*taken), list_backwards(*taken, "I")
        weights = [action._replace(kind="W") for action in inputs]
        # A group goes through all chunks but the last before its first micro-batch is in that one.
        ahead = (chunks - 1) * len(groups[0]) + num_stages - device
        yield from forwards[:ahead]
        for place, action in enumerate(inputs):
            yield action
            # Slices of one action, or of none.
            yield from weights[place - device : place - device + 1] if place >= device else ()
            yield from forwards[ahead + place : ahead + place + 1]
        yield from weights[max(0, len(weights) - device) :]

    return schedule_from_orders(name, order, tuple(range(num_stages)) * chunks, num_microbatches)


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
      >>> from ampx.pipelining import zero_bubble_v
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
        return _read_words(words, {"d": down, "u": up}, num_microbatches)

    device_of = (*range(num_stages), *reversed(range(num_stages)))
    return schedule_from_orders("zero-bubble-v", order, device_of, num_microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipeV: down the devices and up again, with a forward beside each backward.

    Stages lie as in `zero_bubble_v`. Once the pipeline is full, a device takes a forward down and a
    backward of a micro-batch that is on its way up, then a forward up and a backward down. The two
    of a pair have nothing to do with each other, so the messages of one can travel while the other
    computes; in ampx's program they share a tick. Backwards are whole there, and come in halves at
    both ends, where weight gradients fill the bubble. With at least 2 * num_stages micro-batches a
    device is idle for at most (num_stages - 1) (p + b - 3 w), with times p of a pair, b of a whole
    backward and w of a weight gradient. It keeps up to 2 * num_stages + 1 activations of stages
    half as large.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch; with fewer than 2 * num_stages devices wait for longer.

    Returns:
      A `Schedule` of `F`, `B`, `I` and `W` with 2 * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      DeepSeek-AI, DualPipe, https://github.com/deepseek-ai/DualPipe, after
      https://arxiv.org/abs/2412.19437; cut in half by Qi et al.; torch's ScheduleDualPipeV.

    Examples:
      >>> from ampx.pipelining import dualpipe_v
      >>> print(dualpipe_v(num_stages=2, num_microbatches=3))
      dualpipe-v: 4 stages on 2 devices, 3 micro-batches, 15 ticks, 13.3% idle
      tick                    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14
      device 0 (stages 0, 3)  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3F2 0B0 3B2 0B1 .   0I2 0W2
      device 1 (stages 1, 2)  .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2 .   .
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)
    # As in `zero_bubble_v`: the order of a full pipeline, without micro-batches that are not there.
    full = max(num_microbatches, 2 * num_stages)

    def order(device: int) -> Iterator[Action]:
        behind, here = num_stages - 1 - device, device + 1
        # Until the first micro-batch is back from the turn there are only forwards down; then
        # forwards up, too, until it is back from the last stage as a cotangent.
        words = ["dF"] * (2 * behind) + ["dF uF"] * here
        # Backwards begin. In halves, since the stages behind on the way down wait for their `I`.
        words += ["uI W uF"] * behind
        # Pairs of a forward and a backward that goes the other way.
        words += ["dF uB uF dB"] * (full - 2 * num_stages + here)
        # No forwards down are left, and soon none at all.
        words += ["uB uF dB"] * behind
        # The last backwards: whole ones, then halves, whose weight gradients fill the end.
        last = ["u", "d"] * here
        words += [f"{place}B" for place in last[:here]] + [f"{place}I" for place in last[here:]]
        words += ["W dI"] * behind + ["W"] * here
        return _read_words(words, {"d": device, "u": 2 * num_stages - 1 - device}, num_microbatches)

    device_of = (*range(num_stages), *reversed(range(num_stages)))
    return schedule_from_orders("dualpipe-v", order, device_of, num_microbatches)


def _read_words(
    words: Iterable[str], stage_of: Mapping[str, int], num_microbatches: int
) -> Iterator[Action]:
    """Reads a device's order, in which micro-batches have no numbers: they come in turn.

    Args:
      words: each is a few actions: the name of a stage and a kind, such as `"dF uI"`. A `"uW"` is
        the oldest weight gradient of its stage that is left, a `"W"` the oldest of all.
      stage_of: the stages by name.
      num_microbatches: how many there are. Actions of later ones are left out.
    """
    counts: Counter[tuple[int, bool]] = Counter()
    late: list[Action] = []
    for word in " ".join(words).split():
        name, kind = word[:-1], cast(Kind, word[-1])
        if kind == "W":
            action = next(a for a in late if not name or a.stage == stage_of[name])
            late.remove(action)
        else:
            # A stage goes forward in turn and backward in turn, whole or in halves.
            stream = stage_of[name], kind == "F"
            action = Action(stage_of[name], kind, counts[stream])
            counts[stream] += 1
            if kind == "I":
                late.append(action._replace(kind="W"))
        if action.microbatch < num_microbatches:
            yield action
