"""ampx.accumulation.sparse_rows: gradients of lookup tables stay (indices, rows), and equal the
dense ones."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh

import ampx

NUM_ROWS, WIDTH = 11, 3
SPARSE = {"embed/table": lambda batch: batch["ids"]}


def data():
    rng = np.random.default_rng(0)
    params = {
        "embed": {"table": jnp.asarray(rng.normal(size=(NUM_ROWS, WIDTH)), jnp.float32)},
        "out": jnp.asarray(rng.normal(size=(WIDTH,)), jnp.float32),
    }
    # Repeated within and between micro-batches; negative ones count from the end, as in NumPy.
    ids = jnp.array([[1, 1], [3, -1], [10, 0], [1, 3], [-11, 5], [5, 5], [2, -2], [1, 9]])
    return params, {"ids": ids, "y": jnp.asarray(rng.normal(size=(8,)), jnp.float32)}


def loss_of(embedded, params, batch):
    hidden = jnp.sum(jnp.tanh(embedded), axis=1)
    return jnp.mean(
        (hidden.astype(jnp.float32) @ params["out"].astype(jnp.float32) - batch["y"]) ** 2
    )


def dense_loss(params, batch):
    return loss_of(params["embed"]["table"][batch["ids"]], params, batch)


def sparse_loss(params, batch):
    """The rows are in the table's place."""
    return loss_of(params["embed"]["table"], params, batch)


@pytest.mark.slow_but("4-c=f16,o=f32-4096.0-0.002", "8-None-1.0-1e-05")
@pytest.mark.parametrize(
    "policy, loss_scale, rtol", [(None, 1.0, 1e-5), ("c=f16,o=f32", 2.0**12, 2e-3)]
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_equals_dense(num_microbatches, policy, loss_scale, rtol):
    params, batch = data()
    options = dict(num_microbatches=num_microbatches, policy=policy)
    dense = ampx.value_and_grad(dense_loss, **options)(params, batch, loss_scale=loss_scale)
    sparse = ampx.value_and_grad(sparse_loss, sparse_rows=SPARSE, **options)(
        params, batch, loss_scale=loss_scale
    )
    rows = sparse.grads["embed"]["table"]
    assert isinstance(rows, ampx.SparseRows)
    assert rows.rows.shape == (16, WIDTH) and rows.rows.dtype == jnp.float32
    assert rows.num_rows == NUM_ROWS and int(rows.indices.min()) >= 0
    assert sparse.loss == dense.loss
    # float16: the dense gradient adds repeated rows in half, the sparse one in float32.
    chex.assert_trees_all_close(
        ampx.densify(sparse.grads), dense.grads, rtol=rtol, atol=rtol * loss_scale
    )


def test_adds_up_in_float32_what_half_would_lose():
    table, ids = jnp.ones((2, 1), jnp.float16), jnp.zeros(4096, jnp.int32)
    grads = ampx.value_and_grad(
        lambda rows, ids: jnp.sum(rows.astype(jnp.float32)),
        num_microbatches=2,
        normalize="sum",
        sparse_rows={"": lambda ids: ids},
    )(table, ids).grads
    np.testing.assert_array_equal(ampx.densify(grads), [[4096.0], [0.0]])


def shapes_in(jaxpr):
    """Shapes of all results in a jaxpr and those inside it."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize(
    "loss_fn, sparse, found", [(sparse_loss, SPARSE, 0), (dense_loss, None, 1)]
)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_no_array_has_the_shape_of_the_table(num_microbatches, loss_fn, sparse, found):
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=num_microbatches, sparse_rows=sparse)
    jaxpr = jax.make_jaxpr(grads_of)(*data()).jaxpr
    assert ((NUM_ROWS, WIDTH) in set(shapes_in(jaxpr))) == bool(found)


@pytest.mark.slow_but("1-None", "4-dynamic")
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_train_step_equals_dense(num_microbatches, loss_scale):
    params, batch = data()
    options = dict(num_microbatches=num_microbatches, loss_scale=loss_scale, local_norm=True)
    dense = ampx.train_step(dense_loss, optax.adam(0.1), **options)
    sparse = ampx.train_step(sparse_loss, optax.adam(0.1), sparse_rows=SPARSE, **options)
    states = [dense.init(params), sparse.init(params)]
    for _ in range(3):
        states, reports = zip(
            *(jax.jit(s)(state, batch) for s, state in zip((dense, sparse), states, strict=True)),
            strict=True,
        )
        chex.assert_trees_all_close(*reports, rtol=1e-5)
    chex.assert_trees_all_close(states[0].params, states[1].params, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but("dynamic_loss_scale")
@pytest.mark.parametrize("wrap", [ampx.no_loss_scale, ampx.dynamic_loss_scale])
def test_densify_rows_in_a_chain(wrap):
    params, batch = data()
    tx = wrap(optax.chain(ampx.densify_rows(), optax.adam(0.1)))
    state, plain = tx.init(params), optax.adam(0.1)
    scale = ampx.current_loss_scale(state)
    result = ampx.value_and_grad(sparse_loss, num_microbatches=2, sparse_rows=SPARSE)(
        params, batch, loss_scale=scale
    )
    updates, state = jax.jit(tx.update)(result.grads, state, params)
    expected, _ = plain.update(jax.grad(dense_loss)(params, batch), plain.init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-6)
    assert not ampx.is_skipped(state)


def test_overflow_in_a_row_is_seen():
    params, batch = data()
    tx = ampx.dynamic_loss_scale(optax.chain(ampx.densify_rows(), optax.sgd(0.1)))
    grads = ampx.value_and_grad(sparse_loss, sparse_rows=SPARSE)(params, batch).grads
    rows = grads["embed"]["table"]
    grads["embed"]["table"] = rows._replace(rows=rows.rows.at[5, 1].set(jnp.inf))
    updates, state = tx.update(grads, tx.init(params), params)
    assert ampx.is_skipped(state) and not jnp.any(updates["embed"]["table"])


def test_indices_of_any_shape():
    rows = ampx.SparseRows.of(jnp.array([[0, -1], [2, 0]]), jnp.ones((2, 2, 4, 5)), num_rows=3)
    assert rows.indices.tolist() == [0, 2, 2, 0] and rows.rows.shape == (4, 4, 5)
    assert rows.to_dense()[:, 0, 0].tolist() == [2, 0, 2]
    assert jax.jit(lambda r: r)(rows).num_rows == 3


def test_densify_leaves_the_rest_alone():
    tree = {
        "a": jnp.ones(2),
        "b": None,
        "c": ampx.SparseRows.of(jnp.array([0]), jnp.ones((1, 2)), num_rows=2),
    }
    dense = ampx.densify(tree)
    assert dense["a"] is tree["a"] and dense["b"] is None
    assert dense["c"].tolist() == [[1, 1], [0, 0]]


def test_errors():
    with pytest.raises(ValueError, match=r"rows of shape \(3, 2\).*indices, \(2,\)"):
        ampx.SparseRows.of(jnp.arange(2), jnp.ones((3, 2)), num_rows=4)
    grads_of = ampx.value_and_grad(sparse_loss, sparse_rows={"embed/tabel": lambda b: b["ids"]})
    with pytest.raises(ValueError, match=r"\['embed/tabel'\], which are not among the parameters"):
        grads_of(*data())


def test_over_devices_a_plain_sum_is_right():
    params, batch = data()
    expected = jax.grad(dense_loss)(params, batch)
    grads_of = ampx.value_and_grad(sparse_loss, sparse_rows=SPARSE, axis_name="data")

    def per_device(params, batch):
        return jax.lax.psum(grads_of(params, batch).grads, "data")

    spec = jax.sharding.PartitionSpec
    grads = jax.jit(
        jax.shard_map(
            per_device,
            mesh=make_mesh((4,), ("data",)),
            in_specs=(spec(), spec("data")),
            out_specs=spec(),
        )
    )(params, batch)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5)


def test_index_out_of_range_is_not_silent():
    params, batch = data()
    ids = batch["ids"].at[0, 0].set(NUM_ROWS)
    result = ampx.value_and_grad(sparse_loss, sparse_rows=SPARSE)(params, batch | {"ids": ids})
    assert jnp.isnan(result.loss)


def test_small_index_types_hold_negative_indices():
    rows = ampx.SparseRows.of(jnp.array([-1], jnp.int8), jnp.ones((1, 2)), num_rows=1000)
    assert rows.indices.tolist() == [999]
