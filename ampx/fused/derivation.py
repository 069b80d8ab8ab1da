"""Derives the rules of an optax transformation from its own program.

`tx.update` is traced for all parameters at once. What it computes is of two kinds:

    numbers    counts, bias corrections, a schedule's rate, norms        run once, by XLA
    the rest   element by element of one parameter, its gradient and what the state has for it

The second kind is a rule for each parameter, with the numbers that it reads as its coefficients.
Parameters whose equations are the same share one rule, whatever their shapes:

    g, p, mu, nu ──► mu' ──┐
               └──►  nu' ──┴──► u         a `LeafProgram`, the `direction` of an `UpdateRule`
    count ──► count + 1 ──► 1 - b1**t     a number

An array that is neither, such as random bits or a product of matrices, cannot be made block by
block in a kernel. Where a rule would have to read one, the transformation is refused, with the
operation and its line. To which parameter an array of the state belongs is known by its place and
not by its shape: `optax.tree.map_params` tells which are of parameters, and the path of which one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import join_first
from ampx.fused.update_rules import KERNEL_PRIMITIVES, Operations, Slots, UpdateRule
from ampx.jaxprs import building, primitives, reading, source_info
from ampx.jaxprs.late_choices import choose_late
from ampx.jaxprs.reading import Atom, Equation, Jaxpr
from ampx.jaxprs.spread_numbers import spread_late
from ampx.mesh_axes import match_type
from ampx.trees import is_floating

# A rule leaves them out. What they say of mapped axes, the arrays that it is called with say.
_SAME = (primitives.IDENTITIES | primitives.AXIS_TYPE_CASTS) - {"stop_gradient"}
_NARROWING = "convert_element_type"
_MAY_BE_SLOT, _NO_SLOT = object(), object()


class NotDerivable(Exception):
    """Why no rules can be derived from a transformation."""


class Constant(NamedTuple):
    """A number that is written into a program. Its bits are compared: 0.0 is not -0.0."""

    bits: bytes
    dtype: str

    @property
    def value(self) -> np.generic:
        """The number."""
        return np.frombuffer(self.bits, jnp.dtype(self.dtype))[0]


# The place of a value among [gradient, parameter, *slots, *numbers, *results of the steps].
Operand = int | Constant


@dataclasses.dataclass(frozen=True)
class LeafProgram:
    """The equations of one parameter; see `update_rules.Direction`, which a call is.

    Two programs are equal if they do the same, so what is compiled for one serves the other.

    Attributes:
      steps: of each equation the name of the primitive, its settings, and its operands.
      update: the place of the update.
      slots: the places of the new slots.
      held: for each slot the place of the value at which the old slot takes its place on a skip. It
        is the new slot before it is narrowed, and later equations read what was chosen, as a rule
        written by hand does (see `Operations.keep`). None: it is chosen when all is computed.
      dtypes: of the numbers.
      eqns: the equations.
    """

    steps: tuple[tuple[str, str, tuple[Operand, ...]], ...]
    update: Operand
    slots: tuple[Operand, ...]
    held: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    eqns: tuple[Equation, ...] = dataclasses.field(compare=False)

    @property
    def primitives(self) -> frozenset[str]:
        """The names of the primitives that a call runs, with dtypes if no kernel has these."""
        return frozenset(map(_name_for_kernels, self.eqns)).difference(_IN_OTHER_WORDS)

    def __call__(
        self, g: jax.Array, p: Any, slots: Slots, h: Any, operations: Operations
    ) -> tuple[jax.Array, Slots]:
        """The update, and the new slots."""
        pairs = zip(h, self.dtypes, strict=False)  # behind them `h` has what all rules share
        values: list[Any] = [g, p, *slots, *(_from_float(number, dtype) for number, dtype in pairs)]
        old = {at: slot for at, slot in zip(self.held, slots, strict=True) if at is not None}

        def read(operand: Operand) -> Any:
            return values[operand] if isinstance(operand, int) else operand.value

        def hold(place: int) -> None:
            if place in old:
                value = values[place]
                values[place] = operations.keep(value, old[place].astype(value.dtype))

        for place in range(len(values)):
            hold(place)
        for eqn, (name, _, operands) in zip(self.eqns, self.steps, strict=True):
            arrays = [_spread(read(operand), g) for operand in operands]
            if name in _IN_OTHER_WORDS:
                values.append(_IN_OTHER_WORDS[name](operations, *arrays, **eqn.params))
            else:
                values += reading.bind(eqn, arrays)
            hold(len(values) - 1)
        update, *new = (_spread(read(at), g).astype(g.dtype) for at in (self.update, *self.slots))
        triples = zip(new, slots, self.held, strict=True)
        kept = (operations.keep(n, o) if at is None else n for n, o, at in triples)
        return update, tuple(kept)


def _name_for_kernels(eqn: Equation) -> str:
    """The name of a primitive, and its dtypes where kernels have it for others alone."""
    name = eqn.primitive.name
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    dtypes = {aval.dtype.name for aval in avals}
    of_bools = primitives.COMPARING | {"select_n", "and", "or", "not", "is_finite", _NARROWING}
    known = {"float32", "bfloat16", "float16", "int32", *(["bool"] if name in of_bools else [])}
    return name if dtypes <= known else f"{name} of {', '.join(sorted(dtypes))}"


def _multiply_out(x: jax.Array, power: int) -> jax.Array:
    """x**power by products, in the order in which XLA multiplies."""
    result, square, left = None, x, abs(power)
    while left:
        if left & 1:
            result = square if result is None else result * square
        left >>= 1
        square = square * square if left else square
    result = jnp.ones_like(x) if result is None else result
    return result if power >= 0 else 1 / result


# Primitives that not every kernel language has, as functions of (operations, operand, **settings).
_IN_OTHER_WORDS: dict[str, Callable[..., jax.Array]] = {
    "sqrt": lambda operations, x, **_: operations.sqrt(x),
    "integer_pow": lambda operations, x, *, y: _multiply_out(x, y),
    "is_finite": lambda operations, x: jnp.abs(x) < jnp.inf,
}


def _from_float(number: Any, dtype: str) -> Any:
    """A number that travelled in a vector of floats."""
    return number != 0 if dtype == "bool" else number.astype(dtype)


def _spread(x: Any, like: jax.Array) -> jax.Array:
    """A number for each element of a parameter, or of a block of one."""
    return x if np.shape(x) == like.shape else match_type(jnp.full(like.shape, x), like)


class DerivedLeaf(NamedTuple):
    """What is done to one parameter.

    Attributes:
      rule: its arithmetic.
      slots: the places of its slots among the leaves of the state.
      numbers: the places of its coefficients among the numbers.
    """

    rule: UpdateRule
    slots: tuple[int, ...]
    numbers: tuple[int, ...]


class Derivation(NamedTuple):
    """A transformation in parts.

    Attributes:
      leaves: the rule of each parameter.
      numbers: a program from the leaves of gradients, state and parameters to the numbers that the
        rules read, and then to all new leaves of the state that are no slots.
      others: the places of these among the leaves of the state.
      suits_branch: whether XLA does better with the transformation as it is written. For the rules
        it would read more: arrays of which norms are taken, which is done beside the verdict on the
        gradients otherwise, or a slot whose new value does not depend on the old one, to hold it.
        Or there is an operation that no kernel has, and nothing to be won.
    """

    leaves: list[DerivedLeaf]
    numbers: Jaxpr
    others: tuple[int, ...]
    suits_branch: bool


def find_slots(tx: Any, state: Any, params: Any) -> list[int | None]:
    """For each leaf of a state the parameter that it is a slot of; None for all other leaves.

    Raises:
      NotDerivable: where optax cannot tell.
    """
    try:
        # Marks and no bools, of which a container of others may make arrays.
        marks = optax.tree.map_params(
            tx, lambda _: _MAY_BE_SLOT, state, transform_non_params=lambda _: _NO_SLOT
        )
    except Exception as error:  # of its `init`, to which optax gives marks in the place of arrays
        raise NotDerivable("optax.tree.map_params cannot read its state") from error
    # A slot's path in the state ends with that of its parameter: `[0].mu['layer']['w']`. It is not
    # found by its number among the slots: those of parameters that a mask leaves out are missing.
    named = jax.tree_util.tree_leaves_with_path(params)
    places = {tuple(path): place for place, (path, _) in enumerate(named)}

    def find(path: Any, leaf: Any) -> int | None:
        ends = (tuple(path[start:]) for start in range(len(path) + 1))
        place = next((places[end] for end in ends if end in places), None)
        # One number for a parameter or for a row of it is no slot, and integers are not widened.
        is_like = place is not None and leaf.shape == named[place][1].shape
        return place if is_like and is_floating(leaf) else None

    pairs = zip(jax.tree.leaves(marks), jax.tree_util.tree_leaves_with_path(state), strict=True)
    return [find(*leaf) if mark is _MAY_BE_SLOT else None for mark, leaf in pairs]


def derive(
    update: Callable[..., Any],
    slots: Sequence[int | None],
    stored: Sequence[Any],
    grads: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
    names: Sequence[str],
) -> Derivation:
    """Traces a transformation and takes its program apart.

    Args:
      update: from the leaves of gradients, state and parameters, three lists, to those of updates
        and of the new state, two lists.
      slots: what `find_slots` found.
      stored: the dtypes in which the leaves of the state are stored.
      grads: abstract values of the gradients' leaves.
      state: those of the state's.
      params: those of the parameters'.
      names: of the parameters, for the errors.

    Raises:
      NotDerivable: for an operation that does not work element by element, with its line.
    """
    try:
        traced, _ = reading.trace(update, list(grads), list(state), list(params))
    except NotDerivable:
        raise
    except Exception as error:  # of the update: it may lack an extra argument, such as `value`
        raise NotDerivable(f"its update cannot be traced: {error}") from error
    # Functions with derivatives of their own stay calls, which are refused: a step may be
    # differentiated.
    jaxpr = spread_late(choose_late(building.inline_calls(traced)))
    return _Program(jaxpr, slots, stored, names).derive()


class _Program:
    """A traced update, each of its values sorted by what it belongs to.

    Attributes:
      owners: the parameter that a value is made for, element by element. All others are numbers, or
        arrays that no rule can read.
      eqns: the equations of each parameter.
      same: an equal value in the place of which it is read: the same number is one, however many
        parameters compute it, and a number that is spread over a parameter is that number.
      causes: of each value that no rule makes, the first equation that made it so.
    """

    def __init__(
        self, jaxpr: Jaxpr, slots: Sequence[int | None], stored: Sequence[Any], names: Sequence[str]
    ) -> None:
        self.jaxpr, self.slots, self.stored, self.names = jaxpr, slots, stored, names
        self.count = count = len(names)
        self.opened = reading.open_jaxpr(jaxpr)
        self.grads, rest = self.opened.invars[:count], self.opened.invars[count:]
        self.state, self.params = rest[: len(slots)], rest[len(slots) :]
        places = [*range(count), *slots, *range(count)]
        pairs = zip(self.opened.invars, places, strict=True)
        self.owners: dict[Atom, int] = {var: at for var, at in pairs if at is not None}
        self.eqns: list[list[Equation]] = [[] for _ in range(count)]
        self.same: dict[Atom, Atom] = {}
        self.causes: dict[Atom, Equation] = {}
        self._known: dict[Any, Sequence[Atom]] = {}
        for eqn in self.opened.eqns:
            self._sort(eqn)

    def derive(self) -> Derivation:
        updates, state = self.opened.outvars[: self.count], self.opened.outvars[self.count :]
        numbers: dict[Atom, int] = {}
        leaves, suits = [], False
        for leaf, update in enumerate(updates):
            own = tuple(place for place, owner in enumerate(self.slots) if owner == leaf)
            outputs = [self._find_same(atom) for atom in (update, *(state[place] for place in own))]
            program, read = self._read_leaf(leaf, own, outputs)
            suits |= not self._reads_old_slots(leaf, own, outputs)
            suits |= not program.primitives <= KERNEL_PRIMITIVES
            rule = UpdateRule(
                program,
                ("",) * len(own),  # they have names in the state, where only `fuse` looks for them
                is_guarded=False,
                primitives=program.primitives,
            )
            found = tuple(numbers.setdefault(atom, len(numbers)) for atom in read)
            leaves.append(DerivedLeaf(rule, own, found))
        others = tuple(place for place, owner in enumerate(self.slots) if owner is None)
        outputs = [*numbers, *(state[place] for place in others)]
        eqns = [self.opened.eqns[n] for n in reading.find_equations_for(self.jaxpr, outputs)]
        reduces = not self.owners.keys().isdisjoint(_variables(a for e in eqns for a in e.invars))
        program = building.rebuild(self.jaxpr, self.opened.invars, outputs, eqns)
        return Derivation(leaves, program, others, reduces or suits)

    def _sort(self, eqn: Equation) -> None:
        name, outs = eqn.primitive.name, eqn.outvars
        atoms = [self._find_same(atom) for atom in eqn.invars]
        owners = {self.owners[atom] for atom in _variables(atoms) if atom in self.owners}
        if not owners and name == "broadcast_in_dim" and atoms[0].aval.shape == ():
            self.same[outs[0]] = atoms[0]
        elif len(owners) == 1 and name in _SAME:
            self.same[outs[0]] = atoms[0]
        elif len(owners) == 1 and name in primitives.ELEMENTWISE:
            (owner,) = owners
            self.eqns[owner].append(eqn)
            self.owners[outs[0]] = owner
        else:
            found = [self.causes[atom] for atom in _variables(atoms) if atom in self.causes]
            arrays = [out for out in outs if getattr(out.aval, "shape", ())]
            self.causes |= dict.fromkeys(arrays, found[0] if found else eqn)
            if not owners and name in primitives.ELEMENTWISE:
                operands = (_constant(a) if reading.is_literal(a) else a for a in atoms)
                shape = getattr(outs[0].aval, "shape", None)
                first = self._known.setdefault((name, str(eqn.params), shape, *operands), outs)
                self.same |= {new: old for new, old in zip(outs, first, strict=True) if new != old}

    def _find_same(self, atom: Atom) -> Atom:
        while not reading.is_literal(atom) and atom in self.same:
            atom = self.same[atom]
        return atom

    def _read_leaf(
        self, leaf: int, own: Sequence[int], outputs: Sequence[Atom]
    ) -> tuple[LeafProgram, list[Atom]]:
        """The program of one parameter, and the numbers that it reads."""
        eqns = self._find_equations(leaf, outputs)
        made = {eqn.outvars[0] for eqn in eqns}
        inputs = [self.grads[leaf], self.params[leaf], *(self.state[place] for place in own)]
        atoms = [*(self._find_same(atom) for eqn in eqns for atom in eqn.invars), *outputs]
        numbers = [atom for atom in _variables(atoms) if atom not in made and atom not in inputs]
        for atom in numbers:
            if atom.aval.shape or not (is_floating(atom.aval) or atom.aval.dtype == bool):
                raise NotDerivable(self._blame(atom))
            if atom.aval.dtype.itemsize > inputs[0].aval.dtype.itemsize:
                raise NotDerivable(f"it computes with a number in {atom.aval.dtype}")
        places = {atom: place for place, atom in enumerate([*inputs, *numbers])}

        def as_operand(atom: Atom) -> Operand:
            atom = self._find_same(atom)
            return _constant(atom) if reading.is_literal(atom) else places[atom]

        steps = []
        for eqn in eqns:
            operands = tuple(map(as_operand, eqn.invars))
            steps.append((eqn.primitive.name, str(eqn.params), operands))
            places[eqn.outvars[0]] = len(places)
        narrowed = {e.outvars[0]: e.invars[0] for e in eqns if e.primitive.name == _NARROWING}
        held: list[int | None] = []
        for atom, at in zip(outputs[1:], own, strict=True):
            place = None
            if not reading.is_literal(atom):
                # The old slot must survive what is done to the new one behind the choice.
                dtype = getattr(atom.aval, "dtype", None)
                is_narrowed = atom in narrowed and dtype == self.stored[at]
                wide = self._find_same(narrowed[atom] if is_narrowed else atom)
                if not reading.is_literal(wide) and wide.aval.dtype == inputs[0].aval.dtype:
                    place = places[wide]
            # Of two slots with one value the second is held when all is done.
            held.append(None if place in held else place)
        update, *slots = map(as_operand, outputs)
        dtypes = tuple(atom.aval.dtype.name for atom in numbers)
        steps, slots, eqns = tuple(steps), tuple(slots), tuple(eqns)
        return LeafProgram(steps, update, slots, tuple(held), dtypes, eqns), numbers

    def _find_equations(self, leaf: int, outputs: Sequence[Atom]) -> list[Equation]:
        """The equations of a parameter that these values need, in their order."""
        needed, found = set(_variables(outputs)), []
        for eqn in reversed(self.eqns[leaf]):
            if eqn.outvars[0] in needed:
                found.append(eqn)
                needed.update(_variables(map(self._find_same, eqn.invars)))
        return found[::-1]

    def _reads_old_slots(self, leaf: int, own: Sequence[int], outputs: Sequence[Atom]) -> bool:
        """Whether each new slot depends on the old one."""

        def reads(output: Atom, old: Atom) -> bool:
            eqns = self._find_equations(leaf, [output])
            return output == old or any(old in map(self._find_same, e.invars) for e in eqns)

        return all(reads(new, self.state[at]) for new, at in zip(outputs[1:], own, strict=True))

    def _blame(self, atom: Atom) -> str:
        """Says what made a value that no rule can read."""
        if not atom.aval.shape:
            return f"it computes with a number in {atom.aval.dtype}"
        if atom not in self.causes:
            return f"it reads an array of {atom.aval.str_short()} that belongs to no parameter"
        eqn = self.causes[atom]
        name, line = eqn.primitive.name, source_info.line_of(eqn)
        atoms = _variables(map(self._find_same, eqn.invars))
        found = sorted({self.owners[each] for each in atoms if each in self.owners})
        owners = [repr(self.names[owner]) for owner in found]
        if name in primitives.ELEMENTWISE and len(owners) > 1:
            return f"`{name}` reads arrays of several parameters, {join_first(owners)}, in {line}"
        if name == "broadcast_in_dim":
            before, after = (x.aval.str_short() for x in (eqn.invars[0], eqn.outvars[0]))
            of = f" of {owners[0]}" if owners else ""
            return f"an array{of} is broadcast from {before} to {after}, in {line}"
        return f"`{name}` does not work element by element of one parameter, in {line}"


def _variables(atoms: Iterable[Atom]) -> list[Atom]:
    """Those that are no constants, each once and in their order."""
    return list(dict.fromkeys(reading.variables_in(atoms)))


def _constant(atom: Atom) -> Constant:
    number = np.asarray(atom.val, atom.aval.dtype)
    # The name: in numpy's short form all types of 8 bits that it does not know are one.
    return Constant(number.tobytes(), number.dtype.name)
