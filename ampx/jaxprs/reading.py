"""How JAX's equations and their parameters look in each version, behind names that stay.

A jaxpr is a straight list of equations over typed variables. Calls, loops and branches are
equations, too; they hold the jaxprs that they run, here called bodies, among their parameters:

    { lambda a:f32[8] ; b:f32[4,8]. let    a is a constvar, b an invar
        c:f32[] d:f32[4] = scan[           outvars: first the carry, then what is stacked
          jaxpr={ lambda ; ... }           the body
          num_carry=1 num_consts=1         how to read the operands: [*consts, *carry, *xs]
        ] a 0.0 b                          0.0 is a literal, not a variable
      in (c, d) }                          outvars of the jaxpr

JAX offers jaxprs for reading and building under `jax.extend.core`, but no public interface covers
the parameters of an equation, and they change between versions. What differs between versions, and
what several modules need, is read here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ampx.jaxprs import primitives
from ampx.mesh_axes import axes_of_spec

Jaxpr = Any  # jax.extend.core.Jaxpr or ClosedJaxpr: two classes in jax 0.10, one since 0.11
Equation = core.JaxprEqn
Atom = Any  # jax.extend.core.Var or Literal
# Primitives whose bodies can be exchanged, and the parameters that hold them. A cond is apart: its
# `branches` are one parameter that holds several. A custom rule also holds functions that make its
# derivatives; `call_jaxpr` is what it computes where nobody differentiates it.
_BODIES = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint", "scan", "shard_map"), ("jaxpr",)),
    **dict.fromkeys(("closed_call", "call", "core_call", "eval_jaxpr"), ("call_jaxpr",)),
    **dict.fromkeys(primitives.CUSTOM_RULES, ("call_jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
}
_AXES_OF_REDUCTIONS = {
    **dict.fromkeys(primitives.ALL_REDUCTIONS, "axes"),
    **dict.fromkeys(primitives.SCATTERING_COLLECTIVES, "axis_name"),
}
# These name mapped axes, too, but each device runs them alone: nobody waits for anybody.
_LOCAL = primitives.AXIS_TYPE_CASTS | {"axis_index"}


def is_literal(atom: Atom) -> bool:
    """Whether an operand is a constant written into the equation."""
    return isinstance(atom, core.Literal)


def variables_in(atoms: Iterable[Atom]) -> list[Atom]:
    """Those operands or results that are no constants written into an equation."""
    return [atom for atom in atoms if not is_literal(atom)]


def rename(names: Mapping[Any, Atom], atom: Atom) -> Atom:
    """What stands in the place of an operand or a result: itself, where `names` has nothing."""
    return atom if is_literal(atom) else names.get(atom, atom)


def number_of(atom: Atom) -> float | None:
    """The number that an operand is, if it is a scalar constant written into the equation."""
    return number_of_constant(atom.val) if is_literal(atom) else None


def number_of_constant(value: Any) -> float | None:
    """The number that a constant is; None for arrays, and for what has no real number.

    Complex numbers, random keys and the empty gradients of integers (float0) can stand in equations
    as well.
    """
    return float(value) if is_numeric(value) and not np.ndim(value) else None


def round_number(number: float, dtype: Any) -> float:
    """The number that a dtype holds in place of one: infinity beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.asarray(number, dtype))


def is_numeric(value: Any) -> bool:
    """Whether an array, its type or a number is of reals or bools: no random key, not complex."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, int | float)
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))


def is_dropped(variable: Atom) -> bool:
    """Whether nobody reads an output: `_` in a printed jaxpr."""
    return isinstance(variable, core.DropVar)


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The equations of a jaxpr, whether or not constants are attached to it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def trace(
    fun: Callable[..., Any], *args: Any, mapped: Mapping[str, int] | None = None
) -> tuple[Jaxpr, Any]:
    """The jaxpr of `fun(*args)`, with constants attached, and its output as shapes.

    `args` may be arrays, abstract values, or pytrees of them. `mapped` has the sizes of axes that
    are mapped where the jaxpr is to stand, and not here.
    """
    axis_env = None if mapped is None else list(mapped.items())
    return jax.make_jaxpr(fun, axis_env=axis_env, return_shape=True)(*args)


def evaluate(jaxpr: Jaxpr, *operands: Any) -> list[Any]:
    """Runs a jaxpr with constants attached.

    While it is traced, equations keep the name scopes and source lines that they had.
    """
    return core.jaxpr_as_fun(jaxpr)(*operands)


def bind(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Applies an equation to other operands, which may have other shapes."""
    # A custom rule stores traced functions in its parameters; get_bind_params turns these back into
    # the callables that its bind takes.
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def bodies_of(eqn: Equation) -> tuple[Jaxpr, ...]:
    """The jaxprs that a call, a loop or a branch runs."""
    if eqn.primitive.name == "cond":
        return tuple(eqn.params["branches"])
    return tuple(eqn.params[name] for name in _BODIES[eqn.primitive.name])


def with_bodies(eqn: Equation, bodies: Sequence[Jaxpr]) -> dict[str, Any]:
    """The parameters of a call, a loop or a branch with other bodies."""
    if eqn.primitive.name == "cond":
        return {**eqn.params, "branches": tuple(bodies)}
    return {**eqn.params, **dict(zip(_BODIES[eqn.primitive.name], bodies, strict=True))}


def call_name(eqn: Equation) -> str | None:
    """The name of a jitted function, or None."""
    return eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None


def constants_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """The arrays that are attached to a jaxpr, in the order of its `constvars`.

    They are the arrays that the traced function closes over. An open jaxpr has none: the equation
    that holds it passes such arrays as operands.
    """
    return as_closed(jaxpr).consts


def has_constants(jaxpr: Jaxpr) -> bool:
    """Whether arrays are attached to a jaxpr, beside its arguments."""
    return bool(open_jaxpr(jaxpr).constvars)


def is_inlined(fun: Any) -> bool:
    """Whether JAX puts the equations of a jitted function among those of its callers."""
    # A bool in one version of JAX, an enumeration in another.
    inline = getattr(getattr(fun, "_jit_info", None), "inline", None)
    return inline is True or getattr(inline, "name", None) == "JAX_EARLY"


def has_bodies(eqn: Equation) -> bool:
    """Whether any parameter of an equation, known or not, holds a jaxpr."""
    return bool(inner_jaxprs(eqn))


def inner_jaxprs(eqn: Equation) -> tuple[Jaxpr, ...]:
    """The jaxprs among the parameters of any equation, known or not."""
    return tuple(core.jaxprs_in_params(eqn.params))


def called_body(eqn: Equation) -> Jaxpr | None:
    """The body of an equation that runs it once, on its own operands in their order; or None."""
    name = eqn.primitive.name
    if name not in _BODIES or name in primitives.LOOPS:
        return None
    (body,) = bodies_of(eqn)
    fits = len(open_jaxpr(body).invars) == len(eqn.invars)
    return body if fits else None


def mesh_sizes(eqn: Equation) -> dict[Any, int]:
    """The devices along each axis that a shard_map binds; empty for other equations."""
    if eqn.primitive.name != "shard_map":
        return {}
    # The mesh may have more, which are bound further out, or further in, or left to the compiler.
    bound = eqn.params["newly_manual_axes"]
    return {axis: size for axis, size in eqn.params["mesh"].shape.items() if axis in bound}


def specs_of(eqn: Equation) -> tuple[list[frozenset[Any]], list[frozenset[Any]], bool]:
    """The axes that divide each operand and each result of a shard_map, and its `check_vma`."""
    params = eqn.params
    ins, outs = (
        [frozenset(axes_of_spec(spec)) for spec in params[name]]
        for name in ("in_specs", "out_specs")
    )
    return ins, outs, params["check_vma"]


def axes_of_reduction(eqn: Equation) -> tuple[Any, ...] | None:
    """The mapped axes that a sum, a maximum or an exchange of parts runs over; or None."""
    name = _AXES_OF_REDUCTIONS.get(eqn.primitive.name)
    if name is None:
        return None
    axes = eqn.params[name]
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def collective_axes(eqn: Equation) -> tuple[str, ...]:
    """The mapped axes along which devices must run an equation together."""
    if eqn.primitive.name in _LOCAL:
        return ()
    # All others that name axes are collectives, also those that a later JAX adds. Under vmap a name
    # becomes the number of an axis of the operand: what runs over that stays on one device.
    names = (eqn.params.get(name, ()) for name in ("axes", "axis_name"))
    flat = [n if isinstance(n, tuple | list) else (n,) for n in names]
    return tuple(axis for group in flat for axis in group if isinstance(axis, str))


def scan_sizes(eqn: Equation) -> tuple[int, int]:
    """How many operands of a scan are constants and how many are its carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Later versions keep the tree of the operands, (consts, carry, xs), instead of two numbers.
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def scan_steps(eqn: Equation) -> tuple[int, bool]:
    """How many iterations a scan has, and whether it runs from the last one to the first."""
    return eqn.params["length"], eqn.params["reverse"]


def while_sizes(eqn: Equation) -> tuple[int, int]:
    """How many operands of a while loop are constants of its condition and of its body."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def split_scan(eqn: Equation, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits one value for each operand of a scan into those of constants, carry and inputs."""
    consts, carry = scan_sizes(eqn)
    values = list(operands)
    return values[:consts], values[consts : consts + carry], values[consts + carry :]


def split_while(eqn: Equation, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits values of a while loop: constants of its condition, those of its body, the carry."""
    of_condition, of_body = while_sizes(eqn)
    values, consts = list(operands), of_condition + of_body
    return values[:of_condition], values[of_condition:consts], values[consts:]


def multiplies_without_sum(eqn: Equation) -> bool:
    """Whether a `dot_general` adds up nothing: each number of its result is one product."""
    if eqn.primitive.name != "dot_general":
        return False
    (summed, _), _ = eqn.params["dimension_numbers"]
    return not summed


def find_default_precision() -> Any:
    """What `jax_default_matmul_precision` writes into products that ask for no precision."""
    return _read_default_precision(jax.config.jax_default_matmul_precision)  # pyrefly: ignore


@functools.cache
def _read_default_precision(setting: str | None) -> Any:
    if setting is None:
        return None
    vector = jax.ShapeDtypeStruct((1,), np.float32)
    return jax.make_jaxpr(jax.lax.dot)(vector, vector).eqns[-1].params["precision"]


def with_dtype(aval: Any, dtype: Any) -> Any:
    """The same abstract value (shape, sharding, varying axes) in another dtype.

    It is strong: unlike the type of a Python number, it does not yield to that of other operands.
    """
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


def new_variable(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def new_dropped(aval: Any) -> Any:
    """A new output that nobody reads."""
    return core.DropVar(aval)


def new_literal(value: Any, aval: Any) -> Any:
    """A constant of a scalar type."""
    return core.Literal(value, aval)


def find_equations_for(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> list[int]:
    """Finds the equations, by number and in order, that some of a jaxpr's values depend on.

    Equations with effects, such as a print or a write to a reference, always belong to them.
    """
    # Backwards: a reader stands after what it reads, so `needed` is complete for each equation.
    needed = set(variables_in(outputs))
    chosen = []
    for number, eqn in reversed(list(enumerate(open_jaxpr(jaxpr).eqns))):
        if has_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            chosen.append(number)
            needed.update(variables_in(eqn.invars))
    return chosen[::-1]


def has_effects(eqn: Equation) -> bool:
    """Whether an equation does more than to compute its results, such as a print."""
    # To name a mapped axis, as every collective does, is an effect to JAX. It only says where the
    # equation may stand: one whose results nobody reads may be left out on all devices.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def as_closed(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr as one that can be evaluated: without constants, where none were attached."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def is_explicit(aval: Any) -> bool:
    """Whether the sharding of a value is part of its type, as on a mesh with Explicit axes."""
    return any(
        kind == jax.sharding.AxisType.Explicit for kind in aval.sharding.mesh.axis_types or ()
    )
