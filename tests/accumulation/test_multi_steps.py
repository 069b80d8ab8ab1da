"""ampx.accumulation.multi_steps: the optimizer runs on every k-th call, and only then."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ampx

INF, NAN = math.inf, math.nan


def run(tx, grads, params=None, **update_kwargs):
    """Calls the jitted update once a gradient; returns params and state after every call."""
    params = jnp.zeros(()) if params is None else params
    state, history = tx.init(params), []
    update = jax.jit(tx.update)
    for i, grad in enumerate(grads):
        kwargs = {name: values[i] for name, values in update_kwargs.items()}
        updates, state = update(jnp.asarray(grad, jnp.float32), state, params, **kwargs)
        params = ampx.apply_updates(params, updates)
        history.append((params, state))
    return history


def params_of(history):
    return [float(params) for params, _ in history]


# --- optax's _accumulation_test.py ---------------------------------------------------------------


def test_optax_multi_steps_computes_mean():
    assert params_of(run(ampx.multi_steps(optax.scale(1.0), 4), [1, 2, 3, 4])) == [0, 0, 0, 2.5]


def test_optax_multi_steps_skip_not_finite():
    tx = ampx.multi_steps(optax.sgd(1.0), 2, on_nonfinite="drop_micro_step")
    history = run(tx, [1, 1, INF, NAN, -INF, 1, 1])
    assert params_of(history) == [0, -1, -1, -1, -1, -1, -2]
    assert [int(state.micro_step) for _, state in history] == [1, 0, 0, 0, 0, 1, 0]
    assert int(history[-1][1].dropped_total) == 3


def test_optax_multi_steps_every_k_schedule():
    tx = ampx.multi_steps(optax.sgd(1e-4), lambda step: jnp.where(step < 2, 1, 3))
    history = run(tx, [0.0] * 17)
    lengths, calls = [], 0
    for _, state in history:
        calls += 1
        if state.micro_step == 0:
            lengths.append(calls)
            calls = 0
    assert lengths == [1, 1, 3, 3, 3, 3, 3]
    assert int(history[-1][1].gradient_step) == 7


def test_optax_multi_steps_scan_dtype_stability():
    tx = ampx.multi_steps(optax.sgd(1e-4), 2)
    params = {"a": jnp.zeros((), jnp.bfloat16)}

    def body(state, _):
        updates, state = tx.update({"a": jnp.ones((), jnp.bfloat16)}, state, params)
        return state, updates

    state, _ = jax.lax.scan(body, tx.init(params), length=4)
    assert state.grad_sum["a"].dtype == jnp.float32


@pytest.mark.parametrize("grad, dropped", [(INF, True), (NAN, True), (11.0, True), (10.0, False)])
def test_optax_skip_large_updates(grad, dropped):
    """A squared norm of 121 is beyond 100."""
    tx = ampx.multi_steps(
        optax.sgd(1.0),
        1,
        on_nonfinite="drop_micro_step",
        drop_if=lambda grads: optax.tree.norm(grads, squared=True) > 100.0,
    )
    [(params, state)] = run(tx, [grad])
    assert params == (0.0 if dropped else -grad)
    assert int(state.dropped_total) == dropped
    assert int(state.gradient_step) == 1 - dropped


def test_optax_multi_steps_zero_nans():
    tx = ampx.multi_steps(optax.chain(optax.zero_nans(), optax.sgd(1e-4)), 2)
    assert params_of(run(tx, [0.0, 0.0])) == [0, 0]


@pytest.mark.slow_but("float16-bfloat16", "bfloat16-float32")
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("grad_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@jax.numpy_dtype_promotion("standard")  # Adam adds float32 gradients to its half moments
def test_optax_multi_steps_mixed_precision(grad_dtype, param_dtype):
    params = jnp.ones(2, param_dtype)
    tx = ampx.multi_steps(optax.adam(0.1), 4)
    state = tx.init(params)
    for _ in range(5):
        updates, new_state = tx.update(jnp.ones(2, grad_dtype), state, params)
        params = ampx.apply_updates(params, updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        state = new_state
    assert params.dtype == param_dtype
    np.testing.assert_allclose(params.astype(jnp.float32), 0.9, rtol=4e-3)


# --- Horovod's test_gradient_aggregation ---------------------------------------------------------


@pytest.mark.parametrize("reduce_in", ["before", "inside"])
def test_horovod_local_aggregation(reduce_in):
    """Four ranks with gradient = rank, four passes an update, ten steps, exact."""
    k, ranks = 4, 4
    mesh = jax.make_mesh(
        (ranks,), ("rank",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks]
    )
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "rank"))
    accumulate = optax.scale(1.0)
    if reduce_in == "inside":
        tx = ampx.multi_steps(optax.chain(mean, accumulate), k, axis_names="rank")
    else:
        tx = optax.chain(mean, ampx.multi_steps(accumulate, k))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(), out_specs=P(None, "rank"), check_vma=False
    )
    def train():
        def step(carry, _):
            variable, state = carry
            grad = jax.lax.axis_index("rank").astype(jnp.float32)
            updates, state = tx.update(grad, state)
            variable = variable + updates
            return (variable, state), variable[None]

        variable = jnp.zeros(())
        return jax.lax.scan(step, (variable, tx.init(variable)), length=10)[1]

    expected = [math.floor((batch + 1) / k) * np.mean(range(ranks)) for batch in range(10)]
    np.testing.assert_array_equal(jax.jit(train)(), np.tile(expected, (ranks, 1)).T)


# --- the inner transformation runs only when due -------------------------------------------------


def counting(calls):
    """A transformation that tells the host when it really runs."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("drop, expected", [(False, 2), (True, 1)])
def test_inner_runs_only_when_due(drop, expected):
    calls = []
    grads = [1.0] * 7 + [NAN if drop else 1.0] + [1.0] * 3
    run(ampx.multi_steps(counting(calls), 4), grads)
    jax.effects_barrier()
    assert len(calls) == expected


def test_a_masked_inner_would_be_counted():
    """The count above can fail: optax.MultiSteps runs its inner update on every call."""
    calls = []
    run(optax.MultiSteps(counting(calls), 4).gradient_transformation(), [1.0] * 11)
    jax.effects_barrier()
    assert len(calls) == 11


def test_inner_update_is_behind_a_cond():
    tx = ampx.multi_steps(optax.adam(0.1), 4)
    params = jnp.ones(5)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert "sqrt" not in names  # Adam's
    conds = [e.params["branches"] for e in jaxpr.eqns if e.primitive.name == "cond"]
    (update,) = [branches for branches in conds if "sqrt" in str(branches)]
    assert sorted("sqrt" in str(branch) for branch in update) == [False, True]


@pytest.mark.slow_but("4")
@pytest.mark.parametrize("k", [1, 2, 4])
def test_equals_microbatches_in_one_step(k):
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(5,)), jnp.float32)
    batches = jnp.asarray(rng.normal(size=(3, 8, 5)), jnp.float32)

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    tx = optax.adamw(0.1)
    whole, state = params, tx.init(params)
    windowed = ampx.multi_steps(tx, k)
    called, window_state = params, windowed.init(params)
    for batch in batches:
        grads = ampx.value_and_grad(loss_fn, num_microbatches=k)(whole, batch).grads
        updates, state = tx.update(grads, state, whole)
        whole = optax.apply_updates(whole, updates)
        for microbatch in ampx.split_microbatches(batch, k):
            grad = jax.grad(loss_fn)(called, microbatch)
            updates, window_state = windowed.update(grad, window_state, called)
            called = optax.apply_updates(called, updates)
    np.testing.assert_allclose(called, whole, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(window_state.inner_state, state, rtol=1e-4, atol=1e-7)


# --- divisors, weights, drops --------------------------------------------------------------------


def test_sum_and_weights():
    grads = [1.0, 2.0, 3.0, 6.0]
    assert params_of(run(ampx.multi_steps(optax.scale(1.0), 4, normalize="sum"), grads))[-1] == 12
    tx = ampx.multi_steps(optax.scale(1.0), 4, normalize="weights")
    weights = [5.0, 1.0, 0.0, 2.0]
    history = run(tx, grads, weight=weights)
    assert params_of(history)[-1] == np.average(grads, weights=weights)
    assert float(history[2][1].weight_sum) == 6 and float(history[3][1].weight_sum) == 0
    assert params_of(run(tx, grads, weight=[0.0] * 4))[-1] == 0  # not NaN


def test_dropped_micro_steps_leave_the_divisor():
    tx = ampx.multi_steps(optax.scale(1.0), 2, on_nonfinite="drop_micro_step")
    assert params_of(run(tx, [1.0, NAN, 3.0]))[-1] == 2
    tx = ampx.multi_steps(optax.scale(1.0), 2, normalize="weights", on_nonfinite="drop_micro_step")
    assert params_of(run(tx, [1.0, INF, 4.0], weight=[1.0, 100.0, 2.0]))[-1] == 3


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_dropped_window_changes_nothing(bad, position):
    tx = ampx.multi_steps(optax.adam(0.1), 3)
    window = [1.0, 1.0, 1.0]
    window[position] = bad
    history = run(tx, [1.0] * 3 + window + [1.0] * 3)
    (before, state), (after, dropped) = history[2], history[5]
    assert before == after
    chex.assert_trees_all_equal(dropped.inner_state, state.inner_state)
    assert (int(dropped.dropped_total), int(dropped.gradient_step)) == (1, 2)
    assert not dropped.window_is_bad and not jnp.any(dropped.grad_sum)
    clean = run(tx, [1.0] * 6)
    assert params_of(history)[-1] == params_of(clean)[-1]  # as if it had never been


def test_extra_arguments_and_shapes_reach_inner():
    tx = ampx.multi_steps(
        optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda g, s, p=None, *, factor, **_: (jax.tree.map(lambda x: x * factor, g), s),
        ),
        2,
    )
    assert params_of(run(tx, [1.0, 3.0], factor=[5.0, 10.0]))[-1] == 20


def test_donation_and_one_trace():
    tx, traces = ampx.multi_steps(optax.adam(0.1), 2), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        traces.append(1)
        updates, state = tx.update(jnp.ones(3), state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(3)
    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    assert len(traces) == 1 and int(state.gradient_step) == 2


# --- both orders with a loss scale ---------------------------------------------------------------

DYNAMIC = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0, growth_interval=2)


def scales_of(history):
    return [float(ampx.current_loss_scale(state)) for _, state in history]


def test_loss_scale_inside_is_frozen_for_the_window():
    """The scale moves once a window, and an overflow drops the window."""
    history = run(ampx.multi_steps(DYNAMIC(optax.sgd(1.0)), 2), [8, 8, 8, INF, 4, 4, 4, 4])
    assert scales_of(history) == [8, 8, 8, 4, 4, 4, 4, 8]
    assert params_of(history) == [0, -1, -1, -1, -1, -2, -2, -3]
    state = history[-1][1]
    assert int(ampx.find_loss_scale_state(state).skipped_total) == 1
    assert int(state.dropped_total) == 0  # counted by the loss scale


def test_loss_scale_outside_drops_the_micro_step():
    history = run(DYNAMIC(ampx.multi_steps(optax.sgd(1.0), 2)), [8, INF, 4, 4, 4, 8])
    assert scales_of(history) == [8, 4, 4, 8, 8, 16]
    windows = [int(state.inner_state.micro_step) for _, state in history]
    # The window is made of the first and the third call, unscaled with a scale of their own.
    assert windows == [1, 1, 0, 1, 0, 1]
    assert params_of(history) == [0, 0, -1, -1, -1.75, -1.75]


def test_dropping_micro_steps_around_a_loss_scale_is_refused():
    tx = ampx.multi_steps(DYNAMIC(optax.sgd(1.0)), 2, on_nonfinite="drop_micro_step")
    with pytest.raises(ValueError, match=r"dynamic_loss_scale\(multi_steps"):
        tx.init(jnp.zeros(1))


# --- devices and arguments -----------------------------------------------------------------------


@pytest.mark.slow_but("drop_if-expected2")
@pytest.mark.parametrize(
    "how, expected", [("drop_window", [2, 6]), ("drop_micro_step", [1, 3]), ("drop_if", [1, 3])]
)
def test_devices_agree_on_what_is_dropped(how, expected):
    """Else one of them would wait for ever in a reduction that the other never reaches."""
    tx = ampx.multi_steps(
        optax.scale(1.0),
        2,
        on_nonfinite="drop_micro_step" if how == "drop_micro_step" else "drop_window",
        drop_if=(lambda g: jnp.abs(g) > 100) if how == "drop_if" else None,
        axis_names=("data",),
    )
    bad = 1000.0 if how == "drop_if" else NAN
    grads = jnp.array([[1, 1], [3, bad], [1, 5], [3, 7]], jnp.float32)  # calls, devices
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(grads):
        params = jnp.zeros(())
        state = tx.init(params)
        for grad in grads[:, 0]:
            updates, state = tx.update(grad, state, params)
            params = params + updates
        return jnp.stack([params, state.dropped_total.astype(jnp.float32)])[:, None]

    run_on_mesh = jax.shard_map(
        local, mesh=mesh, in_specs=P(None, "data"), out_specs=P(None, "data"), check_vma=False
    )
    params, dropped = jax.jit(run_on_mesh)(grads)
    # A window dropped: the mean of calls 3 and 4. A call dropped: of calls 1 and 3.
    np.testing.assert_array_equal(params, expected)
    np.testing.assert_array_equal(dropped, [1, 1])


@pytest.mark.parametrize(
    "every_k, options, error, message",
    [
        (0, {}, ValueError, "every_k must be a positive int, got 0"),
        (-2, {}, ValueError, "got -2"),
        (2.0, {}, TypeError, "got 2.0"),
        (True, {}, TypeError, "got True"),
        (2, dict(normalize="tokens"), ValueError, "normalize must be one of .* got 'tokens'"),
        (2, dict(on_nonfinite="ignore"), ValueError, "on_nonfinite must be one of .* got 'ignore'"),
    ],
)
def test_bad_arguments(every_k, options, error, message):
    with pytest.raises(error, match=message):
        ampx.multi_steps(optax.sgd(0.1), every_k, **options)


def test_missing_weight():
    with pytest.raises(ValueError, match=r"update\(\.\.\., weight="):
        run(ampx.multi_steps(optax.sgd(0.1), 2, normalize="weights"), [1.0])


@pytest.mark.parametrize("order", ["plain", "scale inside"])
@pytest.mark.parametrize(
    "grads, weights", [([1.0, 1.0], [1.0, NAN]), ([3e38, 3e38], [1.0, 1.0])], ids=["weight", "sum"]
)
def test_finite_gradients_whose_window_is_not(order, grads, weights):
    inner = optax.sgd(1.0)
    inner = ampx.static_loss_scale(inner, 1.0) if order == "scale inside" else inner
    tx = ampx.multi_steps(inner, 2, normalize="weights")
    weights = [jnp.float32(w) for w in weights]
    (_, _), (params, state) = run(tx, grads, weight=weights)
    assert params == 0.0
    assert int(state.gradient_step) == 1 and int(state.micro_step) == 0
    assert int(state.dropped_total) + int(ampx.is_skipped(state)) == 1


def test_train_step_gives_windows_their_weight():
    def loss_fn(w, batch):
        return jnp.sum(w * batch["g"]), batch["weight"]

    tx = ampx.multi_steps(optax.sgd(1.0), 2, normalize="weights")
    step = ampx.train_step(loss_fn, tx, normalize="weights")
    state = step.init(jnp.zeros(()))
    for total, weight in ((1.0, 1.0), (27.0, 9.0)):  # means 1 and 3
        batch = {"g": jnp.full(1, total), "weight": jnp.float32(weight)}
        state, _ = jax.jit(step)(state, batch)
    np.testing.assert_allclose(state.params, -2.8, rtol=1e-6)


def test_two_windows_count_no_step_before_one_is_complete():
    tx = optax.partition(
        {n: ampx.multi_steps(optax.sgd(1.0), 4) for n in "ab"}, {"a": "a", "b": "b"}
    )
    step = ampx.train_step(lambda p, x: jnp.sum((p["a"] + p["b"]) * x), tx)
    state, steps = step.init({"a": jnp.zeros(()), "b": jnp.zeros(())}), []
    for _ in range(5):
        state, _ = jax.jit(step)(state, jnp.ones(2))
        steps.append(int(state.step))
    assert steps == [0, 0, 0, 1, 1]


def window_length(gradient_step):
    """Of an epoch of 10 calls: 4, 4 and 2, as in the guide."""
    return jnp.where((gradient_step + 1) % 3 == 0, 2, 4)


@pytest.mark.parametrize("order", ["plain", "scale inside", "scale outside"])
@pytest.mark.parametrize("how", ["every_k", "set in the state", "divided by k"])
def test_the_last_window_of_an_epoch_may_be_shorter(order, how):
    grads = np.random.default_rng(0).normal(size=(3, 10, 2)).astype(np.float32)
    adam = optax.adam(0.1)
    length = window_length if how == "every_k" else 4
    normalize = "sum" if how == "divided by k" else "mean"
    windows = functools.partial(ampx.multi_steps, every_k=length, normalize=normalize)
    scaled = functools.partial(ampx.dynamic_loss_scale, init_scale=1.0)
    tx = {
        "plain": lambda: windows(adam),
        "scale inside": lambda: windows(scaled(adam)),
        "scale outside": lambda: scaled(windows(adam)),
    }[order]()
    params, update = jnp.ones(2), jax.jit(tx.update)
    state = tx.init(params)
    by_hand, its_state = params, adam.init(params)
    for epoch in grads:
        for i, grad in enumerate(epoch):
            if how != "every_k" and i == 9:
                state = optax.tree.set(state, micro_step=jnp.int32(3))
            grad = grad / 4 if how == "divided by k" else grad
            updates, state = update(jnp.asarray(grad), state, params)
            params = optax.apply_updates(params, updates)
        for window in (epoch[:4], epoch[4:8], epoch[8:]):
            divisor = 4 if how == "divided by k" else len(window)
            mean = jnp.asarray(np.sum(window, 0, np.float64) / divisor, jnp.float32)
            updates, its_state = adam.update(mean, its_state, by_hand)
            by_hand = optax.apply_updates(by_hand, updates)
        assert int(optax.tree.get(state, "micro_step")) == 0
        np.testing.assert_allclose(params, by_hand, rtol=1e-5)
    assert update._cache_size() == 1
