"""Updates added to parameters, whatever their dtypes.

Loss scales hand float32 updates out, while parameters may be half. `optax.apply_updates` adds the
two by JAX's implicit promotion, which `jax.numpy_dtype_promotion("strict")` forbids.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.trees import cast_like, is_float0, path_name, wider_dtype


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, also for float32 updates of half parameters under strict promotion.

    Args:
      params: the parameters.
      updates: what an optimizer returned for them; None where a leaf is not trained.

    Returns:
      The sum, computed in the wider of the two dtypes, in the dtypes of `params`.

    Raises:
      ValueError: for an update of another shape than its parameter.

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
        # Added in the wider dtype and rounded once. Rounded to half before, it would round twice.
        total = optax.apply_updates(widen(param, update), widen(update, param))
        return cast_like(total, param)

    _check_shapes(params, updates)
    return jax.tree.map(widest_sum, params, updates)


def _check_shapes(params: Any, updates: Any) -> None:
    """Refuses updates that JAX would broadcast to their parameter, or it to them."""
    structure = jax.tree.structure(params)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params), structure.flatten_up_to(updates), strict=True
    )
    for (path, param), update in leaves:
        if update is not None and jnp.shape(param) != jnp.shape(update):
            where = f" at {path_name(path)!r}" if path else ""
            raise ValueError(
                f"the update{where} has shape {jnp.shape(update)}, and its parameter has shape "
                f"{jnp.shape(param)}: give the updates that tx.update made for these parameters"
            )
