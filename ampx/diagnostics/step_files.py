"""lint_step for a step that stands in a file: what `python -m ampx doctor train.py:step` runs.

The file is imported and not run as a program, so training that stands behind
`if __name__ == "__main__":` does not begin. The step is only traced, so its arguments need no
values. The file says what they are:

    def example_args():
        return state, jax.ShapeDtypeStruct((64, 128), jnp.float32)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ampx.checking import suggest
from ampx.diagnostics.lint import LintReport, lint_step
from ampx.diagnostics.lint_findings import CheckName

EXAMPLE_ARGS = "example_args"  # where arguments are looked for, unless another name is given


class StepFileError(ValueError):
    """There is no such file, or it does not hold what it was asked for."""


def lint_file(
    target: str, *, args: str = EXAMPLE_ARGS, ignore: Sequence[CheckName] = ()
) -> LintReport:
    """Runs `ampx.lint_step` on a step that stands in a file.

    Args:
      target: `"FILE:STEP"`: a Python file and the name of a step in it, which may have dots.
      args: the name in that file of what the step is called with: a tuple of arrays, of
        `jax.ShapeDtypeStruct` or of trees of these; or a function without arguments that gives one.
      ignore: names of checks to leave out.

    Returns:
      What `ampx.lint_step` finds.

    Raises:
      StepFileError: if there is no such file, or no such step or arguments in it. What the file
        itself raises, and the trace of the step, is not caught.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise StepFileError(f"give FILE:STEP, such as train.py:step; got {target!r}")
    file = Path(path).resolve()
    if not file.is_file():
        raise StepFileError(f"there is no file {path!r}")
    with _imported(file) as module:
        step = _find(module, name, path, "")
        if not callable(step):
            raise StepFileError(f"{name} in {path!r} is no function but {type(step).__name__}")
        found = _find(
            module,
            args,
            path,
            f". It says what {name} is called with: a tuple, or a function that gives one, as in\n"
            f"    {args} = (state, batch)\nArrays may be jax.ShapeDtypeStruct. --args names "
            "another object",
        )
        operands = found() if callable(found) else found
        if not isinstance(operands, tuple):
            raise StepFileError(
                f"{args} in {path!r} must be a tuple with an entry for each argument of {name}, "
                f"or a function that gives one; got {type(operands).__name__}"
            )
        return lint_step(step, ignore=ignore)(*operands)


@contextlib.contextmanager
def _imported(file: Path) -> Iterator[ModuleType]:
    """Imports a file under its own name, with its folder first on the path, as Python does."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise StepFileError(f"{file.name!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    is_new = sys.modules.setdefault(file.stem, module) is module  # dataclasses look it up there
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(file.parent))
        if is_new:
            del sys.modules[file.stem]


def _find(module: ModuleType, name: str, path: str, advice: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        near = suggest(name, [known for known in vars(module) if not known.startswith("_")])
        raise StepFileError(f"{path!r} has no {name!r}{near}{advice}") from None
