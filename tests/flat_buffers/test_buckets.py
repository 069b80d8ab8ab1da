"""Leaves in flat buffers and back: every dtype, every odd shape, one copy each way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal
from hypothesis import given, settings
from hypothesis import strategies as st

import ampx
from ampx.flat_buffers.buckets import default_bucket_bytes

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64")
SHAPES = [(), (1,), (7,), (3, 4), (0,), (2, 0, 3), (5, 1, 2)]


def arrays(draw_shapes, draw_dtypes):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.integers(0, 2, shape), dtype)
        for shape, dtype in zip(draw_shapes, draw_dtypes, strict=True)
    ]


@settings(max_examples=5)  # each compiles a program
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 200),
    st.sampled_from([1, 4, 128, 384]),
)
def test_flatten_and_unflatten_give_the_tree_back(kinds, bucket_bytes, multiple_of):
    tree = arrays([shape for shape, _ in kinds], [dtype for _, dtype in kinds])
    layout = ampx.bucket_layout(tree, bucket_bytes=bucket_bytes, multiple_of=multiple_of)

    @jax.jit
    def there_and_back(tree):
        buffers = layout.flatten(tree)
        return buffers, layout.unflatten(buffers, tree)

    buffers, back = there_and_back(tree)
    assert_bit_equal(back, tree)
    assert all(buffer.shape == (b.size,) for b, buffer in zip(layout.buckets, buffers, strict=True))
    held = sorted(leaf for bucket in layout.buckets for leaf in bucket.leaves)
    assert held == [i for i, leaf in enumerate(tree) if leaf.size]
    for bucket in layout.buckets:
        assert bucket.size % multiple_of == 0
        assert {tree[i].dtype for i in bucket.leaves} == {bucket.dtype}
        ends = [o + s for o, s in zip(bucket.offsets, bucket.sizes, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]] and bucket.size - ends[-1] < multiple_of


def test_the_layout_comes_from_shapes_alone():
    tree = {"a": jnp.ones((3, 4)), "b": jnp.ones(5, jnp.bfloat16), "n": None}
    shapes = jax.eval_shape(lambda: tree)
    assert ampx.bucket_layout(tree) == ampx.bucket_layout(shapes)


# Megatron-LM, test_param_and_grad_buffer.py: ten layers of 95 x 95. The last to be used is first.
@pytest.mark.parametrize(
    "elements, leaves",
    [
        (9000, [1] * 10),
        (9025, [1] * 10),
        (9050, [2] * 5),
        (18000, [2] * 5),
        (18050, [2] * 5),
        (20000, [3, 3, 3, 1]),
    ],
)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_megatron_bucket_sizes_and_padding(elements, leaves, devices):
    tree = [jax.ShapeDtypeStruct((95, 95), jnp.float32)] * 10
    padding = int(np.lcm(devices, 128))
    layout = ampx.bucket_layout(tree, bucket_bytes=4 * elements, multiple_of=padding)
    assert [len(bucket.leaves) for bucket in layout.buckets] == leaves
    assert layout.buckets[0].leaves[0] == 9
    for bucket in layout.buckets:
        assert bucket.size == -(-len(bucket.leaves) * 95 * 95 // padding) * padding


def test_a_leaf_larger_than_a_bucket_has_one_of_its_own_or_ends_one():
    tree = [jnp.ones(2), jnp.ones(1000), jnp.ones(2)]
    layout = ampx.bucket_layout(tree, bucket_bytes=64)
    assert [bucket.leaves for bucket in layout.buckets] == [(2, 1), (0,)]


def test_groups_and_dtypes_do_not_mix():
    tree = {"w": jnp.ones(4), "norm": jnp.ones(4), "half": jnp.ones(4, jnp.float16)}
    layout = ampx.bucket_layout(tree, group_of=lambda path, leaf: path == "norm")
    assert {(b.dtype.name, b.group) for b in layout.buckets} == {
        ("float32", False),
        ("float32", True),
        ("float16", False),
    }


@pytest.mark.parametrize("align, multiple_of, size", [(1, 1, 9), (1, 8, 8), (4, 4, 12)])
def test_a_spare_element_is_added_where_the_last_leaf_fills_the_buffer(align, multiple_of, size):
    tree = {"a": jnp.ones(4), "b": jnp.ones(3) if multiple_of == 8 else jnp.ones(4)}
    (bucket,) = ampx.bucket_layout(tree, align=align, multiple_of=multiple_of).buckets
    spare = bucket.with_spare(multiple_of)
    assert spare.size == size and spare.offsets == bucket.offsets
    buffer = spare.join([jnp.ones(n) for n in bucket.sizes])
    assert buffer.shape == (size,) and buffer[-1] == 0


def test_the_order_of_use_is_reversed():
    tree = {"embed": jnp.ones(4), "head": jnp.ones(4), "layers": jnp.ones(4)}
    layout = ampx.bucket_layout(tree, bucket_bytes=16, order=(0, 2, 1))
    assert [bucket.leaves for bucket in layout.buckets] == [(1,), (2,), (0,)]


def test_buckets_are_completed_in_order():
    """A dtype that comes rarely must not hold up the others."""
    tree = [jnp.ones(4, jnp.float16), *[jnp.ones(4)] * 4, jnp.ones(4, jnp.float16)]
    layout = ampx.bucket_layout(tree, bucket_bytes=32)
    assert [bucket.leaves for bucket in layout.buckets] == [(4, 3), (2, 1), (5, 0)]


def test_default_size_is_that_of_the_shortest_tail():
    assert round(100e6 / default_bucket_bytes(int(100e6))) == 14
    assert default_bucket_bytes(10) == 2**20


def test_empty_trees_and_gradients_of_integers():
    layout = ampx.bucket_layout({})
    assert layout.flatten({}) == [] and layout.unflatten([], {}) == {}
    grads = jax.grad(lambda t: t["w"] * 2, allow_int=True)({"w": 1.0, "n": 2})
    layout = ampx.bucket_layout(grads)
    assert len(layout.buckets) == 1
    back = layout.unflatten(layout.flatten(grads), grads)
    assert back["n"].dtype == jax.dtypes.float0 and back["w"] == 2.0


def bytes_moved(fun, *args):
    return jax.jit(fun).lower(*args).compile().cost_analysis()["bytes accessed"]


def test_each_way_copies_once():
    tree = [jnp.ones((500, 100)), jnp.ones(3000), jnp.ones((100, 30))]
    layout = ampx.bucket_layout(tree)
    size = sum(leaf.nbytes for leaf in tree)
    assert bytes_moved(layout.flatten, tree) <= 2.05 * size
    buffers = layout.flatten(tree)
    assert bytes_moved(lambda b: layout.unflatten(b, tree), buffers) <= 2.05 * size


@pytest.mark.parametrize(
    "call, error, match",
    [
        (dict(bucket_bytes=0), ValueError, "bucket_bytes must be a positive int, got 0"),
        (dict(bucket_bytes=1.5), TypeError, "bucket_bytes must be a positive int, got 1.5"),
        (dict(multiple_of=-1), ValueError, "multiple_of must be"),
        (dict(order=(0, 0)), ValueError, r"permutation of the 2 leaves, got \[0, 0\]"),
    ],
)
def test_settings_are_checked(call, error, match):
    with pytest.raises(error, match=match):
        ampx.bucket_layout([jnp.ones(2), jnp.ones(3)], **call)


@pytest.mark.parametrize(
    "tree", [[jnp.ones(2)], [jnp.ones(2), jnp.ones(4)], [jnp.ones(2), jnp.ones(3, jnp.float16)]]
)
def test_other_trees_are_refused(tree):
    layout = ampx.bucket_layout([jnp.ones(2), jnp.ones(3)])
    with pytest.raises(ValueError, match="the layout"):
        layout.flatten(tree)


def test_jit_and_grad_pass_through():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
    layout = ampx.bucket_layout(tree)
    there_and_back = functools.partial(lambda t: layout.unflatten(layout.flatten(t), t))
    assert_bit_equal(jax.jit(there_and_back)(tree), tree)
    grads = jax.grad(lambda t: sum(jnp.sum(x**2) for x in jax.tree.leaves(there_and_back(t))))(tree)
    assert_bit_equal(grads, jax.tree.map(lambda x: 2 * x, tree))
