import pytest

from ampx import text_tables


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("name", "bytes", "note"), ("a", "1024", ""), ("a long name", "2", "last")]
    assert text_tables.format_table(rows).split("\n") == [
        "name         bytes  note",
        "a            1024",
        "a long name  2      last",
    ]


def test_no_line_ends_in_spaces_and_leading_ones_stay():
    lines = text_tables.format_rows([("equation", "rule"), ("  add", ""), ("", "")])
    assert lines == ["equation  rule", "  add", ""]


@pytest.mark.parametrize("rows", [[], [()]])
def test_no_rows_and_no_cells(rows):
    assert text_tables.format_rows(rows) == [""] * len(rows)


@pytest.mark.parametrize("rows", [[("a", "b"), ("c",)], [("a",), ("b", "c")]])
def test_rows_of_different_lengths_are_refused(rows):
    with pytest.raises(ValueError, match="argument"):
        text_tables.format_rows(rows)
