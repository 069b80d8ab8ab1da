"""Bfloat16 parameters with the rest of a float32 master beside them.

    bytes a parameter           parameter   master   together
    master_weights                  2          4         6
    split_masters, 16 bits          2          2         4      the same numbers
    split_masters, 8 bits           2          1         3      the master has 16 significant bits

The model computes with the bfloat16 half. The optimizer sees the joined float32, and what it
returns is split again. `split_floats` has the arithmetic of both; `narrow_params` says how a fused
optimizer does it in the same pass over memory.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.checking import as_int, check_transformation
from ampx.param_storage.narrow_params import NarrowParam, SplitParam
from ampx.param_storage.wide_updates import update_narrow
from ampx.summaries import show_fields
from ampx.tree_checks import check_arrays, check_structure
from ampx.trees import convert_numbers, leave_untrained_out, widen
from ampx.updates.extra_args import accept_extra_args, schedule_free_field
from ampx.updates.guards import check_update, guard
from ampx.updates.tails import Tail


class SplitMastersState(NamedTuple):
    """State of `ampx.fused.split_masters`.

    Attributes:
      error_bits: a tree like the parameters of int8 or int16, each of its parameter's shape; for a
        parameter that is not bfloat16 a zero of shape ().
      inner_state: the wrapped transformation's state, made for float32 parameters.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> state = ampx.fused.split_masters(ampx.fused.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16))
      >>> state.error_bits.dtype.name
      'int16'
    """

    error_bits: Any
    inner_state: optax.OptState

    __repr__ = show_fields

    b1, z = schedule_free_field("b1"), schedule_free_field("z")

    hands_on_tail = True


def split_masters(
    inner: optax.GradientTransformation, error_bits: Literal[8, 16] = 16
) -> optax.GradientTransformationExtraArgs:
    """Master weights for bfloat16 parameters that store only what bfloat16 leaves out.

    A bfloat16 is the upper half of a float32. With 16 bits the state holds the lower half, so the
    master is exact: the numbers are those of `ampx.master_weights`, in 4 bytes a parameter where
    that takes 6. With 8 bits it is 3 bytes and each step rounds the master to 16 significant bits,
    a relative error of at most 2**-16: a step below 2**-17 of a parameter is lost, and one below
    2**-16 may be.

    A skipped step keeps parameters and error bits. Code that writes to a parameter from outside
    moves its master along: the error bits that stay add at most half a bfloat16 step. Parameters of
    other dtypes (norms kept in float32) are updated as they are.

    Args:
      inner: any optax transformation. It sees float32 parameters, and its moments are float32
        unless it is told otherwise. With a fused one parameters are joined, updated and split in
        the same pass. All that changes updates belongs inside: what comes after this in a chain
        changes parameters without their error bits, and no error tells.
      error_bits: 16 or 8.

    Returns:
      An optax transformation for use with `ampx.fused.apply` or `ampx.train_step`. `update` returns
      float32 differences that give the same bfloat16 when `ampx.apply_updates` adds them.

    Raises:
      TypeError: if `inner` is not a gradient transformation.
      ValueError: for other `error_bits`, or in `update` without parameters.

    References:
      Zamirai et al., https://arxiv.org/abs/2010.06192; the split is as in FlashOptim, the error
      bits are steps of the bit pattern here.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tx = ampx.fused.split_masters(ampx.fused.sgd(2.0**-12))
      >>> params = jnp.ones(1, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(16):  # each step is too small for bfloat16; sixteen are not
      ...     params, state, _ = ampx.fused.apply(tx, jnp.ones(1), state, params)
      >>> params
      Array([0.996094], dtype=bfloat16)
    """
    check_transformation("inner", inner)
    if as_int("error_bits", error_bits) not in (8, 16):
        raise ValueError(f"error_bits must be 8 or 16, got {error_bits!r}")
    inner = guard("fused.split_masters", accept_extra_args(inner))
    dtype = jnp.int8 if error_bits == 8 else jnp.int16

    def init(params: optax.Params) -> SplitMastersState:
        check_arrays("params", params, may_be_shapes=True)
        # Nothing is stored for a parameter that is not split, but a leaf keeps the trees alike.
        # `zeros_like` and not `zeros`: error bits lie where their parameter does.
        errors = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype) if _is_split(p) else jnp.zeros((), dtype), params
        )
        wide = jax.tree.map(widen, convert_numbers(params))
        return SplitMastersState(errors, inner.init(wide))

    def update(
        updates: Any, state: Any, params: Any = None, *, tail: Tail | None = None, **extra_args: Any
    ) -> tuple[Any, SplitMastersState]:
        if params is None:
            raise ValueError("split_masters needs params: call update(grads, state, params)")
        params = leave_untrained_out(params, updates)
        check_update("fused.split_masters", SplitMastersState, updates, state, params)
        check_structure("error_bits in the state", state.error_bits, "params", params)
        updates, params = convert_numbers((updates, params))
        leaves, structure = jax.tree.flatten(params)
        old_errors = structure.flatten_up_to(state.error_bits)
        # The dtype says which parameters are split, in `init` and in every step.
        given = [_as_given(param, error) for param, error in zip(leaves, old_errors, strict=True)]
        steps, forms, inner_state = update_narrow(
            inner, updates, state.inner_state, params, given, tail, extra_args
        )
        errors = [
            form.error if isinstance(form, SplitParam) else error
            for form, error in zip(forms, old_errors, strict=True)
        ]
        return steps, SplitMastersState(structure.unflatten(errors), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_given(param: Any, error: jax.Array) -> Any:
    """What is to be updated for a parameter, see `update_narrow`."""
    if isinstance(param, NarrowParam):  # of a wrapper around this one
        return param
    return NarrowParam(SplitParam(param, error)) if _is_split(param) else widen(param)


def _is_split(param: Any) -> bool:
    return jnp.result_type(param) == jnp.bfloat16
