"""lint_step for a step that stands in a file: what `python -m ampx doctor train.py:step` runs.

The file is imported and not run as a program, so training that stands behind
`if __name__ == "__main__":` does not begin. A file inside of a package is imported as a part of it,
and a module may be named instead, as in `pkg.train:step`. While it is imported, `sys.argv` holds no
arguments. The step is only traced, so its arguments need no values. The file says what they are:

    def example_args():
        return state, jax.ShapeDtypeStruct((64, 128), jnp.float32)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
      target: `"FILE:STEP"`: a Python file, or the name of a module as for `python -m`, and the name
        of a step in it, which may have dots.
      args: the name in that file of what the step is called with: a tuple of arrays, of
        `jax.ShapeDtypeStruct` or of trees of these; or a function without arguments that gives one.
      ignore: names of checks to leave out.

    Returns:
      What `ampx.lint_step` finds.

    Raises:
      StepFileError: if there is no such file, no such step or arguments in it, or if it ends the
        program. What else the file raises, and the trace of the step, is not caught.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise StepFileError(
            f"give FILE:STEP, such as train.py:step or pkg.train:step; got {target!r}"
        )
    with _without_arguments(path), _imported(path) as module:
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
def _without_arguments(path: str) -> Iterator[None]:
    """Hides the arguments of `doctor`, which a file that parses its own must not read."""
    before, sys.argv = sys.argv, [path]
    try:
        yield
    except SystemExit as error:
        raise StepFileError(
            f"{path!r} ends the program when it is imported, with status {error.code!r}: put that "
            'behind `if __name__ == "__main__":`'
        ) from error
    finally:
        sys.argv = before


@contextlib.contextmanager
def _imported(path: str) -> Iterator[ModuleType]:
    """Imports a file or a module, with its folder first on the path, as Python does."""
    name, folder, file = _locate(path)
    before = set(sys.modules)
    try:
        with _first_on_path(folder):
            yield _load(name, file) if file else importlib.import_module(name)
    finally:
        # It may be changed, and linted again; so may the other modules of its package.
        package = name.split(".")[0]
        for other in sys.modules.keys() - before if package not in before else ():
            if other.split(".")[0] == package:
                del sys.modules[other]


def _locate(path: str) -> tuple[str, Path, Path | None]:
    """The module that a path stands for, the folder to import it from, and the file if it is alone.

    Of a file in a package only the package's own name lets its relative imports find their targets.
    """
    names = path.split(".")
    if names[-1] != "py" and all(map(str.isidentifier, names)):
        folder = Path.cwd()
        with _first_on_path(folder):
            if importlib.util.find_spec(names[0]) is None:
                raise StepFileError(f"there is no file and no module {path!r}")
        return path, folder, None
    file = Path(path).resolve()
    if not file.is_file():
        raise StepFileError(f"there is no file {path!r}")
    folder, names = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    if len(names) == 1:
        return names[0], folder, file
    return ".".join(names[:-1] if names[-1] == "__init__" else names), folder, None


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _load(name: str, file: Path) -> ModuleType:
    """Imports a file that is no part of a package, whatever else has its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise StepFileError(f"{file.name!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str, path: str, advice: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        near = suggest(name, [known for known in vars(module) if not known.startswith("_")])
        raise StepFileError(f"{path!r} has no {name!r}{near}{advice}") from None
