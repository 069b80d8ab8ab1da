import io
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
import rich.console
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from test_summaries import CLASSES

import ampx
from ampx import pipelining, text_tables
from ampx.pipelining.planning.footprints import WIRES, DevicePlan


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("name", "bytes", "note"), ("a", "1024", ""), ("a long name", "2", "last")]
    assert str(text_tables.Table(rows)).split("\n") == [
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


# --- in a terminal --------------------------------------------------------------------------------


def lint():
    tx = ampx.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, opt_state):
        updates, opt_state = tx.update(jax.grad(lambda x: x @ x)(params), opt_state)
        return params + updates, opt_state

    return ampx.lint_step(step)(X, tx.init(X))


def check_overlap():
    mesh = make_mesh((2,), ("data",))
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return ampx.check_overlap(add, jnp.ones(16))


def make_plan():
    schedule = pipelining.one_f_one_b(num_stages=2, num_microbatches=3)
    played = schedule.simulate()
    devices = tuple(DevicePlan(i, (i,), 12, 2**30, 2, 2**28, 0.25, SENT) for i in range(2))
    memory = {"arguments": 2**30, "temporary arrays": 2**29}
    about = schedule, {"stage": 2}, 10**9, 8, played, played, devices, memory, {}, "cpu"
    return pipelining.Plan(*about)


X = jnp.ones(2)
SENT = {name: 2**20 for name in WIRES}
REPORTS = {
    "ampx.BucketLayout": lambda: ampx.bucket_layout({"w": jnp.ones((30, 200))}),
    "ampx.Explanation": lambda: ampx.explain(jax.jit(lambda x: jnp.tanh(x @ x)))(X),
    "ampx.LintReport": lint,
    "ampx.NumericsReport": lambda: ampx.numerics_report(lambda x: x @ x)(X),
    "ampx.OverflowReport": lambda: ampx.trace_overflow(lambda x: x / 0)(X),
    "ampx.OverlapReport": check_overlap,
    "ampx.pipelining.Plan": make_plan,
    "ampx.pipelining.Schedule": lambda: make_plan().schedule,
    "ampx.pipelining.Simulation": lambda: make_plan().schedule.simulate(),
}


def in_terminal(report, width, **options):
    console = rich.console.Console(width=width, file=io.StringIO(), **options)
    console.print(report)
    return console.file.getvalue()


def test_all_that_are_tables_in_notebooks_are_here():
    assert set(REPORTS) == {name for name, cls in CLASSES.items() if hasattr(cls, "_repr_html_")}


@pytest.mark.parametrize("name", REPORTS)
def test_a_terminal_shows_what_is_printed_and_cuts_nothing(name):
    report = REPORTS[name]()
    assert isinstance(report, CLASSES[name])
    lines = [line.rstrip() for line in in_terminal(report, 300).splitlines()]
    assert lines == str(report).splitlines()
    for width in (80, 30):
        shown = in_terminal(report, width)
        assert max(map(len, shown.splitlines())) <= width
        assert sorted("".join(shown.split())) == sorted("".join(str(report).split()))


def test_lines_of_programs_stay_whole_and_have_a_colour():
    report = lint()
    place = re.search(r"test_text_tables.py:\S+ \(\S+\)", str(report))[0]
    assert place in in_terminal(report, 80) != str(report)
    assert f"\x1b[36m{place}" in in_terminal(
        report, 80, force_terminal=True, color_system="standard"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_report_is_printed_in_colour_in_terminals_alone(is_terminal, monkeypatch, capsys):
    report = lint()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with monkeypatch.context() as context:
        context.setattr(rich, "print", lambda shown: print(f"rich {shown!r}"))
        text_tables.print_report(report)
    assert capsys.readouterr().out == f"rich {report!r}\n" if is_terminal else f"{report}\n"


def test_without_rich_a_terminal_gets_plain_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(text_tables.importlib.util, "find_spec", lambda name: None)
    text_tables.print_report(lint())
    assert capsys.readouterr().out == f"{lint()}\n"
