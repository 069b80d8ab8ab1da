"""A small model for tests of whole training steps over a pipeline, and the same in one function.

Tests need an overflow in the gradient of one chosen layer and one chosen row, and nowhere else. For
this each layer has a vector `probe`, which is zero, and each row brings a `gain` for each layer:

    x = x + hidden + gain * probe

The gain changes no activation, since `probe` is zero. But it multiplies the gradient of `probe`,
and a gain of 3e38 makes that infinite. Rows carry their gains along from stage to stage beside
`x`; each layer uses the first column and rolls the rest forward.
"""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh

from ampx.pipelining import value_and_grad

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 8, 11, 16, 3


def make_params(layers=LAYERS):
    # By NumPy: to compile jax.random takes a quarter of the time of a process that tests start.
    generator = np.random.default_rng(7)

    def normal(*shape):
        return jnp.asarray(0.4 * generator.normal(size=shape), jnp.float32)

    return {
        "first": {"position": normal(LENGTH, WIDTH)},
        "stages": {
            "kernel": normal(layers, WIDTH, WIDTH),
            "bias": normal(layers, WIDTH),
            "probe": jnp.zeros((layers, WIDTH)),
        },
        "last": {"gain": jnp.ones(WIDTH)},
        "shared": {"table": normal(WORDS, WIDTH)},
    }


def make_batch(step, *, rows=ROWS, layers=LAYERS, words=WORDS, units=(), spoilt=None, gain=3e38):
    """Rows with 0 to 3 tokens each; the gradient of `spoilt`, a (row, layer, *unit), is `gain`."""
    generator = np.random.default_rng(step)
    lengths = generator.integers(0, LENGTH + 1, rows)
    batch = {
        "words": generator.integers(0, words, (rows, LENGTH)).astype(np.int32),
        "labels": generator.integers(0, words, (rows, LENGTH)).astype(np.int32),
        "mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
        "gains": np.zeros((rows, layers, *units), np.float32),
    }
    if spoilt is not None:
        batch["mask"][spoilt[0]] = 1
        batch["gains"][spoilt] = gain
    return batch


def first(params, shared, batch, key):
    x = shared["table"][batch["words"]] + params["position"]
    return x, batch["gains"].astype(x.dtype)


def stage(params, carried, key):
    x, gains = carried
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"])
    if key is not None:
        hidden *= jax.random.bernoulli(key, 0.8, hidden.shape).astype(hidden.dtype)
    probed = gains[:, :1, None] * params["probe"]
    return x + hidden + probed, jnp.roll(gains, -1, axis=1)


def last(params, shared, carried, batch, key):
    x = carried[0].astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    x = x.astype(params["gain"].dtype) * params["gain"]
    logits = (x @ shared["table"].T).astype(jnp.float32)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
    return -jnp.sum(scores[..., 0] * batch["mask"]), jnp.sum(batch["mask"])


def loss_fn(params, batch):
    """The same model without a pipeline: sum of losses, and sum of weights."""
    carried = first(params["first"], params["shared"], batch, None)
    for number in range(params["stages"]["bias"].shape[0]):
        layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["stages"])
        carried = stage(layer, carried, None)
    return last(params["last"], params["shared"], carried, batch, None)


def make_stage_mesh(data, stages):
    return make_mesh((data, stages), ("data", "stage"))


def make_grads_of(schedule, data=2, **options):
    options = {"mesh": make_stage_mesh(data, schedule.num_devices), **options}
    return value_and_grad(
        first=first,
        stage=stage,
        last=last,
        schedule=schedule,
        axis_name="stage",
        data_axes="data",
        **options,
    )


def placed(step, params, key=None):
    """A first state on the devices where the step will leave it, so that it compiles only once."""
    grads_of = step.grads_of
    state = step.init(jax.device_put(params, grads_of.shardings(params)), key=key)
    return committed(state, grads_of.mesh)


def committed(tree, mesh):
    """The same tree; leaves that are committed to no device, as new scalars are, go to all."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    return jax.tree.map(
        lambda leaf: leaf if leaf.committed else jax.device_put(leaf, everywhere), tree
    )


def assert_close(found, expected, rtol=1e-5):
    """Asserts that arrays agree up to `rtol` times the largest number of each array."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * np.max(np.abs(b), initial=0), err_msg=str(path)
        )
