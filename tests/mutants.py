"""Faults put into the library on purpose, one at a time: each must fail the test named beside it.

    make mutants                      all of them
    make mutants ARGS="verdict zero"  those whose description or module holds one of the words

A suite that stays green says little until one knows what would turn it red. Each mutant of
`mutants.txt` is a small plausible mistake: an axis left out of a sum, a factor on the wrong side, a
guard that never fires. First all the tests named there run without a fault, and must pass; then
each mutant runs in a process of its own, and its test must fail.

Some faults of autocast replace a function, not a text. They stand in
`autocasting/test_autocast_mutants.py` and are ordinary tests, so `make test` runs them; this
program runs them too, with the tests without a fault, unless words choose mutants.
"""

import itertools
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mutant_import import import_with_fault
from mutant_list import MUTANTS, Mutant

TESTS = pathlib.Path(__file__).parent
AUTOCAST_MUTANTS = "autocasting/test_autocast_mutants.py"
TIMEOUT = 300  # seconds for one process; a fault may make a loop endless
# A process exits with the exit code of pytest plus this number: a traceback gives 1, a crash a
# negative one, and neither is a failed test.
OF_PYTEST = 100
PASSED, FAILED = OF_PYTEST, OF_PYTEST + 1

# Libraries take most of the start of a process. So they are imported once, by a server that forks
# a process for each mutant: JAX survives a fork as long as no backend has been set up.
processes = multiprocessing.get_context("forkserver")
LIBRARIES = ["optax", "flax.linen", "flax.nnx"]


def _run_pytest(tests: Sequence[str], mutant: Mutant | None, output: str) -> None:
    """What a process does."""
    import pytest

    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(TESTS)
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    if mutant is not None:
        import_with_fault(mutant)
    sys.exit(OF_PYTEST + pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def run_tests(tests: Sequence[str], mutant: Mutant | None = None) -> tuple[int, str]:
    """Runs tests in a process; its exit code, and the end of what it printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = processes.Process(target=_run_pytest, args=(tests, mutant, output.name))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
            return FAILED, "did not end"
        return process.exitcode, "\n".join(output.read().splitlines()[-25:])


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.file} {m.fault}" for w in words)]
    print(f"{len(chosen)} mutants; first the tests without any")
    start = time.monotonic()
    processes.set_forkserver_preload(LIBRARIES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        by_file = itertools.groupby(
            sorted({mutant.test for mutant in chosen}), key=lambda test: test.split("::")[0]
        )
        sound = [list(tests) for _, tests in by_file] + [[AUTOCAST_MUTANTS]] * (not words)
        for tests, (code, output) in zip(sound, pool.map(run_tests, sound), strict=True):
            if code != PASSED:
                print(f"these fail without a fault: {' '.join(tests)}\n{output}")
                return 1
        print(f"they pass, after {time.monotonic() - start:.0f} s")
        survivors = 0
        results = pool.map(lambda mutant: run_tests([mutant.test], mutant), chosen)
        for mutant, (code, output) in zip(chosen, results, strict=True):
            is_killed = code == FAILED
            survivors += not is_killed
            print(f"{'killed  ' if is_killed else 'SURVIVED'}  {mutant.file}: {mutant.fault}")
            if code not in (PASSED, FAILED):
                print(output)
            sys.stdout.flush()
    seconds = time.monotonic() - start
    print(f"{len(chosen) - survivors} of {len(chosen)} killed in {seconds:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
