"""How long do a pipeline's devices wait, what memory do they need, and what does lockstep cost?

Six tables:

1. Bubbles, by simulation: the share of time that devices idle, for each schedule, and what waiting
   for a common tick costs.
2. Trace and compile time of a step, beside the step of the same model on one device.
3. The same of the demo's step.
4. Time of those steps on a machine with fewer cores than devices: the work of all devices together.
5. Temporary memory by number of micro-batches, as the compiler reports it.
6. Time of real steps on virtual devices whose stages *sleep* instead of computing. A sleep takes
   the same time on any machine and needs no core, so four devices run in parallel on two cores.
   What is left to measure is the schedule and the program that executes it. With stages that
   sleep four times as long, what is the same for each tick counts a quarter.

Run `make bench ARGS=pipeline`. In the last table a ratio of 1 means that the step takes no longer
than devices that never wait for a common tick.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import ampx
from ampx import pipelining
from ampx.examples import language_model, text
from benchmarks import model
from benchmarks.distributed import ROOT, plain_environment
from benchmarks.measuring import (
    Candidate,
    measure_compilation,
    print_table,
    ratio,
    take_turns,
    trace_and_compile,
)

STAGES = 4
FORWARD = 0.02  # seconds that a stage sleeps in its forward; twice as long in its backward
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
def _layer(seconds: float, weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight * _sleeping(seconds, x)


def _layer_forward(seconds: float, weight: jax.Array, x: jax.Array):
    return _layer(seconds, weight, x), (weight, x)


def _layer_backward(seconds: float, kept, cotangent: jax.Array):
    weight, x = kept
    # The cotangent is made to depend on x, and the step's result depends on the loss. Otherwise all
    # micro-batches would call with equal arguments, and XLA might sleep once for all of them.
    cotangent = _sleeping(2 * seconds, cotangent + 0 * x)
    return jnp.sum(cotangent * x), cotangent * weight


_layer.defvjp(_layer_forward, _layer_backward)


def _gradients(schedule: pipelining.Schedule, stage, last, first=None, **options):
    devices = jax.devices()[: schedule.num_devices]
    return pipelining.value_and_grad(
        first=first or (lambda p, shared, batch, key: batch),
        stage=stage,
        last=last,
        schedule=schedule,
        axis_name="stage",
        mesh=jax.make_mesh((len(devices),), ("stage",), axis_types=(AUTO,), devices=devices),
        **options,
    )


def _asleep(schedule: pipelining.Schedule, layers: int, forward: float) -> Candidate:
    grads_of = _gradients(
        schedule,
        lambda weight, x, key: _layer(STAGES / layers * forward, weight, x),
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


def time_asleep(rounds: int, forward: float, counts: tuple[int, ...]) -> None:
    """Times steps beside what devices that do not wait for each other would take at best.

    Args:
      rounds: in which all schedules take turns.
      forward: seconds that a stage sleeps in its forward.
      counts: of micro-batches.
    """
    schedules = [
        (name, schedule, microbatches)
        for microbatches in counts
        for name, schedule in (
            ("GPipe", pipelining.gpipe(STAGES, microbatches)),
            ("1F1B", pipelining.one_f_one_b(STAGES, microbatches)),
            ("interleaved, 2 chunks", pipelining.interleaved(STAGES, microbatches)),
        )
    ]
    # One stage on one device, which never waits: m micro-batches of 3 units each (forward 1,
    # backward 2).
    alone = {m: _asleep(pipelining.one_f_one_b(1, m), STAGES, forward) for m in counts}
    candidates = [_asleep(schedule, schedule.num_stages, forward) for _, schedule, _ in schedules]
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
        f"{STAGES} stages that sleep ({1e3 * forward:.0f} ms forward, {2e3 * forward:.0f} ms "
        "backward)",
        ["schedule", "bound without lockstep, ms", "step, ms", "ratio"],
        rows,
    )


def _steps() -> tuple[dict[str, Callable[[], tuple[Any, Any]]], Any]:
    """Makers of steps `(state, batch) -> state` and their first states, by name; and a batch."""
    microbatches, layers = 8, 8
    whole = model.init_params(jax.random.key(0), layers)
    tx = optax.adamw(1e-3)

    def as_step(grads_of):
        def step(state, batch):
            params, opt_state = state
            result = grads_of(params, batch)
            updates, opt_state = tx.update(result.grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return step

    def last(p, shared, x, tokens, key):
        losses = model.token_losses(shared, x, tokens)
        return jnp.sum(losses), jnp.float32(losses.size)

    by_layer = [whole[f"layer_{n}"] for n in range(layers)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_layer)
    divided = {"shared": whole["embed"], "stages": stacked}

    def make_pipelined(name, stash):
        grads_of = _gradients(
            pipelining.make_schedule(name, STAGES, microbatches),
            lambda weights, x, key: model.apply_layer(weights, x),
            last,
            first=lambda p, shared, tokens, key: shared[tokens[:, :-1]],
            stash=stash,
        )
        params = jax.device_put(divided, grads_of.shardings(divided))
        return as_step(grads_of), (params, tx.init(params))

    def make_whole():
        grads_of = ampx.value_and_grad(model.loss_fn, num_microbatches=microbatches)
        return as_step(grads_of), (whole, tx.init(whole))

    makers = {"one device": make_whole}
    for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"):
        for stash in ("inputs", "residuals"):
            made = functools.partial(make_pipelined, name, stash)
            makers[f'{name}, `stash="{stash}"`'] = made
    return makers, model.tokens(2 * microbatches)


def compiling(rounds: int) -> None:
    """Prints how long steps take to trace and to compile, beside the step without a pipeline."""
    makers, batch = _steps()

    def measure(make):
        step, state = make()
        return trace_and_compile(step, state, batch, donate_argnums=0)

    measures = {name: functools.partial(measure, make) for name, make in makers.items()}
    measures["one device"]()  # what JAX loads at its first compilation is no candidate's
    seconds = measure_compilation(measures, rounds)
    rows = []
    for name, own in seconds.items():
        ratios = np.median(own / seconds["one device"], 0)
        rows.append([name, *(f"{s:.1f}" for s in np.median(own, 0)), *(f"{r:.2f}" for r in ratios)])
    print_table(
        f"Trace and compile of a step: 8 layers in {STAGES} stages, 8 micro-batches",
        ["step", "trace, CPU-s", "compile, CPU-s", "both, CPU-s"]
        + [f"{part}: ratio to one device" for part in ("trace", "compile", "both")],
        rows,
    )


def compiling_demo(rounds: int) -> None:
    """Prints how long the demo's pipelines compile, beside the demo on one device."""
    corpus = text.load_corpus()
    divided = dict(mesh=f"stage={STAGES}", microbatches=8)
    settings: dict[str, dict[str, Any]] = {
        "one device": {},
        "one device, accumulating": dict(microbatches=8),
    }
    for name in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        settings[name] = dict(schedule=name, **divided)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, own in settings.items():
            jax.clear_caches()
            config = language_model.Config(steps=1, layers=8, **own)
            seconds[name].append(language_model.train(config, corpus=corpus).compile_seconds)
    first = np.array(seconds["one device"])
    rows = [
        [name, f"{np.median(own):.1f}", f"{np.median(np.array(own) / first):.2f}"]
        for name, own in seconds.items()
    ]
    print_table(
        f"Trace and compile of the demo's step: 8 layers in {STAGES} stages, 8 micro-batches",
        ["step", "s", "ratio to one device"],
        rows,
    )


def time_work(rounds: int) -> None:
    """Times the same steps on fewer cores than devices: all that a pipeline does, one by one."""
    makers, batch = _steps()
    candidates = [Candidate.compiled(name, *make(), batch) for name, make in makers.items()]
    take_turns(candidates, rounds)
    rows = [
        [c.name, f"{c.median_ms:.0f}", ratio(c, candidates[0]), f"{c.temp_bytes / 2**20:.0f}"]
        for c in candidates
    ]
    print_table(
        f"Work of a step: 8 layers in {STAGES} stages, 8 micro-batches",
        ["step", "ms", "ratio to one device", "temporary MiB of a device"],
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
            alone, together = (
                schedule.simulate(forward=1, backward=2, mode=mode)
                for mode in ("async", "lockstep")
            )
            shares = [f"{run.bubble_fraction:.3f}" for run in (alone, together)]
            ratio = f"{together.makespan / alone.makespan:.3f}"
            rows.append([name, str(stages), str(microbatches), *shares, ratio])
    print_table(
        "Bubbles: share of the time that a device idles (backward = 2 forwards)",
        [
            "schedule",
            "stages",
            "micro-batches",
            "without lockstep",
            "in lockstep",
            "time in lockstep / without",
        ],
        rows,
    )


if __name__ == "__main__":
    bubbles()
    compiling(max(2, int(sys.argv[1]) // 4))
    compiling_demo(max(2, int(sys.argv[1]) // 4))
    time_work(max(3, int(sys.argv[1]) // 2))
    memory()
    time_asleep(max(3, int(sys.argv[1]) // 2), FORWARD, (8, 16))
    time_asleep(max(3, int(sys.argv[1]) // 4), 4 * FORWARD, (8,))
