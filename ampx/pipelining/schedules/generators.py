"""The schedules that are known by name.

Each writes down, for every device, the order of its actions; `Schedule.aligned` finds the ticks.
`num_stages` is the number of devices along the stage axis. Where a device has several stages of the
model, its chunks, the model has `chunks` times as many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from ampx.checking import check_choice, check_positive_int
from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.orders import check_sizes, schedule_from_orders
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.zero_bubbles import zero_bubble, zero_bubble_v


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every micro-batch stays in memory.

    Args:
      num_stages: devices along the stage axis, and stages of the model.
      num_microbatches: parts of a batch. A device waits for (num_stages - 1) of
        (num_microbatches + num_stages - 1) parts of the time.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Huang et al., GPipe, https://arxiv.org/abs/1811.06965.

    Examples:
      >>> from ampx.pipelining.schedules.generators import gpipe
      >>> print(gpipe(num_stages=2, num_microbatches=3))
      gpipe: 2 stages on 2 devices, 3 micro-batches, 8 ticks, 25.0% idle
      tick      0  1  2  3  4  5  6  7
      device 0  F0 F1 F2 .  .  B0 B1 B2
      device 1  .  F0 F1 F2 B0 B1 B2 .
    """
    return _alternating("gpipe", num_stages, num_microbatches, lambda device: num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """After a few forwards one backward for each forward, so that memory does not grow.

    Stage s keeps min(num_microbatches, num_stages - s) micro-batches, and waits as with `gpipe`.

    Args:
      num_stages: devices along the stage axis, and stages of the model.
      num_microbatches: parts of a batch.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Narayanan et al., Megatron-LM, https://arxiv.org/abs/2104.04473, after PipeDream-Flush.

    Examples:
      >>> from ampx.pipelining.schedules.generators import one_f_one_b
      >>> print(one_f_one_b(num_stages=3, num_microbatches=3))
      1f1b: 3 stages on 3 devices, 3 micro-batches, 10 ticks, 40.0% idle
      tick      0  1  2  3  4  5  6  7  8  9
      device 0  F0 F1 F2 .  .  B0 .  B1 .  B2
      device 1  .  F0 F1 .  B0 F2 B1 .  B2 .
      device 2  .  .  F0 B0 F1 B1 F2 B2 .  .
    """
    return _alternating("1f1b", num_stages, num_microbatches, lambda device: num_stages - device)


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """`one_f_one_b` with more forwards ahead, so that messages have time to travel.

    Stage s keeps min(num_microbatches, 2 (num_stages - 1 - s) + 1) micro-batches.

    Args:
      num_stages: devices along the stage axis, and stages of the model.
      num_microbatches: parts of a batch.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Zhuang et al., eager 1F1B, https://arxiv.org/abs/2211.05322; JaxPP.

    Examples:
      >>> from ampx.pipelining.schedules.generators import eager_one_f_one_b
      >>> eager_one_f_one_b(num_stages=4, num_microbatches=8).liveness().peak
      (7, 5, 3, 1)
    """
    return _alternating(
        "eager-1f1b",
        num_stages,
        num_microbatches,
        lambda device: 2 * (num_stages - 1 - device) + 1,
    )


def interleaved(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Megatron's 1F1B with several stages a device: it waits `chunks` times less, and sends more.

    Device d has the stages d, num_stages + d, and so on. Micro-batches go through the chunks in
    groups of `num_stages`. What is left over is spread over the groups, first the first: a small
    last group would make devices wait, or wait for ever, and larger groups cost only memory.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch; a multiple of `num_stages` needs least memory.
      chunks: stages of the model on each device.

    Returns:
      A `Schedule` of chunks * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive, or there is only one chunk.

    References:
      Narayanan et al., Megatron-LM, https://arxiv.org/abs/2104.04473.

    Examples:
      >>> from ampx.pipelining.schedules.generators import interleaved
      >>> print(interleaved(num_stages=2, num_microbatches=2))
      interleaved: 4 stages on 2 devices, 2 micro-batches, 10 ticks, 20.0% idle
      tick                    0   1   2   3   4   5   6   7   8   9
      device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
      device 1 (stages 1, 3)  .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .
    """
    check_sizes(num_stages, num_microbatches)
    _check_chunks(chunks, "one_f_one_b")
    groups = _groups(num_stages, num_microbatches)
    return _alternating(
        "interleaved",
        num_stages,
        num_microbatches,
        lambda device: 2 * (num_stages - 1 - device) + (chunks - 1) * len(groups[0]) + 1,
        chunks=chunks,
        groups=groups,
    )


def looped_breadth_first(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through one chunk before the next: it waits as `interleaved`, keeps all.

    The gradients of a chunk are complete at once, which suits sharded parameters.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch; at least `num_stages`, or more time is lost.
      chunks: stages of the model on each device.

    Returns:
      A `Schedule` of chunks * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive, or there is only one chunk.

    References:
      Lamy-Poirier, Breadth-First Pipeline Parallelism, https://arxiv.org/abs/2211.05953.

    Examples:
      >>> from ampx.pipelining.schedules.generators import looped_breadth_first
      >>> print(looped_breadth_first(num_stages=2, num_microbatches=2))
      looped-bfs: 4 stages on 2 devices, 2 micro-batches, 10 ticks, 20.0% idle
      tick                    0   1   2   3   4   5   6   7   8   9
      device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
      device 1 (stages 1, 3)  .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .
    """
    _check_chunks(chunks, "gpipe")
    return _alternating(
        "looped-bfs",
        num_stages,
        num_microbatches,
        lambda device: num_microbatches * chunks,
        chunks=chunks,
    )


def forward_only(num_stages: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards alone, for inference and evaluation.

    Args:
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch.
      chunks: stages of the model on each device, placed and taken in turn as by `interleaved`.

    Returns:
      A `Schedule` of chunks * num_stages stages.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    Examples:
      >>> from ampx.pipelining.schedules.generators import forward_only
      >>> print(forward_only(num_stages=3, num_microbatches=4))
      forward-only: 3 stages on 3 devices, 4 micro-batches, 6 ticks, 33.3% idle
      tick      0  1  2  3  4  5
      device 0  F0 F1 F2 F3 .  .
      device 1  .  F0 F1 F2 F3 .
      device 2  .  .  F0 F1 F2 F3
    """
    check_sizes(num_stages, num_microbatches)
    check_positive_int("chunks", chunks)
    groups = _groups(num_stages, num_microbatches)
    return schedule_from_orders(
        "forward-only",
        lambda device: _forwards(device, num_stages, chunks, groups),
        tuple(range(num_stages)) * chunks,
        num_microbatches,
        has_backward=False,
    )


_GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_breadth_first,
    "zero-bubble": zero_bubble,
    "zero-bubble-v": zero_bubble_v,
    "forward-only": forward_only,
}
_CHUNKED = ("interleaved", "looped-bfs", "forward-only")


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, *, chunks: int | None = None
) -> Schedule:
    """A schedule by its name, as it comes from a command line.

    Args:
      name: `"gpipe"`, `"1f1b"`, `"eager-1f1b"`, `"interleaved"`, `"looped-bfs"`, `"zero-bubble"`,
        `"zero-bubble-v"` or `"forward-only"`.
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch.
      chunks: stages of the model on each device, for those that let choose.

    Returns:
      A `Schedule`, whose name is `name`.

    Raises:
      TypeError: if a number is not an int.
      ValueError: if the name is unknown, a number is not positive, or `chunks` is given to a
        schedule that has none.

    Examples:
      >>> from ampx.pipelining.schedules.generators import make_schedule
      >>> make_schedule("interleaved", 4, 8, chunks=4).num_stages
      16
    """
    check_choice("name", name, tuple(_GENERATORS))
    if chunks is None:
        return _GENERATORS[name](num_stages, num_microbatches)
    if name not in _CHUNKED:
        raise ValueError(f"chunks is for {', '.join(_CHUNKED)}, got chunks={chunks} with {name!r}")
    return _GENERATORS[name](num_stages, num_microbatches, chunks)


def _check_chunks(chunks: int, instead: str) -> None:
    check_positive_int("chunks", chunks)
    if chunks < 2:
        raise ValueError(f"chunks must be at least 2, got {chunks}: use {instead}")


def _alternating(
    name: str,
    num_stages: int,
    num_microbatches: int,
    ahead_of: Callable[[int], int],
    *,
    chunks: int = 1,
    groups: Sequence[range] | None = None,
) -> Schedule:
    """So many forwards ahead on each device, then a backward and a forward in turn."""
    check_sizes(num_stages, num_microbatches)

    def order(device: int) -> Iterator[Action]:
        forwards = _forwards(device, num_stages, chunks, groups or [range(num_microbatches)])
        # Backwards go through the chunks the other way round.
        backwards = [
            Action((chunks - 1 - stage // num_stages) * num_stages + device, "B", microbatch)
            for stage, _, microbatch in forwards
        ]
        ahead = min(len(forwards), ahead_of(device))
        yield from forwards[:ahead]
        for place, backward in enumerate(backwards):
            yield backward
            yield from forwards[ahead + place : ahead + place + 1]

    return schedule_from_orders(name, order, tuple(range(num_stages)) * chunks, num_microbatches)


def _groups(num_stages: int, num_microbatches: int) -> list[range]:
    """Micro-batches in groups of `num_stages` or, with what is left over, a little more."""
    count = max(1, num_microbatches // num_stages)
    size, left = divmod(num_microbatches, count)
    starts = [group * size + min(group, left) for group in range(count + 1)]
    return [range(*bounds) for bounds in itertools.pairwise(starts)]


def _forwards(device: int, num_stages: int, chunks: int, groups: Sequence[range]) -> list[Action]:
    """The forwards of a device: a group of micro-batches through all chunks, then the next."""
    return [
        Action(chunk * num_stages + device, "F", microbatch)
        for group in groups
        for chunk in range(chunks)
        for microbatch in group
    ]
