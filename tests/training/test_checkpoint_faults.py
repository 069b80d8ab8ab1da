"""Bad luck with checkpoints: kills in the middle of a save, and files that are damaged."""

import collections
import pathlib
import signal
import subprocess
import sys
import time

import damaged_checkpoints
import interrupted_training
import pytest

STEPS = 24
LARGE = 2**14  # bytes: such a file holds data of arrays; smaller ones say what is where
PROGRAM = pathlib.Path(interrupted_training.__file__)


def start(folder: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, str(PROGRAM), str(folder), str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder: pathlib.Path) -> str:
    """Runs to the end; the digest of the last state."""
    process = start(folder)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return printed.split()[-1]


def saved(folder: pathlib.Path) -> set[int]:
    """The steps whose folders have got their final names."""
    return {int(path.name) for path in folder.glob("*") if path.name.isdigit()}


@pytest.mark.whole
def test_a_run_that_is_killed_while_it_saves_ends_as_one_that_is_not(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    expected = finish(whole)
    torn.mkdir()
    killed_at = []
    for _ in range(2):
        before = max(saved(torn), default=-1)
        process = start(torn)
        # A few steps later it is killed at once: the next save is under way then.
        while process.poll() is None and max(saved(torn), default=-1) < before + 4:
            time.sleep(0.002)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_at.append(max(saved(torn)))
    assert killed_at == sorted(set(killed_at)) and killed_at[-1] < STEPS - 1
    assert finish(torn) == expected


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_or_is_whole_all_the_same(tmp_path):
    """A file that is torn or lost is never restored as something else.

    A flipped bit is, in the data of large arrays: tensorstore keeps no checksum of them. The guide
    on many processes says so. All else, small arrays too, has one.
    """
    command = [sys.executable, damaged_checkpoints.__file__, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    outcomes = collections.defaultdict(collections.Counter)
    for line in process.stdout.splitlines():
        kind, size, outcome = line.split(": ")
        is_data = kind == "a bit flipped" and int(size) > LARGE
        outcomes[kind]["data" if is_data else outcome] += 1
    assert set(outcomes) == set(damaged_checkpoints.DAMAGES)
    for kind, found in outcomes.items():
        assert found["refused"] and not found["other"], (kind, found)
