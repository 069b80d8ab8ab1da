"""The order in which a model reads its parameters, which is a good order of buckets.

A backward pass completes gradients in the reverse of the order in which the forward pass has read
the parameters. Buckets that follow it can be reduced as soon as they are full. The order of a
pytree is that of sorted names, "attention" before "embedding", and says nothing about use.

The order is found without running the model: its jaxpr is followed from equation to equation, each
value labelled by what it is made of.

    w             leaf 3              w itself
    w.T, w * 2    leaf 3              still nothing but the leaf: not read yet
    x             _DATA               what is made of the batch, of several leaves or by a loop
    2.0           _FIXED              a number in the program, and functions of such numbers
    w.T @ x       _DATA; reads 3      where a leaf meets something else, it is read
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ampx.checking import check_callable
from ampx.jaxprs import folds, reading
from ampx.jaxprs.pure_calls import split_arrays
from ampx.jaxprs.reading import Equation

_DATA, _FIXED = -1, -2  # other labels, 0 and up, are the places of leaves


def forward_order(loss_fn: Callable[..., Any], params: Any, *args: Any) -> tuple[int, ...]:
    """Finds the order in which a forward pass first reads the leaves of its parameters.

    A backward pass completes gradients in the reverse of it, whatever the leaves are called. A leaf
    counts as read where it first meets data or another leaf: casts, transposes and other functions
    of the leaf alone do not count. Nothing is executed.

    Args:
      loss_fn: a function of `params` and `args`, as it is given to `ampx.value_and_grad`.
      params: a pytree of arrays or of `jax.ShapeDtypeStruct`.
      *args: arrays, or `jax.ShapeDtypeStruct` in their places, and anything else.

    Returns:
      Places of the leaves in the flattened tree; those that are not read come last. It is the
      `order` of `ampx.bucket_layout` and `ampx.all_reduce`.

    Raises:
      TypeError: if `loss_fn` is no function.
      ValueError: if a leaf of `params` is not an array.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import forward_order
      >>> params = {"embedding": jnp.ones((4, 4)), "attention": jnp.ones((4, 4))}
      >>> def loss(params, tokens):
      ...     return jnp.sum(params["embedding"][tokens] @ params["attention"])
      >>> forward_order(loss, params, jnp.arange(2))  # "attention" is leaf 0
      (1, 0)
    """
    check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
    leaves = jax.tree.leaves(params)
    arrays, merge = split_arrays((params, args))
    if len(split_arrays(params)[0]) != len(leaves):
        raise ValueError(
            "every leaf of params must be an array or a jax.ShapeDtypeStruct, got leaves of types "
            f"{sorted({type(leaf).__name__ for leaf in leaves})}"
        )

    def of_arrays(*arrays: Any) -> Any:
        params, args = merge(arrays)
        return loss_fn(params, *args)

    # The leaves of params are the first arrays, since (params, args) is flattened in this order.
    jaxpr, _ = reading.trace(of_arrays, *arrays)
    places = [i if i < len(leaves) else _DATA for i in range(len(arrays))]
    order: dict[int, None] = {}  # the leaves read so far; a dict keeps the order of its keys

    def made_of(eqn: Equation, operands: list[int]) -> list[int]:
        """Adds the leaves that an equation reads to `order`; tells what its results are made of."""
        entered = folds.bodies_with_operands(eqn, operands)
        results = [follow(*body) for body in entered]
        if reading.called_body(eqn) is not None:
            return results[0]
        # A loop or a branch mixes what it gets, whatever its bodies make of it.
        sources = {_DATA} if entered else set(operands) - {_FIXED}
        if len(sources) > 1:
            order.update((operand, None) for operand in operands if operand >= 0)
        source = sources.pop() if len(sources) == 1 else _DATA if sources else _FIXED
        return [source] * len(eqn.outvars)

    follow = functools.partial(
        folds.fold, apply=made_of, constant=lambda _: _DATA, literal=lambda _: _FIXED
    )
    follow(jaxpr, places)
    # Leaves that nothing reads come last: their gradients are zeros, known from the start.
    return tuple(dict.fromkeys((*order, *range(len(leaves)))))
