"""The op lists of torch.autocast and Apex O1 as JAX functions, and the dtypes they should give.

`OF_ONE` and `OF_TWO` hold the functions of one and of two arrays. Their keys are the dtypes of the
result, one for each combination of half and float32 arguments. `LISTS` has what torch and Apex say,
and `OTHERWISE` where ampx departs from that, and why.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy import linalg, special

# Entries in (0, 1), symmetric and positive definite: every function below is defined there.
GRID = np.add.outer(np.arange(4), np.arange(4)) / 30
X = jnp.asarray(GRID + np.diag([0.6, 0.5, 0.4, 0.3]) + 0.05, jnp.float32)
INDICES = np.array([2, 0, 3, 1])


def conv(spatial, transposed=False):
    """Convolution of matrices with as many spatial axes as asked for."""

    def of_two(a, b):
        if spatial == 1:
            images, kernels = a[None], b[:, :, None]
        else:
            outer = (None,) * spatial
            images, kernels = a[outer], b[outer]
        if not transposed:
            return lax.conv(images, kernels, (1,) * spatial, "SAME")
        axes = "".join("DHW"[3 - spatial :])
        numbers = ("NC" + axes, "OI" + axes, "NC" + axes)
        return lax.conv_transpose(
            images, kernels, (1,) * spatial, "SAME", dimension_numbers=numbers
        )

    return of_two


def attention(a, b):
    query, key = a[None, :, None], b[None, :, None]
    return jax.nn.dot_product_attention(query, key, key)


def lstm_cell(a, b):
    forget, update, out = jax.nn.sigmoid(a @ X), jnp.tanh(a @ X), jax.nn.sigmoid(a @ X)
    return out * jnp.tanh(forget * b + (1 - forget) * update)


def gru_cell(a, b):
    update, new = jax.nn.sigmoid(a @ X + b @ X), jnp.tanh(a @ X)
    return (1 - update) * new + update * b


def norm(a):
    return jnp.linalg.norm(a, axis=-1, keepdims=True)


def similarity(a, b):
    return jnp.sum(a * b, -1) / (norm(a) * norm(b))[:, 0]


def distances(a, b):
    return jnp.sqrt(jnp.sum((a[:, None] - b[None]) ** 2, -1) + 1e-3)


def layer_norm(a, axis=-1):
    centred = a - a.mean(axis, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis, keepdims=True) + 1e-5)


def pool(a, start, combine):
    return lax.reduce_window(a, start, combine, (2, 2), (2, 2), "VALID")


def kl_divergence(a, b):
    return jnp.sum(b * (jnp.log(b) - jax.nn.log_softmax(a)))


# One array. Columns: dtype for a half argument, dtype for a float32 argument.
OF_ONE = {
    "float32 float32": {
        "acos": jnp.arccos,
        "asin": jnp.arcsin,
        "cosh": jnp.cosh,
        "sinh": jnp.sinh,
        "tan": jnp.tan,
        "acosh": lambda a: jnp.arccosh(a + 1.5),
        "asinh": jnp.arcsinh,
        "atanh": jnp.arctanh,
        "erfinv": special.erfinv,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "lgamma": special.gammaln,
        "digamma": special.digamma,
        "logit": special.logit,
        "reciprocal": jnp.reciprocal,
        "__rdiv__": lambda a: 2.0 / a,
        "rsqrt": lax.rsqrt,
        "sqrt": jnp.sqrt,
        "cbrt": jnp.cbrt,
        "pow with a number": lambda a: a**2.5,
        "__rpow__": lambda a: 2.0**a,
        "cumsum": lambda a: jnp.cumsum(a, 0),
        "cumprod": lambda a: jnp.cumprod(a, 0),
        "logcumsumexp": lambda a: lax.cumlogsumexp(a),
        "sum": jnp.sum,
        "prod": lambda a: jnp.prod(a, 0),
        "mean": jnp.mean,
        "std": lambda a: jnp.std(a, 0),
        "var": jnp.var,
        "logsumexp": special.logsumexp,
        "trace": jnp.trace,
        "diag": jnp.diag,
        "norm": jnp.linalg.norm,
        "norm of order 1": lambda a: jnp.linalg.norm(a, 1),
        "norm of order 3": lambda a: jnp.linalg.norm(a.ravel(), 3),
        "renorm": lambda a: a * jnp.minimum(1, 0.7 / norm(a)),
        "normalize": lambda a: a / norm(a),
        "pdist": lambda a: distances(a, a)[np.triu_indices(4, 1)],
        "softmax": jax.nn.softmax,
        "softmin": lambda a: jax.nn.softmax(-a),
        "log_softmax": jax.nn.log_softmax,
        "softplus": jax.nn.softplus,
        "logsigmoid": jax.nn.log_sigmoid,
        "elu": jax.nn.elu,
        "selu": jax.nn.selu,
        "celu": jax.nn.celu,
        "mish": jax.nn.mish,
        "layer_norm": layer_norm,
        "group_norm": lambda a: layer_norm(a.reshape(4, 2, 2)).reshape(4, 4),
        "local_response_norm": lambda a: a / (1 + 0.5 * a**2) ** 0.75,
        "standardize": jax.nn.standardize,
        "nll_loss": lambda a: -jnp.mean(a[np.arange(4), INDICES]),
        "cross_entropy": lambda a: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(a, INDICES)
        ),
        "multi_margin_loss": lambda a: jnp.mean(jax.nn.relu(1 - a[:, :1] + a)),
        "multilabel_margin_loss": lambda a: jnp.sum(jax.nn.relu(1 - (a[:, :1] - a[:, 1:]))),
        "interpolate": lambda a: jax.image.resize(a, (8, 8), "linear"),
        "avg_pool2d": lambda a: pool(a, 0.0, lax.add) / 4,
        "cholesky": jnp.linalg.cholesky,
        "inverse": jnp.linalg.inv,
        "pinverse": jnp.linalg.pinv,
        "linalg_svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
        "linalg_eigh": lambda a: jnp.linalg.eigh(a)[0],
        "linalg_qr": lambda a: jnp.linalg.qr(a)[1],
        "linalg_det": jnp.linalg.det,
        "fft_irfft": lambda a: jnp.fft.irfft(jnp.fft.rfft(a)),
    },
    "half float32": {
        "abs": jnp.abs,
        "neg": jnp.negative,
        "sign": jnp.sign,
        "floor": jnp.floor,
        "round": jnp.round,
        "trunc": jnp.trunc,
        "square": jnp.square,
        "integer power": lambda a: a**3,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "erf": special.erf,
        "erfc": special.erfc,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "atan": jnp.arctan,
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "leaky_relu": jax.nn.leaky_relu,
        "hardtanh": jax.nn.hard_tanh,
        "hardsigmoid": jax.nn.hard_sigmoid,
        "hardswish": jax.nn.hard_swish,
        "gelu": jax.nn.gelu,
        "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
        "silu": jax.nn.silu,
        "glu": jax.nn.glu,
        "softsign": jax.nn.soft_sign,
        "clamp": lambda a: jnp.clip(a, 0.2, 0.6),
        "nan_to_num": jnp.nan_to_num,
        "amax": lambda a: jnp.max(a, 0),
        "amin": lambda a: jnp.min(a, 0),
        "cummax": lambda a: lax.cummax(a),
        "sort": jnp.sort,
        "topk": lambda a: lax.top_k(a, 2)[0],
        "max_pool2d": lambda a: pool(a, -jnp.inf, lax.max),
        "reflection_pad1d": lambda a: jnp.pad(a, 1, mode="reflect"),
        "replication_pad1d": lambda a: jnp.pad(a, 1, mode="edge"),
        "constant_pad": lambda a: jnp.pad(a, 1),
        "embedding": lambda a: a[INDICES],
        "gather": lambda a: jnp.take_along_axis(a, INDICES[:, None], 1),
        "tril": jnp.tril,
        "flip": jnp.flip,
        "roll": lambda a: jnp.roll(a, 1, 0),
        "repeat": lambda a: jnp.repeat(a, 2, 0),
        "tile": lambda a: jnp.tile(a, 2),
        "transpose": jnp.transpose,
        "split": lambda a: jnp.split(a, 2)[1],
        "expand": lambda a: jnp.broadcast_to(a, (3, 4, 4)),
        "masked_fill": lambda a: jnp.where(GRID > 0.1, a, -1e4),
        "dropout": lambda a: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (4, 4)), a, 0),
        "detach": lax.stop_gradient,
    },
    "bool bool": {
        "gt a number": lambda a: a > 0.5,
        "isnan": jnp.isnan,
        "isfinite": jnp.isfinite,
        "all": jnp.all,
    },
    "int32 int32": {
        "argmax": jnp.argmax,
        "argsort": jnp.argsort,
        "count_nonzero": lambda a: jnp.count_nonzero(a > 0.5),
        "int": lambda a: (a * 10).astype(jnp.int32),
        "bitcast": lambda a: lax.bitcast_convert_type(a, jnp.int32),
    },
    "complex64 complex64": {
        "fft_fft": jnp.fft.fft,
        "fft_rfft2": jnp.fft.rfft2,
        "linalg_eigvals": jnp.linalg.eigvals,
        "view_as_complex": lambda a: lax.complex(a, a),
    },
}

# Two arrays. Columns: both half; half and float32; float32 and half; both float32.
OF_TWO = {
    "half half half half": {
        "matmul": jnp.matmul,
        "__matmul__": lambda a, b: a @ b,
        "mm": lax.dot,
        "mv": lambda a, b: a @ b[0],
        "bmm": lambda a, b: lax.batch_matmul(a[None], b[None]),
        "multi_dot": lambda a, b: jnp.linalg.multi_dot([a, b, a]),
        "linear": lambda a, b: a @ b.T + X[0],
        "einsum": lambda a, b: jnp.einsum("ij,kj->ik", a, b),
        "dot": lambda a, b: jnp.dot(a[0], b[0]),
        "tensordot": lambda a, b: jnp.tensordot(a, b, 1),
        "bilinear": lambda a, b: jnp.einsum("bi,oij,bj->bo", a, jnp.stack([X, X]), b),
        "conv1d": conv(1),
        "conv2d": conv(2),
        "conv3d": conv(3),
        "conv_transpose1d": conv(1, transposed=True),
        "conv_transpose2d": conv(2, transposed=True),
        "conv_transpose3d": conv(3, transposed=True),
        "conv_tbc": lambda a, b: conv(1)(a.T, b),
        "baddbmm": lambda a, b: a[None] @ a[None] + b[None],
        "scaled_dot_product_attention": attention,
        "RNNCell": lambda a, b: jnp.tanh(a @ X + b @ X + X[0]),
    },
    "half float32 half float32": {  # a product plus, or with a state in, the second argument
        "addmm": lambda a, b: a @ a + 0.5 * b,
        "addbmm": lambda a, b: jnp.einsum("bij,bjk->ik", a[None], a[None]) + b,
        "addmv": lambda a, b: a @ a[0] + b[0],
        "addr": lambda a, b: jnp.outer(a[0], a[1]) @ X + b,
        "LSTMCell": lstm_cell,
        "GRUCell": gru_cell,
    },
    "float32 float32 float32 float32": {
        "pow": jnp.power,
        "logaddexp": jnp.logaddexp,
        "cdist": distances,
        "dist": lambda a, b: jnp.linalg.norm(a - 2 * b),
        "cosine_similarity": similarity,
        "mse_loss": lambda a, b: jnp.mean((a - 2 * b) ** 2),
        "l1_loss": lambda a, b: jnp.mean(jnp.abs(a - 2 * b)),
        "smooth_l1_loss": lambda a, b: jnp.mean(optax.huber_loss(a, 2 * b)),
        "binary_cross_entropy": lambda a, b: -jnp.mean(b * jnp.log(a) + (1 - b) * jnp.log1p(-a)),
        "binary_cross_entropy_with_logits": optax.sigmoid_binary_cross_entropy,
        "soft cross_entropy": optax.softmax_cross_entropy,
        "kl_div": kl_divergence,
        "poisson_nll_loss": lambda a, b: jnp.mean(jnp.exp(a) - b * a),
        "soft_margin_loss": lambda a, b: jnp.mean(jnp.log1p(jnp.exp(-b * a))),
        "hinge_embedding_loss": lambda a, b: jnp.mean(jnp.where(b > 0.5, a, jax.nn.relu(1 - a))),
        "margin_ranking_loss": lambda a, b: jnp.mean(jax.nn.relu(0.1 - (a - 2 * b))),
        "cosine_embedding_loss": lambda a, b: jnp.mean(1 - similarity(a, b[::-1])),
        "triplet_margin_loss": lambda a, b: jnp.mean(jax.nn.relu(1 + norm(a - 2 * b) - norm(a))),
        "linalg_solve": jnp.linalg.solve,
        "cholesky_solve": lambda a, b: linalg.cho_solve((b, True), a),
        "linalg_solve_triangular": lambda a, b: linalg.solve_triangular(a, b, lower=True),
    },
    "half float32 float32 float32": {
        "add": jnp.add,
        "sub": lambda a, b: a - 2 * b,
        "mul": jnp.multiply,
        "div": jnp.divide,
        "rem": lambda a, b: jnp.remainder(a, 3 * b),
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "atan2": jnp.arctan2,
        "addcmul": lambda a, b: a + 0.5 * (b * b),
        "addcdiv": lambda a, b: a + 0.5 * (b / (b + 1)),
        "lerp": lambda a, b: a + 0.25 * (2 * b - a),
        "cross": lambda a, b: jnp.cross(a[:, :3], 2 * b[::-1, :3]),
        "cat": lambda a, b: jnp.concatenate([a, b]),
        "stack": lambda a, b: jnp.stack([a, b]),
        "where": lambda a, b: jnp.where(GRID > 0.1, a, b),
        "index_put": lambda a, b: a.at[INDICES[:2]].set(b[:2]),
        "scatter_add": lambda a, b: a.at[INDICES].add(b),
        "scatter_reduce": lambda a, b: a.at[INDICES].max(b),
        "grid_sample": lambda a, b: jax.scipy.ndimage.map_coordinates(a, [3 * b, 3 * b.T], 1),
        "clamp by arrays": lambda a, b: jnp.clip(a, b / 2, b),
        "dynamic_update_slice": lambda a, b: lax.dynamic_update_slice(a, b[:2], (1, 0)),
        "prelu": lambda a, b: jnp.where(a > 0.3, a, b * a),
    },
    "bool bool bool bool": {
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "lt": jnp.less,
        "le": jnp.less_equal,
        "gt": jnp.greater,
        "ge": jnp.greater_equal,
        "equal": jnp.array_equal,
    },
    "complex64 complex64 complex64 complex64": {
        "polar": lambda a, b: lax.complex(a * jnp.cos(b), a * jnp.sin(b)),
    },
}

# What the lists say; an operation in none of them runs in the dtype that it is given.
LISTS = {
    "half": """
        addbmm addmm addmv addr baddbmm bmm multi_dot conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d conv_tbc linear matmul __matmul__ mm mv prelu RNNCell
        GRUCell LSTMCell scaled_dot_product_attention einsum
    """,
    "float32": """
        __rdiv__ __rpow__ acos asin cosh erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt
        sinh tan cumprod cumsum prod sum std var norm dist cdist pdist renorm normalize
        cosine_similarity softmax softmin log_softmax softplus layer_norm group_norm
        local_response_norm binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
        hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
        triplet_margin_loss gelu interpolate
        cholesky cholesky_solve inverse pinverse trace reflection_pad1d replication_pad1d
        linalg_svd linalg_eigh linalg_qr linalg_det linalg_solve linalg_solve_triangular fft_irfft
    """,
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot
        add sub mul div cat stack
    """,
}

# Where ampx gives something else, and why.
OTHERWISE = {
    "in a jaxpr it is a matrix product like any other": "dot tensordot bilinear",
    "the sum is an addition of its own, which takes the widest": """
        addmm addbmm addmv addr LSTMCell GRUCell
    """,
    "no matrix product: it multiplies and selects": "prelu",
    "bounded and tame, and float32 where only float32 reads it": "gelu",
    "copies are exact in any dtype": "reflection_pad1d replication_pad1d",
    "a root or a power leaves the range of float16": "sqrt cbrt pow_with_a_number norm_of_order_3",
    "infinite slopes or cancellation, as in acos and expm1": """
        exp2 acosh asinh atanh lgamma digamma logit
    """,
    "sums lose small terms in half": """
        mean avg_pool2d logcumsumexp logsumexp norm_of_order_1 standardize
    """,
    "made of exp or log, which are float32, and joined to the widest": """
        logsigmoid elu selu celu mish logaddexp soft_cross_entropy
    """,
    "on one platform it is a product with the identity, summed": "diag",
    "banned there; its logs are float32 here, which probabilities near 1 need": """
        binary_cross_entropy
    """,
}
