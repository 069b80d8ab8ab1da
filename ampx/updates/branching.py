"""One branch around a whole update: a step that is skipped costs no update.

    skip is known ──┬── no ───► the update runs: reads and writes everything
                    └── yes ──► what was there before is handed on

A `lax.cond` costs nothing where it is taken: on both ways XLA writes into the buffers of donated
arguments. A choice between old and new, leaf by leaf, needs both in memory at once, and on CPUs
that means a copy of every moment. But a `cond` is one operation: all of its results wait for all of
its operands, and nothing inside begins before `skip` is known.

Both ways must return the same types. An update may change what its arrays vary over inside
`shard_map`, or how they lie on an Explicit mesh; then what is handed on gets the same marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs.hoisting import hoist_sums
from ampx.mesh_axes import mark_varying, match_type, varying_axes
from ampx.trees import is_float0, is_floating


def run_unless(
    skip: jax.Array, run: Callable[..., Any], stay: Callable[[Any], Any], *gradients: Any
) -> Any:
    """Runs an update unless a step is skipped.

    Collectives inside are safe if `skip` is the same on all devices that take part in them.

    Args:
      skip: bool scalar. Under `vmap` with a value for each lane the branch becomes a select.
      run: the update: a function of `gradients` to a tree of arrays.
      stay: what is returned on a skip: a function of a tree like the results of `run`, of which
        only shapes and dtypes may be read, to a tree of the same structure, shapes and dtypes.
      *gradients: trees. Sums of them alone, such as their norm, are computed in front of the
        branch, where XLA merges them with the verdict.
    """
    # Structure and types of what `run` returns.
    found: list[Any] = []
    axes = sorted(varying_axes(skip))

    given, of_gradients = jax.tree.flatten(gradients)
    places = [place for place, leaf in enumerate(given) if is_floating(leaf)]

    def take(*floating: Any) -> list[Any]:
        filled = list(given)
        for place, leaf in zip(places, floating, strict=True):
            filled[place] = leaf
        leaves, structure = jax.tree.flatten(run(*of_gradients.unflatten(filled)))
        leaves = [leaf if is_float0(leaf) else jnp.asarray(leaf) for leaf in leaves]
        held = structure.flatten_up_to(stay(structure.unflatten(leaves)))
        # Usually what is new varies over more than what is old. Where it is the other way round, it
        # is the new that gets the marks.
        for place, old in enumerate(held):
            if not is_float0(leaves[place]):
                also = sorted({*axes, *varying_axes(jnp.asarray(old))})
                leaves[place] = mark_varying(leaves[place], also)
        arrays = _arrays(leaves)
        types = iter(jax.eval_shape(lambda: arrays))
        found[:] = structure, [leaf if is_float0(leaf) else next(types) for leaf in leaves]
        return arrays

    operands = [jnp.asarray(given[place]) for place in places]
    # A `cond` traces its first branch first, so `keep` finds the types.
    take_rest = hoist_sums(take, operands) if operands else take

    def keep() -> list[Any]:
        structure, types = found
        held = structure.flatten_up_to(stay(structure.unflatten(types)))
        pairs = zip(_arrays(held), _arrays(types), strict=True)
        return [match_type(jnp.asarray(old), new) for old, new in pairs]

    arrays = iter(lax.cond(~skip, take_rest, keep))
    structure, types = found
    # An empty gradient of an integer is no array, and the same on both ways.
    return structure.unflatten([leaf if is_float0(leaf) else next(arrays) for leaf in types])


def _arrays(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if not is_float0(leaf)]
