"""JAX's own settings: what plain JAX runs under them, ampx runs, to the same numbers.

Each feature is computed as JAX comes, and once more under each setting that changes how programs
are traced or checked. Strict dtype promotion is set in all tests, by `conftest.py`.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused, pipelining

PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.zeros(4), "out": jnp.ones((4, 2))}
BATCH = {"x": jnp.linspace(-1, 1, 24).reshape(8, 3), "y": jnp.ones((8, 2))}
LARGE = {"w": jnp.linspace(-1, 1, 4096).reshape(8, 512).astype(jnp.bfloat16)}
LAYERS = jnp.cos(jnp.arange(64.0)).reshape(4, 4, 4)
# float16 overflows in none of these steps, so nothing but ampx could make an infinity or a NaN.
SCALE = {"init_scale": 8.0, "growth_interval": 2}


def loss_fn(params, batch):
    hidden = batch["x"].astype(params["w"].dtype) @ params["w"]
    hidden = jnp.tanh((hidden + params["b"][None]).astype(jnp.float32))
    out = (hidden.astype(params["out"].dtype) @ params["out"]).astype(jnp.float32)
    return jnp.mean(jnp.square(out - batch["y"]))


def train(step, params=PARAMS, batch=BATCH):
    state = step.init(params)
    jitted = jax.jit(step)
    for _ in range(2):
        state, report = jitted(state, batch)
    return state, report


def scaled(tx):
    return ampx.dynamic_loss_scale(tx, **SCALE)


def accumulated():
    options = dict(num_microbatches=2, max_grad_norm=1.0, loss_scale=scaled)
    policy = ampx.opt_level("O2", half_dtype=jnp.float16)
    return train(ampx.train_step(loss_fn, optax.adam(0.1), policy=policy, **options))


def windows_of_fused_updates():
    return train(
        ampx.train_step(loss_fn, ampx.multi_steps(scaled(fused.adamw(0.1)), 2), loss_scale=None)
    )


def flat_fused_autocast():
    policy = ampx.opt_level("O1", half_dtype=jnp.bfloat16)
    options = dict(max_grad_norm=1.0, local_norm=True, loss_scale=scaled)
    step = ampx.train_step(loss_fn, fused.adamw(0.1), policy=policy, **options)
    return train(step, fused.flatten(PARAMS))


def derived_rules():
    tx = scaled(fused.fuse(optax.rmsprop(0.1)))
    grads = jax.tree.map(jnp.cos, PARAMS)
    return fused.apply(tx, grads, tx.init(PARAMS), PARAMS, max_norm=1.0)  # op by op


def few_bits():
    tx = scaled(fused.split_masters(fused.adamw(0.1, mu_dtype="int8", nu_dtype="int8"), 8))
    return fused.apply(tx, LARGE, tx.init(LARGE), LARGE, max_norm=1.0)


def masked_rows():
    def loss(params, batch, mask):
        losses = jnp.sum(jnp.square(batch["x"] @ params["w"]), axis=-1)
        return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask, dtype=jnp.float32)

    options = dict(normalize="weights", num_microbatches=3, remainder="mask")
    return jax.jit(ampx.value_and_grad(loss, **options))(PARAMS, BATCH)


def two_devices():
    mesh = make_mesh((2,), ("data",))
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = ampx.dynamic_loss_scale(ampx.zero1(inner, "data"), axis_names="data", **SCALE)
    specs = ampx.zero1_specs(tx, PARAMS, mesh)

    def step(params, state, batch):
        scale = ampx.current_loss_scale(state)
        result = ampx.value_and_grad(loss_fn, axis_name="data")(params, batch, loss_scale=scale)
        updates, state = tx.update(result, state, params)
        return ampx.apply_updates(params, updates), state, result.loss

    places = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    return jax.jit(jax.shard_map(step, mesh=mesh, **places))(PARAMS, tx.init(PARAMS), BATCH)


def pipeline(num_stages=2, layers=LAYERS):
    grads_of = pipelining.value_and_grad(
        first=lambda p, shared, batch, key: batch["x"] @ shared,
        stage=lambda p, x, key: x + jnp.tanh(x @ p),
        last=lambda p, shared, x, batch, key: (jnp.sum(jnp.square(x)), jnp.float32(x.size)),
        schedule=pipelining.one_f_one_b(num_stages, num_stages),
        axis_name="stage",
        mesh=make_mesh((num_stages,), ("stage",)),
    )
    params = {"stages": layers, "shared": PARAMS["w"]}
    return jax.jit(grads_of)(params, BATCH, loss_scale=jnp.float32(8))


FEATURES = (
    accumulated,
    windows_of_fused_updates,
    flat_fused_autocast,
    derived_rules,
    few_bits,
    masked_rows,
    two_devices,
    pipeline,
)
SETTINGS = {
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "highest",
    "jax_use_direct_linearize": False,
}


# The others compile anew what other tests have compiled, or take long to trace.
QUICK = ("jax_default_matmul_precision", "jax_numpy_rank_promotion", "jax_enable_x64")


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    if name.startswith("jax_debug"):
        jax.clear_caches()  # what is compiled already is not checked
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def as_jax_comes():
    results = {}

    def find(feature):
        if feature not in results:
            results[feature] = feature()
        return results[feature]

    return find


def assert_same(found, wanted):
    found, wanted = map(jax.tree_util.tree_leaves_with_path, (found, wanted))
    for (path, leaf), (same_path, other) in zip(found, wanted, strict=True):
        assert path == same_path and leaf.dtype == other.dtype, path
        if "error_bits" in jax.tree_util.keystr(path):
            continue  # the last bits of a master
        numbers = [np.asarray(array, np.float64) for array in (leaf, other)]
        # A code of an 8-bit moment may be the next one.
        tolerance = {"atol": 1.0} if leaf.dtype == np.int8 else {"rtol": 1e-5, "atol": 1e-6}
        if leaf.dtype.itemsize == 2:
            tolerance = {"rtol": 1 / 128, "atol": 1e-5}
        np.testing.assert_allclose(*numbers, **tolerance, err_msg=jax.tree_util.keystr(path))


@pytest.mark.sampled(10, "jax_debug_infs-few_bits")
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_a_setting_of_jax_changes_nothing(name, feature, as_jax_comes):
    wanted = as_jax_comes(feature)
    with setting(name, SETTINGS[name]):
        assert_same(feature(), wanted)


@pytest.mark.slow  # each operation is compiled by itself
def test_a_pipeline_runs_without_jit():
    wanted = pipeline(num_stages=1, layers=LAYERS[:1])
    with jax.disable_jit():
        assert_same(pipeline(num_stages=1, layers=LAYERS[:1]), wanted)


@pytest.mark.parametrize("value", ["highest", "high", "F32_F32_F32"])
def test_the_precision_of_float32_products_keeps_none_of_them_from_half(value):
    def convolution(x):
        return lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")

    def own(params, batch):
        with jax.default_matmul_precision("highest"):
            return batch["x"] @ params["w"]

    wanted = jax.jit(jax.grad(ampx.autocast(loss_fn)))(PARAMS, BATCH)
    with jax.default_matmul_precision(value):
        assert ampx.explain(loss_fn)(PARAMS, BATCH).products_in_half() == (2, 2)
        assert ampx.explain(convolution)(BATCH["x"]).products_in_half() == (1, 1)
        if value != "F32_F32_F32":  # an algorithm changes half products, too
            assert_same(jax.jit(jax.grad(ampx.autocast(loss_fn)))(PARAMS, BATCH), wanted)
    # What the function asks for itself is respected.
    assert ampx.explain(own)(PARAMS, BATCH).products_in_half() == (0, 1)
