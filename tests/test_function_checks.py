"""A function whose call runs nothing is refused by all that takes functions.

A generator's body runs when somebody takes from it, a coroutine's when it is awaited, and a class
makes an object: autocast would change nothing of them, and reports would find nothing in them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import ampx
from ampx import fused, pipelining

X = jnp.ones(2)


def generator(*args, **kwargs):
    yield args


async def coroutine(*args, **kwargs):
    return args


async def async_generator(*args, **kwargs):
    yield args


class Made:
    def __init__(self, *args, **kwargs):
        self.args = args


class Called:
    def __call__(self, *args):
        return jnp.sum(args[0])

    def run(self, *args):
        return jnp.sum(args[0])

    def draw(self, *args):
        yield args

    @classmethod
    def of_class(cls, *args):
        return jnp.sum(args[0])


class MadeLayer:
    dtype = None  # as of flax's layers: this makes it no dtype


class CalledLater:
    def __call__(self, *args):
        yield args


class CalledAsync:
    async def __call__(self, *args):
        return args


LAZY: dict[str, Any] = {
    "a generator": generator,
    "a coroutine": coroutine,
    "an asynchronous generator": async_generator,
    "a partial generator": functools.partial(functools.partial(generator), X),
    "a partial of JAX": jax.tree_util.Partial(generator),
    "a method that yields": Called().draw,
    "an object whose call yields": CalledLater(),
    "an object whose call is awaited": CalledAsync(),
}
CLASSES: dict[str, Any] = {"a class": Made, "a partial class": functools.partial(Made, X)}


def pipeline(**functions):
    simple = {name: lambda p, *args: p for name in ("first", "stage", "last")}
    schedule = pipelining.gpipe(2, 2)
    return pipelining.value_and_grad(**simple | functions, schedule=schedule, axis_name="stage")


# Whatever takes a function that is called where it is traced.
TAKERS = {
    "autocast": ampx.autocast,
    "half_function": ampx.half_function,
    "float_function": ampx.float_function,
    "promote_function": ampx.promote_function,
    "banned_function": ampx.banned_function,
    "explain": ampx.explain,
    "lint_step": ampx.lint_step,
    "trace_overflow": ampx.trace_overflow,
    "numerics_report": ampx.numerics_report,
    "check_overlap": lambda fun: ampx.check_overlap(fun, X),
    "value_and_grad": ampx.value_and_grad,
    "train_step": lambda fun: ampx.train_step(fun, optax.sgd(0.1)),
    "forward_order": lambda fun: ampx.forward_order(fun, X),
    "Recipe.wrap": lambda fun: ampx.opt_level("O1").wrap(fun),
    "multi_steps": lambda fun: ampx.multi_steps(optax.sgd(0.1), 2, drop_if=fun),
    "from_rule": lambda fun: fused.from_rule(fun, 0.1),
    "bucket_layout": lambda fun: ampx.bucket_layout(X, group_of=fun),
    "flatten": lambda fun: fused.flatten(X, group_of=fun),
    "first": lambda fun: pipeline(first=fun),
    "stage": lambda fun: pipeline(stage=fun),
    "stages": lambda fun: pipeline(stage=[fun, fun]),
    "last": lambda fun: pipeline(last=fun),
    "layer_costs": lambda fun: pipelining.layer_costs(fun, [X], X),
}
# What takes one that is only asked something may be given a class, as local_norm=str.
ASKERS = {
    "local_norm": lambda fun: ampx.train_step(jnp.sum, optax.sgd(0.1), local_norm=fun),
    "keep_norm_float32": lambda fun: ampx.opt_level("O2", keep_norm_float32=fun),
    "when": lambda fun: ampx.DEFAULT_RULES.half(when=fun),
    "stash": lambda fun: pipelining.value_and_grad(
        **{name: lambda p, *args: p for name in ("first", "stage", "last")},
        schedule=pipelining.gpipe(2, 2),
        axis_name="stage",
        stash=fun,
    ),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("taker", [*TAKERS, *ASKERS])
def test_a_function_that_runs_nothing_is_refused(taker, kind):
    message = "must run when it is called, got .*(yield nothing|without await)"
    with pytest.raises(TypeError, match=message):
        (TAKERS | ASKERS)[taker](LAZY[kind])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_class_is_refused_where_a_function_is_called(taker, kind):
    with pytest.raises(TypeError, match="must be a function.* got the class Made, whose call"):
        TAKERS[taker](CLASSES[kind])


def test_a_dtype_and_a_layer_with_one_are_told_apart():
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, np.float16):
        with pytest.raises(TypeError, match="got the dtype .*half_dtype="):
            ampx.autocast(dtype)
    with pytest.raises(TypeError, match="got the class MadeLayer, whose call makes an object"):
        ampx.autocast(MadeLayer)


HIDDEN = {
    "yield": (lambda *args: (x for x in args), "yield nothing"),
    "await": (lambda *args: coroutine(*args), "without await"),
    "asynchronous": (lambda *args: async_generator(*args), "yield nothing"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("taker", "autocast explain lint_step trace_overflow".split())
def test_so_is_the_result_of_one_that_does_not_show_it(taker, kind):
    fun, advice = HIDDEN[kind]
    with pytest.raises(TypeError, match=f"<lambda> must run when it is called, and .*{advice}"):
        TAKERS[taker](fun)(X)


def test_objects_methods_and_partial_functions_are_functions():
    functions = (Called(), Called().run, Called.of_class, functools.partial(Called().run, X))
    for fun in (*functions, functools.partial(jnp.sum, X), jax.jit(jnp.sum)):
        args = () if isinstance(fun, functools.partial) else (X,)
        assert ampx.autocast(fun)(*args) == 2
        assert ampx.lint_step(fun)(*args).ok


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x):
        dense = linen.Dense(2)  # a part of a model that runs, so it can be called
        return dense(x) if self.is_initializing() else ampx.autocast(dense)(x)


NO_FUNCTIONS = {
    "a module of linen": (Layer(), r"linen module of type Layer.*module\.apply"),
    "an optimizer": (optax.sgd(0.1), "optax transformation: give the function first"),
    "a word": ("fp16", "got 'fp16' of type str: give a setting by"),
}


@pytest.mark.parametrize("kind", NO_FUNCTIONS)
@pytest.mark.parametrize("taker", ["autocast", "lint_step", "value_and_grad", "train_step"])
def test_what_is_no_function_is_refused_with_the_way_out(taker, kind):
    value, message = NO_FUNCTIONS[kind]
    with pytest.raises(TypeError, match=message):
        TAKERS[taker](value)


def test_a_layer_inside_of_a_model_of_linen_is_a_function():
    layer, x = Layer(), jnp.ones((4, 3))
    out = ampx.autocast(layer.apply)(layer.init(jax.random.key(0), x), x)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "taker",
    ["autocast", "explain", "lint_step", "trace_overflow", "numerics_report", "value_and_grad"],
)
def test_arguments_beside_the_function_get_the_right_call(taker):
    with pytest.raises(TypeError, match=rf"write {taker}\(fun\)\(\*args\)"):
        getattr(ampx, taker)(jnp.sum, X)


def test_autocast_is_no_context():
    with pytest.raises(TypeError, match=r"no context.*write loss = ampx\.autocast\(loss_fn"):
        with ampx.autocast(half_dtype="fp16"):
            pass
