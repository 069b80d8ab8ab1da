"""Reduction inside the backward pass, and clipping that waits for one bucket only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_probes import equations
from helpers import assert_bit_equal, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import ampx

RANDOM = np.random.default_rng(0)
LAYERS = RANDOM.normal(size=(3, 8, 8)).astype(np.float32) / 3
X = RANDOM.normal(size=(16, 8)).astype(np.float32)
CHECKED = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])


def over_devices(fun, check_vma=True, count=2):
    """`fun` over four devices; the last of its arguments is divided."""
    mesh = make_mesh((4,), ("data",))
    specs = (*[P()] * (count - 1), P("data"))
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)


def scanned(reduce):
    """The local share of a mean loss, over layers that are scanned."""

    def loss(layers, x):
        def layer(x, w):
            return jnp.tanh(x @ (ampx.reduce_in_backward(w, "data") if reduce else w)), None

        return jnp.sum(lax.scan(layer, x, layers)[0] ** 2) / X.size

    return loss


@functools.cache
def expected_gradient():
    return jax.jit(jax.grad(scanned(False)))(LAYERS, X)


@CHECKED
def test_scanned_layers_are_reduced_inside_the_backward_loop(check_vma):
    grad = jax.jit(over_devices(jax.grad(scanned(True)), check_vma))
    np.testing.assert_allclose(grad(LAYERS, X), expected_gradient(), rtol=1e-5, atol=1e-7)
    mapped = over_devices(jax.grad(scanned(True)), check_vma)
    eqns = list(equations(jax.make_jaxpr(mapped)(LAYERS, X)))
    bodies = [eqn.params["jaxpr"] for eqn in eqns if eqn.primitive.name == "scan"]
    in_loops = [eqn for body in bodies for eqn in equations(body) if is_sum(eqn)]
    assert in_loops and in_loops == [eqn for eqn in eqns if is_sum(eqn)]


def is_sum(eqn):
    return eqn.primitive.name.startswith("psum")


@CHECKED
def test_unrolled_layers_are_reduced_one_by_one(check_vma):
    def loss(layers, x):
        for w in ampx.reduce_in_backward(layers, "data"):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2) / X.size

    layers = list(LAYERS)
    grads = jax.jit(over_devices(jax.grad(loss), check_vma))(layers, X)
    np.testing.assert_allclose(np.stack(grads), expected_gradient(), rtol=1e-5, atol=1e-7)
    jaxpr = jax.make_jaxpr(over_devices(jax.grad(loss), check_vma))(layers, X)
    assert len([eqn for eqn in equations(jaxpr) if is_sum(eqn)]) == 3


@CHECKED
def test_micro_batches_are_folded_into_the_last(check_vma):
    loss = scanned(False)

    def grads(layers, x):
        micro = x.reshape(4, -1, 8)
        local = lax.pcast(layers, "data", to="varying") if check_vma else layers

        def add(total, x):
            return total + jax.grad(loss)(local, x), None

        total, _ = lax.scan(add, jnp.zeros_like(local), micro[:-1])

        def last(layers):
            return loss(ampx.reduce_in_backward(layers, "data", total), micro[-1])

        return jax.grad(last)(layers)

    step = jax.jit(over_devices(grads, check_vma))
    np.testing.assert_allclose(step(LAYERS, X), expected_gradient(), rtol=1e-5, atol=1e-7)
    assert step.lower(LAYERS, X).compile().as_text().count(" all-reduce(") == 1


def test_half_cotangents_are_summed_in_float32():
    def loss(w, x):
        w = ampx.reduce_in_backward(w, "data")
        return jnp.sum(w * x.astype(w.dtype)).astype(jnp.float32)

    grad = jax.jit(over_devices(jax.grad(loss)))
    w, x = jnp.ones((), jnp.float16), jnp.array([40000.0, 40000.0, -40000.0, -38976.0])
    assert grad(w, x) == 1024  # where a sum in float16 has overflowed on its way


def test_parameters_that_differ_are_refused():
    def loss(w, x):
        return jnp.mean(ampx.reduce_in_backward(w, "data") * x)

    grads = over_devices(lambda w, x: ampx.value_and_grad(loss, axis_name="data")(w, x).grads)
    with pytest.raises(ValueError, match="may differ over.*jax.value_and_grad of each device"):
        jax.eval_shape(grads, jnp.ones(8), X)


def test_accumulators_are_checked():
    def loss(w, x):
        return jnp.sum(ampx.reduce_in_backward(w, "data", [w["a"]])["a"] * x)

    with pytest.raises(ValueError, match="accumulator must be a tree like params"):
        jax.eval_shape(over_devices(jax.grad(loss)), {"a": jnp.ones(8)}, X)
    with pytest.raises(NameError, match="no axis 'data' is mapped here"):
        ampx.reduce_in_backward(jnp.ones(3), "data")


# clip_by_bucket_norm


def test_each_bucket_is_clipped_by_its_own_norm():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3, 0.4]), "c": jnp.ones((2, 2))}
    tx = ampx.clip_by_bucket_norm(1.0, bucket_bytes=8)
    clipped, _ = tx.update(grads, tx.init(grads))
    alone = optax.clip_by_global_norm(1.0)
    for name, leaf in grads.items():
        np.testing.assert_allclose(
            clipped[name], alone.update(leaf, alone.init(leaf))[0], rtol=1e-6
        )
    whole = ampx.clip_by_bucket_norm(1.0)
    expected = alone.update(grads, alone.init(grads))[0]
    for a, b in zip(
        jax.tree.leaves(whole.update(grads, whole.init(grads))[0]),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_zero_gradients_and_half_gradients_are_clipped():
    tx = ampx.clip_by_bucket_norm(0.5)
    zeros = jnp.zeros(3)
    assert_bit_equal(tx.update(zeros, tx.init(zeros))[0], zeros)
    half = jnp.full(4, 1.0, jnp.bfloat16)
    assert_bit_equal(tx.update(half, tx.init(half))[0], jnp.full(4, 0.25, jnp.bfloat16))
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        ampx.clip_by_bucket_norm(0)


def test_integers_are_left_alone():
    grads = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([7]), "flag": jnp.array([True])}
    tx = ampx.clip_by_bucket_norm(1.0)
    clipped, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)
    assert_bit_equal({**clipped, "w": grads["w"]}, grads)


@pytest.mark.parametrize(
    "clip, early",
    [
        (ampx.clip_by_bucket_norm(1.0, bucket_bytes=256), True),
        (optax.clip_by_global_norm(1.0), False),
        (optax.identity(), True),
    ],
    ids=["bucket", "global", "none"],
)
def test_only_a_global_norm_waits_for_the_last_bucket(clip, early):
    tx = optax.chain(
        ampx.all_reduce("data", op="sum", bucket_bytes=256, tail_overlap=True),
        clip,
        optax.adamw(1e-2),
    )
    tx = ampx.dynamic_loss_scale(tx, axis_names="data")

    def step(layers, state, x):
        def loss(layers, x):
            for w in layers:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        grads = ampx.value_and_grad(loss, axis_name="data")
        result = grads(layers, x, loss_scale=ampx.current_loss_scale(state))
        updates, state = tx.update(result.grads, state, layers)
        return ampx.apply_updates(layers, updates), state

    layers = list(LAYERS)
    mapped = over_devices(step, count=3)
    report = ampx.check_overlap(mapped, layers, tx.init(layers), X, compiled=True)
    assert report.overlaps == early and report.compiled_overlaps == early
    assert bool(report.culprits) != early
    if not early:
        assert "clip_by_global_norm" in str(report)


# train_step


def train(**options):
    def loss(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return ampx.train_step(loss, optax.adamw(1e-2), **options)


def test_the_train_step_overlaps_its_tail():
    for tail_overlap, expected in ((None, False), (True, True), (False, False)):
        step = train(
            axis_name="data", loss_scale="dynamic", bucket_bytes=256, tail_overlap=tail_overlap
        )
        state = step.init(list(LAYERS))
        report = ampx.check_overlap(over_devices(step), state, X, compiled=True)
        assert report.compiled_overlaps == expected


@pytest.mark.parametrize("option", [dict(tail_overlap=True), dict(bucket_bytes=100)])
def test_without_devices_there_is_nothing_to_overlap(option):
    with pytest.raises(ValueError, match="without axis_name: there is no reduction to overlap"):
        train(**option)


def test_two_reductions_are_refused():
    step = ampx.train_step(
        lambda w, x: jnp.mean(w * x),
        optax.chain(ampx.all_reduce("data"), optax.sgd(0.1)),
        axis_name="data",
    )
    with pytest.raises(ValueError, match="leave all_reduce out of tx"):
        jax.eval_shape(over_devices(step), step.init(jnp.ones(8)), X)
