"""The demo's language model over the stages of a pipeline: the same training as without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from demo_runs import FLAGS, assert_same_training, run_commands
from processes import reserved_port

from ampx import pipelining
from ampx.examples import command_line, language_model, meshes, pipelined, reporting, text
from ampx.examples.configs import Config, compared_configs
from ampx.examples.runs import Run
from ampx.examples.transformer import Block, LanguageModel, make_model


@pytest.fixture(scope="module")
def short() -> text.Corpus:
    """Little to evaluate on."""
    corpus = text.load_corpus()
    return corpus._replace(held_out=corpus.held_out[:2000])


@pytest.fixture(scope="module")
def model(short) -> LanguageModel:
    return make_model(short, layers=4, width=16, heads=2)


CONFIG = Config(steps=20, batch_size=8, learning_rate=1e-2, growth_interval=10)


@pytest.fixture(scope="module")
def alone(short, model) -> Run:
    return language_model.train(CONFIG, corpus=short, model=model)


def make_mesh(mesh: str) -> jax.sharding.Mesh:
    made = meshes.make_mesh(mesh)
    assert made is not None
    return made


# --- the view -------------------------------------------------------------------------------------


def params_of(model, tokens):
    """Random parameters, by NumPy: to run the model's own initializers, they must be compiled."""
    shapes, rng = (
        jax.eval_shape(model.init, jax.random.key(0), tokens)["params"],
        np.random.default_rng(0),
    )
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


@pytest.mark.parametrize("layers", [1, 4, 11])
def test_view_is_undone(layers) -> None:
    """Eleven: Block_10 comes after Block_9, not after Block_1."""
    model = LanguageModel(vocabulary_size=7, layers=layers, width=8, heads=2)
    params = params_of(model, jnp.zeros((1, 4), jnp.int32))
    parts = jax.jit(pipelined.divide_params)(params)
    for number in range(layers):
        kernel = params[f"Block_{number}"]["Dense_1"]["kernel"]
        np.testing.assert_array_equal(parts["stages"]["Dense_1"]["kernel"][number], kernel)
    jax.tree.map(np.testing.assert_array_equal, pipelined.join_params(parts), params)
    assert pipelined.join_params(params) == params, "nothing to undo"


def test_parts_compute_what_the_model_computes(short, model) -> None:
    tokens = jnp.asarray(short.train[None, :8])
    params = params_of(model, tokens)
    parts = pipelined.divide_params(params)
    x = pipelined.First(model.vocabulary_size, model.width).apply(
        {"params": parts["first"]}, tokens
    )
    for number in range(model.layers):
        layer = jax.tree.map(lambda leaf, n=number: leaf[n], parts["stages"])
        x = Block(model.heads).apply({"params": layer}, x)
    logits = pipelined.Last(model.vocabulary_size).apply({"params": parts["last"]}, x)
    np.testing.assert_array_equal(logits, model.apply({"params": params}, tokens))


def assert_is_divided(state) -> None:
    for tree in (state.params, *(optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))):
        kernel, position = tree["stages"]["Dense_0"]["kernel"], tree["first"]["position"]
        assert kernel.shape == (4, 16, 64)
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 64)
        assert position.sharding.is_fully_replicated


@pytest.fixture(scope="module")
def first_step(model):
    """A step over four devices, and its first state."""
    mesh, schedule = make_mesh("data=2,stage=2"), pipelining.one_f_one_b(2, 4)
    grads_of = pipelined.make_gradients(model, schedule, mesh)
    params = pipelined.divide_params(params_of(model, jnp.zeros((1, 4), jnp.int32)))
    return mesh, *pipelined.spread(language_model.make_step(CONFIG, grads_of), params, mesh)


def test_layers_and_their_moments_are_divided(first_step) -> None:
    assert_is_divided(first_step[2])


@pytest.mark.slow
def test_a_step_leaves_them_divided(first_step) -> None:
    mesh, step, state = first_step
    later, _ = jax.jit(step)(state, meshes.split(np.zeros((8, 9), np.int32), mesh))
    assert_is_divided(later)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, later
    )


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.whole("stage=2-interleaved")  # a schedule that two processes have below
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("data=2,stage=2", None),
        ("stage=2", "interleaved"),
    ],
)
def test_a_pipeline_changes_rounding_only(short, model, alone, mesh, schedule) -> None:
    config = dataclasses.replace(CONFIG, mesh=mesh, schedule=schedule)
    run = language_model.train(config, corpus=short, model=model)
    assert_same_training(run.history, alone.history)
    np.testing.assert_allclose(run.held_out_loss, alone.held_out_loss, rtol=1e-5)
    assert run.devices == meshes.device_count(mesh)
    assert run.schedule is not None and run.schedule.name == (schedule or "1f1b")
    assert jax.tree.structure(run.state) == jax.tree.structure(alone.state)
    for leaf, expected in zip(
        jax.tree.leaves(run.state), jax.tree.leaves(alone.state), strict=True
    ):
        assert leaf.shape == expected.shape and leaf.dtype == expected.dtype
        assert len(leaf.devices()) == 1


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["O2", "fast|step|0.5"])
def test_a_pipeline_keeps_the_precision(short, precision) -> None:
    """Against the same micro-batches on the same parts of the data, without stages."""
    model = make_model(short, layers=2, width=16, heads=2)
    half = dict(precision=precision, init_scale=2.0**24)
    if precision == "O2":
        half |= dict(half="float16", loss_scale="dynamic")
    plain = Config(steps=8, batch_size=8, microbatches=2, mesh="data=2", **half)
    configs = plain, dataclasses.replace(plain, mesh="data=2,stage=2")
    expected, run = (language_model.train(c, corpus=short, model=model) for c in configs)
    np.testing.assert_allclose(run.history.loss, expected.history.loss, rtol=2**-11)
    np.testing.assert_array_equal(run.history.overflow, expected.history.overflow)
    np.testing.assert_array_equal(run.history.loss_scale, expected.history.loss_scale)
    assert run.skipped > 2
    if precision != "O2":
        assert run.history.phase.tolist() == [0] * 4 + [1] * 4
    for leaf, same in zip(jax.tree.leaves(run.state), jax.tree.leaves(expected.state), strict=True):
        assert leaf.dtype == same.dtype


def test_a_pipeline_needs_its_model(short) -> None:
    mesh = make_mesh("stage=2")
    schedule = pipelining.gpipe(2, 2)
    with pytest.raises(TypeError, match="needs a LanguageModel, got Block"):
        pipelined.make_gradients(Block(2), schedule, mesh)
    with pytest.raises(ValueError, match="3 layers have no 2 equal parts: give layers=2 or"):
        pipelined.make_gradients(make_model(short, layers=3), schedule, mesh)


@pytest.mark.slow  # `alone` is trained by slow tests; other lines of a table: test_examples.py
def test_table_names_the_schedule(alone) -> None:
    assert "Pipeline" not in reporting.format_table([[alone]], 3.25)
    run = alone._replace(devices=4, schedule=Config(mesh="data=2,stage=2").pipeline)
    table = reporting.format_table([[run]], 3.25)
    assert "over 4 devices in 1 process;" in table
    assert "Pipeline 1f1b: 2 stages on 2 devices, 4 micro-batches, 10 ticks, 20.0% idle." in table


# --- the command line -----------------------------------------------------------------------------


def configs_of(flags: str) -> list[Config]:
    return command_line.read(command_line.make_parser().parse_args(flags.split())).configs


def test_flags() -> None:
    (config,) = configs_of("--precision O0 --mesh data=2,stage=4 --layers 4")
    assert config == Config("O0", mesh="data=2,stage=4", layers=4)
    assert config.num_microbatches == 8 and config.pipeline == pipelining.one_f_one_b(4, 8)
    (config,) = configs_of("--precision O0 --mesh stage=2 --schedule gpipe --microbatches 16")
    assert config.pipeline == pipelining.gpipe(2, 16)
    configs = configs_of("--mesh stage=2 --schedule zero-bubble")
    assert configs == compared_configs(Config(mesh="stage=2", schedule="zero-bubble"))
    assert Config().num_microbatches == 1 and Config().pipeline is None
    assert Config(mesh="data=2").num_microbatches == 1


@pytest.mark.parametrize("name", pipelined.SCHEDULES)
def test_every_schedule_can_train(name) -> None:
    schedule = pipelining.make_schedule(name, 2, 4)
    mesh = make_mesh("stage=2")
    model = LanguageModel(vocabulary_size=7, layers=4, width=8, heads=2)
    grads_of = pipelined.make_gradients(model, schedule, mesh)
    assert isinstance(grads_of, pipelining.PipelineGradients)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedule gpipe", "schedule gpipe needs a mesh with stage=N, such as data=2,stage=2"),
        ("--schedule gpipe --mesh data=2", "schedule gpipe needs a mesh with stage=N"),
        ("--schedule forward-only --mesh stage=2", "argument --schedule: invalid choice"),
        ("--mesh stage=2,stage=2", "mesh must be data=N, stage=N or data=N,stage=N"),
        ("--mesh data=2,model=2", "mesh must be data=N, stage=N or data=N,stage=N"),
        ("--mesh data=2,stage=0", "mesh must be data=N, stage=N or data=N,stage=N"),
        ("--mesh data=4,stage=4 --layers 4 --microbatches 1", "16 devices, and cpu has 8"),
        ("--mesh data=3,stage=2", "a batch of 16 has no 3 equal parts for the mesh data=3,stage=2"),
        (
            "--mesh data=2,stage=2 --microbatches 3",
            "a batch of 8 on each device has no 3 equal micro-batches: give microbatches that",
        ),
        ("--mesh stage=2 --zero1", "zero1 does not go with a mesh stage=2"),
        ("--mesh stage=4", "1f1b has 4 stages on 4 devices, and 2 layers have no 4 equal parts"),
        (
            "--mesh stage=2 --schedule interleaved",
            "2 layers have no 4 equal parts: give layers=4 or another multiple",
        ),
        ("--layers 0", "layers must be positive, got 0"),
        ("--mesh data=2,stage=2 --microbatches 0", "microbatches must be positive, got 0"),
    ],
)
def test_wrong_flags_get_one_line(flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        language_model.main(flags.split())
    assert exit_info.value.code == 2
    _, error = capsys.readouterr().err.splitlines()
    assert message in error


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be one of gpipe, .*, got 'forward-only'"):
        Config(mesh="stage=2", schedule="forward-only")


# --- in processes of their own --------------------------------------------------------------------


@pytest.mark.whole
def test_two_processes_train_as_one_does(tmp_path, alone) -> None:
    """Each process has both stages, for half of the data."""
    with reserved_port() as port:
        flags = f"{FLAGS} --layers 4 --mesh data=2,stage=2 --schedule interleaved"
        flags += f" --coordinator 127.0.0.1:{port} --num-processes 2"
        first, second = run_commands(tmp_path, f"{flags} --process-id 0", f"{flags} --process-id 1")
    assert first[2] == second[2], "all processes have the same numbers"
    np.testing.assert_allclose(first[2][0], alone.held_out_loss, rtol=1e-5)
    np.testing.assert_allclose(first[2][1:], alone.history.loss, rtol=2e-6)
    assert "Trained over 4 devices in 2 processes;" in first[0]
    assert "Pipeline interleaved: 4 stages on 2 devices, 4 micro-batches" in first[0]
    assert "held-out" not in second[0]
