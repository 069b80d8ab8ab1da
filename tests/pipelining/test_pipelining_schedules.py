"""Schedules as data: generators, notation, text, files and pictures."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

import ampx
from ampx.pipelining.schedules.actions import Action, merge_backwards, parse_action, split_backwards
from ampx.pipelining.schedules.generators import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    looped_breadth_first,
    make_schedule,
    one_f_one_b,
)
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.zero_bubbles import (
    dualpipe_v,
    interleaved_zero_bubble,
    zero_bubble,
    zero_bubble_v,
)
from ampx.plotting import plot_schedule

GENERATORS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_breadth_first,
    "zero-bubble": zero_bubble,
    "interleaved-zero-bubble": interleaved_zero_bubble,
    "zero-bubble-v": zero_bubble_v,
    "dualpipe-v": dualpipe_v,
    "forward-only": forward_only,
}
CHUNKED = ["interleaved", "looped-bfs", "interleaved-zero-bubble", "forward-only"]


def parsed(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("num_stages", range(1, 6))
@pytest.mark.parametrize("name", GENERATORS)
def test_every_size_is_valid_and_complete(name, num_stages):
    for num_microbatches in range(1, 3 * num_stages + 1):
        for chunks in (2, 3) if name in CHUNKED else (None,):
            schedule = make_schedule(name, num_stages, num_microbatches, chunks=chunks).validate()
            assert schedule.name == name
            assert schedule.num_devices == num_stages
            assert schedule.num_microbatches == num_microbatches
            assert schedule.num_stages % num_stages == 0
            assert schedule == schedule.aligned()
            assert any(row[-1] is not None for row in schedule.rows)
            actions = sum(action is not None for row in schedule.rows for action in row)
            halved = sum(a.kind == "I" for row in schedule.rows for a in row if a is not None)
            each = 1 + schedule.has_backward
            assert actions - halved == each * schedule.num_stages * num_microbatches
            if name != "dualpipe-v":  # of its backwards some are whole
                total = schedule.num_stages * num_microbatches
                assert halved == ("zero-bubble" in name) * total


@pytest.mark.parametrize("name", GENERATORS)
def test_the_dispatcher_calls_the_generator(name):
    assert make_schedule(name, 3, 4) == GENERATORS[name](3, 4)
    if name in CHUNKED:
        assert make_schedule(name, 3, 4, chunks=5) == GENERATORS[name](3, 4, chunks=5)
    else:
        with pytest.raises(ValueError, match=f"chunks is for interleaved.*chunks=2 with {name!r}"):
            make_schedule(name, 3, 4, chunks=2)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'gpipe', '1f1b'.*'forward-only'.*got 'pipedream'"):
        make_schedule("pipedream", 2, 2)


@pytest.mark.parametrize("generator", GENERATORS.values())
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "num_stages must be a positive int, got 0"),
        ((-1, 4), ValueError, "num_stages must be a positive int, got -1"),
        ((2, 0), ValueError, "num_microbatches must be a positive int, got 0"),
        ((2.0, 4), TypeError, "num_stages must be a positive int, got 2.0 of type float"),
        ((2, "4"), TypeError, "num_microbatches must be a positive int, got '4' of type str"),
        ((True, 4), TypeError, "num_stages must be a positive int, got True"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(generator, arguments, error, message):
    with pytest.raises(error, match=message):
        generator(*arguments)


@pytest.mark.parametrize(
    ("generator", "instead"),
    [
        (interleaved, "one_f_one_b"),
        (looped_breadth_first, "gpipe"),
        (interleaved_zero_bubble, "zero_bubble"),
    ],
)
def test_one_chunk_is_another_schedule(generator, instead):
    with pytest.raises(ValueError, match=f"chunks must be at least 2, got 1: use {instead}"):
        generator(4, 8, 1)
    with pytest.raises(TypeError, match="chunks must be a positive int"):
        generator(4, 8, 2.0)


def test_stages_lie_where_the_systems_put_them():
    assert one_f_one_b(3, 2).device_of == (0, 1, 2)
    assert interleaved(3, 3).device_of == (0, 1, 2, 0, 1, 2)
    assert zero_bubble_v(3, 3).device_of == dualpipe_v(3, 3).device_of == (0, 1, 2, 2, 1, 0)
    assert interleaved_zero_bubble(3, 3).device_of == (0, 1, 2, 0, 1, 2)
    assert interleaved(2, 2, chunks=3).stages_on(1) == (1, 3, 5)
    assert zero_bubble_v(3, 3).stages_on(0) == (0, 5)


def test_interleaved_goes_through_the_chunks_in_groups():
    first = [action for action in interleaved(2, 4).rows[0] if action is not None]
    assert first[:5] == parsed("0F0 0F1 2F0 2F1 0F2")
    assert [a for a in first if a.kind == "B"] == parsed("2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3")


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 4), (3, 5), (4, 5), (4, 7), (4, 9)])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_micro_batches_that_are_left_over_cost_no_time(stages, microbatches, chunks):
    """A small last group would: with 4 stages, 5 micro-batches and 3 chunks it waits for ever."""
    schedule = interleaved(stages, microbatches, chunks)
    assert schedule.num_ticks == 2 * chunks * microbatches + 2 * (stages - 1)
    assert forward_only(stages, microbatches, chunks).num_ticks == (
        chunks * microbatches + stages - 1
    )


def test_breadth_first_finishes_a_chunk_before_the_next():
    kinds = [(a.stage, a.kind) for a in looped_breadth_first(2, 3).rows[1] if a is not None]
    assert kinds == [pair for pair in ((1, "F"), (3, "F"), (3, "B"), (1, "B")) for _ in range(3)]


def test_a_schedule_is_an_argument_of_compiled_functions():
    assert hash(one_f_one_b(2, 3)) == hash(one_f_one_b(2, 3))
    assert one_f_one_b(2, 3) != gpipe(2, 3)
    lists = Schedule("x", [[Action(0, "F", 0), None]], [0], 1)
    assert hash(lists) == hash(Schedule("x", ((Action(0, "F", 0), None),), (0,), 1))


@pytest.mark.parametrize("text", ["0F0", "12B345", "3I1", "0W7"])
def test_actions_are_read_as_they_are_printed(text):
    assert str(parse_action(text)) == str(parse_action(f" {text}\t")) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0f0", "0X0", "-1F0", "0F0 1F0", "2SEND_B2", "٣F0"]
)
def test_other_text_is_no_action(text):
    with pytest.raises(ValueError, match="one of F, B, I, W"):
        parse_action(text)


def test_only_neighbours_are_merged():
    assert merge_backwards(parsed("0I0 1W0 0W0")) == parsed("0I0 1W0 0W0")
    assert merge_backwards([*parsed("0I0"), None, *parsed("0W0")]) == parsed("0B0")
    assert merge_backwards(parsed("0W0 0I0")) == parsed("0W0 0I0")
    assert split_backwards([None, *parsed("0F0 0B0")]) == parsed("0F0 0I0 0W0")


@pytest.mark.parametrize("name", GENERATORS)
def test_splitting_undoes_merging(name):
    split = make_schedule(name, 3, 4).split().validate()
    assert all(action.kind != "B" for row in split.rows for action in row if action)
    assert split.merged().split() == split


def test_splitting_one_f_one_b_lets_the_stage_before_go_on():
    whole, split = one_f_one_b(4, 4), one_f_one_b(4, 4).split()
    costs = {"input_grad": 1, "weight_grad": 1}
    assert split.simulate(**costs).makespan < whole.simulate(**costs).makespan


def test_what_torch_adds_to_run_a_schedule_is_left_out():
    """As its runtime writes `ScheduleInterleavedZeroBubble` by default, with messages."""
    text = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD"
    )
    schedule = Schedule.from_csv(text).aligned().validate()
    assert schedule == Schedule.from_csv("0F0,,,0I0,0W0\n,1F0,1B0")


@pytest.mark.parametrize("name", GENERATORS)
def test_files_keep_everything(name, tmp_path: Path):
    schedule = make_schedule(name, 3, 4)
    text = schedule.to_csv(tmp_path / "schedule.csv")
    for source in (text, tmp_path / "schedule.csv", text.replace(",", " , ")):
        assert Schedule.from_csv(source, name=name) == schedule


def test_short_lines_are_filled_up():
    schedule = Schedule.from_csv("0F0,,,0B0\n,1F0,1B0\n").validate()
    assert schedule.rows[1] == (None, Action(1, "F", 0), Action(1, "B", 0), None)
    assert schedule.device_of == (0, 1) and schedule.has_backward
    assert not Schedule.from_csv("0F0").has_backward


def test_what_torch_overlaps_is_done_one_after_the_other():
    schedule = Schedule.from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1").validate()
    assert schedule.rows[0][2:4] == (Action(0, "F", 1), Action(1, "B", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1SEND_0", "line 2, column 2: .*got '1SEND_0'"),
        ("schedule.csv", "line 1, column 1: .*give a pathlib.Path"),
        ("", "empty"),
        (",,\n,,", "empty"),
        ("0F0\n0B0", "stage 0 must be on one device, got 0B0 on device 1 and others on device 0"),
        ("0F0\n2F0", "stages must be 0 to 2, but there is none of 1"),
    ],
)
def test_files_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(text)


def chain(num_devices):
    """A forward on each device: small, but a square grid with as many ticks."""
    return "\n".join(f"{stage}F0" for stage in range(num_devices))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("999999999F0,999999999B0", "stages must be 0 to 999999999, but there is none of 0"),
        ("0F999999999", "micro-batches must be 0 to 999999999, but there is none of 0"),
        (",".join(f"{2 * stage}F0" for stage in range(10**5)), "stages .*there is none of 1"),
        (f"{'9' * 5000}F0", "line 1, column 1: an action is .*got '999.*[.]{3};"),
        ("0" + "F" * 10**5 + "0", "line 1, column 1: an action is"),
        ("0F0\n" + "x" * 200_000, "line 2: field larger than field limit"),
        ("0F0\r0B0", "line 1: new-line character seen in unquoted field"),
        ("0F0\n\n1F0", "line 2 has no action: give one line for each device"),
        (chain(5000) + "," * 5000, "5000 devices with 5001 ticks each are more than 16777216"),
    ],
    ids=range(9),
)
def test_hostile_files_are_refused_in_few_words(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Schedule.from_csv(text)
    assert len(str(error.value)) < 400


def test_files_of_other_encodings(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")  # as spreadsheets write it
    assert Schedule.from_csv(path).rows == Schedule.from_csv("0F0,0B0").rows
    path.write_bytes("0F0,0B0".encode("utf-16"))
    with pytest.raises(ValueError, match="can't decode byte"):
        Schedule.from_csv(path)


def test_errors_about_large_files_are_short():
    waiting = Schedule.from_csv("\n".join(f"{s}B0,{s}F0" for s in range(3000)))
    broken = Schedule.from_csv(",".join(f"{s}F0" for s in reversed(range(10**5))))
    for look in (waiting.aligned, waiting.simulate, waiting.validate, broken.validate):
        with pytest.raises(ValueError, match="schedule 'csv'") as error:
            look()
        assert len(str(error.value)) < 8000


numbers = st.integers(0, 3) | st.integers(0, 10**30)
cells = st.builds("{}{}{}".format, numbers, st.sampled_from("FBIWX"), numbers)
cells |= st.builds("({};{})OVERLAP_F_B".format, cells, cells) | st.text(',\r\0"0F٣ ', max_size=4)
files = st.lists(st.lists(cells, max_size=4).map(",".join), max_size=4).map("\n".join)


@pytest.mark.slow
@given(files | st.text(max_size=20))
def test_any_text_is_a_schedule_or_a_short_error(text):
    try:
        schedule = Schedule.from_csv(text)
        assert schedule.num_microbatches <= len(text) and schedule.num_stages <= len(text)
        schedule.render()
        schedule.aligned().validate().simulate()
    except ValueError as error:
        assert len(str(error)) < 2000


def test_aligning_takes_out_what_nobody_waits_for():
    schedule = one_f_one_b(3, 4)
    slow = [[place for action in row for place in (None, action)] for row in schedule.rows]
    assert dataclasses.replace(schedule, rows=slow).validate().aligned() == schedule


def test_the_text_is_the_grid():
    assert str(zero_bubble(2, 2)).split("\n") == [
        "zero-bubble: 2 stages on 2 devices, 2 micro-batches, 7 ticks, 14.3% idle",
        "tick      0  1  2  3  4  5  6",
        "device 0  F0 F1 .  I0 W0 I1 W1",
        "device 1  .  F0 I0 F1 I1 W0 W1",
    ]
    assert zero_bubble_v(2, 2).render(9, 12).split("\n")[1:] == [
        "tick                    9   10  11",
        "device 0 (stages 0, 3)  0I0 0W0 .",
        "device 1 (stages 1, 2)  2I1 2W1 1I1",
    ]


def test_lists_that_are_no_grid_yet_are_shown_too():
    schedule = Schedule("lists", [[Action(0, "F", 0), Action(0, "B", 0)], []], (0, 1), 1)
    assert schedule.render().split("\n") == [
        "lists: 2 stages on 2 devices, 1 micro-batches, 2 ticks, 50.0% idle",
        "tick      0  1",
        "device 0  F0 B0",
        "device 1  .  .",
    ]


def test_columns_stay_in_line_when_numbers_grow():
    lines = one_f_one_b(3, 120).render().split("\n")[1:]
    starts = [match.start() for match in re.finditer(r"\S+", lines[0])]
    for line in lines[1:]:
        cells = [match.start() for match in re.finditer(r"\S+", line)]
        assert set(cells[2:]) <= set(starts), "a cell begins under its tick"


def drawn(axes: plt.Axes) -> float:
    """The area of the boxes."""
    bars = [c for c in axes.collections if isinstance(c, PolyCollection)][1:]
    boxes = [path.vertices for c in bars for path in c.get_paths()]
    return sum(np.ptp(v[:, 0]) * np.ptp(v[:, 1]) for v in boxes if len(v))


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@pytest.mark.parametrize("name", GENERATORS)
def test_the_picture_shows_every_action_for_its_time(name, mode):
    schedule = make_schedule(name, 3, 4)
    result = schedule.simulate(mode=mode, backward=3)
    axes = schedule.plot(mode=mode, backward=3)
    axes.figure.draw_without_rendering()
    waiting = 3 * result.makespan * 0.84
    assert drawn(axes) == pytest.approx(sum(result.busy) * 0.84 + waiting * 2 / 3)
    assert len(axes.texts) == sum(a is not None for row in schedule.rows for a in row)
    assert axes.get_title(loc="right") == f"{result.bubble_fraction:.1%} idle"
    assert ("lockstep" in axes.get_title(loc="left")) == (mode == "lockstep")
    assert ("darker" in axes.get_xlabel()) == (schedule.num_stages > 3)
    labels = axes.get_legend_handles_labels()[1]
    assert labels[0] == "forward" and labels[-1] == "waiting"
    assert ("weight gradient" in labels) == ("zero" in name or name == "dualpipe-v")


def test_numbers_that_do_not_fit_are_left_out():
    _, axes = plt.subplots(figsize=(4, 2))
    assert plot_schedule(one_f_one_b(2, 100), axes=axes) is axes
    assert not axes.texts


@pytest.mark.slow
def test_schedules_need_neither_devices_nor_plotting():
    code = (
        "import sys; from ampx.pipelining.schedules import generators as g; "
        "g.one_f_one_b(2, 2).validate().simulate(); "
        "print('matplotlib' in sys.modules)"
    )
    root = Path(ampx.__file__).parent
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, cwd=root.parent, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "False"
    modules = sorted((root / "pipelining" / "schedules").glob("*.py"))
    assert len(modules) > 10
    for module in modules:
        assert "import jax" not in module.read_text()
