"""What the results of a compiled program wait for, read from the text of its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampx.diagnostics.dataflow import OF_VERDICTS

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_FLOATS = re.compile(r"\b(?:bf|f|c)\d+\w*\[([\d,]*)\]")
_COLLECTIVES = ("all-reduce", "all-reduce-start", "reduce-scatter", "all-to-all")


class CompiledReduction(NamedTuple):
    """A reduction that is left in the compiled program.

    Attributes:
      place: in the order of the program; `compiled_waits_for` of an output names it so.
      name: of the instruction.
      opcode: such as `all-reduce`.
      gradients: how many gradient reductions were merged into it; 0 for a verdict.
    """

    place: int
    name: str
    opcode: str
    gradients: int


class Instruction(NamedTuple):
    """One line of HLO: `%name = result opcode(operands), attributes`.

    Attributes:
      name: without the leading `%`.
      is_root: whether its value is what its computation returns.
      opcode: such as `fusion` or `all-reduce`.
      result: the type as it is printed, such as `f32[8,128]{1,0}`; a tuple's in parentheses.
      operands: names, in order; a value that is passed twice stands here twice.
      operand_types: the type of each operand, `""` where the text does not define it.
      called: names of the computations that the instruction runs.
      attributes: the rest of the line, unparsed.
    """

    name: str
    is_root: bool
    opcode: str
    result: str
    operands: tuple[str, ...]
    operand_types: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str


def parse_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses HLO text: the instructions of each computation, in order, and the entry's name."""
    found: dict[str, list[Instruction]] = {}
    entry, current, types = "", [], {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current, types = found.setdefault(header[2], []), {}
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, kind, opcode, rest = match.groups()
            end = _end_of_operands(rest)
            operands = _NAME.findall(rest[:end])
            types[name] = kind
            called = [_NAME.findall(group) for group in _CALLED.findall(rest[end:])]
            current.append(
                Instruction(
                    name,
                    bool(root),
                    opcode,
                    kind,
                    tuple(operands),
                    tuple(types.get(operand, "") for operand in operands),
                    tuple(name for names in called for name in names),
                    rest[end:],
                )
            )
    return found, entry


def _end_of_operands(rest: str) -> int:
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(rest)


def _gradients_in(instruction: Instruction) -> int:
    """How many arrays of floats, each too large for a verdict, an instruction reduces."""
    dims = [shape.split(",") for shape in _FLOATS.findall(" ".join(instruction.operand_types))]
    sizes = [math.prod(int(dim) for dim in shape if dim) for shape in dims]
    large = sum(size > OF_VERDICTS for size in sizes)
    # An exchange has one operand for each device.
    return min(1, large) if instruction.opcode == "all-to-all" else large


def find_waits_of_outputs(
    text: str, outputs: int
) -> tuple[tuple[CompiledReduction, ...], list[tuple[int, ...]]]:
    """The reductions of a compiled program, and which of them each of its outputs waits for.

    A loop or a branch waits for all of its operands, as it does when it runs.

    Args:
      text: of the optimized HLO.
      outputs: how many the program has.

    Returns:
      The reductions, and for each output the places of those that hold gradients.
    """
    computations, entry = parse_computations(text)
    reductions: list[CompiledReduction] = []
    inside: dict[str, frozenset[int]] = {}

    def own(instruction: Instruction) -> Iterator[int]:
        if instruction.opcode in _COLLECTIVES:
            place, gradients = len(reductions), _gradients_in(instruction)
            opcode = instruction.opcode.removesuffix("-start")
            reductions.append(CompiledReduction(place, instruction.name, opcode, gradients))
            yield place
            return
        for called in instruction.called:
            if called not in inside:
                body = computations.get(called, ())
                inside[called] = frozenset(place for each in body for place in own(each))
            yield from inside[called]

    waits: dict[str, frozenset[int]] = {}
    results: list[frozenset[int]] = []
    for instruction in computations[entry]:
        above = [waits.get(name, frozenset()) for name in instruction.operands]
        waits[instruction.name] = frozenset(own(instruction)).union(*above)
        if instruction.is_root:
            is_tuple = instruction.opcode == "tuple"
            results = above if is_tuple else [waits[instruction.name]] * outputs
    held = {reduction.place for reduction in reductions if reduction.gradients}
    return tuple(reductions), [tuple(sorted(each & held)) for each in results]
