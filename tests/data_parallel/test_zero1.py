"""ZeRO-1 is the replicated optimizer, with a share of its state on each device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal, make_mesh, types_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

RANDOM = np.random.default_rng(0)


def normal(*shape):
    """By NumPy, as all data here: single operations of JAX are compiled, each for each shape."""
    return RANDOM.normal(size=shape).astype(np.float32)


PARAMS = {
    "first": {"w": np.float32(0.3) * normal(12, 32), "b": np.zeros(32, np.float32)},
    "last": np.float32(0.3) * normal(32, 3),
    "scale": np.ones((), np.float32),
}
BATCH = (normal(32, 12), normal(32, 3))
MESHES = {"4": ((4,), ("data",)), "8": ((8,), ("data",)), "2x4": ((2, 4), ("host", "device"))}

INNERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "masters": lambda: ampx.master_weights(optax.adamw(1e-2)),
    "lion": lambda: optax.lion(1e-3),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 20)),
    "masked": lambda: optax.chain(
        optax.masked(optax.scale_by_adam(), {"first": True, "last": False, "scale": True}),
        optax.scale(-1e-2),
    ),
}


def loss_fn(params, batch):
    x, y = batch
    params = ampx.cast_floating(params, jnp.float32)
    h = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return jnp.mean((h @ params["last"] * params["scale"] - y) ** 2)


def make_step(tx, mesh=None, axes=None, specs=None, check_vma=True):
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=2, axis_name=axes)

    def step(params, state, batch):
        result = grads_of(params, batch, loss_scale=ampx.current_loss_scale(state))
        updates, state = tx.update(result.grads, state, params)
        return ampx.apply_updates(params, updates), state, result.loss

    if mesh is None:
        return jax.jit(step)
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P(axes)),
            out_specs=(P(), specs, P()),
            check_vma=check_vma,
        )
    )


def sharded(inner, mesh_name, params=PARAMS, check_vma=True, scaled=True, kind="Auto"):
    """A step over a mesh and its first state."""
    shape, axes = MESHES[mesh_name]
    mesh = make_mesh(shape, axes, kind)
    tx = ampx.zero1(inner, axes, op="sum", bucket_bytes=512)
    if scaled:
        tx = ampx.dynamic_loss_scale(tx, axis_names=axes, init_scale=8.0)
    specs = ampx.zero1_specs(tx, params, mesh, axes)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    return make_step(tx, mesh, axes, specs, check_vma), state, shardings


@functools.cache
def of_inner(name, mesh_name="4"):
    """The same of one of `INNERS`; several tests share it, so that it is compiled once."""
    return sharded(INNERS[name](), mesh_name)


def replicated(inner, scaled=True):
    tx = ampx.dynamic_loss_scale(inner, init_scale=8.0) if scaled else inner
    return make_step(tx), tx.init(PARAMS)


def run(step, state, steps, params=PARAMS, batch=BATCH):
    for _ in range(steps):
        params, state, loss = step(params, state, batch)
    return params, state, loss


# What is left out has states of the same kind as another one here, or divides them over two axes.
@pytest.mark.slow_but("lamb-2x4")
@pytest.mark.whole("lion-4", "adadelta-4", "schedule-4", "adafactor-4", "clip-2x4")
@pytest.mark.parametrize(
    "name, mesh_name", [*((name, "4") for name in INNERS), ("lamb", "2x4"), ("clip", "2x4")]
)
def test_twenty_steps_equal_the_replicated_optimizer(name, mesh_name):
    step, state, _ = of_inner(name, mesh_name)
    params, state, loss = run(step, state, 20)
    expected, expected_state, expected_loss = run(*replicated(INNERS[name]()), 20)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        # Up to 7e-7 where measured: sums over devices in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
    inner, expected_inner = state.inner_state.inner_state, expected_state.inner_state
    assert jax.tree.structure(inner) == jax.tree.structure(expected_inner)
    for a, b in zip(jax.tree.leaves(inner), jax.tree.leaves(expected_inner), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow_but("vma-Explicit", "no vma-Auto")
@pytest.mark.whole("vma-Auto")  # as in twenty steps
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_it_works_on_every_kind_of_mesh(kind, check_vma):
    mesh = make_mesh(*MESHES["4"], kind)
    step, state, _ = sharded(optax.adamw(1e-2), "4", check_vma=check_vma, kind=kind)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    params, _, _ = run(step, state, 3, params, batch)
    expected, _, _ = run(*replicated(optax.adamw(1e-2)), 3)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mesh_name, count", [("4", 4), ("8", 8)])
def test_a_device_holds_its_share_of_the_state(mesh_name, count):
    _, state, _ = of_inner("adamw", mesh_name)

    def bytes_on_first(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    scalars = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if not leaf.ndim)
    assert bytes_on_first(state) == (whole - scalars) / count + scalars


def test_the_step_scatters_and_gathers_and_reduces_no_gradient_whole():
    step, state, _ = sharded(optax.adamw(1e-2), "4", scaled=False)
    text = step.lower(PARAMS, state, BATCH).compile().as_text()
    assert text.count(" reduce-scatter(") >= 1 and text.count(" all-gather(") >= 1
    largest = max(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert f"f32[{largest}]" not in "".join(
        line for line in text.splitlines() if " all-reduce(" in line
    )


def test_the_norm_is_that_of_the_whole_gradient():
    step, state, _ = of_inner("adamw")
    _, state, _ = step(PARAMS, state, BATCH)
    expected = jax.jit(lambda *args: optax.tree.norm(jax.grad(loss_fn)(*args)))(PARAMS, BATCH)
    np.testing.assert_allclose(optax.tree.get(state, "gradient_norm"), expected, rtol=1e-6)


def test_it_tells_what_it_has_scattered():
    step, first, _ = of_inner("adamw")
    _, state, _ = step(PARAMS, first, BATCH)
    assert types_of(state) == types_of(first)
    quarters = [jnp.zeros(leaf.size // 4) for leaf in jax.tree.leaves(PARAMS) if leaf.size > 1]
    layout = ampx.bucket_layout(quarters, bucket_bytes=512)
    sent = state.inner_state.reduction
    assert sent.num_buckets == len(layout.buckets) + 1, "the scale is not divided"
    assert sent.reduced_bytes == 4 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS))


@pytest.mark.slow_but("inf")
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_an_overflow_on_one_device_changes_nothing_on_any(bad):
    step, state, _ = of_inner("adamw")
    params, state, _ = step(PARAMS, state, BATCH)
    spoilt = (BATCH[0].copy(), BATCH[1])
    spoilt[0][9, 0] = bad
    new, skipped, _ = step(params, state, spoilt)
    assert_bit_equal(new, params)
    assert_bit_equal(skipped.inner_state.inner_state, state.inner_state.inner_state)
    assert skipped.overflow and skipped.loss_scale == state.loss_scale / 2
    new, _, _ = step(new, skipped, BATCH)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


@pytest.mark.slow
def test_a_checkpoint_does_not_know_how_many_devices_there_were(tmp_path):
    step, state, _ = of_inner("lamb")
    params, state, _ = run(step, state, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
    expected, _, _ = run(step, state, 3, params)

    step, like, shardings = of_inner("lamb", "2x4")
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (PARAMS, like),
        (jax.tree.map(lambda _: NamedSharding(shardings.loss_scale.mesh, P()), PARAMS), shardings),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored, restored_state = checkpointer.restore(tmp_path / "state", abstract)
    assert_bit_equal(restored, params)
    assert_bit_equal(restored_state, state)
    resumed, _, _ = run(step, restored_state, 3, restored)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_half_parameters_have_sharded_masters():
    params = ampx.cast_floating(PARAMS, jnp.bfloat16)
    step, state, _ = sharded(ampx.master_weights(optax.adamw(1e-2)), "4", params)
    new, state, _ = run(step, state, 2, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("bfloat16")}
    tx = ampx.dynamic_loss_scale(ampx.master_weights(optax.adamw(1e-2)), init_scale=8.0)
    expected, _, _ = run(make_step(tx), tx.init(params), 2, params)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=1e-2)


NARROW = {
    "split_masters": lambda: fused.split_masters(fused.adamw(1e-3)),
    "split_masters, 8 bits": lambda: fused.split_masters(fused.sgd(0.01, momentum=0.5), 8),
    "stochastic_rounding": lambda: fused.stochastic_rounding(fused.adamw(1e-3), seed=3),
}
OF_NARROW = {"w": P(None, "model"), "cube": P(None, None, "model"), "odd": P(), "norm": P()}


@pytest.mark.slow_but("split_masters-data", "stochastic_rounding-data x model")
@pytest.mark.parametrize("axes", ["data", "data x model"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_parameters_have_every_bit_of_one_device(name, axes):
    """Error bits are read and written as bits, and random ones count elements of whole arrays."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 64), "cube": (6, 4, 2), "odd": (7,)}
    params = {key: jnp.asarray(rng.normal(size=s), jnp.bfloat16) for key, s in shapes.items()}
    params["norm"] = jnp.asarray(rng.normal(size=8), jnp.float32)
    # Quarters of them add up exactly, in any order.
    grads = [
        jax.tree.map(lambda p: rng.integers(-64, 64, size=p.shape).astype("f4") / 64, params)
        for _ in range(3)
    ]

    def take_steps(tx, grads, state, params):
        for own in grads:
            updates, state = tx.update(own, state, params)
            params = ampx.apply_updates(params, updates)
        return params, state

    inner = NARROW[name]()
    expected = jax.jit(functools.partial(take_steps, inner))(grads, inner.init(params), params)
    sizes = {"data": 4} if axes == "data" else {"data": 2, "model": 2}
    divided_as = None if axes == "data" else OF_NARROW
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes))
    tx = ampx.zero1(inner, "data", op="sum", model_axes=divided_as)
    specs = ampx.zero1_specs(tx, params, mesh, model_axes=divided_as)
    assert any("data" in spec for spec in jax.tree.leaves(specs.inner_state))
    of_params = divided_as or P()

    def share(grads, state, params):
        grads = jax.tree.map(lambda g: g / sizes["data"], grads)
        return take_steps(tx, grads, state, params)

    mapped = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=([of_params] * len(grads), specs, of_params),
        out_specs=(of_params, specs),
        check_vma=False,
    )
    found, state = jax.jit(mapped)(grads, tx.init(params), params)
    assert_bit_equal((found, state.inner_state), expected)


@pytest.mark.slow  # the quick one is in test_zero1_model_axes.py
def test_train_step_takes_it_in_the_place_of_an_optimizer():
    mesh = make_mesh((4,), ("data",))
    options = dict(loss_scale="dynamic", num_microbatches=2)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    step = ampx.train_step(loss_fn, ampx.zero1(inner, "data"), axis_name="data", **options)
    alone = ampx.train_step(loss_fn, inner, **options)
    state, expected = step.init(PARAMS), alone.init(PARAMS)
    specs = ampx.TrainState(P(), P(), ampx.zero1_specs(step.tx, PARAMS, mesh), None, None)
    mapped = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    alone = jax.jit(alone)
    for _ in range(3):
        state, report = mapped(state, BATCH)
        expected, expected_report = alone(expected, BATCH)
    np.testing.assert_allclose(report.loss, expected_report.loss, rtol=1e-6)
    np.testing.assert_allclose(report.global_norm, expected_report.global_norm, rtol=1e-5)
    assert report.num_buckets is None, "not reduced by the step, but inside tx"
    assert ampx.metrics(state.opt_state)["num_buckets"] == 2
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    spoilt = (BATCH[0].copy(), BATCH[1])
    spoilt[0][3] = np.nan
    held, report = mapped(state, spoilt)
    assert report.overflow
    assert_bit_equal(held.params, state.params)


def test_operations_on_shards_equal_those_on_whole_arrays():
    """Among them a barrier, whose operands have nothing to do with each other's shapes."""

    def update(updates, state, params=None):
        held = jax.lax.optimization_barrier((updates, jnp.arange(3.0)))
        factor = jnp.sum(held[1])
        return jax.tree.map(lambda x: factor * jax.lax.lgamma(x) / jax.lax.digamma(x), held[0]), ()

    inner = optax.GradientTransformation(lambda params: (), update)
    step, state, _ = sharded(inner, "4", scaled=False)
    params, _, _ = run(step, state, 1)
    expected, _, _ = run(*replicated(inner, scaled=False), 1)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# What is refused.


def test_matrix_optimizers_are_refused_by_name():
    step, state, _ = sharded(optax.contrib.muon(1e-2), "4")
    with pytest.raises(NotImplementedError, match=r"cannot be computed on shards.*take this one"):
        step(PARAMS, state, BATCH)


def test_moments_in_blocks_are_refused_where_they_would_be_cut():
    inner = fused.adamw(1e-2, mu_dtype="int8")
    params = {"large": np.ones((64, 64), np.float32), "small": np.ones(8, np.float32)}
    tx = ampx.zero1(inner, "data", op="sum")
    mesh = make_mesh((4,), ("data",))

    def update(state, params):
        return tx.update(params, state, params)[0]

    def map_over(params):
        specs = ampx.zero1_specs(tx, params, mesh)
        mapped = jax.shard_map(
            update, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)(tx.init(params), params)

    with pytest.raises(NotImplementedError, match=r"mu/large' is stored in 8 bits.*jnp\.bfloat16"):
        map_over(params)
    # What the error says is right, and what it warns of is wrong.
    for nu_dtype, found in ((None, []), (jnp.bfloat16, ["half_state"])):
        optimizer = fused.adamw(1e-2, mu_dtype=jnp.bfloat16, nu_dtype=nu_dtype)
        report = ampx.lint_step(optimizer.update)(params, optimizer.init(params), params)
        assert [each.check for each in report.findings] == found
    # A parameter that no device divides keeps whole blocks.
    map_over({"odd": np.ones((67, 67), np.float32)})


def test_a_state_that_is_not_sharded_is_refused():
    mesh = make_mesh((4,), ("data",))
    tx = ampx.zero1(optax.adam(1e-2), "data")
    step = make_step(tx, mesh, "data", P())
    with pytest.raises(ValueError, match=r"has shape \(32,\) on this device, expected \(8,\)"):
        step(PARAMS, tx.init(PARAMS), BATCH)


def test_specs_need_a_zero1():
    with pytest.raises(ValueError, match=r"there is no ampx\.zero1"):
        ampx.zero1_specs(optax.adam(1e-2), PARAMS, make_mesh((4,), ("data",)))


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data"), "fsdp"])
def test_specs_are_those_of_the_axes_of_zero1(axes):
    mesh = make_mesh((2, 2), ("data", "fsdp"))
    tx = ampx.dynamic_loss_scale(ampx.zero1(optax.adam(1e-2), axes), axis_names=axes)
    specs = ampx.zero1_specs(tx, PARAMS, mesh)
    named = {spec for spec in jax.tree.leaves(specs.inner_state.inner_state) if spec != P()}
    assert all(axes in spec for spec in named) and named
    assert specs == ampx.zero1_specs(tx, PARAMS, mesh, axes)  # and so it is a second time
    with pytest.raises(ValueError, match="zero1 in tx has axis_name=.* and axis_name is 'data'"):
        ampx.zero1_specs(tx, PARAMS, mesh, "data")


def test_axes_of_several_zero1_must_be_the_same():
    groups = {name: ampx.zero1(optax.adam(1e-2), name) for name in ("data", "fsdp")}
    tx = optax.partition(groups, {"w": "data", "b": "fsdp"})
    with pytest.raises(ValueError, match="give all zero1 the same"):
        params = {"w": jnp.ones(4), "b": jnp.ones(4)}
        ampx.zero1_specs(tx, params, make_mesh((2, 2), ("data", "fsdp")))


def test_clipping_before_the_reduction_is_refused():
    tx = ampx.zero1(optax.sgd(0.1), "data")
    step = ampx.train_step(loss_fn, tx, axis_name="data", max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm=1.0 around zero1.*clip inside"):
        step.init(PARAMS)


def test_parameters_are_needed():
    tx = ampx.zero1(optax.sgd(0.1), "data")
    with pytest.raises(ValueError, match="zero1 needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_the_longest_axis_that_can_be_is_divided():
    specs = ampx.zero1_specs(
        ampx.zero1(optax.adam(1e-2), "data"),
        {"a": jnp.ones((8, 16)), "b": jnp.ones((12, 7)), "c": jnp.ones((5, 7)), "d": jnp.ones(())},
        make_mesh((4,), ("data",)),
    )
    moments = specs.inner_state[0].mu
    assert moments == {"a": P(None, "data"), "b": P("data"), "c": P(), "d": P()}


def test_no_axis_no_update():
    tx = ampx.zero1(optax.sgd(0.1), "data")
    update = functools.partial(tx.update, PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(NameError, match="no axis 'data' is mapped here"):
        update()


def test_a_step_whose_batch_is_not_split_over_an_axis_of_zero1_is_refused():
    def loss_fn(w, x):
        return jnp.sum(w * x)

    step = ampx.train_step(loss_fn, ampx.zero1(optax.sgd(0.1), "data"), axis_name="host")
    take = jax.vmap(jax.vmap(step, (None, 0), axis_name="data"), (None, 0), axis_name="host")
    with pytest.raises(ValueError, match=r"zero1 divides its state over \['data'\].*\('host',\)"):
        jax.eval_shape(take, step.init(jnp.ones(2)), jnp.ones((2, 2, 1)))
