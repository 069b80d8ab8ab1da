"""What do reductions over devices cost, how many are there, and what do updates wait for?

Runs on four virtual devices of one process, and in two processes that talk by gloo over loopback.
This module starts the processes and prints the tables. The processes run `distributed_worker`,
which names its scenarios; `distributed_steps` has the model, and `distributed_counts` what is
counted.

Run `make bench ARGS=distributed`. Counts and waits are exact on any machine. Times on shared cores
show what each way costs, and not what overlap may win on accelerators.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.measuring import Candidate, print_table, ratio

ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT = 150
LEAVES, MICROBATCHES = (12, 48), (1, 4, 16)
TITLES = {
    "verdict after": "verdict from reduced gradients, `where`",
    "clip_by_global_norm": "`optax.clip_by_global_norm`",
    "apply_if_finite": "`optax.apply_if_finite`",
    "one cond": "verdict from local gradients, one `lax.cond`",
    "clip_by_bucket_norm": "`ampx.clip_by_bucket_norm`",
    "loss scale": "`ampx.dynamic_loss_scale`",
    "loss scale, no tail overlap": "`ampx.dynamic_loss_scale`, `tail_overlap=False`",
}

# --- processes -----------------------------------------------------------------------------------


def plain_environment() -> dict[str, str]:
    """This environment without variables that change devices or flags, or route loopback away."""
    dropped = ("XLA_", "JAX_", "SLURM_", "OMPI_", "KUBERNETES_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped) and not name.lower().endswith("_proxy")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def run(scenarios: list[tuple[str, dict[str, Any]]], count: int, devices: int) -> list[Any]:
    """Runs scenarios of `distributed_worker` in `count` processes; returns what the first found.

    Args:
      scenarios: name and keyword arguments of each, run in this order.
      count: of processes.
      devices: of each process.

    Raises:
      RuntimeError: if a process fails or takes too long; none is left behind.
    """
    with tempfile.TemporaryDirectory() as directory, socket.socket() as reserved:
        # This socket holds a free port until the coordinator listens. With SO_REUSEPORT both may
        # bind it, and the system gives it to nobody else meanwhile.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        setup = {
            "scenarios": scenarios,
            "count": count,
            "devices": devices,
            "address": f"127.0.0.1:{reserved.getsockname()[1]}",
            "directory": directory,
            "alarm": TIMEOUT + 5,
        }
        logs = [pathlib.Path(directory, f"{rank}.log") for rank in range(count)]
        processes: list[subprocess.Popen] = []
        deadline = time.monotonic() + TIMEOUT
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-m", "benchmarks.distributed_worker"]
                with log.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [*command, json.dumps({"rank": rank, **setup})],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=plain_environment(),
                        )
                    )
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(max(0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()  # does nothing to those that have ended
        codes = [process.wait() for process in processes]
        if any(codes):
            tails = [log.read_text(errors="replace")[-3000:] for log in logs]
            killed = -signal.SIGKILL in codes
            raise RuntimeError(
                f"{[name for name, _ in scenarios]} on {count} processes ended with {codes}"
                + f" ({TIMEOUT} s are allowed)" * killed
                + "".join(f"\n--- process {rank} ---\n{tail}" for rank, tail in enumerate(tails))
            )
        return json.loads(pathlib.Path(directory, "results.json").read_text())


def _candidates(seconds: dict[str, list[float]]) -> dict[str, Candidate]:
    """The candidates as the process timed them. `len` stands for a step that nobody calls."""
    return {name: Candidate(name, len, None, (), seconds=s) for name, s in seconds.items()}


# --- tables --------------------------------------------------------------------------------------


def _print_counts(found: list[dict[str, list[int]]]) -> None:
    cases = [(leaves, k) for leaves in LEAVES for k in MICROBATCHES]
    rows = [
        [str(leaves), str(k), *("{} / {}".format(*numbers) for numbers in ways.values())]
        for (leaves, k), ways in zip(cases, found, strict=True)
    ]
    header = [
        "leaves",
        "k",
        "`psum` of each leaf in each micro-batch",
        "`psum` of each leaf after accumulation",
        "`ampx.all_reduce`",
        "`ampx.all_reduce`, 4 buckets, tail overlap",
    ]
    print_table(
        "All-reduces that a step executes: asked for / left by XLA:CPU",
        header,
        rows,
    )


def _print_waits(found: dict[str, list[list[int]]]) -> None:
    rows = []
    for name, title in TITLES.items():
        columns = zip(*found[name], strict=True)
        rows.append([title, *(", ".join(map(str, column)) for column in columns)])
    print_table(
        "Gradient reductions that the update of each of 4 buckets waits for",
        ["design", "in the program, first to last bucket", "compiled"],
        rows,
    )


def _print_small(seconds: dict[str, list[float]]) -> None:
    ways = _candidates(seconds)
    titles = {
        "psum": "`psum` of each leaf",
        "all_reduce": "`ampx.all_reduce`",
        "bfloat16": '`ampx.all_reduce`, `wire_dtype="bfloat16"`',
    }
    rows = [
        [title, f"{ways[name].median_ms:.1f}", _range(ways[name]), _speedup(ways, name, "psum")]
        for name, title in titles.items()
    ]
    print_table(
        "200 leaves of 4 KB, 2 processes over gloo on loopback",
        ["reduction", "ms", "fastest to slowest, ms", "time of `psum` / its time"],
        rows,
    )


def _range(candidate: Candidate) -> str:
    return f"{1e3 * min(candidate.seconds):.1f} to {1e3 * max(candidate.seconds):.1f}"


def _speedup(ways: dict[str, Candidate], name: str, baseline: str) -> str:
    pairs = zip(ways[baseline].seconds, ways[name].seconds, strict=True)
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.1f} ({ratios[quarter]:.1f} to {ratios[-1 - quarter]:.1f})"


def _print_tail(by_place: dict[str, dict[str, Any]]) -> None:
    rows = []
    for place, found in by_place.items():
        ways = _candidates(found["seconds"])
        on, off, psum = ways["on"], ways["off"], ways["psum"]
        times = " / ".join(f"{c.median_ms:.1f}" for c in (on, off, psum))
        copies = " / ".join(map(str, found["copies"]))
        rows.append([place, times, ratio(on, off), ratio(on, psum), copies])
    print_table(
        "Step with AdamW, 1.05 M parameters in 16 leaves",
        [
            "devices",
            "ms: tail overlap / without / `psum` of each leaf",
            "tail overlap / without",
            "tail overlap / `psum`",
            "copies in these three, compiled",
        ],
        rows,
    )


def _print_backward(by_place: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for place, seconds in by_place.items():
        ways = _candidates(seconds)
        end, backward = ways["end"], ways["backward"]
        times = f"{backward.median_ms:.1f} / {end.median_ms:.1f}"
        rows.append([place, times, ratio(backward, end)])
    print_table(
        "Reduction in the backward pass and after it, AdamW, 1.05 M parameters",
        ["devices", "ms: `reduce_in_backward` / `all_reduce`", "ratio"],
        rows,
    )


def _print_zero1(found: dict[str, Any]) -> None:
    ways = _candidates(found["seconds"])
    titles = {"replicated": "`all_reduce` and AdamW", "zero1": "`zero1` of AdamW"}
    rows = [
        [
            title,
            f"{ways[name].median_ms:.1f}",
            ratio(ways[name], ways["replicated"]),
            f"{found['bytes'][name]:,}",
        ]
        for name, title in titles.items()
    ]
    print_table(
        "ZeRO-1, 1.05 M parameters, 4 virtual devices",
        ["step", "ms", "ratio to replicated", "bytes of state on a device"],
        rows,
    )
    rows = [[name, *(f"{x:.1e}" for x in pair)] for name, pair in found["differences"].items()]
    print_table(
        "ZeRO-1 and replicated after 20 steps, 66 thousand parameters",
        ["optimizer", "largest difference of a parameter", "largest change of a parameter"],
        rows,
    )


def distributed(rounds: int) -> None:
    """Prints counts, waits and times of reductions, on 4 virtual devices and in 2 processes."""
    cases = [
        ("counts", {"leaves": leaves, "num_microbatches": k})
        for leaves in LEAVES
        for k in MICROBATCHES
    ]
    *counts, waits = run([*cases, ("waits", {})], 1, 4)
    many = 8 * rounds  # steps of some 20 ms on two cores that other threads use too
    timed: list[tuple[str, dict[str, Any]]] = [
        ("tail_overlap", {"rounds": many, "scaled": True}),
        ("tail_overlap", {"rounds": many, "scaled": False}),
        ("in_backward", {"rounds": many, "scan": False}),
        ("in_backward", {"rounds": many, "scan": True}),
    ]
    *virtual, zero1 = run([*timed, ("zero1", {"rounds": many})], 1, 4)
    *gloo, small = run([*timed, ("small_leaves", {"rounds": many})], 2, 1)
    _print_counts(counts)
    _print_waits(waits)
    _print_small(small)
    places = {"4 virtual devices": virtual, "2 processes over gloo": gloo}

    def rows(kinds: dict[str, int]) -> dict[str, Any]:
        return {
            f"{place}, {kind}": found[at]
            for place, found in places.items()
            for kind, at in kinds.items()
        }

    _print_tail(rows({"dynamic loss scale": 0, "no loss scale": 1}))
    _print_backward(rows({"layers unrolled": 2, "layers scanned": 3}))
    _print_zero1(zero1)
