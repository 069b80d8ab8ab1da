import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES, assert_bit_equal, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import trees
from ampx.loss_scaling import nonfinite

INF, NAN = float("inf"), float("nan")
FLOATS = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "values, expected",
    [
        ((1.0, 2.0), (0, 0)),
        ((1.0, INF), (1, 0)),
        ((-INF, 1.0), (1, 0)),
        ((NAN, 1.0), (0, 1)),
        ((NAN, INF), (1, 1)),
        ((INF, NAN, -INF), (1, 1)),
        ((), (0, 0)),
    ],
)
def test_inf_and_nan_are_counted_apart_even_in_one_leaf(dtype, values, expected):
    leaf = jnp.array(values, dtype)
    np.testing.assert_array_equal(ampx.count_nonfinite(leaf), expected)
    twice = {"a": leaf, "b": (leaf, jnp.ones(2))}
    np.testing.assert_array_equal(ampx.count_nonfinite(twice), np.multiply(expected, 2))


@given(st.lists(st.sampled_from([0.0, 1.5, -3e38, INF, -INF, NAN]), max_size=9))
def test_count_agrees_with_numpy(values):
    leaf = np.array(values, np.float32)
    expected = [int(np.isinf(leaf).any()), int(np.isnan(leaf).any())]
    np.testing.assert_array_equal(ampx.count_nonfinite(leaf), expected)


def test_leaves_that_are_not_floating_are_ignored():
    leaves = [
        jnp.arange(3),
        jnp.ones(2, bool),
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
    ]
    counts = ampx.count_nonfinite(leaves)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, [0, 0])


@pytest.mark.parametrize(
    "value, expected",
    [(complex(1, 2), (0, 0)), (complex(INF, 1), (1, 0)), (complex(1, NAN), (0, 1)),
     (complex(INF, NAN), (1, 1))],
)  # fmt: skip
def test_complex_leaves_are_judged_by_both_parts(value, expected):
    leaf = jnp.array([value], jnp.complex64)
    np.testing.assert_array_equal(ampx.count_nonfinite(leaf), expected)


@pytest.mark.parametrize("value", [complex(65504, 0), complex(0, -65504)])
def test_complex_saturation(value):
    leaf = jnp.array([value], jnp.complex64)
    np.testing.assert_array_equal(ampx.count_nonfinite(leaf, saturation_dtype="float16"), [1, 0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value, inf", [(65504.0, 1), (-65504.0, 1), (65472.0, 0)])
def test_saturation_counts_the_largest_number_as_an_overflow(dtype, value, inf):
    leaf = jnp.array([value], dtype)
    np.testing.assert_array_equal(ampx.count_nonfinite(leaf), [0, 0])
    np.testing.assert_array_equal(
        ampx.count_nonfinite(leaf, saturation_dtype=jnp.float16), [inf, 0]
    )


@pytest.mark.slow_but("float16-65537", "float16-1", "float32-1")
@pytest.mark.parametrize("size", [2048 * 32, 2048 * 32 + 1, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_apex_multi_tensor_scale(size, dtype):
    """Apex's cases: 4 times 1/4 is 1; NaN first, inf last or in the middle are found."""
    leaves = [jnp.full(size, 4.0, dtype), jnp.full(33, 4.0, dtype)]
    for leaf in nonfinite.unscale(leaves, jnp.float32(4.0)):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, 1.0)
    for tensor in range(2):
        end = leaves[tensor].size - 1
        for index, value, expected in (
            (0, NAN, (0, 1)),
            (end, INF, (1, 0)),
            (end // 2, INF, (1, 0)),
        ):
            broken = list(leaves)
            broken[tensor] = broken[tensor].at[index].set(value)
            np.testing.assert_array_equal(ampx.count_nonfinite(broken), expected)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", MESHES)
def test_sharded_gradients_are_judged_under_jit(kind, axes):
    """A bitwise reduction over sharded leaves does not compile on CPU devices."""
    mesh = make_mesh(*MESHES[axes], kind)
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    leaf = jax.device_put(jnp.ones((8, 3)).at[5, 1].set(NAN).at[7, 0].set(INF), sharding)
    whole = jax.device_put(jnp.array([NAN]), NamedSharding(mesh, P()))
    np.testing.assert_array_equal(jax.jit(ampx.count_nonfinite)([leaf, whole]), [1, 2])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("varying", ["all", "first"])
def test_devices_agree_also_where_values_are_equal_along_an_axis(axes, check_vma, varying):
    mesh = make_mesh(*MESHES[axes])
    names = mesh.axis_names

    def judge(x):
        x = x if varying == "all" else jax.lax.pmean(x, names[1:]) if names[1:] else x
        return ampx.count_nonfinite([x, jnp.ones(2)], axis_names=names)[None]

    judged = jax.jit(
        jax.shard_map(judge, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=check_vma)
    )
    found = judged(jnp.ones((4, 3)).at[2, 1].set(NAN))
    assert found.shape == (4, 2)
    np.testing.assert_array_equal(found[:, 0], 0)
    assert (found[:, 1] > 0).all()


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**16, 2.0**126])
def test_unscaling_by_a_power_of_two_is_exact(dtype, scale):
    true = jnp.array([1.0, -0.75, 2.0**-7], dtype)
    wide = jnp.complex64 if dtype == "complex64" else jnp.float32
    scaled = true.astype(wide) * jnp.asarray(scale, wide)
    unscaled = nonfinite.unscale(scaled, jnp.float32(scale))
    assert unscaled.dtype == wide
    np.testing.assert_array_equal(unscaled, true.astype(wide))


def test_unscaling_leaves_other_leaves_alone():
    leaves = {"i": jnp.arange(2), "f0": np.zeros(2, jax.dtypes.float0), "b": jnp.ones(1, bool)}
    unscaled = nonfinite.unscale(leaves, jnp.float32(8.0))
    assert all(unscaled[name] is leaves[name] for name in leaves)


def test_hold_keeps_bits_dtypes_and_keys():
    old = {"w": jnp.array([-0.0, NAN], jnp.float16), "n": jnp.arange(2), "key": jax.random.key(1)}
    new = {"w": jnp.ones(2, jnp.float32), "n": jnp.arange(2) + 1, "key": jax.random.key(2)}
    assert_bit_equal(trees.hold(jnp.array(True), new, old), old)
    moved = trees.hold(jnp.array(False), new, old)
    assert_bit_equal(moved, new | {"w": jnp.ones(2, jnp.float16)})


def test_finite_or_replaces_only_what_would_turn_nonfinite():
    new = jnp.array([1.0, NAN, INF, NAN])
    old = jnp.array([0.5, 0.5, 0.5, INF])
    np.testing.assert_array_equal(trees.keep_finite(new, old), [1.0, 0.5, 0.5, NAN])


def test_landing_foresees_an_overflow_of_half_parameters_only():
    half = jnp.array([60000.0, 60000.0, -INF], jnp.float16)
    updates = jnp.array([10000.0, -10000.0, 1.0])
    np.testing.assert_array_equal(nonfinite.mark_overflowing(updates, half), [INF, -10000.0, 1.0])
    assert nonfinite.mark_overflowing(updates, half.astype(jnp.float32)) is updates
    assert nonfinite.mark_overflowing(updates, None) is updates


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_second_look_tells_apart(dtype):
    """Infinities, NaN and finite gradients whose squares overflow, in loops of some thousands."""
    largest = float(jnp.finfo(dtype).max)
    cases = {
        (0, 0, False): (1.0, -2.0),
        (0, 0, dtype != "float16"): (largest, -largest),
        (1, 0, True): (1.0, -INF),
        (0, 1, True): (largest, NAN),
        # An array with both counts as one with a NaN, as in `measure_and_judge`.
        (0, 1, True, "both"): (INF, NAN),
    }
    judge = jax.jit(lambda grads: nonfinite.judge([grads], [jnp.float32(1)]))
    for expected, (first, second) in cases.items():
        leaf = jnp.ones(8192, dtype).at[5].set(first).at[4100].set(second)
        counts, is_too_large, _ = judge({"a": jnp.ones(3), "b": leaf})
        assert (*map(int, counts[0]), bool(is_too_large)) == expected[:3]


def test_an_axis_that_is_not_mapped_or_named_twice_is_told():
    with pytest.raises(NameError, match="no axis 'data' is mapped here: call it inside jax.shard_"):
        ampx.count_nonfinite({"w": jnp.ones(2)}, axis_names="data")
    with pytest.raises(ValueError, match="axis_names must name each mesh axis once, got"):
        ampx.count_nonfinite({"w": jnp.ones(2)}, axis_names=("data", "data"))


def test_a_second_look_sees_what_a_constant_scale_made_infinite():
    """Under `vmap` it stands beside the scale, and XLA would multiply both constants first."""
    scale = 2.0**16

    def judge(x):
        return nonfinite.judge([x * scale], [jnp.float32(scale)])[0]

    counts = jax.jit(jax.vmap(judge))(jnp.array([[1.0], [1e35]]))
    assert counts.tolist() == [[[0, 0]], [[1, 0]]]
