"""Flat buffers beside parameters that are divided over devices: nothing is gathered for them."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

SHAPES = {"w": (8, 16), "u": (16, 8), "b": (16,), "c": (8,)}
SPECS = {"w": P("data"), "u": P(None, "data"), "b": P(), "c": P()}
MATCH = "'u' is divided over devices as.*'large': large.*inside jax.shard_map"


def normal(seed):
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def put(tree, mesh):
    return {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in tree.items()}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_divided_parameters_are_refused(kind):
    params = put(normal(0), make_mesh((4,), ("data",), kind))
    whole = {name: params[name] for name in "bc"}
    flat = fused.flatten(whole)
    with pytest.raises(ValueError, match="fused.flatten puts.*" + MATCH):
        fused.flatten(params)
    with pytest.raises(ValueError, match="'b' is divided over devices"):
        flat.like(
            whole | {"b": jax.device_put(whole["b"], params["w"].sharding.update(spec=P("data")))}
        )


def test_divided_parameters_are_told_of_under_jit():
    explicit = put(normal(0), make_mesh((4,), ("data",), "Explicit"))
    with pytest.raises(ValueError, match=MATCH):
        jax.jit(fused.flatten)(explicit)
    auto = put(normal(0), make_mesh((4,), ("data",)))
    jax.jit(fused.flatten)({name: auto[name] for name in "bc"})
    # A warning while XLA compiles, which is an error here.
    with pytest.raises(jax.errors.JaxRuntimeError, match=MATCH):
        jax.jit(fused.flatten)(auto)


def loss_fn(params, batch):
    large, small = params["large"], params["small"]
    return jnp.mean((jnp.tanh(batch @ large["w"] + small["b"]) @ large["u"] + small["c"]) ** 2)


@pytest.mark.slow
def test_small_parameters_are_flat_beside_those_that_fsdp_divides():
    mesh = make_mesh((4,), ("data",))
    tree = put(normal(0), mesh)
    large, small = ({name: tree[name] for name in names} for names in ("wu", "bc"))
    batch = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))
    step = ampx.train_step(loss_fn, fused.adamw(0.1), loss_scale="dynamic")
    found, counts = [], []
    for params in (
        {"large": large, "small": small},
        {"large": large, "small": fused.flatten(small)},
    ):
        state = step.init(params)
        compiled = jax.jit(step).lower(state, batch).compile()
        new = compiled(state, batch)[0].params
        assert new["large"]["w"].sharding.spec == P("data")
        found.append(new)
        names = re.findall(r" (all-gather|all-to-all|all-reduce)\(", compiled.as_text())
        counts.append(collections.Counter(names))
    for a, b in zip(
        jax.tree.leaves(found[0]),
        jax.tree.leaves(found[1] | {"small": found[1]["small"].tree()}),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    assert counts[1] <= counts[0], "flat gradients are reduced at once"
    assert counts[1]["all-gather"] == counts[0]["all-gather"]


def test_shards_are_flat_inside_shard_map_with_the_norms_of_the_whole():
    """Each device joins its own shards; LAMB's norms are those of whole parameters."""
    mesh, tx = make_mesh((4,), ("data",)), fused.lamb(0.1)
    params, grads = normal(0), normal(1)

    def step(params, grads):
        flat = fused.flatten(params)
        assert set(flat.layout.names) == {"float32/data", "float32"}
        return fused.apply(tx, flat.like(grads), tx.init(flat), flat)[0].tree()

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(SPECS, SPECS), out_specs=SPECS)
    compiled = jax.jit(mapped).lower(put(params, mesh), put(grads, mesh)).compile()
    assert "all-gather" not in compiled.as_text()
    new = compiled(put(params, mesh), put(grads, mesh))
    expected = jax.jit(lambda p, g: fused.apply(tx, g, tx.init(p), p)[0])(params, grads)
    for name in SHAPES:
        np.testing.assert_allclose(new[name], expected[name], rtol=0, atol=2e-6)
