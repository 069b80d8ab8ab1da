"""What does a loss scale cost around each transformation of optax, in bytes and in time?

A step that can be skipped has to read all gradients once before it may write anything: 4 bytes a
parameter. The table shows what compiled programs move beyond that, as `fused_traffic` counts it,
and what they need beside their inputs and outputs, for

    optax     the transformation alone, and the new parameters
    skipping  the same in a branch of `ampx.dynamic_loss_scale`, as `ampx.train_step` runs it
    derived   the same in `ampx.fused.fuse`: by rules derived from it, unless the branch moves less

A pass, 4 bytes, reads or writes one float32 array once. Bytes do not depend on the load of the
machine. With `--rounds`, steps are timed as well: the step in the branch over that of optax alone,
and the step by derived rules over that in the branch.

Run `python -m benchmarks.optax_updates` for all transformations, or give names: `adamw lamb`.
"""

import argparse
import pathlib
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.updates.tails import prefers_tail, takes_tail
from benchmarks.fused_traffic import Branch, Step, Traffic, by_params, by_update, traffic
from benchmarks.measuring import Candidate, print_table, ratio, take_turns

# The list of optax's transformations belongs to the tests that train with each of them.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from optax_optimizers import NAMES, TAKES, make

# Matrices, since some transformations factor them. Few leaves hide what many would share.
LEAVES, SHAPE = 4, (512, 256)
ELEMENTS = LEAVES * SHAPE[0] * SHAPE[1]
TIMED = (2048, 2048)  # 64 MiB in all, which no cache holds
# Chains with a clip are what most people train with.
CHAINS = {
    "clip, adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "clip, sgd": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9)),
}


def find_names() -> list[str]:
    """All that need no more than gradients, parameters and the value of the loss."""
    return [*CHAINS, *(name for name in NAMES if set(TAKES.get(name, ())) <= {"value"})]


def make_named(name: str) -> optax.GradientTransformation:
    """The transformation of one of `find_names()`."""
    return CHAINS[name]() if name in CHAINS else make(name)


def take_ordinary(branches: list[Traffic]) -> Traffic:
    """The branch of a conditional that an ordinary step takes: see `fused_traffic.Branch`.

    That is the dear one, which updates. But of the search for infinities, which reads gradients and
    writes a byte for each, it is the cheap one. An update moves at least 12 bytes a parameter.
    """
    dear = max(branches)
    return dear if dear.moved > 8 * ELEMENTS else min(branches)


def build_steps(name: str) -> dict[str, tuple[Step, Any]]:
    """The steps of a row, each with the transformation that makes its state."""
    tx = optax.with_extra_args_support(make_named(name))
    extra_args = {"value": jnp.float32(1.0)} if TAKES.get(name) else {}
    forms = {"skipping": tx, "derived": ampx.fused.fuse(tx)}
    scales = {form: ampx.dynamic_loss_scale(own, init_scale=1024.0) for form, own in forms.items()}
    steps = {form: (by_params(own, **extra_args), own) for form, own in scales.items()}
    return {"optax": (by_update(tx, **extra_args), tx), **steps}


def find_way(tx: Any) -> str:
    """How XLA runs a transformation that `fuse` was given."""
    state = jax.eval_shape(tx.init, [jax.ShapeDtypeStruct(SHAPE, jnp.float32)]).inner_state
    if not takes_tail(state):
        return "no rules"
    return "rules" if prefers_tail(state, None) else "the branch"


def count(step: Step, tx: Any, branch: Branch = take_ordinary) -> tuple[float | None, float]:
    """Bytes moved and temporary bytes, a parameter; None where a loop hides what is moved."""
    params = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * LEAVES
    state = params, jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=0).lower(state, params).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes / ELEMENTS
    try:
        return traffic(compiled.as_text(), branch).moved / ELEMENTS, temporary
    except ValueError:
        return None, temporary


def _compare_times(name: str, rounds: int) -> list[str]:
    """Times of the skipping step over optax alone, and of the derived over the skipping one."""
    params = [jnp.full(TIMED, 0.1) for _ in range(LEAVES)]
    grads = [jnp.full(TIMED, 1e-3 * 1024.0) for _ in range(LEAVES)]
    candidates = [
        Candidate.compiled(form, step, (params, tx.init(params)), grads)
        for form, (step, tx) in build_steps(name).items()
    ]
    take_turns(candidates, rounds)
    alone, skipping, derived = candidates
    return [ratio(skipping, alone), ratio(derived, skipping)]


def print_costs(names: list[str], rounds: int) -> None:
    """Prints the table, one row for each transformation."""
    warnings.simplefilter("ignore", DeprecationWarning)  # optax's, of its old names
    rows = []
    shown = ["time: with a skip / optax", "`fuse` / with a skip"] if rounds else []
    for name in names:
        steps = build_steps(name)
        counts = [count(*step) for step in steps.values()]
        cells = [
            f"{'a loop' if moved is None else f'{moved:.0f}'} ({temporary:.1f})"
            for moved, temporary in counts
        ]
        moved = counts[-1][0]
        cells += ["a loop" if moved is None else f"{moved / 4:.3g}"]
        cells.append(find_way(steps["derived"][1]))
        rows.append([f"`{name}`", *cells, *(_compare_times(name, rounds) if rounds else [])])
    print_table(
        "Bytes moved a parameter (temporary bytes in brackets), "
        f"{LEAVES} leaves, {jax.default_backend()}",
        ["transformation", "optax", "with a skip", "`fuse`", "passes", "way", *shown],
        rows,
    )


def optax_updates(rounds: int) -> None:
    """Prints the table of all transformations."""
    print_costs(find_names(), rounds)


def main() -> None:
    """The table of the names given, or of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optax_updates")
    parser.add_argument("names", nargs="*", default=find_names(), help="of transformations")
    parser.add_argument("--rounds", type=int, default=0, help="of timing, 0 for none")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}")
    print_costs(arguments.names, arguments.rounds)


if __name__ == "__main__":
    main()
