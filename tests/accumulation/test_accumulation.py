"""ampx.accumulation.gradients: micro-batches change speed and memory, never the gradient."""

import functools
import re

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx.accumulation import gradients

ROWS = 16


def data(rows=ROWS, dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {"hidden": rng.normal(size=(6, 5)), "out": rng.normal(size=(5,))}
    batch = {"x": rng.normal(size=(rows, 6)), "y": rng.normal(size=(rows,))}
    # Most weights are in one corner, so that a mean of means is far from the mean.
    batch["w"] = np.where(np.arange(rows) % 8 == 0, 5.0, rng.random(rows) < 0.3)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch))


def errors_of(params, batch):
    return (jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"] - batch["y"]) ** 2


def mean_loss(params, batch):
    return jnp.mean(errors_of(params, batch))


def sum_loss(params, batch):
    return jnp.sum(errors_of(params, batch))


def weighted_loss(params, batch):
    return jnp.sum(errors_of(params, batch) * batch["w"]), jnp.sum(batch["w"])


LOSSES = {"mean": mean_loss, "sum": sum_loss, "weights": weighted_loss}


def whole_loss(normalize, params, batch):
    """The loss of the whole batch, written without ampx."""
    value = LOSSES[normalize](params, batch)
    return value[0] / value[1] if normalize == "weights" else value


def every(k, start, batch):
    """Rows start, start + k, start + 2k ..."""
    return jax.tree.map(lambda x: x[start::k], batch)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def make_mesh(n, axis_type=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:n])


# --- the loss alone ------------------------------------------------------------------------------


@pytest.mark.slow_but("weights-4")
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("normalize", LOSSES)
def test_the_loss_alone_is_that_of_a_call_with_gradients(normalize, k):
    params, batch = data()
    grads_of = ampx.value_and_grad(LOSSES[normalize], num_microbatches=k, normalize=normalize)
    both = jax.jit(functools.partial(grads_of, differentiate=False))(params, batch)
    expected = jax.jit(grads_of)(params, batch)
    np.testing.assert_allclose(both.loss, expected.loss, rtol=1e-6)
    assert both.weight == expected.weight and both.grads is None
    slope = jax.grad(lambda p: grads_of(p, batch, differentiate=False).loss)(params)
    chex.assert_trees_all_close(slope, expected.grads, rtol=1e-5, atol=1e-6)
    program = str(jax.make_jaxpr(functools.partial(grads_of, differentiate=False))(params, batch))
    assert program.count("dot_general[") == 2, "those of the loss"


def test_the_loss_alone_reads_tables_and_moves_states():
    table, indices = jnp.arange(12.0).reshape(6, 2), jnp.array([0, 5, 5, 3])

    def loss(params, batch, *, model_state):
        return jnp.mean(params["table"] ** 2), model_state + jnp.sum(batch)

    grads_of = ampx.value_and_grad(
        loss, num_microbatches=2, sparse_rows={"table": lambda batch: batch}
    )
    options = dict(model_state=jnp.array(0))
    expected = grads_of({"table": table}, indices, **options)
    alone = grads_of({"table": table}, indices, differentiate=False, **options)
    assert alone.loss == expected.loss and alone.model_state == expected.model_state
    assert alone.grads is None


# --- equivalence ---------------------------------------------------------------------------------


@pytest.mark.slow_but("mean-4", "sum-2", "weights-1")
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("normalize", LOSSES)
def test_microbatches_equal_float64(normalize, num_microbatches):
    with jax.enable_x64(True):
        loss, grads = jax.value_and_grad(functools.partial(whole_loss, normalize))(
            *data(dtype=np.float64)
        )
        loss, grads = jax.tree.map(np.asarray, (loss, grads))
    grads_of = ampx.value_and_grad(
        LOSSES[normalize], num_microbatches=num_microbatches, normalize=normalize
    )
    result = grads_of(*data())
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    chex.assert_trees_all_close(result.grads, grads, rtol=2e-5, atol=2e-6)
    total_weight = data()[1]["w"].sum() if normalize == "weights" else num_microbatches
    assert result.weight == total_weight
    assert dtypes(result) == {"float32"}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_one_microbatch_is_bit_equal(transform):
    loss, grads = transform(jax.value_and_grad(mean_loss))(*data())
    result = transform(ampx.value_and_grad(mean_loss))(*data())
    chex.assert_trees_all_equal((result.loss, result.grads), (loss, grads))


def test_loss_scale_multiplies_gradients_alone():
    grads_of = jax.jit(ampx.value_and_grad(mean_loss, num_microbatches=4))
    plain, scaled = grads_of(*data()), grads_of(*data(), loss_scale=2.0**10)
    assert scaled.loss == plain.loss
    chex.assert_trees_all_equal(scaled.grads, jax.tree.map(lambda g: g * 2**10, plain.grads))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_nothing_but_masked_rows_gives_zero(num_microbatches):
    params, batch = data()
    batch["w"] = jnp.zeros_like(batch["w"])
    result = ampx.value_and_grad(
        weighted_loss, num_microbatches=num_microbatches, normalize="weights"
    )(params, batch)
    assert result.loss == 0 and result.weight == 0
    chex.assert_trees_all_equal(result.grads, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_half_parameters_get_float32_sums(dtype, num_microbatches):
    params = jnp.ones(3, dtype)
    batch = jnp.tile(jnp.array([[1.0], [2.0**-12]], dtype), (1, 3))
    result = ampx.value_and_grad(
        lambda w, x: jnp.sum(w * x), num_microbatches=num_microbatches, normalize="sum"
    )(params, batch)
    assert dtypes(result) == {"float32"}
    if num_microbatches == 2:  # neither half type holds 1 + 2**-12
        np.testing.assert_array_equal(result.grads, 1 + 2.0**-12)


def test_wide_accumulators():
    result = ampx.value_and_grad(mean_loss, num_microbatches=2, accumulator_dtype=jnp.bfloat16)(
        *data()
    )
    assert dtypes(result) == {"float32"}  # never narrower than the gradients
    with jax.enable_x64(True):
        wide = ampx.value_and_grad(mean_loss, num_microbatches=2, accumulator_dtype=jnp.float64)(
            *data()
        )
    assert dtypes(wide.grads) == {"float64"}


# --- splitting -----------------------------------------------------------------------------------


def test_optax_microbatching_split_is_strided():
    """optax `_microbatching_test.py`: rows 0, 2, 4 and rows 1, 3, 5."""
    split = ampx.split_microbatches({"x": jnp.arange(6), "y": jnp.ones((6, 2))}, 2)
    assert split["x"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert split["y"].shape == (2, 3, 2)
    x = jnp.arange(6.0)
    result = ampx.value_and_grad(
        lambda w, x: jnp.sum(w * x[:-1] * x[1:]), num_microbatches=2, normalize="sum"
    )(jnp.array(1.0), x)
    assert result.loss == 0 * 2 + 2 * 4 + 1 * 3 + 3 * 5


def test_optax_microbatching_indivisible():
    """optax `_microbatching_test.py`: size 3 on 10 rows."""
    with pytest.raises(ValueError, match="10 rows is not divisible into 3"):
        ampx.split_microbatches(jnp.ones((10, 3)), 3)
    with pytest.raises(ValueError, match="divisible.*remainder='mask'"):
        ampx.value_and_grad(mean_loss, num_microbatches=3)(*data(10))


@pytest.mark.slow_but("sum-3", "weights-2")
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("normalize", ["sum", "weights"])
def test_remainder_mask_equals_unpadded(normalize, num_microbatches):
    params, batch = data(rows=10)

    def masked(params, batch, mask):
        rows = mask.astype(jnp.float32)
        total = jnp.sum(errors_of(params, batch) * rows)
        return (total, jnp.sum(rows)) if normalize == "weights" else total

    result = ampx.value_and_grad(
        masked, num_microbatches=num_microbatches, normalize=normalize, remainder="mask"
    )(params, batch)
    whole = mean_loss if normalize == "weights" else sum_loss
    loss, grads = jax.value_and_grad(whole)(params, batch)
    chex.assert_trees_all_close((result.loss, result.grads), (loss, grads), rtol=1e-5, atol=1e-6)
    if normalize == "weights":
        assert result.weight == 10


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_remainder_mask_on_explicit_axes(num_microbatches, jitted):
    """Each device gets as many rows of a micro-batch as any other; the mask lies as rows do."""
    params, batch = data(rows=12)
    mesh = make_mesh(4, AxisType.Explicit)

    def masked(params, batch, mask):
        errors = errors_of(params, batch)
        kept = jnp.where(mask, errors, jnp.zeros_like(errors))
        return (jnp.sum(kept), jnp.sum(mask.astype(jnp.float32))), errors

    grads_of = ampx.value_and_grad(
        masked,
        num_microbatches=num_microbatches,
        normalize="weights",
        remainder="mask",
        has_aux=True,
        aux_reduction="concat",
    )
    with jax.set_mesh(mesh):
        rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        result = (jax.jit(grads_of) if jitted else grads_of)(whole, rows)
    expected = jax.value_and_grad(mean_loss)(params, batch)
    chex.assert_trees_all_close(
        jax.device_get((result.loss, result.grads)), expected, rtol=1e-5, atol=1e-6
    )
    chex.assert_trees_all_close(
        jax.device_get(result.aux), errors_of(params, batch), rtol=1e-5, atol=1e-6
    )
    assert result.weight == 12 and result.aux.sharding.spec[0] == "data"


def test_micro_batches_that_explicit_axes_cannot_divide_are_named():
    rows = jax.device_put(data()[1], NamedSharding(make_mesh(4, AxisType.Explicit), P("data")))
    with pytest.raises(ValueError, match="8 micro-batches of 2 rows each cannot be divided over"):
        ampx.split_microbatches(rows, 8)


# --- auxiliary output, keys, state ---------------------------------------------------------------


def test_keys_are_folded_per_microbatch():
    key = jax.random.key(3)

    def loss_fn(w, x, key):
        return jnp.sum(w * x), jax.random.normal(key)

    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=4, has_aux=True, aux_reduction="stack")
    draws = grads_of(jnp.array(1.0), jnp.ones(4), key=key).aux
    expected = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(draws, expected)
    assert len(set(draws.tolist())) == 4


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        return nn.Dense(1)(x)[:, 0]


def normed_loss(params, batch, *, model_state):
    out, updated = Normed().apply(
        {"params": params, "batch_stats": model_state}, batch["x"], mutable="batch_stats"
    )
    return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]


@pytest.mark.slow_but("4")
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_collections_go_through_the_microbatches_in_order(num_microbatches):
    _, batch = data()
    variables = Normed().init(jax.random.key(0), batch["x"])
    result = ampx.value_and_grad(normed_loss, num_microbatches=num_microbatches)(
        variables["params"], batch, model_state=variables["batch_stats"]
    )
    state, losses, grads = variables["batch_stats"], [], []
    for i in range(num_microbatches):
        rows = every(num_microbatches, i, batch)
        (loss, state), grad = jax.value_and_grad(normed_loss, has_aux=True)(
            variables["params"], rows, model_state=state
        )
        losses.append(loss)
        grads.append(grad)
    chex.assert_trees_all_close(result.model_state, state, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.loss, np.mean(losses), rtol=1e-6)
    mean = jax.tree.map(lambda *g: sum(g) / num_microbatches, *grads)
    chex.assert_trees_all_close(result.grads, mean, rtol=1e-5, atol=1e-6)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.sum(self.dropout(self.norm(self.dense(x))), axis=-1)


def test_nnx_state_equals_a_loop_and_leaves_the_model_alone():
    _, batch = data()
    model = Dropped(nnx.Rngs(0))
    before = nnx.state(nnx.clone(model))

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    result = ampx.value_and_grad(loss_fn, num_microbatches=4)(model, batch)
    chex.assert_trees_all_equal(nnx.state(model), before)
    looped, losses = nnx.clone(model), []
    for i in range(4):
        losses.append(loss_fn(looped, every(4, i, batch)))
    np.testing.assert_allclose(result.loss, np.mean(losses), rtol=1e-6)
    assert int(result.model_state["dropout"]["rngs"]["count"][...]) == 4
    expected = nnx.state(looped, nnx.BatchStat)
    found, _ = nnx.split_state(result.model_state, nnx.BatchStat, ...)
    chex.assert_trees_all_close(nnx.to_pure_dict(found), nnx.to_pure_dict(expected), rtol=1e-6)


# --- MaxText's gradient_accumulation_nnx_test.py -------------------------------------------------


def tiny():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, {"inputs": jnp.arange(8.0).reshape(4, 2), "targets": jnp.zeros((4, 1))}


@pytest.mark.slow
def test_maxtext_weighted_equals_direct():
    def direct(model, batch):
        return jnp.mean((model(batch["inputs"]) - batch["targets"]) ** 2)

    def weighted(model, batch):
        return 1.0 * jnp.sum((model(batch["inputs"]) - batch["targets"]) ** 2), jnp.float32(
            len(batch["inputs"])
        )

    model, batch = tiny()
    result = ampx.value_and_grad(weighted, num_microbatches=2, normalize="weights")(model, batch)
    loss, grads = nnx.value_and_grad(direct)(model, batch)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    chex.assert_trees_all_close(nnx.to_pure_dict(result.grads), nnx.to_pure_dict(grads), rtol=1e-6)
    assert len(jax.tree.leaves(result.grads)) == 2


def test_maxtext_zero_weight_gives_zero():
    """The sum depends on the model and is not zero; its weight is."""

    def no_tokens(model, batch):
        return jnp.sum(model(batch["inputs"]) ** 2) + 1.0, jnp.array(0.0)

    result = ampx.value_and_grad(no_tokens, num_microbatches=2, normalize="weights")(*tiny())
    assert result.loss == 0
    assert all(jnp.all(g == 0) for g in jax.tree.leaves(result.grads))


# --- precision -----------------------------------------------------------------------------------


def test_policy_casts_parameters_and_not_the_batch():
    seen = []

    def loss_fn(params, batch):
        seen.append((params["hidden"].dtype.name, batch["x"].dtype.name))
        return jnp.mean(params["hidden"])

    result = ampx.value_and_grad(loss_fn, policy="c=bf16,o=f32")(*data())
    assert seen == [("bfloat16", "float32")]
    assert dtypes(result) == {"float32"}


def test_scale_is_applied_to_a_float32_loss():
    """300 * 2**10 is beyond float16: a product in the loss's own dtype would be infinite."""
    result = ampx.value_and_grad(lambda w, x: jnp.sum(w * x), policy="p=f16")(
        jnp.array(300.0), jnp.ones(1, jnp.float16), loss_scale=2.0**10
    )
    assert (result.loss, result.grads) == (300, 2**10)


def test_loss_is_finite_where_scaled_gradients_overflow():
    grads_of = ampx.value_and_grad(lambda w, x: jnp.mean(w * x), policy="p=f16", num_microbatches=2)
    result = grads_of(jnp.array(3.0), jnp.ones(4, jnp.float16), loss_scale=2.0**24)
    assert result.loss == 3 and jnp.isinf(result.grads)


def test_traced_loss_scale_does_not_retrace():
    traces = []

    @jax.jit
    def run(params, batch, scale):
        traces.append(scale)
        return ampx.value_and_grad(mean_loss, num_microbatches=2)(
            params, batch, loss_scale=scale
        ).grads

    for scale in (1.0, 2.0, 2.0**16):
        run(*data(), jnp.float32(scale))
    assert len(traces) == 1


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.whole_but(
    "4-1-weights-AxisType.Auto-replicated",
    "4-4-mean-AxisType.Auto-replicated",
    "4-4-mean-AxisType.Explicit-varying",
    "8-2-weights-AxisType.Auto-unchecked",
    "8-2-weights-AxisType.Explicit-varying",
    "4-1-weights-AxisType.Explicit-unchecked",
    "4-4-mean-AxisType.Auto-unchecked",
    "8-2-weights-AxisType.Explicit-replicated",
    "4-1-weights-AxisType.Auto-varying",
)
@pytest.mark.slow_but("4-4-mean-AxisType.Explicit-varying", "8-2-weights-AxisType.Auto-unchecked")
@pytest.mark.parametrize("params_are", ["replicated", "varying", "unchecked"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "devices, num_microbatches, normalize", [(4, 1, "weights"), (4, 4, "mean"), (8, 2, "weights")]
)
def test_plain_sum_over_devices_is_exact(
    devices, num_microbatches, normalize, axis_type, params_are
):
    params, batch = data(rows=32)
    grads_of = ampx.value_and_grad(
        LOSSES[normalize],
        num_microbatches=num_microbatches,
        normalize=normalize,
        axis_name="data",
    )

    def local(params, batch):
        if params_are == "varying":
            params = jax.lax.pcast(params, "data", to="varying")
        result = grads_of(params, batch)
        return result.loss, jax.lax.psum(result.grads, "data"), result.weight

    mesh = make_mesh(devices, axis_type)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    loss, grads, weight = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=params_are != "unchecked",
        )
    )(params, batch)
    expected = jax.value_and_grad(functools.partial(whole_loss, normalize))(*data(rows=32))
    chex.assert_trees_all_close((loss, grads), expected, rtol=1e-5, atol=1e-6)
    tokens = data(rows=32)[1]["w"].sum()
    assert weight == (tokens if normalize == "weights" else devices * num_microbatches)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("averaged", [("data",), ("data", "fsdp")], ids=["one axis", "both"])
def test_a_loss_that_is_averaged_over_devices_already_gives_the_same(averaged, check_vma):
    """As in programs for `pmap`: `lax.pmean` stands inside of the loss."""
    params, batch = data(rows=32)
    mesh = helpers.make_mesh((2, 4), ("data", "fsdp"))

    def plain_loss(params, batch):
        loss = LOSSES["mean"](params, batch)
        return loss, {"loss": loss}

    def averaged_loss(params, batch):
        loss = LOSSES["mean"](params, batch)
        return jax.lax.pmean(loss, averaged), {"loss": loss}

    def local(params, batch):
        settings = dict(num_microbatches=2, axis_name=mesh.axis_names, has_aux=True)
        grads_of = [ampx.value_and_grad(f, **settings) for f in (plain_loss, averaged_loss)]
        results = [g(params, batch) for g in grads_of]
        return [(r.loss, jax.lax.psum(r.grads, mesh.axis_names), r.aux["loss"]) for r in results]

    everywhere = P(mesh.axis_names)
    settings = dict(mesh=mesh, in_specs=(P(), everywhere), out_specs=P(), check_vma=check_vma)
    plain, found = jax.jit(jax.shard_map(local, **settings))(params, batch)
    expected = jax.value_and_grad(functools.partial(whole_loss, "mean"))(*data(rows=32))
    for each in (plain, found):
        chex.assert_trees_all_close(each, (*expected, expected[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", ["sum", "weights"])
def test_sums_over_devices_inside_of_a_loss_are_refused(normalize):
    def summed(params, batch):
        return jax.lax.psum(LOSSES[normalize](params, batch), "data")

    grads_of = ampx.value_and_grad(summed, normalize=normalize, axis_name="data")
    mapped = jax.shard_map(
        lambda params, batch: grads_of(params, batch).loss,
        mesh=make_mesh(4),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=f"same on all .*'data'.*normalize='{normalize}'.* leave"):
        mapped(*data(rows=8))


def test_devices_get_different_keys_and_reduce_auxiliaries():
    """Without the device in the key, 4 devices drew 1 distinct dropout mask."""

    def loss_fn(w, x, key):
        return jnp.sum(w * x), {"draw": jax.random.normal(key), "x": jnp.sum(x), "n": x.size}

    rules = {"draw": "stack", "x": "mean", "n": "sum"}
    grads_of = ampx.value_and_grad(
        loss_fn, num_microbatches=2, axis_name="data", has_aux=True, aux_reduction=rules
    )

    def local(w, x, key):
        return grads_of(w, x, key=key).aux

    aux = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(4),
            in_specs=(P(), P("data"), P()),
            out_specs={"draw": P("data"), "x": P(), "n": P()},
        )
    )(jnp.array(1.0), jnp.arange(16.0), jax.random.key(0))
    assert len(set(aux["draw"].tolist())) == 8
    assert aux["n"] == 16
    assert aux["x"] == jnp.arange(16.0).sum() / 8


def wide_model():
    rng = np.random.default_rng(1)
    params = {"hidden": rng.normal(size=(64, 64)), "out": rng.normal(size=(64,))}
    batch = {"x": rng.normal(size=(64, 64)), "y": rng.normal(size=(64,))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))


def contiguous_split(batch, k):
    return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)


def compiled_on(mesh, num_microbatches):
    def loss_and_grads(params, batch):
        return ampx.value_and_grad(mean_loss, num_microbatches=num_microbatches)(params, batch)[:2]

    params, batch = wide_model()
    if mesh is not None:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return jax.jit(loss_and_grads).lower(params, batch).compile()


def flops_ratio(mesh, num_microbatches):
    """FLOPs per device over those of one device, as a multiple of the ideal 1/n."""
    flops = [compiled_on(m, num_microbatches).cost_analysis()["flops"] for m in (mesh, None)]
    return flops[0] / flops[1] * mesh.size


@pytest.mark.slow_but("1-AxisType.Auto", "4-AxisType.Explicit")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_sharded_batch_stays_sharded(num_microbatches, axis_type):
    assert flops_ratio(make_mesh(4, axis_type), num_microbatches) <= 1.2


def test_contiguous_split_would_not_stay_sharded(monkeypatch):
    """The guard above can fail: this split makes every device compute everything."""
    monkeypatch.setattr(gradients, "split_microbatches", contiguous_split)
    assert flops_ratio(make_mesh(4), 4) > 3.5


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch_gives_the_same_gradients(axis_type):
    mesh = make_mesh(4, axis_type)
    params, batch = data()
    sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
    everywhere = jax.device_put(params, NamedSharding(mesh, P()))

    def with_rows(params, batch):
        return mean_loss(params, batch), errors_of(params, batch)

    grads_of = jax.jit(
        ampx.value_and_grad(with_rows, num_microbatches=4, has_aux=True, aux_reduction="concat")
    )
    result, expected = grads_of(everywhere, sharded), grads_of(params, batch)
    chex.assert_trees_all_close(
        jax.device_get(result), jax.device_get(expected), rtol=1e-5, atol=1e-6
    )
    assert result.aux.sharding.spec[0] == "data"


def gradient_all_reduces(compiled):
    """(all, those inside the loop): operations that reduce the gradient of `hidden`, (64, 64)."""
    lines = re.findall(r".*64,64\].* all-reduce(?:-start)?\(.*", compiled.as_text())
    return len(lines), sum("while/body" in line for line in lines)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_one_reduction_for_all_microbatches(num_microbatches, axis_type):
    """DDP's `no_sync` (E3): one all-reduce a step, outside of the loop over micro-batches."""
    params, batch = wide_model()
    mesh = make_mesh(4, axis_type)
    grads_of = ampx.value_and_grad(mean_loss, num_microbatches=num_microbatches, axis_name="data")
    step = jax.shard_map(
        lambda params, batch: jax.lax.psum(grads_of(params, batch).grads, "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    compiled = jax.jit(step).lower(params, batch).compile()
    assert gradient_all_reduces(compiled) == (1, 0)


def test_reductions_inside_the_loop_would_be_counted():
    """The count above can fail: under plain `jit` the compiler reduces every micro-batch."""
    assert gradient_all_reduces(compiled_on(make_mesh(4), 4)) == (1, 1)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(num_microbatches=0), ValueError, "positive int, got 0"),
        (dict(num_microbatches=2.0), TypeError, "positive int, got 2.0"),
        (dict(num_microbatches=True), TypeError, "positive int, got True"),
        (dict(normalize="tokens"), ValueError, "normalize must be one of .*got 'tokens'"),
        (dict(remainder="drop"), ValueError, "remainder must be one of .*got 'drop'"),
        (dict(remainder="mask"), ValueError, "needs normalize='weights' or 'sum'"),
        (
            dict(has_aux=True, aux_reduction="max"),
            ValueError,
            "aux_reduction must be one of .* got 'max'",
        ),
        (dict(has_aux=True, aux_reduction={"a": "median"}), ValueError, "'median'"),
        (dict(policy=16), TypeError, "policy must be"),
        (dict(policy="O7"), ValueError, "got 'O7'"),
    ],
)
def test_bad_arguments_are_refused_when_built(options, error, message):
    with pytest.raises(error, match=message):
        ampx.value_and_grad(mean_loss, **options)


@pytest.mark.parametrize(
    "loss_fn, options, message",
    [
        (lambda w, x: w * x, {}, r"the loss must be a scalar, got shape \(4,\)"),
        (lambda w, x: jnp.sum(x).astype(int), {}, "the loss must be floating, got int32"),
        (lambda w, x: (jnp.sum(w), 1), {}, "must be a scalar, got tuple: pass has_aux"),
        (lambda w, x: jnp.sum(w * x), dict(has_aux=True), r"\(value, aux\), got"),
        (lambda w, x: (jnp.sum(w * x), 1, 2), dict(has_aux=True), r"\(value, aux\), got"),
        (lambda w, x: jnp.sum(w * x), dict(normalize="weights"), "the pair .* got"),
        (lambda w, x: (jnp.sum(w), x), dict(normalize="weights"), "the weight must be a scalar"),
    ],
)
def test_wrong_results_are_explained(loss_fn, options, message):
    with pytest.raises(TypeError, match=message):
        ampx.value_and_grad(loss_fn, **options)(jnp.array(1.0), jnp.ones(4))


def test_wrong_results_of_nnx_and_stateful_losses_are_explained():
    model, batch = tiny()
    with pytest.raises(TypeError, match=r"\(value, aux\), got"):
        ampx.value_and_grad(lambda m, b: jnp.mean(m(b["inputs"])), has_aux=True)(model, batch)
    with pytest.raises(TypeError, match=r"\(value, new state\), got"):
        ampx.value_and_grad(lambda w, x, model_state: w)(
            jnp.array(1.0), jnp.ones(2), model_state={}
        )


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": jnp.ones(4), "n": jnp.array(3)}, r"\['n'\] is a scalar"),
        ({"x": jnp.ones(4), "y": jnp.ones(6)}, "must share one leading axis.*4.*6"),
        ({}, "no leaves"),
    ],
)
def test_batches_that_cannot_be_split(batch, message):
    grads_of = ampx.value_and_grad(lambda w, b: w, num_microbatches=2)
    with pytest.raises(ValueError, match=message):
        grads_of(jnp.array(1.0), batch)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(loss_scale=jnp.ones(2)), r"must be a scalar, got shape \(2,\)"),
        (dict(model_state={"a": jnp.ones(1)}), "brings its own state"),
    ],
)
def test_bad_call_arguments(kwargs, message):
    model, batch = tiny()
    grads_of = ampx.value_and_grad(lambda m, b: jnp.mean(m(b["inputs"])))
    with pytest.raises(ValueError, match=message):
        grads_of(model, batch, **kwargs)


def test_nnx_with_sparse_rows_is_refused():
    grads_of = ampx.value_and_grad(lambda m, b: 0.0, sparse_rows={"kernel": lambda b: b})
    with pytest.raises(ValueError, match="not an nnx module"):
        grads_of(*tiny())


def test_a_batch_in_parts_is_refused():
    grads_of = ampx.value_and_grad(lambda w, x, y: jnp.mean((w * x - y) ** 2))
    with pytest.raises(TypeError, match=r"got 3 arguments .* as one tree, such as \(x, y\)"):
        grads_of(jnp.ones(2), jnp.ones(2), jnp.ones(2))
