"""The parts of the benchmark, in the order in which they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from benchmarks.gpu import float8, gpt2, kernels, tails
from benchmarks.gpu.rows import Case

TINY_REPEATS = 2


@dataclasses.dataclass(frozen=True)
class Part:
    """What is measured in a process of its own.

    Attributes:
      make_cases: makes its cases, from whether this is a rehearsal; touches no device.
      seconds: that it may take at most. What a part leaves over, later ones may use: they get the
        same share of what is left.
      threads: in which it compiles its programs itself; 0 if workers compile them before.
    """

    make_cases: Callable[[bool], list[Case]]
    seconds: float
    threads: int = 0


# XLA chooses the kernels of matrix products by timing them. All ways must be of one choice, so one
# process compiles all of them, one after the other: products that are timed at the same time slow
# each other down. Their steps are long, and workers may compile beside them.
PARTS = {
    "a step of GPT-2 small": Part(gpt2.make_cases, 140, threads=1),
    "float8": Part(float8.make_cases, 25, threads=8),
    "tails, 1 x 50 M": Part(functools.partial(tails.make_cases, key="1"), 35),
    "tails, GPT-2 small": Part(functools.partial(tails.make_cases, key="gpt2"), 50),
    "kernels": Part(kernels.make_cases, 35),
    "tails, 400 x 125 k": Part(functools.partial(tails.make_cases, key="400"), 50),
    "tails, 2000 x 5 k": Part(functools.partial(tails.make_cases, key="2000"), 30),
}


def make_cases(name: str, tiny: bool) -> list[Case]:
    """The cases of a part."""
    cases = PARTS[name].make_cases(tiny)
    if tiny:
        for case in cases:
            case.repeats = TINY_REPEATS
    return cases
