"""Starts the processes of one distributed program on this machine, and sees all of them end.

Each process has one CPU device, and they talk by gloo over loopback. Each runs a function of
`process_workers.py`. No process outlives a call: those that are still there at the end are killed.

To import libraries takes longer than most of what these processes do. So a server of
`multiprocessing` imports them once and forks a process for each rank: JAX survives a fork as long
as no backend has been set up.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from typing import Any, NamedTuple

import numpy as np
import process_workers
from compiler_flags import quick_compiler

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
LOG_LINES = 25
# After this much silence of one process, JAX ends the others.
HEARTBEAT_SECONDS = 5


class End(NamedTuple):
    """How one process ended: `code` is negative for a signal, as in `subprocess`."""

    rank: int
    code: int
    seconds: float
    killed_here: bool = False
    log: str = ""

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        how = "still running, killed from outside" if self.killed_here else how
        return f"process {self.rank}: {how} after {self.seconds:.1f} s"


class ProcessesFailed(Exception):  # noqa: N818
    """Some process failed or was killed; `ends` has the end of each, in the order of ranks."""

    def __init__(self, worker: str, ends: list[End], why: str) -> None:
        self.ends = sorted(ends)
        lines = [f"{worker!r} on {len(ends)} processes: {why}"]
        lines += [f"  {end}" for end in self.ends]
        for end in self.ends:
            tail = "\n".join(end.log.splitlines()[-LOG_LINES:]) or "(nothing)"
            lines.append(f"--- last lines of process {end.rank} ---\n{tail}")
        super().__init__("\n".join(lines))


def run_processes(
    worker: str,
    count: int,
    *,
    timeout: float = 60.0,
    grace: float = 20.0,
    args: dict[str, Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Runs a function of `process_workers.py` in `count` processes.

    Args:
      worker: name of the function.
      count: number of processes.
      timeout: seconds for all of it; afterwards they are killed.
      grace: once one has failed, seconds in which the others may end by themselves and say why.
      args: keyword arguments of the function, as JSON holds them.

    Returns:
      What each process returned, by rank.

    Raises:
      ProcessesFailed: if any process ended with another exit code than 0, or had to be killed.
    """
    with tempfile.TemporaryDirectory() as directory, reserved_port() as port:
        setup = {
            "worker": worker,
            "count": count,
            "address": f"127.0.0.1:{port}",
            "heartbeat": HEARTBEAT_SECONDS,
            # If this process itself is killed, the alarm ends the workers.
            "alarm": int(timeout) + 5,
            "directory": directory,
            "args": args or {},
        }
        ends = _run(setup, timeout, grace)
        if any(end.code for end in ends):
            raise ProcessesFailed(worker, ends, _cause(ends, timeout))
        results = []
        for rank in range(count):
            with np.load(f"{directory}/{rank}.npz") as arrays:
                results.append(dict(arrays))
        return results


def _run(setup: dict[str, Any], timeout: float, grace: float) -> list[End]:
    """Starts all processes and waits for them; returns their ends in the order in time."""
    start_server(["process_workers"])
    context = multiprocessing.get_context("forkserver")
    start = time.monotonic()
    deadline = start + timeout
    logs = [pathlib.Path(setup["directory"], f"{rank}.log") for rank in range(setup["count"])]
    waiting = {}  # from what tells of the end of a process to its rank and the process
    ends: list[End] = []

    def note_ends(seconds: float | None, killed_here: bool = False) -> None:
        for sentinel in multiprocessing.connection.wait(waiting, seconds):
            rank, process = waiting.pop(sentinel)
            process.join()
            passed, log = time.monotonic() - start, logs[rank].read_text(errors="replace")
            ends.append(End(rank, process.exitcode, passed, killed_here, log))

    try:
        for rank, log in enumerate(logs):
            log.touch()
            own = {"rank": rank, "log": str(log), "environment": environment(), **setup}
            process = context.Process(target=process_workers.main, args=(own,))
            process.start()
            waiting[process.sentinel] = rank, process
        while waiting and time.monotonic() < deadline:
            note_ends(deadline - time.monotonic())
            if any(end.code for end in ends):
                deadline = min(deadline, ends[-1].seconds + start + grace)
    finally:
        for _, process in waiting.values():
            process.kill()  # does nothing to those that have ended
    while waiting:
        note_ends(None, killed_here=True)
    return ends


def start_server(preload: Sequence[str]) -> None:
    """Lets the server begin, if it has not, in an environment without what these tests set.

    JAX reads the environment when it is imported.

    Args:
      preload: names of the modules that it imports before it forks.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(TESTS), own["PYTHONPATH"]])
    with unittest.mock.patch.dict(os.environ, own, clear=True):
        forkserver.ensure_running()


def _cause(ends: list[End], timeout: float) -> str:
    """Says which process failed first, or that time ran out."""
    failed = [end for end in ends if end.code and not end.killed_here]
    # When a signal ends one process, JAX ends the others, by an exit code or by SIGABRT. So an end
    # by another signal is the cause, and goes first.
    failed.sort(key=lambda end: end.code >= 0 or end.code == -signal.SIGABRT)
    return f"failed first: {failed[0]}" if failed else f"not done within {timeout:g} s"


def environment() -> dict[str, str]:
    """This environment without variables that change devices or flags, or route loopback away.

    Where compiled programs are kept stays: what one process has compiled, none compiles again.
    """
    dropped = ("XLA_", "JAX_", "SLURM_", "OMPI_", "KUBERNETES_")
    cache = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(cache)
        or not (name.startswith(dropped) or name.lower().endswith("_proxy"))
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compiler(), "PYTHONUNBUFFERED": "1"}
    return {**kept, **own, "PYTHONPATH": path}


def run_shell(command: list[str], folder: pathlib.Path, **own: str) -> tuple[str, int]:
    """Runs a command that may start others, and ends them all; its output and its exit code.

    Args:
      command: it finds `python`, and what lies in the folder, by their names.
      folder: where it runs.
      own: environment variables besides those of `environment`.
    """
    path = f"{folder}:{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"
    shell = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment() | {"PATH": path} | own,
    )
    try:
        output, _ = shell.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    return output, shell.returncode


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Holds a free port until the coordinator listens on it; SO_REUSEPORT lets both bind it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
