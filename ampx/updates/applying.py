"""Updates added to parameters, whatever their dtypes.

Loss scales hand float32 updates out, while parameters may be half. `optax.apply_updates` adds the
two by JAX's implicit promotion, which `jax.numpy_dtype_promotion("strict")` forbids.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.overwritten import is_replacement
from ampx.tree_checks import check_gradients, check_structure
from ampx.trees import cast_like, is_float0, wider_dtype


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, also for float32 updates of half parameters under strict promotion.

    Args:
      params: the parameters.
      updates: what an optimizer returned for them; None where a leaf is not trained.

    Returns:
      The sum, computed in the wider of the two dtypes, in the dtypes of `params`. Leaves that are
      no weights, as flax's layers in 8 bits have them, are replaced by the value that an update of
      a loss scale holds.

    Raises:
      TypeError: for what is no array.
      ValueError: for updates of another structure than the parameters, or of other shapes.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> ampx.apply_updates(jnp.ones(1, jnp.bfloat16), jnp.array([0.5]))
      Array([1.5], dtype=bfloat16)
    """

    def widen(param: Any, update: Any) -> Any:
        param, update = jnp.asarray(param), jnp.asarray(update)
        return param.astype(wider_dtype(param.dtype, update.dtype))

    def widest_sum(param: Any, update: Any) -> Any:
        # None is the update of what is not trained, float0 the gradient of an integer.
        if update is None or is_float0(update):
            return param
        if is_replacement(update):  # of a leaf that is no weight: its sum is the new value
            return jnp.asarray(param) + update
        # Added in the wider dtype and rounded once. Rounded to half before, it would round twice.
        total = optax.apply_updates(widen(param, update), widen(update, param))
        return cast_like(total, param)

    added = jax.tree.map(
        lambda update: None if is_replacement(update) else update, updates, is_leaf=is_replacement
    )
    check_structure("updates", added, "params", params)
    check_gradients("updates", added, params, part="update")
    return jax.tree.map(widest_sum, params, updates)
