"""Any call as arrays and a pure function of them, nnx modules included."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import register_pytree_node

from ampx.flax_modules import find_imported, is_nnx_object
from ampx.function_checks import refuse_lazy_result


class PureCall(NamedTuple):
    """A call as a pure function of pytrees without nnx objects.

    Attributes:
      fun: from the operands to the result of the call and the state that it left in the objects.
      operands: what to call it with.
      write_back: gives the objects such a state.
    """

    fun: Callable[..., tuple[Any, Any]]
    operands: tuple[Any, ...]
    write_back: Callable[[Any], None]


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Splits a tree into its arrays and a function that puts others in their places.

    What is traced may then be a function of arrays alone: numbers, strings and functions among the
    leaves stay in the closure of `merge`, so that Python can still branch on them.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def merge(arrays: Any) -> Any:
        merged = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        return jax.tree.unflatten(structure, merged)

    return [leaves[place] for place in places], merge


class Fixed:
    """A leaf that JAX does not trace, such as a function in an Equinox module, as a part of a tree.

    It has no leaves, so that a traced function may return it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


register_pytree_node(Fixed, lambda fixed: ((), fixed), lambda fixed, _: fixed)


def as_function_of_arrays(call: PureCall) -> tuple[Callable[..., Any], list[Any]]:
    """A function to trace, and the arrays among the operands of a call, which it takes.

    It returns what the call does, with each leaf that JAX does not trace as a `Fixed`.
    """
    arrays, merge = split_arrays(call.operands)

    def fix(leaf: Any) -> Any:
        is_number = isinstance(leaf, numbers.Number | np.generic)
        return (
            leaf if is_number or is_array(leaf) or hasattr(leaf, "__jax_array__") else Fixed(leaf)
        )

    return lambda *arrays: jax.tree.map(fix, call.fun(*merge(arrays))), arrays


def unfix(tree: Any) -> Any:
    """A tree with all leaves in the places of `Fixed`."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, Fixed) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Fixed),
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX takes. Numbers of Python and NumPy stay themselves."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSU"  # of objects, bytes or text
    # `np.float32` itself has the attributes `dtype` and `shape`, and so have NumPy's numbers.
    if isinstance(leaf, type | np.generic):
        return False
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def unbind(fun: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """`model(x)` and `model.method(x)` as calls of a function of the nnx module and the rest."""
    owner = getattr(fun, "__self__", fun)
    if not is_nnx_object(owner):
        return fun, args
    return (type(owner).__call__ if owner is fun else fun.__func__), (owner, *args)


def as_pure_call(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PureCall:
    """Converts `fun(*args, **kwargs)` to a call of a pure function.

    `fun` may be an nnx module or a method of one, and the arguments may hold nnx objects. What two
    objects share, such as a tied embedding, stays shared: all are split together.

    Raises:
      TypeError: when the function is called, if it has run nothing and gives a generator.
      ValueError: when the function runs, if it changed the structure of an object.
    """
    nnx = find_imported("flax.nnx")
    fun, args = unbind(fun, args)
    # nnx objects are Python objects with references to each other. `nnx.split` takes them apart:
    #   graphdef   static: classes, attributes, which variables are one and the same
    #   before     a pytree of the arrays in their variables
    # and `nnx.merge` makes new objects of both, inside the function that is traced.
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_nnx_object)
    places = [i for i, leaf in enumerate(leaves) if is_nnx_object(leaf)]
    if not places:
        return PureCall(
            lambda args, kwargs: (_run(fun, args, kwargs), ()), (args, kwargs), lambda state: None
        )
    objects = tuple(leaves[place] for place in places)
    graphdef, before = nnx.split(objects)

    def pure(state: Any, *others: Any) -> tuple[Any, Any]:
        filled, copies = list(others), nnx.merge(graphdef, state, copy=True)
        for place, copy in zip(places, copies, strict=True):
            filled[place] = copy
        args, kwargs = jax.tree.unflatten(structure, filled)
        result = _run(fun, args, kwargs)
        after, state = nnx.split(copies)
        if after != graphdef:
            raise ValueError(
                f"{getattr(fun, '__qualname__', fun)} changes the structure of an nnx module: its "
                "submodules, a variable that sow adds, or an attribute that is not an array, such "
                "as a mode. Only arrays are carried out of autocast: make the change outside, as "
                "in model.train(), and call no sow inside"
            )
        return result, state

    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    return PureCall(pure, (before, *others), lambda after: _write_changes(objects, before, after))


def _run(fun: Any, args: Any, kwargs: Any) -> Any:
    result = fun(*args, **kwargs)
    refuse_lazy_result(fun, result)
    return result


def _write_changes(objects: tuple[Any, ...], before: Any, after: Any) -> None:
    """Writes to the objects those variables that the call has changed, and no others.

    A variable may belong to a trace around the call, such as that of `nnx.jit` or `jax.grad`, which
    allows to read it but not to write it. An unchanged one is the very same array before and after.
    """
    nnx = find_imported("flax.nnx")
    held = {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(before)}
    changed = [
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if path not in held or held[path] is not variable.get_raw_value()
    ]
    nnx.update(objects, nnx.from_flat_state(changed))
