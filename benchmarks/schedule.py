"""What does a precision schedule cost, compared with a separate step for each of its phases?

A schedule is one compiled step that holds both precisions and chooses one by `lax.switch`. The
table times it in its first phase and in its second, beside steps that know one precision only,
and beside `step.in_phase(n)`, which is a phase of the schedule without the switch.

Run `make bench ARGS=schedule`. A ratio of 1 in "ratio to the step of its own" means that the switch
costs nothing; "ratio to float32" is what half precision gains.
"""

import jax
import jax.numpy as jnp
import optax

import ampx
from benchmarks import model
from benchmarks.measuring import Candidate, print_table, ratio, take_turns

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
NEVER = 10**9  # a step that no run reaches: the state alone says which phase it is


def schedule(rounds: int) -> None:
    """Times a step with a `switch` in it, in both of its phases, beside steps without one."""
    switching = ampx.PrecisionSchedule((ampx.Phase("O2", until_step=NEVER), ampx.Phase("O0")))
    candidates = [
        _candidate("bfloat16, a step of its own", "O2"),
        _candidate("float32, a step of its own", "O0"),
        _candidate("bfloat16, in a schedule", switching),
        _candidate("float32, in a schedule", switching, phase=1),
        _candidate("bfloat16, `step.in_phase(0)`", switching, phase=0, alone=True),
        _candidate("float32, `step.in_phase(1)`", switching, phase=1, alone=True),
    ]
    take_turns(candidates, rounds)
    rows = [
        [
            candidate.name,
            f"{candidate.median_ms:.0f}",
            ratio(candidate, alone),
            ratio(candidate, candidates[1]),
            f"{candidate.temp_bytes / 2**20:.0f}",
            f"{candidate.compile_seconds:.1f}",
        ]
        for candidate, alone in zip(candidates, candidates[:2] * 3, strict=True)
    ]
    header = ["step", "ms", "ratio to the step of its own", "ratio to float32"]
    header += ["temporary MiB", "trace and compile, s"]
    print_table("A schedule from bfloat16 to float32, 16 x 64 tokens", header, rows)


def _candidate(name, policy, phase=0, alone=False):
    step = ampx.train_step(model.loss_fn, OPTIMIZER, policy=policy, loss_scale="dynamic")
    step = step.in_phase(phase) if alone else step
    state = step.init(model.init_params(jax.random.key(0)))
    if phase:  # begin in a later phase, as a run does that has got there
        later = state.opt_state._replace(precision_phase=jnp.int32(phase))
        state = state._replace(opt_state=later)
    batch = model.tokens(16)
    return Candidate.compiled(name, lambda state, batch: step(state, batch)[0], state, batch)
