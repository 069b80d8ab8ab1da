"""Counters, flags and random keys among the parameters of a pipeline; stages without layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from pipeline_steps import assert_close
from quick_keys import quick_key

import ampx
from ampx.pipelining import gpipe, interleaved, one_f_one_b, plan, value_and_grad, zero_bubble
from ampx.trees import merge_trainable, split_trainable

WIDTH, ROWS, KEY = 4, 8, quick_key(7)
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}


def first(params, shared, batch, key):
    kept = jax.random.bernoulli(params["key"], 0.5, batch.shape)
    times = shared["times"].astype(batch.dtype)
    return jnp.where(kept, batch * params["scale"], shared["offset"] * times)


def stage(params, x, key):
    """A layer whose flag turns it off, with a dropout of its own key and one of the call's."""
    kept = jax.vmap(lambda one: jax.random.bernoulli(one, 0.5, x.shape[1:]))(params["keys"])
    hidden = jnp.tanh(x @ params["kernel"]) * jnp.where(jnp.any(kept, axis=0), 1.0, 0.5)
    if key is not None:
        hidden *= jax.random.uniform(key, x.shape[1:])
    hidden *= params["count"].astype(x.dtype)
    return jnp.where(params["flag"], x + hidden, x)


def last(params, shared, x, batch, key):
    return jnp.sum((x - shared["offset"]) ** 2), jnp.float32(len(x))


def make_params(layers):
    rng = np.random.default_rng(layers)
    keys = jax.vmap(jax.random.key)(np.arange(2 * layers, dtype=np.uint32)).reshape(layers, 2)
    return {
        "first": {"key": jax.random.key(5), "scale": jnp.float32(1.5)},
        "stages": {
            "count": jnp.arange(1, layers + 1, dtype=jnp.uint32),
            "flag": jnp.arange(layers) % 3 != 1,
            "kernel": jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)), jnp.float32),
            "keys": keys,
        },
        "shared": {"offset": jnp.ones(WIDTH), "times": jnp.int32(2)},
    }


def make_batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def vary(params, key):
    """The keys that a call draws from: those that are stored, and a number of the call's key."""
    number = jax.random.bits(key, dtype=jnp.uint32)

    def fold(leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        flat = [jax.random.fold_in(leaf.reshape(-1)[i], number) for i in range(leaf.size)]
        return jnp.stack(flat).reshape(leaf.shape)

    return jax.tree.map(fold, params)


def rest_of(params):
    return split_trainable(params)[1]


def undivided(params, batch, key, num_microbatches):
    """Loss and gradients of the model in one function, by the keys that the module names."""
    layers = len(params["stages"]["kernel"])

    def loss_of(floating):
        whole, total = merge_trainable(floating, rest_of(params)), 0.0
        for number in range(num_microbatches):
            rows, own = batch[number::num_microbatches], jax.random.fold_in(key, number)
            keys = [jax.random.fold_in(own, n) for n in range(layers + 2)]
            x = first(*vary((whole["first"], whole["shared"]), keys[0]), rows, keys[0])
            for n in range(layers):
                layer = jax.tree.map(lambda leaf, n=n: leaf[n], whole["stages"])
                x = stage(vary(layer, keys[n + 1]), x, keys[n + 1])
            total += last(None, whole["shared"], x, rows, keys[-1])[0]
        return total / len(batch)

    return jax.jit(jax.value_and_grad(loss_of), **QUICK)(split_trainable(params)[0])


def make_grads_of(schedule, stage=stage, **options):
    mesh = make_mesh((schedule.num_devices,), ("stage",))
    return value_and_grad(
        first=first, stage=stage, last=last, schedule=schedule, axis_name="stage", mesh=mesh,
        **options,
    )  # fmt: skip


# By name: schedule, number of layers, options. Stages without layers are at the start, in the
# middle and at the end.
CASES = {
    "1f1b": (one_f_one_b(2, 2), 4, {}),
    "chunks, three of them empty": (interleaved(2, 2), 2, {"layers_per_stage": (0, 2, 0, 0)}),
    "the last one empty": (gpipe(3, 2), 2, {"layers_per_stage": (1, 1, 0), "stash": "residuals"}),
    "halves, the middle one empty": (zero_bubble(3, 2), 5, {"layers_per_stage": (2, 0, 3)}),
}


def assert_equal_to_the_undivided(found, params, num_microbatches):
    loss, grads = undivided(params, make_batch(), KEY, num_microbatches)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    assert jax.tree.structure(found.grads) == jax.tree.structure(grads)
    assert_close(found.grads, grads)


@pytest.mark.slow_but("chunks, three of them empty")
@pytest.mark.parametrize("case", CASES)
def test_leaves_without_gradients_are_read_and_stages_may_be_empty(case):
    schedule, layers, options = CASES[case]
    params = make_params(layers)
    found = jax.jit(make_grads_of(schedule, **options), **QUICK)(params, make_batch(), key=KEY)
    assert_equal_to_the_undivided(found, params, schedule.num_microbatches)


@pytest.mark.slow
def test_separate_stages_may_hold_them_and_may_be_empty():
    """Two layers in lists of trees that differ, and between them a stage without parameters."""
    params = make_params(2)
    layers = [jax.tree.map(lambda leaf, n=n: leaf[n], params["stages"]) for n in range(2)]

    def named(p, x, key):
        return stage(p["layer"], x, key) * p["one"]

    separate = params | {"stages": [layers[0], {}, {"layer": layers[1], "one": jnp.ones(())}]}
    grads_of = make_grads_of(one_f_one_b(3, 2), stage=[stage, lambda p, x, key: x, named])
    found = jax.jit(grads_of)(separate, make_batch(), key=KEY)

    def loss_of(floating):
        whole, total = merge_trainable(floating, rest_of(separate)), 0.0
        for number in range(2):
            rows, own = make_batch()[number::2], jax.random.fold_in(KEY, number)
            keys = [jax.random.fold_in(own, n) for n in range(5)]
            x = first(*vary((whole["first"], whole["shared"]), keys[0]), rows, keys[0])
            x = stage(vary(whole["stages"][0], keys[1]), x, keys[1])
            x = named(vary(whole["stages"][2], keys[3]), x, keys[3])
            total += last(None, whole["shared"], x, rows, keys[4])[0]
        return total / ROWS

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(split_trainable(separate)[0])
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    assert_close(found.grads, grads)
    assert jax.tree.structure(found.grads) == jax.tree.structure(grads)


def test_train_step_takes_them():
    params, grads_of = make_params(4), make_grads_of(one_f_one_b(2, 2))
    for tx in (optax.adamw(0.1), ampx.fused.adamw(0.1)):
        step = ampx.train_step(grads_of, tx, loss_scale="dynamic", local_norm=True)
        state = step.init(params, key=KEY)
        assert len(jax.tree.leaves(state.opt_state)) < 3 * len(jax.tree.leaves(params))
        new, report = jax.eval_shape(step, state, make_batch())
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        assert set(report.local_norm) == {"first", "stages", "shared"}


@pytest.mark.slow
def test_train_step_leaves_them_as_they_are():
    params = make_params(4)
    step = ampx.train_step(make_grads_of(one_f_one_b(2, 2)), ampx.fused.adamw(0.1))
    state = step.init(params, key=KEY)
    new, report = jax.jit(step)(state, make_batch())
    assert_bit_equal(
        jax.tree.leaves(new.params["stages"])[:2], jax.tree.leaves(params["stages"])[:2]
    )
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), new.params, params)
    assert moved["stages"] == {"count": False, "flag": False, "kernel": True, "keys": False}
    assert moved["first"] == {"key": False, "scale": True}
    assert np.isfinite(report.global_norm)


def test_gradients_without_a_key_are_refused():
    with pytest.raises(ValueError, match="first/key is a random key, and the call has none"):
        make_grads_of(one_f_one_b(2, 2))(make_params(4), make_batch())


@pytest.mark.slow
def test_keys_are_the_same_for_every_call_without_a_key():
    grads_of, params = make_grads_of(one_f_one_b(2, 2)), make_params(4)
    losses = [jax.jit(grads_of.value)(params, make_batch(), key=key).loss for key in (None, KEY)]
    assert np.all(np.isfinite(losses)) and losses[0] != losses[1]


def test_each_has_a_place():
    params, grads_of = make_params(4), make_grads_of(one_f_one_b(2, 2))
    placed = jax.device_put(params, grads_of.shardings(params))
    assert_bit_equal(placed, params)
    assert placed["stages"]["keys"].addressable_shards[0].data.shape == (2, 2)


@pytest.mark.slow
def test_plans_know_them():
    params, grads_of = make_params(4), make_grads_of(one_f_one_b(2, 2))
    found = plan(grads_of, params, make_batch(), optax.adam(0.1), key=KEY)
    assert found.memory["gradients"] == 4 * (1 + 2 * WIDTH * WIDTH + WIDTH)


def test_what_is_no_array_is_refused():
    params = make_params(4)
    params["first"]["activation"] = jnp.tanh
    with pytest.raises(TypeError, match="first/activation is no array but of type .*eqx.partition"):
        make_grads_of(one_f_one_b(2, 2))(params, make_batch(), key=KEY)


REFUSED = {
    "too few layers": (3, {}, r"leave stages empty, as in layers_per_stage=\(1, 1, 1, 0\)"),
    "negative": (4, {"layers_per_stage": (2, 3, -1, 0)}, "must not be negative.*hands on what"),
    "none at all": (0, {"layers_per_stage": (0, 0, 0, 0)}, "needs at least one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_of_layers_that_cannot_be(case):
    layers, options, message = REFUSED[case]
    grads_of = make_grads_of(one_f_one_b(4, 2), **options)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(grads_of, key=KEY), make_params(layers), make_batch())
