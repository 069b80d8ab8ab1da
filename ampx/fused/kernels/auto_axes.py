"""Kernels on arrays that XLA divides: on meshes of Auto axes, where FSDP under plain `jit` runs.

Along Auto axes it is XLA that decides how arrays are divided, after tracing. `custom_partitioning`
is how JAX lets a function take part in that decision. It is one operation of the program, with

    a rule         which axes of its operands and results belong together: all arrays of a leaf are
                   divided alike, and leaves do not depend on each other
    a partition    called when XLA has decided: it is told how each array is divided, and returns
                   the program of one device, on its shards

So a gradient that lies elsewhere is brought to its parameter, and nothing else moves: the program
of one device is the kernel. Where the program is for one device, the kernel runs on whole arrays.

This happens while XLA compiles. An error in it reaches the caller as one of JAX's runtime errors,
with our message in its text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ampx.fused.kernels.blocks import in_blocks
from ampx.fused.moments.int8_blocks import BLOCK
from ampx.mesh_axes import axes_of_entry

OnShards = Callable[[Any, Sequence[Any], Sequence[tuple[P, tuple[int, ...]]]], list[Any]]


def run_on_auto_shards(update: OnShards, shared: Any, leaves: Sequence[Any]) -> list[Any]:
    """`update(shared, leaves, places)` on the shards that XLA gives each device.

    Args:
      update: see `placement.run_in_place`; `places` are the spec and the whole shape of each leaf.
      shared: a tree of arrays that are the same everywhere.
      leaves: tuples of trees of arrays, the second of them with the parameter.

    Returns:
      What `update` returns: for each leaf arrays that are divided as it is, and one number.
    """
    shapes = [jax.tree.leaves(leaf)[0].shape for leaf in leaves]

    def whole(shared: Any, leaves: Sequence[Any]) -> list[Any]:
        return update(shared, leaves, [(P(), shape) for shape in shapes])

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        given, parts = arguments
        specs = [_spec(mesh, part) for part in parts]
        everywhere = NamedSharding(mesh, P())
        divided = [NamedSharding(mesh, spec) for spec in specs]

        def lay_out(tree: Any, sharding: NamedSharding) -> Any:
            return jax.tree.map(lambda a: sharding if a.shape else everywhere, tree)

        def on_shards(shared: Any, leaves: Sequence[Any]) -> list[Any]:
            return update(shared, leaves, list(zip(specs, shapes, strict=True)))

        of_leaves = [lay_out(*pair) for pair in zip(parts, divided, strict=True)]
        of_results = [lay_out(*pair) for pair in zip(results, divided, strict=True)]
        # Once more around the program of one device, where there is nothing left to divide: JAX
        # lowers it as a function then, and a GPU kernel may have references in it. Otherwise they
        # are effects, which a partition must not have.
        program = custom_partitioning(on_shards)
        program.def_partition(None)
        return mesh, program, of_results, (lay_out(given, everywhere), of_leaves)

    call = custom_partitioning(whole)
    results = jax.eval_shape(whole, shared, list(leaves))
    call.def_partition(partition, sharding_rule=_rule(shared, leaves, results))
    return call(shared, list(leaves))


def _rule(shared: Any, leaves: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Which axes belong together: axis d of all arrays of leaf k has the name `leaf{k}_{d}`."""
    numbers = itertools.count()

    def own(k: int, path: Any, array: Any) -> ArrayMapping:
        names = [f"leaf{k}_{axis}" for axis in range(array.ndim)]
        # The last axis of scales is shorter than that of their codes, and divided as that is. XLA
        # could be told so, but would then divide it further than JAX can write down in a spec.
        if names and jax.tree_util.keystr(path).endswith(".scales"):
            names[-1] = f"scales{k}"
        return ArrayMapping(*names)

    def mappings(trees: Sequence[Any]) -> list[ArrayMapping]:
        with_paths = jax.tree_util.tree_leaves_with_path
        return [own(k, *item) for k, tree in enumerate(trees) for item in with_paths(tree)]

    # Coefficients belong to nothing.
    given = [
        ArrayMapping(*(f"shared{next(numbers)}" for _ in array.shape))
        for array in jax.tree.leaves(shared)
    ]
    return SdyShardingRule((*given, *mappings(leaves)), tuple(mappings(results)))


def _spec(mesh: Any, leaf: Sequence[Any]) -> P:
    """How all arrays of a leaf are to be divided: as the parameter is.

    Raises:
      ValueError: if XLA does not tell, or it cuts blocks of 8-bit moments into pieces.
    """
    param = jax.tree.leaves(leaf[1])[0]
    if not isinstance(param.sharding, NamedSharding):
        raise ValueError(
            "a kernel of ampx.fused is compiled for several devices, and no mesh tells how "
            "parameters are divided over them: enter the mesh, jax.set_mesh(mesh)"
        )
    spec = param.sharding.spec
    entries = [*spec, *[None] * (len(param.shape) - len(spec))]
    # A shard that is filled up with what belongs to no element has no place in a norm.
    sizes = [math.prod(mesh.shape[axis] for axis in axes_of_entry(entry)) for entry in entries]
    pairs = zip(entries, param.shape, sizes, strict=True)
    kept = [entry if length % size == 0 else None for entry, length, size in pairs]
    if in_blocks(leaf) and kept[-1] is not None and param.shape[-1] // sizes[-1] % BLOCK:
        raise ValueError(
            f"a parameter of shape {param.shape} is divided as {spec}, which cuts the blocks of "
            f"{BLOCK} numbers that share a scale in its 8-bit moments: divide another axis, or "
            "give ampx.fused.apply backend='xla'"
        )
    return P(*kept)
