"""Any transformation of optax in the fused tail of a step: `ampx.fused.fuse`.

    tx.init     traces the update: can a rule for each parameter be derived from it?
                  no       the state is optax's, and all goes on as without `fuse`
                  yes      the state is marked, so wrappers hand a `Tail` down
    tx.update   without a tail it is optax's, bit for bit
                with one   the numbers of the step, by XLA             (derivation.numbers)
                           the rule of each parameter, by XLA or by kernels, as those of
                           `ampx.fused.adamw` run                      (derivation.leaves)

Around a plain transformation a loss scale puts a branch that a skipped step does not take, and XLA
fuses most optimizers inside of it as well as it can. Where rules would make XLA read more than
that, the state is marked `prefers_branch`: the loss scale keeps its branch, and only kernels run
the rules. See `Derivation.suits_branch`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import as_bool, check_transformation
from ampx.fused.coefficients import numbers_class
from ampx.fused.derivation import Derivation, NotDerivable, derive, find_slots
from ampx.fused.derived_states import find_derived, mark_derived, unmark_derived
from ampx.fused.leaf_updates import Leaf, compute_dtype
from ampx.fused.transformation import as_array, hold_counts, update_leaves
from ampx.jaxprs import reading
from ampx.overwritten import refuse_overwritten
from ampx.param_storage.narrow_params import as_arrays
from ampx.tree_checks import check_arrays
from ampx.trees import at_path, cast_like, hold, is_floating, null_updates, path_name, widen
from ampx.updates.applying import apply_updates
from ampx.updates.extra_args import accept_extra_args
from ampx.updates.guards import check_update, guard
from ampx.updates.skipped_derivatives import stop_gradient_if
from ampx.updates.tails import Tail, TailResult, takes_tail


class _FusedTransformation(optax.GradientTransformationExtraArgs):
    """What `fuse` returns, so that it knows it again."""


def fuse(
    tx: optax.GradientTransformation, *, strict: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Puts any transformation into the fused tail of a step, with rules derived from its program.

    What the optimizers of `ampx.fused` can do, `tx` can then do, too: the tail of
    `ampx.fused.apply`, groups, masters, and Pallas kernels that update many parameters in one
    launch. It may be one of optax's optimizers, a chain, or one that you wrote in optax's way.
    What is fused already stays what it is.

    Its update must work element by element of each parameter, apart from numbers such as a count, a
    schedule or a norm. If it does not, it runs as it would without `fuse`: those with random
    numbers, with products of matrices (Muon), or with moments of rows and columns (Adafactor, SM3).
    Clip with `max_norm` of `ampx.fused.apply`, where the norm is the verdict, too, and not in the
    chain: there it is one more reading of all gradients.

    Args:
      tx: the transformation. Its `update` must be a pure function, and do the same for all dtypes:
        rules see gradients, parameters and their slots in float32, or in float64 where a parameter
        has it. A parameter that would become infinite or NaN under a loss scale keeps its number.
      strict: whether to refuse a transformation of which no rules can be derived.

    Returns:
      A transformation with the state of `tx`, leaf by leaf and path by path, so checkpoints go both
      ways. Where rules can be derived, one of its classes is a marked one of the same fields: to go
      on with the state of `tx`, use `ampx.extend_state(fuse(tx), state, params)`.

    Raises:
      TypeError: if `tx` is no transformation.
      ValueError: in `init`, with `strict`, for an operation that does not work element by element;
        the error names it and its line.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(ampx.fused.fuse(optax.rmsprop(0.1)), init_scale=8.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> grads = jnp.array([24.0, -32.0])
      >>> params, state, report = ampx.fused.apply(tx, grads, tx.init(params), params, max_norm=1.0)
      >>> print(f"{params[0]:.3f}, {params[1]:.3f}; norm {report.global_norm}")
      0.684, 2.316; norm 5.0
    """
    check_transformation("tx", tx)
    strict = as_bool("strict", strict)
    if isinstance(tx, _FusedTransformation):
        return tx
    inner = guard("fuse", accept_extra_args(tx))

    def init(params: Any) -> Any:
        check_arrays("params", params, may_be_shapes=True)
        refuse_overwritten("params", params)
        state = inner.init(params)
        if takes_tail(state):  # an optimizer of `ampx.fused`, or what hands a tail on to one
            return state
        try:
            prefers_branch = _suits_branch(inner, state, params)
        except NotDerivable as reason:
            if not strict:
                return state
            raise ValueError(
                f"fuse: no rule for each parameter can be derived from tx: {reason}. With "
                "strict=False it runs as it is written"
            ) from None
        return mark_derived(state, prefers_branch=prefers_branch)

    def update(
        updates: Any, state: Any, params: Any = None, *, tail: Tail | None = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        mark = find_derived(state)
        check_update("fuse", None, updates, state, params, may_be_many=mark is None)
        if mark is None:
            given = {} if tail is None else {"tail": tail}
            return inner.update(updates, state, params, **given, **extra_args)
        own = unmark_derived(state)
        if tail is None:
            updates, own = inner.update(updates, own, params, **extra_args)
        elif params is None or (mark.prefers_branch and tail.skip is None and not tail.in_kernels):
            updates, own = _update_as_written(inner, updates, own, params, tail, extra_args)
        else:
            try:
                updates, own = _update(inner, updates, own, params, tail, extra_args)
            except NotDerivable as reason:  # of another argument than `init` was given
                if strict:
                    raise ValueError(
                        f"fuse: no rule can be derived in this update: {reason}"
                    ) from None
                updates, own = _update_as_written(inner, updates, own, params, tail, extra_args)
        return updates, mark_derived(own, prefers_branch=mark.prefers_branch)

    return _FusedTransformation(init, update)


def _suits_branch(tx: Any, state: Any, params: Any) -> bool:
    """Whether XLA does better with the transformation as it is written.

    `optax.tree.map_params` calls `init` with a mark in the place of parameters, and expects the
    classes that their state has. So where there are no arrays, one array of ours stands for them.

    Raises:
      NotDerivable: if there are no rules.
    """
    if not jax.tree.leaves(params):
        params = np.zeros((2, 2), np.float32)
        try:
            state = tx.init(params)
        except Exception:  # of a transformation that asks for parameters by name: most have rules
            return False
    return _derive_without_gradients(tx, state, params).suits_branch


def _derive_without_gradients(tx: Any, state: Any, params: Any) -> Derivation:
    """Derives rules from what is known in `init`; some updates ask for the value of the loss."""
    try:
        return _derive(tx, params, state, params, {})
    except NotDerivable as reason:
        try:
            return _derive(tx, params, state, params, {"value": np.float32(0)})
        except NotDerivable:
            raise reason from None


def _derive(tx: Any, grads: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Derivation:
    """Derives rules for arrays of these shapes, in the dtypes of the arithmetic.

    Raises:
      NotDerivable: if there are none.
    """
    structure, of_state = jax.tree.structure(grads), jax.tree.structure(state)

    def run(grads: list[Any], state: list[Any], params: list[Any]) -> Any:
        unflatten = structure.unflatten
        updates, new_state = tx.update(
            unflatten(grads), of_state.unflatten(state), unflatten(params), **extra_args
        )
        if jax.tree.structure(new_state) != of_state:
            raise NotDerivable("its state changes its structure")
        new = structure.flatten_up_to(updates)
        if any(update is None for update in new):
            raise NotDerivable("it has no update for a parameter")
        return new, jax.tree.leaves(new_state)

    def widen(leaf: Any, place: int | None) -> Any:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        if place is None or not is_floating(aval):
            return aval
        return reading.with_dtype(aval, dtypes[place])

    leaves = [jax.tree.leaves(tree) for tree in (grads, state, params)]
    for where, tree in (("parameters", params), ("state", state), ("gradients", grads)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not hasattr(leaf, "dtype"):
                raise NotDerivable(
                    f"{leaf!r}{at_path(path)} of its {where} is a number of Python, and no array: "
                    f"make it jnp.asarray({leaf!r})"
                )
    for leaf in leaves[2]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise NotDerivable(f"a parameter has the dtype {leaf.dtype}")
    slots = find_slots(tx, state, params)
    pairs = zip(leaves[0], leaves[2], strict=True)
    try:
        dtypes = [compute_dtype(Leaf(grad, param, ())) for grad, param in pairs]
    except TypeError as error:  # of complex numbers
        raise NotDerivable(str(error)) from error
    for leaf, place in zip(leaves[1], slots, strict=True):
        if place is not None and leaf.dtype.itemsize > dtypes[place].itemsize:
            raise NotDerivable(f"it keeps {leaf.dtype} for a parameter in {dtypes[place]}")
    places = (range(len(dtypes)), slots, range(len(dtypes)))
    types = [list(map(widen, *pair)) for pair in zip(leaves, places, strict=True)]
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return derive(run, slots, [leaf.dtype for leaf in leaves[1]], *types, names=names)


def _update(
    tx: Any, updates: Any, state: Any, params: Any, tail: Tail, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """One step by rules, as its tail asks for it.

    Raises:
      NotDerivable: if there are none.
    """
    structure = jax.tree.structure(updates)
    grads, given = (
        [as_array(leaf) for leaf in structure.flatten_up_to(tree)] for tree in (updates, params)
    )
    wide = as_arrays(given)
    unflatten = structure.unflatten
    derivation = _derive(tx, unflatten(grads), state, unflatten(wide), extra_args)
    old, of_state = jax.tree.flatten(state)
    numbers, new = _run_numbers(derivation, grads, old, wide, tail)

    results: list[Any] = [None] * len(grads)
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(derivation.leaves):
        groups.setdefault((leaf.rule, leaf.numbers), []).append(place)
    # One call for all that share a rule and its numbers, since one launch may serve several.
    for (rule, places), group in groups.items():
        coefficients = numbers_class(tuple(f"number_{place}" for place in places))(
            # The vector of coefficients holds one number at the least.
            *(numbers[place] for place in places),
            None,
            None if places else 1.0,
            None,
        )
        leaves = [
            Leaf(grads[k], given[k], tuple(old[slot] for slot in derivation.leaves[k].slots), k)
            for k in group
        ]
        made = update_leaves(rule, coefficients, leaves, [True] * len(leaves), tail)
        for k, (result, slots) in zip(group, made, strict=True):
            results[k] = result
            for place, slot in zip(derivation.leaves[k].slots, slots, strict=True):
                new[place] = slot
    return structure.unflatten(results), of_state.unflatten(new)


def _update_as_written(
    tx: Any, updates: Any, state: Any, params: Any, tail: Tail, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """One step by the transformation itself; what its tail holds is chosen array by array."""

    def unscale(grad: Any) -> Any:
        if tail.factor is None or not is_floating(grad):
            return grad
        wide = widen(grad)
        return wide * tail.factor.astype(wide.dtype)

    wide: Any = None if params is None else as_arrays(params)
    operands = jax.tree.map(unscale, updates), state, wide, extra_args
    if tail.skip is not None:
        operands = stop_gradient_if(tail.skip, operands)
    grads, own, given, extra_args = operands
    updates, new = tx.update(grads, own, given, **extra_args)
    values, old = updates, null_updates(updates)
    if tail.new_params:
        values, old = apply_updates(given, updates), wide
    new = cast_like(new, state)
    if tail.skip is not None:
        values, new = hold(tail.skip, (values, new), (old, state))
    return jax.tree.map(lambda value: TailResult(value, jnp.zeros((), bool)), values), new


def _run_numbers(
    derivation: Derivation, grads: list[Any], old: list[Any], params: list[Any], tail: Tail
) -> tuple[list[Any], list[Any]]:
    """The numbers of a step, and the leaves of the new state, of which slots are still the old."""
    program = reading.open_jaxpr(derivation.numbers)
    types = [atom.aval for atom in program.invars]
    arrays = [*grads, *old, *params]
    # Nothing is computed of an array, unless a number needs it.
    inputs = [
        x if x.dtype == aval.dtype else x.astype(aval.dtype)
        for x, aval in zip(arrays, types, strict=True)
    ]
    if tail.factor is not None:
        inputs[: len(grads)] = [g * tail.factor.astype(g.dtype) for g in inputs[: len(grads)]]
    if tail.skip is not None:
        # Usually a count or two, of more than a thousand arrays.
        atoms = {atom for eqn in program.eqns for atom in reading.variables_in(eqn.invars)}
        read = [place for place, atom in enumerate(program.invars) if atom in atoms]
        guarded = stop_gradient_if(tail.skip, [inputs[place] for place in read])
        for place, array in zip(read, guarded, strict=True):
            inputs[place] = array
    values = reading.evaluate(derivation.numbers, *inputs)
    count = len(values) - len(derivation.others)
    new = list(old)
    for place, value in zip(derivation.others, values[count:], strict=True):
        new[place] = cast_like(value, old[place])  # the same object, where nothing has changed
    return values[:count], new if tail.skip is None else hold_counts(tail.skip, new, old)
