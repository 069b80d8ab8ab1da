"""Compiled steps under a loss scale have the bits of optax where the compiler rounds alike.

`bit_equality.py` says what their bits depend on. Without FMA nothing is left but the order in which
elements are added up, and most transformations add up none.
"""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent.parent


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is for x86")
@pytest.mark.whole("all")
@pytest.mark.parametrize("names", [["adam", "rmsprop", "adabelief"], ["*"]], ids=["some", "all"])
def test_without_fma_compiled_steps_are_bit_equal_to_optax(names):
    run = subprocess.run(
        [sys.executable, str(TESTS / "bit_equality.py"), *names],
        env=os.environ | {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"},
        capture_output=True,
        text=True,
        check=True,
    )
    _, *lines = run.stdout.splitlines()
    assert len(lines) >= (30 if names == ["*"] else len(names))
    assert [line for line in lines if not line.endswith(": skipping derived")] == []
