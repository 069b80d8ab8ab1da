"""torch's DistributedDataParallel and ZeroRedundancyOptimizer beside ampx on as many devices.

torch runs in two processes that talk by gloo, all scenarios of `torch_processes` in one start;
ampx runs in this process on two devices. Parameters must agree, and so must the number of
reductions in a step and their bytes: torch's are counted where they happen.
"""

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from listing import Peer

import ampx
from ampx.jaxprs.reading import inner_jaxprs

pytest.importorskip("torch")
workers = pytest.importorskip("torch_processes")

ROWS, WIDTH = 16, 8
SECONDS = 300
EXCLUDED: dict[str, str] = {}
FORMS = {"one call": workers.SCENARIOS, "multi_steps": ("no_sync",)}
CASES = ["ShardedGradScaler"] + [
    f"{name} in {form}" for form, names in FORMS.items() for name in names
]
PEERS = (
    Peer(
        source="torch",
        runs="two processes with `DistributedDataParallel`, `no_sync`, `ZeroRedundancyOptimizer`, "
        "clip, `GradScaler` and that of FSDP: parameters, scales, and how many reductions of how "
        "many bytes a step has, as with `ampx.all_reduce` and `ampx.zero1`",
        cases=lambda: CASES,
        excluded=EXCLUDED,
    ),
)


def make_inputs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    shapes = {"first": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "second": (2 * WIDTH, 1)}
    params = {name: generator.normal(scale=0.3, size=shape) for name, shape in shapes.items()}
    x = generator.normal(size=(workers.STEPS, ROWS, WIDTH))
    data = {**params, "x": x, "y": np.sin(x.sum(axis=-1, keepdims=True))}
    # A step in six is bad on one device, which the other must hear of.
    sharded = generator.normal(size=(30, workers.PROCESSES, 3))
    bad = generator.random(sharded.shape) < 0.03
    data["sharded"] = np.where(bad, generator.choice([np.inf, -np.inf, np.nan], bad.shape), sharded)
    return {name: array.astype(np.float32) for name, array in data.items()}


INPUTS = make_inputs()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """What each of torch's processes returns; none outlives this."""
    folder = tmp_path_factory.mktemp("torch")
    np.savez(folder / "inputs.npz", **INPUTS)
    worker = pathlib.Path(workers.__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [folder / f"{rank}.log" for rank in range(workers.PROCESSES)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(worker), str(folder), str(rank)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(SECONDS) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(workers.PROCESSES)]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


def make_tx(traits: tuple[str, ...], form: str) -> optax.GradientTransformationExtraArgs:
    size: dict[str, Any] = {"bucket_bytes": 1} if "buckets" in traits else {}
    clip = optax.clip_by_global_norm(workers.MAX_NORM) if "scaler" in traits else optax.identity()
    if "zero" in traits:
        adamw = optax.adamw(workers.RATE, weight_decay=workers.DECAY)
        tx = ampx.zero1(optax.chain(clip, adamw), "data", **size)
    else:
        sgd = optax.sgd(workers.RATE, workers.MOMENTUM)
        wire = jnp.bfloat16 if "bfloat16" in traits else None
        tx = optax.chain(ampx.all_reduce("data", wire_dtype=wire, **size), clip, sgd)
    if "scaler" in traits:
        settings = {"init_scale": 2.0**10, "growth_interval": 2, "axis_names": "data"}
        tx = ampx.dynamic_loss_scale(tx, **settings)
    in_calls = ampx.multi_steps(tx, workers.MICROBATCHES, axis_names="data")
    return in_calls if form == "multi_steps" else tx


def make_step(traits: tuple[str, ...], form: str) -> tuple[Callable, Any, Any]:
    """The step of one call, the state to begin with, and how the state is divided."""
    tx = make_tx(traits, form)
    mesh = make_mesh((workers.PROCESSES,), ("data",))
    params = {name: jnp.asarray(INPUTS[name]) for name in workers.NAMES}
    is_in_one_call = "no_sync" in traits and form == "one call"
    grads_of = ampx.value_and_grad(
        loss_fn, num_microbatches=workers.MICROBATCHES if is_in_one_call else 1
    )
    specs = ampx.zero1_specs(tx, params, mesh) if "zero" in traits else P()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def step(params, state, batch):
        result = grads_of(params, batch, loss_scale=ampx.current_loss_scale(state))
        updates, state = tx.update(result.grads, state, params)
        return ampx.apply_updates(params, updates), state

    return step, (params, tx.init(params)), specs


def batches_of(traits: tuple[str, ...], form: str, step: int) -> Iterator[dict[str, np.ndarray]]:
    """The batch of a step; over calls, the micro-batches that torch's processes take together."""
    x, y = INPUTS["x"][step].copy(), INPUTS["y"][step]
    if "scaler" in traits and step == 1:
        x[ROWS // workers.PROCESSES :] = np.inf
    calls = workers.MICROBATCHES if form == "multi_steps" else 1
    shape = (workers.PROCESSES, calls, -1)
    for call in range(calls):
        yield {
            key: array.reshape(*shape, array.shape[-1])[:, call].reshape(-1, array.shape[-1])
            for key, array in (("x", x), ("y", y))
        }


def reductions_of(jaxpr: Any, *, in_loop: bool = False) -> Iterator[bool]:
    """For each collective that sums an array in a program: whether it stands in a loop."""
    for eqn in jaxpr.eqns:
        names = ("psum", "reduce_scatter", "all_to_all")
        if eqn.primitive.name.startswith(names) and eqn.invars[0].aval.ndim:
            if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
                yield in_loop
        is_loop = eqn.primitive.name in ("scan", "while")
        for inner in inner_jaxprs(eqn):
            yield from reductions_of(inner, in_loop=in_loop or is_loop)


@pytest.mark.parametrize(("name", "form"), [(n, form) for form, ns in FORMS.items() for n in ns])
def test_torch_data_parallel(theirs, name, form):
    traits = workers.SCENARIOS[name]
    step, (params, state), specs = make_step(traits, form)
    run = jax.jit(step)
    scales = []
    for number in range(workers.STEPS):
        for batch in batches_of(traits, form, number):
            params, state = run(params, state, batch)
        scales.append(float(ampx.current_loss_scale(state)))
    for own in theirs:
        expected = {
            key: own[f"{name}/{key}"] for key in (*workers.NAMES, "scales", "counts", "bytes")
        }
        np.testing.assert_array_equal(scales, expected["scales"])
        for leaf in workers.NAMES:
            # Some hundred float32 roundings of sums in another order, over four steps. torch clips
            # by norm + 1e-6, which is 2e-6 of a norm of 0.5. Where a gradient is near the
            # middle of two bfloat16, one may round up and one down.
            atol = 2e-3 if "bfloat16" in traits else 2e-6
            np.testing.assert_allclose(params[leaf], expected[leaf], rtol=2e-5, atol=atol)
        # In its first step torch finds out which parameters come in which order.
        counts, sizes = expected["counts"][1:], expected["bytes"][1:]
        assert (counts == int(optax.tree.get(state, "num_buckets"))).all()
        assert (sizes == float(optax.tree.get(state, "reduced_bytes"))).all()
    jaxpr = jax.make_jaxpr(step)(params, state, batch)
    in_loops = list(reductions_of(jaxpr.jaxpr))
    assert in_loops and not any(in_loops)
    if "bfloat16" not in traits:  # such a sum takes several collectives
        assert len(in_loops) == int(optax.tree.get(state, "num_buckets"))


def test_torch_zero_divides_the_moments(theirs):
    """torch gives whole parameters to processes, ampx a half of each parameter to each device."""
    sizes = [int(own["zero/moments"]) for own in theirs]
    _, (params, state), specs = make_step(workers.SCENARIOS["zero"], "one call")
    whole = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(sizes) == whole
    mesh = make_mesh((workers.PROCESSES,), ("data",))
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    moments = jax.device_put(state, shardings).inner_state
    shards = [
        shard.data.size
        for leaf in jax.tree.leaves(optax.tree.get(moments, "mu"))
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    ]
    assert sum(shards) <= max(sizes)


def test_torch_sharded_grad_scaler(theirs):
    """Each device has other parameters, and all skip together."""
    grads = INPUTS["sharded"]
    mesh = make_mesh((workers.PROCESSES,), ("data",))
    tx = ampx.dynamic_loss_scale(
        optax.sgd(0.5), init_scale=8.0, growth_interval=2, axis_names="data"
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "data"), out_specs=(P(None, "data"), P())
    )
    def run(grads):
        def step(carry, own):
            params, state = carry
            scale = ampx.current_loss_scale(state)
            updates, state = tx.update(own * scale, state, params)
            params = ampx.apply_updates(params, updates)
            return (params, state), (params, (state.loss_scale, state.growth_tracker))

        start = jnp.zeros_like(grads[0])
        return jax.lax.scan(step, (start, tx.init(start)), grads)[1]

    params, (scales, trackers) = run(grads)
    assert len(set(np.asarray(scales).tolist())) > 3  # it has moved both ways
    for rank, own in enumerate(theirs):
        np.testing.assert_array_equal(params[:, rank], own["sharded/params"])
        np.testing.assert_array_equal(scales, own["sharded/scales"])
        np.testing.assert_array_equal(trackers, own["sharded/trackers"])
