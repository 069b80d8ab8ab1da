"""A training step over a pipeline is the step on one device: figures, optimizers, skips."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from pipeline_models import sequential
from pipeline_steps import (
    LAYERS,
    ROWS,
    assert_close,
    committed,
    first,
    last,
    loss_fn,
    make_batch,
    make_grads_of,
    make_params,
    make_stage_mesh,
    placed,
    stage,
)
from quick_keys import quick_key

import ampx
from ampx.pipelining import forward_only, make_schedule, one_f_one_b, value_and_grad

STEPS = 10
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.02, warmup_steps=2, decay_steps=STEPS)
REPORTED = dict(local_norm=True, learning_rate=SCHEDULE)


def half(dtype):
    return ampx.opt_level("O2", half_dtype=dtype)


def run(step, state, batches):
    jitted, reports = jax.jit(step), []
    for batch in batches:
        state, report = jitted(state, batch)
        reports.append(report)
    return state, reports


def rows_by_microbatch(batch, data=2, microbatches=4):
    """The rows in an order in which one device splits them as the pipeline does."""

    def moved(leaf):
        rows = leaf.reshape(data, -1, microbatches, *leaf.shape[1:])
        return np.moveaxis(rows, 1, 0).reshape(leaf.shape)

    return jax.tree.map(moved, batch)


# --- the step on one device ----------------------------------------------------------------------

small_dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10, growth_interval=4)
CASES = {
    "static scale, clipped": (None, 128.0, 1.0, 1e-5),
    "dynamic scale, not clipped": (None, small_dynamic, None, 1e-5),
    "bfloat16": (half(jnp.bfloat16), "policy", 1.0, 2e-2),
    "float16, dynamic scale": (half(jnp.float16), small_dynamic, 1.0, 3e-3),
}


@pytest.mark.slow_but("float16, dynamic scale")
@pytest.mark.whole("bfloat16")  # in which modules of Flax train in test_pipelining_flax.py
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_those_of_one_device(case):
    policy, scale, max_grad_norm, rtol = CASES[case]
    options = dict(loss_scale=scale, max_grad_norm=max_grad_norm, **REPORTED)
    tx = optax.sgd(SCHEDULE, momentum=0.9) if policy else optax.adamw(SCHEDULE)
    step = ampx.train_step(make_grads_of(one_f_one_b(2, 4), policy=policy), tx, **options)
    alone = ampx.train_step(
        loss_fn, tx, policy=policy, normalize="weights", num_microbatches=8, **options
    )
    batches = [make_batch(number) for number in range(STEPS)]
    batches[6] = make_batch(6, spoilt=(3, 1))  # infinite in one layer: skipped
    assert len({int(batch["mask"].sum()) for batch in batches}) > 1

    state, reports = run(step, placed(step, make_params()), batches)
    expected, expected_reports = run(
        alone, alone.init(make_params()), map(rows_by_microbatch, batches)
    )
    assert_close(state.params, expected.params, rtol)
    assert_close(state.opt_state, expected.opt_state, 10 * rtol)
    for number, (report, wanted) in enumerate(zip(reports, expected_reports, strict=True)):
        assert report.overflow == wanted.overflow == (number == 6)
        assert report.loss_scale == wanted.loss_scale
        np.testing.assert_allclose(report.learning_rate, wanted.learning_rate, rtol=1e-6)
        np.testing.assert_allclose(report.loss, wanted.loss, rtol=rtol)
        assert report.size == wanted.size
        if number != 6:
            np.testing.assert_allclose(report.global_norm, wanted.global_norm, rtol=rtol)
            assert_close(report.local_norm, wanted.local_norm, rtol)
    assert reports[0].size == {"first": 24, "last": 8, "shared": 88, "stages": 320}
    if scale is small_dynamic:
        scales = [float(report.loss_scale) for report in reports]
        assert scales == [2.0**10] * 4 + [2.0**11] * 3 + [2.0**10] * 3
    for name in ("first", "stages", "last", "shared"):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.params[name])}
        assert dtypes == {jnp.dtype(jnp.float32)}


@pytest.mark.slow  # steps with a key are quick in test_pipelining_meshes.py
def test_every_layer_and_microbatch_has_its_own_key():
    def grads_alone(params, batch, *, loss_scale, key, **_):
        found = sequential(params, batch, key, 4, 2, first=first, stage=stage, last=last)
        grads = optax.tree.scale(loss_scale, found.grads)
        return ampx.GradResult(found.loss, grads, found.weight, None, None, None)

    step = ampx.train_step(make_grads_of(one_f_one_b(2, 4)), optax.sgd(0.1), loss_scale=8.0)
    alone = ampx.TrainStep(step.tx, grads_alone, None, None, None)
    batches = [make_batch(number) for number in range(2)]
    state, reports = run(step, placed(step, make_params(), quick_key(5)), batches)
    expected, wanted = run(alone, alone.init(make_params(), key=quick_key(5)), batches)
    assert_close(state.params, expected.params)
    np.testing.assert_allclose([r.loss for r in reports], [r.loss for r in wanted], rtol=1e-5)


@pytest.mark.parametrize("data, stages", [(2, 2), (1, 4)])
def test_tied_and_replicated_parameters_count_once_in_the_norm(data, stages):
    def sums(params, shared, x, batch, key):
        return jnp.sum(x + params + 2 * shared), jnp.float32(x.size)

    grads_of = value_and_grad(
        first=lambda params, shared, batch, key: batch + params + shared,
        stage=lambda params, x, key: x + params,
        last=sums,
        schedule=one_f_one_b(stages, 4),
        axis_name="stage",
        data_axes="data",
        mesh=make_stage_mesh(data, stages),
    )
    step = ampx.train_step(grads_of, optax.sgd(1.0), loss_scale=64.0, local_norm=True)
    params = {name: jnp.zeros(()) for name in ("first", "last", "shared")}
    params["stages"] = jnp.zeros(4)
    _, report = jax.jit(step)(step.init(params), jnp.ones(8))
    np.testing.assert_allclose(report.global_norm, np.sqrt(4 * 1 + 1 + 1 + 3**2), rtol=1e-6)
    assert {name: float(norm) for name, norm in report.local_norm.items()} == {
        "first": 1, "last": 1, "shared": 3, "stages": 2
    }  # fmt: skip


# --- optimizers, as in a loop without train_step -------------------------------------------------

MASK = {"first": False, "stages": {"kernel": True, "bias": False, "probe": False}}
OPTIMIZERS = {
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adamw, masked": lambda: optax.adamw(1e-2, mask=MASK | {"last": False, "shared": True}),
    "multi_steps": lambda: ampx.multi_steps(optax.adamw(1e-2), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
}


@functools.cache
def gradient_functions():
    grads_of = make_grads_of(one_f_one_b(2, 4))
    alone = ampx.value_and_grad(loss_fn, normalize="weights")
    return grads_of, jax.jit(grads_of), jax.jit(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_need_not_know_of_stages(name):
    grads_of, pipelined, alone = gradient_functions()
    chain = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name]())
    tx = ampx.dynamic_loss_scale(chain, init_scale=2.0**10)
    found = []
    for function, place in ((pipelined, grads_of.shardings), (alone, None)):
        params = make_params()
        params = jax.device_put(params, place(params)) if place else params
        opt_state, update = tx.init(params), jax.jit(tx.update)
        opt_state = committed(opt_state, grads_of.mesh) if place else opt_state
        for number in range(4):
            scale = ampx.current_loss_scale(opt_state)
            result = function(params, make_batch(number), key=None, loss_scale=scale)
            updates, opt_state = update(result.grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        found.append((params, opt_state))
    assert_close(*(params for params, _ in found))
    assert not np.array_equal(found[0][0]["first"]["position"], make_params()["first"]["position"])


DIVIDED = {
    "adamw": optax.adamw(1e-2),
    "lamb": optax.lamb(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "masters": ampx.master_weights(optax.adamw(1e-2)),
}


@pytest.mark.slow
@pytest.mark.whole("False")
@pytest.mark.parametrize("check_vma", [True, False])
def test_zero1_of_a_pipeline_is_a_sharding_of_the_state(check_vma):
    """Two steps on data x stage, the second of which is skipped; then one on one device."""
    grads_of = make_grads_of(one_f_one_b(2, 4), check_vma=check_vma)
    txs = {k: ampx.dynamic_loss_scale(tx, init_scale=2.0**10) for k, tx in DIVIDED.items()}
    params = make_params()
    of_params = grads_of.shardings(params)
    model_axes = jax.tree.map(lambda sharding: sharding.spec, of_params)

    def divided(tx):
        zero = ampx.zero1(tx, "data")
        specs = ampx.zero1_specs(zero, params, grads_of.mesh, model_axes=model_axes).inner_state
        return jax.tree.map(lambda spec: jax.NamedSharding(grads_of.mesh, spec), specs)

    # All take the gradients of one of them, so that there is one pipeline to compile.
    def step(function, params, states, batch):
        scale = ampx.current_loss_scale(states["adamw"])
        grads = function(params["adamw"], batch, key=None, loss_scale=scale).grads
        for name, tx in txs.items():
            updates, states[name] = tx.update(grads, states[name], params[name])
            params[name] = ampx.apply_updates(params[name], updates)
        return params, states

    layouts = dict.fromkeys(txs, of_params), {name: divided(tx) for name, tx in txs.items()}
    pipelined = jax.jit(functools.partial(step, grads_of), out_shardings=layouts)
    alone = jax.jit(functools.partial(step, ampx.value_and_grad(loss_fn, normalize="weights")))
    first = dict.fromkeys(txs, params), {name: tx.init(params) for name, tx in txs.items()}
    batches = [make_batch(0), make_batch(1, spoilt=(3, 1)), make_batch(2)]
    found, expected = jax.device_put(first, layouts), first
    for number, batch in enumerate(batches):
        if number == 2:  # a checkpoint holds whole arrays
            found = alone(*jax.tree.map(np.asarray, found), batch)
        else:
            found = pipelined(*found, batch)
            for state in found[1].values():
                assert state.overflow == (number == 1)
                kernel, gain = (
                    next(
                        leaf
                        for path, leaf in jax.tree_util.tree_leaves_with_path(state.inner_state)
                        if name in jax.tree_util.keystr(path)
                    )
                    for name in ("kernel", "gain")
                )
                assert kernel.nbytes == 4 * kernel.addressable_shards[0].data.nbytes
                assert gain.nbytes == 2 * gain.addressable_shards[0].data.nbytes
        expected = alone(*expected, batch)
        assert_close(found, expected)


# --- overflow ------------------------------------------------------------------------------------


def copies(tree):
    """What each device holds of every leaf."""
    return [
        [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]


SPOILT = {
    "float32": (None, 3e38),
    "float16": (half(jnp.float16), 6e4),
}


@pytest.mark.whole("float32")  # an overflow in float32 is in the ten steps above
@pytest.mark.parametrize("name", SPOILT)
def test_an_overflow_in_any_layer_shard_and_microbatch_is_skipped_everywhere(name):
    policy, gain = SPOILT[name]
    grads_of = make_grads_of(one_f_one_b(2, 4), policy=policy)
    step = ampx.train_step(
        grads_of,
        optax.adamw(1e-2),
        loss_scale=functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10),
        max_grad_norm=1.0,
    )
    jitted = jax.jit(step)
    state, report = jitted(placed(step, make_params()), make_batch(0))
    assert not report.overflow
    for layer in range(LAYERS):
        for row in (layer, ROWS // 2 + 5 - layer):  # in both shards, in micro-batches 0 to 3
            bad = make_batch(1, spoilt=(row, layer), gain=gain)
            skipped, report = jitted(state, bad)
            assert report.overflow and np.isfinite(report.loss)
            before = (state.params, state.opt_state.inner_state)
            after = (skipped.params, skipped.opt_state.inner_state)
            assert_bit_equal(copies(after), copies(before))
            assert skipped.step == state.step
            assert skipped.opt_state.loss_scale == state.opt_state.loss_scale / 2
            assert all(copy for copy in copies(skipped.opt_state.overflow)[0])
    following, report = jitted(skipped, make_batch(2))
    assert not report.overflow and following.step == state.step + 1
    assert jitted._cache_size() == 1


@pytest.mark.slow_but("zero-bubble")
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "zero-bubble-v"])
def test_the_linter_judges_a_step_rightly(name):
    """In schedules with halves one buffer holds activations of a stage, cotangents of another."""
    grads_of = make_grads_of(make_schedule(name, 2, 4))
    tx = ampx.dynamic_loss_scale(optax.adamw(1e-2))

    def step(params, opt_state, batch, is_scaled):
        scale = ampx.current_loss_scale(opt_state) if is_scaled else 1.0
        grads = grads_of(params, batch, loss_scale=scale).grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    params, batch = make_params(), make_batch(0)
    for is_scaled in (True, False):
        one = functools.partial(step, is_scaled=is_scaled)
        report = ampx.lint_step(one)(params, tx.init(params), batch)
        assert [found.check for found in report.findings] == ["loss_scale"] * (not is_scaled)


@pytest.mark.slow
def test_the_verdict_is_the_count_over_the_gradients():
    _, judged, _ = gradient_functions()
    for bad in (make_batch(1), make_batch(1, spoilt=(9, 2))):
        result = judged(make_params(), bad, key=None, loss_scale=jnp.float32(2.0**10))
        count = ampx.count_nonfinite(result.grads)
        np.testing.assert_array_equal(result.verdict > 0, count > 0)
        spoilt = {
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(result.grads)
            if not np.isfinite(leaf).all()
        }
        assert spoilt == ({"['stages']['probe']"} if bad["gains"].any() else set())
        layers = np.isfinite(result.grads["stages"]["probe"]).all(axis=1)
        assert layers.tolist() == [True, True, not bad["gains"].any(), True]


@pytest.mark.whole("0")
@pytest.mark.parametrize("row", [0, 15])
def test_a_nan_in_one_row_is_skipped_everywhere(row):
    step = ampx.train_step(make_grads_of(one_f_one_b(2, 4)), optax.adamw(1e-2), loss_scale=8.0)
    batch = make_batch(0)
    batch["mask"][row] = np.nan
    state = placed(step, make_params())
    skipped, report = jax.jit(step)(state, batch)
    assert report.overflow and np.isnan(report.loss)
    assert_bit_equal(copies(skipped.params), copies(state.params))


@pytest.mark.parametrize("weight", [jnp.nan, 2e-38])
def test_a_weight_that_spoils_the_gradients_is_an_overflow(weight):
    """Gradients are finite until they are divided."""
    grads_of = value_and_grad(
        first=lambda params, shared, batch, key: batch["x"],
        stage=lambda params, x, key: x * params,
        last=lambda params, shared, x, batch, key: (jnp.sum(x), jnp.sum(batch["weight"])),
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        data_axes="data",
        mesh=make_stage_mesh(2, 2),
    )
    step = ampx.train_step(grads_of, optax.sgd(1.0), loss_scale=8.0)
    params = {"stages": jnp.ones(2)}
    batch = {"x": jnp.ones(4), "weight": jnp.zeros(4).at[3].set(weight)}
    state, report = jax.jit(step)(step.init(params), batch)
    assert report.overflow
    assert_bit_equal(state.params, params)


# --- what is refused -----------------------------------------------------------------------------


def traced(grads_of, params=None, batch=None, **options):
    params = make_params() if params is None else params
    batch = make_batch(0) if batch is None else batch
    return jax.eval_shape(lambda: grads_of(params, batch, **options))


def simple(**options):
    functions = dict(first=first, stage=stage, last=last, axis_name="stage", data_axes="data")
    schedule = one_f_one_b(2, 4)
    return value_and_grad(
        **(functions | {"schedule": schedule, "mesh": make_stage_mesh(2, 2)} | options)
    )


def with_part(**parts):
    return make_params() | parts


REFUSED = {
    "a scale for each stage": (
        lambda: traced(simple(), loss_scale=jnp.ones(2)),
        ValueError,
        r"loss_scale must be a scalar, got shape \(2,\)",
    ),
    "scales to train_step": (
        lambda: ampx.train_step(simple(), optax.sgd(1.0), loss_scale=jnp.ones(2)),
        ValueError,
        r"loss scale must have shape \(\) or \(1,\), got \(2,\)",
    ),
    "a scale of another kind": (
        lambda: ampx.train_step(simple(), optax.sgd(1.0), loss_scale=[8.0]),
        TypeError,
        r"got \[8.0\] of type list: write 'dynamic' or the number",
    ),
    "a state": (
        lambda: traced(simple(), model_state={"mean": jnp.ones(2)}),
        ValueError,
        "no model_state.*Use LayerNorm",
    ),
    "an nnx module": (lambda: traced(simple(), wrt=object()), TypeError, "takes a dict"),
    "a small mesh": (
        lambda: traced(simple(schedule=one_f_one_b(4, 4))),
        ValueError,
        "schedule is for 4 devices, and the mesh has 2 along 'stage'",
    ),
    "a mesh without stages": (
        lambda: traced(simple(mesh=make_mesh((2, 2), ("data", "model")))),
        ValueError,
        r"the mesh has axes \('data', 'model'\), and none named 'stage'",
    ),
    "no mesh": (lambda: traced(simple(mesh=None)), ValueError, "no mesh: give value_and_grad"),
    "one axis for both": (
        lambda: simple(data_axes=("data", "stage")),
        ValueError,
        "'stage' is the axis of the stages.*leave it out of data_axes",
    ),
    "no stages": (
        lambda: traced(simple(), {"first": jnp.ones(2)}),
        TypeError,
        r"must be a dict with 'stages'.*got \['first'\]",
    ),
    "an unknown part": (
        lambda: traced(simple(), with_part(head=jnp.ones(2))),
        TypeError,
        r"must be a dict with 'stages'.*'head'\]",
    ),
    "a list": (lambda: traced(simple(), [jnp.ones(2)]), TypeError, "must be a dict.*got list"),
    "rows for no micro-batches": (
        lambda: traced(simple(), batch=make_batch(0, rows=12)),
        ValueError,
        r"12 rows is not divisible by 8, the 4 micro-batches .* 2 devices along .*\('data',\)",
    ),
    "rows for no shards": (
        lambda: traced(simple(), batch=make_batch(0, rows=7)),
        ValueError,
        "a batch of 7 rows is not divisible by 8",
    ),
    "a scalar in the batch": (
        lambda: traced(simple(), batch=make_batch(0) | {"mask": jnp.ones(())}),
        ValueError,
        r"batch leaf \['mask'\] is a scalar.*give each row its own",
    ),
    "a spec of too many axes": (
        lambda: traced(simple(param_specs={"stages": jax.P("stage", None, "data")})),
        ValueError,
        r"P\('stage', None, 'data'\) for 'stages/bias', .* \(4, 8\).* such as P\('stage', None\)",
    ),
    "a spec that does not divide": (
        lambda: traced(simple(param_specs={"shared": jax.P("data")})),
        ValueError,
        r"'shared/table', .* shape \(11, 8\): 2 devices along 'data' do not divide axis 0",
    ),
    "a spec for some leaves": (
        lambda: traced(simple(param_specs={"stages": {"bias": jax.P("stage")}})),
        ValueError,
        r"param_specs\['stages'\] is no tree prefix of params\['stages'\]: .* one for each subtree",
    ),
    "None as a spec": (
        lambda: traced(simple(param_specs={"last": None})),
        ValueError,
        r"param_specs\['last'\] is no tree prefix .* P\(\) for what is not divided",
    ),
    "shardings by a spec for some leaves": (
        lambda: simple(param_specs={"last": {}}).shardings(make_params()),
        ValueError,
        r"param_specs\['last'\] is no tree prefix of params\['last'\]",
    ),
    "layers for no stages": (
        lambda: traced(simple(), make_params(3)),
        ValueError,
        "3 layers have no 2 equal parts: use a multiple of 2, or give layers_per_stage",
    ),
    "layers that differ": (
        lambda: traced(simple(), with_part(stages={"a": jnp.ones(4), "b": jnp.ones(2)})),
        ValueError,
        r"same leading axis of layers, got a \(4,\), b \(2,\)",
    ),
    "a schedule's name": (
        lambda: simple(schedule="1f1b"),
        TypeError,
        "schedule must be a Schedule, such as .*, got str",
    ),
    "a schedule without backward": (
        lambda: simple(schedule=forward_only(2, 4)),
        ValueError,
        "'forward-only' has no backward",
    ),
    "no function": (lambda: simple(stage=None), TypeError, "stage must be a function.*got None"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_way_out(name):
    attempt, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attempt()


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        *(
            (name, value, rf"give it to ampx.pipelining.value_and_grad\({name}=...\)")
            for name, value in {
                "policy": "O2",
                "normalize": "weights",
                "has_aux": True,
                "aux_reduction": {"a": "mean"},
                "accumulator_dtype": jnp.bfloat16,
                "bucket_bytes": 1,
                "tail_overlap": False,
            }.items()
        ),
        ("num_microbatches", 4, "give it to the schedule"),
        ("axis_name", "data", r"value_and_grad\(data_axes="),
        ("model_axes", "model", r"value_and_grad\(param_specs="),
        ("scatter_gradients", True, "leave it out.*ampx.zero1_specs"),
        ("batch_axes", 1, "leave it out.*axis 0"),
        ("remainder", "drop", "leave it out.*divide the rows"),
        ("sparse_rows", {}, "leave it out"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_arguments_about_gradients_are_sent_to_where_a_pipeline_has_them(name, value, place):
    with pytest.raises(ValueError, match=f"{name}=.* not for a step over a .*{place}") as caught:
        ampx.train_step(simple(), optax.sgd(1.0), **{name: value})
    # A name that a message sends to is one that is there.
    sent_to = re.findall(r"value_and_grad\((\w+)=", str(caught.value))
    assert set(sent_to) <= set(inspect.signature(value_and_grad).parameters)
