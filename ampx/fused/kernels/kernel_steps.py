"""What kernels do to a block of a parameter: an optimizer's rule, in the form that they map."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ampx.fused.coefficients import unpack_coefficients
from ampx.fused.leaf_updates import Leaf, held, is_finite, wide_step
from ampx.fused.moments.int8_blocks import Int8Blocks, encode_blocks, from_codes
from ampx.fused.update_rules import Operations, UpdateRule
from ampx.param_storage.narrow_params import ParamForm
from ampx.param_storage.rounding import element_bits

Parts = tuple[list, list]


class KernelStep(NamedTuple):
    """The rules that kernels map, see `kernels.blocks.BlockFunction`.

    Their scalars are, in this order: the coefficients, whether to skip, what random bits depend on
    (`as_scalars` of two words for each item that draws, then row and column of the first element),
    and a trust ratio.

    Attributes:
      rule: the optimizer.
      numbers: coefficients, of which only matters which are None.
      has_skip: whether a scalar says to keep everything.
      counts: whether to count the parameters that overflow.
      draws: of the parameter and of each slot, whether random bits round it.
    """

    rule: UpdateRule
    numbers: Any
    has_skip: bool
    counts: bool
    draws: tuple[bool, ...]

    def whole(self, scalars: Any, read: Any, written: Any, cell: Any) -> Parts:
        """Reads the gradient, writes parameter and slots."""
        block = self._block(scalars, cell)
        param, *slots = written
        direction, new_slots = self._stepped(block, read[0], param, slots)
        new, overflows = self._landed(block, param, direction)
        return [new, *new_slots], overflows

    def slots(self, scalars: Any, read: Any, written: Any, cell: Any) -> Parts:
        """Reads gradient and parameter, writes the slots; sums the squares of both norms."""
        block = self._block(scalars, cell)
        grad, param = read
        direction, new_slots = self._stepped(block, grad, param, written)
        wide = widen_item(param)
        return new_slots, [wide * wide, direction * direction]

    def param(self, scalars: Any, read: Any, written: Any, cell: Any) -> Parts:
        """Reads the new slots, writes the parameter; the last scalar is the trust ratio."""
        block = self._block(scalars, cell)
        again: Any = self.rule.direction_again
        operations = Operations(cell.sqrt, functools.partial(held, block.skip))
        wide, slots = widen_item(written[0]), tuple(map(widen_item, read))
        direction = again(wide, slots, block.h, operations)
        new, overflows = self._landed(block, written[0], direction * block.ratio)
        return [new], overflows

    def _block(self, scalars: tuple[Any, ...], cell: Any) -> _Block:
        given = sum(number is not None for number in self.numbers)
        numbers, rest = scalars[:given], iter(scalars[given:])
        skip = next(rest) > 0 if self.has_skip else None
        words = [(_word(rest), _word(rest)) if drawn else None for drawn in self.draws]
        start = (_word(rest), _word(rest)) if any(self.draws) else None

        @functools.cache
        def place() -> tuple[jax.Array, jax.Array]:
            (row, column), (first_row, first_column) = cell.index(), start or (0, 0)
            return row + first_row, column + first_column

        def bits_of(own: Any) -> jax.Array:
            row, column = place()
            return element_bits(row, column, own)

        bits = tuple(None if own is None else functools.partial(bits_of, own) for own in words)
        return _Block(
            unpack_coefficients(self.numbers, numbers), skip, bits, next(rest, None), cell
        )

    def _stepped(
        self, block: _Block, grad: Any, param: Any, slots: Sequence[Any]
    ) -> tuple[jax.Array, list[Any]]:
        wide = Leaf(widen_item(grad), widen_item(param), tuple(map(widen_item, slots)))
        direction, new = wide_step(self.rule, block.h, wide, block.skip, block.cell.sqrt)
        pairs = enumerate(zip(slots, new, strict=True), start=1)
        return direction, [block.narrow(k, slot, value) for k, (slot, value) in pairs]

    def _landed(self, block: _Block, param: Any, direction: Any) -> tuple[Any, list]:
        """The new parameter, or the old one; and ones where a finite one would not stay so."""
        h, skip = block.h, block.skip
        step = direction if h.step_size is None else h.step_size * direction
        old = widen_item(param)
        new = block.narrow(0, param, old + step)
        if skip is None:
            return new, []
        # In float32, since not every accelerator compares halves.
        fits = is_finite(_half_of(new).astype(jnp.float32))
        kept = jax.tree.map(functools.partial(_where, fits & ~skip), new, param)
        if not self.counts:
            return kept, []
        return kept, [jnp.where(is_finite(old) & ~fits, jnp.float32(1), jnp.float32(0))]


class _Block(NamedTuple):
    """What a step knows of a block besides its numbers."""

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
    """`jnp.where`; of narrow integers in 32 bits, in which the condition is."""
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
    """uint32 numbers as float32 ones, which hold half a word each exactly."""
    halves = [half for word in words for half in (word >> 16, word & 0xFFFF)]
    return jnp.stack(halves).astype(jnp.float32)


def _word(scalars: Iterable[Any]) -> jax.Array:
    """The next word of `as_scalars`."""
    scalars = iter(scalars)
    high, low = (next(scalars).astype(jnp.int32).astype(jnp.uint32) for _ in range(2))
    return (high << 16) | low
