"""Products in float8 beside bfloat16: the benchmark of `benchmarks.float8` at one size, as rows."""

from __future__ import annotations

import statistics

from benchmarks import float8
from benchmarks.gpu.rows import Bench, Row
from benchmarks.measuring import take_turns


def run(bench: Bench) -> None:
    """Each recipe of `autocast(dots=...)`, with the kernels that ran."""
    size = 32 if bench.tiny else 4096
    candidates = float8.make_candidates(size)
    take_turns(candidates, bench.rounds)
    for candidate in candidates:
        kernels = float8.profile(candidate)
        pairs = zip(candidate.seconds, candidates[0].seconds, strict=True)
        bench.write(
            Row(
                bench.part,
                f"product of {size} x {size} and its gradients",
                candidate.name,
                candidate.median_ms,
                1e3 * min(candidate.seconds),
                statistics.median(own / others for own, others in pairs),
                candidates[0].name,
                compile_seconds=candidate.compile_seconds,
                note=f"{kernels.float8_share:.0%} of the time in float8 kernels: "
                + ", ".join(name[:40] for name in kernels.longest),
            )
        )
