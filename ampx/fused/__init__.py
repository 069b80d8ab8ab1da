"""Optimizer updates in one pass over memory: optax's optimizers, and the whole tail of a step.

Examples:
  >>> import ampx, jax.numpy as jnp
  >>> tx = ampx.dynamic_loss_scale(ampx.fused.adamw(3e-4))
  >>> params = {"w": jnp.ones((2, 2))}
  >>> scaled = {"w": jnp.full((2, 2), 2.0**16)}
  >>> params, state, report = ampx.fused.apply(tx, scaled, tx.init(params), params, max_norm=1.0)
  >>> print(report.global_norm, report.overflow)
  2.0 False
"""

from ampx.flat_buffers.flat_params import FlatParams
from ampx.flat_buffers.flattening import flatten, per_buffer
from ampx.fused.application import ApplyReport, apply
from ampx.fused.fusing import fuse
from ampx.fused.moments.int8_blocks import Int8Blocks
from ampx.fused.optimizers.adadelta import adadelta
from ampx.fused.optimizers.adagrad import adagrad
from ampx.fused.optimizers.adam import adam, adamw
from ampx.fused.optimizers.lamb import lamb
from ampx.fused.optimizers.lion import lion
from ampx.fused.optimizers.novograd import novograd
from ampx.fused.optimizers.sgd import sgd
from ampx.fused.own_rules import from_rule
from ampx.param_storage.split_masters import SplitMastersState, split_masters
from ampx.param_storage.stochastic_rounding import StochasticRoundingState, stochastic_rounding

__all__ = [
    "ApplyReport",
    "FlatParams",
    "Int8Blocks",
    "SplitMastersState",
    "StochasticRoundingState",
    "adadelta",
    "adagrad",
    "adam",
    "adamw",
    "apply",
    "flatten",
    "from_rule",
    "fuse",
    "lamb",
    "lion",
    "novograd",
    "per_buffer",
    "sgd",
    "split_masters",
    "stochastic_rounding",
]


def __dir__() -> list[str]:
    """What completion offers: public names, and not the modules that they come from."""
    return __all__
