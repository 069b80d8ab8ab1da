"""Pictures: what is drawn is what happened."""

import builtins
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from matplotlib.axes import Axes

import ampx
from ampx.diagnostics.bucket_timelines import BucketTimeline, bucket_timeline
from ampx.plotting import plot_buckets, plot_exponents, plot_training


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


SKIPPING = {
    "loss": [4.0, 4.0, 3.0, 2.0],
    "loss_scale": [8, 4, 4, 2],
    "overflow": [True, False, True, False],
}


def skip_marks(axes: Axes) -> list[list[float]]:
    """The steps of each row of ticks, from the panel upwards."""
    rows = [line for line in axes.lines if line.get_marker() == "|"]
    heights = [float(line.get_ydata()[0]) for line in rows]
    assert heights == sorted(set(heights)) and all(height > 1 for height in heights)
    return [line.get_xdata().tolist() for line in rows]


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_marks_as_many_skips_as_there_are() -> None:
    losses, scales = plot_training({"O2": SKIPPING})
    assert isinstance(losses, Axes) and isinstance(scales, Axes)
    assert skip_marks(scales) == [[1, 3]]
    assert labels(losses) == ["O2"]
    assert labels(scales) == ["O2: 2 skipped"]
    assert losses.get_ylabel() and scales.get_ylabel() and scales.get_xlabel()


def test_runs_without_a_scale_leave_the_lower_panel_empty() -> None:
    losses, scales = plot_training({"float32": {"loss": [3.0, 2.0]}, "O0": {"loss": [3.0, 1.0]}})
    assert labels(losses) == ["float32", "O0"]
    assert not scales.lines and scales.get_legend() is None


def reports(steps: int) -> list[ampx.StepReport]:
    step = ampx.train_step(
        lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.1), loss_scale=ampx.dynamic_loss_scale
    )
    state, collected = step.init(jnp.array(2.0)), []
    for index in range(steps):
        state, report = step(state, jnp.full(4, jnp.nan if index == 2 else 1.0))
        collected.append(report)
    return collected


def test_takes_what_training_returns() -> None:
    collected = reports(5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)
    as_mapping = stacked._asdict()
    drawn = []
    for history in (collected, stacked, as_mapping):
        losses, scales = plot_training({"run": history}, smoothing=1)
        drawn.append([line.get_xydata() for line in (*losses.lines, *scales.lines)])
        assert skip_marks(scales) == [[3]]
    for other in drawn[1:]:
        jax.tree.map(np.testing.assert_array_equal, drawn[0], other)


def test_diverged_run_is_marked_and_flattens_nothing() -> None:
    good = {"loss": np.linspace(4, 2, 200)}
    bad = {"loss": [4.0, 900.0, 1e30] + [np.nan] * 197}
    losses, _ = plot_training({"good": good, "bad": bad})
    assert labels(losses) == ["good", "bad (not finite after step 3)"]
    bottom, top = losses.get_ylim()
    assert 1.5 < bottom < 2 and 4 < top < 4.5
    (cross,) = [line for line in losses.lines if line.get_marker() == "X"]
    assert cross.get_xydata().tolist() == [[3, top]]


def test_runs_that_blow_up_leave_the_picture_of_those_that_learn() -> None:
    """However many they are: of five runs two, for more than half of their steps."""
    steps = np.arange(200)
    learns = 1.5 + 2 * np.exp(-steps / 40)
    explodes = np.where(steps < 50, learns, learns * np.exp((steps - 50) / 20))
    jumps = np.where(steps < 150, learns, 90.0)
    histories = {name: {"loss": learns} for name in ("O0", "O1", "O2")}
    losses, _ = plot_training(
        {**histories, "explodes": {"loss": explodes}, "jumps": {"loss": jumps}}, smoothing=1
    )
    bottom, top = losses.get_ylim()
    assert bottom < learns.min() < learns.max() < top < 4
    texts = [text.get_text() for text in losses.texts]
    first = int(np.flatnonzero(explodes[60:] > top)[0]) + 61
    assert texts[:2] == [
        f"explodes leaves at step {first}, ends at {explodes[-1]:.3g}",
        "jumps leaves at step 151, ends at 90",
    ]
    marks = [line.get_xydata()[0] for line in losses.lines if line.get_marker() == "^"]
    np.testing.assert_allclose(marks, [(first, top), (151, top)])


def test_names_stand_at_the_ends_of_lines_and_never_on_each_other() -> None:
    ends = {"a": 2.0, "b": 2.001, "c": 2.002, "d": 1.0, "e": 3.0}
    losses, _ = plot_training(
        {name: {"loss": np.linspace(4, end, 50)} for name, end in ends.items()}, smoothing=1
    )
    assert [text.get_text() for text in losses.texts] == ["d", "a", "b", "c", "e"]
    for text in losses.texts:
        name = text.get_text()
        (line,) = (line for line in losses.lines if line.get_label() == name)
        assert text.get_color() == line.get_color()
        np.testing.assert_allclose(text.xy, (50, ends[name]))
    heights = [text.xyann[1] for text in losses.texts]
    assert np.diff(heights).min() >= 0.054
    bottom, top = losses.get_ylim()
    of_block = (np.mean([ends[name] for name in "abc"]) - bottom) / (top - bottom)
    np.testing.assert_allclose(np.mean(heights[1:4]), of_block)  # apart around their middle


def test_differences_from_a_reference_have_a_panel() -> None:
    base = np.linspace(4, 2, 50)
    away = np.where(np.arange(50) < 25, base, 1e3)
    histories = {
        "float32": {"loss": base},
        "O1": {"loss": base + np.where(np.arange(50) < 4, 1, 0.01)},
        "short": {"loss": base[:20] - 0.02},
        "O3": {"loss": away},
    }
    losses, between, scales = plot_training(histories, smoothing=1, reference="float32")
    assert len({axes.get_position().y0 for axes in (losses, between, scales)}) == 3
    drawn = {line.get_label(): line for line in between.lines}
    assert "float32" in between.get_ylabel() and labels(between) == ["O1", "short", "O3"]
    np.testing.assert_allclose(drawn["O1"].get_ydata()[4:], 0.01)
    np.testing.assert_allclose(drawn["short"].get_xydata()[-1], (20, -0.02))
    bottom, top = between.get_ylim()
    assert -0.03 < bottom < -0.02, "the lowest of the others, with a margin"
    assert 0.01 < top < 0.02, "first steps and what leaves the picture above decide nothing"
    # Alone, or equal to the reference, runs have a panel, too.
    for others in ({}, {"same": {"loss": base}}):
        _, between, _ = plot_training({"float32": {"loss": base}, **others}, reference="float32")
        assert between.get_ylim() == (-1, 1)
    with pytest.raises(ValueError, match="reference='float' is none.*did you mean 'float32'"):
        plot_training(histories, reference="float")
    with pytest.raises(TypeError, match="axes must be three of matplotlib's"):
        plot_training(histories, reference="O1", axes=[losses, scales])


def test_a_picture_of_a_diverged_run_alone_shows_it_whole() -> None:
    losses, _ = plot_training({"O3": {"loss": [1.0, 2.0, 90.0]}}, smoothing=1)
    assert losses.get_ylim()[1] > 80


@pytest.mark.parametrize("loss", [[np.nan, np.nan], [2.0, 2.0], [1.0]])
def test_losses_without_a_range_are_drawn(loss, tmp_path) -> None:
    losses, _ = plot_training({"run": {"loss": loss}})
    losses.figure.savefig(tmp_path / "picture.png")


def test_smoothing_averages_finite_losses_only() -> None:
    loss = [2.0, 4.0, np.nan, 6.0, 8.0]
    losses, _ = plot_training({"run": {"loss": loss}}, smoothing=3)
    smooth, raw = (line.get_ydata() for line in losses.lines)
    np.testing.assert_array_equal(smooth, [3.0, 3.0, np.nan, 7.0, 7.0])
    np.testing.assert_array_equal(raw, loss)


def test_draws_on_given_axes() -> None:
    _, axes = plt.subplots(2)
    assert plot_training({"O2": SKIPPING}, axes=axes) == tuple(axes)


def test_more_runs_than_colours() -> None:
    losses, _ = plot_training({f"run {i}": {"loss": [2.0, 1.0]} for i in range(9)}, smoothing=1)
    assert len(losses.lines) == 9


@pytest.mark.parametrize(
    ("histories", "match"),
    [
        ({}, "histories is empty"),
        ({"O2": {"loss": []}}, "run 'O2' must have a loss for each of its steps"),
        ({"O2": {"loss_scale": [1.0]}}, "run 'O2' must have a loss"),
        ({"O2": SKIPPING | {"overflow": [True]}}, "got 4, 4 and 1"),
    ],
)
def test_histories_are_checked(histories, match) -> None:
    with pytest.raises(ValueError, match=match):
        plot_training(histories)


def test_smoothing_is_checked() -> None:
    with pytest.raises(ValueError, match="smoothing must be a positive"):
        plot_training({"O2": SKIPPING}, smoothing=0)


def test_missing_matplotlib_names_the_extra(monkeypatch) -> None:
    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"ampx-jax\[examples\]"):
        plot_training({"O2": SKIPPING})


@pytest.mark.slow
def test_importing_plotting_does_not_import_matplotlib() -> None:
    source = "import sys, ampx, ampx.plotting; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0


# --- precision schedules --------------------------------------------------------------------------


def dashed(axes: Axes) -> list[float]:
    return [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]


@pytest.mark.parametrize(
    ("phase", "ends"), [([0, 0, 1, 1], [2]), ([0, 1, 1, 2], [1, 3]), ([2, 1, 1, 1], [1])]
)
def test_switches_of_precision_are_marked_in_both_panels(phase, ends) -> None:
    losses, scales = plot_training({"O2": SKIPPING | {"phase": phase}})
    assert dashed(losses) == dashed(scales) == [end + 0.5 for end in ends]
    named = [text.get_text() for text in losses.texts if text.get_text() != "O2"]
    assert named == [f"precision switches after step {end}" for end in ends]


def test_runs_that_switch_together_are_named_once() -> None:
    runs = {name: SKIPPING | {"phase": [0, 1, 1, 1]} for name in ("O2", "O1")}
    losses, _ = plot_training(runs)
    assert len(dashed(losses)) == 2 and len(losses.texts) == 1 + len(runs)


def test_phases_are_checked() -> None:
    with pytest.raises(ValueError, match="as many losses as phases, got 4 and 1"):
        plot_training({"O2": SKIPPING | {"phase": [0]}})


@pytest.mark.parametrize("phase", [None, [1, 1, 1, 1]])
def test_without_a_switch_nothing_is_marked(phase) -> None:
    losses, scales = plot_training({"O2": SKIPPING | {"phase": phase}})
    assert not dashed(losses) + dashed(scales) and labels(losses) == ["O2"]


def test_phases_of_reports_are_drawn() -> None:
    phases = [0, 0, 0, 1, 1]
    collected = [r._replace(phase=jnp.int32(p)) for r, p in zip(reports(5), phases, strict=True)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)
    for history in (collected, stacked):
        assert dashed(plot_training({"run": history})[0]) == [3.5]


# --- exponents ------------------------------------------------------------------------------------

EXPONENTS = np.arange(-30, 20)


def counted(**counts: int) -> np.ndarray:
    """Counts by exponent, as in m24=3 for 2**-24."""
    found = np.zeros(len(EXPONENTS), int)
    for name, count in counts.items():
        found[int(name[1:]) * (-1 if name[0] == "m" else 1) - EXPONENTS[0]] = count
    return found


def outline(axes: Axes, place: int = 0) -> dict[float, float]:
    """Height of a histogram over each exponent at which it is not zero."""
    x, y = axes.lines[place].get_data()
    np.testing.assert_array_equal(np.diff(x)[::2], 0)
    assert y[0] == y[-1] == 0 and np.array_equal(y[1:-1:2], y[2:-1:2])
    return {
        float(left): float(height) for left, height in zip(x[::2], y[1::2], strict=True) if height
    }


def bands(axes: Axes) -> list[tuple[float, float]]:
    """What is shaded behind the histogram."""
    boxes = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    return [(round(box.x0, 3), round(box.x1, 3)) for box in boxes]


def test_exponents_are_shares_beside_the_range_of_a_format() -> None:
    counts = {"grads": counted(m27=1, m24=2, m15=1, m14=4, p15=1, p16=1)}
    axes = plot_exponents(EXPONENTS, counts)
    assert outline(axes) == {-27: 0.1, -24: 0.2, -15: 0.1, -14: 0.4, 15: 0.1, 16: 0.1}
    assert labels(axes) == ["grads: 10.0% too small, 30.0% subnormal, 10.0% too large"]
    low, high = axes.get_xlim()
    assert (low, high) == (-30, 20), "what there is, and a margin"
    assert bands(axes) == [(low, -24), (-24, -14), (15.999, high)]
    drawn = [text.get_text() for text in axes.texts]
    assert drawn == ["too small", "subnormal", "float16: normal"], "what fits into its band"


def test_loss_scale_moves_the_histogram() -> None:
    axes = plot_exponents(EXPONENTS, {"grads": counted(m27=1, m20=3)}, loss_scale=2.0**10)
    assert outline(axes) == {-17: 0.25, -10: 0.75}
    assert labels(axes) == ["grads: 25.0% subnormal"]
    assert axes.get_xlabel() == "log$_2$ |value × 2$^{10}$|"
    assert "×" not in plot_exponents(EXPONENTS, {"grads": counted(p0=1)}).get_xlabel()


def test_each_format_has_its_strip_and_the_first_is_counted() -> None:
    counts = {"weights": counted(m12=1, p9=1), "nothing": counted()}
    axes = plot_exponents(EXPONENTS, counts, formats=("float8_e4m3fn", jnp.bfloat16, np.float32))
    assert labels(axes) == ["weights: 50.0% too small, 50.0% too large", "nothing"]
    assert outline(axes) == {-12: 0.5, 9: 0.5} and outline(axes, 1) == {}
    drawn = [text.get_text() for text in axes.texts]
    assert drawn[-2:] == ["bfloat16: normal", "float32: normal"]
    low, high = axes.get_xlim()
    assert bands(axes) == [(low, -9), (-9, -6), (round(np.log2(448), 3), high)]


def test_exponents_are_drawn_on_given_axes() -> None:
    _, axes = plt.subplots()
    assert plot_exponents([0, 1], {"grads": [1, 2]}, axes=axes) is axes


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (dict(counts={}), ValueError, "counts is empty"),
        (dict(formats=()), ValueError, "formats is empty"),
        (dict(formats=("int8",)), ValueError, "formats must be a floating dtype.* got 'int8'"),
        (dict(loss_scale=0.0), ValueError, "loss_scale must be finite and positive, got 0.0"),
        (dict(loss_scale=np.inf), ValueError, "loss_scale must be finite and positive, got inf"),
        (dict(exponents=[0, 2]), ValueError, r"consecutive integers.* got \[0 2\]"),
        (dict(exponents=[0.0, 1.0]), ValueError, "of dtype float64"),
        (dict(exponents=[]), ValueError, "consecutive integers"),
        (dict(counts={"a": [1, 2, 3]}), ValueError, r"'a' must be one for each of the 2"),
    ],
)
def test_exponents_are_checked(arguments, error, match) -> None:
    with pytest.raises(error, match=match):
        plot_exponents(**{"exponents": [0, 1], "counts": {"grads": [1, 2]}} | arguments)


# --- buckets --------------------------------------------------------------------------------------

SECONDS = dict(bandwidth=10, backward_seconds=8.0, update_seconds=4.0)


def spans(timeline: BucketTimeline) -> list[list[list[float]]]:
    return [np.asarray(part).tolist() for part in timeline[1:]]


def test_buckets_overlap_with_backward_and_update() -> None:
    backward, reduction, update = spans(bucket_timeline([10, 30, 40], **SECONDS))
    assert backward == [[0, 1], [1, 4], [4, 8]]
    assert reduction == [[1, 2], [4, 7], [8, 12]]
    assert update == [[8, 8.5], [8.5, 10], [12, 14]]


def test_a_bucket_waits_for_the_wire() -> None:
    slow = bucket_timeline([10, 10], **SECONDS | {"bandwidth": 1})
    assert spans(slow)[1] == [[4, 14], [14, 24]]
    assert spans(slow)[2] == [[14, 16], [24, 26]]
    assert slow.total_time == 26 and slow.idle_spans() == [(8, 14), (16, 24)]
    assert slow.idle_time == 14


def test_overlap_with_the_tail_alone_waits_for_the_verdict() -> None:
    backward, reduction, update = spans(bucket_timeline([10, 30, 40], overlap="tail", **SECONDS))
    assert backward == [[0, 1], [1, 4], [4, 8]]
    assert reduction == [[8, 9], [9, 12], [12, 16]]
    assert update == [[9, 9.5], [12, 13.5], [16, 18]]


def test_without_overlap_everything_waits_for_the_last() -> None:
    timeline = bucket_timeline([10, 30, 40], overlap=False, latency=0.5, **SECONDS)
    assert spans(timeline)[1] == [[8, 9.5], [9.5, 13], [13, 17.5]]
    assert spans(timeline)[2] == [[17.5, 18], [18, 19.5], [19.5, 21.5]]
    assert timeline.idle_spans() == [(8, 17.5)] and timeline.total_time == 21.5


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(bucket_bytes=[]), r"positive number for each bucket, got \[\]"),
        (dict(bucket_bytes=[8, 0]), r"got \[8, 0\]"),
        (dict(bandwidth=0), "bandwidth must be positive, in bytes per second, got 0"),
        (dict(update_seconds=-1), "update_seconds must be finite and at least 0, got -1"),
        (dict(backward_seconds=np.nan), "backward_seconds must be finite and at least 0, got nan"),
        (dict(latency=-1), "latency must be"),
        (dict(overlap="all"), "overlap must be True, False or 'tail', got 'all'"),
    ],
)
def test_timelines_are_checked(arguments, match) -> None:
    with pytest.raises(ValueError, match=match):
        bucket_timeline(**{"bucket_bytes": [8]} | SECONDS | arguments)


def boxes(axes: Axes) -> dict[int, list[tuple[float, float]]]:
    """Start and end of the boxes in each lane."""
    found: dict[int, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        (corners,) = (path.vertices for path in collection.get_paths())
        (left, bottom), (right, top) = corners.min(0), corners.max(0)
        found.setdefault(round((bottom + top) / 2), []).append((float(left), float(right)))
    return found


def test_buckets_are_drawn_where_they_happen() -> None:
    timeline = bucket_timeline([10, 30, 40], **SECONDS)
    axes = plot_buckets(timeline)
    assert boxes(axes) == {
        row: [tuple(span) for span in lane] for row, lane in enumerate(spans(timeline))
    }
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"] * 3
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["backward", "all-reduce", "update"]
    (idle,) = axes.patches
    assert (idle.get_x(), idle.get_x() + idle.get_width()) == (10, 12)
    assert axes.get_title(loc="left") == "3 buckets, 80 B"
    assert axes.get_title(loc="right") == "14 s, 14.3% idle"


def test_profiled_arrays_are_drawn_in_their_unit() -> None:
    _, axes = plt.subplots()
    rows = [2**20], [(3, 5)], [(5, 9)], [(9, 10)]
    assert plot_buckets(rows, unit="steps", axes=axes) is axes
    assert axes.get_title(loc="left") == "1 bucket, 1 MB"
    assert axes.get_title(loc="right") == "7 steps, 57.1% idle"
    assert axes.get_xlim() == (3, 10)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (([8], [(0, 1)], [(1, 2)]), r"must be bytes of shape \(buckets,\)"),
        (([8], [0, 1], [(1, 2)], [(2, 3)]), r"\(2,\)"),
        (([], [], [], []), "must be bytes"),
        (([8], [(0, 1)], [(2, 1)], [(2, 3)]), r"bucket 0 .* in all-reduce: \[2.0, 1.0\]"),
    ],
)
def test_bucket_rows_are_checked(rows, match) -> None:
    with pytest.raises(ValueError, match=match):
        plot_buckets(rows)
