"""Every row of the troubleshooting page: its cause brings about its symptom, and its call helps.

`ROWS` has a check for each symptom, by the words of the page; a row without one fails a test.
"""

import operator
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import ROOT
from flax import serialization
from helpers import make_mesh

import ampx

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SGD, P = optax.sgd(0.1), jax.P
# One compiled update serves most rows. What differs between them is the state that they begin in.
SCALED = ampx.dynamic_loss_scale(SGD, on_floor="raise-flag")
W = np.ones(2, np.float32)
UNTESTED = {"No faster in half precision": "times depend on the machine"}
ROWS = {}


def row(symptom):
    return lambda check: ROWS.setdefault(symptom, check)


@jax.jit
def compiled(gradients, state, value):
    return SCALED.update(gradients, state, W, value=value)


def update(gradients, state, value=1.0):
    return compiled(gradients, state, np.float32(value))


def begin(**fields):
    state = SCALED.init(W)
    return state._replace(
        **{name: np.asarray(x, state.loss_scale.dtype) for name, x in fields.items()}
    )


def skips_of(gradient_of_scale, steps):
    state, skips = SCALED.init(W), []
    for _ in range(steps):
        gradients = np.full(2, gradient_of_scale(float(state.loss_scale)), np.float32)
        _, state = update(gradients, state)
        skips.append(bool(state.overflow))
    return skips, state


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@row("The first ten steps are skipped, then none")
def check_search():
    skips, state = skips_of(lambda scale: np.inf if scale > 64 else 1, 14)
    assert skips == [True] * 10 + [False] * 4 and state.loss_scale == 64
    _, state = update(W, begin(loss_scale=64))  # a smaller `init_scale`
    assert not state.overflow


@row("Every step is skipped; the scale is 1; `nan_total` grows")
def check_nan():
    skips, state = skips_of(lambda scale: np.nan, 18)
    assert all(skips) and (state.loss_scale, state.nan_total, state.inf_total) == (1, 18, 0)
    found = ampx.trace_overflow(jax.grad(lambda x: jnp.sqrt(-x)))(1.0)
    assert re.search(r"sqrt gives nan.*\n *written in *test_troubleshooting.py:\d+", str(found))


@row("Every step is skipped; `inf_total` grows")
def check_inf():
    skips, state = skips_of(lambda scale: np.inf, 3)
    assert all(skips) and (state.inf_total, state.nan_total) == (3, 0)
    found = str(ampx.trace_overflow(lambda x: x @ x, half_dtype=jnp.float16)(jnp.full(2, 300.0)))
    assert "dot_general" in found


@row("The loss does not move; nothing is skipped")
def check_underflow():
    assert jnp.float16(1e-8) == 0 and jnp.float16(1e-8 * 65536) > 0
    params, batch = {"w": jnp.full((2, 1), 1e-9)}, jnp.ones((4, 2))
    scales = ampx.numerics_report(loss_of)(params, batch).loss_scales("float16")
    assert min(scales) > 1


@row("The loss falls far too slowly, with SGD by a factor of 65536")
def check_forgotten_scale():
    slow, _ = update(W, begin())
    right, _ = update(W * 65536, begin())
    np.testing.assert_array_equal(slow * 65536, right)

    def step(params, opt_state, batch):
        _, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = SCALED.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((3, 2))}
    assert not ampx.lint_step(step)(params, SCALED.init(params), jnp.ones((4, 3))).ok


@row("The loss does not move in bfloat16")
def check_small_steps():
    half, step = W.astype(jnp.bfloat16), np.full(2, 0.001, jnp.bfloat16)
    np.testing.assert_array_equal(half - step, half)
    tx = ampx.master_weights(optax.sgd(1.0))
    params, state = jnp.asarray(half), tx.init(jnp.asarray(half))
    for _ in range(8):
        updates, state = tx.update(jnp.asarray(step), state, params)
        params = ampx.apply_updates(params, updates)
    assert np.all(params < half)


@row('`policy="bf16"` is refused')
def check_policy():
    with pytest.raises(ValueError, match="two meanings"):
        ampx.train_step(loss_of, SGD, policy="bf16")
    for policy in ("bf16-mixed", "p=bf16"):
        ampx.train_step(loss_of, SGD, policy=policy)


@row("Steps are skipped, `bad_update_total` grows, and the scale stays")
def check_bad_update():
    _, state = update(np.full(2, 65536 * 2e19, np.float32), begin())
    assert state.overflow and (state.inf_total, state.nan_total) == (0, 0)
    assert (state.bad_update_total, state.skipped_total, state.loss_scale) == (1, 1, 65536)


@row("`nonfinite_loss_total` grows")
def check_loss():
    _, state = update(W, begin(), value=np.inf)
    assert state.nonfinite_loss_total == 1 and not state.overflow


@row("`floor_hits` grows")
def check_floor():
    _, state = update(W * np.inf, begin(loss_scale=1))
    assert (state.floor_hits, state.loss_scale) == (1, 1)
    with pytest.raises(ArithmeticError, match="smallest loss scale"):
        ampx.raise_if_exhausted(state)


@row("The second call compiles anew, and no other")
def check_weak_types():
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        rate = jnp.where(True, 0.1, 0.2)
        return {"w": state["w"] - rate * x, "rate": rate}

    first = state = {"w": W, "rate": jnp.float32(0.1)}
    for _ in range(3):
        state = step(state, W)
    assert len(traces) == 2
    (found,) = ampx.lint_step(step)(first, W).findings
    assert found.check == "dtype" and found.message.endswith(": rate")


@row("`count` in the optimizer's state stays 0")
def check_lost_state():
    tx = optax.adam(0.1)

    def step(params, opt_state, x, is_right):
        grads = jax.grad(loss_of)(params, x)
        updates, new = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new if is_right else opt_state

    params, x = {"w": np.ones((3, 2), np.float32)}, np.ones((4, 3), np.float32)
    for is_right in (False, True):
        _, state = step(params, tx.init(params), x, is_right)
        assert int(state[0].count) == int(is_right)
        report = ampx.lint_step(step)(params, tx.init(params), x, is_right)
        assert [found.check for found in report.findings] == ([] if is_right else ["lost_state"])


@row("The scale climbs to 2^24 and stays, `ceiling_hits` grows, `skipped_total` is 0")
def check_ceiling():
    state = begin(loss_scale=2**23)
    for hits in range(3):
        # The gradients of a loss that nobody multiplied.
        _, state = update(W, state._replace(growth_tracker=np.int32(1999)))
        assert state.loss_scale == 2**24
        assert ampx.metrics(state)["ceiling_hits"] == hits
    assert state.skipped_total == 0


@row("Devices hold different parameters")
def check_axes():
    def on_device(gradients, axis_names):
        tx = ampx.dynamic_loss_scale(SGD, axis_names=axis_names)
        return tx.update(gradients, tx.init(W), W)[0]

    unlike, alike = over_devices(
        on_device, ("other", ("data", "other")), np.float32([[1, 1], [np.inf, 1]])
    )
    assert not np.array_equal(unlike[0], unlike[1]) and np.array_equal(alike[0], alike[1])


@row('"out_specs which require replication" from `shard_map` around a step')
def check_axis_of_a_step():
    mesh, params, batch = make_mesh((2,), ("data",)), {"w": jnp.ones((2, 1))}, jnp.ones((4, 2))

    def mapped(step):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))

    forgotten = ampx.train_step(loss_of, SGD)
    with pytest.raises(ValueError, match="out_specs which require replication"):
        mapped(forgotten)(forgotten.init(params), batch)
    step = ampx.train_step(loss_of, SGD, axis_name="data")
    state, report = mapped(step)(step.init(params), batch)
    assert report.loss == 4


@row("Gradients are n times too large or too small")
def check_means():
    def on_device(batch, op):
        grads = jax.grad(lambda w: jnp.mean(w * batch))(W)  # the mean over this device's rows
        return ampx.all_reduce("data", op=op).update(grads, ampx.all_reduce("data", op=op).init(W))[
            0
        ]

    summed, mean = over_devices(on_device, ("sum", "mean"), np.ones((2, 2), np.float32))
    np.testing.assert_allclose(summed, 2 * mean)
    np.testing.assert_allclose(mean[0], jax.grad(lambda w: jnp.mean(w))(W))


def over_devices(on_device, choices, rows):
    """What two devices, each with a row, make of each choice."""
    mesh = make_mesh((2, 1), ("data", "other"))

    def both(rows):
        return [on_device(rows[0], choice)[None] for choice in choices]

    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return [np.asarray(each) for each in jax.jit(mapped)(rows)]


@row("Losses with k micro-batches differ from one batch")
def check_weights():
    batch = {"x": np.float32([1, 5, 4, 9]), "mask": np.float32([1, 1, 1, 0])}

    def sum_and_weight(w, batch):
        return jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])

    def mean_of_tokens(w, batch):
        total, weight = sum_and_weight(w, batch)
        return total / weight

    def losses(w, batch):
        mean = ampx.value_and_grad(mean_of_tokens, num_microbatches=2)
        weighed = ampx.value_and_grad(sum_and_weight, num_microbatches=2, normalize="weights")
        return mean(w, batch).loss, weighed(w, batch).loss

    mean, weighed = jax.jit(losses)(jnp.float32(1), batch)
    whole = mean_of_tokens(np.float32(1), batch)
    np.testing.assert_allclose(weighed, whole, rtol=1e-6)
    assert abs(mean - whole) > 0.1


@row('"a batch of 6 rows is not divisible into 4 micro-batches"')
def check_rows():
    grads_of = ampx.value_and_grad(loss_of, num_microbatches=4)
    arguments = {"w": jnp.ones((2, 2))}, jnp.ones((6, 2))
    expect_quoted(ValueError, lambda: jax.eval_shape(grads_of, *arguments))


@row("Memory as of float32 under autocast")
def check_casts():
    def loss(w, x):
        return jnp.sum((x @ w).astype(jnp.float32) + 1)

    half = jnp.ones((2, 2), jnp.bfloat16)
    assert "convert_element_type  pass     bf16       f32" in str(ampx.explain(loss)(half, half))


@row("Each call compiles anew")
def check_traces():
    def count(calls):
        traces = []
        for make, size in calls:
            make(traces)(jnp.ones(size))
        return len(traces)

    def make_step(traces):
        return jax.jit(lambda x: traces.append(1) or x)

    steps = []
    once = lambda traces: steps[0] if steps else steps.append(make_step(traces)) or steps[0]  # noqa: E731
    assert count([(once, 2)] * 3) == 1  # made once, called three times
    steps.clear()
    assert count([(once, 2), (once, 3)]) == 2  # another shape
    assert count([(make_step, 2)] * 3) == 3  # made inside the loop


@row('"the manual axis types do not match" from a loop or a branch in a pipeline')
def check_loops_in_pipelines():
    def grads_of(zeros, **options):
        return ampx.pipelining.value_and_grad(
            first=lambda p, shared, x, key: x,
            stage=lambda p, x, key: jax.lax.fori_loop(0, 2, lambda _, y: y + p * x, zeros(x)),
            last=lambda p, shared, x, batch, key: (jnp.sum(x), len(x)),
            schedule=ampx.pipelining.one_f_one_b(2, 2),
            axis_name="stage",
            mesh=make_mesh((2,), ("stage",)),
            **options,
        )

    def trace(grads_of):
        return jax.eval_shape(grads_of, {"stages": W}, jnp.ones((4, 3)))

    expect_quoted(TypeError, lambda: trace(grads_of(lambda x: jnp.zeros(x.shape))))
    trace(grads_of(jnp.zeros_like))
    trace(grads_of(lambda x: jnp.zeros(x.shape), check_vma=False))


@row('"Buffer has been deleted or donated", "Array has been deleted"')
def check_donation():
    x, donating = jnp.ones(2), jax.jit(jnp.negative, donate_argnums=0)
    donating(x)
    # A ValueError where a compiled function gets it at once; jax 0.12 says RuntimeError always.
    expect_quoted((ValueError, RuntimeError), lambda: donating(x))
    expect_quoted((ValueError, RuntimeError), lambda: x + 1)


@row('"Encountered an unexpected tracer" from a gradient under autocast, and none without it')
def check_closed_over():
    def loss(w, x):
        @jax.custom_vjp
        def half_square(w):
            return jnp.sum((w * x) ** 2) / 2

        half_square.defvjp(lambda w: (half_square(w), w), lambda w, g: (g * w * x**2,))
        return half_square(w)

    with pytest.raises(Exception, match="tracer|Tracer"):  # noqa: B017, its class is JAX's affair
        jax.grad(jax.jit(loss))(W, W)
    expect_quoted(jax.errors.UnexpectedTracerError, lambda: jax.grad(ampx.autocast(loss))(W, W))
    np.testing.assert_array_equal(jax.grad(loss)(W, W), W)
    np.testing.assert_array_equal(ampx.autocast(jax.grad(loss))(W, W), W)


@row("Statistics of batch norm move on a skipped step")
def check_statistics():
    _, state = update(W * np.inf, begin())
    assert ampx.select_if_finite(state, jnp.ones(2), jnp.zeros(2)).tolist() == [0, 0]


@row("`module 'ampx' has no attribute 'train_step'`")
def check_other_distribution():
    with pytest.raises(AttributeError) as caught:
        operator.attrgetter("train_step")(types.ModuleType("ampx"))
    assert str(caught.value) in PAGE


@row("A restored run is refused by its format, or lacks `ceiling_hits`")
def check_format():
    saved = ampx.state_format(SCALED.init(W))
    ampx.check_state_format(saved, SCALED.init(W))
    with pytest.raises(ValueError, match="adam|Adam|mu"):
        ampx.check_state_format(saved, ampx.dynamic_loss_scale(optax.adam(0.1)).init(W))
    fresh = SCALED.init(W)
    earlier = serialization.to_state_dict(fresh)
    del earlier["ceiling_hits"]
    with pytest.raises(ValueError, match="do not match"):
        serialization.from_state_dict(fresh, earlier)
    assert ampx.upgrade_state(earlier, fresh).ceiling_hits == 0


def expect_quoted(kind, call):
    """An error whose message has the words that a row of the page quotes."""
    with pytest.raises(kind) as caught:
        call()
    quoted = re.findall(r'"([^"|]+)"', PAGE.partition("## Questions")[0])
    assert any(quote in str(caught.value) for quote in quoted), caught.value


SLOW = ("inf", "nan", "underflow", "axes", "means", "weights")


@pytest.mark.parametrize(
    "symptom",
    [
        pytest.param(
            symptom,
            id=check.__name__,
            marks=pytest.mark.slow if check.__name__.removeprefix("check_") in SLOW else (),
        )
        for symptom, check in ROWS.items()
    ],
)
def test_a_row_is_as_the_page_says(symptom) -> None:
    ROWS[symptom]()


def test_every_row_has_a_check() -> None:
    table = PAGE.partition("## Symptom")[2].partition("##")[0]
    symptoms = [
        line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:] if "|" in line
    ]
    assert len(symptoms) > 20 and set(symptoms) == {*ROWS, *UNTESTED}
