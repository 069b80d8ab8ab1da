"""JAX's own programs under autocast: a harness for nearly every primitive, shape and dtype.

They come out of the jax wheel (`jax._src.internal_test_util.test_harnesses`, by which jax2tf and
export are tested): some 5,600 small programs in 130 groups. None was written with autocast in mind,
so they hold what its own tests forgot: index operands, integer and complex operands, empty arrays,
linear algebra, random bits. Every program is traced: forward in both half types, and by turns its
gradients or a batch of it, each in one half type. One or two of each group are run.

The five groups of scatters cross all their options, which makes them more than half of all
programs. Those are traced forward. In the other forms are traced those before, one of each dtype,
and every seventh of the crossed ones: among these is each shape, mode and dtype.

With `pytest --whole` every program is traced in all five forms and in both half types.
"""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses
from listing import Peer

import ampx

HALVES = ("bfloat16", "float16")
# What cannot pass: the harness's name, and the reason. A case listed here that passes is an error.
EXCLUDED: dict[str, str] = {}
PEERS = (
    Peer(
        source="jax",
        runs="the harnesses of its primitives under `ampx.autocast`: all traced, forward in both "
        "half types, and as gradients and under `vmap`, with autocast inside and outside, in one "
        "of them; one or two of each group are run",
        cases=lambda: [harness.fullname for harness in test_harnesses.all_harnesses],
        excluded=EXCLUDED,
    ),
)


class Form(NamedTuple):
    """A program in one form.

    Attributes:
      plain: as JAX runs it.
      under_autocast: from a half type to the same form with autocast in it.
      arguments: what both take.
    """

    plain: Callable
    under_autocast: Callable[[str], Callable]
    arguments: list[Any]


MANY = 400  # programs of a group: if it has more, few are traced in more than one form
CROSSED = 16  # from which place on such a group crosses its options
FEW = 4  # if it has fewer, each is traced in every form


def harnesses_by_group() -> dict[str, list[Any]]:
    groups = collections.defaultdict(list)
    for harness in test_harnesses.all_harnesses:
        groups[harness.group_name].append(harness)
    return dict(groups)


GROUPS = harnesses_by_group()


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def sum_of_floats(outputs: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if is_float(leaf)]
    return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), jnp.float32(0))


def cast(fun: Callable, half: str) -> Callable:
    return ampx.autocast(fun, half_dtype=half)


def forms_of(
    harness: Any, gradients: bool = True, batches: bool = True, cast: Callable = cast
) -> Iterator[tuple[str, Form]]:
    """The program as it is, its gradients, and a batch of it; autocast inside and outside.

    Args:
      harness: one of JAX's programs.
      gradients: whether to give its gradients.
      batches: whether to give a batch of it.
      cast: puts a function under autocast, by the word that `Form.under_autocast` is given.
    """
    arguments = harness.dyn_args_maker(np.random.RandomState(0))
    fun = harness.dyn_fun
    yield "forward", Form(fun, lambda half: cast(fun, half), arguments)
    floats = tuple(n for n, argument in enumerate(arguments) if is_float(argument))
    if floats and gradients:

        def gradient(fun: Callable) -> Callable:
            return jax.grad(lambda *args: sum_of_floats(fun(*args)), floats)

        of_fun = gradient(fun)
        inside, outside = (lambda h: gradient(cast(fun, h))), (lambda h: cast(of_fun, h))
        yield "gradient of autocast", Form(of_fun, inside, arguments)
        yield "autocast of gradient", Form(of_fun, outside, arguments)
    if arguments and batches:
        batch = [np.stack([argument, argument]) for argument in arguments]
        batched = jax.vmap(fun)
        yield "vmap of autocast", Form(batched, lambda half: jax.vmap(cast(fun, half)), batch)
        yield "autocast of vmap", Form(batched, lambda half: cast(batched, half), batch)


def shapes_of(form: Form) -> Any | None:
    """What a program returns, or None where JAX itself cannot trace it in this form."""
    try:
        return jax.eval_shape(form.plain, *form.arguments)
    except Exception:  # whatever JAX says of its own program
        return None


def check_traced(
    harness: Any, halves: Sequence[str] = HALVES, further_halves: int = 1, **forms: bool
) -> None:
    """Autocast changes float32 to half here and there, and nothing else of the outputs' types.

    Args:
      harness: one of JAX's programs.
      halves: the half types.
      further_halves: in how many of these the forms other than the first are traced.
      forms: which forms there are but for the first, as `forms_of` takes them.
    """
    for place, (name, form) in enumerate(forms_of(harness, **forms)):
        expected = shapes_of(form)
        if expected is None:
            continue
        for half in halves[: further_halves if place else None]:
            found = jax.eval_shape(form.under_autocast(half), *form.arguments)
            assert jax.tree.structure(found) == jax.tree.structure(expected), name
            for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                allowed = (other.dtype, np.dtype(half) if other.dtype == np.float32 else None)
                assert own.shape == other.shape and own.dtype in allowed, (name, own, other)


def check_run(harness: Any, half: str, **forms: bool) -> None:
    """Same integers, same pattern of finite values, and errors that the half type explains."""
    chosen = {
        name: form for name, form in forms_of(harness, **forms) if shapes_of(form) is not None
    }
    own = {name: form.under_autocast(half) for name, form in chosen.items()}
    plain = {form.plain: form.arguments for form in chosen.values()}  # two forms may share one

    def run_all(arguments: Any) -> Any:
        expected = {fun: fun(*args) for fun, args in zip(plain, arguments[1], strict=True)}
        return {
            name: (fun(*arguments[0][name]), expected[chosen[name].plain])
            for name, fun in own.items()
        }

    try:  # one program of all, since most of them cost little more than that they are compiled
        given = {name: form.arguments for name, form in chosen.items()}
        results = jax.jit(run_all)((given, list(plain.values())))
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        results = {}
        for name, form in chosen.items():
            with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
                expected = jax.jit(form.plain)(*form.arguments)  # else not on this backend
                results[name] = None, expected
        for name, (_, expected) in results.items():
            results[name] = jax.jit(own[name])(*chosen[name].arguments), expected
    for name, (found, expected) in results.items():
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            check_close(one, other, half, name)


def check_close(own: Any, other: Any, half: str, name: str) -> None:
    if not jnp.issubdtype(other.dtype, jnp.inexact):
        np.testing.assert_array_equal(_as_numpy(own), _as_numpy(other), err_msg=name)
        return
    own, other = (np.asarray(x, np.complex128) for x in (own, other))
    finite = np.isfinite(other)
    largest = float(jnp.finfo(half).max)
    within = finite & (np.abs(other) < largest / 2)  # what half can hold must stay finite
    assert np.all(np.isfinite(own[within])), name
    assert np.array_equal(np.isnan(own), np.isnan(other)), name
    scale = np.max(np.abs(other[within]), initial=0.0)
    error = np.max(np.abs(own[within] - other[within]), initial=0.0)
    # A sum of n products of rounded factors is off by at most some roundings of its largest terms.
    assert error <= 16 * float(jnp.finfo(half).eps) * scale + 1e-30, (name, error, scale)


def _as_numpy(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def check_all(check: Callable[[Any], None], harnesses: list[Any]) -> None:
    """Runs a check over harnesses, and compares the failures with the list of the excluded."""
    failures, passed = {}, []
    # Harnesses are written for JAX's own rules of promotion.
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        for harness in harnesses:
            try:
                check(harness)
            except Exception as error:
                failures[harness.fullname] = f"{type(error).__name__}: {error}"[:300]
            else:
                passed.append(harness.fullname)
    unexpected = {name: error for name, error in failures.items() if name not in EXCLUDED}
    assert not unexpected, f"{len(unexpected)} of {len(harnesses)}: {unexpected}"
    assert not set(passed) & set(EXCLUDED), "these pass now: take them off the list"


def test_one_program_of_every_third_group_is_traced():
    chosen = [group[0] for group in GROUPS.values()][::3]
    check_all(functools.partial(check_traced, halves=HALVES[:1]), chosen)


def all_traces(programs: list[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each program, and what `check_traced` takes to trace it in every form and half type."""
    return ((harness, {"further_halves": len(HALVES)}) for harness in programs)


def some_traces(programs: list[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each program, and what `check_traced` takes to trace it in those forms whose turn it is."""
    turn = 0
    for place, harness in enumerate(programs):
        if len(programs) > MANY and place > CROSSED and place % 20:
            halves, forms = HALVES[place % 2 :][:1], {"gradients": False, "batches": False}
        else:
            halves, forms = HALVES[:: -1 if turn % 2 else 1], {}
            if len(programs) >= FEW:
                forms = {"gradients" if turn // 2 % 2 else "batches": False}
            turn += 1
        yield harness, {"halves": halves, **forms}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_programs_are_traced(request, group):
    choose = all_traces if request.config.getoption("--whole") else some_traces
    for harness, options in choose(GROUPS[group]):
        check_all(functools.partial(check_traced, **options), [harness])


# One at either end of a group: shapes grow along it, dtypes change. Of every second group the suite
# runs both, and of the others the one that runs backward.
BOTH = [f"{group}-first" for group in list(GROUPS)[::2]]


@pytest.mark.slow
@pytest.mark.whole_but(*BOTH, *(f"{group}-last" for group in GROUPS))
@pytest.mark.parametrize("end", ["first", "last"])
@pytest.mark.parametrize("group", GROUPS)
def test_some_programs_of_every_group_are_run(group, end):
    # One in each half type. The last runs backward, the first as a batch, and backward, too, where
    # the last cannot.
    first, last = GROUPS[group][0], GROUPS[group][-1]
    if end == "last":
        check_all(functools.partial(check_run, half=HALVES[1], batches=False), [last])
        return
    backward = not any(map(is_float, last.dyn_args_maker(np.random.RandomState(0))))
    check_all(functools.partial(check_run, half=HALVES[0], gradients=backward), [first])


def test_the_harnesses_are_there():
    assert len(GROUPS) > 100 and len(test_harnesses.all_harnesses) > 5000
