"""Checks of what a step hands on to the next one: its optimizer's state, its random keys.

None of these faults shows in a loss, which still falls: moments that begin anew in each step, and
dropout that leaves out the same units in each. They are read from what the results are made of
(`value_sources`):

    lost_state   what comes back of an optimizer's state is what went in, and parameters read it;
                 or a jitted function changes nnx modules, which are copies
    random_key   numbers that reach the parameters are drawn from what no step changes
    batch_stats  running statistics are moved by moments that an optimizer keeps of them
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
    Leaf,
    Names,
    StepProgram,
    optimizer_of,
    source_of,
    source_of_output,
    trace_step,
)
from ampx.diagnostics.value_sources import Sources
from ampx.flax_modules import find_imported


def find_state_faults(program: StepProgram) -> Iterator[LintFinding]:
    """Finds state that is not handed on, keys that are used again, statistics that are trained."""
    sources = Sources(program)
    yield from _find_dropped_states(program, sources)
    yield from _find_used_keys(program, sources)
    yield from _find_trained_statistics(program, sources)


def _find_dropped_states(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds optimizers whose whole state comes back as it went in, or not at all.

    JAX drops equations whose results nobody has, so the new state is not in the program. But of an
    optimizer that counts or averages, and whose numbers go into parameters, a part always changes.
    """
    states: dict[Names, list[int]] = {}
    for i, leaf in enumerate(program.inputs):
        if (path := optimizer_of(leaf)) is not None:
            states.setdefault(path, []).append(i)
    for path, leaves in states.items():
        if not all(i in sources.fixed or i not in program.carried.values() for i in leaves):
            continue
        used = [i for i in leaves if sources.moved >> i & 1 and _changes_when_used(program, i)]
        used = [i for i in used if not _is_elsewhere(program, i)]
        if used:
            number = next(n for n, _ in sources.changed if sources.outputs[n].reads >> used[0] & 1)
            yield LintFinding(
                "lost_state",
                "parameters are updated with an optimizer's state that does not change: "
                + ("/".join(path[1:]) or f"argument {path[0]}" if path else "the arguments"),
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
    lost = [i for i in sorted(held & Sources(program).fixed & changed)]
    lost = [i for i in lost if not _is_elsewhere(program, i)]
    if lost:
        number = next(n for n, i in bare.carried.items() if i == lost[0])
        yield LintFinding(
            "lost_state",
            "jax.jit gets copies of nnx modules, and what the step changes in them is lost: "
            + join_first(program.inputs[i].name.removesuffix("/value") for i in lost),
            source_of_output(bare, number),
            "jit the step with nnx.jit; or return the modules, and use those from then on",
        )


def _find_used_keys(program: StepProgram, sources: Sources) -> Iterator[LintFinding]:
    """Finds random numbers that are the same in each step, and reach what it carries."""
    fixed = sum(1 << i for i in sources.fixed)
    keys = {i for i in sources.fixed if _is_key(program.inputs[i])}
    for draw in sources.draws:
        own = [i for i in keys if draw.reads >> i & 1]
        if own and draw.bit & sources.moved and not draw.reads & ~fixed & sources.of_inputs:
            yield LintFinding(
                "random_key",
                "each step draws the same random numbers, from a key that comes back unchanged: "
                + join_first(program.inputs[i].name for i in own),
                source_of(draw.eqns, program.jaxpr),
                "return a new key, as of key, own = jax.random.split(key); or fold in a counter "
                "that the step advances: jax.random.fold_in(key, step)",
            )


def _is_key(leaf: Leaf) -> bool:
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


def _path_of_statistics(leaf: Leaf) -> Names:
    """The names from `batch_stats` on; of nnx those inside of its module; () of others."""
    if "batch_stats" in leaf.path:
        return leaf.path[leaf.path.index("batch_stats") :]
    nnx = find_imported("flax.nnx")
    is_statistic = (
        nnx is not None and bool(leaf.nodes) and isinstance(leaf.nodes[-1], nnx.BatchStat)
    )
    return leaf.path[2:] if is_statistic else ()
