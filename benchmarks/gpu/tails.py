"""Everything behind the gradients on a GPU: every fused optimizer, by XLA, by kernels, by others.

A tail unscales, checks, clips, updates, and keeps or skips. It runs on few large and on many small
arrays, and on those of GPT-2 small. AdamW is also run by what people use today: optax's clip and
AdamW, `apply_if_finite` around them, a loss scale around them, once with one branch around the
update and once with a choice behind each array, and torch's fused AdamW.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.loss_scaling.nonfinite import Verdict, count_nonfinite
from ampx.updates.clipping import clipped
from ampx.updates.tails import Backend
from benchmarks.fused_traffic import DERIVED, FLOORS, OPTIMIZERS, by_apply, by_update
from benchmarks.gpu.gpt2 import SMALL, shapes_of
from benchmarks.gpu.rows import Bench, Case, Row, Way
from benchmarks.torch_updates import NAMES, torch_candidates

SCALE, RATE, DECAY, MAX_NORM = 1024.0, 1e-3, 0.1, 1.0
XLA, KERNELS, OPTAX = "fused.apply, XLA", "fused.apply, kernels", "optax, clip + the same"
KERNELS_ALONE = "fused.apply without scale and clip, kernels"
DERIVED_KERNELS = "fused.fuse of optax's, kernels"
TOO_MANY = "not measured: kernels for thousands of arrays compile for minutes"
BRANCH = "dynamic_loss_scale of optax's, one branch"
SELECT = "dynamic_loss_scale of optax's, a select for each array"
# Kernels take a tenth of a second an array to compile, and XLA's updates a third of that. So many
# arrays are not asked all that few are asked: AdamW alone by kernels, and thousands by none.
FIRST = ("AdamW", "LAMB", "AdamW, int8 moments")  # to be compiled
MANY, THOUSAND = 200, 1000


@dataclasses.dataclass(frozen=True)
class Tree:
    """Parameters in float32, with gradients in float32.

    Attributes:
      name: as tables print it.
      shapes: of all arrays.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def make(self, seed: int, scale: float, dtype: Any = jnp.float32) -> list[jax.Array]:
        """Arrays of normal numbers."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return [
            scale * jax.random.normal(key, shape, dtype)
            for key, shape in zip(keys, self.shapes, strict=True)
        ]


def make_trees(tiny: bool) -> dict[str, Tree]:
    """The trees of arrays by the name of their part."""
    if tiny:
        shapes = {"1": [(2048,)], "400": [(300,)] * 3, "2000": [(200,)] * 4, "gpt2": [(16, 256)]}
    else:
        shapes = {
            # Multiples of 256, so that kernels take moments in 8 bits.
            "1": [(50_000_128,)],
            "400": [(125_184,)] * 400,
            "2000": [(5120,)] * 2000,
            "gpt2": shapes_of(SMALL),
        }
    names = {"1": "1 x 50 M", "400": "400 x 125 k", "2000": "2000 x 5 k", "gpt2": "GPT-2 small"}
    return {key: Tree(names[key], tuple(own)) for key, own in shapes.items()}


def run(bench: Bench, key: str) -> None:
    """All tails on one tree."""
    tree = make_trees(bench.tiny)[key]
    grads = tree.make(1, 1e-3 * SCALE)
    cases = [_adamw(tree, grads, bench)]
    cases += [_optimizer(tree, grads, name) for name in OPTIMIZERS if name != "AdamW"]
    cases += [_derived(tree, grads, name) for name in DERIVED]
    cases += [_stored_narrowly(tree, name) for name in NARROW]
    cases.sort(key=lambda case: case.name.removesuffix(f", {tree.name}") not in FIRST)
    if len(tree.shapes) >= THOUSAND:
        cases = cases[:1]
        bench.write(Row(bench.part, cases[0].name, KERNELS, note=TOO_MANY))
    elif len(tree.shapes) > MANY:
        for case in cases[1:]:
            case.ways.pop(KERNELS, None)
    if key == "gpt2":
        cases.append(_skipped(tree))
    bench.run(cases)


# --- ways ----------------------------------------------------------------------------------------


def _scaled(tx: Any, **settings: Any) -> Any:
    return ampx.dynamic_loss_scale(tx, init_scale=SCALE, **settings)


def _kernels() -> Backend:
    """Kernels; where there is no GPU XLA in their place, so that a rehearsal has all rows."""
    return "pallas" if jax.default_backend() == "gpu" else "xla"


def _way(tree: Tree, step: Any, tx: Any, size: float, dtype: Any = jnp.float32) -> Way:
    def make_state() -> Any:
        params = tree.make(0, 0.1, dtype)
        return params, tx.init(params)

    return Way(step, make_state, size * tree.elements)


def _by_select(tx: Any) -> Callable[..., Any]:
    """A step that chooses between old and new array by array.

    It does so where updates are to begin before the last gradients have been reduced.
    """

    def step(state: Any, grads: Any) -> Any:
        params, opt_state = state
        verdict = Verdict(count_nonfinite(grads), axes=(), overlaps=True)
        updates, opt_state = tx.update(grads, opt_state, params, verdict=verdict)
        return optax.apply_updates(params, updates), opt_state

    return step


def _adamw(tree: Tree, grads: Any, bench: Bench) -> Case:
    """AdamW by everything that there is."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    ours, derived = ampx.fused.adamw(RATE, weight_decay=DECAY), _scaled(ampx.fused.fuse(adamw))
    scaled, wrapped, guarded = _scaled(ours), _scaled(chain), optax.apply_if_finite(chain, 5)
    behind = _scaled(clipped(ours, MAX_NORM))
    (alone, _), (both, _) = FLOORS["AdamW"], FLOORS["AdamW, clipped"]
    way = functools.partial(_way, tree)
    ways = {
        XLA: way(by_apply(scaled, MAX_NORM, "xla"), scaled, both),
        KERNELS: way(by_apply(scaled, MAX_NORM, _kernels()), scaled, both),
        "fused.fuse of optax's, XLA": way(by_apply(derived, MAX_NORM, "xla"), derived, both),
        DERIVED_KERNELS: way(by_apply(derived, MAX_NORM, _kernels()), derived, both),
        OPTAX: way(by_update(chain), chain, both),
        BRANCH: way(by_update(wrapped), wrapped, both),
        SELECT: way(_by_select(wrapped), wrapped, both),
        "optax.apply_if_finite": way(by_update(guarded), guarded, both),
        "tx.update of a fused optimizer": way(by_update(behind), behind, both),
        "fused.apply without scale and clip, XLA": way(by_apply(ours, None, "xla"), ours, alone),
        KERNELS_ALONE: way(by_apply(ours, None, _kernels()), ours, alone),
        "optax without clip": way(by_update(adamw), adamw, alone),
    }
    if len(tree.shapes) >= THOUSAND:  # these compile for minutes
        ways = {name: ways[name] for name in (XLA, OPTAX)}
    elif len(tree.shapes) > MANY:
        del ways[KERNELS_ALONE], ways[DERIVED_KERNELS]
    others = functools.partial(torch_candidates, tree.shapes, bench.repeats)
    sizes = {
        by: (both if has_clip else alone) * tree.elements for by, (has_clip, _) in NAMES.items()
    }
    name = f"AdamW, {tree.name}"
    return Case(name, ways, (grads,), OPTAX, tree.elements, others, sizes)


def _beside_optax(tree: Tree, ours: Any, chain: Any, size: float) -> dict[str, Way]:
    """An optimizer in the fused tail by XLA and by kernels, and optax's chain."""
    return {
        XLA: _way(tree, by_apply(ours, MAX_NORM, "xla"), ours, size),
        KERNELS: _way(tree, by_apply(ours, MAX_NORM, _kernels()), ours, size),
        OPTAX: _way(tree, by_update(chain), chain, size),
    }


def _optimizer(tree: Tree, grads: Any, name: str) -> Case:
    """Another of the optimizers that optax has, too."""
    ours, theirs = _scaled(OPTIMIZERS[name](ampx.fused)), OPTIMIZERS[name](optax)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), theirs)
    size = FLOORS[name][0] + 4  # the norm reads the gradient once more
    ways = _beside_optax(tree, ours, chain, size)
    if name == "NovoGrad":  # no kernel takes it
        del ways[KERNELS]
    return Case(f"{name}, {tree.name}", ways, (grads,), OPTAX, tree.elements)


def _derived(tree: Tree, grads: Any, name: str) -> Case:
    """An optimizer that only optax has, with rules derived from its program."""
    theirs = DERIVED[name]
    ours, wrapped = _scaled(ampx.fused.fuse(theirs)), _scaled(theirs)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), theirs)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(theirs.init(jnp.ones(1000)))) // 1000
    size = 4 + 4 + 2 * (4 + kept)  # the gradient twice; the parameter and its state in and out
    ways = _beside_optax(tree, ours, chain, size)
    ways[BRANCH] = _way(tree, by_update(wrapped), wrapped, size)
    return Case(f"{name}, {tree.name}", ways, (grads,), OPTAX, tree.elements)


def _skipped(tree: Tree) -> Case:
    """AdamW with gradients that overflowed: every step is skipped."""
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(RATE, weight_decay=DECAY))
    ours, wrapped = _scaled(ampx.fused.adamw(RATE, weight_decay=DECAY)), _scaled(chain)
    size = 4  # one look at the gradients would do
    ways = {
        XLA: _way(tree, by_apply(ours, MAX_NORM, "xla"), ours, size),
        KERNELS: _way(tree, by_apply(ours, MAX_NORM, _kernels()), ours, size),
        BRANCH: _way(tree, by_update(wrapped), wrapped, size),
        SELECT: _way(tree, _by_select(wrapped), wrapped, size),
    }
    grads = tree.make(1, jnp.inf)
    return Case(f"AdamW, every step skipped, {tree.name}", ways, (grads,), BRANCH, tree.elements)


def _narrow_forms() -> dict[str, tuple[Any, Any, float]]:
    """By name: the optimizer, the dtype of its parameters, and bytes a parameter that it keeps."""
    adamw = functools.partial(ampx.fused.adamw, RATE, weight_decay=DECAY)
    int8 = functools.partial(adamw, mu_dtype="int8", nu_dtype="int8")
    half = jnp.bfloat16
    return {
        "AdamW, int8 moments": (int8(), jnp.float32, 6),
        "AdamW, split masters": (ampx.fused.split_masters(adamw()), half, 12),
        "AdamW, split masters of 8 bits, int8 moments": (
            ampx.fused.split_masters(int8(), error_bits=8),
            half,
            5,
        ),
        "AdamW, stochastic rounding, int8 moments": (
            ampx.fused.stochastic_rounding(int8()),
            half,
            4,
        ),
    }


NARROW = tuple(_narrow_forms())


def _stored_narrowly(tree: Tree, name: str) -> Case:
    """AdamW in fewer bytes, with gradients in bfloat16."""
    tx, dtype, kept = _narrow_forms()[name]
    scaled = _scaled(tx)
    size = 2 * kept + 4  # all that is kept in and out, and the half gradient twice
    ways = {
        by: _way(tree, by_apply(scaled, MAX_NORM, backend), scaled, size, dtype)
        for by, backend in ((XLA, "xla"), (KERNELS, _kernels()))
    }
    grads = tree.make(1, 1e-3 * SCALE, jnp.bfloat16)
    return Case(f"{name}, {tree.name}", ways, (grads,), XLA, tree.elements)
