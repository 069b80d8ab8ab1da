"""optax's own tests of its losses, with every loss under `ampx.autocast`.

A loss is where autocast has to be exact: logarithms, exponentials and sums of them run in float32,
whatever the model before them ran in. So each test must pass at the tolerance that optax chose.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import installed_tests
import jax
import optax
import optax.losses
import pytest
from listing import Peer
from optax_cases import cases_by_test

import ampx

FOLDER = pathlib.Path(optax.losses.__file__).parent
MODULES = [f"optax.losses.{file.stem}" for file in sorted(FOLDER.glob("*_test.py"))]
_BY_PRODUCT = (
    "picks log-probabilities by a product with one-hot vectors, and products run in half: "
    "`ampx.float_function` keeps such a loss in float32"
)
_IN_PYTHON = "looks at numbers in Python, which no traced program can"
EXCLUDED = {
    "_classification_test.CTCTest.test_repeat_with_one_to_one_alignment": _BY_PRODUCT,
    "_classification_test.CTCTest.test_with_one_to_one_alignment": _BY_PRODUCT,
    "_classification_test.CTCTest.test_with_one_to_one_alignment_and_paddings": _BY_PRODUCT,
    "_fenchel_young_test.FenchelYoungTest.test_fenchel_young_reg": "makes a loss, and is none",
    "_segmentation_test.DiceLossTest.test_apply_softmax_flag": _IN_PYTHON,
    "_segmentation_test.DiceLossTest.test_dice_loss_weighting_parameters": _IN_PYTHON,
    "_segmentation_test.DiceLossTest.test_probability_validation": _IN_PYTHON,
}


def under_autocast(loss: Callable[..., Any], running: list[str]) -> Callable[..., Any]:
    """A loss under autocast, with its arrays as arguments and all else as settings.

    Losses call each other: one that is called by another is under autocast already, and `running`
    has a name in it.
    """

    @functools.wraps(loss)
    def run(*args: Any, **kwargs: Any) -> Any:
        if running:
            return loss(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [hasattr(leaf, "dtype") for leaf in leaves]

        def of_arrays(arrays: Any) -> Any:
            arrays = iter(arrays)
            whole = [
                next(arrays) if own else leaf for own, leaf in zip(is_array, leaves, strict=True)
            ]
            args, kwargs = structure.unflatten(whole)
            running.append(loss.__name__)
            try:
                return loss(*args, **kwargs)
            finally:
                running.pop()

        arrays = [leaf for own, leaf in zip(is_array, leaves, strict=True) if own]
        return jax.jit(ampx.autocast(of_arrays, half_dtype="bfloat16"))(arrays)

    return run


@contextlib.contextmanager
def losses_under_autocast():
    running: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in MODULES:
            module = importlib.import_module(name.removesuffix("_test"))
            own = {
                key: under_autocast(value, running)
                for key, value in vars(module).items()
                if inspect.isfunction(value)
                and value.__module__ == module.__name__
                and not key.startswith("_")
            }
            stack.enter_context(installed_tests.replaced(module, **own))
        yield


def all_cases(module):
    return {name: case for cases in cases_by_test(module).values() for name, case in cases}


def some_cases(module):
    """The first case of each test."""
    return dict(cases[0] for cases in cases_by_test(module).values())


def names_of(choose):
    return [name for module in MODULES for name in choose(module)]


PEERS = (
    Peer(
        source="optax",
        runs="its own tests of losses, with each loss under `ampx.autocast` in bfloat16",
        cases=lambda: names_of(all_cases),
        in_suite=lambda: names_of(some_cases),
        excluded=EXCLUDED,
    ),
)


@pytest.mark.slow_but("_smoothing_test")
@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.rpartition(".")[2])
def test_losses(module, request):
    choose = all_cases if request.config.getoption("--whole") else some_cases
    with losses_under_autocast():
        installed_tests.check_all(choose(module), EXCLUDED)
