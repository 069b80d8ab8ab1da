"""In what form an optimizer keeps a slot of its state: an array of some dtype, or int8 in blocks.

Slots are widened to the dtype of the arithmetic, updated, and narrowed to their form again:

    stored slot ── widen_slot ──► float32 ── rule ──► new float32 ── narrow_slot ──► stored slot

XLA fuses the three to one loop. Kernels do the same block by block, see `kernels.kernel_steps`.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.checking import as_dtype
from ampx.fused.moments.int8_blocks import Int8Blocks, decode, encode
from ampx.param_storage.rounding import draw_words, element_bits, element_index

# In what form a slot is kept: a floating dtype, int8 in blocks, or None for the parameter's dtype.
SlotDtype = DTypeLike | Literal["int8"] | None
# Smaller slots stay float32, as in other 8-bit optimizers: the 12 KiB that 4096 numbers would save
# are not worth the loss of precision. In rows of fewer than 64 numbers a scale would add more than
# 4 / 64 of a byte to each.
_LEAST_ELEMENTS = 4096
_LEAST_ROW = 64
_SEED = 8  # of the rounding of second moments; any number would do


def as_slot_dtype(name: str, dtype: SlotDtype) -> Any:
    """Converts what a caller chose for a slot to a dtype; None stays.

    Raises:
      ValueError: if it is neither floating nor int8.
    """
    return None if dtype is None else as_dtype(name, dtype, "moment")


def is_int8(dtype: SlotDtype) -> bool:
    """Whether a slot is to be kept in int8 blocks."""
    return dtype is not None and jnp.dtype(dtype) == jnp.int8


def array_dtype(dtype: SlotDtype) -> Any:
    """The dtype in which optax is to make a slot, before `as_format` converts it."""
    return jnp.float32 if is_int8(dtype) else dtype


def as_format(slots: Any, dtype: SlotDtype, *, signed: bool) -> Any:
    """A tree of fresh slots in the form that was asked for; None leaves them as they are."""

    def convert(leaf: jax.Array) -> Any:
        if not is_int8(dtype):
            return leaf.astype(dtype)
        if leaf.size < _LEAST_ELEMENTS or leaf.shape[-1] < _LEAST_ROW:
            return leaf.astype(jnp.float32)
        return encode(leaf.astype(jnp.float32), signed=signed)

    return slots if dtype is None else jax.tree.map(convert, slots)


def widen_slot(slot: Any, dtype: Any) -> jax.Array:
    """The numbers of one parameter's slot, in the dtype of the arithmetic."""
    return (decode(slot) if isinstance(slot, Int8Blocks) else slot).astype(dtype)


def narrow_slot(new: jax.Array, old: Any, step: Any, place: int, *, saturates: bool) -> Any:
    """New numbers in the form of the old slot.

    Args:
      new: float32 or float64, of the parameter's shape.
      old: the slot as it is stored.
      step: int32, how many steps the optimizer has done.
      place: the parameter's number among all of the optimizer.
      saturates: whether a float16 that overflows becomes the largest one. The old number would not
        do: a second moment of long ago beside a first moment of today makes a step of any size.

    Second moments in int8 are rounded stochastically, by bits that depend on the step and on the
    place of the parameter. Rounded to the nearest they would stand still, see `int8_blocks`.
    """
    if isinstance(old, Int8Blocks):
        bits = None
        if not old.signed:
            bits = element_bits(*element_index(new.shape), moment_words(step, place))
        return encode(new.astype(jnp.float32), signed=old.signed, bits=bits)
    if saturates and old.dtype == jnp.float16:
        # bfloat16 has float32's exponents: what is finite in one rounds to a finite number in the
        # other, or was within half a step of the end of both.
        largest = float(jnp.finfo(jnp.float16).max)
        new = jnp.clip(new, -largest, largest)
    return new.astype(old.dtype)


def moment_words(step: Any, place: int) -> tuple[jax.Array, jax.Array]:
    """What the random bits for a parameter's second moments depend on, see `rounding`.

    The bits for the parameter itself are drawn for the leaf number `place`, with any seed. The
    complement `~place`, a number that no place has, keeps the two apart.
    """
    return draw_words(seed=_SEED, step=step, leaf=~place)
