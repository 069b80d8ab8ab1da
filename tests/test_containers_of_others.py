"""Containers that make arrays of the numbers and bools that they are given.

brax counts in such a class, two halves of an integer of 64 bits that its constructor converts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converting:
    """Two arrays; whatever number comes in is an array afterwards."""

    b: object
    w: object

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool | int | float | np.ndarray | jax.Array):
                setattr(self, name, jnp.asarray(value, jnp.float32))


def plain(w, b):
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)}


def values_of(node):
    return (node.w, node.b) if isinstance(node, Converting) else (node["w"], node["b"])


def params_of(container):
    return {"own": container(w=np.full((3, 4), 0.3), b=np.full(4, 0.2)), "head": jnp.ones((4, 1))}


def batch_of(container):
    x = np.linspace(-1, 1, 24).reshape(8, 3)
    return {"rows": container(w=x, b=np.ones((8, 1))), "whole": container(w=1.0, b=2.0)}


AXES = {"rows": 0, "whole": None}
MASK = {"own": True, "head": False}


def loss_fn(params, batch, **mask):
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    w, b = values_of(params["own"])
    x, y = values_of(batch["rows"])
    each = (jnp.tanh(x @ w + b) @ params["head"] - y * values_of(batch["whole"])[1]) ** 2
    return jnp.sum(jnp.where(mask["mask"][:, None], each, 0)) if mask else jnp.mean(each)


def after_two_steps(container, tx, **settings):
    step = ampx.train_step(loss_fn, tx, batch_axes=AXES, **settings)
    state, jitted = step.init(params_of(container)), jax.jit(step)
    for _ in range(2):
        state, _ = jitted(state, batch_of(container))
    return state


def gradients(container, **settings):
    grads_of = ampx.value_and_grad(loss_fn, batch_axes=AXES, **settings)
    return jax.jit(grads_of)(params_of(container), batch_of(container))


def applied(container, tx):
    params = params_of(container)
    tx = ampx.dynamic_loss_scale(tx)
    grads = jax.tree.map(jnp.ones_like, params)
    return jax.jit(lambda p: fused.apply(tx, grads, tx.init(p), p, max_norm=1.0)[:2])(params)


def sharded(container, **settings):
    mesh, params = make_mesh((4,), ("data",)), params_of(container)
    tx = ampx.zero1(optax.adamw(0.1), "data")
    step = ampx.train_step(loss_fn, tx, axis_name="data", batch_axes=AXES, **settings)
    specs = ampx.TrainState(*[P()] * len(ampx.TrainState._fields))
    specs = specs._replace(opt_state=ampx.zero1_specs(step.tx, params, mesh))
    program = jax.shard_map(
        lambda state, batch: step(state, batch)[0],
        mesh=mesh,
        in_specs=(specs, {"rows": P("data"), "whole": P()}),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(program)(step.init(params), batch_of(container))


def two_optimizers(container):
    tx = ampx.dynamic_loss_scale({"own": optax.adam(0.1), "head": fused.adam(0.1)})
    params = params_of(container)
    return tx.update(params, tx.init(params), params)


CASES = {
    "gradients": lambda c: gradients(c),
    "micro-batches": lambda c: gradients(c, num_microbatches=2),
    "remainder": lambda c: gradients(c, num_microbatches=3, remainder="mask", normalize="sum"),
    "O2": lambda c: after_two_steps(c, optax.adam(0.1), policy="O2", local_norm=True),
    "hold": lambda c: after_two_steps(
        c, ampx.dynamic_loss_scale(optax.adam(0.1), nonfinite_updates="hold")
    ),
    "multi_steps": lambda c: after_two_steps(c, ampx.multi_steps(optax.adam(0.1), 2)),
    "masters": lambda c: after_two_steps(c, ampx.master_weights(optax.adam(0.1))),
    "fused": lambda c: after_two_steps(
        c, fused.adamw(0.1, weight_decay=0.1, mask=MASK), loss_scale="dynamic"
    ),
    "fuse": lambda c: after_two_steps(c, fused.fuse(optax.rmsprop(0.1), strict=True)),
    "fuse, mask": lambda c: after_two_steps(
        c, fused.fuse(optax.adamw(0.1, weight_decay=0.1, mask=MASK), strict=True)
    ),
    "8 bits": lambda c: after_two_steps(c, fused.adamw(0.1, mu_dtype="int8", nu_dtype="int8")),
    "apply": lambda c: applied(c, fused.adamw(0.1, weight_decay=0.1, mask=MASK)),
    "apply, fuse": lambda c: applied(c, fused.fuse(optax.rmsprop(0.1), strict=True)),
    "flat": lambda c: fused.flatten(params_of(c), mask=MASK).buffers,
    "zero1": lambda c: sharded(c),
    "zero2": lambda c: sharded(c, scatter_gradients=True, num_microbatches=2),
    "several": two_optimizers,
}


@pytest.mark.parametrize("case", CASES)
def test_they_do_as_a_dict_does(case):
    own, by_dict = CASES[case](Converting), CASES[case](plain)
    by_dict = jax.tree.map(
        lambda node: Converting(**node) if is_pair(node) else node, by_dict, is_leaf=is_pair
    )
    assert_bit_equal(own, by_dict)


def is_pair(node):
    return isinstance(node, dict) and node.keys() == {"w", "b"}


class Tensor:
    """An array of another library, as torch's: its dtype says nothing to NumPy."""

    class Float:
        def __repr__(self):
            return "torch.float32"

    dtype, shape, ndim = Float(), (4,), 1


@pytest.mark.parametrize(
    "name, call",
    {
        "params": lambda tree: ampx.train_step(loss_fn, optax.sgd(0.1)).init(tree),
        "params of a gradient": lambda tree: ampx.value_and_grad(loss_fn)(tree, None),
        "params of a scale": lambda tree: ampx.dynamic_loss_scale(optax.sgd(0.1)).init(tree),
        "params of a fused optimizer": lambda tree: fused.adam(1e-3).init(tree),
        "batch": lambda tree: ampx.value_and_grad(loss_fn, num_microbatches=2)(
            params_of(plain), tree
        ),
    }.items(),
)
def test_a_tensor_of_another_library_is_told_to_be_converted(name, call):
    """NumPy says of it "Cannot interpret 'torch.float32' as a data type"."""
    with pytest.raises(TypeError, match=rf"^{name.split()[0]} .* a .*Tensor of torch.float32.*jnp"):
        call({"w": Tensor()})
