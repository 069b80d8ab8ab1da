"""ampx.training.train_states: three kinds of state, one meaning of a skip."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from helpers import make_mesh
from jax.sharding import NamedSharding, PartitionSpec

import ampx
from ampx.training import train_states

GOOD = {"x": jnp.arange(12.0).reshape(4, 3) / 12, "y": jnp.arange(4.0)}
BAD = GOOD | {"x": GOOD["x"].at[1, 1].set(jnp.inf)}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        return nn.Dense(1)(x)[:, 0]


def linen_loss(params, batch, key=None, *, model_state):
    variables = {"params": params, "batch_stats": model_state}
    out, updated = LinenNet().apply(variables, batch["x"], mutable="batch_stats")
    return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]


class LinenState(train_state.TrainState):
    batch_stats: dict


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.dense(x))))[:, 0]


def nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make(kind, tx, **options):
    """(step, first state), with batch statistics."""
    if kind == "nnx":
        step = ampx.train_step(nnx_loss, tx, **options)
        model = NnxNet(nnx.Rngs(0))
        return step, (model, nnx.Optimizer(model, step.tx, wrt=nnx.Param))
    step = ampx.train_step(linen_loss, tx, **options)
    variables = LinenNet().init(jax.random.key(0), GOOD["x"])
    params, stats = variables["params"], variables["batch_stats"]
    if kind == "linen":
        return step, LinenState.create(
            apply_fn=LinenNet().apply, params=params, tx=step.tx, batch_stats=stats
        )
    return step, step.init(params, key=jax.random.key(1), model_state=stats)


def parts(kind, state):
    """(what must stand still on a skip, step)."""
    if kind == "nnx":
        model, optimizer = state
        learnt = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
        opt_state = nnx.as_pure(optimizer.opt_state)
        return (nnx.to_pure_dict(learnt), opt_state.inner_state), int(optimizer.step[...])
    stats = state.batch_stats if kind == "linen" else state.model_state
    return (state.params, stats, state.opt_state.inner_state), int(state.step)


KINDS = ["pytree", "linen", "nnx"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.whole_but("1-linen", "2-pytree", "2-nnx")
@pytest.mark.slow_but("2-nnx")
@every_kind
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_skip_holds_everything_but_scale_and_key(kind, num_microbatches):
    step, first = make(
        kind, optax.adam(0.1), loss_scale="dynamic", num_microbatches=num_microbatches
    )
    jitted = jax.jit(step)
    state, report = jitted(first, GOOD)
    assert not report.overflow and parts(kind, state)[1] == 1
    skipped, report = jitted(state, BAD)
    assert report.overflow and report.loss_scale == 2.0**16
    chex.assert_trees_all_equal(parts(kind, skipped), parts(kind, state))
    after, report = jitted(skipped, GOOD)
    assert report.loss_scale == 2.0**15 and parts(kind, after)[1] == 2
    before, then = (jax.tree.leaves(parts(kind, s)[0]) for s in (skipped, after))
    changed = [not np.array_equal(*pair) for pair in zip(before, then, strict=True)]
    assert sum(changed) >= 8  # parameters, statistics, moments, count
    if kind == "pytree":
        keys = [jax.random.key_data(s.key) for s in (first, state, skipped, after)]
        assert len({k.tobytes() for k in map(np.asarray, keys)}) == 4
    if kind == "nnx":
        counts = [int(s[0].dropout.rngs.count[...]) for s in (first, state, skipped, after)]
        assert counts == [num_microbatches * i for i in range(4)]


@pytest.mark.slow_but("linen")
@every_kind
def test_statistics_equal_a_plain_loop(kind):
    step, state = make(kind, optax.sgd(0.0))
    for _ in range(2):
        state, _ = jax.jit(step)(state, GOOD)
    if kind == "nnx":
        model = NnxNet(nnx.Rngs(0))
        for _ in range(2):
            model(GOOD["x"])
        found, expected = (nnx.to_pure_dict(nnx.state(m, nnx.BatchStat)) for m in (state[0], model))
    else:
        found = state.batch_stats if kind == "linen" else state.model_state
        variables = LinenNet().init(jax.random.key(0), GOOD["x"])
        for _ in range(2):
            _, updated = LinenNet().apply(variables, GOOD["x"], mutable="batch_stats")
            variables = variables | updated
        expected = variables["batch_stats"]
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.slow_but("nnx")
@every_kind
def test_one_trace_and_donation(kind):
    step, state = make(kind, optax.adam(0.1), loss_scale="dynamic", num_microbatches=2)
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def jitted(state, batch):
        traces.append(1)
        return step(state, batch)

    for i in range(4):
        old, (state, _) = state, jitted(state, BAD if i == 2 else GOOD)
    assert len(traces) == 1
    assert parts(kind, state)[1] == 3
    # Scalars that the step does not read, such as the last verdict, are no inputs of the program.
    assert all(x.is_deleted() for x in jax.tree.leaves(old) if isinstance(x, jax.Array) and x.ndim)


@pytest.mark.slow_but("linen")
@every_kind
def test_state_keeps_shapes_and_dtypes(kind):
    recipe = ampx.opt_level("O2", half_dtype=jnp.float16)
    step, state = make(kind, optax.adam(0.1), policy=recipe, num_microbatches=2)
    first = jax.tree.map(jnp.asarray, state)
    for _ in range(2):
        state, _ = step(state, GOOD)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, first)


def test_an_nnx_pair_is_trained_in_place_and_given_back():
    """Both habits, in a loop and in a jitted step of the user's own, train the same."""
    step, pair = make("nnx", optax.sgd(0.1))
    untouched = nnx.clone(pair)

    @nnx.jit
    def in_place(model, optimizer, batch):
        (model, optimizer), report = step((model, optimizer), batch)
        return report.loss

    @nnx.jit
    def given_back(pair, batch):
        pair, report = step(pair, batch)
        return pair, report.loss

    results = []
    for habit in ("in place", "given back", "no jit", "jax.jit"):
        model, optimizer = nnx.clone(untouched)
        own, losses = (model, optimizer), []
        for batch in (GOOD, jax.tree.map(lambda leaf: leaf / 2, GOOD)):
            if habit == "in place":
                loss = in_place(model, optimizer, batch)
            elif habit == "given back":
                own, loss = given_back(own, batch)
            else:
                call = jax.jit(step) if habit == "jax.jit" else step
                own, report = call(own, batch)
                loss = report.loss
            losses.append(float(loss))
        assert own[0] is model or habit != "no jit", "the very objects are given back"
        results.append((nnx.to_pure_dict(nnx.state(own[0], nnx.Param)), losses))
        if habit != "jax.jit":  # which gives its own copies to the step
            chex.assert_trees_all_equal(
                nnx.to_pure_dict(nnx.state(model, nnx.Param)), results[-1][0]
            )
            assert int(optimizer.step[...]) == 2
    before = nnx.to_pure_dict(nnx.state(untouched[0], nnx.Param))
    for params, losses in results:
        assert np.any(params["head"]["kernel"] != before["head"]["kernel"])
        chex.assert_trees_all_close(params, results[0][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(losses, results[0][1], rtol=1e-5)


def test_init_copies_so_that_donation_keeps_the_parameters():
    params, key = {"w": jnp.ones(3)}, jax.random.key(0)
    step = ampx.train_step(lambda p, b, key: jnp.sum(p["w"] * b), optax.sgd(0.1))
    jax.jit(step, donate_argnums=0)(step.init(params, key=key), jnp.ones(3))
    assert params["w"].sum() == 3 and jax.random.key_data(key) is not None


@pytest.mark.parametrize("how", ["plain", "jit", "eval_shape"])
def test_a_first_state_lies_on_the_mesh_of_its_parameters(how):
    """Made outside of jit and inside, the parameters an argument or not."""
    mesh = make_mesh((2,), ("data",))
    params = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("data")))
    tx = ampx.dynamic_loss_scale(optax.adam(0.1))
    step = ampx.train_step(lambda p, x: jnp.sum(p * x), tx)

    def make():
        return step.init(params, key=jax.random.key(0))

    if how == "plain":
        state = make()
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
    elif how == "jit":
        chex.assert_trees_all_equal(jax.jit(make)(), make())
    else:
        chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(make), make())


def test_a_key_for_one_step_leaves_the_states_own():
    def draw(w, batch, key):
        return jnp.sum(w * batch), jax.random.normal(key)

    step = ampx.train_step(draw, optax.sgd(0.1), has_aux=True)
    state = step.init(jnp.ones(()), key=jax.random.key(0))
    own, report = step(state, jnp.ones(2))
    other, given = step(state, jnp.ones(2), key=jax.random.key(9))
    assert given.aux != report.aux
    assert given.aux == jax.random.normal(jax.random.fold_in(jax.random.key(9), 0))
    assert (own.key != state.key) and (other.key == state.key)


def test_linen_state_without_statistics_takes_a_key():
    step = ampx.train_step(
        lambda p, b, key: jnp.sum(p["w"]) * jax.random.uniform(key) + 0 * jnp.sum(b), optax.sgd(0.1)
    )
    state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=step.tx)
    state, report = jax.jit(step)(state, jnp.ones(2), key=jax.random.key(0))
    assert 0 < report.loss < 2 and int(state.step) == 1


# --- windows of multi_steps ----------------------------------------------------------------------


def window_step(order):
    scale = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)
    tx = {
        "none": lambda: ampx.multi_steps(optax.sgd(1.0), 2),
        "inside": lambda: ampx.multi_steps(scale(optax.sgd(1.0)), 2),
        "outside": lambda: scale(ampx.multi_steps(optax.sgd(1.0), 2)),
    }[order]()

    def loss_fn(w, batch, *, model_state):
        return jnp.mean(w * batch), model_state + 1

    return ampx.train_step(loss_fn, tx, learning_rate=lambda step: 0.5 ** step.astype(jnp.float32))


@pytest.mark.slow_but("inside-overflow1-steps1")
@pytest.mark.parametrize(
    "order, overflow, steps",
    [
        # A window is dropped: by its end if the bad call is its first.
        ("none", [0, 0, 1, 1, 0, 0, 0, 1], [0, 1, 1, 1, 1, 2, 2, 2]),
        ("inside", [0, 0, 1, 1, 0, 0, 0, 1], [0, 1, 1, 1, 1, 2, 2, 2]),
        # The micro-step alone is dropped.
        ("outside", [0, 0, 1, 0, 0, 0, 0, 1], [0, 1, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_windows_count_as_one_update(order, overflow, steps):
    """A verdict inside a window speaks of the last window: it must not hold back the next one."""
    step = window_step(order)
    state = step.init(jnp.zeros(()), model_state=jnp.zeros((), jnp.int32))
    jitted, bad, found = jax.jit(step), {2, 7}, []
    for i in range(8):
        held = state.model_state
        state, report = jitted(state, jnp.full(2, jnp.nan if i in bad else 1.0))
        found.append((int(report.overflow), int(state.step)))
        assert int(state.model_state - held) == 1 - int(report.overflow)
        assert report.learning_rate == 0.5 ** max(int(state.step) - 1, 0), "of the last update"
    assert ([o for o, _ in found], [s for _, s in found]) == (overflow, steps)
    assert float(state.params) == -steps[-1]


@pytest.mark.slow
def test_windows_of_an_nnx_optimizer():
    tx = ampx.multi_steps(ampx.dynamic_loss_scale(optax.sgd(0.1)), 2)
    step, state = make("nnx", tx)
    found = []
    for batch in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD):
        state, report = jax.jit(step)(state, batch)
        found.append((bool(report.overflow), int(state[1].step[...])))
    assert found == [(False, 0), (False, 1), (True, 1), (True, 1), (False, 1), (False, 2)]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [{"params": 1}, (1, 2), None, 3.0])
def test_states_of_another_kind_are_refused(state):
    step = ampx.train_step(lambda w, b: jnp.sum(w), optax.sgd(0.1))
    with pytest.raises(TypeError, match="must be an ampx.TrainState .*got " + type(state).__name__):
        step(state, GOOD)


@pytest.mark.parametrize(
    "kind, fix",
    [("linen", r"TrainState.create\(..., tx=step.tx"), ("nnx", r"nnx.Optimizer\(model, step.tx")],
)
def test_states_of_another_optimizer_are_refused(kind, fix):
    _, state = make(kind, optax.sgd(0.1))
    step, _ = make(kind, optax.sgd(0.1), loss_scale="dynamic")
    with pytest.raises(ValueError, match=f"another optimizer.*{fix}"):
        step(state, GOOD)


def test_init_refuses_nnx_models():
    step = ampx.train_step(nnx_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"call the step with the pair \(model, nnx.Optimizer"):
        step.init(NnxNet(nnx.Rngs(0)))


def test_read_and_write_are_inverse():
    tx = optax.sgd(0.1)
    _, state = make("linen", tx)
    read = train_states.as_train_state(state, state.tx)
    written = train_states.write_back(state, read._replace(step=jnp.array(7)))
    assert int(written.step) == 7 and written.tx is state.tx
    chex.assert_trees_all_equal(written.batch_stats, state.batch_stats)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pytree", "linen"])
def test_orbax_round_trip_resumes_bit_equal(kind, tmp_path: pathlib.Path):
    tx = optax.adamw(optax.cosine_decay_schedule(0.1, 20))
    step, state = make(kind, tx, loss_scale="dynamic", num_microbatches=2)
    jitted = jax.jit(step)
    for batch in (GOOD, BAD, GOOD):
        state, _ = jitted(state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        _, fresh = make(kind, tx, loss_scale="dynamic", num_microbatches=2)
        fresh = fresh if kind == "pytree" else fresh.replace(tx=step.tx)
        restored = checkpointer.restore(tmp_path / "state", fresh)
    for batch in (GOOD, BAD, GOOD):
        state, report = jitted(state, batch)
        restored, restored_report = jitted(restored, batch)
        chex.assert_trees_all_equal(restored_report, report)
    chex.assert_trees_all_equal(parts(kind, restored), parts(kind, state))
    assert int(restored.step) == 4


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.b.kernel = self.a.kernel

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


@pytest.mark.slow
def test_tied_nnx_parameters_stay_tied_under_nnx_jit():
    step = ampx.train_step(lambda m, x: jnp.mean((m(x) - x) ** 2), optax.adam(0.1))
    pairs = []
    for call in (step, nnx.jit(step)):
        model = Tied(nnx.Rngs(0))
        pair = (model, nnx.Optimizer(model, step.tx, wrt=nnx.Param))
        for _ in range(3):
            pair, _ = call(pair, jnp.eye(3))
        pairs.append(pair[0])
    eager, jitted = pairs
    assert jitted.a.kernel is jitted.b.kernel
    np.testing.assert_allclose(jitted.a.kernel[...], eager.a.kernel[...], rtol=1e-5)


def test_nnx_differentiates_what_the_optimizer_trains():
    class Lora(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(3, 2, rngs=rngs)
            self.lora = nnx.LoRA(3, 1, 2, rngs=rngs)

        def __call__(self, x):
            return self.base(x) + self.lora(x)

    def loss_fn(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    model, x = Lora(nnx.Rngs(0)), jnp.ones((4, 3))
    step = ampx.train_step(loss_fn, optax.sgd(0.1), loss_scale="dynamic")
    pair = (model, nnx.Optimizer(model, step.tx, wrt=nnx.LoRAParam))
    (trained, _), report = jax.jit(step)(pair, x)
    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    np.testing.assert_allclose(report.global_norm, optax.tree.norm(nnx.as_pure(grads)), rtol=1e-6)
    np.testing.assert_array_equal(trained.base.kernel[...], model.base.kernel[...])
    assert not np.array_equal(trained.lora.lora_b[...], model.lora.lora_b[...])


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_do_not_disturb_a_step():
    class Sows(NnxNet):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "input", x)
            return super().__call__(x)

    step = ampx.train_step(nnx_loss, optax.sgd(0.1), num_microbatches=2)
    model = Sows(nnx.Rngs(0))
    pair = (model, nnx.Optimizer(model, step.tx, wrt=nnx.Param))
    for _ in range(2):
        pair, report = jax.jit(step)(pair, GOOD)
    assert np.isfinite(report.loss)


def test_a_pair_in_the_wrong_order_is_told_by_its_parts():
    step = ampx.train_step(lambda model, x: jnp.sum(model(x)), optax.sgd(0.1))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"got tuple \(Optimizer, Linear\)"):
        step((optimizer, model), jnp.ones((1, 2)))
