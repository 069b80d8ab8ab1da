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

from ampx.function_checks import check_callable
from ampx.jaxprs import folds, reading
from ampx.jaxprs.pure_calls import split_arrays
from ampx.jaxprs.reading import Equation
from ampx.tree_checks import describe_tree
from ampx.trees import merge_trainable, split_trainable

_DATA, _FIXED = -1, -2  # other labels, 0 and up, are the places of leaves


def forward_order(loss_fn: Callable[..., Any], params: Any, *args: Any) -> tuple[int, ...]:
    """Finds the order in which a forward pass first reads the leaves of its parameters.

    A backward pass completes gradients in the reverse of it, whatever the leaves are called. A leaf
    counts as read where it first meets data or another leaf: casts, transposes and other functions
    of the leaf alone do not count. Nothing is executed.

    Args:
      loss_fn: a function of `params` and `args`, as it is given to `ampx.value_and_grad`.
      params: a pytree of arrays or of `jax.ShapeDtypeStruct`. What is not trained may be among
        them, such as integers and the functions of an Equinox module.
      *args: arrays, or `jax.ShapeDtypeStruct` in their places, and anything else.

    Returns:
      Places of the leaves in the flattened tree of their gradients, which leaves out what is not
      trained; those that are not read come last. It is the `order` of `ampx.bucket_layout` and
      `ampx.all_reduce`.

    Raises:
      TypeError: if `loss_fn` is no function, or `params` hold nothing that is trained.

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
    trained, rest = split_trainable(params)
    leaves, structure = jax.tree.flatten(trained)
    if jax.tree.leaves(params) and not leaves:
        raise TypeError(
            "params must hold arrays of floating numbers, or jax.ShapeDtypeStruct in their places, "
            f"got {describe_tree(params)}"
        )
    others, merge = split_arrays((rest, args))

    def of_arrays(leaves: Any, others: Any) -> Any:
        rest, args = merge(others)
        return loss_fn(merge_trainable(structure.unflatten(leaves), rest), *args)

    jaxpr, _ = reading.trace(of_arrays, leaves, others)
    places = [*range(len(leaves)), *[_DATA] * len(others)]
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
