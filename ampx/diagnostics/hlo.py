"""What the results of a compiled program wait for, read from the text of its HLO.

The compiler may merge reductions, split them or move them, so what a jaxpr allows need not be left
in the program that runs. XLA prints that program as computations, one of which is the entry:

    %add (a: f32[], b: f32[]) -> f32[] {                     a header
      ...
    }
    ENTRY %main (p0: f32[8], p1: f32[8]) -> (f32[8], f32[8]) {
      %all-reduce = (f32[8]{0}, f32[8]{0}) all-reduce(%p0, %p1), to_apply=%add
      %get = f32[8]{0} get-tuple-element(%all-reduce), index=0
      ROOT %tuple = (f32[8]{0}, f32[8]{0}) tuple(%get, ...)
    }

Here two gradients share one reduction. There is no public parser for this text; what is read of it
are names, opcodes, operands, types and calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampx.diagnostics.dataflow import OF_VERDICTS

# The start of a computation; the name of the entry has a mark before it.
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# ROOT, name, type, opcode, and the rest: operands, the parenthesis that closes them, attributes. A
# tuple's type holds spaces and parentheses, so the type ends where ` opcode(` follows first.
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
# Which attributes name computations: of reductions, fusions, loops, branches and calls.
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_FLOATS = re.compile(r"\b(?:bf|f|c)\d+\w*\[([\d,]*)\]")
# An asynchronous reduction is a pair, all-reduce-start and all-reduce-done: the first is counted,
# and the second waits for it as its operand. An all-gather is not listed: it sums no gradients.
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
    entry, current, types = "", [], {}  # types by name, within one computation
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
    """Where the parenthesis closes that was opened before `rest`."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(rest)


def _count_gradients(instruction: Instruction) -> int:
    """Counts the arrays of floats, each too large for a verdict, that an instruction reduces."""
    dims = [shape.split(",") for shape in _FLOATS.findall(" ".join(instruction.operand_types))]
    sizes = [math.prod(int(dim) for dim in shape if dim) for shape in dims]
    large = sum(size > OF_VERDICTS for size in sizes)
    # An exchange has one operand for each device.
    return min(1, large) if instruction.opcode == "all-to-all" else large


def find_waits_of_outputs(
    text: str, outputs: int
) -> tuple[tuple[CompiledReduction, ...], list[tuple[int, ...]]]:
    """Finds the reductions of a compiled program and which of them each of its outputs waits for.

    A loop or a branch waits for all of its operands, as it does when it runs.

    Args:
      text: the optimized HLO, from `compiled.as_text()`.
      outputs: how many the program has.

    Returns:
      The reductions, and for each output the places of those that hold gradients.
    """
    computations, entry = parse_computations(text)
    reductions: list[CompiledReduction] = []
    inside: dict[str, frozenset[int]] = {}  # of a computation: a shared one is counted once

    def record_reductions(instruction: Instruction) -> Iterator[int]:
        if instruction.opcode in _COLLECTIVES:
            place, gradients = len(reductions), _count_gradients(instruction)
            opcode = instruction.opcode.removesuffix("-start")
            reductions.append(CompiledReduction(place, instruction.name, opcode, gradients))
            yield place
            return
        for called in instruction.called:
            if called not in inside:
                body = computations.get(called, ())
                inside[called] = frozenset(
                    place for each in body for place in record_reductions(each)
                )
            yield from inside[called]

    # Instructions are printed after their operands, so one sweep over the entry is enough.
    waits: dict[str, frozenset[int]] = {}
    results: list[frozenset[int]] = []
    for instruction in computations[entry]:
        above = [waits.get(name, frozenset()) for name in instruction.operands]
        waits[instruction.name] = frozenset(record_reductions(instruction)).union(*above)
        if instruction.is_root:
            # The outputs are the operands of the last tuple, if the program does not end in a call.
            is_tuple = instruction.opcode == "tuple"
            results = above if is_tuple else [waits[instruction.name]] * outputs
    held = {reduction.place for reduction in reductions if reduction.gradients}
    return tuple(reductions), [tuple(sorted(each & held)) for each in results]
