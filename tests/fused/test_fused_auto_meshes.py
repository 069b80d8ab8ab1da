"""Kernels under plain jit on meshes of Auto axes: XLA divides, and the kernels follow it."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax._src import core, sharding_impls
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused
from ampx.fused.kernels import pallas_updates, tpu

# Two leaves share an axis of the mesh in different places, and one is divided over two of them.
AXES = (2, 2, 2), ("data", "fsdp", "model")
SHAPES = {"w": (8, 256), "u": (256, 8), "v": (2048,), "t": (2, 4, 256), "b": (7,)}
SPECS = {
    "w": P("fsdp"),
    "u": P("model", ("data", "fsdp")),
    "v": P(("fsdp", "data")),
    "t": P(None, "fsdp", "model"),
    "b": P(),
}
CASES = {
    "adamw": lambda lib: lib.adamw(0.1, weight_decay=0.1),
    "lamb": lambda lib: lib.lamb(0.1, weight_decay=0.1),
    "sgd": lambda lib: lib.sgd(0.1),
    "int8": lambda lib: lib.adamw(0.1, mu_dtype="int8", nu_dtype="int8"),
    "split": lambda lib: lib.split_masters(lib.adamw(0.1)),
    "split, int8": lambda lib: lib.split_masters(
        lib.adamw(0.1, mu_dtype="int8", nu_dtype="int8"), 8
    ),
    "stochastic": lambda lib: lib.stochastic_rounding(lib.adamw(0.1)),
}
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)


@pytest.fixture(autouse=True)
def kernels_for_small_shards(monkeypatch):
    monkeypatch.setattr(tpu, "_SMALL", 64)


def normal(seed, dtype=jnp.float32, shapes=SHAPES):
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape), dtype) for name, shape in shapes.items()}


def put(tree, mesh, specs=SPECS):
    """Everything that belongs to a parameter lies as it does; scales of blocks too."""

    def sharding(path, leaf):
        names = [str(getattr(key, "key", "")) for key in path]
        own = [specs[name] for name in names if name in specs and leaf.ndim == len(SHAPES[name])]
        return NamedSharding(mesh, own[-1] if own else P())

    return jax.device_put(tree, jax.tree_util.tree_map_with_path(sharding, tree))


def step(tx, backend, params, state, grads):
    return fused.apply(tx, grads, state, params, backend=backend)[:2]


def collectives(compiled):
    names = "all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce"
    return collections.Counter(re.findall(rf" ({names})\(", compiled.as_text()))


def near(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=1e-9))


def count_shapes(monkeypatch):
    """A set of the shapes of gradients that kernels have been given, on one device of a mesh."""
    shapes, genuine = set(), pallas_updates._map_leaves

    def recorded(*settings_of_all):
        def map_leaves(fun, jobs, **settings):
            shapes.update(read[0].shape for _, read, _ in jobs)
            return genuine(*settings_of_all)(fun, jobs, **settings)

        return map_leaves

    monkeypatch.setattr(pallas_updates, "_map_leaves", recorded)
    return shapes


def compile_step(case, backend, arguments):
    tx = dynamic(CASES[case](fused))
    return jax.jit(functools.partial(step, tx, backend)).lower(*arguments).compile()


def arguments_of(case, dtype, shapes=SHAPES):
    params, grads = normal(0, dtype, shapes), normal(1, shapes=shapes)
    like = params if dtype != "float16" else normal(0, shapes=shapes)  # kernels keep wide moments
    return params, dynamic(CASES[case](fused)).init(like), grads


def assert_lies_as(new, old):
    for leaf, held in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert leaf.sharding.is_equivalent_to(held.sharding, leaf.ndim)


@pytest.mark.whole_but("lamb-float16", "sgd-bfloat16", "adamw-float32")
@pytest.mark.slow_but("sgd-bfloat16")
@pytest.mark.parametrize(
    "case, dtype",
    [("adamw", "float32"), ("lamb", "float16"), ("lamb", "float32"), ("sgd", "bfloat16")],
)
def test_kernels_follow_the_shards_of_an_auto_mesh(case, dtype, monkeypatch):
    shapes, arguments = count_shapes(monkeypatch), arguments_of(case, dtype)
    placed = put(arguments, make_mesh(*AXES))
    compiled = compile_step(case, "interpret", placed)
    assert {(4, 256), (128, 2), (512,), (2, 2, 128)} <= shapes
    assert set(collectives(compiled)) == {"all-reduce"}
    new = compiled(*placed)
    assert_lies_as(new, placed[:2])
    expected = compile_step(case, "xla", arguments)(*arguments)
    near(new, expected, 2e-6 if dtype == "float32" else 2.0**-7)


LOW = {"w": (16, 512), "v": (8192,), "t": (2, 4, 512)}


@pytest.mark.whole_but("split", "stochastic")
@pytest.mark.slow
@pytest.mark.parametrize("case", ["split", "split, int8", "stochastic"])
def test_shards_of_an_auto_mesh_in_few_bits_are_those_of_the_whole(case, monkeypatch):
    """Random bits too: they depend on the place in the whole, which a shard works out."""
    shapes, arguments = count_shapes(monkeypatch), arguments_of(case, "bfloat16", LOW)
    specs = {"w": P("data", "fsdp"), "v": P(("model", "data")), "t": P(None, "model")}
    placed = put(arguments, make_mesh(*AXES), specs)
    compiled = compile_step(case, "interpret", placed)
    assert {(8, 256), (2048,)} <= shapes
    # Random bits of `t`, which is divided in the middle, are XLA's.
    assert ((2, 2, 512) in shapes) == (case == "split")
    assert set(collectives(compiled)) == {"all-reduce"}
    new = compiled(*placed)
    assert_lies_as(new, placed[:2])
    expected = compile_step(case, "xla", arguments)(*arguments)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        # XLA contracts other products and sums, which moves last bits: those of a master are error
        # bits, of which 2**16 make a bfloat16 step. Random bits of another place would round a half
        # of the elements in another way.
        bits = 4 if a.dtype == jnp.int16 else 0
        assert np.mean(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)) > bits) < 0.01


@pytest.mark.slow
def test_shards_that_cut_blocks_of_eight_bits_are_refused():
    tx, mesh = CASES["int8"](fused), make_mesh((4,), ("data",))
    params = put({"w": jnp.ones((8, 512))}, mesh, {"w": P(None, "data")})
    state = tx.init(params)
    match = "cuts the blocks of 256 numbers.*divide another axis.*backend='xla'"
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.jit(functools.partial(step, tx, "interpret"))(params, state, params)


@pytest.mark.slow
def test_uneven_shards_are_not_filled_up_with_what_counts_in_norms():
    """XLA may divide 10 rows over 4 devices, 3 to each; the last ones then hold nothing of them."""
    sharding = NamedSharding(make_mesh((4,), ("data",)), P("data"))
    params, state, grads = arguments_of("lamb", "float32", {"w": (10, 256)})

    def uneven(backend, params, state, grads):
        place = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
        params, grads = (jax.tree.map(lambda x: place(x) + 1, tree) for tree in (params, grads))
        return step(dynamic(CASES["lamb"](fused)), backend, params, state, grads)

    found = [
        jax.jit(functools.partial(uneven, backend))(params, state, grads)
        for backend in ("interpret", "xla")
    ]
    near(*found, 2e-6)


@pytest.mark.slow
def test_a_jit_without_any_mesh_runs_kernels_on_its_one_device():
    arguments = arguments_of("lamb", "float32")
    new = compile_step("lamb", "interpret", arguments)(*arguments)
    near(new, compile_step("lamb", "xla", arguments)(*arguments), 2e-6)


@pytest.mark.slow
def test_gradients_of_fsdp_in_a_scan_move_what_they_move_without_kernels():
    """The whole step of a user: parameters divided over the axis of the batch."""
    mesh = make_mesh((4,), ("data",))
    params = put({"w": normal(0)["w"], "u": normal(0)["u"]}, mesh, {"w": P("data"), "u": P("data")})
    batches = jax.device_put(jnp.ones((3, 16, 8)), NamedSharding(mesh, P(None, "data")))
    tx = dynamic(fused.adamw(0.01))

    def train(backend, params, state, batches):
        def body(carry, batch):
            params, state = carry

            def loss_fn(params):
                return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["u"]) ** 2) * 8

            return step(tx, backend, params, state, jax.grad(loss_fn)(params)), None

        return jax.lax.scan(body, (params, state), batches)[0]

    found, counts = [], []
    for backend in ("interpret", "xla"):
        compiled = (
            jax.jit(functools.partial(train, backend))
            .lower(params, tx.init(params), batches)
            .compile()
        )
        found.append(compiled(params, tx.init(params), batches))
        counts.append(collectives(compiled))
    assert_lies_as(found[0][0], params)
    near(*found, 1e-5)
    assert counts[0] == counts[1]


def find_partitioned(jaxpr):
    """The equations of `custom_partitioning` in a jaxpr and what it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_partitioning":
            yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr")):
            if hasattr(inner, "jaxpr") and hasattr(inner.jaxpr, "eqns"):
                yield from find_partitioned(inner.jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("case, launches", [("lamb", 2), ("stochastic", 1)])
def test_gpu_kernels_of_shards_lower_in_the_program_of_one_device(case, launches):
    """What JAX does while XLA compiles for GPUs, written out: there are none to compile for."""
    mesh = make_mesh((2, 2), ("data", "model"))
    shapes, specs = (
        {"w": (64, 512), "v": (8192,)},
        {(64, 512): P("data", "model"), (8192,): P("model")},
    )
    arguments = arguments_of(case, "bfloat16" if case == "stochastic" else "float32", shapes)
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(functools.partial(step, dynamic(CASES[case](fused)), "mosaic_gpu"))(
            *arguments
        )
    (eqn,) = find_partitioned(traced.jaxpr)

    def given(variables):
        return [
            jax.ShapeDtypeStruct(
                v.aval.shape,
                v.aval.dtype,
                sharding=NamedSharding(mesh, specs.get(v.aval.shape, P())),
            )
            for v in variables
        ]

    in_tree, out_tree = eqn.params["in_tree"], eqn.params["out_tree"]
    operands = given(eqn.invars)
    _, program, _, shardings = eqn.params["partition"](
        mesh, in_tree.unflatten(operands), out_tree.unflatten(given(eqn.outvars))
    )
    shards = [
        jax.ShapeDtypeStruct(sharding.shard_shape(operand.shape), operand.dtype)
        for sharding, operand in zip(in_tree.flatten_up_to(shardings), operands, strict=True)
    ]
    sizes = list(mesh.shape.items())
    closed = jax.make_jaxpr(program, axis_env=sizes)(*in_tree.unflatten(shards))
    every_axis = sharding_impls.SPMDAxisContext(mesh, frozenset(mesh.axis_names))
    with core.extend_axis_env_nd(sizes):
        module = mlir.build_mlir_module_helper(
            closed, name="one", platforms=["cuda"], backend=None, axis_context=every_axis
        )
    assert str(module).count("custom_call @mosaic_gpu") == launches
