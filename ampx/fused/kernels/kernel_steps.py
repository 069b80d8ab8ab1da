"""What kernels do to a block of a parameter: an optimizer's rule, in the form that they map.

A block is widened to float32, updated by the same `compute_direction` that XLA runs, and narrowed
to the form in which it is stored, all in registers. LAMB needs norms over the whole parameter
between its direction and its step, so it is two maps; all other optimizers are one:

    update_all       gradient, parameter, slots -> parameter, slots

    update_slots     gradient, parameter, slots -> slots; sums of p**2 and d**2
    update_param     new slots, parameter, |p| / |d| -> parameter

In bytes a parameter, with bfloat16 gradients and the rest float32, `update_all` of AdamW moves
2 + 12 + 12 = 26. `update_slots` reads 2 + 12 and writes 8, `update_param` reads 12 and writes 4:
38 together. The direction is worked out in both. To write it in the first and to read it in the
second, in place of the moments, would be 38 as well, and need room for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ampx.fused.coefficients import unpack_coefficients
from ampx.fused.leaf_updates import Leaf, compute_direction
from ampx.fused.moments.int8_blocks import Int8Blocks, encode_blocks, from_codes
from ampx.fused.update_rules import Operations, UpdateRule
from ampx.param_storage.narrow_params import ParamForm
from ampx.param_storage.rounding import element_bits

# New written items, and terms to be summed up: what `blocks.BlockFunction` returns.
Written = tuple[list, list]


class KernelStep(NamedTuple):
    """The functions that kernels map, see `kernels.blocks.BlockFunction`.

    Everything static is in here, everything traced in the vector of scalars, float32 all of them:

        [coefficients ..., skip?, (two words as four halves) for each item that draws ...,
         row and column of the shard's first element as four halves, trust ratio?]

    Attributes:
      rule: the optimizer.
      numbers: coefficients, of which it only matters which are None.
      has_skip: whether a scalar says to keep everything.
      counts: whether to count the parameters that overflow.
      draws: of the parameter and of each slot, whether random bits round it.
    """

    rule: UpdateRule
    numbers: Any
    has_skip: bool
    counts: bool
    draws: tuple[bool, ...]

    def update_all(self, scalars: Any, read: Any, written: Any, cell: Any) -> Written:
        """Reads the gradient, writes parameter and slots."""
        block = self._read_scalars(scalars, cell)
        param, *slots = written
        direction, new_slots = self._update_slots(block, read[0], param, slots)
        new, overflows = self._write_param(block, param, direction)
        return [new, *new_slots], overflows

    def update_slots(self, scalars: Any, read: Any, written: Any, cell: Any) -> Written:
        """Reads gradient and parameter, writes the slots; sums the squares of both norms."""
        block = self._read_scalars(scalars, cell)
        grad, param = read
        direction, new_slots = self._update_slots(block, grad, param, written)
        wide = widen_item(param)
        return new_slots, [wide * wide, direction * direction]

    def update_param(self, scalars: Any, read: Any, written: Any, cell: Any) -> Written:
        """Reads the new slots, writes the parameter; the last scalar is the trust ratio."""
        block = self._read_scalars(scalars, cell)
        again: Any = self.rule.direction_again
        wide, slots = widen_item(written[0]), tuple(map(widen_item, read))
        direction = again(wide, slots, block.h, Operations(cell.sqrt))
        new, overflows = self._write_param(block, written[0], direction * block.ratio)
        return [new], overflows

    def _read_scalars(self, scalars: tuple[Any, ...], cell: Any) -> _BlockContext:
        given = sum(number is not None for number in self.numbers)
        numbers, rest = scalars[:given], iter(scalars[given:])
        skip = next(rest) > 0 if self.has_skip else None
        words = [(_next_word(rest), _next_word(rest)) if drawn else None for drawn in self.draws]
        start = (_next_word(rest), _next_word(rest)) if any(self.draws) else None

        # Once a block, however many items draw, and not at all if none does. Places are those in
        # the whole array, so that shards round as XLA rounds the whole.
        @functools.cache
        def place() -> tuple[jax.Array, jax.Array]:
            (row, column), (first_row, first_column) = cell.index(), start or (0, 0)
            return row + first_row, column + first_column

        def bits_of(own: Any) -> jax.Array:
            row, column = place()
            return element_bits(row, column, own)

        bits = tuple(None if own is None else functools.partial(bits_of, own) for own in words)
        return _BlockContext(
            unpack_coefficients(self.numbers, numbers), skip, bits, next(rest, None), cell
        )

    def _update_slots(
        self, block: _BlockContext, grad: Any, param: Any, slots: Sequence[Any]
    ) -> tuple[jax.Array, list[Any]]:
        wide = Leaf(widen_item(grad), widen_item(param), tuple(map(widen_item, slots)))
        direction, new = compute_direction(self.rule, block.h, wide, block.skip, block.cell.sqrt)
        # On a skip `new` is what was widened, and narrows to the bits that it came from: codes of
        # 8 bits too, see `int8_blocks.encode`.
        pairs = enumerate(zip(slots, new, strict=True), start=1)
        return direction, [block.narrow(k, slot, value) for k, (slot, value) in pairs]

    def _write_param(self, block: _BlockContext, param: Any, direction: Any) -> tuple[Any, list]:
        """The new parameter, or the old one; and ones where a finite one would not stay so."""
        h = block.h
        step = direction if h.step_size is None else h.step_size * direction
        old = widen_item(param)
        new = block.narrow(0, param, old + step)
        if block.skip is None:
            return new, []
        # In float32, since not every accelerator compares halves.
        # All parts of a form stay or go together: error bits belong to their half.
        fits = _is_finite(_half_of(new).astype(jnp.float32))
        kept = jax.tree.map(functools.partial(_where, fits & ~block.skip), new, param)
        if not self.counts:
            return kept, []
        return kept, [jnp.where(_is_finite(old) & ~fits, jnp.float32(1), jnp.float32(0))]


class _BlockContext(NamedTuple):
    """What a step knows of a block besides its numbers.

    Attributes:
      h: the coefficients, float32 scalars in the optimizer's NamedTuple.
      skip: bool scalar, or None.
      bits: for the parameter and each slot a function that draws uint32 of the block's shape, or
        None where nothing is drawn.
      ratio: LAMB's trust ratio, a float32 scalar, or None.
      cell: see `kernels.blocks.Cell`.
    """

    h: Any
    skip: Any
    bits: tuple[Any, ...]
    ratio: Any
    cell: Any

    def narrow(self, place: int, item: Any, value: jax.Array) -> Any:
        """Numbers in the form of the item at this place: 0 is the parameter, slots follow."""
        draw = self.bits[place]
        bits = None if draw is None else draw()
        if isinstance(item, Int8Blocks):
            return encode_blocks(value, self.cell.largest, signed=item.signed, bits=bits)
        return item.narrow(value, bits) if isinstance(item, ParamForm) else value.astype(item.dtype)


def _half_of(param: Any) -> jax.Array:
    """What a model sees of a parameter."""
    return param.half if isinstance(param, ParamForm) else param


def _where(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`jnp.where`; of narrow integers in 32 bits.

    The condition comes from float32 and has its layout on TPUs, one element in 32 bits. A select of
    int8 or int16 would need it in another.
    """
    if jnp.issubdtype(new.dtype, jnp.integer):
        wide = jnp.where(condition, new.astype(jnp.int32), old.astype(jnp.int32))
        return wide.astype(new.dtype)
    return jnp.where(condition, new, old)


def widen_item(item: Any) -> jax.Array:
    """The numbers of an item in float32."""
    if isinstance(item, Int8Blocks):
        return from_codes(item.codes, item.scales)
    return item.widen() if isinstance(item, ParamForm) else item.astype(jnp.float32)


def as_scalars(words: Sequence[jax.Array]) -> jax.Array:
    """uint32 numbers among float32 scalars: the upper and the lower 16 bits of each, exactly.

    float32 holds integers up to 2**24. To pass the bits of a word as a float would not do: some are
    NaN, which hardware may change.
    """
    halves = [half for word in words for half in (word >> 16, word & 0xFFFF)]
    return jnp.stack(halves).astype(jnp.float32)


def _next_word(scalars: Iterable[Any]) -> jax.Array:
    """The next word of `as_scalars`."""
    scalars = iter(scalars)
    high, low = (next(scalars).astype(jnp.int32).astype(jnp.uint32) for _ in range(2))
    return (high << 16) | low


def _is_finite(x: jax.Array) -> jax.Array:
    """`jnp.isfinite`, which not every kernel language has."""
    return jnp.abs(x) < jnp.inf
