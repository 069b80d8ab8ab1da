"""A small causal transformer over characters and its loss. Nothing here knows about precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from ampx.examples import text

CONTEXT = 64  # characters that the model sees


class Block(nn.Module):
    """One pre-LayerNorm transformer layer."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape; nothing sees its future."""
        width = x.shape[-1]
        causal = nn.make_causal_mask(x[..., 0])
        attention: Any = nn.MultiHeadDotProductAttention(self.heads)
        x = x + attention(nn.LayerNorm()(x), mask=causal)
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(hidden)


class LanguageModel(nn.Module):
    """A causal transformer from characters to the logits of the next ones."""

    vocabulary_size: int
    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32 (batch, time) to (batch, time, vocabulary_size)."""
        position = self.param("position", nn.initializers.normal(0.02), (CONTEXT, self.width))
        x = nn.Embed(self.vocabulary_size, self.width)(tokens) + position[: tokens.shape[1]]
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(self.vocabulary_size)(nn.LayerNorm()(x))


def make_model(
    corpus: text.Corpus, *, layers: int = 2, width: int = 64, heads: int = 4
) -> LanguageModel:
    """A model for the characters of a corpus.

    Args:
      corpus: gives the vocabulary.
      layers: number of transformer layers.
      width: size of a character's vector.
      heads: attention heads, a divisor of `width`.

    Returns:
      A linen module.

    Examples:
      >>> from ampx.examples import text, transformer
      >>> transformer.make_model(text.load_corpus()).width
      64
    """
    return LanguageModel(len(corpus.vocabulary), layers, width, heads)


def make_loss(model: nn.Module) -> Callable[[Any, jax.Array], jax.Array]:
    """The loss of a model: mean cross-entropy of every next character, in nats.

    Args:
      model: a linen module from characters to logits.

    Returns:
      `loss_fn(params, windows)`, for windows of shape (batch, time + 1).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx.examples import text, transformer
      >>> model = transformer.make_model(text.load_corpus(), layers=1, width=8, heads=1)
      >>> windows = jnp.zeros((2, 9), jnp.int32)
      >>> params = model.init(jax.random.key(0), windows)["params"]
      >>> transformer.make_loss(model)(params, windows).dtype.name
      'float32'
    """

    def loss_fn(params: Any, windows: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return jnp.mean(losses)

    return loss_fn
