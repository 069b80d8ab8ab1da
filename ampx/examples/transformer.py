"""A small causal transformer over characters and its loss.

Nothing here knows about precision: what is computed in half is decided by the policy, the rules of
autocast or the opt level under which the model is applied.

    tokens i32[batch, time] ─► embed ─► Block, once a layer ─► predict ─► logits
                                  [batch, time, width]               [batch, time, vocabulary]

`embed` and `predict` stand apart from the layers, so that a pipeline can put them on its first and
last stage.
"""

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
        # LayerNorm before each sublayer leaves a path of additions alone from input to output.
        width = x.shape[-1]
        causal = nn.make_causal_mask(x[..., 0])  # [batch, 1, time, time], 1 is "may look at"
        attention: Any = nn.MultiHeadDotProductAttention(self.heads)
        x = x + attention(nn.LayerNorm()(x), mask=causal)
        # [batch, time, 4 * width]; these two products are over half of a layer's arithmetic.
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
        x = embed(self, tokens, self.vocabulary_size, self.width)
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return predict(x, self.vocabulary_size)


def embed(module: nn.Module, tokens: jax.Array, vocabulary_size: int, width: int) -> jax.Array:
    """What comes before the layers; call it in a compact method, whose module gets the parameters.

    Args:
      module: the module of that method.
      tokens: int32 (batch, time).
      vocabulary_size: number of characters.
      width: size of a character's vector.

    Returns:
      Vectors of characters and places, (batch, time, width).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from ampx.examples import transformer
      >>> class Embedded(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, tokens):
      ...         return transformer.embed(self, tokens, vocabulary_size=5, width=8)
      >>> tokens = jnp.zeros((2, 3), jnp.int32)
      >>> x, variables = Embedded().init_with_output(jax.random.key(0), tokens)
      >>> x.shape, sorted(variables["params"])
      ((2, 3, 8), ['Embed_0', 'position'])
    """
    # One learned vector for each place, added to the character's; with it order matters.
    position: Any = module.param("position", nn.initializers.normal(0.02), (CONTEXT, width))
    return nn.Embed(vocabulary_size, width)(tokens) + position[: tokens.shape[1]]


def predict(x: jax.Array, vocabulary_size: int) -> jax.Array:
    """What comes after the layers; call it in a compact method.

    Args:
      x: what the last layer gives, (batch, time, width).
      vocabulary_size: number of characters.

    Returns:
      Logits of the next characters, (batch, time, vocabulary_size).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from ampx.examples import transformer
      >>> class Predicted(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return transformer.predict(x, vocabulary_size=5)
      >>> logits, variables = Predicted().init_with_output(jax.random.key(0), jnp.ones((2, 3, 8)))
      >>> logits.shape, sorted(variables["params"])
      ((2, 3, 5), ['Dense_0', 'LayerNorm_0'])
    """
    return nn.Dense(vocabulary_size)(nn.LayerNorm()(x))


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
        return cross_entropy(model.apply({"params": params}, windows[:, :-1]), windows)

    return loss_fn


def cross_entropy(logits: Any, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of every next character, in nats.

    Args:
      logits: of shape (batch, time, vocabulary_size).
      windows: characters of shape (batch, time + 1).

    Returns:
      A scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.examples import transformer
      >>> print(transformer.cross_entropy(jnp.zeros((1, 2, 4)), jnp.zeros((1, 3), jnp.int32)))
      1.3862944
    """
    # Place t of the input, the characters up to t, is to predict character t + 1.
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses)
