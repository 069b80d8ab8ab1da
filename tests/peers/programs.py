"""Trains programs of other people's packages at several precisions.

A `Program` is a loss with parameters and a batch, put together from its package's own parts as the
package's users would. It knows nothing of ampx. In each of its `FORMS` a program is one case:

    traced         autocast in both half types changes no dtype of loss and gradients, and warns of
                   nothing
    gradients      those of autocast, in both half types, are those of float32 but for rounding
    O0             ten steps of `train_step` are ten steps of optax, bit for bit; the suite trains
                   every third program so, `pytest --whole` all
    O1-bfloat16    ten steps lower the loss about as far as in float32
    O1-float16     the same; the suite runs one of the two, by turns, and `pytest --whole` both
    O2-float16     the same, for models that compute in the dtype of their parameters

Programs are written for JAX's standard promotion of dtypes, so they run under it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

HALVES = ("bfloat16", "float16")
FORMS = ("traced", "gradients", "O0", "O1-bfloat16", "O1-float16", "O2-float16")
RUN = FORMS[1:]
STEPS = 10


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: arrays have no hash
class Program:
    """A loss of somebody's model.

    Attributes:
      loss: a function (params, batch) -> float32 scalar.
      params: a pytree of float32 arrays.
      batch: a pytree of arrays with a leading batch axis, of 4 rows.
      rate: of SGD, so that ten steps lower the loss.
      largest_error: of the gradients' norm, in units of the half type's spacing at 1.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    rate: float = 0.1
    largest_error: float = 8.0


class Programs:
    """The programs of one package.

    Attributes:
      makers: from name to a function that makes the program.
      forms: from name to the forms in which it is run.
      excluded: from case to the reason why it cannot pass.
    """

    def __init__(self, excluded: Mapping[str, str] | None = None) -> None:
        self.makers: dict[str, Callable[[], Program]] = {}
        self.forms: dict[str, tuple[str, ...]] = {}
        self.excluded = dict(excluded or {})

    def add(
        self,
        make: Callable[[], Program] | None = None,
        *,
        casts: bool = False,
        forms: tuple[str, ...] | None = None,
    ) -> Any:
        """Adds a program by the name of the function that makes it; a decorator.

        Args:
          make: makes the program.
          casts: whether it computes in the dtype of its parameters, so that O2 has a meaning.
          forms: in which it is run, if not in all.
        """
        if make is None:
            return functools.partial(self.add, casts=casts, forms=forms)
        self.makers[make.__name__] = make
        self.forms[make.__name__] = forms or (FORMS if casts else FORMS[:-1])
        return make

    def cases(self, forms: Iterable[str] = FORMS) -> list[str]:
        """The names of all cases, or of those in some of the forms."""
        return [
            f"{name}-{form}" for name, own in self.forms.items() for form in own if form in forms
        ]

    def in_suite(self) -> list[str]:
        """The names of the cases that the suite runs."""
        left_out = {
            f"{name}-{form}"
            for number, (name, own) in enumerate(self.forms.items())
            for form in (("O1-bfloat16",), ("O1-float16", "O0"), ("O1-bfloat16", "O0"))[number % 3]
            if {"O1-bfloat16", "O1-float16"} <= set(own)
        }
        return [case for case in self.cases() if case not in left_out]

    def check(self, case: str) -> None:
        """Runs a case; one that is excluded must fail."""
        name, form = case.split("-", 1)
        try:
            with jax.numpy_dtype_promotion("standard"):
                CHECKS[form](make_once(self.makers[name]))
        except Exception:
            if case not in self.excluded:
                raise
        else:
            assert case not in self.excluded, "it passes now: take it off the list"


def parametrize_cases(packages: Iterable[Programs], forms: Iterable[str]) -> pytest.MarkDecorator:
    """Gives a test (programs, case) the cases of some packages in some of the forms."""
    cases = [
        pytest.param(own, case, id=case, marks=() if case in own.in_suite() else pytest.mark.whole)
        for own in packages
        for case in own.cases(forms)
    ]
    return pytest.mark.parametrize(("programs", "case"), cases)


make_once = functools.lru_cache(maxsize=2)(lambda make: make())


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fill(shapes: Any) -> Any:
    """Parameters for the shapes of a model: to run its own initializers, they must be compiled."""
    rng = np.random.default_rng(0)

    def fill_leaf(path: Any, leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        if leaf.ndim > 1:
            fan_in = np.prod(leaf.shape[:-1])
            return (rng.standard_normal(leaf.shape) / np.sqrt(fan_in)).astype(np.float32)
        name = jax.tree_util.keystr(path[-1:], simple=True)
        is_scale = name in ("scale", "weight", "weight_spectral_norm")
        return (np.ones if is_scale else np.zeros)(leaf.shape, np.float32)

    return jax.tree_util.tree_map_with_path(fill_leaf, shapes)


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def mean_square(found: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((found.astype(jnp.float32) - target) ** 2)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def like_params(params: Any, x: jax.Array) -> jax.Array:
    """The input in the dtype in which most parameters are."""
    halves = [leaf.dtype for leaf in jax.tree.leaves(params) if leaf.dtype in HALVES]
    return x.astype(halves[0]) if halves else x


SEQUENCE = {"x": draw(4, 6, 8), "y": draw(4, 6, 8, seed=1)}
VECTORS = {"x": draw(4, 8), "y": draw(4, 8, seed=1)}
IMAGES = {"x": draw(4, 8, 8, 3), "y": np.arange(4)}


def check_traced(program: Program) -> None:
    plain = jax.eval_shape(jax.value_and_grad(program.loss), program.params, program.batch)
    for half in HALVES:
        of_autocast = jax.value_and_grad(ampx.autocast(program.loss, half_dtype=half))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = jax.eval_shape(of_autocast, program.params, program.batch)
        assert jax.tree.structure(found) == jax.tree.structure(plain)
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            assert (own.shape, own.dtype) == (other.shape, other.dtype)


def norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def check_gradients(program: Program) -> None:
    # As in training, half gradients are of a scaled loss.
    scale = 256.0

    @jax.jit
    def compare(params: Any, batch: Any) -> Any:
        exact = jax.grad(program.loss)(params, batch)
        errors = []
        for half in HALVES:
            grads_of = ampx.value_and_grad(ampx.autocast(program.loss, half_dtype=half))
            grads = grads_of(params, batch, loss_scale=scale).grads
            difference = jax.tree.map(lambda own, other: own / scale - other, grads, exact)
            errors.append(norm(difference) / norm(exact))
        return errors

    for half, error in zip(HALVES, compare(program.params, program.batch), strict=True):
        assert error <= program.largest_error * float(jnp.finfo(half).eps), (half, error)


def train(program: Program, step: ampx.TrainStep) -> tuple[Any, np.ndarray]:
    """The parameters after ten steps, and the loss before each of them."""

    @jax.jit
    def run(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: step(s, program.batch), state, length=STEPS)

    state, reports = run(step.init(program.params))
    assert int(state.step) == STEPS and not np.any(reports.overflow)
    return state.params, np.asarray(reports.loss)


@functools.lru_cache(maxsize=2)  # a program's cases run one after the other
def train_by_optax(program: Program) -> tuple[Any, np.ndarray]:
    tx = optax.sgd(program.rate)

    @jax.jit
    def run(params: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            loss, grads = jax.value_and_grad(program.loss)(params, program.batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
        return params, losses

    params, losses = run(jax.tree.map(jnp.asarray, program.params))
    return params, np.asarray(losses)


def check_o0(program: Program) -> None:
    params, losses = train(program, ampx.train_step(program.loss, optax.sgd(program.rate)))
    expected, expected_losses = train_by_optax(program)
    assert expected_losses[-1] < expected_losses[0]
    np.testing.assert_array_equal(losses, expected_losses)
    for own, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)


def check_level(program: Program, level: str, half: str) -> None:
    # A scale that all of these programs bear from the first step on.
    recipe = ampx.opt_level(level, half_dtype=half, loss_scale=128.0)
    step = ampx.train_step(program.loss, optax.sgd(program.rate), policy=recipe)
    _, losses = train(program, step)
    _, expected = train_by_optax(program)
    gain, expected_gain = losses[0] - losses[-1], expected[0] - expected[-1]
    assert 0.8 * expected_gain < gain < 1.25 * expected_gain, (gain, expected_gain)


CHECKS: dict[str, Callable[[Program], None]] = {
    "traced": check_traced,
    "gradients": check_gradients,
    "O0": check_o0,
    "O1-bfloat16": functools.partial(check_level, level="O1", half="bfloat16"),
    "O1-float16": functools.partial(check_level, level="O1", half="float16"),
    "O2-float16": functools.partial(check_level, level="O2", half="float16"),
}
