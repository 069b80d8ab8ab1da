"""A small data-parallel model and its step, with the reduction and the optimizer left open.

The model is a residual stack of square layers, f32[width, width] each. `make_step` takes from the
caller what turns local gradients into new parameters, so that designs differ in that alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

AXIS = "data"
WHOLE, SPLIT = P(), P(AXIS)
Step = Callable[[Any, Any], Any]
Apply = Callable[[Any, Any, Any], tuple[Any, Any]]

# --- the mesh and what lies on it ----------------------------------------------------------------


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def placed(tree: Any, spec: P = WHOLE) -> Any:
    """The same values on every process, as global arrays over all devices."""
    sharding = NamedSharding(make_mesh(), spec)

    def place(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        # Each process hands out the parts that lie on its own devices; `device_put` could not place
        # an array on devices of other processes without comparing the values of all.
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, tree)


def on_devices(step: Step, state_specs: Any = WHOLE) -> Step:
    specs = (state_specs, SPLIT)
    return jax.shard_map(step, mesh=make_mesh(), in_specs=specs, out_specs=state_specs)


# --- model and steps -----------------------------------------------------------------------------


def make_params(layers: int, width: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    scale = 0.5 * width**-0.5
    return {
        f"layer_{i:02}": generator.normal(scale=scale, size=(width, width)).astype(np.float32)
        for i in range(layers)
    }


def make_batch(width: int, rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w)


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    target = jnp.roll(x, 1, axis=-1)
    for name in sorted(params):
        x = layer(x, params[name])
    return jnp.mean((x - target) ** 2)


def applied(tx: optax.GradientTransformation) -> Apply:
    """An `Apply` from an optax chain: local gradients in, new parameters and state out."""

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return apply


def make_step(apply: Apply, loss: Callable[..., Any] = loss_fn, num_microbatches: int = 1) -> Step:
    grads_of = ampx.value_and_grad(loss, num_microbatches=num_microbatches, axis_name=AXIS)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state[:2]
        result = grads_of(params, x, loss_scale=ampx.current_loss_scale(opt_state))
        return (*apply(result.grads, opt_state, params), result.loss)

    return step


def start(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any, Any]:
    """Parameters, optimizer state and a loss: the state that a step takes and returns."""
    return placed((params, tx.init(params), np.float32(0)))


def summed_leaf_by_leaf() -> optax.GradientTransformation:
    """One `psum` for each gradient, as one writes it without a library."""
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g: lax.psum(g, AXIS), grads))


def reduced_by_ampx(**options: Any) -> optax.GradientTransformation:
    return ampx.all_reduce(AXIS, op="sum", **options)
