"""What is measured on a GPU, as rows of one table, and how a step is timed there.

A GPU works on its own while Python goes on, and Python needs longer to hand over a step with a
thousand arrays than the GPU needs to run it. In training that time is hidden behind the rest of the
step. So a step is timed without it: one program runs it several times in a loop,

    state ──► step ──► step ──► ... ──► state

and the program's time is divided by the number of steps. To call a program takes half a millisecond
for GPT-2 small's arrays and 25 for thousands, so there must be many steps in one. What the steps
share, the gradients, goes through a barrier with the state in each round. XLA would otherwise see
that the norm of the gradients is the same in each round, and compute it once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measuring import Candidate, take_turns

COPY = "copy of one large array"
TOO_LATE = "not measured: no time was left"
_COPIED = 1 << 27  # float32 of the array whose copy measures the bandwidth: ten times a GPU's cache


@dataclasses.dataclass
class Row:
    """One row of the table.

    Attributes:
      part: of the benchmark.
      case: what is run; rows of one part and case were measured side by side.
      candidate: by what.
      milliseconds: of a step, the median.
      best: the shortest.
      ratio: to the step that `beside` names, the median over the rounds.
      beside: what that is.
      of_copy: the time that the fewest possible bytes take at a copy's bandwidth, over the time.
      temporaries: bytes a parameter beside inputs and outputs.
      compile_seconds: to trace, to lower and to compile, while other programs were compiled.
      note: why there is no figure, or what else there is to say.
    """

    part: str
    case: str
    candidate: str
    milliseconds: float | None = None
    best: float | None = None
    ratio: float | None = None
    beside: str = ""
    of_copy: float | None = None
    temporaries: float | None = None
    compile_seconds: float | None = None
    note: str = ""


def read_rows(path: Path) -> list[Row]:
    """The rows that a part has written."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [Row(**json.loads(line)) for line in lines if line.endswith("}")]  # not cut off


# --- timing --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Way:
    """A way to make a step.

    Attributes:
      step: `(state, *data) -> state`.
      make_state: what makes the first state, just before the step is timed: the states of all ways
        together may be larger than a GPU's memory.
      bytes_needed: that a step must read and write at least; 0 where memory is not what limits it.
      cost: of compiling it, roughly: its arrays, and three times as much where kernels take them.
    """

    step: Callable[..., Any]
    make_state: Callable[[], Any]
    bytes_needed: float = 0.0
    cost: float = 1.0


@dataclasses.dataclass
class Case:
    """Ways that are timed side by side. To make one touches no device.

    Attributes:
      name: as tables print it.
      ways: by name; all make the same step.
      make_data: makes what each step is called with, besides its state.
      beside: the way that the ratios are to.
      elements: parameters, which temporaries are divided by; 0 leaves that column empty.
      make_others: makes candidates that are no programs of JAX, of as many steps a call as it is
        given.
      bytes_of_others: as `bytes_needed`, by name.
      describe: what to note of each candidate of JAX, after it was timed.
      repeats: steps of one program.
      left_out: by name, why a way is not asked.
    """

    name: str
    ways: dict[str, Way]
    make_data: Callable[[], tuple[Any, ...]]
    beside: str
    elements: int = 0
    make_others: Callable[[int], Iterable[Candidate]] = lambda repeats: ()
    bytes_of_others: dict[str, float] = dataclasses.field(default_factory=dict)
    describe: Callable[[Candidate], str] = lambda candidate: ""
    repeats: int = 30
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


class NoProgram(Exception):
    """There is no program of a way; its row says why."""


def compile_way(case: Case, name: str) -> Candidate:
    """Compiles a way from shapes alone; its state and its data are still to be made."""
    start = time.perf_counter()
    way = case.ways[name]
    state, data = jax.eval_shape(way.make_state), jax.eval_shape(case.make_data)
    step = jax.jit(looped(way.step, case.repeats), donate_argnums=0)
    compiled = step.lower(state, *data).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Candidate(name, compiled, None, (), temporaries, time.perf_counter() - start)


@dataclasses.dataclass
class Bench:
    """What a part of the benchmark is given.

    Attributes:
      part: its name.
      path: the file for its rows.
      seconds: that it may take; what comes too late is not measured, and its row says so.
      tiny: whether this is a rehearsal, with sizes that a CPU can manage and times without meaning.
      threads: that make programs at the same time; with fewer, the first are ready earlier.
      rounds: of side-by-side timing.
    """

    part: str
    path: Path
    seconds: float
    tiny: bool = False
    threads: int = 8
    rounds: int = 6
    end: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        if self.tiny:
            self.rounds = 1

    def write(self, *rows: Row) -> None:
        """Appends rows to the file, at once: a part that dies leaves those that it had."""
        with self.path.open("a") as file:
            file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)

    def run(self, cases: list[Case], make: Callable[[Case, str], Candidate] = compile_way) -> None:
        """Makes the programs of all cases, several at once; then times one case after another.

        Args:
          cases: in this order.
          make: compiles a way, or loads what was compiled elsewhere.
        """
        pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        futures = {}
        copies = {}  # beside all cases stands the same one
        for case in cases:
            if case.repeats not in copies:
                copy = Case(COPY, {COPY: self._copy()}, tuple, COPY, repeats=case.repeats)
                copies[case.repeats] = pool.submit(compile_way, copy, COPY)
            futures[case.name, COPY] = copies[case.repeats]
            for name in case.ways:
                futures[case.name, name] = pool.submit(make, case, name)
            case.ways = {COPY: self._copy(), **case.ways}
        concurrent.futures.wait(futures.values(), timeout=self._left(0.8))
        pool.shutdown(wait=False, cancel_futures=True)
        # A compiler beside what is timed would use the GPU, too, to choose kernels. A thread that
        # still traces would hold Python for 5 ms at a time, as long as some programs take.
        begun = [future for future in futures.values() if future.running()]
        concurrent.futures.wait(begun, timeout=self._left(0.9))
        sys.setswitchinterval(1e-4)
        for case in cases:
            late = sum(not future.done() for future in futures.values())
            note = f"timed while {late} programs compiled" if late else ""
            self._time(case, {name: futures[case.name, name] for name in case.ways}, note)

    def _left(self, share: float = 1.0) -> float:
        return max(0.0, self.end - (1 - share) * self.seconds - time.monotonic())

    def _copy(self) -> Way:
        size = _COPIED >> 12 if self.tiny else _COPIED
        full = functools.partial(jnp.full, size, 0.5, jnp.float32)
        return Way(lambda state: 0.999 * state, full, 8.0 * size)

    def _time(self, case: Case, futures: dict[str, concurrent.futures.Future], note: str) -> None:
        notes = dict(case.left_out)
        candidates = []
        make_data = functools.cache(case.make_data)  # once, unless it fails
        for name, future in futures.items():
            if not future.done() or future.cancelled() or not self._left():
                notes[name] = TOO_LATE
                continue
            try:
                candidate = future.result()
                if name == COPY:  # which the next case takes, too
                    candidate = dataclasses.replace(candidate, seconds=[])
                else:
                    candidate.data = make_data()
                candidate.state = jax.block_until_ready(_distinct(case.ways[name].make_state()))
                candidates.append(candidate)
            except NoProgram as error:
                notes[name] = str(error)
            except Exception as error:
                notes[name] = describe(error)
        try:
            # One that fails leaves those before it.
            for candidate in case.make_others(case.repeats):
                candidates.append(candidate)
        except Exception as error:
            notes["others"] = describe(error)
        running: list[Candidate] = []
        for candidate in candidates:
            try:
                candidate.run_once()
                running.append(candidate)
            except Exception as error:
                notes[candidate.name] = describe(error)
        try:
            take_turns(running, self.rounds)
        except Exception as error:  # the memory of all of them, say
            notes |= dict.fromkeys((candidate.name for candidate in running), describe(error))
            running.clear()
        by_name = {candidate.name: candidate for candidate in running}
        for name in dict.fromkeys([*case.ways, *by_name, *notes]):
            if name in by_name:
                row = self._row(case, by_name, name)
                row.note = "; ".join(filter(None, [row.note, note]))
                self.write(row)
            elif name != COPY:
                self.write(Row(self.part, case.name, name, note=notes[name]))
        for candidate in candidates:
            candidate.state = candidate.step = candidate.data = None  # the next case needs memory

    def _row(self, case: Case, by_name: dict[str, Candidate], name: str) -> Row:
        candidate = by_name[name]
        seconds = [own / case.repeats for own in candidate.seconds]
        row = Row(self.part, case.name, name, statistics.median(seconds) * 1e3, min(seconds) * 1e3)
        if case.beside in by_name:
            row.ratio, row.beside = _ratio(candidate, by_name[case.beside]), case.beside
        way = case.ways.get(name)
        needed = way.bytes_needed if way else case.bytes_of_others.get(name, 0.0)
        if COPY in by_name and needed:
            copied = case.ways[COPY].bytes_needed
            row.of_copy = _ratio(by_name[COPY], candidate) * needed / copied
        if name == COPY:
            row.note = f"{needed / min(seconds) / 1e9:,.0f} GB/s"
        elif way:
            row.compile_seconds = candidate.compile_seconds
            row.note = _describe(case, candidate)
            if case.elements:
                row.temporaries = candidate.temp_bytes / case.elements
        return row


def looped(step: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """A function that runs a step `repeats` times."""

    def run(state: Any, *data: Any) -> Any:
        def once(_: Any, state: Any) -> Any:
            own, given = jax.lax.optimization_barrier((state, data))
            return step(own, *given)

        return jax.lax.fori_loop(0, repeats, once, state)

    return run


def _describe(case: Case, candidate: Candidate) -> str:
    try:
        return case.describe(candidate)
    except Exception as error:  # the times are good
        return describe(error)


def describe(error: BaseException) -> str:
    """What a table says of something that failed; the log has all of it."""
    traceback.print_exception(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {first[:160]}"


def _distinct(state: Any) -> Any:
    """Copies of all arrays: a buffer that appears twice cannot be donated."""
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def _ratio(candidate: Candidate, other: Candidate) -> float:
    pairs = zip(candidate.seconds, other.seconds, strict=True)
    return statistics.median(own / others for own, others in pairs)
