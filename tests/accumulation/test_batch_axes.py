"""Batches of which some leaves are split into micro-batches, and some go whole to each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
OTHER = {
    "w": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32),
    "scale": np.float32(2),
}
BATCH = {"images": ROWS, "critic": OTHER}
AXES = {"images": 0, "critic": None}


def loss_fn(w, batch, **mask):
    """Of one network, through another one that stands still."""
    scores = (batch["images"] * w) @ batch["critic"]["w"] * batch["critic"]["scale"]
    each = jnp.sum(scores**2, axis=1)
    return jnp.sum(jnp.where(mask["mask"], each, 0)) if mask else jnp.mean(each)


def expected(w, rows=ROWS):
    """Loss and gradient of the whole batch, written out in numpy."""
    critic = OTHER["w"] @ OTHER["w"].T * OTHER["scale"] ** 2
    loss = np.mean(np.einsum("bi,ij,bj->b", rows * w, critic, rows * w))
    return loss, 2 * np.mean((rows * w) @ critic * rows, axis=0)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    "axes", [AXES, {"images": 0, "critic": {"w": None, "scale": None}}], ids=["prefix", "tree"]
)
def test_whole_leaves_are_seen_by_every_micro_batch(axes, num_microbatches):
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=num_microbatches, batch_axes=axes)
    w = np.array([1.0, -0.5, 2.0], np.float32)
    result = jax.jit(grads_of)(w, BATCH)
    loss, grads = expected(w)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(result.grads, grads, rtol=1e-5)


def test_only_rows_are_padded():
    grads_of = ampx.value_and_grad(
        loss_fn, num_microbatches=5, batch_axes=AXES, remainder="mask", normalize="sum"
    )
    w = np.ones(3, np.float32)
    np.testing.assert_allclose(grads_of(w, BATCH).loss, 12 * expected(w)[0], rtol=1e-5)


def test_train_step_hands_it_on():
    step = ampx.train_step(loss_fn, optax.sgd(0.25), num_microbatches=3, batch_axes=AXES)
    w = np.full(3, 0.5, np.float32)
    state, report = jax.jit(step)(step.init(w), BATCH)
    loss, grads = expected(w)
    np.testing.assert_allclose(report.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(state.params, w - 0.25 * grads, rtol=1e-5)


def test_a_whole_leaf_as_long_as_the_batch_is_not_split():
    def loss_fn(w, batch):
        return w * jnp.sum(batch["table"]) * jnp.mean(batch["x"]), batch["x"]

    batch = {"x": np.arange(4.0, dtype=np.float32), "table": np.ones(4, np.float32)}
    axes = {"x": 0, "table": None}
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=2, batch_axes=axes, has_aux=True)
    result = grads_of(jnp.float32(1), batch)
    assert result.loss == 6
    np.testing.assert_array_equal(result.aux, batch["x"])


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        (1, ValueError, "batch_axes must be 0, None or a tree of these, got 1: .*moveaxis"),
        ({"images": -1}, ValueError, "got -1"),
        ("0", TypeError, "batch_axes must be an int"),
        (True, TypeError, "batch_axes must be an int"),
        ({"images": 0}, ValueError, "does not fit the batch"),
        ({"images": [0, None], "critic": None}, ValueError, "does not fit the batch"),
        (None, ValueError, "no leaves"),
    ],
)
def test_what_is_no_prefix_is_refused(axes, error, message):
    with pytest.raises(error, match=message):
        ampx.value_and_grad(loss_fn, num_microbatches=2, batch_axes=axes)(np.ones(3), BATCH)
