"""Fused updates by Pallas kernels are those by XLA, bit for bit on a skip, and gather nothing."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, optimizer_step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused
from ampx.fused.kernels import gpu, pallas_updates, tpu

SHAPES = {"w": (20, 130), "v": (2500,), "b": (7,), "s": (), "e": (0, 3)}
RATE = optax.linear_schedule(0.1, 0.05, 10)
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


CASES = {
    "adam": lambda lib: lib.adam(RATE),
    "adam, nesterov": lambda lib: lib.adam(0.1, nesterov=True),
    "adamw": lambda lib: lib.adamw(RATE, weight_decay=0.1, mask=matrices),
    "sgd": lambda lib: lib.sgd(0.1),
    "momentum": lambda lib: lib.sgd(0.1, momentum=0.9),
    "nesterov": lambda lib: lib.sgd(RATE, momentum=0.9, nesterov=True),
    "lamb": lambda lib: lib.lamb(RATE, weight_decay=0.1),
    "adadelta": lambda lib: lib.adadelta(1.0, weight_decay=0.1),
    "adadelta, no rate": lambda lib: lib.adadelta(),
    "lion": lambda lib: lib.lion(0.01, weight_decay=0.1),
    "adagrad": lambda lib: lib.adagrad(0.1),
    "novograd": lambda lib: lib.novograd(0.1, weight_decay=0.1),
    "groups": lambda lib: optax.partition(
        {"all": lib.adamw(RATE), "few": optax.inject_hyperparams(lib.sgd)(RATE, momentum=0.9)},
        {"w": "all", "v": "few", "b": "few", "s": "all", "e": "all"},
    ),
}


@pytest.fixture(autouse=True)
def on_one_device_in_small_blocks(monkeypatch):
    """Every kernel has several blocks, the last one ragged."""
    monkeypatch.setattr(tpu, "_ELEMENTS", 1024)
    with jax.set_mesh(make_mesh((1,), ("one",))):
        yield


def normal(seed, dtype=jnp.float32, shapes=SHAPES):
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape), dtype) for name, shape in shapes.items()}


def apply_step(tx, backend, params, state, grads):
    return fused.apply(tx, grads, state, params, backend=backend)[:2]


def quickly_compiled(step):
    """Compiling is what takes the time here."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0} if on_cpu else None)


def run(tx, step, params, steps):
    step, state = quickly_compiled(step), tx.init(params)
    for grads in steps:
        params, state = step(params, state, grads)
    return params, state


def by(backend, tx, params, steps):
    return run(tx, functools.partial(apply_step, tx, backend), params, steps)


def by_optax(make, params, steps):
    tx = make(optax)
    return run(tx, functools.partial(optimizer_step, tx), params, steps)


def near(actual, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        atol = tolerance * np.max(np.abs(b), initial=1e-9)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def steps_of(dtype=jnp.float32):
    return [normal(i, dtype) for i in (1, 2, 3)]


def count_kernels(monkeypatch):
    """A list that grows by the number of leaves with every call of a map over them."""
    calls, genuine = [], pallas_updates._map_leaves

    def counted(*settings_of_all):
        def map_leaves(fun, leaves, **settings):
            calls.append(len(leaves))
            return genuine(*settings_of_all)(fun, leaves, **settings)

        return map_leaves

    monkeypatch.setattr(pallas_updates, "_map_leaves", counted)
    return calls


# --- equality ------------------------------------------------------------------------------------


@pytest.mark.whole_but(
    "lamb", "adamw", "nesterov", "adadelta", "lion", "adagrad", "novograd", "groups"
)
@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_optax(case, monkeypatch):
    calls = count_kernels(monkeypatch)
    tx = CASES[case](fused)
    actual = by("interpret", tx, normal(0), steps_of())
    assert sum(calls) == {"novograd": 0, "lamb": 2 * len(SHAPES)}.get(case, len(SHAPES))
    # XLA's updates are optax's: test_fused_equivalence.
    near(actual, by_optax(CASES[case], normal(0), steps_of()))


@pytest.mark.slow_but("lamb-bfloat16")
@pytest.mark.parametrize(
    "case, param",
    [
        ("adamw", "float32"),
        ("adamw", "float16"),
        ("lamb", "bfloat16"),
        pytest.param("adamw", "bfloat16", marks=pytest.mark.whole),
        pytest.param("lamb", "float32", marks=pytest.mark.whole),
        pytest.param("lamb", "float16", marks=pytest.mark.whole),
    ],
)
def test_half_gradients_and_parameters(case, param):
    tx = dynamic(CASES[case](fused))
    shapes = {"v": (2500,), "s": ()}
    args = tx, normal(0, param, shapes), [normal(i, jnp.bfloat16, shapes) for i in (1, 2)]
    near(by("interpret", *args), by("xla", *args), 2e-6 if param == "float32" else 2.0**-7)


def test_masters_and_half_moments():
    for make in (
        lambda: ampx.master_weights(fused.lamb(0.1)),
        lambda: fused.adam(0.1, mu_dtype=jnp.bfloat16),
    ):
        shapes = {"v": (2500,)}
        args = make(), normal(0, jnp.bfloat16, shapes), [normal(1, jnp.bfloat16, shapes)] * 2
        near(by("interpret", *args), by("xla", *args), 2.0**-7)


def test_what_kernels_cannot_do_is_left_to_xla(monkeypatch):
    calls = count_kernels(monkeypatch)

    def traced(step, tx, params, grads):
        jax.eval_shape(functools.partial(step, tx, grads), tx.init(params), params)

    def update(tx, grads, state, params):
        return tx.update(grads, state, params)[0]

    def applied(backend, tx, grads, state, params):
        return fused.apply(tx, grads, state, params, backend=backend)[0]

    params = {"v": normal(0)["v"], "i": jnp.arange(3)}
    grads = {"v": normal(1)["v"], "i": np.zeros(3, jax.dtypes.float0)}
    interpreted = functools.partial(applied, "interpret")
    traced(interpreted, fused.adamw(0.1), params, grads)
    assert calls == [1]
    traced(update, fused.adamw(0.1), params, grads)
    traced(functools.partial(applied, "auto"), fused.adamw(0.1), params, grads)
    with jax.enable_x64(True):
        for tx, dtype in (
            (fused.lamb(0.1), "float16"),
            (fused.adam(0.1, mu_dtype="int8"), "float32"),
            (fused.adam(0.1), "float64"),
        ):
            wide = {"m": jnp.ones((64, 128), dtype)}
            traced(interpreted, tx, wide, wide)
    assert calls == [1]


# --- skips and overflows -------------------------------------------------------------------------


@pytest.mark.slow_but("adamw-float16")
@pytest.mark.parametrize(
    "case, dtype",
    [
        ("adamw", jnp.float32),
        ("adamw", jnp.float16),
        ("lamb", jnp.float32),
        ("lion", jnp.float16),
        pytest.param("lamb", jnp.float16, marks=pytest.mark.whole),
        pytest.param("lion", jnp.float32, marks=pytest.mark.whole),
    ],
)
def test_a_skipped_step_leaves_every_bit(case, dtype):
    tx = dynamic(CASES[case](fused))
    step = quickly_compiled(functools.partial(apply_step, tx, "interpret"))
    shapes = {"v": (2500,), "s": ()}
    params = normal(0, dtype, shapes)
    params["v"] = params["v"].at[3].set(-0.0).at[2400].set(1e-41 if dtype == jnp.float32 else 6e-8)
    params, state = params, step(params, tx.init(params), normal(1, shapes=shapes))[1]
    for value in (np.inf, np.nan):
        bad = normal(2, shapes=shapes)
        bad["v"] = bad["v"].at[2499].set(value)
        after, next_state = step(params, state, bad)
        assert_bit_equal((after, next_state.inner_state), (params, state.inner_state))
        assert int(next_state.skipped_total) == 1


@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("case", ["nesterov", "lamb"])
def test_float16_parameters_that_would_overflow_are_held_and_counted(case):
    tx = ampx.static_loss_scale({"nesterov": fused.sgd, "lamb": fused.lamb}[case](1.0), 1.0)
    params = {"w": jnp.full((2048,), 1.0, jnp.float16).at[7].set(6.5e4)}
    grads = {"w": jnp.full((2048,), -1.0, jnp.float32).at[7].set(-6e4)}
    state = tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    for backend in ("interpret", "xla"):
        new, after = jax.jit(functools.partial(apply_step, tx, backend))(params, state, grads)
        assert new["w"][7] == params["w"][7] and float(new["w"][8]) > 1.0
        assert int(after.bad_update_total) == 1


@pytest.mark.slow
def test_coefficients_that_are_not_finite_are_counted():
    tx = dynamic(fused.adam(lambda _: jnp.float32(np.nan)))
    params = normal(0)
    new, state = jax.jit(functools.partial(apply_step, tx, "interpret"))(
        params, tx.init(params), normal(1)
    )
    assert_bit_equal(new, params)
    assert int(state.bad_update_total) == 1


# --- the GPU kernels, interpreted ----------------------------------------------------------------


@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("case", ["adamw", "lamb"])
def test_gpu_kernels_equal_xla(case, monkeypatch):
    interpreted = functools.partial(gpu.map_leaves, interpret=True)
    monkeypatch.setattr(pallas_updates, "_map_leaves", lambda *_: interpreted)
    shapes = {"v": (300,), "b": (7,)}
    steps = [normal(i, jnp.bfloat16, shapes) for i in (1, 2)]
    args = dynamic(CASES[case](fused)), normal(0, shapes=shapes), steps
    near(by("interpret", *args), by("xla", *args))


# --- devices -------------------------------------------------------------------------------------

SPECS = {"w": P("data"), "v": P("model"), "b": P(), "s": P(), "e": P()}
AXES = (2, 2), ("data", "model")


def specs_like(tree, specs=SPECS):
    def spec_of(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return specs[name] if SHAPES.get(name) == leaf.shape else P()

    return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(lambda: tree))


def put(tree, mesh, specs=SPECS):
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs_like(tree, specs))
    return jax.device_put(tree, shardings)


@pytest.mark.slow_but("lamb-float32")
@pytest.mark.parametrize(
    "case, dtype", [("adamw", "float32"), ("adamw", "float16"), ("lamb", "float32")]
)
def test_explicit_shards_are_updated_where_they_lie(case, dtype):
    mesh, tx = make_mesh(*AXES, "Explicit"), dynamic(CASES[case](fused))
    params, grads = normal(0, dtype), normal(1)
    state = tx.init(params)
    step = functools.partial(apply_step, tx, "interpret")
    with jax.set_mesh(mesh):
        args = put(params, mesh), put(state, mesh), put(grads, mesh)
        compiled = jax.jit(step).lower(*args).compile()
        new = compiled(*args)
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {collective}(" not in compiled.as_text()
    for leaf, held in zip(jax.tree.leaves(new), jax.tree.leaves(args[:2]), strict=True):
        assert leaf.sharding.is_equivalent_to(held.sharding, leaf.ndim)
    near(new, by("xla", tx, params, [grads]), 2e-6 if dtype == "float32" else 2.0**-9)


@pytest.mark.slow
def test_the_mesh_of_arrays_is_known_without_entering_it():
    """In a process of its own, where the fixture has entered no mesh."""
    in_a_process("""
mesh, tx = t.make_mesh(*t.AXES, "Explicit"), t.fused.sgd(0.1)
params, grads = t.normal(0), t.normal(1)
expected = t.by("xla", tx, params, [grads])[0]
state = tx.init(params)
step = functools.partial(t.apply_step, tx, "interpret")
with jax.set_mesh(mesh):
    args = t.put(params, mesh), t.put(grads, mesh)
t.near(jax.jit(step)(args[0], state, args[1])[0], expected)
t.near(step(params, state, grads)[0], expected)  # no tracers: known to be on one device
t.near(jax.jit(step)(params, state, grads)[0], expected)  # known when it is compiled
args = t.put(params, t.make_mesh(*t.AXES)), grads  # of Auto axes, where XLA asks the kernel
t.near(jax.jit(step)(args[0], state, args[1])[0], expected)
""")


def test_shards_in_shard_map():
    mesh, tx = make_mesh(*AXES), CASES["adamw"](fused)
    params, grads = normal(0), normal(1)
    state = tx.init(params)
    specs = SPECS, specs_like(state), SPECS

    def step(params, state, grads):
        return fused.apply(tx, grads, state, params, backend="interpret")[:2]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    with jax.set_mesh(mesh):
        new = jax.jit(mapped)(put(params, mesh), put(state, mesh), put(grads, mesh))
    near(new, by("xla", tx, params, [grads]))


@pytest.mark.slow
def test_a_norm_by_kernel_is_that_by_xla():
    tx, params = dynamic(fused.adamw(0.1)), normal(0)
    state, huge = tx.init(params), {"w": jnp.full((20, 130), 1e25)}
    steps = [
        jax.jit(functools.partial(fused.apply, tx, max_norm=0.5, backend=backend))
        for backend in ("xla", "interpret")
    ]
    for grads in (normal(1), normal(2) | huge, normal(3, jnp.bfloat16)):
        theirs, ours = (step(grads, state, params) for step in steps)
        np.testing.assert_allclose(ours[2].global_norm, theirs[2].global_norm, rtol=1e-6)
        near(ours[:2], theirs[:2])
        traced = [
            str(step.trace(grads, state, params).jaxpr).count("pallas_call") for step in steps
        ]
        # The two large leaves: once for the norm, once for the update.
        assert traced == [0, 4]


@pytest.mark.slow
def test_a_norm_by_kernel_is_that_of_all_shards():
    mesh, tx = make_mesh(*AXES, "Explicit"), dynamic(fused.adamw(0.1))
    params, grads = normal(0), normal(1)
    expected = optax.tree.norm(grads) / 8
    with jax.set_mesh(mesh):
        params, grads = put(params, mesh), put(grads, mesh)
        report = jax.jit(functools.partial(fused.apply, tx, backend="interpret"))(
            grads, tx.init(params), params
        )[2]
    np.testing.assert_allclose(report.global_norm, expected, rtol=1e-6)


def refused(match, step, *args):
    with pytest.raises(ValueError, match=match):
        jax.jit(step)(*args)


def test_kernels_are_refused_where_they_would_be_gathered_for():
    tx, params, grads = fused.adamw(0.1), normal(0), normal(1)
    state = tx.init(params)
    step = functools.partial(apply_step, tx, "interpret")
    mesh = make_mesh(*AXES)
    novograd = fused.novograd(0.1)  # of which no kernel updates anything
    clip = functools.partial(fused.apply, novograd, max_norm=1.0, backend="interpret")
    with jax.set_mesh(mesh):
        partly = jax.shard_map(step, in_specs=P(), out_specs=P(), axis_names={"data"})
        match = r"has mapped \['data'\] here, and not \['model'\]. Map all.*backend='xla'"
        refused(match, partly, params, state, grads)
        args = (put(tree, mesh) for tree in (grads, novograd.init(params), params))
        norm = jax.jit(clip)(*args)[2].global_norm
    np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-6)
    explicit = make_mesh(*AXES, "Explicit")
    with jax.set_mesh(explicit):
        args = put(params, explicit), put(state, explicit)
        across = put(grads, explicit, SPECS | {"w": P("model")})
        refused("divided in the same way.*jax.reshard", step, *args, across)
        partly = jax.shard_map(step, in_specs=P(), out_specs=P(), axis_names={"data"})
        refused(match, partly, params, state, grads)


def test_backends_that_are_not_there():
    tx, params = fused.sgd(0.1), normal(0)
    with pytest.raises(ValueError, match="kernels for GPUs and TPUs.*'cpu'.*'interpret'"):
        fused.apply(tx, normal(1), tx.init(params), params, backend="pallas")
    with pytest.raises(ValueError, match="backend"):
        fused.apply(tx, normal(1), tx.init(params), params, backend="triton")


# --- lowering ------------------------------------------------------------------------------------

_PRELUDE = """
import functools, re, sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_numpy_dtype_promotion", "strict")
import test_fused_pallas as t

"""


def in_a_process(script, devices=8):
    tests = pathlib.Path(__file__).parent
    paths = os.pathsep.join(map(str, (tests, tests.parent, tests.parents[1])))
    run = subprocess.run(
        [sys.executable, "-c", _PRELUDE.format(tests=str(tests), devices=devices) + script],
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


_LOWERING = """
from jax._src.mesh import AbstractDevice

# one-dimensional blocks need to know the TPU
tpu = jax.sharding.AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
shapes = {"w": (512, 256), "u": (2, 128, 256), "v": (5000,), "b": (7,), "s": ()}

def lowered(case, backend, dtype):
    tx = t.dynamic(t.CASES[case](t.fused))
    params, grads = t.normal(0, dtype, shapes), t.normal(1, jnp.bfloat16, shapes)
    step = lambda g, s, p: t.fused.apply(tx, g, s, p, max_norm=1.0, backend=backend)
    traced = jax.jit(step, donate_argnums=(1, 2)).trace(grads, tx.init(params), params)
    platform, call = {
        "mosaic_gpu": ("cuda", "mosaic_gpu"), "mosaic_tpu": ("tpu", "tpu_custom_call")
    }[backend]
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    donated = len(re.findall("tf.aliasing_output|jax.buffer_donor", text))
    return len(re.findall("@" + call, text)), text.count("output_operand_alias<"), donated

# every parameter and moment, and ten numbers of the loss scale or more
with jax.sharding.use_abstract_mesh(tpu):
    for case, backend, expected in (
        ("adam", "mosaic_gpu", (1 + 1, 3 * 3)),  # one for the norm
        ("lamb", "mosaic_gpu", (1 + 2, 3 * 3)),
        ("adam", "mosaic_tpu", (3, 3 * 3)),
        ("lamb", "mosaic_tpu", (6, 3 * 3)),
    ):
        *found, donated = lowered(case, backend, jnp.float32)
        assert tuple(found) == expected and donated >= 3 * 5 + 5, (case, backend, found, donated)
    shapes = {"v": (5000,), "w": (512, 256)}
    for case in ("adamw", "nesterov", "adadelta", "lion", "adagrad"):
        for backend in ("mosaic_gpu", "mosaic_tpu"):
            assert lowered(case, backend, jnp.bfloat16)[0] > 0
    assert lowered("sgd", "mosaic_gpu", jnp.float16)[:2] == (1 + 1, 2)
    assert lowered("adamw", "mosaic_tpu", jnp.float16)[:2] == (0, 0)  # TPUs compile no such kernel
"""


@pytest.mark.whole
def test_whole_steps_lower_to_few_kernels_in_place():
    in_a_process(_LOWERING, devices=1)
