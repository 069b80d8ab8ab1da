"""Runs a schedule: one loop over ticks, the same program on every device.

A tick has three slots (forward, backward, weight gradient). In each, a device branches to what its
row of the tables says. Then neighbours exchange what they have made:

  carry                 one tick                                                            carry
  activations --read--> +---------+ +----------+ +-----------------+ +----------+ --write-->
  cotangents            | forward | | backward | | weight gradient | | exchange |
  kept                  | switch  | | switch   | | switch          | | ppermute |
  deferred              +---------+ +----------+ +-----------------+ +----------+
  grads, results         sent, kept  returned,    grads               sent, returned
                                     deferred,                        go to neighbours
                                     grads

Each buffer of the carry has a leading axis of slots, one for each value that waits. Those of
activations and cotangents have one more that nobody reads, where what arrives goes if nobody has
sent anything.

- Branches are real (`lax.switch` on a number that each device looks up for itself), so nothing is
  computed in a bubble: a device sends zeros then, and no mask multiplies what is not due.
- Branches write what they keep, and sums of gradients, where it lies: all else in those buffers
  stays untouched. See `turns`.
- Collectives stand outside of the branches. Devices take different branches at a time, and all
  must take part in a `ppermute`: inside, some would wait for the others for ever.
- For the same reason nothing that is unvarying may be differentiated in a branch, see
  `ampx.pipelining.shard_map_program`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.pipelining.runtime.buffers import (
    Carrier,
    Pool,
    as_key_again,
    as_key_numbers,
    as_varying_as,
    read_at,
    read_slot,
    write_at,
    write_slot,
)
from ampx.pipelining.runtime.lowering import IDLE, Route, Tables, Work
from ampx.pipelining.runtime.stage_programs import (
    StageInputs,
    StageOutputs,
    StageProgram,
    select_floating_leaves,
)
from ampx.pipelining.runtime.turns import first_turn, switch_in_place, switch_in_turn

Wires = tuple[list[jax.Array], ...]
# Finds what a table, int32[ticks, devices], says to this device in this tick.
_LookUp = Callable[[np.ndarray], jax.Array]
# Takes the buffers that it writes; returns what a device hands on at once, and the buffers.
_Branch = Callable[[Any], tuple[Any, Any]]


class Parameters(NamedTuple):
    """A device's parameters, as its stages see them.

    Attributes:
      select: `select(program, chunk)`, the parameters of one stage; `chunk` is an int32 scalar.
      zeros: `zeros()`, sums of gradients for all parameters of the device, in the dtype of sums.
      add: `add(total, program, chunk, gradients)`, those sums with the gradients of one stage
        added, which come as a list of leaves.
    """

    select: Callable[[int, jax.Array], Any]
    zeros: Callable[[], Any]
    add: Callable[[Any, int, jax.Array, Any], Any]


class Totals(NamedTuple):
    """What a device has summed up.

    Attributes:
      grads: gradients of its parameters; None without a backward.
      results: loss, weight and auxiliary output, each with a leading axis of micro-batches; zero
        where another device has them.
    """

    grads: Any
    results: Any


class _Carry(NamedTuple):
    """What a device hands from tick to tick, in buffers of `n` slots.

    Attributes:
      activations: for each wire the arrays that have arrived, each of shape (n + 1, ...).
      cotangents: the same for those that come back.
      kept: what forwards keep for backwards, each of shape (n, ...).
      deferred: what the first half of a backward keeps for the second, each of shape (n, ...).
      grads: sums of gradients so far, like the device's view of the parameters; None without a
        backward.
      results: loss, weight and auxiliary output, each with a leading axis of micro-batches.
      turn: int32[], the turn of the next switch: see `turns`.
    """

    activations: Wires
    cotangents: Wires
    kept: list[jax.Array]
    deferred: list[jax.Array]
    grads: Any
    results: Any
    turn: jax.Array


@dataclasses.dataclass(frozen=True)
class Executor:
    """A pipeline, ready to run inside `shard_map`.

    Attributes:
      tables: the schedule, lowered.
      programs: the different programs of its stages.
      program_of: for each stage, which of them it runs.
      activations: for each wire how values travel forward; receivers are programs.
      cotangents: for each wire how they travel back.
      kept: the buffers in which programs keep residuals for the backward.
      deferred: those in which the first half of a backward keeps values for the second.
      results: the types of loss, weight and auxiliary output of a micro-batch.
      parameters: the device's.
      microbatches: a pytree of arrays of shape (rows, num_microbatches, ...).
      key: a random key, of which each micro-batch gets its own; or None.
      scale: float32 scalar, the cotangent of the loss.
      axis_name: the mapped axis of the stages.
    """

    tables: Tables
    programs: Sequence[StageProgram]
    program_of: Sequence[int]
    activations: Sequence[Carrier]
    cotangents: Sequence[Carrier]
    kept: Pool
    deferred: Pool
    results: tuple[Any, Any, Any]
    parameters: Parameters
    microbatches: Any
    key: jax.Array | None
    scale: jax.Array
    axis_name: str

    def run(self) -> Totals:
        """Runs all ticks."""
        device = lax.axis_index(self.axis_name)

        def run_tick(tick: jax.Array, carry: _Carry) -> _Carry:
            def look_up(table: np.ndarray) -> jax.Array:
                # int32[ticks, devices] -> int32[]. The counter may be int64, or an int without jit.
                place = jnp.asarray(tick, device.dtype), device
                entry = lax.dynamic_slice(table, place, (1, 1), allow_negative_indices=False)
                return entry.reshape(())

            return self._run_tick(carry, look_up)

        # A counter: an array of all ticks would have to be made, and tables looked up through it.
        carry = lax.fori_loop(0, self.tables.num_ticks, run_tick, self._make_carry())
        return Totals(carry.grads, carry.results)

    def _make_carry(self) -> _Carry:
        """Makes empty buffers and sums of zero."""

        def on(carriers: Sequence[Carrier], routes: Sequence[Route]) -> Wires:
            return tuple(
                [t.zeros(route.storage.num_slots + 1) for t in carrier.types]
                for carrier, route in zip(carriers, routes, strict=True)
            )

        tables = self.tables
        number = jax.tree.leaves(self.microbatches)[0].shape[1]
        return _Carry(
            on(self.activations, tables.activations),
            on(self.cotangents, tables.cotangents),
            [t.zeros(tables.residuals.num_slots) for t in self.kept.types],
            [t.zeros(tables.deferred.num_slots) for t in self.deferred.types],
            self.parameters.zeros() if any(p.backward for p in self.programs) else None,
            jax.tree.map(lambda t: t.zeros(number), self.results),
            first_turn(self.axis_name),
        )

    def _run_tick(self, carry: _Carry, look_up: _LookUp) -> _Carry:
        """Runs one tick; `look_up` finds what a table says to this device."""
        # What else is in the tables (links, numbers of slots) is static.
        row = jax.tree.map(lambda t: look_up(t) if np.ndim(t) == 2 else None, self.tables)
        # The order is that of the moments of `intervals`, by which slots were given out.
        carry, sent = self._run_forward(carry, row, look_up)
        carry, returned = self._run_backward(carry, row, look_up)
        carry = self._run_weight_gradient(carry, row, look_up)
        turn, activations = self._exchange(
            carry.turn, look_up, self.tables.activations, carry.activations, sent
        )
        turn, cotangents = self._exchange(
            turn, look_up, self.tables.cotangents, carry.cotangents, returned
        )
        return carry._replace(activations=activations, cotangents=cotangents, turn=turn)

    # --- the slots of a tick ---------------------------------------------------------------------

    def _run_forward(self, carry: _Carry, row: Tables, look_up: _LookUp) -> tuple[_Carry, Wires]:
        slots = [route.storage.forward for route in row.activations]

        # Zeros of the types that branches return go to neighbours, into a slot that nobody reads.
        def idle() -> Any:
            return _make_empty(self.activations), jax.tree.map(lambda t: t.zeros(), self.results)

        def run(number: int) -> _Branch:
            def branch(buffers: list[jax.Array]) -> Any:
                inputs = self._gather_inputs(number, carry, row.forward, slots)
                outputs, kept = self.programs[number].run(inputs)
                sent = tuple(
                    c.pack([as_key_numbers(x) for x in jax.tree.leaves(tree)])
                    if tree is not None
                    else c.nothing()
                    for c, tree in zip(self.activations, outputs.sent, strict=True)
                )
                buffers = self.kept.write(number, buffers, row.residuals.forward, kept)
                return (sent, self._as_results(outputs)), buffers

            return branch

        numbers, branches = self._make_branches((self.tables.forward, run))
        turn, (sent, results), kept = switch_in_place(
            carry.turn, numbers, look_up, idle, branches, carry.kept
        )
        # An idle device has micro-batch -1. JAX clamps that, so zeros are added to the first one's.
        return carry._replace(
            kept=kept,
            results=jax.tree.map(
                lambda total, x: write_at(
                    total, read_at(total, row.forward.microbatch) + x, row.forward.microbatch
                ),
                carry.results,
                results,
            ),
            turn=turn,
        ), sent

    def _run_backward(self, carry: _Carry, row: Tables, look_up: _LookUp) -> tuple[_Carry, Wires]:
        slots = [route.storage.backward for route in row.activations]

        def idle() -> Wires:
            return _make_empty(self.cotangents)

        # A whole backward ("B") and a first half ("I") share the slot: a table each, one switch.
        def taken(number: int, now: Work) -> tuple[StageInputs, list[Any], list[Any]]:
            inputs = self._gather_inputs(number, carry, now, slots)
            kept = self._read_kept(number, carry, row.residuals.backward)
            return inputs, kept, self._read_cotangents(number, carry, row)

        def whole(number: int) -> _Branch:
            def branch(buffers: tuple[list[jax.Array], Any]) -> Any:
                deferred, grads = buffers
                program = self.programs[number]
                ours, theirs = program.pull(*taken(number, row.backward))
                grads = self.parameters.add(grads, number, row.backward.chunk, ours)
                return self._pack_returned(program, theirs), (deferred, grads)

            return branch

        def half(number: int) -> _Branch:
            def branch(buffers: tuple[list[jax.Array], Any]) -> Any:
                deferred, grads = buffers
                program = self.programs[number]
                theirs, late = program.pull_inputs(*taken(number, row.halved))
                deferred = self.deferred.write(number, deferred, row.deferred.backward, late)
                return self._pack_returned(program, theirs), (deferred, grads)

            return branch

        kinds = (self.tables.backward, whole), (self.tables.halved, half)
        numbers, branches = self._make_branches(*kinds)
        if not branches:
            return carry, idle()
        turn, returned, (deferred, grads) = switch_in_place(
            carry.turn, numbers, look_up, idle, branches, (carry.deferred, carry.grads)
        )
        return carry._replace(deferred=deferred, grads=grads, turn=turn), returned

    def _run_weight_gradient(self, carry: _Carry, row: Tables, look_up: _LookUp) -> _Carry:
        slots = [route.storage.weight for route in row.activations]

        def run(number: int) -> _Branch:
            def branch(grads: Any) -> Any:
                program = self.programs[number]
                inputs = self._gather_inputs(number, carry, row.weight, slots)
                kept = self._read_kept(number, carry, row.residuals.weight)
                late = self.deferred.pick(number, read_slot(carry.deferred, row.deferred.weight))
                late = list(map(as_key_again, late, program.deferred))
                ours = program.pull_weights(inputs, kept, late)
                return None, self.parameters.add(grads, number, row.weight.chunk, ours)

            return branch

        numbers, branches = self._make_branches((self.tables.weight, run))
        if not branches:  # a schedule whose backwards are whole
            return carry
        turn, _, grads = switch_in_place(
            carry.turn, numbers, look_up, lambda: None, branches, carry.grads
        )
        return carry._replace(grads=grads, turn=turn)

    def _make_branches(self, *kinds: Any) -> tuple[np.ndarray, list[_Branch]]:
        """Makes a branch for each program that occurs, and a table of which one is due, 0 for none.

        Stages that compute alike share a program and thus a branch: with 32 equal stages there are
        the first, the last and one for all others, so the size of the compiled program does not
        grow with the number of stages.
        """
        numbers, branches = np.zeros_like(self.tables.forward.stage), []
        for work, branch_of in kinds:
            stages = sorted({int(stage) for stage in np.unique(work.stage)} - {IDLE})
            programs = sorted({self.program_of[stage] for stage in stages})
            number_of = np.zeros(len(self.program_of) + 1, np.int32)  # the last one for IDLE, -1
            for stage in stages:
                number_of[stage] = 1 + len(branches) + programs.index(self.program_of[stage])
            branches += map(branch_of, programs)
            # At most one of several tables has work in a tick; the others add 0.
            numbers += number_of[work.stage]
        return numbers, branches

    # --- what a stage takes and gives ------------------------------------------------------------

    def _gather_inputs(
        self, number: int, carry: _Carry, now: Work, slots: Sequence[jax.Array]
    ) -> StageInputs:
        """Gathers what a stage takes; the same in its forward and in its backward."""
        stage, microbatch, chunk = now
        received = tuple(
            None
            if tree is None
            else self._as_received(tree, c.unpack(number, read_slot(buffers, slot)))
            for tree, c, buffers, slot in zip(
                self.programs[number].inputs.received,
                self.activations,
                carry.activations,
                slots,
                strict=True,
            )
        )
        inputs = StageInputs(
            self.parameters.select(number, chunk),
            received,
            jax.tree.map(
                # (rows, num_microbatches, ...) -> (rows, ...). The axis of micro-batches is the
                # second one, as it lies in memory: with a leading one XLA would copy the batch.
                lambda leaf: read_at(leaf, microbatch, axis=1),
                self.microbatches,
            ),
            # A backward that computes the forward again draws the same numbers again.
            None if self.key is None else jax.random.fold_in(self.key, microbatch),
            stage,
        )
        # A jaxpr takes operands of the types it was traced for, and the axes over which a value
        # may vary are part of a type.
        return jax.tree.map(as_varying_as, inputs, self.programs[number].inputs)

    def _as_received(self, types: Any, values: Sequence[jax.Array]) -> Any:
        avals, structure = jax.tree.flatten(types)
        return jax.tree.unflatten(structure, map(as_key_again, values, avals))

    def _read_kept(self, number: int, carry: _Carry, slot: jax.Array) -> list[jax.Array]:
        values = self.kept.pick(number, read_slot(carry.kept, slot))
        return list(map(as_key_again, values, self.programs[number].kept))

    def _read_cotangents(self, number: int, carry: _Carry, row: Tables) -> list[jax.Array]:
        """Reads the cotangents of all that the stage has sent; adds that of its loss."""
        outputs = self.programs[number].outputs
        found: list[jax.Array] = []
        for tree, c, buffers, route in zip(
            outputs.sent, self.cotangents, carry.cotangents, row.cotangents, strict=True
        ):
            if select_floating_leaves(tree):
                found += c.unpack(number, read_slot(buffers, route.storage.backward))
        # The loss of a step is a sum over micro-batches (and stages, where layers have losses of
        # their own), so the cotangent of each part is that of the whole: the loss scale.
        if outputs.loss is not None:
            found.append(self.results[0].of(self.scale.astype(outputs.loss.dtype)))
        return found

    def _pack_returned(self, program: StageProgram, gradients: Sequence[jax.Array]) -> Wires:
        """Puts the gradients of what was received on their wires."""
        # Only floating leaves have cotangents. Integers travel forward, and nothing comes back.
        left = list(gradients)
        returned = []
        for c, tree in zip(self.cotangents, program.inputs.received, strict=True):
            count = len(select_floating_leaves(tree))
            returned.append(c.pack(left[:count]) if count else c.nothing())
            left = left[count:]
        return tuple(returned)

    def _as_results(self, outputs: StageOutputs) -> Any:
        """Makes what a stage adds to loss, weight and auxiliary output: zeros if it has none."""
        found = outputs.loss, outputs.weight, outputs.aux
        return tuple(
            jax.tree.map(lambda t: t.zeros(), types)
            if value is None
            else jax.tree.map(lambda t, x: t.of(jnp.asarray(x, t.dtype)), types, value)
            for types, value in zip(self.results, found, strict=True)
        )

    # --- between devices -------------------------------------------------------------------------

    def _exchange(
        self,
        turn: jax.Array,
        look_up: _LookUp,
        routes: Sequence[Route],
        buffers: Wires,
        sent: Wires,
    ) -> tuple[jax.Array, Wires]:
        """Sends what each wire carries, one wire after another, and stores what arrives."""
        # A device that nobody sends to in an exchange is given zeros by `ppermute`, and its table
        # says to write them to the slot that nobody reads. So does that of one whose neighbour
        # was idle. Where all are idle nothing is sent. That is known by the tick alone, so all
        # devices take the same branch, and a collective may stand in it.
        stored = []
        for route, slots, values in zip(routes, buffers, sent, strict=True):
            exchanges = zip(route.links, route.is_busy, route.arrivals[:-1], strict=True)
            for pairs, is_busy, arrivals in exchanges:
                if not is_busy.any():
                    continue
                permute = functools.partial(lax.ppermute, axis_name=self.axis_name, perm=pairs)
                branches = [list, lambda values, permute=permute: [*map(permute, values)]]
                # What was sent has the type of what arrives, and goes to the slot of nobody.
                busy = np.broadcast_to(is_busy[:, None], arrivals.shape).astype(np.int32)
                turn, arrived = switch_in_turn(turn, look_up(busy), branches, values)
                slots = write_slot(slots, look_up(arrivals), arrived)
            # The next stage may be on the same device, as at the turn of zero-bubble V. Known
            # while tracing: most schedules have no such write.
            if np.any(route.arrivals[-1] < route.storage.num_slots):
                slots = write_slot(slots, look_up(route.arrivals[-1]), values)
            stored.append(slots)
        return turn, tuple(stored)


def _make_empty(carriers: Sequence[Carrier]) -> Wires:
    return tuple(c.nothing() for c in carriers)
