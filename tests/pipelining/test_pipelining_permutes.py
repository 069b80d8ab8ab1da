"""Stages that permute over other axes than that of the stages, against the model on one device.

XLA lets all devices of a mesh take part in a permute. In a branch, where only those of one stage
are, they took numbers of other permutes, or waited for ever. Here a part of each row lies on each
device along "model", and layers read those beside it: in a ring, from one side without an end, in
loops, branches, remat and rules of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from pipeline_models import relative_error, sequential

from ampx.jaxprs import folds
from ampx.pipelining import gpipe, interleaved, one_f_one_b, value_and_grad, zero_bubble

LAYERS, WIDTH, ROWS = 4, 3, 8


class Devices:
    """Moves parts from device to device; `whole` does the same to one array of all parts."""

    def __init__(self, axes, number):
        self.axes, self.number = axes, number

    def shift(self, x, step, is_ring=True):
        pairs = [(n, n + step) for n in range(self.number)]
        if is_ring:
            pairs = [(n, to % self.number) for n, to in pairs]
        return lax.ppermute(x, self.axes, [p for p in pairs if 0 <= p[1] < self.number])

    def part(self, x):
        return lax.dynamic_index_in_dim(x, lax.axis_index(self.axes), 1, keepdims=False)

    def sum(self, x):
        return lax.psum(jnp.sum(x), self.axes)


class Whole:
    def shift(self, x, step, is_ring=True):
        moved = jnp.roll(x, step, 1)
        if is_ring:
            return moved
        return moved.at[:, :step].set(0) if step > 0 else moved.at[:, step:].set(0)

    def part(self, x):
        return x

    def sum(self, x):
        return jnp.sum(x)


def ring(where, p, x):
    return jnp.tanh(where.shift(x, 1) @ p["up"]) @ p["down"]


def open_end(where, p, x):
    return jnp.tanh(where.shift(x, -1, is_ring=False) @ p["up"] + where.shift(x, 1) @ p["down"])


def in_a_loop(where, p, x):
    def body(carry, _):
        moved, total = carry
        moved = where.shift(moved, 1)
        return (moved, total + jnp.tanh(moved @ p["up"])), None

    (_, total), _ = lax.scan(body, (x, jnp.zeros_like(x)), None, length=3)
    return total @ p["down"]


def in_a_branch(where, p, x):
    branches = [functools.partial(ring, where, p), functools.partial(open_end, where, p)]
    return lax.cond(where.sum(x) * 0 > 1, *branches, x)


def in_remat(where, p, x):
    return jax.checkpoint(functools.partial(in_a_loop, where))(p, x)


def by_a_rule(where, p, x):
    """A shift with a derivative of its own, as attention kernels have."""

    @jax.custom_vjp
    def shift(x):
        return where.shift(x, 1)

    shift.defvjp(lambda x: (shift(x), None), lambda _, grad: (where.shift(grad, -1),))
    return jnp.tanh(shift(x) @ p["up"]) @ p["down"]


LAYER_KINDS = {f.__name__: f for f in (ring, open_end, in_a_loop, in_a_branch, in_remat, by_a_rule)}


def make_functions(where, layer):
    def first(params, shared, batch, key):
        return where.part(batch["x"])

    def stage(params, x, key):
        return x + layer(where, params, x)

    def last(params, shared, x, batch, key):
        error = x * params["gain"] - where.part(batch["y"])
        return where.sum(error * error), jnp.float32(len(x))

    return dict(first=first, stage=stage, last=last)


def make_params():
    normal = np.random.default_rng(0).standard_normal
    matrices = {
        name: jnp.asarray(0.5 * normal((LAYERS, WIDTH, WIDTH)), jnp.float32)
        for name in ("up", "down")
    }
    # A leaf of the last part lies along the axes, so that they are the pipeline's.
    return {"stages": matrices, "last": {"gain": jnp.ones(()), "unused": jnp.zeros(12)}}


def make_batch(parts):
    normal = np.random.default_rng(1).standard_normal
    x, y = (jnp.asarray(normal((ROWS, parts, WIDTH)), jnp.float32) for _ in "xy")
    return {"x": x, "y": y}


CASES = {
    "ring": (one_f_one_b(2, 4), {}),
    "ring, unchecked": (one_f_one_b(2, 4), dict(check_vma=False)),
    "ring of three": (gpipe(2, 2), dict(sizes=(3,))),
    "open_end": (interleaved(2, 2), dict(stash="residuals")),
    "open_end, of two axes": (one_f_one_b(2, 2), dict(sizes=(2, 2))),
    "in_a_loop": (zero_bubble(2, 2), dict(stash="residuals")),
    "in_a_loop, unchecked": (zero_bubble(2, 2), dict(check_vma=False, sizes=(3,))),
    "in_a_branch": (one_f_one_b(2, 2), {}),
    "in_remat": (one_f_one_b(2, 2), dict(stash=jax.checkpoint_policies.dots_saveable)),
    "by_a_rule": (one_f_one_b(2, 2), {}),
}


def layer_of(case):
    return LAYER_KINDS[case.replace(",", "").split()[0]]


def make_pipeline(case):
    schedule, options = CASES[case]
    sizes = options.get("sizes", (2,))
    axes = ("model", "other")[: len(sizes)]
    where = Devices(axes, int(np.prod(sizes)))
    grads_of = value_and_grad(
        **make_functions(where, layer_of(case)),
        schedule=schedule,
        axis_name="stage",
        mesh=make_mesh((2, *sizes), ("stage", *axes), "Auto"),
        param_specs={"last": {"gain": P(), "unused": P(axes)}},
        stash=options.get("stash", "inputs"),
        check_vma=options.get("check_vma", True),
    )
    return grads_of, where


@pytest.mark.sampled(3, "open_end, of two axes", "in_remat")
@pytest.mark.slow_but("ring", "in_a_loop, unchecked")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case):
    grads_of, where = make_pipeline(case)
    params, batch = make_params(), make_batch(where.number)
    found = jax.jit(grads_of)(params, batch)
    expected = sequential(params, batch, **make_functions(Whole(), layer_of(case)))
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    found.grads["last"].pop("unused"), expected.grads["last"].pop("unused")
    assert relative_error(found.grads, expected.grads) < 1e-5
    # The forwards alone, where rules of derivatives are still calls.
    np.testing.assert_allclose(
        jax.jit(grads_of.value)(params, batch).loss, expected.loss, rtol=1e-5
    )


def test_only_the_schedule_itself_permutes():
    """All devices take part in what it does, which is over the axis of the stages."""
    grads_of, where = make_pipeline("in_a_loop, unchecked")
    jaxpr = jax.make_jaxpr(grads_of)(make_params(), make_batch(where.number))
    found = [(e.primitive.name, e.params) for e, _ in folds.equations_inside(jaxpr)]
    permuted = {p["axis_name"] for name, p in found if name == "ppermute"}
    assert permuted == {("stage",)}
    assert "all_to_all" in dict(found)


def test_a_shard_map_in_a_stage_permutes_too():
    """Its axis is the compiler's outside of it. (JAX itself takes such a one only unchecked.)"""
    params, batch = make_params(), make_batch(2)
    where = Devices(("model",), 2)

    def stage(p, x, key):
        parts = P(None, "model")
        return x + jax.shard_map(
            lambda p, x: open_end(where, p, x[:, 0])[:, None],
            in_specs=(P(), parts),
            out_specs=parts,
            axis_names={"model"},
            check_vma=False,
        )(p, x)

    whole = make_functions(Whole(), open_end)
    grads_of = value_and_grad(
        **whole | {"stage": stage},
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        mesh=make_mesh((2, 2), ("stage", "model"), "Auto"),
        check_vma=False,
    )
    found, expected = jax.jit(grads_of)(params, batch), sequential(params, batch, **whole)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    assert relative_error(found.grads["stages"], expected.grads["stages"]) < 1e-5
