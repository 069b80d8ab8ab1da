"""Helpers that several test files share: meshes, exact comparisons, optimizer loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

MESHES = {"1 axis": ((4,), ("data",)), "2 axes": ((2, 2), ("data", "model"))}


def make_mesh(shape, names, kind="Auto"):
    """A mesh of the first devices; `kind` names an `AxisType`, the same for all axes."""
    devices = np.prod(shape, dtype=int)
    types = (getattr(jax.sharding.AxisType, kind),) * len(names)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:devices])


def assert_bit_equal(left, right):
    """Asserts the same structure, dtypes and bits: NaN equals NaN, and 0.0 differs from -0.0."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
    ):
        a, b = (jax.random.key_data(x) if _is_key(x) else x for x in (a, b))
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, f"{name}: {a.dtype} != {b.dtype}"
        assert a.shape == b.shape and a.tobytes() == b.tobytes(), f"{name}: {a} != {b}"


def _is_key(x):
    return jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def types_of(tree):
    """Shape, dtype and weak type of each leaf: a change of any of them would trace anew."""
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x), jax.typeof(x).weak_type), tree)


def paths_of(tree):
    """The paths of all leaves, in order."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def all_finite(tree):
    return not np.any(np.asarray(ampx.count_nonfinite(tree)))


def optimizer_step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return ampx.apply_updates(params, updates), state


def counted_step(tx):
    """A jitted step that donates its state, and a list that grows by one with every trace of it."""
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(1)
        return optimizer_step(tx, params, state, grads)

    return step, traces


def map_zero1(tx, step, params, mesh, check_vma):
    """A step of `zero1` on all devices of a mesh, and its first state, divided over them.

    Of the step's three arguments the second is the state, as it is of the step's two results.
    """
    specs = ampx.zero1_specs(tx, params, mesh)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return mapped, jax.jit(tx.init, out_shardings=shardings)(params)


def run_steps(tx, params, grads_sequence, step=None):
    """Runs a Python loop over gradients, each multiplied by the loss scale as training does it."""
    step = step or jax.jit(lambda p, s, g: optimizer_step(tx, p, s, g))
    state = tx.init(params)
    for grads in grads_sequence:
        scale = ampx.current_loss_scale(state)
        params, state = step(params, state, optax.tree.scale(scale, grads))
    return params, state


def scan_flags(tx, bads):
    """The states of a loss scale after each of a sequence of good (False) and bad (True) steps."""

    def body(state, bad):
        # The gradient of a scaled loss: one that stayed 1 would be large under a small scale.
        _, state = tx.update(jnp.where(bad, jnp.inf, ampx.current_loss_scale(state))[None], state)
        own = state._replace(inner_state=())
        return state, own

    return jax.jit(lambda s, b: jax.lax.scan(body, s, b)[1])(
        tx.init(jnp.zeros(1)), jnp.asarray(bads, bool)
    )


def same_everywhere(array):
    """An array, after each device was found to hold the same of it."""
    parts = {}
    for shard in array.addressable_shards:
        first = parts.setdefault(str(shard.index), shard.data)
        np.testing.assert_array_equal(first, shard.data)
    return np.asarray(array)
