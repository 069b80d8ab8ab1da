"""How to divide consecutive layers over stages, and what each layer costs.

A pipeline is as fast as its slowest stage, so the largest sum of costs is made as small as it can
be. Costs are compared exactly, as integers: stages of equal layers are equal, however sums round.

Two passes find the division::

  1. the bound      the least cost that the costliest stage can have, by bisection. For a given
                    bound it is best to fill each stage with all that fits, so one walk over the
                    layers says whether the stages suffice.
  2. the division   of all those that keep the bound the most even one, by dynamic programming from
                    the last stage to the first.

  costs 1 2 3 4 5 6, 2 stages:  bound 10 needs 3 stages, 11 needs 2 (1 2 3 4 | 5 6)  ->  (4, 2)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ampx.checking import as_number, as_number_array, as_positive_int, check_choice
from ampx.function_checks import check_callable
from ampx.pipelining.layer_stacks import count_layers, take_layer
from ampx.tree_checks import check_arrays, check_key
from ampx.trees import merge_trainable, split_trainable

CostKind = Literal["flops", "bytes", "time"]


def balance(
    costs: ArrayLike, num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Divides layers over stages so that the costliest stage costs as little as possible.

    If there are several ways to do so, the one with the least sum of squared costs is chosen; among
    equals the one with the least sum of squared numbers of layers; among these the one with fewer
    layers in the first stages, which hold the most activations.

    Args:
      costs: the cost of each layer, in any unit: numbers of at least 0, shape (layers,).
      num_stages: how many stages there are; each gets at least one layer.
      first: cost of what the first stage does before its layers, such as an embedding, in the same
        unit.
      last: cost of what the last stage does after its layers, such as a head and its loss.

    Returns:
      How many layers each stage has, `layers_per_stage` of `ampx.pipelining.value_and_grad`.

    Raises:
      TypeError: if `num_stages` is not an int.
      ValueError: if there are fewer layers than stages, or a cost is negative or not finite.

    References:
      `torchgpipe.balance` does the same with block partition, https://arxiv.org/abs/1308.2452.

    Examples:
      >>> import ampx
      >>> ampx.pipelining.balance([1, 2, 3, 4, 5, 6], 2)
      (4, 2)
      >>> ampx.pipelining.balance([1] * 7, 2), ampx.pipelining.balance([1] * 8, 2, last=3)
      ((3, 4), (5, 3))
    """
    num_stages = as_positive_int("num_stages", num_stages)
    numbers = as_number_array("costs", costs)
    if numbers.ndim != 1:
        raise ValueError(f"costs must be one number for each layer, got shape {numbers.shape}")
    if len(numbers) < num_stages:
        raise ValueError(
            f"{len(numbers)} layers cannot fill {num_stages} stages: each needs at least one. Use "
            "fewer stages"
        )
    named = {f"costs[{i}]": cost for i, cost in enumerate(numbers.tolist())}
    named |= {"first": first, "last": last}
    # Every float is a fraction with a power of two below. Over their common denominator costs are
    # integers, which Python adds exactly, however large they get.
    *exact, before, behind = (Fraction(as_number(k, cost, least=0)) for k, cost in named.items())
    exact[0] += before
    exact[-1] += behind
    unit = math.lcm(*(cost.denominator for cost in exact))
    whole = [int(cost * unit) for cost in exact]
    return _find_most_even(whole, num_stages, _find_least_bound(whole, num_stages))


def _find_least_bound(costs: Sequence[int], num_stages: int) -> int:
    """Finds the least possible cost of the costliest stage."""
    # Invariant: no bound below `low` will do, and `high` will. No stage can cost less than the
    # costliest layer, and one stage for all needs no more than the sum.
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _count_stages(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _count_stages(costs: Sequence[int], bound: int) -> int:
    """Counts the stages that are needed if each takes all that it can.

    No division needs fewer: after any number of stages, this one has placed at least as many layers
    as any other. If it needs fewer stages than there are, some of its stages can be divided again,
    which makes none of them cost more.
    """
    number, total = 1, 0
    for cost in costs:
        total += cost
        if total > bound:
            number, total = number + 1, cost
    return number


def _find_most_even(costs: Sequence[int], num_stages: int, bound: int) -> tuple[int, ...]:
    """Finds the most even of the divisions in which no stage costs more than `bound`.

    Goes from the last stage to the first. After k stages `best[start]` is about the layers from
    `start` on, divided over those k: the sum of squared costs, the sum of squared numbers of
    layers, and how many layers the first of them takes; None where that cannot be done within the
    bound. Tuples are compared in this order, which is the order of `balance`'s preferences. The
    time is O(num_stages * layers * layers of the longest stage).
    """
    size = len(costs)
    best: list[tuple[int, int, int] | None] = [None] * size + [(0, 0, 0)]
    taken: list[list[tuple[int, int, int] | None]] = []
    for _ in range(num_stages):
        before = best
        best = [None] * (size + 1)
        for start in range(size):
            total = 0
            for count in range(1, size - start + 1):
                total += costs[start + count - 1]
                if total > bound:
                    break
                rest = before[start + count]
                if rest is not None:
                    candidate = total**2 + rest[0], count**2 + rest[1], count
                    best[start] = min(filter(None, (best[start], candidate)))
        taken.append(best)
    # From the first stage on, what was noted for it and the layers that are left.
    counts: list[int] = []
    for row in reversed(taken):
        found = row[sum(counts)]
        assert found is not None
        counts.append(found[2])
    return tuple(counts)


def layer_costs(
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    params: Any,
    x: Any,
    *,
    by: CostKind = "flops",
    key: jax.Array | None = None,
    repeats: int = 10,
) -> np.ndarray:
    """Measures what forward and backward of each layer cost, for `ampx.pipelining.balance`.

    Layers that compute the same with arrays of the same shapes are compiled and measured once.

    Args:
      layer: `layer(layer_params, x, key) -> x`, as `stage` of `ampx.pipelining.value_and_grad`. Or
        a sequence of functions, one for each layer, that take what the one before gives.
      params: a tree with a leading axis of layers; for a sequence of functions a list of trees.
      x: what the first layer takes, of one micro-batch: arrays, or `jax.ShapeDtypeStruct`.
      by: `"flops"`: operations; `"bytes"`: bytes that are read and written; both as the compiler
        counts them, which knows nothing of the inside of a Pallas kernel, and counts the body of a
        loop once. `"time"`: seconds, measured on this machine.
      key: a random key that each layer is given.
      repeats: how often each time is measured; the median counts.

    Returns:
      float64 of shape (layers,).

    Raises:
      TypeError: if times are to be measured and there are no arrays.
      ValueError: for another `by`, or lists that do not fit each other.

    References:
      `torchgpipe.balance.balance_by_time` and `balance_by_size`.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> layers = [lambda p, x, key: x @ p, lambda p, x, key: jnp.tanh(x) @ p]
      >>> params = [jnp.ones((8, 64)), jnp.ones((64, 64))]
      >>> costs = ampx.pipelining.layer_costs(layers, params, jnp.ones((4, 8)))
      >>> bool(costs[1] > 4 * costs[0])
      True
    """
    check_choice("by", by, get_args(CostKind))
    repeats = as_positive_int("repeats", repeats)
    functions = [layer] if callable(layer) else layer
    if not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise TypeError(f"layer must be a function, or a list of functions, got {layer!r}")
    for own in functions:
        check_callable("layer", own, "layer(params, x, key)")
    check_arrays("params", params, may_be_shapes=True)
    check_arrays("x", x, may_be_shapes=True)
    check_key("key", key)
    found: dict[Hashable, float] = {}
    costs = []
    for call, own in _split_layers(layer, params):
        # What a layer passes on is what the next one takes, so it is found on the way: `x`.
        # Layers of the same function, structure, shapes and dtypes cost the same, so 64 equal ones
        # are compiled and measured once.
        leaves, structure = jax.tree.flatten((own, x))
        if by == "time" and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise TypeError("by='time' runs the layers: give arrays in place of ShapeDtypeStructs")
        kind = call, structure, tuple((jnp.shape(a), jnp.result_type(a)) for a in leaves)
        if kind not in found:
            found[kind] = _measure_cost(_make_both_passes(call, key), own, x, by, repeats)
        costs.append(found[kind])
        x = _run_layer(call, own, x, key, by == "time")
    return np.array(costs)


def _split_layers(layer: Any, params: Any) -> Iterator[tuple[Callable[..., Any], Any]]:
    if callable(layer):
        advice = ": for layers that differ, give a list of functions"
        for i in range(count_layers("params", params, advice)):
            yield layer, jax.tree.map(lambda leaf, i=i: take_layer(leaf, i), params)
        return
    if not isinstance(params, list | tuple) or len(params) != len(layer):
        raise ValueError(
            f"layer is a sequence of {len(layer)} functions, so params must be a list of "
            f"{len(layer)} trees"
        )
    yield from zip(layer, params, strict=True)


def _make_both_passes(call: Callable[..., Any], key: Any) -> Callable[..., Any]:
    def run(params: Any, x: Any) -> Any:
        floating, rest = split_trainable((params, x))

        def of_floating(floating: Any) -> Any:
            out = call(*merge_trainable(floating, rest), key)
            return split_trainable(out)[0], out

        # What a pipeline differentiates: floating leaves of parameters and of what is received.
        values, pull, out = jax.vjp(of_floating, floating, has_aux=True)
        # Any cotangent will do, except one that is known while compiling: with ones or zeros XLA
        # would leave out a part of the backward.
        return out, pull(values)

    return run


def _measure_cost(
    run: Callable[..., Any], params: Any, x: Any, by: CostKind, repeats: int
) -> float:
    compiled = jax.jit(run).lower(params, x).compile()
    if by != "time":
        found = compiled.cost_analysis() or {}  # None where a backend does not say
        return float(found.get("flops" if by == "flops" else "bytes accessed", 0.0))
    jax.block_until_ready(compiled(params, x))  # the first run may still set things up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, x))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _run_layer(call: Callable[..., Any], params: Any, x: Any, key: Any, is_real: bool) -> Any:
    """Finds what a layer gives to the next one."""

    def run(params: Any, x: Any) -> Any:
        return call(params, x, key)

    return jax.jit(run)(params, x) if is_real else jax.eval_shape(run, params, x)
