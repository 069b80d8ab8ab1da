"""Finds collectives that a compiled program may start in another order on each device.

XLA starts operations in the order of the program. But on a CPU a loop or a switch that has begun
may go on in another thread, and what stands behind it begins meanwhile, unless it reads a result of
it. If both hold collectives, devices may wait for each other for ever.
"""

from collections.abc import Iterable

from ampx.diagnostics.hlo import Instruction, parse_computations

_COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}


def find_needed(instructions: Iterable[Instruction]) -> dict[str, set[str]]:
    """For each instruction of a computation those whose results it needs, directly or not."""
    needed: dict[str, set[str]] = {}
    for instruction in instructions:  # each is printed after its operands
        direct = [name for name in instruction.operands if name in needed]
        needed[instruction.name] = {*direct}.union(*(needed[name] for name in direct))
    return needed


def find_unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions with collectives: a loop or switch, and one that may overtake it.

    Args:
      text: `compiled.as_text()`.
    """
    computations, _ = parse_computations(text)
    exchanging: dict[str, bool] = {}

    def exchanges(computation: str) -> bool:
        if computation not in exchanging:
            exchanging[computation] = any(map(is_exchange, computations.get(computation, ())))
        return exchanging[computation]

    def is_exchange(instruction: Instruction) -> bool:
        return instruction.opcode in _COLLECTIVES or any(map(exchanges, instruction.called))

    pairs = []
    for instructions in computations.values():
        needed = find_needed(instructions)
        places = list(filter(is_exchange, instructions))
        for number, first in enumerate(places):
            if first.opcode not in _COLLECTIVES:
                behind = places[number + 1 :]
                pairs += [
                    (first.name, other.name)
                    for other in behind
                    if first.name not in needed[other.name]
                ]
    return pairs
