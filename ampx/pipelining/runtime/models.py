"""The functions of a model as what its stages compute.

  stage 0             first, then its layers        reads params["first"], ["shared"], ["stages"]
  stages in between   their layers                  reads params["stages"]
  the last stage      its layers, then last         reads params["stages"], ["last"], ["shared"]

A random key is folded with the micro-batch, then with 0 for `first`, n + 1 for layer n of N, and
N + 1 for `last`. None of these numbers depends on the stage, so masks of dropout are the same for
every schedule. Stages that differ count as one layer each.

Random keys among the parameters, as nnx modules hold them, are the same in every call. So each is
folded with a number that is drawn by the key of the call: what they make differs between
micro-batches and steps, and does not depend on the stage either.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ampx.accumulation.normalization import Normalize, as_loss_and_weight, unpack_output
from ampx.checking import check_choice
from ampx.function_checks import check_callable, refuse_lazy
from ampx.jaxprs import folds, reading
from ampx.mesh_axes import mark_varying, varying_axes
from ampx.pipelining.runtime.assembly import StageKind
from ampx.pipelining.runtime.buffers import as_varying_as, is_key
from ampx.pipelining.runtime.layouts import StackedLayers
from ampx.pipelining.runtime.stage_programs import Compute, StageInputs, StageOutputs
from ampx.pipelining.schedules.intervals import Edge
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.ticks import Stash
from ampx.precision.opt_levels import Recipe
from ampx.trees import at_path

# Forward and backward are in different branches, often in different ticks. XLA cannot merge what is
# recomputed with the first computation, so the barriers against that would only cost.
_recompute = functools.partial(jax.checkpoint, prevent_cse=False)


@dataclasses.dataclass(frozen=True)
class Model:
    """The functions that `ampx.pipelining.value_and_grad` is given, and how they are to be run.

    Attributes:
      first: what comes before the layers.
      stage: one layer, or a function for each stage.
      last: what comes after the layers, with the loss.
      schedule: gives the stages.
      recipe: the precision, or None.
      normalize: what `last` returns.
      has_aux: whether `last` returns auxiliary output.
      has_aux_loss: whether layers return a loss of their own.
      stash: what is kept between forward and backward.
      skips: by name, (source, target) of connections between stages that are not neighbours.
    """

    first: Callable[..., Any]
    stage: Callable[..., Any] | Sequence[Callable[..., Any]]
    last: Callable[..., Any]
    schedule: Schedule
    recipe: Recipe | None
    normalize: Normalize
    has_aux: bool
    has_aux_loss: bool
    stash: Stash | Callable[..., Any]
    skips: Mapping[str, Edge]

    def __post_init__(self) -> None:
        for name, arguments in _ARGUMENTS.items():
            given = getattr(self, name)
            for function in given if isinstance(given, Sequence) else [given]:
                check_callable(name, function, f"{name}({', '.join(arguments)})")
            _check_signature(name, given)
        if callable(self.stash):
            refuse_lazy("stash", self.stash)
        else:
            check_choice("stash", self.stash, get_args(Stash))
        count = self.schedule.num_stages
        if not callable(self.stage) and len(self.stage) != count:
            raise ValueError(
                f"the schedule has {count} stages, and stage is a sequence of {len(self.stage)}: "
                "give one function for each stage"
            )
        if self.skips and not self.is_separate:
            raise ValueError("skips are between stages that differ: give stage as a sequence")
        for name, edge in self.skips.items():
            is_pair = isinstance(edge, Sequence) and len(edge) == 2
            if not is_pair or not all(isinstance(stage, numbers.Integral) for stage in edge):
                raise TypeError(
                    f"skips has {edge!r} for {name!r}, and needs a pair of numbers of stages, "
                    "(source, target), such as (0, 3). What several stages read goes to the first "
                    "of them by a skip, and from there in x, which may be any tree"
                )
            source, target = edge
            if not 0 <= source < target < count:
                raise ValueError(
                    f"the skip {name!r} goes from stage {source} to {target}: it must go forward, "
                    f"between stages 0 and {count - 1}"
                )

    @property
    def is_separate(self) -> bool:
        """Whether each stage has a function and a tree of parameters of its own."""
        return not callable(self.stage)

    @property
    def wires(self) -> list[list[Edge]]:
        """The edges between stages: to the next one, and those that skip some."""
        count = self.schedule.num_stages
        return [[(s, s + 1) for s in range(count - 1)], *([edge] for edge in self.skips.values())]

    def kinds(self, layout: Any) -> list[StageKind]:
        """Groups stages that compute alike, with what they compute."""
        stages: dict[Any, list[int]] = {}
        for stage in range(self.schedule.num_stages):
            stages.setdefault(self._describe_kind(stage, layout), []).append(stage)
        # One function for stages of all kinds, so that a layer is traced once for all of them.
        layers = None if self.is_separate else self._make_layers(layout)
        return [
            StageKind(
                tuple(group),
                self.parts_of(group[0]),
                self._make_compute(group[0], layout, layers or self._make_separate(group[0])),
                self.kept,
            )
            for group in stages.values()
        ]

    @property
    def kept(self) -> Stash:
        """`stash`, with a policy of `jax.checkpoint` counted as the one that recomputes less."""
        return "inputs" if self.stash == "inputs" else "residuals"

    def _describe_kind(self, stage: int, layout: Any) -> Any:
        """Describes what two stages have in common if they compute alike."""
        if self.is_separate:
            return stage
        # What can differ between stages of equal layers: both ends, and how many layers they have.
        return stage == 0, stage == self.schedule.num_stages - 1, layout.counts[stage]

    def parts_of(self, stage: int) -> tuple[str, ...]:
        """The parts of the parameters that a stage reads."""
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        used = {"first": is_first, "stages": True, "last": is_last, "shared": is_first or is_last}
        return tuple(part for part, is_used in used.items() if is_used)

    def _make_compute(self, stage: int, layout: Any, own: Callable[..., Any]) -> Compute:
        """Makes the function of a stage that `trace_stage` traces; `own` is that of its layers."""
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        number_of_layers = self.schedule.num_stages if self.is_separate else sum(layout.counts)
        first, last = self._at_precision(self.first), self.last
        if self.recipe is not None:
            last = functools.partial(self.recipe.call, last)
        # `stash` is about the layers. What the ends would keep, such as logits, can be larger than
        # all of that, so they are recomputed in any case.
        if self.stash != "inputs":
            first, last = _recompute(first), _recompute(last)

        def compute(inputs: StageInputs) -> StageOutputs:
            params, key = inputs.params, inputs.key
            x = inputs.received[0]
            if is_first:
                own_key = _fold_in(key, 0)
                ends = _vary_keys((params["first"], params["shared"]), own_key)
                x = first(*ends, inputs.microbatch, own_key)
                # `first` may return a constant, which is the same on all devices. Layers would mix
                # it with what differs, and the gradient of that step is a sum over devices.
                x = mark_varying(x, sorted(varying_axes(inputs.stage)))
            x, skipped, extra_loss = own(params["stages"], x, inputs)
            if not is_last:
                return StageOutputs((x, *skipped), extra_loss)
            key = _fold_in(key, number_of_layers + 1)
            ends = _vary_keys((params["last"], params["shared"]), key)
            out = last(*ends, x, inputs.microbatch, key)
            value, aux, _ = unpack_output(out, self.has_aux, False, "last")
            _check_aux(aux)
            loss, weight = as_loss_and_weight(value, self.normalize, "last")
            _check_not_summed(loss, inputs.microbatch)
            loss = loss if extra_loss is None else loss + extra_loss.astype(loss.dtype)
            return StageOutputs((None, *skipped), loss, weight, aux)

        return _recompute(compute) if self.stash == "inputs" else compute

    def _at_precision(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun if self.recipe is None else functools.partial(self.recipe.call_part, fun)

    def _with_stash(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return _recompute(fun, policy=self.stash) if callable(self.stash) else fun

    def _make_layers(self, layout: StackedLayers) -> Callable[..., Any]:
        """Makes a function of all layers of a stage, one after the other."""
        assert callable(self.stage)
        call = self._at_precision(self.stage)

        def layer(params: Any, x: Any, key: Any, number: jax.Array) -> Any:
            key = _fold_in(key, number + 1)
            out = call(_vary_keys(params, key), x, key)
            new, loss = _unpack_loss(out) if self.has_aux_loss else (out, None)
            _check_same_type(x, new, self.recipe)
            # A layer that ends in a `psum` returns a value that is the same on all devices, and was
            # given one that differs. The carry of a scan has one type, so it is marked.
            return mark_varying(new, sorted(varying_axes(number))), loss

        layer = self._with_stash(layer)
        # `jit` is a cache here: layers that are written out are traced once for all of them. The
        # calls are opened again in `stage_programs`.
        traced_once = jax.jit(layer)

        def own(params: Any, x: Any, inputs: StageInputs) -> Any:
            # int32 scalar, the number of this stage's first layer in the model: looked up, since
            # the program is the same for all stages of a kind.
            start = jnp.asarray(layout.first_layer)[inputs.stage]

            def body(x: Any, layer_and_number: Any) -> Any:
                return layer(layer_and_number[0], x, inputs.key, layer_and_number[1])

            if isinstance(params, list):
                losses = []
                # A stage may have no layers.
                asks = params and _asks_what_is_differentiated(
                    traced_once, params[0], x, inputs.key, start
                )
                run = layer if asks else traced_once
                for place, params_of_layer in enumerate(params):
                    x, loss = run(params_of_layer, x, inputs.key, start + place)
                    losses.append(loss)
            else:
                number = jax.tree.leaves(params)[0].shape[0]
                x = _mark_like_result(body, x, params, start)
                x, losses = lax.scan(
                    body, x, (params, start + jnp.arange(number, dtype=start.dtype))
                )
            return x, [None] * len(self.skips), _sum_losses(losses) if self.has_aux_loss else None

        return own

    def _make_separate(self, stage: int) -> Callable[..., Any]:
        """Makes the function of one stage, with what it takes from skips and gives to them."""
        assert not callable(self.stage)
        gives = [name for name, (source, _) in self.skips.items() if source == stage]
        takes = [name for name, (_, target) in self.skips.items() if target == stage]
        call = self._with_stash(self._at_precision(self.stage[stage]))

        def own(params: Any, x: Any, inputs: StageInputs) -> Any:
            # Wire 0 joins neighbours; the others are the skips, in the order of `self.skips`. A
            # stage returns x, then its skips if it gives any, then its loss if it has one.
            arrived = dict(zip(self.skips, inputs.received[1:], strict=True))
            args = [{name: arrived[name] for name in takes}] if takes else []
            key = _fold_in(inputs.key, stage + 1)
            out = call(_vary_keys(params, key), x, key, *args)
            x, *rest = out if gives or self.has_aux_loss else (out,)
            given = rest.pop(0) if gives else {}
            skipped = [given[name] if name in gives else None for name in self.skips]
            return x, skipped, _sum_losses(rest) if self.has_aux_loss else None

        return own


# What each function is called with. It is checked by `inspect` before anything is traced: a wrong
# number of arguments would otherwise fail deep inside of a traced stage.
_ARGUMENTS = {
    "first": ("params", "shared", "microbatch", "key"),
    "stage": ("layer_params", "x", "key"),
    "last": ("params", "shared", "x", "microbatch", "key"),
}


def _check_signature(name: str, function: Any) -> None:
    if not callable(function):
        return  # stages that differ: those at the end of a skip take one argument more
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*_ARGUMENTS[name])
    except TypeError as error:
        raise TypeError(
            f"{name} is called as {name}({', '.join(_ARGUMENTS[name])}), and takes {signature}: "
            "let it take all of these, also those that it does not use"
        ) from error


def _asks_what_is_differentiated(layer: Callable[..., Any], *args: Any) -> bool:
    """Whether a derivative rule in a layer may keep something else where an input has no gradient.

    One trace cannot stand for all layers then: what the first one takes may have no gradient, and
    JAX reads what one of two calls has kept by the tree of the other.
    """
    jaxpr, _ = reading.trace(layer, *args)
    return any(
        eqn.primitive.name == "custom_vjp_call" and eqn.params["symbolic_zeros"]
        for eqn, _ in folds.equations_inside(jaxpr)
    )


def _mark_like_result(body: Callable[..., Any], x: Any, params: Any, start: jax.Array) -> Any:
    """Marks what the first layer takes as different between devices wherever its result is."""
    # The carry of a scan needs one type. A layer may make a value vary over an axis of its own,
    # such as a tensor-parallel one over which its weights are divided. Where the number of the
    # layer varies over all mapped axes already, there is no such axis.
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if set(manual) <= varying_axes(start):
        return x
    first = jax.tree.map(lambda leaf: leaf[0], params)
    given = jax.make_jaxpr(lambda *args: body(args[0], args[1:])[0])(x, first, start).out_avals
    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, map(as_varying_as, leaves, given))


def _unpack_loss(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            f"has_aux_loss=True: stage must return a tuple (x, loss), got {type(out).__name__}"
        )
    return out


def _check_same_type(taken: Any, given: Any, recipe: Recipe | None) -> None:
    def described(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)

    if described(given) == described(taken):
        return
    cause = ""
    half = None if recipe is None else recipe.policy.compute_dtype
    pair = [{jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)} for tree in (taken, given)]
    if half in (jnp.float16, jnp.bfloat16) and any(half in dtypes for dtypes in pair):
        cause = (
            f" The policy casts to {jnp.dtype(half)}, and a module with a dtype of its own, such "
            "as nn.Dense(8, dtype=jnp.float32), does not follow it: leave that dtype out, or let "
            "stage return y.astype(x.dtype)."
        )
    raise TypeError(
        f"stage must return what it takes, of the same shapes and dtypes: it takes "
        f"{described(taken)} and returns {described(given)}.{cause} What first returns is what the "
        "first layer takes. If stage returns a loss besides x, give has_aux_loss=True"
    )


def _check_not_summed(loss: jax.Array, microbatch: Any) -> None:
    """Refuses a loss of all devices, where types tell it: it would be divided by them once more."""
    if summed := sorted(varying_axes(microbatch) - varying_axes(loss)):
        raise ValueError(
            f"the loss that last returns is the same on all devices along {summed}, over which the "
            "pipeline sums it: leave the pmean or psum out of last, and return the loss of the "
            "rows of this device"
        )


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.bool_):
            raise TypeError(
                f"the auxiliary output{at_path(path)} is bool and has no mean or "
                "sum: convert it with .astype(jnp.float32)"
            )


def _fold_in(key: jax.Array | None, number: Any) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _vary_keys(params: Any, key: jax.Array | None) -> Any:
    """Folds each random key among parameters with a number that the key of the call draws."""
    if key is None or not any(map(is_key, jax.tree.leaves(params))):
        return params
    number = jax.random.bits(key, dtype=jnp.uint32)

    def fold(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        folded = jax.vmap(lambda one: jax.random.fold_in(one, number))(leaf.reshape(-1))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold, params)


def _sum_losses(losses: Any) -> jax.Array:
    if isinstance(losses, list):
        if not losses:  # a stage without layers
            return jnp.zeros((), jnp.float32)
        losses = jnp.stack(losses)
    return jnp.sum(losses).astype(jnp.float32)
