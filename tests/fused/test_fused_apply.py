"""`ampx.fused.apply`: a loss scale, a clip, an update and a skip are what they are apart."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import all_finite, assert_bit_equal, optimizer_step, types_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ampx
from ampx import fused
from ampx.fused import application
from ampx.jaxprs import building
from ampx.jaxprs.reading import is_literal
from ampx.loss_scaling.nonfinite import Verdict
from ampx.training import step_arguments
from ampx.updates.extra_args import check_spelling

INF, NAN = float("inf"), float("nan")
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**4, growth_interval=2)
RATE = optax.linear_schedule(0.1, 0.01, 20)
DECAY = optax.linear_schedule(0.2, 0.05, 10)
SUBNORMAL = 1e-41
PARAMS = {
    "w": jnp.array([[1.0, -2.0, -0.0], [0.5, SUBNORMAL, 3.0]]),
    "b": jnp.array([-0.0, 0.25]),
    "s": jnp.float32(1.5),
}
LABELS = {"w": "moments", "b": "plain", "s": "moments"}


def normal(seed, like=PARAMS):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda p: jnp.asarray(draw(size=p.shape), jnp.float32), like)


def spoiled(grads, value):
    return grads | {"w": grads["w"].at[1, 2].set(value)}


def near(actual, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=1e-9))


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def own_fields(state):
    """The loss scale's part of the state."""
    return tuple(value for name, value in state._asdict().items() if name != "inner_state")


def partitioned(library, labels=LABELS):
    groups = {
        "moments": library.adamw(RATE, weight_decay=DECAY, mask=matrices),
        "plain": optax.inject_hyperparams(library.sgd)(RATE, momentum=0.9),
    }
    return optax.partition(groups, labels)


FULL = {
    "adamw": lambda library: library.adamw(RATE, weight_decay=DECAY, mask=matrices),
    "hyperparams": lambda library: optax.inject_hyperparams(library.lamb)(RATE, weight_decay=0.1),
    "partition": partitioned,
    "masters": lambda library: ampx.master_weights(library.adamw(RATE, weight_decay=DECAY)),
    "masters of hyperparams": lambda library: ampx.master_weights(
        optax.inject_hyperparams(library.adadelta)(RATE, weight_decay=0.1)
    ),
    "novograd": lambda library: library.novograd(RATE, weight_decay=0.1),
    "trace": lambda library: library.sgd(RATE, momentum=0.9, nesterov=True),
    "lion": lambda library: library.lion(RATE, weight_decay=DECAY),
    "adagrad": lambda library: library.adagrad(RATE),
}


def stored(name, params=PARAMS):
    """The parameters, in half where there are masters."""
    halves = {key: p.astype(jnp.float16) for key, p in params.items()}
    return params | {"w": halves["w"], "s": halves["s"]} if "masters" in name else params


@functools.cache
def jitted(name, max_norm=None, library=fused, loss_scale=dynamic):
    """(init, a step of apply, or of plain optax)."""
    inner = FULL[name](library)
    if library is fused:
        tx = loss_scale(inner)
        return tx.init, jax.jit(lambda p, s, g: fused.apply(tx, g, s, p, max_norm=max_norm))
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    tx = loss_scale(inner if max_norm is None else optax.chain(clip, inner))
    return tx.init, jax.jit(functools.partial(optimizer_step, tx))


# --- skips ---------------------------------------------------------------------------------------

KINDS = {"good": None, "inf": INF, "nan": NAN, "-inf": -INF}


@pytest.mark.whole_but("masters", "adamw", "partition", "novograd", "masters of hyperparams")
@pytest.mark.slow_but("masters")
@pytest.mark.parametrize("name", FULL)
@settings(max_examples=8)
@given(kinds=st.lists(st.sampled_from([*KINDS, "good"]), min_size=1, max_size=8))
def test_a_skipped_step_leaves_every_bit_and_moves_the_scale_as_ever(name, kinds):
    init, step = jitted(name, 1.0)
    scaler = dynamic(optax.set_to_zero())
    params, state, reference = stored(name), init(stored(name)), scaler.init(PARAMS)
    for seed, kind in enumerate(kinds):
        grads = normal(seed)
        if KINDS[kind] is not None:
            grads = spoiled(grads, KINDS[kind])
        grads = optax.tree.scale(ampx.current_loss_scale(state), grads)
        before = params, state.inner_state
        params, state, report = step(params, state, grads)
        _, reference = scaler.update(grads, reference)
        assert bool(report.overflow) == (kind != "good")
        assert_bit_equal(own_fields(state), own_fields(reference))
        if kind == "good":
            assert np.any(np.asarray(params["w"]) != np.asarray(before[0]["w"]))
        else:
            assert_bit_equal((params, state.inner_state), before)


@pytest.mark.slow_but("adamw")
@pytest.mark.parametrize("name", ["adamw", "masters of hyperparams", "partition"])
def test_skips_of_the_update_face_leave_every_bit(name):
    tx = dynamic(FULL[name](fused))
    step = jax.jit(functools.partial(optimizer_step, tx))
    params = stored(name) | {"w": stored(name)["w"].at[1, 1].set(-0.0)}  # no sum keeps subnormals
    _, state = step(params, tx.init(params), normal(0))
    for value in (INF, NAN):
        after, next_state = step(params, state, spoiled(normal(1), value))
        assert_bit_equal((after, next_state.inner_state), (params, state.inner_state))


# --- equality with the parts ---------------------------------------------------------------------


@pytest.mark.whole_but(
    "partition-1.0",
    "novograd-1.0",
    "hyperparams-1.0",
    "masters of hyperparams-1.0",
    "adamw-None",
    "adagrad-1.0",
    "masters-None",
)
@pytest.mark.slow_but("partition-1.0")
@pytest.mark.parametrize(
    "name, max_norm", [*((name, 1.0) for name in FULL), ("adamw", None), ("masters", None)]
)
def test_apply_equals_clip_and_optax_inside_a_loss_scale(name, max_norm):
    start = {key: jnp.where(jnp.abs(p) < 1e-30, 0.125, p) for key, p in PARAMS.items()}
    (init, step), (plain_init, plain_step) = (
        jitted(name, max_norm, library) for library in (fused, optax)
    )
    start = stored(name, start)
    params, state, plain, plain_state = start, init(start), start, plain_init(start)
    for i in range(20):
        grads = normal(i)
        grads = spoiled(grads, INF) if i in (0, 7, 8) else grads
        scale = ampx.current_loss_scale(state)
        params, state, report = step(params, state, optax.tree.scale(scale, grads))
        plain, plain_state = plain_step(plain, plain_state, optax.tree.scale(scale, grads))
        assert_bit_equal(own_fields(state), own_fields(plain_state))
        assert_bit_equal(report.loss_scale, scale)
        if not report.overflow:
            np.testing.assert_allclose(report.global_norm, optax.tree.norm(grads), rtol=1e-6)
    inner = plain_state.inner_state if max_norm is None else plain_state.inner_state[1]
    near(state.inner_state, inner)
    near(params, plain, 1e-3 if "masters" in name else 2e-6)  # a half may round the other way
    assert state.skipped_total == 3
    assert types_of(params) == types_of(start)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_gradients_are_unscaled_in_float32(half):
    """2**-20 over the scale is nothing in float16, and 1/3 is not exact in either."""
    tx = ampx.static_loss_scale(fused.sgd(1.0), 3 * 2.0**10)
    params, grads = jnp.zeros(2), jnp.array([2.0**-20, 3.0], half)
    new, _, report = fused.apply(tx, grads, tx.init(params), params)
    expected = -np.asarray(grads, np.float64) / (3 * 2.0**10)
    np.testing.assert_allclose(new, expected, rtol=3e-7)
    np.testing.assert_allclose(report.global_norm, np.linalg.norm(expected), rtol=3e-7)


def test_the_scale_that_is_held_divides_and_only_then_moves():
    tx = ampx.dynamic_loss_scale(fused.sgd(1.0), init_scale=8.0, growth_interval=1)
    params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    for expected, scale in ((-1.0, 8.0), (-2.0, 16.0), (-3.0, 32.0)):
        params, state, report = fused.apply(tx, jnp.array([scale]), state, params)
        assert (float(params[0]), float(report.loss_scale)) == (expected, scale)
        assert float(state.loss_scale) == 2 * scale


# --- the norm and the clip -----------------------------------------------------------------------


def scaled_or_bare(is_scaled, inner):
    return ampx.static_loss_scale(inner, 64.0) if is_scaled else inner


@pytest.mark.parametrize("is_scaled", [True, False], ids=["scaled", "bare"])
def test_the_norm_in_the_report_is_unscaled_and_before_the_clip(is_scaled):
    tx = scaled_or_bare(is_scaled, fused.sgd(1.0))
    params, grads = jnp.zeros(2), jnp.array([3.0, -4.0]) * (64.0 if is_scaled else 1.0)
    for max_norm, expected in ((1.0, [-0.6, 0.8]), (5.0, [-3, 4]), (100.0, [-3, 4])):
        new, _, report = fused.apply(tx, grads, tx.init(params), params, max_norm=max_norm)
        np.testing.assert_allclose(new, expected, rtol=1e-6)
        assert float(report.global_norm) == pytest.approx(5.0)
        assert float(report.loss_scale) == (64.0 if is_scaled else 1.0)
        assert report.half_params is None and not report.overflow


@pytest.mark.parametrize("is_scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finite_gradients_whose_squares_overflow_are_clipped_and_counted_as_good(dtype, is_scaled):
    tx = scaled_or_bare(is_scaled, fused.sgd(1.0))
    params = {"a": jnp.zeros(2), "b": jnp.zeros((2, 2))}
    grads = {"a": jnp.array([1e30, -2e30], dtype), "b": jnp.full((2, 2), 0.5e30, dtype)}
    new, state, report = fused.apply(tx, grads, tx.init(params), params, max_norm=2.0)
    exact = jax.tree.map(lambda g: np.asarray(g, np.float64) / (64 if is_scaled else 1), grads)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(exact)))
    near(new, jax.tree.map(lambda g: -2 * g / norm, exact))
    np.testing.assert_allclose(report.global_norm, norm, rtol=1e-6)
    assert not report.overflow
    if is_scaled:
        assert not any(map(int, (state.inf_total, state.nan_total, state.bad_update_total)))


@pytest.mark.parametrize("largest", [1.5e38, 3e38])
def test_scaled_gradients_near_the_end_of_float32_are_clipped_to_nothing(largest):
    """Clip and scale together are below 2**-126. The norm is right all the same."""
    tx = ampx.static_loss_scale(fused.sgd(1.0), 2.0**16)
    params, grads = jnp.zeros(4), jnp.full(4, largest)
    new, _, report = fused.apply(tx, grads, tx.init(params), params, max_norm=2.0)
    np.testing.assert_allclose(report.global_norm, 2 * largest / 2.0**16, rtol=1e-6)
    assert not np.any(new) and not report.overflow


def test_the_whole_tail_needs_no_room_for_an_array():
    """Neither does the second look at a norm, for which XLA must make room as well."""
    tx, params = dynamic(fused.adamw(0.1)), {f"p{k}": jnp.ones(2**18) for k in range(6)}

    def step(params_and_state, grads):
        params, state = params_and_state
        return fused.apply(tx, grads, state, params, max_norm=1.0)[:2]

    carried = jax.eval_shape(lambda p: (p, tx.init(p)), params)
    memory = jax.jit(step, donate_argnums=0).lower(carried, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**15
    assert memory.alias_size_in_bytes >= 3 * 6 * 2**20


def test_adagrad_without_a_loss_scale_copies_no_slot():
    """Its sum ends at the largest number; XLA read the old sum twice where a minimum said so."""
    tx, params = fused.adagrad(0.1), jnp.ones(2**14)

    def step(params_and_state, grads):
        params, state = params_and_state
        return fused.apply(tx, grads, state, params)[:2]

    carried = params, tx.init(params)
    memory = jax.jit(step, donate_argnums=0).lower(carried, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**10


@pytest.mark.slow_but(
    "3-float32-inf-counts0",
    "3-bfloat16-nan-counts2",
    "8192-float32-nan-counts2",
    "8192-float16--inf-counts1",
)
@pytest.mark.parametrize("value, counts", [(INF, (1, 0)), (-INF, (1, 0)), (NAN, (0, 1))])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [3, 8192])  # XLA's maximum of many numbers on CPUs loses a NaN
def test_infinities_and_nans_are_counted_apart(size, value, counts, dtype):
    tx = dynamic(fused.adam(0.1))
    params = jnp.ones(size)
    for max_norm in (None, 1.0):
        grads = jnp.ones(size, dtype).at[1].set(value)
        new, state, report = fused.apply(tx, grads, tx.init(params), params, max_norm=max_norm)
        assert (int(state.inf_total), int(state.nan_total)) == counts
        assert report.overflow and int(state.skipped_total) == 1
        assert_bit_equal(new, params)
        assert not np.isfinite(report.global_norm)


def test_a_verdict_from_elsewhere_is_believed_and_the_norm_still_reported():
    tx, params, grads = dynamic(fused.sgd(1.0)), jnp.zeros(2), jnp.array([48.0, 64.0])
    good, bad = (Verdict(jnp.array(counts, jnp.int32), ()) for counts in ([0, 0], [1, 0]))
    settings = dict(max_norm=1.0)
    new, _, report = fused.apply(tx, grads, tx.init(params), params, verdict=good, **settings)
    np.testing.assert_allclose(new, [-0.6, -0.8], rtol=1e-6)
    assert not report.overflow
    assert report.global_norm is not None and float(report.global_norm) == pytest.approx(5.0)
    new, state, report = fused.apply(tx, grads, tx.init(params), params, verdict=bad, **settings)
    assert_bit_equal(new, params)
    assert report.overflow and int(state.inf_total) == 1


def test_a_misspelled_setting_is_no_extra_argument():
    """A clip by the name that the train step has for it would be ignored, as optax does."""
    tx = fused.sgd(0.1)
    state = tx.init(params := jnp.ones(2))
    with pytest.raises(TypeError, match="'max_grad_norm', .* did you mean 'max_norm'"):
        fused.apply(tx, params, state, params, max_grad_norm=1.0)
    handed_over = {*step_arguments._OWN, "value", "value_fn", "obj_fn", "grad_fn"}  # by the step
    check_spelling(handed_over - {*application._SETTINGS}, application._SETTINGS)


@pytest.mark.parametrize("max_norm", [0, -1.0, NAN])
def test_a_clip_to_nothing_is_refused(max_norm):
    tx = fused.sgd(1.0)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        fused.apply(tx, PARAMS, tx.init(PARAMS), PARAMS, max_norm=max_norm)


def test_the_clip_may_be_an_array_that_changes_without_a_new_trace():
    tx, params = fused.sgd(1.0), jnp.zeros(2)
    step = jax.jit(lambda m: fused.apply(tx, params + 3.0, tx.init(params), params, max_norm=m)[0])
    for max_norm in (1.0, 2.0):
        np.testing.assert_allclose(step(max_norm), -max_norm * np.sqrt([0.5, 0.5]), rtol=1e-6)
    assert step._cache_size() == 1


def test_a_clip_leaves_smaller_gradients_alone():
    tx, params = fused.sgd(1.0), jnp.zeros(2)
    new = fused.apply(tx, jnp.array([3.0, -4.0]), tx.init(params), params, max_norm=5.5)[0]
    assert_bit_equal(new, jnp.array([-3.0, 4.0]))


# --- what is not finite without the gradients' fault ---------------------------------------------

UNFIT = {
    "a rate of NaN": (lambda lib: lib.adamw(lambda _: jnp.float32(NAN)), 1.0, 1.0),
    "a rate of inf": (lambda lib: lib.sgd(lambda _: jnp.float32(INF)), 1.0, 1.0),
    "a decay of NaN": (
        lambda lib: lib.adamw(0.1, weight_decay=lambda _: jnp.float32(NAN)),
        1.0,
        1.0,
    ),
    "a step that overflows": (lambda lib: lib.sgd(1e30), 1e18, 1.0),
    "zero over zero": (lambda lib: lib.adam(0.1, eps=0.0), 0.0, 1.0),
}


@pytest.mark.parametrize("face", ["apply", "update"])
@pytest.mark.parametrize("name", UNFIT)
def test_updates_that_are_not_finite_are_held(name, face):
    """Counted are those of a coefficient, which is seen for free; optax's are all counted."""
    make, grad, param = UNFIT[name]
    params, grads = jnp.full(2, param), jnp.full(2, grad)
    for library in (optax, fused):
        mode = "hold" if library is optax else "accept"  # to which a fused optimizer adds its own
        tx = dynamic(make(library), nonfinite_updates=mode)
        if face == "apply" and library is fused:
            new, state, report = fused.apply(tx, 16.0 * grads, tx.init(params), params)
            assert not report.overflow
        else:
            new, state = optimizer_step(tx, params, tx.init(params), 16.0 * grads)
        assert all_finite((new, state))
        assert_bit_equal(new, params)
        is_counted = library is optax or name not in ("a step that overflows", "zero over zero")
        assert (library, int(state.bad_update_total)) == (library, int(is_counted))
        assert int(state.skipped_total) == 0
        if library is fused and is_counted:  # moments stay with the parameter, whose step they were
            moments = [x for x in jax.tree.leaves(state.inner_state) if x.shape == params.shape]
            assert_bit_equal(moments, [jnp.zeros(2)] * len(moments))


@pytest.mark.parametrize("make", [fused.sgd, fused.adamw, fused.lion])
def test_no_number_is_held_by_a_choice_in_its_own_place(make):
    """A choice for each element between the new and the old number is a masked store for x86.

    Some processors are slow at it. One choice for all elements is none.
    """
    tx = dynamic(make(0.1))
    state = tx.init(PARAMS)
    traced = jax.make_jaxpr(lambda *given: fused.apply(tx, *given)[:2])(PARAMS, state, PARAMS)
    in_place, choices = set(traced.jaxpr.invars[-3:]), []
    for eqn in building.inline_calls(traced).eqns:
        read = in_place.intersection(x for x in eqn.invars if not is_literal(x))
        if read and eqn.primitive.name == "custom_jvp_call":  # a mark for derivatives
            in_place.update(eqn.outvars)
        if read and eqn.primitive.name == "select_n":
            choices.append(eqn)
    assert len(choices) >= len(PARAMS)
    assert not any(eqn.invars[0].aval.ndim for eqn in choices)


HALF_OVERFLOWS = {
    "parameter": (lambda lib: lib.sgd(1.0), [-6e4, -1.0], [6e4, 1.0], [6e4, 2.0], 1),
    "master": (
        lambda lib: ampx.master_weights(lib.sgd(1.0)),
        [-6e4, -1.0],
        [6e4, 1.0],
        [6e4, 2.0],
        1,
    ),
    # A step of 75000 is none that float16 holds, but the sum is.
    "step": (lambda lib: lib.sgd(1.25), [-6e4, -1.0], [-6e4, 1.0], [15000.0, 2.25], 0),
}


@pytest.mark.parametrize("face", ["apply", "update"])
@pytest.mark.parametrize("name", HALF_OVERFLOWS)
def test_float16_parameters_that_would_overflow_are_held_and_counted(name, face):
    make, grads, params, expected, bad = HALF_OVERFLOWS[name]
    params, grads = jnp.array(params, jnp.float16), jnp.array(grads, jnp.float16)
    for library in (optax, fused):
        tx = ampx.static_loss_scale(make(library), 1.0)
        if face == "apply" and library is fused:
            new, state, _ = fused.apply(tx, grads, tx.init(params), params)
        else:
            new, state = optimizer_step(tx, params, tx.init(params), grads)
        assert_bit_equal(new, jnp.array(expected, jnp.float16))
        assert int(state.bad_update_total) == bad


HALF_MOMENTS = {
    "adam": lambda lib: lib.adam(0.1, b2=0.9),
    "adagrad": lambda lib: lib.adagrad(0.1),
    "novograd": lambda lib: lib.novograd(0.1),
    "adadelta": lambda lib: lib.adadelta(0.1),
    "momentum": lambda lib: lib.sgd(1e-6, momentum=0.9),
}


@pytest.mark.slow_but("adam-apply", "adagrad-update", "novograd-update")
@pytest.mark.parametrize("face", ["apply", "update"])
@pytest.mark.parametrize("name", HALF_MOMENTS)
def test_float16_moments_that_would_overflow_are_held(name, face):
    tx = ampx.static_loss_scale(HALF_MOMENTS[name](fused), 1.0)
    params, grads = jnp.ones(2, jnp.float16), jnp.array([6e4, 1.0], jnp.float16)
    state = tx.init(params)
    for _ in range(3):
        if face == "apply":
            params, state, _ = fused.apply(tx, grads, state, params)
        else:
            params, state = optimizer_step(tx, params, state, grads)
    assert all_finite((params, state))


def test_what_was_not_finite_before_stays_so_and_is_not_counted():
    tx = dynamic(fused.adamw(0.1))
    params = jnp.array([1.0, INF, NAN])
    new, state, _ = fused.apply(tx, jnp.ones(3), tx.init(params), params)
    assert np.isfinite(new).tolist() == [True, False, False]
    assert int(state.bad_update_total) == 0


# --- the report and the half copy ----------------------------------------------------------------


def test_without_a_loss_scale_nothing_is_judged():
    tx, params = fused.sgd(1.0), jnp.ones(2)
    new, _, report = fused.apply(tx, jnp.array([NAN, 1.0]), tx.init(params), params)
    assert np.isnan(new[0]) and new[1] == 0.0
    assert report.global_norm is None and not report.overflow and report.loss_scale == 1.0


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_the_half_copy_is_the_new_parameters_rounded(half):
    tx = dynamic(fused.adamw(0.1))
    params = {"w": jnp.linspace(-1, 1, 7), "i": jnp.arange(3)}
    grads = {"w": jnp.linspace(1, 2, 7), "i": np.zeros(3, jax.dtypes.float0)}
    for gradient in (grads, grads | {"w": grads["w"] * NAN}):
        new, _, report = fused.apply(tx, gradient, tx.init(params), params, half_dtype=half)
        assert_bit_equal(report.half_params, {"w": new["w"].astype(half), "i": params["i"]})
        assert report.half_params["w"].dtype == half


def test_the_report_has_the_dtypes_it_says():
    tx = dynamic(fused.adamw(0.1))
    report = jax.eval_shape(lambda p: fused.apply(tx, p, tx.init(p), p)[2], PARAMS)
    assert types_of(report)[:3] == (((), jnp.float32, False), ((), bool, False)) + (
        ((), jnp.float32, False),
    )


# --- tracing -------------------------------------------------------------------------------------


@pytest.mark.slow_but("partition", "masters of hyperparams")
@pytest.mark.parametrize("name", FULL)
def test_steps_are_traced_once_and_update_in_place(name):
    tx = dynamic(FULL[name](fused))
    params = jax.tree.map(jnp.copy, stored(name))
    state = tx.init(params)
    types = types_of((params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return fused.apply(tx, grads, state, params, max_norm=1.0)

    for i in range(4):
        held = jax.tree.leaves((params, state.inner_state))
        params, state, _ = step(params, state, normal(i))
        assert all(leaf.is_deleted() for leaf in held)  # a warning would be an error besides
        assert types_of((params, state)) == types
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", ["partition", "masters of hyperparams"])
def test_a_scan_over_steps_equals_a_loop(name):
    tx = dynamic(FULL[name](fused))
    params = stored(name)
    steps = [normal(0), spoiled(normal(1), NAN), normal(2)]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *steps)

    def body(carry, grads):
        params, state = carry
        params, state, report = fused.apply(tx, grads, state, params, max_norm=1.0)
        return (params, state), report

    scanned, reports = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(
        (params, tx.init(params)), stacked
    )
    carry, step = (params, tx.init(params)), jitted(name, 1.0)[1]
    for grads in steps:
        carry = step(*carry, grads)[:2]
    near(scanned, carry, 1e-3 if "masters" in name else 2e-6)
    assert reports.overflow.tolist() == [False, True, False]


def test_under_vmap_each_model_has_its_own_norm_and_verdict():
    tx = dynamic(fused.lamb(0.1, weight_decay=0.1))
    params = jax.tree.map(lambda p: jnp.stack([p, p + 1, p - 1]), PARAMS)
    grads = [normal(0), spoiled(normal(1), INF), optax.tree.scale(1e25, normal(2))]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)

    def step(params, grads):
        return fused.apply(tx, grads, tx.init(params), params, max_norm=1.0)

    together = jax.jit(jax.vmap(step))(params, stacked)
    for i, own in enumerate(grads):
        own_params, own_results = (
            jax.tree.map(operator.itemgetter(i), x) for x in (params, together[:2])
        )
        alone = step(own_params, own)
        near(own_results, alone[:2])
        assert bool(together[2].overflow[i]) == bool(alone[2].overflow) == (i == 1)


# --- parameters of other kinds -------------------------------------------------------------------

WRAPPERS = {
    "bare": lambda tx: tx,
    "scaled": dynamic,
    "masters": lambda tx: dynamic(ampx.master_weights(tx)),
    "partition": lambda tx: dynamic(optax.partition({"all": tx}, lambda p: "all")),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_integer_parameters_and_missing_ones_stay(name):
    tx = WRAPPERS[name](fused.adamw(0.1))
    params = {"w": jnp.ones(2, jnp.float16), "i": jnp.array([2**24 + 1, -3]), "none": None}
    grads = {"w": jnp.ones(2, jnp.float16), "i": np.zeros(2, jax.dtypes.float0), "none": None}
    for value in (1.0, NAN):
        grads["w"] = jnp.full(2, value, jnp.float16)
        applied, state, _ = fused.apply(tx, grads, tx.init(params), params)
        updated, _ = optimizer_step(tx, params, tx.init(params), grads)
        for new in (applied, updated):
            assert_bit_equal({**new, "w": 0}, {**params, "w": 0})
        assert types_of(state) == types_of(tx.init(params))
        if value == 1.0:
            assert (np.asarray(applied["w"]) < 1).all()


def test_no_parameters_at_all_are_no_trouble():
    tx = dynamic(fused.adamw(0.1))
    new, state, report = fused.apply(tx, {}, tx.init({}), {}, max_norm=1.0)
    assert new == {} and report.global_norm == 0.0 and state.growth_tracker == 1


@pytest.mark.parametrize(
    ("tx", "are_merged"),
    [
        (fused.adamw(0.1), True),
        (fused.lamb(0.1), False),
        (fused.adamw(0.1, mu_dtype="int8", nu_dtype="int8"), False),
    ],
    ids=["adamw", "lamb", "int8"],
)
def test_only_loops_without_reductions_read_one_vector(tx, are_merged):
    """XLA for GPUs merges loops that share an array, and writes out what a merged one reduces."""
    params = [jnp.ones((64, 256))] * 2
    jaxpr = jax.make_jaxpr(functools.partial(fused.apply, tx))(params, tx.init(params), params)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert ("unstack" in names or "slice" in names) == are_merged
