"""A fused optimizer as an optax transformation.

`fused_transformation` puts a rule behind optax's interface. `init` is optax's own. `update` is
optax's too, unless a wrapper around it (a loss scale, `fused.apply`) hands down a `Tail`: then
updates become `TailResult`s, unscaled, clipped and skipped as the tail asks, or new parameters.

    state of optax.adamw(...):   (ScaleByAdamState(count, mu, nu), EmptyState(), EmptyState())
    state here:                  (FusedAdamState(count, mu, nu),   EmptyState(), EmptyState())

The marked part is a subclass of optax's class with the same fields. To `jax.tree` both have the
same leaves at the same paths, so checkpoints go both ways. The type is the mark by which wrappers
find out that a fused optimizer is inside: a transformation is two closures and shows nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import as_bool
from ampx.flat_buffers.flattening import per_buffer
from ampx.fused.coefficients import (
    CoefficientsAt,
    PackedCoefficients,
    advance,
    pack_coefficients,
)
from ampx.fused.kernels.pallas_updates import runs_in_kernel, update_in_kernels
from ampx.fused.leaf_updates import Leaf, compute_dtype, keep_leaf, update_leaf
from ampx.fused.moments.formats import SlotDtype, as_format
from ampx.fused.segments import as_per_parameter, find_segments
from ampx.fused.update_rules import UpdateRule
from ampx.model_axes import NOT_DIVIDED, as_model_axes, untracked_of_leaves
from ampx.overwritten import refuse_overwritten
from ampx.param_storage.narrow_params import NarrowParam, as_arrays
from ampx.tree_checks import (
    broadcast_choice,
    check_arrays,
    check_gradients,
    check_memory,
    check_structure,
)
from ampx.trees import at_path, is_float0, is_floating, leave_untrained_out
from ampx.updates.skipped_derivatives import stop_gradient_if
from ampx.updates.tails import Tail, TailResult, TakesTail


class FusedAdamState(optax.ScaleByAdamState, TakesTail):
    """Adam, AdamW and LAMB: `count`, int32; `mu` and `nu`, trees like the parameters.

    A moment is an array in the dtype that optax gives it or that was asked for, or `Int8Blocks`.
    """


class FusedTraceState(optax.TraceState, TakesTail):
    """SGD with momentum: `trace`, a tree like the parameters."""


class FusedEmptyState(optax.EmptyState, TakesTail):
    """SGD without momentum."""


class FusedAdaDeltaState(optax.ScaleByAdaDeltaState, TakesTail):
    """Adadelta: `e_g` and `e_x`, means of squared gradients and steps, like the parameters."""


class FusedLionState(optax.ScaleByLionState, TakesTail):
    """Lion: `count`, int32; `mu`, a tree like the parameters."""


class FusedRssState(optax.ScaleByRssState, TakesTail):
    """Adagrad: `sum_of_squares`, a tree like the parameters."""


class FusedNovogradState(optax.ScaleByNovogradState, TakesTail):
    """NovoGrad: `count`, int32; `mu`, like the parameters; `nu`, one number for each of them.

    The numbers of a flat buffer are one array of shape (parameters,).
    """


class RuleState(NamedTuple):
    """A rule of the user's, see `from_rule`: `count`, int32; `slots`, trees like the parameters.

    Slots stand in a dict by their names, in the order of these.
    """

    count: jax.Array
    slots: dict[str, Any]


class FusedRuleState(RuleState, TakesTail):
    """The same, marked."""


# From optax's class of an optimizer's own part to the marked one.
_KINDS = {
    kind.__bases__[0]: kind
    for kind in (
        FusedAdamState,
        FusedTraceState,
        FusedAdaDeltaState,
        FusedLionState,
        FusedRssState,
        FusedNovogradState,
    )
}


def fused_transformation(
    rule: UpdateRule,
    reference: optax.GradientTransformation,
    coefficients_at: CoefficientsAt,
    *,
    learning_rate: Any,
    weight_decay: Any = None,
    decay_part: int | None = None,
    mask: Any = None,
    slot_dtypes: Mapping[str, SlotDtype] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """A transformation with the state of `reference` and the arithmetic of `rule`.

    Args:
      rule: the optimizer.
      reference: optax's own optimizer of the same settings. Its state is this one's, leaf by leaf
        and path by path, so that checkpoints go both ways.
      coefficients_at: from the number of the step to the optimizer's own numbers; see
        `coefficients.advance`, as for the next three.
      learning_rate: a number, a schedule or None.
      weight_decay: a number, a schedule or None.
      decay_part: the part of `reference`'s state that belongs to the weight decay.
      mask: which parameters decay, as `optax.adamw` takes it: the others have no `weight_decay`.
      slot_dtypes: in what form slots are kept, where it is not that of `reference`.
    """

    def init(params: optax.Params) -> Any:
        check_arrays("params", params, may_be_shapes=True)
        refuse_overwritten("params", params)
        _find_decays(mask, params, jax.tree.structure(params))  # for its errors
        state = mark_own_part(reference.init(params))
        at = find_own_part(state)
        kept = {
            name: jax.tree.map(_as_floating, as_per_parameter(slot))
            for name, slot in _read_slots(rule, state[at]).items()
        }
        for name, dtype in (slot_dtypes or {}).items():
            # Among the slots that can be int8 only `nu` is a mean of squares, without signs to
            # store.
            kept[name] = as_format(kept[name], dtype, signed=name != "nu")
        return (*state[:at], _write_slots(state[at], kept), *state[at + 1 :])

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        tail: Tail | None = None,
        model_axes: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        # optax hands every extra argument to every transformation: those of others are ignored.
        del extra_args
        # Without a tail the arithmetic is that of an empty one, and arrays are returned.
        answers, tail = tail is not None, tail or Tail()
        check_gradients("updates", updates, params)
        params = leave_untrained_out(params, updates)
        at = find_own_part(state)
        _check_own_part(rule, state[at], updates)
        coefficients, next_state = advance(
            state,
            at,
            coefficients_at,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            decay_part=decay_part,
        )
        if params is None and (coefficients.weight_decay is not None or rule.direction_again):
            raise ValueError("this optimizer needs params: call tx.update(grads, state, params)")
        if tail.skip is not None:
            next_state = hold_counts(tail.skip, next_state, state)
        leaves = _list_leaves(rule, updates, state[at], params, model_axes)
        _check_shapes(rule, updates, leaves)
        structure = jax.tree.structure(updates)
        decays = _find_decays(mask, updates if params is None else params, structure)
        results = update_leaves(rule, coefficients, leaves, decays, tail)
        new_updates = structure.unflatten([r if answers else r.value for r, _ in results])
        kept = {
            name: structure.unflatten([own[i] for _, own in results])
            for i, name in enumerate(rule.slots)
        }
        own = _write_slots(next_state[at], kept)
        return new_updates, (*next_state[:at], own, *next_state[at + 1 :])

    return optax.GradientTransformationExtraArgs(init, update)


def _read_slots(rule: UpdateRule, own: Any) -> dict[str, Any]:
    """The slots in an optimizer's own part of the state, by name."""
    if isinstance(own, FusedRuleState):
        return {name: own.slots[name] for name in rule.slots}
    return {name: getattr(own, name) for name in rule.slots}


def _write_slots(own: Any, slots: dict[str, Any]) -> Any:
    return own._replace(slots=slots) if isinstance(own, FusedRuleState) else own._replace(**slots)


def _list_leaves(
    rule: UpdateRule, updates: Any, own_part: Any, params: Any, model_axes: Any
) -> list[Leaf]:
    """What belongs to each leaf of the gradients."""
    # Slots may be trees below a leaf (`Int8Blocks`), so they are cut where the gradients end, not
    # flattened by themselves.
    structure = jax.tree.structure(updates)
    columns = [
        _find_untracked(rule, updates, model_axes),
        find_segments(updates),
        map(as_array, structure.flatten_up_to(updates)),
        [None] * structure.num_leaves
        if params is None
        else map(as_array, structure.flatten_up_to(params)),
        *(structure.flatten_up_to(slot) for slot in _read_slots(rule, own_part).values()),
    ]
    # The count before this step, for the random bits of `nu` in 8 bits. SGD, Adagrad and Adadelta
    # count nothing and draw nothing.
    step = own_part._asdict().get("count", 0)
    return [
        Leaf(grad, param, tuple(own), place, step, segments, untracked)
        for place, (untracked, segments, grad, param, *own) in enumerate(zip(*columns, strict=True))
    ]


def _as_floating(slot: jax.Array) -> jax.Array:
    """A fresh slot, in float32 where optax makes it as integer as its parameter is.

    There it becomes float32 with the first update, or every sum in it is rounded to an integer.
    """
    return slot if is_floating(slot) else slot.astype(jnp.float32)


def _check_own_part(rule: UpdateRule, own: Any, updates: Any) -> None:
    """Refuses the state of another optimizer, and one that was made for other parameters.

    Raises:
      TypeError: if it lacks what this optimizer keeps.
      ValueError: if what it keeps is no tree like the gradients, or has no memory any more.
    """
    check_memory("state", own)
    fields = own.slots if isinstance(own, FusedRuleState) else own._asdict()
    if lacking := [name for name in rule.slots if name not in fields]:
        raise TypeError(
            f"got a state with the part {type(own).__name__}, which has no {', '.join(lacking)}, "
            f"and this optimizer keeps {', '.join(rule.slots)} in its own: give the state that "
            "init(params) of the same optimizer made"
        )
    for name, slot in _read_slots(rule, own).items():
        check_structure(f"{name} in the state", slot, "updates", updates)


def _check_shapes(rule: UpdateRule, updates: Any, leaves: list[Leaf]) -> None:
    """Refuses gradients that differ in shape from their parameter or from its slots.

    JAX would broadcast one to the other, and a parameter would come out in another shape.

    Raises:
      ValueError: for the first such gradient.
    """
    for place, leaf in enumerate(leaves):
        others = {} if leaf.param is None else {"parameter": leaf.param.shape}
        for name, slot in zip(rule.slots, leaf.slots, strict=True):
            # NovoGrad's `nu` is one number for each parameter, and int8 blocks have no one shape.
            if isinstance(slot, jax.Array) and not (rule.needs_squares and name == "nu"):
                others[f"{name} in the state"] = slot.shape
        for other, shape in others.items():
            if shape != leaf.grad.shape:
                path, _ = jax.tree_util.tree_leaves_with_path(updates)[place]
                raise ValueError(
                    f"the gradient{at_path(path)} has shape {leaf.grad.shape}, and its {other} has "
                    f"shape {shape}: give the gradients, the parameters and the state of one model"
                )


def _find_untracked(rule: UpdateRule, updates: Any, model_axes: Any) -> list[tuple[str, ...]]:
    """For each leaf the axes over whose devices a norm of it has to be summed."""
    has_norm = rule.needs_squares or rule.direction_again is not None
    return untracked_of_leaves(updates, as_model_axes(model_axes) if has_norm else NOT_DIVIDED)


def as_array(leaf: Any) -> Any:
    """An array out of a numpy array or a plain number, as optax takes them too."""
    return leaf if is_float0(leaf) or isinstance(leaf, NarrowParam) else jnp.asarray(leaf)


def hold_counts(skip: jax.Array, new_state: Any, state: Any) -> Any:
    """The state with its counts as they were on a skip; slots are held later, number by number.

    The same object in both trees needs no choice, and a select of it would read it.
    """

    def choose(new: Any, old: Any) -> Any:
        return old if new is old else jnp.where(skip, old, new)

    return jax.tree.map(choose, new_state, state)


def _find_decays(mask: Any, tree: Any, structure: Any) -> list[bool]:
    """Which of the leaves decay, in their order; in a mask's tree a flat buffer is one leaf."""
    if mask is None:
        return [True] * structure.num_leaves
    chosen = broadcast_choice("mask", per_buffer(mask)(as_arrays(tree)), tree)
    return [as_bool("mask, for a parameter,", leaf) for leaf in chosen]


def update_leaves(
    rule: UpdateRule, coefficients: Any, leaves: list[Leaf], decays: list[bool], tail: Tail
) -> list[tuple[TailResult, tuple[Any, ...]]]:
    """The update of every parameter; those with the same coefficients share one vector of them."""
    coefficients = coefficients._replace(factor=tail.factor)
    # One vector for each pair of (decays or not, dtype of the arithmetic): two at the most usually.
    shared: dict[Any, tuple[PackedCoefficients, Tail]] = {}
    in_kernels: dict[Any, list[int]] = {}
    # The norms of LAMB, and the largest number of each block in 8 bits.
    has_reductions = bool(rule.direction_again) or any(leaf.has_blocks for leaf in leaves)
    results: list[Any] = []
    for leaf, decay in zip(leaves, decays, strict=True):
        if is_float0(leaf.grad):  # what JAX gives as the gradient of an integer
            results.append((keep_leaf(leaf, tail), leaf.slots))
            continue
        by_kernel = runs_in_kernel(rule, leaf, tail)
        if isinstance(leaf.param, NarrowParam) and not by_kernel:
            # XLA fuses this with the update, and what the wrapper does behind it too.
            leaf = leaf._replace(param=leaf.param.widen())
        key = decay, jnp.dtype(jnp.float32) if by_kernel else compute_dtype(leaf)
        # A kernel's scalars are float32 whatever it reads; float64 is not for kernels.
        if key not in shared:
            own = coefficients if decay else coefficients._replace(weight_decay=None)
            vector = pack_coefficients(
                own, key[1], is_guarded=rule.is_guarded, are_merged=not has_reductions
            )
            own_tail = _skip_if_bad(tail, vector) if rule.is_guarded else tail
            if own_tail.skip is not None:  # once for all parameters that share them
                numbers = stop_gradient_if(own_tail.skip, vector.numbers)
                vector = vector._replace(numbers=numbers)
            shared[key] = vector, own_tail
        if by_kernel:
            in_kernels.setdefault(key, []).append(len(results))
            results.append(None)
        else:
            vector, own_tail = shared[key]
            results.append(update_leaf(rule, vector, leaf, own_tail))
    # Kernels come last and all at once, since one launch may serve several parameters.
    for key, places in in_kernels.items():
        vector, own_tail = shared[key]
        updates = update_in_kernels(rule, vector, [leaves[k] for k in places], own_tail)
        for place, update in zip(places, updates, strict=True):
            results[place] = update
    return results


def _skip_if_bad(tail: Tail, coefficients: PackedCoefficients) -> Tail:
    """The tail, which also skips where a coefficient is not finite: no number could be taken."""
    if tail.skip is None:
        return tail
    return dataclasses.replace(tail, skip=jnp.any(~jnp.isfinite(coefficients.vector) | tail.skip))


def mark_own_part(state: Any) -> tuple[Any, ...]:
    """The state of an optax optimizer with its own part retyped.

    SGD without momentum has no slots: its own part is the empty first one.
    """
    parts = tuple(_KINDS[type(part)](*part) if type(part) in _KINDS else part for part in state)
    if any(isinstance(part, TakesTail) for part in parts):
        return parts
    return (FusedEmptyState(), *parts[1:])


def find_own_part(state: Any) -> int:
    """The place in a state of the part that is marked.

    Raises:
      TypeError: if no part is.
    """
    for place, part in enumerate(state if isinstance(state, tuple) else ()):
        if isinstance(part, TakesTail):
            return place
    raise TypeError(
        f"got a state of {type(state).__name__} that no optimizer of ampx.fused has made: to go on "
        "from a state of optax, use ampx.extend_state(tx, opt_state, params)"
    )
