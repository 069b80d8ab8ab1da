"""Runs the tests that another library installs with itself, as unittest's cases, one at a time.

They are written for absl's runner and for JAX as it comes: flags that are parsed, the usual
promotion of dtypes, warnings that are no errors. Importing such a file may change JAX's settings,
and so may a test that fails half-way; what was set before is set again.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import jax
from absl import flags


@contextlib.contextmanager
def foreign_settings() -> Iterator[None]:
    """What other libraries expect of the process, and its own settings again afterwards."""
    before = dict(jax.config.values)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for name, value in before.items():
                if jax.config.values[name] != value:
                    jax.config.update(name, value)


def load(names: Iterable[str], stubs: Iterable[str] = ()) -> dict[str, types.ModuleType]:
    """Imports test modules by their full names.

    Args:
      names: of modules.
      stubs: modules that they import and that need not be installed: empty ones take their place.
        A test that uses one of them fails.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with foreign_settings(), contextlib.ExitStack() as stack:
        for stub in stubs:
            with contextlib.suppress(ImportError):
                importlib.import_module(stub)
            if stub not in sys.modules:
                _stand_in(stub)
                stack.callback(sys.modules.pop, stub)
        return {name: importlib.import_module(name) for name in names}


def _stand_in(name: str) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def cases_of(module: types.ModuleType) -> dict[str, unittest.TestCase]:
    """The cases of a module by a name that tells what each is about.

    absl numbers the cases of a parametrized test. Here they are called by their parameters, as in
    `AliasTest.test_preserve_dtype(opt_name='adam', dtype='bfloat16')`.
    """
    found: dict[str, unittest.TestCase] = {}
    for case in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if case.__class__.__module__ != module.__name__:
            continue  # doctests, and what another module defines
        name = _name_of(case)
        found[name if name not in found else f"{name} {len(found)}"] = case
    return found


def _flat(suite: Any) -> Iterator[Any]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _flat(item)
        else:
            yield item


def _name_of(case: Any) -> str:
    method = case._testMethodName
    parameters = getattr(getattr(case, method), "__x_params_repr__", "")
    if parameters:
        # Functions and objects print their addresses.
        parameters = re.sub(
            r"<(?:function|class|module|bound method) '?([\w.]+).*?>", r"\1", parameters
        )
        parameters = re.sub(r" at 0x\w+", "", parameters)
        method = method.rstrip("0123456789")
    return f"{type(case).__name__}.{method}{parameters}"


def run(case: unittest.TestCase) -> str:
    """Runs one case: "" if it passes or skips itself, else the end of its first error."""
    result = unittest.TestResult()
    with foreign_settings():
        case.run(result)
    faults = result.errors + result.failures
    if not faults and result.unexpectedSuccesses:
        return "unexpected success"
    return faults[0][1].strip()[-3000:] if faults else ""


def check_all(cases: Mapping[str, unittest.TestCase], excluded: Mapping[str, str]) -> None:
    """Runs cases: those that are excluded must fail, and all others pass."""
    compare_errors({name: run(case) for name, case in cases.items()}, excluded)


def compare_errors(
    errors: Mapping[str, str], excluded: Mapping[str, str], may_pass: Container[str] = ()
) -> None:
    """Compares what `run` said of cases with the list of those that must fail.

    Args:
      errors: from each case to its error, "" where it passed.
      excluded: from cases that must fail to the reason.
      may_pass: reasons that do not hold on every machine.
    """
    unexpected = {name: error for name, error in errors.items() if error and name not in excluded}
    assert not unexpected, f"{len(unexpected)} of {len(errors)}: {unexpected}"
    passed = [
        name
        for name, error in errors.items()
        if not error and name in excluded and excluded[name] not in may_pass
    ]
    assert not passed, f"these pass now: take them off the list: {passed}"


@contextlib.contextmanager
def replaced(owner: Any, **values: Callable[..., Any]) -> Iterator[None]:
    """Other attributes of a module, for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
