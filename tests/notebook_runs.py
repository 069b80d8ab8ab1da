"""Runs the code cells of a notebook, as IPython does, and returns what each of them prints.

A kernel of Jupyter would import all libraries anew, which takes longer than most of the cells. So
each notebook has a process that `processes.start_server` forks from one that has imported them.
"""

import multiprocessing
import os
import pathlib
from multiprocessing.connection import Connection

import nbformat
from processes import start_server

LIBRARIES = (
    *(
        "ipykernel.compiler",
        "IPython.core.interactiveshell",
        "ampx.examples.language_model",
        "ampx.plotting",
    ),
    *("flax.linen", "flax.nnx", "matplotlib.pyplot", "optax"),
)
SECONDS = 300  # for one notebook


class CellFailed(Exception):  # noqa: N818
    """A cell raised an error; the message has its number, and what it printed."""


def run_notebook(path: pathlib.Path, **environment: str) -> list[str]:
    """What each code cell of a notebook prints, its last value included, but no pictures.

    Args:
      path: of the notebook, in whose folder it runs.
      environment: variables that it finds in the environment, besides those of the server.

    Raises:
      CellFailed: if a cell raises an error.
      TimeoutError: if the notebook takes too long.
    """
    start_server(LIBRARIES)
    cells = nbformat.read(path, as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(
        target=_run_cells, args=(there, str(path.parent), sources, environment)
    )
    process.start()
    there.close()
    try:
        if not here.poll(SECONDS):
            raise TimeoutError(f"{path.name} takes more than {SECONDS} s")
        texts, error = here.recv()
    finally:
        process.kill()
        process.join()
    if error:
        raise CellFailed(f"{path.name}, code cell {len(texts) - 1}: {texts[-1]}\n{error}")
    return texts


def _run_cells(
    connection: Connection, folder: str, sources: list[str], environment: dict[str, str]
) -> None:
    """Sends what the cells print, up to the first that fails, and how it failed."""
    from ipykernel.compiler import XCachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    class KeepValue(DisplayHook):
        """Keeps the value of a cell, where IPython's own would print it after a prompt."""

        def __call__(self, result: object = None) -> None:
            self.fill_exec_result(result)

    os.environ.update(environment)
    os.chdir(folder)
    # Cells have the names that a kernel gives them, which are printed where lines of code are.
    shell = InteractiveShell.instance(
        config=Config({"HistoryManager": {"enabled": False}}),
        compiler_class=XCachingCompiler,
        displayhook_class=KeepValue,
    )
    texts, error = [], ""
    for source in sources:
        with capture_output() as captured:
            result = shell.run_cell(source)
        texts.append(captured.stdout)
        # A semicolon at the end of a cell hides its value.
        if result.result is not None and not source.rstrip().endswith(";"):
            texts[-1] += shell.display_formatter.format(result.result)[0]["text/plain"]
        if not result.success:
            error = repr(result.error_before_exec or result.error_in_exec)
            break
    connection.send((texts, error))
