"""What ampx knows about flax: which layers normalise, and how to make models cast.

A precision policy needs two things of a model that only its framework can give: that norm layers
compute in float32 while the rest computes in half, and that the model casts what it takes and what
it gives. The two frameworks of flax allow it in different ways:

    linen   modules are immutable descriptions; `intercept_methods` wraps every call while a block
            of code runs: `linen_casts`
    nnx     modules are Python objects that hold their arrays; a copy of the model gets subclasses
            of its layers, which cast in `__call__`: `nnx_with_casts`

Nothing here imports flax: each function asks whether the program already has. One that has not
cannot hold a flax model, and never pays for the import.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_NORM_NAMES = ("BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm")
# The collection of variables whose gradient is their new value: see `ampx.overwritten`.
OVERWRITE = "_overwrite_with_gradient"
_HALF = (jnp.float16, jnp.bfloat16)
CastTree = Callable[[Any], Any]  # from a pytree to the same with other dtypes


def find_imported(module: str) -> Any:
    """Finds a module that the program has imported; None if it has not."""
    return sys.modules.get(module)


def _norm_types_of(package: Any) -> tuple[type, ...]:
    """The classes of layers that normalise, of linen or of nnx."""
    return tuple(getattr(package, name) for name in _NORM_NAMES if hasattr(package, name))


def is_unbound_linen(value: Any) -> bool:
    """Whether `value` is a linen module that is no part of a running `apply` or `init`."""
    linen = find_imported("flax.linen")
    return (
        linen is not None
        and isinstance(value, linen.Module)
        and value.scope is None
        and value.parent is None
    )


def is_nnx_module(value: Any) -> bool:
    """Whether `value` is an nnx module."""
    nnx = find_imported("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Module)


def find_floating_state(params: Any) -> str | None:
    """Finds the path of what is floating among parameters and is none, such as a running mean.

    Args:
      params: nnx variables, of which parameters are of the type `nnx.Param`; or a dict of linen
        variables, whose statistics are in the collection `"batch_stats"`.
    """
    nnx = find_imported("flax.nnx")
    kind = nnx.Variable if nnx else ()
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, kind))
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "batch_stats" in name.split("/"):
            return name
        is_state = isinstance(leaf, kind) and not isinstance(leaf, nnx.Param)
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(leaf)]
        if is_state and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            return name
    return None


def find_norm_paths(model: Any, /, *args: Any, **kwargs: Any) -> frozenset[str]:
    """Finds the paths of the norm layers of a flax model by the types of its modules.

    Args:
      model: a linen or an nnx module.
      *args: of the model's call, for linen alone: its layers exist only once it is called.
      **kwargs: of the model's call, for linen alone.

    Returns:
      Names joined by "/".

    Raises:
      TypeError: if `model` is not a flax module.
    """
    if is_nnx_module(model):
        nnx = find_imported("flax.nnx")
        found = nnx.iter_modules(model)
        return frozenset(
            "/".join(map(str, path)) for path, m in found if isinstance(m, _norm_types_of(nnx))
        )
    linen = find_imported("flax.linen")
    if linen is None or not isinstance(model, linen.Module):
        raise TypeError(
            f"expected a flax linen or nnx module, got {type(model).__name__}: give a rule by path "
            "instead, a function of the parameter's path that returns a bool"
        )
    # Abstractly: shapes are inferred, nothing is computed.
    modules = model.module_paths(jax.random.key(0), *args, **kwargs)
    return frozenset(path for path, m in modules.items() if isinstance(m, _norm_types_of(linen)))


def _is_half(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) in _HALF


def _call_in_float32(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer on float32 and gives its result the dtype of its first floating operand."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if _is_half(leaf) else leaf

    operands = (*args, *kwargs.values())
    dtypes = [getattr(operand, "dtype", bool) for operand in operands]
    dtype = next((found for found in dtypes if jnp.issubdtype(found, jnp.floating)), None)
    out = call(*jax.tree.map(widen, args), **jax.tree.map(widen, kwargs))
    return out.astype(dtype) if dtype in _HALF and hasattr(out, "astype") else out


def _computes_in_float32(module: Any, norms: tuple[type, ...], params: Any) -> bool:
    """Whether a layer is one that the policy keeps in float32, told by the parameters it got.

    The policy has cast the parameters already, by a rule over their paths: what it kept in float32
    is to compute in float32. That is a norm layer without half parameters, or any other layer whose
    own parameters all stayed float32, such as a norm that somebody wrote themselves. A layer with a
    `dtype` of its own is left alone, because its owner has decided; so is one that holds layers.
    """
    if getattr(module, "dtype", None) is not None:
        return False
    leaves = jax.tree.leaves(params)
    if isinstance(module, norms):
        # One without scale and bias has no leaves: it computes in float32, too.
        return not any(_is_half(leaf) for leaf in leaves)
    # Parameters of a layer inside stand in a mapping under its name.
    holds_layers = any(isinstance(value, Mapping) for value in dict(params or {}).values())
    return bool(leaves) and not holds_layers and all(leaf.dtype == jnp.float32 for leaf in leaves)


@contextlib.contextmanager
def linen_casts(
    *, norms_in_float32: bool, cast_input: CastTree, cast_output: CastTree
) -> Iterator[None]:
    """While active, linen models cast what they take and give, and their norms compute in float32.

    A norm layer hands back the dtype it was given, so one float32 scale does not turn the rest of
    the network into float32. The model is the outermost module that is called.
    """
    linen = find_imported("flax.linen")
    if linen is None:
        yield
        return
    norms = _norm_types_of(linen)
    # linen calls this for every method of every module, the outermost first. A flag tells the model
    # from its layers; it is raised while the model runs.
    inside_model = False

    def interceptor(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal inside_model
        module = context.module
        if module.scope is None:  # a method of an unbound module, which may call apply() itself
            return next_call(*args, **kwargs)
        if norms_in_float32 and (args or kwargs) and context.method_name == "__call__":
            if _computes_in_float32(module, norms, module.variables.get("params")):
                next_call = functools.partial(_call_in_float32, next_call)
        if inside_model:
            return next_call(*args, **kwargs)
        inside_model = True
        try:
            return cast_output(next_call(*cast_input(args), **cast_input(kwargs)))
        finally:
            inside_model = False

    with linen.intercept_methods(interceptor):
        yield


# Cached: layers of one class get one subclass, not one for each layer.
@functools.cache
def _make_float32_class(norm: type) -> type:
    """A subclass of a layer's class that computes in float32."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call_in_float32(functools.partial(norm.__call__, self), *args, **kwargs)

    return type(norm.__name__, (norm,), {"__call__": __call__, "__module__": norm.__module__})


def _make_casting_class(model: type, cast_input: CastTree, cast_output: CastTree) -> type:
    """A subclass of a model's class that casts what it takes and gives."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cast_output(model.__call__(self, *cast_input(args), **cast_input(kwargs)))

    return type(model.__name__, (model,), {"__call__": __call__, "__module__": model.__module__})


def _set_class(module: Any, new_class: type) -> None:
    # Past nnx's own __setattr__, which is for attributes that it keeps track of.
    object.__setattr__(module, "__class__", new_class)


def nnx_with_casts(
    model: Any,
    cast_params: CastTree,
    *,
    norms_in_float32: bool,
    cast_input: CastTree,
    cast_output: CastTree,
) -> Any:
    """A copy of an nnx model that computes as a linen model does under `linen_casts`.

    nnx has no interceptors, so the copy's norm layers and the copy itself get a subclass.

    Args:
      model: an nnx module, which is not changed.
      cast_params: from its parameters to those that the copy holds.
      norms_in_float32: whether layers whose parameters stayed float32 compute in float32.
      cast_input: for the arguments of the model.
      cast_output: for its result.
    """
    nnx = find_imported("flax.nnx")
    graphdef, params, rest = split_nnx(model)
    copy = merge_nnx(graphdef, cast_params(params), rest)
    for path, module in list(nnx.iter_modules(copy)):
        own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
        if isinstance(module, nnx.Embed) and module.dtype == module.param_dtype:
            # A layer with `dtype=None` computes in the dtype of its parameters and inputs. An
            # embedding has no such choice: it got the dtype of its table when it was made.
            module.dtype = module.embedding.dtype
        elif norms_in_float32 and _computes_in_float32(module, _norm_types_of(nnx), own):
            _set_class(module, _make_float32_class(type(module)))
        if not path and callable(module):
            _set_class(module, _make_casting_class(type(module), cast_input, cast_output))
    return copy


def split_nnx(model: Any, wrt: Any = None) -> tuple[Any, Any, Any]:
    """An nnx model as (graph definition, what `wrt` picks, everything else).

    `wrt` is an nnx filter; None picks the parameters.
    """
    nnx = find_imported("flax.nnx")
    return nnx.split(model, nnx.Param if wrt is None else wrt, ...)


def merge_nnx(graphdef: Any, params: Any, rest: Any) -> Any:
    """The nnx model that `split_nnx` took apart, in variables that the present trace may change."""
    return find_imported("flax.nnx").merge(graphdef, params, rest, copy=True)


def split_overwritten_nnx(params: Any, rest: Any) -> tuple[Any, Any]:
    """Takes variables that are to be replaced by their gradient out of the rest of an nnx model.

    A linen model with such variables (see `ampx.overwritten`) that `nnx.bridge.ToNNX` wraps has
    them in a class named as their collection.

    Args:
      params: what is differentiated and trained.
      rest: what is neither.

    Returns:
      Those variables, None if there are none, and what is left of `rest`.

    Raises:
      ValueError: if one is among `params`, where an optimizer would train it.
    """
    nnx, kind = find_imported("flax.nnx"), _find_overwritten_type()
    if kind is None:
        return None, rest
    if taken := nnx.to_flat_state(nnx.filter_state(params, kind)):
        path = "/".join(map(str, taken[0][0]))
        raise ValueError(
            f"wrt picks {path!r}, which is no weight: its gradient is its new value, as in flax's "
            "layers in 8 bits. Leave it out, as in wrt=nnx.Param: it is replaced in any case"
        )
    overwritten, rest = nnx.split_state(rest, kind, ...)
    return (overwritten if jax.tree.leaves(overwritten) else None), rest


def has_overwritten_nnx(model: Any) -> bool:
    """Whether an nnx model has variables that are to be replaced by their gradient."""
    kind = _find_overwritten_type()
    return kind is not None and bool(jax.tree.leaves(find_imported("flax.nnx").state(model, kind)))


def _find_overwritten_type() -> Any:
    """The nnx class of such variables; None as long as nobody has made one."""
    try:
        return find_imported("flax.nnx").variable_type_from_name(OVERWRITE)
    except ValueError:
        return None


def merge_states(*states: Any) -> Any:
    """One nnx state of several."""
    return find_imported("flax.nnx").merge_state(*states)


def as_pure(state: Any) -> Any:
    """An nnx state as nested dicts of arrays, as optax gets it."""
    return find_imported("flax.nnx").as_pure(state)


def replace_params(model: Any, params: Any, wrt: Any = None) -> Any:
    """A copy of an nnx model with other parameters.

    Args:
      model: an nnx module, which is not changed.
      params: nested dicts of arrays in the place of what `wrt` picks, as optax sees them.
      wrt: an nnx filter; None picks the parameters.
    """
    copy = merge_nnx(*split_nnx(model, wrt))
    find_imported("flax.nnx").update(copy, params)
    return copy


def select_nnx_rest(model: Any, wrt: Any = None) -> Any:
    """Selects what `wrt` does not pick: statistics, random counters, caches.

    Sown values are dropped from the model: they are results of a call, not state for the next, and
    would make the state of one step differ in structure from that of the step before.
    """
    nnx = find_imported("flax.nnx")
    nnx.pop(model, nnx.Intermediate)
    return nnx.state(model, nnx.Not(nnx.Param if wrt is None else wrt))


def write_back(model: Any, changed: Any) -> None:
    """Copies the state of `changed` that is not a parameter into `model`."""
    find_imported("flax.nnx").update(model, select_nnx_rest(changed))


def is_nnx_object(leaf: Any) -> bool:
    """Whether something is a node of an nnx graph, such as a module."""
    nnx = find_imported("flax.nnx")
    # To nnx a `jax.Ref` is a node too, but it is an argument as any array is.
    return nnx is not None and nnx.graph.is_graph_node(leaf) and not isinstance(leaf, jax.Ref)
