"""Float32 master weights for models whose parameters are stored in half.

A float16 has 11 significant bits, a bfloat16 8. A step below 2**-12 of a float16 parameter, or
2**-9 of a bfloat16 one, is lost when the sum is rounded, in every step again. Masters collect such
steps in float32, and the model's parameter is the master rounded once::

    master = master + update            float32, 24 bits
    param  = half(master)               what forward and backward pass see

This costs 4 bytes a parameter. `ampx.fused.split_masters` has the same numbers in 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_transformation
from ampx.overwritten import join_new_values, leave_overwritten_out, split_overwritten
from ampx.param_storage.wide_updates import answer_tail, update_wide
from ampx.summaries import show_fields
from ampx.tree_checks import check_arrays, check_like, check_opt_state, is_masked
from ampx.trees import cast_castable, cast_like, convert_numbers, find_nodes, leave_untrained_out
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_update, guard
from ampx.updates.tails import Tail


class MasterWeightsState(NamedTuple):
    """State of `ampx.master_weights`.

    Attributes:
      master_params: a tree like the parameters, of their shapes, in float32; float64 and integer
        parameters keep their dtypes.
      inner_state: the wrapped transformation's state, made for float32 parameters.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> state = ampx.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.float16))
      >>> state.master_params.dtype.name
      'float32'
    """

    master_params: Any
    inner_state: optax.OptState

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    hands_on_tail = True


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets `inner` update float32 copies, and the model's parameters follow them.

    The other way, float32 parameters that are cast in each step, needs no such copy: it is what
    `ampx.value_and_grad(policy=...)` does, and both give the same numbers.

    Put the loss scale outside: `dynamic_loss_scale(master_weights(adamw(3e-4)))`. All that changes
    updates belongs inside: `master_weights(optax.chain(scale_by_adam(), scale(-3e-4)))`. What comes
    after it in a chain changes the parameters and not their masters, and no error tells.

    Args:
      inner: any optax transformation. It sees float32 gradients and parameters.

    Returns:
      A transformation whose updates are float32, `half(master) - params`: added by
      `optax.apply_updates` they give `half(master)` exactly, unless a parameter shrinks by more
      than 2**12 in one step, and then the next step makes up for the rounding. To start from
      float32 weights call `init` with them before casting the model: what is lost in half then
      lives on here. Checkpoint this state: it holds the float32 weights.

    Raises:
      ValueError: if `update` is called without parameters.

    References:
      Micikevicius et al., Mixed Precision Training, section 3.1.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = ampx.master_weights(optax.sgd(2.0**-12))
      >>> params = jnp.ones(1, jnp.float16)
      >>> state = tx.init(params)
      >>> for _ in range(4):  # each step is too small for float16; four are not
      ...     updates, state = tx.update(jnp.ones(1, jnp.float16), state, params)
      ...     params = ampx.apply_updates(params, updates)
      >>> params, state.master_params
      (Array([0.999], dtype=float16), Array([0.99902344], dtype=float32))
    """
    check_transformation("inner", inner)
    inner = guard("master_weights", accept_extra_args(inner))

    def init(params: optax.Params) -> MasterWeightsState:
        check_arrays("params", params)
        # A copy even of float32 leaves: state and parameters may both be donated.
        master = jax.tree.map(jnp.array, cast_castable(convert_numbers(params), jnp.float32))
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: Any, state: Any, params: Any = None, *, tail: Tail | None = None, **extra_args: Any
    ) -> tuple[Any, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights needs params: call update(grads, state, params)")
        params = leave_untrained_out(params, updates)
        check_update("master_weights", MasterWeightsState, updates, state, params)
        check_like("params", params, "master_params in the state", state.master_params)
        updates, params = convert_numbers((updates, params))
        master, bad, inner_state = update_wide(
            inner, updates, state.inner_state, state.master_params, tail, extra_args
        )
        # Masters are held by the inner optimizer where it is fused; here their halves are.
        steps = answer_tail(cast_like(master, params), params, bad, tail)
        return steps, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def master_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """The float32 parameters: the masters, or `params` where the state has none.

    Args:
      opt_state: an optimizer state, however nested.
      params: the model's parameters.

    Returns:
      Parameters for evaluation in float32 and for checkpoints; where the masters are those of a
      part (`optax.partition`, `optax.masked`), the other parameters as they are.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> tx = ampx.dynamic_loss_scale(ampx.master_weights(optax.adam(1e-3)))
      >>> ampx.master_params(tx.init(params), params).dtype.name
      'float32'
    """
    check_opt_state(opt_state)
    found = find_nodes(opt_state, MasterWeightsState)
    if len(found) > 1:
        raise ValueError(
            f"found {len(found)} master copies in the state, expected one at most: pass the part "
            "of the state whose masters are meant"
        )
    if not found:
        return params

    # Inside `optax.masked` the masters of other parameters are `MaskedNode`s, trees without leaves.
    def choose(master: Any, param: Any) -> Any:
        return param if is_masked(master) else master

    check_arrays("params", params, may_be_shapes=True)
    # Of leaves that are no weights there are no masters: an optimizer does not see them.
    own, new = leave_overwritten_out(params), split_overwritten(params)[1]
    check_like("params", own, "the master parameters", found[0].master_params)
    masters = jax.tree.map(choose, found[0].master_params, own, is_leaf=is_masked)
    return masters if new is None else join_new_values(masters, new)
