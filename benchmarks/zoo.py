"""Small models of real kinds: in float32 as a user writes them, cast by hand, cast at the boundary.

A model is written once, with a `dtype` argument:

- `dtype=None` leaves every cast out. That is the user's program, and it is what autocast gets.
- A half `dtype` is what an expert writes: matrix products and activations in half; norms, softmax,
  routing and the loss in float32.

The casts vanish where there is nothing to cast, so all versions are one program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ampx

Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]  # params, state, batch: loss, new state


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its data and its loss.

    Attributes:
      name: as tables print it.
      init: from a key to parameters and state; the state is `{}` without batch statistics.
      batch: from a key to inputs and targets.
      forward: `(params, state, inputs, dtype) -> (outputs, new state)`.
      objective: `(outputs in float32, targets) -> loss`, a mean.
    """

    name: str
    init: Callable[[jax.Array], tuple[Any, Any]]
    batch: Callable[[jax.Array], tuple[Any, Any]]
    forward: Callable[..., tuple[Any, Any]]
    objective: Callable[[Any, Any], jax.Array] = cross_entropy

    def start(self) -> tuple[Any, Any, Any]:
        """Parameters, state and a batch, the same every time."""
        return *self.init(jax.random.key(0)), self.batch(jax.random.key(1))

    def loss(self, params: Any, state: Any, batch: Any, dtype: Any = None) -> tuple[Any, Any]:
        """The mean loss in float32, and the new state."""
        inputs, targets = batch
        outputs, state = self.forward(params, state, inputs, dtype)
        return self.objective(outputs.astype(jnp.float32), targets), state

    def hand_cast(self, half: Any) -> Loss:
        """The loss as an expert writes it for `half`."""
        return functools.partial(self.loss, dtype=half)

    def boundary(self, half: Any) -> Loss:
        """The loss with parameters and inputs cast to `half`, and nothing else, as jmp does."""

        def loss(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            inputs, targets = batch
            cast = ampx.cast_floating((params, inputs), half)
            return self.loss(cast[0], state, (cast[1], targets))

        return loss


# --- layers --------------------------------------------------------------------------------------


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Weights that keep the variance of their inputs: each output sums `shape[-2]` products."""
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def dense(x: jax.Array, layer: dict, dtype: Any = None) -> jax.Array:
    dtype = dtype or x.dtype
    return x.astype(dtype) @ layer["w"].astype(dtype) + layer["b"].astype(dtype)


def layer_norm(x: jax.Array, layer: dict, dtype: Any = None) -> jax.Array:
    wide = x.astype(jnp.float32) if dtype else x  # statistics in float32, as flax's norms do
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    y = (wide - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["bias"]
    return y.astype(dtype) if dtype else y


def attention(
    x: jax.Array, layer: dict, heads: int, mask: jax.Array, fill: float | None, dtype: Any
) -> jax.Array:
    """Self-attention; where `mask` is False, scores are `fill`, or else the lowest number."""
    qkv = dense(x, layer["qkv"], dtype).reshape(*x.shape[:2], 3, heads, -1)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.astype(jnp.float32) if dtype else scores  # f32[batch, heads, queries, keys]
    fill = jnp.finfo(scores.dtype).min if fill is None else fill
    weights = jax.nn.softmax(jnp.where(mask, scores, fill))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)
    return dense(mixed.reshape(x.shape), layer["out"], dtype)


def _dense_init(key: jax.Array, inputs: int, outputs: int) -> dict:
    return {"w": normal(key, inputs, outputs), "b": jnp.zeros(outputs)}


def _norm_init(width: int) -> dict:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _attention_init(key: jax.Array, width: int) -> dict:
    first, second = jax.random.split(key)
    return {"qkv": _dense_init(first, width, 3 * width), "out": _dense_init(second, width, width)}


# --- transformer ---------------------------------------------------------------------------------


def _block_init(key: jax.Array, width: int) -> dict:
    keys = jax.random.split(key, 3)
    return {
        "norm_1": _norm_init(width),
        "attention": _attention_init(keys[0], width),
        "norm_2": _norm_init(width),
        "up": _dense_init(keys[1], width, 4 * width),
        "down": _dense_init(keys[2], 4 * width, width),
    }


def _block(x: jax.Array, layer: dict, heads: int, dtype: Any) -> jax.Array:
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    normed = layer_norm(x, layer["norm_1"], dtype)
    x = x + attention(normed, layer["attention"], heads, causal, None, dtype)
    hidden = jax.nn.gelu(dense(layer_norm(x, layer["norm_2"], dtype), layer["up"], dtype))
    return x + dense(hidden, layer["down"], dtype)


def transformer(
    scan: bool = False,
    remat: bool = False,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    length: int = 32,
    rows: int = 4,
    vocabulary: int = 64,
) -> Model:
    """A decoder whose layers are unrolled or scanned over, and recomputed or not."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        embed_key, head_key, *keys = jax.random.split(key, layers + 2)
        blocks: Any = [_block_init(k, width) for k in keys]
        if scan:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        embed = jax.random.normal(embed_key, (vocabulary, width))
        head = _dense_init(head_key, width, vocabulary)
        return {"embed": embed, "blocks": blocks, "norm": _norm_init(width), "head": head}, {}

    def batch(key: jax.Array) -> tuple[Any, Any]:
        tokens = jax.random.randint(key, (rows, length + 1), 0, vocabulary)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(params: Any, state: Any, tokens: jax.Array, dtype: Any) -> tuple[Any, Any]:
        block = functools.partial(_block, heads=heads, dtype=dtype)
        block = jax.checkpoint(block) if remat else block
        embed = params["embed"]
        x = (embed.astype(dtype) if dtype else embed)[tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["blocks"])
        else:
            for layer in params["blocks"]:
                x = block(x, layer)
        return dense(layer_norm(x, params["norm"], dtype), params["head"], dtype), state

    kind = ("scan" if scan else "unrolled") + (" + remat" if remat else "")
    return Model(f"transformer, {kind}", init, batch, forward)


# --- attention over padded sequences -------------------------------------------------------------


def padded_attention(width: int = 32, heads: int = 2, length: int = 12, rows: int = 6) -> Model:
    """Attention with a padding mask and the popular fill -1e9; one row is padding alone."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, 3)
        return {
            "embed": jax.random.normal(keys[0], (32, width)),
            "attention": _attention_init(keys[1], width),
            "norm": _norm_init(width),
            "head": _dense_init(keys[2], width, 8),
        }, {}

    def batch(key: jax.Array) -> tuple[Any, Any]:
        tokens = jax.random.randint(key, (rows, length), 0, 32)
        # From no real token at all to all of them. In the first row every score is the fill: with
        # -1e9 rounded to -inf, its softmax would be NaN.
        lengths = jnp.arange(rows) * length // (rows - 1)
        mask = jnp.arange(length) < lengths[:, None]
        return {"tokens": tokens, "mask": mask}, jax.random.randint(key, (rows,), 0, 8)

    def forward(params: Any, state: Any, inputs: Any, dtype: Any) -> tuple[Any, Any]:
        embed = params["embed"].astype(dtype) if dtype else params["embed"]
        x = embed[inputs["tokens"]]
        mask = inputs["mask"][:, None, None, :]
        x = x + attention(x, params["attention"], heads, mask, -1e9, dtype)
        pooled = layer_norm(x, params["norm"], dtype).mean(axis=1)
        return dense(pooled, params["head"], dtype), state

    return Model("padded attention", init, batch, forward)


# --- mixture of experts --------------------------------------------------------------------------


def mixture_of_experts(
    width: int = 32, experts: int = 4, chosen: int = 2, tokens: int = 64
) -> Model:
    """A residual layer of experts; a router picks `chosen` of them for each token."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, 5)
        return {
            "stem": _dense_init(keys[0], width, width),
            "router": normal(keys[1], width, experts),
            "up": normal(keys[2], experts, width, 2 * width),
            "down": normal(keys[3], experts, 2 * width, width),
            "head": _dense_init(keys[4], width, 8),
        }, {}

    def batch(key: jax.Array) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        inputs = jax.random.normal(first, (tokens, width))
        return inputs, jax.random.randint(second, (tokens,), 0, 8)

    def forward(params: Any, state: Any, inputs: jax.Array, dtype: Any) -> tuple[Any, Any]:
        x = jax.nn.relu(dense(inputs, params["stem"], dtype))
        logits = (x.astype(jnp.float32) if dtype else x) @ params["router"]
        gates, experts_of = jax.lax.top_k(jax.nn.softmax(logits), chosen)
        gates = gates / gates.sum(axis=-1, keepdims=True)  # [tokens, chosen], of sum 1
        # Each (token, expert) pair becomes a row. Sorted by expert, the rows of an expert are
        # neighbours, and one ragged product multiplies each group by its own matrix.
        order = jnp.argsort(experts_of.reshape(-1))  # int32[tokens * chosen]
        rows, sizes = order // chosen, jnp.bincount(experts_of.reshape(-1), length=experts)
        up, down = (params[name].astype(dtype or x.dtype) for name in ("up", "down"))
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[rows], up, sizes))
        outputs = jax.lax.ragged_dot(hidden, down, sizes)
        # Back to tokens: each gets the sum of its experts' outputs, weighted by its gates.
        weighed = outputs.astype(gates.dtype) * gates.reshape(-1)[order][:, None]
        mixed = jnp.zeros(x.shape, gates.dtype).at[rows].add(weighed)
        return dense(x + mixed.astype(x.dtype), params["head"], dtype), state

    return Model("mixture of experts", init, batch, forward)
