"""Everything behind the gradients on a GPU: every fused optimizer, by XLA, by kernels, by others.

A tail unscales, checks, clips, updates, and keeps or skips. It runs on few large and on many small
arrays, and on those of GPT-2 small. AdamW is also run by what people use today: optax's clip and
AdamW, `apply_if_finite` around them, a loss scale around them, once as it is on GPUs and once with
the branch that it is on CPUs, and torch's fused AdamW.
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
from ampx.updates.clipping import clipped
from ampx.updates.tails import Backend
from benchmarks.fused_traffic import (
    DERIVED,
    FLOORS,
    OPTIMIZERS,
    by_apply,
    by_params,
    by_update,
)
from benchmarks.gpu.gpt2 import SMALL, shapes_of
from benchmarks.gpu.rows import Case, Way
from benchmarks.measuring import traced_for
from benchmarks.torch_updates import NAMES, torch_candidates

SCALE, RATE, DECAY, MAX_NORM = 1024.0, 1e-3, 0.1, 1.0
XLA, KERNELS, OPTAX = "fused.apply, XLA", "fused.apply, kernels", "optax, clip + the same"
KERNELS_ALONE = "fused.apply without scale and clip, kernels"
DERIVED_KERNELS = "fused.fuse of optax's, kernels"
BY_KERNELS = (KERNELS, KERNELS_ALONE, DERIVED_KERNELS)
TOO_MANY = "not measured: kernels for thousands of arrays compile for minutes"
SCALED = "dynamic_loss_scale of optax's"
BRANCH = "dynamic_loss_scale of optax's, behind a branch"
# Kernels take a tenth of a second an array to compile, and XLA's updates a third of that. So many
# arrays are not asked all that few are asked: these optimizers alone by kernels, and of thousands
# AdamW alone, by none.
FIRST = ("AdamW", "LAMB", "AdamW, int8 moments")  # to be timed
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


def make_cases(tiny: bool, key: str) -> list[Case]:
    """All tails on one tree."""
    tree = make_trees(tiny)[key]
    cases = [_adamw(tree)]
    if len(tree.shapes) < THOUSAND:
        cases += [_optimizer(tree, name) for name in OPTIMIZERS if name != "AdamW"]
        cases += [_derived(tree, name) for name in DERIVED]
        cases += [_stored_narrowly(tree, name) for name in NARROW]
    first = [f"{name}, {tree.name}" for name in FIRST]
    cases.sort(key=lambda case: case.name not in first)
    if len(tree.shapes) > MANY:
        for case in cases:
            if case.name not in first:
                case.ways.pop(KERNELS, None)
    if key == "gpt2":
        cases.append(_skipped(tree))
    for case in cases:
        for name, way in case.ways.items():
            way.cost = len(tree.shapes) * (3 if name in BY_KERNELS else 1)
    return cases


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


def _grads(tree: Tree, scale: float = 1e-3 * SCALE, dtype: Any = jnp.float32) -> Any:
    """What makes the data of a case: gradients, times the loss scale."""
    return lambda: (tree.make(1, scale, dtype),)


def _behind_a_branch(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step in the form that it has on CPUs, where a skip is a branch."""

    def traced(*args: Any) -> Any:
        with traced_for("cpu"):
            return step(*args)

    return traced


def _adamw(tree: Tree) -> Case:
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
        SCALED: way(by_update(wrapped), wrapped, both),
        BRANCH: way(_behind_a_branch(by_update(wrapped)), wrapped, both),
        f"{SCALED}, new parameters": way(by_params(wrapped), wrapped, both),
        f"{BRANCH}, new parameters": way(_behind_a_branch(by_params(wrapped)), wrapped, both),
        f"{XLA}, behind a branch": way(
            _behind_a_branch(by_apply(scaled, MAX_NORM, "xla")), scaled, both
        ),
        "optax.apply_if_finite": way(by_update(guarded), guarded, both),
        "tx.update of a fused optimizer": way(by_update(behind), behind, both),
        "fused.apply without scale and clip, XLA": way(by_apply(ours, None, "xla"), ours, alone),
        KERNELS_ALONE: way(by_apply(ours, None, _kernels()), ours, alone),
        "optax without clip": way(by_update(adamw), adamw, alone),
    }
    left_out = {}
    if len(tree.shapes) >= THOUSAND:  # these compile for minutes
        ways, left_out = {name: ways[name] for name in (XLA, OPTAX)}, {KERNELS: TOO_MANY}
    elif len(tree.shapes) > MANY:
        del ways[KERNELS_ALONE], ways[DERIVED_KERNELS]
    others = functools.partial(torch_candidates, tree.shapes)
    sizes = {
        by: (both if has_clip else alone) * tree.elements for by, (has_clip, _) in NAMES.items()
    }
    return Case(
        f"AdamW, {tree.name}",
        ways,
        _grads(tree),
        OPTAX,
        tree.elements,
        others,
        sizes,
        left_out=left_out,
    )


def _beside_optax(tree: Tree, ours: Any, chain: Any, size: float) -> dict[str, Way]:
    """An optimizer in the fused tail by XLA and by kernels, and optax's chain."""
    return {
        XLA: _way(tree, by_apply(ours, MAX_NORM, "xla"), ours, size),
        KERNELS: _way(tree, by_apply(ours, MAX_NORM, _kernels()), ours, size),
        OPTAX: _way(tree, by_update(chain), chain, size),
    }


def _optimizer(tree: Tree, name: str) -> Case:
    """Another of the optimizers that optax has, too."""
    ours, theirs = _scaled(OPTIMIZERS[name](ampx.fused)), OPTIMIZERS[name](optax)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), theirs)
    size = FLOORS[name][0] + 4  # the norm reads the gradient once more
    ways = _beside_optax(tree, ours, chain, size)
    if name == "NovoGrad":  # no kernel takes it
        del ways[KERNELS]
    return Case(f"{name}, {tree.name}", ways, _grads(tree), OPTAX, tree.elements)


def _derived(tree: Tree, name: str) -> Case:
    """An optimizer that only optax has, with rules derived from its program."""
    theirs = DERIVED[name]
    ours, wrapped = _scaled(ampx.fused.fuse(theirs)), _scaled(theirs)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), theirs)
    state = jax.eval_shape(theirs.init, jax.ShapeDtypeStruct((1000,), jnp.float32))
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // 1000
    size = 4 + 4 + 2 * (4 + kept)  # the gradient twice; the parameter and its state in and out
    ways = _beside_optax(tree, ours, chain, size)
    ways[SCALED] = _way(tree, by_update(wrapped), wrapped, size)
    return Case(f"{name}, {tree.name}", ways, _grads(tree), OPTAX, tree.elements)


def _skipped(tree: Tree) -> Case:
    """AdamW with gradients that overflowed: every step is skipped."""
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(RATE, weight_decay=DECAY))
    ours, wrapped = _scaled(ampx.fused.adamw(RATE, weight_decay=DECAY)), _scaled(chain)
    size = 4  # one look at the gradients would do
    ways = {
        XLA: _way(tree, by_apply(ours, MAX_NORM, "xla"), ours, size),
        KERNELS: _way(tree, by_apply(ours, MAX_NORM, _kernels()), ours, size),
        SCALED: _way(tree, by_update(wrapped), wrapped, size),
        BRANCH: _way(tree, _behind_a_branch(by_update(wrapped)), wrapped, size),
    }
    name = f"AdamW, every step skipped, {tree.name}"
    return Case(name, ways, _grads(tree, jnp.inf), SCALED, tree.elements)


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
    # One program makes the state: many operations on arrays of many shapes would be compiled one by
    # one.
    scaled = scaled._replace(init=jax.jit(scaled.init))
    size = 2 * kept + 4  # all that is kept in and out, and the half gradient twice
    ways = {
        by: _way(tree, by_apply(scaled, MAX_NORM, backend), scaled, size, dtype)
        for by, backend in ((XLA, "xla"), (KERNELS, _kernels()))
    }
    grads = _grads(tree, dtype=jnp.bfloat16)
    return Case(f"{name}, {tree.name}", ways, grads, XLA, tree.elements)
