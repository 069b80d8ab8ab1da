"""Programs of two arrays, and the dtypes that autocast should give their outputs and gradients.

`@gives` registers a function of x, f32[4, 8], and w, f32[8, 8]. `test_autocast_matrix` runs each
program under many transformations.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

IDS = np.array([2, 0, 2, 1])
KEY = jax.random.key(0)


class Program(NamedTuple):
    """A row of the matrix.

    Attributes:
      fun: function of x and w.
      outputs: a dtype for each output under autocast.
      gradients: dtypes of the gradients for x and w where autocast is around the gradient too.
      fails: transformations that plain JAX cannot apply to it.
    """

    fun: Any
    outputs: str
    gradients: str
    fails: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}


def gives(outputs, gradients="half half", fails=()):
    """Registers a program with what it should give; see `Program`."""

    def register(fun):
        PROGRAMS[fun.__name__] = Program(fun, outputs, gradients, fails)
        return fun

    return register


# Products


@gives("half")
def matmul(x, w):
    return x @ w


@gives("half")
def einsum(x, w):
    return jnp.einsum("bi,ij,kj->bk", x, w, w)


@gives("half")
def einsum_accumulated_in_float32(x, w):
    return jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.float32)


@gives("half", "float32 float32")
def einsum_given_in_half(x, w):
    return jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.bfloat16)


@gives("float32", "float32 float32")
def highest_precision(x, w):
    return jnp.matmul(x, w, precision=lax.Precision.HIGHEST)


@gives("half", "float32 float32")
def convolution(x, w):
    return lax.conv(x[None, :, None], w[:4, :4, None, None], (1, 1), "SAME")


@gives("half", "float32 float32")
def depthwise_convolution(x, w):
    return lax.conv_general_dilated(x[None], w[:4, None, :3], (1,), "SAME", feature_group_count=4)


@gives("half", "float32 float32")
def convolve(x, w):
    return jnp.convolve(x[0], w[0])


@gives("half", fails=("vmap",))
def ragged_product(x, w):
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3], jnp.int32))


@gives("half")
def tied_weights(x, w):
    return jnp.tanh(x @ w) @ w.T


@gives("half")
def product_of_no_rows(x, w):
    return x[:0] @ w


# Layers


@gives("half", "half float32")
def dense_with_bias(x, w):
    return jax.nn.gelu(x @ w + w[0])


@gives("half")
def gelu(x, w):
    return jax.nn.gelu(x @ w)


@gives("half")
def silu(x, w):
    return jax.nn.silu(x @ w)


@gives("half")
def attention(x, w):
    query = (x @ w).reshape(1, 4, 2, 4)
    return jax.nn.dot_product_attention(query, query, query)


@gives("half")
def causal_attention(x, w):
    query = (x @ w).reshape(1, 4, 2, 4)
    return jax.nn.dot_product_attention(query, query, query, is_causal=True)


@gives("half")
def attention_with_a_mask(x, w):
    query = x @ w
    scores = jnp.where(np.tri(4, dtype=bool), query @ query.T, -1e9)
    return jax.nn.softmax(scores) @ query


@gives("float32", "half float32")
def layer_norm(x, w):
    h = x @ w
    centred = h - h.mean(-1, keepdims=True)
    return centred * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6) * w[0] + w[1]


@gives("float32", "half float32")
def rms_norm(x, w):
    h = x @ w
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * w[0]


@gives("float32 float32 float32")
def batch_norm(x, w):
    h = x @ w
    mean, variance = h.mean(0), h.var(0)
    return (h - mean) / jnp.sqrt(variance + 1e-5), mean, variance


@gives("half")
def dropout(x, w):
    h = x @ w
    return jnp.where(jax.random.bernoulli(KEY, 0.7, h.shape), h / 0.7, 0.0)


@gives("half", "float32 half")
def one_hot_product(x, w):
    return jax.nn.one_hot(jnp.argmax(x, -1), 8) @ w


@gives("half", "float32 float32")
def embedded_then_projected(x, w):
    return w[jnp.argmax(x, -1)] @ w


@gives("float32", "float32 float32")
def embedding(x, w):
    return w[jnp.argmax(x, -1)]


@gives("half")
def max_pool(x, w):
    return lax.reduce_window(x @ w, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


@gives("float32")
def average_pool(x, w):
    return lax.reduce_window(x @ w, 0.0, lax.add, (2, 2), (2, 2), "VALID") / 4


@gives("half float32", "float32 half")
def lstm_cell(x, w):
    gate, update = jax.nn.sigmoid(x @ w), jnp.tanh(x @ w)
    cell = gate * x + (1 - gate) * update
    return gate * jnp.tanh(x @ w), cell


@gives("float32")
def cross_entropy(x, w):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, IDS).mean()


@gives("float32")
def mean_square(x, w):
    return jnp.mean((x @ w - 1.0) ** 2)


# Reductions and functions in float32


@gives("float32")
def softmax(x, w):
    return jax.nn.softmax(x @ w)


@gives("float32")
def logsumexp(x, w):
    return jax.nn.logsumexp(x @ w, axis=-1)


@gives("float32")
def norm(x, w):
    return jnp.linalg.norm(x @ w)


@gives("float32 float32")
def variance_and_deviation(x, w):
    return jnp.var(x @ w, 0), jnp.std(x @ w)


@gives("float32")
def cumsum(x, w):
    return jnp.cumsum(x @ w, 0)


@gives("float32")
def segment_sum(x, w):
    return jax.ops.segment_sum(x @ w, IDS, 3)


@gives("float32")
def reduce_by_a_function(x, w):
    return lax.reduce(x @ w, np.float32(0), lambda a, b: jnp.hypot(a, b), (0,))


@gives("float32 float32", "float32 float32")
def clip_by_global_norm(x, w):
    scale = jnp.minimum(1.0, 1.0 / optax.tree.norm((x, w)))
    return x * scale, w * scale


@gives("complex64")
def fourier(x, w):
    return jnp.fft.fft(x @ w)


@gives("float32", "half float32")
def solve(x, w):
    return jnp.linalg.solve(w + 4 * jnp.eye(8), (x @ w).T)


@gives("float32", "float32 half")
def cholesky(x, w):
    return jnp.linalg.cholesky(w @ w.T + jnp.eye(8))


@gives("float32", "float32 half")
def conjugate_gradients(x, w):
    matrix = w @ w.T + 4 * jnp.eye(8)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=4)[0]


@gives("float32", "float32 float32")
def matrix_exponential(x, w):
    return jax.scipy.linalg.expm(w / 4)


# Moving and selecting


@gives("half")
def sort(x, w):
    return jnp.sort(x @ w)


@gives("half int32")
def top_k(x, w):
    return lax.top_k(x @ w, 2)


@gives("int32", "float32 float32")
def argmax(x, w):
    return jnp.argmax(x @ w, -1)


@gives("half")
def clip(x, w):
    return jnp.clip(x @ w, -0.5, 0.5)


@gives("half half half")
def where_with_fills(x, w):
    h, mask = x @ w, np.tri(4, 8, dtype=bool)
    return jnp.where(mask, h, 0.0), jnp.where(mask, h, jnp.zeros(())), jnp.where(h > 0, 1.0, h)


@gives("float32", "half float32")
def where_with_a_parameter(x, w):
    return jnp.where(np.tri(4, 8, dtype=bool), x @ w, w[:4])


@gives("half half half")
def joined(x, w):
    h = x @ w
    return jnp.concatenate([h, h]), jnp.stack([h, h]), jnp.pad(h, 1)


@gives("float32 float32", "float32 half")
def joined_with_an_input(x, w):
    return jnp.concatenate([x @ w, x]), jnp.stack([x, x @ w])


@gives("half half half half")
def scatters(x, w):
    h = x @ w
    return h.at[IDS].add(h), h.at[1].set(2.0), h.at[IDS].max(h), h.at[0].multiply(h[1])


@gives("half half half")
def slices(x, w):
    h = x @ w
    row = lax.dynamic_slice(h, (jnp.argmax(h[0]) % 3, 0), (1, 8))
    return row, h[1:3, ::2], lax.dynamic_update_slice(h, row, (1, 0))


@gives("half half")
def gathers(x, w):
    h = x @ w
    return h[IDS], jnp.take_along_axis(h, IDS[:, None], 1)


@gives("half half")
def spread(x, w):
    return jnp.broadcast_to(x @ w, (2, 4, 8)), (x @ w)[:, None]


@gives("float32", "half half")  # polyval is a scan, whose carry stays float32
def polynomial(x, w):
    return jnp.polyval(np.float32([1, -2, 0.5]), x @ w)


@gives("float32", "float32 float32")
def interpolation(x, w):
    return jnp.interp(x, jnp.sort(w[0]), (x @ w)[0])


@gives("half half")
def computed_then_gathered(x, w):
    return jnp.tanh(x @ w)[IDS], jnp.tile(jnp.tanh(x @ w), 2)


@gives("float32 float32")  # by weights that are computed
def quantiles(x, w):
    return jnp.median(x @ w, 0), jnp.quantile(x @ w, 0.3)
