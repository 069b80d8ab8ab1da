"""Runs a jaxpr equation by equation, outside of jit, and carries a remark with every value.

A diagnosis looks at numbers that a compiled program never shows. So the program is run here as an
interpreter runs it: each equation on real arrays, one after the other. Calls and branches are
entered, and loops iteration by iteration. With each array goes a remark, which a subclass of `Walk`
makes: who is to blame for an infinity, or whether the value belongs to a gradient.

The `Place` of each equation that runs is known: the calls around it, the iterations of the loops
around it, its name scope, and the line of the user's program. A place is the path from the outside
to the equation; for a product inside of a scanned and jitted layer, in the third iteration,

    path        jit[name=step] > scan > jit[name=layer] > dot_general
    iterations  (2,)

A training step has to fit into memory this way, too. So an array is dropped after its last reader,
and equations that no wanted result needs are not run.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.jaxprs import building, primitives, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.jaxprs.source_info import Frame

_LIBRARIES = (
    source_info.JAX_FOLDER,
    os.path.join(sysconfig.get_path("stdlib"), ""),
)
# Name scopes that remat and the phases of ampx add.
_NO_MODULE = re.compile(r"checkpoint|rematted_computation|ampx\..*")
# Prefixes of primitives that hold a jaxpr, too, but only to say how two numbers are combined: the
# sum in a scatter-add, the comparison in an argmax.
_COMBINING = ("scatter", "reduce", "select_and", "arg")
# What the rule of a derivative computes before there is a cotangent, and of what. JAX computes
# d sqrt(x) = 0.5 / sqrt(x) in the forward pass, by a `div` that reads the result of the `sqrt`.
# The others read an operand: d(x / y) = -x y**-2.
_OF_RESULTS = {"div": ("sqrt", "rsqrt", "cbrt")}
_OF_OPERANDS = {
    "div": ("rsqrt",),
    "pow": ("pow",),
    "integer_pow": ("div", "integer_pow", "reciprocal"),
    "digamma": ("lgamma",),
    "rsqrt": ("asin", "acos", "acosh"),
}


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      path: the calls around it and itself, outermost first, each with the jaxpr that it is in.
      iterations: of the loops around it, outermost first. For a scan the index into what it scans,
        so a reversed scan of 8 steps begins with 7.
    """

    path: tuple[tuple[Equation, Jaxpr], ...] = ()
    iterations: tuple[int, ...] = ()

    def at(self, eqn: Equation, jaxpr: Jaxpr) -> Place:
        """The place of an equation of a jaxpr that is called from here."""
        return self._replace(path=(*self.path, (eqn, jaxpr)))

    def iteration(self, number: int) -> Place:
        """This place, in an iteration of the loop that stands here."""
        return self._replace(iterations=(*self.iterations, number))

    @property
    def scope(self) -> str:
        """The name scopes around the equation: with flax the path of the module."""
        names = [name for eqn, _ in self.path for name in source_info.scope_of(eqn)]
        return "/".join(name for name in names if not _NO_MODULE.fullmatch(name))

    def is_inside(self, scope: str) -> bool:
        """Whether a name scope is around the equation; `scope` may be one that ampx adds."""
        return any(scope in source_info.scope_of(eqn) for eqn, _ in self.path)

    @property
    def is_backward(self) -> bool:
        """Whether the equation belongs to a backward pass; what remat runs again does not."""
        return source_info.is_backward(eqn for eqn, _ in reversed(self.path))

    @property
    def is_derivative(self) -> bool:
        """Whether the equation is a part of the derivative of its line, not of its value."""
        if self.is_backward or not self.path:
            return self.is_backward
        eqn, jaxpr = self.path[-1]
        name, origin = eqn.primitive.name, source_info.origin_of(eqn)
        known: set[Any] = set()
        for other in itertools.takewhile(lambda e: e is not eqn, reading.open_jaxpr(jaxpr).eqns):
            if source_info.origin_of(other) != origin:
                continue
            of_operands = other.primitive.name in _OF_OPERANDS.get(name, ())
            of_results = other.primitive.name in _OF_RESULTS.get(name, ())
            # d asin(x) = 1 / sqrt(1 - x**2): some steps may lie between.
            is_step = not known.isdisjoint(reading.variables_in(other.invars)) and not of_operands
            known.update(reading.variables_in(other.invars) if of_operands else ())
            known.update(reading.variables_in(other.outvars) if of_results or is_step else ())
        return not known.isdisjoint(reading.variables_in(eqn.invars))

    @property
    def source(self) -> str:
        """The innermost line that is the user's own: `"/home/me/model.py:12 (loss)"`.

        Where no equation has one, the function that was called; `""` if that is a library's, too.
        """
        # An equation inside a jitted function has the lines inside that function alone. Those of
        # its callers are found at the equations around it.
        candidates = [
            frame for eqn, _ in reversed(self.path) for frame in source_info.frames_of(eqn)
        ]
        for frame in candidates:
            if not _is_library(frame.file_name):
                return f"{frame.file_name}:{frame.line} ({_describe_function(frame)})"
        bodies = [
            body
            for eqn, jaxpr in reversed(self.path)
            for body in (*reading.inner_jaxprs(eqn), jaxpr)
        ]
        for name, line in filter(None, map(source_info.function_of, bodies)):
            if not _is_library(name):
                return f"{name}:{line}"
        return ""


def _is_library(name: str) -> bool:
    if any(part.endswith("-packages") for part in PurePath(name).parts):
        return True
    return name.startswith(_LIBRARIES) or source_info.is_of_ampx(name)


def _describe_function(frame: Frame) -> str:
    return frame.function_name.replace(".<locals>", "")


class Value(NamedTuple):
    """An array and what is remarked of it.

    Attributes:
      array: a `jax.Array`, a NumPy array, a Python number for a literal, or a `jax.Ref`.
      remark: what a subclass of `Walk` makes of it.
    """

    array: Any
    remark: Any = None


NOT_WANTED = Value(None)  # in the place of a result that nobody wants, and that was not computed


def is_opaque(eqn: Equation) -> bool:
    """Whether an equation holds functions that are not entered: a kernel, a shard_map."""
    return reading.has_bodies(eqn) and not eqn.primitive.name.startswith(_COMBINING)


def compile_equation(eqn: Equation, parent: Jaxpr) -> Any:
    """Compiles an equation as a function of its operands, none of which it uses up.

    A jitted call may donate operands. Inside of another jit that has no effect, and the caller may
    still need them.
    """
    return jax.jit(building.as_function(eqn, parent))


class Walk:
    """Runs jaxprs equation by equation; subclasses make the remarks.

    A subclass says what it remarks of constants, of the results of operations, and of arrays that
    the walk puts together of others. How calls, branches and loops are run may be changed, too:

        run                   a jaxpr: what a call, a branch or an iteration does
          run_equation        one equation, by its kind
            run_whole         an operation, or whatever is not entered
            run_loop          a scan or a while loop
              run_iterations  all of its iterations
                run_iteration one of them, by `run`
    """

    def remark_constant(self, array: Any, here: Place) -> Any:
        """The remark for a number or an array that is written into the program."""

    def remark_results(
        self, eqn: Equation, operands: Sequence[Value], arrays: Sequence[Any], here: Place
    ) -> list[Any]:
        """The remarks for the results of an equation that is not entered."""
        raise NotImplementedError

    def remark_joined(self, values: Sequence[Value]) -> Any:
        """The remark for an array put together from others."""
        raise NotImplementedError

    def run(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Value],
        here: Place,
        wanted: Sequence[bool] | None = None,
    ) -> list[Value]:
        """Runs a jaxpr that is called from a place.

        Args:
          jaxpr: the program.
          operands: its inputs.
          here: the place of the equation that calls it.
          wanted: which of its results are wanted; None wants all.

        Returns:
          The results, with `NOT_WANTED` in the places of the others.
        """
        opened = reading.open_jaxpr(jaxpr)
        known: dict[Any, Value] = dict(zip(opened.invars, operands, strict=True))
        for var, array in zip(opened.constvars, reading.constants_of(jaxpr), strict=True):
            known[var] = Value(array, self.remark_constant(array, here))

        # A literal is remarked where it is read: a mask of infinities is blamed on that line.
        def read(atom: Any, place: Place) -> Value:
            if reading.is_literal(atom):
                return Value(atom.val, self.remark_constant(atom.val, place))
            return known[atom]

        wanted = [True] * len(opened.outvars) if wanted is None else wanted
        results = [
            atom for atom, is_wanted in zip(opened.outvars, wanted, strict=True) if is_wanted
        ]
        eqns = [opened.eqns[number] for number in reading.find_equations_for(jaxpr, results)]
        for eqn, fresh, finished in _find_lifetimes(eqns, results):
            place = here.at(eqn, jaxpr)
            values = self.run_equation(
                eqn, [read(atom, place) for atom in eqn.invars], place, fresh
            )
            known.update(zip(eqn.outvars, values, strict=True))
            for var in finished:
                known.pop(var, None)
        pairs = zip(opened.outvars, wanted, strict=True)
        return [read(atom, here) if is_wanted else NOT_WANTED for atom, is_wanted in pairs]

    def run_equation(
        self,
        eqn: Equation,
        operands: Sequence[Value],
        here: Place,
        wanted: Sequence[bool],
    ) -> Sequence[Value]:
        """Runs one equation; calls, branches and loops are entered.

        Inside of a shard_map an array is one shard on each device, so that is run as a whole.
        """
        name = eqn.primitive.name
        if name == "cond":
            index, *others = operands
            return self.run(reading.bodies_of(eqn)[int(index.array)], others, here, wanted)
        if name in primitives.LOOPS and not _is_empty(eqn):
            return self.run_loop(eqn, operands, here)
        body = reading.called_body(eqn)
        if body is not None and not reading.mesh_sizes(eqn):
            return self.run(body, operands, here, wanted)
        arrays = self.run_whole(eqn, operands, here)
        return list(map(Value, arrays, self.remark_results(eqn, operands, arrays, here)))

    def run_whole(self, eqn: Equation, operands: Sequence[Value], here: Place) -> Sequence[Any]:
        """Runs an equation without entering it, compiled if it holds functions."""
        arrays = [value.array for value in operands]
        with eqn.ctx.manager:
            if is_opaque(eqn):
                return compile_equation(eqn, here.path[-1][1])(*arrays)
            return reading.bind(eqn, arrays)

    def run_loop(self, eqn: Equation, operands: Sequence[Value], here: Place) -> Sequence[Value]:
        """Runs a scan or a while loop iteration by iteration."""
        carry, rows = self.run_iterations(eqn, operands, here)
        columns = zip(*rows, strict=True)
        return [
            *carry,
            *(_join_values(column, jnp.stack, self.remark_joined) for column in columns),
        ]

    def run_iteration(
        self,
        eqn: Equation,
        body: Jaxpr,
        operands: Sequence[Value],
        here: Place,
    ) -> Sequence[Value]:
        """Runs the body of a loop, in the iteration that `here` tells."""
        return self.run(body, operands, here)

    def run_iterations(
        self, eqn: Equation, operands: Sequence[Value], here: Place
    ) -> tuple[Sequence[Value], list[Sequence[Value]]]:
        """Runs all iterations of a loop.

        Returns:
          The last carry, and the rows that a scan stacks, by their place in the result. They are
          not stacked yet: a subclass may want the remark of each.
        """
        if eqn.primitive.name == "while":
            return self._run_while(eqn, operands, here), []
        consts, carry, scanned = reading.split_scan(eqn, operands)
        length, is_reversed = reading.scan_steps(eqn)
        (body,) = reading.bodies_of(eqn)
        rows: list[Sequence[Value]] = [()] * length
        for place in reversed(range(length)) if is_reversed else range(length):
            # The place is an array, not a Python number: one compilation serves all iterations.
            slices = _slice_rows([value.array for value in scanned], np.int32(place))
            xs = [Value(part, value.remark) for part, value in zip(slices, scanned, strict=True)]
            results = self.run_iteration(eqn, body, [*consts, *carry, *xs], here.iteration(place))
            carry, rows[place] = results[: len(carry)], results[len(carry) :]
        return carry, rows

    def _run_while(self, eqn: Equation, operands: Sequence[Value], here: Place) -> Sequence[Value]:
        of_condition, consts, carry = reading.split_while(eqn, operands)
        condition, body = reading.bodies_of(eqn)
        goes_on = jax.jit(functools.partial(reading.evaluate, reading.as_closed(condition)))
        asked = [value.array for value in of_condition]
        for number in itertools.count():
            (going,) = goes_on(*asked, *(value.array for value in carry))
            if not np.any(going):
                break
            results = self.run_iteration(eqn, body, [*consts, *carry], here.iteration(number))
            # vmap makes of a condition one answer for each row: bool[rows]. The loop goes on while
            # any of them is true, and rows that are done stay as they are.
            carry = [self._select_rows(going, *pair) for pair in zip(results, carry, strict=True)]
        return carry

    def _select_rows(self, going: jax.Array, new: Value, old: Value) -> Value:
        if np.all(going):
            return new
        # bool[rows] -> bool[rows, 1, ...], to broadcast against the axes of the value behind.
        mask = jnp.reshape(going, going.shape + (1,) * (jnp.ndim(new.array) - going.ndim))
        return _join_values((new, old), lambda pair: jnp.where(mask, *pair), self.remark_joined)


def _join_values(values: Sequence[Value], join: Any, remark: Any) -> Value:
    return Value(join([v.array for v in values]), remark(values))


@jax.jit
def _slice_rows(arrays: list[Any], place: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(array, place, keepdims=False) for array in arrays]


def _is_empty(eqn: Equation) -> bool:
    # There are no rows of which shapes could be told: JAX knows them from the types.
    return eqn.primitive.name == "scan" and not reading.scan_steps(eqn)[0]


def _find_lifetimes(
    eqns: Sequence[Equation], results: Sequence[Any]
) -> list[tuple[Equation, list[bool], list[Any]]]:
    """Each equation, with which of its results are read and which variables nothing reads after it.

    For `c = add a b; d, e = f c a`, of which d is wanted:

        add   [True]          finished: b
        f     [True, False]   finished: e, c, a
    """
    # Backwards, `read` holds what later equations and the caller read.
    read = set(reading.variables_in(results))
    found = []
    for eqn in reversed(eqns):
        is_read = [out in read for out in eqn.outvars]
        operands = reading.variables_in(eqn.invars)
        finished = [var for var in dict.fromkeys((*eqn.outvars, *operands)) if var not in read]
        read.update(operands)
        found.append((eqn, is_read, finished))
    return found[::-1]
