"""jmp's own tests, run on ampx: policies, loss scales, and what a step makes of them.

jmp installs its tests with itself. They are imported while the names of jmp stand for what this
file says in terms of ampx's public functions, and run so. Where ampx means something else, a case
is listed with the reason. Histories that Hypothesis draws go through both libraries.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import hypothesis
import hypothesis.strategies as st
import installed_tests
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from listing import Peer

import ampx

jmp = pytest.importorskip("jmp")
from jmp._src import loss_scale as jmp_loss_scale  # noqa: E402
from jmp._src import policy as jmp_policy  # noqa: E402

MODULES = ("jmp._src.loss_scale_test", "jmp._src.policy_test")


class Policy(ampx.Policy):
    def with_output_dtype(self, dtype):
        return dataclasses.replace(self, output_dtype=dtype)


def get_policy(name):
    policy = ampx.get_policy(name)
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def cast_to_full(tree):
    return ampx.cast_floating(tree, jnp.float32)


def cast_to_half(tree):
    return ampx.cast_floating(tree, jmp.half_dtype())


class Scale:
    """A transformation that does nothing but unscale, and a state of it."""

    def __init__(self, tx):
        self.tx, self.state = tx, tx.init(())

    def scale(self, tree):
        if ampx.find_loss_scale_state(self.state) is None:
            return tree
        return jax.tree.map(lambda x: x * ampx.current_loss_scale(self.state), tree)

    def unscale(self, tree):
        return self.tx.update(tree, self.state)[0]


@jax.tree_util.register_static
class NoOpLossScale(Scale):
    def __init__(self):
        super().__init__(ampx.no_loss_scale(optax.identity()))


@jax.tree_util.register_static
class StaticLossScale(Scale):
    def __init__(self, loss_scale):
        super().__init__(ampx.static_loss_scale(optax.identity(), loss_scale))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss_scale", "counter"],
    meta_fields=["period", "factor", "min_loss_scale"],
)
@dataclasses.dataclass
class DynamicLossScale:
    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: int = 2
    min_loss_scale: Any = 1.0

    def as_scale(self):
        tx = ampx.dynamic_loss_scale(
            optax.identity(),
            init_scale=float(self.min_loss_scale),
            min_scale=float(self.min_loss_scale),
            max_scale=2.0**126,
            growth_interval=self.period,
            growth_factor=self.factor,
            backoff_factor=1 / self.factor,
            powers_of_two=False,
        )
        made = Scale(tx)
        made.state = made.state._replace(
            loss_scale=jnp.asarray(self.loss_scale, jnp.float32), growth_tracker=self.counter
        )
        return made

    def scale(self, tree):
        return self.as_scale().scale(tree)

    def unscale(self, tree):
        return self.as_scale().unscale(tree)

    def adjust(self, grads_finite):
        before = self.as_scale()
        gradient = jnp.where(grads_finite, 1.0, jnp.inf)
        _, after = before.tx.update(gradient, before.state)
        return dataclasses.replace(self, loss_scale=after.loss_scale, counter=after.growth_tracker)


def all_finite(tree):
    return ~jnp.any(ampx.count_nonfinite(tree) > 0)


def select_tree(pred, a, b):
    state = ampx.static_loss_scale(optax.identity(), 1.0).init(())
    return ampx.select_if_finite(state._replace(overflow=~pred), a, b)


STAND_INS = {
    jmp_policy: (Policy, get_policy, cast_to_full, cast_to_half),
    jmp_loss_scale: (NoOpLossScale, StaticLossScale, DynamicLossScale, all_finite, select_tree),
}


@contextmanager
def ampx_as_jmp() -> Iterator[None]:
    with ExitStack() as stack:
        for module, values in STAND_INS.items():
            own = {value.__name__: value for value in values}
            stack.enter_context(installed_tests.replaced(module, **own))
        yield


@functools.cache
def cases_by_module():
    with ampx_as_jmp():
        modules = installed_tests.load(MODULES)
    return {name: installed_tests.cases_of(module) for name, module in modules.items()}


_WARNS = "asks for jmp's warning about an integer; here a scale is float32, whatever it is given as"
_WORDS = "asks for the words of jmp's own error"
_FULL = "jmp writes float32 as `full`; here it is written `f32`, and both are read"
EXCLUDED = {
    "LossScaleTest.test_dynamic_loss_scale_explicit_min_loss_scale(5.0, 2.0, 0.0)": "an interval "
    "of 5.0 steps and a scale that may fall to 0, both refused here",
    "LossScaleTest.test_dynamic_loss_scale_raises_type_error_on_int_loss_scale": _WARNS,
    "LossScaleTest.test_dynamic_loss_scale_raises_type_error_on_int_min_loss_scale": _WARNS,
    "LossScaleTest.test_select_tree_rejects_non_scalar": _WORDS,
    "LossScaleTest.test_static_empty_trees_StaticLossScale": "a scale of 0, which is refused here",
    "PolicyTest.test_get_policy_almost_dtype": _WORDS,
    "PolicyTest.test_str(numpy.float32)": _FULL,
    "PolicyTest.test_str(jax.numpy.float32)": _FULL,
}
PEERS = (
    Peer(
        source="jmp",
        runs="its own tests, with ampx's policies and loss scales behind its names",
        cases=lambda: itertools.chain(*cases_by_module().values()),
        excluded=EXCLUDED,
    ),
)


@pytest.mark.slow_but("jmp._src.policy_test")
@pytest.mark.parametrize("module", MODULES)
def test_its_own_tests(module):
    with ampx_as_jmp():
        installed_tests.check_all(cases_by_module()[module], EXCLUDED)


@functools.cache
def compiled(kind, period):
    """Both histories are one scan each, compiled once for each period."""

    def run(start, goods):
        def step(scale, good):
            scale = scale.adjust(good)
            return scale, (scale.loss_scale, scale.counter)

        return jax.lax.scan(step, kind(start, jnp.int32(0), period), goods)[1]

    return jax.jit(run)


@hypothesis.given(
    goods=st.lists(st.booleans(), min_size=24, max_size=24),
    period=st.sampled_from([1, 3]),
    exponent=st.integers(0, 20),
)
def test_a_dynamic_scale_moves_as_in_jmp(goods, period, exponent):
    start = jnp.float32(2.0**exponent)
    with installed_tests.foreign_settings():
        expected, found = (
            compiled(kind, period)(start, jnp.array(goods))
            for kind in (jmp_loss_scale.DynamicLossScale, DynamicLossScale)
        )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


WORDS = ("f16", "float16", "half", "bf16", "bfloat16", "f32", "float32", "full")


@hypothesis.given(
    keys=st.lists(
        st.sampled_from([("p", "params"), ("c", "compute"), ("o", "output")]), unique=True
    ),
    long=st.booleans(),
    words=st.tuples(*[st.sampled_from(WORDS)] * 3),
)
def test_a_policy_is_read_as_in_jmp(keys, long, words):
    parts = [f"{key[long]}={word}" for key, word in zip(keys, words, strict=False)]
    name = ",".join(parts) or words[0]
    found, expected = ampx.get_policy(name), jmp.get_policy(name)
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == jnp.dtype(getattr(expected, field.name)), name


@hypothesis.given(st.tuples(*[st.sampled_from([1.0, -0.0, 3e38, np.inf, -np.inf, np.nan])] * 4))
def test_trees_are_finite_as_in_jmp(numbers):
    first, second = np.array(numbers, np.float32).reshape(2, 2)
    tree = {"a": first, "b": [second]}
    assert bool(all_finite(tree)) == bool(jmp.all_finite(tree))
