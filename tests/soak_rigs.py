"""The training steps that the soak puts faults into: each with a mesh, a precision and a scale.

All of them train the small model of `pipeline_steps`, whose rows carry a `gain` for each layer. A
batch has one leaf more, `faults`, of shape (rows, elements): what a row adds to the gradient of
each element of the parameters. It is zero but where the soak wants a fault. So one compiled program
takes faults of every kind, and every row, micro-batch and device can bring them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import make_mesh
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_steps import ROWS, loss_fn, make_batch, make_grads_of, make_params, placed

import ampx
from ampx.pipelining import one_f_one_b, zero_bubble

ELEMENTS = sum(leaf.size for leaf in jax.tree.leaves(make_params()))


class Dynamics(NamedTuple):
    """The settings of a loss scale that the soak's own model of it must know.

    Attributes:
      init: first scale; the only one if `interval` is 0.
      interval: finite steps until the scale doubles; 0 for a static scale.
      hysteresis: overflows until it halves.
      refill: what refills the tolerance; see `ampx.dynamic_loss_scale`.
      floor: smallest scale.
      strict: whether steps with updates that are not finite are undone, too.
    """

    init: float = 2.0**10
    interval: int = 6
    hysteresis: int = 1
    refill: str = "growth"
    floor: float = 1.0
    strict: bool = False

    def wrap(self, tx: Any) -> Any:
        judged = "skip" if self.strict else "accept"
        if not self.interval:
            return ampx.static_loss_scale(tx, self.init, nonfinite_updates=judged)
        return ampx.dynamic_loss_scale(
            tx,
            init_scale=self.init,
            growth_interval=self.interval,
            hysteresis=self.hysteresis,
            refill=self.refill,
            min_scale=self.floor,
            nonfinite_updates=judged,
        )


DYNAMICS = {
    "dynamic": Dynamics(),
    "tolerant": Dynamics(interval=9, hysteresis=3, refill="change", floor=2.0**5),
    "forgetful": Dynamics(interval=5, hysteresis=2, refill="finite"),
    "static": Dynamics(init=128.0, interval=0),
    "strict": Dynamics(strict=True),
}


class Rig(NamedTuple):
    """A training step, ready to be called.

    Attributes:
      step: compiled `step(state, batch) -> (state, report)`.
      state: the first state, on the devices where the step will leave it.
      place: puts a batch of numpy arrays on the devices.
      dynamics: of its loss scale.
      takes_gradient_faults: whether a batch has the leaf `faults`.
    """

    step: Callable[..., Any]
    state: Any
    place: Callable[[Any], Any]
    dynamics: Dynamics
    takes_gradient_faults: bool = True


@jax.custom_vjp
def with_faults(params: Any, faults: jax.Array) -> Any:
    """The parameters; on the way back their gradients get the sum of the rows of `faults` added."""
    del faults
    return params


def _forward(params: Any, faults: jax.Array) -> tuple[Any, jax.Array]:
    return params, faults


def _backward(faults: jax.Array, cotangents: Any) -> tuple[Any, jax.Array]:
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), cotangents))
    added = unravel(jnp.sum(faults, axis=0))
    grads = jax.tree.map(lambda own, more: own + more.astype(own.dtype), cotangents, added)
    return grads, jnp.zeros_like(faults)


with_faults.defvjp(_forward, _backward)


def faulty_loss(params: Any, batch: Any) -> Any:
    rest = {name: leaf for name, leaf in batch.items() if name != "faults"}
    return loss_fn(with_faults(params, batch["faults"]), rest)


def clean_batch(number: int, rig: Rig) -> dict[str, np.ndarray]:
    """A batch without a fault, as numpy arrays."""
    batch = make_batch(number)
    if rig.takes_gradient_faults:
        batch["faults"] = np.zeros((ROWS, ELEMENTS), np.float32)
    return batch


# --- kinds of mesh -------------------------------------------------------------------------------


def _one_device(tx: Any, dynamics: Dynamics, **options: Any) -> Rig:
    step = ampx.train_step(
        faulty_loss,
        tx,
        loss_scale=dynamics.wrap,
        normalize="weights",
        num_microbatches=4,
        **options,
    )
    place = functools.partial(jax.device_put, device=jax.devices()[0])
    return Rig(jax.jit(step), place(step.init(make_params())), place, dynamics)


def _global_arrays(tx: Any, dynamics: Dynamics, *, kind: str = "Auto", **options: Any) -> Rig:
    """Under plain `jit`: rows over one axis, matrices of parameters over the other."""
    mesh = make_mesh((2, 2), ("data", "model"), kind)
    loss = faulty_loss
    if kind == "Explicit":
        # The model does not say how it gathers from a divided table: the compiler decides inside.
        loss = jax.sharding.auto_axes(faulty_loss, out_sharding=NamedSharding(mesh, P()))
    step = ampx.train_step(loss, tx, loss_scale=dynamics.wrap, normalize="weights", **options)
    params = make_params()
    params = jax.tree.map(
        lambda leaf: jax.device_put(
            leaf,
            NamedSharding(mesh, P(None, "model") if leaf.ndim == 2 else P()),
        ),
        params,
    )
    state = step.init(params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    compiled = jax.jit(step, out_shardings=(shardings, None))
    return Rig(
        compiled,
        state,
        lambda batch: jax.device_put(batch, NamedSharding(mesh, P("data"))),
        dynamics,
    )


def _mapped(
    tx: Any, dynamics: Dynamics, *, check_vma: bool, zero1: bool = False, **options: Any
) -> Rig:
    """Inside `shard_map`, with gradients reduced in small buckets, or ZeRO-1."""
    mesh = make_mesh((4,), ("data",))
    if zero1:
        tx = ampx.zero1(tx, "data", bucket_bytes=256)
    else:
        options["bucket_bytes"] = 256
    step = ampx.train_step(
        faulty_loss,
        tx,
        loss_scale=dynamics.wrap,
        normalize="weights",
        axis_name="data",
        num_microbatches=2,
        **options,
    )
    params = make_params()
    specs = jax.tree.map(lambda _: P(), jax.eval_shape(step.init, params))
    if zero1:
        specs = specs._replace(opt_state=ampx.zero1_specs(step.tx, params, mesh))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    rows = NamedSharding(mesh, P("data"))
    state = jax.jit(step.init, out_shardings=shardings)(params)
    return Rig(jax.jit(mapped), state, lambda batch: jax.device_put(batch, rows), dynamics)


def _pipeline(tx: Any, dynamics: Dynamics, *, schedule: Any, policy: Any = None) -> Rig:
    """Stages on two devices, rows on two more."""
    step = ampx.train_step(make_grads_of(schedule, policy=policy), tx, loss_scale=dynamics.wrap)
    rows = NamedSharding(step.grads_of.mesh, P("data"))
    return Rig(
        jax.jit(step),
        placed(step, make_params()),
        lambda batch: jax.device_put(batch, rows),
        dynamics,
        takes_gradient_faults=False,
    )


# --- all of them ---------------------------------------------------------------------------------

PLACES = {
    "one device": _one_device,
    "Auto": _global_arrays,
    "Explicit": functools.partial(_global_arrays, kind="Explicit"),
    "vma": functools.partial(_mapped, check_vma=True),
    "no vma": functools.partial(_mapped, check_vma=False),
    "zero1": functools.partial(_mapped, check_vma=True, zero1=True),
    "zero1, no vma": functools.partial(_mapped, check_vma=False, zero1=True),
    "1f1b": functools.partial(_pipeline, schedule=one_f_one_b(2, 4)),
    "zero-bubble": functools.partial(_pipeline, schedule=zero_bubble(2, 4)),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-3),
    "masters": lambda: ampx.master_weights(optax.adamw(1e-3)),
    "fused adamw": lambda: ampx.fused.adamw(1e-3),
    "fused clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), ampx.fused.adamw(1e-3)),
    "fused int8": lambda: ampx.fused.adamw(1e-3, mu_dtype="int8", nu_dtype="int8"),
    "fused lamb": lambda: ampx.fused.lamb(1e-3),
}
PRECISIONS: dict[str, Callable[[], Any]] = {
    "f32": lambda: None,
    "O1": lambda: ampx.opt_level("O1", half_dtype="f16"),
    "O2": lambda: ampx.opt_level("O2", half_dtype="f16"),
    "O2 bf16": lambda: ampx.opt_level("O2", half_dtype="bf16"),
    "switches": lambda: ampx.precision_schedule("fast|step|0.5", total_steps=200),
}

# Name: place, optimizer, precision, scale. Not the product of all, which nobody could wait for, but
# every choice beside several of each other kind.
CHOICES = [
    ("one device", "adamw", "f32", "dynamic"),
    ("one device", "clip", "O2", "tolerant"),
    ("one device", "fused adamw", "O1", "dynamic"),
    ("one device", "fused int8", "f32", "forgetful"),
    ("one device", "fused clip", "O2", "static"),
    ("one device", "lamb", "O1", "forgetful"),
    ("one device", "momentum", "O2 bf16", "static"),
    ("one device", "adamw", "switches", "dynamic"),
    ("one device", "masters", "O2", "dynamic"),
    ("one device", "clip", "f32", "strict"),
    ("one device", "fused adamw", "O2", "strict"),
    ("Auto", "adamw", "O1", "tolerant"),
    ("Auto", "clip", "f32", "dynamic"),
    ("Auto", "fused adamw", "O2", "forgetful"),
    ("Auto", "fused lamb", "f32", "dynamic"),
    ("Explicit", "adamw", "O2", "dynamic"),
    ("Explicit", "clip", "f32", "forgetful"),
    ("vma", "adamw", "O2", "dynamic"),
    ("vma", "fused clip", "f32", "tolerant"),
    ("vma", "lamb", "f32", "static"),
    ("no vma", "clip", "O1", "dynamic"),
    ("no vma", "fused adamw", "f32", "forgetful"),
    ("no vma", "momentum", "O2", "tolerant"),
    ("zero1", "adamw", "O2", "dynamic"),
    ("zero1", "clip", "f32", "forgetful"),
    ("vma", "adamw", "f32", "strict"),
    ("zero1, no vma", "lamb", "O1", "tolerant"),
    ("1f1b", "adamw", "f32", "dynamic"),
    ("1f1b", "clip", "O2", "tolerant"),
    ("1f1b", "adamw", "f32", "strict"),
    ("zero-bubble", "fused adamw", "O2", "dynamic"),
    ("zero-bubble", "lamb", "f32", "forgetful"),
]
RIGS = {", ".join(choice): choice for choice in CHOICES}


def make_rig(name: str) -> Rig:
    place, optimizer, precision, scale = RIGS[name]
    policy = PRECISIONS[precision]()
    return PLACES[place](OPTIMIZERS[optimizer](), DYNAMICS[scale], policy=policy)
