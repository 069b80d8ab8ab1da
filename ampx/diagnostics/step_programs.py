"""A training step as a program: what goes in, what comes out, and which of it goes round.

A step takes its state and gives the next one. Nothing says which results are which arguments of the
next call, but the structure does: a result, or a part of one, with the names and shapes of an
argument is what that argument becomes.

    step(state, batch)  ->  (state, report)        state/params/w       0/params/w
                                                   state/opt_state/...  0/opt_state/...
                                                   batch                (nothing)

An array that is in both is called *carried* here. Checks of a step are mostly about those: a
parameter, a moment, a counter, a loss scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.checking import join_first
from ampx.jaxprs import pure_calls, reading
from ampx.jaxprs.interpreter import Place
from ampx.jaxprs.pure_calls import is_array
from ampx.jaxprs.reading import Equation, Jaxpr
from ampx.trees import is_named_tuple, path_name

# How a loss scale is known among the arrays of a step: its own name and that of another field of
# the same state. ampx's, flax's `DynamicScale` and jmp's.
_SCALES = (("loss_scale", "growth_tracker"), ("scale", "fin_steps"), ("loss_scale", "counter"))
Names = tuple[str, ...]


class StepArray(NamedTuple):
    """An array that goes into a step, or comes out of it.

    Attributes:
      path: its names, from the argument or the result on: the first is the number of the argument.
      aval: shape and dtype.
      value: the array that was given; None for an output.
      nodes: what holds it, for each name of the path the tree that has this name in it: containers
        of Python, states of optimizers; None where a key does not tell. () for an output.
    """

    path: Names
    aval: Any
    value: Any = None
    nodes: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """Its names after the first, joined by "/"."""
        return "/".join(self.path[1:]) or self.path[0]

    @property
    def number(self) -> float | None:
        """The number that a scalar holds; None for others, and where it is not known."""
        array = self.value
        if not isinstance(array, np.ndarray | jax.Array) or isinstance(array, jax.core.Tracer):
            return None
        is_gone = isinstance(array, jax.Array) and array.is_deleted()
        if array.shape or is_gone or not jnp.issubdtype(array.dtype, np.floating):
            return None
        return float(array)


class StepProgram(NamedTuple):
    """A step that was traced.

    Attributes:
      jaxpr: a function of the arrays among the arguments alone.
      inputs: its arguments, in order.
      outputs: its results, in order.
      carried: from the number of an output to that of the input that it becomes.
      scales: numbers of the inputs that are loss scales.
      has_skips: whether one of them counts skipped steps.
    """

    jaxpr: Jaxpr
    inputs: list[StepArray]
    outputs: list[StepArray]
    carried: dict[int, int]
    scales: tuple[int, ...]
    has_skips: bool

    def output_of(self, i: int) -> int:
        """The number of the output that a carried input becomes."""
        return next(number for number, own in self.carried.items() if own == i)

    def carried_names(self, numbers: Iterable[int]) -> str:
        """Names the inputs that the outputs of these numbers become, in few words."""
        return join_first(self.inputs[self.carried[number]].name for number in numbers)


def trace_step(fun: Callable[..., Any], args: Any, kwargs: Any) -> StepProgram:
    """Traces a call of a step; nothing is run."""
    call = pure_calls.as_pure_call(fun, args, kwargs)
    of_arrays, arrays = pure_calls.as_function_of_arrays(call)
    jaxpr, shapes = reading.trace(of_arrays, *arrays)
    # The operands of a call without nnx objects are (args, kwargs): one name more.
    own = 1 if call.operands[0] is args else 0
    found = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(call.operands)
        if is_array(leaf)
    ]
    inputs = [
        StepArray(_names_of(path)[own:], variable.aval, leaf, _nodes_on(call.operands, path)[own:])
        for (path, leaf), variable in zip(found, reading.open_jaxpr(jaxpr).invars, strict=True)
    ]
    outputs = [
        StepArray(_names_of(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    carried = _pair(inputs, outputs)
    scales = {i: leaf.path for i, leaf in enumerate(inputs) if _is_scale(leaf.path, inputs)}
    become = set(carried.values())
    has_skips = any(
        j in become and _is_beside(leaf.path, path, "skipped_total")
        for path in scales.values()
        for j, leaf in enumerate(inputs)
    )
    return StepProgram(jaxpr, inputs, outputs, carried, tuple(scales), has_skips)


def _names_of(path: Sequence[Any]) -> Names:
    return tuple(path_name((key,)) for key in path)


def _nodes_on(tree: Any, path: Sequence[Any]) -> tuple[Any, ...]:
    """The trees on a path: the one that each key is looked up in."""
    nodes = [tree]
    for key in path[:-1]:
        nodes.append(_look_up(nodes[-1], key))
    return tuple(nodes)


def _look_up(tree: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(tree, key.name, None)
    try:
        return tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
    except (AttributeError, IndexError, KeyError, TypeError):  # a node with keys of its own making
        return None


def _is_beside(path: Names, other: Names, name: str) -> bool:
    """Whether a path is that of the field `name` of the state that another path is a field of.

    flax nnx keeps every array in a variable, which may add a name at the end of both.
    """
    at = max(i for i, part in enumerate(other) if part in ("loss_scale", "scale"))
    return path[:at] == other[:at] and path[at : at + 1] == (name,)


def _is_scale(path: Names, inputs: list[StepArray]) -> bool:
    for scale, beside in _SCALES:
        if scale in path[-2:] and any(_is_beside(leaf.path, path, beside) for leaf in inputs):
            return True
    return False


def _pair(inputs: list[StepArray], outputs: list[StepArray]) -> dict[int, int]:
    """Pairs outputs with the inputs that they become: trees of equal names and shapes.

    Whole arguments come before their parts, and the first of several that fit is taken.
    """
    pairs: dict[int, int] = {}
    for given in (1, 2):
        for before in _parts(inputs, given):
            for within in (0, 1, 2, 3):
                for after in _parts(outputs, within):
                    is_free = pairs.keys().isdisjoint(after.values()) and set(
                        pairs.values()
                    ).isdisjoint(before.values())
                    if is_free and _fits(before, after, inputs, outputs):
                        pairs.update((after[rest], before[rest]) for rest in before)
    return pairs


def _parts(leaves: list[StepArray], depth: int) -> Iterator[dict[Names, int]]:
    """The trees at a depth: from the names inside each to the numbers of its leaves."""
    found: dict[Names, dict[Names, int]] = {}
    for number, leaf in enumerate(leaves):
        if len(leaf.path) >= depth:
            found.setdefault(leaf.path[:depth], {})[leaf.path[depth:]] = number
    return iter(found.values())


def _fits(
    before: dict[Names, int],
    after: dict[Names, int],
    inputs: list[StepArray],
    outputs: list[StepArray],
) -> bool:
    return before.keys() == after.keys() and all(
        inputs[before[rest]].aval.shape == outputs[after[rest]].aval.shape for rest in before
    )


def is_of_library(node: Any) -> bool:
    """Whether a node is a state of optax, or of an optimizer of ampx."""
    package, *inside = type(node).__module__.split(".")
    is_optimizer = package == "optax" or package == "ampx" and "training" not in inside
    return is_named_tuple(node) and is_optimizer


def is_chain(node: Any) -> bool:
    """Whether a node is the state of `optax.chain`: a tuple of states, some of them known."""
    if not isinstance(node, tuple) or is_named_tuple(node):
        return False
    are_states = all(is_named_tuple(part) or is_chain(part) for part in node)
    return are_states and any(is_of_library(part) or is_chain(part) for part in node)


def optimizer_of(leaf: StepArray) -> Names | None:
    """The path of the optimizer's state that an input is a part of; or None."""
    # flax nnx knows the classes of states no more, but keeps them under this name.
    if "opt_state" in leaf.path:
        return leaf.path[: leaf.path.index("opt_state") + 1]
    for depth, node in enumerate(leaf.nodes):
        if is_of_library(node) or is_chain(node):
            return leaf.path[:depth]
    return None


def path_in_optimizer(leaf: StepArray) -> Names:
    """The names from the field of an optimizer's state on, such as ("mu", "layer", "w")."""
    if (path := optimizer_of(leaf)) is None:
        return ()
    fields = [depth for depth, node in enumerate(leaf.nodes) if is_of_library(node)]
    if fields:
        return leaf.path[fields[-1] :]
    inside = leaf.path[len(path) :]  # of flax nnx, whose chains have numbers
    return tuple(itertools.dropwhile(str.isdigit, inside))


def source_of(eqns: tuple[Equation, ...], jaxpr: Jaxpr) -> str:
    """The innermost line of the user's own at an equation and those around it, innermost first."""
    return place_of(eqns, jaxpr).source


def place_of(eqns: tuple[Equation, ...], jaxpr: Jaxpr) -> Place:
    """The place of an equation, given with those around it, innermost first."""
    place = Place()
    for eqn in reversed(eqns):
        place = place.at(eqn, jaxpr)
    return place


def source_of_output(program: StepProgram, number: int) -> str:
    """The line that computes a result, inside of the jitted functions that it comes out of."""
    return source_of_result(program.jaxpr, number, (), program.jaxpr)


def source_of_result(jaxpr: Jaxpr, number: int, around: tuple[Equation, ...], whole: Jaxpr) -> str:
    """The line that computes a result of a jaxpr, which stands in equations of another."""
    eqns = around
    while True:
        opened = reading.open_jaxpr(jaxpr)
        wanted = opened.outvars[number]
        makers = [eqn for eqn in opened.eqns if any(out is wanted for out in eqn.outvars)]
        if not makers:
            break
        eqns = (makers[0], *eqns)
        body = reading.called_body(makers[0])
        if body is None:
            break
        number = next(i for i, out in enumerate(makers[0].outvars) if out is wanted)
        jaxpr = body
    return source_of(eqns, whole)
