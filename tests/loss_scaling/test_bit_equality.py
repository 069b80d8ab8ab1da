"""Compiled steps under a loss scale have the bits of optax where the compiler rounds alike.

`bit_equality.py` says what else they depend on. Without FMA nothing is left but the order in which
reductions add.
"""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

from benchmarks.optax_updates import find_names

TESTS = pathlib.Path(__file__).parent.parent
# Their norm of all gradients may be added up in another order.
ADD_IN_ANOTHER_ORDER = {"clip, adamw", "contrib.normalize", "contrib.sam"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is for x86")
@pytest.mark.slow_but("some")
@pytest.mark.parametrize("names", [["adam", "rmsprop", "clip, sgd"], None], ids=["some", "all"])
def test_without_fma_compiled_steps_are_bit_equal_to_optax(names):
    names = find_names() if names is None else names
    run = subprocess.run(
        [sys.executable, str(TESTS / "bit_equality.py"), *names],
        env=os.environ | {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split(":") for line in run.stdout.splitlines())
    unequal = {name for name in names if found[name].split() != ["skipping", "derived"]}
    assert unequal <= ADD_IN_ANOTHER_ORDER
