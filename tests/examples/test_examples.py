"""The language model that `make demo` trains: same functions, fewer steps, a smaller model."""

import contextlib
import dataclasses
import io
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from demo_runs import FLAGS, assert_same_training, run_commands
from processes import reserved_port

import ampx
from ampx.examples import language_model, meshes, reporting, text, transformer
from ampx.examples.configs import Config, compared_configs
from ampx.examples.runs import Run


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
    runs: list[Run]
    out: str
    err: str
    picture: pathlib.Path


@pytest.fixture(scope="module")
def compared(short, model, tmp_path_factory) -> Comparison:
    picture = tmp_path_factory.mktemp("pictures") / "picture.png"
    configs = compared_configs(CONFIG)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        # At O3 linen's LayerNorm promotes float16 inside flax, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            runs = language_model.compare(configs, corpus=short, model=model, output=picture)
    return Comparison(runs, out.getvalue(), err.getvalue(), picture)


@pytest.fixture
def scaled(compared) -> Run:
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
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    changed = tokens.copy()
    changed[0, 5] += 1
    before, after = (jax.jit(model.apply)(variables, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert np.any(before[0, 5:] != after[0, 5:])


@pytest.mark.slow
def test_training_learns_more_than_letter_frequencies(short, compared) -> None:
    run = compared.runs[0]
    assert run.history.loss[0] > 4
    assert run.held_out_loss < text.unigram_entropy(short) - 0.1
    assert run.skipped == 0 and run.final_scale == 1
    assert run.milliseconds > 0 and run.compile_seconds > 0 and run.temporary_bytes > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_precision_switches_once_and_reaches_the_loss_of_float32(short, model, compared) -> None:
    config = dataclasses.replace(CONFIG, precision="fast|step|0.9", init_scale=2.0**10)
    run = language_model.train(config, corpus=short, model=model)
    np.testing.assert_array_equal(run.history.phase, np.arange(120) >= 108)
    assert set(run.history.loss_scale[108:]) == {1.0} and min(run.history.loss_scale[:108]) >= 2**10
    assert abs(run.held_out_loss / compared.runs[0].held_out_loss - 1) < 0.01


@pytest.mark.slow
def test_schedule_waits_for_skipped_steps(scaled) -> None:
    """A skip reports the rate of the last applied step; every applied step has one of its own."""
    rates, skipped = scaled.history.learning_rate, scaled.history.overflow
    assert np.any(skipped) and np.all(np.diff(rates)[skipped[1:]] == 0)
    assert np.all(np.diff(rates[~skipped]) != 0)


@pytest.mark.slow
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
        (dict(max_grad_norm=0.0), "max_grad_norm must be positive"),
        (dict(mesh="4"), "mesh must be data=N, stage=N or data=N,stage=N for .*, got '4'"),
        (dict(mesh="data=0"), "mesh must be data=N"),
        (dict(mesh="model=2"), "mesh must be data=N"),
        (dict(mesh="data=3"), "a batch of 4 has no 3 equal parts for the mesh data=3"),
        (dict(mesh="data=2", microbatches=4), "batch of 2 on each device has no 4 equal micro-"),
        (dict(zero1=True), "zero1 needs a mesh data=N"),
    ],
)
def test_config_is_checked(changes, match) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **changes)


# --- over a mesh ----------------------------------------------------------------------------------

SHORT = dataclasses.replace(CONFIG, steps=20, batch_size=8)


@pytest.fixture(scope="module")
def alone(short, model) -> Run:
    return language_model.train(SHORT, corpus=short, model=model)


# Four devices that sum gradients train below, where they find their scale.
@pytest.mark.slow
@pytest.mark.whole("data=4", "data=1")
@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh="data=4"),
        dict(mesh="data=2", microbatches=2),
        dict(mesh="data=1"),
        dict(mesh="data=4", zero1=True),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_mesh_changes_rounding_only(short, model, alone, changes) -> None:
    config = dataclasses.replace(SHORT, **changes)
    run = language_model.train(config, corpus=short, model=model)
    assert_same_training(run.history, alone.history)
    np.testing.assert_allclose(run.held_out_loss, alone.held_out_loss, rtol=1e-5)
    assert run.devices == int(config.mesh[-1]) and alone.devices == 1
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(run.state))
    for leaf, expected in zip(
        jax.tree.leaves(run.state.params), jax.tree.leaves(alone.state.params), strict=True
    ):
        assert leaf.shape == expected.shape and leaf.dtype == expected.dtype


@pytest.mark.slow
def test_a_mesh_finds_its_scale_by_skipping_together(short, model, scaled) -> None:
    float16 = dict(precision="O2", half="float16", loss_scale="dynamic", init_scale=2.0**24)
    config = dataclasses.replace(CONFIG, steps=20, mesh="data=4", **float16)
    summed, divided = (
        language_model.train(dataclasses.replace(config, zero1=zero1), corpus=short, model=model)
        for zero1 in (False, True)
    )
    # Gradients are the same bits until they are summed, in float32. What that changes in a
    # parameter can be one unit of its float16 copy, 2**-11, for some of the model.
    np.testing.assert_allclose(summed.history.loss, divided.history.loss, rtol=1e-3)
    np.testing.assert_array_equal(summed.history.overflow, divided.history.overflow)
    # As with micro-batches, each device's mean is of fewer rows, each of which then weighs more:
    # the scale that overflows is up to four times lower than on one device.
    first, first_alone = (np.argmin(run.history.overflow) for run in (summed, scaled))
    assert 2 <= first_alone <= first <= first_alone + 2
    np.testing.assert_allclose(
        summed.history.loss[:first_alone], scaled.history.loss[:first_alone], rtol=1e-3
    )


def test_zero1_divides_the_moments(model) -> None:
    config = dataclasses.replace(SHORT, mesh="data=4", zero1=True)
    variables = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8), np.int32))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), variables["params"])
    step = language_model.make_step(config, transformer.make_loss(model))
    _, state = meshes.spread(step, params, meshes.make_mesh(config.mesh))
    moments = optax.tree.get(state.opt_state, "mu")
    for tree, rows in ((state.params, 64), (moments, 16)):
        position = tree["position"]
        assert position.shape == (64, 16)
        assert position.sharding.shard_shape(position.shape) == (rows, 16)


def test_a_mesh_needs_its_devices(short, model) -> None:
    config = dataclasses.replace(SHORT, batch_size=32, mesh="data=16")
    with pytest.raises(ValueError, match=r"data=16 needs 16 devices, and cpu has 8.*before JAX"):
        language_model.train(config, corpus=short, model=model)


@pytest.mark.slow
def test_table_says_how_many_devices(alone) -> None:
    assert "Trained over" not in reporting.format_table([[alone]], 3.25)
    table = reporting.format_table([[alone._replace(devices=4)]], 3)
    assert "over 4 devices in 1 process;" in table


# --- several runs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_prints_a_table_and_saves_a_picture(compared) -> None:
    assert compared.picture.read_bytes().startswith(b"\x89PNG")
    table = {line.split("  ")[0]: line for line in compared.out.splitlines()}
    for run in compared.runs:
        assert f"{run.held_out_loss:.4f}" in table[run.label]
        assert run.label in compared.err, "a progress bar each"
    assert f"jax {jax.__version__}" in compared.out


@pytest.mark.slow
def test_compared_runs_store_and_scale_what_they_say(compared) -> None:
    float32, o1_bfloat16, o1_float16, bfloat16, float16, o3 = compared.runs
    stored = [run.state.params["position"].dtype.name for run in compared.runs]
    assert stored == ["float32"] * 5 + ["float16"]
    assert float32.final_scale == bfloat16.final_scale == o3.final_scale == 1
    assert o1_bfloat16.final_scale == 1
    assert float16.history.loss_scale[0] == 2.0**24
    assert o1_float16.history.loss_scale[0] == 2.0**16
    assert bfloat16.skipped == o1_bfloat16.skipped == 0


@pytest.mark.slow
def test_o3_is_flagged(compared) -> None:
    assert "[1] O3 float16" in compared.out
    assert "second moments have rounded to zero" in compared.out
    assert not compared.runs[5].held_out_loss < 1.05 * compared.runs[0].held_out_loss


def test_progress_bar_says_loss_scale_skips_and_speed(capsys) -> None:
    with ampx.progress_bar(12, label="O2", tokens_per_step=100) as on_step:
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


@pytest.mark.slow
def test_table_counts_updates_held_back(scaled) -> None:
    scale = ampx.find_loss_scale_state(scaled.state.opt_state)
    state = scaled.state._replace(opt_state=scale._replace(bad_update_total=np.int32(7)))
    table = reporting.format_table([[scaled._replace(state=state)]], 3.25)
    assert "[1] O2 float16, dynamic scale: 7 updates held back" in table
    assert "[1]" not in reporting.format_table([[scaled]], 3.25)
    table = reporting.format_table([[scaled, scaled._replace(state=state)]], 3.25)
    assert "[1] O2 float16, dynamic scale: 0 to 7 updates held back" in table


@pytest.mark.slow
def test_several_seeds_are_compared_seed_by_seed(alone, monkeypatch, capsys) -> None:
    losses = {("float32", 3): 2.0, ("float32", 5): 1.0, ("O1 bfloat16", 3): 2.1}
    trained = []

    def train(config, **_):
        trained.append((config.label, config.seed))
        loss = losses.get(trained[-1], 1.1)  # the other one: O1 with seed 5
        return alone._replace(label=config.label, held_out_loss=loss)

    monkeypatch.setattr(language_model, "train", train)
    configs = [Config(seed=7), Config(precision="O1", seed=7)]
    runs = language_model.compare(configs, seeds=[3, 5], progress=False)
    assert trained == [*list(losses)[::2], ("float32", 5), ("O1 bfloat16", 5)]
    assert [run.held_out_loss for run in runs] == [2.0, 2.1, 1.0, 1.1]
    _, _, float32, o1, *_, last = capsys.readouterr().out.splitlines()
    assert float32.startswith("float32      1.0000 to 2.0000  -                 ")
    # Each is compared with float32 of its own seed, and a figure that all share is written once.
    assert o1.startswith("O1 bfloat16  1.1000 to 2.1000  +5.00% to +10.00%")
    assert o1.split()[-3:] == ["0%", "0", "1"]
    assert last == "Seeds 3, 5: a figure is its range over them."


def test_a_range_ends_in_nan_where_a_run_has_failed(alone) -> None:
    failed = alone._replace(held_out_loss=float("nan"))
    fine = alone._replace(held_out_loss=1.5)
    table = reporting.format_table([[fine, fine], [failed, fine]], 3.25)
    assert "1.5000 to nan  +0.00%  " in table.splitlines()[3]


# --- the command line -----------------------------------------------------------------------------


PROCESSES = "--coordinator 127.0.0.1:1 --num-processes"


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
        ("--precision O1 --dots float8", Config(precision="O1", dots="float8")),
        ("--precision O3 --max-grad-norm 0.5", Config(precision="O3", max_grad_norm=0.5)),
        ("--precision fast|step|0.5", Config(precision="fast|step|0.5")),
        (
            "--precision fast1|loss --final-loss 2.5",
            Config(precision="fast1|loss", final_loss=2.5),
        ),
        ("--precision O2 --mesh data=4", Config(precision="O2", mesh="data=4")),
        (
            "--precision O0 --mesh data=8 --zero1 --microbatches 2",
            Config(precision="O0", mesh="data=8", zero1=True, microbatches=2),
        ),
    ],
)
def test_flags(configs_of, flags, expected) -> None:
    assert configs_of(flags) == [expected]


def test_seeds_are_handed_on(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(language_model, "compare", lambda *_, seeds, **__: given.append(seeds))
    language_model.main("--precision O0 --seeds 4 0".split())
    language_model.main("--precision O0".split())
    assert given == [[4, 0], None]


def test_no_precision_compares_six(configs_of) -> None:
    configs = configs_of("--steps 7")
    assert configs == compared_configs(Config(steps=7))
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
        ("--precision fast|step|0.95", "field 3 of 'fast|step|0.95' must be a number from 0.2"),
        ("--precision fast|loss", "'fast|loss' needs final_loss"),
        ("--precision fast|step --final-loss 2", "final_loss=2.0 has no meaning"),
        ("--precision O2 --final-loss 2", "final_loss is for a schedule, not for precision O2"),
        ("--precision fast|step --loss-scale 128", "each phase of fast|step has its own"),
        ("--precision fast1|step --init-scale 8", "needs a dynamic loss scale, not None"),
        ("--final-loss 2", "--final-loss needs --precision"),
        ("--half float16", "--half needs --precision"),
        ("--loss-scale 128", "--loss-scale needs --precision"),
        ("--steps 0", "steps must be positive, got 0"),
        ("--microbatches 3", "batch of 16 has no 3 equal micro-batches"),
        ("--max-grad-norm 0", "max_grad_norm must be positive"),
        ("--seed -1", "seed must not be negative"),
        ("--seeds 0 -1", "seed must not be negative, got -1"),
        ("--seeds 0 1 0", "--seeds must differ from each other, got 0 1 0"),
        ("--seed 1 --seeds 0 1", "--seed 1 and --seeds exclude each other"),
        (
            "--mesh 4",
            "mesh must be data=N, stage=N or data=N,stage=N for numbers of devices N, got",
        ),
        ("--mesh data=3", "a batch of 16 has no 3 equal parts"),
        ("--mesh data=16", "data=16 needs 16 devices, and cpu has 8"),
        ("--zero1", "zero1 needs a mesh data=N"),
        ("--num-processes 2", "--num-processes needs --mesh data=N"),
        ("--mesh data=2 --coordinator localhost:1", "--num-processes is missing"),
        (f"--mesh data=2 {PROCESSES} 2 --process-id 2", "--process-id must be 0 to 1, got 2"),
        (f"--mesh data=4 {PROCESSES} 3 --process-id 0", "4 devices has no 3 equal parts"),
        (f"--mesh data=2 {PROCESSES} 2 --process-id 0", "JAX has been used already"),
        (
            "--mesh data=2 --coordinator here --num-processes 2 --process-id 0",
            "--coordinator must be HOST:PORT, got here",
        ),
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
    monkeypatch.setattr(language_model, "make_model", lambda corpus, **_: model)
    picture = tmp_path / "picture.png"
    flags = "--precision O2 --half float16 --loss-scale 128 --microbatches 2 --no-progress"
    size = ["--steps", "2", "--batch-size", "4", "--output", str(picture)]
    language_model.main([*flags.split(), *size])
    out, err = capsys.readouterr()
    assert picture.exists() and not err
    assert "O2 float16, scale 128" in out and "2^7" in out


# --- in processes of their own --------------------------------------------------------------------


@pytest.mark.whole
def test_command_line_makes_virtual_devices(tmp_path, alone) -> None:
    ((out, _, losses),) = run_commands(tmp_path, f"{FLAGS} --layers 1 --mesh data=4 --zero1")
    assert "Trained over 4 devices in 1 process;" in out
    np.testing.assert_allclose(losses[0], alone.held_out_loss, rtol=1e-5)


@pytest.mark.whole
def test_two_processes_train_as_one_does(tmp_path, alone) -> None:
    with reserved_port() as port:
        flags = f"{FLAGS} --layers 1 --mesh data=2 --coordinator 127.0.0.1:{port} --num-processes 2"
        first, second = run_commands(tmp_path, f"{flags} --process-id 0", f"{flags} --process-id 1")
    assert first[2] == second[2], "all processes have the same numbers"
    np.testing.assert_allclose(first[2][0], alone.held_out_loss, rtol=1e-5)
    np.testing.assert_allclose(first[2][1:], alone.history.loss, rtol=2e-6)
    # Only the first prints, shows progress and draws.
    assert "Trained over 2 devices in 2 processes;" in first[0] and "100%" in first[1]
    assert "held-out" not in second[0] and "%" not in second[1]
    pictures = [path.parent.name for path in tmp_path.glob("*/language_model.png")]
    assert pictures == ["0"]
