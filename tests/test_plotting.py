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
from ampx.plotting import plot_training


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


SKIPPING = {
    "loss": [4.0, 4.0, 3.0, 2.0],
    "loss_scale": [8, 4, 4, 2],
    "overflow": [True, False, True, False],
}


def skip_marks(axes: Axes) -> list[tuple[float, float]]:
    return [
        tuple(point)
        for line in axes.lines
        if line.get_marker() == "x"
        for point in line.get_xydata()
    ]


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_marks_as_many_skips_as_there_are() -> None:
    losses, scales = plot_training({"O2": SKIPPING})
    assert isinstance(losses, Axes) and isinstance(scales, Axes)
    assert skip_marks(scales) == [(1, 8), (3, 4)]
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
        assert skip_marks(scales) == [(3, 2.0**16)]
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


def test_importing_plotting_does_not_import_matplotlib() -> None:
    source = "import sys, ampx, ampx.plotting; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0
