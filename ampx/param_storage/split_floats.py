"""A float32 master weight as the bfloat16 parameter plus the bits that bfloat16 leaves out.

Parameter and master together take 4 bytes (16 error bits) or 3 bytes (8 error bits), where a
bfloat16 parameter beside a float32 master takes 6.

The split is exact because both types have the same 8 exponent bits, so a bfloat16 is a float32
whose lower 16 bits are zero::

    float32   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bfloat16  s eeeeeeee mmmmmmm

Without the sign, these 31 bits read as an integer are the rank of the float among all floats that
are not negative: the next larger float has the next larger integer, also where the exponent
changes, and among subnormals. So for the magnitude M of a master::

    half  = floor((M + 2**15) / 2**16)     the nearest bfloat16, ties away from zero
    error = M - half * 2**16               from -2**15 to 2**15 - 1: just what int16 holds
    M     = half * 2**16 + error           in integers, without any rounding

The error counts float32 steps. A scaled float in its place would need a unit, and that changes at
each power of two: next above 2.0 the steps are twice as wide as next below. A count needs none.
The float just below 2.0 is (half 2.0, error -1), the one just above it is (half 2.0, error 1).

With 8 error bits M is first rounded to a multiple of 2**8, which leaves 16 significant bits, and
the error counts these coarser steps, from -2**7 to 2**7 - 1.

Everything is integer arithmetic on bit patterns, so subnormals survive on hardware that flushes
them to zero in float arithmetic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_INF = 0x7F800000  # float32's infinity without a sign; larger patterns are NaN
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign


def split(master: jax.Array, error_bits: int) -> tuple[jax.Array, jax.Array]:
    """Splits float32 into bfloat16 and a signed count of the finer steps between.

    Args:
      master: float32 of any shape.
      error_bits: 16 or 8.

    Returns:
      `(half, error)`, both of the shape of `master`: bfloat16, and int16 or int8. `half` is the
      nearest bfloat16 to `join(half, error)`, ties away from zero. With 16 bits `join` gives back
      every float32 bit for bit, but that NaN is some NaN. With 8 bits it gives the nearest number
      of 16 significant bits: the relative error is at most 2**-16 (2**-142 absolute among
      subnormals), and finite values stay finite. Beyond 3.396e38 `half` is infinity, as it is
      after a plain cast, while the joined value is finite.

    Raises:
      TypeError: if `master` is not float32.
      ValueError: if `error_bits` is neither 8 nor 16.

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, and Gonzalez Ortiz et al., FlashOptim,
      2026, section 3.1. Here the error counts steps of the bit pattern and is not a scaled float.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.param_storage.split_floats import split
      >>> half, error = split(jnp.array([1.0, 1.0 + 2.0**-10]), 16)
      >>> half.tolist(), error.tolist()
      ([1.0, 1.0], [0, 8192])
    """
    if master.dtype != jnp.float32:
        raise TypeError(f"split takes float32, got {master.dtype}: only bfloat16 halves are kept")
    if error_bits not in (8, 16):
        raise ValueError(f"error_bits must be 8 or 16, got {error_bits!r}")
    bits = jax.lax.bitcast_convert_type(master, jnp.int32)
    # The sums below stay within int32 for all that is finite: at most 0x7F7FFFFF + 2**15. For NaN
    # they may wrap, and what comes of that is replaced.
    magnitude = bits & _MAGNITUDE
    unit = 16 - error_bits
    fine = magnitude
    if unit:
        # At most the last multiple below infinity: the master of a finite number is finite.
        rounded = jnp.minimum(magnitude + (1 << (unit - 1)), _INF - (1 << unit))
        fine = jnp.where(magnitude < _INF, rounded, magnitude) >> unit
    half = (fine + (1 << (error_bits - 1))) >> error_bits
    error = fine - (half << error_bits)
    special = magnitude >= _INF
    # bfloat16's quiet bit. The upper half of a NaN whose payload lies in the lower half alone would
    # be the pattern of infinity.
    quiet = (magnitude > _INF).astype(jnp.int32) << 6
    half = jnp.where(special, (magnitude >> 16) | quiet, half)
    half = half | ((bits >> 16) & 0x8000)
    error = jnp.where(special, 0, error)
    half = jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
    return half, error.astype(jnp.int16 if error_bits == 16 else jnp.int8)


def join(half: jax.Array, error: jax.Array) -> jax.Array:
    """The float32 that `split` took apart.

    Args:
      half: bfloat16 of any shape.
      error: int16 or int8 of the same shape.

    Returns:
      float32. An error that is not from the same `split`, because someone wrote to `half`, moves
      the value by at most half a bfloat16 step; it makes no NaN and changes no sign.

    Raises:
      TypeError: if the dtypes are others.

    References:
      See `split`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.param_storage.split_floats import join, split
      >>> x = jnp.array([0.1, -3e-39, jnp.inf])
      >>> join(*split(x, 16)) == x
      Array([ True,  True,  True], dtype=bool)
      >>> abs(join(*split(x, 8))[0] / x[0] - 1) < 2**-16
      Array(True, dtype=bool)
    """
    if half.dtype != jnp.bfloat16:
        raise TypeError(f"join takes a bfloat16 half, got {half.dtype}")
    if error.dtype not in (jnp.int8, jnp.int16):
        raise TypeError(f"join takes int8 or int16 errors, got {error.dtype}")
    unit = 16 - 8 * error.dtype.itemsize
    pattern = jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.int32)
    magnitude = (pattern & 0x7FFF) << 16
    steps = error.astype(jnp.int32) << unit
    # Masters between the largest bfloat16 and infinity have infinity as their half and an error
    # below zero. An error above zero, left from another half, would turn infinity into NaN.
    steps = jnp.where(magnitude < _INF, steps, jnp.minimum(steps, 0))
    # A negative error beside a half of 0, left from another half, would flip the sign bit.
    joined = jnp.maximum(magnitude + steps, 0)
    joined = jnp.where(magnitude > _INF, magnitude, joined)
    return jax.lax.bitcast_convert_type(joined | ((pattern & 0x8000) << 16), jnp.float32)
