"""Faults put into autocast on purpose: each must fail the case that is there to catch it."""

import contextlib
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import test_autocast_acceptance as acceptance

from ampx.autocasting import (
    calls,
    custom_rules,
    marks,
    narrowing,
    operations,
    planner,
    rewriter,
    tables,
    transform,
)
from ampx.autocasting.values import Demand, Vote
from ampx.jaxprs import reading


class Mutant(NamedTuple):
    """A fault: `change` makes of `where.attribute` what stands in its place."""

    caught_by: int | Callable[[], None]
    fault: str
    where: Any
    attribute: str
    change: Callable[[Any], Any]
    error: type[Exception] = AssertionError
    message: str | None = None


def value(replacement):
    return lambda original: replacement


def result(replacement):
    return lambda original: lambda *args, **kwargs: replacement


def classified(**precisions):
    """A table of defaults with other precisions."""
    return lambda defaults: MappingProxyType({**defaults, **precisions})


def then(change):
    """A function whose result goes through `change`, which sees the arguments too."""
    return lambda original: lambda *args: change(original(*args), *args)


def _unlifted(planned, *_):
    lifted, asked, readers = planned
    return set(), asked, readers


def _plain_cast(number, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(number).astype(dtype)


def _clipping(half):
    largest = float(jax.numpy.finfo(half).max)
    return lambda x: jax.numpy.clip(x, -largest, largest)


def _as_float32(known, *_):
    return known._replace(vote=Vote.FLOAT32)


def _without_policy(params, *_):
    return {**params, "policy": None} if "policy" in params else params


def _without_shardings(params, *_):
    (plain,) = jax.make_jaxpr(jax.jit(jax.numpy.sin))(0.0).eqns
    (unspecified,) = plain.params["out_shardings"]
    shardings = params.get("out_shardings", ())
    return {**params, "out_shardings": (unspecified,) * len(shardings)} if shardings else params


def _every_dot_rewritten(decision, self, eqn, *_):
    return (
        operations._decide_half(eqn, "fault") if eqn.primitive.name == "dot_general" else decision
    )


def _inlined_rule(eqn, parent, body, run_autocast):
    return lambda *operands: tuple(reading.evaluate(body, *operands))


def _with_custom_vjp(choice):
    return then(
        lambda settings, *_: settings.__class__(settings.half_dtype, settings.rules, choice)
    )


def _uncast(decision, eqn, *_):
    return decision._replace(operands=(None,) * len(eqn.invars))


def _inlined(fun, *args, **kwargs):
    return fun(*args, **kwargs)


def _identity(tree, *args, **kwargs):
    return tree


def _any_number(atom):
    return getattr(atom.aval, "dtype", np.dtype(bool)).kind in "ifc"


def _unpinned(known, demand, float32):
    return known if float32 else planner.AS_TRACED


def _every_conversion_dropped(is_alias, self, eqn, decision):
    return is_alias or (
        eqn.primitive.name == "convert_element_type" and self._known_value(eqn.invars[0]).half
    )


def _without_spreading(original):
    return lambda self, eqn, atom, target: self._convert(atom, target, eqn)


def _forgetful(original):
    def rewritten(self, jaxpr, plan):
        plan.rewritten = None
        return original(self, jaxpr, plan)

    return rewritten


def _remembering(original):
    calls = {}
    return lambda call, *rest: calls.setdefault(rest, original(call, *rest))


class _Global:
    """A setting that jit knows nothing of; a leaky one stays after an error."""

    def __init__(self, leaky=False):
        self.value = None
        self.leaky = leaky

    @contextlib.contextmanager
    def __call__(self, new):
        old, self.value = self.value, new
        try:
            yield
        except BaseException:
            self.value = self.value if self.leaky else old
            raise
        self.value = old


def _bias(shape, transform=jax.jit):
    return functools.partial(
        acceptance.test_the_gradient_of_a_bias_is_summed_in_float32, shape, transform
    )


def _spread(how):
    return functools.partial(
        acceptance.test_cotangents_of_a_spread_activation_are_summed_in_float32, how
    )


NOTHING_LIFTED = ("nothing is lifted", planner, "_lift_backward", then(_unlifted))
LITERALS_VOTE = ("a literal votes float32", planner, "describe_literal", then(_as_float32))
CARRIES_FREE = (
    "a carry is not pinned",
    calls,
    "_demand_float32_carry",
    lambda _: [Demand.KEEP].__mul__,
)
RULE_INLINED = ("a rule is inlined", custom_rules, "make_function", value(_inlined_rule))
NATIVE_IGNORED = ("the mark is ignored", calls, "NATIVE_MARK", value("unknown"))


def defaults(fault, **precisions):
    return fault, tables, "DEFAULTS", classified(**precisions)


MUTANTS = [
    Mutant(1, "a bias promotes", tables, "TAKING_BIAS_OR_SCALE", value(frozenset())),
    Mutant(1, *defaults("products in float32", dot_general="float32")),
    Mutant(2, *NOTHING_LIFTED),
    Mutant(2, *defaults("exp and sums in half", exp="pass", reduce_sum="pass")),
    Mutant(3, *NOTHING_LIFTED),
    Mutant(4, *NOTHING_LIFTED),
    Mutant(5, "literals overflow", rewriter, "saturate", value(_plain_cast)),
    Mutant(5, "fills overflow", rewriter, "_make_saturate", result(lambda x: x)),
    Mutant(
        acceptance.test_infinite_fills_beside_finite_ones_stay_infinite,
        "infinities are clipped",
        rewriter,
        "_make_saturate",
        value(_clipping),
    ),
    Mutant(6, *LITERALS_VOTE),
    Mutant(6, "zeros follow", tables, "ACCUMULATING", value(frozenset())),
    Mutant(6, "every input yields", operations, "_is_bias_or_scale", result(True)),
    Mutant(6, *defaults("sums in half", reduce_sum="pass")),
    Mutant(7, "the opt-out is ignored", operations, "_requests_other_precision", result(False)),
    Mutant(8, "every product is half", planner.Planner, "_decide", then(_every_dot_rewritten)),
    Mutant(9, *CARRIES_FREE, TypeError, "carry"),
    Mutant(9, *defaults("scan is left as traced", scan="opaque")),
    Mutant(10, "the policy is dropped", reading, "with_bodies", then(_without_policy)),
    Mutant(10, *defaults("remat is left as traced", remat2="opaque", checkpoint="opaque")),
    Mutant(11, *CARRIES_FREE),
    Mutant(11, *defaults("while is left as traced", **{"while": "opaque"})),
    Mutant(
        12,
        "branches differ",
        calls,
        "_agree_on_dtype",
        value(lambda outputs, demand: demand),
        ValueError,
        "mismatched return types",
    ),
    Mutant(12, "branches are float32", calls, "_agree_on_dtype", result(Demand.PIN_FLOAT32)),
    Mutant(13, *RULE_INLINED),
    Mutant(14, *RULE_INLINED),
    Mutant(14, "never opaque", transform, "make_settings", _with_custom_vjp("transform")),
    Mutant(14, "always opaque", transform, "make_settings", _with_custom_vjp("opaque")),
    Mutant(
        15, "no cast", marks, "_cast_floating", value(_identity), TypeError, "knows only bfloat16"
    ),
    Mutant(15, "the relabelling stays", calls, "RELABEL_MARK", value("unknown")),
    Mutant(16, *NATIVE_IGNORED),
    Mutant(17, "the mark is ignored", calls, "PROMOTE_MARK", value("unknown")),
    Mutant(18, "the outer wins", transform, "as_written", value(_inlined)),
    Mutant(18, *NATIVE_IGNORED),
    Mutant(18, "jit knows no autocast", marks, "_tracing_for", lambda _: _Global()),
    Mutant(
        19,
        "any number is float32",
        operations,
        "is_float32",
        value(_any_number),
        ValueError,
        "promotion",
    ),
    Mutant(20, *defaults("random numbers in half", erf_inv="half", sub="half", mul="half")),
    Mutant(21, *LITERALS_VOTE),
    Mutant(21, *defaults("the mask compares halves", lt="half")),
    Mutant(22, *defaults("psum in float32", psum="float32", psum_invariant="float32")),
    Mutant(22, *defaults("shard_map is left as traced", shard_map="opaque")),
    Mutant(23, "shardings are dropped", reading, "with_bodies", then(_without_shardings)),
    Mutant(23, *defaults("jit is left as traced", jit="opaque", pjit="opaque")),
    Mutant(24, "outputs are not pinned", planner, "apply_demand", value(_unpinned)),
    Mutant(24, *defaults("products in float32", dot_general="float32")),
    Mutant(
        25, "the unknown gets half", operations, "decide_opaque", then(_uncast), ValueError, "bits"
    ),
    Mutant(25, *defaults("ampx.cast is ignored", reduce_precision="pass")),
    Mutant(
        25,
        "conversions are dropped",
        rewriter._BodyRewriter,
        "_is_alias",
        then(_every_conversion_dropped),
    ),
    Mutant(
        _bias((2,)),
        "spread in half",
        rewriter._BodyRewriter,
        "_convert_operand",
        _without_spreading,
    ),
    Mutant(
        _bias((1, 1)),
        "spread in half",
        rewriter._BodyRewriter,
        "_convert_operand",
        _without_spreading,
    ),
    Mutant(
        _spread(lambda h: h[jax.numpy.zeros(9, int)]),
        "broadcasts in half",
        tables,
        "SUMMING_WHEN_TRANSPOSED",
        value(frozenset()),
    ),
    Mutant(
        acceptance.test_cotangents_of_a_weight_used_twice_are_added_in_float32,
        "one narrow cast for all",
        narrowing,
        "make_again",
        value(lambda wide, narrow, near: ([], narrow)),
    ),
    Mutant(
        acceptance.test_weights_of_a_scan_over_layers_are_cast_once_before_it,
        "nothing is hoisted",
        planner,
        "_find_operand_demands",
        then(lambda asked, *_: [Demand.KEEP if d is Demand.HALF else d for d in asked]),
    ),
    Mutant(
        acceptance.test_closed_over_arrays_are_read_at_every_call,
        "a call is traced once",
        transform,
        "trace_and_plan",
        _remembering,
    ),
    Mutant(
        functools.partial(
            acceptance.test_an_error_inside_leaves_no_autocast_behind, acceptance.bfloat16
        ),
        "an error leaves autocast on",
        marks,
        "_tracing_for",
        lambda _: _Global(leaky=True),
    ),
]


def _name(mutant):
    check = mutant.caught_by
    where = f"{check:02}" if isinstance(check, int) else ""
    return f"{where} {mutant.fault}".strip()


@pytest.fixture(autouse=True)
def no_plan_outlives_a_mutant():
    transform._make_rewriter.cache_clear()
    yield
    transform._make_rewriter.cache_clear()


@pytest.mark.slow_but(
    "09 a carry is not pinned",
    "12 branches differ",
    "15 no cast",
    "21 the mask compares halves",
    "25 ampx.cast is ignored",
)
@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
def test_a_fault_is_caught(mutant, monkeypatch):
    check = (
        acceptance.CASES[mutant.caught_by]
        if isinstance(mutant.caught_by, int)
        else mutant.caught_by
    )
    original = getattr(mutant.where, mutant.attribute)
    monkeypatch.setattr(mutant.where, mutant.attribute, mutant.change(original))
    with pytest.raises(mutant.error, match=mutant.message):
        check()


def test_calls_that_rewrite_anew_are_caught(monkeypatch, caplog):
    monkeypatch.setattr(rewriter.Rewriter, "rewrite", _forgetful(rewriter.Rewriter.rewrite))
    with pytest.raises(AssertionError):
        acceptance.test_calls_without_jit_compile_nothing_anew(caplog)


def test_every_case_catches_a_fault():
    assert {m.caught_by for m in MUTANTS if isinstance(m.caught_by, int)} == set(acceptance.CASES)
