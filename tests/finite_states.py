"""Which optimizers keep all numbers finite, whatever the gradients and the steps: a proof.

    python tests/finite_states.py

prints the tables of docs/guides/optax_optimizers.md. The `update` of each transformation is traced
and then run on bounds instead of numbers, by `intervals`; nothing is compiled.

Shown is: from the state that `init` makes, after any number of steps with gradients whose norm is
at most G, each array with a norm of its own, all updates and all numbers of the state are finite.
Assumed is: the norm of each parameter array is at most G and at most 1e15, and so is the absolute
value of the loss; a matrix of 1024 x 1024 and a vector of 1024 numbers in float32; optax's
defaults. A number of the state that is infinite from the start (the best loss so far) may stay so.
"""

import functools
import pathlib
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import large_gradients as large
from intervals import fixed_points
from intervals.programs import Program
from intervals.values import Fact, is_float
from optax_optimizers import TAKES

from ampx.jaxprs import reading, source_info

SHAPES = {"w": (1024, 1024), "b": (1024,)}
# A loss scale lets no larger norm pass; then smaller ones.
NORMS = (1.3e19, 1e15, 1e6)
LARGEST_PARAMS = 1e15
FEW = 2.0**30  # steps
NEEDS_A_LOSS = {"value_fn", "obj_fn"}  # functions, of which nothing is known


class Verdict(NamedTuple):
    """What was found of one transformation.

    Attributes:
      norm: the largest of `NORMS` for which all is finite; None if that is shown for none.
      reason: why it is not shown for the next larger one.
      state: facts of the state after any number of steps, as the state.
      updates: facts of the updates.
      few: whether it is shown for a billion steps only.
    """

    norm: float | None
    reason: str = ""
    state: object = None
    updates: object = None
    few: bool = False


class NotShown(Exception):
    """The first operation whose result may not be finite, although its operands are.

    The second argument: whether a count may have left the range of int32 before.
    """


def within(norm, tree):
    """What is assumed of arrays with this norm, or of a number of this size."""
    return [Fact(-norm, norm, l2=norm) for _ in jax.tree.leaves(tree)]


def extra_args(takes, value, grads, more_grads):
    """What a transformation asks for beside gradients."""
    about = {"value": value, "grad": grads, "grad_fn": lambda params, _: more_grads}
    return {name: about[name] for name in takes}


class Programs(NamedTuple):
    """What a transformation computes, and of what: parameters, updates and state as shapes."""

    init: Program
    update: Program  # of gradients, other gradients, the loss, parameters and state
    params: object
    updates: object
    state: object


def trace(tx, takes=(), shapes=SHAPES):
    """The programs of a transformation, for parameters of these shapes."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with jax.numpy_dtype_promotion("standard"):
        return _trace(tx, takes, params)


def _trace(tx, takes, params):
    init, state = reading.trace(tx.init, params)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    value = jax.ShapeDtypeStruct((), jnp.float32)

    def update(grads, more_grads, value, params, state):
        return tx.update(grads, state, params, **extra_args(takes, value, grads, more_grads))

    traced, (updates, _) = reading.trace(update, params, params, value, params, state)
    return Programs(Program(init), Program(traced), params, updates, state)


def prove(programs, norm, few=False):
    """Facts of updates and state that hold after any number of steps; raises `NotShown`.

    With `few`, after up to a billion steps.
    """
    init, update, params, updates, state = programs
    of_params = within(min(norm, LARGEST_PARAMS), params)
    value = within(min(norm, LARGEST_PARAMS), 0.0)
    given = [*within(norm, params), *within(norm, params), *value]
    start = init.results(of_params)
    leaves, count = jax.tree.leaves(state), len(jax.tree.leaves(updates))
    endless = [False] * count + [fact.largest == float("inf") and not fact.nan for fact in start]
    found = []

    def every_step(facts):
        scope = update.run([*given, *of_params, *facts])
        outs = update.body.outvars
        found[:] = [scope.read(atom) for atom in outs]
        if any(map(may_fail, outs, found, endless)):
            found[:] = update.by_cases(scope)
        for atom, fails in zip(outs, map(may_fail, outs, found, endless), strict=True):
            if fails:
                raise NotShown(blame(scope, atom), has_wrapped(scope))
        return found[count:]

    def step(facts):
        pairs = zip(facts, leaves, strict=True)
        return every_step(
            [x._replace(hi=min(x.hi, FEW)) if few and is_count(leaf) else x for x, leaf in pairs]
        )

    try:
        facts = fixed_points.find(step, start, leaves)
    except fixed_points.Unbounded:
        raise NotShown("no bound was found", False) from None
    return (
        jax.tree.unflatten(jax.tree.structure(updates), found[:count]),
        jax.tree.unflatten(jax.tree.structure(state), facts),
    )


def may_fail(atom, fact, may_be_infinite):
    """Whether a float may be what it must not be."""
    return is_float(atom.aval.dtype) and (fact.nan if may_be_infinite else not fact.is_finite)


def is_count(leaf):
    """Whether a number of the state counts steps."""
    return leaf.dtype == jnp.int32 and leaf.size == 1


def has_wrapped(scope):
    """Whether an integer that is computed of a count may leave int32, and come out negative."""
    made = (out for eqn in scope.program.body.eqns for out in eqn.outvars)
    return any(is_count(x.aval) and scope.read(x).lo < -(2**30) for x in made)


def blame(scope, atom):
    """The operation that may make an infinity or a NaN of finite numbers, and its line."""
    while (eqn := scope.program.maker(atom)) is not None:
        bad = [
            operand
            for operand in eqn.invars
            if is_float(operand.aval.dtype) and not scope.read(operand).is_finite
        ]
        if not bad or all(map(reading.is_literal, bad)):
            return f"`{eqn.primitive.name}`, {line_of(eqn)}"
        atom = next(x for x in bad if not reading.is_literal(x))
    return "an infinity or NaN from the start"


def line_of(eqn):
    """The file, line and function of an equation."""
    frames = source_info.user_frames_of(eqn)
    places = [f for f in frames if "/optax/" in f.file_name or "/ampx/" in f.file_name] or frames
    if not places:
        return "line unknown"
    frame = places[0]
    function = re.sub(r".*<locals>\.", "", frame.function_name)
    return f"{pathlib.PurePath(frame.file_name).name}:{frame.line} ({function})"


def judge(tx, takes=(), norms=NORMS):
    """The verdict about a transformation, which takes these extra arguments."""
    if NEEDS_A_LOSS & set(takes):
        return Verdict(None, "it evaluates the loss at other parameters")
    programs, reason = trace(tx, takes), ""
    for norm in norms:
        for few in (False, True):
            try:
                updates, state = prove(programs, norm, few)
                return Verdict(norm, reason, state, updates, few)
            except NotShown as found:
                why, wraps = found.args
                if not wraps:
                    break
        reason = why
    return Verdict(None, reason)


@functools.cache
def verdict(name):
    """The verdict about an optimizer by its name."""
    return judge(make(name), TAKES.get(name, ()))


def make(name):
    """An optimizer of optax; one of `ampx.fused` in a loss scale, as it is meant to be used."""
    return large.scaled(name) if name in large.FUSED else large.make_any(name)


def table(names=large.ALL):
    """The lines of both tables in the guide."""
    found = {name: verdict(name) for name in names}
    yield "| shown finite after any number of steps, for gradients of a norm | optimizers |"
    yield "| --- | --- |"
    for norm in NORMS:
        shown = [
            f"`{name}`" + " (in a billion steps)" * found[name].few
            for name in names
            if found[name].norm == norm
        ]
        yield f"| up to {write(norm)} | {', '.join(shown)} |"
    yield ""
    yield "| optimizer | not shown beyond | because of |"
    yield "| --- | --- | --- |"
    for name in names:
        norm, reason = found[name][:2]
        if reason:
            yield f"| `{name}` | {write(norm) if norm else 'any'} | {reason} |"


def write(norm):
    """`1.3e19`"""
    return f"{norm:.2g}".replace("e+0", "e").replace("e+", "e")


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1:] or large.ALL)))
