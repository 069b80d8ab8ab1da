"""Several optimizers under one loss scale, each of which skips for itself.

Two networks that train each other have one optimizer each, and often one loss scale. If gradients
of the first overflow, the second may still take its step; the scale falls all the same, since both
losses were multiplied by it. `torch.amp.GradScaler` does this when several optimizers are stepped
before one `update()`.

    grads = {"generator": ..., "discriminator": ...}            times the scale S
                  |                    |
              judge, unscale,      judge, unscale,              each a loss scale of its own that
              update or skip       update or skip               never moves (`wrap_with_scale`)
                  |                    |
                found A              found B                    bool[*losses, 2]
                  +-------- or --------+
                            |
                  S moves, once for all

An optimizer takes part in an update if there are gradients for it. Networks that train each other
take turns: the second needs the new parameters of the first. Updates with `move_scale=False` add to
what was found, and leave the scale to the last one of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx import trees
from ampx.checking import as_bool, check_state, check_transformation, suggest
from ampx.loss_scaling.calls import (
    Advance,
    Judgement,
    ScaleSettings,
    Transition,
    split_by_loss,
)
from ampx.loss_scaling.gradient_results import replace_scale
from ampx.loss_scaling.nonfinite import Verdict, judge
from ampx.loss_scaling.scaled_update import move_scale, wrap_with_scale
from ampx.loss_scaling.state import LossScaleState, OptimizersState
from ampx.model_axes import as_model_axes
from ampx.updates.extra_args import accept_extra_args

# These evaluate a loss of all parameters, and an optimizer knows its own alone.
_OF_ALL_PARAMETERS = ("value_fn", "obj_fn", "grad_fn")


def wrap_each_with_scale(
    optimizers: Mapping[str, optax.GradientTransformation],
    init_scale: float,
    hysteresis: int,
    advance: Advance,
    settings: ScaleSettings,
) -> optax.GradientTransformationExtraArgs:
    """One loss scale around several optimizers; arguments as of `wrap_with_scale`."""
    _check_optimizers(optimizers)
    scaled = {
        name: wrap_with_scale(
            tx,
            init_scale,
            hysteresis,
            lambda state, bad: state,
            dataclasses.replace(settings, model_axes=settings.model_axes.below(name)),
        )
        for name, tx in optimizers.items()
    }

    def init(params: Any) -> LossScaleState:
        _check_params(params, scaled, needed=scaled)
        states: dict[str, Any] = {name: tx.init(params[name]) for name, tx in scaled.items()}
        return _init_state(states)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        verdict: Verdict | None = None,
        move_scale: bool = True,
        gradient_scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        check_state("loss_scale", state, LossScaleState)
        check_state("loss_scale", state.inner_state, OptimizersState)
        scaled_by = replace_scale(state, gradient_scale)
        moves = as_bool("move_scale", move_scale)
        per_loss = split_by_loss(updates, settings.num_losses)
        for grads in per_loss:
            if grads is not None:
                _check_names("gradients", grads, scaled)
        names = _find_given(per_loss, scaled)
        if params is not None:
            _check_params(params, scaled, names)
        inside: OptimizersState = state.inner_state
        new_updates: dict[str, Any] = {}
        for name in names:
            own_grads = [None if grads is None else grads.get(name) for grads in per_loss]
            new_updates[name], own = _update_one(
                scaled[name],
                tuple(own_grads) if len(per_loss) > 1 else own_grads[0],
                scaled_by._replace(inner_state=inside.inner_states[name]),
                None if params is None else params[name],
                verdict=_judge_again(verdict, own_grads, scaled_by.loss_scale),
                **_for_one(name, extra_args, own_grads[0]),
            )
            inside = _record(inside, name, own)
        seen = _find_seen(per_loss, scaled).reshape(state.loss_scale.shape)
        inside = inside._replace(pending_seen=inside.pending_seen | seen)
        result = _fill_up(new_updates, params, updates if settings.num_losses == 1 else None)
        if not moves:
            return result, state._replace(overflow=inside.pending_skip, inner_state=inside)
        return result, _move(advance, state, inside)

    return optax.GradientTransformationExtraArgs(init, update)


def run_each(
    optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Several optimizers without a loss scale, called as `wrap_each_with_scale` is.

    The state is a dict from name to the state of each optimizer.
    """
    _check_optimizers(optimizers)
    plain = {name: accept_extra_args(tx) for name, tx in optimizers.items()}

    def init(params: Any) -> dict[str, optax.OptState]:
        _check_params(params, plain, needed=plain)
        return {name: tx.init(params[name]) for name, tx in plain.items()}

    def update(
        updates: Any, state: Any, params: Any = None, *, move_scale: bool = True, **extra_args: Any
    ) -> tuple[Any, dict[str, optax.OptState]]:
        as_bool("move_scale", move_scale)  # there is none to move
        _check_names("gradients", updates, plain)
        names = _find_given([updates], plain)
        if params is not None:
            _check_params(params, plain, names)
        new_updates, new_states = {}, dict(state)
        for name in names:
            new_updates[name], new_states[name] = plain[name].update(
                updates[name],
                state[name],
                None if params is None else params[name],
                **_for_one(name, extra_args, updates[name]),
            )
        return _fill_up(new_updates, params, updates), new_states

    return optax.GradientTransformationExtraArgs(init, update)


def _init_state(states: dict[str, Any]) -> LossScaleState:
    """One state of those of the optimizers, each under a scale of its own."""
    shared = next(iter(states.values()))
    shape = shared.loss_scale.shape
    inside = OptimizersState(
        optimizer_skipped={name: jnp.zeros((), bool) for name in states},
        optimizer_skipped_total={name: jnp.zeros((), jnp.int32) for name in states},
        pending_found=jnp.zeros((*shape, 2), bool),
        pending_seen=jnp.zeros(shape, bool),
        pending_skip=jnp.zeros((), bool),
        pending_bad_update=jnp.zeros((), bool),
        pending_bad_loss=jnp.zeros((), bool),
        inner_states={name: own.inner_state for name, own in states.items()},
    )
    return shared._replace(inner_state=inside)


def _update_one(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: LossScaleState,
    params: Any,
    **extra_args: Any,
) -> tuple[Any, LossScaleState]:
    """Runs one optimizer under its own scale, whose counts are then those of this update alone."""
    fresh = jax.tree.map(jnp.zeros_like, state._replace(inner_state=()))
    fresh = fresh._replace(loss_scale=state.loss_scale, inner_state=state.inner_state)
    updates, new = tx.update(grads, cast(Any, fresh), params, **extra_args)
    return updates, cast(LossScaleState, new)


def _record(inside: OptimizersState, name: str, own: LossScaleState) -> OptimizersState:
    """Adds what the update of one optimizer has found."""
    total = trees.count_up(inside.optimizer_skipped_total[name], own.overflow)
    found = jnp.stack([own.inf_total, own.nan_total], axis=-1) > 0
    return inside._replace(
        optimizer_skipped={**inside.optimizer_skipped, name: own.overflow},
        optimizer_skipped_total={**inside.optimizer_skipped_total, name: total},
        pending_found=inside.pending_found | found,
        pending_skip=inside.pending_skip | own.overflow,
        pending_bad_update=inside.pending_bad_update | (own.bad_update_total > 0),
        pending_bad_loss=inside.pending_bad_loss | (own.nonfinite_loss_total > 0),
        inner_states={**inside.inner_states, name: own.inner_state},
    )


def _move(advance: Advance, state: LossScaleState, inside: OptimizersState) -> LossScaleState:
    """The state after the last update of a step, whose findings are in the fields `pending_...`."""
    judgement = Judgement(
        counts=inside.pending_found.astype(jnp.int32),
        is_too_large=jnp.zeros((), bool),  # if it was, it is among the bad updates
        seen=inside.pending_seen,
        axes=(),
        is_bad_loss=inside.pending_bad_loss,
    )
    cleared: dict[str, Any] = {
        name: jnp.zeros_like(value)
        for name, value in inside._asdict().items()
        if name.startswith("pending_")
    }
    transition = Transition(
        None, inside._replace(**cleared), inside.pending_skip, inside.pending_bad_update
    )
    return move_scale(advance, state, judgement, transition)


def _judge_again(
    verdict: Verdict | None, own_grads: Sequence[Any], loss_scale: jax.Array
) -> Verdict | None:
    """A verdict on one optimizer's gradients, over the same axes as that on all of them."""
    # One pair of counts cannot tell whose gradients were bad.
    if verdict is None:
        return None
    scales = list(jnp.atleast_1d(loss_scale))
    counts, is_too_large, _ = judge(own_grads, scales, verdict.axes)
    return verdict._replace(counts=jnp.sum(counts, axis=0), is_too_large=is_too_large)


def _for_one(name: str, extra_args: dict[str, Any], own_grads: Any) -> dict[str, Any]:
    """The extra arguments that the optimizer of this name gets."""
    own = {key: value for key, value in extra_args.items() if key not in _OF_ALL_PARAMETERS}
    if "model_axes" in own:
        own["model_axes"] = as_model_axes(own["model_axes"]).below(name)
    return {**own, "grad": own_grads} if "grad" in own else own


def _fill_up(new_updates: dict[str, Any], params: Any, grads: Any) -> Any:
    """Updates for all parameters that were given, in the same kind of mapping.

    Without parameters they are like `grads`, or a dict if that is None.
    """
    if params is not None:
        for name in set(params) - set(new_updates):
            new_updates[name] = trees.null_updates(jax.tree.map(jnp.asarray, params[name]))
    model_of = grads if params is None else params
    if model_of is None:
        return new_updates
    # Unflattened, and not built anew: the states of flax nnx are mappings that wrap what is read
    # out of them. The first part of a leaf's path is the name of its optimizer.
    leaves = {name: iter(jax.tree.leaves(own)) for name, own in new_updates.items()}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model_of)]
    names = [trees.path_name(path[:1]) for path in paths]
    return jax.tree.structure(model_of).unflatten([next(leaves[name]) for name in names])


def _find_given(per_loss: Sequence[Any], optimizers: Iterable[str]) -> list[str]:
    """The names of the optimizers for which any loss has gradients, in the optimizers' order."""
    given = [
        name
        for name in optimizers
        if any(grads is not None and grads.get(name) is not None for grads in per_loss)
    ]
    if not given:
        raise ValueError(
            "gradients of no optimizer were given: update takes a dict from the names of those "
            f"that take part, of {sorted(optimizers)}, to their gradients"
        )
    return given


def _find_seen(per_loss: Sequence[Any], optimizers: Iterable[str]) -> np.ndarray:
    """Which losses have gradients for any optimizer; numpy bool[losses]."""
    return np.array(
        [
            grads is not None and any(grads.get(name) is not None for name in optimizers)
            for grads in per_loss
        ]
    )


def _check_optimizers(optimizers: Mapping[str, optax.GradientTransformation]) -> None:
    if not optimizers:
        raise ValueError(
            "inner must be an optimizer, or a dict from name to optimizer, got an empty dict"
        )
    for name, tx in optimizers.items():
        if not isinstance(name, str):
            raise TypeError(f"names in inner must be strings, got {name!r}")
        check_transformation(f"inner[{name!r}]", tx)


def _check_names(what: str, tree: Any, optimizers: Iterable[str]) -> None:
    """Refuses what is not a mapping from names of optimizers."""
    names = sorted(optimizers)
    if not isinstance(tree, Mapping):
        raise TypeError(
            f"{what} must be a dict from the names of the optimizers, {names}, got "
            f"{type(tree).__name__}"
        )
    for name in tree:
        if name not in names:
            raise ValueError(
                f"{what} have the name {name!r}, and the optimizers are {names}"
                f"{suggest(name, names)}"
            )


def _check_params(params: Any, optimizers: Iterable[str], needed: Iterable[str]) -> None:
    """Refuses parameters that are no mapping, or lack those of the optimizers in `needed`."""
    _check_names("params", params, optimizers)
    if missing := sorted(set(needed) - set(params)):
        raise ValueError(
            f"params lack those of the optimizers {missing}: give a dict with an entry for each"
        )
