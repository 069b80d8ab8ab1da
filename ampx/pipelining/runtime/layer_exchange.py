"""Layers on their way between the devices that store them and those that run them.

Stored layers are divided in the order of the model, so that a checkpoint knows nothing of stages.
With chunks, or stages of unequal length, a schedule wants others. 8 layers for `interleaved` on 2
devices, 2 chunks, as 4 blocks of 2 layers:

           stored           run
  device 0  [0 1] [2 3]      [0 1] [4 5]     stages 0 and 2
  device 1  [4 5] [6 7]      [2 3] [6 7]     stages 1 and 3

  round 1   device 0 sends [2 3] to device 1, which sends [4 5] to device 0
  round 2   each sends the block that it keeps to itself

In each round a device sends one block and receives one, at most: that is what one `ppermute` does.
Seen as a graph, with senders on one side, receivers on the other and a line for each block, a round
is a matching, a set of lines of which no two share an end. Each round takes a largest one, until no
line is left. There are at least as many rounds as any device has blocks to send, or to receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mesh_axes import mark_varying, varying_axes
from ampx.pipelining.runtime.buffers import read_at, write_at

BlockPlace = tuple[int, int]  # a device, and which of its blocks


class Round(NamedTuple):
    """An exchange in which each device sends and receives one block, at most.

    Attributes:
      pairs: (sender, receiver).
      taken: for each device the place that it sends from; one too many for none.
      put: for each device the place that it receives into; likewise.
    """

    pairs: tuple[tuple[int, int], ...]
    taken: tuple[int, ...]
    put: tuple[int, ...]

    def reversed(self) -> Round:
        """Makes the round that brings all blocks back."""
        return Round(tuple((t, s) for s, t in self.pairs), self.put, self.taken)


def plan_exchange(
    sources: Sequence[BlockPlace], targets: Sequence[BlockPlace], num_devices: int
) -> list[Round]:
    """Plans rounds in which every block gets from its source to its target.

    Args:
      sources: for each block where it lies.
      targets: for each block where it is to lie.
      num_devices: how many devices there are.

    Returns:
      Rounds that together have each block once.
    """
    # One place more than there are, for devices without a block in a round. A device that sends
    # none reads some block all the same (JAX clamps the index), and nobody receives it. A device
    # that receives none is given zeros by `ppermute`, and puts them into padding, or into the row
    # that is cut off.
    nowhere = [1 + max(place for _, place in ends) for ends in (sources, targets)]
    left = dict(enumerate(zip(sources, targets, strict=True)))
    rounds = []
    while left:
        chosen = [left.pop(block) for block in _find_matching(left)]
        taken, put = ([count] * num_devices for count in nowhere)
        for (sender, place_there), (receiver, place_here) in chosen:
            taken[sender], put[receiver] = place_there, place_here
        pairs = tuple((source[0], target[0]) for source, target in chosen)
        rounds.append(Round(pairs, tuple(taken), tuple(put)))
    return rounds


def _find_matching(left: dict[int, tuple[BlockPlace, BlockPlace]]) -> list[int]:
    """Finds as many blocks as possible with different senders and receivers (Kuhn's algorithm).

    Senders are taken one after the other. `block_to` is a matching all the time. A sender whose
    receivers are all taken may have one of them if that one's sender can be given another, and so
    on: an augmenting path. By Berge's theorem a matching without such a path is a largest one.
    """
    block_to: dict[int, int] = {}  # by receiver

    def assign(sender: int, tried: set[int]) -> bool:
        for block, ((owner, _), (receiver, _)) in left.items():
            if owner != sender or receiver in tried:
                continue
            tried.add(receiver)
            if receiver not in block_to or assign(left[block_to[receiver]][0][0], tried):
                block_to[receiver] = block
                return True
        return False

    for sender in dict.fromkeys(source[0] for source, _ in left.values()):
        assign(sender, set())
    return list(block_to.values())


def exchange_blocks(tree: Any, rounds: Sequence[Round], size: int, axis_name: str) -> Any:
    """Brings blocks to their new places.

    Args:
      tree: leaves of shape (old places, ...), different on each device.
      rounds: from `plan_exchange`.
      size: how many places there are afterwards; those that no block goes to have zeros.
      axis_name: the mapped axis of the stages.

    Returns:
      Leaves of shape (size, ...).
    """
    device = lax.axis_index(axis_name)
    # One row more only if some device receives nothing in some round.
    rows = max(size, *(1 + place for r in rounds for place in r.put))

    def exchange(leaf: jax.Array) -> jax.Array:
        arrived = mark_varying(
            jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), sorted(varying_axes(leaf))
        )
        for pairs, taken, put in rounds:
            block = read_at(leaf, read_at(jnp.asarray(taken), device))
            block = lax.ppermute(block, axis_name, pairs)
            arrived = write_at(arrived, block, read_at(jnp.asarray(put), device))
        return arrived[:size]

    return jax.tree.map(exchange, tree)
