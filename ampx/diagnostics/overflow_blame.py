"""Who is to blame for a value that is not finite: the equation where it, or its cause, was born.

Blames go forward with the values:

    a NaN          is blamed on an operand that is NaN, else on one that is infinite
    an infinity    is blamed on any operand that is not finite
    otherwise      no operand explains it, and the equation itself is to blame

    x = [300, 1]        finite
    y = x * x           [inf, 1]     blame: this mul. No operand explains the infinity.
    z = y - y           [nan, 0]     blame: the mul. Its infinity explains the NaN.
    w = z / [1, 0]      [nan, nan]   blame: the mul. 0/0 is new, but an array has one blame, and
                                     what came first is what to repair first.

An infinity may become finite again, where the exact result would have been another number. Nothing
is inherited then, but such a blame is kept: what goes wrong later may come from it.

    r = rsqrt([inf, 1]) [0, 1]       vanished: the mul above. The root of 9e4 is no infinity.

Infinities that are written into the program, as masks are, explain infinities but no NaN. They may
also be numbers that are too large for their dtype, which JAX turns into infinities (1e5 in
float16): then a product with one, or a sum, is blamed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.autocasting import float8
from ampx.diagnostics.overflow_notes import (
    describe_conversion,
    describe_end,
    describe_pole,
    describe_type,
    find_largest,
    is_inexact,
)
from ampx.diagnostics.overflow_reports import (
    ARGUMENT,
    OPAQUE,
    PROGRAM,
    TOO_LARGE,
    OverflowRecord,
)
from ampx.jaxprs import primitives, reading
from ampx.jaxprs.interpreter import Place, Value, Walk, compile_equation, is_opaque
from ampx.jaxprs.reading import Equation, Jaxpr

COMPILED_ONLY = (
    "only compiled: equation by equation all of it is finite, but the compiler joins operations "
    "and may reorder them"
)
_WRITTEN_NAN = "a NaN that is written into the program"
_IN_FLOAT8 = "a step of a matrix product in float8"
_OF_WRITTEN = "of infinities that are written into the program, as for a row masked as a whole"
# These apply a mask of infinities: they put them in the places of some numbers, or of none.
_MASKS = primitives.CHOOSING | primitives.ADDING | {"reduce_max", "reduce_min"}
_PRODUCTS = ("mul", "div")
# One over infinity is 0. (So is exp(-inf), which is right to the last bit, and so is tanh(inf).)
_VANISHING = ("div", "rsqrt", "integer_pow", "pow")


class Flags(NamedTuple):
    """What an array holds that is not finite.

    Attributes:
      nan: whether it holds a NaN.
      above: whether it holds a positive infinity.
      below: whether it holds a negative infinity.
    """

    nan: bool = False
    above: bool = False
    below: bool = False


@jax.jit
def _is_finite(array: Any) -> Any:
    return jnp.isfinite(array).all()


def find_flags(array: Any) -> Flags:
    """Finds what an array holds that is not finite: nothing, if it is not of floats."""
    if not is_inexact(array):
        return Flags()
    # On the CPU NumPy reads the array where it is, and needs no compilation for each shape.
    # Elsewhere one bool comes back, and the array only if it is false.
    if not _is_near(array) and bool(_is_finite(array)):
        return Flags()
    numbers = np.asarray(array)
    bad = numbers[~np.isfinite(numbers)]
    parts = np.concatenate([bad.real, bad.imag]) if np.iscomplexobj(bad) else bad
    parts = parts.astype(np.float32)
    return Flags(*map(bool, (np.isnan(parts).any(), (parts > 0).any(), (parts < 0).any())))


def _is_near(array: Any) -> bool:
    devices = array.sharding.device_set if isinstance(array, jax.Array) else ()
    return all(device.platform == "cpu" for device in devices)


class Blame(NamedTuple):
    """What made a value not finite. The higher rank comes first, then the earlier number.

    Attributes:
      rank: how sure it is that nobody meant it; see below.
      number: blames are numbered as they arise, in the order of the program.
      record: what there is to tell.
    """

    rank: int
    number: int
    record: OverflowRecord


# An infinity may be meant. The ranks:
#   WRITTEN   it is a constant of the program: a mask, or a number too large for its dtype
#   MASKING   the constant has been joined with other numbers, as only masks are
#   GIVEN     it came in an argument, perhaps as a mask
#   COMPUTED  an equation made it, or it is a NaN
WRITTEN, MASKING, GIVEN, COMPUTED = range(4)


def choose_blame(blames: Iterable[Blame | None]) -> Blame | None:
    """Chooses the blame to report among several; None if there is none."""
    found = [blame for blame in blames if blame is not None]
    return min(found, key=lambda blame: (-blame.rank, blame.number), default=None)


class BlamingWalk(Walk):
    """A walk whose remarks are blames; what is finite has none.

    Equation by equation a loop is slow: a scan of 1,000 steps of 100 equations is 100,000 small
    programs. So a loop is first run whole, and if its results are bad, iteration by iteration, both
    compiled. Only the iterations in which something turns bad are run equation by equation.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # By the id of a jaxpr: the jaxpr itself, and the function that runs it compiled.
        self._bodies: dict[int, tuple[Any, Any]] = {}
        # By the id of a loop's equation: what the last iteration began and ended with, as far as it
        # is not finite, and the blames of its results. See `run_iteration`.
        self._situations: dict[int, tuple[Any, list[Blame | None]]] = {}
        # By the id of a reference: what it holds. It is written to in place, so there is no new
        # value with which a blame could go.
        self._held: dict[int, Value] = {}
        self._vanished: list[Blame] = []

    def find_vanished(self, blame: Blame) -> Blame | None:
        """The first infinity before a blame that an equation made, and another one made finite."""
        return min((v for v in self._vanished if v.number < blame.number), default=None)

    def take_argument(self, array: Any, name: str) -> Value:
        """Takes an array as the argument of the program that has this name."""
        flags = find_flags(array)
        if not any(flags):
            return Value(array)
        kind = "nan" if flags.nan else "inf"
        rank = COMPUTED if flags.nan else GIVEN
        note = f"argument {name} holds {kind}"
        return Value(array, self.blame_here(Place(), [], array, note, rank, ARGUMENT))

    def blame_here(
        self,
        here: Place,
        operands: Sequence[Value],
        array: Any,
        note: str = "",
        rank: int = COMPUTED,
        outside: str = PROGRAM,
    ) -> Blame:
        """Makes a new blame for a result of what stands at a place, or is outside of equations.

        Args:
          here: the place; one without a path is outside of equations.
          operands: what the result was made of.
          array: the result.
          note: what else there is to say.
          rank: how sure it is that nobody meant it.
          outside: what to call it that is outside of equations.
        """
        record = OverflowRecord(
            primitive=here.path[-1][0].primitive.name if here.path else outside,
            kind="nan" if find_flags(array).nan else "inf",
            direction="backward" if here.is_derivative else "forward",
            scope=here.scope,
            source=here.source,
            iterations=here.iterations,
            input_types=tuple(describe_type(value.array) for value in operands),
            output_type=describe_type(array),
            largest_inputs=tuple(find_largest(value.array) for value in operands),
            largest_output=find_largest(array),
            note=note,
        )
        return Blame(rank, next(self._numbers), record)

    def remark_constant(self, array: Any, here: Place) -> Blame | None:
        """The blame for what is written into the program: a NaN is never meant."""
        flags = find_flags(array)
        if flags.nan:
            return self.blame_here(here, [], array, _WRITTEN_NAN)
        # An array with some infinities is a mask already; a single number becomes one.
        rank = MASKING if any(flags) and _where_finite(array).any() else WRITTEN
        return self.blame_here(here, [], array, rank=rank) if any(flags) else None

    def remark_joined(self, values: Sequence[Value]) -> Blame | None:
        """The blame to report among those of several values; a finite one has none any more."""
        return choose_blame(value.remark for value in values if any(find_flags(value.array)))

    def remark_results(
        self, eqn: Equation, operands: Sequence[Value], arrays: Sequence[Any], here: Place
    ) -> list[Blame | None]:
        """The blames of the results of an equation: inherited, or its own."""
        # An equation that writes to a reference has it for an operand, and so has one that reads
        # it: between them the blame of what the reference holds is kept under its id.
        references = [value.array for value in operands if isinstance(value.array, jax.Ref)]
        operands = [self._held.get(id(value.array), value) for value in operands]
        blames = [self._find_blame(eqn, operands, array, here) for array in arrays]
        for reference in references:
            held = self._find_blame(eqn, operands, reference[...], here)
            self._held[id(reference)] = Value(reference, held)
        return blames

    def _find_blame(
        self, eqn: Equation, operands: Sequence[Value], array: Any, here: Place
    ) -> Blame | None:
        """Finds the blame of one result of an equation; None if it is finite."""
        flags = find_flags(array)
        if not any(flags):
            if eqn.primitive.name in _VANISHING:
                remarks = (value.remark for value in operands)
                self._vanished += [r for r in remarks if r and r.rank == COMPUTED]
            return None
        explaining, is_explained = _find_explanations(eqn, operands, array)
        inherited = _inherit(explaining, flags)
        if is_explained and _is_too_large(eqn, explaining, flags):
            dtype = next(v.array.dtype for v in explaining if is_inexact(v.array))
            return self.blame_here(here, operands, array, f"{TOO_LARGE} {describe_end(dtype)}")
        # An operand that an equation made bad is blamed even if it does not explain all that is bad
        # here: it came first. A mask has to explain all of it, or else something new is wrong.
        if inherited is not None and (is_explained or inherited.rank == COMPUTED):
            return _as_mask(inherited, eqn, array)
        if flags.nan and is_explained:
            note = _OF_WRITTEN
        else:
            note = OPAQUE if is_opaque(eqn) else describe_conversion(eqn, operands, array)
            note = note or describe_pole(eqn, operands, array)
            note = note or (_IN_FLOAT8 if here.is_inside(float8.SCOPE) else "")
        return self.blame_here(here, operands, array, note)

    def run_loop(self, eqn: Equation, operands: Sequence[Value], here: Place) -> Sequence[Value]:
        """Runs a loop compiled; it is entered if its results are bad."""
        arrays = self.run_whole(eqn, operands, here)
        # A second run would begin with what the first has written to the references.
        if any(isinstance(value.array, jax.Ref) for value in operands):
            return list(map(Value, arrays, self.remark_results(eqn, operands, arrays, here)))

        def look_inside() -> list[Blame | None]:
            carry, rows = self.run_iterations(eqn, operands, here)
            columns = zip(*rows, strict=True)
            stacked = [choose_blame(value.remark for value in column) for column in columns]
            return [*(value.remark for value in carry), *stacked]

        return self._with_blames(arrays, operands, here, look_inside)

    def run_iteration(
        self,
        eqn: Equation,
        body: Jaxpr,
        operands: Sequence[Value],
        here: Place,
    ) -> Sequence[Value]:
        """Runs one iteration compiled; it is entered if something turns bad in it."""
        # If an array is to blame as a whole, an iteration may get a part of it that is finite.
        given = [find_flags(value.array) if value.remark else Flags() for value in operands]
        operands = [
            value if any(flags) else Value(value.array)
            for value, flags in zip(operands, given, strict=True)
        ]
        arrays = self._compiled(body)(*(value.array for value in operands))
        # Once a carry is bad, it is often bad in the same way in all later iterations. What an
        # iteration makes of the same flags and blames need not be looked into again.
        now = given, [value.remark for value in operands], list(map(find_flags, arrays))
        before, remarks = self._situations.get(id(eqn), (None, []))
        carried = len(arrays) if eqn.primitive.name == "while" else reading.scan_sizes(eqn)[1]

        def look_inside() -> list[Blame | None]:
            # One blame that nobody meant explains all that is bad here.
            blames = {value.remark for value in operands if value.remark is not None}
            if len(blames) == 1 and min(blames).rank == COMPUTED:
                return [*blames] * len(arrays)
            # A carry that turned bad in the last iteration, but is not bad now, was dropped: rows
            # of a vmapped while loop that are done do not take what the body makes of them. What
            # turns bad now belongs to this iteration.
            is_kept = not any(blame and blame.rank == COMPUTED for blame in remarks[:carried])
            if now == before and is_kept:
                return remarks
            return [value.remark for value in self.run(body, operands, here)]

        values = self._with_blames(arrays, operands, here, look_inside)
        self._situations[id(eqn)] = now, [value.remark for value in values]
        return values

    def _compiled(self, body: Jaxpr) -> Any:
        if id(body) not in self._bodies:
            run = jax.jit(functools.partial(reading.evaluate, reading.as_closed(body)))
            self._bodies[id(body)] = body, run  # held, so that its id stays its own
        return self._bodies[id(body)][1]

    def _with_blames(
        self, arrays: Sequence[Any], operands: Sequence[Value], here: Place, look_inside: Any
    ) -> list[Value]:
        """Joins results of what was run compiled with blames, which are asked for only if need be.

        Where the equations one by one give no blame for a bad result, only the compiled program is
        bad: XLA has joined operations or changed their order.
        """
        bad = [any(find_flags(array)) for array in arrays]
        if not any(bad):
            return list(map(Value, arrays))
        values = []
        for array, is_bad, remark in zip(arrays, bad, look_inside(), strict=True):
            if is_bad and remark is None:
                remark = self.blame_here(here, operands, array, COMPILED_ONLY)
            values.append(Value(array, remark if is_bad else None))
        return values


class CompiledWalk(BlamingWalk):
    """Runs calls compiled, too: for what is finite when it is run equation by equation."""

    def run_equation(
        self,
        eqn: Equation,
        operands: Sequence[Value],
        here: Place,
        wanted: Sequence[bool],
    ) -> Sequence[Value]:
        """Runs one equation; a call is entered if its results are bad."""
        body = reading.called_body(eqn)
        if body is None or reading.mesh_sizes(eqn):
            return super().run_equation(eqn, operands, here, wanted)
        arrays = compile_equation(eqn, here.path[-1][1])(*(value.array for value in operands))
        return self._with_blames(
            arrays,
            operands,
            here,
            lambda: [value.remark for value in self.run(body, operands, here)],
        )


def _inherit(explaining: Sequence[Value], flags: Flags) -> Blame | None:
    """Chooses among the blames of the operands that explain a result; None if none can."""
    if not flags.nan:
        return choose_blame(value.remark for value in explaining)
    broken = choose_blame(value.remark for value in explaining if find_flags(value.array).nan)
    # inf - inf: infinities explain a NaN, except those of masks, two of which should never meet.
    return broken or choose_blame(v.remark for v in explaining if v.remark.rank > MASKING)


def _is_too_large(eqn: Equation, explaining: Sequence[Value], flags: Flags) -> bool:
    """Whether a constant that explains a result is rather a number too large than a mask."""
    if any(value.remark.rank > MASKING for value in explaining):
        return False
    # Masks are negative infinities: they are added to scores and stay below. A positive infinity,
    # or an infinite factor, is a number such as 1e5 that float16 cannot hold.
    name, has_constant = eqn.primitive.name, any(v.remark.rank == WRITTEN for v in explaining)
    if name in primitives.ADDING:
        return has_constant and flags.above and not flags.nan
    if name in _PRODUCTS:
        return has_constant or flags.above  # scores are masked, then scaled: that stays below
    return name == "pow" or name in primitives.CONTRACTIONS


def _as_mask(blame: Blame, eqn: Equation, array: Any) -> Blame:
    """Passes a blame on: a constant becomes a mask where it is joined with other numbers."""
    is_mask = eqn.primitive.name in _MASKS or _where_finite(array).any()
    return blame._replace(rank=MASKING) if blame.rank == WRITTEN and is_mask else blame


def _find_explanations(
    eqn: Equation, operands: Sequence[Value], array: Any
) -> tuple[list[Value], bool]:
    """Finds the operands that what is not finite may come from, and whether all of it may.

    Elementwise, a number can only come from those in the same place of the operands; and of
    `select_n` only from the operand that was chosen there. In other equations it may come from any.
    """
    # What is finite has no remark, so no suspect.
    suspects = [value for value in operands if value.remark is not None]
    if not suspects or eqn.primitive.name not in primitives.ELEMENTWISE:
        return suspects, bool(suspects)
    bad = ~_where_finite(array)
    unexplained, explaining = bad.copy(), []
    for number, value in enumerate(operands):
        if value.remark is None:
            continue
        meets = bad & ~_where_finite(value.array)
        if eqn.primitive.name == "select_n":
            # select_n(which, case 0, case 1, ...): operand k + 1 is case k.
            meets = meets & (np.asarray(operands[0].array).astype(np.int32) == number - 1)
        if meets.any():
            explaining.append(value)
            unexplained &= ~meets
    return explaining, not unexplained.any()


def _where_finite(array: Any) -> np.ndarray:
    """Which numbers of an array are finite, as bools of its shape."""
    return np.isfinite(np.asarray(array))
