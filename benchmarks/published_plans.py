"""Plans of models that others have trained, beside what their papers say of them.

`python -m benchmarks.published_plans` prints the table of docs/benchmarks.md. Nothing is computed;
each row is traced for its paper's mesh, and the program of one device compiled.
"""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from ampx import pipelining


class Run(NamedTuple):
    """A published run.

    Attributes:
      name: of the model.
      billions: parameters, as the paper gives them.
      layers: how many.
      width: of the residual stream.
      heads: of queries.
      hidden: width of the feed-forward.
      tokens: of a row.
      vocabulary: how many rows the embedding has.
      mesh: devices along data, stage and model.
      microbatches: of one row each, in a step.
      shared_heads: of keys and values, if there are fewer; then the feed-forward is gated and the
        head has its own matrix, as in LLaMA.
    """

    name: str
    billions: float
    layers: int
    width: int
    heads: int
    hidden: int
    tokens: int
    vocabulary: int
    mesh: tuple[int, int, int]
    microbatches: int
    shared_heads: int | None = None

    @property
    def published_idle(self) -> float:
        """What all these papers say of the bubble: (p - 1) / m of the time of the work."""
        stages = self.mesh[1]
        return (stages - 1) / (self.microbatches + stages - 1)


RUNS = (
    Run("GPipe's", 41, 24, 12288, 96, 49152, 2048, 32000, (4, 8, 16), 64),
    Run("GPT-3", 174.6, 96, 12288, 96, 4 * 12288, 2048, 51200, (4, 12, 8), 384),
    Run("Megatron", 529.6, 105, 20480, 128, 4 * 20480, 2048, 51200, (2, 35, 8), 1120),
    Run("Megatron", 1008.0, 128, 25600, 160, 4 * 25600, 2048, 51200, (6, 64, 8), 512),
    Run("LLaMA-3", 405, 126, 16384, 128, 53248, 8192, 128256, (64, 16, 8), 32, 8),
)


def _normalize(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _place_of_word(table, words):
    at = words - jax.lax.axis_index("model") * table.shape[0]
    is_here = (at >= 0) & (at < table.shape[0])
    return is_here, jnp.where(is_here, at, 0)


def _embed(params, shared, batch, key):
    is_here, at = _place_of_word(shared["embedding"], batch["tokens"])
    return jax.lax.psum(jnp.where(is_here[..., None], shared["embedding"][at], 0), "model")


def _block(params, x, key):
    h = _normalize(x)
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, params[name]) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jax.lax.psum(jnp.einsum("bthe,hed->btd", mixed, params["out"]), "model")
    h = _normalize(x)
    up = jax.nn.gelu(h @ params["up"])
    up = up * (h @ params["gate"]) if "gate" in params else up
    return x + jax.lax.psum(up @ params["down"], "model")


def _loss(params, shared, x, batch, key):
    table = shared["embedding"] if params is None else params["head"]
    logits = (_normalize(x) @ table.T).astype(jnp.float32)
    largest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
    total = jax.lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
    is_here, at = _place_of_word(table, batch["targets"])
    picked = jnp.take_along_axis(logits, at[..., None], -1)[..., 0]
    picked = jax.lax.psum(jnp.where(is_here, picked, 0), "model")
    return jnp.sum(jnp.log(total) + largest - picked), jnp.float32(picked.size)


def make_model(run: Run):
    """The arguments of `plan`: bfloat16 over float32 masters, stages that compute again."""
    data, stages, _ = run.mesh
    size, of_keys = run.width // run.heads, run.shared_heads or run.heads
    shapes = {
        "q": ((run.width, run.heads, size), P("stage", None, "model")),
        "k": ((run.width, of_keys, size), P("stage", None, "model")),
        "v": ((run.width, of_keys, size), P("stage", None, "model")),
        "out": ((run.heads, size, run.width), P("stage", "model")),
        "up": ((run.width, run.hidden), P("stage", None, "model")),
        "down": ((run.hidden, run.width), P("stage", "model")),
    }
    if run.shared_heads:
        shapes["gate"] = shapes["up"]
    layers = {
        name: jax.ShapeDtypeStruct((run.layers, *shape), jnp.float32)
        for name, (shape, _) in shapes.items()
    }
    table = jax.ShapeDtypeStruct((run.vocabulary, run.width), jnp.float32)
    params = {"stages": layers, "shared": {"embedding": table}}
    specs = {
        "stages": {name: spec for name, (_, spec) in shapes.items()},
        "shared": {"embedding": P("model")},
    }
    if run.shared_heads:
        params["last"], specs["last"] = {"head": table}, {"head": P("model")}
    # Where stages do not divide the layers, the first and the last have fewer.
    each, left = divmod(run.layers, stages)
    counts = [each] * stages
    for stage in range(1, 1 + left):
        counts[stage] += 1
    grads_of = pipelining.value_and_grad(
        first=_embed,
        stage=_block,
        last=_loss,
        schedule=pipelining.one_f_one_b(stages, run.microbatches),
        axis_name="stage",
        data_axes="data",
        policy="p=f32,c=bf16,o=f32",
        param_specs=specs,
        layers_per_stage=counts if left else None,
    )
    tokens = jax.ShapeDtypeStruct((data * run.microbatches, run.tokens), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    mesh = dict(zip(("data", "stage", "model"), run.mesh, strict=True))
    return grads_of, params, batch, mesh


def main(names: list[str]) -> None:
    """Prints a row of the table for each run, or for those whose names are given."""
    for run in RUNS:
        if names and f"{run.name}-{run.billions:.0f}" not in names:
            continue
        *model, mesh = make_model(run)
        found = pipelining.plan(*model, optax.adamw(1e-4), mesh=mesh)
        gib = {name: size / 2**30 for name, size in found.memory.items()}
        cells = [
            f"{run.name} {run.billions:g}B",
            " x ".join(map(str, run.mesh)),
            f"{found.num_parameters / 1e9:.1f}B",
            f"{found.num_parameters / 1e9 / run.billions - 1:+.1%}",
            f"{run.published_idle:.1%}",
            f"{found.lockstep.bubble_fraction:.1%}",
            f"{gib['parameters'] + gib['optimizer state']:.1f}",
            f"{found.peak_bytes / 2**30:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
