"""What would a step of a large model need, on 512 devices that nobody here has?

A transformer of 24 layers of width 12288, with 96 heads, a feed-forward of 49152 and 2048 tokens a
row, on a mesh of 16 x 32 devices: 16 divide each layer (tensor parallelism, by hand), and 32 are 8
stages of 3 layers each, 4 times. (24 layers do not divide over 32 stages.) Run
`python -m benchmarks.large_plan`: nothing is computed, and the report takes less than a minute.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from ampx import pipelining

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS, VOCABULARY = 24, 12288, 96, 49152, 2048, 51200
MESH = {"data": 4, "stage": 8, "model": 16}
MICROBATCHES = 64


def _normalize(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _own_vocabulary(shared):
    """The first token whose embedding this device has."""
    return jax.lax.axis_index("model") * shared["embedding"].shape[0]


def _embed(params, shared, batch, key):
    local = batch["tokens"] - _own_vocabulary(shared)
    is_here = (local >= 0) & (local < shared["embedding"].shape[0])
    found = shared["embedding"][jnp.where(is_here, local, 0)]
    return jax.lax.psum(jnp.where(is_here[..., None], found, 0), "model")


def _block(params, x, key):
    # Every device has some heads and a part of the feed-forward; sums over them are exchanged.
    h = _normalize(x)
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, params[name]) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jax.lax.psum(jnp.einsum("bthe,hed->btd", mixed, params["out"]), "model")
    return x + jax.lax.psum(jax.nn.gelu(_normalize(x) @ params["up"]) @ params["down"], "model")


def _loss(params, shared, x, batch, key):
    logits = (_normalize(x) @ shared["embedding"].T).astype(jnp.float32)
    largest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
    total = jax.lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
    local = batch["targets"] - _own_vocabulary(shared)
    is_here = (local >= 0) & (local < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[..., None], -1)[..., 0]
    picked = jax.lax.psum(jnp.where(is_here, picked, 0), "model")
    return jnp.sum(jnp.log(total) + largest - picked), jnp.float32(picked.size)


def main() -> None:
    """Prints the plan."""
    size = WIDTH // HEADS
    shapes = {
        **{name: ((LAYERS, WIDTH, HEADS, size), P("stage", None, "model")) for name in "qkv"},
        "out": ((LAYERS, HEADS, size, WIDTH), P("stage", "model")),
        "up": ((LAYERS, WIDTH, HIDDEN), P("stage", None, "model")),
        "down": ((LAYERS, HIDDEN, WIDTH), P("stage", "model")),
    }
    stages = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in shapes.items()}
    embedding = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    rows = MESH["data"] * MICROBATCHES
    tokens = jax.ShapeDtypeStruct((rows, TOKENS), jnp.int32)
    grads_of = pipelining.value_and_grad(
        first=_embed,
        stage=_block,
        last=_loss,
        schedule=pipelining.one_f_one_b(MESH["stage"], MICROBATCHES),
        axis_name="stage",
        data_axes="data",
        policy="p=f32,c=bf16,o=f32",
        param_specs={
            "stages": {name: spec for name, (_, spec) in shapes.items()},
            "shared": {"embedding": P("model")},
        },
    )
    params = {"stages": stages, "shared": {"embedding": embedding}}
    batch = {"tokens": tokens, "targets": tokens}
    print(pipelining.plan(grads_of, params, batch, optax.adamw(1e-4), mesh=MESH))


if __name__ == "__main__":
    main()
