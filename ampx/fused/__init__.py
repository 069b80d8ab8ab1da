"""Optimizer updates in one pass over memory: optax's optimizers, and the whole tail of a step."""

from ampx.fused.application import ApplyReport, apply
from ampx.fused.rules_adadelta import adadelta
from ampx.fused.rules_adagrad import adagrad
from ampx.fused.rules_adam import adam, adamw
from ampx.fused.rules_lamb import lamb
from ampx.fused.rules_lion import lion
from ampx.fused.rules_novograd import novograd
from ampx.fused.rules_sgd import sgd

__all__ = [
    "ApplyReport",
    "adadelta",
    "adagrad",
    "adam",
    "adamw",
    "apply",
    "lamb",
    "lion",
    "novograd",
    "sgd",
]
