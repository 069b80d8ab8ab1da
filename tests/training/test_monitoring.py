"""Figures by name: what is logged is what the states hold, however they are nested."""

import builtins
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from helpers import assert_bit_equal, make_mesh

import ampx
from ampx.drawing import format_scale
from ampx.training import monitoring
from ampx.training.monitoring import metrics, progress_bar
from ampx.updates.clipping import clipped

SCALE = (
    *("loss_scale", "growth_tracker", "hysteresis_tracker", "overflow", "skipped_total"),
    *("inf_total", "nan_total", "floor_hits", "ceiling_hits", "bad_update_total"),
    "nonfinite_loss_total",
)
FIGURES_OF_INNER = ("num_buckets", "reduced_bytes", "global_norm")
WINDOW = ("micro_step", "gradient_step", "weight_sum", "window_is_bad", "dropped_total")
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


def fields(state, names):
    return {name: getattr(state, name) for name in names}


def scaled(inner=None, **options):
    options = {"init_scale": 8.0, "growth_interval": 2} | options
    return ampx.dynamic_loss_scale(optax.sgd(0.1) if inner is None else inner, **options)


def injected(**options):
    return optax.inject_hyperparams(optax.adamw)(**options)


def of_scale(state):
    return fields(state, SCALE)


def prefixed(prefix, figures):
    return {f"{prefix}/{name}": value for name, value in figures.items()}


# From a nesting to a transformation and its figures, read from the state by hand.
NESTINGS = {
    "alone": (scaled(), of_scale),
    "static": (ampx.static_loss_scale(optax.sgd(0.1), 8.0), of_scale),
    "chain": (
        optax.chain(optax.identity(), scaled(), optax.trace(0.9)),
        lambda state: of_scale(state[1]),
    ),
    "hyperparameters inside": (
        scaled(injected(learning_rate=lambda count: 0.1 / (1 + count.astype(jnp.float32)))),
        lambda state: of_scale(state) | dict(state.inner_state.hyperparams),
    ),
    "hyperparameters around": (
        optax.inject_hyperparams(lambda learning_rate: scaled(optax.sgd(learning_rate)))(0.1),
        lambda state: (
            {"learning_rate": state.hyperparams["learning_rate"]} | of_scale(state.inner_state)
        ),
    ),
    "masked": (
        optax.masked(scaled(), {"w": True, "b": False}),
        lambda state: of_scale(state.inner_state),
    ),
    "optax.MultiSteps": (
        optax.MultiSteps(scaled(), 2),
        lambda state: of_scale(state.inner_opt_state),
    ),
    "windows around": (
        ampx.multi_steps(scaled(), 2),
        lambda state: fields(state, WINDOW) | of_scale(state.inner_state),
    ),
    "windows inside": (
        scaled(ampx.multi_steps(optax.sgd(0.1), 2)),
        lambda state: of_scale(state) | fields(state.inner_state, WINDOW),
    ),
    "masters": (scaled(ampx.master_weights(optax.adam(0.1))), of_scale),
    "schedule around": (
        ampx.follow_schedule(scaled(), ampx.precision_schedule("fast|step|0.5", total_steps=4)),
        lambda state: (
            fields(state, ("precision_phase", "steps_seen")) | of_scale(state.inner_state)
        ),
    ),
    "groups": (
        optax.partition(
            {"decay": scaled(), "rest": scaled(init_scale=32.0)}, {"w": "decay", "b": "rest"}
        ),
        lambda state: (
            prefixed("decay", of_scale(state.inner_states["decay"].inner_state))
            | prefixed("rest", of_scale(state.inner_states["rest"].inner_state))
        ),
    ),
}


@pytest.mark.slow_but("hyperparameters inside", "windows inside", "groups")
@pytest.mark.parametrize("nesting", NESTINGS)
def test_figures_are_the_fields_of_the_states(nesting):
    tx, expected = NESTINGS[nesting]
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        _, state = tx.update(grads, state, params)
        return state, metrics(state)

    state = tx.init(PARAMS)
    assert_bit_equal(metrics(state), expected(state))
    seen = []
    for value in (1.0, jnp.inf, 1.0, jnp.nan, 1.0):
        state, figures = step(PARAMS, state, optax.tree.full_like(PARAMS, value))
        assert_bit_equal(figures, expected(state))
        seen.append(jax.device_get(figures))
    assert len(traces) == 1
    assert seen[0] != seen[-1], "nothing has moved: the comparison says nothing"


def test_figures_cost_nothing():
    state = NESTINGS["hyperparameters inside"][0].init(PARAMS)
    assert not jax.make_jaxpr(metrics)(state).eqns
    figures = metrics(state)
    assert figures["loss_scale"] is state.loss_scale
    shapes = metrics(jax.eval_shape(lambda: state))
    assert {name: shape.dtype for name, shape in shapes.items()} == {
        name: figure.dtype for name, figure in figures.items()
    }


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_scale_that_reaches_no_gradient_hits_its_maximum_and_never_overflows(forgotten):
    tx = scaled(init_scale=2.0**14, growth_interval=1)

    @jax.jit
    def train(params, opt_state):
        def step(carry, _):
            params, opt_state = carry
            scale = 1.0 if forgotten else ampx.current_loss_scale(opt_state)
            # What a model in float16 hands back: infinite beyond 65504.
            half = (scale * params).astype(jnp.float16)
            updates, opt_state = tx.update(half.astype(jnp.float32), opt_state, params)
            return (params + updates, opt_state), None

        return jax.lax.scan(step, (params, opt_state), length=14)[0]

    params = jnp.ones(2)
    figures = metrics(train(params, tx.init(params))[1])
    if forgotten:
        assert figures["skipped_total"] == 0 and figures["ceiling_hits"] == 4
    else:
        assert figures["skipped_total"] > 0 and figures["ceiling_hits"] == 0


def test_a_reduction_tells_its_bytes_and_a_clip_its_norm():
    inner = clipped(optax.chain(ampx.all_reduce("data"), optax.sgd(0.1)), 1.0)
    tx = scaled(inner, axis_names="data")
    everywhere = jax.P()

    @jax.jit
    @jax.shard_map(mesh=make_mesh((2,), ("data",)), in_specs=everywhere, out_specs=everywhere)
    def steps(state, factors):
        def step(state, factor):
            grads = jax.lax.pcast(optax.tree.full_like(PARAMS, 8 * factor), "data", to="varying")
            _, state = tx.update(grads, state, PARAMS)
            return state, metrics(state)

        return jax.lax.scan(step, state, factors)

    first = tx.init(PARAMS)
    assert [float(metrics(first)[name]) for name in FIGURES_OF_INNER] == [0, 0, 0]
    state, figures = steps(first, jnp.array([2.0, jnp.inf]))
    # Each device's gradients are a shard to the clip, which comes before the reduction.
    expected = [len(ampx.bucket_layout(PARAMS).buckets), 4 * 9, np.sqrt(2 * 9 * 2.0**2)]
    for name, value in zip(FIGURES_OF_INNER, expected, strict=True):
        np.testing.assert_allclose(figures[name], [value, value], rtol=1e-6)
    restored = serialization.from_bytes(first, serialization.to_bytes(state))
    assert_bit_equal(metrics(restored), metrics(state))


def test_zero1_tells_the_norm_of_what_it_reduced():
    tx = scaled(ampx.zero1(optax.adam(0.1), "data"), axis_names="data")
    mesh = make_mesh((4,), ("data",))
    params = {"w": jnp.ones((4, 8)), "b": jnp.zeros(3)}
    specs = ampx.zero1_specs(tx, params, mesh)

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P("data")),
        out_specs=(specs, jax.P()),
    )
    def step(params, state, batch):
        def loss(params, batch):
            return jnp.mean(batch) * (jnp.sum(params["w"]) + jnp.sum(params["b"]))

        grads = ampx.value_and_grad(loss, axis_name="data")(params, batch, loss_scale=8.0).grads
        _, state = tx.update(grads, state, params, reduce_op="sum")
        return state, metrics(state)

    state, figures = step(params, tx.init(params), jnp.arange(8.0))
    zero1 = state.inner_state
    sent = {"num_buckets": np.int32(2), "reduced_bytes": np.float32(4 * 35)}
    assert_bit_equal(figures, of_scale(state) | {"global_norm": zero1.gradient_norm} | sent)
    np.testing.assert_allclose(figures["global_norm"], 3.5 * np.sqrt(35), rtol=1e-6)


def test_nnx_variables_are_opened():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaled(injected(learning_rate=0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: 8 * jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return metrics(optimizer.opt_state)

    for _ in range(2):
        figures = step(model, optimizer, jnp.ones((1, 3)))
    assert {type(figure) for figure in figures.values()} == {type(jnp.ones(1))}
    assert set(SCALE) < set(figures) and figures["growth_tracker"] == 0
    assert float(figures["loss_scale"]) == 16 and float(figures["learning_rate"]) == np.float32(0.1)


def test_several_losses_give_vectors():
    figures = metrics(scaled(num_losses=2).init(PARAMS))
    assert figures["loss_scale"].shape == figures["nan_total"].shape == (2,)
    assert figures["overflow"].shape == ()


def names(state):
    return [name for name in metrics(state) if name.endswith(("loss_scale", "learning_rate"))]


def test_prefixes_are_as_short_as_they_can_be():
    groups = optax.partition({"decay": scaled(), "rest": scaled()}, {"w": "decay", "b": "rest"})
    three = optax.chain(groups, scaled()).init(PARAMS)
    assert names(three) == ["0/decay/loss_scale", "0/rest/loss_scale", "1/loss_scale"]
    rates = optax.inject_hyperparams(
        lambda learning_rate: optax.chain(
            optax.sgd(learning_rate), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        )
    )(learning_rate=0.25)
    nested = rates.init(PARAMS)
    assert names(nested) == ["learning_rate", "inner_state/learning_rate"]
    assert [float(metrics(nested)[name]) for name in names(nested)] == [0.25, 0.5]


def test_states_inside_states_keep_the_path_of_their_group():
    groups = {name: ampx.multi_steps(scaled(), 2) for name in ("decay", "rest")}
    state = optax.partition(groups, {"w": "decay", "b": "rest"}).init(PARAMS)
    assert names(state) == ["decay/loss_scale", "rest/loss_scale"]


def test_only_what_is_there_twice_is_prefixed():
    groups = {
        "decay": scaled(ampx.multi_steps(optax.sgd(0.1), 2)),
        "rest": scaled(),
    }
    state = optax.partition(groups, {"w": "decay", "b": "rest"}).init(PARAMS)
    assert {"decay/loss_scale", "rest/loss_scale", "micro_step"} < set(metrics(state))


@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.identity()])
def test_states_without_figures_give_none(tx):
    assert metrics(tx.init(PARAMS)) == {}


def test_a_report_is_no_state_and_is_told_where_its_figures_are():
    report = ampx.StepReport(*[jnp.float32(0)] * 5)
    with pytest.raises(TypeError, match=r"got a StepReport.*report\._asdict\(\)"):
        metrics(report)


# --- the progress bar -----------------------------------------------------------------------------


class Watched:
    """A number that counts how often it is read."""

    def __init__(self, value):
        self.value, self.reads = value, 0

    def __float__(self):
        self.reads += 1
        return float(self.value)

    def __bool__(self):
        return bool(float(self))


def report(loss=2.5, overflow=False, loss_scale=2.0**17):
    return ampx.StepReport(
        loss=loss,
        overflow=overflow,
        loss_scale=loss_scale,
        learning_rate=None,
        global_norm=np.float32(1),
    )


def last_bar(capsys):
    return capsys.readouterr().err.split("\r")[-1]


def test_bar_tells_loss_scale_skips_and_speed(capsys):
    with progress_bar(12, label="O2", tokens_per_step=100) as on_step:
        for step in range(12):
            on_step(report(loss=np.float32(step), overflow=np.bool_(step < 3)))
    bar = last_bar(capsys)
    assert bar.startswith("O2 ") and "100%" in bar
    assert "loss 11.000, scale 2^17, 3 skipped" in bar and "tokens/s" in bar


def test_bar_without_tokens_tells_steps_a_second(capsys, monkeypatch):
    # Made, first step on its way, two steps done, all steps done.
    now = iter([0.0, 10.0, 11.0, 12.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(monitoring, "time", clock)
    shown = []
    with progress_bar(4, refresh_every=2) as on_step:
        for _ in range(4):
            on_step(report())
            shown.append(last_bar(capsys))
    assert "2/4 " in shown[1] and "2.0 steps/s, 00:01 left" in shown[1]
    assert "4/4 " in shown[3] and "2.0 steps/s, 00:00 left" in shown[3]


def test_bar_reads_reports_some_at_a_time(capsys):
    losses = [Watched(step) for step in range(8)]
    overflows = [Watched(step % 2) for step in range(8)]
    with progress_bar(20, refresh_every=3) as on_step:
        for step, (loss, overflow) in enumerate(zip(losses, overflows, strict=True), 1):
            on_step(report(loss, overflow))
            read = step - step % 3
            assert [each.reads for each in overflows] == [1] * read + [0] * (8 - read)
    assert [loss.reads for loss in losses] == [0, 0, 1, 0, 0, 1, 0, 1]
    bar = last_bar(capsys)
    assert "40%" in bar and "loss 7.000" in bar and "4 skipped" in bar, "the rest is shown at last"


def without_tqdm(monkeypatch):
    def importing(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)


def test_disabled_bar_shows_and_reads_nothing_and_needs_no_tqdm(capsys, monkeypatch):
    without_tqdm(monkeypatch)
    loss = Watched(1.0)
    with progress_bar(1, disable=True) as on_step:
        on_step(report(loss, loss))
    assert not loss.reads and not capsys.readouterr().err


def test_missing_tqdm_names_the_extra(monkeypatch):
    without_tqdm(monkeypatch)
    with pytest.raises(ImportError, match=r"ampx-jax\[examples\]"), progress_bar(1):
        pass


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"total_steps": 0}, ValueError),
        ({"total_steps": 1.0}, TypeError),
        ({"total_steps": 1, "refresh_every": 0}, ValueError),
        ({"total_steps": 1, "tokens_per_step": -1}, ValueError),
    ],
)
def test_bar_checks_its_numbers(arguments, error):
    with pytest.raises(error, match="must be a positive int"), progress_bar(**arguments):
        pass


@pytest.mark.parametrize(
    ("scale", "said"), [(1.0, "1"), (2.0**17, "2^17"), (0.5, "2^-1"), (1000.0, "1000")]
)
def test_scales_are_said_as_powers_of_two(scale, said):
    assert format_scale(scale) == said
