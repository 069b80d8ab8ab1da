"""Which of optax's own tests are run in which form, found without running any.

A file is about optimizers if its code names a factory of them. Its tests are written once for many
optimizers and dtypes, 2,000 in all, and each form compiles each of them anew. `all_cases` are those
of every form: 45 minutes of one processor, so they are run on request (`pytest --whole`). The suite
takes `some_cases`. Where optimizers differ, every second form takes a case of its own. Any other
test is run in one form, by turns: with its one case, or with one of its parameters' cases.

`optax_cases.txt` lists by name what is left out, with the reason: tests that make no optimizer,
tests of which the suite runs no case since they take too long, and cases that cannot pass. A line
that begins with `~` is a regular expression, and stands for all cases whose names match it.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import types
import unittest
import zlib
from collections.abc import Collection, Iterator

import installed_tests
import optax
import optax_forms

import ampx

ROOT = pathlib.Path(optax.__file__).parent
LIST = pathlib.Path(__file__).with_suffix(".txt")
STUBS = ("sklearn", "sklearn.datasets", "sklearn.linear_model")
UNUSED = "calls no update of a transformation that optax makes"
NOT_FUSED = "calls no optimizer that `ampx.fused` has"
LONG = "compiles for seconds in each form, and asks for little that others do not"
PATTERN = "~ "
WHOLE_TESTS = (UNUSED, NOT_FUSED, LONG)  # lines of the list with these name tests, others cases
FORMS = optax_forms.FORMS
Cases = list[tuple[str, unittest.TestCase]]
FUSED = frozenset(name for name in ampx.fused.__all__ if hasattr(optax, name))


def _module_name(file: pathlib.Path) -> str:
    return ".".join(("optax", *file.relative_to(ROOT).with_suffix("").parts))


def _taken_from_modules(text: str) -> set[str]:
    """The names that a file takes from the modules it imports, as `sgd` in `alias.sgd`."""
    imported = re.findall(r"^(?:from optax.*)?import .*?(\w+)(?:  #.*)?$", text, re.MULTILINE)
    taken = re.findall(r"(?<![\w.])(\w+)\.(\w+)", text)
    return {name for module, name in taken if module in imported}


@functools.cache
def files() -> dict[str, bool]:
    """Each test file in optax's wheel, and whether it names a factory of transformations."""
    factories = optax_forms.factory_names()
    return {
        _module_name(file): bool(_taken_from_modules(file.read_text()) & factories)
        for file in sorted(ROOT.rglob("*_test.py"))
    }


def modules() -> list[str]:
    """The test files about optimizers."""
    return [module for module, makes_optimizers in files().items() if makes_optimizers]


@functools.cache
def load(module: str) -> types.ModuleType:
    """A test file, imported where factories heed the form, for what it binds while importing."""
    with optax_forms.dispatching_optax():
        return installed_tests.load([module], STUBS)[module]


def short(module: str) -> str:
    return module.rpartition(".")[2]


@functools.cache
def listed() -> dict[str, str]:
    """What `optax_cases.txt` leaves out: a case or a test, and the reason."""
    found, reason = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            found[line] = reason
    return found


@functools.cache
def cases_by_test(module: str) -> dict[str, Cases]:
    """The cases of each test of a file: one, or as many as its parameters make."""
    tests = collections.defaultdict(list)
    defined = set(re.findall(r"def (test\w+)", pathlib.Path(load(module).__file__).read_text()))
    for name, case in installed_tests.cases_of(load(module)).items():
        own, _, method = name.partition("(")[0].partition(".")
        starts = (start for start in defined if method.startswith(start))
        test = max(starts, key=len, default=method)
        tests[f"{short(module)}.{own}.{test}"].append((f"{short(module)}.{name}", case))
    return dict(tests)


def reasons_against(test: str, form: str) -> set[str]:
    """Why a whole test is listed: the form would not change it, or it takes too long."""
    return {listed().get(f"{key}: {test}", "") for key in ("all", form)}


def all_cases(module: str, form: str) -> dict[str, Cases]:
    """The cases of a file that a form can change, by the tests that they belong to."""
    return {
        test: [(f"{form}: {name}", case) for name, case in _suited(cases, form)]
        for test, cases in cases_by_test(module).items()
        if not reasons_against(test, form) & {UNUSED, NOT_FUSED}
    }


def some_cases(module: str, form: str) -> dict[str, Cases]:
    """Those of them that the suite runs."""
    return {
        test: _spread(cases, form, is_fused=not reasons_against(test, "fused") & set(WHOLE_TESTS))
        for test, cases in all_cases(module, form).items()
        if LONG not in reasons_against(test, form)
    }


@functools.cache
def excluded() -> dict[str, str]:
    """Each case that cannot pass, and why. Finding them imports every file."""
    names = [name for module in modules() for form in FORMS for name in _names(module, form)]
    found: dict[str, str] = {}
    for line, reason, met in _exclusions(names):
        assert met and not found.keys() & set(met), f"no case, or one that is listed twice: {line}"
        found |= dict.fromkeys(met, reason)
    return found


def excluded_among(names: Collection[str]) -> dict[str, str]:
    """Those of some cases that cannot pass, and why."""
    return {name: reason for _, reason, met in _exclusions(names) for name in met}


def _exclusions(names: Collection[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Each line of the list about cases, its reason, and the cases that it stands for."""
    for line, reason in listed().items():
        if reason in WHOLE_TESTS:
            continue
        pattern = line.removeprefix(PATTERN)
        met = [name for name in names if re.fullmatch(pattern, name)] if pattern != line else [line]
        yield line, reason, met


def _names(module: str, form: str) -> list[str]:
    return [name for cases in all_cases(module, form).values() for name, _ in cases]


def _suited(cases: Cases, form: str) -> Cases:
    """Those cases of a test that can use a form: names that `ampx.fused` has."""
    if form != "fused" or "opt_name=" not in cases[0][0]:
        return cases
    names = [re.search(r"opt_name='(\w+?)(?:_mom)?'", name) for name, _ in cases]
    return [case for case, name in zip(cases, names, strict=True) if name and name[1] in FUSED]


def _spread(cases: Cases, form: str, is_fused: bool) -> Cases:
    if not cases:
        return []
    first = cases[0][0].removeprefix(f"{form}: ")
    if "opt_name=" in first:
        if (zlib.crc32(first.encode()) + FORMS.index(form)) % 2:
            return []
    else:
        number, odd = divmod(zlib.crc32(first.encode()), 2)
        around = ("scale", "window" if odd else "zero1")[number % 3 > 0]
        if form != ("fused" if is_fused and number % 2 else around):
            return []
    return [cases[FORMS.index(form) * len(cases) // len(FORMS)]]
