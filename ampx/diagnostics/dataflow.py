r"""What the results of a jaxpr wait for: reductions over devices, followed through its equations.

A fold over the step's jaxpr gives each variable a node of a graph, and each node the set of
reductions that it waits for: those of its operands, and itself if it is one. For a step that
reduces two gradients and clips them by their common norm:

    g0 -- psum 0 --+--------- mul -- update of p0     waits for {0, 1}
                    \       /   \
                     norm --+     the culprit: it joins what waits for 0 with what waits for 1
                    /       \
    g1 -- psum 1 --+--------- mul -- update of p1     waits for {0, 1}

Without the norm the update of p0 would wait for {0} alone and could run during psum 1. Sets of
reductions are the bits of an int: a step of a large model has thousands of nodes, and a union is
then one `|`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax.numpy as jnp

from ampx.diagnostics import bit_sets
from ampx.jaxprs import folds, reading, source_info
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.jaxprs.source_info import Frame

# The most elements of a floating sum that counts as a verdict: a loss and a weight travel in one.
# Whether so small a gradient overlaps does not matter. Counts of infinities are integers.
OF_VERDICTS = 2


class ReductionRecord(NamedTuple):
    """A sum, maximum or exchange over devices.

    Attributes:
      place: its number in the order of the program, from 0. Outputs name reductions by it.
      primitive: the name of the primitive, such as `"psum"`.
      axes: the mapped axes that it runs over.
      dtype: the name of the dtype of what is reduced.
      elements: how many numbers are reduced, on one device.
      bytes: how large they are together, on one device.
      source: file, line and function that it was written in.
      is_verdict: whether it is something else than a gradient: it reduces integers or bools, takes
        a maximum or minimum, or has at most two elements.
    """

    place: int
    primitive: str
    axes: tuple[Any, ...]
    dtype: str
    elements: int
    bytes: int
    source: str
    is_verdict: bool


class Culprit(NamedTuple):
    """An equation that joins what came from the last reduction with what came from others.

    Attributes:
      name: the optax transformation, library function or function of yours that it belongs to.
      place: file and line in that function.
      primitive: the name of the primitive that joins them.
      functions: all functions around the equation, innermost first.
    """

    name: str
    place: str
    primitive: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.place}, {self.primitive})"


class FlowNode(NamedTuple):
    """An equation, with calls inlined.

    Attributes:
      inputs: numbers of the nodes that it reads, all smaller than its own.
      own: the set of reductions that it is, or that run inside of it; bit i is reduction i.
      waits: the set that it waits for, `own` included.
      eqns: the equation and the calls around it, innermost first.
    """

    inputs: tuple[int, ...]
    own: int
    waits: int
    eqns: tuple[Equation, ...]


class Flow:
    """The equations of a jaxpr that wait for reductions, as a graph.

    Attributes:
      reductions: in the order of the program.
      nodes: in the order of the program, after node 0, which stands for all that waits for nothing.
    """

    def __init__(self) -> None:
        self.reductions: list[ReductionRecord] = []
        self.nodes = [FlowNode((), 0, 0, ())]
        # The branches that ampx chooses between: the nodes of their operands, and the sizes of
        # mapped axes. What is the user's own may stand in them.
        self._choices: dict[int, tuple[list[int], dict[Any, int]]] = {}

    def follow(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[int],
        sizes: dict[Any, int],
        around: tuple[Equation, ...] = (),
    ) -> list[int]:
        """Adds the equations of a jaxpr.

        Args:
          jaxpr: the program, or the body of a call.
          operands: the nodes of its inputs.
          sizes: the devices along each mapped axis, as far as they are known.
          around: the calls around the jaxpr, innermost first.

        Returns:
          The nodes of its outputs.
        """

        def nodes_of(eqns: tuple[Equation, ...], inputs: list[int]) -> list[int]:
            eqn = eqns[0]
            body = reading.called_body(eqn)
            if body is not None:
                return self.follow(body, inputs, sizes | reading.mesh_sizes(eqn), eqns)
            if places := self._record_reductions(eqn, sizes):
                # One psum of a tuple is one reduction an operand: nothing ties its results.
                pairs = zip(inputs, places, strict=True)
                return [self._add_node((i,), 1 << place, eqns) for i, place in pairs]
            own = sum(1 << place for place in self._record_reductions_inside(eqn, sizes))
            node = self._add_node(inputs, own, eqns)
            if eqn.primitive.name == "cond" and _is_of_ampx(eqn):
                self._choices[node] = (inputs, sizes)
            return [node] * len(eqn.outvars)

        return folds.fold_inside(jaxpr, operands, nodes_of, lambda _: 0, around=around)

    def _add_node(self, inputs: Iterable[int], own: int, eqns: tuple[Equation, ...]) -> int:
        """Adds a node and gives its number; 0, and no new node, for what waits for nothing."""
        inputs = tuple(dict.fromkeys(i for i in inputs if i))
        waits = own
        for i in inputs:
            waits |= self.nodes[i].waits
        if not waits:
            return 0
        self.nodes.append(FlowNode(inputs, own, waits, eqns))
        return len(self.nodes) - 1

    def _record_reductions(self, eqn: Equation, sizes: dict[Any, int]) -> list[int]:
        """Records the reductions that an equation is, an operand each, and gives their places.

        Over axes of one device there is nothing to send, and nothing is recorded.
        """
        # An axis that no mesh around names has an unknown size, and counts as one of many devices.
        axes = reading.axes_of_reduction(eqn)
        if axes is None or all(sizes.get(axis) == 1 for axis in axes):
            return []
        first, name = len(self.reductions), eqn.primitive.name
        for place, atom in enumerate(eqn.invars, first):
            aval: Any = atom.aval
            # Gradients are summed, or scattered in parts, in floating dtypes. A maximum, or a sum
            # of integers or bools, is a verdict: it is small, and everything may wait for it.
            is_sum = name not in ("pmax", "pmin") and jnp.issubdtype(aval.dtype, jnp.inexact)
            size, width = math.prod(aval.shape), aval.dtype.itemsize
            self.reductions.append(
                ReductionRecord(
                    place=place,
                    primitive=name,
                    axes=axes,
                    dtype=str(aval.dtype),
                    elements=size,
                    bytes=size * width,
                    source=source_info.line_of(eqn),
                    is_verdict=not is_sum or size <= OF_VERDICTS,
                )
            )
        return list(range(first, len(self.reductions)))

    def _record_reductions_inside(self, eqn: Equation, sizes: dict[Any, int]) -> Iterator[int]:
        # XLA runs a loop or a branch as one instruction: it starts when all of its operands are
        # there, and none of its results is ready before all are.
        for body in reading.inner_jaxprs(eqn):
            for inner, around in folds.equations_inside(body, (eqn,)):
                bound = functools.reduce(operator.or_, map(reading.mesh_sizes, around), sizes)
                yield from self._record_reductions(inner, bound)

    def find_waits(self, node: int, among: int) -> tuple[int, ...]:
        """Finds the places of the reductions in the set `among` that a node waits for."""
        return bit_sets.members_of(self.nodes[node].waits & among)

    def find_culprits(self, outputs: Iterable[int], gradients: int) -> tuple[Culprit, ...]:
        """Finds where the last of some reductions first meets others, on the way to some outputs.

        A culprit has an operand that waits for the last reduction and another that waits for an
        earlier one, but not for the last. What comes after a culprit joins them, too, but is not to
        blame. If it is a choice of ampx between branches, what joins them in a branch is one, too.

        Args:
          outputs: nodes.
          gradients: a set of reductions.

        Returns:
          One culprit for each function and file.
        """
        last, wanted = 1 << gradients.bit_length() - 1, set(outputs)
        # Nodes read smaller ones alone: one sweep downwards finds all that the outputs depend on.
        for i in reversed(range(len(self.nodes))):
            if i in wanted:
                wanted.update(self.nodes[i].inputs)
        below: set[int] = set()  # culprits, and all that depends on one
        found: dict[tuple[str, str], Culprit] = {}
        # Upwards again, so that what a node reads has been judged before it.
        for i in sorted(wanted):
            node = self.nodes[i]
            if not below.isdisjoint(node.inputs):
                below.add(i)
                continue
            # A loop or a branch joins all reductions inside it, so these count as operands.
            parts = [self.nodes[j].waits & gradients for j in node.inputs]
            if node.eqns and reading.inner_jaxprs(node.eqns[0]):
                parts += [1 << place for place in bit_sets.members_of(node.own & gradients)]
            if any(part & last for part in parts) and any(p and not p & last for p in parts):
                below.add(i)
                for culprit in (name_culprit(node.eqns), *self._find_inside(i, gradients)):
                    found.setdefault((culprit.name, culprit.place.split(":")[0]), culprit)
        return tuple(found.values())

    def _find_inside(self, choice: int, gradients: int) -> Iterator[Culprit]:
        """Finds the culprits in the branches of a choice of ampx, as if each stood there alone."""
        if choice not in self._choices:
            return
        node, (inputs, sizes) = self.nodes[choice], self._choices[choice]
        for body in reading.bodies_of(node.eqns[0]):
            flow = Flow()
            flow.nodes, flow.reductions = self.nodes[:choice], list(self.reductions)
            results = flow.follow(body, inputs[1:], sizes, node.eqns)
            outvars: Any = reading.open_jaxpr(body).outvars
            arrays = [node for node, out in zip(results, outvars, strict=True) if out.aval.shape]
            # The reductions inside are recorded anew, behind those of the whole program.
            again = flow.reductions[len(self.reductions) :]
            wanted = gradients & ~node.own
            wanted |= sum(1 << record.place for record in again if not record.is_verdict)
            if wanted:
                yield from flow.find_culprits(arrays, wanted)


def _is_of_ampx(eqn: Equation) -> bool:
    """Whether ampx wrote an equation, in whatever function of the user's."""
    frames = source_info.user_frames_of(eqn)
    return bool(frames) and source_info.is_of_ampx(frames[0].file_name)


# Names of culprits. A user knows `clip_by_global_norm`, not the `mul` in a lambda inside of it: a
# culprit is named after a function on the traceback of its equation:
#   in a library   the optax convention is a factory with functions inside, as in
#                  clip_by_global_norm.<locals>.update_fn: named after the factory; else after the
#                  library function that the user's own code called
#   in user code   the innermost function; of an `update` the class or factory around it, too


def _find_package(frame: Frame) -> int:
    """Where in the parts of its file's path the name of an installed package stands, or 0."""
    file, own = PurePath(frame.file_name), PurePath(source_info.AMPX_FOLDER)
    if file.is_relative_to(own):
        return len(own.parts) - 1
    return next((i for i, part in enumerate(file.parts, 1) if part.endswith("-packages")), 0)


def _list_functions(frame: Frame) -> list[str]:
    """The functions and classes that a frame lies in, outermost first, lambdas left out."""
    names = re.split(r"\.<locals>\.|\.", frame.function_name)
    return [name for name in names if not name.startswith("<")] or [frame.function_name]


def name_culprit(eqns: Sequence[Equation]) -> Culprit:
    """Names an equation, which comes first, by the functions around it and around its calls."""
    # A body is traced once for all of its calls: only the equations around it tell who called it.
    frames = [frame for eqn in eqns for frame in source_info.user_frames_of(eqn)]
    primitive = eqns[0].primitive.name
    if not frames:
        return Culprit(primitive, "unknown file", primitive, ())

    def library(frame: Frame) -> str:
        at = _find_package(frame)
        return PurePath(frame.file_name).parts[at] if at else ""

    def is_update(frame: Frame) -> bool:
        names = _list_functions(frame)
        return any(name in ("update", "update_fn") for name in names[1:])

    inner = library(frames[0])
    own = list(itertools.takewhile(lambda frame: library(frame) == inner, frames))
    if inner:
        chosen = next((frame for frame in own if is_update(frame)), own[-1])
        name = _list_functions(chosen)[0]
    else:
        chosen = own[0]
        names = _list_functions(chosen)
        name = ".".join(names[-2:]) if is_update(chosen) else names[-1]
    parts = PurePath(chosen.file_name).parts
    file = "/".join(parts[_find_package(chosen) or -1 :])
    functions = tuple(dict.fromkeys(_list_functions(frame)[-1] for frame in frames))
    return Culprit(name, f"{file}:{chosen.line}", primitive, functions)
