"""Sums over devices that come twice, and results that differ; sound steps that look alike."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import ampx
from ampx.diagnostics.lint import lint_step

PARAMS = {"w": jnp.full((4, 3), 0.1), "b": jnp.zeros(3)}
BATCH = {
    "x": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4),
    "y": jnp.ones((8, 3)) * jnp.arange(8.0)[:, None],
}


def loss_of(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def mean_loss(params, batch):
    return lax.pmean(loss_of(params, batch), "data")


def total_loss(params, batch):
    return lax.psum(jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2), "data") / 24


OF_DATA, EQUAL_ON_ALL = P("data"), P()


def mapped(step, check_vma, out=EQUAL_ON_ALL, axes=("data",), shape=(4,), given=OF_DATA):
    specs = dict(in_specs=(P(), given), out_specs=out)
    return jax.shard_map(step, mesh=make_mesh(shape, axes), check_vma=check_vma, **specs)


def sgd(reduce, loss=loss_of, own=False, check_vma=True, **options):
    """A step of plain SGD whose gradients go through `reduce`."""

    def step(params, batch):
        at = params
        if own and check_vma:  # marked as different, so that JAX does not sum their gradients
            at = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        grads = reduce(jax.grad(loss)(at, batch))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return mapped(step, check_vma, **options)


def each(fun):
    return functools.partial(jax.tree.map, fun)


def pmean(grads):
    return lax.pmean(grads, "data")


def psum(grads):
    return lax.psum(grads, "data")


def by_hand(grads):
    return jax.tree.map(lambda g: g / 4, psum(grads))


def by_factor(grads):
    return jax.tree.map(lambda g: g * 0.25, psum(grads))


def joined(grads):
    """All gradients in one array, in bfloat16 on their way, and clipped by their norm after it."""
    flat, restore = jax.flatten_util.ravel_pytree(grads)
    flat = lax.pmean(flat.astype(jnp.bfloat16), "data").astype(jnp.float32)
    return restore(flat * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(flat)))


def in_optax(grads):
    tx = optax.chain(optax.stateless(lambda g, _: psum(g)), optax.scale(2.0))
    return tx.update(grads, tx.init(grads))[0]


NOTHING = each(lambda grads: grads)
# From a name to the step, and by which factor its update is larger than that of a mean.
FAULTS = {
    "summed by JAX, mean": (lambda: sgd(pmean), "changes nothing", 4),
    "summed by JAX, mean by hand": (lambda: sgd(by_hand), "changes nothing", 4),
    "summed by JAX, mean by a factor": (lambda: sgd(by_factor), "changes nothing", 4),
    "summed by JAX, all in one, mean": (lambda: sgd(joined), "changes nothing", None),
    "summed by JAX, sum": (lambda: sgd(psum), "4 times too large", 16),
    "summed by JAX, sum in optax": (lambda: sgd(in_optax), "4 times too large", 32),
    "sum twice": (
        lambda: sgd(lambda g: psum(psum(g)), check_vma=False),
        "4 times too large",
        16,
    ),
    "sum twice, varying": (lambda: sgd(lambda g: psum(psum(g)), own=True), "4 times", 16),
    "loss of all, sum": (lambda: sgd(psum, mean_loss), "4 times too large", 4),
}


def step_of_one_device():
    grads = jax.grad(loss_of)(PARAMS, BATCH)
    return jax.tree.map(lambda g: -0.1 * np.asarray(g, np.float64), grads)


@pytest.mark.parametrize("name", FAULTS)
def test_gradients_that_are_reduced_twice_are_found(name):
    make, said, factor = FAULTS[name]
    step = jax.jit(make())
    found = lint_step(step)(PARAMS, BATCH).findings
    assert {each.check for each in found} == {"reduction"} and said in found[0].message
    assert all("test_device_checks.py" in each.source for each in found)
    if factor:  # it is as wrong as the message says
        moved = jax.tree.map(lambda new, old: np.asarray(new) - old, step(PARAMS, BATCH), PARAMS)
        right = jax.tree.map(lambda u: factor * u, step_of_one_device())
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), moved, right
        )


def with_norm(grads):
    norm = lax.pmean(optax.tree.norm(grads), "data")
    return jax.tree.map(lambda g: g / 4 / jnp.maximum(norm, 1.0), grads)


def synchronized(params, batch):
    params = jax.tree.map(lambda p, g: p - 0.1 * g / 4, params, jax.grad(loss_of)(params, batch))
    return pmean(params)


def weighted(params, batch):
    """Gradients of sums on each device, of which some rows count twice."""
    weight = 1.0 + lax.axis_index("data").astype(jnp.float32)
    total = psum(weight)
    at = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
    grads = jax.grad(lambda p: loss_of(p, batch) * weight)(at)
    return jax.tree.map(lambda p, g: p - 0.1 * g / total, params, psum(grads))


def sound_ampx(tx=None, check_vma=True, **options):
    tx = optax.sgd(0.1) if tx is None else tx
    step = ampx.train_step(loss_of, tx, axis_name="data", **options)
    state = step.init(PARAMS)
    return mapped(step, check_vma), state


SOUND = {
    "a mean inside": lambda: sgd(NOTHING, mean_loss),
    "a mean inside and another": lambda: sgd(pmean, mean_loss),
    "a sum inside, and a mean": lambda: sgd(pmean, total_loss),
    "divided by hand": lambda: sgd(each(lambda g: g / 4)),
    "a sum of JAX": lambda: sgd(NOTHING),
    "marked, mean": lambda: sgd(pmean, own=True),
    "marked, sum": lambda: sgd(psum, own=True),
    "marked, all in one": lambda: sgd(joined, own=True),
    "mean": lambda: sgd(pmean, check_vma=False),
    "sum": lambda: sgd(psum, check_vma=False),
    "mean of a mean": lambda: sgd(lambda g: pmean(pmean(g)), check_vma=False),
    "sum of a mean": lambda: sgd(lambda g: psum(pmean(g)), check_vma=False),
    "mean of a norm": lambda: sgd(with_norm),
    "mean of parameters": lambda: mapped(synchronized, True),
    "weighted": lambda: mapped(weighted, True),
    "loss of all": lambda: sgd(pmean, total_loss, check_vma=False),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reduction_gives_nothing(name):
    report = lint_step(jax.jit(SOUND[name]()))(PARAMS, BATCH)
    assert report.ok, report


def sum_of(params, batch):
    return jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2)


def weight_of(batch):
    return jnp.sum((batch["x"] > 0).astype(jnp.float32))


# What a loss function returns as the sum of losses and as their weight; how gradients are off.
TOTALS = {
    "own": (sum_of, weight_of, None),
    "a constant": (sum_of, lambda b: 8.0, None),
    "another axis": (lambda p, b: lax.pmean(sum_of(p, b), "model"), weight_of, None),
    "a share of all": (sum_of, lambda b: lax.pmean(weight_of(b), "data"), None),
    "a quotient": (lambda p, b: sum_of(p, b) / lax.psum(weight_of(b), "data"), lambda b: 1.0, None),
    "both": (lambda p, b: psum(sum_of(p, b)), lambda b: psum(weight_of(b)), None),
    "loss": (lambda p, b: psum(sum_of(p, b)), weight_of, "the loss .*: gradients are 2 .* large"),
    "weight": (sum_of, lambda b: psum(weight_of(b)), "the weight .*: gradients are 2 .* small"),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", TOTALS)
def test_a_loss_or_weight_that_is_a_total_is_found(name, num_microbatches, check_vma):
    loss, weight, told = TOTALS[name]
    if check_vma and name in ("loss", "both"):
        pytest.skip("types tell it, and the step is refused")

    def loss_and_weight(params, batch):
        return loss(params, batch), weight(batch)

    options = dict(normalize="weights", num_microbatches=num_microbatches)
    step = ampx.train_step(loss_and_weight, optax.sgd(0.1), axis_name="data", **options)
    state = step.init(PARAMS)
    over_both = mapped(step, check_vma, out=(P(), P()), axes=("data", "model"), shape=(2, 2))
    findings = lint_step(over_both)(state, BATCH).findings
    assert [found.check for found in findings] == ["reduction"] * bool(told)
    if told:
        assert re.search(told, findings[0].message)
        assert "this device's own rows" in findings[0].fix


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["plain", "dynamic", "clip", "accumulation"])
def test_a_step_of_ampx_over_devices_gives_nothing(kind, check_vma):
    tx, options = optax.adam(0.1), {}
    if kind == "dynamic":
        options = {"loss_scale": "dynamic"}
    if kind == "clip":
        options = {"max_grad_norm": 1.0}
    if kind == "accumulation":
        options = {"num_microbatches": 2}
    step, state = sound_ampx(tx, check_vma, **options)
    report = lint_step(step)(state, BATCH)
    assert report.ok, report


def of_axes(fun, **options):
    """A result for each device, which counts as equal."""
    return mapped(lambda params, batch: fun(params, batch), False, **options)


def ring(params, batch):
    """An all-reduce by hand: what each device has goes round to all."""
    total = part = jax.grad(loss_of)(params, batch)
    for _ in range(3):
        part = lax.ppermute(part, "data", [(i, (i + 1) % 4) for i in range(4)])
        total = jax.tree.map(jnp.add, total, part)
    return jax.tree.map(lambda p, g: p - g / 4, params, total)


def of_first(params, batch):
    is_first = lax.axis_index("data") == 0
    return psum(jnp.where(is_first, loss_of(params, batch), 0.0))


def scattered(params, batch, gather):
    grad = jax.grad(loss_of)(params, batch)["w"]
    part = lax.psum_scatter(grad, "data", tiled=True)
    new = params["w"][:1] - part
    return lax.all_gather(new, "data", tiled=True) if gather else new


def looped(params, batch, reduce):
    def body(params, _):
        grads = reduce(jax.grad(loss_of)(params, batch))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    return lax.scan(body, params, length=3)[0]


def until(params, batch, reduce):
    def goes_on(state):
        return reduce(loss_of(state, batch)) > 0.1

    return lax.while_loop(goes_on, each(lambda p: p * 0.9), params)


def branch(params, batch, reduce):
    value = reduce(loss_of(params, batch))
    return lax.cond(value > 1.0, lambda p: p, each(lambda p: -p), params)


def total_by_hand(params, batch):
    """Its derivative is that of the device's own loss."""
    loss = loss_of(params, batch)
    return loss + lax.stop_gradient(pmean(loss) - loss)


def centred(params, batch):
    return jnp.mean((batch["x"] - pmean(batch["x"])) ** 2)


def side_by_side(params, batch):
    """A loss and a mean of it that travel in one array."""
    loss = loss_of(params, batch)
    both = jnp.stack([loss, pmean(loss)]) * 2.0
    return both[1]


def same(value):
    return value


def nested(reduce):
    """Over "data"; each product is divided over "model" by a shard_map of its own."""

    def product(x, w):
        return lax.psum(x @ w, "model")

    def loss(params, batch):
        inner = jax.shard_map(
            product,
            in_specs=(P(None, "model"), P("model")),
            out_specs=P(),
            axis_names={"model"},
        )
        return jnp.mean((inner(batch["x"], params["w"]) + params["b"] - batch["y"]) ** 2)

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, reduce(jax.grad(loss)(params, batch)))

    return jax.shard_map(
        step,
        mesh=make_mesh((2, 2), ("data", "model")),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )


UNEQUAL = {
    "gradients": lambda: sgd(same, check_vma=False),
    "a loss": lambda: of_axes(loss_of),
    "distances from a mean": lambda: of_axes(centred),
    "the index of a device": lambda: of_axes(lambda p, b: lax.axis_index("data")),
    "a part of a sum": lambda: of_axes(functools.partial(scattered, gather=False)),
    "a loop": lambda: of_axes(functools.partial(looped, reduce=same)),
    "the length of a loop": lambda: of_axes(functools.partial(until, reduce=same)),
    "a branch": lambda: of_axes(functools.partial(branch, reduce=same)),
    "divided further in, too": lambda: nested(same),
    "reduced over another axis": lambda: of_axes(
        lambda p, b: lax.pmean(loss_of(p, b), "model"),
        axes=("data", "model"), shape=(2, 2), given=P(("data", "model")),
    ),
}  # fmt: skip
EQUAL = {
    "gradients": lambda: sgd(pmean, check_vma=False),
    "a loss": lambda: of_axes(lambda p, b: pmean(loss_of(p, b))),
    "a loss of each": lambda: of_axes(lambda p, b: loss_of(p, b)[None], out=P("data")),
    "a loss of the first": lambda: of_axes(of_first),
    "a total by hand": lambda: of_axes(total_by_hand),
    "side by side with what differs": lambda: of_axes(side_by_side),
    "in one barrier with what differs": lambda: of_axes(
        lambda p, b: lax.optimization_barrier((p, loss_of(p, b)))[0]
    ),
    "a ring": lambda: of_axes(ring),
    "parts that are gathered": lambda: of_axes(functools.partial(scattered, gather=True)),
    "all losses": lambda: of_axes(lambda p, b: lax.all_gather(loss_of(p, b), "data")),
    "a loop": lambda: of_axes(functools.partial(looped, reduce=pmean)),
    "the length of a loop": lambda: of_axes(functools.partial(until, reduce=pmean)),
    "a branch": lambda: of_axes(functools.partial(branch, reduce=pmean)),
    "a maximum": lambda: of_axes(lambda p, b: lax.pmax(loss_of(p, b), "data")),
    "an axis of one device": lambda: of_axes(loss_of, shape=(1,)),
    "reduced over both": lambda: of_axes(
        lambda p, b: lax.pmean(loss_of(p, b), ("data", "model")),
        axes=("data", "model"), shape=(2, 2), given=P(("data", "model")),
    ),
    "divided further in over another axis": lambda: nested(pmean),
    "another axis": lambda: of_axes(
        lambda p, b: pmean(loss_of(p, b)), axes=("data", "model"), shape=(2, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "no jit"])
@pytest.mark.parametrize("name", UNEQUAL)
def test_a_result_that_differs_on_devices_is_found(name, jit):
    (found,) = lint_step(jit(UNEQUAL[name]()))(PARAMS, BATCH).findings
    assert found.check == "out_specs" and "JAX takes those of the first" in found.message
    assert "jax.lax.pmean" in found.fix and "test_device_checks.py" in found.source


@pytest.mark.parametrize("name", EQUAL)
def test_a_result_that_is_equal_on_devices_is_not(name):
    report = lint_step(jax.jit(EQUAL[name]()))(PARAMS, BATCH)
    assert report.ok, report


def test_what_differs_is_named():
    tx = optax.adam(0.1)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = tx.update(pmean(grads), state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "worst": pmean(loss)}

    state = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
    report = lint_step(jax.jit(mapped(step, False)))(state, BATCH)
    (found,) = report.findings
    assert found.message.endswith("JAX takes those of the first: 1/loss")
    lines = pathlib.Path(__file__).read_text().splitlines()
    line = lines[int(found.source.split(":")[1].split()[0]) - 1]
    assert "return jnp.mean" in line
