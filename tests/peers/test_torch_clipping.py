"""torch's clips of gradients beside those of a step of ampx, and the norms that both report."""

import functools
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from listing import Peer

import ampx

torch = pytest.importorskip("torch")

FORMS = ("optax", "fused.apply", "train_step")
EXCLUDED = {
    "clip_grad_norm_ of an infinite norm": "torch multiplies finite gradients by 0 and the "
    "optimizer goes on; ampx undoes the step and counts it in bad_update_total",
    "clip_grad_norm_ of another order": "ampx clips by the norm of order 2 alone",
}
PEERS = (
    Peer(
        source="torch",
        runs="`clip_grad_norm_`, its norm and the step that SGD makes of it, as of "
        "`optax.clip_by_global_norm`, `ampx.fused.apply` and `ampx.train_step`; `clip_grad_value_`",
        cases=lambda: [
            *(f"clip_grad_norm_ as {form}" for form in FORMS),
            "clip_grad_value_",
            *EXCLUDED,
        ],
        excluded=EXCLUDED,
    ),
)
SHAPES = {"a": (3,), "b": (2, 2)}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
SCALE = 2.0**10
MAX_NORMS = (1e-3, 1.0, 100.0)
# Squares of the largest, times a scale of 2**10, are beyond float32; their norm is not.
sizes = st.sampled_from([1e-12, 1e-3, 1.0, 1e4, 1e16, 1e18])
seeds = st.integers(0, 2**32 - 1)


def make_grads(seed: int, size: float) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: np.asarray(size * generator.normal(size=shape), np.float32)
        for name, shape in SHAPES.items()
    }


def loss_fn(params, batch):
    return sum(jnp.sum(param * batch[name][0]) for name, param in params.items())


@functools.cache
def step_of(form: str, max_norm: float) -> Callable:
    """From gradients to the parameters after one step at rate 1 from zeros, norm and verdict."""
    module = ampx.fused if form == "fused.apply" else optax
    inner = module.sgd(1.0)
    if form == "optax":
        inner = optax.chain(optax.clip_by_global_norm(max_norm), inner)
    scaled = functools.partial(ampx.dynamic_loss_scale, init_scale=SCALE)
    step = ampx.train_step(loss_fn, inner, loss_scale=scaled, max_grad_norm=max_norm)
    tx = scaled(inner)

    @jax.jit
    def run(params, grads):
        if form == "train_step":
            state, report = step(step.init(params), {k: g[None] for k, g in grads.items()})
            return state.params, report.global_norm, report.overflow
        state, grads = tx.init(params), optax.tree.scale(SCALE, grads)
        if form == "fused.apply":
            params, state, report = ampx.fused.apply(tx, grads, state, params, max_norm=max_norm)
            return params, report.global_norm, report.overflow
        updates, state = tx.update(grads, state, params)
        norm = optax.tree.norm(optax.tree.scale(1 / SCALE, grads))
        return ampx.apply_updates(params, updates), norm, ampx.is_skipped(state)

    return run


def run_theirs(grads: dict, clip: Callable) -> tuple[dict[str, np.ndarray], float]:
    params = {name: torch.nn.Parameter(torch.tensor(zero)) for name, zero in ZEROS.items()}
    for name, param in params.items():
        param.grad = torch.tensor(grads[name])
    norm = clip(list(params.values()))
    torch.optim.SGD(list(params.values()), lr=1.0).step()
    return {name: param.detach().numpy() for name, param in params.items()}, norm


@pytest.mark.parametrize("form", FORMS)
@given(seed=seeds, size=sizes, max_norm=st.sampled_from(MAX_NORMS))
def test_torch_clip_grad_norm(form, seed, size, max_norm):
    grads = make_grads(seed, size)
    expected, norm = run_theirs(
        grads, lambda params: float(torch.nn.utils.clip_grad_norm_(params, max_norm))
    )
    found, own_norm, skipped = step_of(form, max_norm)(ZEROS, grads)
    assert not skipped
    # Some roundings of a sum of seven squares, and of a root.
    np.testing.assert_allclose(own_norm, norm, rtol=1e-6)
    # torch divides by the norm plus 1e-6, and ampx by the norm.
    theirs, ours = min(1, max_norm / (norm + 1e-6)), min(1, max_norm / norm)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array * (ours / theirs), rtol=2e-6)


@given(seed=seeds, size=sizes, limit=st.sampled_from(MAX_NORMS))
def test_torch_clip_grad_value(seed, size, limit):
    grads = make_grads(seed, size)
    expected, _ = run_theirs(grads, lambda p: torch.nn.utils.clip_grad_value_(p, limit))
    tx = ampx.static_loss_scale(optax.chain(optax.clip(limit), optax.sgd(1.0)), SCALE)
    updates, _ = tx.update(optax.tree.scale(SCALE, grads), tx.init(ZEROS), ZEROS)
    for name, array in expected.items():
        np.testing.assert_array_equal(updates[name], array)


def test_torch_goes_on_after_an_infinite_norm():
    grads = {name: np.full(shape, 3e38, np.float32) for name, shape in SHAPES.items()}
    expected, norm = run_theirs(
        grads, lambda params: float(torch.nn.utils.clip_grad_norm_(params, 1.0))
    )
    assert np.isinf(norm) and not any(map(np.any, expected.values()))
    step = ampx.train_step(loss_fn, optax.sgd(1.0), loss_scale=1.0, max_grad_norm=1.0)
    state, _ = step(step.init(ZEROS), {name: grad[None] for name, grad in grads.items()})
    assert int(ampx.find_loss_scale_state(state.opt_state).bad_update_total) == 1


def test_torch_has_norms_of_other_orders():
    grads = make_grads(0, 1.0)
    largest = max(np.max(np.abs(grad)) for grad in grads.values())
    norm = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0, norm_type=np.inf)
    assert run_theirs(grads, norm)[1] == largest
    _, own, _ = step_of("train_step", 1.0)(ZEROS, grads)
    assert own > largest
