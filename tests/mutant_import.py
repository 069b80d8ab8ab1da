"""A pytest plugin that loads one module of ampx with a fault in it; see `mutants.py`.

    python -m pytest -p mutant_import ...   with MUTANT='["loss_scaling/state.py", "old", "new"]'

The file on disk is never touched: the text is replaced between reading and compiling, and no
bytecode is kept. So an interrupted run leaves nothing behind, and several run side by side.
"""

import importlib.machinery
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

SOURCES = pathlib.Path(__file__).parents[1] / "ampx"


def with_fault(source: str, old: str, new: str) -> str:
    """The source with the fault in it.

    Raises:
      ValueError: unless the text to replace stands in the source exactly once.
    """
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in the module, expected once")
    return source.replace(old, new)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        _, old, new = json.loads(os.environ["MUTANT"])
        path = self.get_filename(fullname)
        source = with_fault(self.get_data(path).decode(), old, new)
        return self.source_to_code(source.encode(), path)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "ampx":
            return None
        spec = super().find_spec(fullname, path, target)
        file = SOURCES / json.loads(os.environ["MUTANT"])[0]
        if spec is not None and spec.origin and pathlib.Path(spec.origin) == file:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if "MUTANT" in os.environ:
    assert not any(name.split(".")[0] == "ampx" for name in sys.modules), "ampx is loaded already"
    sys.meta_path.insert(0, _Finder)
