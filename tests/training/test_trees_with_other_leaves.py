"""Parameters among other leaves: integers, functions, settings; Equinox modules above all."""

import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
from ampx.diagnostics.overlap import check_overlap

BATCH = {
    "x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32),
    "y": np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class OwnModule(eqx.Module):
    """Fields as people write them: numbers that are not marked static, arrays of integers."""

    weight: jax.Array
    order: jax.Array  # i32[4]
    rate: float
    layers: int
    is_odd: bool
    activation: object
    name: str
    nothing: None = None

    def __call__(self, x):
        for _ in range(self.layers):
            x = self.rate * self.activation(x @ self.weight)[self.order]
        return -x if self.is_odd else x


def make_own():
    order = jnp.array([1, 0, 3, 2], jnp.int32)
    return OwnModule(draw(4, 4), order, 0.5, 2, True, jnp.tanh, "own")


def make_mlp():
    return eqx.nn.MLP(4, 4, 8, 1, activation=jax.nn.silu, key=jax.random.key(0))


def make_with_dropout():
    first, second = jax.random.split(jax.random.key(0))
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(4, 4, key=first),
            eqx.nn.LayerNorm(4),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Dropout(0.0, inference=True),  # a Python float and a bool among the leaves
            eqx.nn.Linear(4, 4, key=second),
        ]
    )


def make_tree():
    """No module: a tree that somebody has put together."""
    return {
        "weight": draw(4, 4),
        "scale": 0.5,  # to jax.grad, a Python float is a parameter
        "order": np.array([1, 0, 3, 2], np.int32),
        "activation": jnp.tanh,
        "mode": "same",
        "key": jax.random.key(3),
        "dtype": jnp.float32,
        "on": True,
        "none": None,
    }


def call(model, x):
    if not isinstance(model, dict):
        return jax.vmap(model)(x)
    assert model["mode"] == "same" and model["dtype"] is jnp.float32
    noise = 0.0 * jax.random.normal(model["key"], x.shape)
    return model["activation"](x @ model["weight"] + noise)[:, model["order"]] * model["scale"]


def loss_fn(model, batch):
    return jnp.mean((call(model, batch["x"]) - batch["y"]) ** 2)


MODELS = {
    "module": make_own,
    "mlp": make_mlp,
    "dropout": make_with_dropout,
    "tree": make_tree,
}


def filter_trained(model):
    """What Equinox says is trained; in a plain tree, a Python float is trained, too."""
    numbers = float if isinstance(model, dict) else ()
    return eqx.filter(model, lambda x: eqx.is_inexact_array(x) or isinstance(x, numbers))


def train_by_equinox(model, tx, steps):
    """The loop of Equinox's own documentation."""
    opt_state = tx.init(filter_trained(model))

    @eqx.filter_jit
    def step(model, opt_state):
        trained = filter_trained(model)
        is_none = functools.partial(operator.is_, None)
        rest = jax.tree.map(
            lambda own, leaf: leaf if own is None else None, trained, model, is_leaf=is_none
        )
        loss, grads = jax.value_and_grad(lambda own: loss_fn(eqx.combine(own, rest), BATCH))(
            trained
        )
        updates, opt_state = tx.update(grads, opt_state, trained)
        return eqx.combine(optax.apply_updates(trained, updates), rest), opt_state, loss

    losses = []
    for _ in range(steps):
        model, opt_state, loss = step(model, opt_state)
        losses.append(loss)
    return model, losses


def is_number(leaf):
    return isinstance(leaf, jax.Array | np.ndarray | float) and not jnp.issubdtype(
        jnp.result_type(leaf), jax.dtypes.prng_key
    )


def assert_same(found, expected, check):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if is_number(other):
            check(np.asarray(own), np.asarray(other))
        elif not isinstance(other, jax.Array):
            assert own == other  # the same function, setting or name


equal = np.testing.assert_array_equal
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
TX = optax.adam(1e-2)


@pytest.mark.slow_but("module")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_options_is_equinox_with_optax_bit_for_bit(name):
    model = MODELS[name]()
    step = ampx.train_step(loss_fn, TX)
    state, jitted = step.init(model), eqx.filter_jit(step)
    losses = []
    for _ in range(3):
        state, report = jitted(state, BATCH)
        losses.append(report.loss)
    expected, expected_losses = train_by_equinox(model, TX, 3)
    assert_same(state.params, expected, equal)
    assert losses == expected_losses and losses[2] < losses[0]


WRAPPERS = {
    "none": lambda tx: tx,
    "dynamic_loss_scale": ampx.dynamic_loss_scale,
    "no_loss_scale": ampx.no_loss_scale,
    "multi_steps": lambda tx: ampx.multi_steps(tx, 1),
    "master_weights": ampx.master_weights,
    "split_masters": ampx.fused.split_masters,
    "stochastic_rounding": ampx.fused.stochastic_rounding,
}


@pytest.mark.slow_but("mlp-dynamic_loss_scale")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["module", "mlp", "dropout"])
def test_updates_take_the_whole_module_for_its_trained_part(name, wrapper):
    model = jax.tree.map(lambda x: jnp.asarray(x) if hasattr(x, "dtype") else x, MODELS[name]())
    model = ampx.cast_floating(model, "bf16")
    trained = filter_trained(model)
    tx = WRAPPERS[wrapper](ampx.fused.adamw(1e-2))
    state = tx.init(trained)
    grads = jax.tree.map(jnp.sin, trained)  # None where nothing is trained, as of any gradient
    expected, _ = tx.update(grads, state, trained)
    updates, _ = tx.update(grads, state, model)
    assert_same(updates, expected, equal)
    if wrapper != "multi_steps":  # of which fused.apply takes none
        applied, _, report = ampx.fused.apply(tx, grads, state, model, half_dtype="fp16")
        alone, _, _ = ampx.fused.apply(tx, grads, state, trained)
        assert_same(filter_trained(applied), alone, equal)
        assert jax.tree.structure(applied) == jax.tree.structure(model)
        assert jax.tree.structure(report.half_params) == jax.tree.structure(model)


OPTIONS = {
    "scaled": dict(loss_scale="dynamic"),
    "accumulated": dict(num_microbatches=4, loss_scale=8.0),
    "clipped": dict(max_grad_norm=1e6, local_norm=True),
}


@pytest.mark.slow_but("module-scaled")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["module", "tree"])
def test_scales_and_micro_batches_change_nothing_but_rounding(name, options):
    model = MODELS[name]()
    step = ampx.train_step(loss_fn, TX, **OPTIONS[options])
    state, jitted = step.init(model), eqx.filter_jit(step)
    for _ in range(2):
        state, report = jitted(state, BATCH)
    expected, _ = train_by_equinox(model, TX, 2)
    assert_same(state.params, expected, close)
    assert int(state.step) == 2 and not report.overflow


@pytest.mark.slow_but("module")
@pytest.mark.parametrize("name", ["module", "tree"])
def test_a_skipped_step_changes_nothing(name):
    model = MODELS[name]()
    step = ampx.train_step(loss_fn, TX, loss_scale="dynamic")
    state = step.init(model)
    bad = {**BATCH, "x": np.full_like(BATCH["x"], np.inf)}
    new, report = eqx.filter_jit(step)(state, bad)
    assert report.overflow
    assert_same(new.params, state.params, equal)


@pytest.mark.whole_but(
    "module-fused",
    "tree-masters",
    "module-split_masters",
    "tree-multi_steps",
    "tree-lbfgs",
    "tree-inject",
    "tree-fused",
)
@pytest.mark.slow_but("tree-masters")
@pytest.mark.parametrize(
    "tx",
    [
        ampx.fused.adamw(1e-2),
        ampx.master_weights(optax.sgd(0.1)),
        ampx.fused.split_masters(ampx.fused.adam(1e-2)),
        ampx.multi_steps(optax.sgd(0.1), 2),
        optax.lbfgs(),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    ],
    ids=["fused", "masters", "split_masters", "multi_steps", "lbfgs", "inject"],
)
@pytest.mark.parametrize("name", ["module", "tree"])
def test_every_optimizer_sees_floating_arrays_alone(name, tx):
    step = ampx.train_step(loss_fn, tx, loss_scale=1.0)
    state, jitted = step.init(MODELS[name]()), eqx.filter_jit(step)
    first = state.params
    with jax.numpy_dtype_promotion("standard"):  # lbfgs of optax
        for _ in range(2):
            state, report = jitted(state, BATCH)
    assert jax.tree.structure(state.params) == jax.tree.structure(first)
    old, new = filter_trained(first), filter_trained(state.params)
    moved = [np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)]
    assert all(moved) and moved


@pytest.mark.whole_but("bfloat16-O1", "float16-O2", "bfloat16-O3")
@pytest.mark.filterwarnings("ignore:parameters are stored in .* without masters")
@pytest.mark.slow_but("float16-O2")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_opt_levels_cast_floating_arrays_alone(level, half):
    def loss_fn(model, batch):  # in plain JAX code, inputs are cast where the model is called
        x = batch["x"].astype(model.weight.dtype)
        found = jax.vmap(model)(x).astype(jnp.float32)
        return jnp.mean((found - batch["y"]) ** 2)

    model = make_own()
    recipe = ampx.opt_level(level, half_dtype=half, loss_scale=8.0)
    step = ampx.train_step(loss_fn, optax.sgd(0.5), policy=recipe)
    state = step.init(model)
    assert state.params.weight.dtype == (half if level == "O3" else np.float32)
    assert state.params.order.dtype == np.int32 and state.params.rate == 0.5
    new, report = eqx.filter_jit(step)(state, BATCH)
    exact, _ = train_by_equinox(model, optax.sgd(0.5), 1)
    assert new.params.weight.dtype == state.params.weight.dtype
    # The step is 0.5 times a gradient of about 0.1; half rounds it, and O3 the weight itself.
    error = np.max(np.abs(np.asarray(new.params.weight, np.float32) - exact.weight))
    assert error < 8 * float(jnp.finfo(half).eps) and not report.overflow


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_gradient_of_what_is_not_trained_is_none(name, num_microbatches):
    model = MODELS[name]()
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=num_microbatches)
    grads = jax.eval_shape(lambda batch: grads_of(model, batch, loss_scale=4.0).grads, BATCH)
    assert jax.tree.structure(grads) == jax.tree.structure(filter_trained(model))


def test_a_plain_tree_of_numbers_is_trained_whole():
    params = {"weight": 2.0, "bias": np.float32(1.0)}
    grads_of = ampx.value_and_grad(lambda p, x: jnp.mean(p["weight"] * x + p["bias"]))
    grads = grads_of(params, np.ones(4, np.float32)).grads
    assert {name: float(g) for name, g in grads.items()} == {"weight": 1.0, "bias": 1.0}


def test_updates_of_none_leave_a_leaf_as_it_is():
    model = jax.tree.map(lambda x: x, make_own())
    updates = jax.tree.map(jnp.ones_like, filter_trained(model))
    found = ampx.apply_updates(model, updates)
    expected = eqx.apply_updates(model, updates)
    assert_same(found, expected, equal)
    with pytest.raises(ValueError, match="the update at 'weight' has shape"):
        ampx.apply_updates(model, eqx.tree_at(lambda u: u.weight, updates, jnp.ones(2)))


@pytest.mark.slow
def test_jit_of_a_tree_of_arrays_alone_and_a_scan():
    """Integers among parameters need no filter: such a state is made of arrays."""
    params = {"weight": draw(4, 4), "order": np.array([1, 0, 3, 2], np.int32), "count": 3}

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["weight"])[:, params["order"]] ** 2)

    step = ampx.train_step(loss_fn, TX, loss_scale="dynamic")
    state = step.init(params)
    batches = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    final, reports = jax.jit(lambda s: jax.lax.scan(step, s, batches), donate_argnums=0)(state)
    assert int(final.step) == 2 and reports.loss[1] < reports.loss[0]
    assert int(final.params["count"]) == 3 and final.params["order"].tolist() == [1, 0, 3, 2]


def test_numbers_of_a_module_under_jax_jit_are_refused_with_the_way_out():
    class Scale(eqx.Module):
        weight: jax.Array
        rate: float

    step = ampx.train_step(lambda m, x: jnp.mean(m.weight * m.rate * x), TX)
    state = step.init(Scale(jnp.ones(4), 0.5))
    with pytest.raises(ValueError, match="use equinox.filter_jit"):
        jax.jit(step)(state, np.ones((4, 4), np.float32))


@pytest.mark.slow
def test_a_checkpoint_of_equinox_goes_on(tmp_path):
    step = ampx.train_step(loss_fn, TX, loss_scale="dynamic")
    jitted = eqx.filter_jit(step)
    state, _ = jitted(step.init(make_own()), BATCH)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    again = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", step.init(make_own()))
    for one, other in zip(
        *(jax.tree.leaves(jitted(s, BATCH)[0]) for s in (state, again)), strict=True
    ):
        assert one is other or np.array_equal(one, other)


@pytest.mark.slow
def test_statistics_of_equinox_are_a_model_state():
    model, statistics = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")

    def loss_fn(model, batch, model_state):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        found, model_state = run(batch["x"], model_state)
        return jnp.mean((found - batch["y"]) ** 2), model_state

    step = ampx.train_step(loss_fn, TX, num_microbatches=2)
    state = step.init(model, model_state=statistics)
    with jax.numpy_dtype_promotion("standard"):
        new, _ = eqx.filter_jit(step)(state, BATCH)
    before, after = (jax.tree.leaves(s.model_state) for s in (state, new))
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_diagnostics_take_a_module():
    model = make_own()
    assert ampx.numerics_report(loss_fn)(model, BATCH).is_finite
    assert not ampx.trace_overflow(loss_fn)(model, BATCH)


def test_a_state_is_carried_over_to_a_module_with_more_layers():
    step = ampx.train_step(loss_fn, TX, loss_scale="dynamic")
    state = step.init(make_mlp())
    grown = eqx.tree_at(lambda m: m.activation, make_mlp(), jnp.tanh)
    extended = ampx.extend_state(step.tx, state.opt_state, grown)
    expected = step.init(grown).opt_state
    assert jax.tree.structure(extended) == jax.tree.structure(expected)


@pytest.mark.parametrize("make_model", [make_mlp, make_own])
@pytest.mark.parametrize(
    "wrap",
    [
        functools.partial(ampx.dynamic_loss_scale, init_scale=8.0),
        functools.partial(ampx.static_loss_scale, scale=8.0),
    ],
    ids=["dynamic", "static"],
)
def test_a_step_of_your_own_may_hand_the_whole_module_to_the_optimizer(wrap, make_model):
    """As the loops in Equinox's documentation do; its gradients are None for what is no array."""

    def train(tx, scale):
        @eqx.filter_jit
        def step(model, state):
            grads = eqx.filter_grad(lambda model: scale * loss_fn(model, BATCH))(model)
            updates, state = tx.update(grads, state, model)
            return eqx.apply_updates(model, updates), state

        model = make_model()
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        for _ in range(2):
            model, state = step(model, state)
        return eqx.filter(model, eqx.is_inexact_array)

    plain = optax.adamw(0.1)
    ours, theirs = train(wrap(plain), 8.0), train(plain, 1.0)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# --- what looks into a program --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "module", "tree"])
def test_a_step_that_returns_such_leaves_can_be_looked_into(name):
    step = ampx.train_step(loss_fn, TX, loss_scale="dynamic")
    state = step.init(MODELS[name]())
    for of_step in (step, eqx.filter_jit(step)):
        found = [finding.check for finding in ampx.lint_step(of_step)(state, BATCH).findings]
        # The noise of a key among the parameters is the same in each step.
        assert found == ["random_key"] * (name == "tree")
        assert "finite" in str(ampx.trace_overflow(of_step)(state, BATCH))
        bad = {**BATCH, "x": np.full_like(BATCH["x"], np.inf)}
        assert "batch/x" in str(ampx.trace_overflow(of_step)(state, bad))
    with pytest.raises(ValueError, match="nothing to overlap"):  # and not of its leaves
        check_overlap(step, state, BATCH)


@pytest.mark.parametrize("name", ["mlp", "module", "tree"])
def test_autocast_returns_such_leaves_as_they_are(name):
    model = MODELS[name]()
    same, loss = ampx.autocast(lambda m, batch: (m, loss_fn(m, batch)))(model, BATCH)
    assert jax.tree.structure(same) == jax.tree.structure(model)
    for found, own in zip(jax.tree.leaves(same), jax.tree.leaves(model), strict=True):
        if not eqx.is_array_like(own):
            assert found is own
    assert loss.shape == ()
