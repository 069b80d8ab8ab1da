"""Layers on their way between the devices that store them and those that run them.

In each round a device sends one block and receives one, so that a round is one `ppermute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mesh_axes import mark_varying, varying_axes

Place = tuple[int, int]  # a device, and which of its blocks


class Round(NamedTuple):
    """One block a device, at most.

    Attributes:
      pairs: (sender, receiver).
      taken: for each device the place that it sends from; one too many for none.
      put: for each device the place that it receives into; likewise.
    """

    pairs: tuple[tuple[int, int], ...]
    taken: tuple[int, ...]
    put: tuple[int, ...]

    def reversed(self) -> Round:
        """The way back."""
        return Round(tuple((t, s) for s, t in self.pairs), self.put, self.taken)


def exchange_rounds(
    sources: Sequence[Place], targets: Sequence[Place], num_devices: int
) -> list[Round]:
    """Rounds in which every block gets from its source to its target."""
    nowhere = [1 + max(place for _, place in ends) for ends in (sources, targets)]
    left = dict(enumerate(zip(sources, targets, strict=True)))
    rounds = []
    while left:
        chosen = [left.pop(block) for block in _matching(left)]
        taken, put = ([count] * num_devices for count in nowhere)
        for (sender, place_there), (receiver, place_here) in chosen:
            taken[sender], put[receiver] = place_there, place_here
        pairs = tuple((source[0], target[0]) for source, target in chosen)
        rounds.append(Round(pairs, tuple(taken), tuple(put)))
    return rounds


def _matching(left: dict[int, tuple[Place, Place]]) -> list[int]:
    """As many blocks as possible with different senders and receivers (Kuhn's algorithm)."""
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


def exchanged(tree: Any, rounds: Sequence[Round], size: int, axis_name: str) -> Any:
    """Blocks in their new places; leaves have a leading axis of places, afterwards of this size."""
    device = lax.axis_index(axis_name)

    def exchange(leaf: jax.Array) -> jax.Array:
        arrived = mark_varying(
            jnp.zeros((size + 1, *leaf.shape[1:]), leaf.dtype), tuple(varying_axes(leaf))
        )
        for pairs, taken, put in rounds:
            block = lax.dynamic_index_in_dim(leaf, jnp.asarray(taken)[device], keepdims=False)
            block = lax.ppermute(block, axis_name, pairs)
            place = jnp.asarray(put)[device]
            arrived = lax.dynamic_update_index_in_dim(arrived, block, place, 0)
        return arrived[:size]

    return jax.tree.map(exchange, tree)
