"""`torch.autocast` beside `ampx.autocast`, operation by operation: the dtype of every result.

`autocast_op_lists` holds the operations of torch's lists as JAX functions, with the dtypes that
ampx gives, which other tests check. Here torch itself is asked. Its list for GPUs is asked without
one: fake tensors have a device and a dtype but no numbers, and go through the same dispatch.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from autocast_op_lists import INDICES, OF_ONE, OF_TWO, OTHERWISE
from listing import Peer

torch = pytest.importorskip("torch")
fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")

F, linalg, fft = torch.nn.functional, torch.linalg, torch.fft
HALF = {"cuda": torch.float16, "cpu": torch.bfloat16}


def indices(like: Any) -> Any:
    return torch.tensor(INDICES, device=like.device)


def conv(name: str, spatial: int) -> Callable:
    """A convolution of one image."""

    def of_two(a: Any, b: Any) -> Any:
        if spatial == 1:
            return getattr(F, name)(a.unsqueeze(0), b.unsqueeze(-1))
        lead = (1,) * spatial
        return getattr(F, name)(a.reshape(*lead, 4, 4), b.reshape(*lead, 4, 4))

    return of_two


def cell(name: str) -> Callable:
    """A recurrent cell, its weights in float32."""

    def of_two(a: Any, b: Any) -> Any:
        made = getattr(torch.nn, name)(4, 4, device=a.device)
        return made(a, (b, b))[1] if name == "LSTMCell" else made(a, b)

    return of_two


# How to call what takes more than arrays, without brackets, which would ask for a GPU. All others
# are functions of torch by their own names.
OF_ONE_THERE = {
    "__rdiv__": lambda a: 2.0 / a,
    "__rpow__": lambda a: 2.0**a,
    "pow with a number": lambda a: a**2.5,
    "integer power": lambda a: a**3,
    "cumsum": lambda a: a.cumsum(0),
    "cumprod": lambda a: a.cumprod(0),
    "logcumsumexp": lambda a: a.logcumsumexp(0),
    "cummax": lambda a: a.cummax(0)[0],
    "logsumexp": lambda a: a.logsumexp(0),
    "prod": lambda a: a.prod(0),
    "std": lambda a: a.std(0),
    "amax": lambda a: a.amax(0),
    "amin": lambda a: a.amin(0),
    "norm of order 1": lambda a: torch.norm(a, 1),
    "norm of order 3": lambda a: torch.norm(a, 3),
    "renorm": lambda a: a.renorm(2, 0, 0.7),
    "softmax": lambda a: F.softmax(a, -1),
    "softmin": lambda a: F.softmin(a, -1),
    "log_softmax": lambda a: F.log_softmax(a, -1),
    "layer_norm": lambda a: F.layer_norm(a, (4,)),
    "group_norm": lambda a: F.group_norm(a, 2),
    "local_response_norm": lambda a: F.local_response_norm(a.unsqueeze(0), 2),
    "nll_loss": lambda a: F.nll_loss(a, indices(a)),
    "cross_entropy": lambda a: F.cross_entropy(a, indices(a)),
    "multi_margin_loss": lambda a: F.multi_margin_loss(a, indices(a)),
    "multilabel_margin_loss": lambda a: F.multilabel_margin_loss(a, indices(a).expand(4, 4)),
    "interpolate": lambda a: F.interpolate(a.expand(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "avg_pool2d": lambda a: F.avg_pool2d(a.unsqueeze(0), 2),
    "max_pool2d": lambda a: F.max_pool2d(a.unsqueeze(0), 2),
    "linalg_svd": lambda a: linalg.svdvals(a),
    "linalg_eigh": lambda a: linalg.eigvalsh(a),
    "linalg_qr": lambda a: linalg.qr(a)[1],
    "linalg_det": linalg.det,
    "linalg_eigvals": linalg.eigvals,
    "fft_irfft": fft.irfft,
    "fft_fft": fft.fft,
    "fft_rfft2": fft.rfft2,
    "exact gelu": F.gelu,
    "gelu": lambda a: F.gelu(a, approximate="tanh"),
    "clamp": lambda a: a.clamp(0.2, 0.6),
    "topk": lambda a: a.topk(2)[0],
    "sort": lambda a: a.sort()[0],
    "reflection_pad1d": lambda a: F.pad(a, (1, 1), mode="reflect"),
    "replication_pad1d": lambda a: F.pad(a, (1, 1), mode="replicate"),
    "constant_pad": lambda a: F.pad(a, (1, 1)),
    "embedding": lambda a: F.embedding(indices(a), a),
    "gather": lambda a: a.gather(1, indices(a).unsqueeze(1)),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 0),
    "repeat": lambda a: a.repeat_interleave(2, 0),
    "tile": lambda a: a.tile(2),
    "transpose": lambda a: a.transpose(0, 1),
    "split": lambda a: a.split(2)[1],
    "expand": lambda a: a.expand(3, 4, 4),
    "masked_fill": lambda a: a.masked_fill(a > 0.1, -1e4),
    "dropout": lambda a: F.dropout(a, 0.5),
    "gt a number": lambda a: a > 0.5,
    "all": lambda a: (a > 0.5).all(),
    "int": lambda a: (a * 10).int(),
    "view_as_complex": lambda a: torch.view_as_complex(torch.stack([a, a], -1)),
}
OF_TWO_THERE = {
    "mm": torch.mm,
    "mv": lambda a, b: torch.mv(a, b.select(0, 0)),
    "bmm": lambda a, b: torch.bmm(a.unsqueeze(0), b.unsqueeze(0)),
    "multi_dot": lambda a, b: linalg.multi_dot([a, b, a]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "dot": lambda a, b: torch.dot(a.select(0, 0), b.select(0, 0)),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4, device=a.device)),
    **{f"conv{axes}d": conv(f"conv{axes}d", axes) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": conv(f"conv_transpose{axes}d", axes) for axes in (1, 2, 3)},
    "conv_tbc": lambda a, b: torch.conv_tbc(a.unsqueeze(0), b.unsqueeze(0), b.select(0, 0)),
    "baddbmm": lambda a, b: torch.baddbmm(b.unsqueeze(0), a.unsqueeze(0), a.unsqueeze(0)),
    "scaled_dot_product_attention": lambda a, b: F.scaled_dot_product_attention(
        a.expand(1, 1, 4, 4), b.expand(1, 1, 4, 4), b.expand(1, 1, 4, 4)
    ),
    **{name: cell(name) for name in ("RNNCell", "LSTMCell", "GRUCell")},
    "addmm": lambda a, b: torch.addmm(b, a, a),
    "addbmm": lambda a, b: torch.addbmm(b, a.unsqueeze(0), a.unsqueeze(0)),
    "addmv": lambda a, b: torch.addmv(b.select(0, 0), a, a.select(0, 0)),
    "addr": lambda a, b: torch.addr(b, a.select(0, 0), a.select(0, 1)),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b),
    "soft cross_entropy": F.cross_entropy,
    "margin_ranking_loss": lambda a, b: F.margin_ranking_loss(a, b, b),
    "cosine_embedding_loss": lambda a, b: F.cosine_embedding_loss(a, b, b.select(0, 0)),
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(a, b, a),
    "linalg_solve": linalg.solve,
    "linalg_solve_triangular": lambda a, b: linalg.solve_triangular(a, b, upper=False),
    "rem": torch.remainder,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "cross": lambda a, b: linalg.cross(a.narrow(1, 0, 3), b.narrow(1, 0, 3)),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0.1, a, b),
    "index_put": lambda a, b: a.index_put((indices(a),), b),
    "scatter_add": lambda a, b: a.scatter_add(0, indices(a).expand(4, 4), b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, indices(a).expand(4, 4), b, "amax"),
    "grid_sample": lambda a, b: F.grid_sample(
        a.expand(1, 1, 4, 4), torch.stack([b, b], -1).unsqueeze(0), align_corners=False
    ),
    "clamp by arrays": lambda a, b: torch.clamp(a, b / 2, b),
    "prelu": lambda a, b: F.prelu(a, b.select(0, 0)),
}
# Not in torch, or without a dtype of their own.
NOT_THERE = "cbrt standardize bitcast dynamic_update_slice equal".split()


def find(name: str) -> Callable:
    """torch's function of that name."""
    spaces = (torch, F, torch.special, torch.Tensor)
    return next(getattr(space, name) for space in spaces if hasattr(space, name))


def rows() -> Iterator[tuple[str, list[str], Callable]]:
    """Every operation: its name without blanks, ampx's dtypes, and torch's function."""
    for table, there in ((OF_ONE, OF_ONE_THERE), (OF_TWO, OF_TWO_THERE)):
        for dtypes, functions in table.items():
            for name in functions:
                if name not in NOT_THERE:
                    fun = there.get(name) or find(name)
                    yield name.replace(" ", "_"), dtypes.split(), fun


ROWS = {name: (dtypes, fun) for name, dtypes, fun in rows()}
# In which of the dtypes h (half) and f (float32) the arguments come, as in the tables.
ARGUMENTS = {2: ("h", "f"), 4: ("hh", "hf", "fh", "ff")}

# Where torch gives another dtype: why, and for which operations. Of those where ampx departs from
# the lists of torch and Apex, these do what ampx does on a GPU.
AGREEING = """
    gelu logsumexp norm_of_order_1 norm_of_order_3 pow_with_a_number reflection_pad1d
    replication_pad1d soft_cross_entropy LSTMCell GRUCell binary_cross_entropy
""".split()
ON_GPUS = {
    **{
        reason: " ".join(sorted(set(names.split()) & set(ROWS) - set(AGREEING)))
        for reason, names in OTHERWISE.items()
    },
    "half where half reads it, float32 where float32 does: exact enough for both": """
        square integer_power
    """,
    "float32 in Apex's list; a sum loses small terms in half": "std var",
    "JAX's libraries have no half, and torch's list for CPUs has float32, too": """
        trace cholesky cholesky_solve linalg_svd linalg_eigh linalg_qr linalg_det linalg_solve
        linalg_solve_triangular fft_irfft
    """,
    "JAX has no complex numbers of two halves": """
        fft_fft fft_rfft2 linalg_eigvals view_as_complex polar
    """,
    "torch takes the dtype of the first array; ampx takes the widest": "cross",
    "torch bans it for float16": "binary_cross_entropy",
}
ON_CPUS = {
    "torch's list for CPUs leaves it as it is; ampx has one list, that for GPUs": """
        acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 reciprocal __rdiv__ rsqrt
        __rpow__ cumsum cumprod sum logsumexp norm renorm normalize pdist softmax softmin
        log_softmax softplus layer_norm group_norm local_response_norm interpolate mv pow dist
        cosine_similarity acosh asinh atanh exp2 lgamma digamma logit sqrt logcumsumexp mean std var
        diag logsigmoid elu selu celu mish avg_pool2d linalg_det dot addr logaddexp
        linalg_solve_triangular pow_with_a_number norm_of_order_1 norm_of_order_3
    """,
    "torch's list for CPUs makes it float32; ampx has one list, that for GPUs": """
        reflection_pad1d replication_pad1d grid_sample
    """,
    "torch takes the dtype of the first array; ampx takes the widest": "cross index_put",
    "in a jaxpr it is a product like any other, or not one at all": "addmm addbmm prelu bilinear",
}
# Fake tensors do not get through these on a GPU.
NOT_ASKED = "RNNCell LSTMCell GRUCell grid_sample".split()
CASES = {
    **{f"{name} on a GPU": (name, "cuda") for name in ROWS if name not in NOT_ASKED},
    **{f"{name} on a CPU": (name, "cpu") for name in ROWS},
}
EXCLUDED = {
    f"{name} on a {device}": reason
    for device, table in (("GPU", ON_GPUS), ("CPU", ON_CPUS))
    for reason, names in table.items()
    for name in names.split()
}
PEERS = (
    Peer(
        source="torch",
        runs="the operations of the lists of `torch.autocast`, for GPUs and for CPUs: the dtypes "
        "of their results for half and float32 arguments, as `ampx.autocast` gives them",
        cases=lambda: list(CASES),
        excluded=EXCLUDED,
    ),
)


def dtypes_there(fun: Callable, arguments: tuple[str, ...], device: str) -> list[str | None]:
    """The dtypes of results under torch's autocast; None where torch refuses the arguments."""
    found: list[str | None] = []
    half = HALF[device]
    before = torch.get_autocast_dtype(device)
    names = {half: "half", torch.int64: "int32"}  # torch's integers are of 64 bits
    for kinds in arguments:
        with fake_tensor.FakeTensorMode():
            dtypes = [half if kind == "h" else torch.float32 for kind in kinds]
            arrays = [torch.rand(4, 4, device=device, dtype=dtype) for dtype in dtypes]
            torch.set_autocast_dtype(device, half)
            torch.set_autocast_enabled(device, True)  # `torch.autocast("cuda")` asks for a GPU
            try:
                result = fun(*arrays)
                found.append(names.get(result.dtype, str(result.dtype).removeprefix("torch.")))
            except (RuntimeError, ValueError):
                found.append(None)
            finally:
                torch.set_autocast_enabled(device, False)
                torch.set_autocast_dtype(device, before)
                torch.clear_autocast_cache()
    return found


def is_same(name: str, device: str) -> bool:
    """Whether torch gives ampx's dtypes for all arguments that it takes."""
    dtypes, fun = ROWS[name]
    there = dtypes_there(fun, ARGUMENTS[len(dtypes)], device)
    asked = [pair for pair in zip(dtypes, there, strict=True) if pair[1] is not None]
    return bool(asked) and all(own == other for own, other in asked)


@pytest.fixture(autouse=True)
def no_reports_of_refusals():
    """torch logs what it refuses to compute with fake tensors."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")  # torch's, about functions that it means to remove
def test_torch_gives_the_same_dtypes_but_for_the_excluded():
    differing = {case for case, asked in CASES.items() if not is_same(*asked)}
    assert differing == set(EXCLUDED)
