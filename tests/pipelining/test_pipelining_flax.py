"""Flax modules, linen and nnx, as the stages of a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pipeline_models import sequential
from pipeline_steps import (
    WIDTH,
    assert_close,
    first,
    last,
    make_batch,
    make_params,
    make_stage_mesh,
    placed,
)
from quick_keys import quick_key

import ampx
from ampx.pipelining import one_f_one_b, stack_layers, unstack_layers, value_and_grad

LAYERS = 4


def make_grads_of(stage, *, microbatches=4, data=2, **options):
    return value_and_grad(
        first=embed,
        stage=stage,
        last=head,
        schedule=one_f_one_b(2, microbatches),
        axis_name="stage",
        data_axes="data",
        mesh=make_stage_mesh(data, 2),
        **options,
    )


def embed(params, shared, batch, key):
    return first(params, shared, batch, key)[0]


def head(params, shared, x, batch, key):
    return last(params, shared, (x,), batch, key)


def with_stages(stages):
    return make_params() | {"stages": stages}


def loss_of(stage):
    """The same model in one function."""

    def loss_fn(params, batch):
        x = embed(params["first"], params["shared"], batch, None)
        for number in range(LAYERS):
            layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["stages"])
            x = stage(layer, x, None)
        return head(params["last"], params["shared"], x, batch, None)

    return loss_fn


def assert_equal_to_the_sequence(stage, stages):
    """Loss and gradients, with a key."""
    params, batch, key = with_stages(stages), make_batch(0), quick_key(4)
    found = jax.jit(make_grads_of(stage))(params, batch, key=key)
    expected = sequential(params, batch, key, 4, 2, first=embed, stage=stage, last=head)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    assert jax.tree.structure(found.grads) == jax.tree.structure(params)
    assert_close(found.grads, expected.grads)
    return found


# --- linen ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual layer; `deterministic` turns its dropout off."""

    norm: type = nn.LayerNorm

    @nn.compact
    def __call__(self, x, deterministic=False):
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(self.norm()(x)))
        return x + nn.Dropout(0.3)(nn.Dense(WIDTH)(hidden), deterministic=deterministic)


def linen_params(block=Block()):  # noqa: B008
    def init(key):
        return block.init(key, jnp.ones((1, WIDTH)), deterministic=True)

    return jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(1), LAYERS))


def linen_stage(params, x, key):
    rngs = None if key is None else {"dropout": key}
    return Block().apply(params, x, deterministic=key is None, rngs=rngs)


def test_linen_layers_with_dropout_equal_the_sequence():
    found = assert_equal_to_the_sequence(linen_stage, linen_params())
    assert np.any(found.grads["stages"]["params"]["Dense_1"]["bias"])


@pytest.mark.slow
def test_linen_trains_in_half_precision_with_norms_in_float32():
    seen = set()

    def watched(params, x, key):
        flat = jax.tree_util.tree_leaves_with_path(params)
        seen.update((path[1].key, leaf.dtype.name) for path, leaf in flat)
        seen.add(("x", x.dtype.name))
        return linen_stage(params, x, key)

    assert_half_training(watched, linen_stage, linen_params())
    assert seen == {
        ("x", "bfloat16"),
        ("Dense_0", "bfloat16"),
        ("Dense_1", "bfloat16"),
        ("LayerNorm_0", "float32"),
    }


def assert_half_training(stage, stage_alone, stages):
    """Three steps at O2."""
    policy = ampx.opt_level("O2", half_dtype=jnp.bfloat16)
    tx, options = optax.sgd(0.1, momentum=0.9), dict(max_grad_norm=1.0)
    step = ampx.train_step(make_grads_of(stage, policy=policy), tx, **options)
    alone = ampx.train_step(loss_of(stage_alone), tx, policy=policy, normalize="weights", **options)
    state, expected = placed(step, with_stages(stages)), alone.init(with_stages(stages))
    steps = jax.jit(step), jax.jit(alone)
    for number in range(3):
        state, report = steps[0](state, make_batch(number))
        expected, wanted = steps[1](expected, make_batch(number))
        np.testing.assert_allclose(report.loss, wanted.loss, rtol=1e-2)
        np.testing.assert_allclose(report.global_norm, wanted.global_norm, rtol=2e-2)
    # Biases start at zero: all that is in them is the sum of rounded gradients.
    assert_close(state.params, expected.params, 5e-2)


# --- nnx -----------------------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    def __init__(self, rngs, norm=nnx.LayerNorm):
        self.norm = norm(WIDTH, rngs=rngs)
        self.inner = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.outer = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3)

    def __call__(self, x, key=None):
        hidden = self.outer(nnx.gelu(self.inner(self.norm(x))))
        rngs = None if key is None else nnx.Rngs(key)
        return x + self.dropout(hidden, rngs=rngs, deterministic=key is None)


def nnx_stacked(how, norm=nnx.LayerNorm):
    """The definition of one layer, and the parameters of all."""
    if how == "vmap":
        make = nnx.vmap(lambda key: NNXBlock(nnx.Rngs(key), norm))
        return nnx.split(make(jax.random.split(jax.random.key(2), LAYERS)))
    layers = [nnx.split(NNXBlock(nnx.Rngs(number), norm)) for number in range(LAYERS)]
    return layers[0][0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s for _, s in layers])


@pytest.mark.slow
def test_nnx_layers_with_dropout_equal_the_sequence():
    graphdef, stages = nnx_stacked("vmap")
    found = assert_equal_to_the_sequence(
        lambda params, x, key: nnx.merge(graphdef, params)(x, key), stages
    )
    assert isinstance(found.grads["stages"], nnx.State)


@pytest.mark.slow
def test_a_stacked_nnx_module_trains_as_parameters_do():
    """A module is a pytree; the step on one device takes it too."""

    def stage(layer, x, key):
        return layer(x, key)

    params = with_stages(nnx.merge(*nnx_stacked("stack")))
    tx, options = optax.adamw(1e-2), dict(loss_scale=8.0, local_norm=True)
    step = ampx.train_step(make_grads_of(stage), tx, **options)
    alone = ampx.train_step(loss_of(stage), tx, normalize="weights", **options)
    states, steps = [placed(step, params), alone.init(params)], [jax.jit(step), jax.jit(alone)]
    for number in range(2):
        found = [run(state, make_batch(number)) for run, state in zip(steps, states, strict=True)]
        states, reports = zip(*found, strict=True)
        assert_close(*(report.local_norm for report in reports))
    assert isinstance(states[0].params["stages"], NNXBlock)
    assert_close(*(state.params for state in states))


@pytest.mark.slow
def test_nnx_modules_train_in_half_precision_with_norms_in_float32():
    seen = set()

    def watched(layer, x, key):
        seen.update({("x", x.dtype.name), ("inner", layer.inner.kernel[...].dtype.name)})
        seen.add(("norm", layer.norm.scale[...].dtype.name))
        return layer(x, key)

    recipe = ampx.opt_level("O2", half_dtype=jnp.bfloat16)

    def alone(layer, x, key):
        return recipe.call_part(lambda layer, x: layer(x), layer, x)

    stages = nnx.merge(*nnx_stacked("stack"))
    assert_half_training(watched, alone, stages)
    assert seen == {("x", "bfloat16"), ("inner", "bfloat16"), ("norm", "float32")}


class TiedModel(nn.Module):
    """A model as people write it: an embedding at both ends, and numbered blocks."""

    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(11, WIDTH, name="embed")
        x = embed(words)
        for number in range(LAYERS):
            x = Block(name=f"block_{number}")(x, deterministic=True)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def loss_sum(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


@pytest.mark.slow
@pytest.mark.whole("O2")  # modules train at O2 above
@pytest.mark.parametrize("policy", [None, "O2"])
def test_a_tied_model_is_taken_from_its_checkpoint_and_put_back(policy):
    batch, model = make_batch(0), TiedModel()
    checkpoint = jax.jit(model.init)(jax.random.key(0), batch["words"])["params"]
    embedding, norm = nn.Embed(11, WIDTH), nn.LayerNorm()

    def last(params, shared, x, batch, key):
        x = norm.apply({"params": params["norm"]}, x)
        return loss_sum(embedding.apply({"params": shared}, x, method="attend"), batch)

    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: embedding.apply({"params": shared}, batch["words"]),
        stage=lambda p, x, key: Block().apply({"params": p}, x, deterministic=True),
        last=last,
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        mesh=make_stage_mesh(1, 2),
        policy=policy,
    )
    stages = stack_layers(checkpoint, "block_{}")
    # Under its name, by which O2 knows a norm.
    last_part = {"norm": checkpoint["norm"]}
    params = {"stages": stages, "shared": checkpoint["embed"], "last": last_part}
    found = jax.jit(grads_of)(params, batch)
    alone = ampx.value_and_grad(
        lambda params, batch: loss_sum(model.apply({"params": params}, batch["words"]), batch),
        normalize="weights",
        policy=policy,
    )
    expected = jax.jit(alone)(checkpoint, batch)
    rtol = 5e-2 if policy else 1e-5  # rounded to bfloat16 at other places
    np.testing.assert_allclose(found.loss, expected.loss, rtol=rtol)
    grads = unstack_layers(found.grads["stages"], checkpoint, "block_{}")
    grads |= {"embed": found.grads["shared"], "norm": found.grads["last"]["norm"]}
    assert_close(grads, expected.grads, rtol)


# --- batch statistics ----------------------------------------------------------------------------


def refused_stages():
    block = Block(functools.partial(nn.BatchNorm, use_running_average=False))
    graphdef, state = nnx_stacked("stack", nnx.BatchNorm)
    return {
        "linen": (
            linen_params(block),
            lambda params, x, key: block.apply(params, x, True, mutable=["batch_stats"])[0],
            "stages/batch_stats/BatchNorm_0/mean",
        ),
        "nnx state": (
            state,
            lambda params, x, key: nnx.merge(graphdef, params)(x, key),
            "stages/norm/mean",
        ),
        "nnx module": (
            nnx.merge(graphdef, state), lambda layer, x, key: layer(x, key), "stages/norm/mean"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["linen", "nnx state", "nnx module"])
def test_batch_statistics_among_the_parameters_are_refused(name):
    """They would get a gradient of zero, or be trained."""
    stages, stage, path = refused_stages()[name]
    with pytest.raises(ValueError, match=f"{path} is no parameter.*Use LayerNorm.*close over"):
        jax.eval_shape(make_grads_of(stage), with_stages(stages), make_batch(0))


@pytest.mark.slow
def test_frozen_batch_statistics_are_closed_over():
    block = Block(functools.partial(nn.BatchNorm, use_running_average=True))
    variables = linen_params(block)
    frozen = jax.tree.map(lambda leaf: leaf[0] + 0.5, variables["batch_stats"])

    def stage(params, x, key):
        return block.apply({"params": params, "batch_stats": frozen}, x, deterministic=True)

    assert_equal_to_the_sequence(stage, variables["params"])


# --- random state of nnx modules -----------------------------------------------------------------


class WithRngs(nnx.Module):
    """A layer whose two dropouts hold the streams that they draw from."""

    def __init__(self, rngs):
        self.dropout, self.late = nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.late(jnp.tanh(self.linear(self.dropout(x))))


def layers_with_rngs():
    layers = [nnx.split(WithRngs(nnx.Rngs(number))) for number in range(LAYERS)]
    return layers[0][0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s for _, s in layers])


def with_call_key(state, key):
    """The state of a layer with its keys as the pipeline gives them, folded with the call's."""
    number = jax.random.bits(key, dtype=jnp.uint32)
    streams, rest = nnx.split_state(state, nnx.RngKey, ...)
    streams = jax.tree.map(lambda stored: jax.random.fold_in(stored, number), streams)
    return nnx.merge_state(streams, rest)


@pytest.mark.slow
@pytest.mark.whole("state", "module")
@pytest.mark.parametrize("form", ["state", "module", "module, O2"])
def test_dropout_with_streams_of_its_own_equals_the_sequence(form):
    graphdef, stages = layers_with_rngs()
    is_module = form != "state"
    policy = ampx.opt_level("O2", half_dtype=jnp.bfloat16) if "O2" in form else None
    if is_module:
        stages = nnx.merge(graphdef, stages)

    def stage(layer, x, key):
        return layer(x) if is_module else nnx.merge(graphdef, layer)(x)

    params, batch, key = with_stages(stages), make_batch(0), jax.random.key(4)
    grads_of = make_grads_of(stage, microbatches=2, data=1, policy=policy)
    found = jax.jit(grads_of)(params, batch, key=key)
    _, trained, rest = nnx.split(nnx.merge(*layers_with_rngs()), nnx.Param, ...)

    def loss_of(trained_parts):
        total, weights = 0.0, 0.0
        state = nnx.merge_state(trained_parts["stages"], rest)
        for number in range(2):
            own = jax.random.fold_in(jax.random.fold_in(key, 0), number)  # shard, micro-batch
            rows = jax.tree.map(lambda x, n=number: x[n::2], batch)
            x = embed(trained_parts["first"], trained_parts["shared"], rows, None)
            for n in range(LAYERS):
                layer = jax.tree.map(lambda leaf, n=n: leaf[n], state)
                layer = with_call_key(layer, jax.random.fold_in(own, n + 1))
                x = nnx.merge(graphdef, layer)(x)
            loss, weight = head(trained_parts["last"], trained_parts["shared"], x, rows, None)
            total, weights = total + loss, weights + weight
        return total / weights

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(params | {"stages": trained})
    rtol = 2e-2 if policy else 1e-5
    np.testing.assert_allclose(found.loss, loss, rtol=rtol)
    assert jax.tree.leaves(found.grads["stages"], is_leaf=lambda x: x is None)[:2] == [None, None]
    assert_close(found.grads, grads, 5 * rtol)


def test_streams_without_a_key_would_draw_the_same_in_every_step():
    graphdef, stages = layers_with_rngs()
    grads_of = make_grads_of(lambda layer, x, key: nnx.merge(graphdef, layer)(x))
    with pytest.raises(ValueError, match="stages/dropout/rngs/key/value is a random key.*key=..."):
        jax.eval_shape(grads_of, with_stages(stages), make_batch(0))
    found = jax.eval_shape(grads_of, with_stages(stages), make_batch(0), key=jax.random.key(0))
    assert len(jax.tree.leaves(found.grads["stages"])) == 2  # of the linear layer alone
    # Evaluation without a key draws from the streams as they are, or not at all.
    jax.eval_shape(grads_of.value, with_stages(stages), make_batch(0))


def test_other_state_of_nnx_modules_is_refused():
    class WithCache(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.largest = nnx.Variable(jnp.zeros(()))

    layers = [nnx.split(WithCache(nnx.Rngs(number))) for number in range(LAYERS)]
    stages = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[state for _, state in layers])
    grads_of = make_grads_of(lambda layer, x, key: x)
    with pytest.raises(ValueError, match="stages/largest is no parameter.*nnx.Param"):
        jax.eval_shape(grads_of, with_stages(stages), make_batch(0))
