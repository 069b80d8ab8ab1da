"""Every transformation of ampx by its public name, for tests of parameters that are divided."""

import functools

import jax.numpy as jnp
import optax

import ampx
from ampx import fused

SCHEDULE = ampx.precision_schedule("fast1|step|0.5", total_steps=4)
# By public name; a name with a comma is the same one with other settings.
TRANSFORMS = {
    "all_reduce": lambda tx: optax.chain(ampx.all_reduce("data"), tx),
    "clip_by_bucket_norm": lambda tx: optax.chain(ampx.clip_by_bucket_norm(1.0), tx),
    "densify_rows": lambda tx: optax.chain(ampx.densify_rows(), tx),
    "dynamic_loss_scale": functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**16),
    "dynamic_loss_scale, hold": functools.partial(
        ampx.dynamic_loss_scale, init_scale=2.0**16, nonfinite_updates="hold"
    ),
    "dynamic_loss_scale, skip": functools.partial(
        ampx.dynamic_loss_scale, init_scale=2.0**16, nonfinite_updates="skip"
    ),
    "follow_schedule": lambda tx: ampx.follow_schedule(ampx.dynamic_loss_scale(tx), SCHEDULE),
    "loss_scale": lambda tx: ampx.loss_scale("dynamic", tx),
    "master_weights": ampx.master_weights,
    "multi_steps": lambda tx: ampx.multi_steps(tx, 2),
    "multi_steps, scale inside": lambda tx: ampx.multi_steps(
        ampx.dynamic_loss_scale(tx, init_scale=2.0**16), 2
    ),
    "no_loss_scale": ampx.no_loss_scale,
    "static_loss_scale": lambda tx: ampx.static_loss_scale(tx, 2.0**16),
    "zero1": lambda tx: ampx.zero1(tx, "data"),
    "fused.fuse": fused.fuse,
    "fused.split_masters": fused.split_masters,
    "fused.split_masters, 8 bits": functools.partial(fused.split_masters, error_bits=8),
    "fused.stochastic_rounding": fused.stochastic_rounding,
}


def momentum(grad, param, slots, numbers, operations):
    mean = operations.keep(numbers.decay * slots["mean"] + grad, slots["mean"])
    return mean, {"mean": mean}


OPTIMIZERS = {
    "fused.from_rule": functools.partial(
        fused.from_rule, momentum, 0.1, slots={"mean": 0.0}, numbers={"decay": 0.9}
    ),
    **{
        f"fused.{name}": functools.partial(getattr(fused, name), 0.1)
        for name in "adadelta adagrad adam adamw lamb lion novograd".split()
    },
    "fused.sgd": functools.partial(fused.sgd, 0.1, momentum=0.9),
    "fused.adamw, bfloat16": functools.partial(
        fused.adamw, 0.1, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16
    ),
    "fused.adamw, int8": functools.partial(fused.adamw, 0.1, mu_dtype="int8", nu_dtype="int8"),
}


def make(name):
    """The transformation of a name, around `optax.adamw` if it needs another one."""
    return OPTIMIZERS[name]() if name in OPTIMIZERS else TRANSFORMS[name](optax.adamw(0.1))
