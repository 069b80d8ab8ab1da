"""Every transformation around parameters that are divided over devices: state lies as they do."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_transforms import OPTIMIZERS, TRANSFORMS, make

import ampx

MESHES = {
    "1 axis": ((4,), ("data",), {"w": P("data"), "v": P("data"), "m": P(None, "data")}),
    "2 axes": (
        (2, 2),
        ("data", "model"),
        {"w": P("model", "data"), "v": P(("data", "model")), "m": P("model")},
    ),
    "3 axes": (
        (2, 2, 2),
        ("data", "fsdp", "model"),
        {"w": P(("fsdp", "data"), "model"), "v": P("fsdp"), "m": P("data", ("model", "fsdp"))},
    ),
}
SHAPES = {"w": (8, 8), "v": (8,), "m": (4, 1024), "s": ()}


def is_transform(value):
    annotation = getattr(value, "__annotations__", {}).get("return", "")
    return inspect.isfunction(value) and str(annotation).startswith("optax.GradientTransformation")


def test_the_list_is_complete():
    found = {
        prefix + name
        for prefix, module in (("", ampx), ("fused.", ampx.fused))
        for name in module.__all__
        if is_transform(getattr(module, name))
    }
    assert found == {name.partition(",")[0] for name in (*TRANSFORMS, *OPTIMIZERS)}


@pytest.mark.whole_but("1 axis-Auto", "2 axes-Explicit", "3 axes-Auto")
@pytest.mark.slow_but("2 axes-Explicit")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", MESHES)
def test_fresh_state_is_divided_as_its_parameters(axes, kind):
    shape, names, specs = MESHES[axes]
    mesh = make_mesh(shape, names, kind)
    params = {
        name: jax.device_put(
            jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, specs.get(name, P()))
        )
        for name, shape in SHAPES.items()
    }
    for name in (*TRANSFORMS, *OPTIMIZERS):
        tx = make(name)
        states = {"outside of jit": tx.init(params)}
        if (
            kind == "Explicit"
            and axes == "2 axes"
            and name in ("multi_steps", "fused.split_masters")
        ):
            with jax.set_mesh(mesh):
                states["jit"] = jax.jit(tx.init)(params)
        for where, state in states.items():
            found = 0
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                own = [params[str(key.key)] for key in path if getattr(key, "key", None) in SHAPES]
                if own and leaf.shape == own[-1].shape != ():
                    found += 1
                    at = f"{name}, {where}: {jax.tree_util.keystr(path)}"
                    assert leaf.sharding.is_equivalent_to(own[-1].sharding, leaf.ndim), at
            assert found >= 3 or name == "all_reduce", name
