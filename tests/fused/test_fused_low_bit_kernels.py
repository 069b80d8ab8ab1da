"""Kernels that read and write 8-bit moments and narrow parameters are XLA's low-bit updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_fused_pallas import (
    apply_step,
    by,
    count_kernels,
    dynamic,
    in_a_process,
    normal,
    on_one_device_in_small_blocks,
    quickly_compiled,
)

import ampx
from ampx import fused
from ampx.fused.kernels import blocks, gpu, pallas_updates, tpu
from ampx.fused.moments import int8_blocks
from ampx.fused.moments.int8_blocks import Int8Blocks
from ampx.param_storage.rounding import element_index
from ampx.param_storage.split_floats import join

__all__ = ["on_one_device_in_small_blocks"]  # a fixture

SHAPES = {"w": (20, 256), "x": (9, 512), "u": (33, 130), "b": (2048,), "s": ()}
INT8 = dict(mu_dtype="int8", nu_dtype="int8")


def adamw8(rate=0.1):
    return fused.adamw(rate, weight_decay=0.1, **INT8)


# What makes it, dtype of the parameters, and the parameters that it updates: each case has some of
# `SHAPES`, as each is one more kernel to compile.
CASES = {
    "int8": (adamw8, "float32", "wxs"),
    "int8, float16": (lambda: dynamic(adamw8()), "float16", "wub"),
    "split 8, lamb": (lambda: fused.split_masters(fused.lamb(0.1), 8), "bfloat16", "wus"),
    "split 8, int8": (lambda: dynamic(fused.split_masters(adamw8(), 8)), "bfloat16", "xub"),
    "stochastic, lion": (
        lambda: fused.stochastic_rounding(fused.lion(0.01, mu_dtype="int8")),
        "bfloat16",
        "wub",
    ),
    "stochastic, int8": (
        lambda: dynamic(
            fused.stochastic_rounding(
                optax.partition(
                    {"all": optax.inject_hyperparams(adamw8)(rate=0.1), "few": fused.lamb(0.1)},
                    {"w": "all", "x": "all", "u": "few", "b": "few", "s": "all"},
                )
            )
        ),
        "bfloat16",
        "wxubs",
    ),
}
# How many leaves kernels have in all: a loss scale looks at every gradient, LAMB passes twice, and
# `u` is left to XLA where moments have 8 bits, since its rows of 130 are no blocks of 256.
LEAVES = {
    "int8, float16": 3 + 2,
    "split 8, lamb": 2 * 3,
    "split 8, int8": 3 + 2,
    "stochastic, lion": 2,
    "stochastic, int8": 5 + 3 + 2 * 2,
}
STEPS = [normal(i, jnp.bfloat16, SHAPES) for i in (1, 2)]


def arguments_of(case):
    """The optimizer of a case, its parameters, and two steps of gradients."""
    make, dtype, names = CASES[case]
    shapes = {name: SHAPES[name] for name in names}
    return make(), normal(0, dtype, shapes), [normal(i, jnp.bfloat16, shapes) for i in (1, 2)]


def numbers(params, state):
    """Parameters as the masters that they stand for, and moments in float32."""
    moments = [
        int8_blocks.decode(leaf) if isinstance(leaf, Int8Blocks) else leaf
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Int8Blocks))
        if isinstance(leaf, Int8Blocks) or jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    found = [value for _, value in optax.tree.get_all_with_path(state, "error_bits")]
    errors = found[0] if found else dict.fromkeys(params)
    masters = [p if errors[name] is None else join(p, errors[name]) for name, p in params.items()]
    return [np.asarray(x, np.float64) for x in (*masters, *moments)]


def same_but_for_last_bits(actual, expected):
    """Where a last bit of float32 turns a rounding, one in a hundred may be a code off.

    That is a quarter, in the octaves of four steps in which most second moments lie.
    """
    for a, b in zip(numbers(*actual), numbers(*expected), strict=True):
        off = np.abs(a - b) > 2e-6 * np.max(np.abs(b), initial=1e-9)
        assert off.sum() <= a.size / 100
        np.testing.assert_allclose(a, b, rtol=1 / 4 + 1e-6)


def interpreted_gpu(monkeypatch):
    interpreted = functools.partial(gpu.map_leaves, interpret=True)
    monkeypatch.setattr(pallas_updates, "_map_leaves", lambda *_: interpreted)


@pytest.mark.slow
@pytest.mark.whole("split 8, lamb-tpu", "split 8, int8-tpu", "stochastic, int8-tpu")
@pytest.mark.parametrize(
    "case, platform",
    [
        ("split 8, lamb", "tpu"),
        ("split 8, int8", "tpu"),
        ("stochastic, lion", "tpu"),
        ("stochastic, int8", "tpu"),
        ("int8, float16", "gpu"),
    ],
)
def test_kernels_equal_xla(case, platform, monkeypatch):
    if platform == "gpu":
        interpreted_gpu(monkeypatch)
    calls = count_kernels(monkeypatch)
    args = arguments_of(case)
    actual = by("interpret", *args)
    assert sum(calls) == LEAVES[case]
    same_but_for_last_bits(actual, by("xla", *args))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, platform",
    [("int8, float16", "tpu"), ("split 8, int8", "gpu")],
)
def test_a_skipped_step_leaves_every_bit(case, platform, monkeypatch):
    if platform == "gpu":
        interpreted_gpu(monkeypatch)
    tx, params, (good, bad) = arguments_of(case)
    first, *_, last = params
    step = quickly_compiled(functools.partial(apply_step, tx, "interpret"))
    params, state = step(params, tx.init(params), good)
    # Pruned: its error bits are those of another half.
    params[first] = params[first].at[:, 5].set(0)
    bad[last] = bad[last].at[9].set(jnp.nan)
    after, next_state = step(params, state, bad)
    assert_bit_equal((after, next_state.inner_state), (params, state.inner_state))
    assert int(next_state.skipped_total) == 1


@pytest.mark.slow_but("16-xla")
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("error_bits", [8, 16])
def test_a_half_that_would_overflow_keeps_its_error_bits(error_bits, backend):
    # The rate is large, since gradients whose squares overflow are not taken at all.
    tx = ampx.static_loss_scale(fused.split_masters(fused.sgd(1e18), error_bits), 1.0)
    params = jnp.full((2048,), 1.0, jnp.bfloat16).at[7].set(3.3e38)
    grads = jnp.full((2048,), 2e-21).at[7].set(-6e18)
    step, state = functools.partial(apply_step, tx, backend), tx.init(params)
    params, state = step(params, state, grads)  # 3.36e38, of which bfloat16 leaves something out
    before = join(params, state.inner_state.error_bits)
    params, state = step(params, state, grads * 1.5)  # 3.45e38
    after = join(params, state.inner_state.error_bits)
    assert before[7] == after[7] and before[7] > 3.35e38 and before[8] > after[8]


@pytest.mark.slow
def test_masks_see_arrays_and_wrappers_wrap_wrappers():
    def large(params):
        return jax.tree.map(lambda p: isinstance(p, jax.Array) and p.size > 2000, params)

    adamw = fused.adamw(0.1, weight_decay=0.5, mask=large)
    params = normal(0, "bfloat16", {"w": (20, 130), "b": (7,)})
    grads = normal(1, shapes={"w": (20, 130), "b": (7,)})
    for tx in (
        fused.split_masters(fused.split_masters(adamw)),
        fused.stochastic_rounding(fused.split_masters(adamw)),
        fused.split_masters(fused.stochastic_rounding(fused.novograd(0.1))),
    ):
        actual, expected = (by(name, tx, params, [grads] * 2) for name in ("interpret", "xla"))
        same_but_for_last_bits(actual, expected)


@pytest.mark.slow
def test_a_nan_that_nobody_judges_makes_its_blocks_not_finite():
    tx, params = adamw8(), normal(0, shapes=SHAPES)
    bad = STEPS[0] | {"x": STEPS[0]["x"].at[3, 300].set(jnp.nan)}
    state = by("interpret", tx, params, [bad])[1]
    for name in ("mu", "nu"):
        decoded = int8_blocks.decode(getattr(state[0], name)["x"])
        assert not jnp.isfinite(decoded[3, 256:512]).any()
        assert jnp.isfinite(decoded).sum() == decoded.size - 256


# --- shards --------------------------------------------------------------------------------------

SPECS = {"w": P("data", "model"), "t": P("data"), "m": P(None, "data")}
SHARDED = {"w": (20, 512), "t": (4, 6, 256), "m": (6, 4, 256)}


@pytest.mark.whole
def test_bits_are_those_of_the_place_in_the_whole(monkeypatch):
    """`m` is divided in its middle, where a shard does not know its rows, and is left to XLA."""
    mesh = make_mesh((2, 2), ("data", "model"), "Explicit")
    tx, params = fused.stochastic_rounding(adamw8()), normal(0, "bfloat16", SHARDED)
    steps = [normal(i, jnp.bfloat16, SHARDED) for i in (1, 2)]
    expected = by("interpret", tx, params, steps)

    def put(tree):
        def place(path, leaf):
            own = [key.key for key in path if getattr(key, "key", None) in SPECS]
            return jax.device_put(leaf, NamedSharding(mesh, SPECS[own[0]] if own else P()))

        return jax.tree_util.tree_map_with_path(place, tree)

    calls = count_kernels(monkeypatch)
    step, state = jax.jit(functools.partial(apply_step, tx, "interpret")), tx.init(params)
    with jax.set_mesh(mesh):
        params, state = put(params), put(state)
        for grads in steps:
            params, state = step(params, state, put(grads))
    assert sum(calls) == len(SHARDED) - 1
    actual = jax.tree.map(np.asarray, (params, state))
    assert_bit_equal(actual, jax.tree.map(np.asarray, expected))


# --- the kernels themselves ----------------------------------------------------------------------


def encoded_places(scalars, read, written, cell):
    """Encodes where each element lies, times a scalar."""
    row, column = (x.astype(jnp.int32).astype(jnp.float32) for x in cell.index())
    value = read[0] + scalars[0] * (row * 1000 + column)
    scales = int8_blocks.block_scale(cell.largest(jnp.abs(value)), signed=True)
    codes = int8_blocks.to_codes(value, scales, signed=True)
    return [Int8Blocks(codes, scales)], [int8_blocks.from_codes(*written[0])]


@pytest.mark.whole_but(
    "map_blocks0-(4, 11, 256)",
    "map_blocks1-(1, 1024)",
    "map_blocks1-(1536,)",
    "map_whole-(1, 1024)",
)
@pytest.mark.slow_but("map_blocks1-(1, 1024)", "map_whole-(1, 1024)")
@pytest.mark.parametrize("shape", [(1, 1024), (4, 11, 256), (1536,)], ids=str)
@pytest.mark.parametrize("kernel", [gpu.map_blocks, tpu.map_blocks, blocks.map_whole])
def test_blocks_and_places(kernel, shape):
    x, old = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))
    old = int8_blocks.encode(old, signed=True)
    settings = {} if kernel is blocks.map_whole else {"interpret": True}
    run = functools.partial(kernel, encoded_places, num_sums=1, **settings)
    [new], sums = jax.jit(run)(jnp.full(1, 0.5), [x], [old])
    row, column = (i.astype(jnp.int32).astype(jnp.float32) for i in element_index(shape))
    due = int8_blocks.encode(x + 0.5 * (row * 1000 + column), signed=True)
    assert_bit_equal(new, due)
    np.testing.assert_allclose(sums[0], jnp.sum(int8_blocks.decode(old)), rtol=1e-5)


def test_scales_of_other_blocks_are_refused():
    half = Int8Blocks(jnp.zeros((8, 512), jnp.int8), jnp.zeros((8, 4)))
    with pytest.raises(ValueError, match=r"one shape, not .*\(8, 512\), \(8, 1024\)"):
        tpu.map_blocks(encoded_places, jnp.ones(1), [jnp.zeros((8, 512))], [half])


@pytest.mark.slow
def test_rows_longer_than_a_tpu_kernel_holds_are_left_to_xla(monkeypatch):
    calls = count_kernels(monkeypatch)
    tx, params = adamw8(), {"w": jnp.ones((2, 16384)), "v": jnp.ones((2, 8192))}
    step = functools.partial(apply_step, tx, "interpret")
    jax.eval_shape(step, params, tx.init(params), params)
    assert calls == [1]


_LOWERING = """
from jax._src.mesh import AbstractDevice
import test_fused_low_bit_kernels as low

tpu = jax.sharding.AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
plain = lambda: t.fused.stochastic_rounding(t.fused.adamw(0.1))
cases = low.CASES | {"stochastic": (plain, "bfloat16", 2)}
calls = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}
with jax.sharding.use_abstract_mesh(tpu):
    for case, arrays in (
        ("int8", 5), ("split 8, lamb", 4), ("split 8, int8", 6), ("stochastic, lion", 3),
        ("stochastic", 3),
    ):
        shapes = {"w": (512, 130 if case == "stochastic" else 512), "v": (5120,)}
        make, dtype, _ = cases[case]
        tx, params = make(), t.normal(0, dtype, shapes)
        state, grads = tx.init(params), t.normal(1, jnp.bfloat16, shapes)
        for platform, backend in (("cuda", "mosaic_gpu"), ("tpu", "mosaic_tpu")):
            step = functools.partial(t.apply_step, tx, backend)
            traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, grads)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            kernels = len(re.findall("@" + calls[platform], text))
            passes = 2 if "lamb" in case else 1
            norm = platform == "cuda" and case == "split 8, int8"
            due = passes * (1 if platform == "cuda" else 2) + norm
            assert kernels == due, (case, platform, kernels)
            aliases = text.count("output_operand_alias<")
            assert aliases == 2 * arrays, (case, platform, aliases)
            if case == "stochastic, lion":  # the parameter is not widened on its way to a kernel
                assert not re.search("512x512xbf16>.* -> tensor<512x512xf32>", text), platform
"""


@pytest.mark.whole
def test_low_bit_kernels_lower_in_place_without_an_accelerator():
    in_a_process(_LOWERING, devices=1)
