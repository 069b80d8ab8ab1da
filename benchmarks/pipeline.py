"""How long do a pipeline's devices wait, what memory do they need, and what does lockstep cost?

Three tables:

1. Bubbles, by simulation: the share of time that devices idle, for each schedule.
2. Temporary memory by number of micro-batches, as the compiler reports it.
3. Time of real steps on virtual devices whose stages *sleep* instead of computing. A sleep takes
   the same time on any machine and needs no core, so four devices run in parallel on two cores.
   What is left to measure is the schedule and the program that executes it.

Run `make bench ARGS=pipeline`. In the third table a ratio of 1 means that the step takes no longer
than devices that never wait for a common tick.
"""

import functools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ampx import pipelining
from benchmarks.distributed import ROOT, plain_environment
from benchmarks.measuring import Candidate, print_table, take_turns

STAGES = 4
FORWARD, BACKWARD = 0.02, 0.04  # seconds
AUTO = AxisType.Auto


def pipeline(rounds: int) -> None:
    """Makes the tables, in a process of its own that has eight devices."""
    environment = plain_environment() | {"JAX_NUM_CPU_DEVICES": "8"}
    run = [sys.executable, "-m", "benchmarks.pipeline", str(rounds)]
    sys.stdout.flush()
    subprocess.run(run, env=environment, cwd=ROOT, check=True)


def _sleep(seconds: float, x: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    return x


def _sleeping(seconds: float, x: jax.Array) -> jax.Array:
    return jax.pure_callback(functools.partial(_sleep, seconds), x, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(share: float, weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight * _sleeping(share * FORWARD, x)


def _layer_forward(share: float, weight: jax.Array, x: jax.Array):
    return _layer(share, weight, x), (weight, x)


def _layer_backward(share: float, kept, cotangent: jax.Array):
    weight, x = kept
    # The cotangent is made to depend on x, and the step's result depends on the loss. Otherwise all
    # micro-batches would call with equal arguments, and XLA might sleep once for all of them.
    cotangent = _sleeping(share * BACKWARD, cotangent + 0 * x)
    return jnp.sum(cotangent * x), cotangent * weight


_layer.defvjp(_layer_forward, _layer_backward)


def _gradients(schedule: pipelining.Schedule, stage, last, **options):
    devices = jax.devices()[: schedule.num_devices]
    return pipelining.value_and_grad(
        first=lambda p, shared, batch, key: batch,
        stage=stage,
        last=last,
        schedule=schedule,
        axis_name="stage",
        mesh=jax.make_mesh((len(devices),), ("stage",), axis_types=(AUTO,), devices=devices),
        **options,
    )


def _asleep(schedule: pipelining.Schedule, layers: int) -> Candidate:
    grads_of = _gradients(
        schedule,
        lambda weight, x, key: _layer(STAGES / layers, weight, x),
        lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(1)),
        stash="residuals",
        check_vma=False,
    )

    @jax.jit
    def step(params, batch):
        result = grads_of(params, batch)
        return jax.tree.map(lambda p, g: p + 1e-3 * g / result.loss, params, result.grads)

    params = {"stages": jnp.ones(schedule.num_stages)}
    return Candidate(schedule.name, step, params, (jnp.ones((schedule.num_microbatches, 1)),))


def time_asleep(rounds: int) -> None:
    """Times steps beside what devices that do not wait for each other would take at best."""
    schedules = [
        (name, schedule, microbatches)
        for microbatches in (8, 16)
        for name, schedule in (
            ("GPipe", pipelining.gpipe(STAGES, microbatches)),
            ("1F1B", pipelining.one_f_one_b(STAGES, microbatches)),
            ("interleaved, 2 chunks", pipelining.interleaved(STAGES, microbatches)),
        )
    ]
    # One stage on one device, which never waits: m micro-batches of 3 units each (forward 1,
    # backward 2).
    alone = {m: _asleep(pipelining.one_f_one_b(1, m), STAGES) for m in (8, 16)}
    candidates = [_asleep(schedule, schedule.num_stages) for _, schedule, _ in schedules]
    take_turns([*alone.values(), *candidates], rounds)
    rows = []
    for (name, schedule, microbatches), candidate in zip(schedules, candidates, strict=True):
        # The simulated makespan is in the same units. Multiplied by what a unit took here, it is
        # a bound in this run's own time, whatever a sleep really takes.
        chunks = schedule.num_stages / STAGES
        at_best = schedule.simulate(forward=1 / chunks, backward=2 / chunks).makespan
        bound = at_best / (3 * microbatches) * np.array(alone[microbatches].seconds)
        ratios = np.array(candidate.seconds) / bound
        rows.append(
            [
                f"{name}, {microbatches} micro-batches",
                f"{1e3 * np.median(bound):.0f}",
                f"{candidate.median_ms:.0f}",
                f"{np.median(ratios):.3f}",
            ]
        )
    print_table(
        f"{STAGES} stages that sleep ({1e3 * FORWARD:.0f} ms forward, {1e3 * BACKWARD:.0f} ms "
        "backward)",
        ["schedule", "bound without lockstep, ms", "step, ms", "ratio"],
        rows,
    )


def memory() -> None:
    """Prints the temporary memory of a device by number of micro-batches; nothing is run."""
    width, rows_of_microbatch, layers = 256, 64, 8
    params = {name: jnp.zeros((layers, width, width)) for name in ("up", "down")}

    def stage(p, x, key):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def last(p, shared, x, batch, key):
        return jnp.sum(x**2), jnp.float32(len(x))

    counts = (8, 16, 32, 64)
    kinds = {
        "GPipe": (pipelining.gpipe, "residuals"),
        "GPipe, recomputing": (pipelining.gpipe, "inputs"),
        "1F1B": (pipelining.one_f_one_b, "residuals"),
        "1F1B, keeping products": (
            pipelining.one_f_one_b,
            jax.checkpoint_policies.dots_saveable,
        ),
        "1F1B, recomputing": (pipelining.one_f_one_b, "inputs"),
        "zero-bubble, recomputing": (pipelining.zero_bubble, "inputs"),
    }
    rows = []
    for name, (make, stash) in kinds.items():
        kib = []
        for count in counts:
            grads_of = _gradients(make(STAGES, count), stage, last, stash=stash)
            stored = jax.device_put({"stages": params}, grads_of.shardings({"stages": params}))
            # Rows grow with the number of micro-batches: what may not grow is what a stage keeps.
            batch = jax.ShapeDtypeStruct((count * rows_of_microbatch, width), jnp.float32)
            compiled = jax.jit(grads_of).lower(stored, batch).compile()
            kib.append(compiled.memory_analysis().temp_size_in_bytes / 1024)
        rows.append([name, *(f"{k:.0f}" for k in kib), f"{kib[-1] / kib[0]:.3f}"])
    print_table(
        f"Temporary KiB of a device: {STAGES} stages, each with {layers // STAGES} layers of "
        f"{2 * width**2 // 256} KiB, activations of {rows_of_microbatch * width // 256} KiB",
        ["schedule", *(f"M = {count}" for count in counts), "64 to 8"],
        rows,
    )


def bubbles() -> None:
    """Prints the share of time that devices idle, by simulation."""
    rows = []
    for stages, microbatches in ((4, 8), (4, 32), (8, 32)):
        for name in (
            *("gpipe", "1f1b", "interleaved", "zero-bubble", "interleaved-zero-bubble"),
            *("zero-bubble-v", "dualpipe-v"),
        ):
            schedule = pipelining.make_schedule(name, stages, microbatches)
            shares = [
                schedule.simulate(forward=1, backward=2, mode=mode).bubble_fraction
                for mode in ("async", "lockstep")
            ]
            rows.append([name, str(stages), str(microbatches), *(f"{s:.3f}" for s in shares)])
    print_table(
        "Bubbles: share of the time that a device idles (backward = 2 forwards)",
        ["schedule", "stages", "micro-batches", "without lockstep", "in lockstep"],
        rows,
    )


if __name__ == "__main__":
    bubbles()
    memory()
    time_asleep(max(3, int(sys.argv[1]) // 2))
