"""The schedules that are known by name.

Each writes down, for every device, the order of its actions; `Schedule.aligned` finds the ticks.
`num_stages` is the number of devices along the stage axis. Where a device has several stages of the
model, its chunks, the model has `chunks` times as many. How to read a grid::

  tick      0  1  2  3  4  5  6  7  8  9     F0   forward of micro-batch 0
  device 0  F0 F1 F2 .  .  B0 .  B1 .  B2    B0   its backward, or the halves of one: I0, W0
  device 1  .  F0 F1 .  B0 F2 B1 .  B2 .     .    idle: the bubble
  device 2  .  .  F0 B0 F1 B1 F2 B2 .  .     2F0  with chunks: the forward of stage 2

All are one idea with other numbers: a device warms up with some forwards, then takes a backward and
a forward in turn, then the backwards that are left. With P devices, M micro-batches, v chunks and
groups of G micro-batches (P of them, where P divides M), on device d::

  schedule                 warm-up forwards            idle share         activations on paper
  gpipe                    M                           (P-1) / (M+P-1)    M
  1f1b                     P - d                       (P-1) / (M+P-1)    P - d
  eager-1f1b               2(P-1-d) + 1                (P-1) / (M+P-1)    2(P-1-d) + 1
  interleaved              2(P-1-d) + 1 + (v-1)G       (P-1) / (vM+P-1)   the same, of 1/v size
  looped-bfs               vM                          (P-1) / (vM+P-1)   vM, of 1/v size
  zero-bubble              P - d                       (P-1) / (3M+P-1)   P
  interleaved-zero-bubble  P - d + (v-1)G              (P-1) / (3vM+P-1)  P + (v-1)G, of 1/v size
  zero-bubble-v            2(P-d) - 1 on the way down  (P-1) / (6M+P-1)   2P, of half size
  dualpipe-v               2P - 1 - d down, d + 1 up   (P-1) / (6M+P-1)   2P + 1, of half size

Idle shares are for stages of equal cost and at least P micro-batches. Those of the last four are
for `F`, `I` and `W` that take equally long; that of zero-bubble-v begins with 2P - 1 micro-batches,
that of dualpipe-v with 2P. Activations are those that devices keep which go on by themselves,
`liveness(mode="async")`; `ampx.pipelining.schedules.ticks` says why one program keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampx.checking import as_positive_int, check_choice
from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.orders import (
    as_chunks,
    as_sizes,
    group_microbatches,
    list_backwards,
    list_forwards,
    schedule_from_orders,
)
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.zero_bubbles import (
    dualpipe_v,
    interleaved_zero_bubble,
    zero_bubble,
    zero_bubble_v,
)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every micro-batch stays in memory.

    Micro-batch m is forwarded by stage s at tick s + m, so the last stage begins num_stages - 1
    ticks late, and waits as long again while the backwards go to the first. Every device is
    therefore idle for (num_stages - 1) / (num_microbatches + num_stages - 1) of the time: more
    micro-batches make the bubble smaller, and the memory larger.

    Args:
      num_stages: devices along the stage axis, and stages of the model.
      num_microbatches: parts of a batch.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if an argument is not positive.

    References:
      Huang et al., GPipe, https://arxiv.org/abs/1811.06965.

    Examples:
      >>> from ampx.pipelining import gpipe
      >>> print(gpipe(num_stages=2, num_microbatches=3))
      gpipe: 2 stages on 2 devices, 3 micro-batches, 8 ticks, 25.0% idle
      tick      0  1  2  3  4  5  6  7
      device 0  F0 F1 F2 .  .  B0 B1 B2
      device 1  .  F0 F1 F2 B0 B1 B2 .
    """
    return _alternate("gpipe", num_stages, num_microbatches, lambda device: num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """After a few forwards one backward for each forward, so that memory does not grow.

    From the forward of stage s on a micro-batch to its backward there and back, 2 (num_stages - s)
    ticks go by, and each micro-batch on the way gives the stage two ticks of work. So
    num_stages - s of them keep it busy, which is how many forwards it does before its first
    backward, and how many it keeps: min(num_microbatches, num_stages - s). It waits as long as
    with `gpipe`, only at other times. (In ampx's compiled program devices move in step, and a stage
    keeps more: `Schedule.liveness` counts them.)

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
      >>> from ampx.pipelining import one_f_one_b
      >>> print(one_f_one_b(num_stages=3, num_microbatches=3))
      1f1b: 3 stages on 3 devices, 3 micro-batches, 10 ticks, 40.0% idle
      tick      0  1  2  3  4  5  6  7  8  9
      device 0  F0 F1 F2 .  .  B0 .  B1 .  B2
      device 1  .  F0 F1 .  B0 F2 B1 .  B2 .
      device 2  .  .  F0 B0 F1 B1 F2 B2 .  .
    """
    return _alternate("1f1b", num_stages, num_microbatches, lambda device: num_stages - device)


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """`one_f_one_b` with more forwards ahead, so that messages have time to travel.

    If a message takes a tick, a micro-batch comes back to stage s after as many ticks more as there
    are stages to pass, twice. Keeping min(num_microbatches, 2 (num_stages - 1 - s) + 1) of them in
    place of num_stages - s hides that. It is also what `one_f_one_b` keeps in lockstep.

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
      >>> from ampx.pipelining import eager_one_f_one_b
      >>> eager_one_f_one_b(num_stages=4, num_microbatches=8).liveness(mode="async").peak
      (7, 5, 3, 1)
    """
    return _alternate(
        "eager-1f1b",
        num_stages,
        num_microbatches,
        lambda device: 2 * (num_stages - 1 - device) + 1,
    )


def interleaved(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Megatron's 1F1B with several stages a device: it waits `chunks` times less, and sends more.

    Device d has the stages d, num_stages + d, and so on, so the model goes around the devices
    `chunks` times. The bubble at either end is num_stages - 1 actions long, as ever, but each is
    of a stage `chunks` times smaller. Every micro-batch goes from device to device `chunks` times
    as often, which is the price.

    Micro-batches go through the chunks in groups of `num_stages`. If they are not a multiple of it,
    those left over are spread over the groups, one for each from the first on. A small last group
    would make devices wait, or wait for ever; larger groups cost only memory.

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
      >>> from ampx.pipelining import interleaved
      >>> print(interleaved(num_stages=2, num_microbatches=2))
      interleaved: 4 stages on 2 devices, 2 micro-batches, 10 ticks, 20.0% idle
      tick                    0   1   2   3   4   5   6   7   8   9
      device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
      device 1 (stages 1, 3)  .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)
    chunks = as_chunks(chunks, "one_f_one_b")
    groups = group_microbatches(num_stages, num_microbatches)
    return _alternate(
        "interleaved",
        num_stages,
        num_microbatches,
        # A group goes through all chunks but the last, then its first micro-batch through that;
        # until its cotangent is back there is time for two forwards for each device behind.
        lambda device: 2 * (num_stages - 1 - device) + (chunks - 1) * len(groups[0]) + 1,
        chunks=chunks,
        groups=groups,
    )


def looped_breadth_first(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through one chunk before the next: it waits as `interleaved`, keeps all.

    It is to `interleaved` what `gpipe` is to `one_f_one_b`. A device is done with a chunk before it
    begins the next, so parameters that are sharded over data are gathered once for each pass over
    a chunk, and gradients of a chunk can be reduced while the next one is computed.

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
      >>> from ampx.pipelining import looped_breadth_first
      >>> print(looped_breadth_first(num_stages=2, num_microbatches=2))
      looped-bfs: 4 stages on 2 devices, 2 micro-batches, 10 ticks, 20.0% idle
      tick                    0   1   2   3   4   5   6   7   8   9
      device 0 (stages 0, 2)  0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
      device 1 (stages 1, 3)  .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .
    """
    chunks = as_chunks(chunks, "gpipe")
    return _alternate(
        "looped-bfs",
        num_stages,
        num_microbatches,
        lambda device: num_microbatches * chunks,
        chunks=chunks,
    )


def forward_only(num_stages: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards alone, for inference and evaluation.

    Stage s forwards micro-batch m at tick s + m, and keeps nothing. With chunks the order is that
    of `interleaved`.

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
      >>> from ampx.pipelining import forward_only
      >>> print(forward_only(num_stages=3, num_microbatches=4))
      forward-only: 3 stages on 3 devices, 4 micro-batches, 6 ticks, 33.3% idle
      tick      0  1  2  3  4  5
      device 0  F0 F1 F2 F3 .  .
      device 1  .  F0 F1 F2 F3 .
      device 2  .  .  F0 F1 F2 F3
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)
    chunks = as_positive_int("chunks", chunks)
    # Without backwards there is nothing to alternate with: all forwards, in the order of groups.
    groups = group_microbatches(num_stages, num_microbatches)
    return schedule_from_orders(
        "forward-only",
        lambda device: list_forwards(device, num_stages, chunks, groups),
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
    "interleaved-zero-bubble": interleaved_zero_bubble,
    "zero-bubble-v": zero_bubble_v,
    "dualpipe-v": dualpipe_v,
    "forward-only": forward_only,
}
# The names whose functions take `chunks`; zero-bubble-v and dualpipe-v have two of them always.
_CHUNKED = ("interleaved", "looped-bfs", "interleaved-zero-bubble", "forward-only")


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, *, chunks: int | None = None
) -> Schedule:
    """A schedule by its name, as it comes from a command line.

    Args:
      name: `"gpipe"`, `"1f1b"`, `"eager-1f1b"`, `"interleaved"`, `"looped-bfs"`, `"zero-bubble"`,
        `"interleaved-zero-bubble"`, `"zero-bubble-v"`, `"dualpipe-v"` or `"forward-only"`.
      num_stages: devices along the stage axis.
      num_microbatches: parts of a batch.
      chunks: stages of the model on each device, for `"interleaved"`, `"looped-bfs"`,
        `"interleaved-zero-bubble"` and `"forward-only"`; by default theirs.

    Returns:
      A `Schedule`, whose name is `name`.

    Raises:
      TypeError: if a number is not an int.
      ValueError: if the name is unknown, a number is not positive, or `chunks` is given to a
        schedule that has none.

    Examples:
      >>> from ampx.pipelining import make_schedule
      >>> make_schedule("interleaved", 4, 8, chunks=4).num_stages
      16
    """
    check_choice("name", name, tuple(_GENERATORS))
    if chunks is None:
        return _GENERATORS[name](num_stages, num_microbatches)
    if name not in _CHUNKED:
        raise ValueError(f"chunks is for {', '.join(_CHUNKED)}, got chunks={chunks} with {name!r}")
    return _GENERATORS[name](num_stages, num_microbatches, chunks)


def _alternate(
    name: str,
    num_stages: int,
    num_microbatches: int,
    ahead_of: Callable[[int], int],
    *,
    chunks: int = 1,
    groups: Sequence[range] | None = None,
) -> Schedule:
    """Makes a schedule of some forwards ahead, then a backward and a forward in turn.

    With warm-up forwards w (`ahead_of(device)`) and n in all, the order of a device is

      F[0] ... F[w-1]   B[0] F[w]  B[1] F[w+1] ... B[n-w-1] F[n-1]   B[n-w] ... B[n-1]
      warm-up           one backward, one forward                    cool-down

    where F[k] is the k-th forward of the device, which with chunks need not be of micro-batch k.
    """
    num_stages, num_microbatches = as_sizes(num_stages, num_microbatches)

    def order(device: int) -> Iterator[Action]:
        taken = device, num_stages, chunks, groups or [range(num_microbatches)]
        forwards, backwards = list_forwards(*taken), list_backwards(*taken, "B")
        ahead = min(len(forwards), ahead_of(device))
        yield from forwards[:ahead]
        # A slice of one action, or of none after the last forward.
        for place, backward in enumerate(backwards):
            yield backward
            yield from forwards[ahead + place : ahead + place + 1]

    return schedule_from_orders(name, order, tuple(range(num_stages)) * chunks, num_microbatches)
