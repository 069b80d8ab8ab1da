import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import (
    MESHES,
    all_finite,
    assert_bit_equal,
    counted_step,
    make_mesh,
    optimizer_step,
    run_steps,
    scan_flags,
    types_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

INF, NAN = float("inf"), float("nan")
WIDEST = dict(min_scale=2.0**-126, max_scale=2.0**126)
dynamic = ampx.dynamic_loss_scale


def full_optimizer():
    """Everything that must stand still on a skip: clip, moments, decay, schedule, EMA, masters."""
    return ampx.master_weights(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.01),
            optax.ema(0.9),
            optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 10)),
        )
    )


PARAMS = {
    "w": jnp.array([[1.0, -2.0], [0.5, 3.0]], jnp.float16),
    "norm": jnp.array([1.0, 1.5], jnp.float32),
}


def gradients(seed, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params)


# --- equivalence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        dynamic,
        functools.partial(dynamic, growth_interval=2, max_scale=2.0**40),
        functools.partial(ampx.static_loss_scale, scale=128.0),
        ampx.no_loss_scale,
    ],
)
def test_scaled_gradients_give_plain_optax_bit_for_bit(wrap):
    inner = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.cosine_decay_schedule(0.1, 50), weight_decay=0.01),
    )
    params = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    steps = [gradients(i) for i in range(8)]
    # Not jitted: compilers fuse the two programs differently, which moves last bits.
    tx = wrap(inner)
    ours, _ = run_steps(tx, params, steps, functools.partial(optimizer_step, tx))
    plain, _ = run_steps(inner, params, steps, functools.partial(optimizer_step, inner))
    assert_bit_equal(ours, plain)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.LayerNorm()(nn.Dense(4)(x)))


@pytest.mark.slow
@pytest.mark.parametrize("half_dtype, scale", [("bfloat16", 1.0), ("float16", 2.0**10)])
def test_ascend_lamb_with_decay_mask_from_names(half_dtype, scale):
    """Row A1: LAMB, decay 0.01 but not for LayerNorm and biases, through policy and scale.

    Equal to optax.lamb: in bfloat16 whatever the scale, in float16 when by hand scaled the same.
    """

    def decayed(params):
        def by_name(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return "LayerNorm" not in name and not name.endswith("bias")

        return jax.tree_util.tree_map_with_path(by_name, params)

    lamb = optax.lamb(0.01, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decayed)
    model, x = Net(), jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(1), x)["params"]
    assert decayed(params) == {
        "Dense_0": {"kernel": True, "bias": False},
        "Dense_1": {"kernel": True, "bias": False},
        "LayerNorm_0": {"scale": False, "bias": False},
    }

    def loss_fn(params, x):
        return jnp.mean((model.apply({"params": params}, x) - x[:, :1]) ** 2)

    recipe = ampx.opt_level("O2", half_dtype=half_dtype)
    scaled = functools.partial(dynamic, init_scale=2.0**10)
    step = ampx.train_step(loss_fn, lamb, policy=recipe, loss_scale=scaled)
    state = step.init(params)
    plain_params, plain_state = params, lamb.init(params)

    @jax.jit
    def plain_step(params, state):
        grads = jax.grad(lambda p: recipe.call(loss_fn, p, x) * scale)(params)
        return optimizer_step(lamb, params, state, optax.tree.scale(1 / scale, grads))

    step = jax.jit(step)
    for _ in range(3):
        state, report = step(state, x)
        assert not report.overflow
        plain_params, plain_state = plain_step(plain_params, plain_state)
    assert_bit_equal(state.params, plain_params)


# --- the state machine against plain Python ------------------------------------------------------
#
# Each reference returns the scale after each step, and the growths so far that found it at `high`.


def apex_reference(bads, *, init, growth, backoff, interval, hysteresis, low, high):
    """`update_scale_hysteresis` in apex/csrc: refilled by any finite step."""
    scale, successes, tolerance, hits, seen = init, 0, hysteresis, 0, []
    for bad in bads:
        if bad:
            tolerance -= 1
            successes = 0
            if tolerance <= 0:
                scale = max(scale * backoff, low)
        else:
            successes += 1
            if successes == interval:
                hits += scale == high
                scale, successes = min(scale * growth, high), 0
            tolerance = hysteresis
        seen.append((scale, hits))
    return seen


def megatron_reference(bads, *, init, growth, backoff, interval, hysteresis, low, high):
    """`DynamicGradScaler` in Megatron-LM: refilled when the scale grows."""
    scale, growth_tracker, tolerance, hits, seen = init, 0, hysteresis, 0, []
    for bad in bads:
        if bad:
            growth_tracker, tolerance = 0, tolerance - 1
            if tolerance <= 0:
                scale = max(scale * backoff, low)
        else:
            growth_tracker += 1
            if growth_tracker == interval:
                growth_tracker, tolerance = 0, hysteresis
                hits += scale == high
                scale = min(scale * growth, high)
        seen.append((scale, hits))
    return seen


def ascend_reference(bads, *, init, growth, backoff, interval, hysteresis, low, high):
    """`ExponentialUpdateLossScaleManager`: bad steps add up until the scale moves."""
    scale, num_good, num_bad, hits, seen = init, 0, 0, 0, []
    for bad in bads:
        if bad:
            num_good, num_bad = 0, num_bad + 1
            if num_bad >= hysteresis:
                scale, num_good, num_bad = max(scale * backoff, low), 0, 0
        else:
            num_good += 1
            if num_good >= interval:
                hits += scale == high
                scale, num_good, num_bad = min(scale * growth, high), 0, 0
        seen.append((scale, hits))
    return seen


REFERENCES = {
    "finite": apex_reference,
    "growth": megatron_reference,
    "change": ascend_reference,
}


def check_against_reference(refill, bads, **settings):
    names = dict(
        init="init_scale",
        growth="growth_factor",
        backoff="backoff_factor",
        interval="growth_interval",
        low="min_scale",
        high="max_scale",
        hysteresis="hysteresis",
    )
    options = {names[name]: value for name, value in settings.items()}
    states = scan_flags(dynamic(optax.identity(), refill=refill, **options), bads)
    scales, hits = np.transpose(REFERENCES[refill](bads, **settings))
    np.testing.assert_array_equal(states.loss_scale, np.float32(scales))
    np.testing.assert_array_equal(states.ceiling_hits, hits)
    np.testing.assert_array_equal(states.overflow, bads)
    np.testing.assert_array_equal(states.skipped_total, np.cumsum(bads))
    return states


# Each example compiles a program: few settings, and long sequences.
@pytest.mark.slow_but("change")
@pytest.mark.parametrize("refill", REFERENCES)
@settings(max_examples=4)
@given(
    bads=st.lists(st.booleans(), min_size=120, max_size=120),
    init=st.sampled_from([1.0, 8.0, 2.0**16]),
    growth=st.sampled_from([1.0, 2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    room=st.sampled_from([(1.0, 2.0**24), (2.0**-3, 2.0**17), (2.0**-126, 2.0**126)]),
)
def test_any_sequence_of_good_and_bad_steps_follows_the_reference(
    refill, bads, init, growth, backoff, interval, hysteresis, room
):
    low, high = room
    rules = dict(init=init, growth=growth, backoff=backoff, interval=interval)
    states = check_against_reference(
        refill, bads, **rules, hysteresis=hysteresis, low=low, high=high
    )
    scales = np.asarray(states.loss_scale)
    assert (scales >= low).all() and (scales <= high).all()
    assert (np.frexp(scales)[0] == 0.5).all(), "a scale that is not a power of two"


@pytest.mark.parametrize("refill", REFERENCES)
def test_growths_at_the_maximum_are_counted(refill):
    rules = dict(init=2.0, growth=2.0, backoff=0.5, interval=2, hysteresis=1, low=1.0, high=8.0)
    # 4 and 8 after two and four good steps; at six the first growth that finds it there. The
    # overflow lowers it to 4, and it takes one growth to arrive before the next one counts.
    states = check_against_reference(refill, [0] * 7 + [1] + [0] * 4, **rules)
    assert states.ceiling_hits.tolist() == [0] * 5 + [1] * 6 + [2]
    assert states.loss_scale[-1] == 8


def test_the_three_refills_are_told_apart():
    # Two tolerated overflows with good steps between, then growth, then two more.
    bads = [1, 0, 1, 0, 0, 1, 1]
    settings = dict(init=8.0, growth=2.0, backoff=0.5, interval=2, hysteresis=2, low=1.0, high=64.0)
    found = {
        refill: check_against_reference(refill, bads, **settings).loss_scale.tolist()
        for refill in REFERENCES
    }
    assert found == {
        "finite": [8, 8, 8, 8, 16, 16, 8],
        "growth": [8, 8, 4, 4, 8, 8, 4],
        "change": [8, 8, 4, 4, 8, 8, 4],
    }
    bads = [1, 1, 1]  # tolerance used up: Megatron falls at every overflow, Ascend counts again
    after = {
        refill: check_against_reference(refill, bads, **settings).loss_scale.tolist()
        for refill in REFERENCES
    }
    assert after == {"finite": [8, 4, 2], "growth": [8, 4, 2], "change": [8, 4, 4]}


APEX_GRID = list(
    itertools.product([1.0, 1024.0, 65536.0], [1.0, 2.0, 4.0], [0.5, 0.25], [10, 100], [10, 100])
)


@pytest.mark.whole_but(
    "1.0-0.25-10-10",
    "1.0-0.5-100-100",
    "2.0-0.25-100-10",
    "2.0-0.5-10-100",
    "4.0-0.5-10-100",
    "4.0-0.25-100-10",
    "1.0-0.25-100-100",
    "2.0-0.5-10-10",
)
@pytest.mark.slow_but("4.0-0.5-10-100")
@pytest.mark.parametrize(
    "growth, backoff, interval, hysteresis", sorted({g[1:] for g in APEX_GRID})
)
def test_apex_update_scale_hysteresis(growth, backoff, interval, hysteresis):
    for init in (1.0, 1024.0, 65536.0):
        phases = [
            ([True] * (hysteresis - 1), init),  # tolerated
            ([False], init),  # refills the tolerance
            ([True] * (hysteresis - 1), init),  # so that as many are tolerated again
            ([True], init * backoff),
            ([False] * (interval - 1), init * backoff),
            ([True], init * backoff),  # restarts the interval
            ([False] * (interval - 1), init * backoff),
            ([False], init * backoff * growth),
        ]
        bads = list(itertools.chain.from_iterable(flags for flags, _ in phases))
        states = check_against_reference(
            "finite",
            bads,
            init=init,
            growth=growth,
            backoff=backoff,
            interval=interval,
            hysteresis=hysteresis,
            low=2.0**-126,
            high=2.0**126,
        )
        ends = np.cumsum([len(flags) for flags, _ in phases]) - 1
        np.testing.assert_array_equal(states.loss_scale[ends], [scale for _, scale in phases])


def test_torch_grad_scaling_update_scale():
    tx = dynamic(
        optax.identity(),
        init_scale=4.0,
        growth_factor=2.0,
        backoff_factor=0.25,
        growth_interval=2,
    )
    states = scan_flags(tx, [False, False, True])
    np.testing.assert_array_equal(states.loss_scale, [4.0, 8.0, 2.0])
    np.testing.assert_array_equal(states.growth_tracker, [1, 0, 0])


@pytest.mark.parametrize("growth_factor, powers_of_two", [(2.0**100, True), (5e37, False)])
def test_torch_pr_98876_huge_growth_never_gives_inf(growth_factor, powers_of_two):
    tx = dynamic(
        optax.identity(),
        growth_factor=growth_factor,
        growth_interval=1,
        powers_of_two=powers_of_two,
        **WIDEST,
    )
    scales = scan_flags(tx, [False] * 5).loss_scale
    np.testing.assert_array_equal(scales[1:], 2.0**126)
    assert np.isfinite(1 / scales).all() and (1 / scales > 0).all()


def jmp_scale(factor, **options):
    return dynamic(
        optax.identity(),
        init_scale=10.0,
        growth_factor=factor,
        backoff_factor=1 / factor,
        powers_of_two=False,
        **options,
    )


@pytest.mark.parametrize("period, factor", [(20, 2), (30, 3)])
def test_jmp_increases_on_counter(period, factor):
    tx = jmp_scale(factor, growth_interval=period)
    states = scan_flags(tx, [False] * period)
    np.testing.assert_array_equal(states.loss_scale, [10.0] * (period - 1) + [10.0 * factor])
    np.testing.assert_array_equal(states.growth_tracker, [*range(1, period), 0])


@pytest.mark.parametrize(
    "factor, low", [(2, 1.0), (3, 1.0), (2, 0.3125), (2, 0.37), (2, 2.0**-126)]
)
def test_jmp_100_infs_end_at_the_minimum_through_jit(factor, low):
    tx = jmp_scale(factor, min_scale=low)
    scales = scan_flags(tx, [True] * 100).loss_scale
    expected = [max(low, 10.0 / factor ** (i + 1)) for i in range(100)]
    # Only 1/3 rounds: two float32 roundings a step until the minimum is reached.
    np.testing.assert_allclose(scales, np.float32(expected), rtol=1e-6 if factor == 3 else 0)


def test_deepspeed_zero_optim_overflow():
    """Scale 2**8, window 2: doubles every two clean steps, halves per overflow, floor 1."""
    tx = dynamic(optax.identity(), init_scale=2.0**8, growth_interval=2)
    clean = scan_flags(tx, [False] * 10)
    np.testing.assert_array_equal(clean.loss_scale[1::2], 2.0 ** np.arange(9, 14))
    overflow = scan_flags(tx, [True] * 10)
    np.testing.assert_array_equal(overflow.loss_scale, [128, 64, 32, 16, 8, 4, 2, 1, 1, 1])
    assert overflow.floor_hits[-1] == 2
    mixed = scan_flags(tx, [True, True, False, False, False, True])
    np.testing.assert_array_equal(mixed.loss_scale, [128, 64, 64, 128, 128, 64])


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_interval_n_means_n_finite_steps(interval):
    tx = dynamic(optax.identity(), init_scale=1.0, growth_interval=interval)
    scales = scan_flags(tx, [False] * 3 * interval).loss_scale
    np.testing.assert_array_equal(
        scales, [2.0 ** ((step + 1) // interval) for step in range(3 * interval)]
    )


# --- one step: unscale with the old scale, judge, undo as a whole ---------------------------------


def test_growth_and_backoff_steps_unscale_with_the_scale_the_loss_had():
    tx = dynamic(optax.sgd(1.0), init_scale=8.0, growth_interval=1)
    params = jnp.zeros(1)
    state = tx.init(params)
    for bad in (False, False, True, False, True, True, False):
        scale = ampx.current_loss_scale(state)
        updates, state = tx.update(jnp.where(bad, INF, scale)[None], state, params)
        assert updates == (0.0 if bad else -1.0)
        assert state.loss_scale == scale * (0.5 if bad else 2.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inner_sees_float32_gradients_and_the_state_stays_float32(dtype):
    seen = []

    def record(updates, params):
        seen.append(updates.dtype)
        return updates

    tx = dynamic(optax.stateless(record), init_scale=8.0)
    params = jnp.ones(2, dtype)
    state = tx.init(params)
    assert state.loss_scale.dtype == jnp.float32 and not jax.typeof(state.loss_scale).weak_type
    updates, new_state = tx.update(jnp.full(2, 8.0, dtype), state, params)
    assert seen == [jnp.float32]
    np.testing.assert_array_equal(updates, 1.0)
    assert types_of(new_state) == types_of(state)


@functools.cache
def after_three_steps(choice):
    tx = ampx.loss_scale(choice, full_optimizer())
    step = jax.jit(functools.partial(optimizer_step, tx))
    return step, *run_steps(tx, PARAMS, [gradients(i) for i in range(3)], step)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("leaf", PARAMS)
@pytest.mark.parametrize("choice", ["dynamic", 2.0**16])
def test_a_skip_leaves_everything_bit_for_bit(choice, leaf, value):
    step, params, state = after_three_steps(choice)
    bad = gradients(9)
    bad[leaf] = bad[leaf].at[1].set(value)
    skipped_params, skipped = step(params, state, bad)

    assert_bit_equal(skipped_params, params)
    assert_bit_equal(skipped.inner_state, state.inner_state)
    assert skipped.overflow and skipped.skipped_total == 1
    assert (skipped.inf_total, skipped.nan_total) == ((0, 1) if math.isnan(value) else (1, 0))
    assert skipped.growth_tracker == 0

    good = optax.tree.scale(skipped.loss_scale, gradients(10))
    next_params, after = step(skipped_params, skipped, good)
    assert not after.overflow and after.skipped_total == 1
    assert optax.tree.get(after, "micro_step") is None
    counts = optax.tree.get_all_with_path(after.inner_state, "count")
    assert len(counts) == 3 and all(count == 4 for _, count in counts)
    assert all(
        np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (next_params, params)), strict=True)
    )


def test_a_skip_keeps_negative_zeros():
    tx = dynamic(optax.sgd(0.1))
    params = jnp.array([-0.0, 1.0])
    updates, _ = tx.update(jnp.array([NAN, 1.0]), tx.init(params), params)
    assert_bit_equal(ampx.apply_updates(params, updates), params)


@pytest.mark.parametrize("kind", ["inf", "nan", "both"])
def test_inf_and_nan_steps_are_counted_apart(kind):
    bad = dict(inf=[INF, 1.0], nan=[1.0, NAN], both=[INF, NAN])[kind]
    tx = dynamic(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))
    for grads in (bad, [1.0, 1.0], bad):
        _, state = tx.update(jnp.array(grads), state)
    # An array with both counts as one with a NaN, which no smaller scale removes.
    assert state.inf_total == (2 if kind == "inf" else 0)
    assert state.nan_total == (0 if kind == "inf" else 2)
    assert state.skipped_total == 2 and state.bad_update_total == 0


@pytest.mark.parametrize("hysteresis, hits", [(1, 3), (3, 1)])
@pytest.mark.parametrize("on_floor", ["hold", "raise-flag"])
def test_floor_hits_are_counted_and_flagged_on_request(hysteresis, hits, on_floor):
    tx = dynamic(optax.identity(), init_scale=4.0, on_floor=on_floor, hysteresis=hysteresis)
    states = scan_flags(tx, [True] * 5)  # 4 -> 2 -> 1, then three more; hysteresis 3 delays by two
    assert states.loss_scale[-1] == 1.0
    assert states.floor_hits[-1] == hits
    flagged = states.floor_flag
    assert not flagged[:-hits].any()
    assert (flagged[-hits:] == (on_floor == "raise-flag")).all()


@pytest.mark.parametrize("saturation_dtype, skipped", [(None, 0), ("float16", 1)])
@pytest.mark.parametrize("wrap", [dynamic, functools.partial(ampx.static_loss_scale, scale=4.0)])
def test_saturated_gradients_count_as_overflow_on_request(wrap, saturation_dtype, skipped):
    tx = wrap(optax.sgd(1.0), saturation_dtype=saturation_dtype)
    _, state = tx.update(jnp.array([65504.0], jnp.float16), tx.init(jnp.zeros(1)))
    assert (state.skipped_total, state.inf_total) == (skipped, skipped)


# --- finite gradients, non-finite updates ---------------------------------------------------------


def half_adam():
    """Adam wholly in float16: its epsilon is 0 there, so that a zero gradient gives 0/0."""
    to_half = optax.stateless(lambda g, p: jax.tree.map(lambda x: x.astype(jnp.float16), g))
    return optax.chain(to_half, optax.scale_by_adam(eps=1e-8), optax.scale(-0.5))


@pytest.mark.slow_but("skip")
@pytest.mark.parametrize("mode", ["hold", "skip"])
def test_half_adam_with_vanished_epsilon(mode):
    tx = dynamic(half_adam(), init_scale=1.0, nonfinite_updates=mode)
    params = jnp.ones(3, jnp.float16)
    state = tx.init(params)
    step = jax.jit(functools.partial(optimizer_step, tx))
    plain = half_adam()
    raw, _ = plain.update(jnp.array([1.0, 0.0, 1e-4]), plain.init(params), params)
    np.testing.assert_array_equal(np.isfinite(raw), [True, False, False])  # 0/0 and x/0

    new_params, new_state = step(params, state, jnp.array([1.0, 0.0, 1e-4]))
    assert all_finite((new_params, new_state))
    assert new_state.bad_update_total == 1
    moved = np.asarray(new_params != params)
    if mode == "hold":
        np.testing.assert_array_equal(moved, [True, False, False])
        assert not new_state.overflow and optax.tree.get(new_state, "count") == 1
    else:
        assert not moved.any() and new_state.overflow and new_state.skipped_total == 1
        assert_bit_equal(new_state.inner_state, state.inner_state)


@pytest.mark.parametrize("mode", ["accept", "hold", "skip"])
def test_second_moment_that_overflows_never_enters_the_state(mode):
    """The update itself is finite: m / sqrt(inf) is zero. The state would be poisoned for good."""
    tx = ampx.static_loss_scale(optax.adam(0.1), 1.0, nonfinite_updates=mode)
    params = jnp.ones(2)
    start = tx.init(params)
    new_params, state = optimizer_step(tx, params, start, jnp.array([1.0, 1e25]))
    assert_bit_equal((new_params, state.inner_state), (params, start.inner_state))
    assert state.overflow and state.bad_update_total == 1
    new_params, state = optimizer_step(tx, new_params, state, jnp.ones(2))
    assert (new_params != params).all(), "a poisoned second moment would hold the element forever"


@pytest.mark.parametrize("mode", ["hold", "skip"])
def test_learning_rate_that_becomes_nan(mode):
    def schedule(count):
        return jnp.where(count == 1, NAN, 0.1)

    tx = dynamic(optax.adam(schedule), init_scale=1.0, nonfinite_updates=mode)
    params = jnp.ones(2)
    first, state = optimizer_step(tx, params, tx.init(params), jnp.ones(2))
    second, state = optimizer_step(tx, first, state, jnp.ones(2))
    assert_bit_equal(second, first)
    assert all_finite(state) and state.bad_update_total == 1
    # "hold" goes on past the bad count; "skip" undoes the count with the rest of the step.
    assert optax.tree.get(state.inner_state[0], "count") == (2 if mode == "hold" else 1)


@pytest.mark.parametrize("mode", ["hold", "skip"])
def test_finite_update_that_overflows_a_half_parameter(mode):
    tx = dynamic(optax.sgd(1.0), init_scale=1.0, nonfinite_updates=mode)
    params = jnp.full(2, 60000.0, jnp.float16)
    new_params, state = optimizer_step(tx, params, tx.init(params), jnp.array([-10000.0, 10000.0]))
    np.testing.assert_array_equal(new_params, [60000, 49984 if mode == "hold" else 60000])
    assert state.bad_update_total == 1 and state.overflow == (mode == "skip")


def test_state_that_starts_infinite_is_left_alone():
    """As optax.contrib.reduce_on_plateau does with its best value."""

    def update(updates, state, params=None):
        return updates, state

    tx = dynamic(
        optax.GradientTransformation(lambda p: jnp.full(1, INF), update), nonfinite_updates="skip"
    )
    _, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
    assert not state.overflow and state.bad_update_total == 0


@pytest.mark.parametrize("mode", ["hold", "skip"])
@given(
    values=st.lists(
        st.sampled_from([0.0, 1.0, -1e-7, 1e-4, 300.0, 65504.0, 1e30, -3e38, INF, NAN]),
        min_size=12,
        max_size=12,
    )
)
def test_nothing_nonfinite_ever_reaches_params_or_state(mode, values):
    params = jnp.ones(3, jnp.float16)
    step = nothing_nonfinite_step(mode)
    state = dynamic(half_adam(), init_scale=1.0, nonfinite_updates=mode).init(params)
    for grads in np.array(values, np.float32).reshape(4, 3):
        params, state = step(params, state, grads)
        assert all_finite((params, state))


@functools.cache
def nothing_nonfinite_step(mode):
    tx = dynamic(half_adam(), init_scale=1.0, nonfinite_updates=mode)
    return jax.jit(functools.partial(optimizer_step, tx))


# --- several losses, several optimizers -----------------------------------------------------------


@pytest.mark.slow_but("0-fp16-0", "1-fp16-1")
@pytest.mark.parametrize("bad_loss", [0, 1])
@pytest.mark.parametrize("bad_weight", ["fp16", "fp32"])
@pytest.mark.parametrize("bad_iteration", [0, 1])
def test_apex_multiple_models_optimizers_losses(bad_loss, bad_weight, bad_iteration):
    """Scales 4 and 16; the bad iteration leaves no trace in the final parameters."""

    def model(unique):
        weight = unique + jnp.arange(2.0)
        return {"fp32": weight, "fp16": (weight + 1).astype(jnp.float16)}

    params = {"model0": model(1.0), "model1": model(2.0)}
    x = jnp.array([1.0, -0.5])

    def loss(name, params):
        weights = params[name]
        return jnp.sum(x * weights["fp32"] * weights["fp16"].astype(jnp.float32))

    inner = ampx.master_weights(
        optax.partition(
            {"a": optax.sgd(0.25, momentum=0.125), "b": optax.sgd(0.5, momentum=0.125)},
            {"model0": "a", "model1": "b"},
        )
    )
    tx = dynamic(inner, num_losses=2, init_scale=16.0)
    state = tx.init(params)
    state = state._replace(loss_scale=jnp.array([4.0, 16.0]))
    reference_params, reference = params, inner.init(params)

    @jax.jit
    def step(params, state, poison):
        grads = []
        for i, name in enumerate(params):
            scale = ampx.current_loss_scale(state, i)
            scaled = jax.grad(lambda p, s=scale, n=name: loss(n, p) * s)(params)
            if i == bad_loss:
                weight = scaled[name][bad_weight]
                scaled[name][bad_weight] = weight.at[0].set(
                    jnp.where(poison, INF, weight[0]).astype(weight.dtype)
                )
            grads.append(scaled)
        return optimizer_step(tx, params, state, tuple(grads))

    for iteration in range(3):
        poison = iteration == bad_iteration
        params, state = step(params, state, jnp.array(poison))
        assert state.overflow == poison
        if not poison:
            grads = jax.grad(lambda p: loss("model0", p) + loss("model1", p))(reference_params)
            reference_params, reference = optimizer_step(inner, reference_params, reference, grads)
    assert_bit_equal(params, reference_params)
    assert_bit_equal(state.inner_state, reference)
    expected = [4.0, 16.0]
    expected[bad_loss] /= 2
    np.testing.assert_array_equal(state.loss_scale, expected)


def test_apex_checkpointing_of_three_losses_backed_off_0_1_2_times():
    tx = dynamic(optax.adam(0.1), num_losses=3, init_scale=2.0**16)
    params = {"w": jnp.ones(2, jnp.float32)}
    state, update = tx.init(params), jax.jit(tx.update)
    for loss_id in range(3):
        for _ in range(loss_id):
            grads = [None] * 3
            grads[loss_id] = {"w": jnp.array([INF, 1.0])}
            _, state = update(tuple(grads), state, params)
    leaves, treedef = jax.tree.flatten(state)
    restored = jax.tree.unflatten(treedef, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    assert_bit_equal(restored, state)
    for loss_id in range(3):
        assert ampx.current_loss_scale(restored, loss_id) == 2.0 ** (16 - loss_id)
    np.testing.assert_array_equal(restored.growth_tracker, 0)
    np.testing.assert_array_equal(restored.hysteresis_tracker, [1, 0, 0])
    assert restored.skipped_total == 3


def test_losses_are_unscaled_before_they_are_summed():
    tx = dynamic(optax.sgd(1.0), num_losses=2, init_scale=2.0**20)
    state = tx.init(jnp.zeros(1))._replace(loss_scale=jnp.array([2.0**100, 2.0]))
    updates, _ = jax.jit(tx.update)((jnp.array([2.0**100]), jnp.array([6.0])), state)
    np.testing.assert_array_equal(updates, [-4.0])


def test_one_bad_loss_skips_all_but_lowers_its_own_scale_alone():
    tx = dynamic(optax.sgd(1.0), num_losses=3, init_scale=8.0, growth_interval=2)
    state = tx.init(jnp.zeros(1))
    good, bad = jnp.ones(1), jnp.array([NAN])
    updates, state = tx.update((good, bad, None), state)
    assert updates == 0.0 and state.overflow
    np.testing.assert_array_equal(state.loss_scale, [8, 4, 8])
    np.testing.assert_array_equal(state.growth_tracker, [1, 0, 0])
    np.testing.assert_array_equal(state.nan_total, [0, 1, 0])
    _, state = tx.update((good, None, good), state)
    np.testing.assert_array_equal(state.loss_scale, [16, 4, 8])
    np.testing.assert_array_equal(state.growth_tracker, [0, 0, 1])
    # At its maximum: one growth is due, the next would be in the last step, which leaves it out.
    state = state._replace(loss_scale=jnp.full(3, 2.0**24))
    for grads in [(good, None, None)] * 3 + [(None, good, None)]:
        _, state = tx.update(grads, state)
    np.testing.assert_array_equal(state.ceiling_hits, [1, 0, 0])


@pytest.mark.parametrize(
    "grads, message",
    [
        (jnp.ones(1), "tuple of 2"),
        ((jnp.ones(1),), "length 1"),
        ((jnp.ones(1),) * 3, "length 3"),
        ((None, None), "every loss was left out"),
    ],
)
def test_gradients_of_the_wrong_number_of_losses_are_refused(grads, message):
    tx = dynamic(optax.sgd(1.0), num_losses=2)
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(jnp.ones(1)))


@pytest.mark.parametrize("bad_group", [None, "a", "b"])
def test_several_optimizers_share_one_scale_both_ways(bad_group):
    params = {"a": jnp.ones(2), "b": jnp.full(2, 2.0)}
    optimizers = {"a": optax.adam(0.1), "b": optax.sgd(0.5, momentum=0.9)}
    grads = {"a": jnp.full(2, 8.0), "b": jnp.full(2, 4.0)}
    if bad_group:
        grads[bad_group] = grads[bad_group].at[0].set(INF)

    inside = dynamic(optax.partition(optimizers, {"a": "a", "b": "b"}), init_scale=8.0)
    expected, inside_state = optimizer_step(inside, params, inside.init(params), grads)

    scaler = dynamic(optax.identity(), init_scale=8.0)
    unscaled, scaler_state = scaler.update(grads, scaler.init(params))
    for name, optimizer in optimizers.items():
        old = optimizer.init(params[name])
        new_params, new = optimizer_step(optimizer, params[name], old, unscaled[name])
        kept = ampx.select_if_finite(scaler_state, (new_params, new), (params[name], old))
        np.testing.assert_array_equal(kept[0], expected[name])
        if bad_group:
            assert_bit_equal(kept, (params[name], old))
    assert scaler_state.loss_scale == inside_state.loss_scale == (4.0 if bad_group else 8.0)
    if bad_group:
        assert_bit_equal(expected, params)


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.slow_but("inf-2 axes-False")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("value", [INF, NAN])
def test_torch_fsdp_sharded_grad_scaler_found_inf(axes, check_vma, value):
    """An overflow on one device: every device goes from 2.0 to 1.0 and skips."""
    mesh = make_mesh(*MESHES[axes])
    everywhere = P(mesh.axis_names)
    tx = dynamic(optax.adam(0.1), init_scale=2.0, axis_names=mesh.axis_names)
    params = jnp.ones(8)

    def step(params, state, grads):
        params, state = optimizer_step(tx, params, state, grads)
        return params, state, state.loss_scale[None], state.overflow[None]

    # Parameters and moments are sharded, as with FSDP; counters are equal everywhere.
    state_specs = jax.tree.map(lambda x: everywhere if x.ndim else P(), tx.init(params))
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everywhere, state_specs, everywhere),
            out_specs=(everywhere, state_specs, everywhere, everywhere),
            check_vma=check_vma,
        )
    )
    grads = jnp.ones(8)
    new_params, state, scales, overflow = step(params, tx.init(params), grads.at[5].set(value))
    np.testing.assert_array_equal(scales, [1.0] * 4)
    assert overflow.all()
    assert_bit_equal(new_params, params)
    new_params, state, scales, overflow = step(new_params, state, grads)
    assert not overflow.any() and (new_params != params).all()


@pytest.mark.slow_but("Explicit")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_state_keeps_its_shardings_under_jit(kind):
    mesh = make_mesh((4,), ("data",), kind)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tx = dynamic(ampx.master_weights(optax.adam(0.1)))
    params = jax.device_put(jnp.ones((8, 2), jnp.float16), rows)
    state = jax.jit(tx.init)(params)
    state = jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim else whole), state)
    step = jax.jit(functools.partial(optimizer_step, tx), donate_argnums=(0, 1))
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
    for seed in range(3):
        grads = jax.device_put(gradients(seed, params), rows)
        params, state = step(params, state, optax.tree.scale(state.loss_scale, grads))
        same = jax.tree.map(
            lambda x, spec: x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim),
            (params, state),
            specs,
        )
        assert all(jax.tree.leaves(same)), same


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("make_init", [lambda init: init, jax.jit], ids=["eager", "jitted"])
def test_one_trace_with_donation_and_stable_types(make_init):
    tx = dynamic(full_optimizer(), growth_interval=2)
    step, traces = counted_step(tx)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = make_init(tx.init)(params)
    types = types_of((params, state))
    for seed in range(3):
        params, state = step(params, state, optax.tree.scale(state.loss_scale, gradients(seed)))
        assert types_of((params, state)) == types
    assert len(traces) == 1


def test_scan_of_steps_equals_a_python_loop():
    tx = dynamic(full_optimizer(), growth_interval=2, init_scale=4.0)
    steps = [gradients(seed) for seed in range(6)]
    steps[3]["w"] = steps[3]["w"].at[0, 0].set(NAN)
    looped = run_steps(tx, PARAMS, steps)

    def body(carry, grads):
        params, state = carry
        return optimizer_step(tx, params, state, optax.tree.scale(state.loss_scale, grads)), ()

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
    scanned, _ = jax.jit(lambda c, x: jax.lax.scan(body, c, x))((PARAMS, tx.init(PARAMS)), stacked)
    # Moments may differ in their last bit: XLA compiles the body of a scan otherwise.
    for found, expected in zip(*map(jax.tree.leaves, (scanned, looped)), strict=True):
        exact = found.dtype != jnp.float32 or not found.shape
        np.testing.assert_allclose(found, expected, rtol=0 if exact else 1e-6)


@pytest.mark.slow
def test_vmap_over_states_judges_each_lane_alone():
    tx = dynamic(optax.adam(0.1), init_scale=8.0)
    params = jnp.arange(6.0).reshape(3, 2)
    state = jax.vmap(tx.init)(params)
    grads = jnp.ones((3, 2)).at[1, 0].set(INF)
    new_params, new_state = jax.vmap(functools.partial(optimizer_step, tx))(params, state, grads)
    np.testing.assert_array_equal(new_state.loss_scale, [8, 4, 8])
    np.testing.assert_array_equal(new_state.overflow, [False, True, False])
    for lane in range(3):
        alone = optimizer_step(tx, params[lane], tx.init(params[lane]), grads[lane])
        assert_bit_equal(jax.tree.map(lambda x, i=lane: x[i], (new_params, new_state)), alone)


def test_bounds_survive_jit_and_a_pytree_round_trip():
    tx = dynamic(optax.identity(), min_scale=2.0**-3, max_scale=2.0**17, growth_interval=1)

    @jax.jit
    def step(state, bad):
        _, state = tx.update(jnp.where(bad, INF, 1.0)[None], state)
        return jax.tree.unflatten(*reversed(jax.tree.flatten(state)))

    state = tx.init(jnp.zeros(1))
    for bad, bound in ((True, 2.0**-3), (False, 2.0**17)):
        for _ in range(25):
            state = step(state, jnp.array(bad))
        assert state.loss_scale == bound


def test_integer_parameters_and_their_empty_gradients():
    params = {"w": jnp.ones(2), "table": jnp.arange(2)}
    tx = dynamic(optax.masked(optax.sgd(1.0), {"w": True, "table": False}), init_scale=8.0)

    @jax.jit
    def step(params, state, factor):
        def loss(p):
            return jnp.sum(p["w"] * p["table"].astype(jnp.float32)) * state.loss_scale * factor

        grads = jax.grad(loss, allow_int=True)(params)
        assert grads["table"].dtype == jax.dtypes.float0
        return optimizer_step(tx, params, state, grads)

    new_params, state = step(params, tx.init(params), 1.0)
    assert_bit_equal(new_params, {"w": jnp.array([1.0, 0.0]), "table": params["table"]})
    held, state = step(new_params, state, INF)
    assert_bit_equal(held, new_params)
    assert state.loss_scale == 4.0


def test_random_keys_inside_the_optimizer_are_held_too():
    def update(updates, key, params=None):
        return updates, jax.random.split(key)[0]

    tx = dynamic(optax.GradientTransformation(lambda p: jax.random.key(0), update))
    start = tx.init(jnp.ones(1))
    _, good = tx.update(jnp.ones(1), start)
    _, held = tx.update(jnp.array([NAN]), good)
    assert_bit_equal(held.inner_state, good.inner_state)
    assert np.any(jax.random.key_data(good.inner_state) != jax.random.key_data(start.inner_state))


# --- choices and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, -1, "none", -1.0, "-1"])
def test_loss_scale_off(choice):
    inner = optax.adamw(0.1)
    params = jnp.ones(2)
    state = ampx.loss_scale(choice, inner).init(params)
    assert_bit_equal(state, inner.init(params))
    assert ampx.current_loss_scale(state) == 1.0 and not ampx.is_skipped(state)


@pytest.mark.parametrize(
    "choice, scale",
    [
        (0, 2.0**16),
        ("dynamic", 2.0**16),
        (jnp.array(0), 2.0**16),
        (1, 1.0),
        (128, 128.0),
        ("128", 128.0),
        (1.5, 1.5),
        (np.float32(8), 8.0),
        (jnp.array(8), 8.0),
        (jnp.array([8.0]), 8.0),
    ],
)
def test_loss_scale_on(choice, scale):
    tx = ampx.loss_scale(choice, optax.sgd(1.0))
    _, state = tx.update(jnp.array([INF]), tx.init(jnp.ones(1)))
    assert state.overflow
    assert state.loss_scale == (scale / 2 if scale == 2.0**16 else scale)


@pytest.mark.parametrize(
    "choice, error, message",
    [
        (True, TypeError, "True of type bool: write 'dynamic' or the number"),
        (jnp.array(True), TypeError, "True"),
        (np.True_, TypeError, "True"),
        ([8.0], TypeError, r"\[8.0\] of type list"),
        (8j, TypeError, "8j"),
        ("abc", ValueError, "'none' .*'dynamic', or a number >= 1, got 'abc'"),
        ("", ValueError, "got ''"),
        (0.5, ValueError, "number >= 1, got 0.5"),
        (-2, ValueError, "number >= 1, got -2"),
        (NAN, ValueError, "got nan"),
        ("nan", ValueError, "got 'nan'"),
        (INF, ValueError, "between 2.*got inf"),
        (jnp.array([8.0, 9.0]), ValueError, r"shape \(\) or \(1,\), got \(2,\)"),
        (jnp.ones((1, 1)), ValueError, r"got \(1, 1\)"),
    ],
)
def test_loss_scale_refuses(choice, error, message):
    with pytest.raises(error, match=message):
        ampx.loss_scale(choice, optax.sgd(1.0))


def test_loss_scale_passes_options_to_what_was_chosen():
    state = ampx.loss_scale("dynamic", optax.sgd(1.0), init_scale=4.0).init(jnp.ones(1))
    assert state.loss_scale == 4.0
    with pytest.raises(TypeError, match="init_scale"):
        ampx.loss_scale(None, optax.sgd(1.0), init_scale=4.0)
    with pytest.raises(TypeError, match="growth_interval"):
        ampx.loss_scale(128, optax.sgd(1.0), growth_interval=4)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(init_scale=100.0), ValueError, "100.0 is not a power of two.*64 or 128"),
        (dict(backoff_factor=0.8), ValueError, "0.8 is not a power of two.*0.5 or 1"),
        (dict(max_scale=65504.0), ValueError, "32768 or 65536"),
        (dict(growth_factor=0.5), ValueError, "growth_factor must be >= 1"),
        (dict(backoff_factor=1.0), ValueError, "backoff_factor < 1"),
        (dict(backoff_factor=0.0), ValueError, "between 2"),
        (dict(min_scale=2.0**-127), ValueError, r"2\*\*-126"),
        (dict(max_scale=2.0**127), ValueError, r"2\*\*126"),
        (dict(init_scale=2.0**25), ValueError, "outside"),
        (dict(init_scale=0.5), ValueError, "outside"),
        (dict(init_scale="4"), TypeError, "'4' of type str"),
        (dict(init_scale=True), TypeError, "True"),
        (dict(growth_interval=0), ValueError, "positive int, got 0"),
        (dict(growth_interval=2.0), TypeError, "positive int, got 2.0"),
        (dict(hysteresis=0), ValueError, "positive int, got 0"),
        (dict(hysteresis=True), TypeError, "got True"),
        (dict(refill="never"), ValueError, "'growth', 'finite', 'change'.*'never'"),
        (dict(on_floor="flag"), ValueError, "'hold', 'raise-flag'.*'flag'"),
        (dict(nonfinite_updates="drop"), ValueError, "'accept', 'hold', 'skip'.*'drop'"),
        (dict(num_losses=0), ValueError, "positive int, got 0"),
    ],
)
def test_dynamic_loss_scale_refuses(options, error, message):
    with pytest.raises(error, match=message):
        dynamic(optax.sgd(1.0), **options)


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN, 2.0**127])
def test_static_loss_scale_refuses(scale):
    with pytest.raises(ValueError, match="scale must be between"):
        ampx.static_loss_scale(optax.sgd(1.0), scale)


@pytest.mark.parametrize("inner", [None, 0.1, optax.sgd, jnp.ones(1)])
def test_ascend_manager_without_an_optimizer_is_an_error_at_construction(inner):
    """Rows A4 and D6: the wrong kind of argument is refused before training starts."""
    with pytest.raises(TypeError, match="gradient transformation.*give the optimizer"):
        dynamic(inner)


@pytest.mark.parametrize(
    "inside",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: ampx.master_weights(tx),
        lambda tx: ampx.multi_steps(tx, 2),
    ],
)
def test_nested_scales_are_refused(inside):
    nested = dynamic(inside(ampx.static_loss_scale(optax.sgd(1.0), 8.0)))
    with pytest.raises(ValueError, match="unscaled twice; wrap once"):
        nested.init(jnp.ones(1))


def test_a_shorter_interval_after_a_resume_still_grows():
    long, short = (ampx.dynamic_loss_scale(optax.sgd(0.1), growth_interval=n) for n in (10, 3))
    params = jnp.zeros(1)
    _, state = run_steps(long, params, [jnp.ones(1)] * 5)
    _, state = short.update(state.loss_scale * jnp.ones(1), state)
    assert float(state.loss_scale) == 2.0**17 and int(state.growth_tracker) == 0


def test_agreement_under_vmap_with_an_axis_name():
    tx = ampx.dynamic_loss_scale(optax.sgd(0.1), axis_names="replica")
    grads = jnp.array([[1.0], [jnp.inf], [1.0]])
    update = jax.vmap(lambda g: tx.update(g, tx.init(jnp.zeros(1))), axis_name="replica")
    _, states = jax.jit(update)(grads)
    assert states.overflow.tolist() == [True] * 3
