"""The language model of `transformer`, divided over devices layer by layer.

Parameters come as the model has them and leave as the model has them. In between they are in the
layout that a pipeline takes: what is before the layers, the layers stacked, what is after them.

  the model's                                            a pipeline's
  Embed_0, position                --divide_params-->    "first"    on every device
  Block_0, Block_1, ...                                  "stages"   one tree, with an axis of layers
  LayerNorm_0, Dense_0             <--join_params---     "last"     on every device

The layers are the same `Block`s with the same parameters, so losses equal those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import pipelining
from ampx.examples import meshes
from ampx.examples.transformer import Block, LanguageModel, cross_entropy, embed, predict

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "zero-bubble",
    "interleaved-zero-bubble",
    "zero-bubble-v",
    "dualpipe-v",
)
_PARTS = {"first", "stages", "last"}
_FIRST = ("Embed_0", "position")
_LAST = ("LayerNorm_0", "Dense_0")


class First(nn.Module):
    """What the model does before its layers."""

    vocabulary_size: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32 (batch, time) to (batch, time, width)."""
        return embed(self, tokens, self.vocabulary_size, self.width)


class Last(nn.Module):
    """What the model does after its layers."""

    vocabulary_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to (batch, time, vocabulary_size)."""
        return predict(x, self.vocabulary_size)


def divide_params(params: dict[str, Any]) -> dict[str, Any]:
    """The model's parameters as a pipeline takes them.

    Args:
      params: of a `LanguageModel`.

    Returns:
      `{"first": ..., "stages": ..., "last": ...}`: parameters by the names that they had; those of
      the layers as one tree, with a leading axis of layers.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx.examples import pipelined, transformer
      >>> model = transformer.LanguageModel(vocabulary_size=5, layers=3, width=8, heads=2)
      >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
      >>> parts = pipelined.divide_params(params)
      >>> sorted(parts["first"]), parts["stages"]["Dense_0"]["kernel"].shape
      (['Embed_0', 'position'], (3, 8, 32))
    """
    return {
        "first": {name: params[name] for name in _FIRST},
        "stages": pipelining.stack_layers(params, "Block_{}"),
        "last": {name: params[name] for name in _LAST},
    }


def join_params(tree: Any) -> Any:
    """What `divide_params` did undone, wherever it was done.

    Args:
      tree: parameters as a pipeline takes them, or a tree with such in it, as a training state has
        in its parameters and in its optimizer's moments.

    Returns:
      The same with the model's own layout. A tree without such parts is left as it is.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx.examples import pipelined, transformer
      >>> model = transformer.LanguageModel(vocabulary_size=5, layers=3, width=8, heads=2)
      >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
      >>> both = pipelined.join_params((pipelined.divide_params(params), jnp.ones(2)))
      >>> jax.tree.structure(both[0]) == jax.tree.structure(params), both[1]
      (True, Array([1., 1.], dtype=float32))
    """
    # Also inside of an optimizer's state, whose moments have the layout of the parameters.
    return _map_parts(_join_parts, lambda leaf: leaf, tree)


def _join_parts(parts: dict[str, Any]) -> dict[str, Any]:
    layers = pipelining.unstack_layers(parts["stages"])
    blocks = {f"Block_{number}": layer for number, layer in enumerate(layers)}
    return {**parts["first"], **blocks, **parts["last"]}


def _map_parts(on_parts: Callable[[Any], Any], on_leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Maps parameters that are in a pipeline's layout as a whole, and all else leaf by leaf."""

    def is_parts(node: Any) -> bool:
        return isinstance(node, dict) and set(node) == _PARTS

    return jax.tree.map(
        lambda node: on_parts(node) if is_parts(node) else on_leaf(node), tree, is_leaf=is_parts
    )


def check_layers(layers: int, schedule: pipelining.Schedule) -> None:
    """Checks that the stages of a schedule can have equally many layers.

    Args:
      layers: of the model.
      schedule: the schedule.

    Raises:
      ValueError: if they cannot.

    Examples:
      >>> from ampx import pipelining
      >>> from ampx.examples import pipelined
      >>> pipelined.check_layers(2, pipelining.interleaved(num_stages=2, num_microbatches=4))
      Traceback (most recent call last):
      ValueError: interleaved has 4 stages on 2 devices, and 2 layers have no 4 equal parts: give
      layers=4 or another multiple
    """
    stages, devices = schedule.num_stages, schedule.num_devices
    if layers % stages:
        raise ValueError(
            f"{schedule.name} has {stages} stages on {devices} devices, and {layers} layers have "
            f"no {stages} equal parts: give layers={stages} or another multiple"
        )


def make_gradients(
    model: nn.Module,
    schedule: pipelining.Schedule,
    mesh: Mesh,
    policy: ampx.Recipe | ampx.PrecisionSchedule | None = None,
) -> pipelining.PipelineGradients:
    """The loss of `transformer.make_loss` and its gradients, over the stages of a pipeline.

    Args:
      model: a `LanguageModel`.
      schedule: what each device does when.
      mesh: has an axis `stage`, and maybe an axis `data` that batches are split over.
      policy: the precision, or a schedule of precisions.

    Returns:
      A function for `ampx.train_step`, of parameters as `divide_params` gives them and of windows.

    Raises:
      TypeError: for a model of another kind.
      ValueError: if the schedule's stages cannot have equally many layers.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx import pipelining
      >>> from ampx.examples import meshes, pipelined, transformer
      >>> model = transformer.LanguageModel(vocabulary_size=5, layers=2, width=8, heads=2)
      >>> windows = jnp.zeros((4, 9), jnp.int32)
      >>> params = model.init(jax.random.key(0), windows[:, :-1])["params"]
      >>> grads_of = pipelined.make_gradients(
      ...     model, pipelining.one_f_one_b(1, 2), meshes.make_mesh("stage=1")
      ... )
      >>> result = jax.jit(grads_of)(pipelined.divide_params(params), windows)
      >>> expected = transformer.make_loss(model)(params, windows)
      >>> bool(abs(result.loss - expected) < 1e-6)
      True
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"a pipeline needs a LanguageModel, got {type(model).__name__}")
    check_layers(model.layers, schedule)
    # Modules of their own for the ends. They name their parameters as the model does, because linen
    # numbers submodules by class in the order in which they are made.
    embedding = First(model.vocabulary_size, model.width)
    block, head = Block(model.heads), Last(model.vocabulary_size)

    def first(params: Any, shared: Any, windows: jax.Array, key: Any) -> Any:
        return embedding.apply({"params": params}, windows[:, :-1])

    def stage(params: Any, x: jax.Array, key: Any) -> Any:
        return block.apply({"params": params}, x)

    def last(params: Any, shared: Any, x: jax.Array, windows: jax.Array, key: Any) -> jax.Array:
        return cross_entropy(head.apply({"params": params}, x), windows)

    return pipelining.value_and_grad(
        first=first,
        stage=stage,
        last=last,
        schedule=schedule,
        axis_name=meshes.STAGE,
        data_axes=meshes.DATA if meshes.DATA in mesh.shape else (),
        mesh=mesh,
        policy=policy,
        normalize="mean",
    )


def spread(
    step: ampx.TrainStep, params: Any, mesh: Mesh
) -> tuple[Callable[[Any, Any], Any], ampx.TrainState]:
    """Makes a state whose layers and their moments are divided over the stages, and keeps it so.

    Args:
      step: made from `make_gradients`.
      params: the first parameters, as `divide_params` gives them.
      mesh: the mesh.

    Returns:
      A function `(state, batch) -> (state, report)`, not yet jitted, and the first state.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> from ampx import pipelining
      >>> from ampx.examples import meshes, pipelined, transformer
      >>> model = transformer.LanguageModel(vocabulary_size=5, layers=2, width=8, heads=2)
      >>> mesh, windows = meshes.make_mesh("stage=1"), jnp.zeros((4, 9), jnp.int32)
      >>> params = model.init(jax.random.key(0), windows[:, :-1])["params"]
      >>> grads_of = pipelined.make_gradients(model, pipelining.one_f_one_b(1, 2), mesh)
      >>> step = ampx.train_step(grads_of, optax.sgd(0.1))
      >>> step, state = pipelined.spread(step, pipelined.divide_params(params), mesh)
      >>> state, report = jax.jit(step)(state, windows)
      >>> state.params["stages"]["Dense_0"]["kernel"].shape, bool(report.overflow)
      ((2, 8, 32), False)
    """
    grads_of: Any = step.grads_of
    # Layers are divided over the stage axis, and so are their moments. The rest of the state, such
    # as step counts and the loss scale, is on every device.
    everywhere = NamedSharding(mesh, P())
    shardings = _map_parts(
        lambda parts: grads_of.shardings(parts, mesh),
        lambda leaf: everywhere,
        jax.eval_shape(step.init, params),
    )

    def kept(state: Any, batch: Any) -> Any:
        state, report = step(state, batch)
        # Without this the compiler might choose another sharding for the result, and the next step
        # would be compiled again for it.
        return lax.with_sharding_constraint(state, shardings), report

    return kept, jax.jit(step.init, out_shardings=shardings)(params)
