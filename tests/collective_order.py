"""Finds collectives that a compiled program may start in another order on each device.

XLA starts operations in the order of the program. But on a CPU a loop or a switch that has begun
may go on in another thread, and what stands behind it begins meanwhile, unless it reads a result of
it. If both hold collectives, devices may wait for each other for ever.
"""

import re
from typing import NamedTuple

_COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
# "  ROOT %name = type kind(%operand, ...), attribute=%computation, metadata=..."
_OPERATION = re.compile(r"\s+(?:ROOT )?%(\S+) = .*?[ )}\]] ?([a-z][a-z-]*)\((.*?)\)(.*)")
_NAME = re.compile(r"%([\w.-]+)")


class Operation(NamedTuple):
    name: str
    kind: str
    operands: list[str]
    bodies: list[str]  # the computations that it runs


def read_computations(text: str) -> dict[str, list[Operation]]:
    """The operations of each computation of a compiled program, in their order, from its text."""
    found: dict[str, list[Operation]] = {}
    own: list[Operation] = []
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            own = found[start[1]] = []
        elif match := _OPERATION.match(line):
            name, kind, operands, rest = match.groups()
            bodies = _NAME.findall(rest.partition(", metadata=")[0])
            own.append(Operation(name, kind, _NAME.findall(operands), bodies))
    return found


def find_unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Pairs of operations with collectives, a loop or a switch and one behind it that may overtake.

    Args:
      text: `compiled.as_text()`.
    """
    computations = read_computations(text)
    exchanging: dict[str, bool] = {}

    def exchanges(computation: str) -> bool:
        if computation not in exchanging:
            exchanging[computation] = any(map(is_exchange, computations.get(computation, ())))
        return exchanging[computation]

    def is_exchange(operation: Operation) -> bool:
        return operation.kind in _COLLECTIVES or any(map(exchanges, operation.bodies))

    pairs = []
    for operations in computations.values():
        waits_for: dict[str, set[str]] = {}  # all operations whose results it needs
        for operation in operations:
            direct = [name for name in operation.operands if name in waits_for]
            waits_for[operation.name] = {*direct}.union(*(waits_for[name] for name in direct))
        places = list(filter(is_exchange, operations))
        for number, first in enumerate(places):
            if first.kind not in _COLLECTIVES:
                behind = places[number + 1 :]
                pairs += [
                    (first.name, o.name) for o in behind if first.name not in waits_for[o.name]
                ]
    return pairs
