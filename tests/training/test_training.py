"""ampx.training.train_step: the whole step is plain optax at float32, and reports what it did."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from helpers import assert_bit_equal, make_mesh, types_of

import ampx
from ampx.training import step_reports
from ampx.updates.clipping import clipped

STEPS = 50


def data(steps=STEPS, rows=8):
    rng = np.random.default_rng(0)
    params = {"dense": {"kernel": rng.normal(size=(6, 5)), "bias": rng.normal(size=(5,))}}
    params["head"] = {"kernel": rng.normal(size=(5, 1))}
    batches = {"x": rng.normal(size=(steps, rows, 6)), "y": rng.normal(size=(steps, rows))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batches))


def rows_of(batches, i):
    return jax.tree.map(lambda x: x[i], batches)


def loss_fn(params, batch):
    kernel = params["dense"]["kernel"]
    hidden = jnp.tanh(batch["x"].astype(kernel.dtype) @ kernel + params["dense"]["bias"])
    out = (hidden @ params["head"]["kernel"])[:, 0].astype(jnp.float32)
    return jnp.mean((out - batch["y"]) ** 2)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.05, warmup_steps=10, decay_steps=STEPS)


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))


# --- equivalence with plain optax and flax -------------------------------------------------------


def optax_run(tx, params, batches, steps=STEPS):
    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for i in range(steps):
        params, opt_state, loss = step(params, opt_state, rows_of(batches, i))
        losses.append(loss)
    return params, opt_state, losses


def ampx_run(step, state, batches, steps=STEPS):
    jitted, reports = jax.jit(step), []
    for i in range(steps):
        state, report = jitted(state, rows_of(batches, i))
        reports.append(report)
    return state, reports


def test_plain_pytree_is_bit_equal_to_optax():
    params, batches = data()
    expected_params, expected_opt_state, losses = optax_run(adamw(), params, batches)
    step = ampx.train_step(loss_fn, adamw(), learning_rate=SCHEDULE)
    state, reports = ampx_run(step, step.init(params), batches)
    chex.assert_trees_all_equal(state.params, expected_params)
    chex.assert_trees_all_equal(state.opt_state, expected_opt_state)
    chex.assert_trees_all_equal([r.loss for r in reports], losses)
    assert int(state.step) == STEPS
    # Reported by another program than the one that compares, hence the tolerance.
    rates = [SCHEDULE(i) for i in range(STEPS)]
    np.testing.assert_allclose([r.learning_rate for r in reports], rates, rtol=1e-5)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.LayerNorm()(nn.Dense(5)(x))))[:, 0]


def linen_loss(params, batch):
    return jnp.mean((Net().apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def linen_params():
    return Net().init(jax.random.key(0), jnp.ones((1, 6)))["params"]


def linen_state(tx):
    return train_state.TrainState.create(apply_fn=Net().apply, params=linen_params(), tx=tx)


@pytest.mark.slow
def test_linen_is_bit_equal_to_flax():
    _, batches = data()

    @jax.jit
    def flax_step(state, batch):
        return state.apply_gradients(grads=jax.grad(linen_loss)(state.params, batch))

    expected = linen_state(adamw())
    for i in range(STEPS):
        expected = flax_step(expected, rows_of(batches, i))
    step = ampx.train_step(linen_loss, adamw())
    state, _ = ampx_run(step, linen_state(step.tx), batches)
    assert isinstance(state, train_state.TrainState)
    chex.assert_trees_all_equal(state.params, expected.params)
    chex.assert_trees_all_equal(state.opt_state, expected.opt_state)
    assert int(state.step) == int(expected.step) == STEPS


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 5, rngs=rngs)
        self.head = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.dense(x)))[:, 0]


def nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def nnx_pair(tx):
    model = NnxNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_nnx_is_bit_equal_to_flax():
    _, batches = data()

    @nnx.jit
    def flax_step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(nnx_loss)(model, batch))

    model, optimizer = nnx_pair(adamw())
    for i in range(STEPS):
        flax_step(model, optimizer, rows_of(batches, i))
    step = ampx.train_step(nnx_loss, adamw())
    (new_model, new_optimizer), _ = ampx_run(step, nnx_pair(step.tx), batches)
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(new_model)), nnx.to_pure_dict(nnx.state(model))
    )
    chex.assert_trees_all_equal(
        nnx.as_pure(new_optimizer.opt_state), nnx.as_pure(optimizer.opt_state)
    )
    assert int(new_optimizer.step[...]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", ["dynamic", 128])
def test_loss_scale_changes_nothing_in_float32(loss_scale):
    """Powers of two scale exactly: bit for bit, operation by operation.

    Compiled, the branch is a program of its own, in which XLA fuses other multiplications and
    additions.
    """
    params, batches = data()
    step = ampx.train_step(loss_fn, adamw(), loss_scale=loss_scale)
    with jax.disable_jit():
        expected, _, losses = optax_run(adamw(), params, batches, steps=2)
        state, reports = ampx_run(step, step.init(params), batches, steps=2)
    chex.assert_trees_all_equal(state.params, expected)
    chex.assert_trees_all_equal([r.loss for r in reports], losses)
    expected, _, losses = optax_run(adamw(), params, batches)
    state, reports = ampx_run(step, step.init(params), batches)
    chex.assert_trees_all_close(state.params, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose([r.loss for r in reports], losses, rtol=1e-5)


@pytest.mark.slow
def test_lamb_of_the_npu_optimizer_manual():
    """A1: weight decay 0.01, betas 0.9 and 0.999, epsilon 1e-6, no decay on LayerNorm and bias."""

    def decayed(params):
        def rule(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return not re.search("LayerNorm|bias", name)

        return jax.tree_util.tree_map_with_path(rule, params)

    assert sorted(jax.tree.leaves(decayed(linen_params()))) == [False] * 4 + [True] * 2
    tx = optax.lamb(0.01, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decayed)
    _, batches = data()

    @jax.jit
    def optax_step(params, opt_state, batch):
        grads = jax.grad(linen_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected, opt_state = linen_params(), tx.init(linen_params())
    for i in range(STEPS):
        expected, opt_state = optax_step(expected, opt_state, rows_of(batches, i))
    bare = ampx.train_step(linen_loss, tx)
    state, _ = ampx_run(bare, bare.init(linen_params()), batches)
    chex.assert_trees_all_equal(state.params, expected)
    stack = ampx.train_step(
        linen_loss,
        tx,
        policy="O0",
        loss_scale="dynamic",
        max_grad_norm=1e6,
        num_microbatches=4,
        local_norm=True,
    )
    state, reports = ampx_run(stack, stack.init(linen_params()), batches)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-5, atol=1e-5)
    assert not any(r.overflow for r in reports)


# --- the report ----------------------------------------------------------------------------------

QUADRATIC = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([12.0]), "d": jnp.array([0.0, 84.0])}}


def quadratic(params, batch):
    """Its gradient is the parameters times the mean of the batch: norms 5, 12, 84 and in all 85."""
    halves = jax.tree.map(lambda p: jnp.sum(p**2) / 2, params)
    return sum(jax.tree.leaves(halves)) * jnp.mean(batch)


ONES = jnp.ones(4)


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, np.float32])
def test_numbers_may_be_those_of_any_library(kind):
    """A step can be hashed, as `jax.jit` does with what it compiles."""
    settings = [
        dict(learning_rate=kind(0.5)),
        dict(learning_rate={"a": kind(0.5), "b": 0.5}),
        dict(loss_scale=kind(128), max_grad_norm=kind(1.0)),
        dict(policy=ampx.opt_level("O0", loss_scale=kind(128))),
    ]
    for setting in settings:
        hash(ampx.train_step(quadratic, optax.sgd(0.5), **setting))


@pytest.mark.parametrize("inject", [False, True])
def test_a_parameter_may_be_called_learning_rate(inject):
    sgd = functools.partial(optax.sgd, momentum=0.9)
    tx = optax.inject_hyperparams(sgd)(0.5) if inject else sgd(0.5)
    step = ampx.train_step(lambda params, x: jnp.sum(params["learning_rate"] * x), tx)
    _, report = step(step.init({"learning_rate": jnp.ones(4)}), ONES)
    assert report.learning_rate == (0.5 if inject else None)


@pytest.mark.slow_but("None-None", "1.0-dynamic")
@pytest.mark.parametrize("loss_scale", [None, "dynamic", 128])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_report(max_grad_norm, loss_scale):
    """D5: loss, overflow, scale, rate, global norm; norms and sizes of the groups."""
    step = ampx.train_step(
        quadratic,
        optax.sgd(0.5),
        loss_scale=loss_scale,
        max_grad_norm=max_grad_norm,
        learning_rate=0.5,
        local_norm=True,
    )
    state, report = jax.jit(step)(step.init(QUADRATIC), ONES)
    assert report.loss == 85**2 / 2
    assert report.loss_scale == {None: 1.0, "dynamic": 2.0**16, 128: 128.0}[loss_scale]
    assert not report.overflow and report.overflow.dtype == bool
    assert report.learning_rate == 0.5
    assert report.global_norm == 85  # unscaled, and before clipping
    assert report.local_norm == {"a": 5.0, "b": pytest.approx(np.hypot(12, 84))}
    assert report.size == {"a": 2, "b": 3}
    assert report.aux is None
    assert report.num_buckets is None and report.reduced_bytes is None
    chex.assert_shape(jax.tree.leaves(report), ())
    factor = 0.5 if max_grad_norm is None else 0.5 / 85
    chex.assert_trees_all_close(
        state.params, jax.tree.map(lambda p: p - factor * p, QUADRATIC), rtol=1e-6
    )


def test_local_norms_of_groups_of_ones_own():
    step = ampx.train_step(
        quadratic,
        optax.sgd(0.1),
        local_norm=lambda path: "decayed" if path in ("a", "b/d") else "rest",
    )
    _, report = step(step.init(QUADRATIC), ONES)
    assert report.size == {"decayed": 4, "rest": 1}
    assert report.local_norm == {"decayed": pytest.approx(np.hypot(5, 84)), "rest": 12.0}


GROUPS = {"a": "slow", "b": {"c": "slow", "d": "fast"}}
RATES_OF = {"slow": optax.exponential_decay(0.5, 1, 0.5), "fast": 0.125}


def test_local_norms_by_the_labels_of_a_partition():
    step = ampx.train_step(quadratic, optax.sgd(0.1), local_norm=GROUPS)
    _, report = step(step.init(QUADRATIC), ONES)
    assert report.size == {"slow": 3, "fast": 2}
    assert report.local_norm == {"slow": pytest.approx(13), "fast": 84.0}
    step = ampx.train_step(quadratic, optax.sgd(0.1), local_norm={"a": "slow", "b": "fast"})
    assert step(step.init(QUADRATIC), ONES)[1].size == {"slow": 2, "fast": 3}
    step = ampx.train_step(quadratic, optax.sgd(0.1), local_norm={"a": "slow", "b": {"c": "x"}})
    with pytest.raises(ValueError, match=r"no group for the parameter 'b/d', .*\['a', 'b/c'\]"):
        step(step.init(QUADRATIC), ONES)


def grouped(make):
    return optax.partition({name: make(rate) for name, rate in RATES_OF.items()}, GROUPS)


@pytest.mark.slow_but("several optimizers")
@pytest.mark.parametrize("source", ["injected", "given", "several optimizers"])
def test_rates_are_told_by_group(source):
    """The reference is what the parameters do: SGD moves each by its rate times its gradient."""
    loss_scale, rates = "dynamic", None
    tx = grouped(optax.inject_hyperparams(optax.sgd))
    groups = GROUPS
    if source == "given":
        tx, rates = grouped(optax.sgd), RATES_OF
    if source == "several optimizers":
        rate = optax.inject_hyperparams(optax.sgd)
        groups = {"a": "a", "b": {"c": "b", "d": "b"}}
        tx, loss_scale = {"a": rate(RATES_OF["slow"]), "b": rate(RATES_OF["fast"])}, None
        tx = ampx.dynamic_loss_scale(tx)
    step = ampx.train_step(quadratic, tx, loss_scale=loss_scale, learning_rate=rates)
    state, jitted = step.init(QUADRATIC), jax.jit(step)
    for batch in (ONES, BAD, ONES):
        old = state.params
        state, report = jitted(state, batch)
        assert set(report.learning_rate) == set(jax.tree.leaves(groups))
        assert all(r.dtype == jnp.float32 and r.shape == () for r in report.learning_rate.values())
        if not report.overflow:
            rates = jax.tree.map(report.learning_rate.get, groups)
            expected = jax.tree.map(lambda p, rate: p * (1 - rate), old, rates)
            chex.assert_trees_all_close(state.params, expected, rtol=1e-6)
    assert sorted(map(float, report.learning_rate.values())) == [0.125, 0.25]


@pytest.mark.parametrize("rate", ["0.1", True, None])
def test_a_wrong_rate_of_a_group_is_named(rate):
    with pytest.raises(TypeError, match=r"learning_rate\['fast'\] must be a number"):
        ampx.train_step(quadratic, optax.sgd(0.1), learning_rate={"slow": 0.1, "fast": rate})


def test_local_norms_only_where_asked():
    step = ampx.train_step(quadratic, optax.sgd(0.1))
    _, report = step(step.init(QUADRATIC), ONES)
    assert report.local_norm is None and report.size is None and report.learning_rate is None


def test_a_call_by_the_custom_of_other_loops_is_told_of_the_state():
    """`step(params, opt_state, batch)` of optax, and `step(model, optimizer, batch)` of nnx."""
    step = ampx.train_step(nnx_loss, optax.sgd(0.1))
    model, optimizer = nnx_pair(step.tx)
    with pytest.raises(TypeError, match=r"got 3 arguments .* step\(\(model, optimizer\), batch\)"):
        nnx.jit(step)(model, optimizer, jnp.ones((2, 6)))
    with pytest.raises(TypeError, match=r"step\(step.init\(params\), batch\)"):
        jax.jit(step)({"w": jnp.ones(2)}, optax.sgd(0.1).init(jnp.ones(2)), jnp.ones((2, 2)))


def test_nnx_groups_have_plain_names():
    step = ampx.train_step(nnx_loss, optax.sgd(0.1), local_norm=True)
    _, report = jax.jit(step)(nnx_pair(step.tx), rows_of(data()[1], 0))
    assert report.size == {"dense": 35, "head": 6}


@pytest.mark.filterwarnings("ignore:parameters are stored in float16 without masters")
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_overflow_is_reported_with_a_finite_loss(num_microbatches):
    step = ampx.train_step(
        lambda w, x: jnp.sum(w * x), optax.sgd(1.0), policy="p=f16", loss_scale=2.0**20,
        num_microbatches=num_microbatches, normalize="sum",
    )  # fmt: skip
    state = step.init(jnp.array(2.0))
    new, report = jax.jit(step)(state, jnp.ones(2, jnp.float16))
    assert report.overflow and report.loss == 4 and report.loss_scale == 2**20
    assert not jnp.isfinite(report.global_norm)
    chex.assert_trees_all_equal((new.params, new.step), (state.params, 0))


def double_rate(count):
    return 0.25 * (count + 1).astype(jnp.float32)


BAD = jnp.full(4, jnp.nan)


@pytest.mark.slow_but("injected")
@pytest.mark.parametrize("source", ["schedule", "injected"])
def test_learning_rate_is_the_one_used_and_held_on_skips(source):
    if source == "schedule":
        step = ampx.train_step(
            quadratic, optax.sgd(double_rate), loss_scale="dynamic", learning_rate=double_rate
        )
    else:
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=double_rate)
        step = ampx.train_step(quadratic, tx, loss_scale="dynamic")
    state, jitted = step.init(QUADRATIC), jax.jit(step)
    rates, steps = [], []
    for batch in (ONES, ONES, BAD, ONES):
        before = state.params["a"]
        state, report = jitted(state, batch)
        rates.append(float(report.learning_rate))
        steps.append(int(state.step))
        if not report.overflow:
            np.testing.assert_allclose(state.params["a"], before * (1 - rates[-1]), atol=1e-6)
    assert [rates[0], rates[1], rates[3]] == [0.25, 0.5, 0.75]
    assert rates[2] == 0.5, "that of the last update"
    assert steps == [1, 2, 2, 3]


RATE_SOURCES = {
    "schedule": (optax.sgd(double_rate), double_rate),
    "injected": (optax.inject_hyperparams(optax.sgd)(learning_rate=double_rate), None),
    "fused": (ampx.fused.sgd(double_rate), double_rate),
    "injected, fused": (
        optax.inject_hyperparams(ampx.fused.sgd)(learning_rate=double_rate),
        None,
    ),
}


@pytest.mark.slow_but("injected-", "fused-")
@pytest.mark.parametrize("window", [None, 2], ids=["", "window"])
@pytest.mark.parametrize("source", RATE_SOURCES)
def test_the_rate_is_that_of_the_last_update_whoever_tells_it(source, window):
    tx, rate = RATE_SOURCES[source]
    if window:
        tx = ampx.multi_steps(tx, window)
    step = ampx.train_step(quadratic, tx, loss_scale="dynamic", learning_rate=rate)
    state, jitted, rates = step.init(QUADRATIC), jax.jit(step), []
    for batch in (BAD, ONES, BAD, ONES, BAD, ONES, ONES):
        before = state.params["a"]
        state, report = jitted(state, batch)
        rates.append(float(report.learning_rate))
        if not window and not report.overflow:
            np.testing.assert_allclose(state.params["a"], before * (1 - rates[-1]), atol=1e-6)
    # The scale judges each call, so bad ones are left out of the windows.
    expected = [1, 1, 1, 1, 1, 1, 2] if window else [1, 1, 1, 2, 2, 3, 4]
    assert rates == [0.25 * number for number in expected]


@pytest.mark.parametrize("num_layers", [1, 40, 2000])
def test_groups_may_have_more_elements_than_int32_can_count(num_layers):
    """B4: all stages of a pipeline are one group. Shapes alone: 41 billion numbers are not made."""
    params = {"stages": jax.ShapeDtypeStruct((num_layers, 1024, 1024), jnp.float32)}

    def loss(params, batch):
        return jnp.sum(params["stages"][:, 0, 0]) * jnp.mean(batch)

    step = ampx.train_step(loss, optax.sgd(0.1), local_norm=True)
    state = jax.eval_shape(step.init, params)
    _, report = jax.eval_shape(step, state, jnp.ones(4))
    fits = num_layers * 2**20 < 2**31
    assert report.size["stages"].dtype == (jnp.int32 if fits else jnp.float32)
    assert report.local_norm["stages"].dtype == jnp.float32


def test_large_sizes_are_right_to_seven_digits():
    sizes = [2**31 - 1, 2**31, 41_004_011_520, 10**13]
    found = [step_reports.as_size(size) for size in sizes]
    np.testing.assert_allclose([float(size) for size in found], sizes, rtol=1e-7)
    assert found[0].dtype == jnp.int32 and int(found[0]) == sizes[0]


def test_learning_rate_that_is_set_by_hand():
    step = ampx.train_step(quadratic, optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    state, _ = step(step.init(QUADRATIC), ONES)
    state.opt_state.hyperparams["learning_rate"] = jnp.array(0.125)
    _, report = step(state, ONES)
    assert report.learning_rate == 0.125


def test_max_grad_norm_equals_a_chain():
    """D2: on as an option, off by default."""
    params, batches = data()
    runs = {}
    for name, step in {
        "option": ampx.train_step(loss_fn, optax.adamw(SCHEDULE), max_grad_norm=1.0),
        "chain": ampx.train_step(loss_fn, adamw()),
        "off": ampx.train_step(loss_fn, optax.adamw(SCHEDULE)),
    }.items():
        runs[name] = ampx_run(step, step.init(params), batches, steps=20)[0].params
    chex.assert_trees_all_equal(runs["option"], runs["chain"])
    assert not np.array_equal(runs["option"]["head"]["kernel"], runs["off"]["head"]["kernel"])


@pytest.mark.slow_but("None-ampx.fused", "dynamic-optax")
@pytest.mark.parametrize("library", [optax, ampx.fused])
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_the_state_keeps_the_norm_before_the_clip(loss_scale, library):
    step = ampx.train_step(
        quadratic, library.sgd(0.1, momentum=0.9), loss_scale=loss_scale, max_grad_norm=1.0
    )

    def following(state, batch):
        new, report = step(state, batch)
        return new, (state, ampx.metrics(new.opt_state)["global_norm"], report.global_norm)

    factors = jnp.array([1.0, jnp.nan, 3.0] if loss_scale else [1.0, 2.0, 3.0])
    first = step.init(QUADRATIC)
    last, (states, kept, reported) = jax.jit(functools.partial(jax.lax.scan, following))(
        first, factors[:, None] * ONES
    )
    grads = [jax.grad(quadratic)(rows_of(states.params, i), factors[i] * ONES) for i in range(3)]
    norms = np.array([optax.tree.norm(g) for g in grads])
    np.testing.assert_allclose(reported, norms, rtol=1e-6)
    expected = np.where(np.isfinite(norms), norms, norms[0])
    np.testing.assert_allclose(kept, expected, rtol=1e-6)
    assert kept.dtype == np.float32 and ampx.metrics(first.opt_state)["global_norm"] == 0
    assert types_of(first) == types_of(last)
    if loss_scale:
        assert_bit_equal(*(rows_of(states.opt_state.inner_state, i) for i in (1, 2)))


@pytest.mark.parametrize("library", [optax, ampx.fused])
def test_the_norm_of_divided_gradients_is_that_of_all_shards(library):
    spec = jax.sharding.PartitionSpec
    params = {"divided": jnp.arange(8.0), "whole": jnp.ones(3)}
    specs = {"divided": spec("model"), "whole": spec()}
    tx = clipped(library.sgd(0.1), 1.0)
    mapped = jax.shard_map(
        lambda params: tx.update(params, tx.init(params), params)[1].gradient_norm,
        mesh=make_mesh((4,), ("model",)),
        in_specs=(specs,),
        out_specs=spec(),
    )
    np.testing.assert_allclose(jax.jit(mapped)(params), optax.tree.norm(params), rtol=1e-6)


def test_microbatches_equal_one_batch():
    params, batches = data()
    runs = []
    for k in (1, 4):
        step = ampx.train_step(loss_fn, adamw(), num_microbatches=k, local_norm=True)
        runs.append(ampx_run(step, step.init(params), batches))
    (one, one_reports), (four, four_reports) = runs
    chex.assert_trees_all_close(four.params, one.params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(four_reports, one_reports, rtol=1e-3, atol=1e-5)


def test_auxiliary_output_and_weights():
    def masked(params, batch):
        errors = (params["a"][0] * batch["x"] - 1.0) ** 2
        return (jnp.sum(errors * batch["w"]), jnp.sum(batch["w"])), {"errors": errors}

    step = ampx.train_step(
        masked, optax.sgd(0.1), num_microbatches=2, normalize="weights", has_aux=True,
        aux_reduction="concat",
    )  # fmt: skip
    batch = {"x": jnp.arange(4.0), "w": jnp.array([1.0, 1.0, 0.0, 1.0])}
    _, report = jax.jit(step)(step.init(QUADRATIC), batch)
    errors = (3.0 * np.arange(4.0) - 1) ** 2
    np.testing.assert_array_equal(report.aux["errors"], errors)
    np.testing.assert_allclose(report.loss, np.average(errors, weights=batch["w"]), rtol=1e-6)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, scale",
    [
        (None, None), ("none", None), (-1, None), ("-1", None),
        (0, 2.0**16), ("dynamic", 2.0**16), ("0", 2.0**16),
        (128, 128.0), ("128", 128.0), (1, 1.0), (np.float32(8), 8.0), (jnp.array([8.0]), 8.0),
        (functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10), 2.0**10),
    ],
)  # fmt: skip
def test_loss_scale_choices(choice, scale):
    """A7 and D3."""
    step = ampx.train_step(quadratic, optax.sgd(0.1), loss_scale=choice)
    state, report = step(step.init(QUADRATIC), ONES)
    found = ampx.find_loss_scale_state(state.opt_state)
    assert (found is None) == (scale is None)
    assert report.loss_scale == (scale or 1.0)
    assert report.loss == 85**2 / 2


@pytest.mark.parametrize(
    "choice, error, message",
    [
        (True, TypeError, "got True.*write 'dynamic' or the number"),
        (object(), TypeError, "must be None, a string or a number"),
        ("abc", ValueError, "a number >= 1.*got 'abc'"),
        ("auto", ValueError, "got 'auto'"),
        (0.5, ValueError, "a number >= 1.*got 0.5"),
        (-2, ValueError, "got -2"),
        (float("nan"), ValueError, "got nan"),
        (np.ones(2), ValueError, r"shape \(\) or \(1,\), got \(2,\)"),
        (np.ones((1, 1)), ValueError, r"got \(1, 1\)"),
    ],
)
def test_loss_scales_that_are_refused(choice, error, message):
    """A7 and D6: the same classes of error, with the value and the fix."""
    with pytest.raises(error, match=message):
        ampx.train_step(quadratic, optax.sgd(0.1), loss_scale=choice)


@pytest.mark.parametrize(
    "loss_fn, tx, options, error, message",
    [
        (
            None,
            optax.sgd(0.1),
            {},
            TypeError,
            r"loss_fn must be a function, called as loss_fn\(params, batch\), got None",
        ),
        (quadratic, None, {}, TypeError, "tx must be .*got NoneType: give the optimizer"),
        # A4: loss scaling asked for, with nothing to scale for.
        (quadratic, None, dict(loss_scale="dynamic"), TypeError, "got NoneType"),
        (quadratic, 3e-4, dict(max_grad_norm=1.0), TypeError, "got float: give the optimizer"),
        (quadratic, optax.sgd(0.1), dict(policy=2), TypeError, "policy must be"),
        (quadratic, optax.sgd(0.1), dict(policy="O9"), ValueError, "got 'O9'"),
        (quadratic, optax.sgd(0.1), dict(max_grad_norm=True), TypeError, "got True"),
        (quadratic, optax.sgd(0.1), dict(max_grad_norm="1"), TypeError, "got '1'"),
        (quadratic, optax.sgd(0.1), dict(max_grad_norm=0.0), ValueError, "got 0.0: None is off"),
        (quadratic, optax.sgd(0.1), dict(max_grad_norm=-1), ValueError, "got -1: None is off"),
        (quadratic, optax.sgd(0.1), dict(local_norm="all"), TypeError, "got 'all'"),
        (quadratic, optax.sgd(0.1), dict(num_microbatches=0), ValueError, "got 0"),
        (quadratic, optax.sgd(0.1), dict(normalize="token"), ValueError, "got 'token'"),
        (quadratic, optax.sgd(0.1), dict(remainder="mask"), ValueError, "needs normalize="),
    ],
)
def test_arguments_are_checked_when_built(loss_fn, tx, options, error, message):
    with pytest.raises(error, match=message):
        ampx.train_step(loss_fn, tx, **options)


@pytest.mark.parametrize("options", [dict(loss_scale="dynamic"), dict(policy="O2")])
def test_two_loss_scales_are_refused(options):
    step = ampx.train_step(quadratic, ampx.static_loss_scale(optax.sgd(0.1), 8.0), **options)
    with pytest.raises(ValueError, match="already has a loss scale.*wrap once"):
        step.init(QUADRATIC)


def test_clipping_around_a_loss_scale_is_refused():
    """It would clip gradients that are still scaled: nearly to zero, and in silence."""
    tx = ampx.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match="would clip scaled gradients.*clip inside it"):
        ampx.train_step(quadratic, tx, max_grad_norm=1.0).init(QUADRATIC)


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.whole_but("O0-bfloat16", "O1-float16", "O2-bfloat16", "O3-float16", "O2-float16")
@pytest.mark.filterwarnings("ignore:parameters are stored in .* without masters")
@pytest.mark.slow_but("O1-float16")
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_trains(level, half):
    params, batches = data(rows=32)
    step = ampx.train_step(
        loss_fn, optax.sgd(0.02), policy=ampx.opt_level(level, half_dtype=half), max_grad_norm=1.0
    )
    state = step.init(params)
    stored = {p.dtype for p in jax.tree.leaves(state.params)}
    assert stored == {jnp.dtype(half if level == "O3" else jnp.float32)}
    jitted, batch, losses = jax.jit(step), rows_of(batches, 0), []
    for _ in range(40):
        state, report = jitted(state, batch)
        losses.append(float(report.loss))
    assert {p.dtype for p in jax.tree.leaves(state.params)} == stored
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.whole_but("float16-2", "bfloat16-1")
@pytest.mark.slow_but("float16-2")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_an_o1_step_is_its_parts_put_together(half, num_microbatches):
    params, batches = data(rows=32)
    recipe = ampx.opt_level("O1", half_dtype=half, loss_scale=256.0)
    step = ampx.train_step(loss_fn, adamw(), policy=recipe, num_microbatches=num_microbatches)
    state, reports = ampx_run(step, step.init(params), batches)
    cast = ampx.autocast(loss_fn, half_dtype=half)
    tx = adamw()

    @jax.jit
    def by_hand(params, opt_state, batch):
        slices = ampx.split_microbatches(batch, num_microbatches)
        grads = optax.tree.zeros_like(params)
        for i in range(num_microbatches):
            part = jax.tree.map(lambda rows, i=i: rows[i], slices)
            scaled = jax.grad(lambda p, part=part: 256.0 * cast(p, part))(params)
            grads = optax.tree.add(grads, optax.tree.scale(1 / (256.0 * num_microbatches), scaled))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    expected = params
    for i in range(STEPS):
        expected, opt_state = by_hand(expected, opt_state, rows_of(batches, i))
    plain = ampx.train_step(loss_fn, adamw(), num_microbatches=num_microbatches)
    exact, _ = ampx_run(plain, plain.init(params), batches)
    assert all(report.loss.dtype == jnp.float32 for report in reports)

    def distance(other):
        return optax.tree.norm(optax.tree.sub(state.params, other))

    # The compiler may fuse the two otherwise, and round elsewhere; precision differs by far more.
    assert 5 * distance(expected) < distance(exact.params)


@pytest.mark.slow
def test_an_nnx_model_with_statistics_trains_at_o1():
    class Normed(NnxNet):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(5, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.tanh(self.norm(self.dense(x))))[:, 0]

    _, batches = data(rows=32)
    step = ampx.train_step(nnx_loss, adamw(), policy="O1")
    model = Normed(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
    (model, _), reports = ampx_run(step, (model, optimizer), batches)
    assert np.any(model.norm.mean[...] != 0) and model.norm.mean[...].dtype == jnp.float32
    assert reports[-1].loss < reports[0].loss


@pytest.mark.filterwarnings("ignore:float16 without a loss scale", "ignore:parameters are stored")
def test_half_moments_stay_half_without_a_loss_scale():
    policy = ampx.opt_level("O3", half_dtype=jnp.float16, loss_scale=None)
    tree = ampx.train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.adam(1e-3), policy=policy)
    module = ampx.train_step(lambda m, x: jnp.mean(m(x) ** 2), optax.adam(1e-3))
    linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0), param_dtype=jnp.float16)
    states = {
        tree: tree.init(jnp.ones(3)),
        module: (linear, nnx.Optimizer(linear, module.tx, wrt=nnx.Param)),
    }
    for step, state in states.items():
        jitted = jax.jit(step)
        # optax itself mixes float32 gradients and half moments.
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(2):
                before = jax.tree.leaves(types_of(state))
                state, _ = jitted(state, jnp.ones((2, 3), jnp.float16))
                assert jax.tree.leaves(types_of(state)) == before
        assert jitted._cache_size() == 1


@pytest.mark.slow
def test_float16_recovers_from_a_scale_that_starts_too_high():
    params, batches = data()
    step = ampx.train_step(
        loss_fn,
        optax.adam(0.01),
        policy=ampx.opt_level("O2", half_dtype=jnp.float16),
        loss_scale=functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**24),
    )
    state, reports = ampx_run(step, step.init(params), batches)
    good = [i for i, r in enumerate(reports) if not r.overflow]
    skips = STEPS - len(good)
    assert 2 <= good[0] and good[-20:] == list(range(STEPS - 20, STEPS))
    assert reports[-1].loss_scale == 2.0 ** (24 - skips)
    assert int(state.step) == len(good)
    assert all(jnp.isfinite(r.loss) for r in reports)
    # As float32 does on the steps that were not skipped.
    plain = ampx.train_step(loss_fn, optax.adam(0.01))
    kept = jax.tree.map(lambda x: x[jnp.array(good)], batches)
    expected, _ = ampx_run(plain, plain.init(params), kept, steps=len(good))
    chex.assert_trees_all_close(state.params, expected.params, rtol=0.02, atol=0.02)


# --- composition ---------------------------------------------------------------------------------


def test_scan_over_steps_equals_a_loop():
    params, batches = data(steps=6)
    step = ampx.train_step(
        loss_fn, adamw(), loss_scale="dynamic", num_microbatches=2, learning_rate=SCHEDULE
    )
    looped, reports = ampx_run(step, step.init(params), batches, steps=6)
    scanned, stacked = jax.jit(functools.partial(jax.lax.scan, step))(step.init(params), batches)
    chex.assert_trees_all_close(scanned, looped, rtol=1e-6, atol=1e-7)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *reports)
    chex.assert_trees_all_close(stacked, expected, rtol=1e-5, atol=1e-7)


def test_settings_are_readable():
    tx = optax.sgd(0.1)
    step = ampx.train_step(quadratic, tx, policy="O2", learning_rate=0.1)
    assert step.recipe.level == "O2" and step.learning_rate == 0.1
    assert hasattr(step.tx, "update") and "TrainStep" in repr(step)


# --- devices -------------------------------------------------------------------------------------


# Half of all combinations, in which any three of the four options meet in all ways.
SHARDED = [
    case
    for case in itertools.product([None, "O1"], [1, 2], [True, False], [None, "dynamic"])
    if sum((case[0] is None, case[1] == 1, case[2], case[3] is None)) % 2 == 0
]


@pytest.mark.sampled(2)
@pytest.mark.slow_but("O1-1-True-dynamic")
@pytest.mark.parametrize("level, num_microbatches, check_vma, loss_scale", SHARDED, ids=str)
def test_shard_map_step_equals_one_device(level, num_microbatches, check_vma, loss_scale):
    policy = level and ampx.opt_level(level, loss_scale=None)
    params, batches = data(rows=32)
    batch = rows_of(batches, 0)
    options = dict(
        loss_scale=loss_scale, max_grad_norm=0.5, num_microbatches=num_microbatches, policy=policy
    )
    alone = ampx.train_step(loss_fn, optax.adamw(0.01), **options)
    step = ampx.train_step(loss_fn, optax.adamw(0.01), axis_name="data", bucket_bytes=64, **options)
    spec = jax.sharding.PartitionSpec
    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=make_mesh((4,), ("data",)),
            in_specs=(spec(), spec("data")),
            out_specs=spec(),
            check_vma=check_vma,
        )
    )
    expected, state = alone.init(params), step.init(params)
    for _ in range(3):
        expected, expected_report = jax.jit(alone)(expected, batch)
        state, report = sharded(state, batch)
    tolerance = dict(rtol=1e-5, atol=1e-6) if policy is None else dict(rtol=2e-2, atol=2e-3)
    chex.assert_trees_all_close(state, expected, **tolerance)
    layout = ampx.bucket_layout(params, bucket_bytes=64)
    assert report.num_buckets == len(layout.buckets) > 1
    assert report.reduced_bytes == 4 * sum(bucket.size for bucket in layout.buckets)
    report = report._replace(num_buckets=None, reduced_bytes=None)
    chex.assert_trees_all_close(report, expected_report, **tolerance)


def test_one_device_with_an_overflow_skips_all():
    step = ampx.train_step(
        lambda w, x: jnp.mean(w * x), optax.sgd(0.1), loss_scale="dynamic", axis_name="data"
    )
    spec = jax.sharding.PartitionSpec
    sharded = jax.shard_map(
        step,
        mesh=make_mesh((4,), ("data",)),
        in_specs=(spec(), spec("data")),
        out_specs=spec(),
    )
    state, report = jax.jit(sharded)(step.init(jnp.ones(())), jnp.ones(8).at[3].set(jnp.inf))
    assert report.overflow and float(state.params) == 1.0
    assert float(ampx.current_loss_scale(state.opt_state)) == 2.0**15


def test_a_loss_scale_around_a_part_is_refused():
    scaled = ampx.dynamic_loss_scale(optax.sgd(1.0))
    for tx in (
        optax.partition({"a": scaled, "b": optax.sgd(1.0)}, {"a": "a", "b": "b"}),
        optax.chain(optax.clip_by_global_norm(1.0), scaled),
    ):
        step = ampx.train_step(lambda p, x: jnp.sum((p["a"] + p["b"]) * x), tx)
        state = step.init({"a": jnp.zeros(()), "b": jnp.zeros(())})
        with pytest.raises(ValueError, match="around the whole optimizer"):
            step(state, jnp.ones(2))
