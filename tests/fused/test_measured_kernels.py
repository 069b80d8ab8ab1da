"""What `auto` takes where kernels were measured to be faster, and with which settings they run."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_fused_kernels import adamw, check, hyperparameters, leaf
from test_fused_pallas import count_kernels, near, normal

import ampx
from ampx import fused
from ampx.fused.kernels import blocks, gpu, measured, pallas_updates
from ampx.updates.tails import KernelPlan

SHAPES = {"v": (300,), "w": (4, 256)}
KIND = jax.devices()[0].device_kind


@pytest.fixture
def measure(monkeypatch):
    """A function that lets `auto` know a plan for the CPU, where kernels are interpreted."""

    def know(**plan):
        monkeypatch.setattr(measured, "_read", lambda: {KIND: plan})
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        interpreted = functools.partial(gpu.map_leaves, interpret=True)
        monkeypatch.setattr(pallas_updates, "_map_leaves", lambda *_: interpreted)

    return know


@pytest.fixture
def on_one_of_eight_devices():
    with jax.set_mesh(make_mesh((1,), ("one",))):
        yield


def stepped(tx, grads, params, backend="auto"):
    def step(grads, state, params):
        return fused.apply(tx, grads, state, params, max_norm=1.0, backend=backend)[:2]

    return jax.jit(step)(grads, tx.init(params), params)


def test_what_is_kept_is_a_plan_for_each_kind_of_device():
    path = measured.importlib.resources.files("ampx.fused.kernels") / measured.FILE
    for kind, entry in json.loads(path.read_text()).items():
        plan = measured.plan_for(kind)
        assert plan.elements >= 256 and plan.elements.bit_count() == plan.vector.bit_count() == 1
        assert set(plan.work) <= set(pallas_updates.KindOfWork.__args__)
        assert entry["versions"]


def test_nothing_is_taken_where_nothing_was_measured(monkeypatch):
    assert measured.plan_for("a device that nobody has") is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert measured.resolve_backend("auto") == ("xla", KernelPlan())
    assert measured.resolve_backend("pallas") == ("mosaic_gpu", KernelPlan())


def test_a_default_device_that_is_no_gpu_gets_no_kernels_for_one(measure):
    measure(work=["norms"], versions="jax 1")
    assert measured.resolve_backend("auto")[0] == "mosaic_gpu"
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert measured.resolve_backend("auto")[0] == "xla"
            with pytest.raises(ValueError, match="JAX on 'cpu'"):
                measured.resolve_backend("pallas")


def test_what_is_asked_for_runs_with_the_settings_that_won(measure):
    measure(elements=512, vector=2, leaves=4, work=[], versions="jax 1")
    settings = KernelPlan(elements=512, vector=2, leaves=4)
    assert measured.resolve_backend("pallas") == ("mosaic_gpu", settings)
    assert measured.resolve_backend("auto") == ("xla", KernelPlan())


LAMB, ADAMW = functools.partial(fused.lamb, 0.1), functools.partial(fused.adamw, 0.1)
INT8 = functools.partial(ADAMW, mu_dtype="int8", nu_dtype="int8")


def narrow():
    return fused.split_masters(ADAMW())


WORK = {"norms": (LAMB, 4), "elementwise": (ADAMW, 2), "blocks": (INT8, 1), "narrow": (narrow, 2)}


@pytest.mark.usefixtures("on_one_of_eight_devices")
@pytest.mark.parametrize("won", WORK)
def test_auto_takes_the_kinds_of_work_that_won_and_no_other(won, measure, monkeypatch):
    measure(work=[won], versions="jax 1")
    calls = count_kernels(monkeypatch)
    for kind, (make, leaves) in WORK.items():
        # Of blocks one parameter alone: `v` has too few numbers for 8 bits, so it is elementwise.
        shapes = {"w": (16, 256)} if kind == "blocks" else SHAPES
        dtype = jnp.bfloat16 if kind == "narrow" else jnp.float32
        tx, params, grads = make(), normal(0, dtype, shapes), normal(1, shapes=shapes)
        calls.clear()
        new = stepped(tx, grads, params)
        assert sum(calls) == (leaves if kind == won else 0)
        near(new, stepped(tx, grads, params, "xla"), 2e-6 if kind != "narrow" else 2.0**-7)


@pytest.mark.usefixtures("on_one_of_eight_devices")
def test_auto_takes_the_norm_where_kernels_were_faster_with_it(measure, monkeypatch):
    measure(work=["squares"], versions="jax 1")
    calls = count_kernels(monkeypatch)
    params, grads = normal(0, shapes=SHAPES), normal(1, shapes=SHAPES)
    near(stepped(ADAMW(), grads, params), stepped(ADAMW(), grads, params, "xla"))
    assert calls == [len(SHAPES)]


def test_auto_leaves_arrays_on_several_devices_to_xla(measure, monkeypatch):
    measure(work=[*WORK, "squares"], versions="jax 1")
    calls = count_kernels(monkeypatch)
    mesh = make_mesh((2,), ("data",))
    params = jax.device_put(normal(0, shapes={"w": (4, 256)}), NamedSharding(mesh, P("data")))
    grads, tx = jax.tree.map(jnp.ones_like, params), ampx.dynamic_loss_scale(ADAMW())
    with jax.set_mesh(mesh):
        new = stepped(tx, grads, params)
        assert_bit_equal(new, stepped(tx, grads, params, "xla"))
    assert not calls


@pytest.mark.parametrize("elements, vector, leaves", [(256, 1, 1), (2048, 8, 2), (1024, 2, 16)])
def test_settings_change_no_number(elements, vector, leaves):
    plan = KernelPlan(elements, vector, leaves)
    jobs = [(hyperparameters(), *leaf((n,), seed=n)) for n in (1500, 300)]
    mapped = functools.partial(gpu.map_leaves, num_sums=2, interpret=True, plan=plan)
    new, sums = jax.jit(functools.partial(mapped, adamw))(jobs)
    for k, job in enumerate(jobs):
        check((new[k], sums[k]), blocks.map_whole(adamw, *job, num_sums=2))


def test_settings_reach_the_thread_blocks():
    job = hyperparameters(), *leaf((5000,))
    part = gpu._part(job, 0, KernelPlan(elements=2048, vector=2))
    assert (part.block, part.programs) == (2048, 2)
    assert {window.vector for window in part.windows(0, 2048)} == {2}
    narrow = gpu._part(job, 0, KernelPlan(elements=256, vector=8))  # 2 a thread
    assert {window.vector for window in narrow.windows(0, 256)} == {2}
