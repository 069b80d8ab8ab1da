"""The zoo's models in Flax: layers compute in the `dtype` that they are given.

`dtype=None` is the user's float32 model, and a half `dtype` is the model cast by hand, as in `zoo`.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from benchmarks.zoo import Model, mixture_of_experts, padded_attention, transformer


class Perceptron(nn.Module):
    """Three dense layers with a layer norm and gelu between them."""

    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.Dense(self.width, dtype=self.dtype)(x)
            x = nn.gelu(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class Convolutional(nn.Module):
    """Convolutions with batch norm and a residual connection."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False, dtype=self.dtype)(x)))
        y = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False, dtype=self.dtype)(x)))
        x = nn.max_pool(x + y, (2, 2), strides=(2, 2))
        x = nn.relu(norm()(nn.Conv(32, (3, 3), strides=(2, 2), dtype=self.dtype)(x)))
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    """An LSTM over sequences, read at every step."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.RNN(nn.OptimizedLSTMCell(32, dtype=self.dtype))(x)
        return nn.Dense(10, dtype=self.dtype)(x)


class Decoder(nn.Module):
    """A decoder of linen's own layers, as in flax's language model: q, k and v are three products.

    Its softmax is in float32 by hand too; with linen's default it would be in `dtype`.
    """

    layers: int = 2
    width: int = 64
    vocabulary: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            normed = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                4, dtype=self.dtype, deterministic=True, force_fp32_for_softmax=True
            )(normed, mask=mask)
            hidden = nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.width, dtype=self.dtype)(nn.relu(hidden))
        return nn.Dense(self.vocabulary, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


class NnxPerceptron(nnx.Module):
    """A dense network with a layer norm, in nnx."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.first = nnx.Linear(32, 64, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(64, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(64, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.silu(self.norm(self.first(x))))


def _mixing(dtype: Any) -> contextlib.AbstractContextManager:
    """A context in which flax's layers may mix half with float32; strict promotion forbids it."""
    mixes = dtype != jnp.float32
    return jax.numpy_dtype_promotion("standard") if mixes else contextlib.nullcontext()


def _linen_model(name: str, module: Any, shape: tuple[int, ...], labels: tuple[int, ...]) -> Model:
    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = dict(module().init(key, jnp.ones(shape)))
        return variables.pop("params"), variables

    def forward(params: Any, state: Any, inputs: jax.Array, dtype: Any) -> tuple[Any, Any]:
        with _mixing(dtype or inputs.dtype):
            return module(dtype=dtype).apply({"params": params, **state}, inputs, mutable=[*state])

    return Model(name, init, functools.partial(_labelled, shape=shape, labels=labels), forward)


def _labelled(key: jax.Array, shape: tuple[int, ...], labels: tuple[int, ...]) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.normal(first, shape), jax.random.randint(second, labels, 0, 10)


def perceptron(width: int = 64, rows: int = 16) -> Model:
    """Three dense layers in linen."""
    module = functools.partial(Perceptron, width)
    return _linen_model("MLP, linen", module, (rows, 32), (rows,))


def decoder(rows: int = 4, length: int = 32, layers: int = 2) -> Model:
    """A transformer of linen's own layers, beside those of `zoo`, whose layers are hand-written."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        return Decoder(layers).init(key, jnp.zeros((1, length), jnp.int32))["params"], {}

    def batch(key: jax.Array) -> tuple[Any, Any]:
        tokens = jax.random.randint(key, (rows, length + 1), 0, Decoder.vocabulary)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(params: Any, state: Any, tokens: jax.Array, dtype: Any) -> tuple[Any, Any]:
        with _mixing(dtype or jnp.float32):
            return Decoder(layers, dtype=dtype).apply({"params": params}, tokens), state

    return Model("transformer, linen", init, batch, forward)


def convolutional() -> Model:
    """A small residual network with batch norm in linen."""
    return _linen_model("CNN with BatchNorm, linen", Convolutional, (8, 16, 16, 3), (8,))


def recurrent() -> Model:
    """An LSTM in linen."""
    return _linen_model("LSTM, linen", Recurrent, (4, 16, 8), (4, 16))


def nnx_perceptron() -> Model:
    """A dense network in nnx, split into parameters and structure."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        return nnx.state(NnxPerceptron(nnx.Rngs(key))), {}

    def forward(params: Any, state: Any, inputs: jax.Array, dtype: Any) -> tuple[Any, Any]:
        graph, _ = nnx.split(nnx.eval_shape(lambda: NnxPerceptron(nnx.Rngs(0), dtype)))
        with _mixing(dtype or inputs.dtype):
            return nnx.merge(graph, params)(inputs), state

    batch = functools.partial(_labelled, shape=(16, 32), labels=(16,))
    return Model("MLP, nnx", init, batch, forward)


def models() -> list[Model]:
    """All of the zoo, at a size that a CPU runs in moments."""
    return [
        perceptron(),
        nnx_perceptron(),
        convolutional(),
        recurrent(),
        transformer(),
        transformer(scan=True),
        transformer(scan=True, remat=True),
        padded_attention(),
        mixture_of_experts(),
    ]
