import itertools
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampx.pipelining import balance, layer_costs


def divisions(size, num_stages):
    """All ways to divide so many layers."""
    for cuts in itertools.combinations(range(1, size), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, size)))


def stage_costs(costs, counts):
    places = itertools.accumulate((0, *counts))
    return [sum(costs[a:b]) for a, b in itertools.pairwise(places)]


# --- what is known of others -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, (4, 2)),  # torchgpipe: test_blockpartition, test_balance_by_time
        ([6, 5, 4, 3, 2, 1], 2, (2, 4)),  # torchgpipe: test_balance_by_size_latent
        ([0, 0], 2, (1, 1)),  # torchgpipe: test_blockpartition_zeros
        ([42], 1, (1,)),
        ([0] * 6, 3, (2, 2, 2)),
        ([1] * 7, 2, (3, 4)),
        ([0.1] * 6, 2, (3, 3)),  # 0.1 + 0.1 + 0.1 rounds
        ([1, 1, 1, 1, 9, 1, 1, 1, 1], 3, (4, 1, 4)),
        ([1e-300, 1e300, 1e-300], 2, (1, 2)),
    ],
)
def test_known_divisions(costs, stages, expected):
    assert balance(costs, stages) == expected


def test_what_rides_on_the_ends_counts():
    assert balance([1] * 8, 2, first=2) == (3, 5)
    assert balance([1] * 8, 2, last=2) == (5, 3)
    assert balance([1] * 6, 3, first=1, last=1) == (2, 2, 2)
    assert balance([1] * 6, 3, first=3, last=3) == (1, 4, 1)
    assert balance([1], 1, first=5, last=5) == (1,)


# --- exact, by trying all ------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_the_costliest_stage_is_as_cheap_as_can_be(costs, stages, first, last):
    stages = min(stages, len(costs))
    counts = balance(costs, stages, first=first, last=last)
    costs = [costs[0] + first, *costs[1:]]
    costs[-1] += last

    def merit(counts):
        found = stage_costs(costs, counts)
        return max(found), sum(c**2 for c in found), sum(n**2 for n in counts), counts

    assert len(counts) == stages and min(counts) >= 1 and sum(counts) == len(costs)
    assert merit(counts) == min(map(merit, divisions(len(costs), stages)))


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=8), st.integers(1, 3))
def test_floating_costs_are_compared_exactly(costs, stages):
    exact = [Fraction(cost) for cost in costs]
    best = min(max(stage_costs(exact, counts)) for counts in divisions(len(costs), stages))
    assert max(stage_costs(exact, balance(costs, stages))) == best


def test_many_layers_take_no_time():
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    counts = balance(rng.random(400), 32)
    assert sum(counts) == 400 and time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("costs", "stages", "error", "message"),
    [
        ([1, 2], 3, ValueError, "2 layers cannot fill 3 stages"),
        ([], 1, ValueError, "0 layers cannot fill 1 stages"),
        ([1], 0, ValueError, "num_stages must be a positive int, got 0"),
        ([1], -1, ValueError, "num_stages must be a positive int, got -1"),
        ([1], 1.0, TypeError, "num_stages must be a positive int"),
        ([1, -2], 1, ValueError, r"costs\[1\] must be finite and at least 0, got -2"),
        ([1, float("nan")], 1, ValueError, r"costs\[1\] must be finite"),
        ([float("inf")], 1, ValueError, r"costs\[0\] must be finite"),
        ([[1]], 1, ValueError, r"one number for each layer, got shape \(1, 1\)"),
    ],
)
def test_errors(costs, stages, error, message):
    with pytest.raises(error, match=message):
        balance(costs, stages)


@pytest.mark.parametrize("name", ["first", "last"])
def test_errors_about_the_ends(name):
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        balance([1, 2], 2, **{name: -1.0})


# --- costs of layers -----------------------------------------------------------------------------


def dense(params, x, key):
    return jnp.tanh(x @ params)


@pytest.mark.parametrize("by", ["flops", "bytes"])
def test_costs_of_layers_that_differ_follow_their_size(by):
    sizes = [8, 8, 64, 32, 96, 128]
    shapes = [(a, b) for a, b in itertools.pairwise(sizes)]
    params = [jnp.ones(shape) for shape in shapes]
    costs = layer_costs([dense] * 5, params, jnp.ones((32, 8)), by=by)
    assert costs.shape == (5,) and costs.dtype == np.float64
    order = [a * b for a, b in shapes]
    assert np.array_equal(np.argsort(costs, kind="stable"), np.argsort(order, kind="stable"))
    if by == "flops":  # forward, and two products of the same size in the backward
        products = np.array([3 * 2 * 32 * a * b for a, b in shapes])
        assert np.all(costs >= products) and np.all(costs < 1.3 * products + 3000)


def test_stacked_layers_cost_the_same_and_need_no_arrays():
    params = jnp.ones((4, 16, 16))
    costs = layer_costs(dense, params, jnp.ones((2, 16)))
    shapes = jax.eval_shape(lambda: (params, jnp.ones((2, 16))))
    assert np.array_equal(layer_costs(dense, *shapes), costs)
    assert len(set(costs)) == 1 and costs[0] > 0
    assert balance(costs, 2) == (2, 2)


def test_layers_may_have_keys_and_integers():
    def layer(params, x, key):
        kept = jax.random.bernoulli(key, 0.5, x["x"].shape)
        return {"x": jnp.where(kept, x["x"] @ params, 0.0), "position": x["position"]}

    x = {"x": jnp.ones((2, 4)), "position": jnp.arange(2)}
    costs = layer_costs(layer, jnp.ones((3, 4, 4)), x, key=jax.random.key(0))
    assert costs.shape == (3,) and np.all(costs > 0)


def test_measured_times_divide_as_torchgpipe_does():
    def waiting(seconds):
        def layer(params, x, key):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            waited = jax.pure_callback(lambda _: (time.sleep(seconds), np.float32(0))[1], shape, 0)
            return x * params + jax.lax.stop_gradient(waited)

        return layer

    layers = [waiting(i / 100) for i in range(1, 7)]
    costs = layer_costs(layers, [jnp.ones(())] * 6, jnp.ones(4), by="time", repeats=3)
    assert np.all(costs >= np.arange(1, 7) / 100)
    assert balance(costs, 2) == (4, 2)


def test_layers_of_one_kind_are_measured_once():
    costs = layer_costs(dense, jnp.ones((3, 8, 8)), jnp.ones((2, 8)), by="time", repeats=2)
    assert len(set(costs)) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((dense, jnp.ones((2, 4, 4)), jnp.ones((1, 4))), {"by": "size"}, ValueError, "by must be"),
        (([dense], [], jnp.ones((1, 4))), {}, ValueError, "a list of 1 trees"),
        (
            (dense, [jnp.ones((2, 4)), jnp.ones((3, 4))], jnp.ones(4)),
            {},
            ValueError,
            "leading axis",
        ),
        (
            (dense, jax.ShapeDtypeStruct((2, 4, 4), "float32"), jnp.ones((1, 4))),
            {"by": "time"},
            TypeError,
            "give arrays",
        ),
    ],
)
def test_errors_of_layer_costs(arguments, options, error, message):
    with pytest.raises(error, match=message):
        layer_costs(*arguments, **options)
