"""`fused.fuse`: optax's optimizers in the fused tail, with rules derived from their programs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, paths_of, types_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax_optimizers import NAMES, TAKES, make
from test_fused_pallas import count_kernels, in_a_process

import ampx
from ampx import fused
from ampx.fused.derived_states import find_derived, unmark_derived
from ampx.updates.tails import takes_tail
from benchmarks.autocast import counted_compilations

# Two parameters of one shape, one of a shape that fills no block, and a single number.
PARAMS = {
    "w": jnp.linspace(-1, 1, 256).reshape(2, 128),
    "v": jnp.full((2, 128), 0.3, jnp.float32),
    "b": jnp.ones(3),
    "s": jnp.ones(()),
}
# Of which no rules can be derived, and the operation that the error names.
REFUSED = {
    "contrib.galore": "cond",
    "contrib.mechanize": "cond",
    "contrib.muon": "reshape",
    "contrib.scale_by_galore": "cond",
    "contrib.scale_by_muon": "reshape",
    "noisy_sgd": "random_bits",
    "novograd": "cond",
    "sm3": "reshape",
}
# They take a norm, keep a slot without a look at the old one, or do what no kernel does.
BRANCHING = {
    "adafactor",
    "adan",
    "contrib.dadapt_adamw",
    "contrib.dog",
    "contrib.dowg",
    "contrib.madgrad",
    "contrib.momo",
    "contrib.momo_adam",
    "contrib.normalize",
    "contrib.prodigy",
    "contrib.sam",
    "contrib.scale_by_madgrad",
    "fromage",
    "lamb",
    "lars",
    "optimistic_adam",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "polyak_sgd",
}
DERIVED = [name for name in NAMES if name not in REFUSED and set(TAKES.get(name, ())) <= {"value"}]
pytestmark = pytest.mark.usefixtures("standard_promotion")
QUICK = ("adabelief-xla", "radam-interpret", "lamb-interpret", "adan-xla")


def normal(seed, params=PARAMS):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda p: jnp.asarray(draw(size=p.shape), p.dtype), params)


def apply_step(tx, backend="xla", **settings):
    @jax.jit
    def step(params, state, grads, **extra_args):
        return fused.apply(tx, grads, state, params, backend=backend, **settings, **extra_args)

    return step


def near(actual, expected, rtol=3e-6):
    def check(a, b):
        if not jnp.issubdtype(b.dtype, jax.dtypes.extended):
            np.testing.assert_allclose(
                a, b, rtol=rtol, atol=rtol * (1e-9 + np.max(np.abs(b), initial=0))
            )

    jax.tree.map(check, actual, expected)


def compare(tx, params=PARAMS, backend="xla", steps=3, rtol=3e-6, **extra_args):
    """Runs `tx` in the tail and without it; before each good step in the tail comes a bad one."""
    ours = ampx.static_loss_scale(fused.fuse(tx, strict=True), 8.0)
    step, state = apply_step(ours, backend), ours.init(params)
    reference = optax.with_extra_args_support(tx)
    update = jax.jit(reference.update)
    expected, ref_state = params, reference.init(params)
    for seed in range(steps):
        grads = normal(seed, params)
        bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), grads)
        after, skipped, report = step(params, state, bad, **extra_args)
        assert report.overflow
        assert_bit_equal((after, skipped.inner_state), (params, state.inner_state))
        params, new, _ = step(params, state, optax.tree.scale(8.0, grads), **extra_args)
        assert types_of(new) == types_of(state)
        state = new
        updates, ref_state = update(grads, ref_state, expected, **extra_args)
        expected = ampx.apply_updates(expected, updates)
    near(params, expected, rtol)
    near(unmark_derived(state.inner_state), ref_state, rtol)
    return state


# --- optax's own ----------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.slow_but(*QUICK)
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", DERIVED)
def test_optimizers_of_optax_are_themselves_in_the_tail(name, backend):
    extra_args = {"value": jnp.float32(1.5)} if TAKES.get(name) else {}
    state = compare(make(name), backend=backend, rtol=2e-5 if extra_args else 3e-6, **extra_args)
    assert find_derived(state.inner_state).prefers_branch == (name in BRANCHING)
    assert paths_of(state.inner_state) == paths_of(make(name).init(PARAMS))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_derived_is_refused_by_name_or_left_as_it_is(name):
    tx, params = make(name), {"w": PARAMS["w"]}
    with pytest.raises(ValueError, match=REFUSED[name]):
        fused.fuse(tx, strict=True).init(params)
    state = fused.fuse(tx).init(params)
    assert_bit_equal(state, tx.init(params))
    assert not takes_tail(state)


@pytest.mark.parametrize("make", [fused.adamw, lambda rate: fused.fuse(optax.rmsprop(rate))])
def test_what_is_fused_stays_what_it_is(make):
    tx, again = make(0.1), fused.fuse(make(0.1), strict=True)
    assert_bit_equal(again.init(PARAMS), tx.init(PARAMS))
    found = []
    for one in (tx, again):
        scaled = ampx.static_loss_scale(one, 8.0)
        found.append(apply_step(scaled)(PARAMS, scaled.init(PARAMS), normal(0))[0])
    assert_bit_equal(*found)


def test_links_of_a_chain_see_what_they_see_in_optax():
    """The state of one is a part of a chain's, and marks nothing there."""
    sgd, decay = optax.sgd(0.1), optax.add_decayed_weights(0.1)
    chains = {
        "behind a clip": lambda fuse: optax.chain(optax.clip_by_global_norm(0.5), fuse(sgd)),
        "behind a decay": lambda fuse: optax.chain(decay, fuse(sgd)),
        "in front": lambda fuse: optax.chain(fuse(optax.scale_by_adam()), optax.scale(-0.1)),
        "by names": lambda fuse: optax.named_chain(("decay", decay), ("sgd", fuse(sgd))),
        "inside": lambda fuse: fuse(optax.chain(decay, fuse(sgd))),
    }
    for name, make_chain in chains.items():
        found = []
        for fuse in (fused.fuse, lambda tx: tx):
            tx = ampx.static_loss_scale(make_chain(fuse), 8.0)
            grads = optax.tree.scale(8.0, normal(0))
            updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
            found.append(updates)
        near(*found)
        if name != "inside":
            assert not takes_tail(make_chain(fused.fuse).init(PARAMS))


@pytest.mark.parametrize("given", ["no parameters", "another argument"])
def test_an_update_without_rules_runs_as_optax_has_it(given):
    def update(updates, state, params=None, *, slope=None):
        if slope is not None:
            updates = jax.tree.map(
                lambda g: jnp.cumsum(g.ravel()).reshape(g.shape) * slope, updates
            )
        return adam.update(updates, state, params)

    adam = optax.adam(0.1)
    plain = optax.GradientTransformationExtraArgs(adam.init, update)
    params, extra_args = (None, {}) if given == "no parameters" else (PARAMS, {"slope": 0.5})
    bad = jax.tree.map(lambda g: jnp.full_like(g, jnp.inf), PARAMS)
    found = []
    for tx in (fused.fuse(plain), plain):
        scaled = ampx.static_loss_scale(tx, 8.0)
        state = scaled.init(PARAMS)
        step = jax.jit(lambda g, s, tx=scaled: tx.update(g, s, params, **extra_args))
        updates, state = step(optax.tree.scale(8.0, normal(0)), state)
        null, after = step(bad, state)
        assert_bit_equal(after.inner_state, state.inner_state)
        found.append((updates, null))
    near(*found)
    if extra_args:
        strict = ampx.static_loss_scale(fused.fuse(plain, strict=True), 8.0)
        with pytest.raises(ValueError, match="`cumsum`"):
            strict.update(PARAMS, strict.init(PARAMS), PARAMS, **extra_args)


def test_a_slot_restored_in_a_wider_dtype_keeps_its_bits_on_a_skip():
    tx = ampx.static_loss_scale(fused.fuse(optax.adamw(0.1, mu_dtype=jnp.bfloat16)), 8.0)
    state = tx.init(PARAMS)
    state = jax.tree.map(
        lambda x: x.astype(jnp.float32) + 0.1 if x.dtype == jnp.bfloat16 else x, state
    )
    bad = jax.tree.map(lambda g: jnp.full_like(g, jnp.inf), PARAMS)
    after = apply_step(tx)(PARAMS, state, bad)
    assert_bit_equal((after[0], after[1].inner_state), (PARAMS, state.inner_state))


def test_a_derivative_through_a_step_is_that_of_the_transformation():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g * jax.lax.stop_gradient(g), updates), state

    plain = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    relu = of_rule(lambda g, p: (-0.1 * jax.nn.relu(g),), 0)
    for tx in (plain, relu):
        found = []
        for one in (fused.fuse(tx), tx):
            scaled = ampx.static_loss_scale(one, 1.0)
            state = scaled.init(PARAMS)

            def total(grads, tx=scaled, state=state):
                return optax.tree.sum(tx.update(grads, state, PARAMS)[0])

            found.append(jax.grad(total)(optax.tree.zeros_like(PARAMS) | {"w": PARAMS["w"]}))
        near(*found)


def test_numbers_of_python_and_wide_numbers_are_left_to_optax():
    assert not takes_tail(fused.fuse(optax.rmsprop(0.1)).init({"a": 1.5}))
    with jax.enable_x64():
        tiny = optax.GradientTransformation(
            lambda params: jnp.float64(1e-60),
            lambda g, s, p=None: (jax.tree.map(lambda g: g * (s / 1e-60), g), s),
        )
        assert not takes_tail(fused.fuse(tiny).init(PARAMS))


def test_what_was_there_in_init_and_is_not_in_update_is_named():
    tx = fused.fuse(make("contrib.momo"))
    with pytest.raises(TypeError, match="'value'"):
        fused.apply(tx, PARAMS, tx.init(PARAMS), PARAMS)


def test_an_init_that_looks_into_the_parameters_is_left_to_optax():
    """`optax.tree.map_params` calls it with a mark in their place."""

    def init(params):
        assert set(params) == set(PARAMS)
        return jax.tree.map(jnp.zeros_like, params)

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    assert not takes_tail(fused.fuse(tx).init(PARAMS))
    with pytest.raises(ValueError, match="map_params"):
        fused.fuse(tx, strict=True).init(PARAMS)


def of_update(update, state=()):
    return optax.GradientTransformation(lambda params: state, update)


BLAMED = {
    "another parameter": (
        of_update(lambda g, s, p: ({**g, "w": g["w"] * g["v"]}, s)),
        r"`mul` reads arrays of several parameters, 'v', 'w', in .*test_fusing\.py:\d+",
    ),
    "one that is broadcast": (
        of_update(lambda g, s, p: ({**g, "w": g["w"] * jnp.broadcast_to(g["b"], (2, 3))}, s)),
        r"an array of 'b' is broadcast from float32\[1,3\] to float32\[2,3\], in .*test_fusing",
    ),
    "an array of its own": (
        of_update(lambda g, s, p: (jax.tree.map(lambda x: x * np.float32([[1, 2, 3]]), g), s)),
        r"it reads an array of float32\[1,3\] that belongs to no parameter",
    ),
    "a number of its state": (
        of_update(lambda g, s, p: (g, s), {"a": {"rate": 0.5}}),
        r"0\.5 at 'a/rate' of its state is a number of Python.*make it jnp.asarray\(0\.5\)",
    ),
    "a number for a parameter": (optax.sgd(0.1), r"2\.0 at 'b' of its parameters is a number"),
}


@pytest.mark.parametrize("name", BLAMED)
def test_a_refusal_says_what_is_not_of_one_parameter(name):
    tx, message = BLAMED[name]
    params = {name: jnp.ones((2, 3)) for name in "bvw"}
    if name == "one that is broadcast":
        params["b"] = jnp.ones((1, 3))
    if name == "a number for a parameter":
        params["b"] = 2.0
    with pytest.raises(ValueError, match=message):
        fused.fuse(tx, strict=True).init(params)


def test_a_refusal_names_the_line():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: g - jnp.cumsum(g, 0), updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(ValueError, match=r"`cumsum` does not work.*test_fusing\.py:\d+"):
        fused.fuse(tx, strict=True).init({"w": PARAMS["w"]})


def test_without_a_tail_updates_are_optaxs_bit_for_bit():
    tx = optax.adabelief(0.1)
    ours, state, expected = fused.fuse(tx), fused.fuse(tx).init(PARAMS), tx.init(PARAMS)
    for seed in range(2):
        updates, state = jax.jit(ours.update)(normal(seed), state, PARAMS)
        ref, expected = jax.jit(tx.update)(normal(seed), expected, PARAMS)
        assert_bit_equal((updates, unmark_derived(state)), (ref, expected))


# --- transformations of one's own -----------------------------------------------------------------


def of_rule(rule, count=1, first=0.0):
    """A transformation written in optax's way: rule(g, p, *slots) -> (update, *slots)."""

    def init(params):
        numbers = [first * (1 + number) for number in range(count)]
        return tuple(jax.tree.map(lambda p, n=n: jnp.full_like(p, n), params) for n in numbers)

    def update(updates, state, params=None):
        leaves, structure = jax.tree.flatten(updates)
        columns = [structure.flatten_up_to(tree) for tree in (params, *state)]
        rows = [rule(*row) for row in zip(leaves, *columns, strict=True)]
        updates, *slots = (structure.unflatten(column) for column in zip(*rows, strict=True))
        return updates, tuple(slots)

    return optax.GradientTransformation(init, update)


RATE = jnp.float32(-0.1)


@jax.jit
def move(g, a):
    return RATE * (g + a)


RULES = {
    # Programs that no optimizer of optax has, by what is special in them.
    "a call that closes over a number": (lambda g, p, a: (move(g, a), move(a, g)), 1, 0.3),
    "slots that move on": (lambda g, p, a, b: (-0.1 * (g + a + b), g, a), 2),
    "two slots with one value": (lambda g, p, a, b: (-0.1 * b, *(a + g,) * 2), 2, 0.3),
    "a slot that stays": (lambda g, p, a: (-0.1 * (g + a), a), 1),
    "a slot that is a constant": (lambda g, p, a: (-0.1 * (g + a), jnp.full_like(g, 0.5)), 1),
    "a slot that is the update": (lambda g, p, a: ((u := 0.9 * a - 0.1 * g), u), 1),
    "an update that is a constant": (lambda g, p: (jnp.zeros_like(g),), 0),
    "an update that is the gradient": (lambda g, p: (g,), 0),
    "a slot that was a condition": (
        lambda g, p, a: (-0.1 * (g + a), ((g + a) > 0).astype(jnp.float32)),
        1,
        0.3,
    ),
    "a slot that was narrow": (
        lambda g, p, a: (-0.1 * (g + a), (g + a).astype(jnp.bfloat16).astype(jnp.float32)),
        1,
    ),
    "narrow constants": (
        lambda g, p, a: (
            -0.1 * (g.astype(jnp.bfloat16) * jnp.bfloat16(2)).astype(jnp.float32),
            jnp.where(g > 0, a, 0.5 * g),
        ),
        1,
    ),
    "conditions of conditions": (
        lambda g, p: (jnp.where(jnp.maximum(g > 0, p > 0), -0.1 * g, 0.1 * g),),
        0,
    ),
    "powers": (lambda g, p: (-0.1 * (g + g**3 + (2 + g**2) ** -3),), 0),
    "choices": (
        lambda g, p, a: (jnp.where(jnp.isfinite(g) & (g > a), -0.1 * g, jnp.sign(p)), a + g),
        1,
    ),
    "a bound": (lambda g, p: (-jnp.clip(g, -0.5, 0.5) * (jnp.abs(p) <= 1),), 0),
    "a rate of each element": (
        lambda g, p: (-jnp.sqrt(1 - jnp.full_like(g, RATE)) * jnp.ones_like(g) * 0.1 * g,),
        0,
    ),
    "whole numbers": (lambda g, p: (-0.1 * jnp.round(g).astype(jnp.int32).astype(g.dtype),), 0),
}


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", RULES)
def test_rules_of_ones_own(name, backend):
    compare(of_rule(*RULES[name]), backend=backend, steps=2)


@pytest.mark.parametrize("name", ["adan", "adamw", "rmsprop"])
def test_a_parameter_without_elements_has_a_rule(name):
    """Of an empty array JAX makes `jnp.where(is_first, 0, x)` a zero."""
    params = {"w": PARAMS["w"], "none": jnp.zeros((0, 3))}
    tx, plain = fused.fuse(make(name), strict=True), make(name)
    expected, _ = plain.update(normal(0, params), plain.init(params), params)
    found, _, _ = apply_step(tx)(params, tx.init(params), normal(0, params))
    near(found, optax.apply_updates(params, expected))


def test_a_slot_belongs_to_the_parameter_with_the_longest_path():
    params = {"w": PARAMS["w"], "layer": {"w": PARAMS["v"], "layer": {"w": PARAMS["v"]}}}
    compare(optax.rmsprop(0.1), params)


def test_a_norm_is_that_of_unscaled_gradients():
    compare(make("fromage"), backend="interpret")


def test_what_no_kernel_has_is_left_to_xla(monkeypatch):
    calls = count_kernels(monkeypatch)
    compare(make("contrib.madgrad"), backend="interpret", steps=1)
    assert not calls
    compare(optax.rmsprop(0.1), backend="interpret", steps=1)
    assert calls


def test_state_that_is_wider_than_its_parameter_is_left_to_optax():
    with jax.enable_x64():
        tx = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float64)
        assert not takes_tail(fused.fuse(tx).init(PARAMS))
        with pytest.raises(ValueError, match="keeps float64 for a parameter in float32"):
            fused.fuse(tx, strict=True).init(PARAMS)


def test_a_number_that_is_not_finite_and_not_chosen_skips_nothing():
    def update(updates, state, params=None):
        root = jnp.sqrt(state - 1.0)  # NaN in the first step
        rate = jnp.where(state > 0, root, 1.0)
        chosen = jax.tree.map(lambda g: jnp.where(state > 0, -root * g, -g), updates)
        return jax.tree.map(lambda u: u * jnp.minimum(rate, 1.0), chosen), state + 1

    tx = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    compare(tx, steps=3)


WRAPPED = {
    "a schedule": lambda: optax.rmsprop(optax.linear_schedule(0.1, 0.0, 4)),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.adamax)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 4)
    ),
    "a mask": lambda: optax.adamw(0.1, mask={"w": True, "v": False, "b": True, "s": False}),
    "groups": lambda: optax.partition(
        {"rms": optax.rmsprop(0.1), "sgd": optax.sgd(0.1), "still": optax.set_to_zero()},
        {"w": "rms", "v": "sgd", "b": "still", "s": "rms"},
    ),
    "a clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.yogi(0.1)),
    "a clip by value": lambda: optax.chain(optax.clip(0.5), optax.adagrad(0.1)),
    "moments in bfloat16": lambda: optax.adamw(0.1, mu_dtype=jnp.bfloat16),
    "means of updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}


@pytest.mark.sampled(2, "a schedule-xla")
@pytest.mark.slow_but("groups-xla", "hyperparameters in the state-interpret", "a clip-xla")
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", WRAPPED)
def test_chains_groups_and_schedules(name, backend):
    compare(WRAPPED[name](), backend=backend, rtol=2.0**-7 if "bfloat16" in name else 3e-6)


# --- inside the wrappers of the library -----------------------------------------------------------


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize(
    "wrap",
    [ampx.master_weights, fused.split_masters, fused.stochastic_rounding],
    ids=lambda wrap: wrap.__name__,
)
def test_masters_are_those_around_a_fused_optimizer(wrap, backend):
    """Adagrad is there twice: by hand, and derived."""
    params = ampx.cast_floating({"w": PARAMS["w"], "b": PARAMS["b"]}, jnp.bfloat16)
    found = []
    for optimizer in (fused.fuse(optax.adagrad(0.1)), fused.adagrad(0.1)):
        tx = ampx.dynamic_loss_scale(wrap(optimizer), init_scale=8.0)
        step, state, new = apply_step(tx, backend, max_norm=1.0), tx.init(params), params
        for seed in range(2):
            new, state, _ = step(new, state, optax.tree.scale(8.0, normal(seed, params)))
        found.append(new)
    near(*found, rtol=2.0**-7)


def test_groups_of_derived_and_written_rules_and_hyperparameters_around():
    labels = {"w": "rms", "v": "adam", "b": "rms", "s": "adam"}

    def build(learning_rate, fuse, library):
        groups = {
            "rms": fuse(optax.rmsprop(learning_rate)),
            "adam": library.adam(learning_rate),
        }
        return optax.partition(groups, labels)

    ours = ampx.static_loss_scale(
        optax.inject_hyperparams(build, static_args=("fuse", "library"))(0.1, fused.fuse, fused),
        8.0,
    )
    plain = build(0.1, lambda tx: tx, optax)
    state, ref_state, params, expected = ours.init(PARAMS), plain.init(PARAMS), PARAMS, PARAMS
    step = apply_step(ours)
    for seed in range(2):
        params, state, _ = step(params, state, optax.tree.scale(8.0, normal(seed)))
        updates, ref_state = plain.update(normal(seed), ref_state, expected)
        expected = optax.apply_updates(expected, updates)
    near(params, expected)


def test_flat_buffers():
    tx = ampx.static_loss_scale(fused.fuse(optax.rmsprop(0.1), strict=True), 8.0)
    found = []
    for convert in (fused.flatten, lambda tree: tree):
        params, grads = convert(PARAMS), convert(optax.tree.scale(8.0, normal(0)))
        params, _, _ = apply_step(tx)(params, tx.init(params), grads)
        found.append(params)
    near(found[0].tree(), found[1])


@pytest.mark.parametrize("name", ["lamb", "rmsprop"])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_a_clip_in_the_tail_is_optaxs(name, backend):
    """Also where XLA takes the branch."""
    tx = ampx.static_loss_scale(fused.fuse(make(name)), 8.0)
    plain = optax.chain(optax.clip_by_global_norm(0.5), make(name))
    grads = optax.tree.scale(8.0, normal(0))
    params, _, report = apply_step(tx, backend, max_norm=0.5)(PARAMS, tx.init(PARAMS), grads)
    updates, _ = plain.update(normal(0), plain.init(PARAMS), PARAMS)
    near(params, optax.apply_updates(PARAMS, updates))
    np.testing.assert_allclose(report.global_norm, optax.tree.norm(normal(0)), rtol=1e-6)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", ["adabelief", "adan"])
def test_a_clip_without_a_loss_scale(name, backend):
    tx = fused.fuse(make(name))
    params, _, _ = apply_step(tx, backend, max_norm=0.5)(PARAMS, tx.init(PARAMS), normal(0))
    plain = optax.chain(optax.clip_by_global_norm(0.5), make(name))
    updates, _ = plain.update(normal(0), plain.init(PARAMS), PARAMS)
    near(params, optax.apply_updates(PARAMS, updates))


READ_THE_LOSS = [name for name in DERIVED if TAKES.get(name)]


@pytest.mark.parametrize("name", READ_THE_LOSS)
def test_a_result_hands_its_loss_on_with_and_without_a_loss_scale(name):
    def loss_fn(params, batch):
        return sum(jnp.mean((leaf - batch) ** 2) for leaf in jax.tree.leaves(params))

    assert len(READ_THE_LOSS) > 3
    plain, one = make(name), fused.fuse(make(name))
    expected, of_plain = PARAMS, plain.init(PARAMS)
    for _ in range(3):
        loss, grads = jax.value_and_grad(loss_fn)(expected, 2.0)
        updates, of_plain = plain.update(grads, of_plain, expected, value=loss)
        expected = optax.apply_updates(expected, updates)
    for tx in (one, ampx.no_loss_scale(one), ampx.dynamic_loss_scale(one)):
        params, state = PARAMS, tx.init(PARAMS)
        grads_of = ampx.value_and_grad(loss_fn)
        for _ in range(3):
            result = grads_of(params, 2.0, loss_scale=ampx.current_loss_scale(state))
            params, state, _ = apply_step(tx)(params, state, result)
        near(params, expected)


def test_an_argument_of_the_caller_goes_before_what_a_result_tells():
    tx = fused.fuse(optax.polyak_sgd())
    result = ampx.value_and_grad(lambda params, batch: jnp.sum(params["s"] ** 2))(PARAMS, 0.0)
    given = apply_step(tx)(PARAMS, tx.init(PARAMS), result, value=0.5)[0]
    near(given, apply_step(tx)(PARAMS, tx.init(PARAMS), result.grads, value=0.5)[0])


@pytest.mark.parametrize("name", ["adabelief", "adan", "sm3"])
def test_a_train_step_takes_what_is_there(name):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"].T) ** 2) + params["b"].sum()

    found = []
    for optimizer in (fused.fuse(make(name)), make(name)):
        step = ampx.train_step(loss_fn, optimizer, loss_scale="dynamic", max_grad_norm=1.0)
        state = step.init({"w": PARAMS["w"], "b": PARAMS["b"]})
        state, _ = step(state, jnp.ones((4, 128)))
        found.append(state.params)
    near(*found)


# --- types, devices, compilation ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_of_parameters(dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.linspace(-1, 1, 256, dtype=dtype).reshape(2, 128)}
        tolerance = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float64": 1e-12}[dtype]
        grads = {"w": jnp.linspace(1, 3, 256, dtype=dtype).reshape(2, 128)}
        tx = optax.adabelief(0.1)
        ours = ampx.static_loss_scale(fused.fuse(tx, strict=True), 2.0)
        new, state, _ = apply_step(ours)(params, ours.init(params), optax.tree.scale(2.0, grads))
        wide = jnp.promote_types(dtype, jnp.float32)
        grads, expected, found = (optax.tree.cast(tree, wide) for tree in (grads, params, new))
        updates, _ = tx.update(grads, tx.init(expected), expected)
        assert new["w"].dtype == params["w"].dtype
        near(found, optax.apply_updates(expected, updates), tolerance)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_parameters_that_no_rule_takes_are_left_to_optax(dtype):
    tx = fused.fuse(optax.rmsprop(0.1))
    params = {"w": jnp.ones(2), "x": jnp.ones(3, dtype)}
    assert not takes_tail(tx.init(params))
    with pytest.raises(ValueError, match=dtype):
        fused.fuse(optax.rmsprop(0.1), strict=True).init(params)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_parameters(kind, backend):
    mesh = make_mesh((2, 2), ("data", "model"), kind)
    tx = ampx.static_loss_scale(fused.fuse(optax.lamb(0.1)), 8.0)
    one, _, _ = apply_step(tx)(PARAMS, tx.init(PARAMS), normal(0))
    specs = {"w": P("data", "model"), "v": P(None, "model"), "b": P(), "s": P()}
    with jax.set_mesh(mesh):
        places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        params, grads = jax.device_put((PARAMS, normal(0)), (places, places))
        many, _, _ = apply_step(tx, backend)(params, tx.init(params), grads)
    near(many, one)
    assert many["w"].sharding.spec == specs["w"]


@pytest.mark.parametrize("name", ["fuse", "from_rule"])
def test_a_loop_outside_of_jit_compiles_each_program_once(name):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    tx = {
        "fuse": lambda: fused.fuse(optax.rmsprop(rate)),
        "from_rule": lambda: fused.from_rule(
            lambda g, p, slots, numbers, operations: (numbers.half * g, {}),
            rate,
            numbers={"half": 0.5},
        ),
    }[name]()
    params = {"w": PARAMS["w"], "v": PARAMS["v"]}
    state = tx.init(params)
    for seed in range(3):
        with counted_compilations() as compilations:
            params, state, _ = fused.apply(tx, normal(seed, params), state, params)
    assert not compilations


def test_a_step_is_in_place():
    tx = ampx.dynamic_loss_scale(fused.fuse(optax.adabelief(0.1)))
    params = {name: jnp.ones((256, 256)) for name in "abcd"}
    step = jax.jit(lambda p, s, g: fused.apply(tx, g, s, p)[:2], donate_argnums=(0, 1))
    memory = step.lower(params, tx.init(params), params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 4 * 4 * 256 * 256


# --- kernels for accelerators that are not there --------------------------------------------------

_LOWERING = """
import optax, test_fusing as f
from jax._src.mesh import AbstractDevice

tpu = jax.sharding.AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
params = {"w": jnp.ones((64, 128)), "v": jnp.ones((8, 128))}
left_to_xla = ("adafactor", "contrib.madgrad", "contrib.scale_by_madgrad")
left_to_xla += ("conditions of conditions",)
rules = {name: f.of_rule(*rule) for name, rule in f.RULES.items()}
with jax.sharding.use_abstract_mesh(tpu), jax.numpy_dtype_promotion("standard"):
    for name in [*f.DERIVED, *rules]:
        tx = rules[name] if name in rules else f.make(name)
        extra = {"value": jnp.float32(1.0)} if f.TAKES.get(name) else {}
        tx = f.ampx.dynamic_loss_scale(f.fused.fuse(tx, strict=True))
        state = tx.init(params)
        for backend, platform, call in (
            ("mosaic_gpu", "cuda", "@mosaic_gpu"), ("mosaic_tpu", "tpu", "@tpu_custom_call")
        ):
            step = lambda p, s, g: f.fused.apply(tx, g, s, p, backend=backend, **extra)[:2]
            traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, params)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            found = text.count(call) - (backend == "mosaic_gpu")  # one for the norm
            assert bool(found) == (name not in left_to_xla), (name, backend, found)
"""


@pytest.mark.whole
def test_derived_rules_lower_to_kernels_for_gpus_and_tpus():
    in_a_process(_LOWERING, devices=1)
