"""Pipelines whose layers are divided, too: data x stage x model against a model on one device.

The model has all that meets on such meshes: layers and a tied embedding that "model" divides,
dropout of replicated and of divided activations, weights of tokens, a loss scale and a clip.

    first   embedding rows of this device, summed over "model"     shared/table     P("model")
    stage   hidden units of this device, summed over "model"       up, down, probe  P("stage", ...)
    last    logits of this device's words, sums over "model"       shared/table     P("model")

`probe` is zero. A row's gains multiply its gradient, unit by unit: so an overflow can be made in
one layer, one row and one shard of the layer, and nowhere else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pipeline_steps
import pytest
from collective_order import find_unordered_collectives
from helpers import assert_bit_equal, make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_models import sequential
from pipeline_steps import assert_close, committed

import ampx
from ampx.pipelining import interleaved, one_f_one_b, value_and_grad, zero_bubble

LAYERS, WIDTH, HIDDEN, WORDS, LENGTH, SHARDS = 4, 8, 8, 12, 3, 2
SPECS = {
    "first": {"position": P()},
    "stages": {
        "up": P("stage", None, "model"),
        "probe": P("stage", "model"),
        "down": P("stage", "model"),
        "bias": P("stage"),
    },
    "last": {"gain": P()},
    "shared": {"table": P("model")},
}
KEY = 3


def make_params():
    generator = np.random.default_rng(7)

    def normal(*shape):
        return (0.4 * generator.normal(size=shape)).astype(np.float32)

    return {
        "first": {"position": normal(LENGTH, WIDTH)},
        "stages": {
            "up": normal(LAYERS, WIDTH, HIDDEN),
            "probe": np.zeros((LAYERS, HIDDEN), np.float32),
            "down": normal(LAYERS, HIDDEN, WIDTH),
            "bias": normal(LAYERS, WIDTH),
        },
        "last": {"gain": np.ones(WIDTH, np.float32)},
        "shared": {"table": normal(WORDS, WIDTH)},
    }


make_batch = functools.partial(pipeline_steps.make_batch, words=WORDS, units=(HIDDEN,))


def make_functions(is_divided):
    """`first`, `stage` and `last` for arrays that "model" divides, or for whole ones."""

    def add_up(x):
        return lax.psum(x, "model") if is_divided else x

    def own_part(x):
        if not is_divided:
            return x
        size = x.shape[-1] // SHARDS
        return lax.dynamic_slice_in_dim(x, lax.axis_index("model") * size, size, -1)

    def look_up(table, words):
        """Which words this device has, and where."""
        start = lax.axis_index("model") * len(table) if is_divided else 0
        at = words - start
        is_here = (at >= 0) & (at < len(table))
        return is_here, jnp.where(is_here, at, 0)

    def draw(key, shape):
        return jax.random.bernoulli(key, 0.8, shape).astype(jnp.float32)

    def draw_parts(key, shape):
        """Each shard of the hidden units has a mask of its own: the key of its number."""
        if is_divided:
            return draw(jax.random.fold_in(key, lax.axis_index("model")), shape)
        part = (*shape[:-1], shape[-1] // SHARDS)
        keys = [jax.random.fold_in(key, number) for number in range(SHARDS)]
        return jnp.concatenate([draw(k, part) for k in keys], axis=-1)

    def first(params, shared, batch, key):
        is_here, at = look_up(shared["table"], batch["words"])
        x = add_up(jnp.where(is_here[..., None], shared["table"][at], 0.0))
        return x + params["position"], batch["gains"]

    def stage(params, carried, key):
        x, gains = carried
        hidden = jnp.tanh(x @ params["up"]) + own_part(gains[:, 0])[:, None] * params["probe"]
        hidden *= draw_parts(key, hidden.shape)
        out = add_up(hidden @ params["down"]) + params["bias"]
        # Replicated over "model": all devices along it must drop the same.
        return x + out * draw(jax.random.fold_in(key, SHARDS), out.shape), jnp.roll(gains, -1, 1)

    def last(params, shared, carried, batch, key):
        x = carried[0]
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["gain"]
        logits = x @ shared["table"].T
        largest = lax.stop_gradient(logits.max(-1))
        largest = lax.pmax(largest, "model") if is_divided else largest
        total = add_up(jnp.exp(logits - largest[..., None]).sum(-1))
        is_here, at = look_up(shared["table"], batch["labels"])
        picked = jnp.take_along_axis(logits, at[..., None], -1)[..., 0]
        losses = jnp.log(total) + largest - add_up(jnp.where(is_here, picked, 0.0))
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    return dict(first=first, stage=stage, last=last)


def make_grads_of(check_vma=True, schedule=None, kind="Auto", **options):
    return value_and_grad(
        **make_functions(is_divided=True),
        schedule=schedule or one_f_one_b(2, 4),
        axis_name="stage",
        data_axes="data",
        mesh=make_mesh((2, 2, 2), ("data", "stage", "model"), kind),
        param_specs=SPECS,
        check_vma=check_vma,
        **options,
    )


def alone(params, batch, *, loss_scale, key, **_):
    """The same on one device, without `shard_map`: what a pipeline's function returns."""
    whole = sequential(params, batch, key, 4, 2, **make_functions(is_divided=False))
    grads = optax.tree.scale(loss_scale, whole.grads)
    return ampx.GradResult(whole.loss, grads, whole.weight, None, None, None)


OPTIMIZERS = {
    # After one step its state is the clipped gradient.
    "sgd": lambda: optax.sgd(0.5, momentum=0.9),
    "fused.lamb": lambda: ampx.fused.lamb(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
}
SCALE = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10, growth_interval=2)
# Two good steps, one with an infinity in shard 1 of layer 1 of stage 0, a good one.
SPOILT = (None, None, (3, 1, 5), None)


def train(step, state):
    """Takes the steps; states and reports of each."""
    jitted, found = jax.jit(step), []
    # The layers hold collectives, and so do the exchanges between them.
    compiled = jitted.lower(state, make_batch(0)).compile()
    assert find_unordered_collectives(compiled.as_text()) == []
    for number, spoilt in enumerate(SPOILT):
        state, report = jitted(state, make_batch(number, spoilt=spoilt))
        found.append((state, report))
    return found


def make_step(grads_of, name):
    # A norm of 0.5 is below that of all steps, so each of them is clipped.
    options = dict(loss_scale=SCALE, max_grad_norm=0.5, local_norm=True)
    return ampx.train_step(grads_of, OPTIMIZERS[name](), **options)


@functools.cache
def trained_alone(name):
    # `train_step` puts the loss scale and the clip around the optimizer in the same way.
    step = make_step(make_grads_of(), name)
    step = ampx.TrainStep(step.tx, alone, None, None, step.group_of)
    return train(step, step.init(make_params(), key=jax.random.key(KEY)))


def copies(tree):
    """What each device holds of every leaf."""
    return [[np.asarray(s.data) for s in x.addressable_shards] for x in jax.tree.leaves(tree)]


def assert_trains_as_alone(step, state, name, rtol=1e-5):
    found = train(step, state)
    wanted = trained_alone(name)
    for number, ((state, report), (expected, expected_report)) in enumerate(
        zip(found, wanted, strict=True)
    ):
        assert report.overflow == expected_report.overflow == (number == 2)
        assert report.loss_scale == expected_report.loss_scale
        np.testing.assert_allclose(report.loss, expected_report.loss, rtol=rtol)
        if number != 2:
            assert_close(report.global_norm, expected_report.global_norm, rtol)
            assert_close(report.local_norm, expected_report.local_norm, rtol)
            assert report.global_norm > 0.5
        assert_close(state.params, expected.params, rtol)
        assert_close(state.opt_state, expected.opt_state, 10 * rtol)
    # The skip undid everything but the scale, on every device.
    (before, _), (after, _) = found[1:3]
    assert_bit_equal(copies(after.params), copies(before.params))
    assert_bit_equal(
        copies(after.opt_state.inner_state.inner_state),
        copies(before.opt_state.inner_state.inner_state),
    )
    assert [float(report.loss_scale) for _, report in found] == [2**10, 2**10, 2**11, 2**10]
    return found[-1][0]


CASES = {
    "checked": (dict(), "sgd"),
    "unchecked": (dict(check_vma=False), "sgd"),
    "zero-bubble, Explicit": (dict(schedule=zero_bubble(2, 4), kind="Explicit"), "fused.lamb"),
    "interleaved, unchecked": (dict(schedule=interleaved(2, 4), check_vma=False), "lamb"),
}


@pytest.mark.slow
@pytest.mark.whole("unchecked", "interleaved, unchecked", "zero-bubble, Explicit")
@pytest.mark.parametrize("case", CASES)
def test_steps_on_data_stage_and_model_are_those_of_one_device(case):
    options, name = CASES[case]
    grads_of = make_grads_of(**options)
    step = make_step(grads_of, name)
    params = jax.device_put(make_params(), grads_of.shardings(make_params()))
    state = committed(step.init(params, key=jax.random.key(KEY)), grads_of.mesh)
    assert_trains_as_alone(step, state, name)


@pytest.mark.whole
def test_the_optimizers_state_may_be_divided_over_the_data_too():
    """ZeRO-1 as a sharding: gradients are global arrays, and the compiler divides the update."""
    grads_of = make_grads_of()
    step = make_step(grads_of, "fused.lamb")
    params = jax.device_put(make_params(), grads_of.shardings(make_params()))
    state = committed(step.init(params, key=jax.random.key(KEY)), grads_of.mesh)
    specs = ampx.zero1_specs(
        ampx.zero1(step.tx, "data"), params, grads_of.mesh, model_axes=SPECS
    ).inner_state
    places = jax.tree.map(lambda spec: NamedSharding(grads_of.mesh, spec), specs)

    def divided(state, batch):
        state, report = step(state, batch)
        opt_state = lax.with_sharding_constraint(state.opt_state, places)
        return state._replace(opt_state=opt_state), report

    state = state._replace(opt_state=jax.device_put(state.opt_state, places))
    state = assert_trains_as_alone(divided, state, "fused.lamb")
    moments = state.opt_state.inner_state.inner_state[0].mu
    parts = {
        path: leaf.size // leaf.addressable_shards[0].data.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(moments)
    }
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): n for path, n in parts.items()}
    assert found == {
        "first/position": 2,
        "stages/up": 8,
        "stages/probe": 8,
        "stages/down": 8,
        "stages/bias": 4,
        "last/gain": 2,
        "shared/table": 4,
    }
