"""Parameters, gradients and moments that live in flat buffers: the same training as the tree's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx.fused.segments import Segments

fused = ampx.fused


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(0.3 * rng.normal(size=shape), dtype)

    return {
        "dense_0": {"kernel": normal(5, 300), "bias": normal(300)},
        "norm": {"scale": normal(300) + jnp.asarray(1, dtype), "temperature": normal()},
        "dense_1": {"kernel": normal(300, 2), "bias": normal(2)},
        "nothing": normal(0, 3),
    }


def loss_fn(params, batch):
    dtype = params["dense_0"]["kernel"].dtype
    x = batch["x"].astype(dtype) @ params["dense_0"]["kernel"] + params["dense_0"]["bias"]
    x = jnp.tanh(x.astype(jnp.float32) * params["norm"]["scale"].astype(jnp.float32))
    x = x.astype(dtype) @ params["dense_1"]["kernel"] + params["dense_1"]["bias"]
    x = x.astype(jnp.float32) * params["norm"]["temperature"].astype(jnp.float32)
    return jnp.mean((x - batch["y"]) ** 2)


def make_batch(rows=16, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, 5)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(rows, 2)), jnp.float32),
    }


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def padding_of(flat):
    """The elements of the buffers that belong to no parameter."""
    marks = flat.like(jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), flat.tree()))
    return [
        np.asarray(buffer)[np.asarray(mark) == 0]
        for buffer, mark in zip(flat.buffers, marks.buffers, strict=True)
    ]


def assert_padding_is_zero(tree):
    for node in jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, fused.FlatParams)):
        if isinstance(node, fused.FlatParams) and all(b.ndim for b in node.buffers):
            sizes = [bucket.size for bucket in node.layout.buckets]
            if [b.size for b in node.buffers] == sizes:
                for padding in padding_of(node):
                    assert not padding.astype(np.float32).any()


def close(left, right, rtol=2e-5, atol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=atol
        ),
        left,
        right,
    )


# --- the layout -------------------------------------------------------------------------------


@pytest.mark.slow_but("8")
@pytest.mark.parametrize("row", [1, 8, 256])
def test_round_trip_in_every_dtype(row):
    tree = {
        "half": [jnp.arange(7, dtype=jnp.bfloat16), jnp.ones((), jnp.bfloat16)],
        "ids": (jnp.arange(3), jnp.zeros((2, 0))),
        "full": jnp.arange(24.0).reshape(2, 3, 4),
        "flag": np.array([True, False]),
        "none": None,
    }
    flat = fused.flatten(tree, row=row)
    assert_bit_equal(flat.tree(), jax.tree.map(jnp.asarray, tree))
    assert_bit_equal(flat.like(jax.tree.map(jnp.asarray, tree)), flat)
    assert sorted(flat.layout.names) == ["bfloat16", "bool", "float32", "int32"]
    for bucket, buffer in zip(flat.layout.buckets, flat.buffers, strict=True):
        assert all(offset % row == 0 for offset in bucket.offsets)
        assert buffer.shape == (bucket.size,) and bucket.size % row == 0
        assert bucket.size > bucket.offsets[-1] + bucket.sizes[-1], "the last element is spare"
    assert all(not padding.any() for padding in padding_of(flat))


def test_groups_have_buffers_with_names_of_their_own():
    params = make_params()
    flat = fused.flatten(params, mask=matrices)
    assert set(flat.layout.names) == {"float32/decay", "float32/no_decay"}
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(flat)]
    assert paths == [f"['{name}']" for name in flat.layout.names]
    flat = fused.flatten(params, group_of=lambda path, leaf: path.split("/")[0])
    assert set(flat.layout.names) == {"float32/dense_0", "float32/norm", "float32/dense_1"}
    flat = fused.flatten(params, bucket_bytes=2048)
    assert len(set(flat.layout.names)) == len(flat.buffers) > 1
    assert_bit_equal(flat.tree(), params)
    assert fused.flatten(params, multiple_of=6).buffers[0].size % 768 == 0


def test_layouts_of_equal_trees_are_equal_and_cheap_to_hash():
    first, second = (fused.flatten(make_params()) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(first.layout) == hash(second.layout)
    assert jax.tree.structure(first) != jax.tree.structure(fused.flatten(make_params(), row=64))


def test_wrong_arguments_name_the_fix():
    params = make_params()
    flat = fused.flatten(params)
    with pytest.raises(ValueError, match="flat already"):
        fused.flatten(flat)
    with pytest.raises(TypeError, match="row"):
        fused.flatten(params, row=0.5)
    with pytest.raises(ValueError, match="the layout is for"):
        flat.like({"a": jnp.ones(3)})
    halves = jax.tree.map(lambda buffer: buffer[: buffer.size // 2], flat)
    with pytest.raises(ValueError, match="holds no whole parameters"):
        halves.tree()
    match = "'dense_0/kernel'.*'dense_0/bias'|'dense_0/bias'.*'dense_0/kernel'|flatten\\(params, m"
    for make in (
        lambda: fused.adamw(0.1, mask=matrices).init(flat),
        lambda: fused.adamw(0.1, mask=matrices(params)).update(
            flat, fused.adamw(0.1).init(flat), flat
        ),
        lambda: fused.per_buffer(matrices)(flat),
    ):
        with pytest.raises(ValueError, match=match):
            make()
    with pytest.raises(ValueError, match="sparse_rows needs a tree"):
        ampx.value_and_grad(loss_fn, sparse_rows={"dense_0/kernel": lambda b: b})(flat, {})


# --- gradients --------------------------------------------------------------------------------


def concatenations(jaxpr):
    """Output sizes of all concatenations and pads in a jaxpr."""
    return [
        int(size)
        for size in re.findall(r"\[(\d+)\][^=\n]* = (?:concatenate|pad)\b", str(jaxpr))
        if int(size) > 1000
    ]


@pytest.mark.slow_but("4-O2")
@pytest.mark.parametrize(("micro", "policy"), [(1, None), (4, "O2")])
def test_gradients_are_those_of_the_tree_and_born_in_one_concatenation(micro, policy):
    params, batch = make_params(), make_batch()
    flat = fused.flatten(params, mask=matrices)
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=micro, policy=policy)
    expected = jax.jit(grads_of)(params, batch)
    result = jax.jit(grads_of)(flat, batch)
    assert isinstance(result.grads, fused.FlatParams)
    assert result.grads.layout is flat.layout
    close(result.grads.tree(), expected.grads, rtol=1e-5, atol=1e-7)
    close(result.loss, expected.loss)
    assert_padding_is_zero(result.grads)
    sizes = sorted(bucket.size for bucket in flat.layout.buckets)
    assert sorted(concatenations(jax.make_jaxpr(grads_of)(flat, batch))) == [
        size for size in sizes if size > 1000
    ]


def test_gradients_without_matrix_products_are_bit_equal():
    params = make_params()

    def loss(params):
        return sum(jnp.sum(leaf * leaf * 0.3) for leaf in jax.tree.leaves(params))

    flat_grads = jax.jit(jax.grad(lambda flat: loss(flat.tree())))(fused.flatten(params))
    assert_bit_equal(flat_grads.tree(), jax.jit(jax.grad(loss))(params))


@pytest.mark.slow
def test_remat_and_half_buffers():
    params, batch = make_params(jnp.bfloat16), make_batch()
    flat = fused.flatten(params)
    result, expected = (
        jax.jit(ampx.value_and_grad(fun))(p, batch)
        for fun, p in ((jax.checkpoint(loss_fn), flat), (loss_fn, params))
    )
    assert {b.dtype for b in result.grads.buffers} == {np.dtype(np.float32)}
    close(result.grads.tree(), expected.grads, 0.05, 1e-3)


# --- training ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda mask: fused.adamw(1e-2, weight_decay=0.1, mask=mask),
    "sgd": lambda mask: fused.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": lambda mask: fused.lamb(1e-2, weight_decay=0.1, mask=mask),
    "novograd": lambda mask: fused.novograd(1e-2, weight_decay=0.1),
    "lion": lambda mask: fused.lion(1e-3, weight_decay=0.1, mask=mask),
    "adadelta": lambda mask: fused.adadelta(1e-1, weight_decay_mask=mask),
    "adamw_int8": lambda mask: fused.adamw(1e-2, mu_dtype="int8", mask=mask),
    "optax_adamw": lambda mask: optax.adamw(1e-2, mask=fused.per_buffer(mask)),
}
OPTIONS = {
    "plain": {},
    "all": dict(loss_scale="dynamic", max_grad_norm=0.5, num_microbatches=2),
    "O2": dict(policy="O2", loss_scale=128.0),
}


def trained(step, params, steps=20):
    state = step.init(params)
    run = jax.jit(step, donate_argnums=0)
    reports = []
    for number in range(steps):
        state, report = run(state, make_batch(seed=number))
        reports.append(report)
    return state, reports


@pytest.mark.slow_but("novograd-plain")
@pytest.mark.parametrize(
    "optimizer, options",
    [("adamw", "all"), ("lamb", "O2"), ("novograd", "plain"), ("sgd", "plain")],
)
def test_twenty_steps_are_those_of_the_tree(optimizer, options):
    params = make_params()
    tx = OPTIMIZERS[optimizer](matrices)
    step = ampx.train_step(loss_fn, tx, local_norm=True, **OPTIONS[options])
    expected, reports = trained(step, params)
    state, flat_reports = trained(step, fused.flatten(params, mask=matrices))
    rough = options == "O2"
    tolerances = (2e-2, 2e-3) if rough else (1e-3, 1e-4)
    close(state.params.tree(), expected.params, *tolerances)
    close(flat_reports[-1].loss, reports[-1].loss, 1e-2 if rough else 1e-4)
    close(flat_reports[3].local_norm, reports[3].local_norm, 2e-2 if rough else 1e-3, 1e-4)
    assert flat_reports[0].size == reports[0].size
    assert_padding_is_zero(state.params)
    assert_padding_is_zero(state.opt_state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:parameters are stored in bfloat16 without masters")
def test_o3_moves_parameters_to_buffers_of_their_stored_dtype():
    recipe = ampx.opt_level("O3", keep_norm_float32=True)
    step = ampx.train_step(loss_fn, fused.adamw(1e-3, mask=matrices), policy=recipe)
    state = step.init(fused.flatten(make_params(), mask=matrices))
    assert_bit_equal(state.params.tree(), step.init(make_params()).params)
    assert set(state.params.layout.names) == {
        "bfloat16/decay",
        "bfloat16/no_decay",
        "float32/no_decay",
    }
    state, _ = jax.jit(step)(state, make_batch())
    masters = ampx.master_weights(fused.adamw(1e-3)).init(state.params)
    assert ampx.master_params(masters, state.params).tree()["dense_0"]["bias"].dtype == jnp.float32


@pytest.mark.slow
def test_labels_divide_buffers_among_optimizers():
    params, batch = make_params(), make_batch()

    def labels(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)

    def make(labels):
        groups = {"matrix": fused.adamw(1e-2, mask=matrices), "vector": fused.novograd(1e-2)}
        return ampx.dynamic_loss_scale(optax.partition(groups, labels))

    tree_step = ampx.train_step(loss_fn, make(labels), loss_scale=None)
    flat_step = ampx.train_step(loss_fn, make(fused.per_buffer(labels)), loss_scale=None)
    expected, state = tree_step.init(params), flat_step.init(fused.flatten(params, mask=labels))
    assert set(state.params.layout.names) == {"float32/matrix", "float32/vector"}
    for _ in range(3):
        expected, _ = jax.jit(tree_step)(expected, batch)
        state, _ = jax.jit(flat_step)(state, batch)
    close(state.params.tree(), expected.params, 1e-4, 1e-6)


OF_TREES = {
    "labels": lambda params: jax.tree.map(lambda p: "b" if p.ndim > 1 else "a", params),
    "a mask": matrices,
    "names": lambda params: {name: "a" for name in params},
    "a name": lambda params: {**matrices(params), "nothing": params["nothing"].ndim > 1},
}
TAKES_CHOICES = {
    "partition": lambda choice: optax.partition(
        dict.fromkeys(("a", "b", True, False), optax.sgd(0.1)), choice
    ),
    "masked": lambda choice: optax.masked(optax.sgd(0.1), choice),
    "adamw": lambda choice: optax.adamw(0.1, mask=choice),
    "chain": lambda choice: optax.chain(optax.masked(optax.sgd(0.1), choice), optax.scale(2.0)),
}


@pytest.mark.parametrize("is_function", [True, False], ids=["function", "tree"])
@pytest.mark.parametrize("kind", OF_TREES)
@pytest.mark.parametrize("name", TAKES_CHOICES)
def test_a_choice_for_a_tree_is_told_to_go_through_per_buffer(name, kind, is_function):
    if kind in ("labels", "a mask") and is_function:
        return  # a function that maps over any tree is right, and sees buffers
    params = make_params()
    choice = OF_TREES[kind] if is_function else OF_TREES[kind](params)
    tx, flat = TAKES_CHOICES[name](choice), fused.flatten(params)
    for init in (
        ampx.dynamic_loss_scale(tx).init,
        ampx.multi_steps(tx, 2).init,
        ampx.train_step(loss_fn, tx).init,
        ampx.train_step(loss_fn, tx, loss_scale="dynamic").init,
    ):
        with pytest.raises(ValueError, match=r"flat: wrap it in ampx.fused.per_buffer"):
            init(flat)


@pytest.mark.whole_but("adamw_int8", "lamb", "novograd", "optax_adamw")
@pytest.mark.slow_but("adamw_int8")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_those_of_the_tree_and_a_skipped_one_leaves_every_bit(optimizer):
    params = make_params()
    flat = fused.flatten(params, mask=matrices)
    tx = ampx.dynamic_loss_scale(OPTIMIZERS[optimizer](matrices), init_scale=8.0)

    @jax.jit
    def twenty(params, grads):
        def body(carry, factor):
            params, state = carry
            scaled = jax.tree.map(lambda g: 8 * jnp.cos(factor) * g, grads)
            if optimizer.startswith("optax"):
                updates, state = tx.update(scaled, state, params)
                return (ampx.apply_updates(params, updates), state), None
            return fused.apply(tx, scaled, state, params, max_norm=1.0)[:2], None

        return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(20.0))[0]

    expected, _ = twenty(params, make_params())
    new, state = twenty(flat, flat)
    tolerances = (2e-2, 2e-3) if optimizer == "adamw_int8" else (1e-4, 1e-6)
    close(new.tree(), expected, *tolerances)
    assert_padding_is_zero((new, state))
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), flat)
    update = jax.jit(lambda *args: tx.update(*args)[1])
    assert_bit_equal(update(bad, state, new).inner_state, state.inner_state)
    if not optimizer.startswith("optax"):
        kept, after, report = jax.jit(functools.partial(fused.apply, tx))(bad, state, new)
        assert bool(report.overflow)
        assert_bit_equal((kept, after.inner_state), (new, state.inner_state))


@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("optimizer", [fused.adamw, fused.lamb])
def test_no_epsilon_poisons_no_norm(optimizer):
    """0 / 0 in the padding."""
    tx = optimizer(1e-2, eps=0.0)
    params = {"a": jnp.ones(3), "b": jnp.full((2, 2), 2.0)}
    flat = fused.flatten(params)

    @jax.jit
    def two(params, grads):
        state = tx.init(params)
        for _ in range(2):
            params, state, _ = fused.apply(tx, grads, state, params, max_norm=1.0)
        return params

    close(two(flat, flat).tree(), two(params, params))


def test_sums_over_parameters_by_rows():
    params = {"a": jnp.ones(700), "b": jnp.full((2, 2), 2.0), "c": jnp.full(256, 3.0)}
    flat = fused.flatten(params)
    (bucket,) = flat.layout.buckets
    segments = Segments(bucket, flat.layout.row)
    poisoned = jnp.where(flat.like(jax.tree.map(jnp.ones_like, params)).buffers[0] == 0, jnp.nan, 1)
    sums = segments.sums(poisoned * flat.buffers[0])
    named = dict(zip(bucket.leaves, sums.tolist(), strict=True))
    assert named == {0: 700.0, 1: 8.0, 2: 768.0}
    spread = fused.FlatParams((segments.spread(sums),), flat.layout).tree()
    assert {name: set(np.ravel(x).tolist()) for name, x in spread.items()} == {
        "a": {700.0},
        "b": {8.0},
        "c": {768.0},
    }


@pytest.mark.slow
def test_checkpoints_of_flat_states(tmp_path):
    step = ampx.train_step(loss_fn, fused.adamw(1e-2, mask=matrices), loss_scale="dynamic")
    state = step.init(fused.flatten(make_params(), mask=matrices))
    run = jax.jit(step)
    state, _ = run(state, make_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        like = jax.tree.map(jnp.zeros_like, state)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert_bit_equal(restored, state)
    assert_bit_equal(restored.params.tree(), state.params.tree())
    assert_bit_equal(run(restored, make_batch())[0], run(state, make_batch())[0])


# --- devices ----------------------------------------------------------------------------------


REPLICATED = P()


def sharded(step, mesh, state_specs=REPLICATED):
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(state_specs, P("data")), out_specs=(state_specs, P())
        ),
        donate_argnums=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "overlap"), [("adamw", True), ("lamb", False)])
def test_four_devices_train_like_one(optimizer, overlap):
    mesh = make_mesh((4,), ("data",))
    tx = OPTIMIZERS[optimizer](matrices)
    build = functools.partial(ampx.train_step, loss_fn, tx, loss_scale="dynamic")
    one, four = build(), build(axis_name="data", tail_overlap=overlap, num_microbatches=2)
    expected = one.init(make_params())
    state = four.init(fused.flatten(make_params(), mask=matrices))
    on_one, on_four = jax.jit(one), sharded(four, mesh)
    for number in range(5):
        expected, _ = on_one(expected, make_batch(seed=number))
        state, report = on_four(state, make_batch(seed=number))
    assert not report.overflow
    close(state.params.tree(), expected.params, 1e-3, 1e-5)
    assert_padding_is_zero(state)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_reduction_works_on_the_buffers_themselves(overlap):
    mesh = make_mesh((4,), ("data",))
    step = ampx.train_step(
        loss_fn, fused.adamw(1e-2, mask=matrices), axis_name="data", tail_overlap=overlap
    )
    state = step.init(fused.flatten(make_params(), mask=matrices))
    sizes = sorted(bucket.size for bucket in state.params.layout.buckets)
    text = sharded(step, mesh).lower(state, make_batch()).compile().as_text()
    moved = re.findall(r"= \(?([^=]*?)\)? (all-reduce|concatenate|copy)\(", text)
    found = {kind: [] for kind in ("all-reduce", "concatenate", "copy")}
    for shapes, kind in moved:
        for size in re.findall(r"f32\[(\d+)\]", shapes):
            if int(size) in sizes:
                found[kind].append(int(size))
    assert sorted(found["all-reduce"]) == sizes
    assert sorted(found["concatenate"]) == sizes
    assert not found["copy"]


@pytest.mark.parametrize("first", [1.0, np.nan])
def test_a_chain_of_reductions_keeps_the_last_parameter_and_the_padding(first):
    """A reduction waits for the one before by a number in the last element of its buffer."""
    leaf = jnp.arange(1.0, 257.0).at[0].set(first)  # it fills its row
    flat = fused.flatten({"a": leaf, "b": leaf}, bucket_bytes=1024)
    assert len(flat.buffers) == 2
    tx = ampx.all_reduce("data", op="sum", tail_overlap=True)

    def summed(flat, factor):
        grads = jax.tree.map(lambda buffer: factor * buffer, flat)
        return tx.update(grads, tx.init(flat))[0]

    mesh = make_mesh((4,), ("data",))
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    reduced = jax.jit(mapped)(flat, jnp.arange(1.0, 5.0))
    for own in reduced.tree().values():
        np.testing.assert_array_equal(own, 10 * leaf)
    assert not any(np.any(padding) for padding in padding_of(reduced))


@pytest.mark.slow_but("zero1")
@pytest.mark.parametrize("scattered", [False, True], ids=["zero1", "zero2"])
def test_zero1_divides_the_buffers(scattered):
    mesh = make_mesh((4,), ("data",))
    params = make_params()
    tx = ampx.zero1(fused.adamw(1e-2, weight_decay=0.1, mask=matrices), "data")
    step = ampx.train_step(loss_fn, tx, axis_name="data", scatter_gradients=scattered)
    flat = fused.flatten(params, mask=matrices)
    one = ampx.train_step(loss_fn, fused.adamw(1e-2, weight_decay=0.1, mask=matrices))
    expected = one.init(params)
    state = step.init(flat)
    specs = jax.tree.map(lambda _: P(), state)._replace(
        opt_state=ampx.zero1_specs(step.tx, flat, mesh)
    )
    assert {tuple(spec) for spec in specs.opt_state.inner_state[0].mu.buffers} == {("data",)}
    run = sharded(step, mesh, specs)
    for number in range(3):
        expected, _ = jax.jit(one)(expected, make_batch(seed=number))
        state, _ = run(state, make_batch(seed=number))
    close(state.params.tree(), expected.params, 1e-3, 1e-5)
    refused = ampx.train_step(loss_fn, ampx.zero1(fused.lamb(1e-2), "data"), axis_name="data")
    flat = fused.flatten(params)
    state = refused.init(flat)
    specs = jax.tree.map(lambda _: P(), state)._replace(
        opt_state=ampx.zero1_specs(refused.tx, flat, mesh)
    )
    with pytest.raises(NotImplementedError, match=r"on shards.*give zero1 the tree, params.tree"):
        sharded(refused, mesh, specs)(state, make_batch())
