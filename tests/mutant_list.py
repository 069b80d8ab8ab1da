"""Reads the list of mutants, `mutants.txt`, whose head explains it."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

LIST = pathlib.Path(__file__).with_name("mutants.txt")


class Mutant(NamedTuple):
    """One fault.

    Attributes:
      fault: what is wrong, in words.
      file: the module, below `ampx/`.
      old: a text that stands in it once.
      new: what stands there instead.
      test: what must fail: a file below `tests/`, `::`, a test, and perhaps a case in brackets.
    """

    fault: str
    file: str
    old: str
    new: str
    test: str


def read_mutants(text: str) -> Iterator[Mutant]:
    """Reads the mutants of a list in the order in which they stand there.

    Raises:
      ValueError: for a line that is none of the list's.
    """
    file = tests = fault = test = ""
    old: list[str] = []
    new: list[str] = []
    for line in (*text.splitlines(), ""):
        kind, rest = line[:2], line[2:]
        if kind not in ("- ", "+ ") and new:
            yield Mutant(fault, file, "\n".join(old), "\n".join(new), f"{tests}::{test}")
            old, new = [], []
        if kind == "- ":
            old.append(rest)
        elif kind == "+ ":
            new.append(rest)
        elif kind == "= ":
            file, tests = rest.split(" killed by ")
        elif kind == "* ":
            fault, test = rest.split(": ", 1)
        elif line and kind.strip() != "#":
            raise ValueError(f"no line of a list of mutants: {line!r}")


MUTANTS = list(read_mutants(LIST.read_text()))
