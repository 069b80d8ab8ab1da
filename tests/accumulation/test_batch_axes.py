"""Batches of which some leaves are split into micro-batches, and some go whole to each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

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


@jax.tree_util.register_pytree_node_class
class Named:
    """An array with a shape beside it, as with named axes; honest ones read them off the array."""

    def __init__(self, array, shape, is_honest=False):
        self.array, self.is_honest = array, is_honest
        self.shape = getattr(array, "shape", shape) if is_honest else shape

    dtype = property(lambda self: self.array.dtype)

    def tree_flatten(self):
        return (self.array,), (None if self.is_honest else self.shape, self.is_honest)

    @classmethod
    def tree_unflatten(cls, about, children):
        return cls(*children, *about)


class Strict(Named):
    """One that checks its sizes."""

    def __init__(self, array, shape, is_honest=False):
        if getattr(array, "shape", shape) != shape:
            raise RuntimeError(f"{array.shape} are not {shape}")
        super().__init__(array, shape, is_honest)


jax.tree_util.register_pytree_node_class(Strict)


@pytest.mark.parametrize("remainder", ["error", "mask"])
@pytest.mark.parametrize(
    "container",
    [
        lambda: sparse.BCOO.fromdense(np.eye(12, 3) + 1, nse=36),  # rows of its arrays: numbers
        lambda: Named(ROWS, {"batch": 12, "features": 3}),
        lambda: Strict(ROWS, ROWS.shape),
    ],
    ids=["BCOO", "Named", "Strict"],
)
def test_containers_with_a_shape_of_their_own_are_not_split(container, remainder):
    seen = []

    def loss(w, batch, **mask):
        seen.append(batch["x"].shape)
        return jnp.sum(w)

    batch = {"x": container()}
    grads_of = ampx.value_and_grad(loss, num_microbatches=4, remainder=remainder, normalize="sum")
    with pytest.raises(ValueError, match=r"\['x'\] is a (BCOO|Named|Strict), which keeps a shape"):
        grads_of(jnp.ones(3), batch)
    assert not seen
    whole = ampx.value_and_grad(loss, num_microbatches=4, batch_axes={"x": None, "y": 0})
    assert whole(jnp.ones(3), batch | {"y": ROWS}).loss == 3
    assert seen and all(shape == batch["x"].shape for shape in seen)
    assert ampx.value_and_grad(loss)(jnp.ones(3), batch).loss == 3


def test_containers_with_the_shape_of_their_arrays_are_split():
    def loss(w, batch):
        assert batch["x"].shape == (3, 3)
        return jnp.mean(batch["x"].array @ w)

    batch = {"x": Named(ROWS, None, is_honest=True)}
    split = ampx.value_and_grad(loss, num_microbatches=4)(jnp.ones(3), batch)
    np.testing.assert_allclose(split.loss, np.mean(ROWS @ np.ones(3)), rtol=1e-5)


def test_a_loss_inside_of_a_container_is_refused_by_name():
    with pytest.raises(TypeError, match="the loss must be an array, got Named, which holds one"):
        ampx.value_and_grad(lambda w, x: Named(jnp.mean(w * x), {}))(jnp.ones(3), ROWS)
