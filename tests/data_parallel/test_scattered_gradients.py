"""ZeRO-2: gradients that are scattered after each micro-batch, held against the undivided step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx.jaxprs import reading

RANDOM = np.random.default_rng(0)
PARAMS = {
    "in": RANDOM.normal(size=(6, 8)).astype(np.float32),
    "out": RANDOM.normal(size=(8, 4)).astype(np.float32),
    "bias": np.zeros(3, np.float32),  # no number of devices divides it
}
DIVIDED = {"in": P(None, "model"), "out": P("model"), "bias": P()}
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "masters": ampx.master_weights(optax.adamw(1e-2)),
}
MICROBATCHES = 2


def make_batch(step):
    """Rows of unequal weights; in the second step the gradient of one hidden unit overflows."""
    random = np.random.default_rng(step)
    x, y = (random.normal(size=(16, n)).astype(np.float32) for n in (6, 4))
    spike = np.zeros((16, 8), np.float32)
    spike[5, 7] = 1e35 if step == 1 else 0
    return x, y, random.integers(0, 4, 16).astype(np.float32), spike


BATCHES = [make_batch(step) for step in range(3)]


def loss_fn(params, batch, add=lambda x: x):
    """`add` sums over the devices that divide the hidden units."""
    x, y, weights, spike = batch
    out = add(jnp.tanh(x @ params["in"]) @ params["out"])
    errors = jnp.sum((out - y) ** 2, 1) + jnp.sum(params["bias"] + params["bias"] ** 2)
    spiked = add(jnp.sum(spike * params["in"][0]))
    return jnp.sum(weights * errors) + spiked, jnp.sum(weights)


OPTIONS = dict(loss_scale="dynamic", num_microbatches=MICROBATCHES, normalize="weights")


def take_all(steps, states, batch):
    results = {name: step(states[name], batch) for name, step in steps.items()}
    return {name: r[0] for name, r in results.items()}, {name: r[1] for name, r in results.items()}


def on_mesh(names, check_vma=True, model=1, **options):
    """A program that takes the steps of some optimizers, and their first states."""
    mesh = make_mesh((2, model) if model > 1 else (4,), ("data", "model")[: 1 + (model > 1)])
    of_params = DIVIDED if model > 1 else dict.fromkeys(PARAMS, P())

    def add(x):  # unchecked, the transpose of a psum is a psum, which would count twice
        if check_vma or model == 1:
            return jax.lax.psum(x, "model") if model > 1 else x
        return x + jax.lax.stop_gradient(jax.lax.psum(x, "model") - x)

    steps, specs = {}, {}
    for name in names:
        step = ampx.train_step(
            functools.partial(loss_fn, add=add),
            ampx.zero1(OPTIMIZERS[name], "data"),
            axis_name="data",
            model_axes=None if check_vma or model == 1 else DIVIDED,
            **OPTIONS | {"scatter_gradients": True} | options,
        )
        model_axes = DIVIDED if model > 1 else None
        of_state = ampx.zero1_specs(step.tx, PARAMS, mesh, model_axes=model_axes)
        steps[name], specs[name] = step, ampx.TrainState(P(), of_params, of_state, None, None)
    rows = P("data", "model") if model > 1 else P("data")
    take = jax.shard_map(
        functools.partial(take_all, steps),
        mesh=mesh,
        in_specs=(specs, (P("data"), P("data"), P("data"), rows)),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    return take, {name: step.init(PARAMS) for name, step in steps.items()}


def run(take, states):
    history = []
    for batch in BATCHES:
        states, reports = take(states, batch)
        history.append((states, reports))
    return history


@functools.cache
def undivided(names):
    steps = {name: ampx.train_step(loss_fn, OPTIMIZERS[name], **OPTIONS) for name in names}
    states = {name: step.init(PARAMS) for name, step in steps.items()}
    return run(jax.jit(functools.partial(take_all, steps)), states)


@pytest.mark.slow_but("one optimizer")
@pytest.mark.parametrize(
    ("names", "check_vma", "model"),
    [
        pytest.param(("adamw",), True, 1, id="one optimizer"),
        pytest.param(tuple(OPTIMIZERS), True, 2, id="all, model"),
        pytest.param(("lamb", "masters"), False, 2, id="two, model, no vma"),
    ],
)
def test_steps_are_those_of_one_device_and_a_skip_changes_nothing(names, check_vma, model):
    take, states = on_mesh(names, check_vma, model)
    history, before = run(jax.jit(take), states), None
    for step, found in enumerate(zip(history, undivided(names), strict=True)):
        (states, reports), (expected, expected_reports) = found
        for name in names:
            ours, theirs = reports[name], expected_reports[name]
            assert ours.overflow == theirs.overflow == (step == 1)
            assert ours.loss_scale == theirs.loss_scale
            np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
            if step == 1:
                assert_bit_equal(states[name].params, before[name].params)
                inner, old = (s[name].opt_state.inner_state for s in (states, before))
                assert_bit_equal(inner, old)
                for leaf in jax.tree.leaves((states[name].params, states[name].opt_state[0])):
                    whole = [shard.data for shard in leaf.addressable_shards if not leaf.ndim]
                    assert len({float(data) for data in whole}) <= 1, "all devices skip"
            else:
                np.testing.assert_allclose(ours.global_norm, theirs.global_norm, rtol=1e-5)
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
            jax.tree.map(close, states[name].params, expected[name].params)
            inner = states[name].opt_state.inner_state.inner_state
            jax.tree.map(close, inner, expected[name].opt_state.inner_state)
            # One bucket with two matrices for each micro-batch, and the bias once.
            sizes = [leaf.size // model * 4 for leaf in (PARAMS["in"], PARAMS["out"])]
            assert ours.num_buckets == MICROBATCHES + 1
            assert ours.reduced_bytes == MICROBATCHES * sum(sizes) + 3 * 4
        before = states


def carries_of(jaxpr):
    """The shapes of what loops carry from one turn to the next, in a program and all inside."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            _, carry, _ = reading.split_scan(eqn, eqn.invars)
            yield [v.aval.shape for v in carry]
        for inner in reading.inner_jaxprs(eqn):
            yield from carries_of(reading.open_jaxpr(inner))


def test_micro_batches_add_up_shards():
    for scattered, factor in ((True, 4), (False, 1)):
        take, states = on_mesh(["adamw"], scatter_gradients=scattered)
        (carried,) = carries_of(jax.make_jaxpr(take)(states, BATCHES[0]).jaxpr)
        assert sum(map(np.prod, carried)) == (6 * 8 + 8 * 4) / factor + 3


@pytest.mark.slow
def test_gradients_are_never_held_whole():
    """Beside the updates, which are gathered whole, there are shards and one bucket."""
    width, layers, devices = 64, 6, 4
    params = {str(i): np.ones((width, width), np.float32) for i in range(layers)}
    mesh, size = make_mesh((devices,), ("data",)), layers * width * width * 4
    buckets = dict(bucket_bytes=4 * width**2 // devices)  # one for each layer

    def loss(params, x):
        for weights in params.values():
            x = jnp.tanh(x @ weights)
        return jnp.mean(x)

    def temporaries(scattered, microbatches):
        """The bytes of temporary arrays of the compiled step, over those of the parameters."""
        step = ampx.train_step(
            loss,
            ampx.zero1(optax.adamw(1e-3), "data", **buckets),
            axis_name="data",
            loss_scale="dynamic",
            num_microbatches=microbatches,
            scatter_gradients=scattered,
            **buckets,
        )
        of_state = ampx.zero1_specs(step.tx, params, mesh)
        specs = ampx.TrainState(P(), P(), of_state, None, None)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
        state = jax.eval_shape(step.init, params)
        batch = jax.ShapeDtypeStruct((devices * microbatches, width), jnp.float32)
        compiled = jax.jit(mapped, donate_argnums=0).lower(state, batch).compile()
        scatters = compiled.as_text().count(" reduce-scatter(")
        assert scatters == layers, "one for each bucket, in a loop over micro-batches"
        return compiled.memory_analysis().temp_size_in_bytes / size

    assert temporaries(False, 4) > 2, "gradients and updates"
    for microbatches in (1, 4):
        assert temporaries(True, microbatches) < 1 + 1 / devices + 1.5 / layers


# What is refused. Nothing is compiled for it.


def by_hand(tx, zero=None, **options):
    """Traces an update of gradients that were scattered."""
    mesh = make_mesh((4,), ("data",))
    params = {"w": jnp.ones((8, 4))}
    options = dict(axis_name="data", scatter_gradients=True) | options
    grads_of = ampx.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), **options)
    specs = ampx.zero1_specs(zero, params, mesh) if zero else P()

    def step(params, state, x):
        updates, _ = tx.update(grads_of(params, x).grads, state, params)
        return updates

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=P(), check_vma=False
    )
    return jax.eval_shape(mapped, params, tx.init(params), jnp.ones((8, 8)))


OTHERS = {
    "dynamic_loss_scale": ampx.dynamic_loss_scale(optax.sgd(0.1), axis_names="data"),
    "all_reduce": ampx.all_reduce("data"),
    "clip_by_bucket_norm": ampx.clip_by_bucket_norm(1.0),
    "fused": ampx.fused.sgd(0.1),
    "master_weights": ampx.master_weights(optax.sgd(0.1)),
    "multi_steps": ampx.multi_steps(optax.sgd(0.1), 2),
    "multi_steps of zero1": ampx.multi_steps(
        ampx.zero1(optax.sgd(0.1), "data"), 2, axis_names="data"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_zero1_takes_shards(name):
    zero = OTHERS[name] if "zero1" in name else None
    with pytest.raises(ValueError, match=r"updates are ampx\.GradientShards.*only ampx\.zero1"):
        by_hand(OTHERS[name], zero)
    with pytest.raises(ValueError, match=r"tx has no ampx\.zero1"):
        step = ampx.train_step(
            lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1), axis_name="x", scatter_gradients=True
        )
        state = step.init({"w": jnp.ones((8, 4))})
        jax.eval_shape(jax.vmap(step, (None, 0), axis_name="x"), state, jnp.ones((2, 8, 8)))


def test_zero1_takes_them_around_every_optimizer_and_over_its_own_axes_alone():
    for inner in (optax.sgd(0.1), ampx.multi_steps(optax.adamw(0.1), 2)):
        zero = ampx.zero1(inner, "data")
        scaled = ampx.dynamic_loss_scale(zero, axis_names="data")
        assert by_hand(scaled, scaled)["w"].shape == (8, 4)
    zero = ampx.zero1(optax.sgd(0.1), "data")
    with pytest.raises(ValueError, match=r"at 'w' was scattered over \('data',\), and zero1"):
        by_hand(ampx.zero1(optax.sgd(0.1), "data", model_axes={"w": P("data")}), zero)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_experts_are_scattered_over_the_other_axes(check_vma):
    """Beside a dense layer four experts, divided over an axis that divides the rows, too."""
    specs = {"dense": P(), "experts": P("expert")}
    params = {name: RANDOM.normal(size=(4, 6)).astype(np.float32) for name in specs}
    mesh, axes = make_mesh((2, 2), ("data", "expert")), ("data", "expert")

    def loss(params, x, mix=lambda x, experts: jnp.sum(jnp.tanh(x @ experts.T), 1)):
        return jnp.mean((mix(x, params["experts"]) + x @ params["dense"][0] - 1) ** 2)

    def exchange(x, experts):  # all rows along "expert" to the experts of this device, and back
        x = jax.lax.all_gather(x, "expert", tiled=True)
        out = jnp.sum(jnp.tanh(x @ experts.T), 1)
        return jax.lax.psum_scatter(out, "expert", tiled=True)

    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    options = dict(loss_scale="dynamic", num_microbatches=2)
    step = ampx.train_step(
        functools.partial(loss, mix=exchange),
        ampx.zero1(inner, axes),
        axis_name=axes,
        model_axes=specs,
        scatter_gradients=True,
        **options,
    )
    alone = ampx.train_step(loss, inner, **options)
    of_state = ampx.zero1_specs(step.tx, params, mesh, axes, model_axes=specs)
    states = ampx.TrainState(P(), specs, of_state, None, None)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(states, P(axes)), out_specs=(states, P()), check_vma=check_vma
    )
    mapped, jitted, state, expected = (
        jax.jit(mapped),
        jax.jit(alone),
        *[s.init(params) for s in (step, alone)],
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    for number in range(2):
        x = np.random.default_rng(number).normal(size=(16, 6)).astype(np.float32)
        (state, report), (expected, expected_report) = mapped(state, x), jitted(expected, x)
        jax.tree.map(close, state.params, expected.params)
        close(report.global_norm, expected_report.global_norm)
    assert report.num_buckets == 2 * 2, "one of experts, one of the dense layer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scatter_gradients=True), "scatter_gradients=True without axis_name"),
        (dict(bucket_bytes=64), "bucket_bytes=64 without scatter_gradients"),
        (dict(model_axes="model"), "model_axes='model' without scatter_gradients"),
        (
            dict(scatter_gradients=True, axis_name="data", sparse_rows={"w": lambda x: x}),
            "scatter_gradients=True with sparse_rows",
        ),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        ampx.value_and_grad(loss_fn, **options)
