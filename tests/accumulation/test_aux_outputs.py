"""ampx.accumulation.normalization: what becomes of the auxiliary outputs of k micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax.sharding import PartitionSpec as P

import ampx

X = jnp.arange(8.0)
WEIGHTS = jnp.array([5.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 3.0])


def aux_of(aux_fn, reduction, num_microbatches=4, normalize="mean"):
    def loss_fn(w, batch):
        value = jnp.sum(w * batch["x"])
        if normalize == "weights":
            value = value, jnp.sum(batch["w"])
        return value, aux_fn(batch)

    grads_of = ampx.value_and_grad(
        loss_fn,
        num_microbatches=num_microbatches,
        normalize=normalize,
        has_aux=True,
        aux_reduction=reduction,
    )
    return grads_of(jnp.array(1.0), {"x": X, "w": WEIGHTS}).aux


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "reduction, aux_fn, expected",
    [
        ("mean", lambda b: jnp.mean(b["x"]), jnp.mean(X)),
        ("sum", lambda b: jnp.sum(b["x"]), jnp.sum(X)),
        ("sum", lambda b: jnp.sum(b["x"] > 3), 4),
        ("concat", lambda b: 2 * b["x"], 2 * X),
        ("concat", lambda b: jnp.outer(b["x"], jnp.ones(3)), np.outer(X, np.ones(3))),
    ],
)
def test_any_number_of_microbatches_gives_the_same(reduction, aux_fn, expected, num_microbatches):
    np.testing.assert_array_equal(aux_of(aux_fn, reduction, num_microbatches), expected)


@pytest.mark.parametrize(
    "reduction, expected", [("stack", [[0, 4], [1, 5], [2, 6], [3, 7]]), ("last", [3, 7])]
)
def test_stack_and_last(reduction, expected):
    assert aux_of(lambda b: b["x"], reduction).tolist() == expected


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_mean_is_weighted_as_the_loss_is(num_microbatches):
    """Rows 2 and 6, the third of four micro-batches, have no weight: their 0/0 does not count."""
    aux = aux_of(
        lambda b: jnp.sum(b["x"] * b["w"]) / jnp.sum(b["w"]), "mean", num_microbatches, "weights"
    )
    np.testing.assert_allclose(aux, np.average(X, weights=WEIGHTS), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_means_are_float32(dtype):
    aux = aux_of(lambda b: b["x"][0].astype(dtype), "mean", num_microbatches=8)
    assert aux == jnp.mean(X) and aux.dtype == jnp.float32


def test_rules_are_a_tree_prefix():
    aux = aux_of(
        lambda b: {"rows": (b["x"], -b["x"]), "n": b["x"].size, "loss": jnp.mean(b["x"])},
        {"rows": "concat", "n": "sum", "loss": "mean"},
    )
    np.testing.assert_array_equal(aux["rows"], (X, -X))
    assert (aux["n"], aux["loss"]) == (8, 3.5)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    "reduction, aux_fn, message",
    [
        (
            "mean",
            lambda b: b["x"].size,
            "needs floating leaves, got int32: give 'sum' or 'stack'",
        ),
        ("concat", lambda b: jnp.sum(b["x"]), "needs leaves with a leading batch axis"),
    ],
)
def test_rules_that_do_not_fit(reduction, aux_fn, message, num_microbatches):
    with pytest.raises(TypeError, match=message):
        aux_of(aux_fn, reduction, num_microbatches)


def test_integers_are_summed_as_integers():
    aux = aux_of(lambda b: (b["x"] > 3).sum(dtype=jnp.int8), "sum")
    assert (aux, aux.dtype) == (4, jnp.int32)


def test_no_auxiliary_output():
    result = ampx.value_and_grad(lambda w, x: jnp.sum(w * x), num_microbatches=2)(jnp.array(1.0), X)
    assert result.aux is None and jax.tree.leaves(result.aux) == []


@pytest.mark.parametrize(
    "values, total",
    [
        (jnp.ones(4, bool), jnp.int32(4)),
        (jnp.full(4, 100, jnp.uint8), jnp.int32(400)),
        (jnp.full(4, 256, jnp.bfloat16), jnp.float32(1024)),
        (jnp.array([256, 1, 1, 1], jnp.bfloat16), jnp.float32(259)),
    ],
)
def test_sums_do_not_wrap_or_round(values, total):
    def loss_fn(w, rows):
        return w, rows[0]

    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=4, has_aux=True, aux_reduction="sum")
    aux = grads_of(jnp.ones(()), values).aux
    assert aux.dtype == total.dtype and aux == total


def test_concat_leaves_out_the_repeats():
    def loss_fn(w, rows, *, mask):
        mask = mask.astype(jnp.float32)
        return (jnp.sum(w * mask), jnp.sum(mask)), rows

    grads_of = ampx.value_and_grad(
        loss_fn,
        num_microbatches=4,
        normalize="weights",
        remainder="mask",
        has_aux=True,
        aux_reduction="concat",
    )
    assert grads_of(jnp.ones(()), jnp.arange(5)).aux.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_by_default_rows_are_joined_and_all_else_is_averaged(num_microbatches):
    """(8, 10) for 32 rows would be a mean over unrelated rows. The reference is the whole batch."""
    x = np.random.default_rng(0).normal(size=(32, 10)).astype(np.float32)

    def loss_fn(w, rows):
        aux = {
            "logits": w * rows,
            "predictions": jnp.argmax(rows, axis=1),
            "right": rows[:, 0] > 0,
            "half": rows[:, 1].astype(jnp.bfloat16),
            "accuracy": jnp.mean(rows[:, 0] > 0, dtype=jnp.float32),
            "by class": jnp.mean(rows, axis=0),  # f32[10], no rows
        }
        return jnp.mean(rows) * w, aux

    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=num_microbatches, has_aux=True)
    aux = jax.jit(grads_of)(jnp.float32(2), x).aux
    for name, value in {
        "logits": 2 * x,
        "predictions": np.argmax(x, axis=1),
        "right": x[:, 0] > 0,
        "half": x[:, 1].astype(jnp.bfloat16),
    }.items():
        np.testing.assert_array_equal(aux[name], value)
        assert aux[name].dtype == value.dtype or name == "predictions"
    np.testing.assert_allclose(aux["accuracy"], np.mean(x[:, 0] > 0))
    np.testing.assert_allclose(aux["by class"], np.mean(x, axis=0), atol=1e-6)


def test_what_looks_like_rows_can_be_averaged():
    rules = {"as rows": "auto", "as numbers": "mean"}
    aux = aux_of(lambda b: {"as rows": b["x"], "as numbers": b["x"]}, rules, num_microbatches=2)
    np.testing.assert_array_equal(aux["as rows"], X)
    np.testing.assert_array_equal(aux["as numbers"], [0.5, 2.5, 4.5, 6.5])


def test_joined_rows_leave_out_the_repeats():
    def loss_fn(w, rows, *, mask):
        return w * jnp.sum(jnp.where(mask, rows, 0)), {"rows": rows, "two": jnp.ones(2)}

    grads_of = ampx.value_and_grad(
        loss_fn, num_microbatches=4, normalize="sum", remainder="mask", has_aux=True
    )
    assert grads_of(jnp.ones(()), jnp.arange(10.0)).aux["rows"].tolist() == list(range(10))


def test_devices_keep_their_own_rows():
    mesh = make_mesh((2,), ("data",))

    def loss_fn(w, rows):
        return jnp.mean(w * rows), {"rows": rows, "mean": jnp.mean(rows)}

    step = ampx.train_step(
        loss_fn, optax.sgd(0.1), num_microbatches=2, has_aux=True, axis_name="data"
    )

    def local(state, batch):
        state, report = step(state, batch)
        return state, report.loss, report.aux

    specs = (P(), P(), {"rows": P("data"), "mean": P()})
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=specs)
    _, _, aux = jax.jit(sharded)(step.init(jnp.ones(())), X)
    np.testing.assert_array_equal(aux["rows"], X)
    assert aux["mean"] == 3.5
