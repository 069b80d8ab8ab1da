"""Bucketed all-reduce: equal to the plain sum, once a step, on every kind of mesh."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import all_finite, assert_bit_equal, make_mesh, types_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx.jaxprs import folds, primitives

MESHES = {
    "one device": ((1,), ("data",)),
    "four": ((4,), ("data",)),
    "three": ((3,), ("data",)),
    "two axes": ((2, 4), ("host", "device")),
}
CHECKED = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])


def local_trees(count):
    """Small integers, which any order of summation adds exactly; one tree for each device."""
    rng = np.random.default_rng(0)

    def leaf(*shape, dtype=jnp.float32):
        return np.asarray(rng.integers(-8, 9, (count, *shape)), dtype)

    return {
        "w": leaf(30, 7),
        "b": leaf(5),
        "scalar": leaf(),
        "empty": leaf(0, 3),
        "half": leaf(9, dtype=jnp.bfloat16),
        "none": None,
    }


def reduced(tx, trees, shape, names, kind="Auto", check_vma=True, part=0):
    mesh = make_mesh(shape, names, kind)

    def update(trees):
        grads = jax.tree.map(lambda leaf: leaf[0], trees)
        return tx.update(grads, tx.init(grads))[part]

    trees = jax.device_put(trees, NamedSharding(mesh, P(names)))
    mapped = jax.shard_map(update, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=check_vma)
    return jax.jit(mapped)(trees)


def sums(trees, op):
    reduce = np.sum if op == "sum" else np.mean
    return jax.tree.map(
        lambda leaf: reduce(leaf.astype(np.float32), axis=0).astype(leaf.dtype), trees
    )


def pairs_of_settings():
    """Each two settings of operation, mesh, kind of axes and check meet in one of eight cases."""
    for op, name, kind, vma in itertools.product(range(2), range(4), range(2), range(2)):
        case = (("mean", "sum")[op], list(MESHES)[name], ("Auto", "Explicit")[kind], bool(vma))
        is_needed = kind == op ^ (name & 1) and vma == op ^ (name >> 1)
        yield pytest.param(*case, marks=() if is_needed else pytest.mark.whole)


@pytest.mark.parametrize(("op", "name", "kind", "check_vma"), list(pairs_of_settings()))
def test_it_is_the_sum_or_mean(name, op, kind, check_vma):
    shape, names = MESHES[name]
    trees = local_trees(int(np.prod(shape)))
    tx = ampx.all_reduce(names, op=op, bucket_bytes=128, tail_overlap=True)
    result = reduced(tx, trees, shape, names, kind, check_vma)
    if name == "three" and op == "mean":  # thirds are rounded before the sum
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(sums(trees, op)), strict=True):
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=1e-6)
            assert a.dtype == b.dtype
    else:
        assert_bit_equal(result, sums(trees, op))


@CHECKED
def test_no_array_without_elements_is_in_a_sum(check_vma):
    """XLA of jaxlib 0.11 ends the process when it merges such a sum with another."""
    mesh = make_mesh((2,), ("data",))

    def loss_fn(params, batch):
        loss = jnp.sum(params["w"] * batch) + jnp.sum(params["none"])
        return loss, {"mean": params["none"], "sum": params["none"]}

    def step(batch):
        params = {"w": jnp.ones(3), "none": jnp.ones((0, 3))}
        of_aux = ampx.value_and_grad(
            loss_fn, has_aux=True, aux_reduction={"mean": "mean", "sum": "sum"}, axis_name="data"
        )
        own = jax.grad(lambda p: loss_fn(ampx.reduce_in_backward(p, "data"), batch)[0])(params)
        tx = ampx.all_reduce("data", op="sum")
        varying = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        return own, of_aux(params, batch).aux, tx.update(varying, tx.init(params))[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)
    program = jax.make_jaxpr(mapped)(jnp.ones(6))
    sums = [
        eqn.invars
        for eqn, _ in folds.equations_inside(program.jaxpr)
        if eqn.primitive.name in primitives.PSUMS
    ]
    assert len(sums) >= 3 and all(atom.aval.size for atoms in sums for atom in atoms)


@pytest.mark.parametrize(
    "options",
    [
        dict(tail_overlap=False),
        dict(hierarchical=True),
        dict(gradient_predivide_factor=2.0),
        dict(bucket_bytes=1),
        dict(bucket_bytes=2**20),
        dict(order=(4, 1, 0, 2, 3)),
        dict(group_of=lambda path, leaf: path),
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.whole(
    *("vma-tail_overlap", "no vma-hierarchical", "vma-gradient_predivide_factor"),
    *("no vma-bucket_bytes0", "vma-bucket_bytes1", "no vma-order", "vma-group_of"),
)
@CHECKED
def test_options_change_no_number(options, check_vma):
    shape, names = MESHES["two axes"]
    trees = local_trees(8)
    tx = ampx.all_reduce(names, **{"bucket_bytes": 128, "tail_overlap": True, **options})
    assert_bit_equal(reduced(tx, trees, shape, names, "Auto", check_vma), sums(trees, "mean"))


def all_reduces(fun, *args):
    """Operands of each float all-reduce in the compiled program, and of each in its loops."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    return [
        line.count("f32[")
        for line in text.splitlines()
        if re.search(r"= .*f32.* all-reduce\(", line)
    ]


def train(num_microbatches, tx, leaves=6, check_vma=True):
    """A step over four devices, and its arguments."""
    params = {f"w{i}": np.eye(8, dtype=np.float32) for i in range(leaves)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    grads_of = ampx.value_and_grad(loss, num_microbatches=num_microbatches, axis_name="data")

    def step(params, state, x):
        result = grads_of(params, x, loss_scale=ampx.current_loss_scale(state))
        updates, state = tx.update(result.grads, state, params)
        return ampx.apply_updates(params, updates), state, result.loss

    mesh = make_mesh((4,), ("data",))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    return mapped, (params, tx.init(params), np.ones((32, 8), np.float32))


# Each two of the three settings meet.
@pytest.mark.whole("vma-2-1", "vma-12-4", "no vma-2-4", "no vma-12-1")
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("leaves", [2, 12])
@CHECKED
def test_one_all_reduce_for_a_bucket_however_many_micro_batches(k, leaves, check_vma):
    """DDP's no_sync, lingvo's apply_crs_to_grad: counted in the compiled program."""
    reduce = ampx.all_reduce("data", op="sum", bucket_bytes=8 * 8 * 4 * 2, tail_overlap=True)
    tx = optax.chain(reduce, optax.sgd(0.1))
    step, args = train(k, tx, leaves, check_vma)
    # One for two leaves each, and one for loss and weight, which XLA may merge with the first.
    found = all_reduces(step, *args)
    assert leaves // 2 <= len(found) <= leaves // 2 + 2


def test_without_the_chain_xla_merges_what_is_independent():
    counts = {}
    for tail_overlap in (True, False):
        reduce = ampx.all_reduce("data", op="sum", bucket_bytes=1, tail_overlap=tail_overlap)
        step, args = train(1, optax.chain(reduce, optax.sgd(0.1)))
        counts[tail_overlap] = len(all_reduces(step, *args))
    assert counts[True] >= 6 > counts[False]


@pytest.mark.slow_but("True-vma")
@CHECKED
@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_over_devices_is_the_step_of_one(check_vma, scaled):
    def wrapped(*links, axes=()):
        tx = optax.chain(*links, optax.adamw(1e-2))
        return ampx.dynamic_loss_scale(tx, axis_names=axes) if scaled else tx

    reduce = ampx.all_reduce("data", op="sum", bucket_bytes=512, tail_overlap=True)
    step, (params, state, _) = train(2, wrapped(reduce, axes="data"), check_vma=check_vma)
    alone, _ = train(2, wrapped())
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    tx = wrapped()

    @jax.jit
    def plain(params, state):
        def loss(params, x):
            for w in params.values():
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        scale = ampx.current_loss_scale(state)
        result = ampx.value_and_grad(loss, num_microbatches=2)(params, x, loss_scale=scale)
        updates, state = tx.update(result.grads, state, params)
        return ampx.apply_updates(params, updates), state, result.loss

    here, there = (params, state), (params, tx.init(params))
    step = jax.jit(step)
    for _ in range(5):
        *here, loss = step(*here, x)
        *there, expected = plain(*there)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(here[0]), jax.tree.leaves(there[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


# Overflow. The verdict is that of the local gradients, and all devices agree on it.


def with_row(x, row, number):
    changed = x.copy()
    changed[row] = number
    return changed


# Each two of the three settings meet.
@pytest.mark.slow_but("0-nan-no vma", "3-nan-vma")
@pytest.mark.whole("0-inf-no vma", "3-nan-no vma", "0-nan-vma", "3-inf-vma")
@CHECKED
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("where", [0, 3])
def test_one_bad_device_makes_all_skip(bad, where, check_vma):
    chain = optax.chain(
        ampx.all_reduce("data", op="sum", bucket_bytes=256, tail_overlap=True), optax.adamw(0.1)
    )
    tx = ampx.dynamic_loss_scale(chain, axis_names="data", init_scale=8.0)
    step, (params, state, x) = train(2, tx, check_vma=check_vma)
    step = jax.jit(step)
    new, skipped, _ = step(params, state, with_row(x, 8 * where, bad))
    assert_bit_equal(new, params)
    assert_bit_equal(skipped.inner_state, state.inner_state)
    assert skipped.overflow and skipped.loss_scale == 4.0
    new, good, _ = step(new, skipped, x)
    assert all_finite(new)
    assert not np.array_equal(new["w0"], params["w0"])
    # The figures are those of the last update that was applied.
    assert [*skipped.inner_state[0]] == [0, 0]
    buckets = ampx.bucket_layout(params, bucket_bytes=256).buckets
    room = 1  # for what each bucket waits for
    assert [*good.inner_state[0]] == [6, sum(4 * (bucket.size + room) for bucket in buckets)]
    _, held, _ = step(new, good, with_row(x, 0, bad))
    assert_bit_equal(held.inner_state, good.inner_state)
    assert types_of(held) == types_of(state)


def test_deepspeed_overflow_on_devices_moves_the_scale():
    """test_zero_optim_overflow.py: scale 2**8, window 2, alternating overflows, floor 1."""
    chain = optax.chain(ampx.all_reduce("data"), optax.sgd(0.1))
    tx = ampx.dynamic_loss_scale(chain, axis_names="data", init_scale=2.0**8, growth_interval=2)
    step, (params, state, x) = train(1, tx)
    step = jax.jit(step)
    expected, bad = 2.0**8, with_row(x, 5, np.inf)
    for i in range(12):
        overflow = i % 3 == 2
        params, state, _ = step(params, state, bad if overflow else x)
        expected = expected / 2 if overflow else expected * (2 if i % 3 == 1 else 1)
        assert state.loss_scale == expected
    for _ in range(10):
        params, state, _ = step(params, state, bad)
    assert state.loss_scale == 1.0 and state.floor_hits > 0


def test_float16_gradients_are_finite_where_a_float16_sum_is_not():
    trees = {"g": jnp.full((4, 3), 60000.0, jnp.float16)}
    mean = reduced(ampx.all_reduce("data"), trees, (4,), ("data",))
    assert_bit_equal(mean, {"g": jnp.full(3, 60000.0, jnp.float16)})


def test_float32_gradients_are_finite_where_their_sum_is_not():
    trees = {"g": jnp.full((4, 3), 3e38)}
    assert_bit_equal(reduced(ampx.all_reduce("data"), trees, (4,), ("data",)), {"g": trees["g"][0]})
    late = ampx.all_reduce("data", gradient_predivide_factor=1.0)
    assert not all_finite(reduced(late, trees, (4,), ("data",)))


def test_a_train_step_judges_gradients_before_they_are_summed():
    """Every device's gradients are finite, their sum is not: a step to undo, and no overflow."""
    scaled = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0)
    step = ampx.train_step(
        lambda w, x: jnp.sum(w * x),
        optax.sgd(1.0),
        loss_scale=scaled,
        normalize="sum",
        axis_name="data",
    )
    mesh = make_mesh((4,), ("data",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    state, report = jax.jit(mapped)(step.init(jnp.ones(())), jnp.full(4, 1e38))
    scale = ampx.find_loss_scale_state(state.opt_state)
    assert report.overflow and scale.loss_scale == 2.0 and scale.inf_total == 0
    assert scale.bad_update_total == 1 and state.params == 1.0


def test_a_loss_scale_that_asks_nobody_is_refused():
    tx = ampx.dynamic_loss_scale(optax.chain(ampx.all_reduce("data"), optax.sgd(0.1)))
    step, args = train(1, tx)
    with pytest.raises(ValueError, match="all devices must agree.*axis_names='data'"):
        jax.jit(step)(*args)


# What travels.


def widened(trees, dtype=jnp.float32):
    """The gradients of one device, in the dtype that they are summed in."""
    narrow = jnp.dtype(dtype).itemsize
    return jax.tree.map(
        lambda leaf: leaf[0].astype(dtype) if leaf.dtype.itemsize < narrow else leaf[0], trees
    )


@pytest.mark.parametrize(
    "options, name, chunks, itemsize",
    [
        (dict(), "four", 1, None),
        (dict(reduce_dtype=jnp.bfloat16), "four", 1, None),
        (dict(wire_dtype=jnp.bfloat16), "three", 3, 2),
        (dict(wire_dtype=jnp.bfloat16), "two axes", 8, 2),
        (dict(hierarchical=True), "two axes", 4, None),
        (dict(group_of=lambda path, leaf: path), "four", 1, None),
    ],
)
def test_the_state_tells_the_bytes_of_the_buckets(options, name, chunks, itemsize):
    shape, names = MESHES[name]
    trees = local_trees(int(np.prod(shape)))
    layout = ampx.bucket_layout(
        widened(trees, options.get("reduce_dtype", jnp.float32)),
        bucket_bytes=128,
        multiple_of=chunks,
        group_of=options.get("group_of"),
    )
    tx = ampx.all_reduce(names, bucket_bytes=128, tail_overlap=False, **options)
    sent = reduced(tx, trees, shape, names, part=1)
    sizes = [b.size * (itemsize or b.dtype.itemsize) for b in layout.buckets]
    assert len(sizes) > 1
    assert [*sent] == [len(sizes), sum(sizes)]


@pytest.mark.parametrize(
    "options, shape, expected",
    [
        (dict(), (1,), [0, 0]),  # nothing travels
        (dict(), (2,), [3, 8 + 6 * 4 + 3 * 4]),
        (dict(tail_overlap=True), (2,), [3, 8 + 4 + 7 * 4 + 4 * 4]),  # an element more for each
        (dict(wire_dtype=jnp.float16), (2,), [3, 8 + 6 * 2 + 4 * 2]),  # padded for two devices
    ],
)
def test_bytes_counted_by_hand(options, shape, expected):
    leaves = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((2, 3)), "n": jnp.arange(2)}
    trees = jax.tree.map(lambda leaf: jnp.stack([leaf] * shape[0]), leaves)
    tx = ampx.all_reduce("data", op="sum", bucket_bytes=1, **{"tail_overlap": False, **options})
    assert [*reduced(tx, trees, shape, ("data",), part=1)] == expected


def test_bytes_over_explicit_axes_are_those_of_what_is_unreduced():
    mesh = make_mesh((2, 4), ("data", "model"), "Explicit")
    tx = ampx.all_reduce("data", op="sum")
    with jax.set_mesh(mesh):

        @jax.jit
        def sent(half, whole):
            due = jax.reshard(half, P(None, "model", unreduced={"data"}))
            return tx.update({"due": due, "whole": whole}, tx.init(whole))[1]

        state = sent(jnp.ones((6, 8), jnp.bfloat16), jnp.ones(3))
    assert [*state] == [1, 6 * 8 // 4 * 2]


# What others do.


@pytest.mark.parametrize("count", [2, 4, 8])
def test_megatron_prescaling_by_powers_of_two_is_exact(count):
    """test_reduce_scatter_with_fp32_accumulation.py: dividing first loses nothing."""
    rng = np.random.default_rng(1)
    trees = {"g": jnp.asarray(rng.normal(size=(count, 500)), jnp.float32)}
    shape = ((count,), ("data",))
    first = reduced(ampx.all_reduce("data"), trees, *shape)
    last = reduced(ampx.all_reduce("data", gradient_predivide_factor=1.0), trees, *shape)
    assert_bit_equal(first, last)


@pytest.mark.whole("vma-2", "no vma-4", "vma-8")
@pytest.mark.parametrize("count", [2, 4, 8])
@CHECKED
def test_megatron_bfloat16_wire_is_summed_in_float32(count, check_vma):
    """Terms that bfloat16 holds give the float32 sum, rounded once."""
    rng = np.random.default_rng(2)
    terms = jnp.asarray(rng.normal(size=(count, 1000)), jnp.bfloat16).astype(jnp.float32)
    tx = ampx.all_reduce("data", op="sum", wire_dtype=jnp.bfloat16)
    result = reduced(tx, {"g": terms}, (count,), ("data",), "Auto", check_vma)["g"]
    exact = np.sum(np.asarray(terms, np.float64), axis=0)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, exact, rtol=2.0**-8)
    in_half = functools.reduce(lambda a, b: a + b, terms.astype(jnp.bfloat16)).astype(jnp.float32)
    if count > 2:
        assert np.abs(result - exact).sum() < np.abs(np.asarray(in_half) - exact).sum()


def test_bfloat16_wire_stays_within_its_documented_error():
    rng = np.random.default_rng(3)
    terms = jnp.asarray(rng.normal(size=(8, 1001)), jnp.float32)
    tx = ampx.all_reduce("data", op="sum", wire_dtype=jnp.bfloat16)
    result = reduced(tx, {"g": terms}, (8,), ("data",))["g"]
    bound = 2.0**-7 * np.abs(terms).sum(0)
    assert np.all(np.abs(result - np.sum(np.asarray(terms, np.float64), 0)) <= bound)


def test_apex_race_condition_sums_are_exact():
    """ddp_race_condition_test.py: two devices, ten iterations, sums of rank-dependent gradients."""
    mesh = make_mesh((2,), ("data",))
    tx = ampx.all_reduce("data", op="sum", bucket_bytes=1)

    def update(i):
        rank = jax.lax.axis_index("data").astype(jnp.float32)
        grads = {"a": jnp.full(64, 1.0 * i + rank), "b": jnp.full((8, 8), 2.0 * i + rank)}
        return tx.update(grads, tx.init(grads))[0]

    step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P()))
    for i in range(10):
        sums = step(jnp.float32(i))
        assert_bit_equal(sums, {"a": jnp.full(64, 2.0 * i + 1), "b": jnp.full((8, 8), 4.0 * i + 1)})


def test_horovod_local_aggregation():
    """test_tensorflow.py: gradient = rank, k calls summed locally, one reduction a window."""
    k, count = 4, 4
    tx = ampx.multi_steps(
        optax.chain(ampx.all_reduce("data", op="sum"), optax.sgd(1.0)),
        k,
        normalize="sum",
        axis_names="data",
    )
    mesh = make_mesh((count,), ("data",))

    def steps(params):
        def step(carry, _):
            params, state = carry
            rank = jax.lax.pcast(jax.lax.axis_index("data").astype(jnp.float32), (), to="varying")
            updates, state = tx.update(rank, state, params)
            return (params + updates, state), params

        state = tx.init(params)
        return jax.lax.scan(step, (params, state), length=10)[0][0]

    mapped = jax.shard_map(steps, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert jax.jit(mapped)(jnp.float32(0)) == -(0 + 1 + 2 + 3) * k * 2


# A whole result knows whether its gradients are parts of a sum.


@pytest.mark.parametrize("reducer", ["all_reduce", "zero1"])
def test_a_whole_result_is_summed_or_averaged_as_its_loss_was(reducer):
    """`op="mean"`, the default, would divide the parts of a sum by the devices once more."""
    mesh, sgd = make_mesh((4,), ("data",)), optax.sgd(1.0)
    inside = ampx.zero1(sgd, "data")
    if reducer == "all_reduce":
        inside = optax.chain(ampx.all_reduce("data"), sgd)
    tx = ampx.dynamic_loss_scale(inside, axis_names="data")
    x, w = np.arange(32.0).reshape(8, 4) / 32, np.arange(4.0)

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    def step(w, x):
        state = tx.init(w)
        scale = ampx.current_loss_scale(state)
        # Parts of the mean over all devices, and each device's own mean.
        parts = ampx.value_and_grad(loss_fn, axis_name="data")(w, x, loss_scale=scale)
        own_w = jax.lax.pcast(w, "data", to="varying")
        own = ampx.value_and_grad(loss_fn)(own_w, x, loss_scale=scale)
        return [tx.update(result, state, w)[0] for result in (parts, own)]

    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    updates = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(w, x)
    slopes = (1 - np.tanh(x @ w) ** 2)[:, None] * x
    for update in updates:  # float32 sums of eight rows
        np.testing.assert_allclose(update, -slopes.mean(0), rtol=1e-5)


# What is refused.


@pytest.mark.parametrize(("params", "at"), [({"a": 1.0}, " at 'a'"), (1.0, "")])
def test_gradients_that_jax_has_summed_already_are_refused(params, at):
    mesh = make_mesh((4,), ("data",))
    tx = ampx.all_reduce("data")
    params = jax.tree.map(jnp.asarray, params)

    def step(w, x):
        grads = jax.grad(lambda w: jnp.mean(sum(jax.tree.leaves(w)) * x))(w)
        return tx.update(grads, tx.init(w))[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=f"gradient{at} is the same on all devices .*n times"):
        jax.jit(mapped)(params, jnp.ones(8))


def test_a_window_that_asks_nobody_is_refused():
    tx = ampx.multi_steps(optax.chain(ampx.all_reduce("data"), optax.sgd(0.1)), 2)
    step, args = train(1, tx)
    with pytest.raises(ValueError, match="all devices must agree on what to drop"):
        jax.jit(step)(*args)


def test_without_a_mapped_axis_there_is_nothing_to_reduce():
    tx = ampx.all_reduce("data")
    with pytest.raises(NameError, match="no axis 'data' is mapped here.*Under plain jit"):
        jax.jit(lambda g: tx.update(g, tx.init(g))[0])(jnp.ones(3))


def test_integers_are_summed_and_have_no_mean():
    trees = {"n": jnp.arange(8, dtype=jnp.int32).reshape(4, 2)}
    total = reduced(ampx.all_reduce("data", op="sum"), trees, (4,), ("data",))
    assert_bit_equal(total, {"n": jnp.array([12, 16], jnp.int32)})
    with pytest.raises(TypeError, match="dtype int32 have no mean"):
        reduced(ampx.all_reduce("data"), trees, (4,), ("data",))


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(op="max"), "op must be one of"),
        (dict(hierarchical=True), "at least two axes"),
        (
            dict(gradient_predivide_factor=0.0),
            "gradient_predivide_factor must be finite and positive, got 0.0",
        ),
        (dict(gradient_predivide_factor=2.0, op="sum"), "for op='mean'"),
        (dict(reduce_dtype=jnp.int32), "reduce_dtype must be a floating dtype"),
        (dict(wire_dtype=jnp.int8), "wire_dtype must be a floating dtype"),
    ],
)
def test_options_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        ampx.all_reduce("data", **options)


def test_axes_are_checked():
    with pytest.raises(ValueError, match="at least one mesh axis"):
        ampx.all_reduce(())
    with pytest.raises(ValueError, match="exclude each other"):
        ampx.all_reduce(("a", "b"), hierarchical=True, wire_dtype=jnp.bfloat16)


# Meshes with other axes.


def test_axes_that_are_not_mapped_keep_their_sharding():
    """Flat buffers would gather what a model axis has divided."""
    mesh = make_mesh((2, 4), ("data", "model"))
    tx = ampx.all_reduce("data")

    def step(grads):
        return tx.update(grads, tx.init(grads))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    grads = jax.device_put(jnp.arange(64.0).reshape(2, 32), NamedSharding(mesh, P("data", "model")))
    compiled = jax.jit(mapped).lower(grads).compile()
    assert "all-gather" not in compiled.as_text()
    mean, sent = compiled(grads)
    np.testing.assert_array_equal(mean[0], jnp.mean(grads, 0))
    assert [*sent] == [1, 32 * 4]


@pytest.mark.parametrize("tail_overlap", [True, False])
def test_leaves_that_differ_over_other_axes_stay_apart(tail_overlap):
    """Neither a bucket nor the chain makes what is the same along "model" vary over it."""
    mesh = make_mesh((2, 4), ("data", "model"))
    options = {"bucket_bytes": 1, "tail_overlap": tail_overlap}
    tx = ampx.all_reduce("data", op="sum", **options)
    specs = {"a": P(), "b": P("model"), "c": P(), "d": P("model")}  # reduced from the last on

    def step(grads):
        grads = jax.tree.map(lambda leaf: leaf[0], grads)
        return tx.update(grads, tx.init(grads))[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({name: P("data", *spec) for name, spec in specs.items()},),
        out_specs=specs,
    )
    grads = {name: jnp.arange(16.0).reshape(2, 8) + ord(name) for name in specs}
    expected = jax.tree.map(lambda leaf: leaf.sum(0), grads)
    assert_bit_equal(jax.jit(mapped)(grads), expected)
    # Those of one kind wait for each other.
    assert len(all_reduces(mapped, grads)) >= (2 if tail_overlap else 1)


def test_unreduced_gradients_of_explicit_axes_are_reduced_once_outside_the_loop():
    mesh = make_mesh((4,), ("data",), "Explicit")
    tx = ampx.all_reduce("data", op="sum")
    with jax.set_mesh(mesh):
        w = jnp.eye(8)
        x = jax.device_put(
            jnp.arange(256.0).reshape(4, 8, 8) / 256, NamedSharding(mesh, P(None, "data"))
        )

        @jax.jit
        def step(w, x):
            local = jax.reshard(w, P(reduced={"data"}))

            def add(total, rows):
                return total + jax.grad(lambda w: jnp.sum((rows @ w) ** 2))(local), None

            zeros = jax.reshard(jnp.zeros_like(w), P(unreduced={"data"}))
            grads, _ = jax.lax.scan(add, zeros, x)
            return tx.update(grads, tx.init(w))[0]

        result = step(w, x)
        text = step.lower(w, x).compile().as_text()
    rows = np.asarray(x).reshape(-1, 8)
    np.testing.assert_allclose(result, 2 * rows.T @ rows, rtol=1e-5)
    assert text.count(" all-reduce(") == 1


@pytest.mark.parametrize("normalize", ["mean", "weights"])
def test_micro_batches_over_explicit_axes_are_reduced_once(normalize):
    mesh = make_mesh((4,), ("data",), "Explicit")
    tx = optax.chain(ampx.all_reduce("data", op="sum"), optax.sgd(1.0))

    def loss(w, x):
        squares = jnp.tanh(x @ w) ** 2
        return jnp.mean(squares) if normalize == "mean" else (jnp.sum(squares), jnp.float32(x.size))

    grads_of = ampx.value_and_grad(loss, num_microbatches=4, normalize=normalize)

    def step(w, x):
        local = jax.reshard(w, P(reduced={"data"}))  # its gradient is left unreduced
        result = grads_of(local, x)
        updates, _ = tx.update(result.grads, tx.init(w), w)
        return w + updates, result.loss

    w, x = jnp.eye(8), jax.random.normal(jax.random.key(0), (16, 8))
    expected = grads_of(w, x)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, NamedSharding(mesh, P("data")))
        compiled = jax.jit(step).lower(w, spread).compile()
        new, value = compiled(jax.device_put(w, NamedSharding(mesh, P())), spread)
    np.testing.assert_allclose(value, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(new, w - expected.grads, rtol=1e-5, atol=1e-7)
    whole = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    assert len([line for line in whole if "f32[8,8]" in line]) == 1
