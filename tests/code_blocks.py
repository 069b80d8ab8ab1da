"""Runs the code blocks of a page as a reader would: from the top, in one namespace."""

import doctest
import pathlib
import re
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?P<language>[^\n]*)\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {"python", "pycon", "diff"}  # languages of the blocks that are run
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    source: str
    line: int  # of the page: where the source begins, from 1


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(
            found["language"],
            found["source"],
            text.count("\n", 0, found.start("source")) + 1,
        )
        for found in BLOCK.finditer(text)
    ]


def side_of_diff(diff: str, sign: str) -> str:
    """What the lines of a diff say before (`-`) or after it (`+`), line by line."""
    kept = (line[1:] if line[:1] in (sign, " ") else "" for line in diff.splitlines())
    return "\n".join(kept)


class _Checker(doctest.OutputChecker):
    """Compares without places in programs, which here are lines of the page."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (re.sub(r"\S+:\d+:\d+", "<place>", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def _run_session(block: Block, page: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.source, names, page, page, block.line - 1)
    test.globs = names  # the parser copies them; what a session defines is there afterwards
    said: list[str] = []
    runner = doctest.DocTestRunner(_Checker(), optionflags=FLAGS)
    failed, _ = runner.run(test, out=said.append, clear_globs=False)
    assert not failed, "".join(said)


def run_block(block: Block, page: str, names: dict[str, Any]) -> None:
    """Runs one block, if it is a program; of a diff the old side too, whose names are forgotten."""

    def execute(source: str, names: dict[str, Any]) -> None:
        # Tracebacks, and all that JAX says of the program, name the line of the page.
        exec(compile("\n" * (block.line - 1) + source, str(ROOT / page), "exec"), names)

    if block.language == "pycon":
        _run_session(block, page, names)
    elif block.language == "diff":
        execute(side_of_diff(block.source, "-"), dict(names))
        execute(side_of_diff(block.source, "+"), names)
    elif block.language == "python":
        execute(block.source, names)


def run_page(page: str) -> dict[str, Any]:
    """Runs all blocks of a page in their order, and returns what they have defined."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(page):
        run_block(block, page, names)
    return names
