"""Test set-up: eight virtual CPU devices, strict dtype promotion, repeatable Hypothesis runs.

The CPU is used unless ``JAX_PLATFORMS`` names something else (``cuda,cpu`` for the GPU tests).
Environment variables reach the notebook kernels too.
"""

import functools
import gc
import itertools
import os
import pathlib
import zlib
from collections.abc import Callable

import hypothesis
import jax
import optax
import pytest
from compiler_flags import quick_compiler, share_contexts, widen_dispatch_caches
from mutant_list import MUTANTS

os.environ.setdefault("MPLBACKEND", "Agg")
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = f"{quick_compiler()} {os.environ.get('XLA_FLAGS', '')}".strip()
# Workers, processes and notebook kernels share what has been compiled, and the next run does too.
FOLDER = pathlib.Path(__file__).parents[1] / ".jax_cache"
CACHE = {
    "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(FOLDER)),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
for name, choice in CACHE.items():
    jax.config.update(name, choice)
    os.environ[name.upper()] = str(choice)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
share_contexts()
widen_dispatch_caches()
gc.set_threshold(50_000, 20, 50)  # tracing makes many objects that live on

# Those with the most CPU seconds in the whole suite, the longest first.
LONG_FILES = (
    "test_documentation",
    "test_mesh_cells",
    "test_optax_suite",
    "test_jax_harnesses",
    "test_examples_pipeline",
    "test_pipelining_gradients",
    "test_processes",
    "test_fused_low_bit_kernels",
    "test_examples",
    "test_autocast_models",
    "test_large_gradients",
    "test_pipelining_stages",
    "test_programs_equinox",
    "test_pipelining_flax",
    "test_pipelining_executor",
    "test_public_api",
    "test_autocast_matrix",
    "test_autocast_lists",
    "test_optax_optimizers",
    "test_pipelining_training",
    "test_training",
    "test_code_blocks",
    "test_loss_scaling",
    "test_pipelining_processes",
    "test_pipelining_regressions",
    "test_programs_haiku",
    "test_programs_flax",
    "test_programs_jax",
)

hypothesis.settings.register_profile("ampx", deadline=None, derandomize=True, max_examples=15)
hypothesis.settings.load_profile("ampx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="all cases of the tests that the suite samples"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's own look at `-m "not slow"`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow cases, leaves out those marked `whole`, and puts long files first.

    Workers take whole files, so they end together. `slow_but("a", "b")`: of a parametrized test
    only the cases with these ids are quick. `whole_but("a", "b")`: without `--whole` only these
    run. `whole("a", "b")`: only these are left out. `sampled(3, "a")`: of the slow cases about
    every third is run without `--whole`, and "a". Which ones, their names decide, so that a new
    case moves no other.
    """
    named: dict[tuple[str, str], set[str]] = {}  # ids that these marks should meet
    for item in items:
        assert " at 0x" not in item.name, f"{item.name} has another name in each worker: give ids"
        for name in ("slow_but", "whole_but", "whole", "sampled"):
            mark = item.get_closest_marker(name)
            if ids := [arg for arg in mark.args if isinstance(arg, str)] if mark else []:
                test = (item.nodeid.partition("[")[0], name)
                named.setdefault(test, set(ids)).discard(item.callspec.id)
                if name.endswith("_but") and item.callspec.id not in ids:
                    item.add_marker(name.removesuffix("_but"))
        if (mark := item.get_closest_marker("sampled")) and item.get_closest_marker("slow"):
            every, *kept = mark.args
            if zlib.crc32(item.name.encode()) % every and item.callspec.id not in kept:
                item.add_marker("whole")
    # A test named on the command line, or `--lf`, keeps pytest from collecting the other cases.
    if not (any("::" in arg for arg in config.args) or config.getoption("lf", False)):
        if unmet := {test: ids for test, ids in named.items() if ids}:
            raise pytest.UsageError(f"marks name ids that no case has: {unmet}")
        if asleep := find_idle_killers(items):
            raise pytest.UsageError(f"mutants need these, so they cannot be `whole`: {asleep}")
    if not config.getoption("--whole"):
        config.hook.pytest_deselected(items=list(filter(is_for_whole, items)))
        items[:] = itertools.filterfalse(is_for_whole, items)
    ranks = {name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def find_idle_killers(items: list[pytest.Item]) -> set[str]:
    """The tests that must fail for a mutant, and of which no case is run without `--whole`."""
    files = {item.nodeid.partition("::")[0] for item in items}
    killers = {f"tests/{m.test}" for m in MUTANTS}
    run = {item.nodeid for item in items if not is_for_whole(item)}
    run |= {name.partition("[")[0] for name in run}
    return {test for test in killers - run if test.partition("::")[0] in files}


def is_for_whole(item: pytest.Item) -> bool:
    marks = item.iter_markers("whole")
    return any(not mark.args or item.callspec.id in mark.args for mark in marks)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: set JAX_PLATFORMS=cuda,cpu")


@pytest.fixture
def traced_as_for_gpus(monkeypatch):
    """Programs have the form that they have on GPUs. They still run on CPUs."""
    monkeypatch.setattr("ampx.updates.devices.find_device", lambda: ("gpu", "of any kind"))


@pytest.fixture
def standard_promotion():
    """For optimizers of optax, many of which add ints to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# optax mixes int32 step counts with floats in Adam's bias correction, its schedules and MultiSteps.
# Those parts alone get JAX's standard promotion, so that ampx can be held to the strict one.


def _standard_promotion(fun: Callable) -> Callable:
    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return fun(*args, **kwargs)

    return wrapped


def _schedule_factory(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        return _standard_promotion(factory(*args, **kwargs))

    return wrapped


optax.tree.bias_correction = _standard_promotion(optax.tree.bias_correction)
optax.MultiSteps.update = _standard_promotion(optax.MultiSteps.update)
_schedules = [name for name in dir(optax) if name.endswith("_schedule")]
_schedules.remove("scale_by_schedule")
for _name in (*_schedules, "exponential_decay", "join_schedules"):
    setattr(optax, _name, _schedule_factory(getattr(optax, _name)))
