"""Timing side by side: candidates take turns, so that a drifting machine moves them all alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass
class Candidate:
    """A compiled step and the arguments that it is called with again and again.

    `step(state, data)` returns the next state and something else, or the pair's first part alone.
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
        """Traces and compiles with the state donated, and notes how long that took."""
        # A copy: candidates donate, and must not donate each other's buffers.
        state = jax.tree.map(lambda x: x.copy(), state)
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, *data).compile()
        elapsed = time.perf_counter() - start
        temp = compiled.memory_analysis().temp_size_in_bytes
        return cls(name, compiled, state, data, temp, elapsed)

    def run_once(self) -> None:
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.step(self.state, *self.data))
        self.seconds.append(time.perf_counter() - start)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def take_turns(candidates: list[Candidate], rounds: int) -> None:
    """One warm-up each, then `rounds` rounds in which every candidate runs once."""
    for candidate in candidates:
        candidate.run_once()
        candidate.seconds.clear()
    for _ in range(rounds):
        for candidate in candidates:
            candidate.run_once()


def ratio(candidate: Candidate, baseline: Candidate) -> str:
    """Median of the ratios round by round, with the middle half of them."""
    ratios = sorted(a / b for a, b in zip(candidate.seconds, baseline.seconds, strict=True))
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A Markdown table, ready for docs/benchmarks.md."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + " --- |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
