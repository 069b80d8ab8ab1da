"""check_overlap and forward_order: what a step waits for, and who makes it wait."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import ampx
from ampx.data_parallel.forward_order import forward_order
from ampx.diagnostics.hlo import find_waits_of_outputs
from ampx.diagnostics.overlap import check_overlap

BUCKETS = ("a", "b", "c", "d")
PARAMS = {name: jnp.ones(8) for name in BUCKETS}
X = jnp.ones((4, 8))
psum = functools.partial(lax.psum, axis_name="data")


def local_grads(params, x):
    return jax.tree.map(lambda p: p * jnp.sum(x), lax.pcast(params, "data", to="varying"))


def step_of(tx, *, reduce=psum, update=None, out_specs=None):
    """A data-parallel step: local gradients, one reduction a bucket, `tx`."""

    def apply(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params, state, x):
        def local(params, state, x):
            grads = local_grads(params, x)
            reduced = jax.tree.map(reduce, grads) if reduce is psum else reduce(grads)
            return (update or apply)(reduced, state, params)

        specs = (P(), P(), P("data"))
        sharded = jax.shard_map(
            local, mesh=make_mesh((4,), ("data",)), in_specs=specs, out_specs=out_specs or P()
        )
        return sharded(params, state, x)

    return step


def checked(tx, compiled=False, **options):
    return check_overlap(step_of(tx, **options), PARAMS, tx.init(PARAMS), X, compiled=compiled)


def waits(report, prefix="0/"):
    """What each new parameter waits for, in the order of the tree."""
    return [set(o.waits_for) for o in report.outputs if o.path.startswith(prefix)]


def the_culprit(report, overlaps=False):
    assert report.overlaps is overlaps
    (culprit,) = report.culprits
    assert str(culprit) in str(report)
    return culprit


ALL = [set(range(4))] * 4
OWN = [{0}, {1}, {2}, {3}]
SGD = optax.sgd(0.1, momentum=0.9)


# What overlaps


def test_a_reduction_per_bucket_overlaps_under_adamw():
    report = checked(optax.adamw(1e-3))
    assert report.overlaps and not report.culprits
    assert waits(report) == OWN
    assert [o.waits_for for o in report.outputs if "/nu/" in o.path] == [(i,) for i in range(4)]
    assert {o.path for o in report.scalars} == {"1/0/count"}
    assert all(not r.is_verdict and r.elements == 8 and r.bytes == 32 for r in report.reductions)
    assert all(r.axes == ("data",) and "test_overlap.py" in r.source for r in report.reductions)
    assert "Overlap: 9 of 12 arrays (75% of the bytes)" in str(report)


def test_jitting_the_step_or_its_parts_changes_nothing():
    tx = optax.adamw(1e-3)
    step = jax.jit(step_of(tx, reduce=jax.jit(lambda g: jax.tree.map(psum, g))), donate_argnums=0)
    shapes = jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS), X))
    assert waits(check_overlap(step, *shapes)) == OWN
    assert check_overlap(step, *shapes, compiled=True).compiled


def test_a_verdict_from_local_gradients_overlaps():
    flags = []

    def with_local_verdict(grads):
        bad = sum(jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in jax.tree.leaves(grads))
        flags.append(psum(bad) > 0)
        return jax.tree.map(psum, grads)

    def update(grads, state, params):
        updates, new = SGD.update(grads, state, params)
        choose = functools.partial(jnp.where, flags[-1])
        params, new = jax.tree.map(
            choose, (params, state), (optax.apply_updates(params, updates), new)
        )
        return params, new

    report = checked(SGD, reduce=with_local_verdict, update=update)
    assert [r.is_verdict for r in report.reductions] == [True] + [False] * 4
    assert report.overlaps
    assert waits(report) == [{1}, {2}, {3}, {4}]
    assert re.search(r"^0 .* int32\[1\] +verdict", str(report), re.MULTILINE)


def test_what_only_scalars_need_is_no_culprit():
    def update(grads, state, params):
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        return params, {"norm": optax.tree.norm(grads)}

    report = checked(SGD, update=update)
    assert report.overlaps and not report.culprits
    (norm,) = report.scalars
    assert norm.path == "1/norm" and norm.waits_for == (0, 1, 2, 3)


@pytest.mark.parametrize("size", [1, 2])
def test_a_weight_summed_last_is_no_gradient(size):
    def update(grads, state, params):
        weight = psum(lax.axis_index("data").astype(jnp.float32) * jnp.ones(size))[0]
        return jax.tree.map(lambda p, g: p - g / weight, params, grads), state

    report = checked(SGD, update=update)
    assert report.reductions[-1].is_verdict and report.overlaps and waits(report) == OWN


def chain(grads):
    """Each buffer carries an element that depends on the sum before it."""
    summed, before = {}, jnp.zeros(8)
    for name, grad in grads.items():
        token = jnp.sum(jnp.isnan(before))[None].astype(jnp.float32)
        before = psum(jnp.concatenate([grad, lax.pcast(token, "data", to="varying")]))
        summed[name] = before[:-1]
    return summed


def test_a_chain_of_buckets_lets_the_early_ones_go():
    report = checked(SGD, compiled=True, reduce=chain)
    assert report.overlaps and report.compiled_overlaps and not report.merged
    assert waits(report) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]
    compiled = [len(o.compiled_waits_for) for o in report.outputs if o.path.startswith("0/")]
    assert compiled == [1, 2, 3, 4]


def test_reduce_scatter_counts():
    scatter = functools.partial(lax.psum_scatter, axis_name="data", tiled=True)

    def zero1(grads, state, params):
        shards = jax.tree.map(scatter, grads)
        return jax.tree.map(
            lambda g: lax.all_gather(g, "data", tiled=True, to="invarying"), shards
        ), ()

    report = checked(SGD, compiled=True, reduce=lambda g: g, update=zero1)
    assert {r.primitive for r in report.reductions} == {"reduce_scatter"}
    assert report.overlaps and waits(report) == OWN
    assert sum(r.gradients for r in report.compiled) == 4


def test_a_step_of_an_nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    def step(model, x):
        grads = local(nnx.state(model, nnx.Param), x)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))
        return jnp.sum(x)

    def reduced(params, x):
        return jax.tree.map(psum, local_grads(params, x))

    mesh = make_mesh((4,), ("data",))
    local = jax.shard_map(reduced, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    report = check_overlap(step, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X)
    assert report.overlaps
    assert sorted(o.waits_for for o in report.outputs) == [(0,), (1,)]


# What does not


def test_a_finite_check_before_the_moments_stops_everything():
    def update(grads, state, params):
        ok = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads.values()]))
        updates, new = SGD.update(grads, state, params)
        new = jax.tree.map(functools.partial(jnp.where, ok), new, state)
        return jax.tree.map(lambda p, u: jnp.where(ok, p + u, p), params, updates), new

    report = checked(SGD, update=update)
    culprit = the_culprit(report)
    assert culprit.name == "test_a_finite_check_before_the_moments_stops_everything.update"
    assert waits(report, "") == ALL * 2


def test_a_finite_check_of_the_parameters_alone_is_named():
    def all_finite(tree):
        return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(g)) for g in tree.values()])

    def update(grads, state, params):
        ok = all_finite(grads)
        updates, state = SGD.update(grads, state, params)
        return jax.tree.map(lambda p, u: jnp.where(ok, p + u, p), params, updates), state

    report = checked(SGD, update=update)
    culprit = the_culprit(report, overlaps=True)
    assert culprit.name == "all_finite" and culprit.primitive == "and"
    assert culprit.place.startswith("test_overlap.py:")
    assert culprit.functions[:2] == ("all_finite", "update")
    assert waits(report) == ALL
    assert waits(report, "1/") == OWN, "the moments do not pass through the check"
    assert "3 of 8 arrays" in str(report) and "Others do, since all_finite" in str(report)


@pytest.mark.parametrize(
    "tx, name, primitive, file, advice",
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            "clip_by_global_norm",
            "add",
            "optax/transforms/_clipping",
            "by its own norm",
        ),
        (
            optax.apply_if_finite(SGD, 3),
            "apply_if_finite",
            "concatenate",
            "optax/",
            "the local gradients",
        ),
        (optax.MultiSteps(SGD, 2), "MultiSteps", "cond", "optax/", "jnp.where"),
    ],
    ids=["clip", "finite", "multi"],
)
def test_optax_transformations_are_named(tx, name, primitive, file, advice):
    report = checked(tx)
    culprit = the_culprit(report)
    assert (culprit.name, culprit.primitive) == (name, primitive)
    assert re.fullmatch(rf"{file}.*py:\d+", culprit.place)
    assert waits(report) == ALL and advice in str(report)


def test_functions_of_ampx_are_named_with_their_files():
    culprit = the_culprit(checked(ampx.dynamic_loss_scale(SGD)))
    assert culprit.place.startswith("ampx/loss_scaling/")


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("tail_overlap", [None, True])
def test_a_branch_of_ampx_does_not_hide_the_culprit(clips, tail_overlap):
    """On a CPU one branch holds all updates, unless one asks for what an accelerator does."""
    reduce = ampx.all_reduce("data", op="sum", bucket_bytes=16, tail_overlap=tail_overlap)
    clip = [optax.clip_by_global_norm(1.0)] * clips
    tx = ampx.dynamic_loss_scale(optax.chain(reduce, *clip, SGD), axis_names="data")
    report = checked(tx, reduce=lambda grads: grads)
    names = [culprit.name for culprit in report.culprits]
    in_branch = tail_overlap is None
    assert len(names) == in_branch + clips and ("clip_by_global_norm" in names) is clips
    assert report.overlaps is not (in_branch or clips)
    assert ("tail_overlap=True" in str(report)) is in_branch
    assert ("by its own norm" in str(report)) is clips and "jnp.where" not in str(report)


def test_a_chain_of_buckets_does_not_hide_the_culprit():
    tx = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    assert the_culprit(checked(tx, reduce=chain)).name == "clip_by_global_norm"


def test_two_culprits_are_both_named():
    tx = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), SGD), 3)
    names = {culprit.name for culprit in checked(tx).culprits}
    assert "apply_if_finite" in names


def test_a_norm_called_by_the_user_is_named_as_the_function_called():
    def update(grads, state, params):
        scale = 1 / (1 + optax.tree.norm(grads))
        return jax.tree.map(lambda p, g: p - scale * g, params, grads), state

    culprit = the_culprit(checked(SGD, update=update))
    assert culprit.name == "tree_norm" and culprit.place.startswith("optax/")
    assert "update" in culprit.functions


def one_cond(grads, state, params, ok=True):
    def accept():
        updates, new = SGD.update(grads, state, params)
        return optax.apply_updates(params, updates), new

    return lax.cond(ok, accept, lambda: (params, state))


def test_one_cond_around_the_update_is_named_whatever_it_decides_by():
    def by_count(grads, state, params):
        return one_cond(grads, state, params, jnp.sum(params["a"]) > 0)

    culprit = the_culprit(checked(SGD, update=by_count))
    assert (culprit.name, culprit.primitive) == ("one_cond", "cond")
    assert "jnp.where" in str(checked(SGD, update=by_count))


def test_a_cond_per_bucket_overlaps():
    def update(grads, state, params):
        ok = jnp.sum(params["a"]) > 0
        return {
            name: lax.cond(ok, lambda p, g: p - g, lambda p, g: p, params[name], grads[name])
            for name in params
        }, state

    report = checked(SGD, update=update)
    assert report.overlaps and waits(report) == OWN


def test_one_flat_update_is_named():
    def flat_update(grads, state, params):
        flat = jnp.concatenate(list(grads.values()))
        return dict(zip(params, jnp.split(flat * 2, 4), strict=True)), state

    culprit = the_culprit(checked(SGD, update=flat_update))
    assert (culprit.name, culprit.primitive) == ("flat_update", "concatenate")


def test_a_flag_from_the_last_bucket_alone_is_a_culprit():
    def update(grads, state, params):
        ok = jnp.all(jnp.isfinite(grads["d"]))
        return jax.tree.map(lambda p, g: jnp.where(ok, p - g, p), params, grads), state

    report = checked(SGD, update=update)
    assert waits(report) == [{0, 3}, {1, 3}, {2, 3}, {3}]
    assert the_culprit(report).primitive == "select_n"


@pytest.mark.parametrize("reduce", [psum, jax.jit(psum)], ids=["plain", "in a call"])
def test_reductions_inside_a_loop_are_ready_when_it_ends(reduce):
    def in_scan(grads):
        def body(total, _):
            return jax.tree.map(lambda t, g: t + reduce(g), total, grads), None

        return lax.scan(body, jax.tree.map(jnp.zeros_like, PARAMS), None, length=3)[0]

    report = checked(SGD, reduce=in_scan, compiled=True)
    assert len(report.reductions) == 4 and waits(report) == ALL
    assert the_culprit(report).primitive == "scan"
    assert not report.compiled_overlaps
    assert "after it" in str(report)


def test_a_culprit_inside_a_jitted_function_is_named_by_its_caller():
    together = jax.jit(lambda tree: sum(jnp.sum(g) for g in tree.values()))

    def one_caller(grads, state, params):
        return jax.tree.map(lambda p, g: p - g * together(grads), params, grads), state

    def another_caller(grads, state, params):
        return one_caller(grads, state, params)

    checked(SGD, update=one_caller)
    culprit = the_culprit(checked(SGD, update=another_caller))
    assert "another_caller" in culprit.functions


def test_one_reduction_for_all():
    def flat(grads):
        parts = jnp.split(psum(jnp.concatenate(list(grads.values()))), 4)
        return dict(zip(grads, parts, strict=True))

    report = checked(SGD, reduce=flat)
    assert not report.overlaps and not report.culprits
    assert "One reduction holds all gradients" in str(report)


# Compiled


def test_the_combiner_of_the_compiler_is_seen():
    report = checked(SGD, compiled=True)
    assert report.overlaps and not report.compiled_overlaps
    (merged,) = report.merged
    assert merged.gradients == 4 and merged.opcode == "all-reduce"
    assert {o.compiled_waits_for for o in report.outputs} == {(merged.place,)}
    text = str(report)
    assert f"merged 4 into {merged.name}" in text and "tail_overlap" in text


def test_compiled_is_not_read_unless_asked_for():
    report = checked(SGD)
    assert report.compiled is None and report.compiled_overlaps is None and not report.merged


GPU_HLO = """
HloModule jit_step, is_scheduled=true

%scatter (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[16]{0} reduce-scatter(%p), channel_id=3, dimensions={0}, to_apply=%add
}

%body (c: (f32[8], s32[])) -> (f32[8], s32[]) {
  %c = (f32[8]{0}, s32[]) parameter(0)
  %g = f32[8]{0} get-tuple-element(%c), index=0
  %i = s32[] get-tuple-element(%c), index=1
  %inner = f32[8]{0} all-reduce(%g), to_apply=%add
  ROOT %t = (f32[8]{0}, /*index=1*/s32[]) tuple(%inner, %i)
}

ENTRY %main (a: f32[8], b: f32[64], n: f32[2]) -> (f32[8], f32[16], f32[8], f32[2]) {
  %a = f32[8]{0:T(256)} parameter(0), metadata={op_name="p['(a)']"}
  %b = f32[64]{0} parameter(1)
  %n = f32[2]{0} parameter(2)
  %start = (f32[8]{0}, f32[2]{0}) all-reduce-start(%a, %n), channel_id=1, to_apply=%add
  %as = ((f32[64]{0}), f32[16]{0}) async-start(%b), calls=%scatter
  %done = (f32[8]{0}, f32[2]{0}) all-reduce-done(%start)
  %ad = f32[16]{0} async-done(%as)
  %x = f32[8]{0} get-tuple-element(%done), index=0
  %y = f32[2]{0} get-tuple-element(%done), index=1
  %zero = s32[] constant(0)
  %in = (f32[8]{0}, s32[]) tuple(%a, %zero)
  %loop = (f32[8]{0}, s32[]) while(%in), condition=%cond, body=%body
  %z = f32[8]{0} get-tuple-element(%loop), index=0
  ROOT %out = (f32[8]{0}, f32[16]{0}, f32[8]{0}, f32[2]{0}) tuple(%x, %ad, %z, %n)
}
"""


def test_asynchronous_and_nested_reductions_of_other_compilers_are_read():
    reductions, outputs = find_waits_of_outputs(GPU_HLO, 4)
    assert [(r.opcode, r.gradients) for r in reductions] == [
        ("all-reduce", 1),
        ("reduce-scatter", 1),
        ("all-reduce", 1),
    ]
    assert outputs == [(0,), (1,), (2,), ()]


# Refusals


def test_a_step_without_a_gradient_reduction_is_refused():
    mesh = make_mesh((1,), ("data",))

    def alone(grads):
        return jax.shard_map(psum, mesh=mesh, in_specs=P("data"), out_specs=P())(grads)

    with pytest.raises(ValueError, match="nothing to overlap.*alone.*more than one device"):
        check_overlap(alone, X)
    with pytest.raises(ValueError, match="nothing to overlap"):
        checked(
            SGD,
            reduce=lambda g: jax.tree.map(psum, jax.tree.map(jnp.sum, g)),
            update=lambda g, s, p: (p, g),
        )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, functools.partial(functools.partial)])
def test_arguments_that_are_missing_are_told_before_the_trace(wrap):
    step = wrap(step_of(SGD))
    told = "missing a required argument: 'x': .*as in check_overlap\\(step, state, batch\\)"
    with pytest.raises(TypeError, match=told.replace("'x'", "'params'")):
        check_overlap(step)(PARAMS, SGD.init(PARAMS), X)
    with pytest.raises(TypeError, match=told):
        check_overlap(step, PARAMS, SGD.init(PARAMS))
    mapped = jax.shard_map(
        lambda x: x, mesh=make_mesh((4,), ("data",)), in_specs=P(), out_specs=P()
    )
    with pytest.raises(TypeError, match=told):
        check_overlap(wrap(mapped))(X)


def test_it_takes_what_is_no_array():
    step = jax.jit(
        lambda params, state, x, *, flag: step_of(SGD)(params, state, x) if flag else x,
        static_argnames="flag",
    )
    x = np.ones((4, 8), np.float32)
    report = check_overlap(step, PARAMS, SGD.init(PARAMS), x, flag=True)
    assert waits(report) == OWN


def test_the_options_of_a_jitted_step_are_kept():
    options = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    step = jax.jit(step_of(SGD), compiler_options=options)
    report = check_overlap(step, PARAMS, SGD.init(PARAMS), X, compiled=True)
    assert report.compiled_overlaps and not report.merged
    assert len(report.compiled) == 4


# forward_order


def names_of(order, params):
    names = [
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    return [names[i] for i in order]


MODEL = {
    "embedding": jnp.ones((8, 8)),
    "attention": jnp.ones((8, 8)),
    "unused": jnp.ones(3),
    "bias": jnp.ones(8),
    "head": jnp.ones((8, 8)),
}
USED = ["embedding", "attention", "bias", "head", "unused"]


def forward(params, x):
    x = x @ params["embedding"]
    x = jax.nn.silu(x @ params["attention"] + params["bias"])
    return jnp.mean(x @ params["head"])


def loops(params, x):
    def first(x, v, w):
        return x @ w @ v

    weights = params["attention"], params["embedding"]
    x = lax.cond(jnp.sum(x) > 0, first, lambda x, v, w: x, x, *weights)
    x = lax.scan(lambda x, _: (x @ params["attention"], None), x, None, length=2)[0]
    x = lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x + params["bias"], x)
    return jnp.mean(jax.checkpoint(lambda x, w: x @ w)(x, params["head"]))


@pytest.mark.parametrize(
    "loss",
    [
        forward,
        jax.jit(forward),
        loops,
        lambda p, x: forward(jax.tree.map(lambda w: w.astype("bfloat16"), p), x.astype("bfloat16")),
        lambda p, x: jax.jit(forward)(
            jax.jit(lambda p: jax.tree.map(lambda w: w.T.T * 2, p))(p), x
        ),
        lambda p, x: forward(jax.tree.map(lambda w: w + jnp.zeros_like(w), p), x),
    ],
    ids=["plain", "jit", "loops", "cast", "jitted cast", "constants"],
)
def test_forward_order_is_that_of_use(loss):
    shapes = jax.eval_shape(lambda: MODEL)
    assert names_of(forward_order(loss, shapes, X), MODEL) == USED


def test_forward_order_of_layers_in_a_scan():
    params = {
        "b_layers": {"out": jnp.ones((3, 8, 8)), "inner": jnp.ones((3, 8, 8))},
        "a_head": jnp.ones((8, 8)),
        "z_first": jnp.ones((8, 8)),
    }

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w["inner"]) @ w["out"], None

        x, _ = lax.scan(layer, x @ params["z_first"], params["b_layers"])
        return jnp.sum(x @ params["a_head"])

    order = forward_order(loss, params, X)
    assert names_of(order, params) == ["z_first", "b_layers/inner", "b_layers/out", "a_head"]


NOT_TRAINED = {
    "a function": jnp.tanh,
    "integers": jnp.arange(3),
    "a random key": jax.random.key(0),
    "a word": "relu",
    "nothing": None,
}


@pytest.mark.parametrize("name", NOT_TRAINED)
def test_forward_order_is_that_of_the_leaves_that_have_gradients(name):
    params = {"a_rest": NOT_TRAINED[name], **MODEL}
    order = forward_order(forward, params, X)
    grads = ampx.value_and_grad(forward)(params, X).grads
    assert names_of(order, grads) == USED
    assert ampx.bucket_layout(grads, order=order)  # which refuses another number of leaves


def test_forward_order_takes_modules_with_functions_and_numbers():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
    order = forward_order(lambda model, x: jnp.sum(jax.vmap(model)(x)), model, X)
    assert order == (0, 1, 2, 3, 4, 5)
    scaled = {"a_scale": 2.0, "w": jnp.ones((8, 8))}
    assert forward_order(lambda p, x: jnp.sum(x @ p["w"] * p["a_scale"]), scaled, X) == (1, 0)


def test_forward_order_refuses_what_holds_nothing_to_train():
    for params in (jnp.tanh, {"a": jnp.arange(3)}, {"a": "w"}):
        with pytest.raises(TypeError, match="params must hold arrays of floating numbers"):
            forward_order(lambda p: p, params)
