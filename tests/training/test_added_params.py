"""ampx.extend_state: parameters that are added to a running optimizer, thawed, frozen, removed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bit_equal, optimizer_step, types_of

import ampx
from ampx import fused

BODY = {"w": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "b": np.array([0.25], np.float32)}
ADAPTER = [np.array([2.0, 1.0, -1.0], np.float32)]


def grads_of(params, number):
    """Whole numbers that depend on the leaf's own shape and on the step, never on other leaves."""
    return jax.tree.map(lambda p: jnp.full(p.shape, float(number + p.size), jnp.float32), params)


def train(tx, params, state, steps):
    step = jax.jit(lambda p, s, g: optimizer_step(tx, p, s, g))
    for number in steps:
        params, state = step(params, state, grads_of(params, number))
    return params, state


# Optimizers that treat each parameter for itself and count nothing: a parameter that is added later
# must then be trained as if it had an optimizer of its own. That one is the reference.
def momentum():
    return optax.sgd(0.125, momentum=0.5)


WRAPPERS = {
    "plain": momentum,
    "scaled": lambda: ampx.dynamic_loss_scale(
        optax.chain(optax.clip(1e6), momentum()), init_scale=1.0
    ),
    "masters": lambda: ampx.static_loss_scale(ampx.master_weights(momentum()), 1.0),
    "fused": lambda: ampx.dynamic_loss_scale(fused.sgd(0.125, momentum=0.5), init_scale=1.0),
    "two calls": lambda: ampx.multi_steps(momentum(), 2, normalize="sum"),
    "partition": lambda: optax.partition(
        {"all": momentum(), "none": optax.sgd(1.0)},
        lambda params: jax.tree.map(lambda _: "all", params),
    ),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(0.125, momentum=0.5),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "scaled" else pytest.mark.slow) for name in WRAPPERS],
)
def test_old_parameters_go_on_and_new_ones_begin(name):
    tx = WRAPPERS[name]()
    dtype = jnp.bfloat16 if name == "masters" else jnp.float32
    body, adapter = jax.tree.map(lambda p: jnp.asarray(p, dtype), (BODY, ADAPTER))
    params, state = train(tx, {"body": body}, tx.init({"body": body}), range(4))
    params = {"adapter": adapter, **params}
    extended = ampx.extend_state(tx, state, params)
    assert types_of(extended) == types_of(tx.init(params))
    params, _ = train(tx, params, extended, range(4, 8))

    alone = {"body": body}
    expected, _ = train(tx, alone, tx.init(alone), range(8))
    assert_bit_equal(params["body"], expected["body"])
    alone = {"adapter": adapter}
    expected, _ = train(tx, alone, tx.init(alone), range(4, 8))
    assert_bit_equal(params["adapter"], expected["adapter"])


def test_what_belongs_to_no_parameter_goes_on():
    tx = ampx.dynamic_loss_scale(optax.adam(0.1), init_scale=2.0, growth_interval=3)
    _, state = train(tx, BODY, tx.init(BODY), range(4))
    params = {**BODY, "adapter": ADAPTER}
    extended = ampx.extend_state(tx, state, params)
    assert extended.loss_scale == 4 and extended.growth_tracker == 1
    old, new = state.inner_state[0], extended.inner_state[0]
    assert new.count == 4
    for name in ("mu", "nu"):
        for part in BODY:
            assert_bit_equal(getattr(new, name)[part], getattr(old, name)[part])
        assert_bit_equal(getattr(new, name)["adapter"], [jnp.zeros(3)])


def freezing(*frozen):
    def labels(params):
        return {name: "still" if name in frozen else "moving" for name in params}

    groups = {"moving": momentum(), "still": optax.set_to_zero()}
    return ampx.dynamic_loss_scale(optax.partition(groups, labels), init_scale=1.0)


def test_frozen_parameters_thaw_and_others_freeze():
    state = freezing("b").init(BODY)
    params, state = train(freezing("b"), BODY, state, range(2))
    assert_bit_equal(params["b"], jnp.asarray(BODY["b"]))
    thawed = ampx.extend_state(freezing(), state, params)
    params, thawed = train(freezing(), params, thawed, range(2, 4))
    for part, steps in (("w", range(4)), ("b", range(2, 4))):
        own = {part: BODY[part]}
        expected, _ = train(momentum(), own, momentum().init(own), steps)
        assert_bit_equal(params[part], expected[part])
    frozen = ampx.extend_state(freezing("w"), thawed, params)
    assert types_of(frozen) == types_of(freezing("w").init(params))
    traces = [optax.tree.get(s, "trace")["b"] for s in (frozen, thawed)]
    assert_bit_equal(*traces)


def test_lists_grow_at_their_end_and_parameters_go():
    tx = optax.sgd(0.1, momentum=0.5)
    _, state = train(tx, [np.ones(2, np.float32)], tx.init([np.ones(2)]), range(2))
    longer = ampx.extend_state(tx, state, [np.ones(2, np.float32), np.ones(3, np.float32)])
    trace = optax.tree.get(longer, "trace")
    assert_bit_equal(trace[0], optax.tree.get(state, "trace")[0])
    assert_bit_equal(trace[1], jnp.zeros(3))
    assert_bit_equal(ampx.extend_state(tx, longer, [np.ones(2, np.float32)]), state)


def test_flat_buffers_are_laid_out_anew():
    tx = ampx.dynamic_loss_scale(fused.adam(0.1, mu_dtype="bf16"), init_scale=1.0)
    flat = fused.flatten(jax.tree.map(jnp.asarray, BODY))
    ones = jax.tree.map(np.ones_like, flat)
    _, state = jax.jit(tx.update)(ones, tx.init(flat), flat)
    grown = fused.flatten({"adapter": ADAPTER, **BODY})
    extended = ampx.extend_state(tx, state, grown)
    assert jax.tree.leaves(types_of(extended)) == jax.tree.leaves(types_of(tx.init(grown)))
    for name in ("mu", "nu"):
        old, new = (optax.tree.get(s, name).tree() for s in (state, extended))
        assert_bit_equal({part: new[part] for part in BODY}, old)
        assert not np.any(new["adapter"][0])


ADAM = optax.adam(0.1)
SCHEDULE = ampx.precision_schedule("fast|step|0.5", total_steps=8)


def step_around(tx, **options):
    return ampx.train_step(lambda p, x: 0.0, tx, **options).tx


AROUND_ADAM = {
    "nothing": ADAM,
    "dynamic": ampx.dynamic_loss_scale(ADAM, init_scale=2.0),
    "adaptive": ampx.dynamic_loss_scale(ADAM, init_scale=2.0, growth_interval=(20, 30)),
    "static": ampx.static_loss_scale(ADAM, 2.0),
    "clip": step_around(ADAM, max_grad_norm=1.0),
    "clip in a scale": step_around(ADAM, max_grad_norm=1.0, loss_scale="dynamic"),
    "masters": ampx.master_weights(ADAM),
    "masters in a scale": ampx.dynamic_loss_scale(ampx.master_weights(ADAM)),
    "window": ampx.multi_steps(ADAM, 2),
    "window in a scale": ampx.dynamic_loss_scale(ampx.multi_steps(ADAM, 2)),
    "scale in a window": ampx.multi_steps(ampx.dynamic_loss_scale(ADAM), 2),
    "optax's window": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "optax's skip": optax.apply_if_finite(ADAM, 3),
    "zero1": ampx.zero1(ADAM, "data"),
    "schedule": ampx.follow_schedule(ampx.dynamic_loss_scale(ADAM), SCHEDULE),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "fused": ampx.dynamic_loss_scale(fused.adam(0.1)),
    "derived": fused.fuse(ADAM),
}


@pytest.mark.parametrize("there", AROUND_ADAM)
@pytest.mark.parametrize("here", AROUND_ADAM)
def test_wrappers_are_put_on_and_taken_off(here, there):
    """Whatever is around Adam before and after, its moments and its count go on."""
    params = jax.tree.map(jnp.asarray, BODY)
    _, state = ADAM.update(grads_of(params, 1), ADAM.init(params), params)
    first = ampx.extend_state(AROUND_ADAM[here], state, params)
    then = ampx.extend_state(AROUND_ADAM[there], first, params)
    assert types_of(then) == types_of(AROUND_ADAM[there].init(params))
    for name in ("mu", "nu", "count"):
        found = optax.tree.get(then, name, filtering=lambda path, value: "Adam" in str(path))
        assert_bit_equal(found, getattr(state[0], name))
    if isinstance(first, ampx.LossScaleState) and isinstance(then, ampx.LossScaleState):
        assert then.loss_scale == first.loss_scale


def test_a_wrapper_inside_of_a_new_one_goes_on():
    params = jax.tree.map(jnp.asarray, BODY)
    window, both = AROUND_ADAM["window"], AROUND_ADAM["window in a scale"]
    _, state = window.update(grads_of(params, 1), window.init(params), params)
    extended = ampx.extend_state(both, state, params)
    assert_bit_equal(extended.inner_state, state)
    assert_bit_equal(ampx.extend_state(window, extended, params), state)


def test_sums_of_an_unfinished_window_are_not_left_behind():
    params = jax.tree.map(jnp.asarray, BODY)
    for name in ("window", "optax's window"):
        tx = AROUND_ADAM[name]
        _, state = tx.update(grads_of(params, 1), tx.init(params), params)
        with pytest.raises(ValueError, match="sum of 1 gradients of a window that is not full"):
            ampx.extend_state(ADAM, state, params)


def test_flat_buffers_are_switched_on_and_off():
    params = jax.tree.map(jnp.asarray, BODY)
    tx = fused.adam(0.1)
    _, state = tx.update(grads_of(params, 1), tx.init(params), params)
    flat = ampx.extend_state(tx, state, fused.flatten(params))
    assert jax.tree.structure(flat) == jax.tree.structure(tx.init(fused.flatten(params)))
    assert_bit_equal(ampx.extend_state(tx, flat, params), state)
    assert_bit_equal(flat[0].mu.tree(), state[0].mu)


@pytest.mark.slow
def test_a_train_state_goes_on():
    def loss_fn(params, batch):
        return sum(jnp.sum(leaf**2) * batch[0] for leaf in jax.tree.leaves(params))

    step = ampx.train_step(loss_fn, momentum(), loss_scale="dynamic", max_grad_norm=1e6)
    batch = jnp.ones(4)
    state, _ = step(step.init(BODY), batch)
    fresh = step.init({**state.params, "adapter": ADAPTER})
    opt_state = ampx.extend_state(step.tx, state.opt_state, fresh.params)
    state, report = step(fresh._replace(step=state.step, opt_state=opt_state), batch)
    assert state.step == 2 and not report.overflow
    for name, old in BODY.items():
        # p1 = p - r 2 p, and then a momentum of 1/2: p2 = p1 - r (2 p1 + p)
        first = old * (1 - 0.25)
        np.testing.assert_allclose(state.params[name], first - 0.125 * (2 * first + old), rtol=1e-6)
    np.testing.assert_allclose(state.params["adapter"][0], ADAPTER[0] * (1 - 0.25), rtol=1e-6)


@pytest.mark.slow
def test_an_nnx_model_grows():
    class Model(nnx.Module):
        def __init__(self):
            self.body = nnx.Param(jnp.asarray(BODY["w"]))

    model = Model()
    tx = WRAPPERS["scaled"]()
    old = nnx.Optimizer(model, tx, wrt=nnx.Param)
    old.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    model.adapter = nnx.Param(jnp.asarray(ADAPTER[0]))
    new = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    opt_state = ampx.extend_state(tx, nnx.as_pure(old.opt_state), params)
    nnx.update(new.opt_state, nnx.state(opt_state))
    trace = optax.tree.get(nnx.as_pure(new.opt_state), "trace")
    assert_bit_equal((trace["body"], trace["adapter"]), (jnp.ones((2, 2)), jnp.zeros(3)))
    new.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.body[...], BODY["w"] - 0.125 - 0.1875)
    np.testing.assert_array_equal(model.adapter[...], ADAPTER[0] - 0.125)


@pytest.mark.parametrize(
    ("old_tx", "tx", "params", "message"),
    [
        (momentum(), optax.adam(0.1), BODY, r"\[0\] is a TraceState.*a ScaleByAdamState"),
        (momentum(), ampx.static_loss_scale(optax.adam(0.1), 2.0), BODY, "is a TraceState"),
        (
            momentum(),
            optax.chain(optax.trace(0.5), optax.identity(), optax.identity()),
            BODY,
            "holds 2 states, and that of tx 3",
        ),
        (
            momentum(),
            momentum(),
            {**BODY, "b": np.ones(2, np.float32)},
            r"trace\['b'\] is an array float32\[1\].* float32\[2\]: .*another name",
        ),
        (momentum(), momentum(), jax.tree.map(jnp.bfloat16, BODY), "must keep its shape and dtype"),
        (momentum(), momentum(), {**BODY, "b": {"c": np.ones(1)}}, r"\['b'\] is an array.*a dict"),
    ],
)
def test_what_does_not_fit_is_refused(old_tx, tx, params, message):
    with pytest.raises(ValueError, match=message):
        ampx.extend_state(tx, old_tx.init(BODY), params)


@pytest.mark.slow
def test_flat_moments_of_8_bits_stay_as_they_are():
    tx = fused.adam(0.1, mu_dtype="int8")
    body = {"w": np.ones((64, 1024), np.float32)}  # large enough to be kept in blocks
    state = tx.init(fused.flatten(body))
    assert_bit_equal(ampx.extend_state(tx, state, fused.flatten(body)), state)
    grown = fused.flatten({"adapter": ADAPTER, **body})
    of_tree = tx.init(body)
    for given, params, message in (
        (
            state,
            grown,
            "is flat in another layout.*added ones by an optimizer.*8 bits",
        ),
        (state, body, "is flat, and that of tx a tree: give params that are flat, too.*8 bits"),
        (of_tree, grown, "is a tree, and that of tx flat: give params that are a tree.*8 bits"),
    ):
        with pytest.raises(ValueError, match=rf"opt_state\[0\].mu {message}"):
            ampx.extend_state(tx, given, params)


def test_no_transformation_is_refused():
    with pytest.raises(TypeError, match="tx must be an optax gradient transformation, got dict"):
        ampx.extend_state(BODY, BODY, BODY)
