"""Every transformation on every kind of mesh, held against the same step on one device.

    python tests/mesh_cells.py

runs all cells and prints the table of the guide "Meshes". A cell is

    a transformation    those of `sharded_transforms`, in a train step with a dynamic loss scale;
                        and the ways of writing a step by hand
    a kind of mesh      Auto, Explicit, Manual (`shard_map`), Manual without `check_vma`
    axes                data; data x model; data x fsdp x model

It is one compiled program, which takes three steps: a good one, one in which a single element of
a gradient overflows on a single device, and a good one. Loss, norm, verdict, scale and parameters
are those of the undivided step.

The model has two matrices and a bias. Along "model" its hidden units are divided, along "fsdp" the
matrices, which become whole before they are used. Rows are divided along "data" and "fsdp". Under
plain `jit` there is no reason to hold matrices whole along "data", so they are divided there, too.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collective_order import find_unordered_collectives
from helpers import make_mesh, same_everywhere
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_transforms import OPTIMIZERS, TRANSFORMS, make

import ampx
from ampx import fused

KINDS = ("Auto", "Explicit", "Manual", "Manual, unchecked")
# The sizes of the axes, those that divide rows, and how parameters lie under `jit`, in `shard_map`.
LAYOUTS = {
    "data": (
        {"data": 4},
        ("data",),
        {"up": P("data"), "down": P(None, "data"), "bias": P()},
        {"up": P(), "down": P(), "bias": P()},
    ),
    "data x model": (
        {"data": 2, "model": 2},
        ("data",),
        {"up": P("data", "model"), "down": P("model", "data"), "bias": P()},
        {"up": P(None, "model"), "down": P("model"), "bias": P()},
    ),
    "data x fsdp x model": (
        {"data": 2, "fsdp": 2, "model": 2},
        ("data", "fsdp"),
        {"up": P(("fsdp", "data"), "model"), "down": P("model", "fsdp"), "bias": P("fsdp")},
        {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "bias": P()},
    ),
}
AXES = tuple(LAYOUTS)
ROWS, WIDTH, HIDDEN = 8, 8, 16
INIT_SCALE = 2.0**16


def apply_by_hand(tx, result, state, params, axes):
    """`fused.apply` after a reduction of its own."""
    grads = result.grads
    if axes:
        reduction = ampx.all_reduce(**axes, op="sum")
        grads = reduction.update(grads, reduction.init(params), params)[0]
    given = {"model_axes": axes["model_axes"]} if axes else {}
    params, state, report = fused.apply(tx, grads, state, params, max_norm=0.5, **given)
    return params, state, report.overflow, report.global_norm


def update_by_hand(tx, result, state, params, axes):
    """`tx.update`, with a reduction inside of `tx` where one is needed."""
    given = {"model_axes": axes["model_axes"]} if axes else {}
    updates, state = tx.update(result.grads, state, params, **given)
    return ampx.apply_updates(params, updates), state, ampx.is_skipped(state), None


# Ways of writing a step by hand: what is inside the loss scale, and the function that updates.
BY_HAND = {
    "dynamic_loss_scale": (lambda: optax.adamw(0.1), update_by_hand),
    "all_reduce": (lambda: optax.sgd(0.1, momentum=0.9), update_by_hand),
    "fused.apply": (lambda: fused.lamb(0.1), apply_by_hand),
}
CLIPS = {"train_step, max_grad_norm": lambda: optax.adamw(0.1)}
HAS_SCALE = (
    "dynamic_loss_scale",
    "follow_schedule",
    "loss_scale",
    "multi_steps, scale inside",
    "static_loss_scale",
)
SCALE_OVER_DATA = functools.partial(ampx.dynamic_loss_scale, axis_names="data")
NAMES = sorted({*TRANSFORMS, *OPTIMIZERS, *BY_HAND, *CLIPS})


def make_params(name):
    dtype = jnp.bfloat16 if any(word in name for word in ("master", "rounding")) else jnp.float32
    # 8-bit moments are for arrays of 4096 numbers and more, in blocks of 256.
    rows, hidden = (16, 1024) if "int8" in name else (WIDTH, HIDDEN)
    draw = np.random.default_rng(0).normal
    shapes = {"up": (rows, hidden), "down": (hidden, WIDTH), "bias": (WIDTH,)}
    return {key: np.asarray(draw(size=s) / 4, dtype) for key, s in shapes.items()}


def make_batches(params):
    """Three batches; in the second the gradient of the last element of `up` overflows, if scaled.

    It does so on the device alone that has the last row and that element.
    """
    draw = np.random.default_rng(1).normal
    place = np.zeros(params["up"].shape, np.float32)
    place[-1, -1] = 1
    batches = []
    for number in range(3):
        spike = np.zeros(ROWS, np.float32)
        spike[-1] = 1e35 if number == 1 else 0
        x = draw(size=(ROWS, params["up"].shape[0])).astype(np.float32)
        batches.append({"x": x, "spike": spike, "place": place})
    return batches


def loss_fn(kind, axes, params, batch):
    """The mean over the rows that are here; `kind` is None for the undivided step."""
    up, down, bias = (params[key].astype(jnp.float32) for key in ("up", "down", "bias"))
    place, has_model = batch["place"], "model" in axes
    product, add = jnp.matmul, lambda part: part
    if kind == "Explicit":  # there FSDP says where parameters become whole; on Auto axes XLA does
        rows, model = LAYOUTS[" x ".join(axes)][1], "model" if has_model else None
        up, place = (jax.reshard(a, P(None, model)) for a in (up, place))
        down, bias = jax.reshard(down, P(model)), jax.reshard(bias, P())
        product = functools.partial(jnp.matmul, out_sharding=P(rows))
    if kind is not None and kind.startswith("Manual"):
        if "fsdp" in axes:
            up = jax.lax.all_gather(up, "fsdp", axis=0, tiled=True)
            down = jax.lax.all_gather(down, "fsdp", axis=1, tiled=True)
        if has_model and kind == "Manual":
            add = functools.partial(jax.lax.psum, axis_name="model")
        elif has_model:

            def add(part):  # unchecked, JAX would sum the gradients, too, and count them twice
                return part + jax.lax.stop_gradient(jax.lax.psum(part, "model") - part)

    out = add(product(jnp.tanh(batch["x"] @ up), down)) + bias
    return jnp.mean(out**2) + add(jnp.sum(up * place)) * jnp.mean(batch["spike"])


BATCH_AXES = {"x": 0, "spike": 0, "place": None}


class Report(NamedTuple):
    """What a step tells; `norm` is None where nobody measures it."""

    loss: Any
    overflow: Any
    scale: Any
    norm: Any


def make_step(name, kind=None, axes=()):
    """Parameters to a state, and a step from state and batch to state and `Report`."""
    of_kind = functools.partial(loss_fn, kind, axes)
    mapped = {}
    if kind is not None and kind.startswith("Manual"):
        _, rows, _, specs = LAYOUTS[" x ".join(axes)]
        mapped = {"axis_name": rows, "model_axes": None if kind == "Manual" else specs}
    if name in BY_HAND:
        make_inner, update = BY_HAND[name]
        inner, named = make_inner(), {}
        if update is update_by_hand and (mapped or (name == "all_reduce" and kind)):
            reduction = ampx.all_reduce(**(mapped or {"axis_name": "data"}), op="sum")
            named = {"axis_names": mapped.get("axis_name", "data")}
            inner = optax.chain(reduction, inner)
        tx = ampx.dynamic_loss_scale(inner, init_scale=INIT_SCALE, **named)
        rows = {"axis_name": mapped["axis_name"]} if mapped else {}
        grads_of = ampx.value_and_grad(of_kind, batch_axes=BATCH_AXES, **rows)

        def take(state, batch):
            params, state = state
            scale = ampx.current_loss_scale(state)
            result = grads_of(params, batch, loss_scale=scale)
            params, state, overflow, norm = update(tx, result, state, params, mapped)
            return (params, state), Report(result.loss, overflow, scale, norm)

        return tx, lambda params: (params, tx.init(params)), take
    inner = CLIPS[name]() if name in CLIPS else make_inside(name, kind)
    scale = "dynamic" if name != "zero1" or kind is None else SCALE_OVER_DATA
    step = ampx.train_step(
        of_kind,
        inner,
        loss_scale=None if name.startswith((*HAS_SCALE, "no_loss_scale")) else scale,
        max_grad_norm=0.5 if name in CLIPS else None,
        batch_axes=BATCH_AXES,
        **mapped,
    )

    def take(state, batch):
        state, report = step(state, batch)
        own = (report.loss, report.overflow, report.loss_scale, report.global_norm)
        return state, Report(*own)

    return step.tx, step.init, take


def make_inside(name, kind):
    # zero1 gives the numbers of what it is around.
    return optax.adamw(0.1) if name == "zero1" and kind is None else make(name)


def params_of(state):
    return state[0] if isinstance(state, tuple) and len(state) == 2 else state.params


class Outcome(NamedTuple):
    """What three steps have come to: reports of each, parameters before and after each."""

    reports: list[Report]
    params: list[Any]


def take_steps(take, state, batches):
    reports, params = [], [params_of(state)]
    for batch in batches:
        state, report = take(state, batch)
        reports.append(report)
        params.append(params_of(state))
    return Outcome(reports, params)


@functools.cache
def undivided(name):
    """The outcome on one device."""
    params = make_params(name)
    _, init, take = make_step(name)
    return jax.device_get(take_steps(jax.jit(take), init(params), make_batches(params)))


class Cell(NamedTuple):
    """One program on a mesh, compiled.

    Attributes:
      compiled: from state and batch to state and `Report`.
      state: the first.
      batches: three.
    """

    compiled: Any
    state: Any
    batches: Any


def compile_cell(name, kind, axes):
    """The program of a transformation on a mesh.

    Raises:
      Whatever ampx refuses it with.
    """
    tx, init, take = make_step(name, kind, tuple(LAYOUTS[axes][0]))
    divided = name == "zero1" and kind.startswith("Manual")
    return lay_out(make_params(name), init, take, kind, axes, tx if divided else None)


def lay_out(params, init, take, kind, axes, zero1=None):
    """Compiles a step for a mesh, where `zero1` divides its own state if it is given."""
    sizes, rows, lies, mapped = LAYOUTS[axes]
    is_mapped = kind.startswith("Manual")
    specs = mapped if is_mapped else lies
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes), "Auto" if is_mapped else kind)
    # In `shard_map` the place of the overflow is divided as the matrix is after it was gathered.
    of_place = P(None, "model" if "model" in sizes else None) if is_mapped else specs["up"]
    of_batch = {"x": P(rows), "spike": P(rows), "place": of_place}

    def put(tree, specs):
        return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs)

    with jax.set_mesh(mesh):
        state = init(put(params, specs))
        batches = [put(batch, of_batch) for batch in make_batches(params)]
        if is_mapped:
            of_state = specs_of(state, specs)
            if zero1 is not None:
                of_zero1 = ampx.zero1_specs(zero1, params, mesh, model_axes=specs)
                of_state = of_state._replace(opt_state=of_zero1)
            state = put(state, of_state)
            take = jax.shard_map(
                take,
                mesh=mesh,
                in_specs=(of_state, of_batch),
                out_specs=(of_state, P()),
                check_vma=kind == "Manual",
            )
        return Cell(jax.jit(take).lower(state, batches[0]).compile(), state, batches)


def specs_of(state, specs):
    """A spec for each array of a state: that of the parameter in its path, if it is as large."""

    def spec(path, leaf):
        own = [specs[key.key] for key in path if getattr(key, "key", None) in specs]
        return own[-1] if own and jnp.ndim(leaf) >= len(own[-1]) else P()

    return jax.tree_util.tree_map_with_path(spec, state)


def run_cell(cell):
    outcome = take_steps(cell.compiled, cell.state, cell.batches)
    return jax.tree.map(same_everywhere, outcome)


def check_outcome(name, found):
    """Holds the outcome of a cell against the undivided one.

    Sums in another order: some units in the last place of float32. bfloat16 parameters have
    bfloat16 gradients, which round before they are summed in `shard_map`: by 1/512, which moves a
    step of 0.1 by less than 1e-3. And there the elements of a shard are numbered anew, so second
    moments of 8 bits are rounded by other random bits, by up to 1/32.
    """
    expected = undivided(name)
    is_half = expected.params[0]["up"].dtype == jnp.bfloat16
    rtol, atol = (1e-2, 1e-3) if is_half else (1e-5, 2e-6)
    if "stochastic" in name:  # by other random bits, too: up or down by 1/128 in each step
        rtol, atol = 0.03, 0.01
    if "int8" in name:
        rtol, atol = 0.03, 0.01  # a step is 0.1
    for number, (own, theirs) in enumerate(zip(found.reports, expected.reports, strict=True)):
        if name == "no_loss_scale" and number:
            break  # nobody skips, and all is infinite
        is_bad = number == 1 and name != "no_loss_scale"
        assert own.overflow == theirs.overflow == is_bad, f"verdict of step {number}"
        assert own.scale == theirs.scale, f"scale of step {number}"
        close(own.loss, theirs.loss, rtol, 0, f"loss of step {number}")
        assert (own.norm is None) == (theirs.norm is None)
        if own.norm is not None and number != 1:
            close(own.norm, theirs.norm, rtol, 0, f"norm of step {number}")
        for key, array in found.params[number + 1].items():
            wide = [np.asarray(a, np.float32) for a in (array, expected.params[number + 1][key])]
            close(*wide, rtol, atol, f"{key} after step {number}")
            if is_bad:
                np.testing.assert_array_equal(array, found.params[number][key])
    if name not in ("no_loss_scale", "static_loss_scale", "follow_schedule"):
        assert found.reports[2].scale == found.reports[1].scale / 2, "the scale is halved"


def close(own, theirs, rtol, atol, what):
    np.testing.assert_allclose(own, theirs, rtol=rtol, atol=atol, err_msg=what)


# What the devices of a mesh exchange in one step.

_COLLECTIVE = re.compile(
    r" = (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\((.*)"
)
_ARRAY = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")
# Where squares do not add up to a finite number, the second look of a verdict.
_SECOND_LOOK = "ampx.verdict/cond/"


class Exchange(NamedTuple):
    """What one compiled step exchanges while all is well; both sides of other branches count.

    Attributes:
      gathered: elements of arrays that become whole.
      summed: elements of arrays that are summed.
      moved: elements that change places otherwise.
      numbers: arrays of less than four elements that are summed: verdicts, norms, losses.
    """

    gathered: int
    summed: int
    moved: int
    numbers: int


def count_exchange(compiled):
    elements, numbers = {"all-gather": 0, "all-reduce": 0}, 0
    for result, opcode, rest in _COLLECTIVE.findall(compiled.as_text()):
        if _SECOND_LOOK in rest:
            continue
        for dims in _ARRAY.findall(result):
            size = math.prod(map(int, filter(None, dims.split(","))))
            if opcode == "all-reduce" and size < 4:
                numbers += 1
            else:
                elements[opcode] = elements.get(opcode, 0) + size
    gathered, summed = elements.pop("all-gather"), elements.pop("all-reduce")
    return Exchange(gathered, summed, sum(elements.values()), numbers)


@functools.cache
def exchange_of_plain(name, kind, axes):
    """What the same step exchanges with plain optax, and with `lax.psum` where one is needed."""
    tx, (sizes, rows, _, specs) = getattr(optax, name)(0.1), LAYOUTS[axes]
    of_kind = functools.partial(loss_fn, kind, tuple(sizes))

    def add(leaf, spec):
        divided = {axis for entry in spec if entry for axis in (entry,)}
        return jax.lax.psum(leaf, tuple(axis for axis in rows if axis not in divided))

    def take(state, batch):
        params, state = state
        loss, grads = jax.value_and_grad(of_kind)(params, batch)
        if kind.startswith("Manual"):
            loss = jax.lax.psum(loss, rows)
        if kind == "Manual, unchecked":  # else JAX sums them
            grads = jax.tree.map(add, grads, specs)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    cell = lay_out(make_params(name), lambda p: (p, tx.init(p)), take, kind, axes)
    return count_exchange(cell.compiled)


def check_exchange(name, kind, axes, found):
    """Nothing is gathered, summed or moved that plain optax leaves; single numbers apart."""
    plain = exchange_of_plain("adamw", kind, axes)
    if "int8" in name:  # of a larger model
        return
    if name == "zero1":  # half of an all-reduce, then the other half
        assert found.gathered > plain.gathered and found.summed < plain.summed
        return
    assert found.gathered == plain.gathered and found.moved == plain.moved
    assert found.summed <= plain.summed


def table():
    """The lines of the table in the guide; each cell is run on the way."""
    yield f"| | {' | '.join(KINDS)} |"
    yield "| --- |" + " --- |" * len(KINDS)
    for name in ("adamw", "lamb"):
        cells = [[exchange_of_plain(name, kind, axes) for axes in AXES] for kind in KINDS]
        yield as_row(f"optax.{name}", cells)
    for name in NAMES:
        yield as_row(name, [[run(name, kind, axes) for axes in AXES] for kind in KINDS])


def as_row(name, cells):
    first, _, settings = name.partition(", ")
    texts = [", ".join(str(e.numbers) if e else "refused" for e in own) for own in cells]
    texts = ["for `shard_map`" if "refused" in text else text for text in texts]
    return f"| `{first}`{settings and ', ' + settings} | {' | '.join(texts)} |"


# They reduce along mapped axes. Under plain `jit` there are none, and JAX sums gradients itself.
MAPPED = ("all_reduce", "zero1")


def run(name, kind, axes):
    """Runs a cell, checks it, and counts what it exchanges; None where ampx refuses it."""
    if name in MAPPED and not kind.startswith("Manual"):
        with pytest.raises(NameError, match="no axis 'data' is mapped here: call it inside jax.sh"):
            compile_cell(name, kind, axes)
        return None
    cell = compile_cell(name, kind, axes)
    check_outcome(name, run_cell(cell))
    assert find_unordered_collectives(cell.compiled.as_text()) == []
    exchange = count_exchange(cell.compiled)
    check_exchange(name, kind, axes, exchange)
    return exchange


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with jax.numpy_dtype_promotion("standard"):
        for line in table():
            print(line, flush=True)
