"""optax's own tests, with ampx around or in the place of every optimizer that they make.

optax installs its tests with itself. They are not copied: each is imported and run in the forms of
`optax_forms`, and must see the numbers that it asks for. `optax_cases` says which cases the suite
runs, and which all of them are, for `pytest --whole`; its text file says what cannot pass.
"""

from __future__ import annotations

import installed_tests
import optax_cases
import optax_forms
import pytest
from listing import Peer
from optax_cases import FORMS, NOT_FUSED, UNUSED, WHOLE_TESTS, all_cases, listed, short, some_cases

MODULES = optax_cases.modules()
# How a sum is rounded depends on the processor, too.
LAST_DIGITS = "compares to more digits than a compiled program and single operations share"


def names_of(choose):
    for module in MODULES:
        for form in FORMS:
            for cases in choose(module, form).values():
                yield from (name for name, _ in cases)


PEERS = (
    Peer(
        source="optax",
        runs="its own tests of optimizers, with each optimizer inside `ampx.dynamic_loss_scale` "
        "(`scale`), `ampx.multi_steps` (`window`) or `ampx.zero1`, or the one of `ampx.fused` in "
        "its place",
        cases=lambda: names_of(all_cases),
        in_suite=lambda: names_of(some_cases),
        excluded=optax_cases.excluded,
    ),
)


def run_in_form(name, case):
    with optax_forms.dispatching_optax(), optax_forms.form(name) as seen:
        return installed_tests.run(case), seen()


def check(module, form, choose=some_cases):
    """All pass but those that are excluded, and none of the tests has nothing to do with ampx."""
    errors, idle, fused = {}, [], []
    whole = optax_cases.cases_by_test(module)
    for test, cases in choose(module, form).items():
        seen = []
        for name, case in cases:
            errors[name], what = run_in_form(form, case)
            seen.append(what)
        # Of a parametrized test, the form may have got a case that calls no such optimizer.
        is_alone = len(whole[test]) == 1
        if (is_alone or len(cases) > 1) and cases and not any(what.used for what in seen):
            idle.append(test)
        if is_alone and seen and seen[0].names & optax_cases.FUSED:
            fused.append(f"fused: {test}")
    installed_tests.compare_errors(
        errors, optax_cases.excluded_among(errors), may_pass=(LAST_DIGITS,)
    )
    assert not idle, f"list these with {UNUSED!r}, or for fused with {NOT_FUSED!r}: {idle}"
    wrong = set(fused) & set(listed())
    assert not wrong, f"these make optimizers that ampx.fused has: {wrong}"


QUICK = "optax.transforms._combining_test"


@pytest.fixture
def choose(request):
    return all_cases if request.config.getoption("--whole") else some_cases


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_each_form(form, choose):
    check(QUICK, form, choose)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", [m for m in MODULES if m != QUICK], ids=short)
def test_optimizers(module, form, choose):
    check(module, form, choose)


@pytest.mark.whole
def test_the_others_call_no_optimizer():
    """Every fourth of them: a file whose code has changed has several."""
    lines = [name for name, why in listed().items() if why == UNUSED]
    idle = {line.removeprefix("all: ") for line in lines if line.startswith("all: ")}
    tests = {
        t: own for m in MODULES for t, own in optax_cases.cases_by_test(m).items() if t in idle
    }
    assert tests.keys() == idle, "these are no tests"
    for test, cases in list(tests.items())[::4]:
        assert not run_in_form("scale", cases[0][1])[1].used, f"{test} can be run"


def test_what_is_listed_exists():
    tests = {test for module in MODULES for test in optax_cases.cases_by_test(module)}
    names = {name.partition(": ")[2] for name, why in listed().items() if why in WHOLE_TESTS}
    assert names <= tests
