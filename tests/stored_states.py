"""States as they were saved in each format, which later versions of ampx must read.

`python tests/stored_states.py` writes `tests/states_format_N.json` for the format of today: for
each optimizer below its state after three updates, the second of which overflows, and after two
more.
A file of an earlier format is not written again.

Rates and gradients are powers of two, so all sums and products are exact, and a state that was
saved by another jax goes on bit for bit.
"""

import json
import pathlib
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx import fused
from ampx.training.state_formats import FORMAT
from ampx.trees import map_by_path

SGD = optax.sgd(0.5, momentum=0.5)
FUSED = fused.sgd(0.5, 0.5)
SCALE = partial(ampx.dynamic_loss_scale, init_scale=8.0, growth_interval=2)
SCHEDULE = ampx.precision_schedule("fast|step|0.5", total_steps=4)
TRANSFORMATIONS = {
    "loss_scale": SCALE(SGD),
    "adaptive_interval": SCALE(SGD, growth_interval=(1, 2)),
    "loss_scales": SCALE({"a": SGD, "b": optax.sgd(0.5)}),
    "multi_steps": ampx.multi_steps(SCALE(SGD), 2),
    "master_weights": SCALE(ampx.master_weights(SGD)),
    "split_masters": SCALE(fused.split_masters(FUSED)),
    "stochastic_rounding": SCALE(fused.stochastic_rounding(FUSED)),
    "follow_schedule": ampx.follow_schedule(SCALE(SGD), SCHEDULE),
}
PARAMS = {"a": {"w": np.array([1, 2, -4], np.float32)}, "b": {"w": np.array(0.5, np.float32)}}
GRADIENTS = (1.0, np.inf, 0.5, 2.0, -1.0)


def file_of(number):
    return pathlib.Path(__file__).parent / f"states_format_{number}.json"


def loss_fn(params, batch, key, model_state):
    return jnp.sum(params["a"]["w"]) * batch.mean(), {"seen": model_state["seen"] + 1}


STEP = ampx.train_step(loss_fn, SGD, loss_scale=SCALE, max_grad_norm=np.inf)
CASES = (*TRANSFORMATIONS, "train_step")


def init(name):
    if name == "train_step":
        return STEP.init(PARAMS, key=jax.random.key(0), model_state={"seen": jnp.zeros((), int)})
    narrow = name in ("master_weights", "split_masters", "stochastic_rounding")
    params = ampx.cast_floating(PARAMS, "bf16" if narrow else "f32")
    return params, TRANSFORMATIONS[name].init(jax.tree.map(jnp.asarray, params))


def take_steps(name, state, gradients):
    """The state after some updates."""

    @jax.jit
    def take(state, factor):
        if name == "train_step":
            return STEP(state, jnp.full(2, factor, jnp.float32))[0]
        params, opt_state = state
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 8 * factor, jnp.float32), params)
        tx = TRANSFORMATIONS[name]
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    for factor in gradients:
        state = take(state, factor)
    return state


def as_arrays(state):
    """From path to the numbers of each leaf, which are few."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = (leaf.view(np.uint16) if leaf.dtype == jnp.bfloat16 else leaf).tolist()
    return found


def from_arrays(arrays, like):
    """Puts arrays into the structure of a state by their paths."""

    return map_by_path(like, lambda path, leaf: as_leaf(arrays[path], leaf))


def as_dicts(arrays, like):
    """The same as dicts of dicts: what libraries restore if they are told of no class."""
    leaves, tree = {}, {}
    map_by_path(like, leaves.setdefault)
    for path, numbers in arrays.items():
        *outer, name = path.split("/")
        inside = reduce(lambda node, part: node.setdefault(part, {}), outer, tree)
        inside[name] = as_leaf(numbers, leaves[path])
    return tree


def as_leaf(numbers, like):
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(numbers, np.uint32))
    if like.dtype == jnp.bfloat16:
        return jnp.asarray(np.array(numbers, np.uint16).view(jnp.bfloat16))
    return jnp.asarray(np.array(numbers, like.dtype))


def write():
    formats, states = {}, {}
    for name in CASES:
        before = take_steps(name, init(name), GRADIENTS[:3])
        after = take_steps(name, before, GRADIENTS[3:])
        formats[name] = ampx.state_format(before)
        states[name] = {"before": as_arrays(before), "after": as_arrays(after)}
    text = json.dumps({"formats": formats, "states": states}, separators=(",", ":"))
    file = file_of(FORMAT)
    file.write_text(text + "\n")
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    write()
