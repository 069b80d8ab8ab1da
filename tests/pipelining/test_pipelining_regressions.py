"""Cases that went wrong once: unusual placements, types and axes."""

import types
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from pipeline_models import (
    first,
    last,
    make_batch,
    make_params,
    pipeline,
    relative_error,
    run,
    sequential,
    stage,
    stage_mesh,
)

import ampx
from ampx.pipelining import (
    Action,
    Schedule,
    interleaved,
    one_f_one_b,
    stack_layers,
    value_and_grad,
    zero_bubble,
)
from ampx.pipelining.model_parts import PARTS

MICROBATCHES = 4


def gpipe_on(device_of):
    """All forwards, then all backwards, with stages on any devices."""
    rows = [[] for _ in range(max(device_of) + 1)]
    stages = range(len(device_of))
    for kind, order in (("F", stages), ("B", stages[::-1])):
        for microbatch in range(MICROBATCHES):
            for number in order:
                rows[device_of[number]].append(Action(number, kind, microbatch))
    return Schedule("own", rows, device_of, MICROBATCHES).aligned().validate()


@pytest.mark.slow_but("uneven-(0, 0, 1, 1)")
@pytest.mark.whole(
    "uneven-(3, 1, 0, 2)", "even-(0, 0, 0, 1)", "uneven-(0, 1, 0)", "even-(0, 0, 1, 1)"
)
@pytest.mark.parametrize(
    "device_of", [(3, 1, 0, 2), (0, 0, 0, 1), (0, 1, 0), (0, 0, 1, 1)], ids=str
)
@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_stages_may_lie_on_any_device(device_of, is_even):
    count = len(device_of)
    layers = count if is_even else count + 1
    options = {} if is_even else {"layers_per_stage": (*[1] * (count - 1), 2)}
    params, batch = make_params(layers), make_batch(8)
    found = run(pipeline(gpipe_on(device_of), **options), params, batch)
    expected = sequential(params, batch, num_microbatches=MICROBATCHES)
    assert relative_error(found.grads, expected.grads) < 1e-5


@pytest.mark.slow_but("(0, 0, 1)")
@pytest.mark.parametrize("device_of", [(1, 0, 1), (0, 0, 1)], ids=str)
def test_stages_that_differ_may_lie_on_any_device(device_of):
    widths = (3, 5, 2, 4)
    keys = jax.random.split(jax.random.key(0), 3)
    trees = [
        {"kernel": jax.random.normal(key, shape)}
        for key, shape in zip(keys, zip(widths, widths[1:], strict=False), strict=True)
    ]
    batch = jax.random.normal(jax.random.key(1), (8, 3))

    def layer(p, x, key):
        return jnp.tanh(x @ p["kernel"])

    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: batch,
        stage=[layer] * 3,
        last=lambda p, shared, x, batch, key: (jnp.sum(x**2), jnp.float32(len(x))),
        schedule=gpipe_on(device_of),
        axis_name="stage",
        mesh=make_mesh((2,), ("stage",)),
    )

    def loss(trees):
        x = batch
        for tree in trees:
            x = layer(tree, x, None)
        return jnp.sum(x**2) / len(x)

    found = jax.jit(grads_of)({"stages": trees}, batch)
    assert relative_error(found.grads["stages"], jax.grad(loss)(trees)) < 1e-5


@pytest.mark.slow_but("zero-bubble")
@pytest.mark.parametrize("schedule", [one_f_one_b(2, 4), zero_bubble(2, 4)], ids=lambda s: s.name)
def test_random_keys_may_travel(schedule):
    def draw(key):
        return jax.vmap(jax.random.uniform)(key)[:, None]

    def keyed_stage(p, x, key):
        return {"x": x["x"] * p * draw(x["key"]), "key": x["key"]}

    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: batch,
        stage=keyed_stage,
        last=lambda p, shared, x, batch, key: (jnp.sum(x["x"]), jnp.float32(1)),
        schedule=schedule,
        axis_name="stage",
        mesh=make_mesh((2,), ("stage",)),
    )
    batch = {"x": jnp.ones((8, 3)), "key": jax.random.split(jax.random.key(0), 8)}

    def loss(params):
        return jnp.sum(batch["x"] * params[0] * params[1] * draw(batch["key"]) ** 2) / 4

    params = jnp.array([2.0, 3.0])
    found = jax.jit(grads_of)({"stages": params}, batch)
    np.testing.assert_allclose(found.grads["stages"], jax.grad(loss)(params), rtol=1e-5)


@pytest.mark.slow
def test_float64_stays_float64():
    with jax.enable_x64(True):
        params = make_params(4, jnp.float64)
        batch = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, make_batch(8)
        )

        def stage_with_half_loss(p, x, key):
            return stage(p, x, key), jnp.float32(1)

        grads_of = pipeline(
            one_f_one_b(2, 4),
            stage=stage_with_half_loss,
            last=lambda p, shared, x, batch, key: (jnp.sum(x**2), jnp.float64(len(x))),
            has_aux_loss=True,
        )
        found = run(grads_of, params, batch)

        def loss(params):
            x = first(params["first"], params["shared"], batch, None)
            for number in range(4):
                x = stage(jax.tree.map(lambda leaf, i=number: leaf[i], params["stages"]), x, None)
            return (jnp.sum(x**2) + 4 * 4) / len(x)

        value, expected = jax.value_and_grad(loss)(params)
        assert found.loss.dtype == jnp.float64
        np.testing.assert_allclose(found.loss, value, rtol=1e-12)
        assert relative_error(found.grads["stages"], expected["stages"]) < 1e-12


def test_layers_may_make_x_differ_along_another_axis():
    """`first` gives the same on all devices of "rows", and the layers do not."""
    specs = {"stages": P("stage", "rows")}
    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: batch,
        stage=lambda p, x, key: x * jnp.sum(p),
        last=lambda p, shared, x, batch, key: (
            jax.lax.psum(jnp.sum(x), "rows"),
            jnp.float32(len(x)),
        ),
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        mesh=make_mesh((2, 2), ("stage", "rows")),
        param_specs=specs,
    )
    params = jnp.arange(1.0, 17.0).reshape(4, 4)

    def loss(params):
        sums = jnp.sum(params.reshape(4, 2, 2), axis=2)
        return jnp.sum(jnp.prod(sums, axis=0)) * 3

    found = jax.jit(grads_of)({"stages": params}, jnp.ones((4, 3)))
    np.testing.assert_allclose(found.loss, loss(params), rtol=1e-6)
    np.testing.assert_allclose(found.grads["stages"], jax.grad(loss)(params), rtol=1e-5)


@pytest.mark.slow_but("not divided")
@pytest.mark.whole("1f1b")
@pytest.mark.parametrize(
    ("schedule", "layers_per_stage"),
    [
        (one_f_one_b(4, 4), (3, 2, 2, 1)),
        (interleaved(2, 4), (3, 1, 2, 2)),
        (interleaved(1, 4), (3, 2)),
        (one_f_one_b(2, 4), (2, 3)),
    ],
    ids=["1f1b", "interleaved", "one device", "not divided"],
)
def test_unequal_stages_stay_divided_where_devices_divide_the_layers(schedule, layers_per_stage):
    params, batch = make_params(sum(layers_per_stage)), make_batch(8)
    grads_of = pipeline(schedule, layers_per_stage=layers_per_stage)
    divides = sum(layers_per_stage) % schedule.num_devices == 0
    (spec,) = {s.spec for s in jax.tree.leaves(grads_of.shardings(params)["stages"])}
    assert spec == (P("stage") if divides else P())
    placed = jax.device_put(params, grads_of.shardings(params))
    found = run(grads_of, placed, batch)
    expected = sequential(params, batch, num_microbatches=4)
    assert relative_error(found.grads, expected.grads) < 1e-5
    assert found.grads["stages"]["kernel"].sharding.is_equivalent_to(
        placed["stages"]["kernel"].sharding, 3
    )


def test_a_sum_over_stages_in_a_layer_is_refused_with_its_line():
    grads_of = pipeline(
        one_f_one_b(2, 4), stage=lambda p, x, key: jax.lax.psum(x @ p["kernel"], "stage")
    )
    with pytest.raises(ValueError, match=r"psum over the axis 'stage'.*regressions.py:\d+"):
        run(grads_of, make_params(4), make_batch(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stage=lambda p, x: x), r"stage is called as stage\(layer_params, x, key\)"),
        (dict(first=lambda p, batch: batch), r"first is called as first\(params, shared, micro"),
        (dict(last=lambda x: x), r"last is called as last\(params, shared, x, microbatch, key\)"),
    ],
    ids=["stage", "first", "last"],
)
def test_functions_with_other_arguments_are_named(options, message):
    with pytest.raises(TypeError, match=message):
        pipeline(one_f_one_b(2, 4), **options)


@pytest.mark.parametrize("axis", ["stage", "data"])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_pipeline_inside_shard_map_is_refused(axis, is_given):
    """Along another axis, too: gradients of parameters that are the same there were summed."""
    mesh = stage_mesh(one_f_one_b(2, 4), data=2)
    grads_of = pipeline(one_f_one_b(2, 4), mesh=mesh if is_given else None)
    mapped = jax.shard_map(
        lambda params, batch: jax.lax.pmean(grads_of(params, batch).loss, axis),
        axis_names={axis},
        in_specs=(P(), P()),
        out_specs=P(),
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"'{axis}'.* already.*plain jit"):
        jax.eval_shape(mapped, make_params(4), make_batch(8))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_pipeline_runs_outside_of_jit(check_vma):
    """Also on a mesh with an axis that it does not map, for which JAX refused an unchecked one."""
    schedule = one_f_one_b(2, 2)
    mesh = stage_mesh(schedule, model=2)
    grads_of = pipeline(schedule, mesh=mesh, check_vma=check_vma)
    params, batch = make_params(2), make_batch(4)
    result, expected = grads_of(params, batch), run(grads_of, params, batch)
    assert relative_error(result.grads, expected.grads) < 1e-6
    np.testing.assert_allclose(grads_of.value(params, batch).loss, expected.loss, rtol=1e-6)


def test_layers_in_a_list_and_too_few_of_them_are_named():
    params, batch = make_params(4), make_batch(8)
    layers = [jax.tree.map(lambda leaf, n=n: leaf[n], params["stages"]) for n in range(4)]
    with pytest.raises(TypeError, match="stack the layers"):
        run(pipeline(one_f_one_b(2, 4)), params | {"stages": layers}, batch)
    with pytest.raises(ValueError, match="1 layers cannot fill the 2 stages of '1f1b' on 2 dev"):
        run(pipeline(one_f_one_b(2, 4)), make_params(1), batch)


def test_what_is_printed_is_short():
    grads_of = pipeline(interleaved(2, 4))
    assert repr(grads_of) == ("PipelineGradients(interleaved, 4 stages on 2 devices along 'stage')")
    result = grads_of.schedule.simulate()
    assert str(result) == "async: 27 units of time, 11.1% idle (3, 3 by device)"
    assert len(repr(result)) < 100


def test_a_layer_that_changes_its_type_is_named():
    grads_of = pipeline(one_f_one_b(2, 4), stage=lambda p, x, key: x.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"stage must return what it takes.*float32.*bfloat16") as e:
        run(grads_of, make_params(4), make_batch(8))
    assert "policy" not in str(e.value)


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=lambda half: half.__name__)
@pytest.mark.parametrize("place", ["first", "stage"])
def test_a_module_that_does_not_follow_the_policy_is_named_as_the_cause(half, place):
    def computes_in(dtype):
        return lambda params, x, key: stage(params, x.astype(half), key).astype(dtype)

    functions = {
        "first": dict(
            first=lambda *args: first(*args).astype(jnp.float32), stage=computes_in(half)
        ),
        "stage": dict(stage=computes_in(jnp.float32)),
    }
    recipe = ampx.opt_level("O2", half_dtype=half)
    grads_of = pipeline(one_f_one_b(2, 4), policy=recipe, **functions[place])
    cause = rf"policy casts to {half.__name__}.*dtype=jnp\.float32.*leave that dtype out"
    with pytest.raises(TypeError, match=cause):
        jax.eval_shape(grads_of, make_params(4), make_batch(8))


def test_a_layer_without_the_loss_that_it_promised_is_named():
    grads_of = pipeline(one_f_one_b(2, 4), has_aux_loss=True)
    with pytest.raises(TypeError, match=r"has_aux_loss=True: stage must return a tuple"):
        run(grads_of, make_params(4), make_batch(8))


def test_auxiliary_bools_are_refused():
    def last_with_flag(*args):
        return last(*args), {"is_large": jnp.bool_(True)}

    grads_of = pipeline(one_f_one_b(2, 4), last=last_with_flag, has_aux=True)
    with pytest.raises(TypeError, match=r"'is_large' is bool and has no mean"):
        run(grads_of, make_params(4), make_batch(8))


def test_a_train_state_made_from_placed_parameters_compiles_once():
    grads_of = pipeline(one_f_one_b(2, 4))
    step = ampx.train_step(grads_of, optax.adamw(1e-3), loss_scale="dynamic")
    params = make_params(4)
    state = step.init(jax.device_put(params, grads_of.shardings(params)))
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    assert state.opt_state.inner_state[0].mu["stages"]["kernel"].sharding.spec == P("stage")
    jitted = jax.jit(step)
    for _ in range(3):
        state, _ = jitted(state, make_batch(8))
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("make", [dict, freeze, OrderedDict], ids=lambda make: make.__name__)
def test_the_callers_mapping_comes_back(make):
    """What comes after `jax.tree` compares kinds of mappings: device_put and optax among others."""
    # Not sorted, as a mapping with an order of its own may be.
    params, batch = make({part: make_params(4)[part] for part in PARTS[::-1]}), make_batch(8)
    grads_of = pipeline(one_f_one_b(2, 4))
    placed = jax.device_put(params, grads_of.shardings(params))
    grads = run(grads_of, placed, batch).grads
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    expected = sequential(make_params(4), batch, num_microbatches=4).grads
    assert relative_error(grads, make({part: expected[part] for part in PARTS[::-1]})) < 1e-5
    step = ampx.train_step(grads_of, optax.adamw(1e-3), max_grad_norm=1.0, loss_scale="dynamic")
    jax.eval_shape(step, step.init(params), batch)


def test_a_mapping_that_is_a_leaf_to_jax_is_refused():
    params = types.MappingProxyType(make_params(4))
    with pytest.raises(TypeError, match=r"is a mappingproxy.*give dict\(params\)"):
        pipeline(one_f_one_b(2, 4))(params, make_batch(8))


@pytest.mark.parametrize("axis", ["data", "no axis of the mesh"])
def test_parameters_in_boxes_are_refused_with_the_way_out(axis):
    """A box of `flax.linen` asks for a sharding at each use; in a pipeline its axes are mapped."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (axis, None))
    layer, x = nn.Dense(4, kernel_init=init), jnp.ones((8, 4))
    stages = stack_layers([layer.init(jax.random.key(n), x) for n in range(2)])
    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: batch,
        stage=lambda p, x, key: layer.apply(p, x),
        last=lambda p, shared, x, batch, key: (jnp.sum(x**2), len(x)),
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        data_axes="data",
        mesh=make_mesh((2, 2), ("data", "stage")),
    )
    with pytest.raises(ValueError, match="Auto axes of the mesh|Resource axis") as caught:
        jax.eval_shape(grads_of, {"stages": stages}, x)
    assert any("flax.linen.unbox(params)" in note for note in caught.value.__notes__)
    jax.eval_shape(grads_of, {"stages": nn.unbox(stages)}, x)


@pytest.mark.parametrize("normalize", ["mean", "weights"])
def test_a_loss_that_is_averaged_over_devices_already_is_refused(normalize):
    """The pipeline would divide by the devices once more: gradients came out too small."""

    def last(p, shared, x, batch, key):
        loss = jax.lax.pmean(jnp.mean((x @ p) ** 2), "data")
        return (loss, 1.0) if normalize == "weights" else loss

    grads_of = ampx.pipelining.value_and_grad(
        first=lambda p, shared, batch, key: batch @ p,
        stage=lambda p, x, key: x + x @ p,
        last=last,
        schedule=ampx.pipelining.one_f_one_b(2, 2),
        mesh=make_mesh((2, 2), ("stage", "data")),
        axis_name="stage",
        data_axes="data",
        normalize=normalize,
    )
    params = {"first": jnp.ones((3, 4)), "stages": jnp.ones((2, 4, 4)), "last": jnp.ones((4, 1))}
    with pytest.raises(
        ValueError, match=r"last returns is the same .* along \['data'\].*leave the"
    ):
        jax.eval_shape(grads_of, params, jnp.ones((8, 3)))
