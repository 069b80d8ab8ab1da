"""The language model that `make demo` trains: same functions, fewer steps, a smaller model."""

import contextlib
import dataclasses
import io
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

import ampx
from ampx.examples import language_model, reporting, text, transformer
from ampx.examples.language_model import Config


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    return text.load_corpus()


@pytest.fixture(scope="module")
def short(corpus) -> text.Corpus:
    """The same text, with little to evaluate on."""
    return corpus._replace(held_out=corpus.held_out[:2000])


@pytest.fixture(scope="module")
def model(corpus):
    return transformer.make_model(corpus, layers=1, width=16, heads=2)


CONFIG = Config(steps=120, batch_size=4, learning_rate=1e-2, growth_interval=10)


class Comparison(NamedTuple):
    runs: list[language_model.Run]
    out: str
    err: str
    picture: pathlib.Path


@pytest.fixture(scope="module")
def compared(short, model, tmp_path_factory) -> Comparison:
    picture = tmp_path_factory.mktemp("pictures") / "picture.png"
    configs = language_model.compared_configs(CONFIG)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        # At O3 linen's LayerNorm promotes float16 inside flax, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            runs = language_model.compare(configs, corpus=short, model=model, output=picture)
    return Comparison(runs, out.getvalue(), err.getvalue(), picture)


@pytest.fixture
def scaled(compared) -> language_model.Run:
    return compared.runs[4]


# --- the text -------------------------------------------------------------------------------------


def test_held_out_text_is_not_in_the_training_text(corpus) -> None:
    train, held_out = (text.decode(corpus, part) for part in (corpus.train, corpus.held_out))
    assert len(train) > 8 * len(held_out) > 100_000
    shared = set(train.split("\n\n")) & set(held_out.split("\n\n"))
    assert not shared
    windows = text.all_windows(corpus.held_out, transformer.CONTEXT + 1)
    assert not any(text.decode(corpus, window) in train for window in windows)


def test_windows_are_repeatable_and_reach_the_end() -> None:
    def draw(seed):
        return text.random_windows(np.arange(10), np.random.default_rng(seed), 200, 4)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert np.any(draw(1) != draw(2))
    assert draw(1).min() == 0 and draw(1).max() == 9


@pytest.mark.parametrize("characters", [9, 10, 11, 12])
def test_every_character_is_predicted_once(characters) -> None:
    targets = text.all_windows(np.arange(characters), 4)[:, 1:].ravel()
    np.testing.assert_array_equal(targets, np.arange(1, len(targets) + 1))
    assert characters - 1 - len(targets) < 3


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_held_out_fraction_is_checked(fraction) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        text.load_corpus(fraction)


# --- one run --------------------------------------------------------------------------------------


def test_model_sees_no_future(corpus, model) -> None:
    tokens = corpus.train[None, :8]
    variables = model.init(jax.random.key(0), tokens)
    changed = tokens.copy()
    changed[0, 5] += 1
    before, after = (model.apply(variables, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert np.any(before[0, 5:] != after[0, 5:])


def test_training_learns_more_than_letter_frequencies(short, compared) -> None:
    run = compared.runs[0]
    assert run.history.loss[0] > 4
    assert run.held_out_loss < text.unigram_entropy(short) - 0.1
    assert run.skipped == 0 and run.final_scale == 1
    assert run.milliseconds > 0 and run.compile_seconds > 0 and run.temporary_bytes > 0


def test_scale_that_starts_scaled_is_found_by_skipping(scaled, compared) -> None:
    history = scaled.history
    good = np.flatnonzero(~history.overflow)
    assert history.overflow[0] and len(good) > 90
    falling = history.loss_scale[: good[0] + 1]
    np.testing.assert_array_equal(falling, 2.0 ** (24 - np.arange(len(falling))))
    assert np.any(np.diff(history.loss_scale) > 0), "the scale should grow again"
    assert np.any(history.overflow[good[0] :]), "and be too high again"
    assert scaled.skipped == np.sum(history.overflow)
    assert scaled.state.step == len(history.loss) - scaled.skipped
    assert np.all(np.isfinite(history.loss)), "the loss itself never overflows"
    assert abs(scaled.held_out_loss / compared.runs[0].held_out_loss - 1) < 0.05


def test_schedule_waits_for_skipped_steps(scaled) -> None:
    change = np.diff(scaled.history.learning_rate)
    skipped = scaled.history.overflow[:-1]
    assert np.all(change[skipped] == 0) and np.all(change[~skipped] != 0)


def test_microbatches_change_rounding_only_and_on_step_sees_all(short, model, compared) -> None:
    config = dataclasses.replace(CONFIG, microbatches=4)
    seen = []
    run = language_model.train(config, corpus=short, model=model, on_step=seen.append)
    np.testing.assert_array_equal([report.loss for report in seen], run.history.loss)
    # The same 256 losses summed in another order, and AdamW's answer to it for a few steps.
    whole = compared.runs[0].history.loss
    np.testing.assert_allclose(run.history.loss[:5], whole[:5], rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(steps=0), "steps must be positive, got 0"),
        (dict(batch_size=6, microbatches=4), "batch of 6 has no 4 equal"),
        (dict(learning_rate=float("nan")), "learning_rate must be positive"),
        (dict(seed=-1), "seed must not be negative, got -1"),
    ],
)
def test_config_is_checked(changes, match) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **changes)


# --- several runs ---------------------------------------------------------------------------------


def test_compare_prints_a_table_and_saves_a_picture(compared) -> None:
    assert compared.picture.read_bytes().startswith(b"\x89PNG")
    table = {line.split("  ")[0]: line for line in compared.out.splitlines()}
    for run in compared.runs:
        assert f"{run.held_out_loss:.4f}" in table[run.label]
        assert run.label in compared.err, "a progress bar each"
    assert f"jax {jax.__version__}" in compared.out


def test_compared_runs_store_and_scale_what_they_say(compared) -> None:
    float32, o1_bfloat16, o1_float16, bfloat16, float16, o3 = compared.runs
    stored = [run.state.params["position"].dtype.name for run in compared.runs]
    assert stored == ["float32"] * 5 + ["float16"]
    assert float32.final_scale == bfloat16.final_scale == o3.final_scale == 1
    assert o1_bfloat16.final_scale == 1
    assert float16.history.loss_scale[0] == 2.0**24
    assert o1_float16.history.loss_scale[0] == 2.0**16
    assert bfloat16.skipped == o1_bfloat16.skipped == 0


def test_o3_is_flagged(compared) -> None:
    assert "[1] O3 float16" in compared.out
    assert "second moments have rounded to zero" in compared.out
    assert not compared.runs[5].held_out_loss < 1.05 * compared.runs[0].held_out_loss


def test_progress_bar_says_loss_scale_skips_and_speed(capsys) -> None:
    with reporting.progress_bar("O2", steps=12, tokens_per_step=100) as on_step:
        for step in range(12):
            on_step(
                ampx.StepReport(
                    loss=np.float32(2.5),
                    overflow=np.bool_(step < 3),
                    loss_scale=np.float32(2.0**17),
                    learning_rate=None,
                    global_norm=np.float32(1),
                )
            )
    bar = capsys.readouterr().err.split("\r")[-1]
    assert "100%" in bar and "loss 2.500, scale 2^17, 3 skipped" in bar and "tokens/s" in bar


def test_table_counts_updates_held_back(scaled) -> None:
    scale = ampx.find_loss_scale_state(scaled.state.opt_state)
    state = scaled.state._replace(opt_state=scale._replace(bad_update_total=np.int32(7)))
    table = reporting.format_table([scaled._replace(state=state)], 3.25)
    assert "[1] O2 float16, dynamic scale: 7 updates held back" in table
    assert "[1]" not in reporting.format_table([scaled], 3.25)


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def configs_of(monkeypatch):
    def configs_of(flags: str) -> list[Config]:
        seen = []
        monkeypatch.setattr(language_model, "compare", lambda configs, **_: seen.extend(configs))
        language_model.main(flags.split())
        return seen

    return configs_of


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--precision O0", Config(precision="O0")),
        ("--precision float32 --loss-scale none", Config(precision="float32", loss_scale="none")),
        ("--precision p=f32,c=bf16,o=f32", Config(precision="p=f32,c=bf16,o=f32")),
        (
            "--precision O2 --half float16 --loss-scale 128 --microbatches 4 --steps 7",
            Config("O2", "float16", "128", microbatches=4, steps=7),
        ),
        (
            "--precision O2 --init-scale 1024 --batch-size 8 --learning-rate 0.1 --seed 3",
            Config("O2", init_scale=1024.0, batch_size=8, learning_rate=0.1, seed=3),
        ),
        ("--precision O3 --max-grad-norm 0.5", Config(precision="O3", max_grad_norm=0.5)),
    ],
)
def test_flags(configs_of, flags, expected) -> None:
    assert configs_of(flags) == [expected]


def test_no_precision_compares_six(configs_of) -> None:
    configs = configs_of("--steps 7")
    assert configs == language_model.compared_configs(Config(steps=7))
    assert len(configs) == 6
    differing = {
        field.name
        for field in dataclasses.fields(Config)
        if len({getattr(config, field.name) for config in configs}) > 1
    }
    assert differing == {"precision", "half", "loss_scale", "init_scale"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precision O4", "level must be 'O0', 'O1', 'O2' or 'O3'"),
        ("--precision fp8", "must be float16, bfloat16 or float32"),
        ("--precision O2 --half float8", "argument --half: invalid choice"),
        ("--precision O2 --loss-scale high", "loss scale must be None"),
        ("--precision O2 --loss-scale 0.5", "a number >= 1, got '0.5'"),
        ("--precision O2 --init-scale 1000", "use 512 or 1024"),
        ("--precision O2 --init-scale 8 --loss-scale 128", "needs a dynamic loss scale, not 128"),
        ("--precision O3 --init-scale 8", "needs a dynamic loss scale, not 1.0"),
        ("--half float16", "--half needs --precision"),
        ("--loss-scale 128", "--loss-scale needs --precision"),
        ("--steps 0", "steps must be positive, got 0"),
        ("--microbatches 3", "batch of 16 has no 3 equal micro-batches"),
        ("--max-grad-norm 0", "max_grad_norm must be positive"),
        ("--seed -1", "seed must not be negative"),
        ("--output picture.doc", "must be a .png file in a folder that exists, got picture.doc"),
        ("--output no/such/folder/picture.png", "in a folder that exists"),
        ("--stpes 3", "unrecognized arguments"),
    ],
)
def test_wrong_flags_get_one_line(flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        language_model.main(flags.split())
    assert exit_info.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: python -m ampx.examples.language_model")
    assert message in error


def test_main_trains(short, model, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(text, "load_corpus", lambda: short)
    monkeypatch.setattr(language_model, "make_model", lambda corpus: model)
    picture = tmp_path / "picture.png"
    flags = "--precision O2 --half float16 --loss-scale 128 --microbatches 2 --no-progress"
    size = ["--steps", "2", "--batch-size", "4", "--output", str(picture)]
    language_model.main([*flags.split(), *size])
    out, err = capsys.readouterr()
    assert picture.exists() and not err
    assert "O2 float16, scale 128" in out and "2^7" in out
