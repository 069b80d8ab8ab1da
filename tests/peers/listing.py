"""What `docs/peers.md` says of the programs in this folder, and the constant that tells it.

    python tests/peers/listing.py          writes the tables of docs/peers.md anew

A file `test_*.py` here runs programs that nobody here wrote. It says which in a constant of its
module, one `Peer` for each library:

    from listing import Peer

    EXCLUDED: dict[str, str] = {"name of a case": "why it cannot pass"}
    PEERS = (
        Peer(
            source="dm-haiku",
            runs="every example network, its loss and gradients, under `ampx.autocast`",
            cases=lambda: [f"{name}-{form}" for name in NAMES for form in FORMS],
            excluded=EXCLUDED,
        ),
    )

The tests of the file must be strict: every case runs, one that fails must be in `excluded`, and
one in `excluded` that passes fails the test. So what passed is what is left, and can be counted
without running anything. A library that has too many cases says which of them the suite runs, in
`in_suite`; its tests run all with `pytest --whole`. `test_listing.py` holds all of this in step:
each file has its `PEERS`, each excluded name is a case, and the page says what the files say.

A library that is not among the tests' own requirements is asked for at the top of its file, by
`pytest.importorskip`. Where it is missing its tests are skipped, and its lines of the page stay as
they are.
"""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs/peers.md"
BEGIN, END = "<!-- begin: written by tests/peers/listing.py -->\n", "<!-- end -->\n"
SHOWN = 6  # so many names of excluded cases are shown on the page; the file has them all


class Peer(NamedTuple):
    """A library whose programs a file runs.

    Attributes:
      source: the distribution that the programs come from, as pip knows it.
      runs: what is run and how, in one or two sentences of Markdown that begin in lower case.
      cases: returns the names of all cases, without running them. Each program in each form is one.
      excluded: which of these cases cannot pass, and why, in words that a reader of the page
        understands; or a function that returns this, where finding it takes seconds, which every
        worker would spend while it collects tests.
      in_suite: returns the names of those cases that the suite runs; without it, it runs all.
    """

    source: str
    runs: str
    cases: Callable[[], Iterable[str]]
    excluded: Mapping[str, str] | Callable[[], Mapping[str, str]]
    in_suite: Callable[[], Iterable[str]] | None = None

    @property
    def reasons(self) -> Mapping[str, str]:
        """`excluded`, found if need be."""
        return self.excluded() if callable(self.excluded) else self.excluded

    @property
    def version(self) -> str:
        return installed_version(self.source)


def installed_version(source: str) -> str:
    """The version of a distribution, without the build: the programs of `2.13.0+cpu` are the same.

    Raises:
      PackageNotFoundError: if it is not installed.
    """
    return importlib.metadata.version(source).partition("+")[0]


def list_files() -> list[str]:
    """The names of the files in this folder that run peers."""
    return sorted(file.name for file in FOLDER.glob("test_*.py") if file.stem != "test_listing")


def read_files() -> Iterator[tuple[str, tuple[Peer, ...]]]:
    """The name of each file in this folder and its peers; without files whose library is missing.

    Raises:
      AttributeError: if a file has no `PEERS`.
    """
    for file in list_files():
        try:
            peers = importlib.import_module(file.removesuffix(".py")).PEERS
        except pytest.skip.Exception:
            continue
        yield file, peers


def rows_of(file: str, peer: Peer) -> tuple[str, list[str]]:
    """A peer's row in the table, and its rows in the table of what is excluded."""
    cases, excluded = len(list(peer.cases())), len(peer.reasons)
    cells = (peer.source, peer.version, f"`{file}`", peer.runs)
    in_suite = cases if peer.in_suite is None else len(list(peer.in_suite()))
    counts = (f"{number:,}" for number in (cases, cases - excluded, excluded, in_suite))
    groups = collections.defaultdict(list)
    for name, reason in peer.reasons.items():
        groups[reason].append(name)
    details = []
    for reason, names in groups.items():
        shown = ", ".join(f"`{name}`" for name in sorted(names)[:SHOWN])
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        details.append(f"| {peer.source} | {reason} | {len(names):,}: {shown}{more} |")
    return f"| {' | '.join((*cells, *counts))} |", details


def tables() -> str:
    """Both tables of the page, with the lines that it has of what is not installed here."""
    found = dict(read_files())
    rows, details = [], []
    for file in list_files():
        if file in found:
            own = [rows_of(file, peer) for peer in found[file]]
            rows += [row for row, _ in own]
            details += [line for _, lines in own for line in lines]
        else:
            rows += shown_lines(lambda cells, file=file: f"`{file}`" in cells)
    here = {peer.source for peers in found.values() for peer in peers}
    details += shown_lines(lambda cells: len(cells) == 3 and cells[0] not in {"library", *here})
    lines = [
        "| library | version | file | what is run | cases | pass | excluded | run by the suite |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        "| library | why it is excluded | cases |",
        "| --- | --- | --- |",
        *sorted(details, key=lambda line: line.split(" | ")[0].lower()),
    ]
    return "\n".join(lines) + "\n"


def shown_lines(is_wanted: Callable[[list[str]], bool]) -> list[str]:
    """Lines of the page's tables, chosen by their cells."""
    cells_of = {line: line.strip("| ").split(" | ") for line in shown_tables().splitlines()}
    return [line for line, cells in cells_of.items() if "---" not in line and is_wanted(cells)]


def shown_tables() -> str:
    """The tables as the page has them."""
    _, found = PAGE.read_text().split(BEGIN)
    return found.split(END)[0].strip() + "\n"


def write() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")


def versions_shown() -> dict[str, str]:
    """The libraries of the page, and the versions with which it was written."""
    return dict(re.findall(r"^\| ([\w.-]+) \| (\d[\w.+-]*) \|", PAGE.read_text(), re.MULTILINE))


if __name__ == "__main__":
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    # As under pytest: eight devices and the quick compiler, and a copy of this module by its name.
    importlib.import_module("conftest")
    importlib.import_module("listing").write()
