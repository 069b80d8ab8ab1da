"""Updates added to parameters, whatever their dtypes.

Loss scales hand float32 updates out, while parameters may be half. `optax.apply_updates` adds the
two by JAX's implicit promotion, which `jax.numpy_dtype_promotion("strict")` forbids.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.trees import cast_like, is_float0, wider_dtype


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, also for float32 updates of half parameters under strict promotion.

    Args:
      params: the parameters.
      updates: what an optimizer returned for them.

    Returns:
      The sum, computed in the wider of the two dtypes, in the dtypes of `params`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> ampx.apply_updates(jnp.ones(1, jnp.bfloat16), jnp.array([0.5]))
      Array([1.5], dtype=bfloat16)
    """

    def widen(param: Any, update: Any) -> Any:
        param, update = jnp.asarray(param), jnp.asarray(update)
        return param.astype(wider_dtype(param.dtype, update.dtype))

    def widest_sum(param: Any, update: Any) -> Any:
        if is_float0(update):  # the gradient of an integer parameter
            return param
        # Added in the wider dtype and rounded once. Rounded to half before, it would round twice.
        return optax.apply_updates(widen(param, update), widen(update, param))

    return cast_like(jax.tree.map(widest_sum, params, updates), params)
