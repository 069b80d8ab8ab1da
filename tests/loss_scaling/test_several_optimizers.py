"""Several optimizers that share one loss scale, each of which skips for itself.

The reference is a loss scaler in plain numpy, written after the documents of torch's and Apex's:
`step` of one optimizer, which is left out if its gradients are bad, and one `update` of the scale.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import blocks_of, run_block
from flax.core import freeze
from helpers import assert_bit_equal, counted_step, make_mesh, optimizer_step, types_of
from jax.sharding import PartitionSpec as P

import ampx

INF, NAN = np.inf, np.nan
GUIDE = "docs/guides/loss_scaling.md"
PARAMS = {"d": np.array([0.5, -1.0], np.float32), "g": np.array([2.0, 0.25], np.float32)}
RATES = {"d": 0.25, "g": 0.5}
# Which optimizer's gradients are bad in each step: none, one, the other, both.
POISON = np.random.default_rng(0).choice([0, 0, 0, 1, 2, 3], 40)


class NumpyScaler:
    """A scale for each loss, and SGD with momentum 0.5 for each optimizer."""

    def __init__(self, params, num_losses=1, interval=2):
        self.scales = np.full(num_losses, 16.0, np.float32)
        self.counts, self.interval = np.zeros(num_losses, int), interval
        self.found = np.zeros(num_losses, bool)
        self.seen = np.zeros(num_losses, bool)
        self.params = {name: value.copy() for name, value in params.items()}
        self.traces = {name: np.zeros_like(value) for name, value in params.items()}
        self.skips = dict.fromkeys(params, 0)

    def step(self, name, grads):
        """`grads`: from the number of a loss to its scaled gradient."""
        bad = {i: not np.isfinite(grad).all() for i, grad in grads.items()}
        for i, is_bad in bad.items():
            self.found[i] |= is_bad
            self.seen[i] = True
        if any(bad.values()):
            self.skips[name] += 1
            return
        total = sum(grad / self.scales[i] for i, grad in grads.items())
        self.traces[name] = total + np.float32(0.5) * self.traces[name]
        self.params[name] = self.params[name] - np.float32(RATES[name]) * self.traces[name]

    def update(self):
        for i in np.flatnonzero(self.seen):
            if self.found[i]:
                self.scales[i] /= 2
                self.counts[i] = 0
            else:
                self.counts[i] += 1
                if self.counts[i] == self.interval:
                    self.scales[i] *= 2
                    self.counts[i] = 0
        self.found[:] = self.seen[:] = False


def make(**options):
    """Two optimizers under a scale that starts at 16 and grows after two good steps."""
    optimizers = {name: optax.sgd(rate, momentum=0.5) for name, rate in RATES.items()}
    options = {"init_scale": 16.0, "growth_interval": 2, "min_scale": 2.0**-40, **options}
    return ampx.dynamic_loss_scale(optimizers, **options)


def gradients(name, params):
    """Of each one's quarrel with the other; of no loss in particular."""
    other = params["g" if name == "d" else "d"]
    return 0.125 * (params[name] - other) * (1 if name == "d" else -0.5)


def run_ours(tx, step, poison):
    """All steps in one scan; the parameters, scale and state after each."""

    def body(carry, poison):
        params, state = step(*carry, poison)
        return (params, state), (params, state.loss_scale)

    params = jax.tree.map(jnp.asarray, PARAMS)
    return jax.jit(functools.partial(jax.lax.scan, body))((params, tx.init(params)), poison)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_torch_only_the_optimizer_with_bad_gradients_skips_and_the_scale_moves_once(takes_turns):
    tx = make()

    def scaled(name, params, state, poison):
        bad = poison & (1 if name == "d" else 2) > 0
        grads = gradients(name, params) * ampx.current_loss_scale(state)
        return grads.at[0].set(jnp.where(bad, INF, grads[0]))

    def step(params, state, poison):
        if takes_turns:
            grads = {"d": scaled("d", params, state, poison)}
            updates, state = tx.update(grads, state, params, move_scale=False)
            params = ampx.apply_updates(params, updates)
            grads = {"g": scaled("g", params, state, poison)}
        else:
            grads = {name: scaled(name, params, state, poison) for name in ("d", "g")}
        updates, state = tx.update(grads, state, params)
        return ampx.apply_updates(params, updates), state

    (_, state), (all_params, scales) = run_ours(tx, step, POISON)

    reference = NumpyScaler(PARAMS)
    for i, poison in enumerate(POISON):
        old = dict(reference.params)
        for name, bit in (("d", 1), ("g", 2)):
            seen = reference.params if takes_turns else old
            grad = np.float32(gradients(name, seen)) * reference.scales[0]
            if poison & bit:
                grad[0] = INF
            reference.step(name, {0: grad})
        reference.update()
        assert scales[i] == reference.scales[0]
        for name, value in reference.params.items():
            np.testing.assert_allclose(all_params[name][i], value, rtol=1e-5, atol=1e-6)
    counts = state.inner_state.optimizer_skipped_total
    assert counts == reference.skips and 0 < reference.skips["d"] < len(POISON)
    assert state.skipped_total == np.count_nonzero(POISON)


def test_apex_two_optimizers_three_losses_with_a_scale_each():
    # As a GAN has them: two losses of "d", on real and on made-up images, and one of "g". The
    # second also reaches "g", whose gradients then come from two losses.
    tx = make(num_losses=3)
    reached = {0: ("d",), 1: ("d", "g"), 2: ("g",)}
    poison = np.random.default_rng(1).choice([-1, -1, 0, 1, 2], 30)  # which loss is bad

    def step(params, state, bad):
        def grads_of(i):
            scale = ampx.current_loss_scale(state, i)
            grads = {n: (i + 1) * gradients(n, params) * scale for n in reached[i]}
            name = reached[i][-1]  # where the loss is bad it is so in one of its optimizers
            return {**grads, name: jnp.where(bad == i, NAN, grads[name])}

        updates, state = tx.update(tuple(map(grads_of, range(3))), state, params)
        return ampx.apply_updates(params, updates), state

    (_, state), (all_params, scales) = run_ours(tx, step, poison)

    reference = NumpyScaler(PARAMS, num_losses=3)
    for step_number, bad in enumerate(poison):
        old = dict(reference.params)
        for name in PARAMS:
            grads = {
                i: np.float32((i + 1) * gradients(name, old)) * reference.scales[i]
                for i in reached
                if name in reached[i]
            }
            grads = {
                i: np.full(2, NAN) if bad == i and name == reached[i][-1] else grad
                for i, grad in grads.items()
            }
            reference.step(name, grads)
        reference.update()
        np.testing.assert_array_equal(scales[step_number], reference.scales)
        for name, value in reference.params.items():
            np.testing.assert_allclose(all_params[name][step_number], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.nan_total, [np.sum(poison == i) for i in range(3)])
    assert state.inner_state.optimizer_skipped_total == reference.skips


def test_a_loss_that_nobody_gave_keeps_its_scale():
    tx = make(num_losses=2, growth_interval=1)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update, static_argnames="move_scale")
    ones = np.ones(2, np.float32)
    _, state = update(({"d": ones}, None), state, PARAMS, move_scale=False)
    np.testing.assert_array_equal(state.loss_scale, [16, 16])
    _, state = update(({"g": ones}, {}), state, PARAMS)
    np.testing.assert_array_equal(state.loss_scale, [32, 16])


WRAPPERS = {
    "dynamic": lambda inner: ampx.dynamic_loss_scale(inner, init_scale=16.0),
    "skip": lambda inner: ampx.dynamic_loss_scale(inner, init_scale=16.0, nonfinite_updates="skip"),
    "static": lambda inner: ampx.static_loss_scale(inner, 16.0),
    "by a word": lambda inner: ampx.loss_scale("16", inner),
}


@pytest.mark.parametrize(
    ("wrap", "bad"),
    [
        ("dynamic", "g"),
        *(
            pytest.param(wrap, bad, marks=pytest.mark.slow)
            for wrap, bad in zip(WRAPPERS, "dgdg", strict=True)
        ),
    ],
)
def test_each_is_bit_equal_to_itself_under_a_scale_of_its_own(wrap, bad):
    wrap = WRAPPERS[wrap]
    optimizers = {
        "d": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        "g": ampx.master_weights(ampx.fused.adamw(0.1)),
    }
    params = {"d": {"w": jnp.ones((2, 2))}, "g": [jnp.ones(3, jnp.bfloat16)]}
    tx = wrap(optimizers)
    state = tx.init(params)
    alone = {name: wrap(optimizer) for name, optimizer in optimizers.items()}
    jitted = jax.jit(optimizer_step, static_argnums=0)
    states = {name: alone[name].init(params[name]) for name in alone}
    expected = params
    for number in range(3):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 24.0), params)
        if number == 1:
            grads[bad] = jax.tree.map(lambda g: g * NAN, grads[bad])
        now = {n: s._replace(loss_scale=state.loss_scale) for n, s in states.items()}
        results = {n: jitted(alone[n], expected[n], now[n], grads[n]) for n in alone}
        expected = {n: result[0] for n, result in results.items()}
        states = {n: result[1] for n, result in results.items()}
        params, state = jitted(tx, params, state, grads)
        assert_bit_equal(params, expected)
        inner = {n: s.inner_state for n, s in states.items()}
        assert_bit_equal(state.inner_state.inner_states, inner)
        assert {n: bool(ampx.is_skipped(state, n)) for n in alone} == {
            n: number == 1 and n == bad for n in alone
        }
        assert ampx.is_skipped(state) == (number == 1)


def test_one_trace_donation_and_a_stable_state():
    tx = make()
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    types = types_of(state)
    step, traces = counted_step(tx)
    for _ in range(3):
        params, state = step(params, state, jax.tree.map(jnp.ones_like, params))
    assert len(traces) == 1
    assert types_of(state) == types


def test_updates_are_for_the_parameters_that_were_given_in_their_own_mapping():
    tx = make()
    params = freeze(PARAMS)
    state = tx.init(params)
    ones = np.ones(2, np.float32)
    for grads in ({"d": ones}, {"d": ones, "g": None}):
        updates, _ = tx.update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert_bit_equal(updates["g"], jnp.array([-0.0, -0.0]))
        assert updates["d"][0] < 0
    assert set(tx.update({"d": ones}, state, {"d": PARAMS["d"]})[0]) == {"d"}
    assert set(tx.update({"d": ones}, state)[0]) == {"d"}
    updates, new = tx.update({"d": ones}, state, params)
    assert_bit_equal(new.inner_state.inner_states["g"], state.inner_state.inner_states["g"])


def test_what_lives_outside_can_follow_one_optimizer():
    tx = make()
    grads = {"d": np.array([NAN, 1], np.float32), "g": np.ones(2, np.float32)}
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert ampx.select_if_finite(state, 2.0, 1.0) == 1.0
    assert ampx.select_if_finite(state, 2.0, 1.0, "d") == 1.0
    assert ampx.select_if_finite(state, 2.0, 1.0, optimizer="g") == 2.0
    figures = ampx.metrics(state)
    assert figures["overflow"] and figures["d/overflow"] and not figures["g/overflow"]
    assert figures["skipped_total"] == figures["d/skipped_total"] == 1
    assert figures["g/skipped_total"] == 0
    with pytest.raises(ValueError, match=r"'gg' is none .*\['d', 'g'\]: did you mean 'g'"):
        ampx.is_skipped(state, "gg")
    single = ampx.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(1))
    with pytest.raises(ValueError, match="one optimizer alone"):
        ampx.is_skipped(single, "g")


def test_without_a_loss_scale_each_is_itself():
    optimizers = {"d": optax.adam(0.1), "g": optax.sgd(0.5, momentum=0.5)}
    tx = ampx.loss_scale(None, optimizers)
    state = tx.init(PARAMS)
    grads = jax.tree.map(np.ones_like, PARAMS)
    params, state = optimizer_step(tx, PARAMS, state, {"d": grads["d"]})
    expected, own = optimizer_step(
        optimizers["d"], PARAMS["d"], optimizers["d"].init(PARAMS["d"]), grads["d"]
    )
    assert_bit_equal((params["d"], state["d"]), (expected, own))
    assert_bit_equal(params["g"], jnp.asarray(PARAMS["g"]))
    assert_bit_equal(state["g"], optimizers["g"].init(PARAMS["g"]))
    tx.update(grads, state, PARAMS, move_scale=False)
    assert ampx.current_loss_scale(state) == 1


ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda tx, s: ampx.dynamic_loss_scale({}), ValueError, "empty dict"),
        (lambda tx, s: ampx.dynamic_loss_scale({"d": 3}), TypeError, r"inner\['d'\] .* got int"),
        (lambda tx, s: ampx.no_loss_scale({1: optax.sgd(0.1)}), TypeError, "strings, got 1"),
        (lambda tx, s: tx.init(ONES), TypeError, r"params must be a dict .*\['d', 'g'\]"),
        (lambda tx, s: tx.init({"d": ONES}), ValueError, r"lack .*\['g'\]"),
        (lambda tx, s: tx.init({**PARAMS, "h": ONES}), ValueError, "name 'h'"),
        (lambda tx, s: tx.update(ONES, s), TypeError, "gradients must be a dict"),
        (lambda tx, s: tx.update({"dd": ONES}, s), ValueError, "'dd'.*did you mean 'd'"),
        (lambda tx, s: tx.update({}, s), ValueError, "gradients of no optimizer"),
        (lambda tx, s: tx.update({"d": None}, s), ValueError, "gradients of no optimizer"),
        (lambda tx, s: tx.update({"d": ONES}, s, {"g": ONES}), ValueError, r"lack .*\['d'\]"),
        (
            lambda tx, s: tx.update({"d": ONES}, s, move_scale="no"),
            TypeError,
            "move_scale must be True or False, got 'no'",
        ),
        (lambda tx, s: make(num_losses=2).update(PARAMS, s), ValueError, "tuple of 2"),
        (
            lambda tx, s: tx.update(PARAMS, ampx.dynamic_loss_scale(optax.sgd(0.1)).init(ONES)),
            TypeError,
            "OptimizersState",
        ),
        (
            lambda tx, s: ampx.dynamic_loss_scale({"d": tx}).init({"d": PARAMS}),
            ValueError,
            "inner already has a loss scale",
        ),
        (
            lambda tx, s: ampx.fused.apply(tx, PARAMS, s, PARAMS),
            TypeError,
            "needs a fused optimizer",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    tx = make()
    with pytest.raises(error, match=message):
        call(tx, tx.init(PARAMS))


def test_train_step_takes_several_optimizers_and_no_several_losses():
    def loss_fn(params, batch):
        return jnp.mean(params["d"][0] * batch) + jnp.mean((params["g"][0] * batch) ** 2)

    step = ampx.train_step(loss_fn, make())
    state = step.init(PARAMS)
    # The squares are in range, and times the scale they are not: "g" skips, and "d" does not.
    new, report = step(state, jnp.full(4, 8e18))
    assert report.overflow and report.loss_scale == 16
    assert ampx.is_skipped(new.opt_state, "g") and not ampx.is_skipped(new.opt_state, "d")
    assert new.params["d"][0] != PARAMS["d"][0]
    assert_bit_equal(new.params["g"], jnp.asarray(PARAMS["g"]))
    assert new.opt_state.loss_scale == 8 and new.step == 0

    # The same from a dict, with a loss scale and without one.
    optimizers = {name: optax.sgd(rate, momentum=0.5) for name, rate in RATES.items()}
    scale = functools.partial(ampx.dynamic_loss_scale, init_scale=16.0)
    step = ampx.train_step(loss_fn, optimizers, loss_scale=scale)
    assert_bit_equal(step(step.init(PARAMS), jnp.full(4, 8e18))[0].params, new.params)
    step = ampx.train_step(loss_fn, optimizers)
    plain, report = step(step.init(PARAMS), jnp.ones(4))
    scaled = ampx.train_step(loss_fn, make())
    assert_bit_equal(plain.params, scaled(scaled.init(PARAMS), jnp.ones(4))[0].params)
    assert report.loss_scale == 1 and not report.overflow
    with pytest.raises(ValueError, match="max_grad_norm=1.0 is one norm.*several optimizers"):
        ampx.train_step(loss_fn, optimizers, max_grad_norm=1.0)
    with pytest.raises(TypeError, match=r"inner\['d'\] must be an optax gradient transformation"):
        ampx.train_step(loss_fn, {"d": 3}, loss_scale="dynamic")

    step = ampx.train_step(loss_fn, make(num_losses=2))
    with pytest.raises(ValueError, match="num_losses=2.*guide on loss scaling"):
        step.init(PARAMS)
    opt_state = step.tx.init(PARAMS)
    with pytest.raises(ValueError, match="num_losses=2.*guide on loss scaling"):
        step(state._replace(opt_state=opt_state), jnp.ones(4))


def test_devices_agree_for_each_optimizer():
    mesh = make_mesh((2,), ("data",))
    tx = make()

    def loss_fn(params, batch):
        return jnp.mean(batch["d"]) * params["d"][0] + jnp.mean(batch["g"]) * params["g"][0]

    step = ampx.train_step(loss_fn, tx, axis_name="data")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    batch = {"d": jnp.array([1.0, INF]), "g": jnp.ones(2)}  # bad on the second device alone
    state, report = jax.jit(sharded)(step.init(PARAMS), batch)
    assert report.overflow and state.opt_state.loss_scale == 8
    assert_bit_equal(state.params["d"], jnp.asarray(PARAMS["d"]))
    assert state.params["g"][0] == PARAMS["g"][0] - 0.5


def test_an_optimizer_of_the_guides_gan_skips_alone():
    (block,) = (block for block in blocks_of(GUIDE) if "discriminator" in block.source)
    names = {"ampx": ampx, "jax": jax, "jnp": jnp, "optax": optax}
    run_block(block, GUIDE, names)
    params, opt_state = names["params"], names["opt_state"]
    for bad in (False, True):
        images = np.ones((8, 3), np.float32)
        images[0, 0] = INF if bad else 1.0
        old = params
        params, opt_state = names["step"](params, opt_state, images, np.ones((8, 2), np.float32))
        assert np.array_equal(params["discriminator"]["w"], old["discriminator"]["w"]) == bad
        assert np.all(params["generator"]["w"] != old["generator"]["w"])
    assert opt_state.loss_scale == 2.0**15
