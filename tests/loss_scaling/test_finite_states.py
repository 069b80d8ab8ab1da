"""The proof that optimizers stay finite: what it shows must be so, and what is not so not shown.

Soundness is tested from below, with numbers. Programs run equation by equation, and each number
that they compute, on the way as at the end, must lie within the bounds that the analysis gives for
it. Then there are optimizers that are known to fail, and faults put into the analysis.
"""

import pathlib
import re
import zlib

import finite_states
import jax
import jax.numpy as jnp
import large_gradients as large
import numpy as np
import optax
import pytest
from intervals import fixed_points, programs, relations, rules, scopes, values
from intervals.values import Fact
from optax_optimizers import TAKES

from ampx.jaxprs import reading

SMALL = {"w": (3, 4), "b": (4,)}
ANALYSED = [name for name in large.ALL if not finite_states.NEEDS_A_LOSS & set(TAKES.get(name, ()))]
QUICK = ["adam", "lamb", "radam"]


def evaluate(program, operands):
    """All values that a program computes, by variable."""
    env = dict(zip(program.body.invars, operands, strict=True)) | program.constants

    def read(atom):
        return jnp.asarray(atom.val, atom.aval.dtype) if reading.is_literal(atom) else env[atom]

    for eqn in program.body.eqns:
        env.update(zip(eqn.outvars, reading.bind(eqn, [read(x) for x in eqn.invars]), strict=True))
    return env, [read(atom) for atom in program.body.outvars]


def assert_within(array, fact, what):
    """Each number of an array lies within the bounds, and so do its norms."""
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != bool:
        return
    numbers = np.asarray(array).astype(np.float64)
    assert fact.nan or not np.isnan(numbers).any(), what
    numbers = numbers[~np.isnan(numbers)]
    if numbers.size:
        found = numbers.min(), numbers.max(), np.abs(numbers).sum(), np.linalg.norm(numbers.ravel())
        lo, hi, l1, l2 = map(float, found)
        assert fact.lo <= lo and hi <= fact.hi, (what, fact, lo, hi)
        assert l1 <= fact.l1 * (1 + 1e-12) and l2 <= fact.l2 * (1 + 1e-12), (what, fact, l1, l2)
    for part, number in zip(fact.parts or (), np.ravel(array), strict=bool(fact.parts)):
        assert_within(number, part, what)


def draw_gradients(rng, norm):
    """Of a norm, of many sizes at once, nearly all zero, or too small to square."""
    tree = {name: rng.standard_normal(shape) for name, shape in SMALL.items()}
    kind = rng.integers(4)
    if kind == 1:
        tree = {name: x * 10.0 ** rng.uniform(-30, 0, x.shape) for name, x in tree.items()}
    elif kind == 2:
        tree = {name: np.where(rng.random(x.shape) < 0.8, 0, x) for name, x in tree.items()}
    largest = 1e-25 if kind == 3 else norm * 0.999
    norms = {name: np.linalg.norm(x) or 1.0 for name, x in tree.items()}
    return {name: jnp.asarray(x / norms[name] * largest, jnp.float32) for name, x in tree.items()}


@pytest.mark.sampled(2)
@pytest.mark.slow_but(*QUICK)
@pytest.mark.parametrize("name", ANALYSED)
def test_every_number_lies_within_its_bounds(name):
    traced = finite_states.trace(finite_states.make(name), TAKES.get(name, ()), SMALL)
    rng = np.random.default_rng(zlib.crc32(name.encode()))  # other gradients for each
    for norm in (1.0, 1.3e19):
        size = min(norm, finite_states.LARGEST_PARAMS)
        params = jax.tree.leaves(draw_gradients(rng, size))
        _, state = evaluate(traced.init, params)
        proved = None
        try:
            updates, facts = finite_states.prove(traced, norm)
            proved = jax.tree.leaves((updates, facts), is_leaf=lambda x: isinstance(x, Fact))
        except finite_states.NotShown:
            pass
        for _ in range(2):
            grads = [x for _ in range(2) for x in jax.tree.leaves(draw_gradients(rng, norm))]
            value = jnp.float32(rng.uniform(-size, size))
            operands = [*grads, value, *params, *state]
            env, outs = evaluate(traced.update, operands)
            # Bounds as tight as can be: what is computed of exactly these arrays.
            scope = traced.update.run([around(x) for x in operands])
            for eqn in traced.update.body.eqns:
                for out in eqn.outvars:
                    assert_within(env[out], scope.read(out), (name, eqn))
            for array, fact in zip(outs, proved or (), strict=bool(proved)):
                assert_within(array, fact, name)
            state = outs[len(params) :]


def around(array):
    """The fact of an array that is known."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return values.ANYTHING
    return values.of_array(array)


# Numbers at which something happens: signs, 0, underflow, 1, overflow, infinity.
ENDS = [-np.inf, -3.4e38, -2e19, -1.0, -1e-20, -1e-38, 0.0, 1e-40, 1e-30, 0.7, 1.0, 3.0, 1e19, 3e38]
OPERATIONS = {
    **dict.fromkeys(("neg", "abs", "sign", "sqrt", "rsqrt", "cbrt", "exp", "log", "tanh"), 1),
    **dict.fromkeys(("square", "is_finite", "erf_inv"), 1),
    **dict.fromkeys(("add", "sub", "mul", "div", "max", "min", "pow", "rem"), 2),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2),
    **dict.fromkeys(("clamp",), 3),
}


def check_operation(name, cases=40):
    """Compares the rule of an operation with what it makes of numbers inside of intervals."""
    rng = np.random.default_rng(len(name))
    arity = OPERATIONS[name]
    bounds = np.sort(rng.choice(np.float32(ENDS), (cases, arity, 2)))
    inside = 10.0 ** rng.uniform(-40, 38, (cases, arity, 3)) * rng.choice(
        [-1, 1], (cases, arity, 3)
    )
    inside = np.clip(np.float32(inside), bounds[..., :1], bounds[..., 1:])
    numbers = np.concatenate([bounds, inside], -1)
    grids = [np.stack(np.meshgrid(*case)) for case in numbers]  # each with each
    operands = [jnp.asarray(np.stack([grid[i] for grid in grids])) for i in range(arity)]
    function = getattr(jax.lax, name)
    traced, _ = reading.trace(function, *(jnp.float32(0) for _ in operands))
    (eqn,) = programs.Program(traced).body.eqns
    if name == "clamp":
        operands[2] = jnp.maximum(operands[0], operands[2])
    for result, case in zip(np.asarray(function(*operands)), bounds, strict=True):
        facts = [values.of_array(ends) for ends in case]
        if name == "clamp":
            facts[2] = rules.apply(max_equation(), [facts[0], facts[2]])
        fact = rules.apply(eqn, facts)
        assert_within(result, fact._replace(l1=np.inf, l2=np.inf), (name, case))


def max_equation():
    """An equation that takes the larger of two numbers."""
    return reading.trace(jax.lax.max, jnp.float32(0), jnp.float32(0))[0].eqns[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rule_allows_for_all_that_the_operation_computes(name):
    check_operation(name)


@pytest.mark.parametrize("number", [0.1, 0.3, 0.7])
def test_the_rule_of_sums_allows_for_any_order(number):
    """One after another is the worst order; XLA on CPUs takes a better one, and others may not."""
    numbers = np.full(2**20, number, np.float32)
    traced, _ = reading.trace(jnp.sum, numbers)
    (fact,) = programs.Program(traced).results([values.of_array(numbers)])
    assert_within(np.cumsum(numbers)[-1:], fact, "sum")
    assert fact.hi < 1.2 * numbers.sum(dtype=np.float64)


def stateless(function):
    return optax.stateless(lambda grads, _: jax.tree.map(function, grads))


def accumulator(update, start=0.0):
    """An optimizer with one array of its own, which is also the update."""

    def step(grads, state, params=None):
        state = jax.tree.map(update, grads, state)
        return state, state

    return optax.GradientTransformation(lambda p: jax.tree.map(lambda x: x * 0 + start, p), step)


UNSAFE = {
    "a high power": stateless(lambda g: g**8),
    "zero by zero": stateless(lambda g: g / jnp.abs(g)),
    "adam, eps=0": optax.adam(0.1, eps=0.0),
    "adam, float16 moments": optax.adam(0.1, mu_dtype=jnp.float16),
    "centered rmsprop, eps=0": optax.rmsprop(0.1, eps=0.0, centered=True),
    "grows for ever": accumulator(lambda g, s: 1.001 * s + g),
    "grows for ever from one": accumulator(lambda g, s: s * 1.001, start=1.0),
    "through float16": stateless(lambda g: g.astype(jnp.float16).astype(jnp.float32)),
    "an unknown operation": stateless(lambda g: jax.lax.lgamma(g)),
    "a norm of zero": stateless(lambda g: g / jnp.sqrt(jnp.sum(g * g))),
    "the norm of others": stateless(
        lambda g: jnp.where((n := jnp.sqrt(jnp.sum(g[0] ** 2))) > 0, g * (1e15 / n), 0.0)
    ),
    "the guard of another number": stateless(
        lambda g: jnp.where((a := jnp.abs(g)) > 1, 1 / jnp.min(a), 0.0)
    ),
    "the guard of another number, beside one of all": stateless(
        lambda g: jnp.where(
            ((a := jnp.abs(g)) > 1) & (jnp.broadcast_to(n := jnp.max(a), g.shape) > 1),
            1 / jnp.min(a * n),
            0.0,
        )
    ),
    "the guard the wrong way round": stateless(lambda g: jnp.where((a := g * g) > 1, 0.0, 1 / a)),
    "a guard that NaN passes": stateless(
        lambda g: jnp.where((a := g * g) < 1 + jnp.sqrt(g), 0.0, 1 / a)
    ),
    "a matrix and its transpose": stateless(lambda g: jnp.sqrt((2 * g) * g.T)),
    "a loop that overflows": stateless(
        lambda g: jax.lax.fori_loop(0, 99, lambda _, x: x * 10 + 1, g)
    ),
    "a branch that overflows": stateless(
        lambda g: jax.lax.cond(jnp.sum(g) > 0, lambda x: x, lambda x: x * 1e35, g)
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_unsafe_is_not_shown(name):
    verdict = finite_states.judge(UNSAFE[name], norms=(1e6,))
    assert verdict.norm is None and verdict.reason


SAFE = {
    "a guard": stateless(lambda g: jnp.where(g > 1, 1 / g / g, 0.0)),
    "a guarded norm": stateless(
        lambda g: jnp.where((n := jnp.sqrt(jnp.sum(g * g))) == 0, 0.0, g * (1e15 / n))
    ),
    "a loop": stateless(lambda g: jax.lax.fori_loop(0, 99, lambda _, x: 0.5 * x + 1, g)),
    "a branch": stateless(
        lambda g: jax.lax.cond((n := jnp.sum(g)) > 1, lambda x, n: x / n, lambda x, n: x, g, n)
    ),
    "a clip by norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "a schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 100, 1000)),
    "a sum that stands still": accumulator(lambda g, s: s + g),
}


@pytest.mark.parametrize("name", SAFE)
def test_what_is_safe_by_how_its_terms_belong_together_is_shown(name):
    assert finite_states.judge(SAFE[name], norms=(1e6,)).norm == 1e6


def _multiply_carelessly(call):
    a, b = call.facts
    return Fact(a.lo * b.lo, a.hi * b.hi)  # wrong where both are negative


def _no_negative_zero(call):
    a, b = call.facts
    return Fact(0.0, a.largest / (b.hi or 1.0))


FAULTS = {
    "no check": ((fixed_points, "is_inside", lambda *_: True), "grows for ever"),
    "all is elementwise": (
        (scopes, "is_elementwise", lambda _: True),
        "the guard of another number",
    ),
    "any norm will do": ((relations, "dominates", lambda *_: True), "the norm of others"),
    "both answers at once": (
        (scopes, "_side", lambda name, a, b, gap: Fact(1.0, 1.0)),
        "the guard the wrong way round",
    ),
    "conversions keep all": (
        (rules.RULES, "convert_element_type", lambda call: call.facts[0]),
        "through float16",
    ),
    "no rounding of results": ((rules, "rounded", lambda lo, hi, *_: (lo, hi)), "div"),
    "no rounding of sums": ((rules, "rounded_sum", lambda lo, hi, *_: (lo, hi)), "add"),
    "two corners of four": ((rules.RULES, "mul", _multiply_carelessly), "mul"),
    "no zeros in quotients": ((rules.RULES, "div", _no_negative_zero), "zero by zero"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_analysis_is_found(fault, monkeypatch):
    (home, name, replacement), victim = FAULTS[fault]
    put = monkeypatch.setitem if isinstance(home, dict) else monkeypatch.setattr
    put(home, name, replacement)
    if victim in OPERATIONS:
        with pytest.raises(AssertionError):
            check_operation(victim)
    else:
        assert finite_states.judge(UNSAFE[victim], norms=(1e6,)).norm is not None


def run_for(tx, grads, steps, params):
    """The state after steps with gradients by turns."""

    def body(i, state):
        g = jnp.stack(grads)[i % len(grads)]
        return tx.update(g, state, params)[1]

    return jax.jit(lambda: jax.lax.fori_loop(0, steps, body, tx.init(params)))()


@pytest.mark.parametrize("name", ["adagrad", "adabelief", "contrib.normalize"])
def test_what_is_not_shown_may_really_happen(name):
    """The experiment finds none of these: it takes 30 steps, all with the same gradient."""
    params = jnp.ones(2)
    with jax.numpy_dtype_promotion("standard"):
        if name == "adagrad":  # a sum of squares that nothing forgets
            state = run_for(large.make_any(name), [params * 1e18], 400, params)
        elif name == "adabelief":  # the square of a difference, which may be twice the gradient
            grads = [params * 1.2e19] * 20 + [params * -1.2e19]
            state = run_for(large.make_any(name), grads, 21, params)
        else:  # a norm of zero
            state = large.make_any(name).update(params * 0, large.make_any(name).init(params))[0]
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert finite_states.verdict(name).norm in (None, 1e15)


GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/optax_optimizers.md"


def without_lines(row):
    """A row without numbers of lines, which move with each version and each edit."""
    return re.sub(r"(\.py):\d+", r"\1", row)


def tables_of_guide():
    section = GUIDE.read_text().split("## What is proved")[1].split("## ")[0]
    return [without_lines(line) for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", [*QUICK, "adagrad", "contrib.madgrad"])
def test_the_guide_says_for_which_gradients_all_is_finite(name):
    rows = [row for row in tables_of_guide() if f"`{name}`" in row]
    printed = [without_lines(r) for r in finite_states.table([name]) if f"`{name}`" in r]
    assert len(rows) == len(printed)
    for row, expected in zip(rows, printed, strict=True):
        assert row.split("|")[1] == expected.split("|")[1]
        assert expected.split("|")[2].strip() in row


@pytest.mark.slow
def test_the_guide_has_what_the_command_prints():
    assert tables_of_guide() == [without_lines(row) for row in finite_states.table() if row]
