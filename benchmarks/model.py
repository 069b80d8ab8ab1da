"""A decoder-only transformer in plain JAX, whose optimizer is a small part of a step.

Each layer has arrays of its own, as in flax. A model that slices its layers out of one stacked
array would measure something else: XLA's CPU backend computes the gradient of a stacked array
anew for each reader (see docs/benchmarks.md on loss scaling).
"""

import jax
import jax.numpy as jnp
import optax

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 384, 4, 6, 512, 64


def init_params(key: jax.Array, layers: int = LAYERS) -> dict:
    """About 7.3 million float32 parameters; the embedding serves as output matrix too."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    key, embed_key = jax.random.split(key)
    params: dict = {"embed": 0.02 * jax.random.normal(embed_key, (VOCABULARY, WIDTH))}
    for layer, layer_key in enumerate(jax.random.split(key, layers)):
        keys = jax.random.split(layer_key, len(shapes))
        params[f"layer_{layer}"] = {
            name: 0.02 * jax.random.normal(k, shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
    return params


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def apply_layer(weights: dict, x: jax.Array) -> jax.Array:
    """One layer on float32 of shape (rows, length, WIDTH)."""
    rows, length, width = x.shape
    qkv = (_norm(x) @ weights["qkv"]).reshape(rows, length, 3, HEADS, width // HEADS)
    heads = jax.nn.dot_product_attention(  # f32[rows, length, HEADS, width // HEADS]
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
    )
    x = x + heads.reshape(rows, length, width) @ weights["out"]
    return x + jax.nn.gelu(_norm(x) @ weights["up"]) @ weights["down"]


def token_losses(embed: jax.Array, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The next-token losses behind the last layer, float32 of shape (rows, length)."""
    logits = _norm(x) @ embed.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    """Mean next-token loss of int32 tokens of shape (batch, LENGTH + 1)."""
    x = params["embed"][tokens[:, :-1]]  # f32[rows, length, width]
    for layer in range(len(params) - 1):
        x = apply_layer(params[f"layer_{layer}"], x)
    return token_losses(params["embed"], x, tokens).mean()


def tokens(batch_size: int) -> jax.Array:
    """Random int32 tokens of shape (batch_size, LENGTH + 1)."""
    return jax.random.randint(jax.random.key(1), (batch_size, LENGTH + 1), 0, VOCABULARY)
