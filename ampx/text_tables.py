"""Tables as plain text: what reports, plans and explanations print.

A table is a sequence of rows, a row a sequence of cells, a cell a string. Each column is as wide as
its widest cell, two spaces stand between columns, and no line ends in spaces:

    reduction  primitive  axes
    0          psum       data
    12         psum       data, stage
"""

from __future__ import annotations

from collections.abc import Sequence


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


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """The lines of `format_rows` as one text."""
    return "\n".join(format_rows(rows))
