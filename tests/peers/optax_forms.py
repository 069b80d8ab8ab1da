"""Puts ampx around the transformations that optax's own tests make, or in their place.

While a form is active, each factory of optax (`optax.adam`, `optax.chain`, `optax.contrib.sam`)
returns its transformation inside ampx:

    scale     `ampx.dynamic_loss_scale`, with a scale that grows. `update` multiplies the gradients
              by the scale in the state, as a loss that was multiplied by it would
    window    `ampx.multi_steps(..., every_k=1)`
    zero1     `ampx.zero1`, mapped over a mesh of one device, on which the test makes its arrays,
              too; where it gives no parameters, it is given zeros
    fused     `ampx.fused.adam` is returned in the place of `optax.adam`, and so for each name that
              both have

The test then must see the numbers that it asks for. Two liberties are taken:

- The outermost factory alone is wrapped: of `chain(clip(1), adam(1))` the chain. Inside it, and
  inside the functions of a transformation, factories return what optax returns.
- A test may look at the state. So ampx's state is shown as a `Behind`, which answers as the state
  inside does. ampx is given its own state back; or a fresh one around the inner state, if the test
  has made that by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import installed_tests
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import optax.experimental
from jax.sharding import PartitionSpec as P
from optax._src import test_utils

import ampx

FORMS = ("scale", "window", "zero1", "fused")


class _Run:
    """What the factories do at present: the one global that the patched functions must share."""

    form: str | None = None
    depth: int = 0  # of factories, and of functions of wrapped transformations
    used: bool = False  # whether an `update` inside ampx was called
    names: frozenset[str] = frozenset()  # of the factories that were called


class _InnerAndOuter(NamedTuple):
    """What a `Behind` holds.

    Attributes:
      ampx_inner_state: what the test would see without ampx.
      ampx_state: the other fields of ampx's state, in their order.
    """

    ampx_inner_state: Any
    ampx_state: tuple[Any, ...]


class Behind(_InnerAndOuter):
    """A state of ampx that answers as the state inside it."""

    @property
    def count(self) -> Any:  # a method of tuples otherwise
        return self.ampx_inner_state.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ampx_inner_state, name)

    def __getitem__(self, key: Any) -> Any:
        return self.ampx_inner_state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ampx_inner_state)

    def _replace(self, **values: Any) -> Behind:
        return Behind(*(values.get(name, getattr(self, name)) for name in self._fields))


class Wrapped(optax.GradientTransformationExtraArgs):
    """A transformation inside ampx; `plain` is the one that optax made."""

    plain: Any


def show_inner(tree: Any) -> Any:
    """A tree with the inner state in the place of each `Behind`."""
    return jax.tree.map(
        lambda node: node.ampx_inner_state if isinstance(node, Behind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Behind),
    )


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _Run.depth += 1
    try:
        yield
    finally:
        _Run.depth -= 1


def _scaled(tree: Any, scale: jax.Array) -> Any:
    def times(leaf: Any) -> Any:
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        return leaf * scale.astype(jnp.result_type(leaf)) if inexact else leaf

    return jax.tree.map(times, tree)


def _scale(tx: Any) -> tuple[Any, Callable[..., Any]]:
    # The scale is another one every second step, and small enough for gradients in float16.
    own = ampx.dynamic_loss_scale(tx, init_scale=2.0**2, growth_interval=2, max_scale=2.0**8)

    def update(updates: Any, state: Any, params: Any, **extra: Any) -> Any:
        scale = state.loss_scale
        about = {name: _scaled(extra[name], scale) for name in ("grad",) if name in extra}
        return own.update(_scaled(updates, scale), state, params, **{**extra, **about})

    return own, update


def _window(tx: Any) -> tuple[Any, Callable[..., Any]]:
    own = ampx.multi_steps(tx, every_k=1)
    return own, own.update


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def _zero1(tx: Any) -> tuple[Any, Callable[..., Any]]:
    own = ampx.zero1(tx, "data")
    mesh = _mesh()

    def update(updates: Any, state: Any, params: Any, **extra: Any) -> Any:
        def on_device(updates: Any, state: Any, params: Any) -> Any:
            mine = jax.lax.pcast(updates, "data", to="varying")  # not yet reduced
            return own.update(mine, state, params, **extra)

        params = jax.tree.map(jnp.zeros_like, updates) if params is None else params
        specs = ampx.zero1_specs(own, params, mesh)
        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs)
        )
        return mapped(updates, state, params)

    return own, update


class _Form(NamedTuple):
    """How ampx is put around a transformation.

    Attributes:
      state: the class of ampx's state.
      build: from a transformation to the one around it, and to its update as a test calls it.
    """

    state: Any
    build: Callable[[Any], tuple[Any, Callable[..., Any]]]


_AROUND = {
    "scale": _Form(ampx.LossScaleState, _scale),
    "window": _Form(ampx.MultiStepsState, _window),
    "zero1": _Form(ampx.Zero1State, _zero1),
}


def wrap(form: str, tx: Any) -> Wrapped:
    """A transformation inside ampx."""
    kind, build = _AROUND[form]
    with _inside():
        own, own_update = build(tx)

    def init(params: Any) -> Any:
        with _inside():
            # Tests of what has no state begin with `init(None)`. The update then makes a state.
            return tx.init(params) if params is None else _behind(own.init(params))

    def whole_state(state: Any, params: Any) -> Any:
        if isinstance(state, Behind):
            rest = iter(state.ampx_state)
            inner = state.ampx_inner_state
            return kind(*(inner if f == "inner_state" else next(rest) for f in kind._fields))
        made = own.init(params)
        # Where there is nothing to remember, tests give anything as a state.
        is_empty = state is None or not jax.tree.leaves(made.inner_state)
        return made if is_empty else made._replace(inner_state=state)

    def run(updates: Any, state: Any, params: Any, extra: Any) -> Any:
        state = whole_state(state, updates if params is None else params)
        updates, state = own_update(updates, state, params, **extra)
        return updates, _behind(state)

    compiled = jax.jit(run)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        _Run.used = True
        # Compiled where it can be: a `lax.cond` that is called outside of `jit` is compiled anew
        # each time.
        can_compile = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(extra))
        with _inside():
            return (compiled if can_compile else run)(updates, state, params, extra)

    wrapped = Wrapped(init, update)
    wrapped.plain = tx
    return wrapped


def _behind(state: Any) -> Behind:
    own = [value for name, value in state._asdict().items() if name != "inner_state"]
    return Behind(state.inner_state, tuple(own))


def _plain(argument: Any) -> Any:
    """An argument of a factory without ampx around the transformations in it."""
    is_wrapped = lambda node: isinstance(node, Wrapped)  # noqa: E731
    if not any(map(is_wrapped, jax.tree.leaves(argument, is_leaf=is_wrapped))):
        return argument
    return jax.tree.map(
        lambda node: node.plain if is_wrapped(node) else node, argument, is_leaf=is_wrapped
    )


def _dispatching(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that returns what the present form makes of its transformation."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if factory.__module__ == "optax._src.alias":
            _Run.names |= {factory.__name__}
        if _Run.form == "fused":
            fused = getattr(ampx.fused, factory.__name__, None)
            if fused is None or _Run.depth or factory.__module__ != "optax._src.alias":
                return factory(*args, **kwargs)
            with _inside():
                return _counted(fused(*args, **kwargs))
        if _Run.form is None or _Run.depth:
            return factory(*args, **kwargs)
        args, kwargs = [_plain(arg) for arg in args], {k: _plain(v) for k, v in kwargs.items()}
        with _inside():
            made = factory(*args, **kwargs)
        if isinstance(made, optax.GradientTransformation):
            return wrap(_Run.form, made)
        return _dispatching(made) if inspect.isfunction(made) else made

    return make


def _counted(tx: Any) -> Any:
    def init(params: Any) -> Any:
        with _inside():  # what ampx itself asks of optax
            return tx.init(params)

    def update(*args: Any, **kwargs: Any) -> Any:
        _Run.used = True
        with _inside():
            return tx.update(*args, **kwargs)

    return tx._replace(init=init, update=update)


def _factories() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Every function of optax that returns a transformation, or does not say what it returns."""
    found = {}
    for module in _modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__.startswith("optax."):
                returned = inspect.signature(value).return_annotation
                is_factory = returned is inspect.Signature.empty or "GradientT" in str(returned)
                is_factory &= value.__name__ not in ("<lambda>", "with_extra_args_support")
                if is_factory and not name.startswith("_"):
                    found[value] = _dispatching(value)
    return found


def factory_names() -> set[str]:
    return {factory.__name__ for factory in _factories()}


def _modules() -> list[Any]:
    names = [n for n in sys.modules if n.split(".")[0] == "optax" and not n.endswith("_test")]
    return [sys.modules[name] for name in names if not name.endswith("test_utils")]


@contextlib.contextmanager
def dispatching_optax() -> Iterator[None]:
    """Optax with factories that heed the form, and comparisons that see the inner states."""
    dispatchers = _factories()
    with contextlib.ExitStack() as stack:
        for module in _modules():
            own = {
                name: dispatchers[value]
                for name, value in vars(module).items()
                if inspect.isfunction(value) and value in dispatchers
            }
            stack.enter_context(installed_tests.replaced(module, **own))
        comparisons = {
            name: _on_inner_states(value)
            for name, value in vars(test_utils).items()
            if name.startswith("assert_trees")
        }
        stack.enter_context(installed_tests.replaced(test_utils, **comparisons))
        yield


def _on_inner_states(compare: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compare)
    def compare_inner(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        compare(show_inner(actual), show_inner(desired), *args, **kwargs)

    return compare_inner


class Seen(NamedTuple):
    """What a test did in a form.

    Attributes:
      used: whether it called an `update` inside ampx.
      names: the optimizers of `optax._src.alias` that it made, or had made.
    """

    used: bool
    names: frozenset[str]


@contextlib.contextmanager
def form(name: str | None) -> Iterator[Callable[[], Seen]]:
    """A form, active; the value tells what happened in it."""
    _Run.form, _Run.used, _Run.depth, _Run.names = name, False, 0, frozenset()
    # Results of `zero1` lie on its mesh. Were the first arguments elsewhere, the second call of a
    # step would be compiled anew, which tests of optax count.
    with jax.set_mesh(_mesh()) if name == "zero1" else contextlib.nullcontext():
        try:
            yield lambda: Seen(_Run.used, _Run.names)
        finally:
            _Run.form = None
