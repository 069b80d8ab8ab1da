"""Checks of what a step hands on to the next one: its optimizer's state, its random keys.

None of these faults shows in a loss, which still falls: moments that begin anew in each step, and
dropout that leaves out the same units in each. They are read from what the results are made of
(`value_sources`):

    lost_state   what comes back of an optimizer's state is what went in, and parameters read it;
                 or parameters come back so, and their moments do not;
                 or a jitted function changes nnx modules, which are copies
    random_key   numbers that reach the parameters are drawn from what no step changes
    batch_stats  running statistics are moved by moments that an optimizer keeps of them;
                 or nothing moves them and nothing reads them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.checking import join_first
from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.step_programs import (
    Names,
    StepArray,
    StepProgram,
    optimizer_of,
    path_in_optimizer,
    source_of,
    source_of_output,
    trace_step,
)
from ampx.diagnostics.value_sources import Sources
from ampx.flax_modules import find_imported
from ampx.jaxprs.reading import Equation

# Fields of optax's states that every update changes, whatever the gradients are.
_COUNTS = [("count",), ("step_count",)]
_MOMENTS = [
    (name,) for name in "mu nu nu_max trace ema exp_avg exp_avg_sq m1 m2 e_g e_x grad_sum".split()
]


def find_state_faults(program: StepProgram) -> Iterator[LintFinding]:
    """Finds state that is not handed on, keys that are used again, statistics that are trained."""
    sources = Sources(program)
    yield from _find_dropped_states(program, sources)
    yield from _find_dropped_params(program, sources)
    yield from _find_used_keys(program, sources)
    yield from _find_trained_statistics(program, sources)
    yield from _find_dropped_statistics(program, sources)


def _find_dropped_states(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds optimizers whose state, or a part of it, comes back as it went in, or not at all.

    JAX drops equations whose results nobody has, so the new state is not in the program. But of an
    optimizer that counts or averages, and whose numbers go into parameters, a part always changes.
    """
    states: dict[Names, list[int]] = {}
    for i, leaf in enumerate(program.inputs):
        if (path := optimizer_of(leaf)) is not None:
            states.setdefault(path, []).append(i)
    for path, leaves in states.items():
        lost = [i for i in leaves if i in sources.fixed or i not in program.carried.values()]
        is_whole = len(lost) == len(leaves)
        changes = _changes_when_used if is_whole else _changes_always
        used = [i for i in lost if sources.moved >> i & 1 and changes(program, i)]
        used = [i for i in used if not _is_elsewhere(program, i)]
        if used:
            number = next(n for n, _ in sources.changed if sources.outputs[n].reads >> used[0] & 1)
            which = "/".join(path[1:]) or f"argument {path[0]}" if path else "the arguments"
            if not is_whole:
                which = "of " + which + ", " + join_first(program.inputs[i].name for i in used)
            yield LintFinding(
                "lost_state",
                f"parameters are updated with {'' if is_whole else 'a part of '}an optimizer's "
                f"state that does not change: {which}",
                source_of_output(program, number),
                "return the state that tx.update gives, and not the one that it was given: "
                "updates, opt_state = tx.update(grads, opt_state, params)",
            )


def _changes_when_used(program: StepProgram, i: int) -> bool:
    """Whether a part of an optimizer's state is a counter or a moment: no rate and no scale."""
    leaf = program.inputs[i]
    if i in program.scales:
        return False
    is_count = leaf.aval.shape == () and "count" in leaf.path[-2:]
    return is_count or bool(leaf.aval.shape) and jnp.issubdtype(leaf.aval.dtype, np.floating)


def _changes_always(program: StepProgram, i: int) -> bool:
    """Whether it is a counter or a moment by its name: others may be what never changes.

    Such as the first parameters, which `optax.contrib.prodigy` keeps.
    """
    leaf = program.inputs[i]
    field = path_in_optimizer(leaf)[:1]
    is_count = leaf.aval.shape == () and jnp.issubdtype(leaf.aval.dtype, np.integer)
    return field in _MOMENTS or is_count and field in _COUNTS


def _find_dropped_params(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds parameters that come back as they went in, while moments of them change."""
    moved: set[tuple[Names, Any]] = set()
    for _, i in sources.changed:
        field, *name = path_in_optimizer(program.inputs[i]) or ("",)
        if (field,) in _MOMENTS and name:
            moved.add((tuple(name), program.inputs[i].aval.shape))
    held: dict[tuple[Names, Any], list[int]] = {}  # with averages of them, which are called alike
    for i in program.carried.values():
        leaf = program.inputs[i]
        ends = ((leaf.path[start:], leaf.aval.shape) for start in range(1, len(leaf.path)))
        key = next((end for end in ends if end in moved), None)
        if key is not None and optimizer_of(leaf) is None:
            held.setdefault(key, []).append(i)
    stay = [each[0] for each in held.values() if sources.fixed.issuperset(each)]
    lost = [i for i in stay if not _is_elsewhere(program, i)]
    if lost:
        yield LintFinding(
            "lost_state",
            "parameters come back as they went in, and an optimizer moves its moments of them: "
            + join_first(program.inputs[i].name for i in lost),
            source_of_output(program, program.output_of(lost[0])),
            "return what optax.apply_updates(params, updates) gives; parameters that are to stay "
            "need no moments: leave them out with optax.partition or optax.masked",
        )


def _is_elsewhere(program: StepProgram, i: int) -> bool:
    """Whether a result that is paired with no input may be what an input has become.

    It has the same type; or the same names, as where the states of several steps are stacked.
    """
    before = program.inputs[i]
    return any(
        (leaf.aval.shape, leaf.aval.dtype) == (before.aval.shape, before.aval.dtype)
        or leaf.path[-2:] == before.path[-2:]
        for number, leaf in enumerate(program.outputs)
        if number not in program.carried
    )


def find_lost_changes(
    step: Callable[..., Any], args: Any, kwargs: Any, program: StepProgram
) -> Iterator[LintFinding]:
    """Finds nnx modules that a function under `jax.jit` changes and does not return.

    There they are copies, and JAX drops what nobody has: so the function is traced without its jit.
    """
    inner = getattr(step, "__wrapped__", None)
    # The second of the results is what a step leaves in the objects among its arguments.
    held = {i for n, i in program.carried.items() if program.outputs[n].path[0] == "1"}
    if not held or inner is None or not hasattr(step, "lower"):
        return
    bare = trace_step(inner, args, kwargs)
    changed = {i for _, i in Sources(bare).changed}
    unreturned = sorted(held & Sources(program).fixed & changed)
    lost = [i for i in unreturned if not _is_elsewhere(program, i)]
    if lost:
        yield LintFinding(
            "lost_state",
            "jax.jit gets copies of nnx modules, and what the step changes in them is lost: "
            + join_first(program.inputs[i].name.removesuffix("/value") for i in lost),
            source_of_output(bare, bare.output_of(lost[0])),
            "jit the step with nnx.jit; or return the modules, and use those from then on",
        )


def _find_used_keys(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds random numbers that are the same in each step, and reach what it carries."""
    fixed = sum(1 << i for i in sources.fixed)
    keys = {i for i in sources.fixed if _is_key(program.inputs[i])}
    for draw in sources.draws:
        own = [i for i in keys if draw.reads >> i & 1]
        # In a branch there may be what is drawn once, such as the first parameters.
        is_written = not draw.reads & sources.of_inputs and not _is_optional(draw.eqns)
        is_same = is_written or own and not draw.reads & ~fixed & sources.of_inputs
        if is_same and draw.bit & sources.moved:
            yield LintFinding(
                "random_key",
                "each step draws the same random numbers, from a key that "
                + ("comes back unchanged: " if own else "is written in the program")
                + join_first(program.inputs[i].name for i in own),
                source_of(draw.eqns, program.jaxpr),
                "return a new key, as of key, own = jax.random.split(key); or fold in a counter "
                "that the step advances: jax.random.fold_in(key, step)",
            )


def _is_optional(eqns: tuple[Equation, ...]) -> bool:
    return any(eqn.primitive.name == "cond" for eqn in eqns)


def _is_key(leaf: StepArray) -> bool:
    dtype, shape = leaf.aval.dtype, leaf.aval.shape
    is_raw = dtype == np.uint32 and shape[-1:] in ((2,), (4,))
    return is_raw or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _find_trained_statistics(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds running statistics of flax that are made of an optimizer's moments of them."""
    moments = [i for i, leaf in enumerate(program.inputs) if optimizer_of(leaf) is not None]
    trained = []
    for number, i in sources.changed:
        tail = _path_of_statistics(program.inputs[i])
        own = [j for j in moments if tail and program.inputs[j].path[-len(tail) :] == tail]
        if i not in moments and any(sources.outputs[number].reads >> j & 1 for j in own):
            trained.append(number)
    if trained:
        yield LintFinding(
            "batch_stats",
            "the optimizer moves batch statistics, as by weight decay: "
            f"{program.carried_names(trained)}",
            source_of_output(program, trained[0]),
            'give the optimizer the parameters alone: variables["params"] of flax linen, '
            "wrt=nnx.Param of nnx",
        )


def _find_dropped_statistics(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds running statistics of flax linen that come back as they went in, and are not read.

    A norm that is frozen reads them. Where another copy of them changes, this one may be of a
    model that is never evaluated.
    """
    copies: dict[Names, list[int]] = {}
    for i, leaf in enumerate(program.inputs):
        if "batch_stats" in leaf.path and optimizer_of(leaf) is None:
            copies.setdefault(_path_of_statistics(leaf), []).append(i)
    changed = [program.inputs[i].path for _, i in sources.changed]
    lost = []
    for tail, own in copies.items():
        outputs = enumerate(sources.outputs)
        reads = [value.reads for n, value in outputs if program.carried.get(n) not in own]
        is_read = any(each >> i & 1 for each in reads for i in own)
        module = tail[1:-1]
        is_trained = any(path[-len(module) - 1 : -1] == module for path in changed if module)
        if sources.fixed.issuperset(own) and is_trained and not is_read:
            lost.append(own[0])
    if lost:
        yield LintFinding(
            "batch_stats",
            "the running statistics come back as they went in, and nothing reads them: "
            + join_first(program.inputs[i].name for i in lost),
            source_of_output(program, program.output_of(lost[0])),
            'return those that model.apply(..., mutable=["batch_stats"]) gives beside its output',
        )


def _path_of_statistics(leaf: StepArray) -> Names:
    """The names from `batch_stats` on; of nnx those inside of its module; () of others."""
    if "batch_stats" in leaf.path:
        return leaf.path[leaf.path.index("batch_stats") :]
    nnx = find_imported("flax.nnx")
    is_statistic = (
        nnx is not None and bool(leaf.nodes) and isinstance(leaf.nodes[-1], nnx.BatchStat)
    )
    return leaf.path[2:] if is_statistic else ()
