"""Fused updates of arrays that are divided over devices: nothing is gathered, norms are whole."""

import functools

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

RATE = optax.linear_schedule(0.05, 0.01, 20)
OPTIMIZERS = {
    "adadelta": lambda lib: lib.adadelta(0.1, weight_decay=0.1),
    "adagrad": lambda lib: lib.adagrad(0.05),
    "adam": lambda lib: lib.adam(1e-2, nesterov=True),
    "adamw": lambda lib: lib.adamw(RATE, weight_decay=0.1),
    "lamb": lambda lib: lib.lamb(1e-2, weight_decay=0.1),
    "lion": lambda lib: lib.lion(1e-3),
    "novograd": lambda lib: lib.novograd(1e-2, weight_decay=0.1),
    "sgd": lambda lib: lib.sgd(0.1, momentum=0.9, nesterov=True),
    "masters": lambda lib: ampx.master_weights(lib.adamw(1e-2)),
}


def near(actual, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=1e-3))


# --- zero1 ---------------------------------------------------------------------------------------

WHOLE = {"w": (8, 3), "b": (5,), "s": (), "v": (4,)}


def draw(seed, shapes, dtype=jnp.float32, *, leading=()):
    normal = np.random.default_rng(seed).normal
    return {name: jnp.asarray(normal(size=leading + s), dtype) for name, s in shapes.items()}


@pytest.mark.whole_but("masters-False", "lamb-True", "novograd-False", "sgd-False")
@pytest.mark.slow_but("masters-False")
@pytest.mark.parametrize(
    "name, scaled", [*((name, False) for name in OPTIMIZERS), ("lamb", True), ("novograd", True)]
)
def test_zero1_over_a_fused_optimizer_equals_optax_unsharded(name, scaled):
    mesh, params = make_mesh((4,), ("data",)), draw(0, WHOLE)
    tx = ampx.zero1(OPTIMIZERS[name](fused), "data", op="sum")
    plain = OPTIMIZERS[name](optax)
    if scaled:
        tx = ampx.dynamic_loss_scale(tx, init_scale=8.0, axis_names="data")
        plain = ampx.dynamic_loss_scale(plain, init_scale=8.0)
    specs = ampx.zero1_specs(tx, params, mesh)

    def own_step(params, state, grads):
        return optimizer_step(tx, params, state, jax.tree.map(lambda g: g[0], grads))

    mapped = jax.shard_map(
        own_step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    step, plain_step = jax.jit(mapped), jax.jit(functools.partial(optimizer_step, plain))
    expected, state, plain_state = params, tx.init(params), plain.init(params)
    for i in range(1, 7):
        grads = draw(i, WHOLE, leading=(4,))
        if scaled and i == 3:
            grads["w"] = grads["w"].at[2, 5, 1].set(jnp.nan)
        params, state = step(params, state, grads)
        summed = jax.tree.map(lambda g: jnp.sum(g, axis=0), grads)
        expected, plain_state = plain_step(expected, plain_state, summed)
    near(params, expected, 3e-6)
    inner, plain_inner = (
        (state, plain_state) if not scaled else (state.inner_state, plain_state.inner_state)
    )
    near(inner.inner_state, plain_inner, 3e-6)


# --- each device holds a shard -------------------------------------------------------------------

SPECS = {"w": P("data"), "v": P(None, ("data", "model")), "b": P(), "m": P("model", "data")}
SHAPES = {"w": (8, 3), "v": (3, 8), "b": (5,), "m": (2, 4)}


def normal(seed, dtype=jnp.float32):
    return draw(seed, SHAPES, dtype)


def spec_of(path, leaf):
    """A moment lies where its parameter does; numbers lie everywhere."""
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return SPECS[name] if SHAPES.get(name) == leaf.shape else P()


def specs_like(tree):
    return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(lambda: tree))


def sharded_step(tx, state, max_norm, **options):
    def step(params, state, grads):
        return fused.apply(tx, grads, state, params, max_norm=max_norm, **options)

    mesh = make_mesh((2, 2), ("data", "model"))
    specs = (SPECS, specs_like(state), SPECS)
    outs = (*specs[:2], P())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=outs))


@pytest.mark.whole_but("masters-bare", "lamb-scaled", "novograd-bare", "adamw-scaled")
@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("name", ["adamw", "lamb", "novograd", "masters"])
def test_norms_and_ratios_of_shards_are_those_of_the_whole(name, scaled):
    tx = OPTIMIZERS[name](fused)
    if scaled:
        tx = ampx.dynamic_loss_scale(tx, axis_names=("data", "model"), init_scale=8.0)
    alone = ampx.dynamic_loss_scale(OPTIMIZERS[name](fused), init_scale=8.0) if scaled else tx
    params = expected = normal(0)
    state = expected_state = tx.init(params)
    step = sharded_step(tx, state, 0.5)
    whole = jax.jit(lambda p, s, g: fused.apply(alone, g, s, p, max_norm=0.5))
    for i in range(1, 6):
        grads = normal(i)
        if scaled and i == 3:
            grads["m"] = grads["m"].at[1, 3].set(jnp.inf)  # on one device of four
        params, state, report = step(params, state, grads)
        expected, expected_state, expected_report = whole(expected, expected_state, grads)
        near((params, state), (expected, expected_state))
        assert bool(report.overflow) == bool(expected_report.overflow) == (scaled and i == 3)
        if not report.overflow:
            np.testing.assert_allclose(report.global_norm, expected_report.global_norm, rtol=1e-6)


def test_the_update_face_in_shard_map_takes_whole_trust_ratios_too():
    tx, mesh = OPTIMIZERS["lamb"](fused), make_mesh((2, 2), ("data", "model"))
    params, grads = normal(0), normal(1)
    state = tx.init(params)
    specs = (SPECS, specs_like(state), SPECS)
    step = functools.partial(optimizer_step, tx)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    near(jax.jit(mapped)(params, state, grads), step(params, state, grads))


@pytest.mark.slow_but("apply")
@pytest.mark.parametrize("face", ["apply", "update"])
def test_float16_shards_that_overflow_are_counted_on_all_devices(face):
    """One element of one shard would become infinite; its count is no device's own."""
    tx = ampx.static_loss_scale(fused.sgd(1.0), 1.0, axis_names=("data", "model"))
    params, grads = normal(0, jnp.float16), normal(1, jnp.float16)
    params["m"] = params["m"].at[1, 3].set(6e4)
    grads["m"] = grads["m"].at[1, 3].set(-6e4)
    state = tx.init(params)

    def step(params, state, grads):
        if face == "apply":
            return fused.apply(tx, grads, state, params)[:2]
        return optimizer_step(tx, params, state, grads)

    mesh = make_mesh((2, 2), ("data", "model"))
    specs = (SPECS, specs_like(state), SPECS)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    new, state = jax.jit(mapped)(params, state, grads)
    assert float(new["m"][1, 3]) == 6e4
    assert int(state.bad_update_total) == 1


# --- meshes under plain jit ----------------------------------------------------------------------


@pytest.mark.whole_but("lamb-Auto", "masters-Explicit", "novograd-Explicit", "adagrad-Explicit")
@pytest.mark.slow_but("lamb-Auto")
@pytest.mark.parametrize(
    "name, kind", [*((name, "Explicit") for name in OPTIMIZERS), ("lamb", "Auto")]
)
def test_global_arrays_are_updated_where_they_lie(name, kind):
    mesh = make_mesh((2, 2), ("data", "model"), kind)
    tx = ampx.dynamic_loss_scale(OPTIMIZERS[name](fused), init_scale=8.0)
    dtype = jnp.bfloat16 if name == "masters" else jnp.float32

    def step(params, state, grads):
        return fused.apply(tx, grads, state, params, max_norm=0.5)

    def placed(tree):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_like(tree))
        return jax.device_put(tree, shardings)

    params, grads = normal(0, dtype), normal(1)
    state = tx.init(params)
    with jax.set_mesh(mesh):
        arguments = placed(params), placed(state), placed(grads)
        compiled = jax.jit(step).lower(*arguments).compile()
        new = compiled(*arguments)
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {collective}(" not in text
    for leaf, held in zip(jax.tree.leaves(new[:2]), jax.tree.leaves(arguments[:2]), strict=True):
        assert leaf.sharding.is_equivalent_to(held.sharding, leaf.ndim)
    expected = jax.jit(step)(params, state, grads)
    near(new[:2], expected[:2], 1e-2 if name == "masters" else 2e-6)
    np.testing.assert_allclose(new[2].global_norm, expected[2].global_norm, rtol=1e-6)


def test_a_skip_of_sharded_arrays_leaves_every_bit():
    mesh = make_mesh((2, 2), ("data", "model"), "Explicit")
    tx = ampx.dynamic_loss_scale(fused.lamb(0.1), init_scale=8.0)
    params = normal(0)
    state = tx.init(params)
    grads = normal(1)
    grads["v"] = grads["v"].at[0, 7].set(jnp.nan)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    with jax.set_mesh(mesh):
        arguments = jax.device_put((grads, params), (shardings, shardings))
        new, after, report = jax.jit(lambda g, p: fused.apply(tx, g, tx.init(p), p))(*arguments)
    assert_bit_equal((new, after.inner_state), (params, state.inner_state))
    assert report.overflow and int(after.nan_total) == 1
