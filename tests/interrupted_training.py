"""A run that saves every step in the background, and goes on from the last step that was saved.

    python tests/interrupted_training.py FOLDER STEPS

Every third batch holds a NaN, so that skips, counters and the loss scale are part of what is saved.
Prints a digest of the last state. `training/test_checkpoint_faults.py` kills it in the middle.
"""

import hashlib
import sys

import conftest  # noqa: F401 (the compilation cache)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import ampx


def loss_fn(params, batch):
    hidden = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"])
    return jnp.mean(((hidden @ params["v"]).astype(jnp.float32) - 1) ** 2)


def make_step():
    return ampx.train_step(
        loss_fn,
        optax.adamw(0.01),
        policy=ampx.opt_level("O2", half_dtype="f16"),
        loss_scale=lambda tx: ampx.dynamic_loss_scale(tx, growth_interval=3),
        max_grad_norm=1.0,
    )


def make_params():
    generator = np.random.default_rng(0)
    # Large enough that a save is not over before somebody can interrupt it.
    shapes = {"w": (64, 512), "v": (512, 64)}
    return {name: jnp.asarray(generator.normal(size=shape), "f4") for name, shape in shapes.items()}


def make_batch(number):
    batch = np.random.default_rng(number).normal(size=(4, 64)).astype(np.float32)
    if number % 3 == 2:
        batch[1, number % 64] = np.nan
    return batch


def digest(state):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def main(folder, steps):
    step = make_step()
    state = step.init(make_params())
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        first = 0
        if (saved := manager.latest_step()) is not None:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(saved, args=ocp.args.StandardRestore(like))
            first = saved + 1
        jitted = jax.jit(step)
        for number in range(first, steps):
            state, _ = jitted(state, make_batch(number))
            manager.save(number, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    print(digest(state))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
