"""What a profiler shows of a step: the names of its phases, read out of compiled programs."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import make_mesh

import ampx

PARAMS = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16))}
STEP = {"ampx.micro_batch", "ampx.verdict", "ampx.update"}
BUCKETS = {"ampx.bucket_0", "ampx.bucket_1"}


def loss_fn(params, batch):
    with jax.named_scope("model"):
        hidden = jnp.tanh(batch @ params["a"])
    with jax.named_scope("head"):
        return jnp.mean((hidden @ params["b"]) ** 2)


def scopes(name):
    return re.findall(r"ampx\.\w+", name)


def compiled_names(step, *args):
    """Opcode and op_name of each instruction that has one."""
    text = jax.jit(step).lower(*args).compile().as_text()
    return re.findall(r"\s([a-z][\w\-]*)\(.*op_name=\"([^\"]*)\"", text)


def lowered_text(lowered):
    """The program before the compiler merges what it can."""
    return lowered.as_text(debug_info=True)


def found_in(names):
    return {scope for _, name in names for scope in scopes(name)}


@pytest.mark.slow_but("fused")
@pytest.mark.parametrize("optimizer", [optax.adamw, ampx.fused.adamw], ids=["plain", "fused"])
def test_compiled_step_names_its_phases(optimizer):
    mesh = make_mesh((4,), ("data",))
    step = ampx.train_step(
        loss_fn,
        optimizer(0.1),
        loss_scale="dynamic",
        num_microbatches=2,
        axis_name="data",
        bucket_bytes=1024,
        tail_overlap=True,
    )
    specs = (jax.P(), jax.P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(jax.P(), jax.P()))
    names = compiled_names(mapped, step.init(PARAMS), jnp.ones((16, 16)))
    assert found_in(names) >= STEP | BUCKETS

    reductions = [scopes(name) for opcode, name in names if opcode.startswith("all-reduce")]
    assert sorted(map(tuple, filter(None, reductions))) == [
        *[(bucket,) for bucket in sorted(BUCKETS)],
        ("ampx.verdict",),
    ]
    products = [name for opcode, name in names if opcode == "dot"]
    assert products and all("ampx.micro_batch" in name for name in products)
    assert any(re.search(r"ampx\.micro_batch.*model", name) for name in products)


@pytest.mark.parametrize("optimizer", [optax.adamw, ampx.fused.adamw], ids=["plain", "fused"])
def test_update_by_hand_names_its_phases(optimizer):
    tx = ampx.dynamic_loss_scale(optimizer(0.1))
    names = compiled_names(tx.update, PARAMS, tx.init(PARAMS), PARAMS)
    assert found_in(names) == {"ampx.verdict", "ampx.update"}


def test_zero1_names_its_buckets():
    tx = ampx.zero1(optax.adam(0.1), "data", bucket_bytes=256)
    mesh = make_mesh((4,), ("data",))
    specs = ampx.zero1_specs(tx, PARAMS, mesh)

    def step(grads, state, params):
        return tx.update(jax.lax.pcast(grads, "data", to="varying"), state, params)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(jax.P(), specs, jax.P()), out_specs=(jax.P(), specs)
    )
    text = lowered_text(jax.jit(mapped).lower(PARAMS, tx.init(PARAMS), PARAMS))
    for collective in ("reduce_scatter", "all_gather"):
        places = re.findall(rf"\"([^\"]*/{collective}\w*)\"", text)
        assert {scope for place in places for scope in scopes(place)} == BUCKETS


def test_step_without_a_loss_scale_names_its_update():
    step = ampx.train_step(loss_fn, optax.sgd(0.1))
    lowered = jax.jit(step).lower(step.init(PARAMS), jnp.ones((4, 16)))
    assert set(scopes(lowered_text(lowered))) == {"ampx.scale", "ampx.micro_batch", "ampx.update"}


def test_step_of_an_nnx_model_names_its_update():
    class Model(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(PARAMS["a"]), nnx.Param(PARAMS["b"])

    def loss(model, batch):
        return loss_fn({"a": model.a[...], "b": model.b[...]}, batch)

    step = ampx.train_step(loss, optax.sgd(0.1))
    model = Model()
    state = model, nnx.Optimizer(model, step.tx, wrt=nnx.Param)
    lowered = nnx.jit(lambda state, batch: step(state, batch)).lower(state, jnp.ones((4, 16)))
    found = set(scopes(lowered_text(lowered.lowered)))
    assert found == {"ampx.scale", "ampx.micro_batch", "ampx.update"}


def products_of(rules):
    """The dtypes of the model's and the head's product under `autocast` of a whole gradient."""

    def gradient(params, batch):
        with jax.named_scope("outer"):
            return ampx.value_and_grad(loss_fn, num_microbatches=2)(params, batch).grads

    cast = ampx.autocast(gradient, half_dtype=jnp.bfloat16, rules=rules)
    text = lowered_text(jax.jit(cast).lower(PARAMS, jnp.ones((4, 16))))
    places = dict(re.findall(r"^(#loc\d+) = loc\(\"([^\"]*)\"", text, re.MULTILINE))
    found = {"model": set(), "head": set()}
    for dtype, place in re.findall(r"dot_general.*-> tensor<[\dx]+x(\w+)> loc\((#loc\d+)\)", text):
        (layer,) = (layer for layer in found if layer in places[place])
        found[layer].add(dtype)
    return found


def test_rules_match_through_the_scopes_of_ampx():
    everything = {"model": {"bf16"}, "head": {"bf16"}}
    assert products_of(ampx.DEFAULT_RULES) == everything
    for name in ("head", "outer/head"):
        assert products_of(ampx.DEFAULT_RULES.float32(name)) == everything | {"head": {"f32"}}


@pytest.mark.parametrize("name", ["ampx", "micro_batch", "scale", "ampx/micro_batch"])
def test_rules_do_not_match_the_scopes_of_ampx(name):
    assert products_of(ampx.DEFAULT_RULES.float32(name)) == products_of(ampx.DEFAULT_RULES)
