"""Stages that differ, skips between them, collectives inside them, and what is refused."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_models import (
    first,
    fold,
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
from quick_keys import quick_key

from ampx.pipelining import (
    forward_only,
    gpipe,
    interleaved,
    looped_breadth_first,
    one_f_one_b,
    value_and_grad,
    zero_bubble,
    zero_bubble_v,
)

KEY = quick_key(7)
STASHES = {
    "inputs": "inputs",
    "residuals": "residuals",
    "dots": jax.checkpoint_policies.dots_saveable,
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 2, jnp.float32)


# --- a small U-Net: sequences get shorter and longer again, with segment ids and half activations


def enter(params, shared, batch, key):
    return {"x": batch["x"], "segments": batch["segments"]}


def without_padding(inputs):
    return jnp.where((inputs["segments"] > 0)[..., None], inputs["x"], 0.0)


def down(params, inputs, key):
    y = jnp.tanh(without_padding(inputs) @ params["w"])
    return {"x": y[:, ::2], "segments": inputs["segments"][:, ::2]}, {"a": y}


def bottom(params, inputs, key):
    y = jnp.tanh(without_padding(inputs) @ params["w"] + params["b"])
    kept = jax.random.bernoulli(key, 0.8, y.shape)
    y = jnp.where(kept, y, 0.0)
    half = y[:, ::2].astype(jnp.bfloat16)
    return {"x": half, "segments": inputs["segments"][:, ::2]}, {"b": y}


def up(params, inputs, key, skips):
    y = jnp.repeat(inputs["x"].astype(jnp.float32), 2, axis=1) @ params["w"] + skips["b"]
    return y, {"c": jnp.sum(skips["b"], axis=1)}


def top(params, x, key, skips):
    y = jnp.repeat(x, 2, axis=1) @ params["out"]["w"]
    return y + skips["a"] + skips["c"][:, None] @ params["out"]["v"]


def leave(params, shared, x, batch, key):
    return jnp.sum((x - batch["y"]) ** 2), jnp.float32(len(x))


U_NET = dict(
    first=enter,
    stage=[down, bottom, up, top],
    last=leave,
    skips={"a": (0, 3), "b": (1, 2), "c": (2, 3)},
)


def u_net_params():
    return {
        "stages": [
            {"w": normal(0, 4, 6)},
            {"w": normal(1, 6, 10), "b": normal(2, 10)},
            {"w": normal(3, 10, 10)},
            {"out": {"w": normal(4, 10, 6), "v": normal(5, 10, 6)}},
        ]
    }


def u_net_batch():
    segments = np.random.default_rng(0).integers(0, 3, (12, 8))
    return {
        "x": normal(6, 12, 8, 4),
        "y": normal(7, 12, 8, 6),
        "segments": jnp.asarray(segments, jnp.int32),
    }


@functools.cache
def u_net_reference(num_microbatches):
    batch = u_net_batch()

    def loss(params):
        total = jnp.float32(0)
        for number in range(num_microbatches):
            own = fold(KEY, number)
            part = jax.tree.map(lambda leaf, m=number: leaf[m::num_microbatches], batch)
            p = params["stages"]
            x, a = down(p[0], enter(None, None, part, None), fold(own, 1))
            x, b = bottom(p[1], x, fold(own, 2))
            x, c = up(p[2], x, fold(own, 3), b)
            total += leave(None, None, top(p[3], x, fold(own, 4), a | c), part, None)[0]
        return total

    exact = {"xla_allow_excess_precision": False}
    value_and_grad = jax.jit(jax.value_and_grad(loss), compiler_options=exact)
    return jax.tree.map(lambda leaf: leaf / 12, value_and_grad(u_net_params()))


# Each stash meets both kinds of axes; what is left out are further schedules.
@pytest.mark.slow_but("interleaved-dots-Explicit")
@pytest.mark.whole(
    "1f1b-residuals-Auto", "interleaved-residuals-Explicit", "looped-bfs-inputs-Auto"
)
@pytest.mark.parametrize(
    ("schedule", "stash", "kind"),
    [
        (gpipe(4, 3), "residuals", "Auto"),
        (one_f_one_b(4, 3), "inputs", "Explicit"),
        (one_f_one_b(4, 2), "residuals", "Auto"),
        (interleaved(2, 3), "dots", "Explicit"),
        (interleaved(1, 2, chunks=4), "residuals", "Explicit"),
        (looped_breadth_first(2, 3), "inputs", "Auto"),
        (zero_bubble(4, 3), "residuals", "Explicit"),
        (zero_bubble_v(2, 3), "inputs", "Auto"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_stages_may_differ_in_parameters_shapes_and_dtypes(schedule, stash, kind):
    loss, grads = u_net_reference(schedule.num_microbatches)
    grads_of = pipeline(schedule, 1, kind, **U_NET, stash=STASHES[stash])
    result = run(grads_of, u_net_params(), u_net_batch(), key=KEY)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    assert relative_error(jax.device_get(result.grads), grads) < 1e-5


def stash_x(params, x, key):
    return x * params, {"x": x}


def scale(params, x, key):
    return x * params


def pop_x(params, x, key, skips):
    return x * params + jnp.sin(skips["x"])


def scale_and_pop(params, x, key, skips):
    return pop_x(params["pop"], scale(params["scale"], x, key), key, skips)


def stash_and_scale(params, x, key):
    x, skips = stash_x(params["stash"], x, key)
    return scale(params["scale"], x, key), skips


def all_three(params, x, key):
    x, skips = stash_and_scale(params, x, key)
    return pop_x(params["pop"], x, key, skips)


@pytest.mark.slow_but("3-inputs", "1, 2-residuals", "2, 1-dots", "1, 1, 1-inputs")
@pytest.mark.whole(
    *("3-residuals", "3-dots", "1, 2-inputs", "1, 2-dots", "2, 1-inputs", "2, 1-residuals")
)
@pytest.mark.parametrize("stash", STASHES)
@pytest.mark.parametrize("partition", ["3", "1, 2", "2, 1", "1, 1, 1"])
def test_torchgpipe_skips(partition, stash):
    names = {"stash": 2.0, "scale": 3.0, "pop": 5.0}
    values = {name: jnp.float32(value) for name, value in names.items()}
    stages, parts = {
        "3": ([all_three], [["stash", "scale", "pop"]]),
        "1, 2": ([stash_x, scale_and_pop], ["stash", ["scale", "pop"]]),
        "2, 1": ([stash_and_scale, pop_x], [["stash", "scale"], "pop"]),
        "1, 1, 1": ([stash_x, scale, pop_x], ["stash", "scale", "pop"]),
    }[partition]
    count = len(stages)
    params = {
        "stages": [
            values[part] if isinstance(part, str) else {name: values[name] for name in part}
            for part in parts
        ]
    }
    grads_of = pipeline(
        one_f_one_b(count, 3),
        first=lambda params, shared, batch, key: batch,
        stage=stages,
        last=lambda params, shared, x, batch, key: (jnp.sum(x), jnp.float32(1)),
        skips={"x": (0, count - 1)} if count > 1 else None,
        normalize="weights",
        stash=STASHES[stash],
    )
    batch = jnp.arange(6.0)
    result = run(grads_of, params, batch)

    def loss(values):
        return jnp.sum(all_three(values, batch, None)) / 3

    expected, grads = jax.value_and_grad(loss)(values)
    np.testing.assert_allclose(result.loss, expected, rtol=1e-6)
    found = functools.reduce(
        operator.or_,
        (
            {part: grad} if isinstance(part, str) else grad
            for part, grad in zip(parts, jax.device_get(result.grads)["stages"], strict=True)
        ),
    )
    assert relative_error(found, grads) < 1e-6


def test_stages_that_differ_may_have_auxiliary_losses():
    def routed(params, x, key):
        return x * params, jnp.sum(params * x)

    grads_of = pipeline(
        interleaved(2, 2),
        first=lambda params, shared, batch, key: batch,
        stage=[routed] * 4,
        last=lambda params, shared, x, batch, key: (jnp.sum(x), jnp.float32(1)),
        has_aux_loss=True,
    )
    params, batch = [jnp.float32(p) for p in (2, 3, 5, 7)], jnp.arange(4.0)
    result = run(grads_of, {"stages": params}, batch)

    def loss(params):
        x, total = batch, jnp.float32(0)
        for param in params:
            x, extra = routed(param, x, None)
            total += extra
        return (total + jnp.sum(x)) / 2

    expected, grads = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(result.loss, expected, rtol=1e-6)
    assert relative_error(jax.device_get(result.grads["stages"]), grads) < 1e-6


# --- other axes of the mesh


def wide(params, x, key):
    return x + jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


def wide_by_hand(params, x, key):
    partial = jnp.tanh(x @ params["up"]) @ params["down"]
    return x + jax.lax.psum(partial, "model") + params["bias"]


def wide_by_compiler(params, x, key):
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["up"]), P(None, None, "model"))
    return x + hidden @ params["down"] + params["bias"]


def wide_params():
    stages = {"up": normal(0, 4, 8, 16), "down": normal(1, 4, 16, 8), "bias": normal(2, 4, 8)}
    return make_params() | {"stages": stages}


WIDE_SPECS = {
    "stages": {"up": P("stage", None, "model"), "down": P("stage", "model"), "bias": P("stage")}
}


# The quick case of these is in `test_pipelining_meshes.py`, and steps of such layers on Explicit
# axes and beside data shards.
@pytest.mark.slow
@pytest.mark.whole(
    "1f1b-2-Auto-True-None", "1f1b-2-Explicit-False-None", "zero-bubble-1-Explicit-True-None"
)
@pytest.mark.parametrize(
    ("schedule", "data", "kind", "check_vma", "layers_per_stage"),
    [
        (one_f_one_b(2, 3), 2, "Auto", True, None),
        (one_f_one_b(2, 3), 2, "Explicit", False, None),
        (zero_bubble(2, 3), 1, "Explicit", True, None),
        (interleaved(2, 3), 1, "Auto", False, None),
        (one_f_one_b(2, 3), 1, "Explicit", True, (3, 1)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_stages_may_sum_over_a_further_axis(schedule, data, kind, check_vma, layers_per_stage):
    grads_of = pipeline(
        schedule,
        data,
        stage=wide_by_hand,
        mesh=stage_mesh(schedule, data, kind, model=2),
        param_specs=WIDE_SPECS,
        check_vma=check_vma,
        layers_per_stage=layers_per_stage,
    )
    batch = make_batch(12)
    result = run(grads_of, wide_params(), batch)
    expected = sequential(wide_params(), batch, None, 3, data, stage=wide)
    assert relative_error(jax.device_get(result.grads), expected.grads) < 1e-5
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)


@pytest.mark.whole("1f1b")
@pytest.mark.parametrize(
    "schedule", [one_f_one_b(2, 3), zero_bubble_v(2, 3)], ids=operator.attrgetter("name")
)
def test_the_compiler_may_divide_stages_along_a_further_axis(schedule):
    mesh = stage_mesh(schedule, model=2)
    grads_of = pipeline(schedule, stage=wide_by_compiler, mesh=mesh)
    batch = make_batch(6)
    result = run(grads_of, wide_params(), batch)
    expected = sequential(wide_params(), batch, None, 3, stage=wide)
    assert relative_error(jax.device_get(result.grads), expected.grads) < 1e-5


# --- what is refused


def _summed(x):
    return x + jax.lax.psum(x, "stage")


def _gathered(x):
    return x + jnp.sum(jax.lax.all_gather(x, "stage"), axis=0)


def _permuted(x):
    return jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("place", ["first", "stage", "last"])
@pytest.mark.parametrize(
    ("exchange", "primitive"),
    [(_summed, "psum"), (_gathered, "all_gather"), (_permuted, "ppermute")],
)
def test_collectives_between_stages_are_refused(exchange, primitive, place, check_vma):
    functions = {
        "first": lambda *args: exchange(first(*args)),
        "stage": lambda *args: exchange(stage(*args)),
        "last": lambda p, shared, x, *rest: last(p, shared, exchange(x), *rest),
    }
    grads_of = pipeline(one_f_one_b(2, 2), check_vma=check_vma, **{place: functions[place]})
    with pytest.raises(ValueError, match=rf"^{primitive}.*'stage'.*test_pipelining_stages\.py:\d+"):
        jax.eval_shape(grads_of, make_params(), make_batch(4))


def normalized(params, x, key, mean_over_data=lambda x: jax.lax.pmean(x, "data")):
    """A layer with a mean over the rows of all data shards, and a mask that depends on nothing."""
    mean = mean_over_data(jnp.mean(x))
    variance = mean_over_data(jnp.mean((x - mean) ** 2))
    mask = jnp.tril(jnp.ones((8, 8)))
    kernel = params["kernel"] * (mask + jnp.cos(mask)) * mask
    return stage({"kernel": kernel, "bias": params["bias"]}, x * jax.lax.rsqrt(variance + 1), None)


@pytest.mark.slow_but("1f1b-inputs")
@pytest.mark.whole("zero-bubble-inputs")
@pytest.mark.parametrize(
    ("schedule", "stash"),
    [
        (one_f_one_b(2, 1), "inputs"),
        (zero_bubble(2, 1), "inputs"),
        (zero_bubble(2, 1), "residuals"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_collectives_over_the_data_are_allowed_in_stages(schedule, stash):
    grads_of = pipeline(schedule, 2, stage=normalized, stash=stash)
    batch = make_batch(4)
    result = run(grads_of, make_params(), batch)
    whole = functools.partial(normalized, mean_over_data=lambda x: x)
    expected = sequential(make_params(), batch, stage=whole)
    assert relative_error(jax.device_get(result.grads), expected.grads) < 1e-5


def placed_by_hand(params, x, key):
    start = 4 * jax.lax.axis_index("model")
    own = jax.lax.dynamic_slice_in_dim(params["kernel"], start, 4, 1)
    return x + jax.lax.psum(jnp.tanh(x @ own + params["bias"]) @ own.T, "model")


@pytest.mark.slow_but(
    "normalized-1f1b-residuals-that differ",
    "normalized-zero-bubble-inputs-alike",
    "placed_by_hand-zero-bubble-inputs-alike",
    "placed_by_hand-zero-bubble-inputs-that differ",
)
@pytest.mark.parametrize("differ", [False, True], ids=["alike", "that differ"])
@pytest.mark.parametrize("stash", ["inputs", "residuals"])
@pytest.mark.parametrize("schedule", [one_f_one_b(2, 1), zero_bubble(2, 1)], ids=lambda s: s.name)
@pytest.mark.parametrize("layer", [normalized, placed_by_hand], ids=lambda f: f.__name__)
def test_what_differs_along_few_axes_goes_from_one_pass_to_the_next(layer, schedule, stash, differ):
    """Traced: the types of what is kept must be those that the backward was made for."""
    params, specs = make_params(4), {"kernel": P("stage"), "bias": P("stage", "model")}
    if layer is normalized:
        specs["bias"] = P("stage")
    if differ:
        one = jax.tree.map(lambda leaf: leaf[0], params["stages"])
        params["stages"], specs = [one, one], jax.tree.map(lambda spec: P(*spec[1:]), specs)
    grads_of = pipeline(
        schedule,
        2,
        stage=[layer, layer] if differ else layer,
        stash=stash,
        mesh=stage_mesh(schedule, 2, model=2),
        param_specs={"stages": [specs, specs] if differ else specs},
    )
    jax.eval_shape(grads_of, params, make_batch(4))


def refused(error, message, schedule=None, params=None, rows=4, **options):
    schedule = schedule or one_f_one_b(2, 2)
    with pytest.raises(error, match=message):
        jax.eval_shape(pipeline(schedule, **options), params or make_params(), make_batch(rows))


def test_arguments_that_do_not_fit_are_refused():
    refused(ValueError, "8 layers have no 3 equal parts", one_f_one_b(3, 2))
    refused(ValueError, "add up to 8", layers_per_stage=(4, 3))
    refused(ValueError, "must not be negative", layers_per_stage=(9, -1))
    refused(ValueError, "batch of 5 rows", rows=5)
    refused(ValueError, "2 devices.*mesh has 4", mesh=stage_mesh(one_f_one_b(4, 1)))
    refused(ValueError, "none named 'model'", param_specs={"shared": P("model")})
    refused(ValueError, "no mesh", mesh=None)
    refused(ValueError, "stage must be|stash must be", stash="everything")
    refused(ValueError, "normalize", normalize="median")
    refused(ValueError, "give stage as a sequence", skips={"a": (0, 1)})
    refused(ValueError, "must go forward", stage=[stage, stage], skips={"a": (1, 1)})
    for edge in ((0, (1, 2)), (0, [1]), (0, 1, 2), 1, "01", (0, 1.0)):
        refused(TypeError, "first of them by a skip", stage=[stage, stage], skips={"a": edge})
    refused(ValueError, "2 stages, and stage is a sequence of 3", stage=[stage] * 3)
    refused(TypeError, "must be a list.*2 (trees|stages)", stage=[stage] * 2)
    refused(TypeError, "first must be a function", first=None)
    refused(TypeError, "a dict with 'stages'", params={"layers": 1})
    refused(TypeError, "stage must return what it takes", stage=lambda p, x, key: x[..., :4])


def test_a_schedule_without_backward_and_other_things_are_no_schedule():
    with pytest.raises(ValueError, match="no backward"):
        pipeline(forward_only(2, 2), mesh=stage_mesh(one_f_one_b(2, 2)))
    with pytest.raises(TypeError, match="must be a Schedule"):
        value_and_grad(first=first, stage=stage, last=last, schedule="1f1b", axis_name="stage")


def test_what_a_pipeline_does_not_have_is_refused():
    grads_of = pipeline(one_f_one_b(2, 2))
    with pytest.raises(ValueError, match="model_state"):
        grads_of(make_params(), make_batch(4), model_state={"mean": 0.0})
    with pytest.raises(TypeError, match="nnx"):
        grads_of(make_params(), make_batch(4), wrt=...)
    with pytest.raises(ValueError, match="loss_scale must be a scalar"):
        grads_of(make_params(), make_batch(4), loss_scale=jnp.ones(2))


def test_a_stage_that_raises_does_not_hang():
    def broken(params, x, key):
        raise ZeroDivisionError("in a stage")

    for functions in (dict(stage=broken), dict(stage=[stage, broken])):
        grads_of = pipeline(one_f_one_b(2, 2), **functions)
        params = make_params()
        if isinstance(functions["stage"], list):
            layer = jax.tree.map(lambda leaf: leaf[0], params["stages"])
            params = params | {"stages": [layer, layer]}
        with pytest.raises(ZeroDivisionError, match="in a stage"):
            run(grads_of, params, make_batch(4))
