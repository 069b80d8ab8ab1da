"""What one stage computes, traced once: forward, backward, and the two halves of the backward.

A backward pass reads residuals: values that its forward pass had. In a jaxpr each of them is a
variable, and which one says what to do about it:

  an input of the stage    fetched again at the backward: parameters and the micro-batch are at
                           hand, received activations lie in their buffer, keys are folded anew
  a constant               written into the program
  cheap to make of others  made again: see `ampx.pipelining.runtime.residuals`
  anything else            kept from the forward to the backward, once for each micro-batch

So parameters are never kept for each micro-batch, though nobody says which inputs are parameters.
And `stash="inputs"` needs no code of its own: it is `jax.checkpoint` around the stage, which leaves
inputs as the only residuals.

The halves of a backward are found by liveness. For a layer y = x w with cotangent dy:

  residuals x, w; cotangent dy --> first half:  dx = dy w^T  --> sent to the stage before
                                   second half: dw = x^T dy  --> added to the gradients, ticks later

The first half has all equations that the gradients of inputs depend on, the second what else the
gradients of weights need. What the first makes and the second reads is deferred: kept between them.
So are cotangents that the second reads, since their slots are free after the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Jaxpr
from ampx.pipelining.runtime.residuals import choose_kept, find_free_equations
from ampx.trees import is_floating


class StageInputs(NamedTuple):
    """What a stage computes from.

    Attributes:
      params: its parameters.
      received: for each wire what arrives, a pytree; None where nothing does.
      microbatch: the micro-batch.
      key: the micro-batch's random key, or None.
      stage: int32, the number of the stage.
    """

    params: Any
    received: tuple[Any, ...]
    microbatch: Any
    key: Any
    stage: jax.Array


class StageOutputs(NamedTuple):
    """What a stage computes.

    Attributes:
      sent: for each wire what leaves, a pytree; None where nothing does.
      loss: its part of the loss; None if it has none.
      weight: its part of the weight; None if it has none.
      aux: auxiliary output, or None.
    """

    sent: tuple[Any, ...]
    loss: jax.Array | None = None
    weight: jax.Array | None = None
    aux: Any = None


Compute = Callable[[StageInputs], StageOutputs]


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """The jaxprs of a stage, from `trace_stage`.

    Inputs and outputs are counted by leaves: parameters come first, then what is received.

    Attributes:
      forward: jaxpr from all inputs to the outputs, followed by what is kept.
      inputs: the inputs, as abstract values.
      outputs: the outputs, as abstract values.
      num_params: how many of the inputs are parameters.
      pulled: which inputs have a gradient, by number; those of the parameters come first.
      remake: jaxpr from inputs and what is kept to what is made again; None if nothing is.
      kept: the abstract values of what is kept.
      residuals: what the backward reads, in its order: a constant, or a number, counted through
        inputs, what is kept and what is made again.
      backward: from residuals and cotangents to gradients.
      halves: the same in two parts, if asked for.
      deferred: the types of what the first half keeps for the second.
    """

    forward: Jaxpr
    inputs: StageInputs
    outputs: StageOutputs
    num_params: int
    pulled: tuple[int, ...] = ()
    remake: Jaxpr | None = None
    kept: tuple[Any, ...] = ()
    residuals: tuple[Any, ...] = ()
    backward: Jaxpr | None = None
    halves: Halves | None = None
    deferred: tuple[Any, ...] = ()

    def run(self, inputs: StageInputs) -> tuple[StageOutputs, list[Any]]:
        """Runs the forward: the outputs, and what is to be kept."""
        structure = jax.tree.structure(self.outputs)
        values = reading.evaluate(reading.as_closed(self.forward), *jax.tree.leaves(inputs))
        outputs = values[: structure.num_leaves]
        return jax.tree.unflatten(structure, outputs), values[structure.num_leaves :]

    def pull(
        self, inputs: StageInputs, kept: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the backward: gradients of the parameters, and of what was received."""
        operands = [*self._gather_residuals(inputs, kept), *cotangents]
        gradients = reading.evaluate(reading.as_closed(self.backward), *operands)
        return gradients[: self.num_trained], gradients[self.num_trained :]

    def pull_inputs(
        self, inputs: StageInputs, kept: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the first half: gradients of what was received, and what the second half needs."""
        assert self.halves is not None
        # Residuals need not be deferred: at the weight gradient they are still at hand, or kept.
        residuals = self._gather_residuals(inputs, kept)
        values = reading.evaluate(reading.as_closed(self.halves.inputs), *residuals, *cotangents)
        count = len(self.pulled) - self.num_trained
        late = [i - len(residuals) for i in self.halves.reads if i >= len(residuals)]
        return values[:count], [*(cotangents[i] for i in late), *values[count:]]

    def pull_weights(
        self, inputs: StageInputs, kept: Sequence[Any], deferred: Sequence[Any]
    ) -> list[Any]:
        """Runs the second half: gradients of the parameters."""
        assert self.halves is not None
        residuals = self._gather_residuals(inputs, kept)
        early = [residuals[i] for i in self.halves.reads if i < len(residuals)]
        return reading.evaluate(reading.as_closed(self.halves.weights), *early, *deferred)

    def _gather_residuals(self, inputs: StageInputs, kept: Sequence[Any]) -> list[Any]:
        at_hand = [*jax.tree.leaves(inputs), *kept]
        if self.remake is not None:
            at_hand += reading.evaluate(reading.as_closed(self.remake), *at_hand)
        return [at_hand[r] if isinstance(r, int) else r.value for r in self.residuals]

    @property
    def num_trained(self) -> int:
        """How many of the parameters have a gradient."""
        return _count_trained(self.pulled, self.num_params)

    @property
    def reads_received(self) -> bool:
        """Whether the backward reads again what was received."""
        received = len(jax.tree.leaves(self.inputs.received))
        numbers = range(self.num_params, self.num_params + received)
        return any(r in numbers for r in self.residuals if isinstance(r, int))


class _Constant(NamedTuple):
    """A residual that is known while tracing; a class of its own, as numbers mean other residuals.

    Attributes:
      value: an array or a number.
    """

    value: Any


class Halves(NamedTuple):
    """Two jaxprs that do the work of one.

    Attributes:
      inputs: from all operands to the gradients of inputs, followed by what is kept.
      weights: from some operands and what was kept to the gradients of weights.
      reads: which operands `weights` takes, by number.
    """

    inputs: Jaxpr
    weights: Jaxpr
    reads: tuple[int, ...]


def trace_stage(
    compute: Compute, inputs: StageInputs, *, differentiate: bool = True, split: bool = False
) -> StageProgram:
    """Traces a stage for inputs of these types.

    Args:
      compute: the stage.
      inputs: arrays or types.
      differentiate: whether there will be a backward.
      split: whether the backward comes in two halves.
    """
    leaves, structure = jax.tree.flatten(inputs)
    num_params = len(jax.tree.leaves(inputs.params))
    num_received = len(jax.tree.leaves(inputs.received))
    pulled = tuple(i for i in range(num_params + num_received) if is_floating(leaves[i]))

    # Only floating leaves of parameters and of what was received are differentiated. Nobody asks
    # for gradients of the micro-batch, the key or the number of the stage.
    def from_floating(floating: Sequence[Any], *leaves: Any) -> Any:
        filled = list(leaves)
        for number, leaf in zip(pulled, floating, strict=True):
            filled[number] = leaf
        outputs = compute(jax.tree.unflatten(structure, filled))
        return (select_floating_leaves(outputs.sent), outputs.loss), outputs

    def forward(*leaves: Any) -> Any:
        floating = [leaves[i] for i in pulled]
        if not differentiate:
            return from_floating(floating, *leaves)[1], ()
        _, pullback, outputs = jax.vjp(
            lambda floating: from_floating(floating, *leaves), floating, has_aux=True
        )
        return outputs, pullback

    # `pullback` is a pytree (`jax.tree_util.Partial`) whose leaves are the residuals. Returned from
    # a traced function they become outputs of the jaxpr, behind those of the stage, and what
    # comes back here is the same pytree with types in their place.
    traced, (outputs, pullback) = reading.trace(forward, *leaves)
    body = reading.open_jaxpr(traced)
    made = [v.aval for v in body.outvars][: len(jax.tree.leaves(outputs))]
    program = StageProgram(
        traced,
        jax.tree.unflatten(structure, [v.aval for v in body.invars]),
        jax.tree.unflatten(jax.tree.structure(outputs), made),
        num_params,
    )
    if not differentiate:
        return program
    return _add_backward(program, pulled, pullback, split)


def _add_backward(
    program: StageProgram, pulled: tuple[int, ...], pullback: Any, split: bool
) -> StageProgram:
    """Adds the backward to a program whose forward still returns all residuals."""
    # Calls are opened: what is made inside of one, such as a mask, could not be made again.
    whole = building.inline_calls(program.forward)
    body = reading.open_jaxpr(whole)
    num_outputs = len(jax.tree.leaves(program.outputs))
    outputs, read = body.outvars[:num_outputs], body.outvars[num_outputs:]
    # Numbers count inputs, then what is kept, then what is made again. A value that is a residual
    # twice gets one number, and is kept once.
    constants = dict(zip(body.constvars, reading.as_closed(whole).consts, strict=True))
    made = dict.fromkeys(reading.variables_in(read))
    made = [a for a in made if a not in body.invars and a not in constants]
    # A received activation is at hand only if its slot is held until the backward: no value that is
    # made again is to be what holds it.
    received = body.invars[program.num_params :][: len(jax.tree.leaves(program.inputs.received))]
    at_hand = (set(body.invars) - set(received)) | {a for a in received if a in read}
    kept, remade, remaking = choose_kept(body, made, at_hand | set(constants))
    number_of = {variable: i for i, variable in enumerate([*body.invars, *kept, *remade])}
    residuals: list[Any] = [
        _Constant(atom.val)
        if reading.is_literal(atom)
        else _Constant(constants[atom])
        if atom in constants
        else number_of[atom]
        for atom in read
    ]
    structure = jax.tree.structure(pullback)
    sent, loss = select_floating_leaves(program.outputs.sent), program.outputs.loss

    def backward(residuals: Any, cotangents: Any, seed: Any) -> Any:
        (gradients,) = jax.tree.unflatten(structure, residuals)((cotangents, seed))
        return gradients

    # From the pullback's structure and types alone: no array of the forward is in it.
    traced, _ = reading.trace(backward, [atom.aval for atom in read], sent, loss)
    num_trained = _count_trained(pulled, program.num_params)
    halves = split_backward(traced, num_trained) if split else None
    deferred: list[Any] = []
    if halves is not None:
        first = reading.open_jaxpr(halves.inputs)
        # Operands of the backward are residuals, then cotangents.
        late = [i for i in halves.reads if i >= len(residuals)]
        num_received = len(pulled) - num_trained
        deferred = [
            *(first.invars[i].aval for i in late),
            *(a.aval for a in first.outvars[num_received:]),
        ]
    # The forward, with only those residuals as outputs that are to be kept.
    ends = [*outputs, *kept]
    eqns = [body.eqns[i] for i in reading.find_equations_for(body, ends)]
    return dataclasses.replace(
        program,
        forward=building.rebuild(whole, body.invars, ends, eqns),
        pulled=pulled,
        remake=building.rebuild(whole, [*body.invars, *kept], remade, remaking) if remade else None,
        kept=tuple(atom.aval for atom in kept),
        residuals=tuple(residuals),
        backward=traced,
        halves=halves,
        deferred=tuple(deferred),
    )


def _count_trained(pulled: Sequence[int], num_params: int) -> int:
    return sum(number < num_params for number in pulled)


def select_floating_leaves(tree: Any) -> list[Any]:
    """Selects the leaves of a tree that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)]


def split_backward(jaxpr: Jaxpr, num_weights: int) -> Halves:
    """Divides a jaxpr whose first outputs are gradients of weights, the others of inputs.

    An equation that both need is in the first half. Loops are not divided: unroll them before. (A
    scan over layers is one equation that makes both kinds of gradients, so all of it would be in
    the first half.)

    Args:
      jaxpr: from residuals and cotangents to gradients.
      num_weights: how many of its outputs are gradients of weights.

    Returns:
      Two jaxprs that together compute each equation that is needed once; twice those that depend
      on no operand.
    """
    # Calls are opened first: an equation inside one could not go to another half than the call.
    # Those of `jax.checkpoint` are among them, so what is recomputed is divided, too.
    whole = building.inline_calls(jaxpr)
    body = reading.open_jaxpr(whole)
    of_weights, of_inputs = body.outvars[:num_weights], body.outvars[num_weights:]
    first = reading.find_equations_for(body, of_inputs)
    free = find_free_equations(body)
    # Backwards from the gradients of weights: what the first half does is taken from it, but for
    # what depends on no operand, such as a causal mask or the place of a shard. That costs less to
    # make again than to keep for each micro-batch.
    made_first = {out for i in set(first) - free for out in body.eqns[i].outvars}
    needed, second = set(reading.variables_in(of_weights)), []
    for i, eqn in reversed(list(enumerate(body.eqns))):
        if not (needed - made_first).isdisjoint(eqn.outvars):
            second.insert(0, i)
            needed.update(reading.variables_in(eqn.invars))
    # What crosses from the first half to the second: made there, and wanted here as an operand or
    # as a result. In order and without repetition, so that a trace is the same every time.
    made_second = {out for i in second for out in body.eqns[i].outvars}
    wanted = [atom for i in second for atom in body.eqns[i].invars] + list(of_weights)
    wanted = list(dict.fromkeys(reading.variables_in(wanted)))
    kept = [v for v in wanted if v in made_first]
    reads = [i for i, v in enumerate(body.invars) if v in set(wanted) - made_second]
    return Halves(
        building.rebuild(whole, body.invars, [*of_inputs, *kept], [body.eqns[i] for i in first]),
        building.rebuild(
            whole,
            [*(body.invars[i] for i in reads), *kept],
            of_weights,
            [body.eqns[i] for i in second],
        ),
        tuple(reads),
    )
