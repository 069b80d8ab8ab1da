"""How a pipeline runs: nothing in bubbles, memory that does not grow, one trace."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_models import (
    find_inner_copies,
    first,
    last,
    make_batch,
    make_params,
    pipeline,
    relative_error,
    run,
    sequential,
    stage,
)
from quick_keys import quick_key

from ampx.pipelining import (
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from ampx.pipelining.runtime.buffers import ArrayType, Carrier
from ampx.pipelining.runtime.executor import Executor
from ampx.pipelining.runtime.lowering import lower
from ampx.pipelining.runtime.stage_programs import StageInputs, StageOutputs, trace_stage

KEY = quick_key(7)


def name_of(value):
    return getattr(value, "name", str(value))


def poisoned(monkeypatch):
    """All buffers start with NaN, and what is sent in a bubble is NaN."""
    start, nothing = Executor._make_carry, Carrier.nothing

    def as_nan(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + jnp.asarray(jnp.nan, leaf.dtype)

    def poisoned_start(self):
        carry = start(self)
        buffers = ("activations", "cotangents", "kept", "deferred")
        return carry._replace(
            **{name: jax.tree.map(as_nan, getattr(carry, name)) for name in buffers}
        )

    monkeypatch.setattr(Executor, "_make_carry", poisoned_start)
    monkeypatch.setattr(Carrier, "nothing", lambda self: [as_nan(x) for x in nothing(self)])


@pytest.mark.slow
@pytest.mark.whole("interleaved-inputs", "1f1b-residuals")
@pytest.mark.parametrize(
    ("schedule", "stash"),
    [
        (zero_bubble(4, 3), "inputs"),
        (zero_bubble_v(2, 3), "residuals"),
        (interleaved(2, 16, chunks=2), "inputs"),
        (interleaved(2, 4, chunks=2), "residuals"),
        (one_f_one_b(4, 16), "residuals"),
    ],
    ids=name_of,
)
def test_praxis_nan_in_bubbles_changes_no_bit(schedule, stash, monkeypatch):
    batch = make_batch(2 * schedule.num_microbatches)

    def result():
        return run(pipeline(schedule, stash=stash), make_params(), batch, key=KEY)

    clean = result()
    assert np.isfinite(clean.loss)
    poisoned(monkeypatch)
    assert_bit_equal(jax.device_get(result()), jax.device_get(clean))


def test_the_poison_is_found_where_it_is_read(monkeypatch):
    """The check above would fail if bubbles were read."""
    zeros = ArrayType.zeros
    monkeypatch.setattr(ArrayType, "zeros", lambda self, *n: zeros(self, *n) + jnp.nan)
    result = run(pipeline(one_f_one_b(2, 2)), make_params(), make_batch(4))
    assert np.isnan(result.loss)


@pytest.mark.slow_but("interleaved")
@pytest.mark.whole("gpipe", "eager-1f1b")  # no chunks and no halves: theirs are easier tables
@pytest.mark.parametrize(
    "schedule",
    [gpipe(4, 3), eager_one_f_one_b(2, 3), interleaved(2, 3), zero_bubble(2, 3)],
    ids=name_of,
)
def test_stages_are_not_run_in_bubbles(schedule):
    calls = []

    def counted(params, x, key):
        jax.debug.callback(lambda x: calls.append(1), x[0, 0, 0])
        return stage(params, x, key)

    grads_of = pipeline(schedule, stage=counted, stash="residuals")
    batch = make_batch(2 * schedule.num_microbatches)
    jax.block_until_ready(run(grads_of, make_params(), batch))
    jax.effects_barrier()
    assert len(calls) == 8 * schedule.num_microbatches


@pytest.mark.parametrize(("size", "exchanges"), [((3, 2), 3), ((12, 96), 106)])
def test_the_ticks_in_which_neighbours_exchange(size, exchanges):
    """Stage s sends micro-batch m in tick s + m; the last stage sends nothing."""
    edges = [(stage, stage + 1) for stage in range(size[0] - 1)]
    for make in (gpipe, one_f_one_b, zero_bubble):
        tables = lower(make(*size), [edges])
        for (route,) in (tables.activations, tables.cotangents):
            assert route.is_busy.sum() == exchanges


def test_neighbours_exchange_only_what_somebody_sends(monkeypatch):
    calls, permute = [], jax.lax.ppermute

    def counted(value, *args, **options):
        jax.debug.callback(lambda x: calls.append(1), value.ravel()[0])
        return permute(value, *args, **options)

    monkeypatch.setattr(jax.lax, "ppermute", counted)
    jax.block_until_ready(
        run(pipeline(gpipe(3, 2), stage=lambda p, x, key: x), make_params(6), make_batch(4))
    )
    jax.effects_barrier()
    # 3 devices, 2 directions, 3 ticks: of 7 ticks the first 3 have something to send forward.
    assert len(calls) == 3 * 2 * 3


# --- memory and traces


@pytest.mark.parametrize("stash", ["inputs", "residuals"])
def test_what_depends_on_no_input_is_made_again_and_not_kept(stash):
    def layer(params, x):
        return jnp.tanh(x @ jnp.cumsum(params * jnp.tril(jnp.ones((3, 3))), axis=0))

    def compute(inputs):
        apply = jax.checkpoint(layer) if stash == "inputs" else layer
        return StageOutputs((apply(inputs.params, inputs.received[0]),))

    inputs = StageInputs(jnp.ones((3, 3)), (jnp.ones((5, 3)),), None, None, jnp.int32(0))
    program = trace_stage(compute, inputs, split=True)
    assert program.deferred
    shapes = [aval.shape for aval in (*program.kept, *program.deferred)]
    # What is made of mask and parameters is kept where all residuals are; the mask never is.
    assert shapes.count((3, 3)) == (stash == "residuals")


@pytest.mark.parametrize("stash", ["inputs", "residuals"])
def test_the_backward_is_divided_also_of_calls_that_close_over_arrays(stash):
    mask = jnp.asarray(np.tril(np.ones((5, 4), np.float32)))

    def layer(params, x):
        return x + jnp.tanh(x @ params) * mask

    def products(layer):
        """How many products each half of the backward has."""

        def compute(inputs):
            apply = jax.checkpoint(layer) if stash == "inputs" else layer
            x = apply(inputs.params[0], inputs.received[0])
            return StageOutputs((apply(inputs.params[1], x),))

        inputs = StageInputs(jnp.ones((2, 4, 4)), (jnp.ones((5, 4)),), None, None, jnp.int32(0))
        halves = trace_stage(compute, inputs, split=True).halves
        return [str(jaxpr).count("dot_general") for jaxpr in (halves.inputs, halves.weights)]

    remade = 2 if stash == "inputs" else 0
    assert products(jax.jit(layer)) == products(layer) == [2 + remade, 2]


def test_what_a_few_instructions_make_of_kept_values_is_not_kept():
    def compute(inputs):
        x, weights = inputs.received[0], inputs.params
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        products = x * scale @ weights
        return StageOutputs((jnp.tanh(products) * products,))

    inputs = StageInputs(jnp.ones((3, 7)), (jnp.ones((5, 3)),), None, None, jnp.int32(0))
    program = trace_stage(compute, inputs)
    # Products and their tanh; of the normalization numbers for each row, since x itself is an
    # input. JAX alone keeps x * scale, too, and what the derivative of tanh reads.
    shapes = [aval.shape for aval in program.kept]
    assert shapes.count((5, 7)) == 2
    assert set(shapes) == {(5, 1), (5, 7)}

    kept = program.run(inputs)[1]
    _, pullback = jax.vjp(
        lambda p, x: compute(StageInputs(p, (x,), *inputs[2:])).sent[0],
        *[inputs.params, inputs.received[0]],
    )
    cotangent = jnp.arange(35.0).reshape(5, 7)
    ours, theirs = program.pull(inputs, kept, [cotangent])
    for actual, wanted in zip([*ours, *theirs], pullback(cotangent), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)


@functools.cache
def compiled(schedule, width=64, rows=64, **options):
    def layer(params, x, key):
        return x + jnp.sin(jnp.tanh(x @ params["w"])) @ params["v"]

    grads_of = pipeline(
        schedule,
        first=lambda params, shared, batch, key: batch["x"],
        stage=layer,
        last=lambda params, shared, x, batch, key: (
            jnp.sum((x - batch["y"]) ** 2),
            jnp.float32(len(x)),
        ),
        **options,
    )
    shape = (rows * schedule.num_microbatches, width)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in ("x", "y")}
    place = NamedSharding(grads_of.mesh, P("stage"))
    layers = jax.ShapeDtypeStruct((8, width, width), jnp.float32, sharding=place)
    return jax.jit(grads_of).lower({"stages": {"w": layers, "v": layers}}, batch).compile()


def compiled_temporaries(schedule, **options):
    return compiled(schedule, **options).memory_analysis().temp_size_in_bytes


@pytest.mark.slow_but("1f1b")
@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), zero_bubble(4, 8)], ids=name_of)
def test_ticks_copy_neither_stash_nor_sums_of_gradients(schedule):
    """A branch writes its part; an idle one, and the loop around, hand on what they were given."""
    copied = find_inner_copies(compiled(schedule, stash="residuals").as_text())
    # Sums of gradients are [1 chunk, 2 layers, 64, 64], buffers [slots, 64, 64].
    large = [result for result in copied if re.match(r"f32\[(1,2|[2-9]|1\d),64,64\]", result)]
    assert copied and not large


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8)], ids=name_of)
def test_the_layers_of_a_stage_are_read_by_one_kernel(schedule):
    """It is told the place; a static slice would be a kernel of its own for each layer."""
    text = compiled(schedule, stash="residuals").as_text()
    reads = re.findall(r"= f32\[(?:1,)*64,64\]\S* ((?:dynamic-)?slice)\(", text)
    assert set(reads) == {"dynamic-slice"}


@pytest.mark.slow_but("one_f_one_b-residuals")
@pytest.mark.parametrize(
    ("make", "stash"),
    [(one_f_one_b, "inputs"), (one_f_one_b, "residuals"), (interleaved, "inputs")],
)
def test_memory_does_not_grow_with_the_number_of_microbatches(make, stash):
    # Large activations: the schedule's own tables do grow, by some bytes a tick.
    few, many = (compiled_temporaries(make(4, m), stash=stash) for m in (8, 64))
    assert many <= 1.02 * few


def test_memory_of_gpipe_grows_by_its_activations():
    few, many = (compiled_temporaries(gpipe(4, m)) for m in (8, 64))
    assert many - few >= 56 * 64 * 64 * 4


def test_policies_order_what_is_stashed():
    policies = jax.checkpoint_policies
    stashes = (policies.nothing_saveable, policies.dots_saveable, "residuals")
    sizes = [compiled_temporaries(one_f_one_b(4, 8), stash=s) for s in stashes]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3


def test_the_number_of_traces_does_not_grow_with_the_number_of_microbatches():
    def traces(num_microbatches):
        counts = dict.fromkeys(("first", "stage", "last"), 0)

        def counted(function):
            def wrapped(*args):
                counts[function.__name__] += 1
                return function(*args)

            return wrapped

        functions = {f.__name__: counted(f) for f in (first, stage, last)}
        grads_of = pipeline(one_f_one_b(4, num_microbatches), **functions)
        jax.eval_shape(grads_of, make_params(), make_batch(2 * num_microbatches))
        return counts

    assert traces(4) == traces(32)
    assert max(traces(4).values()) <= 8


@pytest.mark.parametrize("stash", ["inputs", "residuals"])
def test_layers_that_are_written_out_are_traced_once(stash):
    calls = []

    def counted(params, x, key):
        calls.append(1)
        return stage(params, x, key)

    grads_of = pipeline(zero_bubble(4, 8), stage=counted, stash=stash)
    jax.eval_shape(grads_of, make_params(16), make_batch(16))
    assert len(calls) == 1  # for 16 layers, in three kinds of stages


@jax.custom_vjp
def product(x, w):
    return x @ w


def keep_what_is_asked_for(x, w):
    return x.value @ w.value, (w.value if x.perturbed else None, x.value if w.perturbed else None)


def multiply_what_is_kept(kept, g):
    w, x = kept
    of_w = None if x is None else jnp.einsum("...i,...j->ij", x, g)
    return None if w is None else g @ w.T, of_w


product.defvjp(keep_what_is_asked_for, multiply_what_is_kept, symbolic_zeros=True)


@pytest.mark.parametrize("stash", ["inputs", "residuals"])
def test_layers_may_have_rules_that_ask_what_is_differentiated(stash):
    def constant_first(params, shared, batch, key):
        return jax.lax.stop_gradient(first(params, shared, batch, key))

    def layer(params, x, key):  # the first layer's x has no gradient, and no layer has one of `s`
        y = x["x"] + jnp.tanh(product(x["x"], params["kernel"]) + params["bias"])
        return {"x": y + product(x["s"], params["kernel"]), "s": jax.lax.stop_gradient(jnp.sin(y))}

    functions = {
        "first": lambda *args: {"x": constant_first(*args), "s": constant_first(*args)},
        "stage": layer,
        "last": lambda params, shared, x, batch, key: last(params, shared, x["x"], batch, key),
    }
    params, batch = make_params(4), make_batch(4)
    found = run(pipeline(zero_bubble(2, 2), stash=stash, **functions), params, batch)
    expected = sequential(params, batch, num_microbatches=2, **functions)
    assert relative_error(found.grads["stages"], expected.grads["stages"]) < 1e-5


def test_a_second_call_does_not_trace_again():
    traces = []

    def traced(params, x, key):
        traces.append(1)
        return stage(params, x, key)

    grads_of = pipeline(one_f_one_b(2, 2), stage=traced)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, batch, key, scale):
        result = grads_of(params, batch, key=key, loss_scale=scale)
        return jax.tree.map(lambda p, g: p - 0.01 * g / scale, params, result.grads), result.loss

    params = jax.device_put(make_params(), grads_of.shardings(make_params()))
    losses, counts = [], []
    for number in range(4):
        given = params
        key = jax.random.fold_in(KEY, number)
        params, loss = step(params, make_batch(4), key, jnp.float32(2.0**number))
        losses.append(float(loss))
        counts.append(len(traces))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert len(set(losses)) == 4 and len(set(counts)) == 1


# --- what others test


def assert_as_sequential(schedule, rows, rtol=1e-5, atol=4e-5, **options):
    batch, params = make_batch(rows), make_params(options.pop("layers", 8))
    result = run(pipeline(schedule, **options), params, batch)
    expected = sequential(params, batch, None, schedule.num_microbatches)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=rtol)
    for found, wanted in zip(
        jax.tree.leaves(jax.device_get(result.grads)), jax.tree.leaves(expected.grads), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_torch_four_microbatches_on_eight_interleaved_stages():
    assert_as_sequential(interleaved(4, 4, chunks=2), rows=8)


@pytest.mark.whole  # other numbers of what the tests of gradients have
def test_axlearn_batch_of_14_in_microbatches_of_2():
    assert_as_sequential(one_f_one_b(4, 7), rows=14)


@pytest.mark.slow
@pytest.mark.whole("8")
@pytest.mark.parametrize("num_microbatches", [4, 8])
def test_maxtext_circular_pipeline_of_32_layers(num_microbatches):
    assert_as_sequential(
        interleaved(4, num_microbatches, chunks=8), rows=2 * num_microbatches, layers=32
    )


@pytest.mark.slow  # `last` has such a norm in every other test
def test_gradients_of_a_norm_without_epsilon_are_finite():
    def normed(params, x, key):
        x = stage(params, x, key)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True))

    batch = make_batch(6)
    result = run(pipeline(one_f_one_b(4, 3), stage=normed), make_params(), batch)
    expected = sequential(make_params(), batch, None, 3, stage=normed)
    assert relative_error(jax.device_get(result.grads), expected.grads) < 1e-5
