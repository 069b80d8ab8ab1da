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
without running anything. `test_listing.py` holds all of this in step: each file has its `PEERS`,
each excluded name is a case, and the page says what the files say.
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
        understands.
    """

    source: str
    runs: str
    cases: Callable[[], Iterable[str]]
    excluded: Mapping[str, str]

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.source)


def read_files() -> Iterator[tuple[str, tuple[Peer, ...]]]:
    """The name of each file in this folder and its peers.

    Raises:
      AttributeError: if a file has no `PEERS`.
      ImportError: if the library that it runs is not installed.
    """
    for file in sorted(FOLDER.glob("test_*.py")):
        if file.stem != "test_listing":
            yield file.name, importlib.import_module(file.stem).PEERS


def rows_of(file: str, peer: Peer) -> tuple[str, list[str]]:
    """A peer's row in the table, and its rows in the table of what is excluded."""
    cases, excluded = len(list(peer.cases())), len(peer.excluded)
    cells = (peer.source, peer.version, f"`{file}`", peer.runs)
    counts = (f"{number:,}" for number in (cases, cases - excluded, excluded))
    groups = collections.defaultdict(list)
    for name, reason in peer.excluded.items():
        groups[reason].append(name)
    details = []
    for reason, names in groups.items():
        shown = ", ".join(f"`{name}`" for name in sorted(names)[:SHOWN])
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        details.append(f"| {peer.source} | {reason} | {len(names):,}: {shown}{more} |")
    return f"| {' | '.join((*cells, *counts))} |", details


def tables() -> str:
    """Both tables of the page."""
    rows = [rows_of(file, peer) for file, peers in read_files() for peer in peers]
    lines = [
        "| library | version | file | what is run | cases | pass | excluded |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
        *(row for row, _ in rows),
        "",
        "| library | why it is excluded | cases |",
        "| --- | --- | --- |",
        *(line for _, details in rows for line in details),
    ]
    return "\n".join(lines) + "\n"


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
