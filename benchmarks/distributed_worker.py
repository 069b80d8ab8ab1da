"""What each process of `distributed` runs: scenarios by name, with results that JSON can hold.

A single process has four virtual devices. Of two processes each has one device, and they talk by
gloo over loopback. The first process writes the results.
"""

import json
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding

import ampx
from benchmarks.distributed_counts import counts, waits
from benchmarks.distributed_steps import (
    AXIS,
    SPLIT,
    WHOLE,
    Step,
    applied,
    layer,
    loss_fn,
    make_batch,
    make_mesh,
    make_params,
    make_step,
    on_devices,
    placed,
    reduced_by_ampx,
    start,
    summed_leaf_by_leaf,
)
from benchmarks.measuring import Candidate, take_turns

# --- times ---------------------------------------------------------------------------------------


def timed(candidates: list[Candidate], rounds: int) -> dict[str, list[float]]:
    take_turns(candidates, rounds)
    return {candidate.name: candidate.seconds for candidate in candidates}


def small_leaves(rounds: int) -> dict[str, list[float]]:
    """Times the reduction alone: 200 leaves of 4 KB."""
    devices = jax.device_count()
    # f32[devices, 1024] each: every device has one row, as it would have its own gradient.
    leaves = placed([np.ones((devices, 1024), np.float32) for _ in range(200)], SPLIT)

    def reduction(tx: optax.GradientTransformation) -> Step:
        def step(leaves: Any, _: Any) -> Any:
            reduced, _ = tx.update([leaf[0] for leaf in leaves], tx.init(leaves))
            # f32[1, 1024] on each device again, so that the output can be the next input.
            return [leaf[None] for leaf in reduced]

        return on_devices(step, SPLIT)

    def mean(grads: Any, _: Any) -> Any:
        return [lax.psum(g, AXIS) / devices for g in grads]

    ways = {
        "psum": optax.stateless(mean),
        "all_reduce": ampx.all_reduce(AXIS),
        "bfloat16": ampx.all_reduce(AXIS, wire_dtype=jnp.bfloat16),
    }
    data = placed(np.zeros(devices, np.float32), SPLIT)
    return timed(
        [Candidate.compiled(name, reduction(tx), leaves, data) for name, tx in ways.items()], rounds
    )


LAYERS, WIDTH, ROWS = 16, 256, 32  # 1.05 million parameters, rows for each device


def _data() -> jax.Array:
    return placed(make_batch(WIDTH, ROWS * jax.device_count()), SPLIT)


def tail_overlap(rounds: int, scaled: bool) -> dict[str, Any]:
    """Times a step with AdamW, and a dynamic loss scale or none; counts its compiled copies."""
    params, adamw = make_params(LAYERS, WIDTH), optax.adamw(1e-3)
    ways = {
        "on": reduced_by_ampx(tail_overlap=True),
        "off": reduced_by_ampx(tail_overlap=False),
        "psum": summed_leaf_by_leaf(),
    }
    candidates = []
    for name, reduction in ways.items():
        tx = optax.chain(reduction, adamw)
        tx = ampx.dynamic_loss_scale(tx, axis_names=AXIS) if scaled else tx
        step = on_devices(make_step(applied(tx)))
        candidates.append(Candidate.compiled(name, step, start(tx, params), _data()))
    copies = [candidate.step.as_text().count(" copy(") for candidate in candidates]
    return {"seconds": timed(candidates, rounds), "copies": copies}


def in_backward(rounds: int, scan: bool) -> dict[str, list[float]]:
    """Times a reduction where the backward pass makes the gradients, and one at its end."""
    params: Any = make_params(LAYERS, WIDTH)
    if scan:
        params = np.stack(list(params.values()))

    def reducing(params: Any) -> Any:
        return ampx.reduce_in_backward(params, AXIS)

    def loss(params: Any, x: jax.Array, reading: Callable[[Any], Any] = lambda w: w) -> jax.Array:
        if not scan:
            return loss_fn(reading(params), x)
        result, _ = lax.scan(lambda x, w: (layer(x, reading(w)), None), x, params)
        return jnp.mean((result - jnp.roll(x, 1, axis=-1)) ** 2)

    adamw = optax.adamw(1e-3)
    at_end = optax.chain(reduced_by_ampx(), adamw)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state, _ = state

        # Summed over devices, the shares are the mean loss, and so are their gradients, which
        # `reduce_in_backward` sums where they are made.
        def share(params: Any) -> jax.Array:
            return loss(params, x, reducing) / lax.axis_size(AXIS)

        value, grads = jax.value_and_grad(share)(params)
        return (*applied(adamw)(grads, opt_state, params), lax.psum(value, AXIS))

    ways = {"end": (at_end, make_step(applied(at_end), loss)), "backward": (adamw, step)}
    candidates = [
        Candidate.compiled(name, on_devices(step), start(tx, params), _data())
        for name, (tx, step) in ways.items()
    ]
    return timed(candidates, rounds)


def _replicated(inner: optax.GradientTransformation, params: Any) -> tuple[Step, Any]:
    tx = optax.chain(reduced_by_ampx(), inner)
    return on_devices(make_step(applied(tx))), start(tx, params)


def _zero1(inner: optax.GradientTransformation, params: Any) -> tuple[Step, Any]:
    tx, mesh = ampx.zero1(inner, AXIS, op="sum"), make_mesh()
    specs = ampx.zero1_specs(tx, params, mesh, AXIS)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, loss = placed((params, np.float32(0)))
    # Made under jit with these shardings, the whole state is never on one device.
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    return on_devices(make_step(applied(tx)), (WHOLE, specs, WHOLE)), (params, state, loss)


def zero1(rounds: int) -> dict[str, Any]:
    """Time and bytes of AdamW; differences of parameters after 20 steps of several optimizers."""
    params = make_params(LAYERS, WIDTH)
    ways = {"replicated": _replicated, "zero1": _zero1}
    candidates, state_bytes = [], {}
    for name, make in ways.items():
        step, state = make(optax.adamw(1e-3), params)
        candidates.append(Candidate.compiled(name, step, state, _data()))
        state_bytes[name] = sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state[1])
        )
    result = {"seconds": timed(candidates, rounds), "bytes": state_bytes, "differences": {}}
    small = make_params(LAYERS, 64)
    inners = {
        "AdamW": optax.adamw(1e-3),
        "LAMB": optax.lamb(1e-3),
        "SGD with momentum": optax.sgd(0.1, momentum=0.9),
    }
    for name, inner in inners.items():
        ends = []
        for make in ways.values():
            step, state = make(inner, small)
            step = jax.jit(step)
            for seed in range(20):
                batch = make_batch(64, ROWS * jax.device_count(), seed)
                state = step(state, placed(batch, SPLIT))
            ends.append(jax.device_get(state[0]))  # replicated, then sharded
        result["differences"][name] = [
            max(float(np.abs(a[key] - b[key]).max()) for key in small)
            for a, b in (ends, (ends[0], small))  # between both; and since the start, for scale
        ]
    return result


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (counts, waits, small_leaves, tail_overlap, in_backward, zero1)
}

# --- start and end of a process ------------------------------------------------------------------


def main(setup: dict[str, Any]) -> None:
    # If the benchmark itself is killed, the alarm ends this process, so that none stays behind.
    signal.alarm(setup["alarm"])
    jax.config.update("jax_num_cpu_devices", setup["devices"])
    code = 1
    try:
        if setup["count"] > 1:
            jax.distributed.initialize(
                setup["address"],
                setup["count"],
                setup["rank"],
                heartbeat_timeout_seconds=10,
                shutdown_timeout_seconds=10,
            )
        results = [SCENARIOS[name](**arguments) for name, arguments in setup["scenarios"]]
        if setup["rank"] == 0:
            pathlib.Path(setup["directory"], "results.json").write_text(json.dumps(results))
        if setup["count"] > 1:
            jax.distributed.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # End at once: an interpreter that ends in the usual way waits for other processes of the
    # distributed program, which may be waiting for this one.
    os._exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
