"""A loss that is not finite although its gradients are: counted, or a reason to skip the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

import ampx

INF, NAN = float("inf"), float("nan")
PARAMS = np.array([1.0, -2.0], np.float32)
GRADS = np.array([8.0, 4.0], np.float32)
# Loss and whether the gradients are good, in each step.
STEPS = [(1.0, True), (INF, True), (NAN, True), (INF, False), (1.0, False), (2.0, True)]
INNERS = {
    "plain": lambda: optax.sgd(0.5, momentum=0.5),
    "fused": lambda: ampx.fused.sgd(0.5, momentum=0.5),
}


def reference(nonfinite_loss):
    """SGD with momentum in numpy, with a scale that halves after bad gradients alone."""
    params, trace, scale, counts = PARAMS.astype(float), np.zeros(2), 8.0, [0, 0]
    for loss, is_good in STEPS:
        counts[0] += not np.isfinite(loss)
        if not is_good or (nonfinite_loss == "skip" and not np.isfinite(loss)):
            counts[1] += 1
        else:
            trace = GRADS / 8 + 0.5 * trace
            params = params - 0.5 * trace
        scale *= 1 if is_good else 0.5
    return params, scale, counts


@pytest.mark.slow_but("fused-skip")
@pytest.mark.parametrize("nonfinite_loss", ["count", "skip"])
@pytest.mark.parametrize("inner", INNERS)
def test_a_loss_that_is_not_finite_is_counted_or_skips_the_step(inner, nonfinite_loss):
    tx = ampx.dynamic_loss_scale(
        INNERS[inner](), init_scale=8.0, nonfinite_loss=nonfinite_loss, min_scale=2.0**-8
    )
    state = tx.init(PARAMS)

    @jax.jit
    def step(params, state, loss, is_good):
        grads = GRADS / 8 * state.loss_scale
        grads = jnp.where(is_good, grads, INF)
        updates, state = tx.update(grads, state, params, value=loss)
        return params + updates, state

    params = PARAMS
    for loss, is_good in STEPS:
        params, state = step(params, state, np.float32(loss), is_good)
    expected, scale, (losses, skips) = reference(nonfinite_loss)
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert state.loss_scale == scale and state.inf_total == 2
    assert state.nonfinite_loss_total == losses and state.skipped_total == skips
    assert state.bad_update_total == 0
    assert ampx.metrics(state)["nonfinite_loss_total"] == losses


def test_without_a_loss_nothing_is_counted():
    tx = ampx.static_loss_scale(optax.sgd(0.5), 8.0, nonfinite_loss="skip")
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert not state.overflow and state.nonfinite_loss_total == 0


def overflowing_loss(w, x):
    # Its derivative is finite everywhere: the gradient of an infinite constant is zero.
    return jnp.sum(w * x[0]) + jax.lax.stop_gradient(jnp.sum(x[1]))


@pytest.mark.parametrize("nonfinite_loss", ["count", "skip"])
def test_train_step_tells_the_loss(nonfinite_loss):
    scale = functools.partial(ampx.dynamic_loss_scale, nonfinite_loss=nonfinite_loss)
    step = ampx.train_step(overflowing_loss, optax.sgd(0.5), loss_scale=scale)
    state, report = step(step.init(PARAMS), jnp.array([1.0, INF]))
    skips = nonfinite_loss == "skip"
    assert report.overflow == skips and state.step == 1 - skips
    assert state.opt_state.nonfinite_loss_total == 1 and state.opt_state.loss_scale == 2.0**16
    assert_bit_equal(state.params, jnp.asarray(PARAMS if skips else PARAMS - 0.5))


def test_of_several_optimizers_each_is_skipped_and_the_loss_is_counted_once():
    inner = {"a": optax.sgd(0.5), "b": optax.sgd(0.5)}
    tx = ampx.dynamic_loss_scale(inner, init_scale=8.0, nonfinite_loss="skip")
    params, grads = ({"a": x, "b": x} for x in (PARAMS, GRADS))
    state = tx.init(params)
    updates, state = tx.update({"a": GRADS}, state, params, value=jnp.float32(1), move_scale=False)
    assert updates["a"][0] == -0.5
    _, state = tx.update({"b": GRADS}, state, params, value=jnp.float32(NAN))
    assert state.overflow and ampx.is_skipped(state, "b") and not ampx.is_skipped(state, "a")
    updates, state = tx.update(grads, state, params, value=jnp.float32(INF))
    assert_bit_equal(updates, jax.tree.map(lambda _: jnp.full(2, -0.0), params))
    assert state.nonfinite_loss_total == 2 and state.loss_scale == 8


@pytest.mark.parametrize("inner", INNERS)
def test_a_static_scale_can_leave_gradients_unchecked(inner):
    """The reference is the optimizer alone, given gradients that were divided by hand."""
    tx = ampx.static_loss_scale(INNERS[inner](), 8.0, check=False)
    state, alone = tx.init(PARAMS), INNERS[inner]()
    expected, plain = PARAMS, alone.init(PARAMS)
    params = PARAMS
    for grads in (GRADS, 3 * GRADS):
        updates, state = tx.update(grads, state, params)
        params = ampx.apply_updates(params, updates)
        updates, plain = alone.update(grads / 8, plain, expected)
        expected = ampx.apply_updates(expected, updates)
    assert_bit_equal(params, expected)
    assert_bit_equal(state.inner_state, plain)
    _, state = tx.update(np.array([INF, 1], np.float32), state, params)
    assert not state.overflow and state.inf_total == state.skipped_total == 0
    assert state.loss_scale == 8


def test_unchecked_gradients_are_not_read_for_a_verdict():
    def count_reductions(check):
        tx = ampx.static_loss_scale(optax.sgd(0.5), 8.0, check=check)
        compiled = jax.jit(tx.update).lower(GRADS, tx.init(PARAMS)).compile()
        return compiled.as_text().count(" reduce(")

    assert count_reductions(check=False) < count_reductions(check=True)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        ({"a": optax.sgd(0.1)}, {}, "check=False is for one optimizer and one loss"),
        (optax.sgd(0.1), {"num_losses": 2}, "check=False is for one optimizer and one loss"),
        (optax.sgd(0.1), {"nonfinite_loss": "skip"}, "nonfinite_loss='skip' says which steps"),
        (optax.sgd(0.1), {"saturation_dtype": "f16"}, "saturation_dtype='f16' says"),
    ],
)
def test_check_false_beside_what_needs_a_check_is_refused(inner, options, message):
    with pytest.raises(ValueError, match=message):
        ampx.static_loss_scale(inner, 8.0, check=False, **options)


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_on_a_loss_of_their_own(check_vma):
    tx = ampx.dynamic_loss_scale(
        optax.sgd(0.5), init_scale=8.0, axis_names="data", nonfinite_loss="skip"
    )

    def local(state, losses):
        updates, state = tx.update(jnp.asarray(GRADS), state, jnp.asarray(PARAMS), value=losses[0])
        return updates, state

    sharded = jax.shard_map(
        local,
        mesh=make_mesh((2,), ("data",)),
        in_specs=(P(), P("data")),
        out_specs=(P("data") if not check_vma else P(), P()),
        check_vma=check_vma,
    )
    updates, state = jax.jit(sharded)(tx.init(PARAMS), jnp.array([1.0, INF]))
    assert not np.any(updates) and state.overflow and state.nonfinite_loss_total == 1
