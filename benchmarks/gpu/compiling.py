"""Compiles programs in many processes, before any of them is timed.

To trace and to lower is Python, and threads of one process do it one after another, while the one
that is to time something waits for them. So workers compile from shapes alone, and leave programs
as files that the parts load. Jobs are files, too:

    jobs.json       all jobs in their order: part, case and way
    waiting/0007    job 7 waits for a worker
    taken/0007-123  process 123 works on it
    done/0007       its program, or why there is none

A file has one name at a time, so that a job has one worker. One that dies leaves the job's file
behind, and so costs one row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from benchmarks.gpu.rows import TOO_LATE, Case, NoProgram, compile_way, describe
from benchmarks.measuring import Candidate

# By `Way.cost`: what takes minutes to compile, and what a part compiles for itself if it must.
_DEAR, _CHEAP = 1000, 100


class Job(NamedTuple):
    """What is to be compiled, by names."""

    part: str
    case: str
    way: str


@dataclasses.dataclass
class Program:
    """What comes of a job.

    Attributes:
      serialized: what `deserialize_and_load` takes.
      temporaries: bytes beside inputs and outputs.
      seconds: to trace, to lower and to compile.
      failure: why there is no program.
    """

    serialized: tuple[Any, ...] = ()
    temporaries: int = 0
    seconds: float = 0.0
    failure: str = ""


class Queue:
    """Jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = [Job(*job) for job in json.loads((folder / "jobs.json").read_text())]

    @classmethod
    def make(cls, folder: Path, cases: Iterable[tuple[str, Case]]) -> Queue:
        """Writes a job for each way of the cases of parts.

        The few that take minutes come first, and then the cheapest: if there is too little time,
        it is for those in between.
        """
        jobs = [
            (way.cost, Job(part, case.name, name))
            for part, case in cases
            for name, way in case.ways.items()
        ]
        jobs.sort(key=lambda job: (job[0] < _DEAR, job[0]))
        (folder / "jobs.json").write_text(json.dumps([job for _, job in jobs]))
        for state in ("waiting", "taken", "done"):
            (folder / state).mkdir()
        for number in range(len(jobs)):
            (folder / "waiting" / f"{number:04}").touch()
        return cls(folder)

    def names(self, state: str) -> list[str]:
        """The names of the files of a state."""
        return sorted(os.listdir(self.folder / state))

    def take(self) -> int | None:
        """Takes the first job that waits for this process; None if none does."""
        for name in self.names("waiting"):
            try:
                os.rename(
                    self.folder / "waiting" / name, self.folder / "taken" / f"{name}-{os.getpid()}"
                )
            except FileNotFoundError:  # another worker was faster
                continue
            return int(name)
        return None

    def finish(self, number: int, program: Program, pid: int | None = None) -> None:
        """Writes what came of a job that a process, this one by default, has taken."""
        taken = self.folder / "taken" / f"{number:04}-{pid or os.getpid()}"
        with taken.open("wb") as file:
            pickle.dump(program, file)
        taken.rename(self.folder / "done" / f"{number:04}")  # a file that is there is whole

    def taken_by(self, pid: int) -> int | None:
        """The job that a process works on, or worked on when it died."""
        found = [name for name in self.names("taken") if name.endswith(f"-{pid}")]
        return int(found[0].split("-")[0]) if found else None

    def loader(self, part: str) -> Callable[[Case, str], Candidate]:
        """What loads the programs of a part, for `Bench.run`.

        A cheap one that is missing, or that cannot be loaded, it compiles.
        """
        numbers = {job: number for number, job in enumerate(self.jobs)}
        # One at a time: a way may be traced in the form of another device (`measuring.traced_for`).
        tracing = threading.Lock()
        if jax.default_backend() == "gpu":
            # XLA finds what launches our kernels by a variable of the environment, which this
            # import sets. Where a kernel is traced it is imported anyway.
            from jax.experimental.pallas import mosaic_gpu  # noqa: F401

        def load(case: Case, name: str) -> Candidate:
            try:
                return load_compiled(name, numbers[Job(part, case.name, name)])
            except NoProgram:
                raise
            except Exception as error:
                if case.ways[name].cost <= _CHEAP:
                    describe(error)  # for the log
                    with tracing:
                        return compile_way(case, name)
                if isinstance(error, FileNotFoundError):
                    raise NoProgram(TOO_LATE) from None
                raise

        def load_compiled(name: str, number: int) -> Candidate:
            program: Program = pickle.loads((self.folder / "done" / f"{number:04}").read_bytes())
            if program.failure:
                raise NoProgram(program.failure)
            step = serialize_executable.deserialize_and_load(
                *program.serialized, execution_devices=jax.devices()[:1]
            )
            return Candidate(name, step, None, (), program.temporaries, program.seconds)

        return load


def work(queue: Queue, make_cases: Callable[[str], list[Case]]) -> None:
    """Compiles one job after another, until none waits.

    Args:
      queue: the jobs.
      make_cases: makes the cases of a part.
    """
    make_cases = functools.cache(make_cases)
    jax.devices()  # a step has the form of the devices that are known when it is traced
    while (number := queue.take()) is not None:
        part, name, way = queue.jobs[number]
        try:
            case = next(case for case in make_cases(part) if case.name == name)
            compiled = compile_way(case, way)
            program = Program(
                serialize_executable.serialize(compiled.step),
                compiled.temp_bytes,
                compiled.compile_seconds,
            )
        except Exception as error:
            program = Program(failure=describe(error))
        queue.finish(number, program)


class Workers:
    """Processes that work on a queue; one that dies is replaced while jobs wait."""

    def __init__(self, queue: Queue, count: int, start: Callable[[], subprocess.Popen]) -> None:
        """Starts `count` processes, each by `start`."""
        self.queue, self._start = queue, start
        self._lock, self._is_ended = threading.Lock(), False
        self._processes: list[subprocess.Popen] = []
        self._threads = [threading.Thread(target=self._keep_one) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until all jobs are done, at most so long."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def end(self) -> None:
        """Ends all processes; what they have not compiled is not compiled."""
        with self._lock:
            self._is_ended = True
            for process in self._processes:
                process.kill()
        self.wait(60)

    def _keep_one(self) -> None:
        while process := self._start_one():
            status = process.wait()
            lost = self.queue.taken_by(process.pid)
            if self._is_ended:
                return
            if lost is not None:
                why = f"failed: the compiler ended its process, with exit status {status}"
                self.queue.finish(lost, Program(failure=why), process.pid)
            elif status:
                return  # it did not even begin, and no other one would

    def _start_one(self) -> subprocess.Popen | None:
        with self._lock:
            if self._is_ended or not self.queue.names("waiting"):
                return None
            process = self._start()
            self._processes.append(process)
            return process
