"""One branch around a whole update: a step that is skipped costs no update.

    skip is known ──┬── no ───► the update runs: reads and writes everything
                    └── yes ──► what was there before is handed on

A `lax.cond` costs nothing where it is taken: on both ways XLA writes into the buffers of donated
arguments. A choice between old and new, leaf by leaf, needs both in memory at once, and on CPUs
that means a copy of every moment. But a `cond` is one operation: all of its results wait for all of
its operands, nothing inside begins before `skip` is known, and nothing inside is fused with what is
outside. So updates that the caller adds to parameters are made behind the branch where they can be
(`ampx.jaxprs.sinking`), sums of gradients in front of it (`ampx.jaxprs.hoisting`), and inside each
norm is one sum (`ampx.jaxprs.late_choices`).

All that is so on CPUs. On GPUs a caller that allows it gets a choice behind each number, since
there that is what costs nothing: see `ampx.updates.devices`. But not where the update holds a
branch or a loop of its own that makes arrays, as `optax.MultiSteps` does: what comes out of these
is in memory already, and a choice behind them would be a copy. And not where it prints.

Both ways must return the same types. An update may change what its arrays vary over inside
`shard_map`, or how they lie on an Explicit mesh; then what is handed on gets the same marks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs import primitives
from ampx.jaxprs.hoisting import hoist_sums
from ampx.jaxprs.late_choices import choose_late
from ampx.jaxprs.reading import (
    Equation,
    Jaxpr,
    as_closed,
    called_body,
    evaluate,
    has_effects,
    inner_jaxprs,
    open_jaxpr,
    trace,
    variables_in,
)
from ampx.jaxprs.sinking import sink
from ampx.mesh_axes import mark_varying, match_type, varying_axes
from ampx.trees import is_float0, is_floating, null_updates
from ampx.updates.devices import chooses_behind_updates
from ampx.updates.skipped_derivatives import stop_gradient_if

# A loop whose end depends on what it computes may have none where that is NaN, and a callback may
# refuse it. Neither must run in vain.
_NEVER_IN_VAIN = {"while", "pure_callback"}
_OWN_BRANCHES = {"cond", "scan"}
_BY_ELEMENTS = primitives.ELEMENTWISE | primitives.AXIS_TYPE_CASTS | {"optimization_barrier"}


def run_unless(
    skip: jax.Array,
    run: Callable[..., Any],
    stay: Callable[[Any], Any],
    *gradients: Any,
    may_choose: bool = False,
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
      may_choose: whether `run` may be computed in vain as well, and old or new chosen behind it,
        where that is cheaper than a branch.
    """
    return _branch(skip, run, stay, gradients, (), may_choose)


def update_unless(
    skip: jax.Array,
    run: Callable[..., Any],
    stay: Callable[[Any], Any],
    *gradients: Any,
    params: Any,
) -> Any:
    """As `run_unless` that may choose, where the caller is to add the updates to parameters.

    Updates that are made element by element of gradients, parameters and new state are computed
    behind the branch and chosen there. XLA fuses that with the addition.

    Args:
      skip: as in `run_unless`.
      run: a function of `gradients` and `params` to a tuple, of which the first is the updates.
      stay: as in `run_unless`; its updates are null.
      *gradients: as in `run_unless`.
      params: a tree, or None.
    """
    return _branch(skip, run, stay, gradients, (params,), may_choose=True)


def _branch(
    skip: jax.Array,
    run: Callable[..., Any],
    stay: Callable[[Any], Any],
    gradients: tuple[Any, ...],
    params: tuple[Any, ...],
    may_choose: bool,
) -> Any:
    jaxpr, operands, structure, types = _trace_update(
        run, stay, (*gradients, *params), sorted(varying_axes(skip))
    )
    chooses = may_choose and chooses_behind_updates() and not _needs_a_branch(jaxpr)
    parts = None
    if params and not chooses:
        updates = _arrays(jax.tree.leaves(structure.unflatten(types)[0]))
        parts = sink(jaxpr, [n for n, leaf in enumerate(updates) if is_floating(leaf)])
        jaxpr = parts.inside
    moved = () if parts is None else parts.moved
    # Behind its own results the branch returns numbers, for the sake of what is behind it.
    numbers = [atom.aval for atom in open_jaxpr(jaxpr).outvars][len(_arrays(types)) - len(moved) :]
    count = sum(map(is_floating, jax.tree.leaves(gradients)))

    def keep() -> list[Any]:
        # Shapes and dtypes alone: what varies over some axes of a mesh only has no full type here.
        shapes = [x if is_float0(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
        held = structure.flatten_up_to(stay(structure.unflatten(shapes)))
        pairs = zip(_arrays(held), _arrays(types), strict=True)
        arrays = [
            match_type(jnp.asarray(old), new)
            for place, (old, new) in enumerate(pairs)
            if place not in moved
        ]
        zeros = (jnp.zeros(aval.shape, aval.dtype) for aval in numbers)
        varying = (sorted(aval.manual_axis_type.varying) for aval in numbers)
        return [*arrays, *map(mark_varying, zeros, varying)]

    if chooses:
        closed = as_closed(jaxpr)
        guarded = closed.replace(consts=stop_gradient_if(skip, closed.consts))
        new = _compute_beside(skip, guarded, *operands)
        chosen = _read_from_array(skip) if _is_elementwise(jaxpr, count) else skip
        arrays = [jnp.where(chosen, *pair) for pair in zip(keep(), new, strict=True)]
    else:
        take_rest = hoist_sums(jaxpr, operands, count, functools.partial(_compute_beside, skip))
        # What hands old arrays on comes first. With jax before 0.11.2 XLA copies them, and all
        # results once more, if it is the second branch; and a `cond` has another first branch on
        # GPUs.
        arrays = lax.switch((~skip).astype(jnp.int32), [keep, take_rest])
    if parts is not None and moved:
        values = [*operands, *arrays]
        made = _choose_behind(skip, parts.behind, [values[source] for source in parts.sources])
        arrays = _weave(arrays, dict(zip(parts.moved, made, strict=True)), len(_arrays(types)))
    rest = iter(arrays)
    # An empty gradient of an integer is no array, and the same on both ways.
    return structure.unflatten([leaf if is_float0(leaf) else next(rest) for leaf in types])


class _Traced(NamedTuple):
    """An update as a program.

    Attributes:
      jaxpr: of the floating operands alone; the others are constants of it.
      operands: the floating ones.
      structure: that of what the update returns.
      types: of its leaves; an empty gradient of an integer stands for itself, and is no result of
        the jaxpr.
    """

    jaxpr: Jaxpr
    operands: list[jax.Array]
    structure: Any
    types: list[Any]


def _trace_update(
    run: Callable[..., Any],
    stay: Callable[[Any], Any],
    trees: tuple[Any, ...],
    axes: Sequence[str],
) -> _Traced:
    """Traces an update of some trees, whose results vary over `axes` and whatever `stay` gives."""
    found: list[Any] = []
    given, of_operands = jax.tree.flatten(trees)
    places = [place for place, leaf in enumerate(given) if is_floating(leaf)]

    def take(*floating: Any) -> list[Any]:
        filled = list(given)
        for place, leaf in zip(places, floating, strict=True):
            filled[place] = leaf
        leaves, structure = jax.tree.flatten(run(*of_operands.unflatten(filled)))
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

    # Where each device decides for itself, what they share gets its mark in front of the branch.
    # The derivative of a mark is a sum over devices, and inside not all would take part in it.
    operands = [mark_varying(jnp.asarray(given[place]), axes) for place in places]
    return _Traced(choose_late(trace(take, *operands)[0]), operands, *found)


def _needs_a_branch(jaxpr: Jaxpr) -> bool:
    """Whether an update must not be computed in vain, or costs more to choose than to branch.

    The first is so where it prints, calls back, or loops until something is reached. The second is
    so where it makes arrays in a branch or loop of its own, as `optax.MultiSteps` does, and
    products of matrices in a loop; a branch that makes numbers does not count. It is also so where
    it keeps state in the host's memory: there a choice would be computed, too.
    """

    def needs_one(eqn: Equation) -> bool:
        name = eqn.primitive.name
        results: list[Any] = [atom.aval for atom in eqn.outvars]
        return (
            has_effects(eqn)
            or name in _NEVER_IN_VAIN
            or (name in _OWN_BRANCHES and any(aval.shape for aval in results))
            or any(map(_is_in_host_memory, results))
            or any(map(_needs_a_branch, inner_jaxprs(eqn)))
        )

    return any(map(needs_one, open_jaxpr(jaxpr).eqns))


def _is_in_host_memory(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def _is_elementwise(jaxpr: Jaxpr, count: int) -> bool:
    """Whether an update computes element by element, but for what it makes of gradients alone.

    Args:
      jaxpr: the update.
      count: how many of its operands, from the first, are gradients.
    """
    opened = open_jaxpr(jaxpr)
    of_gradients = set(opened.invars[:count])
    for eqn in opened.eqns:
        atoms = variables_in(eqn.invars)
        if of_gradients.issuperset(atoms):
            of_gradients.update(eqn.outvars)
        elif eqn.primitive.name not in _BY_ELEMENTS and any(atom.aval.shape for atom in atoms):
            body = called_body(eqn)
            if body is None or not _is_elementwise(body, 0):
                return False
    return True


def _read_from_array(number: jax.Array) -> jax.Array:
    """The number, as an element of an array of which no compiler knows what is in it.

    On GPUs XLA merges the loops over arrays of one shape that read an array in common, and not
    those that read a number in common. Of GPT-2's arrays most are so small that a GPU takes as
    long to launch their loops as to run them. Not for loops that end in reductions: what is to be
    reduced would be written out for all arrays at once.
    """
    return lax.optimization_barrier(jnp.stack([number, number]))[0]


def _choose_behind(skip: jax.Array, jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a program behind the branch, or null updates on a skip."""
    new = _compute_beside(skip, jaxpr, *operands)
    null = map(match_type, null_updates(new), new)
    # `jnp.where` is a function, of which XLA makes a copy for each call before it inlines all.
    return [lax.select(skip, *pair) for pair in zip(null, new, strict=True)]


def _compute_beside(skip: jax.Array, jaxpr: Jaxpr, *operands: Any) -> list[Any]:
    """The results of a program in front of the branch, such as a norm, or behind it.

    On a skip they are in vain, and have no derivative.
    """
    return evaluate(jaxpr, *stop_gradient_if(skip, operands))


def _weave(arrays: Sequence[Any], moved: dict[int, Any], count: int) -> list[Any]:
    """Puts what was moved between what the branch returned, `count` arrays in all."""
    rest = iter(arrays)
    return [moved[place] if place in moved else next(rest) for place in range(count)]


def _arrays(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if not is_float0(leaf)]
