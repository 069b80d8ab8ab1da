"""Everything about ampx that only a GPU can tell: `make gpu`, in at most 8 minutes.

Processes compile all programs, and beside them run the tests that need a GPU and the parts that
compile for themselves. Then, with nothing beside them, the other parts are timed:

    compile workers ──────────────────────────┐
    tests ──► a step of GPT-2 small ──► float8 ┴─► tails, kernels, ...

Each part has a process of its own: a kernel that goes wrong can end a process, and then the other
parts still run. At the end there are one table, as Markdown, and one file, `gpu.json`, with all of
it. The file is written anew after each part, and what tests and parts print, tracebacks too, goes
to `gpu.log`.

`make gpu ARGS="--adopt"` also writes what won into `ampx/fused/kernels/measured.json`, from which
the library takes the settings of kernels on this kind of GPU and what `backend="auto"` runs. With
`--adopt FILE` that comes from a file of an earlier run, and nothing is measured.

Without a GPU there is nothing to measure; `--tiny` rehearses all of it on a CPU, with small sizes
and times that mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import jax

from benchmarks.gpu import adopting, goals
from benchmarks.gpu.compiling import Queue, Workers, work
from benchmarks.gpu.parts import PARTS, make_cases
from benchmarks.gpu.rows import COPY, Bench, Row, read_rows
from benchmarks.measuring import print_table

ROOT = Path(__file__).parents[2]
SECONDS = 470  # of the whole
TEST_FILES = ("tests/fused/test_fused_gpu.py", "tests/test_gpu.py")  # the first has the kernels
TESTS = 120  # seconds at most
TESTERS = 6  # processes that run them; most of their time goes into tracing and compiling
COMPILING = 270 / 470  # of all the time, at most; the rest is for what is timed on its own
COMPILERS, TINY_COMPILERS = 12, 2  # processes
# A part's own time is kept by itself; this much later it is ended from outside.
GRACE = 10


@dataclasses.dataclass
class Result:
    """What a run has found.

    Attributes:
      device: its kind, as JAX names it.
      versions: of Python and the packages that matter.
      seconds: that all of it took.
      tests: the last line that pytest wrote.
      failed: the tests that failed, and the first line of why.
      rows: of the table.
    """

    device: str
    versions: str
    seconds: float = 0.0
    tests: str = ""
    failed: list[str] = dataclasses.field(default_factory=list)
    rows: list[Row] = dataclasses.field(default_factory=list)

    def write(self, path: Path) -> None:
        own = dataclasses.asdict(self) | {"chosen": self.chosen}
        path.write_text(json.dumps(own, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        own = json.loads(path.read_text())
        own["rows"] = [Row(**row) for row in own["rows"]]
        return cls(**{field.name: own[field.name] for field in dataclasses.fields(cls)})

    @property
    def chosen(self) -> dict[str, Any]:
        """What the rules make of the rows."""
        return adopting.choose_plan(self.rows) | {"work": adopting.choose_work(self.rows)}


def main(arguments: list[str] | None = None) -> None:
    """Runs everything, or adopts what an earlier run found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file for all figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that it may take")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    parser.add_argument(
        "--adopt", nargs="?", const=True, type=Path, metavar="FILE", help="let the winners be used"
    )
    # What a process runs, and until when: its imports alone take seconds.
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of `time.monotonic`
    given = parser.parse_args(arguments)
    if given.compile:
        _be_process(functools.partial(_compile, given.compile, given.tiny))
    if given.part:
        bench = Bench(given.part, given.out, given.until - time.monotonic(), given.tiny)
        _be_process(functools.partial(_be_part, bench, given.programs))
    if isinstance(given.adopt, Path):
        result = Result.read(given.adopt)
    else:
        result = _measure(given)
        _show(result)
        print(f"\nAll figures: {given.out}; what went wrong: {_log(given.out)}")
    faulty = "passed" not in result.tests or any(TEST_FILES[0] in line for line in result.failed)
    if given.adopt and faulty:
        print("Nothing is adopted: the tests of kernels did not run to their end, or failed")
    elif given.adopt and not given.tiny:
        print(f"Adopted: {adopting.adopt(result.device, result.versions, result.rows)}")


def _compile(folder: Path, tiny: bool) -> None:
    os.nice(10)  # what runs beside the workers has few threads, and is timed
    work(Queue(folder), functools.partial(make_cases, tiny=tiny))


def _be_part(bench: Bench, programs: Path) -> None:
    cases = make_cases(bench.part, bench.tiny)
    if threads := PARTS[bench.part].threads:
        bench.threads = threads
        bench.run(cases)
    else:
        bench.run(cases, Queue(programs).loader(bench.part))


def _be_process(run: Callable[[], None]) -> NoReturn:
    """Runs something and ends the process, without waiting for programs that still compile."""
    status = 0
    # Programs out of a cache were not compiled, and on a CPU XLA cannot write them out again.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        run()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _log(out: Path) -> Path:
    return out.with_suffix(".log")


def _measure(given: argparse.Namespace) -> Result:
    """Runs tests and parts while there is time; what there is so far is in the file."""
    start = time.monotonic()
    backend, device, versions = _describe_device()
    if backend != "gpu" and not given.tiny:
        sys.exit(
            "make gpu needs an NVIDIA GPU and a jax that sees it, and found none: install ampx "
            "with its extra [cuda], and set JAX_PLATFORMS=cuda,cpu"
        )
    result = Result(device, versions)
    log = _log(given.out)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)

    own = [name for name in PARTS if name in given.parts and PARTS[name].threads]
    compiled = [name for name in PARTS if name in given.parts and not PARTS[name].threads]
    end = start + given.seconds
    quiet = start + given.seconds * COMPILING if compiled else end

    def run_parts(names: list[str], end: float, programs: Path) -> None:
        waiting = sum(PARTS[name].seconds for name in names)
        for name in names:
            began = time.monotonic()
            seconds = PARTS[name].seconds / waiting * max(end - began, 0)
            waiting -= PARTS[name].seconds
            result.rows += _run_part(name, seconds, given.tiny, log, programs)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            result.seconds = time.monotonic() - start
            result.write(given.out)

    jax.config.update("jax_platforms", "cpu")  # this process asks for the names of cases alone
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder)
        with _workers(programs, compiled, given.tiny, log) as workers:
            if not given.no_tests:
                seconds = min(TESTS, quiet - time.monotonic())
                result.tests, result.failed = _run_tests(seconds, log, backend)
                print(f"Tests: {result.tests}", *result.failed, sep="\n", flush=True)
                result.write(given.out)
            run_parts(own, quiet, programs)
            workers.wait(quiet - time.monotonic())
        if jobs := workers.queue.jobs:
            count = f"{len(workers.queue.names('done'))} of {len(jobs)}"
            print(f"compiled by workers: {count}, {time.monotonic() - start:.0f} s", flush=True)
        run_parts(compiled, end, programs)
    return result


@contextlib.contextmanager
def _workers(folder: Path, parts: list[str], tiny: bool, log: Path) -> Iterator[Workers]:
    """Processes that compile the programs of parts; at the end they are ended."""
    queue = Queue.make(folder, [(name, case) for name in parts for case in make_cases(name, tiny)])
    command = [sys.executable, "-m", "benchmarks.gpu", "--compile", str(folder)]
    command += ["--tiny"] if tiny else []
    with tempfile.TemporaryFile() as file:
        start = functools.partial(
            subprocess.Popen,
            command,
            cwd=ROOT,
            # A worker gives back what it took to choose kernels: it times nothing for the table.
            env={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"} | _environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        count = TINY_COMPILERS if tiny else min(COMPILERS, os.cpu_count() or 1)
        workers = Workers(queue, count, start)
        try:
            yield workers
        finally:
            workers.end()
            _keep(log, command, file, "")


def _environment() -> dict[str, str]:
    """That of the processes: ampx from this folder, and memory left for the others and torch."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}
    return memory | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _describe_device() -> tuple[str, str, str]:
    """Backend, kind of device and versions, asked in a process so that this one holds no memory."""
    program = (
        "import jax, optax\n"
        "print(jax.default_backend())\nprint(jax.devices()[0].device_kind)\n"
        "try: import torch; torch = f', torch {torch.__version__}'\n"
        "except (ImportError, OSError): torch = ''\n"
        "print(f'jax {jax.__version__}, optax {optax.__version__}{torch}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env=_environment(), capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(f"JAX does not start here:\n{run.stderr.strip()[-2000:]}")
    backend, device, versions = run.stdout.splitlines()[-3:]
    return backend, device, f"{versions}, Python {platform.python_version()}"


def _run(command: list[str], seconds: float, log: Path, **variables: str) -> tuple[int | None, str]:
    """Runs a command for at most so many seconds; then it is ended, and all that it has started.

    Returns:
      Its exit status, None if it was ended, and all that it printed, which is in the log as well.
    """
    with tempfile.TemporaryFile() as file:  # a pipe might be held open by what a process leaves
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment() | {"PYTHONUNBUFFERED": "1"} | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return status, _keep(log, command, file, f"[{status}]")


def _keep(log: Path, command: list[str], file: IO[bytes], status: str) -> str:
    """Appends what a command has printed to the log, and returns it."""
    file.seek(0)
    text = file.read().decode(errors="replace")
    with log.open("a") as kept:
        kept.write(f"$ {' '.join(command)}\n{text}\n{status}\n\n")
    return text


def _run_tests(seconds: float, log: Path, backend: str) -> tuple[str, list[str]]:
    """Runs the tests that need a GPU: a summary, and a line for each that failed.

    With pytest-xdist in several processes. So a kernel that ends a process is one failure, and the
    other tests run.
    """
    files = [name for name in TEST_FILES if (ROOT / name).exists()]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-rfE", "-p", "no:cacheprovider"]
    command += ["--tb=short", "-p", "benchmarks.gpu.failures"]  # the log has what failed, and how
    command += ["-o", "filterwarnings=default"]  # a warning of another version is no fault here
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(TESTERS)]
    variables = {}
    if backend == "gpu":  # some compare with a CPU; and tests take that where nothing is named
        variables["JAX_PLATFORMS"] = "cuda,cpu"
    status, text = _run([*command, *files], seconds, log, **variables)
    lines = text.strip().splitlines() or [""]
    if status is not None:
        return lines[-1], [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    # Each test has a line: `name PASSED`, and of a worker `[gw0] [ 50%] PASSED name`.
    outcome = r"(PASSED|FAILED|ERROR|SKIPPED)"
    ended = [line for line in lines if re.search(rf"::.* {outcome}\b|\] {outcome} \S+::", line)]
    failed = [line for line in ended if re.search(r"\b(FAILED|ERROR)\b", line)]
    summary = f"not finished after {seconds:.0f} s: {len(ended)} ended, {len(failed)} of them badly"
    return summary, failed


def _run_part(name: str, seconds: float, tiny: bool, log: Path, programs: Path) -> list[Row]:
    """Runs one part in a process; what it wrote before it ended, however it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        until = time.monotonic() + seconds
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--out", str(path)]
        command += ["--programs", str(programs), "--until", str(until)]
        command += ["--tiny"] if tiny else []
        status, text = _run(command, seconds + GRACE, log)
        rows = read_rows(path)
    if status is None:
        note = f"ended after {seconds + GRACE:.0f} s"
    elif status:
        last = (text.strip().splitlines() or ["no message"])[-1]
        note = f"ended with exit status {status}: {last[:200]}"
    else:
        return rows
    return [*rows, Row(name, "", "", note=note)]


# --- the table -----------------------------------------------------------------------------------


def _show(result: Result) -> None:
    print(f"\n{result.device}, {result.versions}; {result.seconds:.0f} s")
    print(f"Tests: {result.tests}", *result.failed, sep="\n")
    header = ["case", "by", "ms, best / median", "ratio", "beside", "of copy bandwidth"]
    header += ["temporary B a parameter", "compile, s", "note"]
    print_table("On a GPU", header, [_cells(row) for row in _without_copies(result.rows)])
    header = ["goal", "limit", "measured", "worst case", "met"]
    print_table("Goals", header, [_goal_cells(goal) for goal in goals.judge(result.rows)])
    print(f"\nBy the rules of benchmarks/gpu/adopting.py: {result.chosen}")


def _without_copies(rows: list[Row]) -> list[Row]:
    """Every case has a copy beside it; one of each part is enough to read."""
    seen: set[str] = set()
    return [
        row for row in rows if row.candidate != COPY or not (row.part in seen or seen.add(row.part))
    ]


def _goal_cells(goal: goals.Goal) -> list[str]:
    worst = "not measured" if goal.worst is None else f"{goal.worst:.3f}"
    return [goal.what, goal.limit, worst, goal.case, "yes" if goal.is_met else "no"]


def _cells(row: Row) -> list[str]:
    def text(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    times = "–" if row.best is None else f"{row.best:.3f} / {row.milliseconds:.3f}"
    cells = [row.case or row.part, row.candidate, times, text(row.ratio, 3), row.beside]
    cells += [
        text(row.of_copy, 2),
        text(row.temporaries, 2),
        text(row.compile_seconds, 1),
        row.note,
    ]
    return [cell.replace("|", "\\|") for cell in cells]


if __name__ == "__main__":
    main()
