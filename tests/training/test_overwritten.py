"""Leaves whose gradient is their new value: flax's layers in 8 bits, and one written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P
from pipeline_models import first, last, stage
from recorded_layer import (
    LARGEST,
    OVERWRITE,
    X,
    draw,
    largest_of,
    make_variables,
    record,
    record_loss,
)

import ampx

ADAMW = optax.adamw(0.03)


# Layers of flax.


class Net(nn.Module):
    """One layer in 8 bits, with a short history, and one that is not."""

    op: type = fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, x):
        op = functools.partial(self.op, amax_history_length=4)
        x = nn.Dense(16, dot_general_cls=op)(x)
        return nn.Dense(1)(nn.relu(x))


class Dequantized(fp8_ops.Fp8DotGeneralOp):
    """flax warns of its class as deprecated; only it can compute in float16."""


NET = Net()
IMAGES = draw(32, 16)
BATCH = (IMAGES, np.sum(IMAGES * draw(16, seed=2), axis=1, keepdims=True))
VARIABLES = jax.eval_shape(NET.init, jax.random.key(0), IMAGES)
VARIABLES = {
    "params": jax.tree.map(lambda s: 0.3 * draw(*s.shape), VARIABLES["params"]),
    OVERWRITE: jax.tree_util.tree_map_with_path(
        lambda path, s: np.full(s.shape, "scale" in str(path[-1]), np.float32),
        VARIABLES[OVERWRITE],
    ),
}


def net_loss(variables, batch, net=NET):
    images, targets = batch
    return jnp.mean((net.apply(variables, images).astype(jnp.float32) - targets) ** 2)


def flax_steps(n, loss=net_loss, tx=ADAMW, batch=BATCH):
    """flax's own loop."""
    state = TrainState.create(apply_fn=None, params=VARIABLES, tx=tx)

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    for _ in range(n):
        state, value = step(state)
    return state, value


def ampx_steps(n, loss=net_loss, tx=ADAMW, batch=BATCH, **options):
    step = ampx.train_step(loss, tx, **options)
    state, jitted = step.init(VARIABLES), jax.jit(step)
    for _ in range(n):
        state, report = jitted(state, batch)
    return state, report


def measures(params):
    """The variables of the layer in 8 bits, by name."""
    (layer,) = params[OVERWRITE].values()
    (op,) = layer.values()
    return op


@pytest.mark.slow
@pytest.mark.parametrize("given", ["ampx", "flax"])
def test_flax_layers_are_trained_as_by_flax_to_the_last_bit(given):
    """With ampx's state and with flax's own; optimizer states are the same, too."""
    expected, loss = flax_steps(60)
    if given == "ampx":
        state, report = ampx_steps(60)
    else:
        step = ampx.train_step(net_loss, ADAMW)
        state, jitted = (
            TrainState.create(apply_fn=None, params=VARIABLES, tx=step.tx),
            jax.jit(step),
        )
        for _ in range(60):
            state, report = jitted(state, BATCH)
    assert_bit_equal((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert float(report.loss) == float(loss) < 0.1


@pytest.mark.slow
def test_a_loop_by_hand_trains_flax_layers_as_flax_does_to_the_last_bit():
    """`optax.apply_updates` knows nothing of such leaves, and replaces them."""
    tx = ampx.no_loss_scale(ADAMW)
    params, opt_state = VARIABLES, tx.init(VARIABLES)

    @jax.jit
    def step(params, opt_state):
        updates, opt_state = tx.update(jax.grad(net_loss)(params, BATCH), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(5):
        params, opt_state = step(params, opt_state)
    expected, _ = flax_steps(5)
    assert_bit_equal((params, opt_state), (expected.params, expected.opt_state))
    assert float(measures(params)["input_scale"][0]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_precision_leaves_scales_as_flax_makes_them(level, half):
    # float16 needs a loss scale; one that looks at nothing puts no branch around the update.
    scale = 1024.0
    unchecked = functools.partial(ampx.static_loss_scale, scale=scale, check=False)
    recipe = ampx.opt_level(level, half_dtype=half, loss_scale=None)
    loss = functools.partial(net_loss, net=Net(Dequantized))

    def by_hand(variables, batch):
        if level == "O1":
            cast_loss = ampx.autocast(loss, half_dtype=half, output="original")
            return scale * cast_loss(variables, batch)
        cast = ampx.cast_floating(variables["params"], half)
        return scale * loss({**variables, "params": cast}, (batch[0].astype(half), batch[1]))

    @jax.jit
    def flax_step(state):
        grads = jax.grad(by_hand)(state.params, BATCH)
        unscaled = jax.tree.map(lambda g: g / scale, grads["params"])
        return state.apply_gradients(grads={**grads, "params": unscaled})

    # The two layers have the same variables at the same paths but for the name of the op.
    renamed = jax.tree.map(lambda x: x, VARIABLES)
    renamed[OVERWRITE] = {"Dense_0": {"Dequantized_0": measures(VARIABLES)}}
    step = ampx.train_step(loss, ADAMW, policy=recipe, loss_scale=unchecked)
    state, jitted = step.init(renamed), jax.jit(step)
    expected = TrainState.create(apply_fn=None, params=renamed, tx=ADAMW)
    for _ in range(3):
        (state, _), expected = jitted(state, BATCH), flax_step(expected)
    assert_bit_equal(state.params[OVERWRITE], expected.params[OVERWRITE])
    assert float(measures(state.params)["input_scale"][0]) < 0.1


@pytest.mark.slow
def test_scale_clip_and_micro_batches_leave_what_a_layer_measured():
    """Of cotangents the layer measures what it sees: times the loss scale and the micro-batches."""
    clipped = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)
    expected = measures(flax_steps(5, tx=clipped)[0].params)
    state, report = ampx_steps(5, loss_scale=2.0**12, max_grad_norm=0.5, num_microbatches=4)
    found = measures(state.params)
    for name, value in expected.items():
        factor = 2.0**14 if "output_grad" in name else 1.0
        if "scale" in name:  # the first is 1 in all units; later ones come from the maxima
            assert value.item() != 1
        np.testing.assert_allclose(found[name], factor * value, rtol=0.02, err_msg=name)
    assert_bit_equal(found["input_amax_history"], expected["input_amax_history"])
    assert not report.overflow


@pytest.mark.slow
def test_an_nnx_model_that_wraps_the_layers_is_trained_as_by_flax():
    """Outside of `wrt`: their new values are a part of the model's state."""
    model = nnx.bridge.lazy_init(nnx.bridge.ToNNX(NET, rngs=nnx.Rngs(0)), IMAGES)
    kind = nnx.variable_type_from_name(OVERWRITE)
    nnx.update(model, nnx.State({**VARIABLES["params"]}))
    nnx.update(model, nnx.State({**VARIABLES[OVERWRITE]}))

    def loss(model, batch):
        return jnp.mean((model(batch[0]) - batch[1]) ** 2)

    step = ampx.train_step(loss, ADAMW)
    pair, jitted = (model, nnx.Optimizer(model, step.tx, wrt=nnx.Param)), nnx.jit(step)
    for _ in range(60):
        pair, report = jitted(pair, BATCH)
    expected, _ = flax_steps(60)
    assert_bit_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected.params["params"])
    assert_bit_equal(nnx.to_pure_dict(nnx.state(model, kind)), expected.params[OVERWRITE])
    before = nnx.to_pure_dict(nnx.state(model, kind))
    halves = ampx.value_and_grad(loss, num_microbatches=2)(model, BATCH)
    assert_bit_equal(nnx.to_pure_dict(nnx.state(model, kind)), before)  # nothing in place
    measured = measures({OVERWRITE: nnx.to_pure_dict(nnx.filter_state(halves.model_state, kind))})
    assert measured["input_amax_history"][0] == np.abs(IMAGES).max()
    reducing = ampx.train_step(loss, optax.chain(ampx.all_reduce("x"), ADAMW))
    pair = (model, nnx.Optimizer(model, reducing.tx, wrt=nnx.Param))
    with pytest.raises(ValueError, match="name the mapped axes in train_step"):
        reducing(pair, BATCH)
    with pytest.raises(ValueError, match="wrt picks 'Dense_0/.*, which is no weight"):
        ampx.value_and_grad(loss)(model, BATCH, wrt=nnx.Any(nnx.Param, kind))


# From here on with the layer of `recorded_layer`.

OPTIONS = {
    "frozen": dict(make=freeze),
    "O2": dict(policy="O2"),
    "O3": dict(policy="O3", tx=ampx.fused.adamw(0.1)),
    "micro-batches": dict(num_microbatches=4),
    "weights": dict(num_microbatches=2, normalize="weights"),
    "clip": dict(max_grad_norm=0.1),
    "multi_steps": dict(tx=ampx.multi_steps(ADAMW, 2)),
    "fused": dict(tx=ampx.fused.adamw(0.1), loss_scale=8.0),
    "masters": dict(tx=ampx.master_weights(ADAMW), policy="O3"),
    "axis": dict(axis_name="data", num_microbatches=2),
    "zero1": dict(tx=ampx.zero1(ADAMW, "data"), axis_name="data", loss_scale="dynamic"),
}
OPTIONS["zero2"] = OPTIONS["zero1"] | dict(num_microbatches=2, scatter_gradients=True)


@pytest.mark.whole_but(
    "O2", "micro-batches", "frozen", "weights", "multi_steps", "fused", "masters", "axis", "zero2"
)
@pytest.mark.slow_but("O2", "micro-batches")
@pytest.mark.filterwarnings("ignore:parameters are stored in .* without masters")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_new_value_is_the_largest_and_the_optimizer_sees_the_rest(options):
    options = {"tx": ADAMW, "make": dict, **options}
    variables = options.pop("make")(make_variables())
    is_weighted = options.get("normalize") == "weights"
    loss = (lambda v, x: (8 * record_loss(v, x), 8.0)) if is_weighted else record_loss
    step = ampx.train_step(loss, **options)
    state = step.init(variables)
    if "axis_name" in options:
        mesh = make_mesh((2,), ("data",))
        state_specs = jax.tree.map(lambda _: P(), state)
        if "zero1" in str(jax.tree.structure(state.opt_state)).lower():
            specs = ampx.zero1_specs(step.tx, variables, mesh)
            state_specs = state_specs._replace(opt_state=specs)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(state_specs, P("data")), out_specs=(state_specs, P())
        )
    new, report = jax.jit(step)(state, X)
    assert type(new.params) is type(variables)
    assert largest_of(new.params) == pytest.approx(LARGEST, rel=2**-8 if "policy" in options else 0)
    assert new.params[OVERWRITE]["layer"]["largest"].dtype == jnp.float32
    # The optimizer's state has nothing for these leaves, and the norm does not count them.
    assert OVERWRITE not in str(jax.tree.structure(new.opt_state))
    grad = jax.grad(record_loss)(make_variables(), X)["params"]["layer"]["w"]
    assert report.global_norm == pytest.approx(np.linalg.norm(grad), rel=0.02)


def test_a_skip_holds_them():
    step = ampx.train_step(record_loss, ADAMW, loss_scale="dynamic")
    jitted, state = jax.jit(step), step.init(make_variables())
    skipped, report = jitted(state, np.float32(1e30) * X)  # finite, and its squares are not
    assert report.overflow and largest_of(skipped.params) == -7
    assert_bit_equal(skipped.params, state.params)


def test_a_number_that_is_not_finite_is_not_taken():
    """The layer clips as those of flax do, so gradients are finite though it has seen infinity."""

    def loss(variables, x):
        y = jnp.clip(record(x, variables[OVERWRITE]["layer"]["largest"]), -1, 1)
        return jnp.mean((y @ variables["params"]["layer"]["w"]) ** 2)

    x = X.copy()
    x[0] = np.inf  # in the first of two micro-batches
    step = ampx.train_step(loss, ADAMW, num_microbatches=2, loss_scale="dynamic")
    new, report = jax.jit(step)(step.init(make_variables()), x)
    assert not report.overflow and largest_of(new.params) == np.abs(X[1::2]).max()


def test_each_of_several_optimizers_sees_the_rest_of_its_own_model():
    names = ("one", "two")

    def loss(models, x):
        return sum(record_loss(models[name], x) for name in names)

    step = ampx.train_step(loss, {name: optax.sgd(0.1) for name in names}, loss_scale="dynamic")
    state = step.init({name: make_variables() for name in names})
    new, _ = jax.jit(step)(state, X)
    alone = ampx.train_step(record_loss, optax.sgd(0.1))
    expected, _ = jax.jit(alone)(alone.init(make_variables()), X)
    for name in names:
        assert_bit_equal(new.params[name], expected.params)


@pytest.mark.slow
def test_the_loop_by_hand_of_the_guide_does_what_the_train_step_does():
    tx = ampx.dynamic_loss_scale(ADAMW)
    grads_of = ampx.value_and_grad(record_loss, num_microbatches=2)

    @jax.jit
    def by_hand(variables, opt_state, x):
        result = grads_of(variables, x, loss_scale=ampx.current_loss_scale(opt_state))
        old, new = variables[OVERWRITE], result.grads[OVERWRITE]
        params = variables["params"]
        updates, opt_state = tx.update(result.grads["params"], opt_state, params)
        variables = {
            "params": ampx.apply_updates(params, updates),
            OVERWRITE: ampx.select_if_finite(opt_state, new, old),
        }
        return variables, opt_state

    step = ampx.train_step(record_loss, tx, num_microbatches=2)
    state, jitted = step.init(make_variables()), jax.jit(step)
    variables, opt_state = make_variables(), tx.init(make_variables()["params"])
    for x in (X, np.float32(1e30) * X, X / 2):
        state, _ = jitted(state, x)
        variables, opt_state = by_hand(variables, opt_state, x)
    assert_bit_equal(variables[OVERWRITE], state.params[OVERWRITE])
    np.testing.assert_allclose(
        variables["params"]["layer"]["w"], state.params["params"]["layer"]["w"], rtol=1e-5
    )


def test_value_and_grad_hands_the_new_value_out_and_policies_do_not_cast_it():
    variables = make_variables()
    grads = ampx.value_and_grad(record_loss)(variables, X, loss_scale=8.0).grads
    assert largest_of(grads) == LARGEST
    recipe = ampx.opt_level("O2", keep_norm_float32=lambda path: path.endswith("w"))
    for cast in (
        recipe.half_params,
        ampx.opt_level("O3").cast_params,
        ampx.get_policy("bf16").cast_to_param,
        functools.partial(ampx.cast_floating, dtype="bf16"),
    ):
        assert cast(variables)[OVERWRITE]["layer"]["largest"].dtype == np.float32


def test_stages_that_differ_refuse_them():
    grads_of = ampx.pipelining.value_and_grad(
        first=first,
        stage=[stage, stage],
        last=last,
        schedule=ampx.pipelining.gpipe(2, 2),
        axis_name="stage",
        mesh=make_mesh((2,), ("stage",)),
    )
    with pytest.raises(ValueError, match=f"{OVERWRITE}/layer/largest' is no weight.*Stages that"):
        grads_of({"stages": [make_variables(), make_variables()]}, X)


@pytest.mark.parametrize(
    "tx",
    [ampx.zero1(ADAMW, "x"), optax.chain(ampx.all_reduce("x"), ADAMW)],
    ids=["zero1", "all_reduce"],
)
def test_a_reduction_inside_the_optimizer_would_not_see_them(tx):
    """With axis_name the maximum over devices is taken; else each would have values of its own."""
    step = ampx.train_step(record_loss, tx)
    with pytest.raises(ValueError, match="name the mapped axes in train_step"):
        step(step.init(make_variables()), X)


@pytest.mark.parametrize("divided", [False, True], ids=["one for all shards", "one for each shard"])
def test_the_largest_is_taken_over_axes_that_divide_other_parameters(divided):
    """Unchecked: no type says that the devices along "model" measured different parts."""
    mesh = make_mesh((2, 2), ("data", "model"))
    specs = {
        "params": {"layer": {"w": P("model")}},
        OVERWRITE: P("model") if divided else P(),
    }
    variables = make_variables()
    if divided:
        variables[OVERWRITE]["layer"]["largest"] = np.array([-7, -7], np.float32)
    step = ampx.train_step(
        record_loss, ADAMW, axis_name="data", loss_scale="dynamic", model_axes=specs
    )
    state = step.init(variables)
    state_specs = state._replace(
        step=P(),
        params=specs,
        opt_state=jax.tree.map(lambda x: P("model") if jnp.ndim(x) else P(), state.opt_state),
    )
    mapped = jax.shard_map(
        lambda state, x: step(state, x)[0].params[OVERWRITE]["layer"]["largest"],
        mesh=mesh,
        in_specs=(state_specs, P("data", "model")),
        out_specs=P(("data", "model")),
        check_vma=False,
    )
    # X[:, :2] is what the first device along "model" sees, X[:, 2:] the second.
    parts = [np.abs(X[:, :2]).max(), np.abs(X[:, 2:]).max()]
    expected = [*parts, *parts] if divided else [max(parts)] * 4
    np.testing.assert_array_equal(jax.jit(mapped)(state, X), expected)


def test_a_report_of_numbers_does_not_take_new_values_for_gradients():
    report = ampx.numerics_report(record_loss)(make_variables(), X)
    assert OVERWRITE not in str(report) and "layer/w" in str(report)


# --- pipelines -----------------------------------------------------------------------------------


def recorded_layer(variables, x, add_up=lambda x: x):
    """Clips what it measured, as flax's layers do: an infinity spoils no gradient."""
    own, measured = variables["params"], variables[OVERWRITE]["layer"]
    x = jnp.clip(record(x, measured["largest"]), -3, 3)
    hidden = jnp.clip(record(x @ own["up"], measured["hidden"]), -2, 2)
    return x + add_up(hidden @ own["down"])


def recorded_loss(variables, x):
    y = record(x, variables[OVERWRITE]["layer"]["largest"])
    return jnp.sum((y @ variables["params"]["w"]) ** 2), jnp.float32(len(x))


def whole_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, layer: (recorded_layer(layer, x), None), batch, params["stages"])
    return recorded_loss(params["last"], x)


def stacked_variables():
    layers = {"up": draw(4, 4, 6, seed=3) / 2, "down": draw(4, 6, 4, seed=4) / 2}
    old = np.full((4, 1), -7, np.float32)
    old = {"layer": {"largest": old, "hidden": old}}
    last = {"params": {"w": draw(4)}, OVERWRITE: make_variables()[OVERWRITE]}
    return {"stages": {"params": layers, OVERWRITE: old}, "last": last}


MODEL_SPECS = {
    "stages": {
        "params": {"up": P("stage", None, "model"), "down": P("stage", "model")},
        OVERWRITE: P("stage"),
    }
}
PIPELINES = {
    "one stage": (ampx.pipelining.one_f_one_b(1, 2), {}),
    "zero-bubble": (ampx.pipelining.zero_bubble(2, 2), {}),
    "layers that travel": (ampx.pipelining.interleaved(2, 2), {}),
    "padded": (ampx.pipelining.one_f_one_b(2, 2), dict(layers_per_stage=(3, 1))),
    "data x stage x model": (
        ampx.pipelining.one_f_one_b(2, 2),
        dict(param_specs=MODEL_SPECS, check_vma=False),
    ),
}


@pytest.mark.whole_but("one stage", "zero-bubble", "data x stage x model")
@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_take_the_largest_of_all_micro_batches_and_devices(name):
    schedule, options = PIPELINES[name]
    is_divided = "param_specs" in options
    sizes = (2, schedule.num_devices, 2) if is_divided else (2, schedule.num_devices)
    add_up = (lambda x: jax.lax.psum(x, "model")) if is_divided else (lambda x: x)
    grads_of = ampx.pipelining.value_and_grad(
        first=lambda params, shared, batch, key: batch,
        stage=lambda variables, x, key: recorded_layer(variables, x, add_up),
        last=lambda variables, shared, x, batch, key: recorded_loss(variables, x),
        schedule=schedule,
        axis_name="stage",
        data_axes="data",
        mesh=make_mesh(sizes, ("data", "stage", "model")[: len(sizes)]),
        **options,
    )
    given = dict(loss_scale="dynamic", max_grad_norm=1.0)
    step = ampx.train_step(grads_of, optax.sgd(0.1), **given)
    alone = ampx.train_step(
        whole_loss, optax.sgd(0.1), num_microbatches=4, normalize="weights", **given
    )
    states = [each.init(stacked_variables()) for each in (step, alone)]
    jitted = [jax.jit(each) for each in (step, alone)]
    spoilt = X.copy()
    spoilt[0] = np.inf  # one micro-batch measures an infinity, which is not taken
    for x in (X, spoilt, np.full_like(X, np.nan), X / 2):
        (one, report), (two, expected) = (f(s, x) for f, s in zip(jitted, states, strict=True))
        assert report.overflow == expected.overflow == np.isnan(x).all()
        np.testing.assert_allclose(report.loss, expected.loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        for leaf in jax.tree.leaves(one.params):  # the same on all devices that have it
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(leaf)[shard.index])
        if not report.overflow:
            np.testing.assert_allclose(report.global_norm, expected.global_norm, rtol=1e-5)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(one.params))
        states = [one, two]
