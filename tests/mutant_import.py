"""Loads one module of ampx with a fault in it; see `mutants.py`.

The file on disk is never touched: the text is replaced between reading and compiling, and no
bytecode is kept. So an interrupted run leaves nothing behind, and several run side by side.
"""

import importlib.machinery
import pathlib
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from mutant_list import Mutant

SOURCES = pathlib.Path(__file__).parents[1] / "ampx"


def with_fault(source: str, mutant: Mutant) -> str:
    """The source of a mutant's module with the fault in it.

    Raises:
      ValueError: unless the text to replace stands in the source exactly once.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.old!r} stands {count} times in {mutant.file}, expected once")
    return source.replace(mutant.old, mutant.new)


def import_with_fault(mutant: Mutant) -> None:
    """From now on, an import of the mutant's module gives the faulty one."""
    assert not any(name.split(".")[0] == "ampx" for name in sys.modules), "ampx is loaded already"
    file = SOURCES / mutant.file

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            source = with_fault(file.read_text(), mutant)
            return self.source_to_code(source.encode(), str(file))

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(
            cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname.split(".")[0] != "ampx":
                return None
            spec = super().find_spec(fullname, path, target)
            if spec is not None and spec.origin and pathlib.Path(spec.origin) == file:
                spec.loader = Loader(fullname, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder)
