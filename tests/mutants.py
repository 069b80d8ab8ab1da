"""Faults put into the library on purpose, one at a time: each must fail the tests named beside it.

    make mutants                      all of them
    make mutants ARGS="verdict zero"  those whose description holds one of the words

A suite that stays green says little until one knows what would turn it red. Each mutant is a small
plausible mistake: an axis left out of a sum, a factor on the wrong side, a guard that never fires.
First the named tests run without any fault, and must pass; then each mutant runs in a process of
its own, and must fail. Faults in autocast that no replaced text can express stand in
`autocasting/test_autocast_mutants.py`.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

TESTS = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds for one mutant; a fault may make a loop endless


class Mutant(NamedTuple):
    """One fault.

    Attributes:
      fault: what is wrong, in words.
      file: the module, below `ampx/`.
      old: a text that stands in it once.
      new: what stands there instead.
      tests: arguments for pytest: files below `tests/`, perhaps `-k` and names.
    """

    fault: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS: list[Mutant] = []


def run_tests(arguments: Sequence[str], mutant: Mutant | None = None) -> tuple[int, str]:
    """Runs pytest in a process; its exit code, and the end of what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    plugin = []
    if mutant is not None:
        environment["MUTANT"] = json.dumps([mutant.file, mutant.old, mutant.new])
        plugin = ["-p", "mutant_import"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *plugin]
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=TESTS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return 1, "did not end"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-12:])


def arguments_of(mutant: Mutant) -> list[str]:
    """`-k` takes all words behind it, so that an expression needs no quotes."""
    files, _, names = mutant.tests.partition(" -k ")
    return [*files.split(), *(["-k", names] if names else [])]


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.fault for word in words)]
    print(f"{len(chosen)} mutants; first the tests without any")
    start = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sound = {tuple(arguments_of(m)): None for m in chosen}
        for arguments, (code, output) in zip(sound, pool.map(run_tests, sound), strict=True):
            if code:
                print(f"these fail without a fault: {' '.join(arguments)}\n{output}")
                return 1
        results = pool.map(lambda m: run_tests(arguments_of(m), m), chosen)
        survivors = 0
        for mutant, (code, output) in zip(chosen, results, strict=True):
            killed = code == 1  # pytest: some test failed; above that, it could not run them
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.file}: {mutant.fault}")
            if code > 1:
                print(output)
    seconds = time.monotonic() - start
    print(f"{len(chosen) - survivors} of {len(chosen)} killed in {seconds:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
