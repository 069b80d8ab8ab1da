"""A whole training step of GPT-2 small in bfloat16: opt levels, casts by hand, and torch's AMP.

The model is written once, in float32 as a user writes it. Activations have the dtype of the
embedding, so with a half embedding everything is half but statistics of norms, softmax and loss.
"By hand" casts the parameters where they are used; O1 and O2 are `train_step` with those policies.
Attention is `jax.nn.dot_product_attention`, by XLA, and by cuDNN in rows that say so. Torch's model
has the same parameters and formulas, and gives the same loss.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ampx
from benchmarks.gpu.rows import Case, Way
from benchmarks.measuring import Candidate
from benchmarks.torch_updates import torch
from benchmarks.zoo import cross_entropy

RATE, BY_HAND, OPT_1, OPT_1_SCALED = 3e-4, "by hand", "O1", "O1, dynamic loss scale"
CUDNN = ", attention by cuDNN"


@dataclasses.dataclass(frozen=True)
class Size:
    """The numbers that make a GPT-2."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    rows: int


SMALL = Size(layers=12, width=768, heads=12, length=1024, vocabulary=50257, rows=8)
TINY = Size(layers=2, width=32, heads=2, length=16, vocabulary=64, rows=2)


def init(size: Size, key: jax.Array) -> Any:
    """Parameters in float32: 124 million for `SMALL`."""
    width = size.width

    def dense(key: jax.Array, inputs: int, outputs: int) -> dict:
        return {"w": 0.02 * jax.random.normal(key, (inputs, outputs)), "b": jnp.zeros(outputs)}

    def norm() -> dict:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block(key: jax.Array) -> dict:
        keys = jax.random.split(key, 4)
        return {
            "norm_1": norm(),
            "qkv": dense(keys[0], width, 3 * width),
            "out": dense(keys[1], width, width),
            "norm_2": norm(),
            "up": dense(keys[2], width, 4 * width),
            "down": dense(keys[3], 4 * width, width),
        }

    tokens, places, *keys = jax.random.split(key, size.layers + 2)
    return {
        "tokens": 0.02 * jax.random.normal(tokens, (size.vocabulary, width)),
        "places": 0.02 * jax.random.normal(places, (size.length, width)),
        "blocks": [block(key) for key in keys],
        "norm": norm(),
    }


def shapes_of(size: Size) -> list[tuple[int, ...]]:
    """The shapes of all parameters."""
    params = jax.eval_shape(functools.partial(init, size), jax.random.key(0))
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def make_batch(size: Size) -> jax.Array:
    """Random int32 tokens of shape (rows, length + 1)."""
    return jax.random.randint(jax.random.key(1), (size.rows, size.length + 1), 0, size.vocabulary)


# --- the model -----------------------------------------------------------------------------------


def _dense(x: jax.Array, layer: dict) -> jax.Array:
    return x @ layer["w"].astype(x.dtype) + layer["b"].astype(x.dtype)


def _norm(x: jax.Array, layer: dict) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(axis=-1, keepdims=True)
    normed = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (normed * layer["scale"] + layer["bias"]).astype(x.dtype)


def _attend(x: jax.Array, layer: dict, heads: int, cudnn: bool) -> jax.Array:
    qkv = _dense(x, layer["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    if cudnn:  # it takes halves alone
        half = qkv.astype(jnp.bfloat16)
        mixed = jax.nn.dot_product_attention(
            half[:, :, 0], half[:, :, 1], half[:, :, 2], is_causal=True, implementation="cudnn"
        ).astype(x.dtype)
    else:
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
    return _dense(mixed.reshape(x.shape), layer["out"])


def loss_fn(
    params: Any, tokens: jax.Array, *, heads: int, dtype: Any = None, cudnn: bool = False
) -> jax.Array:
    """The mean loss of the next token, float32.

    Args:
      params: as `init` makes them.
      tokens: int32 of shape (rows, length + 1).
      heads: of attention.
      dtype: of the embedding, and so of the activations; None leaves it as it is.
      cudnn: whether attention is cuDNN's.
    """
    table, places = (
        params[name].astype(dtype or params[name].dtype) for name in ("tokens", "places")
    )
    x = table[tokens[:, :-1]] + places[: tokens.shape[1] - 1]
    for layer in params["blocks"]:
        x = x + _attend(_norm(x, layer["norm_1"]), layer, heads, cudnn)
        hidden = jax.nn.gelu(_dense(_norm(x, layer["norm_2"]), layer["up"]))
        x = x + _dense(hidden, layer["down"])
    logits = _norm(x, params["norm"]) @ table.T
    return cross_entropy(logits.astype(jnp.float32), tokens[:, 1:])


# --- torch ---------------------------------------------------------------------------------------


def torch_loss(params: Any, tokens: Any, heads: int, fused_attention: bool) -> Any:
    """`loss_fn` in torch; attention by its own kernels, or by matrix products as XLA's."""
    functional = torch.nn.functional

    def norm(x: Any, layer: dict) -> Any:
        return functional.layer_norm(x, x.shape[-1:], layer["scale"], layer["bias"], 1e-5)

    def dense(x: Any, layer: dict) -> Any:
        return functional.linear(x, layer["w"].T, layer["b"])

    def attend(x: Any, layer: dict) -> Any:
        qkv = dense(x, layer["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))  # rows, heads, length, width
        if fused_attention:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return dense(mixed.transpose(1, 2).reshape(x.shape), layer["out"])

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = functional.embedding(inputs, params["tokens"]) + params["places"][: inputs.shape[1]]
    for layer in params["blocks"]:
        x = x + attend(norm(x, layer["norm_1"]), layer)
        hidden = functional.gelu(dense(norm(x, layer["norm_2"]), layer["up"]), approximate="tanh")
        x = x + dense(hidden, layer["down"])
    logits = norm(x, params["norm"]) @ params["tokens"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def to_torch(tree: Any) -> Any:
    """Arrays of JAX as tensors of torch."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return jax.tree.map(lambda x: torch.tensor(jax.device_get(x), device=device), tree)


def torch_steps(size: Size, repeats: int) -> Iterator[Candidate]:
    """Torch's AMP in bfloat16 with its fused AdamW, as its users write it.

    Raises:
      ImportError: if torch is not there.
    """
    if torch is None:
        raise ImportError("torch is not installed")
    tokens = to_torch(make_batch(size)).long()
    for kind in ("by products", "by torch's kernels"):
        step = _torch_step(size, tokens, "kernels" in kind, repeats)
        yield Candidate(f"torch AMP, attention {kind}", step, None, ())


def _torch_step(
    size: Size, tokens: Any, fused_attention: bool, repeats: int
) -> Callable[[None], None]:
    params = to_torch(init(size, jax.random.key(0)))
    leaves = [leaf.requires_grad_() for leaf in jax.tree.leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=RATE, weight_decay=0.1, fused=True)

    def step(_: None) -> None:
        for _ in range(repeats):
            with torch.autocast(tokens.device.type, torch.bfloat16):
                loss = torch_loss(params, tokens, size.heads, fused_attention)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()

    return step


# --- the part ------------------------------------------------------------------------------------


def make_ways(size: Size) -> dict[str, Way]:
    """The ways in JAX, by name."""
    tx = optax.adamw(RATE, weight_decay=0.1)
    loss = functools.partial(loss_fn, heads=size.heads)

    def start() -> Any:
        return init(size, jax.random.key(0))

    def plain(loss: Any) -> Way:
        def step(state: Any, tokens: jax.Array) -> Any:
            params, opt_state = state
            grads = jax.grad(loss)(params, tokens)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        def make_state() -> Any:
            params = start()
            return params, tx.init(params)

        return Way(step, make_state)

    def level(name: str, loss: Any, tx: Any = tx, loss_scale: Any = None) -> Way:
        recipe = ampx.opt_level(name, half_dtype=jnp.bfloat16, loss_scale=loss_scale)
        step = ampx.train_step(loss, tx, policy=recipe)
        return Way(lambda state, tokens: step(state, tokens)[0], lambda: step.init(start()))

    attentions = {"": loss}
    if jax.default_backend() == "gpu":
        attentions[CUDNN] = functools.partial(loss, cudnn=True)
    # In the order in which they are compiled: the last may come too late.
    ways = {}
    for attention, own in attentions.items():
        ways[BY_HAND + attention] = plain(functools.partial(own, dtype=jnp.bfloat16))
        ways[OPT_1 + attention] = level("O1", own)
        ways[OPT_1_SCALED + attention] = level("O1", own, loss_scale="dynamic")
    ways["O1, fused AdamW"] = level("O1", loss, ampx.fused.adamw(RATE, weight_decay=0.1))
    ways["O2"] = level("O2", loss)
    ways["float32"] = plain(loss)
    return ways


def make_cases(tiny: bool) -> list[Case]:
    """All ways of a step, with what they convert."""
    size = TINY if tiny else SMALL
    case = Case(
        f"GPT-2 small, {size.rows} rows of {size.length} tokens",
        make_ways(size),
        lambda: (make_batch(size),),
        BY_HAND,
        make_others=functools.partial(torch_steps, size),
        describe=count_conversions,
        repeats=2,  # steps are long
    )
    return [case]


def count_conversions(candidate: Candidate) -> str:
    """How often a compiled program changes a dtype, and in how many kernels of their own."""
    text = candidate.step.as_text()
    alone = len(re.findall(r"= \S+ fusion\(.*calls=%?wrapped_convert", text))
    conversions = len(re.findall(r" convert\(", text))
    return f"{conversions} conversions, {alone} kernels that only convert"
