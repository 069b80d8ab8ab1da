"""Times candidates side by side, so that a machine whose speed drifts moves all of them alike.

A round runs every candidate once, one after the other:

    round 0: A B C    round 1: A B C    round 2: A B C ...

`ratio` divides A's time by B's time within each round, and only then takes the median over the
rounds. If other work slows the machine down for a while, it slows down A and B of the same
rounds, and their ratio stays. A ratio of two medians would compare A on a quiet machine with B on
a busy one.

Each candidate begins after a rest. Threads of a library (OpenMP's, that torch computes with) wait
by spinning for a while after their work, and hold the cores that the next candidate needs: on two
cores, the one behind torch took a tenth longer.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ampx.updates import devices

REST = 0.02  # seconds; longer than threads spin


@dataclasses.dataclass
class Candidate:
    """A compiled step and what it is called with; `step(state, *data)` returns the next state.

    Attributes:
      name: as tables print it.
      step: called once per round.
      state: what the last call returned; the first state before that.
      data: further arguments, the same in each call.
      temp_bytes: what the compiled program needs beside its inputs and outputs.
      compile_seconds: to trace, lower and compile.
      seconds: of each call, one per round.
    """

    name: str
    step: Callable[..., Any]
    state: Any
    data: tuple[Any, ...]
    temp_bytes: int = 0
    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def compiled(cls, name: str, step: Callable[..., Any], state: Any, *data: Any) -> "Candidate":
        """Traces and compiles with the state donated, and measures how long that takes."""
        # A copy: candidates donate, and must not donate each other's buffers.
        state = jax.tree.map(lambda x: x.copy(), state)
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, *data).compile()
        elapsed = time.perf_counter() - start
        temp = compiled.memory_analysis().temp_size_in_bytes
        return cls(name, compiled, state, data, temp, elapsed)

    def run_once(self) -> None:
        """Runs the step and appends its seconds; waits until all of its results are there."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.step(self.state, *self.data))
        self.seconds.append(time.perf_counter() - start)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def take_turns(candidates: list[Candidate], rounds: int) -> None:
    """Runs every candidate once to warm up, and then once in each of `rounds` rounds."""
    for candidate in candidates:
        candidate.run_once()
        candidate.seconds.clear()
    for _ in range(rounds):
        for candidate in candidates:
            time.sleep(REST)
            candidate.run_once()


def ratio(candidate: Candidate, baseline: Candidate) -> str:
    """The median of the ratios round by round, with the middle half of them in brackets."""
    ratios = sorted(a / b for a, b in zip(candidate.seconds, baseline.seconds, strict=True))
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def trace_and_compile(
    fun: Callable[..., Any], *args: Any, compiles: bool = True, **jit_options: Any
) -> np.ndarray:
    """CPU seconds to trace, to lower and compile, and both together; nothing is cached.

    Without `compiles` it traces alone, so that many rounds of it are cheap.

    CPU seconds, since another program on the machine slows a clock down far more than it does
    them. Garbage is collected before and not in between: how much of it there is depends on what
    ran earlier in the process.
    """
    jax.clear_caches()
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        # A new lambda each time, since `jit` finds what it has traced by the function.
        traced = jax.jit(lambda *args: fun(*args), **jit_options).trace(*args)
        middle = time.process_time()
        if compiles:
            traced.lower().compile()
        end = time.process_time()
    finally:
        gc.enable()
    return np.array([middle - start, end - middle, end - start])


def measure_compilation(
    candidates: dict[str, Callable[[], np.ndarray]], rounds: int
) -> dict[str, np.ndarray]:
    """What `trace_and_compile` gives for each candidate in each of `rounds` rounds of turns.

    Returns:
      Arrays of shape (rounds, 3) by name. The ratio of two of them is taken within rounds.
    """
    seconds: dict[str, list[np.ndarray]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, measure in candidates.items():
            seconds[name].append(measure())
    return {name: np.array(own) for name, own in seconds.items()}


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Programs that are traced inside have the form that they have on a platform.

    On GPUs a step is skipped by another form than on CPUs: see `ampx.updates.devices`.
    """
    jax.devices()  # before JAX has started, all programs have the form of CPUs
    with unittest.mock.patch.object(devices, "find_device", lambda: (platform, "")):
        yield


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a Markdown table, ready for docs/benchmarks.md."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + " --- |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
