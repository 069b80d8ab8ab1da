"""Warnings about half precision that trains worse than it need, given where a state is made.

Two settings are legal, seldom meant, and fail without a word:

    float16 without a loss scale     gradients below 3e-8 become zero
    half parameters, no masters      an update below 1/512 (bfloat16) or 1/4096 (float16) of its
                                     parameter is rounded away

A linter (`ampx.lint_step`) finds more, with the lines of the program; these need no program.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from ampx.loss_scaling.state import LossScaleState
from ampx.param_storage.master_weights import MasterWeightsState
from ampx.param_storage.split_masters import SplitMastersState
from ampx.param_storage.stochastic_rounding import StochasticRoundingState
from ampx.precision.opt_levels import Recipe
from ampx.trees import find_nodes

# What keeps the part of an update that half parameters cannot hold, or rounds without a bias.
_KEEPERS = (MasterWeightsState, SplitMastersState, StochasticRoundingState)


def warn_of_half(recipe: Recipe, opt_state: Any, stacklevel: int) -> None:
    """Warns of float16 without a loss scale, and of half parameters without masters.

    Args:
      recipe: of the step.
      opt_state: of its optimizer; it tells what is around and inside of it.
      stacklevel: what `warnings.warn` takes, counted from the caller.
    """
    param_dtype, compute_dtype = recipe.policy.param_dtype, recipe.policy.compute_dtype
    dtypes = {np.dtype(d) for d in (param_dtype, compute_dtype, recipe.autocast_dtype) if d}
    if np.dtype(np.float16) in dtypes and not find_nodes(opt_state, LossScaleState):
        warnings.warn(
            "float16 without a loss scale: gradients below 3e-8 become zero. Give "
            "loss_scale='dynamic', or compute in bfloat16, which needs none",
            stacklevel=stacklevel + 1,
        )
    is_half = param_dtype is not None and np.dtype(param_dtype).itemsize == 2
    if is_half and not any(find_nodes(opt_state, keeper) for keeper in _KEEPERS):
        name = np.dtype(param_dtype).name
        # Neighbours between 1 and 2 are eps apart, and half of that is lost. Of a parameter of
        # nearly 2 that is eps / 4; of one of 1 it is twice as much.
        parts = round(4 / float(jnp.finfo(param_dtype).eps))
        warnings.warn(
            f"parameters are stored in {name} without masters: an update below 1/{parts} of "
            "its parameter is rounded away. Level O2 keeps masters in float32, and so does "
            "ampx.master_weights(tx) around an optimizer",
            stacklevel=stacklevel + 1,
        )
