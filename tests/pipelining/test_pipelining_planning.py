import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import pipelining
from ampx.pipelining import Plan, plan, value_and_grad
from ampx.pipelining.planning.footprints import Footprint
from benchmarks import published_plans

WIDTH, LENGTH, VOCABULARY, ROWS = 64, 16, 128, 4


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def first(params, shared, batch, key):
    return shared["embedding"][batch["tokens"]]


def perceptron(params, x, key):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def attention(params, x, key):
    scores = jnp.einsum("bti,bsi->bts", x @ params["up"], x @ params["up"])
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    if key is not None:
        weights = weights * jax.random.bernoulli(key, 0.9, weights.shape).astype(x.dtype)
    return x + jnp.tanh(weights @ x @ params["up"]) @ params["down"]


def last(params, shared, x, batch, key):
    logits = (x @ shared["embedding"].T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch["tokens"][..., None], axis=-1)
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1)) - jnp.sum(picked), jnp.float32(picked.size)


def make_params(layers=8, hidden=2 * WIDTH):
    up, down = float32(layers, WIDTH, hidden), float32(layers, hidden, WIDTH)
    return {
        "stages": {"up": up, "down": down},
        "shared": {"embedding": float32(VOCABULARY, WIDTH)},
    }


def make_batch(schedule, data=1, rows=ROWS):
    rows = rows * schedule.num_microbatches * data
    return {"tokens": jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)}


def pipeline(schedule, stage=perceptron, **options):
    return value_and_grad(
        **({"first": first, "stage": stage, "last": last, "axis_name": "stage"} | options),
        schedule=schedule,
    )


def placed(tree, shardings):
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def compiled_bytes(step, *args, **options):
    found = jax.jit(step, **options).lower(*args).compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def measured(grads_of, params, batch, mesh, tx=None, key=None):
    """What the compiler says of the real program, on devices that are there."""
    shardings = grads_of.shardings(params, mesh)
    data = NamedSharding(mesh, P(grads_of.data_axes or None))
    batch = placed(batch, jax.tree.map(lambda _: data, batch))
    if tx is None:

        def gradients(params, batch, key):
            return grads_of(params, batch, key=key)

        return compiled_bytes(gradients, placed(params, shardings), batch, key)
    step = ampx.train_step(grads_of, tx)
    whole = NamedSharding(mesh, P())
    real = jax.tree.map(lambda t, s: jax.device_put(jnp.ones(t.shape), s), params, shardings)
    state = jax.tree.map(
        lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, whole),
        step.init(real),
    )
    return compiled_bytes(
        step, placed(state, jax.tree.map(lambda a: a.sharding, state)), batch, donate_argnums=0
    )


# --- memory, against the compiler ----------------------------------------------------------------

DOTS = jax.checkpoint_policies.dots_saveable
CASES = {
    "1f1b": (pipelining.one_f_one_b(4, 8), {"data": 2, "stage": 4}, {}, {}),
    "1f1b, unequal stages": (
        pipelining.one_f_one_b(2, 32),
        {"stage": 2},
        {"layers_per_stage": (3, 5)},
        {},
    ),
    "1f1b, dropout": (
        pipelining.one_f_one_b(2, 4),
        {"data": 4, "stage": 2},
        {"stage": attention},
        {"key": jax.random.key(0)},
    ),
    "1f1b, residuals, adam": (
        pipelining.one_f_one_b(4, 8),
        {"data": 2, "stage": 4},
        {"stash": "residuals"},
        {"tx": optax.adamw(1e-3)},
    ),
    "gpipe, dots": (
        pipelining.gpipe(4, 16),
        {"stage": 4},
        {"stash": DOTS, "stage": attention, "check_vma": False},
        {},
    ),
    "interleaved": (
        pipelining.interleaved(2, 4, chunks=2),
        {"data": 2, "stage": 2},
        {},
        {},
    ),
    "zero bubble": (pipelining.zero_bubble(4, 8), {"stage": 4}, {"stash": "residuals"}, {}),
    "half precision": (
        pipelining.one_f_one_b(8, 8),
        {"stage": 8},
        {"policy": "p=f32,c=bf16,o=f32"},
        {"tx": optax.sgd(0.1)},
    ),
}


# What the partitioner does around unequal stages, and the compiler about a key, is not foreseen.
LOOSE = "1f1b, unequal stages", "1f1b, dropout"


@pytest.mark.slow
@pytest.mark.whole("1f1b, dropout", "interleaved", "half precision")
@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_the_compiler_says_of_the_real_program(name):
    schedule, shape, options, more = CASES[name]
    mesh = make_mesh(tuple(shape.values()), tuple(shape))
    data = [axis for axis in shape if axis != "stage"]
    grads_of = pipeline(schedule, mesh=mesh, data_axes=data, **options)
    params, batch = make_params(), make_batch(schedule, shape.get("data", 1))
    found = plan(grads_of, params, batch, more.get("tx"), mesh=shape, key=more.get("key"))
    expected = measured(grads_of, params, batch, mesh, **more)
    print(f"\n{name}: plan {found.peak_bytes / 1024:.1f} KiB, real {expected / 1024:.1f} KiB")
    assert found.peak_bytes == pytest.approx(expected, rel=0.15 if name in LOOSE else 0.05)
    assert min(found.memory.values()) >= 0


@pytest.mark.slow
def test_memory_of_stages_that_differ():
    schedule = pipelining.one_f_one_b(4, 8)
    mesh = make_mesh((2, 4), ("data", "stage"))
    grads_of = pipeline(schedule, [perceptron] * 4, mesh=mesh, data_axes="data")
    params = make_params()
    params["stages"] = [
        {"up": float32(WIDTH, hidden), "down": float32(hidden, WIDTH)} for hidden in (32, 64, 16, 8)
    ]
    batch = make_batch(schedule, 2, rows=16)
    found = plan(grads_of, params, batch)
    assert found.peak_bytes == pytest.approx(measured(grads_of, params, batch, mesh), rel=0.1)
    assert [d.layers for d in found.devices] == [1] * 4
    embedding = 4 * VOCABULARY * WIDTH
    sizes = [4 * 2 * WIDTH * hidden for hidden in (32, 64, 16, 8)]
    sizes[0], sizes[3] = sizes[0] + embedding, sizes[3] + embedding
    assert [d.parameters for d in found.devices] == sizes


# --- what is stored and sent ---------------------------------------------------------------------


def footprint(schedule, shape, **options):
    mesh = AbstractMesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )
    data = [axis for axis in shape if axis != "stage"]
    grads_of = pipeline(schedule, data_axes=data, **options)
    return Footprint(
        grads_of, mesh, make_params(), make_batch(schedule, shape.get("data", 1)), None
    )


@pytest.mark.parametrize("make", [pipelining.one_f_one_b, pipelining.gpipe, pipelining.zero_bubble])
def test_stash_and_wires_by_hand(make):
    schedule, activation = make(4, 8), 4 * ROWS * LENGTH * WIDTH
    found = footprint(schedule, {"data": 2, "stage": 4})
    devices = found.devices()
    layers = 4 * 2 * WIDTH * 2 * WIDTH
    embedding = 4 * VOCABULARY * WIDTH
    # 8 of each device, and the first arrive as many ticks later as there are devices between.
    exchanges = 8 + 4 - 2
    for number, device in enumerate(devices):
        is_end = number in (0, 3)
        assert device.stages == (number,) and device.layers == 2
        assert device.parameters == 2 * layers + is_end * embedding
        assert device.sent["activations"] == (number < 3) * exchanges * activation
        assert device.sent["cotangents"] == (number > 0) * exchanges * activation
        # A ring of two devices sends half of the sum there, and half of it back.
        assert device.sent["sums over data"] == pytest.approx(2 * layers, rel=1e-3)
        assert device.sent["sums over stage, data"] == pytest.approx(
            2 * 7 / 8 * embedding, rel=1e-3
        )
    lives = [d.microbatches for d in devices]
    if schedule.name == "gpipe":
        assert lives == [8] * 4
    if schedule.name == "1f1b":
        assert lives == [min(8, 2 * (3 - stage) + 1) for stage in range(4)]


def test_layers_travel_to_the_chunks_of_their_devices():
    schedule = pipelining.interleaved(4, 8, chunks=2)
    devices = footprint(schedule, {"stage": 4}).devices()
    layer = 4 * 2 * WIDTH * 2 * WIDTH
    travelling = [
        sum(schedule.device_of[stage] != stage // 2 for stage in (2 * d, 2 * d + 1))
        for d in range(4)
    ]
    arriving = [sum(stage // 2 != d for stage in schedule.stages_on(d)) for d in range(4)]
    expected = [layer * (out + back) for out, back in zip(travelling, arriving, strict=True)]
    assert [d.sent.get("layers to their stages and back", 0) for d in devices] == expected
    assert [d.stages for d in devices] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_collectives_inside_of_stages_are_counted():
    def stage(params, x, key):
        return x + jax.lax.psum(jnp.tanh(x @ params["up"]) @ params["down"], "model")

    schedule = pipelining.one_f_one_b(2, 4)
    mesh = AbstractMesh((2, 4), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"stages": {"up": P("stage", None, "model"), "down": P("stage", "model")}}
    grads_of = pipeline(schedule, stage, mesh=mesh, param_specs=specs)
    found = plan(grads_of, make_params(), make_batch(schedule))
    sent = found.sent["inside of stages"]
    once = 2 * 3 / 4 * 4 * ROWS * LENGTH * WIDTH  # one sum of one layer over a ring of four
    # Four layers a stage: in the forward, again when it is recomputed, and for the gradient of x.
    assert sent >= 2 * 4 * 4 * once and sent <= 3 * 4 * 4 * once
    whole = sum(np.prod(t.shape) * 4 for t in make_params()["stages"].values())
    embedding = 4 * VOCABULARY * WIDTH
    assert found.memory["parameters"] == whole // 8 + embedding
    assert [device.parameters for device in found.devices] == [whole // 8 + embedding] * 2


# --- meshes that are not here --------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    schedule = pipelining.one_f_one_b(32, 64)
    grads_of = pipeline(schedule, data_axes="data")
    params, batch = make_params(layers=64), make_batch(schedule, 16)
    return plan(
        grads_of,
        params,
        batch,
        optax.adam(1e-3),
        mesh={"data": 16, "stage": 32},
        forward=1e-3,
        bandwidth=1e9,
    )


def test_a_plan_for_512_devices(large):
    assert isinstance(large, Plan) and len(large.devices) == 32
    stages, embedding = 64 * 4 * WIDTH * WIDTH, VOCABULARY * WIDTH
    assert large.num_parameters == stages + embedding
    assert large.memory["parameters"] == 4 * (stages // 32 + embedding)
    assert large.memory["optimizer state"] == 2 * large.memory["parameters"] + 4
    assert large.memory["gradients"] == large.memory["parameters"]
    assert large.memory["batch"] == 4 * ROWS * 64 * LENGTH
    assert [d.microbatches for d in large.devices] == [
        min(64, 2 * (31 - stage) + 1) for stage in range(32)
    ]
    assert large.seconds["activations"] == large.sent["activations"] / 1e9
    plain = large.schedule.simulate(mode="lockstep")
    assert large.lockstep.bubble_fraction > plain.bubble_fraction  # as exchanges take time
    alone = large.schedule.simulate(mode="lockstep", forward=1e-3, backward=2e-3).makespan
    busiest = max(d.sent["activations"] + d.sent["cotangents"] for d in large.devices)
    assert large.lockstep.makespan == pytest.approx(alone + busiest / 1e9)
    assert large.devices[5].idle == pytest.approx(large.lockstep.bubble_fraction)


def test_a_plan_can_be_read(large):
    text = str(large)
    print(text)
    assert "1f1b: 1.06 million parameters on 16 data x 32 stage devices, 32 stages" in text
    assert "device  stages  layers" in text and "\n31" in text
    assert "peak, by the compiler for" in text
    assert "sums over stage, data" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.slow
def test_meshes_may_be_real_or_abstract_or_of_another_kind():
    schedule = pipelining.one_f_one_b(2, 2)
    params, batch = make_params(2), make_batch(schedule, 2)
    real = make_mesh((2, 2), ("data", "stage"))
    explicit = AbstractMesh((2, 2), ("data", "stage"), axis_types=(AxisType.Explicit,) * 2)
    grads_of = pipeline(schedule, mesh=real, data_axes="data")
    expected = plan(grads_of, params, batch).memory
    assert plan(grads_of, params, batch, mesh=explicit).memory == expected
    with jax.set_mesh(real):
        assert plan(grads_of, params, batch).memory == pytest.approx(expected, rel=0.03)


def test_costs_follow_layers_unless_they_are_given():
    schedule = pipelining.one_f_one_b(4, 8)
    found = footprint(schedule, {"stage": 4}, layers_per_stage=(1, 2, 2, 3))
    assert found.layers_of_stages == [1, 2, 2, 3]
    assert [d.layers for d in found.devices()] == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mesh": {"stage": 8}}, ValueError, "the schedule is for 2 devices, and the mesh has 8"),
        ({"mesh": {"pipe": 2}}, ValueError, "none named 'stage'"),
        ({"mesh": None}, ValueError, "give plan a mesh or sizes"),
        ({"bandwidth": 0.0}, ValueError, "bandwidth must be finite and positive, got 0"),
        ({"forward": [1.0] * 3}, ValueError, "one for each of the 2 stages"),
        ({"batch": {"tokens": jax.ShapeDtypeStruct((3, 4), jnp.int32)}}, ValueError, "3"),
    ],
)
def test_errors(change, error, message):
    schedule = pipelining.one_f_one_b(2, 2)
    arguments = {"mesh": {"stage": 2}, "batch": make_batch(schedule)} | change
    with pytest.raises(error, match=message):
        plan(pipeline(schedule), make_params(2), **arguments)


def test_a_training_step_is_refused_with_advice():
    step = ampx.train_step(lambda w, x: jnp.sum(w * x), optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"step.grads_of and step.tx"):
        plan(step, float32(2), float32(2), mesh={"stage": 2})


def test_nothing_is_changed_and_nothing_is_run():
    def poisoned(params, x, key):
        jax.debug.callback(lambda: pytest.fail("a plan was run"))
        return perceptron(params, x, key)

    schedule = pipelining.one_f_one_b(2, 2)
    grads_of = pipeline(schedule, poisoned)
    before = dataclasses.asdict(dataclasses.replace(grads_of, model=None))
    plan(grads_of, make_params(2), make_batch(schedule), mesh={"stage": 2})
    assert dataclasses.asdict(dataclasses.replace(grads_of, model=None)) == before


@pytest.mark.slow_but("GPT-3 174.6")
@pytest.mark.parametrize("run", published_plans.RUNS, ids=lambda run: f"{run.name} {run.billions}")
def test_models_of_papers_have_the_parameters_and_the_idle_time_that_these_give(run):
    """Without the memory, which needs a compiler: `python -m benchmarks.published_plans`."""
    grads_of, params, _, mesh = published_plans.make_model(run)
    number = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
    assert number / 1e9 == pytest.approx(run.billions, rel=0.1)
    assert grads_of.schedule.num_devices == mesh["stage"]
    idle = grads_of.schedule.simulate(mode="lockstep", forward=1, backward=2).bubble_fraction
    assert idle == pytest.approx(run.published_idle, rel=0.1)
