"""numerics_report in eight bits: what scales of tensors, rows and blocks lose, beside numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ampx

DTYPES = {name: getattr(ml_dtypes, name) for name in ("float8_e4m3fn", "float8_e5m2")}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_operands():
    """Inputs and weights of products that need different recipes."""
    x, w = draw(0, 64, 64), draw(1, 64, 32)
    # The second half of the channels is small, and counts as much by its weights.
    channels = np.repeat(np.float32([1, 2.0**-16]), 32)
    tiny = 1 + 1e-3 * draw(3, 32, 32)
    return {
        "plain": (x, w),
        "tokens": (x * SIZES, w),
        "channels": (x * channels, w / channels[:, None]),
        # Small inputs with large cotangents: in dw all terms count alike.
        "tokens_dw": (x * SIZES, w),
        "cancelling": (np.hstack([x[:, :32]] * 2), np.vstack([w[:32], -w[:32] * tiny])),
        "batched": (x.reshape(4, 16, 64), np.stack([w] * 4)),
        "small": (x, w[:, :3]),
    }


def loss(weights, inputs):
    total = 0.0
    for name, w in weights.items():
        with jax.named_scope(name):
            y = inputs[name] @ w
        if name == "tokens_dw":
            y = y / SIZES
        total += jnp.sum(y * COTANGENTS[: y.size].reshape(y.shape))
    return total


COTANGENTS = draw(4, 64 * 32)
SIZES = 2.0 ** np.random.default_rng(2).integers(-12, 13, size=(64, 1)).astype(np.float32)


def shares(x, name, axes, block=False):
    """(flushed, saturated) of one cast, in float64."""
    dtype, x = DTYPES[name], x.astype(np.float64)
    if block:
        (axis,) = axes
        x = np.moveaxis(x, axis, -1).reshape(-1, 32)
        axes = (1,)
    limit = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=axes, keepdims=True) / limit))
    left = (x / scale).astype(dtype).astype(np.float64)
    return np.mean(left == 0), np.mean(np.abs(left) == limit)


def test_shares_are_those_of_the_casts_and_recipes_keep_what_matters():
    operands = make_operands()
    inputs, weights = ({name: pair[i] for name, pair in operands.items()} for i in (0, 1))
    report = ampx.numerics_report(loss)(weights, inputs)
    tables = {name: {row[:2]: row for row in report.float8_table(name)} for name in DTYPES}
    # The forward product sums over columns of x, and the gradient of w over rows of x and of g.
    for scope, (x, w) in list(operands.items())[:5]:
        g = COTANGENTS.reshape(64, 32) / (SIZES if scope == "tokens_dw" else 1)
        for name, table in tables.items():
            of_forward, of_cotangent = table[scope, "forward"], table[scope, "backward"]
            for found, casts, block in (
                (of_forward.by_tensor, [(x, (0, 1)), (w, (0, 1))], False),
                (of_forward.by_row, [(x, (1,)), (w, (0,)), (x, (0,))], False),
                (of_forward.by_block, [(x, (1,)), (w, (0,)), (x, (0,))], True),
                (of_cotangent.by_tensor, [(g, (0, 1))], False),
                (of_cotangent.by_row, [(g, (0,))], False),
            ):
                expected = [shares(array, name, axes, block) for array, axes in casts]
                np.testing.assert_allclose(found, np.max(expected, axis=0), atol=1e-12)
    assert tables["float8_e4m3fn"]["tokens", "forward"].by_tensor.flushed > 0.3
    assert dict(report.float8_recipes) == {  # not of batched or small ones
        "plain": "tensorwise",
        "tokens": "rowwise",
        "tokens_dw": "rowwise_half_dw",
        "channels": "mxfp8",
        "cancelling": None,
    }
    lines = str(report).splitlines()
    assert lines[-1].endswith("dots='rowwise_half_dw', half for cancelling, channels")
    with pytest.raises(ValueError, match="float8_dtype must be .*, got 'float16'"):
        report.float8_table("float16")


def test_tokens_of_very_different_size_lose_nothing_by_row():
    """Spread over 2**-12 to 2**12. Of an input that is given, no gradient casts the columns."""
    x, w = draw(0, 64, 64) * SIZES, draw(1, 64, 32)
    cotangent = COTANGENTS.reshape(64, 32)
    report = ampx.numerics_report(lambda x: jnp.sum((x @ w) * cotangent))(x)
    forward = next(row for row in report.float8_table("float8_e4m3fn") if row[1] == "forward")
    assert forward.by_tensor.flushed > 0.3
    assert forward.by_row.flushed < 0.001 and forward.by_block.flushed < 0.001
    assert report.float8_recipes[""] == "rowwise"
