"""Stochastic rounding to bfloat16, and the random bits for it as a function of the position.

Parameters that are kept in bfloat16 alone (2 bytes each, no master) still follow steps far below
their resolution, on average. A float32 lies between two bfloat16; its lower 16 bits f say how far::

    bfloat16 q                x                               bfloat16 q + 1
        |---------------------|-------------------------------------|
        0                     f                                   2**16

Add a uniform random r from 0 to 2**16 - 1 to the bit pattern and cut the lower 16 bits off. The sum
carries into q + 1 if f + r >= 2**16, which f of the 2**16 values of r bring about. So q + 1 comes
with probability f / 2**16. Float32 steps between two neighbouring bfloat16 are all of one width, so
the mean is (1 - f / 2**16) q + f / 2**16 (q + 1) = x, exactly. At the last bfloat16 of an octave
the carry runs on into the exponent, which is the next bfloat16 again.

The bits are a hash of the element's place and of the step, not the output of a generator with
state: they are the same however an array is cut into blocks or shards, they cost no memory, and a
kernel makes them where it needs them::

    draw_words(seed, step, leaf)   two words, once for an array
    element_index(shape)           (row, column) of each element
    element_bits(row, column, words)   32 bits an element
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

_INF = 0x7F800000
_LARGEST = 0x7F7F  # of the finite bfloat16 patterns


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two bfloat16 around it, the nearer the likelier.

    Args:
      x: float32 of any shape.
      bits: uint16, or uint32 whose upper half is used; uniform, of the shape of `x`.

    Returns:
      bfloat16 whose mean over `bits` is exactly `x`; off by less than a step, 2**-7 relative.
      What bfloat16 holds comes back as it is, infinities, NaN, signed zeros and subnormals too.
      No finite value becomes infinite: above the largest bfloat16 (3.39e38) it is that.

    Raises:
      TypeError: if the dtypes are others.

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, section 4.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.param_storage.rounding import stochastic_round
      >>> x = jnp.full(4, 1 + 2.0**-9)  # a quarter of a step above 1
      >>> stochastic_round(x, jnp.array([0, 0x4000, 0x8000, 0xC000], jnp.uint16))
      Array([1, 1, 1, 1.00781], dtype=bfloat16)
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"stochastic_round takes float32, got {x.dtype}")
    if bits.dtype not in (jnp.uint16, jnp.uint32):
        raise TypeError(f"stochastic_round takes uint16 or uint32 bits, got {bits.dtype}")
    if bits.dtype == jnp.uint32:
        bits = bits >> 16
    pattern = jax.lax.bitcast_convert_type(x, jnp.int32)
    # Without the sign, so that positive and negative numbers round alike, away from or towards 0.
    # Finite: at most 0x7F7FFFFF + 0xFFFF, which int32 holds.
    magnitude = pattern & 0x7FFFFFFF
    rounded = jnp.minimum((magnitude + bits.astype(jnp.int32)) >> 16, _LARGEST)
    # bfloat16's quiet bit, without which a NaN may have the upper half of infinity.
    quiet = (magnitude > _INF).astype(jnp.int32) << 6
    half = jnp.where(magnitude < _INF, rounded, (magnitude >> 16) | quiet)
    half = half | ((pattern >> 16) & 0x8000)
    return jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)


def element_index(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Where each element of an array lies in it.

    Under `jax.jit` a shape is that of the whole array, also where shards of it lie on devices.

    Args:
      shape: of the array.

    Returns:
      uint32 `(row, column)` of shapes that broadcast to `shape`: the place along the last axis,
      and the rank in row-major order of the axes before it. So arrays of more than 2**32 elements
      need no 64-bit integers; only with more than 2**32 rows do rows come to share their bits.

    Examples:
      >>> from ampx.param_storage.rounding import element_index
      >>> row, column = element_index((2, 3))
      >>> row.tolist(), column.tolist()
      ([[0], [1]], [[0, 1, 2]])
    """
    shape = tuple(shape)
    if not shape:
        return jnp.uint32(0), jnp.uint32(0)

    def along(axis: int) -> jax.Array:
        # Of length 1 along all other axes: sums of these broadcast only as far as they must.
        size = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        return jax.lax.broadcasted_iota(jnp.uint32, size, axis)

    # Row-major rank over the axes before the last, modulo 2**32.
    row = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in range(len(shape) - 1):
        row = row + along(axis) * _word(math.prod(shape[axis + 1 : -1]))
    return row, along(len(shape) - 1)


def draw_words(
    *, seed: int | jax.Array, step: int | jax.Array, leaf: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """All of the random bits that is the same for every element: two uint32, for a kernel to take.

    Args:
      seed: any integer, as are the next two; only the lower 32 bits count.
      step: of the training; every step has bits of its own.
      leaf: number of the parameter. Draws for two purposes at one parameter need two numbers.
    """
    # Two chains in opposite order: two draws would need equal words in both to share their bits.
    # The constant, 2**32 over the golden ratio, keeps the chains apart where all inputs are 0.
    first = _mix(_mix(_mix(_word(seed)) ^ _word(step)) ^ _word(leaf))
    second = _mix(_mix(_mix(_word(leaf) + _word(0x9E3779B9)) ^ _word(step)) ^ _word(seed))
    return first, second


def element_bits(
    row: jax.Array, column: jax.Array, words: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Random bits for the element at a place.

    Args:
      row: uint32, see `element_index`.
      column: uint32 that broadcasts with `row`.
      words: from `draw_words`.

    Returns:
      uint32 of the broadcast shape, from two integer hashes an element and two a row.
      Good for rounding; not for cryptography, nor a replacement for `jax.random`.

    References:
      Wellons, Prospecting for Hash Functions, 2018: "lowbias32".

    Examples:
      >>> from ampx.param_storage.rounding import draw_words, element_bits, element_index
      >>> words = draw_words(seed=0, step=7, leaf=2)
      >>> row, column = element_index((4, 8))
      >>> bits = element_bits(row, column, words)
      >>> bool((bits[2:] == element_bits(row[2:], column, words)).all())  # of a block alone
      True
    """
    # One word before the hash of the column and one after it. With the first alone, two rows would
    # have the same bits in another order: column ^ a and column ^ b run over the same numbers.
    before, between = (_mix(row ^ word) for word in words)
    return _mix(_mix(column ^ before) + between)


def _mix(word: jax.Array) -> jax.Array:
    """The hash "lowbias32": a bijection of uint32, since each of its parts can be undone.

    `word ^ (word >> k)` keeps the upper k bits, from which the others follow; a product with an odd
    number has an inverse modulo 2**32. So columns of one row never share their first hash.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _word(value: int | jax.Array) -> jax.Array:
    """An integer modulo 2**32; a Python int may be negative or larger."""
    if isinstance(value, int):
        return jnp.uint32(value & 0xFFFFFFFF)
    return jnp.asarray(value).astype(jnp.uint32)
