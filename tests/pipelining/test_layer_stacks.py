"""Layers under numbered names become one stack, and the stack those layers again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from helpers import assert_bit_equal, make_mesh

from ampx.pipelining import layer_costs, stack_layers, unstack_layers

LAYERS = 12  # with two digits: sorted as words, 10 comes before 2


def layer(number, **more):
    rng = np.random.default_rng(number)
    return {
        "attn": {"kernel": rng.normal(size=(2, 3)).astype(np.float32)},
        "count": np.uint32(number),
        **more,
    }


def layers(count=LAYERS):
    return [layer(number) for number in range(count)]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.embed = nnx.Embed(3, 2, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def linen(start=0):
    named = {f"block_{number + start}": own for number, own in enumerate(layers())}
    return named | {"embed": np.ones(3), "block_norm": {"scale": np.ones(2)}}


def haiku():
    """A flat dict, with slashes in its names, and several entries for a layer."""
    params = {"net/embed": {"w": np.ones(3)}}
    for number, own in enumerate(layers()):
        params[f"net/h{number}_attn/query"] = own["attn"]
        params[f"net/h{number}_mlp"] = {"count": own["count"]}
    return params


TREES = {
    "linen": (linen(), "block_{}"),
    "linen from 1": (linen(start=1), "block_{}"),
    "nested": ({"params": {"decoder": linen(), "head": np.ones(2)}}, "params/decoder/block_{}"),
    "frozen": (freeze({"decoder": linen()}), "decoder/block_{}"),
    "zeros in front": ({f"h_{number:02}": layer(number) for number in range(LAYERS)}, "h_{}"),
    "words for numbers": ({"h": {str(n): layer(n) for n in range(LAYERS)}, "ln": 1.0}, "h/{}"),
    "list inside": ({"blocks": layers(), "norm": (np.ones(2), None)}, "blocks/{}"),
    "arrays": ({f"w{number}": np.full(2, number) for number in range(LAYERS)}, "w{}"),
    "haiku": (haiku(), "net/h{}_"),
    "nnx state": (nnx.state(Model(nnx.Rngs(0))), "blocks/{}"),
    "list": (layers(), None),
    "tuple": (tuple(layers()), None),
    "nnx modules": ([Block(nnx.Rngs(number)) for number in range(3)], None),
}


@pytest.mark.parametrize("name", TREES)
def test_unstacking_undoes_stacking_exactly(name):
    params, pattern = TREES[name]
    stages = stack_layers(params, pattern)
    back = unstack_layers(stages, params, pattern)
    assert_bit_equal(back, params)
    assert type(back) is type(params)
    alone = unstack_layers(stages)
    assert_bit_equal(stack_layers(alone), stages)


@pytest.mark.parametrize("name", ["linen", "linen from 1", "zeros in front", "list inside"])
def test_layers_are_in_the_order_of_their_numbers(name):
    stages = stack_layers(*TREES[name])
    assert stages["count"].tolist() == list(range(LAYERS))
    assert isinstance(stages["attn"]["kernel"], np.ndarray)
    for number, own in enumerate(layers()):
        np.testing.assert_array_equal(stages["attn"]["kernel"][number], own["attn"]["kernel"])


def test_what_a_haiku_layer_is_made_of():
    stages = stack_layers(haiku(), "net/h{}_")
    assert sorted(stages) == ["attn/query", "mlp"]
    assert stages["mlp"]["count"].tolist() == list(range(LAYERS))


def test_a_layer_of_an_nnx_state_can_be_merged():
    model = Model(nnx.Rngs(0))
    stages = stack_layers(nnx.state(model), "blocks/{}")
    own = jax.tree.map(lambda leaf: leaf[10], stages)
    merged = nnx.merge(nnx.graphdef(model.blocks[10]), own)
    np.testing.assert_array_equal(merged.linear.kernel[...], model.blocks[10].linear.kernel[...])


def test_shapes_devices_and_what_has_changed():
    params = linen()
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    stages = stack_layers(shapes, "block_{}")
    assert stages["count"] == jax.ShapeDtypeStruct((LAYERS,), np.uint32)
    assert unstack_layers(stages, shapes, "block_{}") == shapes
    on_device = stack_layers(jax.tree.map(jnp.asarray, params), "block_{}")
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_device))
    # Trained and cast since: layers come from the stack, all else from the tree.
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16) + 1, on_device)
    back = unstack_layers(half, params, "block_{}")
    assert back["embed"] is params["embed"]
    np.testing.assert_array_equal(back["block_3"]["count"], np.float16(4))


def bad(change):
    params = linen()
    change(params)
    return lambda: stack_layers(params, "block_{}")


REFUSED = {
    "a gap": (bad(lambda p: p.pop("block_7")), ValueError, "'block_7' is missing: .*without a gap"),
    "a late start": (
        lambda: stack_layers({f"b{n}": 1.0 for n in (2, 3)}, "b{}"), ValueError, "'b0' is missing"
    ),
    "twice": (bad(lambda p: p.update(block_03=1.0)), ValueError, "'block_3' comes twice"),
    "one leaf less": (
        bad(lambda p: p["block_5"].pop("count")),
        ValueError,
        "block_0 has a leaf 'count', and block_5 has none",
    ),
    "one leaf more": (
        bad(lambda p: p["block_5"].update(bias=1.0)),
        ValueError,
        "block_5 has a leaf 'bias', and block_0 has none",
    ),
    "another shape": (
        bad(lambda p: p["block_5"]["attn"].update(kernel=np.ones((3, 2), np.float32))),
        ValueError,
        r"'attn/kernel' is float32\[2, 3\] in block_0 and float32\[3, 2\] in block_5",
    ),
    "another dtype": (
        bad(lambda p: p["block_5"].update(count=np.int32(5))),
        ValueError,
        r"'count' is uint32\[\] in block_0 and int32\[\] in block_5",
    ),
    "another container": (
        lambda: stack_layers([{"a": (1.0,)}, {"a": [1.0]}]), ValueError, "containers of other kinds"
    ),
    "no such name": (
        lambda: stack_layers(linen(), "layer_{}"), ValueError, "no name fits .* block_0, block_1"
    ),
    "half a name": (lambda: stack_layers(haiku(), "net/h{}"), ValueError, "no name fits"),
    "no pattern": (lambda: stack_layers(linen()), TypeError, "give the names of the layers"),
    "no number": (lambda: stack_layers(linen(), "block"), TypeError, r"with one \{\} for"),
    "an empty list": (lambda: stack_layers([]), TypeError, "must be a list of layers"),
    "no tree": (
        lambda: unstack_layers({"a": np.ones(2)}, pattern="b{}"), TypeError, "give into="
    ),
    "more layers": (
        lambda: unstack_layers({"a": np.ones(3)}, [{"a": 1.0}] * 2),
        ValueError,
        "stages has 3 layers, and into has 2",
    ),
    "leaves of another shape": (
        lambda: unstack_layers({"a": np.ones((2, 3))}, [{"a": 1.0}] * 2),
        ValueError,
        r"'a' is of shape \[3\] in stages and of shape \[\] in layer 0",
    ),
    "no leading axis": (
        lambda: unstack_layers({"a": np.ones(2), "b": np.ones(3)}),
        ValueError,
        r"same leading axis of layers, got a \(2,\), b \(3,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_layer_and_the_leaf_are_named(name):
    attempt, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attempt()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_layers_that_lie_on_their_stages_are_taken_apart_and_measured(kind):
    mesh = make_mesh((2, 2), ("data", "stage"), kind)
    given = {f"block_{n}": {"w": jnp.full((4, 3), float(n))} for n in range(4)}

    def placed(spec):
        stages = stack_layers(given, "block_{}")
        return jax.device_put(stages, jax.NamedSharding(mesh, spec))

    for spec in (jax.P("stage"), jax.P("stage", "data"), jax.P(None, "data")):
        stages = placed(spec)
        back = unstack_layers(stages, given, "block_{}")
        assert_bit_equal(back, given)
        # What else divides a layer goes on to do so.
        assert back["block_1"]["w"].sharding.is_equivalent_to(
            jax.NamedSharding(mesh, jax.P(*spec[1:])), 2
        )
        assert_bit_equal(stack_layers(back, "block_{}"), stages)
    costs = layer_costs(lambda p, x, key: x * p["w"], placed(jax.P("stage")), jnp.ones((4, 3)))
    assert len(set(costs)) == 1
