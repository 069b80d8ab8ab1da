"""optax's own tests, with ampx around or in the place of every optimizer that they make.

optax installs its tests with itself. They are not copied: each is imported and run in the forms of
`optax_forms`, and must see the numbers that it asks for. `optax_cases` says which are run, and its
text file what cannot pass. The tests of losses make no optimizers; they are run on losses under
`ampx.autocast`, which must leave every loss as exact as it is.
"""

from __future__ import annotations

import installed_tests
import optax_cases
import optax_forms
import pytest
from listing import Peer
from optax_cases import LONG, NOT_FUSED, UNUSED, chosen, listed, short

MODULES = [module for module, makes_optimizers in optax_cases.files().items() if makes_optimizers]
WHOLE_TESTS = (UNUSED, NOT_FUSED, LONG)  # not run at all; all other lines are cases
# How a sum is rounded depends on the processor, too.
LAST_DIGITS = "compares to more digits than a compiled program and single operations share"
EXCLUDED = {name: reason for name, reason in listed().items() if reason not in WHOLE_TESTS}


def case_names():
    for module in MODULES:
        for form in optax_forms.FORMS:
            for cases in chosen(module, form).values():
                yield from (name for name, _ in cases)


PEERS = (
    Peer(
        source="optax",
        runs="its own tests of optimizers, with each optimizer inside `ampx.dynamic_loss_scale` "
        "(`scale`), `ampx.multi_steps` (`window`) or `ampx.zero1`, or the one of `ampx.fused` in "
        "its place",
        cases=case_names,
        excluded=EXCLUDED,
    ),
)


def run_in_form(name, case):
    with optax_forms.dispatching_optax(), optax_forms.form(name) as seen:
        return installed_tests.run(case), seen()


def check(module, form):
    """All pass but those that are excluded, and none of the tests has nothing to do with ampx."""
    errors, idle, fused = {}, [], []
    whole = optax_cases.cases_by_test(module)
    for test, cases in chosen(module, form).items():
        seen = []
        for name, case in cases:
            errors[name], what = run_in_form(form, case)
            seen.append(what)
        if cases and not any(what.used for what in seen):
            idle.append(test)
        # Of a parametrized test, the form `fused` may have got a case without such an optimizer.
        is_alone = len(whole[test]) == 1
        if is_alone and seen and seen[0].names & optax_cases.FUSED:
            fused.append(f"fused: {test}")
    installed_tests.compare_errors(errors, EXCLUDED, may_pass=(LAST_DIGITS,))
    assert not idle, f"list these with {UNUSED!r}, or for fused with {NOT_FUSED!r}: {idle}"
    wrong = set(fused) & set(listed())
    assert not wrong, f"these make optimizers that ampx.fused has: {wrong}"


QUICK = "optax.transforms._combining_test"


@pytest.mark.parametrize("form", optax_forms.FORMS)
def test_a_file_in_each_form(form):
    check(QUICK, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", optax_forms.FORMS)
@pytest.mark.parametrize("module", [m for m in MODULES if m != QUICK], ids=short)
def test_optimizers(module, form):
    check(module, form)


@pytest.mark.slow
def test_the_others_call_no_optimizer():
    lines = [name for name, why in listed().items() if why == UNUSED]
    idle = {line.removeprefix("all: ") for line in lines if line.startswith("all: ")}
    for module in MODULES:
        for test, cases in optax_cases.cases_by_test(module).items():
            if test in idle:
                assert not run_in_form("scale", cases[0][1])[1].used, f"{test} can be run"
                idle.remove(test)
    assert not idle, "these are no tests"


def test_what_is_listed_exists():
    tests = {test for module in MODULES for test in optax_cases.cases_by_test(module)}
    names = {name.partition(": ")[2] for name, why in listed().items() if why in WHOLE_TESTS}
    assert names <= tests
