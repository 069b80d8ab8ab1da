"""What does ampx cost beside plain optax, in time, memory and compilation?

Run `make bench` for all benchmarks, or `python -m benchmarks NAME ...` for some; `--help` lists
the names. Each prints Markdown tables, which docs/benchmarks.md keeps and explains. Here stand
the small benchmarks: a step with a loss scale, accumulation, and compile time. The large ones
have modules of their own.

How to read a table: all candidates run in one process and take turns, and a ratio is the median
over the rounds (see `measuring`). Compare ratios, not milliseconds: those drift with the machine.
"""

import argparse
import functools
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from benchmarks import autocast, distributed, fused, model, optax_updates, pipeline, schedule
from benchmarks.fused_traffic import by_params, by_update
from benchmarks.measuring import (
    Candidate,
    measure_compilation,
    print_table,
    ratio,
    take_turns,
    trace_and_compile,
)

# Every loss scale below wraps the whole chain, so that the clip sees unscaled gradients.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def _plain_step(tx):
    def step(state, batch):
        params, opt_state = state
        _, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _ampx_step(tx, num_microbatches=1):
    grads_of = ampx.value_and_grad(model.loss_fn, num_microbatches=num_microbatches)

    def step(state, batch):
        params, opt_state = state
        scale = ampx.current_loss_scale(opt_state)
        grads = grads_of(params, batch, loss_scale=scale).grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _microbatch_step(tx, rows):
    """A step by `optax.microbatch`, which asks for the rows of a micro-batch."""
    mean = optax.microbatching.AccumulationType.MEAN
    grads_of = optax.microbatch(jax.grad(model.loss_fn), 1, rows, mean)

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(grads_of(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _over_calls(tx, k):
    """k calls of an optimizer that accumulates over calls, in a scan: one compiled step."""
    one = _plain_step(tx)

    def step(state, batch):
        micro_batches = ampx.split_microbatches(batch, k)
        return jax.lax.scan(lambda carry, mb: (one(carry, mb), None), state, micro_batches)[0]

    return step


def _train_step(step):
    return lambda state, batch: step(state, batch)[0]


def _start(tx):
    """Parameters and optimizer state, as `_plain_step` and `_ampx_step` carry them."""
    params = model.init_params(jax.random.key(0))
    return params, tx.init(params)


def scaling(rounds: int) -> None:
    """A training step with a loss scale beside the same step without."""
    batch = model.tokens(64)
    variants = {
        "optax": (OPTIMIZER, _plain_step),
        "dynamic_loss_scale": (ampx.dynamic_loss_scale(OPTIMIZER), _ampx_step),
        "static_loss_scale": (ampx.static_loss_scale(OPTIMIZER, 128.0), _ampx_step),
        "apply_if_finite": (optax.apply_if_finite(OPTIMIZER, 5), _plain_step),
    }
    candidates = [
        Candidate.compiled(name, make(tx), _start(tx), batch)
        for name, (tx, make) in variants.items()
    ]
    for name, loss_scale in (("train_step, no scale", None), ("train_step, dynamic", "dynamic")):
        step = ampx.train_step(model.loss_fn, OPTIMIZER, loss_scale=loss_scale)
        state = step.init(model.init_params(jax.random.key(0)))
        candidates.append(Candidate.compiled(name, _train_step(step), state, batch))
    take_turns(candidates, rounds)
    _print_steps("Loss-scaled step, 7.3 M parameters, 64 x 64 tokens, AdamW with clip", candidates)


def tail(rounds: int) -> None:
    """The optimizer alone: without a model around it, the wrapper's whole cost is visible."""
    _tail("one array of 50 M", 1, 50_000_000, rounds)
    _tail("400 arrays of 125 k", 400, 125_000, rounds)


def _tail(title: str, leaves: int, size: int, rounds: int) -> None:
    params = {f"w{i}": jnp.ones(size) for i in range(leaves)}
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    infinite = jax.tree.map(lambda p: p * jnp.inf, params)

    # `train_step` does as `by_params`: the branch of the loss scale makes the new parameters.
    scaled = ampx.dynamic_loss_scale(OPTIMIZER)
    variants = {
        "optax": (OPTIMIZER, by_update, grads),
        "scale, in train_step": (scaled, by_params, grads),
        "the same, step skipped": (scaled, by_params, infinite),
        "scale, tx.update": (scaled, by_update, grads),
        "tx.update, step skipped": (scaled, by_update, infinite),
        "hold": (ampx.dynamic_loss_scale(OPTIMIZER, nonfinite_updates="hold"), by_params, grads),
        "skip": (ampx.dynamic_loss_scale(OPTIMIZER, nonfinite_updates="skip"), by_params, grads),
        "apply_if_finite": (optax.apply_if_finite(OPTIMIZER, 5), by_update, grads),
    }
    # One after the other beside optax: all at once would not fit into the memory of small machines.
    rows = []
    for name, (tx, make, data) in variants.items():
        pair = [
            Candidate.compiled("optax", by_update(OPTIMIZER), _start_of(OPTIMIZER, params), grads),
            Candidate.compiled(name, make(tx), _start_of(tx, params), data),
        ]
        take_turns(pair, rounds)
        temp = pair[1].temp_bytes / (leaves * size)
        rows.append([name, f"{pair[1].median_ms:.0f}", ratio(*reversed(pair)), f"{temp:.2f}"])
    header = ["step", "ms", "ratio to optax", "temporary bytes a parameter"]
    print_table(f"Optimizer tail alone, clip and AdamW, {title}", header, rows)


def _start_of(tx, params):
    return params, tx.init(params)


def accumulation(rounds: int) -> None:
    """k micro-batches by ampx, optax.microbatch and optax.MultiSteps: one effective step each."""
    rows = []
    batch = model.tokens(16)
    for k in (1, 4, 16):
        multi = optax.MultiSteps(OPTIMIZER, k).gradient_transformation()
        windowed = ampx.multi_steps(OPTIMIZER, k)
        candidates = [
            Candidate.compiled("ampx", _ampx_step(OPTIMIZER, k), _start(OPTIMIZER), batch),
            Candidate.compiled(
                "optax.microbatch",
                _microbatch_step(OPTIMIZER, batch.shape[0] // k),
                _start(OPTIMIZER),
                batch,
            ),
            Candidate.compiled("optax.MultiSteps", _over_calls(multi, k), _start(multi), batch),
            Candidate.compiled(
                "ampx.multi_steps", _over_calls(windowed, k), _start(windowed), batch
            ),
        ]
        take_turns(candidates, rounds)
        ours, microbatch, multi_steps, our_multi_steps = candidates
        rows.append(
            [
                str(k),
                f"{ours.median_ms:.0f}",
                ratio(ours, microbatch),
                ratio(ours, multi_steps),
                ratio(our_multi_steps, multi_steps),
                " / ".join(f"{c.temp_bytes / 2**20:.0f}" for c in candidates),
            ]
        )
    header = [
        "k",
        "ampx, ms",
        "ampx / optax.microbatch",
        "ampx / optax.MultiSteps",
        "ampx.multi_steps / optax.MultiSteps",
        "temporary MiB: ampx / microbatch / MultiSteps / ampx.multi_steps",
    ]
    print_table("Accumulation, one effective step of 16 x 64 tokens", header, rows)


def compiling(rounds: int) -> None:
    """Trace and compile time of the step, beside plain optax; no run uses what another cached."""
    batch = model.tokens(8)
    scaled = ampx.dynamic_loss_scale(OPTIMIZER)
    train = ampx.train_step(model.loss_fn, OPTIMIZER, loss_scale="dynamic", num_microbatches=4)
    state = train.init(model.init_params(jax.random.key(0)))

    multi = optax.MultiSteps(OPTIMIZER, 4).gradient_transformation()
    guarded = optax.apply_if_finite(OPTIMIZER, 5)
    # Without a clip there is less that a loss scale is measured beside.
    alone = optax.adamw(1e-3)
    scaled_alone, guarded_alone = ampx.dynamic_loss_scale(alone), optax.apply_if_finite(alone, 5)
    variants = {
        "optax": (_plain_step(OPTIMIZER), _start(OPTIMIZER)),
        "ampx, dynamic": (_ampx_step(scaled), _start(scaled)),
        "optax.microbatch, k = 4": (_microbatch_step(OPTIMIZER, 2), _start(OPTIMIZER)),
        "ampx, k = 4": (_ampx_step(OPTIMIZER, 4), _start(OPTIMIZER)),
        "optax.MultiSteps, k = 4": (_over_calls(multi, 4), _start(multi)),
        "optax.microbatch, apply_if_finite, k = 4": (_microbatch_step(guarded, 2), _start(guarded)),
        "train_step, dynamic, k = 4": (_train_step(train), state),
        "optax, no clip": (_plain_step(alone), _start(alone)),
        "optax.apply_if_finite, no clip": (_plain_step(guarded_alone), _start(guarded_alone)),
        "ampx, dynamic, no clip": (_ampx_step(scaled_alone), _start(scaled_alone)),
    }
    measures = {
        name: functools.partial(trace_and_compile, step, start, batch, donate_argnums=0)
        for name, (step, start) in variants.items()
    }
    seconds = measure_compilation(measures, max(3, rounds // 3))
    rows = []
    for name, own in seconds.items():
        baseline = "optax, no clip" if name.endswith("no clip") else "optax"
        ratios = np.median(own / seconds[baseline], 0)
        rows.append([name, *(f"{s:.2f}" for s in np.median(own, 0)), f"{ratios[2]:.2f}"])
    header = ["step", "trace, CPU-s", "compile, CPU-s", "both, CPU-s", "both: ratio to optax"]
    print_table("Trace and compile", header, rows)
    fused.compiling(rounds)


def _print_steps(title: str, candidates: list[Candidate]) -> None:
    baseline = candidates[0]
    rows = [
        [c.name, f"{c.median_ms:.1f}", ratio(c, baseline), f"{c.temp_bytes / 2**20:.0f}"]
        for c in candidates
    ]
    print_table(title, ["step", "ms", f"ratio to {baseline.name}", "temporary MiB"], rows)


BENCHMARKS = {
    "scaling": scaling,
    "tail": tail,
    "accumulation": accumulation,
    "compile": compiling,
    "distributed": distributed.distributed,
    "pipeline": pipeline.pipeline,
    "autocast": autocast.autocasting,
    "fused": fused.fused,
    "optax_updates": optax_updates.optax_updates,
    "schedule": schedule.schedule,
}


def main() -> None:
    """Runs the chosen benchmarks and prints Markdown tables."""
    description = (
        "Compares ampx with plain optax, and prints tables as docs/benchmarks.md has them."
    )
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=12, help="rounds of side-by-side timing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmarks {sorted(unknown)}: choose from {list(BENCHMARKS)}")
    print(
        f"jax {jax.__version__}, optax {optax.__version__}, Python {platform.python_version()}, "
        f"{jax.devices()[0].device_kind} with {os.cpu_count()} cores; ratios are medians over "
        "rounds in which all candidates take turns, with the middle half in brackets"
    )
    for name in arguments.names or BENCHMARKS:
        BENCHMARKS[name](arguments.rounds)


if __name__ == "__main__":
    main()
