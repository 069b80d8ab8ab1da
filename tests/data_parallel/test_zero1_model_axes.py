"""ZeRO-1 of parameters that are divided over further axes: optax on whole ones, and no more bytes.

Gradients are made of numbers and not of a model, so that the reference needs no mesh: optax updates
the undivided parameters on one device. One program updates with all optimizers at once.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx.data_parallel.shard_layouts import ShardLayout, find_common_layout
from ampx.mesh_axes import axes_of_spec

SPECS = {
    "columns": P(None, "model"),
    "rows": P("model"),  # a part has 3 rows, which "data" does not divide, and 8 columns
    "bias": P("model"),  # divided over "model" and "data" along the same axis
    "stages": P("model"),  # a part of it is whole on all devices along "data"
    "norm": P(),
    "scale": None,
}
SHAPES = {
    "columns": (8, 12),
    "rows": (6, 8),
    "bias": (16,),
    "stages": (2, 3, 5),
    "norm": (8,),
    "scale": (),
}
THREE = SPECS | {
    "columns": P("stage", "model"),
    "rows": P("model", "stage"),
    "bias": P(("stage", "model")),
    "stages": P("stage"),
}
# The batch is divided over "data" and "expert", and zero1 divides over both.
EXPERTS = {
    "columns": P(None, "expert"),  # a part is divided over "data" in addition
    "rows": P("expert"),
    "bias": P(("data", "expert")),  # nothing is left to divide: each device has its own
    "stages": P("expert"),  # a part is whole on all devices along "data", which sum its gradient
    "norm": P(),
    "scale": None,
}
NAMES = {name: "model" if spec else None for name, spec in SPECS.items()}
RANDOM = np.random.default_rng(0)
PARAMS = {name: RANDOM.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
# Four rows of gradients a step, divided over "data": their mean is what the reference takes.
GRADS = [
    {name: RANDOM.normal(size=(4, *s)).astype(np.float32) for name, s in SHAPES.items()}
    for _ in range(3)
]


def chain(transformation):
    return optax.chain(transformation, optax.sgd(0.1, momentum=0.9))


QUICK = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
}
# Any axis of an array may be the one that is divided.
SLOW = QUICK | {
    "masters": ampx.master_weights(chain(optax.clip_by_global_norm(0.5))),
    # Its mean divides by the number of elements of the whole.
    "rms": chain(optax.clip_by_block_rms(0.2)),
    # Over calls it adds up shards: a call that is not due, one that is, and one more.
    "multi_steps": ampx.multi_steps(chain(optax.clip_by_global_norm(0.5)), 2),
    # Zeros that come whole out of one branch, and a verdict of all parts.
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}
# They sum over some axes of an array, and so must know which of them is divided.
BY_AXIS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "unitwise": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
}
STAGED = QUICK | {"masters": SLOW["masters"]}
SOME = QUICK | {"masters": SLOW["masters"]} | BY_AXIS


def specs_of(tree):
    return jax.tree.map(lambda spec: spec or P(), tree, is_leaf=lambda x: x is None)


class Sharded:
    """A program on a mesh that updates with several optimizers, and its first state."""

    def __init__(self, sizes, check_vma, model_axes, inners, specs=SPECS, axes=("data",)):
        self.mesh = make_mesh(tuple(sizes.values()), tuple(sizes))
        txs = {
            name: ampx.dynamic_loss_scale(
                ampx.zero1(inner, axes, model_axes=model_axes, bucket_bytes=128),
                axis_names=tuple(sizes),
                init_scale=2.0,
            )
            for name, inner in inners.items()
        }
        self.specs = {
            name: ampx.zero1_specs(tx, PARAMS, self.mesh, axes, model_axes=specs)
            for name, tx in txs.items()
        }
        of_params = specs_of(specs)
        # A gradient has rows from each device that holds the same part. The mean over the devices
        # of all axes divides by those, too, along which the parts differ.
        own = {k: [a for a in axes if a in axes_of_spec(spec)] for k, spec in of_params.items()}
        others = {k: tuple(a for a in axes if a not in own[k]) for k in own}
        of_grads = {k: P(others[k] or None, *spec) for k, spec in of_params.items()}
        factors = {k: 2 * math.prod(sizes[a] for a in own[k]) for k in own}
        self.state = {name: tx.init(PARAMS) for name, tx in txs.items()}
        self.params = dict.fromkeys(txs, PARAMS)

        def step(params, state, grads):
            grads = {k: factors[k] * jnp.mean(g, 0) for k, g in grads.items()}
            results = {}
            for name, tx in txs.items():
                updates, new = tx.update(grads, state[name], params[name])
                results[name] = ampx.apply_updates(params[name], updates), new
            return {k: v[0] for k, v in results.items()}, {k: v[1] for k, v in results.items()}

        of_all = dict.fromkeys(txs, of_params)
        self.step = jax.jit(
            jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=(of_all, self.specs, of_grads),
                out_specs=(of_all, self.specs),
                check_vma=check_vma,
            )
        )

    def train(self, grads, params=None, state=None):
        params, state = params or self.params, state or self.state
        for each in grads:
            params, state = self.step(params, state, each)
        return params, state


@functools.cache
def sharded(kind):
    """Programs that several tests share; each is compiled once."""
    sizes, batch = {"data": 2, "model": 2}, {"data": 2, "expert": 2}
    return {
        "names": lambda: Sharded(sizes, False, NAMES, QUICK),
        "types, all": lambda: Sharded(sizes, True, None, SLOW),
        "three axes": lambda: Sharded(sizes | {"stage": 2}, True, None, STAGED, THREE),
        "three axes, specs": lambda: Sharded(sizes | {"stage": 2}, False, THREE, STAGED, THREE),
        "experts": lambda: Sharded(batch, False, EXPERTS, STAGED, EXPERTS, tuple(batch)),
        "experts, types": lambda: Sharded(batch, True, EXPERTS, QUICK, EXPERTS, tuple(batch)),
        "types and specs": lambda: Sharded(sizes, True, SPECS, BY_AXIS),
        "specs": lambda: Sharded(sizes, False, SPECS, SOME),
        "other mesh": lambda: Sharded({"data": 4, "model": 1}, False, SPECS, SOME),
    }[kind]()


@functools.cache
def expected(names):
    """Parameters and states after three steps of optax on one device, and the last norm."""
    inners = {name: (SLOW | BY_AXIS)[name] for name in names}

    @jax.jit
    def step(params, state, grads):
        grads = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
        results = {}
        for name, tx in inners.items():
            updates, new = tx.update(grads, state[name], params[name])
            results[name] = ampx.apply_updates(params[name], updates), new
        params, state = ({k: v[i] for k, v in results.items()} for i in (0, 1))
        return params, state, optax.tree.norm(grads)

    params = dict.fromkeys(inners, PARAMS)
    state = {name: tx.init(PARAMS) for name, tx in inners.items()}
    for grads in GRADS:
        params, state, norm = step(params, state, grads)
    return params, state, norm


def assert_close(tree, like):
    assert jax.tree.structure(tree) == jax.tree.structure(like)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for (path, a), b in zip(paths, jax.tree.leaves(like), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))


# Three axes and experts meet types here and specs there; with `--whole` each meets both.
@pytest.mark.slow_but("names")
@pytest.mark.whole("types and specs", "specs", "three axes", "three axes, specs", "experts, types")
@pytest.mark.parametrize(
    "kind",
    [
        *("names", "types, all", "types and specs", "specs"),
        *("three axes", "three axes, specs", "experts", "experts, types"),
    ],
)
def test_parts_are_updated_as_the_whole_is(kind):
    params, state = sharded(kind).train(GRADS)
    whole_params, whole_state, norm = expected(tuple(params))
    for name in params:
        assert_close(params[name], whole_params[name])
        inner = state[name].inner_state
        assert_close(inner.inner_state, whole_state[name])
        np.testing.assert_allclose(inner.gradient_norm, norm, rtol=1e-6)


@pytest.mark.slow_but("names")
@pytest.mark.parametrize("kind", ["types, all", "names"])
def test_an_overflow_on_one_part_skips_on_all_devices(kind):
    program = sharded(kind)
    spoilt = {**GRADS[0], "columns": GRADS[0]["columns"].copy()}
    spoilt["columns"][3, 0, 11] = np.inf  # data 1, model 1
    params, state = program.train([spoilt])
    for name in params:
        assert_bit_equal(params[name], PARAMS)
        assert state[name].overflow and state[name].loss_scale == 1
        for shard in state[name].loss_scale.addressable_shards:
            assert float(shard.data) == 1
        assert_bit_equal(state[name].inner_state, program.state[name].inner_state)


def test_data_divides_the_state_on_top_of_model():
    _, state = sharded("names").train(GRADS[:1])
    moments = optax.tree.get(state["adamw"], "mu")
    # Over both axes; the stages have no axis that "data" divides, a scale none at all.
    parts = {"columns": 4, "rows": 4, "bias": 4, "stages": 2, "norm": 2, "scale": 1}
    for name, leaf in moments.items():
        (size,) = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert size * parts[name] == leaf.nbytes == PARAMS[name].nbytes
    specs = optax.tree.get(sharded("names").specs["adamw"], "mu")
    assert specs["columns"] == P("data", "model") and specs["rows"] == P("model", "data")
    assert specs["bias"] == P(("model", "data")) and specs["stages"] == P("model")


@pytest.mark.slow
def test_data_divides_the_state_of_stages_and_experts():
    """The devices over which a moment is divided."""
    found = {}
    for kind in ("three axes", "experts"):
        moments = optax.tree.get(sharded(kind).train(GRADS[:1])[1]["adamw"], "mu")
        parts = {
            k: leaf.nbytes / leaf.addressable_shards[0].data.nbytes for k, leaf in moments.items()
        }
        found[kind] = {name: int(count) for name, count in parts.items()}
    same = {"stages": 2, "scale": 1}  # no axis of a stage is left that "data" divides
    assert found["three axes"] == same | {"columns": 8, "rows": 8, "bias": 8, "norm": 2}
    assert found["experts"] == same | {"columns": 4, "rows": 4, "bias": 4, "norm": 4}


@pytest.mark.slow
@pytest.mark.whole("other mesh-specs")
@pytest.mark.parametrize(("here", "there"), [("other mesh", "specs"), ("three axes", "experts")])
def test_a_checkpoint_of_one_mesh_goes_on_on_another(here, there):
    params, state = sharded(here).train(GRADS[:2])
    there = sharded(there)
    shardings = jax.tree.map(lambda spec: NamedSharding(there.mesh, spec), there.specs)
    # All arrays are whole in a checkpoint, whatever mesh they come from and go to.
    params, state = jax.tree.map(np.asarray, (params, state))
    params, state = there.train(GRADS[2:], params, jax.device_put(state, shardings))
    whole_params, whole_state, _ = expected(tuple(params))
    for name in params:
        assert_close(params[name], whole_params[name])
        assert_close(state[name].inner_state.inner_state, whole_state[name])


# In a train step, with a model whose hidden units are divided over "model".

MODEL = {"in": P(None, "model"), "out": P("model"), "bias": P()}
WEIGHTS = {
    "in": RANDOM.normal(size=(6, 8)).astype(np.float32),
    "out": RANDOM.normal(size=(8, 4)).astype(np.float32),
    "bias": np.zeros(4, np.float32),
}
# The third array is for gradients of chosen hidden units.
BATCH = tuple(RANDOM.normal(size=(4, n)).astype(np.float32) for n in (6, 4)) + (
    np.zeros((4, 8), np.float32),
)


def model_loss(params, batch, sum_over_model=lambda x: x):
    x, y, spoilt = batch
    out = jnp.tanh(x @ params["in"]) @ params["out"]
    own = jnp.sum(jnp.mean(spoilt, 0) * params["in"][0])
    return jnp.mean((sum_over_model(out) + params["bias"] - y) ** 2) + sum_over_model(own)


def sum_with_gradient_of_one(x):
    """A sum over "model" for check_vma=False, where JAX would sum its cotangents again."""
    return x + jax.lax.stop_gradient(jax.lax.psum(x, "model") - x)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_train_step_reports_what_holds_for_the_whole(check_vma):
    mesh = make_mesh((2, 2), ("data", "model"))
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    add = (lambda x: jax.lax.psum(x, "model")) if check_vma else sum_with_gradient_of_one
    step = ampx.train_step(
        functools.partial(model_loss, sum_over_model=add),
        ampx.zero1(inner, "data"),
        axis_name="data",
        model_axes=None if check_vma else MODEL,
        loss_scale="dynamic",
    )
    alone = ampx.train_step(model_loss, inner, loss_scale="dynamic")
    of_state = ampx.zero1_specs(step.tx, WEIGHTS, mesh, model_axes=MODEL)
    specs = ampx.TrainState(P(), MODEL, of_state, None, None)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, (P("data"), P("data"), P("data", "model"))),
            out_specs=(specs, P()),
            check_vma=check_vma,
        )
    )
    jitted = jax.jit(alone)
    state, expected = step.init(WEIGHTS), alone.init(WEIGHTS)
    for _ in range(2):
        state, report = mapped(state, BATCH)
        expected, expected_report = jitted(expected, BATCH)
    np.testing.assert_allclose(report.loss, expected_report.loss, rtol=1e-5)
    np.testing.assert_allclose(report.global_norm, expected_report.global_norm, rtol=1e-5)
    assert_close(state.params, expected.params)
    spoilt = BATCH[2].copy()
    spoilt[1, 7] = np.inf  # the gradient of a hidden unit of model 1, from rows of data 0
    held, report = mapped(state, (*BATCH[:2], spoilt))
    assert report.overflow and report.loss_scale == held.opt_state.loss_scale * 2
    assert np.isnan(report.global_norm), "not the norm of the step before"
    for leaf, old in zip(jax.tree.leaves(held.params), jax.tree.leaves(state.params), strict=True):
        for shard, before in zip(leaf.addressable_shards, old.addressable_shards, strict=True):
            np.testing.assert_array_equal(shard.data, before.data)  # on all devices


# What is refused. Nothing is compiled for it.


def trace(inner, model_axes=NAMES, params=None, specs=None, check_vma=False):
    params, specs = params or {"w": jnp.ones((8, 4))}, specs or {"w": P("model")}
    mesh = make_mesh((2, 2), ("data", "model"))
    tx = ampx.zero1(inner, "data", model_axes=model_axes)
    of_state = ampx.zero1_specs(tx, params, mesh, model_axes=specs)

    def step(params, state):
        grads = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        return tx.update(grads, state, params)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, of_state),
        out_specs=(specs, of_state),
        check_vma=check_vma,
    )
    return jax.eval_shape(mapped, params, tx.init(params))


@pytest.mark.parametrize("check_vma, axes", [(True, ()), (False, "model")])
@pytest.mark.parametrize("name", ["row sums", "noise"])
def test_what_depends_on_the_divided_axis_needs_specs(name, check_vma, axes):
    inner = {
        "row sums": stateless(lambda g: g / jnp.sum(g, 1, keepdims=True)),
        "noise": stateless(lambda g: g + jax.random.normal(jax.random.key(0), g.shape)),
    }[name]
    with pytest.raises(NotImplementedError, match=r"'model'.*is not known: give zero1 a tree of"):
        trace(inner, axes, check_vma=check_vma)
    trace(inner, {"w": P("model")}, check_vma=check_vma)


def stateless(function):
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def test_a_sum_that_the_inner_optimizer_completes_is_refused():
    inner = stateless(lambda g: g / jax.lax.psum(jnp.sum(g), "model"))
    with pytest.raises(NotImplementedError, match=r"sums over \['model'\] inside zero1"):
        trace(inner, "model")


def test_a_parameter_that_differs_along_data_must_be_named():
    """A pcast makes such of any parameter; only what is divided keeps a gradient of its own."""
    params, mesh = {"w": jnp.ones((8, 4))}, make_mesh((2, 2), ("data", "model"))

    def update(model_axes):
        tx = ampx.zero1(optax.sgd(0.1), "data", model_axes=model_axes)

        def step(params):
            return tx.update(params, tx.init(params), params)[0]

        jaxpr = jax.make_jaxpr(
            jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        )
        return str(jaxpr(params))

    with pytest.raises(ValueError, match=r"at 'w' may differ along \['data'\].*name them for it"):
        update(None)
    assert "psum_scatter" not in update(P("data")) and "all_gather" not in update(P("data"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_explicit_axes_that_are_not_mapped_are_refused(check_vma):
    """`shard_map` over "data" alone, where types say that "model" divides a parameter."""
    mesh = make_mesh((2, 2), ("data", "model"), "Explicit")
    params = {"w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("model")))}
    tx = ampx.zero1(optax.sgd(0.1), "data")

    def step(params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=check_vma
    )
    message = r"at 'w' is divided over \['model'\], which are not mapped here"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, params, params)


def test_a_scalar_that_differs_along_model_is_refused():
    with pytest.raises(ValueError, match="parameter at 'w' is a scalar that is divided over"):
        trace(optax.sgd(0.1), "model", {"w": jnp.ones(())}, {"w": P()})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("model", "and not which axis of the array"),
        ({"w": P(None, "model")}, r"shape \(8, 3\) cannot be divided so"),
        ({"w": P("stage")}, "none named 'stage', which model_axes asks for"),
    ],
)
def test_specs_of_the_state_need_specs_of_the_parameters(axes, message):
    mesh = make_mesh((2, 2), ("data", "model"))
    with pytest.raises(ValueError, match=message):
        tx = ampx.zero1(optax.sgd(0.1), "data")
        ampx.zero1_specs(tx, {"w": jnp.ones((8, 3))}, mesh, model_axes=axes)


def test_layouts_are_cut_to_their_common_refinement():
    model, both = ShardLayout((("model",),)), ShardLayout((("model", "data"),))
    assert find_common_layout([model, both, ShardLayout()]) == both
    assert find_common_layout([model, ShardLayout(((), ("data",)))]) == ShardLayout(
        (("model",), ("data",))
    )
    assert find_common_layout([model, ShardLayout((("data",),))]) is None, (
        "neither divides the other's parts"
    )
    assert find_common_layout([model, ShardLayout(((), ("model",)))]) is None, (
        "one axis cannot divide two"
    )
