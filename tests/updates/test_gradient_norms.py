"""The norm and the verdict of one pass, and the second look at what did not add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_order import find_unordered_collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ampx.model_axes import as_model_axes
from ampx.updates.gradient_norms import measure_and_judge

SHAPES = [(4, 6)] * 9 + [(6, 4)] * 9 + [(24,)] + [(4, 6)] * 8 + [()] * 8
DTYPES = ["float32"] * 19 + ["bfloat16"] * 8 + ["float32"] * 8
LARGEST = 1e38


def make_gradients(*bad):
    """Leaves of four kinds; `bad` are pairs of a leaf's place and the number that it holds."""
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=shape) for shape in SHAPES]
    for place, number in bad:
        leaves[place].flat[-1] = number
    return [jnp.asarray(x, dtype) for x, dtype in zip(leaves, DTYPES, strict=True)]


def find_norm(leaves):
    return np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in leaves))


def on_mesh(axis_type, check):
    """`measure_and_judge` where matrices are divided over two devices, some along other axes."""
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(axis_type,) * 2)
    specs = [P("rows") if len(s) == 2 and s[0] == 4 else P() for s in SHAPES]
    specs[0] = P(None, "columns")

    def measure(leaves):
        if axis_type is AxisType.Explicit:
            return jax.jit(measure_and_judge)(leaves)
        axes = as_model_axes(specs) if not check else as_model_axes(None)

        def inner(leaves):
            judged = measure_and_judge(leaves, model_axes=axes)
            return judged.norm, jax.lax.pmax(judged.counts, ("rows", "columns"))

        inner = jax.shard_map(inner, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check)
        return jax.jit(inner)(leaves)

    def placed(leaves):
        with jax.set_mesh(mesh):
            pairs = zip(leaves, specs, strict=True)
            return measure([jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs])

    return placed


def mapped(leaves):
    norms, counts = jax.jit(jax.vmap(measure_and_judge))([jnp.stack([x, x]) for x in leaves])
    return norms[1], counts[1]


@pytest.mark.parametrize(
    ("bad", "counts"),
    [
        ((), (0, 0)),
        (((0, LARGEST), (3, -LARGEST), (20, LARGEST), (28, LARGEST)), (0, 0)),
        (((0, np.inf), (1, np.nan), (2, -np.inf), (21, np.nan), (29, np.inf)), (3, 2)),
    ],
    ids=["small", "large", "nonfinite"],
)
@pytest.mark.parametrize("how", ["jit", "vmap"])
def test_a_second_look_at_arrays_in_groups_tells_what_one_at_each_tells(how, bad, counts):
    leaves = make_gradients(*bad)
    norm, found = {"jit": jax.jit(measure_and_judge), "vmap": mapped}[how](leaves)
    assert tuple(map(int, found)) == counts
    if not any(counts):
        np.testing.assert_allclose(norm, find_norm(leaves), rtol=1e-6)
    else:
        assert not np.isfinite(norm)


@pytest.mark.parametrize(
    ("axis_type", "check"),
    [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, True)],
    ids=["typed shards", "named shards", "explicit"],
)
def test_a_second_look_adds_over_the_axes_of_each_group(axis_type, check):
    measure = on_mesh(axis_type, check)
    leaves = make_gradients((0, LARGEST), (3, -LARGEST), (20, LARGEST), (28, LARGEST))
    norm, counts = measure(leaves)
    np.testing.assert_allclose(norm, find_norm(leaves), rtol=1e-6)
    assert tuple(map(int, counts)) == (0, 0)
    norm, counts = measure(make_gradients((0, np.inf), (1, np.nan), (29, np.inf)))
    assert not np.isfinite(norm)
    # A device counts what it holds: the two matrices are divided, the scalar is everywhere.
    assert tuple(map(int, counts)) == (2, 1)


def test_a_second_look_at_groups_has_derivatives():
    """Those of the norm in float64, also where squares overflow."""
    leaves = make_gradients((0, 1e25), (3, -2e25))
    slopes = jax.jit(jax.grad(lambda x: measure_and_judge(x).norm))(leaves)
    norm = find_norm(leaves)
    for slope, leaf in zip(slopes, leaves, strict=True):
        np.testing.assert_allclose(np.float64(slope), np.float64(leaf) / norm, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_collectives_of_a_second_look_come_in_one_order(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    matrices = [jax.ShapeDtypeStruct((8, 2**k), jnp.float32) for k in range(3, 7) for _ in range(8)]
    sharding = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(measure_and_judge, in_shardings=sharding).lower(matrices).compile()
    text = compiled.as_text()
    # One a kind or more, and that of the first look.
    assert text.count(" all-reduce(") + text.count(" all-gather(") > 4
    assert not find_unordered_collectives(text)


def test_stacks_of_a_second_look_take_turns_in_memory():
    leaves = [jax.ShapeDtypeStruct((2**13,), jnp.float32)] * 160  # 10 groups of 16
    memory = jax.jit(measure_and_judge).lower(leaves).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * 4 * 2**17
