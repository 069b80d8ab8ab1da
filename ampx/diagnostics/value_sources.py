"""What the results of a step are made of: which inputs go into each, and which come out unchanged.

Two facts follow each value through a program. Its `reads` are the inputs that it depends on, as
bits; its `own` is the input that it is, number for number, or -1:

    new = add params update       own -1              reads {params, moments, batch}
    old = select_n skip mu mu     own mu              reads {skip, mu}
    key = opt-barrier key         own key             reads {key}

An input of which the result that takes its place is `own` is *fixed*: it is the same in each step.
What reads fixed inputs alone is the same in each step, too, such as random numbers.

A matrix that is drawn from nothing that changes and multiplies others, as a random projection does,
is meant to be the same in each step. So a product does not read such draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ampx.diagnostics import bit_sets
from ampx.diagnostics.step_programs import StepProgram
from ampx.jaxprs import folds, primitives
from ampx.jaxprs.reading import Equation, Jaxpr

_DRAWING = frozenset({"random_bits", "random_gamma"})


class Source(NamedTuple):
    """What a value is made of.

    Attributes:
      own: the number of the input that it is; -1 where it is none.
      reads: the inputs that it depends on, as bits, and behind them the draws of random numbers.
    """

    own: int = -1
    reads: int = 0


class Draw(NamedTuple):
    """An equation that draws random numbers.

    Attributes:
      bit: what stands for it among the reads of a value.
      reads: what its key depends on.
      eqns: the equation and those around it, innermost first.
    """

    bit: int
    reads: int
    eqns: tuple[Equation, ...]


class Sources:
    """The sources of all results of a step.

    Attributes:
      outputs: in the order of the results.
      draws: the draws of random numbers, in the order of the program.
      fixed: the inputs, by number, that come out of the step as they went in.
      changed: the other carried results: the number of each, and that of its input.
      moved: what goes into those, as bits.
      of_inputs: the bits of all inputs.
    """

    def __init__(self, program: StepProgram) -> None:
        count = len(program.inputs)
        self._first = count
        self.of_inputs = (1 << count) - 1
        self._draws: dict[tuple[int, ...], Draw] = {}
        self.outputs = self._follow(program.jaxpr, [Source(i, 1 << i) for i in range(count)], ())
        self.draws = list(self._draws.values())
        carried = program.carried.items()
        self.fixed = {i for number, i in carried if self.outputs[number].own == i}
        self.changed = [(number, i) for number, i in carried if i not in self.fixed]
        self.moved = _unite([self.outputs[number] for number, _ in self.changed]).reads

    def _follow(
        self, jaxpr: Jaxpr, operands: Sequence[Source], around: tuple[Equation, ...]
    ) -> list[Source]:
        return folds.fold_inside(jaxpr, operands, self._apply, lambda _: Source(), around=around)

    def _apply(self, eqns: tuple[Equation, ...], inputs: list[Source]) -> Sequence[Source]:
        eqn = eqns[0]
        name, count = eqn.primitive.name, len(eqn.outvars)
        # Reads are only added, and what is no input stays none, so a loop settles.
        results = folds.follow_bodies(
            eqn, inputs, lambda body, operands: self._follow(body, operands, eqns), _unite
        )
        if results is not None:
            return results
        if name in primitives.SAME_NUMBERS and len(inputs) == count:
            return inputs
        if name == "select_n":
            return [_unite(inputs[1:], inputs[:1])]
        if name in primitives.CONTRACTIONS:
            inputs = [value for value in inputs if value.reads & self.of_inputs]
        made = _unite(inputs)._replace(own=-1)
        if name in _DRAWING:
            key = tuple(map(id, eqns))
            before = self._draws.get(key)
            bit = before.bit if before else 1 << self._first + len(self._draws)
            self._draws[key] = Draw(bit, made.reads, eqns)
            made = made._replace(reads=made.reads | bit)
        return [made] * count


def _unite(values: Sequence[Source], read: Sequence[Source] = ()) -> Source:
    """What is one of several values, and depends on others."""
    reads = bit_sets.unite(value.reads for value in (*values, *read))
    owns = {value.own for value in values}
    return Source(owns.pop() if len(owns) == 1 else -1, reads)
