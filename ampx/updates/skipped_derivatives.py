"""Derivatives of a step that may be skipped: on a skip, those of what stays.

A skipped step takes none of its results, so they get a gradient of zero. But its gradients are
infinite or NaN, and so are derivatives at them, and zero times infinity is NaN:

    w' = select(skip, w, w - rate * g / sqrt(v + g**2))         with g infinite
    cotangent of g = 0 * NaN = NaN                              0 is meant

So wherever something is computed whether a step is skipped or not, what goes in and what comes out
is given its derivative here. The inside of a branch needs none of it: a `lax.cond` runs one way
alone, and where `vmap` turns it into a select, JAX guards its operands in the same way. It matters
where an update itself is differentiated: in learned optimizers, in MAML of first order, and for
gradients of hyperparameters. What is computed does not change.

What the gradients themselves are functions of is not reached from here: the second derivative of a
loss that overflowed is not finite either.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mesh_axes import varying_axes
from ampx.trees import is_float0, is_floating


def stop_gradient_if(skip: jax.Array, tree: Any) -> Any:
    """The same tree; its floating arrays of JAX have no derivative if `skip`, a bool, is true.

    For what goes into a computation that is in vain on a skip. What devices share that decide each
    for itself is left alone: it would vary by its type, and what varies is taken for shards.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = varying_axes(skip)

    def may_be_guarded(x: Any) -> bool:
        return isinstance(x, jax.Array) and is_floating(x) and axes <= varying_axes(x)

    places = [place for place, leaf in enumerate(leaves) if may_be_guarded(leaf)]
    guarded = _choose_derivative(skip, [leaves[n] for n in places], None)
    for place, leaf in zip(places, guarded, strict=True):
        leaves[place] = leaf
    return structure.unflatten(leaves)


def derive_held(skip: jax.Array, new: Any, old: Any) -> Any:
    """The arrays `new`, which have the derivative of `old` if `skip`, a bool scalar, is true.

    For what comes out of a computation that has chosen `old` on a skip already.

    Args:
      skip: bool scalar.
      new: a tree of arrays, on a skip equal to `old`.
      old: a tree of the same structure and shapes; its dtypes may differ.
    """
    return _choose_derivative(skip, new, old)


@jax.custom_jvp
def _choose_derivative(skip: jax.Array, new: Any, old: Any) -> Any:
    del old
    if not isinstance(skip, jax.core.Tracer):
        return new  # outside of `jit` the choice below would copy all arrays
    # A choice between an array and itself, which XLA drops. If each lane of `vmap` has a `skip` of
    # its own, the derivative has lanes, and JAX wants them in the value as well.
    return jax.tree.map(lambda x: lax.select(skip, x, x) if is_floating(x) else x, new)


@_choose_derivative.defjvp
def _differentiate(primals: Any, tangents: Any) -> tuple[Any, Any]:
    skip = primals[0]
    _, of_new, of_old = tangents
    if of_old is None:
        of_old = jax.tree.map(lambda x: jnp.zeros((), x.dtype), of_new)

    # In reverse mode a cotangent goes to `old` on a skip and else to `new`, zeros to the other.
    def choose(new: Any, old: Any) -> Any:
        return new if is_float0(new) else jnp.where(skip, old.astype(new.dtype), new)

    return _choose_derivative(*primals), jax.tree.map(choose, of_new, of_old)
