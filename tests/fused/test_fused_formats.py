"""Split masters, stochastic rounding and int8 moments of `ampx.fused`."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from ampx import fused
from ampx.fused.moments import int8_blocks
from ampx.fused.moments.int8_blocks import Int8Blocks, block_scale, from_codes, to_codes
from ampx.param_storage.rounding import (
    draw_words,
    element_bits,
    element_index,
    stochastic_round,
)
from ampx.param_storage.split_floats import join, split

ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)
TINY = np.finfo(np.float32).tiny

encode = jax.jit(int8_blocks.encode, static_argnames=("signed", "block"))
decode = jax.jit(int8_blocks.decode, static_argnames="block")


def bits_of(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@functools.partial(jax.jit, static_argnums=0)
def draws(shape, seed=0, step=0, leaf=0):
    return element_bits(*element_index(shape), draw_words(seed=seed, step=step, leaf=leaf))


# Split masters


@functools.cache
def all_halves():
    """Every upper half of a float32, with the lower halves at which something changes."""
    low = [0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF]
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.uint32(low)
    return bits.view(np.float32).ravel()


@functools.cache
def split_and_joined(error_bits):
    half, error = jax.jit(split, static_argnums=1)(all_halves(), error_bits)
    return np.asarray(half), np.asarray(error), np.asarray(jax.jit(join)(half, error))


def test_sixteen_error_bits_give_back_every_float32():
    half, error, joined = split_and_joined(16)
    assert half.dtype == jnp.bfloat16 and error.dtype == np.int16
    nan = np.isnan(all_halves())
    np.testing.assert_array_equal(bits_of(joined)[~nan], bits_of(all_halves())[~nan])
    assert np.isnan(joined[nan]).all() and (bits_of(half)[nan] & 0x7FC0 == 0x7FC0).all()


def test_eight_error_bits_keep_sixteen_significant_bits():
    x = all_halves()
    half, error, joined = split_and_joined(8)
    assert error.dtype == np.int8
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(x))
    np.testing.assert_array_equal(np.isinf(joined), np.isinf(x))
    np.testing.assert_array_equal(np.signbit(joined), np.signbit(x))
    finite = np.isfinite(x)
    exact, got = x[finite].astype(np.float64), joined[finite].astype(np.float64)
    bound = np.maximum(np.abs(exact) * 2.0**-16, 2.0**-142)
    assert (np.abs(got - exact) <= bound).all()
    normal = np.abs(exact) >= TINY
    worst = (np.abs(got - exact)[normal] / np.abs(exact[normal])).max()
    assert worst > 0.99 * 2.0**-16  # the bound is what 16 significant bits can do, not 2**-17


@pytest.mark.parametrize("error_bits", [8, 16])
def test_half_is_the_joined_value_rounded_to_nearest(error_bits):
    half, error, joined = split_and_joined(error_bits)
    number = ~np.isnan(joined)
    rounded = (bits_of(joined)[number] + np.uint32(0x8000)) >> 16
    np.testing.assert_array_equal(bits_of(half)[number], rounded)
    special = ~np.isfinite(all_halves())
    assert not error[special].any()


@pytest.mark.parametrize("error_bits", [8, 16])
def test_splitting_again_changes_nothing(error_bits):
    half, error, joined = split_and_joined(error_bits)
    assert_bit_equal(jax.jit(split, static_argnums=1)(joined, error_bits), (half, error))


@given(hnp.arrays(np.float32, 32, elements=ANY))
def test_random_masters_survive(x):
    np.testing.assert_array_equal(bits_of(join(*split(jnp.asarray(x), 16))), bits_of(x))


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_errors_of_another_half_do_no_harm(dtype):
    half = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    wide = half.astype(np.float32)
    for error in (np.iinfo(dtype).min, -1, 1, np.iinfo(dtype).max):
        joined = np.asarray(join(jnp.asarray(half), jnp.full(half.shape, error, dtype)))
        np.testing.assert_array_equal(np.isnan(joined), np.isnan(wide))
        np.testing.assert_array_equal(np.signbit(joined), np.signbit(wide))


def test_split_and_join_refuse_other_dtypes():
    with pytest.raises(TypeError, match="float32, got float16"):
        split(jnp.ones(1, jnp.float16), 16)
    with pytest.raises(ValueError, match="8 or 16, got 4"):
        split(jnp.ones(1), 4)
    with pytest.raises(TypeError, match="bfloat16 half, got float16"):
        join(jnp.ones(1, jnp.float16), jnp.ones(1, jnp.int16))
    with pytest.raises(TypeError, match="int8 or int16 errors, got int32"):
        join(jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.int32))


# Stochastic rounding


@pytest.mark.parametrize("x", [1.001, -0.3, 1e-40, 3.38e38, 6e-39, 1 + 2.0**-23, 0.99999])
def test_the_mean_over_all_bits_is_the_value(x):
    every = jnp.arange(1 << 16, dtype=jnp.uint16)
    x = jnp.full(every.shape, x, jnp.float32)
    for bits in (every, every.astype(jnp.uint32) << 16):
        half = np.asarray(stochastic_round(x, bits)).astype(np.float64)
        assert half.mean() == np.float64(np.asarray(x)[0]) and len(set(half)) <= 2


def test_mean_of_many_draws():
    """The acceptance case of torchao, `test_low_bit_optim.py`."""
    x = np.random.default_rng(0).random(16, np.float32)
    half = stochastic_round(jnp.broadcast_to(x, (100_000, 16)), draws((100_000, 16)))
    np.testing.assert_allclose(np.asarray(half).astype(np.float64).mean(0), x, atol=3e-5, rtol=0)


@pytest.mark.parametrize("draw", [0, 0x7FFF, 0xFFFF])
def test_what_bfloat16_holds_stays(draw):
    half = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    number = half[~np.isnan(half.astype(np.float32))]
    bits = jnp.full(number.shape, draw, jnp.uint16)
    rounded = stochastic_round(jnp.asarray(number.astype(np.float32)), bits)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(number))


def test_finite_stays_finite_and_nan_stays_nan():
    x = np.uint32([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0xFFFFFFFF]).view(np.float32)
    half = np.asarray(stochastic_round(jnp.asarray(x), jnp.full(4, 0xFFFF, jnp.uint16)))
    assert bits_of(half)[:2].tolist() == [0x7F7F, 0xFF7F]
    assert bits_of(half)[2:].tolist() == [0x7FC0, 0xFFFF]


def test_rounding_refuses_other_dtypes():
    with pytest.raises(TypeError, match="float32, got bfloat16"):
        stochastic_round(jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.uint16))
    with pytest.raises(TypeError, match="bits, got int32"):
        stochastic_round(jnp.ones(1), jnp.ones(1, jnp.int32))


# Counter bits


def as_signs(bits):
    """(32, n) of -1 and 1: the bits of each word."""
    words = np.asarray(bits).ravel()
    return np.float32(2) * ((words >> np.arange(32, dtype=np.uint32)[:, None]) & 1) - np.float32(1)


@pytest.mark.slow_but("shape1")
@pytest.mark.parametrize("shape", [(1 << 14,), (128, 128), (1 << 14, 1)])
def test_bits_are_uniform_and_uncorrelated(shape):
    n = 1 << 14
    limit = 5.5 / np.sqrt(n)  # standard deviations; 32 * 32 products are looked at
    signs = as_signs(draws(shape))
    assert np.abs(signs.mean(1)).max() < limit
    others = {
        "next element": np.roll(signs, 1, 1),
        "next row": np.roll(signs, shape[-1], 1),
        "next step": as_signs(draws(shape, step=1)),
        "next leaf": as_signs(draws(shape, leaf=1)),
        "next seed": as_signs(draws(shape, seed=1)),
    }
    for name, other in others.items():
        if name != "next row" or shape[0] < n:
            assert np.abs(signs @ other.T / n).max() < limit, name
    assert np.abs(signs @ signs.T / n - np.eye(32)).max() < limit
    counts = np.bincount(np.asarray(draws(shape)).ravel() >> 24, minlength=256)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 370  # chi-square of 255, 5 sigma


def test_seed_step_and_leaf_do_not_stand_in_for_each_other():
    keys = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 1), (-1, 0, 0)]
    words = [np.asarray(draws((64,), *key)) for key in keys]
    for i, a in enumerate(words):
        assert all((a != b).all() for b in words[:i])
    wide = element_bits(*element_index((64,)), draw_words(seed=2**40, step=0, leaf=1))
    np.testing.assert_array_equal(wide, words[0])


def test_bits_do_not_depend_on_blocks_shards_or_types_of_counters():
    shape = (3, 8, 64)
    whole = draws(shape, seed=5, step=6, leaf=7)
    row, column = element_index(shape)
    words = draw_words(seed=5, step=jnp.int32(6), leaf=jnp.uint32(7))
    assert_bit_equal(element_bits(row[2:, 4:], column[..., 48:], words), whole[2:, 4:, 48:])
    assert_bit_equal(whole.reshape(24, 64), draws((24, 64), seed=5, step=6, leaf=7))
    mesh = make_mesh((2, 2), ("data", "model"))
    sharding = jax.NamedSharding(mesh, jax.P(None, "data", "model"))
    sharded = jax.jit(lambda step: draws(shape, 5, step, 7), out_shardings=sharding)(6)
    assert_bit_equal(sharded, whole)
    assert draws(()).shape == () and draws((0, 3)).shape == (0, 3)


def test_huge_arrays_need_no_wide_integers():
    full_shape = (3, 2**30, 2**20)  # 2**52 elements

    @jax.jit  # XLA computes what is taken out alone
    def find_ends():
        row, column = element_index(full_shape)
        return row[2, -2:], column[..., -4:]

    row, column = find_ends()
    assert row.ravel().tolist() == [3 * 2**30 - 2, 3 * 2**30 - 1]
    assert column.ravel().tolist() == list(range(2**20 - 4, 2**20))


# Int8 moments

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["m", "v"])


def every_code(signed):
    return jnp.arange(-127, 128, dtype=jnp.int8) if signed else jnp.arange(256).astype(jnp.uint8)


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.4028235e38, 1e-10, "smallest"])
def test_every_code_survives_its_value(signed, scale):
    scale = block_scale(jnp.float32(2.0**-122 if scale == "smallest" else scale), signed=signed)
    codes = every_code(signed)
    values = from_codes(codes, scale)
    assert (np.diff(np.asarray(values, np.float64)) > 0).all()
    for bits in (None, draws(codes.shape), jnp.full(codes.shape, 2**32 - 1, jnp.uint32)):
        assert_bit_equal(to_codes(values, scale, signed=signed, bits=bits), codes)


@SIGNED
@given(hnp.arrays(np.float32, (2, 19), elements=ANY), st.booleans())
def test_encoding_again_changes_nothing(signed, x, narrow):
    """So a skipped step that encodes its state again leaves it as it was."""
    x = jnp.asarray(np.float32(x) if not narrow else np.sign(x) * np.abs(x) ** np.float32(0.1))
    enc, dec = functools.partial(encode, signed=signed, block=8), functools.partial(decode, block=8)
    for bits in (None, draws(x.shape)):
        blocks = enc(x, bits=bits)
        assert_bit_equal(enc(dec(blocks), bits=draws(x.shape, step=1)), blocks)
        assert_bit_equal(enc(dec(blocks)), blocks)


@SIGNED
@given(hnp.arrays(np.float32, 19, elements=st.floats(-27, 40, width=32)), st.data())
def test_errors_are_within_bounds(signed, exponents, data):
    sign = data.draw(hnp.arrays(np.float32, 19, elements=st.sampled_from([-1, 1])))
    x = np.exp2(exponents) * (sign if signed else np.float32(1))
    padded = np.pad(np.abs(x), (0, 5)).reshape(3, 8)
    ratio = (padded / padded.max(-1, keepdims=True)).ravel()[:19]
    bound = np.select(
        [ratio > 1 / 4, ratio > 1 / 16, (ratio > 2.0**-18) | (not signed)],
        [1 / 32, 1 / 16, 1 / 8],
        1 / 4,
    )
    reached = ratio > 2.0 ** (-29 if signed else -55)
    for bits, factor in ((None, 1), (draws(x.shape), 2)):
        blocks = encode(jnp.asarray(x), signed=signed, block=8, bits=bits)
        y = np.asarray(decode(blocks, block=8))
        error = np.abs(y.astype(np.float64) - x) / np.abs(x)
        assert (error <= factor * bound + 1e-5)[reached].all()
        np.testing.assert_array_equal(y[ratio == 1], x[ratio == 1])
        if not signed:
            assert (y > 0).all()


@pytest.mark.parametrize("block", [128, 256])
def test_normal_moments_pass_flashoptims_acceptance(block):
    rng = np.random.default_rng(0)
    m = rng.standard_normal((64, 2048)).astype(np.float32)
    for x, signed in ((m, True), (m**2, False)):
        blocks = encode(jnp.asarray(x), signed=signed, block=block)
        y = np.asarray(decode(blocks, block=block))
        assert (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()) > 0.999
        assert ((x - y) ** 2).sum() / (x**2).sum() < 5e-4
        assert sum(part.nbytes for part in blocks) == x.size * (1 + 4 / block)


@pytest.mark.slow_but("shape0-m", "shape1-v", "shape3-m", "shape4-v")
@SIGNED
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 5), (2, 3, 300), (5, 1)])
def test_any_shape_and_zeros_and_equal_values(signed, shape):
    zeros = encode(jnp.zeros(shape), signed=signed)
    assert_bit_equal(zeros, jax.tree.map(jnp.zeros_like, zeros))
    assert_bit_equal(decode(zeros), jnp.zeros(shape))
    assert zeros.codes.shape == shape
    assert zeros.scales.shape == ((*shape[:-1], -(-shape[-1] // 256)) if shape else (1,))
    equal = jnp.full(shape, -0.1 if signed else 0.1)
    assert_bit_equal(decode(encode(equal, signed=signed, bits=draws(shape))), equal)


def test_ragged_blocks_are_the_slices():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 600)), jnp.float32)
    blocks = encode(x, signed=True, bits=draws(x.shape))
    for i, part in enumerate((slice(0, 256), slice(256, 512), slice(512, 600))):
        alone = encode(x[:, part], signed=True, bits=draws(x.shape)[:, part])
        assert_bit_equal(alone, Int8Blocks(blocks.codes[:, part], blocks.scales[:, i : i + 1]))


@SIGNED
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [2, 32])  # XLA's maximum of many numbers on CPUs loses a NaN
def test_what_is_not_finite_shows(signed, bad, rows):
    x = jnp.ones((rows, 300)).at[0, 3].set(bad)
    y = np.asarray(decode(encode(x, signed=signed)))
    assert not np.isfinite(y[0, :256]).any()
    np.testing.assert_array_equal(y[0, 256:], 1)
    np.testing.assert_array_equal(y[1:], 1)


def test_second_moments_never_vanish_and_never_turn_negative():
    v = jnp.array([1e30, 1.0, 1e-30, 1e-37, 0.0, -1.0])
    y = decode(encode(v, signed=False))
    assert (y[:4] > 0).all() and (y[4:] == 0).all()
    assert decode(encode(jnp.array([-3.0, 0.5]), signed=False)).tolist() == [0.0, 0.5]


@SIGNED
def test_stochastic_codes_have_the_value_as_their_mean(signed):
    x = np.float32([1.0, 0.8137, 0.3333, 0.07, 1e-3, 3e-5])
    drawn = draws((40_000, 6), leaf=1)
    y = decode(encode(jnp.broadcast_to(x, drawn.shape), signed=signed, bits=drawn))
    # A step is at most half the value, so one draw's deviation at most a quarter of it.
    np.testing.assert_allclose(np.asarray(y, np.float64).mean(0), x, rtol=5 * 0.25 / 200)


def test_encode_refuses():
    with pytest.raises(TypeError, match="float32, got bfloat16"):
        encode(jnp.ones(1, jnp.bfloat16), signed=True)
    with pytest.raises(ValueError, match="block must be a positive int, got 0"):
        encode(jnp.ones(1), signed=True, block=0)
    with pytest.raises(TypeError, match="bits must be uint32, got uint16"):
        encode(jnp.ones(1), signed=True, bits=jnp.ones(1, jnp.uint16))


def linear_int8(x, signed):
    """What `encode` must not be: `decode(encode(x))` with equal steps."""
    top = 127.0 if signed else 255.0
    blocked = x.reshape(-1, 256)
    scale = jnp.max(jnp.abs(blocked), -1, keepdims=True) / top
    return (jnp.round(blocked / scale) * scale).reshape(x.shape)


def adamw_distances(store, steps=300):
    """Trains 512 coordinates whose gradients differ by up to 1e8 within a block."""
    rng = np.random.default_rng(0)
    size = jnp.asarray(10 ** rng.permutation(np.linspace(-6, 2, 512)), jnp.float32)
    target = jnp.asarray(rng.standard_normal(512), jnp.float32)
    noise = jnp.asarray(rng.standard_normal((steps, 512)), jnp.float32)

    def step(carry, inputs):
        w, m, v = carry
        count, extra = inputs
        g = size * (w - target + 0.3 * extra)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        t = (count + 1).astype(jnp.float32)
        update = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-12) + 0.01 * w
        return (w - 0.01 * update, store(m, True, count), store(v, False, count)), None

    zeros = jnp.zeros(512)
    (w, _, _), _ = jax.jit(jax.lax.scan, static_argnums=0)(
        step, (zeros, zeros, zeros), (jnp.arange(steps), noise)
    )
    return np.asarray(w - target)


@functools.cache
def float32_distances():
    return adamw_distances(lambda x, signed, count: x)


@pytest.mark.parametrize("stochastic", [False, True])
def test_adamw_with_int8_moments_tracks_float32(stochastic):
    def store(x, signed, count):
        bits = draws(x.shape, step=count) if stochastic and not signed else None
        return decode(encode(x, signed=signed, bits=bits))

    distances, expected = adamw_distances(store), float32_distances()
    # The start is at 0.96 rms of the targets, float32 gets to 0.11.
    assert np.sqrt(((distances - expected) ** 2).mean()) < 0.06
    assert np.sqrt((distances**2).mean()) < 1.3 * np.sqrt((expected**2).mean())


@pytest.mark.parametrize("linear", ["v", "m and v"])
def test_linear_int8_second_moments_diverge(linear):
    """unslothai/unsloth-zoo#962: the test above must be able to fail."""

    def store(x, signed, count):
        if signed and linear == "v":
            return decode(encode(x, signed=True))
        return linear_int8(x, signed)

    assert not np.sqrt((adamw_distances(store) ** 2).mean()) < 1


def test_slow_second_moments_need_stochastic_rounding():
    """With b2 = 0.999 rounding to nearest stands still, relative to the block's largest."""
    squares = jnp.ones(256).at[1:].set(1e-4)  # gradients fell to a hundredth; one did not

    def run(store):
        v, _ = jax.lax.scan(
            lambda v, t: (store(0.999 * v + 0.001 * squares, t), None),
            jnp.ones(256),
            jnp.arange(3000),
        )
        return float(v[1:].mean())

    expected = run(lambda v, t: v)
    nearest = run(lambda v, t: decode(encode(v, signed=False)))
    drawn = run(lambda v, t: decode(encode(v, signed=False, bits=draws((256,), step=t))))
    assert nearest > 5 * expected
    assert abs(drawn / expected - 1) < 0.1


# Inside kernels and under sharding


def all_formats(x):
    bits = element_bits(*element_index(x.shape), draw_words(seed=1, step=2, leaf=3))
    half, error = split(x, 8)
    m_scale = block_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True), signed=True)
    v = x * x
    v_scale = block_scale(jnp.max(v, axis=-1, keepdims=True), signed=False)
    m = to_codes(x, m_scale, signed=True)
    v = to_codes(v, v_scale, signed=False, bits=bits)
    rounded = stochastic_round(join(half, error), bits)
    return rounded, m, v, from_codes(m, m_scale) + from_codes(v, v_scale)


def kernel(x, *outputs):
    for ref, value in zip(outputs, all_formats(x[...]), strict=True):
        ref[...] = value


def test_pallas_kernels_compute_the_same():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((16, 256)), jnp.float32)
    expected = jax.jit(all_formats)(x)
    shapes = jax.eval_shape(all_formats, x)
    assert_bit_equal(pl.pallas_call(kernel, shapes, interpret=True)(x), expected)


def test_kernels_lower_for_tpus():
    x = jax.ShapeDtypeStruct((32, 256), jnp.float32)
    call = pl.pallas_call(kernel, jax.eval_shape(all_formats, x))
    assert "tpu_custom_call" in jax.jit(call).trace(x).lower(lowering_platforms=("tpu",)).as_text()


@SIGNED
def test_sharded_moments_need_no_communication(signed):
    sharding = jax.NamedSharding(make_mesh((2, 2), ("data", "model")), jax.P("data", "model"))
    x = jnp.asarray(np.random.default_rng(3).random((4, 1024)), jnp.float32)

    def there_and_back(x):
        return decode(encode(x, signed=signed, bits=draws(x.shape)))

    step = jax.jit(there_and_back, in_shardings=sharding, out_shardings=sharding)
    text = step.lower(x).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "permute", "all-to-all"))
    assert_bit_equal(step(x), there_and_back(x))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_moments_in_float8_give_updates_in_the_dtype_of_the_gradients(dtype):
    params = {"w": jnp.linspace(-1, 1, 8)}
    narrow, wide = (fused.lion(0.1, mu_dtype=own) for own in (getattr(jnp, dtype), None))
    found, state = narrow.update(params, narrow.init(params), params)
    expected, _ = wide.update(params, wide.init(params), params)
    assert state[0].mu["w"].dtype == dtype
    assert found["w"].dtype == expected["w"].dtype
    np.testing.assert_array_equal(found["w"], expected["w"])  # the first reads a moment of zeros
