"""In which order a model reads its parameters: a good order of buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ampx.jaxprs import reading
from ampx.jaxprs.pure_calls import split_arrays
from ampx.jaxprs.reading import Equation, Jaxpr

_DATA, _FIXED = -1, -2  # what is no leaf of the parameters: computed from arguments, or constant


def forward_order(loss_fn: Callable[..., Any], params: Any, *args: Any) -> tuple[int, ...]:
    """The order in which a forward pass first reads the leaves of its parameters.

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

    jaxpr, _ = reading.trace(of_arrays, *arrays)
    places = [i if i < len(leaves) else _DATA for i in range(len(arrays))]
    order: dict[int, None] = {}
    _read(jaxpr, places, order)
    return tuple(dict.fromkeys((*order, *range(len(leaves)))))


def _read(jaxpr: Jaxpr, inputs: Sequence[int], order: dict[int, None]) -> list[int]:
    """Adds the leaves that a jaxpr reads to `order`; tells which leaf each output is made of."""
    opened = reading.open_jaxpr(jaxpr)
    made_of: dict[Any, int] = dict(zip(opened.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return _FIXED if reading.is_literal(atom) else made_of.get(atom, _DATA)

    for eqn in opened.eqns:
        operands = [of(atom) for atom in eqn.invars]
        body = reading.called_body(eqn)
        results = [_DATA] * len(eqn.outvars)
        if body is not None:
            results = _read(body, operands, order)
        elif repeated := _bodies_with(eqn, operands):
            for inner, inner_operands in repeated:
                _read(inner, inner_operands, order)
        else:
            sources = set(operands) - {_FIXED}
            if len(sources) == 1:
                results = [sources.pop()] * len(eqn.outvars)
            elif not sources:
                results = [_FIXED] * len(eqn.outvars)
            else:
                order.update((operand, None) for operand in operands if operand >= 0)
        made_of.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in opened.outvars]


def _bodies_with(eqn: Equation, operands: list[int]) -> list[tuple[Jaxpr, list[int]]]:
    """The bodies of a loop or a branch, each with those of the operands that it gets."""
    name = eqn.primitive.name
    if name == "scan":
        return [(body, operands) for body in reading.bodies_of(eqn)]
    if name == "cond":
        return [(body, operands[1:]) for body in reading.bodies_of(eqn)]
    if name == "while":
        of_condition, of_body = reading.while_sizes(eqn)
        carry = operands[of_condition + of_body :]
        consts = operands[:of_condition], operands[of_condition : of_condition + of_body]
        return [(b, c + carry) for b, c in zip(reading.bodies_of(eqn), consts, strict=True)]
    return []
