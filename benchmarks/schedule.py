"""What a precision schedule in one compiled step costs beside a step for each of its phases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from benchmarks import model
from benchmarks.measuring import Candidate, print_table, ratio, take_turns

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
NEVER = 10**9


def schedule(rounds: int) -> None:
    """One step with a `switch` in it, in both of its phases, beside two steps without."""
    batch = model.tokens(16)
    for half in (jnp.bfloat16, jnp.float16):
        low = ampx.opt_level("O2", half_dtype=half)
        switching = ampx.PrecisionSchedule((ampx.Phase(low, until_step=NEVER), ampx.Phase("O0")))
        rows = []
        candidates = [
            _candidate(f"{np.dtype(half)}, a step of its own", low),
            _candidate("float32, a step of its own", ampx.opt_level("O0", loss_scale="dynamic")),
            _candidate(f"{np.dtype(half)}, in a schedule", switching),
            _candidate("float32, in a schedule", switching, phase=1),
        ]
        take_turns(candidates, rounds)
        for candidate, alone in zip(candidates, candidates[:2] * 2, strict=True):
            rows.append(
                [
                    candidate.name,
                    f"{candidate.median_ms:.1f}",
                    ratio(candidate, alone),
                    ratio(candidate, candidates[1]),
                    f"{candidate.temp_bytes / 2**20:.0f}",
                    f"{candidate.compile_seconds:.1f}",
                ]
            )
        header = ["step", "ms", "ratio to the step of its own", "ratio to float32"]
        header += ["temporary MiB", "trace and compile, s"]
        print_table(
            f"A schedule from {np.dtype(half)} to float32, {batch.size} tokens", header, rows
        )


def _candidate(name, policy, phase=0):
    step = ampx.train_step(model.loss_fn, OPTIMIZER, policy=policy, loss_scale="dynamic")
    state = step.init(model.init_params(jax.random.key(0)))
    if phase:
        later = state.opt_state._replace(precision_phase=jnp.int32(phase))
        state = state._replace(opt_state=later)
    batch = model.tokens(16)
    return Candidate.compiled(name, lambda state, batch: step(state, batch)[0], state, batch)
