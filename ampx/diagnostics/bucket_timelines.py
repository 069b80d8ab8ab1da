"""When buckets of gradients are known, reduced and used: a model of a step's end, in seconds.

A device computes and communicates at the same time, but does one job at a time in each of these
two lanes. Here are four buckets, whose reductions start as soon as a bucket is complete:

    computing      b0 b1 b2 b3|u0 u1    u2    u3       b: backward, u: update
    communicating     r0    r1    r2    r3             r: reduction
                              | verdict: are all gradients finite?

Each job starts when its input is there and its lane is free. u0 and u1 wait for the verdict; before
u2 and u3 the device is idle, since r2 and r3 have not ended yet. Nothing is measured: all times
follow from the rates that the caller gives, so the model shows what an order of work allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ampx.checking import as_bool, as_number, as_number_array
from ampx.summaries import show_fields

Span = tuple[float, float]  # start and end, in seconds


class BucketTimeline(NamedTuple):
    """What happens to each bucket when, in the order in which buckets are reduced.

    Attributes:
      bucket_bytes: float64[buckets], in bytes.
      backward: float64[buckets, 2], start and end in seconds, when the backward pass computes the
        gradients of the bucket.
      reduction: the same, when the bucket is summed over devices.
      update: the same, when its parameters are updated.

    Examples:
      >>> from ampx import BucketTimeline
      >>> times = BucketTimeline([8], backward=[(0, 2)], reduction=[(2, 5)], update=[(5, 6)])
      >>> times.total_time, times.idle_time
      (6.0, 3.0)
    """

    bucket_bytes: ArrayLike
    backward: ArrayLike
    reduction: ArrayLike
    update: ArrayLike

    __repr__ = show_fields

    @property
    def total_time(self) -> float:
        """Seconds from the first start to the last end."""
        spans = np.concatenate([np.asarray(part, float) for part in self[1:]])
        return float(spans.max() - spans.min())

    @property
    def idle_time(self) -> float:
        """How long a device does nothing but wait for reductions."""
        return float(sum(end - start for start, end in self.idle_spans()))

    def idle_spans(self) -> list[Span]:
        """When a device neither computes gradients nor updates parameters."""
        # In the order of their starts; `busy_until` is infinite before the first, so that waiting
        # for the first job is no gap.
        computing = np.concatenate([np.asarray(self.backward), np.asarray(self.update)])
        spans, busy_until = [], math.inf
        for start, end in sorted(map(tuple, computing.astype(float).tolist())):
            if start > busy_until:
                spans.append((busy_until, start))
            busy_until = end if busy_until == math.inf else max(busy_until, end)
        return spans


def bucket_timeline(
    bucket_bytes: Sequence[int],
    *,
    bandwidth: float,
    backward_seconds: float,
    update_seconds: float,
    overlap: bool | Literal["tail"] = True,
    latency: float = 0.0,
) -> BucketTimeline:
    """Times the end of a step: the backward pass, a reduction for each bucket, the updates.

    A backward pass completes buckets one after the other, as fast as they are large. A device
    reduces one bucket at a time and updates one at a time. A bucket's update waits for its
    reduction and for the verdict on all gradients, which is there when the backward pass ends.

    Args:
      bucket_bytes: in the order in which the backward pass completes the buckets, as
        `ampx.bucket_layout` has them: `[b.size * b.dtype.itemsize for b in layout.buckets]`.
      bandwidth: bytes of gradients that are reduced in a second.
      backward_seconds: of the whole backward pass.
      update_seconds: of all updates.
      overlap: True starts to reduce a bucket as soon as it is complete. `"tail"` waits for the
        verdict first, as `ampx.all_reduce` inside a loss scale does, and hides reductions behind
        the updates alone. With False reductions wait for the whole backward pass, and updates for
        the last reduction.
      latency: seconds that each reduction takes besides, whatever its size.

    Returns:
      A `BucketTimeline`.

    Raises:
      ValueError: for no buckets or one without bytes, a `bandwidth` that is not positive, negative
        seconds, or an unknown `overlap`.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704.

    Examples:
      >>> from ampx import bucket_timeline
      >>> for overlap in (False, "tail", True):
      ...     times = bucket_timeline(
      ...         [100, 100, 100, 100],
      ...         bandwidth=100,
      ...         backward_seconds=8,
      ...         update_seconds=4,
      ...         overlap=overlap,
      ...     )
      ...     print(f"{overlap!s:5}  {times.total_time:g} s, of them {times.idle_time:g} s idle")
      False  16 s, of them 4 s idle
      tail   13 s, of them 1 s idle
      True   12 s, of them 0 s idle
    """
    sizes = as_number_array("bucket_bytes", bucket_bytes)
    if sizes.ndim != 1 or not sizes.size or not np.all(sizes > 0):
        raise ValueError(
            f"bucket_bytes must hold a positive number for each bucket, got {bucket_bytes}"
        )
    bandwidth = as_number(
        "bandwidth", bandwidth, above=0, may_be_infinite=True, unit="bytes per second"
    )
    backward_seconds = as_number("backward_seconds", backward_seconds, least=0)
    update_seconds = as_number("update_seconds", update_seconds, least=0)
    latency = as_number("latency", latency, least=0)
    if isinstance(overlap, str) and overlap != "tail":
        raise ValueError(f"overlap must be True, False or 'tail', got {overlap!r}")
    overlap = overlap if overlap == "tail" else as_bool("overlap", overlap)

    # No layer is known to be slower than others, so time goes with the bytes of parameters.
    shares = sizes / sizes.sum()
    backward = _run_in_turn(np.zeros(len(sizes)), shares * backward_seconds)
    verdict = backward[-1, 1]  # taken from the local gradients: it needs no reduction
    complete = backward[:, 1] if overlap is True else np.full(len(sizes), verdict)
    reduction = _run_in_turn(complete, sizes / bandwidth + latency)
    arrived = reduction[:, 1] if overlap else np.full(len(sizes), reduction[-1, 1])
    # Updates run in the same lane as the backward pass, which has ended with the verdict.
    update = _run_in_turn(np.maximum(arrived, verdict), shares * update_seconds)
    return BucketTimeline(sizes, backward, reduction, update)


def _run_in_turn(ready: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Times jobs that run one at a time, in their order, each when it is ready.

    Args:
      ready: float64[jobs], when the input of each is there.
      seconds: float64[jobs], how long each takes.

    Returns:
      float64[jobs, 2], start and end.
    """
    spans: list[Span] = []
    free: Any = -math.inf
    for when, duration in zip(ready, seconds, strict=True):
        start = max(free, when)
        free = start + duration
        spans.append((start, free))
    return np.array(spans)
