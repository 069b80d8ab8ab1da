"""Puts a schedule and the functions of a model together: traces each kind of stage once.

  Model.kinds ---> trace_stage, for each kind ---> programs ------+
                                                                  |
  Schedule ------> lower ----------------------> tables ----------+--> Executor
                                                                  |
  types of what programs send and keep --------> carriers, pools -+

Stages of one kind share a program. Which types a stage receives is not declared anywhere: it is
what the stages before it send, so programs are traced along the model, from the first stage on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.jaxprs import folds, reading, source_info
from ampx.overwritten import add_gradients, keep_finite_overwritten, lowest_overwritten
from ampx.pipelining.runtime.buffers import (
    ArrayType,
    Carrier,
    make_carrier,
    make_pool,
    restore_keys,
    type_of,
)
from ampx.pipelining.runtime.executor import Executor, Parameters
from ampx.pipelining.runtime.layouts import Layout
from ampx.pipelining.runtime.lowering import lower
from ampx.pipelining.runtime.permutes import exchange_in_groups
from ampx.pipelining.runtime.stage_programs import (
    Compute,
    StageInputs,
    StageProgram,
    select_floating_leaves,
    trace_stage,
)
from ampx.pipelining.schedules.intervals import Edge
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.ticks import Stash
from ampx.trees import cast_like, fill_floating, split_trainable, wider_dtype


class StageKind(NamedTuple):
    """Stages that compute alike.

    Attributes:
      stages: their numbers, counted along the model.
      uses: the parts of the parameters that they read, such as `("first", "stages", "shared")`.
      compute: what they compute, from `StageInputs` to `StageOutputs`.
      stash: what they keep of a micro-batch, which says how long their backwards take.
    """

    stages: tuple[int, ...]
    uses: tuple[str, ...]
    compute: Compute
    stash: Stash


def assemble(
    schedule: Schedule,
    kinds: Sequence[StageKind],
    wires: Sequence[Sequence[Edge]],
    parameters: Parameters,
    microbatches: Any,
    key: jax.Array | None,
    scale: jax.Array,
    axis_name: str,
) -> Executor:
    """Assembles an executor, inside `shard_map`; its arguments vary over all mapped axes.

    Args:
      schedule: a valid one.
      kinds: together all stages.
      wires: for each wire its edges; the first wire joins each stage to the next.
      parameters: the device's.
      microbatches: a pytree of arrays of shape (rows, num_microbatches, ...).
      key: a random key or None.
      scale: the cotangent of the loss.
      axis_name: the axis of the stages.

    Raises:
      TypeError: if a stage does not take what the one before it gives.
      ValueError: if a stage uses a collective over the axis of the stages.
    """
    program_of = [0] * schedule.num_stages
    for number, kind in enumerate(kinds):
        for stage in kind.stages:
            program_of[stage] = number

    # Traced with values of the right types; which values they are does not matter. The number of
    # the stage, too, is an operand: one program runs for all stages of its kind.
    def trace(number: int, received: Sequence[Any]) -> StageProgram:
        inputs = StageInputs(
            parameters.select(number, jnp.zeros((), jnp.int32)),
            tuple(jax.tree.map(lambda t: t.zeros(), tree) for tree in received),
            jax.tree.map(lambda leaf: leaf[:, 0], microbatches),
            key,
            jnp.int32(kinds[number].stages[0]) + jnp.zeros_like(scale, dtype=jnp.int32),
        )
        program = trace_stage(
            kinds[number].compute,
            inputs,
            differentiate=schedule.has_backward,
            split=schedule.splits_backward,
        )
        # Before anything runs: a program with such a collective would not fail, it would hang.
        _refuse_stage_collectives(program, axis_name)
        return exchange_in_groups(program) if schedule.num_devices > 1 else program

    # What crosses a wire, a buffer or a branch varies at least over the axes of the stages and of
    # the data, whatever it varied over when it was made.
    base = type_of(scale).axes
    programs = _trace_programs(trace, len(kinds), program_of, wires, base)
    received, sent = [p.inputs.received for p in programs], [p.outputs.sent for p in programs]
    # What a device keeps for itself comes out of a branch that it takes by its number along the
    # stages, and differs along no other axis than before: the backward was traced for that type,
    # and would refuse a mean over the data that is marked as different along "data".
    own = base & {axis_name}
    return Executor(
        tables=lower(
            schedule,
            wires,
            stash=kinds[0].stash,
            keeps_inputs=any(p.reads_received for p in programs),
        ),
        programs=programs,
        program_of=program_of,
        activations=_make_carriers(received, jax.tree.leaves, base),
        cotangents=_make_carriers(sent, select_floating_leaves, base),
        kept=make_pool([[_type_on_wire(t, own) for t in p.kept] for p in programs]),
        deferred=make_pool([[_type_on_wire(t, own) for t in p.deferred] for p in programs]),
        results=_find_result_types(programs, base),
        parameters=parameters,
        microbatches=microbatches,
        key=key,
        scale=scale,
        axis_name=axis_name,
    )


def _type_on_wire(leaf: Any, base: frozenset[str]) -> ArrayType:
    found = type_of(leaf)
    return dataclasses.replace(found, axes=found.axes | base)


def _make_carriers(
    trees: Iterable[Sequence[Any]], leaves_of: Callable[[Any], list[Any]], base: frozenset[str]
) -> list[Carrier]:
    """Makes a carrier for each wire, for those programs that have something on it."""
    return [
        make_carrier(
            {
                number: [_type_on_wire(leaf, base) for leaf in leaves_of(tree)]
                for number, tree in enumerate(wire)
                if tree is not None
            }
        )
        for wire in zip(*trees, strict=True)
    ]


def _find_result_types(programs: Sequence[StageProgram], base: frozenset[str]) -> Any:
    """Finds the types of loss, weight and auxiliary output: one for all programs.

    It is that of the last one that has them, as a rule that of the last stage.
    """
    outputs = [(p.outputs.loss, p.outputs.weight, p.outputs.aux) for p in reversed(programs)]
    given = [
        next((value for value in values if value is not None), None)
        for values in zip(*outputs, strict=True)
    ]
    return tuple(jax.tree.map(lambda leaf: _type_on_wire(leaf, base), tree) for tree in given)


def _trace_programs(
    trace: Callable[[int, Sequence[Any]], StageProgram],
    number_of_kinds: int,
    program_of: Sequence[int],
    wires: Sequence[Sequence[Edge]],
    base: frozenset[str],
) -> list[StageProgram]:
    """Traces all programs, each for what the stages before it send.

    A fixed point: each round sends what programs give to those that take it, and traces again those
    that are given more than before. More means a wire that had nothing, or an axis over which a
    value may vary besides. Both can only grow and are finite, so this ends.
    """
    received: list[list[Any]] = [[None] * len(wires) for _ in range(number_of_kinds)]
    programs: list[Any] = [None] * number_of_kinds
    edges = sorted(
        (target, source, wire) for wire, pairs in enumerate(wires) for source, target in pairs
    )
    programs[program_of[0]] = trace(program_of[0], received[program_of[0]])
    # Several stages may run one program, and be sent different types by different neighbours:
    # values of the first stage may be the same along an axis over which layers make them vary.
    stale = True
    while stale:
        stale = False
        for stage, arriving in itertools.groupby(edges, key=lambda edge: edge[0]):
            number = program_of[stage]
            taken = list(received[number])
            for _, source, wire in arriving:
                sent = programs[program_of[source]].outputs.sent[wire]
                sent = jax.tree.map(lambda leaf: _type_on_wire(leaf, base), sent)
                taken[wire] = _join_types(taken[wire], sent, source, stage)
            if taken != received[number]:
                received[number] = taken
                programs[number] = trace(number, taken)
                stale = True
    return programs


def _join_types(before: Any, sent: Any, source: int, target: int) -> Any:
    """Joins two types, which may differ in nothing but the axes over which values vary."""
    if before is None:
        return sent

    def signature(tree: Any) -> Any:
        return jax.tree.structure(tree), [(t.shape, str(t.dtype)) for t in jax.tree.leaves(tree)]

    if signature(before) != signature(sent):
        raise TypeError(
            f"stage {source} gives {_describe_types(sent)}, but stages such as stage {target} take "
            f"{_describe_types(before)}: layers of one kind must return what they take"
        )
    return jax.tree.map(lambda a, b: dataclasses.replace(a, axes=a.axes | b.axes), before, sent)


def _describe_types(tree: Any) -> str:
    return str(jax.tree.map(lambda t: f"{t.dtype}{list(t.shape)}", tree))


def _refuse_stage_collectives(program: StageProgram, axis_name: str) -> None:
    # Only here, where jaxprs are at hand, can a collective be seen wherever a layer calls it. Sums
    # that JAX itself adds in a backward are found, too.
    traced: Iterable[Any] = (program.forward, program.backward)
    for name, jaxpr in zip(("forward", "backward"), traced, strict=True):
        for eqn, _ in folds.equations_inside(jaxpr) if jaxpr is not None else ():
            if axis_name in reading.collective_axes(eqn):
                collective = eqn.primitive.name.removesuffix("_invariant")
                raise ValueError(
                    f"{collective} over the axis {axis_name!r} of the stages, at "
                    f"{source_info.line_of(eqn)}, in the {name} pass of a stage: devices run "
                    "different stages at a time, so some would wait for ever. Use other axes, or "
                    "move it out of the stages"
                )


def make_stage_parameters(
    view: Any, layout: Layout, kinds: Sequence[StageKind], accumulator_dtype: DTypeLike
) -> Parameters:
    """Makes the functions by which the executor reaches the parameters of a device.

    Args:
      view: a dict of parts; `"stages"` as `layout` shows them, random keys as `store_keys` does.
      layout: of the stages.
      kinds: which parts the programs read.
      accumulator_dtype: of the sums, at least.
    """

    def select_stored(program: int, chunk: Any) -> Any:
        kind = kinds[program]
        own = layout.select(view["stages"], kind.stages[0], chunk)
        return {part: own if part == "stages" else view[part] for part in kind.uses}

    def select(program: int, chunk: Any) -> Any:
        return restore_keys(select_stored(program, chunk))

    # Sums of many micro-batches lose what is small against them in half precision, so they are kept
    # in `accumulator_dtype`, or wider where the parameters are.
    def zeros() -> Any:
        sums = jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, dtype=wider_dtype(leaf.dtype, accumulator_dtype)),
            split_trainable(view)[0],
        )
        return lowest_overwritten(sums)

    def add(total: Any, program: int, chunk: Any, gradients: Sequence[Any]) -> Any:
        # Selecting again costs nothing: only types are looked at. Leaves that are not floating have
        # no gradient, and no sum.
        held = select_stored(program, chunk)
        own = keep_finite_overwritten(fill_floating(held, gradients), held)
        # Sums of parts that this program does not read stay as they are.
        stages = layout.add(total["stages"], kinds[program].stages[0], chunk, own.pop("stages"))
        rest = {
            part: add_gradients(total[part], cast_like(gradient, total[part]))
            for part, gradient in own.items()
        }
        return total | rest | {"stages": stages}

    return Parameters(select, zeros, add)
