"""Fused optimizers among other transformations, in flax's states and in `ampx.train_step`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from helpers import assert_bit_equal, make_mesh, optimizer_step
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

INF = float("inf")
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**4, growth_interval=3)
PARAMS = {"w": jnp.array([[1.0, -2.0, 0.5], [0.5, 4.0, 3.0]]), "b": jnp.array([-0.5, 0.25])}
MASK = {"w": True, "b": False}


def normal(seed, like=PARAMS):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda p: jnp.asarray(draw(size=p.shape), jnp.float32), like)


def near(actual, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=1e-9))


# --- transformations that see updates ------------------------------------------------------------


def two_groups(library, other):
    return optax.partition({"w": library.adamw(0.1), "b": other}, {"w": "w", "b": "b"})


# What computes with updates or gradients around the optimizer, to be driven by tx.update alone.
UPDATE_FACE_ONLY = {
    "chain": lambda lib: optax.chain(lib.adamw(0.1), optax.scale(0.5)),
    "chain of one": lambda lib: optax.chain(lib.adamw(0.1)),
    "clip": lambda lib: optax.chain(optax.clip_by_global_norm(0.5), lib.adamw(0.1)),
    "ema": lambda lib: optax.chain(lib.sgd(0.1, momentum=0.9), optax.ema(0.5)),
    "masked": lambda lib: optax.masked(lib.adamw(0.1), MASK),
    "partly plain": lambda lib: two_groups(lib, optax.sgd(0.1)),
    "partly frozen": lambda lib: two_groups(lib, optax.set_to_zero()),
    "optax.MultiSteps": lambda lib: optax.MultiSteps(lib.lamb(0.1), 3),
    "ampx.multi_steps": lambda lib: ampx.multi_steps(lib.adamw(0.1), 3),
    "apply_if_finite": lambda lib: optax.apply_if_finite(lib.adamw(0.1), 5),
    "masters of a chain": lambda lib: ampx.master_weights(
        optax.chain(optax.clip(0.5), lib.adamw(0.1))
    ),
    "named chain": lambda lib: optax.named_chain(("adamw", lib.adamw(0.1))),
}
EITHER_FACE = {
    "hyperparams": lambda lib: optax.inject_hyperparams(lib.adamw)(
        optax.linear_schedule(0.1, 0.0, 9), b1=0.8
    ),
    "groups": lambda lib: two_groups(lib, optax.inject_hyperparams(lib.lion)(0.01)),
    "masters of groups": lambda lib: ampx.master_weights(two_groups(lib, lib.sgd(0.1))),
    "masters in groups": lambda lib: two_groups(lib, ampx.master_weights(lib.sgd(0.1))),
    "groups of groups": lambda lib: optax.partition(
        {"all": two_groups(lib, lib.sgd(0.1))}, {"w": "all", "b": "all"}
    ),
}
AROUND = {
    "bare": lambda tx: optax.with_extra_args_support(tx),
    "scaled": dynamic,
    "skipping": functools.partial(dynamic, nonfinite_updates="skip"),
    "saturating": functools.partial(dynamic, saturation_dtype=jnp.float16),
}


def gradient_sequence(scaled):
    good = [normal(i) for i in range(9)]
    bad = {1: {"w": good[1]["w"].at[0, 0].set(INF), "b": good[1]["b"]}} if scaled else {}
    return [bad.get(i, grads) for i, grads in enumerate(good)]


def run(tx, step, grads_sequence):
    step = jax.jit(functools.partial(step, tx))
    params, state = PARAMS, tx.init(PARAMS)
    for grads in grads_sequence:
        grads = optax.tree.scale(ampx.current_loss_scale(state), grads)
        params, state = step(params, state, grads)
    return params, state


def apply_step(tx, params, state, grads):
    return fused.apply(tx, grads, state, params)[:2]


@pytest.mark.whole_but(
    "clip-scaled",
    "hyperparams-bare",
    "masters of groups-scaled",
    "masters in groups-scaled",
    "groups of groups-scaled",
    "hyperparams-scaled",
    "masked-scaled",
    "partly frozen-scaled",
    "ampx.multi_steps-scaled",
    "optax.MultiSteps-bare",
)
@pytest.mark.slow_but("clip-scaled", "hyperparams-bare")
@pytest.mark.parametrize(
    "name, around",
    [
        *((name, "scaled") for name in EITHER_FACE),
        *((name, "scaled") for name in ("clip", "masked", "partly frozen", "ampx.multi_steps")),
        *((name, "bare") for name in ("clip", "optax.MultiSteps", "hyperparams")),
    ],
)
def test_the_update_face_works_inside_any_transformation(name, around):
    make = (UPDATE_FACE_ONLY | EITHER_FACE)[name]
    steps = gradient_sequence(around != "bare")
    expected = run(AROUND[around](make(optax)), optimizer_step, steps)
    near(run(AROUND[around](make(fused)), optimizer_step, steps), expected)


@pytest.mark.slow_but("skipping-optimizer_step", "saturating-apply_step")
@pytest.mark.parametrize("face", [optimizer_step, apply_step])
@pytest.mark.parametrize("around", ["skipping", "saturating"])
def test_both_faces_work_inside_every_loss_scale(around, face):
    steps = gradient_sequence(True)
    steps[2]["w"] = jnp.full((2, 3), 7e4 / 16)  # at the scale, beyond float16
    expected = run(AROUND[around](optax.adamw(0.1)), optimizer_step, steps)
    near(run(AROUND[around](fused.adamw(0.1)), face, steps), expected)


def test_both_faces_work_with_several_losses_and_a_clip():
    def step(face, tx):
        return jax.jit(functools.partial(face, tx))(PARAMS, tx.init(PARAMS), grads)

    clip = functools.partial(optax.chain, optax.clip_by_global_norm(0.5))
    ours, plain = (dynamic(tx, num_losses=2) for tx in (fused.adamw(0.1), clip(optax.adamw(0.1))))
    grads = normal(0), normal(1)
    new, state = step(optimizer_step, plain)
    near(step(apply_clipped, ours), (new, state._replace(inner_state=state.inner_state[1])))


def apply_clipped(tx, params, state, grads):
    return fused.apply(tx, grads, state, params, max_norm=0.5)[:2]


@pytest.mark.slow_but("hyperparams-scaled", "masters in groups-scaled", "masters of groups-bare")
@pytest.mark.parametrize(
    ("name", "around"), [*((name, "scaled") for name in EITHER_FACE), ("masters of groups", "bare")]
)
def test_apply_reaches_through_what_does_not_look_at_updates(name, around):
    steps = gradient_sequence(around != "bare")
    expected = run(AROUND[around](EITHER_FACE[name](optax)), optimizer_step, steps)
    near(run(AROUND[around](EITHER_FACE[name](fused)), apply_step, steps), expected)


@pytest.mark.parametrize("around", ["bare", "scaled"])
@pytest.mark.parametrize("name", UPDATE_FACE_ONLY)
def test_apply_refuses_what_would_have_to_see_updates(name, around):
    tx = AROUND[around](UPDATE_FACE_ONLY[name](fused))
    with pytest.raises(TypeError, match="fused optimizer"):
        fused.apply(tx, PARAMS, tx.init(PARAMS), PARAMS)


REFUSED = {
    "plain optax": optax.adamw(0.1),
    "plain optax, scaled": dynamic(optax.adamw(0.1)),
    "masters of plain optax": dynamic(ampx.master_weights(optax.adamw(0.1))),
    "masters around the scale": ampx.master_weights(dynamic(fused.adamw(0.1))),
    "a chain around the scale": optax.chain(dynamic(fused.adamw(0.1)), optax.scale(2.0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_apply_refuses_what_it_cannot_fold(name):
    tx = REFUSED[name]
    with pytest.raises(TypeError, match="update"):
        fused.apply(tx, PARAMS, tx.init(PARAMS), PARAMS)


def test_apply_refuses_what_is_no_transformation_and_unknown_backends():
    tx = fused.adamw(0.1)
    with pytest.raises(TypeError, match="tx"):
        fused.apply(PARAMS, PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="backend"):
        fused.apply(tx, PARAMS, tx.init(PARAMS), PARAMS, backend="triton")


# --- flax ----------------------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.LayerNorm()(nn.tanh(nn.Dense(5)(x))))


X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))
NET_PARAMS = jax.jit(Net().init)(jax.random.key(1), X)["params"]


def net_loss(params, batch):
    x, y = batch
    return jnp.mean((Net().apply({"params": params}, x).astype(jnp.float32) - y) ** 2)


def test_flax_train_state_drives_it():
    def train(tx):
        state = train_state.TrainState.create(apply_fn=Net().apply, params=NET_PARAMS, tx=tx)
        step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(net_loss)(s.params, (X, Y))))
        for _ in range(5):
            state = step(state)
        return state.params, state.opt_state

    near(train(fused.lamb(0.02)), train(optax.lamb(0.02)), 2e-5)


class NnxNet(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(5, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(nnx.tanh(self.dense(x)))


def nnx_loss(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


@pytest.mark.slow
def test_nnx_optimizer_drives_it_by_hand_and_in_a_train_step():
    @nnx.jit
    def by_hand(model, optimizer):
        optimizer.update(model, nnx.grad(nnx_loss)(model, (X, Y)))

    model = NnxNet()
    optimizer = nnx.Optimizer(model, fused.adamw(0.02), wrt=nnx.Param)
    for _ in range(3):
        by_hand(model, optimizer)
    for library in (optax, fused):
        step = ampx.train_step(nnx_loss, library.adamw(0.02), loss_scale=dynamic)
        trained = NnxNet()
        pair, jitted = (trained, nnx.Optimizer(trained, step.tx, wrt=nnx.Param)), nnx.jit(step)
        for _ in range(3):
            pair, report = jitted(pair, (X, Y))
        assert not report.overflow
        near(nnx.state(pair[0]), nnx.state(model), 2e-5)


# --- ampx.train_step -----------------------------------------------------------------------------

TRAINING = {
    "clipped": dict(max_grad_norm=0.1),
    "micro-batches": dict(loss_scale=dynamic, max_grad_norm=0.1, num_microbatches=4),
    "O2": dict(policy=ampx.opt_level("O2", half_dtype="float16"), loss_scale=dynamic),
    "skipping": dict(loss_scale=functools.partial(dynamic, nonfinite_updates="skip")),
}


def train(tx, mapped=lambda step: step, steps=6, **options):
    step = ampx.train_step(net_loss, tx, local_norm=True, learning_rate=0.02, **options)
    jitted, state, reports = jax.jit(mapped(step)), step.init(NET_PARAMS), []
    for i in range(steps):
        poison = 1e38 if i == 2 and options.get("loss_scale") else 1.0
        state, report = jitted(state, (X, poison * Y))
        reports.append(report)
    return state, reports


def assert_same_training(ours, plain):
    near(ours, plain, 5e-5)
    for report, expected in zip(ours[1], plain[1], strict=True):
        assert_bit_equal(report.overflow, expected.overflow)
        assert_bit_equal(report.loss_scale, expected.loss_scale)


def finite(result):
    """Without the reports of skipped steps, whose norm is no number."""
    return result[0], [report for report in result[1] if not report.overflow]


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("name", TRAINING)
def test_a_train_step_with_a_fused_optimizer_is_the_one_with_optax(name):
    options = TRAINING[name]
    ours, plain = (
        train(library.adamw(0.02, weight_decay=0.1), **options) for library in (fused, optax)
    )
    for report in (ours[1][2], plain[1][2]):
        assert bool(report.overflow) == ("loss_scale" in options)
        assert bool(np.isfinite(report.global_norm)) != bool(report.overflow)

    assert_same_training(finite(ours), finite(plain))


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale, max_grad_norm", [(None, 0.1), (dynamic, None)])
def test_a_train_step_over_devices_is_the_one_with_optax(loss_scale, max_grad_norm):
    mesh = make_mesh((4,), ("data",))
    options = dict(axis_name="data", loss_scale=loss_scale, max_grad_norm=max_grad_norm)

    def mapped(step):
        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

    ours, plain = (
        train(library.lamb(0.02, weight_decay=0.1), mapped, **options) for library in (fused, optax)
    )
    assert_same_training(finite(ours), finite(plain))
    assert len(finite(ours)[1]) == (6 if loss_scale is None else 5)


@pytest.mark.slow
def test_the_manuals_lamb_with_decay_by_name_is_optax_with_the_same():
    """Ascend's NpuFusedLamb: decay 0.01, but not for LayerNorm and biases."""

    def decayed(params):
        def by_name(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return "LayerNorm" not in name and not name.endswith("bias")

        return jax.tree_util.tree_map_with_path(by_name, params)

    assert not any(jax.tree.leaves(decayed(NET_PARAMS)["LayerNorm_0"]))
    settings = dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decayed)
    ours, plain = (
        train(library.lamb(0.02, **settings), policy="O2", loss_scale=dynamic, max_grad_norm=1.0)[0]
        for library in (fused, optax)
    )
    near(ours, plain, 5e-5)
