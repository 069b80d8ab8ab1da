"""Checks of a step over devices: what is equal on all of them, and what has been summed already.

Inside of a `shard_map` each value is followed by the axes over which it differs from device to
device. What was divided over an axis differs over it, a sum over the axis does not any more:

    x (data) -> loss (data) -> gradients (data) -> psum () -> update ()

Three faults can be read from that. A result that differs, and of which `out_specs` says that it is
equal on all devices: with `check_vma=True` JAX refuses it, otherwise the first device's is taken.
And a sum of gradients that are equal on all devices since they were summed before: it multiplies
them by the number of devices; a mean of them leaves them as they are, a sum. And a loss, or the
weight beside it, that was summed before `ampx.value_and_grad` sums it.

What went from device to device (`ppermute`) may have been everywhere: over its axis nothing is
known of what depends on it. Nor is it of total - x, which x is added to where the derivative of a
total is written by hand, nor of arrays that hold parts which differ beside others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ampx.checking import join_first
from ampx.diagnostics import bit_sets
from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.step_programs import StepProgram, source_of, source_of_result
from ampx.jaxprs import folds, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr

Axes = frozenset[Any]
_NONE: Axes = frozenset()
# What has the sum of gradients as a factor: these keep it, and a sum keeps it that has it in all
# of its terms. A norm is no gradient any more, and parameters plus an update are none.
_LINEAR = (
    primitives.REARRANGING
    | primitives.ADDING
    | frozenset(("mul", "div", "neg", "convert_element_type", "concatenate", "select_n"))
    | frozenset(("reduce_precision", "reduce_sum", "integer_pow"))
)
_SAME_FACTOR = primitives.REARRANGING | frozenset(("mul", "div", "convert_element_type"))
_SIDE_BY_SIDE = frozenset(("concatenate", "stack", "dynamic_update_slice", "scatter"))
# What `ampx.value_and_grad` sums over the devices, by its scope.
_TOTALS = {"ampx.loss_total": "loss", "ampx.weight_total": "weight"}
_GATHERS = frozenset(("all_gather", "all_gather_invariant", "all_gather_reduced", "pbroadcast"))


class Spread(NamedTuple):
    """How a value is spread over the devices.

    Attributes:
      varies: the axes over which it certainly differs.
      unknown: those over which it may be equal, for what nobody can tell.
      by_jax: those over which it is a sum of gradients that JAX took, as the transpose of a copy.
      by_hand: those over which it is a sum of gradients that the program takes.
      summed: those over which it, or what it is made of, was summed.
      is_gradient: whether it comes from a backward pass.
      is_total: whether it is a sum over devices, but for a factor.
      is_constant: whether it is made of what is written in the program alone.
      marks: what it is made of: bit i is `Devices.suspects[i]`.
      number: what it is, if it is a number.
    """

    varies: Axes = _NONE
    unknown: Axes = _NONE
    by_jax: Axes = _NONE
    by_hand: Axes = _NONE
    summed: Axes = _NONE
    is_gradient: bool = False
    is_total: bool = False
    is_constant: bool = False
    marks: int = 0
    number: float | None = None


class Suspect(NamedTuple):
    """An equation that is a fault if its results become results of the step.

    Attributes:
      kind: `"sum"`, `"mean"`, `"loss"` or `"weight"`, or `"result"` of a shard_map.
      axes: those that it is about.
      devices: how many they are.
      eqns: the equation and those around it, innermost first.
      number: of a result, which one.
    """

    kind: str
    axes: tuple[Any, ...]
    devices: int
    eqns: tuple[Equation, ...]
    number: int = 0


def find_device_faults(program: StepProgram) -> Iterator[LintFinding]:
    """Finds results that differ and count as equal, and sums of what was summed before."""
    names = {eqn.primitive.name for eqn, _ in folds.equations_inside(program.jaxpr)}
    if "shard_map" not in names:
        return
    devices = Devices()
    operands = [Spread()] * len(program.inputs)
    outputs = devices.follow(program.jaxpr, operands, {}, ())
    reached = [set(bit_sets.members_of(each.marks)) for each in outputs]
    carried = set().union(*(reached[number] for number in program.carried))
    # A loss and a weight that are both sums have a right quotient.
    totals = {(each.axes, each.kind) for each in devices.suspects}
    both = {axes for axes, kind in totals if kind == "loss" and (axes, "weight") in totals}
    differing: dict[tuple[Any, ...], list[int]] = {}
    for place, (kind, axes, count, eqns, _) in enumerate(devices.suspects):
        over = join_first(map(repr, axes))
        if kind == "result" and any(place in own for own in reached):
            differing.setdefault((axes, *map(id, eqns)), []).append(place)
        if kind == "sum" and place in carried:
            yield LintFinding(
                "reduction",
                f"gradients are summed over {over} twice, and so are {count} times too large: they "
                "were equal on all devices before this sum",
                source_of(eqns, program.jaxpr),
                "leave out one of the sums. With check_vma=True JAX itself sums the gradients of "
                "parameters that are equal on all devices",
            )
        is_total = kind in ("loss", "weight") and axes not in both
        if is_total and any(place in own for own in reached):
            size = "large" if kind == "loss" else "small"
            yield LintFinding(
                "reduction",
                f"the {kind} that the loss function returns is a sum over {over} already, and is "
                f"summed once more: gradients are {count} times too {size}",
                source_of(eqns, program.jaxpr),
                f"return the {kind} of this device's own rows: value_and_grad(axis_name=...) sums "
                "it over the devices",
            )
        if kind == "mean" and place in carried and devices.forward.isdisjoint(axes):
            yield LintFinding(
                "reduction",
                f"this mean over {over} changes nothing: JAX has summed the gradients already, so "
                f"they stay a sum, {count} times as large as a mean",
                source_of(eqns, program.jaxpr),
                "take the mean of the loss inside of what is differentiated, jax.lax.pmean(loss, "
                '...); or differentiate by jax.lax.pcast(params, ..., to="varying")',
            )

    for places in differing.values():
        _, axes, _, eqns, number = devices.suspects[places[0]]
        pairs = zip(program.outputs, reached, strict=True)
        names = join_first(leaf.name for leaf, own in pairs if not own.isdisjoint(places))
        yield LintFinding(
            "out_specs",
            f"each device has other numbers of what counts as equal over "
            f"{join_first(map(repr, axes))}, and JAX takes those of the first: {names}",
            source_of_result(reading.bodies_of(eqns[0])[0], number, eqns, program.jaxpr),
            "reduce it over the axis before shard_map ends, as by jax.lax.pmean; or name the axis "
            "in out_specs. With check_vma=True, JAX refuses such results",
        )


class Devices:
    """How the values of a program are spread over devices.

    Attributes:
      suspects: in the order in which they were found.
      forward: the axes over which the forward pass of what is differentiated is reduced.
    """

    def __init__(self) -> None:
        self.suspects: list[Suspect] = []
        self.forward: Axes = _NONE
        # A loop's body is followed until its carry settles: an equation is suspected once.
        self._known: dict[tuple[Any, ...], int] = {}

    def follow(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Spread],
        sizes: dict[Any, int],
        around: tuple[Equation, ...],
    ) -> list[Spread]:
        """The spreads of a jaxpr's results, where the axes of `sizes` are mapped."""
        apply = functools.partial(self._apply, sizes=sizes)
        constant = Spread(is_constant=True)
        return folds.fold_inside(
            jaxpr, operands, apply, lambda _: constant, _of_literal, around=around
        )

    def _apply(
        self, eqns: tuple[Equation, ...], inputs: list[Spread], sizes: dict[Any, int]
    ) -> Sequence[Spread]:
        eqn = eqns[0]
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name == "shard_map":
            return self._enter_shard_map(eqns, inputs, sizes)
        # Axes and marks are only added, and sums of gradients only lost, so a loop settles.
        results = folds.follow_bodies(
            eqn, inputs, lambda body, operands: self.follow(body, operands, sizes, eqns), _unite
        )
        if results is not None:
            return results
        if name in primitives.SAME_NUMBERS and len(inputs) == count:
            return inputs
        axes = frozenset(axis for axis in _named_axes(eqn) if sizes.get(axis, 1) > 1)
        if name in primitives.ALL_REDUCTIONS and not eqn.params.get("axis_index_groups"):
            return [
                self._ask_total(eqns, value, self._reduce(eqns, value, axes, sizes), axes, sizes)
                for value in inputs
            ]
        made = self._compute(eqns, inputs, sizes)
        if name in _GATHERS:
            made = made._replace(varies=made.varies - axes, unknown=made.unknown - axes)
            self._note_forward(axes, eqns)
        elif name in ("axis_index", *primitives.SCATTERING_COLLECTIVES - primitives.TRANSFERS):
            made = made._replace(varies=made.varies | axes)
        else:
            made = made._replace(unknown=made.unknown | axes)
        if reading.has_bodies(eqn):  # a kernel may send to other devices
            made = made._replace(unknown=made.unknown | frozenset(sizes))
        return [made] * count

    def _enter_shard_map(
        self, eqns: tuple[Equation, ...], inputs: list[Spread], sizes: dict[Any, int]
    ) -> list[Spread]:
        (body,) = reading.bodies_of(eqns[0])
        own = reading.mesh_sizes(eqns[0])
        of_inputs, of_outputs, is_checked = reading.specs_of(eqns[0])
        given = [
            value._replace(varies=value.varies | frozenset(a for a in axes if own[a] > 1))
            for value, axes in zip(inputs, of_inputs, strict=True)
        ]
        results = self.follow(body, given, sizes | own, eqns)
        outputs = []
        for number, (value, axes) in enumerate(zip(results, of_outputs, strict=True)):
            marks, wrong = value.marks, value.varies - value.unknown - axes - sizes.keys()
            if wrong and not is_checked:
                marks |= self._suspect("result", wrong, 0, eqns, number)
            kept = [part & sizes.keys() for part in (value.varies, value.unknown)]
            outputs.append(Spread(kept[0], kept[1], marks=marks))
        return outputs

    def _reduce(
        self, eqns: tuple[Equation, ...], value: Spread, axes: Axes, sizes: dict[Any, int]
    ) -> Spread:
        """What a sum or a maximum over devices makes of a value."""
        made = value._replace(
            varies=value.varies - axes, unknown=value.unknown - axes, is_total=bool(axes)
        )
        self._note_forward(axes, eqns)
        is_backward = source_info.is_backward(eqns)
        if eqns[0].primitive.name not in primitives.PSUMS or not axes:
            return made
        is_equal = axes.isdisjoint(value.varies | value.unknown)
        if is_equal and not is_backward and axes <= value.by_jax | value.by_hand:
            count = math.prod(sizes[axis] for axis in axes)
            return made._replace(marks=made.marks | self._suspect("sum", axes, count, eqns))
        summed = axes & value.varies - value.unknown
        made = made._replace(summed=made.summed | summed)
        if is_backward:
            return made._replace(by_jax=made.by_jax | summed)
        return made._replace(by_hand=made.by_hand | (summed if made.is_gradient else _NONE))

    def _ask_total(
        self,
        eqns: tuple[Equation, ...],
        value: Spread,
        made: Spread,
        axes: Axes,
        sizes: dict[Any, int],
    ) -> Spread:
        """Suspects a loss, or the weight beside it, that is summed for all devices once more."""
        again = axes & value.summed - value.varies - value.unknown
        kind = _TOTALS.get(str(eqns[0].source_info.name_stack).split("/")[-1])
        if kind is None or not again:
            return made
        count = math.prod(sizes[axis] for axis in again)
        return made._replace(marks=made.marks | self._suspect(kind, again, count, eqns))

    def _compute(
        self, eqns: tuple[Equation, ...], inputs: list[Spread], sizes: dict[Any, int]
    ) -> Spread:
        """What an equation on one device makes of values."""
        eqn = eqns[0]
        name, made = eqn.primitive.name, _unite(inputs)
        made = made._replace(is_gradient=made.is_gradient or source_info.is_backward(eqns))
        if name == "sub" and inputs[0].is_total:
            made = made._replace(unknown=made.unknown | inputs[1].varies - inputs[0].varies)
        if name in _SIDE_BY_SIDE:  # a part that is taken out again may be one that is equal
            avals: list[Any] = [atom.aval for atom in eqn.invars]
            pairs = zip(inputs, avals, strict=True)
            parts = [value for value, aval in pairs if aval.shape and not value.is_constant]
            everywhere = _common(parts, "varies")
            made = made._replace(unknown=made.unknown | made.varies - everywhere)
        if name in _SAME_FACTOR:
            made = made._replace(is_total=inputs[0].is_total)
        if name not in _LINEAR or name == "integer_pow" and eqn.params["y"] != 1:
            return made._replace(by_jax=_NONE, by_hand=_NONE)
        if name == "select_n":
            chosen = _unite(inputs[1:])
            return made._replace(by_jax=chosen.by_jax, by_hand=chosen.by_hand)
        if name not in ("mul", "div"):
            return made
        factors = inputs if name == "mul" else inputs[:1]
        by_jax, by_hand = _union(factors, "by_jax"), _union(factors, "by_hand")
        made = made._replace(by_jax=by_jax, by_hand=by_hand)
        number = next((value.number for value in inputs if value.number), None)
        if number is None:
            return made
        return self._divide(made, 1 / number if name == "mul" else number, sizes)

    def _divide(self, made: Spread, divisor: float, sizes: dict[Any, int]) -> Spread:
        """A sum that is divided by the number of devices is a mean."""
        for place in bit_sets.members_of(made.marks):
            kind, axes, count, eqns, _ = self.suspects[place]
            if kind == "sum" and math.isclose(count, divisor, rel_tol=1e-6):
                marks = made.marks & ~(1 << place)
                if made.by_jax.issuperset(axes):
                    marks |= self._suspect("mean", frozenset(axes), count, eqns)
                return made._replace(marks=marks)
        if any(math.isclose(n, divisor, rel_tol=1e-6) for n in _products(made.summed, sizes)):
            made = made._replace(summed=_NONE)
        summed = made.by_jax | made.by_hand
        if summed and math.isclose(math.prod(sizes[a] for a in summed), divisor, rel_tol=1e-6):
            return made._replace(by_jax=_NONE, by_hand=_NONE)
        return made

    def _suspect(
        self, kind: str, axes: Axes, count: int, eqns: tuple[Equation, ...], number: int = 0
    ) -> int:
        key = (kind, number, *map(id, eqns))
        if key not in self._known:
            self._known[key] = len(self.suspects)
            self.suspects.append(Suspect(kind, tuple(sorted(axes)), count, eqns, number))
        return 1 << self._known[key]

    def _note_forward(self, axes: Axes, eqns: tuple[Equation, ...]) -> None:
        if source_info.is_differentiated(eqns) and not source_info.is_backward(eqns):
            self.forward |= axes


def _named_axes(eqn: Equation) -> tuple[Any, ...]:
    """The mapped axes that an equation names, of a collective or `axis_index`."""
    if eqn.primitive.name == "axis_index":
        axis = eqn.params["axis_name"]
        return tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    return reading.collective_axes(eqn)


def _of_literal(value: Any) -> Spread:
    return Spread(is_constant=True, number=reading.number_of_constant(value))


def _unite(values: Sequence[Spread], read: Sequence[Spread] = ()) -> Spread:
    """What is made of values that are added or chosen among, and depends on others."""
    both = (*values, *read)
    # Zeros, say, which an update is replaced by, are no other term.
    terms = [value for value in values if not value.is_constant] or values
    return Spread(
        varies=_union(both, "varies"),
        unknown=_union(both, "unknown"),
        by_jax=_common(terms, "by_jax"),
        by_hand=_common(terms, "by_hand"),
        summed=_union(both, "summed"),
        is_gradient=any(value.is_gradient for value in values),
        is_constant=all(value.is_constant for value in both),
        marks=bit_sets.unite(value.marks for value in both),
    )


def _union(values: Sequence[Spread], field: str) -> Axes:
    return _NONE.union(*(getattr(value, field) for value in values))


def _common(values: Sequence[Spread], field: str) -> Axes:
    first, *others = (getattr(value, field) for value in values or (Spread(),))
    return first.intersection(*others)


def _products(axes: Axes, sizes: dict[Any, int]) -> Iterator[int]:
    """How many devices there are along some of the axes together, for each choice of them."""
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            yield math.prod(sizes[axis] for axis in some)
