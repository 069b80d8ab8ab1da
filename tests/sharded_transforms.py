"""Every transformation of ampx around parameters that are divided over devices, as FSDP does.

    python tests/sharded_transforms.py

prints the table of the guide: what the devices exchange in one compiled step, by array, since XLA
puts several arrays into one collective or not.
"""

import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

SCHEDULE = ampx.precision_schedule("fast1|step|0.5", total_steps=4)
# By public name; a name with a comma is the same one with other settings.
TRANSFORMS = {
    "all_reduce": lambda tx: optax.chain(ampx.all_reduce("data"), tx),
    "clip_by_bucket_norm": lambda tx: optax.chain(ampx.clip_by_bucket_norm(1.0), tx),
    "densify_rows": lambda tx: optax.chain(ampx.densify_rows(), tx),
    "dynamic_loss_scale": functools.partial(ampx.dynamic_loss_scale, init_scale=8.0),
    "dynamic_loss_scale, hold": functools.partial(
        ampx.dynamic_loss_scale, init_scale=8.0, nonfinite_updates="hold"
    ),
    "dynamic_loss_scale, skip": functools.partial(
        ampx.dynamic_loss_scale, init_scale=8.0, nonfinite_updates="skip"
    ),
    "follow_schedule": lambda tx: ampx.follow_schedule(ampx.dynamic_loss_scale(tx), SCHEDULE),
    "loss_scale": lambda tx: ampx.loss_scale("dynamic", tx),
    "master_weights": ampx.master_weights,
    "multi_steps": lambda tx: ampx.multi_steps(tx, 2),
    "no_loss_scale": ampx.no_loss_scale,
    "static_loss_scale": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "zero1": lambda tx: ampx.zero1(tx, "data"),
    "fused.split_masters": fused.split_masters,
    "fused.split_masters, 8 bits": functools.partial(fused.split_masters, error_bits=8),
    "fused.stochastic_rounding": fused.stochastic_rounding,
}
OPTIMIZERS = {
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


# What each one is compared with, where that is not `optax.adamw`.
PLAIN = {
    f"fused.{name}": functools.partial(getattr(optax, name), 0.1)
    for name in "adadelta adagrad adam lamb lion novograd".split()
} | {"fused.sgd": functools.partial(optax.sgd, 0.1, momentum=0.9)}
# They reduce along mapped axes, so they are for `jax.shard_map`.
MAPPED = ("all_reduce", "zero1")
NAMES = sorted({*TRANSFORMS, *OPTIMIZERS} - set(MAPPED))
KINDS = ("Auto", "Explicit")
SHAPES = {"w": (8, 16), "u": (16, 8), "b": (16,)}
SPECS = {"w": P("data"), "u": P(None, "data"), "b": P()}
_COLLECTIVE = re.compile(
    r" = (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
)
_ARRAY = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")


def loss_fn(params, batch):
    # On Explicit axes FSDP says where parameters become whole; on Auto axes XLA finds it.
    if any(jax.typeof(params["w"]).sharding.spec):
        params = jax.tree.map(lambda p: jax.reshard(p, P()), params)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) @ params["u"]) ** 2)


def make_plain(name):
    """The optimizer of optax that a transformation is compared with."""
    return PLAIN.get(name, functools.partial(optax.adamw, 0.1))()


def compile_step(tx, kind, dtype=jnp.float32):
    """The compiled step of a transformation with FSDP on a mesh of Auto or Explicit axes."""
    mesh = make_mesh((4,), ("data",), kind)
    params = {
        key: jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, SPECS[key]))
        for key, shape in SHAPES.items()
    }
    batch = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))

    def step(params, state, batch):
        def scaled(params):
            return loss_fn(params, batch) * ampx.current_loss_scale(state)

        updates, state = tx.update(jax.grad(scaled)(params), state, params)
        return ampx.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        return jax.jit(step).lower(params, tx.init(params), batch).compile()


class Exchange(NamedTuple):
    """What the devices exchange in a step, in arrays: a loop or branch counts as it is written."""

    gathered: int
    summed: int  # of more than one element
    numbers: int  # that are summed
    others: int


def count_exchange(tx, kind, dtype=jnp.float32):
    """The `Exchange` of a transformation."""
    counts = Counter()
    for result, opcode in _COLLECTIVE.findall(compile_step(tx, kind, dtype).as_text()):
        for dims in _ARRAY.findall(result):
            counts[opcode, math.prod(map(int, filter(None, dims.split(",")))) > 1] += 1
    gathered, summed = counts.pop(("all-gather", True), 0), counts.pop(("all-reduce", True), 0)
    return Exchange(gathered, summed, counts.pop(("all-reduce", False), 0), counts.total())


def exchange_of(name, kind):
    """That of a transformation, and of plain optax."""
    # The wrappers of narrow parameters do nothing for float32 ones.
    is_narrow = any(word in name for word in ("master", "rounding"))
    dtype = jnp.bfloat16 if is_narrow else jnp.float32
    return tuple(count_exchange(tx, kind, dtype) for tx in (make(name), make_plain(name)))


def table():
    """The lines of the table in the guide."""
    yield "| transformation | Auto | Explicit | plain optax |"
    yield "| --- | --- | --- | --- |"
    for name in NAMES:
        first, _, settings = name.partition(", ")
        (auto, plain), (explicit, _) = (exchange_of(name, kind) for kind in KINDS)
        cells = [
            f"{found.gathered}, {found.summed}, {found.numbers}"
            for found in (auto, explicit, plain)
        ]
        yield f"| `{first}`{settings and ', ' + settings} | {' | '.join(cells)} |"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with jax.numpy_dtype_promotion("standard"):
        print("\n".join(table()))
