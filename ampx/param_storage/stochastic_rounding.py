"""Bfloat16 parameters without masters, rounded stochastically after each step.

A step of 2**-12 on a bfloat16 parameter of 1.0, whose neighbours are 2**-7 above and 2**-8 below:

    to the nearest    1.0 - 2**-12 is 1.0 again, in each step: the parameter never moves
    stochastically    one step in 16 moves it by 2**-8, the other 15 by nothing: 2**-12 on average

The price is noise, not a bias: see `rounding` for why the mean is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import as_int, check_transformation
from ampx.param_storage.narrow_params import NarrowParam, RoundedParam
from ampx.param_storage.rounding import draw_words
from ampx.param_storage.wide_updates import update_narrow
from ampx.summaries import show_fields
from ampx.tree_checks import check_arrays
from ampx.trees import convert_numbers, hold, leave_untrained_out, widen
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_update, guard
from ampx.updates.tails import Tail


class StochasticRoundingState(NamedTuple):
    """State of `ampx.fused.stochastic_rounding`.

    Attributes:
      rounding_count: int32 scalar, steps that were rounded, which the random bits depend on. It
        stands still on a skipped step.
      inner_state: the wrapped transformation's state, made for float32 parameters.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.stochastic_rounding(ampx.fused.adam(0.1))
      >>> state = tx.init(jnp.ones(2, jnp.bfloat16))
      >>> state.inner_state[0].mu.dtype.name
      'float32'
    """

    rounding_count: jax.Array
    inner_state: optax.OptState

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    hands_on_tail = True


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Updates bfloat16 parameters in float32 and rounds them up or down at random.

    Rounded to the nearest, a bfloat16 parameter loses every step below 1/512 of itself. Rounded
    stochastically it keeps it on average: 2 bytes a parameter, no master. What it costs is noise of
    up to 1/128 of a parameter in each step, so it is for long runs with small rates; where that
    shows, take `split_masters`.

    The random bits are a hash of seed, step, parameter and element: repeatable, and the same on any
    mesh under plain `jit`. Inside `shard_map` the elements of a shard are numbered anew. A skipped
    step keeps parameters and count. Other dtypes are updated as they are.

    Args:
      inner: any optax transformation. It sees float32 parameters, and its moments are float32
        unless it is told otherwise. With a fused one everything is one pass over memory. All that
        changes updates belongs inside: what comes after this in a chain is rounded to the nearest.
      seed: of the random bits; runs with different seeds round differently.

    Returns:
      An optax transformation for use with `ampx.fused.apply` or `ampx.train_step`. `update` returns
      float32 differences that give the same bfloat16 when `ampx.apply_updates` adds them.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or `seed` not an int.
      ValueError: in `update` without parameters.

    References:
      Zamirai et al., https://arxiv.org/abs/2010.06192.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.stochastic_rounding(ampx.fused.sgd(2.0**-12))
      >>> params = jnp.ones(4096, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(16):  # each step is too small for bfloat16
      ...     params, state, _ = ampx.fused.apply(tx, jnp.ones(4096), state, params)
      >>> print(f"{params.astype(jnp.float32).mean():.3f}")  # 1 - 16 / 4096
      0.996
    """
    check_transformation("inner", inner)
    seed = as_int("seed", seed)
    inner = guard("fused.stochastic_rounding", accept_extra_args(inner))

    def init(params: optax.Params) -> StochasticRoundingState:
        check_arrays("params", params, may_be_shapes=True)
        inner_state = inner.init(jax.tree.map(widen, convert_numbers(params)))
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, *, tail: Tail | None = None, **extra_args: Any
    ) -> tuple[Any, StochasticRoundingState]:
        if params is None:
            raise ValueError("stochastic_rounding needs params: call update(grads, state, params)")
        params = leave_untrained_out(params, updates)
        check_update("fused.stochastic_rounding", StochasticRoundingState, updates, state, params)
        updates, params = convert_numbers((updates, params))
        leaves = jax.tree.leaves(params)
        # Each leaf has bits of its own, by its number: equal parameters must not round alike.
        words = [
            draw_words(seed=seed, step=state.rounding_count, leaf=place)
            for place in range(len(leaves))
        ]
        given = [_as_given(*pair) for pair in zip(leaves, words, strict=True)]
        steps, _, inner_state = update_narrow(
            inner, updates, state.inner_state, params, given, tail, extra_args
        )
        # A skipped step rounds nothing, so the next one draws what this one would have drawn.
        count: Any = optax.safe_increment(state.rounding_count)
        if tail is not None and tail.skip is not None:
            count = hold(tail.skip, count, state.rounding_count)
        return steps, StochasticRoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_given(param: Any, words: tuple[jax.Array, jax.Array]) -> Any:
    """What is to be updated for a parameter, see `update_narrow`."""
    if isinstance(param, NarrowParam):  # of a wrapper around this one
        return param
    if param.dtype == jnp.bfloat16:
        return NarrowParam(RoundedParam(param), words)
    return widen(param)
