"""Optimizer moments in 8 bits, with a float32 scale a block.

A moment takes 1 + 4 / block bytes a parameter, 1.0156 with blocks of 256, where float32 takes 4.
Blocks lie along the last axis: one of n < block elements costs 1 + 4 / n, so keep n = 1 in float32.

Linear int8 loses every value below 1/254 of its block's largest, and a second moment that becomes 0
divides by epsilon alone. The moments of one block range over many powers of two. So these codes
have an exponent of their own, and fewer steps in an octave (from one power of two to the next) the
further an octave lies below the block's largest number, which itself is exact::

    |x| / largest       steps an octave   codes, signed   codes, unsigned   relative error at most
    1      to 2**-2           16            127 to 95        255 to 223             1/32
    2**-2  to 2**-4            8             95 to 79        223 to 207             1/16
    2**-4  to 2**-18           4             79 to 23        207 to 1               1/8
    2**-18 to 2**-29           2             23 to 1         as above               1/4
    0                                            0               0                  exact

Unsigned codes have no fourth line: with 4 steps an octave they reach down to 2**-55. They are for
second moments, whose root is what counts, and the root of 2**-55 is as far down as 2**-27.

A step of 1/16 octave is 2**19 patterns of a float32, whose lower 23 bits count through an octave.
So encoding is integer arithmetic, piecewise linear, on the pattern of the ratio to the largest; one
division comes before it, and no logarithm.

A second moment with b2 = 0.999 changes by 0.1% a step, which no 8-bit step resolves: rounded to the
nearest it only follows its block's scale. Give `encode` random `bits` for second moments, and they
follow on average; first moments (b1 = 0.9) are as good without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ampx.checking import as_positive_int
from ampx.summaries import show_fields

BLOCK = 256  # elements that share a scale, unless one says otherwise
_ONE = 0x3F800000  # the bits of 1.0
# Where steps double in width: octaves and steps below the largest; the last only with signs.
# 2 octaves of 16 steps are 32, 2 more of 8 make 48, and 14 more of 4 make 104.
_KNEES = ((2, 32), (4, 48), (18, 104))
# Blocks whose largest number is below this are zero. Every code must decode to a normal float32,
# 2**-126 or more, since accelerators flush what is smaller to 0.
_SMALLEST = 2.0**-122


class Int8Blocks(NamedTuple):
    """An array in 8 bits. All zeros, scales too, is what an array of zeros encodes to.

    Attributes:
      codes: of the array's shape; int8 where values have signs, uint8 where they have none.
      scales: float32 of shape `(*shape[:-1], ceil(shape[-1] / block))`, the largest magnitude of
        each block; of shape `(1,)` for a scalar.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> state = ampx.fused.adam(1e-3, mu_dtype="int8").init({"w": jnp.ones((8, 1000))})
      >>> blocks = optax.tree.get(state, "mu")["w"]
      >>> blocks.codes.shape, blocks.scales.shape
      ((8, 1000), (8, 4))
    """

    codes: jax.Array
    scales: jax.Array

    __repr__ = show_fields

    stores_blocks = True

    @property
    def signed(self) -> bool:
        """Whether these are first moments, which have signs, or second ones."""
        return self.codes.dtype == jnp.int8


def encode(
    x: jax.Array, *, signed: bool, block: int = BLOCK, bits: jax.Array | None = None
) -> Int8Blocks:
    """Encodes an array of moments in blocks along its last axis.

    Args:
      x: float32 of any shape.
      signed: True for a first moment; False for a second moment, whose negative values become 0.
      block: elements that share a scale. Shards of the last axis should be multiples of it.
      bits: uniform uint32 of the shape of `x`, see `ampx.param_storage.rounding.element_bits`:
        rounds stochastically, `x` being the mean. Without, to the nearest, ties towards 0.

    Returns:
      The blocks. Zero and the largest of a block stay exact. The relative error of others is at
      most 1/32 above 1/4 of the largest, 1/16 above 1/16 and then 1/8, or 1/4 for first moments
      below 2**-18 of it; stochastic rounding doubles that. Below the reach a first moment becomes
      0, a second moment the smallest code: no update is divided by 0. Encoding what `decode`
      returned gives the same blocks, bit for bit, with any `bits`. Infinity or NaN makes its whole
      block non-finite. For tiny blocks see `block_scale`.

    Raises:
      TypeError: if `x` is not float32, or `bits` not uint32.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, for blocks and tapered
      codes; Gonzalez Ortiz et al., FlashOptim, 2026, for companding. The code itself is our own.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import decode, encode
      >>> decode(encode(jnp.array([4.0, 1.1, 1e-12, 0.0]), signed=False)).tolist()
      [4.0, 1.125, 9.094947017729282e-13, 0.0]
    """
    block = as_positive_int("block", block)
    if x.dtype != jnp.float32:
        raise TypeError(f"encode takes float32, got {x.dtype}")
    codes, scales = encode_blocks(
        _in_blocks(x, block),
        lambda magnitudes: jnp.max(magnitudes, axis=-1, keepdims=True),
        signed=signed,
        bits=None if bits is None else _in_blocks(bits, block),
    )
    return Int8Blocks(_out_of_blocks(codes, x.shape), jnp.squeeze(scales, -1))


def encode_blocks(
    x: jax.Array,
    largest: Callable[[jax.Array], jax.Array],
    *,
    signed: bool,
    bits: jax.Array | None = None,
) -> Int8Blocks:
    """`encode` of numbers that are divided into blocks already, for kernels too.

    Args:
      x: float32.
      largest: from an array of that shape to the largest element of each block; what it returns
        broadcasts to `x`.
      signed: see `encode`.
      bits: uint32 of the shape of `x`, see `encode`.

    Returns:
      Codes of the shape of `x`, and scales of the shape of what `largest` returns.
    """
    scales = block_scale(largest(magnitudes_of(x, signed=signed)), signed=signed)
    return Int8Blocks(to_codes(x, scales, signed=signed, bits=bits), scales)


def decode(blocks: Int8Blocks, *, block: int = BLOCK) -> jax.Array:
    """The float32 array that `encode` was given, up to the stated error; with the same `block`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import decode, encode
      >>> decode(encode(jnp.array([-2.0, 0.9]), signed=True)).tolist()
      [-2.0, 0.90625]
    """
    codes, scales = blocks
    values = from_codes(_in_blocks(codes, block), scales[..., None])
    return _out_of_blocks(values, codes.shape)


def magnitudes_of(x: jax.Array, *, signed: bool) -> jax.Array:
    """What `block_scale` is to be told the largest of: float32 of the shape of `x`.

    Infinite for a NaN, since a maximum loses it on CPUs, and perhaps in kernels.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import magnitudes_of
      >>> magnitudes_of(jnp.array([-2.0, jnp.nan]), signed=True).tolist()
      [2.0, inf]
    """
    own = jnp.abs(x) if signed else jnp.where(x < 0, jnp.zeros_like(x), x)
    return jnp.where(x == x, own, jnp.inf)


def block_scale(largest: jax.Array, *, signed: bool) -> jax.Array:
    """The scale of a block, for kernels that find its largest value themselves.

    Args:
      largest: float32, largest magnitude.
      signed: as in `encode`.

    Returns:
      float32: `largest`, but 0 below 2**-122 and otherwise at least 2**-94 (signed) or 2**-67, so
      that even the smallest code decodes to a normal number.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import block_scale
      >>> block_scale(jnp.array([3.0, 0.0]), signed=True).tolist()
      [3.0, 0.0]
    """
    # The smallest codes are 2**-29 and about 2**-55 of the scale: 2**-94 * 2**-29 = 2**-123, and
    # 2**-67 * 2**-55 = 2**-122.
    smallest = _SMALLEST * 2.0 ** (28 if signed else 55)
    return jnp.where(largest < _SMALLEST, 0.0, jnp.maximum(largest, smallest))


def to_codes(
    x: jax.Array, scale: jax.Array, *, signed: bool, bits: jax.Array | None = None
) -> jax.Array:
    """Encodes element by element, for kernels.

    Args:
      x: float32.
      scale: float32 from `block_scale`; broadcasts to `x`.
      signed: gives int8 codes, otherwise uint8, of the shape of `x`.
      bits: uint32 of that shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import to_codes
      >>> to_codes(jnp.array([1.0, -0.5, 0.0]), jnp.ones(1), signed=True)
      Array([ 127, -111,    0], dtype=int8)
    """
    if bits is not None and bits.dtype != jnp.uint32:
        raise TypeError(f"bits must be uint32, got {bits.dtype}")
    # Bits of x / scale. XLA may multiply with 1 / scale, which can be subnormal and so 0: divide by
    # the significand only, and subtract the exponent.
    #     scale = 2**e * s, s from 1 to 2        |x| / s = 2**e * (|x| / scale)
    # The pattern of |x| / s is then e << 23 above that of |x| / scale.
    scale_bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    significand = jax.lax.bitcast_convert_type(scale_bits & 0x7FFFFF | _ONE, jnp.float32)
    quotient = jax.lax.bitcast_convert_type(jnp.abs(x) / significand, jnp.int32)
    # Patterns below that of |x| = scale: 0 there, 1 << 23 an octave down.
    below = (scale_bits & 0x7F800000) - quotient
    # To a multiple of 64 patterns, 2**-13 of the finest step. This forgets the division's rounding
    # error: what `from_codes` made lies on a code again, and no random bits move it.
    place = below = (below + 32) & -64
    # In units of the finest step, 2**19 patterns. Beyond the knees the slope is 1 - 1/2 = 1/2, then
    # 1 - 1/2 - 1/4 = 1/4, and 1/8.
    for i, (octaves, _) in enumerate(_KNEES if signed else _KNEES[:2]):
        place = place - (jnp.maximum(below - (octaves << 23), 0) >> (i + 1))
    # Half a step rounds to the nearest, 19 uniform bits at random. Values are linear in patterns
    # within an octave, and no step reaches over the end of one: so the mean is the value.
    noise = 1 << 18 if bits is None else (bits >> 13).astype(jnp.int32)
    top = 127 if signed else 255
    code = jnp.where(scale > 0, jnp.clip(top - ((place + noise) >> 19), 0, top), 0)
    if signed:
        return jnp.where(x < 0, -code, code).astype(jnp.int8)
    # In a block of second moments that has a scale only 0 becomes 0, whatever the rounding: an
    # update would otherwise be divided by epsilon alone.
    return jnp.where(x > 0, jnp.maximum(code, (scale > 0).astype(jnp.int32)), 0).astype(jnp.uint8)


def from_codes(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Decodes element by element, for kernels: float32 of the shape of `codes`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.fused.moments.int8_blocks import from_codes
      >>> from_codes(jnp.array([127, -111, 0], jnp.int8), jnp.ones(1)).tolist()
      [1.0, -0.5, 0.0]
    """
    signed = codes.dtype == jnp.int8
    code = codes.astype(jnp.int32)
    # The inverse of the knees in `to_codes`: steps count once, then 1 + 1 = 2, 1 + 1 + 2 = 4 and
    # 1 + 1 + 2 + 4 = 8 times.
    below = steps = (127 if signed else 255) - jnp.abs(code)
    for i, (_, knee) in enumerate(_KNEES if signed else _KNEES[:2]):
        below = below + (jnp.maximum(steps - knee, 0) << i)
    ratio = jax.lax.bitcast_convert_type(_ONE - (below << 19), jnp.float32)
    ratio = jnp.where(code == 0, 0.0, jnp.where(code < 0, -ratio, ratio))
    return ratio * scale


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """From shape (..., n) to (..., blocks, elements of a block), the last block padded with zeros.

    Padding never changes the largest magnitude of a block. A row of fewer than `block` elements is
    one block, without padding.
    """
    x = jnp.atleast_1d(x)
    size = max(min(block, x.shape[-1]), 1)
    ragged = -x.shape[-1] % size
    if ragged:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, ragged)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _out_of_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_in_blocks`, for an array that had this shape; padding is cut off."""
    joined = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return joined[..., : (1, *shape)[-1]].reshape(shape)
