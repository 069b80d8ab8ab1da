"""Tables as text: what reports, plans and explanations print, in a log and in a terminal.

A table is a sequence of rows, a row a sequence of cells, a cell a string. Each column is as wide as
its widest cell, two spaces stand between columns, and no line ends in spaces:

    reduction  primitive  axes
    0          psum       data
    12         psum       data, stage

A report is a list of blocks, each a text or a `Table`, below each other. Three things are made of
the same blocks:

    print(report)        this plain text, the same everywhere
    a notebook           the plain text as HTML (`ampx.summaries`)
    rich.print(report)   tables in colour that fit the terminal: a cell that is too long for its
                         column goes on in the next line of it, and nothing is ever cut off

rich is asked for by duck typing: it looks for a method of a certain name, and is imported there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

# The head of a column with lines of programs, which a report is there for.
SOURCE = "written in"
_GAP = 2  # spaces between columns


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, one a row, with aligned columns.

    Args:
      rows: cells as strings, in every row as many as in the first, which is the header if there is
        one.

    Returns:
      One line a row, without line breaks; none for no rows.

    Raises:
      ValueError: if rows differ in length.

    Examples:
      >>> from ampx import text_tables
      >>> text_tables.format_rows([("scope", "values"), ("head", "64"), ("layers/0", "")])
      ['scope     values', 'head      64', 'layers/0']
    """
    # The strict transposition is also the check that no row is shorter than another.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class Table(NamedTuple):
    """A table as a block of a report.

    Attributes:
      rows: cells as strings; the first row is the header.
    """

    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return "\n".join(format_rows(self.rows))


Block = str | Table


class Blocks(tuple[Block, ...]):
    """Blocks that are printed as a report is, without being one."""

    __slots__ = ()

    def _blocks(self) -> Iterable[Block]:
        return self

    def __str__(self) -> str:
        return show_blocks(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return show_rich(self, console, options)


def spread(blocks: Iterable[Block]) -> list[Block]:
    """Puts an empty line between blocks."""
    return [part for block in blocks for part in ("", block)][1:]


def show_blocks(self: Any) -> str:
    """The blocks of a report as plain text: its `__str__`."""
    return "\n".join(map(str, self._blocks()))


def show_rich(self: Any, console: Any, options: Any) -> Iterator[Any]:
    """The blocks of a report in colour: its `__rich_console__`, which rich calls.

    A report that has no blocks is shown as the text that it prints.
    """
    from rich.text import Text

    blocks = self._blocks() if hasattr(self, "_blocks") else [str(self)]
    for block in blocks:
        if isinstance(block, Table):
            yield _as_rich_table(block, options.max_width)
        else:
            yield Text(block, overflow="fold")


def print_report(report: Any) -> None:
    """Prints a report: by rich in a terminal, if it is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        import rich

        rich.print(report)
    else:
        print(report)


def _as_rich_table(table: Table, width: int) -> Any:
    """A table for rich, at most as wide as the terminal, in characters."""
    from rich import table as rich_tables
    from rich.text import Text

    made = rich_tables.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    head, *rows = table.rows
    for name, column in zip(head, fit_columns(table.rows, width), strict=True):
        style = "cyan" if name == SOURCE else ""
        made.add_column(Text(name), style=style, overflow="fold", width=column)
    for row in rows:
        made.add_row(*map(Text, row))  # not strings: rich would take float32[3] for a markup
    return made


def fit_columns(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column, so that the table is at most as wide as the terminal.

    The widest columns give way, as far as each word stays whole, and so do lines of programs. If
    they cannot all, these go on in a second line first, and then words do.

    Examples:
      >>> from ampx import text_tables
      >>> rows = [("check", "written in"), ("it is wrong here", "train.py:7 (step)")]
      >>> [text_tables.fit_columns(rows, width) for width in (80, 30, 20, 10)]
      [[16, 17], [11, 17], [8, 10], [4, 4]]
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    words = [max(map(_longest_word, cells)) for cells in columns]
    is_source = [cells[0] == SOURCE for cells in columns]
    sources = [own if is_source[i] else words[i] for i, own in enumerate(widths)]
    room = max(width - _GAP * (len(columns) - 1), len(columns))
    least = next((least for least in (sources, words) if sum(least) <= room), [1] * len(columns))
    while sum(widths) > room:
        widest = max((i for i, own in enumerate(widths) if own > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _longest_word(cell: str) -> int:
    indent = len(cell) - len(cell.lstrip())
    return indent + max(map(len, cell.split()), default=0)
