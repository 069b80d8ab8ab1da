"""trace_overflow: planted overflows are found where they were planted, and nothing else is."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import ampx
from ampx.diagnostics import overflow_blame
from ampx.diagnostics.overflow_blame import COMPILED_ONLY, BlamingWalk
from ampx.diagnostics.overflow_tracing import trace_overflow
from ampx.jaxprs import building, reading, source_info
from ampx.jaxprs.interpreter import Place
from ampx.jaxprs.source_info import Frame

HERE = Path(__file__)
LINES = HERE.read_text().splitlines()
HUGE = 1e30  # its square is infinite in float32


def line_of(mark):
    (found,) = (n for n, line in enumerate(LINES, 1) if line.endswith(f"# planted: {mark}"))
    return found


def check(report, mark, primitive, kind="inf", direction="forward", scope="", iterations=()):
    """The report blames this primitive on the line with this mark."""
    first = report.first
    assert report and report.reached and report.written is None
    where = (first.primitive, first.kind, first.direction, first.scope, first.iterations)
    assert where == (primitive, kind, direction, scope, iterations)
    assert first.source.startswith(f"{HERE}:{line_of(mark)} (")
    return first


def squares(x):
    return x * x  # planted: squares


# Where it was planted


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=jnp.float16, name="inner")(x)
        return nn.relu(nn.Dense(8, dtype=jnp.float16, name="outer")(x))  # planted: layer


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Layer()(x)
        return nn.Dense(1)(x.astype(jnp.float32))


def net_loss(params, x):
    return jnp.mean(Net().apply({"params": params}, x) ** 2)


def net_params():
    return Net().init(jax.random.key(0), jnp.ones((2, 4)))["params"]


@pytest.mark.slow_but("grad")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad, jax.jit], ids=["loss", "grad", "jit"])
def test_a_layer_with_a_large_weight(wrap):
    params, x = net_params(), jnp.ones((2, 4))
    assert not trace_overflow(wrap(net_loss))(params, x)
    params["Layer_1"]["outer"]["kernel"] = jnp.full((8, 8), 6e4).at[:, ::2].multiply(-1)
    x = jnp.full((2, 4), 30.0)
    report = trace_overflow(wrap(net_loss))(params, x)
    first = check(report, "layer", "dot_general", scope="Net/Layer_1/outer")
    assert first.input_types == ("float16[2,8]", "float16[8,8]")
    assert first.output_type == "float16[2,8]"
    assert first.largest_inputs[1] == 6e4 and 0 < first.largest_inputs[0] < 6e4
    assert "Layer_1/outer" in str(report) and "float32" in first.hint


def test_a_gradient_in_float16_with_too_high_a_loss_scale():
    def loss(w, x, scale):
        with jax.named_scope("head"):
            y = x.astype(jnp.float16) * w.astype(jnp.float16)  # planted: scaled
        return jnp.sum(y.astype(jnp.float32)) * scale  # planted: seed

    grad, w, x = jax.grad(loss), jnp.full(8, 2.0), jnp.full(8, 3.0)
    assert not trace_overflow(grad)(w, x, 2.0**14)
    first = check(
        trace_overflow(grad)(w, x, 2.0**15),
        *("scaled", "mul", "inf", "backward", "head"),
    )
    assert set(first.largest_inputs) == {3.0, 2.0**15} and first.largest_output is None
    assert "loss scale" in first.hint
    # The scaled loss itself no longer fits: the cotangent is too large when it becomes half.
    first = check(
        trace_overflow(grad)(w, x, 2.0**16),
        *("seed", "convert_element_type", "inf", "backward"),
    )
    assert first.note == "float16 ends at 65504" and first.output_type == "float16[8]"


def test_the_seventh_iteration_of_a_scan():
    def growing(x, steps):
        def body(carry, step):
            carry = carry * step  # planted: growing
            return carry, jnp.sqrt(carry)

        return lax.scan(body, x, steps)

    steps = jnp.full(20, 1e4)
    check(trace_overflow(growing)(jnp.full(3, 1e12), steps), "growing", "mul", iterations=(6,))
    assert not trace_overflow(growing)(jnp.full(3, 1e-30), steps[:8])

    def one(x, step):  # only what is stacked is bad, and only there
        return x, squares(step)

    report = trace_overflow(lambda s: lax.scan(one, 0.0, s)[1])(jnp.ones(9).at[6].set(HUGE))
    check(report, "squares", "mul", iterations=(6,))


def test_a_loop_with_infinities_that_are_not_to_blame():
    mask = jnp.where(jnp.arange(3) > 1, -jnp.inf, 0.0)

    def masked(x):
        def body(carry, x):
            return carry + jnp.sum(jnp.exp(mask)), squares(x) + jnp.where(x > 2, mask, 0.0)

        return lax.scan(body, 0.0, x)

    x = jnp.ones((8, 3)).at[5, 0].set(HUGE)
    check(trace_overflow(masked)(x), "squares", "mul", iterations=(5,))

    def guarded(x, y):
        def body(carry, xy):
            x, y = xy
            return carry + jnp.where(jnp.isfinite(x), x, 0.0) + squares(y), None

        return lax.scan(body, 0.0, (1 / x, y))[0]

    x, y = jnp.ones(6).at[1].set(0.0), jnp.ones(6).at[4].set(HUGE)
    check(trace_overflow(guarded)(x, y), "squares", "mul", iterations=(4,))


def count_calls(monkeypatch, method):
    calls, original = [], getattr(BlamingWalk, method)

    def counted(self, *args):
        calls.append(args)
        return original(self, *args)

    monkeypatch.setattr(BlamingWalk, method, counted)
    return calls


def test_iterations_that_change_nothing_are_not_looked_into(monkeypatch):
    calls = count_calls(monkeypatch, "run")
    best = lambda x: lax.scan(lambda c, x: (jnp.minimum(c, x), c), -jnp.inf, x)  # noqa: E731
    assert trace_overflow(best)(jnp.ones(50)).written is not None
    assert 2 <= len(calls) <= 4


def test_iterations_after_the_first_bad_one_are_not_looked_into(monkeypatch):
    calls = count_calls(monkeypatch, "run")
    product = lambda x: lax.scan(lambda c, x: (c * x, c), 1.0, x)  # noqa: E731
    assert trace_overflow(product)(jnp.full(40, 1e10)).first.iterations == (3,)
    assert len(calls) == 2


def test_what_no_bad_result_needs_is_not_run_again(monkeypatch):
    calls = count_calls(monkeypatch, "remark_results")
    both = jax.jit(lambda x: (jnp.sin(x), squares(x)))
    fun = lambda x: (jnp.cos(x), *both(x))  # noqa: E731
    check(trace_overflow(fun)(jnp.full(2, HUGE)), "squares", "mul")
    assert [eqn.primitive.name for eqn, *_ in calls] == ["mul"]


def test_a_scan_that_runs_backwards():
    def summed(x):
        return lax.scan(lambda c, x: (c + squares(x), None), 0.0, x, reverse=True)[0]

    x = jnp.ones(6).at[jnp.array([1, 4])].set(HUGE)
    check(trace_overflow(summed)(x), "squares", "mul", iterations=(4,))
    # The backward pass of a scan: 1 / (2 sqrt(0)) in the third step.
    roots = jax.grad(lambda x: lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, x)[0])
    first = trace_overflow(roots)(jnp.ones(5).at[2].set(0.0)).first
    assert (first.primitive, first.kind, first.iterations) == ("div", "inf", (2,))


def test_one_of_four_micro_batches():
    def loss(w, batch):
        return jnp.mean(squares(batch @ w))

    batch = jnp.ones((8, 2)).at[5].set(HUGE)
    grads_of = ampx.value_and_grad(loss, num_microbatches=4)
    split = ampx.split_microbatches(batch, 4)
    (hit,) = (i for i in range(4) if jnp.max(split[i]) == HUGE)
    report = trace_overflow(grads_of)(jnp.ones(2), batch)
    check(report, "squares", "mul", iterations=(hit,))
    assert hit and report.reached == ("loss", "grads")
    assert not trace_overflow(grads_of)(jnp.ones(2), jnp.ones((8, 2)))


@jax.custom_vjp
def steep(x):
    return x


def steep_forward(x):
    return x, x


def steep_backward(x, cotangent):
    return (cotangent * jnp.exp(x),)


steep.defvjp(steep_forward, steep_backward)


def test_the_backward_rule_of_a_custom_vjp():
    def loss(x):
        with jax.named_scope("steep part"):
            return jnp.sum(steep(x))  # planted: steep

    assert not trace_overflow(loss)(jnp.full(3, 100.0))
    # Of what a backward rule runs JAX keeps the line that calls the function.
    report = trace_overflow(jax.grad(loss))(jnp.full(3, 100.0))
    check(report, "steep", "exp", direction="backward", scope="steep part")

    def scanned(x):
        return lax.scan(lambda c, x: (c + loss(x), None), 0.0, x)[0]

    report = trace_overflow(jax.grad(scanned))(jnp.ones((3, 2)).at[1].set(100.0))
    check(report, "steep", "exp", direction="backward", scope="steep part", iterations=(1,))


@jax.custom_vjp
def overflowing_vjp(x):
    return squares(x)


overflowing_vjp.defvjp(lambda x: (squares(x), x), lambda x, ct: (ct,))


@jax.custom_jvp
def overflowing_jvp(x):
    return squares(x)


@overflowing_jvp.defjvp
def _jvp(primals, tangents):
    return overflowing_jvp(*primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=())
def straight(x):
    return x


@straight.defjvp
def _straight_jvp(primals, tangents):
    return straight(*primals), tangents[0] * primals[0] * primals[0]  # planted: jvp rule


def test_custom_jvp_and_custom_vjp():
    x = jnp.full(3, HUGE)
    for fun in (overflowing_jvp, overflowing_vjp):
        for wrap in (lambda f: f, jax.jit, jax.checkpoint):
            check(trace_overflow(wrap(fun))(x), "squares", "mul")
    grad = jax.grad(lambda x: jnp.sum(straight(x)))
    assert not trace_overflow(straight)(x)
    first = check(trace_overflow(grad)(x), "jvp rule", "mul", direction="backward")
    assert first.largest_output is None


def test_while_loops():
    def power(x):
        def body(state):
            return state[0] + 1, squares(state[1])

        return lax.while_loop(lambda state: state[0] < 9, body, (0, x))

    # 10, 1e2, 1e4, 1e8, 1e16, 1e32, inf
    report = trace_overflow(power)(jnp.float32(10.0))
    check(report, "squares", "mul", iterations=(5,))
    assert report.reached == ("1",)
    assert not trace_overflow(power)(jnp.float32(1.0))

    def until(x, count):
        return lax.fori_loop(0, count, lambda _, x: squares(x), x)

    # Each row for itself: the first is done after two steps, before it would overflow.
    x, counts = jnp.array([1e8, 1e4]), jnp.array([2, 4])
    assert np.isinf(jax.vmap(until)(x, counts)).tolist() == [False, True]
    check(trace_overflow(jax.vmap(until))(x, counts), "squares", "mul", iterations=(3,))
    assert not trace_overflow(jax.vmap(until))(x, jnp.array([2, 3]))


def test_the_branch_that_was_taken():
    def branched(index, x):
        tame = lambda x: x  # noqa: E731
        return lax.switch(index, [tame, lambda x: jnp.exp(x), squares], x)  # planted: switch

    x = jnp.full(2, HUGE)
    assert not trace_overflow(branched)(0, x)
    check(trace_overflow(branched)(1, x), "switch", "exp")
    check(trace_overflow(branched)(2, x), "squares", "mul")


def test_remat():
    def loss(x):
        with jax.named_scope("block"):
            return jnp.sum(jax.checkpoint(lambda x: jnp.sin(squares(x)))(x))

    x = jnp.full(2, HUGE)
    for fun in (loss, jax.grad(loss), jax.value_and_grad(loss)):
        check(trace_overflow(fun)(x), "squares", "mul", scope="block")
    # A cotangent that is too large inside of a recomputed block.
    grad = jax.grad(lambda x: HUGE * loss(x))
    x = jnp.full(2, 1e10)
    check(trace_overflow(grad)(x), "squares", "mul", "inf", "backward", "block")


def test_nested_loops_and_calls():
    @jax.jit
    def inner(carry, x):
        with jax.named_scope("inner"):
            return carry + squares(x), None

    def outer(x):
        def body(carry, row):
            with jax.named_scope("outer"):
                return lax.scan(inner, carry, row)[0], None

        return lax.scan(body, 0.0, x)[0]

    x = jnp.ones((4, 5)).at[2, 3].set(HUGE).at[3, 1].set(HUGE)
    report = trace_overflow(jax.jit(outer))(x)
    check(report, "squares", "mul", scope="outer/inner", iterations=(2, 3))
    assert "iteration   2, 3" in str(report)


def test_a_jitted_function_is_traced_for_its_first_caller_but_blamed_on_the_present_one():
    x = jnp.linspace(0.0, HUGE, 7)
    trace_overflow(lambda x: jnp.var(x))(x)  # what is inside of jnp.var is now known by this line
    check(trace_overflow(lambda x: jnp.var(x) + 1)(x), "var", "square")  # planted: var


def test_a_nan_that_is_written():
    report = trace_overflow(lambda x: jnp.where(x > 2, x, jnp.nan))(jnp.ones(3))  # planted: where
    first = report.first
    assert first.kind == "nan" and first.note == "a NaN that is written into the program"
    assert first.source.startswith(f"{HERE}:{line_of('where')} (")


def test_donated_arguments_stay():
    step = jax.jit(lambda x: jnp.exp(x), donate_argnums=0)
    x = jnp.full(4, 1e3)
    assert trace_overflow(step)(x).first.primitive == "exp"
    assert trace_overflow(step)(x).first.primitive == "exp"
    assert float(x[0]) == 1e3


# Autocast and steps


def test_a_product_that_overflows_under_autocast():
    def loss(params, x):
        h = x @ params["first"]
        with jax.named_scope("second"):
            h = h @ params["second"]  # planted: autocast
        return jnp.mean(h)

    params = {"first": jnp.full((4, 4), 1.0), "second": jnp.full((4, 4), 500.0)}
    x = jnp.full((2, 4), 20.0)
    assert not trace_overflow(loss)(params, x)
    assert not trace_overflow(loss, half_dtype=jnp.bfloat16)(params, x)
    report = trace_overflow(loss, half_dtype=jnp.float16)(params, x)
    first = check(report, "autocast", "dot_general", scope="second")
    assert first.input_types == ("float16[2,4]", "float16[4,4]")
    assert first.largest_inputs == (80.0, 500.0)
    report = trace_overflow(jax.grad(loss), half_dtype=jnp.float16)(params, x)
    assert not report, "the gradient needs no value of the second product"
    kept = ampx.DEFAULT_RULES.float32("second")

    assert not trace_overflow(loss, half_dtype=jnp.float16, rules=kept)(params, x)


def dense_layers(params, x, plant):
    with jax.named_scope("up"):
        hidden = x @ params["up"]  # planted: inside
    if plant == "before":
        hidden = hidden / (hidden - hidden[0, 0])  # planted: before
    with jax.named_scope("down"):
        y = hidden @ params["down"]  # planted: cotangent
    if plant == "after":
        y = jnp.exp(y * 0 + 100)  # planted: after
    if plant == "derivative":
        y = jnp.sqrt(y * 0)  # planted: derivative
    if plant == "cotangent":  # 1e38 for each zero
        y = (y - lax.stop_gradient(y)) * 1e38
    return jnp.sum(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, plant, expected",
    [
        ("rowwise", "inside", ("mul", "inf", "forward", "up")),
        ("rowwise", "before", ("div", "inf", "forward", "")),
        ("rowwise", "after", ("exp", "inf", "forward", "")),
        ("rowwise", "derivative", ("div", "inf", "backward", "")),
        ("rowwise", "cotangent", ("mul", "inf", "backward", "down")),
        ("mxfp8", "cotangent", ("dot_general", "inf", "backward", "down")),
    ],
    ids=["inside", "before", "after", "derivative", "cotangent", "mxfp8"],
)
def test_what_is_born_around_a_product_in_float8_is_blamed_on_a_line_of_the_user(
    recipe, plant, expected
):
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((32, 64)), "down": rng.standard_normal((64, 32))}
    params = {name: array.astype(np.float32) for name, array in params.items()}
    x = rng.standard_normal((32, 32)).astype(np.float32)
    fun = functools.partial(dense_layers, plant=plant)
    options = dict(half_dtype=jnp.bfloat16, dots=recipe)
    if plant == "inside":  # a sum of 32 numbers of 1e38
        params["up"][:] = 1e38
        report = trace_overflow(fun, **options)(params, x)
    else:
        report = trace_overflow(jax.grad(ampx.autocast(fun, **options)))(params, x)
    first = check(report, plant, *expected)
    in_float8 = plant in ("inside", "cotangent")
    assert first.note == ("a step of a matrix product in float8" if in_float8 else "")


def test_a_train_step_with_too_high_a_loss_scale():
    def loss(w, x):
        with jax.named_scope("product"):
            return jnp.mean(x @ w)  # planted: step

    scale = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**24)
    policy = ampx.opt_level("O1", half_dtype=jnp.float16)
    step = ampx.train_step(loss, optax.sgd(0.1), policy=policy, loss_scale=scale)
    state = step.init(jnp.ones((4, 2)))
    new_state, told = step(state, jnp.ones((8, 4)))
    assert bool(told.overflow) and np.isfinite(new_state.params).all()
    for run in (step, jax.jit(step)):
        report = trace_overflow(run)(state, jnp.ones((8, 4)))
        first = report.first
        assert report.reached == ("1/global_norm",)
        assert first.direction == "backward" and "float16" in first.output_type
        assert first.source.startswith(f"{HERE}:{line_of('step')} (")
    state = state._replace(opt_state=step.tx.init(state.params)._replace(loss_scale=jnp.float32(1)))
    assert not trace_overflow(step)(state, jnp.ones((8, 4)))


def test_nnx_modules():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.linear(x))

    def loss(model, x):
        return jnp.mean(squares(model(x) * HUGE))

    model = Model()
    before = jax.tree.map(jnp.copy, nnx.state(model))
    check(
        trace_overflow(loss)(model, jax.random.normal(jax.random.key(0), (8, 4))),
        *("squares", "mul"),
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert not trace_overflow(model)(jnp.ones((8, 4)))
    model.linear.kernel[...] = model.linear.kernel * jnp.inf
    report = trace_overflow(loss)(model, jnp.ones((8, 4)))
    assert report.first.note == "argument linear/kernel/value holds inf"


# What is meant


def attention(x, mask):
    scores = jnp.where(mask, x, -jnp.inf)
    return jax.nn.softmax(scores)  # planted: softmax


def plain_softmax(x, mask):
    scores = jnp.where(mask, x, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))  # planted: minus
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def test_masks_of_infinities_are_clean_until_they_hide_a_whole_row():
    x = jnp.ones((2, 3))
    mask = jnp.array([[True, False, True], [True, True, False]])
    for fun in (attention, plain_softmax):
        assert not trace_overflow(fun)(x, mask)
        assert not trace_overflow(jax.grad(lambda *a, f=fun: jnp.sum(f(*a) ** 2)))(x, mask)
    dead = mask.at[1].set(False)
    first = check(trace_overflow(plain_softmax)(x, dead), "minus", "sub", "nan")
    assert "row masked as a whole" in first.note
    check(trace_overflow(attention)(x, dead), "softmax", "sub", "nan")
    report = trace_overflow(lambda x, mask: plain_softmax(squares(x), mask))(x * HUGE, mask)
    check(report, "squares", "mul")


def test_written_infinities_in_results_are_no_overflow():
    report = trace_overflow(lambda x: {"y": x, "mask": jnp.where(x > 2, x, -jnp.inf)})(jnp.ones(3))
    assert not report and report.first is None and report.reached == ("mask",)
    assert report.written.source.startswith(f"{HERE}:")
    assert "No overflow" in str(report) and "mask" in str(report)
    # The same array with an overflow beside the mask.
    report = trace_overflow(lambda x: squares(jnp.where(x > 2, x, -jnp.inf)))(jnp.array([1, HUGE]))
    check(report, "squares", "mul")
    table = np.array([0.0, -np.inf], np.float32)
    assert trace_overflow(lambda x: x + table)(jnp.ones(2)).written is not None


def test_guarded_infinities_are_clean_but_the_gradient_of_the_guard_is_not():
    def guarded(x):
        return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))  # planted: guard

    x = jnp.array([0.0, 1.0, 2.0])
    assert not trace_overflow(guarded)(x)
    first = check(trace_overflow(jax.grad(guarded))(x), "guard", "div", "nan", "backward")
    assert "Guard the operand" in first.hint

    def later(x):  # the infinity that the guard keeps out is not what the result is blamed on
        return guarded(x) + jnp.sum(squares(x * HUGE))

    check(trace_overflow(later)(x), "squares", "mul")
    mixed = lambda x: jnp.where(x > 0, jnp.log(x), -jnp.inf)  # noqa: E731
    assert trace_overflow(mixed)(x).written is not None


# JAX folds a literal with NumPy, which warns.
folds = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
HALF = jnp.float16
TOO_LARGE = "a constant is inf in float16, which ends at 65504"


@folds
def test_a_literal_that_is_too_large_for_half_is_an_overflow():
    x = jnp.arange(1, 4, dtype=HALF)
    cases = {
        "mul": lambda x: x * 1e5,  # planted: literal mul
        "add": lambda x: x.astype(HALF) + 70000.0,  # planted: literal add
        "div": lambda x: 1e5 / x,  # planted: literal div
        "pow": lambda x: jnp.power(x, 7e4),  # planted: literal pow
        "dot_general": lambda x: x @ jnp.full((3, 2), 1e5, HALF),  # planted: literal dot_general
        "ragged_dot_general": lambda x: lax.ragged_dot(  # planted: literal ragged_dot_general
            x[None], jnp.full((1, 3, 2), 1e5, HALF), jnp.ones(1, jnp.int32)
        ),
    }
    for primitive, fun in cases.items():
        first = check(trace_overflow(fun)(x), f"literal {primitive}", primitive)
        assert first.note == TOO_LARGE and "Keep this operation in float32" in first.hint
    for primitive in ("mul", "div", "pow"):
        assert not trace_overflow(cases[primitive])(jnp.ones(3)), "it fits in float32"
    scaled = jax.grad(lambda w: jnp.sum(w * w) * 65536.0)  # planted: literal scale
    first = check(trace_overflow(scaled)(x), "literal scale", "mul", direction="backward")
    assert first.note == TOO_LARGE and "Lower the loss scale" in first.hint
    in_scan = lambda x: lax.scan(lambda c, x: (c, x * 1e5), 0, x)[1]  # noqa: E731
    assert trace_overflow(in_scan)(x).first.iterations == (0,)
    additive = lambda mask: (1 - mask) * -1e9  # noqa: E731  # planted: literal nan
    first = check(trace_overflow(additive)(jnp.ones(2, HALF)), "literal nan", "mul", "nan")
    assert first.note == TOO_LARGE and "Keep this operation in float32" in first.hint
    # A mask beside it does not hide it, nor is it to blame.
    both = lambda x: jnp.where(x > 1, x, -jnp.inf) / 2.0 + x * 1e5  # noqa: E731  # planted: both
    check(trace_overflow(both)(x), "both", "mul")
    assert trace_overflow(lambda x: jnp.where(x > 1, -jnp.inf, x) * -1.0)(x), "not below any more"


@pytest.mark.slow_but("float16")
@folds
@pytest.mark.parametrize("dtype", [HALF, jnp.float32])
def test_masks_stay_clean_when_they_are_moved_scaled_and_added(dtype):
    x, mask = jnp.arange(3, dtype=dtype), jnp.array([True, False, True])
    table = np.array([0, -np.inf, 0], dtype)
    added = lambda x: x + jnp.where(mask, 0.0, -jnp.inf).astype(dtype)  # noqa: E731
    masks = [
        lambda x: jnp.where(mask, x, -jnp.inf) / 3.0,
        lambda x: lax.scan(lambda c, x: (c, jnp.where(x > 1, x, -jnp.inf) / 2), 0, x)[1],
        lambda x: jnp.where(jnp.zeros(3, bool), x, -jnp.inf).max() * 2.0,
        lambda x: jnp.concatenate([x, jnp.full(2, -jnp.inf, dtype)]) * 2.0,
        lambda x: (x + table) * 2.0,
        lambda x: table * x[2],
        lambda x: x - jnp.where(mask, 0.0, jnp.inf).astype(dtype),
        lambda x: x + jnp.where(mask, 0.0, jnp.inf).astype(dtype),
        lambda x: x + -jnp.inf,
        lambda x: jnp.minimum(x, -jnp.inf),
        added,
    ]
    for number, masked in enumerate(masks):
        report = trace_overflow(masked)(x)
        assert not report and report.written is not None, number
    smallest = lambda x: jnp.where(mask, x, jnp.finfo(dtype).min)  # noqa: E731
    for fun in (smallest, lambda x: jax.nn.softmax(added(x))):
        assert trace_overflow(fun)(x).reached == ()


def test_arguments_keep_their_names_beside_an_nnx_module():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def __call__(self, x, *, scale=1.0):
            return self.linear(x) * scale

    def loss(model, batch, scale=1.0):
        return jnp.sum(model(batch["y"]) * batch["x"]) * scale

    model, x = Model(), jnp.ones((2, 1))
    bad = x * jnp.nan
    swapped = lambda b, model, *, c: loss(model, b) + c  # noqa: E731
    notes = {
        trace_overflow(fun)(*args, **kwargs).first.note
        for fun, args, kwargs in [
            (loss, (model, {"x": bad, "y": x}), {}),
            (swapped, ({"x": x, "y": bad}, model), {"c": 1.0}),
            (swapped, ({"x": x, "y": x}, model), {"c": bad}),
            (loss, (model, {"x": x, "y": x}, float("nan")), {}),
            (model, (bad,), {}),
            (model.__call__, (x,), {"scale": bad}),
        ]
    }
    names = {note.removeprefix("argument ").removesuffix(" holds nan") for note in notes}
    assert names == {"batch/x", "b/y", "c", "scale", "x"}


def test_numbers_among_the_arguments_that_are_not_finite():
    product = lambda x, y: x * y  # noqa: E731
    for number, kind in [(np.nan, "nan"), (np.inf, "inf"), (complex("nan"), "nan")]:
        for value in (number, np.asarray(number)[()]):
            x = jnp.ones(3, jnp.asarray(number).dtype)
            report = trace_overflow(product)(x, value)
            assert report.first.note == f"argument y holds {kind}", value
    report = trace_overflow(product)(jnp.ones(3, HALF), y=float("inf"))
    assert report.first.note == "argument y holds inf"
    assert trace_overflow(lambda x, y: (x * y).astype(x.dtype))(jnp.ones(2), float("inf"))

    def by_order(x, order):
        return jnp.sum(squares(x)) if order == jnp.inf else x

    # Numbers that the program has to know stay numbers.
    for fun in (by_order, jax.jit(by_order, static_argnums=1)):
        check(trace_overflow(fun)(jnp.full(2, HUGE), float("inf")), "squares", "mul")


def test_the_derivative_of_a_line_is_told_from_the_line():
    def rooted(x):
        return jnp.sum(jnp.sqrt(x))  # planted: root

    def length(x):
        return jnp.linalg.norm(x)  # planted: norm

    def powered(x):
        return jnp.sum(x**0.5)  # planted: power

    def logarithm(x):
        return jnp.sum(jnp.log(x))  # planted: logarithm

    def halved(x):
        return jnp.sum(0.5 / jnp.sqrt(x))  # planted: halved

    x = jnp.zeros(3)
    cases = [(rooted, "root"), (length, "norm"), (powered, "power"), (logarithm, "logarithm")]
    for fun, mark in cases:
        primitive = "pow" if mark == "power" else "div"
        first = check(trace_overflow(jax.grad(fun))(x), mark, primitive, direction="backward")
        assert first.hint.startswith("The derivative of this line is infinite there: guard")
    first = check(trace_overflow(halved)(x), "halved", "div")
    assert first.hint.startswith("Usually a division by zero")


def guarded(function):
    return jax.grad(lambda x: jnp.sum(jnp.where(x > 2, function(x), 0.0)))


POLES = {
    "integer_pow": (lambda x: x**-2, 0.0, 0.0),
    "pow": (lambda x: x**-0.5, 0.0, 0.0),
    "atanh": (jnp.arctanh, 1.0, None),
    "erf_inv": (jax.scipy.special.erfinv, -1.0, None),
    "lgamma": (jax.scipy.special.gammaln, -2.0, None),
    "digamma": (None, None, -2.0),
    "rsqrt": (None, None, 1.0),
}
DERIVED = {"digamma": jax.scipy.special.gammaln, "rsqrt": jnp.arcsin}


@pytest.mark.parametrize("primitive", POLES)
def test_a_pole_is_not_a_number_too_large(primitive):
    function, at, derived_at = POLES[primitive]
    if at is not None:
        first = trace_overflow(function)(jnp.array([0.5, at])).first
        assert (first.primitive, first.direction) == (primitive, "forward")
        assert first.note == f"infinite where the operand is {at:g}"
        expected = "A division by zero" if "pow" in primitive else "A pole"
        assert first.hint.startswith(expected) and "jnp.where(ok, x, safe)" in first.hint
    if derived_at is not None:
        fun = guarded(DERIVED.get(primitive, function))
        first = trace_overflow(fun)(jnp.array([0.5, derived_at])).first
        assert (first.primitive, first.direction) == (primitive, "backward")
        assert "jnp.where(ok, x, safe)" in first.hint


def test_the_denominator_of_a_quotient_behind_a_where():
    fun = jax.grad(lambda w, n: jnp.sum(jnp.where(n > 0, w / n, 0.0)), argnums=1)
    first = trace_overflow(fun)(jnp.ones(3), jnp.zeros(3)).first
    assert (first.primitive, first.direction) == ("integer_pow", "backward")
    assert first.hint.startswith("The derivative of this line is infinite there: guard")


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x**8, 1e10),
        (lambda x: x**4.5, 1e10),
        (jax.scipy.special.gammaln, 1e38),
        (lambda x: (x**2) ** 2, 1e10),
    ],
)
def test_powers_of_large_numbers_are_too_large(function, x):
    first = trace_overflow(function)(jnp.full(2, x)).first
    assert first.direction == "forward" and not first.note
    assert first.hint.startswith("Too large for float32")


def test_what_comes_out_of_a_callback_is_told():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    for value in (np.inf, np.nan):
        of_host = functools.partial(np.full_like, fill_value=value)
        first = trace_overflow(lambda x, f=of_host: jax.pure_callback(f, shape, x))(
            jnp.ones(3)
        ).first
        assert first.primitive == "pure_callback" and "Python callback" in first.hint


def test_an_index_out_of_bounds():
    taken = trace_overflow(lambda x: jnp.take(x, 7))  # planted: take
    first = check(taken(jnp.ones(3)), "take", "gather", "nan")
    assert "index out of bounds, which gather fills with NaN" in first.hint


def test_arguments_that_are_not_finite():
    def loss(params, x, *, bias):
        return jnp.sum(x @ params["w"] + bias)

    w, x, bias = jnp.ones((2, 2)), jnp.ones((3, 2)), jnp.zeros(2)
    report = trace_overflow(loss)({"w": w.at[0, 1].set(jnp.inf)}, x, bias=bias)
    assert report.first.primitive == "argument" and report.first.kind == "inf"
    assert report.first.note == "argument params/w holds inf"
    assert str(report).startswith("argument params/w holds inf\n  reaches     the result\n")
    report = trace_overflow(loss)({"w": w}, x, bias=bias.at[0].set(jnp.nan))
    assert report.first.note == "argument bias holds nan" and report.first.kind == "nan"
    masked = trace_overflow(lambda x, mask: jnp.sum(jax.nn.softmax(squares(x) + mask)))
    mask = jnp.array([0.0, -jnp.inf, 0.0])
    assert not masked(jnp.ones(3), mask)
    check(masked(jnp.array([1.0, 1.0, HUGE]), mask), "squares", "mul")


def test_clean_functions():
    def fun(x):
        def body(carry, x):
            return carry + x, (carry * x, jnp.int32(1))

        return lax.scan(body, jnp.zeros(2), x), jnp.argmax(x), x > 0, jax.random.key(0)

    for x in (jnp.ones((4, 2)), jnp.ones((1, 2))):
        report = trace_overflow(fun)(x)
        assert not report and report.first is None and report.reached == ()
        assert str(report) == "All results are finite."
    empty = lambda x, n: (lax.scan(lambda c, x: (c, x), squares(x), n), x)  # noqa: E731
    check(trace_overflow(empty)(jnp.float32(HUGE), jnp.ones((0, 2))), "squares", "mul")


def test_random_keys_and_integers_are_walked_over():
    def fun(key, x):
        key, other = jax.random.split(key)
        keys = jax.random.split(other, 3)

        def body(carry, key):
            return carry + 1, jax.random.normal(key, (2,))

        count, noise = lax.scan(body, 0, keys)
        return squares(x) + jnp.sum(noise) * 0, count, jax.random.bits(key)

    report = trace_overflow(fun)(jax.random.key(0), jnp.full(2, HUGE))
    check(report, "squares", "mul")
    assert report.reached == ("0",)


def test_references_hold_blames():
    def fun(x):
        held = jax.new_ref(x)
        held[...] = squares(held[...])
        with jax.named_scope("later"):
            return 2 * held[...]

    check(trace_overflow(fun)(jnp.full(2, HUGE)), "squares", "mul")

    def change(held):
        held[...] = squares(held[...])
        return held[...]

    held = jax.new_ref(jnp.full(2, HUGE))
    check(trace_overflow(change)(held), "squares", "mul")
    assert held[...].tolist() == jnp.full(2, HUGE).tolist(), "no argument changes"


def test_conversions_to_eight_bits():
    for dtype, kind in ((jnp.float8_e5m2, "inf"), (jnp.float8_e4m3fn, "nan")):
        report = trace_overflow(lambda x, d=dtype: x.astype(d).astype(x.dtype))(jnp.full(2, 1e5))
        assert (report.first.primitive, report.first.kind) == ("convert_element_type", kind)
        assert report.first.note == f"{jnp.dtype(dtype)} ends at {float(jnp.finfo(dtype).max):g}"
        assert "float32" in report.first.hint


def test_arrays_on_another_device_are_judged_there_first(monkeypatch):
    monkeypatch.setattr(overflow_blame, "_is_near", lambda array: not isinstance(array, jax.Array))
    fetched, original = [], np.asarray

    def asarray(array, *args, **kwargs):
        fetched.append(np.shape(array))
        return original(array, *args, **kwargs)

    monkeypatch.setattr(np, "asarray", asarray)
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64):
        assert not any(overflow_blame.find_flags(jnp.ones(71, dtype)))
        assert overflow_blame.find_flags(jnp.full(73, -jnp.inf, dtype)).below
    assert (71,) not in fetched and (73,) in fetched


# What is not looked into


def test_kernels_and_shard_map_are_blamed_as_a_whole():
    mesh = make_mesh((2,), ("data",))

    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def summed(x):
        return lax.psum(squares(x), "data")

    def fun(x):
        return summed(x)  # planted: shard_map

    first = check(trace_overflow(fun)(jnp.full(4, HUGE)), "shard_map", "shard_map")
    assert first.note == "what happens inside was not looked into"
    assert "rows_of_one_device" in first.hint and "Too large" not in first.hint
    inside = trace_overflow(lambda x: jnp.mean(squares(x)))(jnp.full(2, HUGE))  # as it advises
    check(inside, "squares", "mul")
    first = trace_overflow(lambda i, x: jnp.zeros(2).at[i].add(x))(jnp.int32(1), jnp.inf).first
    assert first is None or first.primitive == "argument"


def test_no_line_of_a_library_is_named():
    frame = Frame(jax.__file__, "current", 1, 213)
    mesh = make_mesh((2,), ("data",))

    def local(x):  # planted: local
        return lax.psum(squares(x), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())
    jaxpr, _ = reading.trace(mapped, jnp.ones(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_info, "frames_of", lambda eqn: [frame])
        (eqn,) = reading.open_jaxpr(jaxpr).eqns
        place = Place().at(eqn, jaxpr)
        assert place.source == f"{HERE}:{line_of('local')}"
        patch.setattr(source_info, "function_of", lambda body: (jax.__file__, 1))
        assert place.source == ""
        assert "no line of your own" in str(trace_overflow(mapped)(jnp.full(4, HUGE)))


def test_what_ampx_computes_is_told_of_the_line_that_called_it():
    def cast(x):
        return ampx.cast_floating(x, jnp.float16)  # planted: narrowed

    first = trace_overflow(cast)(jnp.float32(1e6)).first
    assert first.source.startswith(f"{HERE}:{line_of('narrowed')} ")


def test_what_only_the_compiled_program_does_is_said(monkeypatch):
    """A call whose compiled form differs from its equations, as fusion may make it."""

    @jax.jit
    def sensitive(x):
        return jnp.sin(x)  # planted: compiled

    def fun(x):
        with jax.named_scope("call"):
            return 2 * sensitive(x)  # planted: call

    evaluate = reading.evaluate

    def broken(jaxpr, *operands):
        return [out * jnp.float32(jnp.inf) for out in evaluate(jaxpr, *operands)]

    monkeypatch.setattr(reading, "evaluate", broken)
    first = trace_overflow(fun)(jnp.ones(3)).first
    assert first.primitive == "program" and first.note == COMPILED_ONLY
    monkeypatch.setattr(
        building, "as_function", lambda eqn, parent: lambda x: [x * jnp.float32(jnp.inf)]
    )
    report = trace_overflow(fun)(jnp.ones(3))
    first = check(report, "call", "jit", scope="call")
    assert first.note == COMPILED_ONLY and "only compiled" in str(report)


# How it is called


def test_debug_flags_do_not_interfere():
    with jax.debug_nans(True):
        check(
            trace_overflow(jax.jit(lambda x: squares(x) * 0))(jnp.ones(2) * HUGE), "squares", "mul"
        )


def test_wrong_calls():
    with pytest.raises(ValueError, match="give the half_dtype"):
        trace_overflow(jnp.sin, rules=ampx.DEFAULT_RULES.half("x"))
    with pytest.raises(ValueError, match="float16 or bfloat16, got float32"):
        trace_overflow(jnp.sin, half_dtype=jnp.float32)
    with pytest.raises(TypeError, match="x is a .*Tracer. Call it outside of jit"):
        jax.jit(lambda x: bool(trace_overflow(squares)(x)))(jnp.ones(2))
    with pytest.raises(TypeError, match="x is a ShapeDtypeStruct"):
        trace_overflow(squares)(jax.ShapeDtypeStruct((2,), "float32"))


# --- what a report says beside the facts ----------------------------------------------------------


def half_loss(params, batch):
    return jnp.mean((batch @ params).astype(jnp.float16))


@pytest.mark.parametrize("kind", ["value_and_grad", "train_step"])
def test_a_loss_in_half_is_told_to_be_the_cause(kind):
    """The line that overflows is none of the user's: the cast that takes the loss to float32."""
    params, batch = jnp.ones((4, 4)), jnp.ones((2, 4))
    if kind == "train_step":
        step = ampx.train_step(half_loss, optax.sgd(0.1), loss_scale="dynamic")
        report = trace_overflow(step)(step.init(params), batch)
    else:
        grads_of = ampx.value_and_grad(half_loss)
        report = trace_overflow(grads_of)(params, batch, loss_scale=jnp.float32(2.0**16))
    assert report.first.direction == "backward" and report.first.source == ""
    assert "compute the loss in float32" in report.first.hint
    assert "unknown" not in str(report)


@pytest.mark.parametrize("wrapped", [lambda fun: fun, jax.jit], ids=["as it is", "jit"])
def test_a_program_in_float16_that_is_finite_points_to_what_counts_zeros(wrapped):
    small = jnp.full((2, 4), 1e-6)
    in_half = wrapped(lambda x: jnp.sum((x.astype(jnp.float16) ** 2).astype(jnp.float32)))
    report = trace_overflow(jax.grad(in_half))(small)
    assert not report and "ampx.numerics_report" in str(report)
    in_float32 = wrapped(lambda x: jnp.sum(x**2))
    assert str(trace_overflow(jax.grad(in_float32))(small)) == "All results are finite."


def rms_norm(x):
    squares = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + jnp.asarray(1e-6, x.dtype))


def test_an_infinity_that_became_finite_again_is_told_beside_what_came_of_it():
    """The first layer's squares overflow; one over their root is 0, on which the second divides."""
    w, x = jnp.eye(4, dtype=jnp.float16), jnp.full((2, 4), 300, jnp.float16)
    report = trace_overflow(jax.grad(lambda w: jnp.sum(rms_norm(rms_norm(x @ w) @ w))))(w)
    assert report.first.primitive == "div" and report.first.kind == "inf"
    assert (report.vanished.primitive, report.vanished.largest_inputs) == ("mul", (300.0, 300.0))
    assert "(rms_norm)" in report.vanished.source
    assert "Begin here" in str(report) and report.vanished.hint in str(report)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.log(jnp.exp(-1e3 * x) - jnp.exp(jnp.tanh(1e38 * x * 10)) * 0),  # tanh(inf)
        lambda x: 1 / (jnp.zeros(2) / jnp.full(2, jnp.inf)) * x,  # written into the program
        lambda x: jnp.log(x - x) + 1 / (x * 1e38 * 10),  # after what is to blame
    ],
)
def test_other_infinities_that_became_finite_are_not_told(fun):
    report = trace_overflow(fun)(jnp.full(2, 5.0))
    assert report.first is not None and report.vanished is None
