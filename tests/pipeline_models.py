"""A small language model to divide over devices, and the same model in plain JAX, undivided.

`first`, `stage` and `last` are the three functions that a pipeline takes. `sequential` computes
with them what any schedule must reproduce: loss, gradients, weight and auxiliary outputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh

from ampx.diagnostics.hlo import parse_computations
from ampx.pipelining import value_and_grad

WIDTH, VOCABULARY, LENGTH, LAYERS = 8, 11, 5, 8


class Reference(NamedTuple):
    """What `sequential` computes: what a pipeline's result should be."""

    loss: np.ndarray
    grads: Any
    weight: np.ndarray
    aux: Any


def make_params(layers=LAYERS, dtype=jnp.float32):
    """Positions, layers stacked on axis 0, a last norm, and an embedding that both ends use."""
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    return {
        "first": {"positions": normal(LENGTH, WIDTH, scale=0.1)},
        "stages": {
            "kernel": normal(layers, WIDTH, WIDTH, scale=WIDTH**-0.5),
            "bias": normal(layers, WIDTH, scale=0.1),
        },
        "last": {"norm": {"scale": jnp.ones(WIDTH, dtype)}},
        "shared": {"embedding": normal(VOCABULARY, WIDTH)},
    }


def make_batch(rows, seed=0):
    """Tokens, targets and weights; a fifth of the weights is zero, as for padding."""
    rng = np.random.default_rng(seed)
    shape = (rows, LENGTH)
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCABULARY, shape), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, VOCABULARY, shape), jnp.int32),
        "weights": jnp.asarray(rng.random(shape) * (rng.random(shape) < 0.8), jnp.float32),
    }


def first(params, shared, batch, key):
    return shared["embedding"][batch["tokens"]] + params["positions"]


def stage(params, x, key):
    """A residual layer, with dropout if there is a key."""
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"].astype(x.dtype))
    if key is not None:
        kept = jax.random.bernoulli(key, 0.8, hidden.shape)
        hidden = jnp.where(kept, hidden / 0.8, 0.0)
    return x + hidden


def stage_with_loss(params, x, key):
    """The same with an auxiliary loss, such as a router's."""
    y = stage(params, x, key)
    return y, 0.1 * jnp.sum(jnp.square((y - x).astype(jnp.float32)))


def last(params, shared, x, batch, key):
    """Sum of losses and sum of weights.

    The norm has no epsilon: zeros give NaN. So a pipeline that runs `last` on an empty buffer and
    uses the result fails its tests.
    """
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    x = (x * params["norm"]["scale"].astype(jnp.float32)).astype(shared["embedding"].dtype)
    logits = (x @ shared["embedding"].T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def last_with_aux(params, shared, x, batch, key):
    value = last(params, shared, x, batch, key)
    return value, {"rows": jnp.float32(len(x)), "size": jnp.mean(jnp.abs(x.astype(jnp.float32)))}


def last_mean(params, shared, x, batch, key):
    """The mean loss over rows without weights, for the other ways to normalize."""
    return last(params, shared, x, batch, key)[0] / len(x)


def fold(key, number):
    return None if key is None else jax.random.fold_in(key, number)


def sequential(
    params,
    batch,
    key=None,
    num_microbatches=1,
    data_shards=1,
    *,
    first=first,
    stage=stage,
    last=last,
    normalize="weights",
    has_aux=False,
    has_aux_loss=False,
    aux_reduction="mean",
    cast=lambda params: params,
):
    """The model without a pipeline: layer after layer, micro-batch after micro-batch.

    `cast` turns the stored parameters into those that the model computes with. Of a shard's rows,
    micro-batch m of M has m, m + M, m + 2 M and so on, as `ampx.split_microbatches` gives them.
    """

    def split(leaf):
        rows = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.swapaxes(rows, 1, 2).reshape(-1, rows.shape[1], *leaf.shape[1:])

    def part(params, number, microbatch):
        """Value and auxiliary output of one micro-batch of one shard of the data."""
        computed = cast(params)
        # The pipeline folds keys in this order: shard (if there are several), micro-batch, and then
        # 0 for `first`, 1 to L for the layers, L + 1 for `last`. It never folds in the stage, so
        # every division of the layers draws the same numbers.
        own = key
        if data_shards > 1:
            own = fold(own, number // num_microbatches)
        own = fold(own, number % num_microbatches)
        x = first(computed.get("first"), computed.get("shared"), microbatch, fold(own, 0))

        def layer(x, params_and_number):
            out = stage(params_and_number[0], x, fold(own, params_and_number[1] + 1))
            return out if has_aux_loss else (out, jnp.float32(0))

        layers = len(jax.tree.leaves(computed["stages"])[0])
        x, extra = jax.lax.scan(layer, x, (computed["stages"], jnp.arange(layers)))
        out = last(
            computed.get("last"), computed.get("shared"), x, microbatch, fold(own, layers + 1)
        )
        value, aux = out if has_aux else (out, None)
        loss, weight = value if normalize == "weights" else (value, jnp.float32(1))
        return loss + jnp.sum(extra), (weight, aux)

    number = num_microbatches * data_shards

    @jax.jit
    def run(params, batch):
        def one(total, numbered):
            (loss, (weight, aux)), grads = jax.value_and_grad(part, has_aux=True)(params, *numbered)
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)
            return total, (loss, weight, aux)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        microbatches = jax.tree.map(split, batch)
        return jax.lax.scan(one, zeros, (jnp.arange(number), microbatches))

    grads, (losses, weights, auxes) = jax.device_get(run(params, batch))
    weight = np.sum(weights)
    divisor = {"weights": weight, "mean": np.float32(number), "sum": np.float32(1)}[normalize]

    def reduced(leaf):
        """The sum, or the mean weighted as the loss is."""
        if aux_reduction == "sum":
            return np.sum(leaf)
        return np.sum(leaf * weights) / weight

    return Reference(
        np.sum(losses) / divisor,
        jax.tree.map(lambda leaf: leaf / divisor, grads),
        weight,
        jax.tree.map(reduced, auxes),
    )


def stage_mesh(schedule, data=1, kind="Auto", **axes):
    """A mesh with axes `data`, `stage` (the schedule's devices) and those in `axes`."""
    shape = {"data": data, "stage": schedule.num_devices, **axes}
    return make_mesh(tuple(shape.values()), tuple(shape), kind)


def pipeline(schedule, data=1, kind="Auto", **options):
    """The pipeline's `value_and_grad` of this model, on a mesh of its own; `options` override."""
    functions = dict(first=first, stage=stage, last=last)
    return value_and_grad(
        **functions | dict(mesh=stage_mesh(schedule, data, kind)) | options,
        schedule=schedule,
        axis_name="stage",
        data_axes=("data",) if data > 1 else (),
    )


def run(grads_of, params, batch, **arguments):
    """Runs `grads_of` as one compiled program, without LLVM's optimization to save time."""
    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(functools.partial(grads_of, **arguments), compiler_options=options)
    return compiled(params, batch)


def relative_error(found, expected):
    """The largest deviation of any leaf, in units of the leaf's largest number."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(*map(jax.tree.leaves, jax.device_get((found, expected))), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def find_inner_copies(text):
    """The types of all copies that a compiled program makes in loops and branches."""
    computations, entry = parse_computations(text)
    inner = (own for name, own in computations.items() if name != entry)
    return [i.result for instructions in inner for i in instructions if i.opcode == "copy"]
