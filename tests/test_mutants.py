"""The list of mutants is in order; `make mutants` runs it."""

import collections

import pytest
from mutant_import import SOURCES, with_fault
from mutant_list import MUTANTS
from mutants import AUTOCAST_MUTANTS, TESTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.fault}")
def test_a_mutant_fits_its_module_and_has_a_test(mutant):
    source = (SOURCES / mutant.file).read_text()
    compile(with_fault(source, mutant), mutant.file, "exec")
    assert mutant.new != mutant.old
    file, _, test = mutant.test.partition("::")
    assert f"\ndef {test.split('[')[0]}(" in (TESTS / file).read_text()


def test_every_package_has_mutants():
    packages = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    counts = collections.Counter(mutant.file.split("/")[0] for mutant in MUTANTS)
    assert packages <= set(counts)
    assert len(MUTANTS) >= 50
    assert (TESTS / AUTOCAST_MUTANTS).exists()
