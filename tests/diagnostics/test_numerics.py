"""numerics_report: counts, shares, loss scales and advice, against NumPy on the values."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import ampx
from ampx.diagnostics.exponents import EXPONENTS, FORMATS, Histogram, count_exponents
from ampx.diagnostics.numerics import numerics_report
from ampx.diagnostics.recommendations import (
    LADDER,
    LARGEST_LOSS,
    TOLERANCE,
    Evidence,
    Findings,
    find_scale_range,
    recommend,
)
from ampx.jaxprs import reading, source_info

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def cast(values, name, scale=1.0):
    """What a cast of float32 numbers times a scale gives, in float64."""
    scaled = np.asarray(values, np.float64) * scale
    kept = scaled.astype(np.float32)
    exact = np.abs(scaled) < 2.0**128
    assert (kept[exact] == scaled[exact]).all(), "a case that the cast would round twice"
    with np.errstate(over="ignore", invalid="ignore"):
        return kept.astype(DTYPES[name]).astype(np.float64)


def brute(values, name, scale=1.0):
    """How many numbers become zero, subnormal, non-finite."""
    values = np.asarray(values)[np.asarray(values) != 0]
    got, normal = cast(values, name, scale), float(ml_dtypes.finfo(DTYPES[name]).smallest_normal)
    return (
        int(np.sum(got == 0)),
        int(np.sum((got != 0) & (np.abs(got) < normal))),
        int(np.sum(~np.isfinite(got))),
    )


def counted(histogram, name, shift=0):
    form = FORMATS[name]
    kinds = (histogram.underflows, histogram.subnormals, histogram.overflows)
    return tuple(count(form, shift) for count in kinds)


def spread(seed=0, low=-45, high=45, size=4000):
    """Numbers of many sizes, with those where a format changes its mind and their neighbours."""
    rng = np.random.default_rng(seed)
    numbers = 2.0 ** rng.uniform(low, high, size) * rng.choice([-1, 1], size)
    numbers = numbers.astype(np.float32)
    edges = []
    for name, dtype in DTYPES.items():
        info = ml_dtypes.finfo(dtype)
        tiny, normal, largest = map(
            float, (info.smallest_subnormal, info.smallest_normal, info.max)
        )
        if name != "bfloat16":
            edges += [tiny / 2, tiny, normal, normal - tiny / 2, normal - tiny, largest]
            edges += [largest * (1 + 2.0 ** -(k + 2)) for k in range(1, 12)]
            edges += [65520.0, 61440.0, 464.0, 480.0]
    edges = np.array([e for e in edges if 2.0**low < e < 2.0**high], np.float32)
    return np.concatenate(
        [numbers, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e30))]
    )


# Counts


def test_exponents_are_those_of_frexp():
    values = spread(low=-148, high=127)
    values = np.concatenate([values, [0.0, -0.0, np.inf, np.nan, 2.0**-149, 3 * 2.0**-149]])
    found = count_exponents(values.astype(np.float32))
    finite = values[np.isfinite(values) & (values != 0)]
    exponents = np.frexp(finite)[1] - 1
    np.testing.assert_array_equal(
        found.counts, [np.sum(exponents == exponent) for exponent in EXPONENTS]
    )
    assert (found.zeros, found.non_finite, found.nonzero) == (2, 2, len(finite))
    assert found.largest_exponent == exponents.max()
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        own = values[np.abs(values) < 100].astype(dtype)
        exponents = np.frexp(own.astype(np.float64)[own != 0])[1] - 1
        np.testing.assert_array_equal(
            count_exponents(own).counts, [np.sum(exponents == exponent) for exponent in EXPONENTS]
        )
    pair = count_exponents(np.array([3 + 0.25j], np.complex64))
    assert EXPONENTS[pair.counts.nonzero()].tolist() == [-2, 1]
    assert Histogram().largest_exponent is None


@pytest.mark.parametrize("name", DTYPES)
def test_shares_are_those_of_a_cast_at_every_scale(name):
    values = spread()
    found = count_exponents(values)
    for shift in range(-30, 31):
        assert counted(found, name, shift) == brute(values, name, 2.0**shift), shift
    wide = spread(seed=1, low=-140, high=127)
    assert counted(count_exponents(wide), name) == brute(wide, name)
    form, dtype = FORMATS[name], ml_dtypes.finfo(DTYPES[name])
    assert form.largest == float(dtype.max)


@pytest.mark.parametrize("name", ("float16", "float8_e4m3fn", "float8_e5m2"))
@pytest.mark.parametrize("center", (-18, 0, 9))
def test_the_range_of_scales_against_all_scales(name, center):
    values = spread(seed=abs(center), low=center - 9, high=center + 6, size=3000)
    found = count_exponents(values)
    scales = range(-40, 41)
    all_of = {shift: brute(values, name, 2.0**shift) for shift in scales}
    high = max(shift for shift in scales if not all_of[shift][2])
    allowed = all_of[high][0] / len(values) + 0.001
    low = min(s for s in scales if s <= high and all_of[s][0] / len(values) <= allowed)
    assert find_scale_range(found, name) == (low, high)
    assert low < high or name != "float16"
    assert TOLERANCE == 0.001


def test_no_gradients_fit_at_every_scale():
    assert find_scale_range(Histogram(), "float16") == (-126, 126)


# Walks


def histogram_by_hand(*arrays):
    values = np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in arrays])
    exponents = np.frexp(values[values != 0])[1] - 1
    return [int(np.sum(exponents == exponent)) for exponent in EXPONENTS]


def test_a_closed_form():
    w = jnp.array([0.5, 3.0, 0.0, -1.25, 100.0])

    def loss(w):
        with jax.named_scope("wave"):
            return 8.0 * jnp.sum(jnp.sin(w))

    report = numerics_report(loss)(w)
    sin, cos = jnp.sin(w), jnp.cos(w)
    total = jnp.sum(sin)
    keys = {("wave", "forward"), ("wave", "backward"), ("", "forward"), ("", "parameter")}
    assert set(report.counts) == keys
    assert report.counts["", "forward"].tolist() == histogram_by_hand(w)
    assert report.counts["wave", "forward"].tolist() == histogram_by_hand(
        sin, cos, total, 8 * total
    )
    seed = np.full(5, 8.0)
    assert report.counts["wave", "backward"].tolist() == histogram_by_hand(8.0, seed, seed * cos)
    assert report.counts["", "parameter"].tolist() == histogram_by_hand(seed * cos)
    assert report.histograms["wave", "forward"].zeros == 1
    np.testing.assert_array_equal(report.exponents, np.arange(-149, 129))
    np.testing.assert_array_equal(report.counts_of("backward"), report.counts["wave", "backward"])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(3, name="head")(x)


def net():
    x = jax.random.normal(jax.random.key(1), (5, 8)) * 30
    params = Net().init(jax.random.key(0), x)["params"]

    def loss(params, x):
        return jnp.mean(Net().apply({"params": params}, x) ** 2)

    return loss, params, x


def flat_values(loss, *args):
    """All floating results of a loss and its gradient, with scope, and whether of the gradient."""

    def both(cotangent, *args):
        value, pull = jax.vjp(lambda params: loss(params, *args[1:]), args[0])
        return value, pull(cotangent)

    with jax.disable_jit():  # leaves no calls
        jaxpr, _ = reading.trace(both, jnp.ones(()), *args)
    opened = reading.open_jaxpr(jaxpr)
    known = dict(zip(opened.constvars, reading.constants_of(jaxpr), strict=True))
    known |= dict(zip(opened.invars, [jnp.ones(()), *jax.tree.leaves(args)], strict=True))
    backward = {opened.invars[0]}
    needed, eqns = set(filter(lambda a: not reading.is_literal(a), opened.outvars)), []
    for eqn in reversed(opened.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.insert(0, eqn)
            needed.update(a for a in eqn.invars if not reading.is_literal(a))
    for eqn in eqns:
        values = [a.val if reading.is_literal(a) else known[a] for a in eqn.invars]
        results = reading.bind(eqn, values)
        known |= dict(zip(eqn.outvars, results, strict=True))
        depends = any(not reading.is_literal(a) and a in backward for a in eqn.invars)
        backward.update(eqn.outvars if depends else ())
        scope, direction = "/".join(source_info.scope_of(eqn)), "backward" if depends else "forward"
        for result in results:
            if jnp.issubdtype(result.dtype, jnp.floating):
                yield scope, direction, np.asarray(result)


@pytest.mark.slow
def test_a_flax_model_against_its_values():
    loss, params, x = net()
    report = numerics_report(loss, loss_scale=2.0**12)(params, x)
    found = {}
    for scope, direction, values in flat_values(loss, params, x):
        found.setdefault((scope, direction), []).append(values.ravel())
    found = {key: np.concatenate(values) for key, values in found.items()}
    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.grad(loss)(params, x)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name, "parameter"] = np.ravel(gradient)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        found[jax.tree_util.keystr(path, simple=True, separator="/"), "forward"] = np.ravel(array)
    assert {"Net/Dense_0", "Net/LayerNorm_0", "Net/head"} <= {scope for scope, _ in found}
    assert set(report.counts) == set(found)
    for name in DTYPES:
        for row in report.table(name):
            values = found[row.scope, row.direction]
            scale = 1.0 if row.direction == "forward" else 2.0**12
            shares = np.array(brute(values, name, scale)) / max(1, np.sum(values != 0))
            assert (row.underflow, row.subnormal, row.overflow) == tuple(shares), (name, row)
            assert row.zeros == np.sum(values == 0) and row.values == np.sum(values != 0)
    gradients = np.concatenate([values for (_, d), values in found.items() if d != "forward"])
    low, high = report.loss_scales("float16")
    scales = [2.0**shift for shift in range(-30, 31)]
    lost = {scale: brute(gradients, "float16", scale) for scale in scales}
    assert high == max(scale for scale in scales if not lost[scale][2])
    most = lost[high][0] + 0.001 * np.sum(gradients != 0)
    assert low == min(scale for scale in scales if lost[scale][0] <= most)


def sums(report):
    """All counts of a report, by direction."""
    return {d: report.counts_of(d).tolist() for d in ("forward", "backward", "parameter")}


def test_loops_count_in_every_iteration_and_calls_by_what_is_inside():
    def step(carry, x):
        return jnp.sin(carry * x), None

    def scanned(w, xs):
        return jnp.sum(lax.scan(step, w, xs)[0])

    def unrolled(w, xs):
        for x in [lax.index_in_dim(xs, i, keepdims=False) for i in range(len(xs))]:
            w = step(w, x)[0]
        return jnp.sum(w)

    w, xs = jnp.array([0.1, 0.2]), jnp.array([[3.0, 1.0], [40.0, 2.0], [500.0, 3.0]])
    report = numerics_report(jax.jit(scanned))(w, xs)

    def counts(fun):
        return {d: np.array(own) for d, own in sums(numerics_report(fun)(w, xs)).items()}

    loop, flat = counts(scanned), counts(unrolled)
    assert sums(report) == {d: own.tolist() for d, own in loop.items()}
    slices = np.array(histogram_by_hand(xs, xs))  # each sliced, and its axis of one dropped
    np.testing.assert_array_equal(loop["forward"], flat["forward"] - slices)
    np.testing.assert_array_equal(loop["parameter"], flat["parameter"])
    repeated = lambda w: jnp.sum(lax.fori_loop(0, 3, lambda i, w: jnp.sin(w), w))  # noqa: E731
    forward = numerics_report(repeated)(w).counts_of("forward")
    one, two, three = jnp.sin(w), jnp.sin(jnp.sin(w)), jnp.sin(jnp.sin(jnp.sin(w)))
    expected = np.array(histogram_by_hand(one, two, three, jnp.sum(three)))
    assert (forward - expected >= 0).all() and forward.sum() > expected.sum()  # and cosines


def test_what_remat_runs_again_is_no_gradient():
    def block(w):
        return jnp.sin(jnp.sin(w) * 1e4)

    plain = lambda w: jnp.sum(block(w))  # noqa: E731
    again = lambda w: jnp.sum(jax.checkpoint(block)(w))  # noqa: E731
    w = jnp.array([0.3, 0.7])
    once, twice = numerics_report(plain)(w), numerics_report(again)(w)
    np.testing.assert_array_equal(once.counts_of("backward"), twice.counts_of("backward"))
    assert twice.counts_of("forward").sum() > once.counts_of("forward").sum()


def test_fills_of_masks_are_counted_apart():
    mask = jnp.array([True, False, True, False])

    def loss(w, fill):
        scores = jnp.where(mask, w, fill)
        return jnp.sum(jnp.square(jax.nn.softmax(scores)))

    w = jnp.array([1.0, 2.0, 3.0, 4.0])
    for fill in (float(jnp.finfo("float32").min), -1e9):
        report = numerics_report(lambda w, f=fill: loss(w, f))(w)
        forward = [row for row in report.table("float16") if row.direction == "forward"]
        assert sum(row.fills for row in forward) > 0
        assert not any(row.overflow for row in forward)
    report = numerics_report(lambda w: loss(w, -jnp.inf))(w)
    assert sum(row.non_finite for row in report.table("float16")) > 0
    # A large number that is multiplied by is none.
    report = numerics_report(lambda w: jnp.sum(w * 1e6))(w)
    forward = [row for row in report.table("float16") if row.direction == "forward"]
    assert [(row.fills, row.overflow) for row in forward] == [(0, 5 / 9)]  # the rest is w


def fills_and_overflows(loss, *args):
    """How many forward values of a loss are fills, and exceed float16."""
    forward = [h for (_, d), h in numerics_report(loss)(*args).histograms.items() if d == "forward"]
    return sum(h.fills for h in forward), sum(h.overflows(FORMATS["float16"]) for h in forward)


def test_real_numbers_that_are_large_are_no_fills():
    w, x = jnp.ones((8, 4)), jnp.ones((8, 4))
    # What is added is a number like others: x + 1e5, its product with w, and the sum of that.
    assert fills_and_overflows(lambda w: jnp.mean((x + 1e5) * w) * 1e-3, w) == (0, 66)
    assert fills_and_overflows(lambda w: jnp.mean((x - 1e5) * w) * 1e-3, w) == (0, 66)
    # It is a mask from -1e9 down and at the end of a dtype; in the sum of all it counts.
    for mask in (-1e9, jnp.finfo("float32").max, float(jnp.finfo("bfloat16").max)):
        assert fills_and_overflows(lambda w, m=mask: jnp.sum(jnp.tanh(w + m)), w) == (32, 0)
        assert fills_and_overflows(lambda w, m=mask: jnp.sum(jnp.tanh(w - -m)), w)[0] == (
            32 if mask > 0 else 0
        )
    # An array is data, and counts where it is closed over.
    data = jnp.full((8, 4), 1e5)
    fills, overflows = fills_and_overflows(lambda w: jnp.mean(data @ w) * 1e-4, jnp.ones((4, 2)))
    assert (fills, overflows) == (0, 32 + 16 + 1 + 1)
    # Where a number is picked, it is the fill, and others as large are not.
    mask = jnp.arange(8)[:, None] < 2
    fills, overflows = fills_and_overflows(
        lambda w: jnp.mean(jnp.tanh(jnp.where(mask, 1e5, w))), jnp.full((8, 4), 2e5)
    )
    assert (fills, overflows) == (32 + 8, 32 + 24)  # broadcast, picked; w, and what is left of it


def test_has_aux_and_nnx_modules():
    loss, params, x = net()
    with_aux = numerics_report(lambda p, x: (loss(p, x), {"n": 1}), has_aux=True)(params, x)
    assert sums(with_aux) == sums(numerics_report(loss)(params, x))

    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 2, rngs=nnx.Rngs(0))

    def nnx_loss(model, x):
        return jnp.mean(model.linear(x))

    report = numerics_report(nnx_loss)(Model(), np.asarray(x))
    gradient = jnp.broadcast_to(jnp.mean(x, axis=0)[:, None] / 2, (8, 2))
    kernel = report.counts["linear/kernel/value", "parameter"]
    assert kernel.tolist() == histogram_by_hand(gradient)


# The ladder


def found(forward=(1.0,), gradients=(1.0,), products=None):
    """Findings of these values; those of products are the same unless told."""

    def evidence(forward, gradients):
        histograms = [count_exponents(np.array(v, np.float32)) for v in (forward, gradients)]
        return Evidence({"layer": histograms[0]}, {"layer": histograms[1]})

    everything = evidence(forward, gradients)
    return Findings(everything, everything if products is None else evidence(*products))


FIRST = ("O2", "float16", 128.0)
SECOND = ("O1", "float16", 128.0)
THIRD = ("O1", "float16", "dynamic")
FOURTH = ("O2", "bfloat16", None)
LAST = ("O0", None, None)
WIDE = tuple(2.0**e for e in range(-60, 16))


@pytest.mark.parametrize(
    ("findings", "rung", "reason"),
    [
        (found(), FIRST, "the cheapest choice holds all values"),
        (found([6e4], [2.0**-20, 500.0]), FIRST, "holds"),
        (found([65520.0], products=([1.0], [1.0])), SECOND, "1 forward values exceed 65504"),
        (found([1.0], [512.0], ([1.0], [1.0])), SECOND, "overflow at a loss scale of 128: 2**6"),
        (found([1.0], [2.0**-40], ([1.0], [1.0])), SECOND, "underflow at a loss scale of 128"),
        (found([1.0], [600.0]), THIRD, "2**6 is the largest"),
        (found([1.0], [2.0**-40]), THIRD, "it takes 2**16"),
        (found([1e5]), FOURTH, "most of them in layer"),
        (found([1.0], [2.0**17]), FOURTH, "overflow at every loss scale from 1 on: 2**-2"),
        (found([1.0], [2.0**-60]), FOURTH, "underflow at every loss scale up to 2**24"),
        (found([1.0], WIDE), FOURTH, "underflow even at the largest loss scale, 2**0"),
        (found([3.4e38]), LAST, "1 forward values exceed 3.38953e+38"),
        (found([1.0], [3.4e38]), LAST, "1 gradients overflow in bfloat16"),
        (found([1.0], [2.0**-140, 2.0**127]), LAST, "50.0% of the gradients underflow"),
    ],
)
def test_each_rung_is_reached(findings, rung, reason):
    best = recommend(findings)
    assert best[:3] == rung and reason in best.reason
    refused = best.reason.count("not O")
    assert refused == [step[:3] for step in LADDER].index(rung)


def test_every_rung_is_an_opt_level():
    for rung in LADDER:
        half = {"half_dtype": rung.half_dtype} if rung.half_dtype else {}
        recipe = ampx.opt_level(rung.level, loss_scale=rung.loss_scale, **half)
        assert recipe.level == rung.level and recipe.loss_scale == rung.loss_scale
    assert [rung[:3] for rung in LADDER] == [FIRST, SECOND, THIRD, FOURTH, LAST]
    assert LARGEST_LOSS == 0.05


def test_what_a_program_shows_leads_to_a_rung():
    w, x = jnp.full((4, 4), 0.5), jnp.full((8, 4), 0.5)

    def recommended(loss):
        return numerics_report(loss)(w, x).recommended[:3]

    def product(w, x):
        return jnp.mean(x @ w)

    assert recommended(product) == FIRST
    # Overflow outside of products: O1 has it in float32.
    assert recommended(lambda w, x: jnp.mean(jnp.exp(15 * x @ w)) * 1e-6) == SECOND
    assert recommended(lambda w, x: product(w, x) * 2.0**13) == THIRD
    assert recommended(lambda w, x: product(w * 1e5, x)) == FOURTH
    assert recommended(lambda w, x: product(w * 2e5, x * 1e-5)) == FOURTH  # only the operand
    at_the_end = numerics_report(lambda w: w @ jnp.ones(1))(jnp.array([3.4e38]))
    assert at_the_end.recommended[:3] == LAST


def test_parameters_and_operands_count_for_o2():
    def product(w, x):
        return jnp.mean((x.astype(w.dtype) @ w).astype(jnp.float32))

    w, x = jnp.full((4, 2), 1e5), jnp.full((8, 4), 1e-6)
    assert not np.isfinite(product(w.astype(jnp.float16), x))
    report = numerics_report(product)(w, x)
    assert report.recommended[:3] == FOURTH
    assert report.counts["", "forward"][EXPONENTS == 16] == w.size
    # A parameter that is no operand of a product, by its path.
    scaled = numerics_report(lambda p, x: jnp.mean(p["s"] * x))({"s": jnp.full(4, 1e5)}, x[0])
    assert scaled.recommended[:3] == SECOND and "most of them in s" in scaled.recommended.reason
    # Data that are an operand of a product.
    assert numerics_report(product)(w * 1e-9, x * 1e11).recommended[:3] == FOURTH
    wide = found(products=([1e5], [1.0]))
    assert recommend(wide)[:3] == FOURTH and "not O2" in recommend(wide).reason
    assert recommend(found(products=([3.4e38], [1.0])))[:3] == LAST


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: jnp.mean(x * w / 0.0),  # infinity, and NaN
        lambda w, x: jnp.mean(jnp.sqrt(x * w)),  # a finite loss with an infinite gradient
        lambda w, x: jnp.mean(x * w) + jnp.inf,  # finite gradients
    ],
)
def test_no_half_for_what_is_not_finite_already(loss):
    report = numerics_report(loss)(jnp.zeros(4), jnp.full((8, 4), 1e2))
    assert not report.is_finite
    advice = report.recommended
    assert advice[:3] == LAST
    assert advice.reason == "not finite in float32 already: ampx.trace_overflow tells where"
    assert numerics_report(jnp.sum)(jnp.zeros(4)).is_finite


@pytest.mark.slow
def test_sums_that_are_only_scaled_object_to_nothing():
    x = jax.random.normal(jax.random.key(0), (4096, 64))
    w = jax.random.normal(jax.random.key(1), (64, 8))

    def squares(w, x):
        return (x @ w) ** 2

    assert np.isfinite(jnp.mean(squares(w.astype(jnp.float16), x.astype(jnp.float16))))
    report = numerics_report(lambda w, x: jnp.mean(squares(w, x)))(w, x)
    assert report.recommended[:3] == FIRST
    (left_out,) = report.sums.values()
    assert left_out.counts.tolist() == histogram_by_hand(jnp.sum(squares(w, x)))
    assert "O2 in float16" in str(report)
    # With this loss the sum itself, or what else reads it, has it in half.
    for loss in (
        lambda w, x: jnp.sum(squares(w, x)),
        lambda w, x: (lambda s: 1e-6 * s + s / (1 + s))(jnp.sum(squares(w, x))),
        lambda w, x: jnp.sqrt(jnp.sum(squares(w, x))),
        lambda w, x: 1e-6 * jnp.cumsum(squares(w, x).ravel())[-1],
    ):
        report = numerics_report(loss)(w, x)
        assert not report.sums
        assert "not O2 in float16 with loss_scale=128.0: " in report.recommended.reason
        assert "forward values exceed 65504" in report.recommended.reason


def test_what_is_not_entered_is_named():
    mesh = jax.make_mesh((1,), ("data",))
    spec = jax.sharding.PartitionSpec()

    def inside(w, x):
        return jax.shard_map(
            lambda w, x: jnp.sin(1e6 * w * x), mesh=mesh, in_specs=(spec, spec), out_specs=spec
        )(w, x)

    def outside(x):
        return jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    w = jnp.ones(3)
    report = numerics_report(lambda w, x: jnp.mean(inside(w, outside(x)) * 1e-3))(w, w)
    assert report.opaque == ("pure_callback", "shard_map")
    assert "\nnothing counted inside: pure_callback, shard_map\n" in str(report)
    unknown = "; unknown: what happens inside pure_callback, shard_map"
    assert report.recommended.reason.endswith(unknown)
    loss, params, x = net()
    report = numerics_report(loss)(params, x)
    assert report.opaque == () and "inside" not in str(report)
    empty = numerics_report(lambda w: jnp.sum(lax.scan(lambda c, x: (c * x, c), w, w[:0])[0]))(w)
    assert empty.opaque == ()


# How it is called and printed


def test_the_table_is_printed():
    loss, params, x = net()
    report = numerics_report(loss, loss_scale=128.0)(params, x)
    text = str(report).splitlines()
    rows = len(report.histograms)
    assert text[0].split() == ["scope", "direction", "values", "exponent", *DTYPES]
    assert len(text) == rows + 5 and any(line.startswith("Net/head") for line in text)
    assert "times 128" in text[-3] and text[-2].startswith("loss scales that fit: float16 ")
    assert text[-1].startswith(f"try first: {report.recommended.level} in ")
    assert isinstance(report.counts, types.MappingProxyType)


def test_wrong_calls():
    for scale in (0.0, -2.0, 100.0, math.inf):
        with pytest.raises(ValueError, match="loss_scale must be a power of two, got"):
            numerics_report(jnp.sum, loss_scale=scale)
    with pytest.raises(TypeError, match="must give a floating scalar, got .*3"):
        numerics_report(lambda w: w)(jnp.ones(3))
    with pytest.raises(TypeError, match="must give a floating scalar"):
        numerics_report(lambda w: (jnp.sum(w), w))(jnp.ones(3))
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda w: numerics_report(jnp.sum)(w).loss_scale)(jnp.ones(3))
    report = numerics_report(jnp.sum)(jnp.ones(3))
    with pytest.raises(ValueError, match="one of float16, bfloat16, .*, got 'float32'"):
        report.table("float32")
    with pytest.raises(ValueError, match="got 'half'"):
        report.loss_scales("half")
    assert list(itertools.islice(FORMATS, 2)) == ["float16", "bfloat16"]


def test_float64_is_refused():
    assert numerics_report(jnp.sum)(np.ones(3)).counts_of("forward").sum() == 4  # JAX has float32
    with jax.enable_x64(True):
        single = jnp.ones(3, jnp.float32)
        with pytest.raises(TypeError, match="counts float32, got float64"):
            numerics_report(jnp.sum)(jnp.ones(3, jnp.float64))
        with pytest.raises(TypeError, match="counts float32, got float64"):
            numerics_report(lambda w: jnp.sum(jnp.sin(w.astype("float64"))).astype("float32"))(
                single
            )
        assert numerics_report(lambda w, rate: rate * jnp.sum(w))(single, 0.5).is_finite
