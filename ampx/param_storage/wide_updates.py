"""Parameters that are stored in one form and updated in a wider one: what such wrappers share.

`master_weights`, `split_masters` and `stochastic_rounding` each wrap an optimizer that sees float32
parameters. A step of theirs is

    stored ── widen ──► float32 ── inner optimizer ──► new float32 ── narrow ──► new stored

and ends in what optax wants (a difference to be added) or what a fused tail wants (the new
parameter, and on a skipped step the old one, bit for bit).

    update_wide       the middle: one step of the inner optimizer, fused or not
    update_narrow     all of it, for parameters in a `narrow_params` form
    answer_tail       the end
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.mesh_axes import sum_over_shards
from ampx.param_storage.narrow_params import (
    NarrowParam,
    ParamForm,
    SplitParam,
    as_arrays,
    runs_kernels,
)
from ampx.trees import is_float0, is_floating, widen
from ampx.updates.applying import apply_updates
from ampx.updates.tails import Tail, TailResult, takes_tail, unwrap_results


def update_wide(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    inner_state: Any,
    wide: Any,
    tail: Tail | None,
    extra_args: dict[str, Any],
) -> tuple[Any, jax.Array, Any]:
    """One step of `inner` on wide parameters.

    Args:
      inner: any transformation; a fused one works in one pass.
      grads: gradients of any floating dtype.
      inner_state: its state, made for wide parameters.
      wide: the parameters in the form in which they are updated.
      tail: what this step's tail asks for, if anything does.
      extra_args: handed to `inner`.

    Returns:
      New wide parameters, a bool scalar that tells whether a number was refused, and the new state.
    """
    if takes_tail(inner_state):
        # New parameters, whatever the caller wants: they are to be narrowed before any difference.
        own_tail = dataclasses.replace(tail or Tail(), new_params=True)
        results, new_state = inner.update(grads, inner_state, wide, tail=own_tail, **extra_args)
        new, bad = unwrap_results(results)
        return new, bad, new_state
    # A plain optax optimizer computes in the dtypes that it is given: here float32 throughout.
    grads = jax.tree.map(lambda g: g if is_float0(g) else widen(g), grads)
    updates, new_state = inner.update(grads, inner_state, wide, **extra_args)
    return apply_updates(wide, updates), jnp.zeros((), bool), new_state


class Settled(NamedTuple):
    """A new parameter on which a kernel has decided already: on a skip it is the old one.

    Attributes:
      param: the parameter as it is stored, or a `NarrowParam` on its way to an outer wrapper.
    """

    param: Any


def update_narrow(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    inner_state: Any,
    params: Any,
    given: list[Any],
    tail: Tail | None,
    extra_args: dict[str, Any],
) -> tuple[Any, list[ParamForm | None], Any]:
    """One step on parameters of which some are stored in a narrow form.

    Args:
      inner: see `update_wide`, as for the next two.
      grads: see there.
      inner_state: see there.
      params: the parameters as the model has them: arrays, or each a `NarrowParam` that a wrapper
        around this one hands on.
      given: for each leaf of `params` a `NarrowParam`, or else the array that is to be updated.
      tail: see `update_wide`, as for the next.
      extra_args: see there.

    Returns:
      What `update` returns for `params`; the new form of each leaf that this wrapper stores in one,
      else None; and the new inner state.
    """
    leaves, structure = jax.tree.flatten(params)
    in_kernels = runs_kernels(tail, inner_state)
    wide = structure.unflatten(given if in_kernels else as_arrays(given))
    new, bad, inner_state = update_wide(inner, grads, inner_state, wide, tail, extra_args)
    new_params, forms = [], []
    for param, own, value in zip(leaves, given, structure.flatten_up_to(new), strict=True):
        form = None
        if isinstance(param, NarrowParam):  # of the wrapper around this one, which narrows it
            value = Settled(value)
        elif isinstance(value, NarrowParam):  # narrowed by a kernel, which knew of a skip
            form = value.form
            value = Settled(form.half)
        elif isinstance(own, NarrowParam):
            form = _hold_error(own.narrow(value), own.form, tail)
            value = form.half
        else:
            value = value.astype(param.dtype)
        new_params.append(value)
        forms.append(form)
    return answer_tail(structure.unflatten(new_params), params, bad, tail), forms, inner_state


def _hold_error(new: ParamForm, old: Any, tail: Tail | None) -> ParamForm:
    """The new form; where `answer_tail` holds the half, what lies beside it is held too.

    New error bits beside an old half would be a master that nobody computed.
    """
    if not isinstance(new, SplitParam) or tail is None or tail.skip is None:
        return new
    is_taken = jnp.isfinite(new.half) & ~tail.skip
    return new._replace(error=jnp.where(is_taken, new.error, old.error))


def answer_tail(new: Any, params: Any, bad: jax.Array, tail: Tail | None) -> Any:
    """What an update returns when `new` is to stand in the place of `params`: as the tail asks.

    Without a tail these are float32 updates, the difference of two stored parameters. Added by
    `optax.apply_updates` they give the new one exactly, unless a half parameter shrinks by more
    than 2**12 in one step. Two float16 numbers of 11 bits, one 2**12 times the other, reach over
    11 + 12 bits; if they lie further apart, their difference does not fit into float32's 24.
    """

    def result(leaf: jax.Array, new_leaf: Any) -> Any:
        if isinstance(new_leaf, Settled):
            return TailResult(new_leaf.param, bad)
        wants_params = tail is not None and tail.new_params
        value = new_leaf if wants_params else _difference(new_leaf, leaf)
        if tail is None:
            return value
        if tail.skip is None or not is_floating(leaf):
            return TailResult(value, bad)
        # Negative zeros: a parameter of -0.0 plus 0.0 would become 0.0.
        stays = leaf if wants_params else jnp.full_like(value, -0.0)
        held = jnp.where(jnp.isfinite(new_leaf) & ~tail.skip, value, stays)
        return TailResult(held, bad | overflows(new_leaf, leaf))

    return jax.tree.map(result, params, new)


def overflows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Whether a float16 parameter that is finite would not stay so; over all of its shards.

    Other types have the range of what they are computed in, and are not looked through.
    """
    if new.dtype != jnp.float16:
        return jnp.zeros((), bool)
    lost = jnp.sum(~jnp.isfinite(new) & jnp.isfinite(old), dtype=jnp.int32)
    return sum_over_shards(lost) > 0


def _difference(new: jax.Array, old: jax.Array) -> Any:
    if is_floating(old):
        return widen(new) - widen(old)
    # optax gives an integer parameter an update of its own dtype, and a PRNG key one of float0.
    is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
    return np.zeros(old.shape, jax.dtypes.float0) if is_key else jnp.zeros_like(old)
