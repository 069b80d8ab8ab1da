"""What each process of a distributed test computes; `processes.py` starts the processes.

A scenario is a function that all processes call at the same time. It returns a dict of arrays.
Importing this file starts nothing, so tests take the model and the data from here too.
"""

import os
import pathlib
import signal
import sys
import time
import traceback
import unittest.mock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pipeline_steps
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import pipelining

ROWS, WIDTH = 16, 8

# --- the model, the data and the step, the same in one process and in many -----------------------


class State(NamedTuple):
    params: Any
    opt_state: Any


def make_params():
    # By NumPy: to compile jax.random takes a quarter of the time of a process that tests start.
    generator = np.random.default_rng(1000)
    shapes = {"first": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "second": (2 * WIDTH, 1)}
    return {
        name: jnp.asarray(generator.normal(scale=0.3, size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


def make_batch(step, *, bad=False):
    """The rows of one step; if `bad`, the last row is infinite, which the last process holds."""
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    if bad:
        x[-1] = np.inf
    return {"x": x, "y": y}


def make_step(how, axis=None):
    """A step `(state, batch) -> (state, loss)`, and a function from params to its first state.

    With an axis, `how` says who sums the gradients: `"train_step"` does it itself, and in
    `"all_reduce"` the optimizer does, in `"hosts"` first inside each of two hosts.
    """
    if how == "train_step":
        train_step = ampx.train_step(
            loss_fn,
            optax.adamw(1e-2),
            loss_scale="dynamic",
            num_microbatches=2,
            axis_name=axis,
        )

        def step(state, batch):
            state, report = train_step(state, batch)
            return state, report.loss

        return step, train_step.init

    reduction = [ampx.all_reduce(axis, op="sum", hierarchical=how == "hosts")] if axis else []
    tx = ampx.dynamic_loss_scale(optax.chain(*reduction, optax.adamw(1e-2)), axis_names=axis or ())
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=2, axis_name=axis)

    def step(state, batch):
        scale = ampx.current_loss_scale(state.opt_state)
        result = grads_of(state.params, batch, loss_scale=scale)
        updates, opt_state = tx.update(result.grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), result.loss

    return step, lambda params: State(params, tx.init(params))


# --- arrays of all processes ----------------------------------------------------------------------


def make_mesh(how):
    """All processes along one axis; or two hosts, the first half of the processes on the first."""
    count = jax.device_count()
    sizes = {"host": 2, "device": count // 2} if how == "hosts" else {"data": count}
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def on_all(mesh, tree):
    """The same values on every process, as global arrays."""
    return _global(tree, NamedSharding(mesh, P()))


def own_rows(mesh, batch):
    """A global batch of which this process provides its own rows only."""
    rows, rank = ROWS // jax.process_count(), jax.process_index()
    own = jax.tree.map(lambda x: x[rank * rows : (rank + 1) * rows], batch)
    return _global(own, NamedSharding(mesh, P(mesh.axis_names)))


def _global(tree, sharding):
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree
    )


def local(tree):
    """This process's copy of replicated arrays, by path: `"before/params/bias"`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x.addressable_data(0))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


class Training:
    """A model that all processes train; in the steps of `bad` the last row is infinite."""

    def __init__(self, how, bad=()):
        self.mesh, self.bad, self.losses = make_mesh(how), bad, []
        axes = self.mesh.axis_names
        step, init = make_step(how, axes)
        self.state = on_all(self.mesh, init(make_params()))
        sharded = jax.shard_map(step, mesh=self.mesh, in_specs=(P(), P(axes)), out_specs=P())
        self.step = jax.jit(sharded)

    def run(self, first, last):
        for number in range(first, last):
            batch = own_rows(self.mesh, make_batch(number, bad=number in self.bad))
            self.state, loss = self.step(self.state, batch)
            self.losses.append(float(loss))


# --- scenarios ------------------------------------------------------------------------------------


def train(hows, steps):
    """Trains by each way; the losses, and the whole state at the end."""
    result = {"devices": [jax.device_count(), jax.local_device_count()]}
    for how in hows:
        training = Training(how)
        training.run(0, steps)
        result[f"{how}/losses"] = training.losses
        result |= local({how: training.state})
    return result


def overflow(hows, bad_step):
    """The whole state before the bad step, after it, and after the next one."""
    states = {}
    for how in hows:
        training = Training(how, bad=[bad_step])
        training.run(0, bad_step)
        states[how] = {"before": training.state}
        for number, name in ((bad_step, "after"), (bad_step + 1, "next")):
            training.run(number, number + 1)
            states[how][name] = training.state
    return local(states)


def end_in_the_middle(how, victim, by):
    """Ends or stops one process after two steps; the others train on until they are ended too."""
    training = Training(how)
    training.run(0, 2)
    if jax.process_index() == victim:
        if by == "exception":
            raise ValueError("the rows of this process cannot be read")
        os.kill(os.getpid(), getattr(signal, by))
    training.run(2, 10**9)
    return {}


def sleep():
    """Never ends by itself, so that the timeout has to end it."""
    time.sleep(10**6)
    return {}


def save_and_die(how, directory, every, last, victims):
    """Saves the state after every `every` steps; when `last` are done, kills these processes."""
    training = Training(how, bad=[1])
    with ocp.StandardCheckpointer() as checkpointer:
        for number in range(last):
            training.run(number, number + 1)
            if (number + 1) % every == 0:
                checkpointer.save(pathlib.Path(directory) / str(number + 1), training.state)
                checkpointer.wait_until_finished()
    if jax.process_index() in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    training.run(last, 10**9)


def resume(how, directory, steps):
    """The last state of a run from the newest checkpoint, and of one that was never killed."""
    saved = max(int(path.name) for path in pathlib.Path(directory).iterdir())
    resumed, uninterrupted = Training(how, bad=[1]), Training(how, bad=[1])
    with ocp.StandardCheckpointer() as checkpointer:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, resumed.state)
        resumed.state = checkpointer.restore(pathlib.Path(directory) / str(saved), like)
    resumed.run(saved, steps)
    uninterrupted.run(0, steps)
    states = {"resumed": resumed.state, "uninterrupted": uninterrupted.state}
    return {"saved": saved, **local(states)}


def stall(seconds):
    """Measures when each part of a step is done on this process, while the last process is late.

    The last process is late with one of four buckets only, the last one: it sleeps between taking
    the verdict (whether all gradients are finite) and reducing that bucket. There are two designs:
    the verdict is taken "before" the reduction, from local gradients, or "after" it.
    """
    reduction = ampx.all_reduce("data", op="sum", bucket_bytes=1, tail_overlap=True)
    adamw = optax.adamw(1e-2)
    designs = {
        "before": ampx.dynamic_loss_scale(optax.chain(reduction, adamw), axis_names="data"),
        "after": optax.chain(reduction, ampx.dynamic_loss_scale(adamw, axis_names="data")),
    }
    result = {}
    for name, tx in designs.items():
        for event, at in stalled_step(tx, seconds).items():
            result[f"{name}/{event}"] = at
    return result


def stalled_step(tx, seconds):
    """Seconds from the start of a step to each event: verdict, bucket reduced, bucket updated."""
    size, buckets = 100, "dcba"  # in the order of their reduction
    late = jax.process_index() == jax.process_count() - 1
    times = {}

    def note(event):
        times[event] = time.monotonic()

    def mark(event, value):
        jax.debug.callback(lambda _: note(event), value)

    def delayed(value):
        time.sleep(seconds if late else 0)
        return value

    psum, waiting = jax.lax.psum, list(buckets)

    def watched_psum(value, *args, **kwargs):
        if jnp.size(value) < size:
            return psum(value, *args, **kwargs)
        bucket = waiting.pop(0)
        if not waiting:
            value = jax.pure_callback(delayed, jax.typeof(value), value)
        result = psum(value, *args, **kwargs)
        mark(f"reduced {bucket}", result[0])
        return result

    def step(params, opt_state, rows):
        grads = optax.tree.scale(ampx.current_loss_scale(opt_state) * rows[0], params)
        updates, opt_state = tx.update(grads, opt_state, params)
        mark("verdict", ampx.is_skipped(opt_state))
        for bucket in buckets:
            mark(f"updated {bucket}", updates[bucket][0])
        return optax.apply_updates(params, updates), opt_state

    mesh = make_mesh("all_reduce")
    params = {bucket: jnp.ones(size) for bucket in buckets}
    arguments = on_all(mesh, (params, tx.init(params)))
    rows = own_rows(mesh, np.ones(ROWS, np.float32))
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    # No argument of all_reduce could delay one bucket, or tell when it has arrived.
    with unittest.mock.patch.object(jax.lax, "psum", watched_psum):
        step = jax.jit(step).lower(*arguments, rows).compile()
    for _ in range(2):  # the first call also connects the processes
        start = time.monotonic()
        arguments = jax.block_until_ready(step(*arguments, rows))
        jax.effects_barrier()
    return {event: at - start for event, at in times.items()}


# --- a pipeline whose stages are in different processes -------------------------------------------

PIPELINES = {"1f1b": pipelining.one_f_one_b, "interleaved": pipelining.interleaved}
PIPELINE_BATCHES = 3


def make_pipeline_step(name, data, stages):
    return ampx.train_step(
        pipeline_steps.make_grads_of(PIPELINES[name](stages, 4), data),
        optax.adamw(1e-2),
        loss_scale="dynamic",
        max_grad_norm=1.0,
    )


def make_pipeline_batch(step):
    """A batch; the second one is infinite in the last layer's gradient, by its last row alone."""
    return pipeline_steps.make_batch(step, spoilt=(15, 3) if step == 1 else None)


def pipeline(name, data, stages):
    """Trains a pipeline; losses, skips, and this process's layers and the index of the first."""
    step = make_pipeline_step(name, data, stages)
    mesh = step.grads_of.mesh
    rows = NamedSharding(mesh, P("data"))
    # `device_put` would compile a comparison of the values on all processes first.
    state = jax.tree.map(
        lambda leaf, place: jax.make_array_from_callback(
            leaf.shape, place, lambda index: np.asarray(leaf)[index]
        ),
        *pipeline_state(step),
    )
    run, losses, skips = jax.jit(step), [], []
    for number in range(PIPELINE_BATCHES):
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, rows, lambda index: x[index]),
            make_pipeline_batch(number),
        )
        state, report = run(state, batch)
        losses.append(float(report.loss))
        skips.append(bool(report.overflow))
    starts = [leaf.addressable_shards[0].index for leaf in jax.tree.leaves(state.params["stages"])]
    return {
        "losses": losses,
        "skips": skips,
        "devices": [jax.device_count(), jax.local_device_count()],
        "first layer": [(index[0].start or 0) if index else 0 for index in starts],
        **local(state.params),
    }


def pipeline_state(step):
    """A first state, and where each of its arrays should lie."""
    state = step.init(pipeline_steps.make_params())
    everywhere = NamedSharding(step.grads_of.mesh, P())
    layers = NamedSharding(step.grads_of.mesh, P("stage"))

    def place(path, leaf):
        return layers if "['stages']" in jax.tree_util.keystr(path) else everywhere

    return state, jax.tree_util.tree_map_with_path(place, state)


# --- start and end of a process -------------------------------------------------------------------


def main(setup):
    """Runs one function in a process that `processes` has started, and ends the process."""
    signal.alarm(setup["alarm"])
    log = os.open(setup["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(setup["environment"])  # which XLA reads when it makes its devices
    jax.config.update("jax_num_cpu_devices", 1)
    code = 1
    try:
        jax.distributed.initialize(
            setup["address"],
            setup["count"],
            setup["rank"],
            heartbeat_timeout_seconds=setup["heartbeat"],
            shutdown_timeout_seconds=setup["heartbeat"],
        )
        result = globals()[setup["worker"]](**setup["args"])
        np.savez(pathlib.Path(setup["directory"]) / f"{setup['rank']}.npz", **result)
        # Waits for all processes: if the coordinator left early, the others would be ended.
        jax.distributed.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # End at once: an interpreter that ends in the usual way waits for other processes, which may
    # be waiting for this one.
    os._exit(code)
