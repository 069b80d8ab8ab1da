"""The Pallas kernels: interpreted, they equal plain JAX; and they lower for GPUs and TPUs.

Neither needs the accelerator. What only a real one shows is not tested here: speed, and what the
last compiler makes of the kernel.
"""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ampx.fused.kernels import blocks, gpu, tpu

KERNELS = {
    "gpu": lambda *args, **kw: gpu.map_blocks(*args, interpret=True, **kw),
    "tpu": lambda *args, **kw: tpu.map_blocks(*args, interpret=True, **kw),
    "tpu ragged": lambda *args, **kw: tpu.map_blocks(*args, interpret=True, _elements=8192, **kw),
}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
SHAPES = [(), (1,), (7,), (128,), (768,), (1024,), (300, 130), (9, 16, 256), (278011,)]


def f32(x):
    return x.astype(jnp.float32)


def adamw(scalars, read, written, cell):
    """AdamW that keeps everything if told to skip; the terms are those of LAMB's trust ratio."""
    skip, factor, b1, b2, c1, c2, decay, step = scalars
    p, m, v = map(f32, written)
    g = f32(read[0]) * factor
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    u = m * c1 / (cell.sqrt(v * c2) + 1e-8) + decay * p
    new = (p + step * u, m, v)
    kept = [jnp.where(skip > 0, a, b.astype(a.dtype)) for a, b in zip(written, new, strict=True)]
    return kept, [p * p, u * u]


def without_terms(scalars, read, written, cell):
    return adamw(scalars, read, written, cell)[0], []


def squares(scalars, read, written, cell):
    del scalars, written, cell
    return [], [f32(read[0]) * f32(read[0])]


def hyperparameters(skip=0.0):
    return jnp.array([skip, 0.5, 0.9, 0.99, 10, 100, 0.01, -0.001], jnp.float32)


def leaf(shape, dtype=jnp.float32, gradient=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    g, p, m, v = rng.normal(size=(4, *shape))
    written = [jnp.asarray(a, dtype) for a in (p, m, np.abs(v))]
    return [jnp.asarray(g, gradient)], written


def check(actual, desired, dtype=jnp.float32):
    (new, sums), (due, due_sums) = actual, desired
    tolerance = 2e-6 if dtype == jnp.float32 else 2.0**-7  # one unit in the last place of bfloat16
    for a, b in zip(new, due, strict=True):
        assert a.dtype == b.dtype == dtype and a.shape == b.shape
        np.testing.assert_allclose(f32(a), f32(b), rtol=tolerance, atol=2e-6)
    np.testing.assert_allclose(sums, due_sums, rtol=2e-6)


def both(kernel, fun, *args, num_sums):
    run = [
        jax.jit(lambda *a, map_=map_: map_(fun, *a, num_sums=num_sums))(*args)
        for map_ in (kernel, blocks.map_whole)
    ]
    return run


@pytest.mark.whole_but(
    "()-gpu",
    "()-tpu",
    "(1,)-tpu ragged",
    "(7,)-gpu",
    "(7,)-tpu",
    "(128,)-tpu",
    "(128,)-tpu ragged",
    "(768,)-tpu ragged",
    "(1024,)-tpu",
    "(1024,)-gpu",
    "(300, 130)-gpu",
    "(300, 130)-tpu ragged",
    "(278011,)-tpu ragged",
    "(278011,)-gpu",
    "(9, 16, 256)-tpu",
    "(9, 16, 256)-gpu",
)
@pytest.mark.slow_but(
    "()-gpu",
    "()-tpu",
    "(1,)-tpu ragged",
    "(7,)-gpu",
    "(128,)-tpu",
    "(768,)-tpu ragged",
    "(300, 130)-tpu ragged",
)
@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_equals_plain_jax(kernel, shape):
    check(*both(kernel, adamw, hyperparameters(), *leaf(shape), num_sums=2))


@pytest.mark.whole_but(
    "(2048,)-float32-tpu",
    "(2048,)-bfloat16-gpu",
    "(300, 130)-float16-gpu",
    "(300, 130)-bfloat16-tpu ragged",
    "(2048,)-float16-tpu ragged",
    "(300, 130)-float32-gpu",
    "(300, 130)-float16-tpu",
    "(2048,)-bfloat16-tpu",
    "(300, 130)-float32-tpu ragged",
)
@pytest.mark.slow_but(
    "(2048,)-float32-tpu", "(2048,)-bfloat16-gpu", "(300, 130)-bfloat16-tpu ragged"
)
@kernels
@pytest.mark.parametrize("gradient", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(2048,), (300, 130)], ids=str)
def test_half_precision_parameters(kernel, shape, gradient):
    args = leaf(shape, jnp.bfloat16, gradient)
    check(*both(kernel, without_terms, hyperparameters(), *args, num_sums=0), jnp.bfloat16)


@pytest.mark.slow_but("float32-tpu", "bfloat16-tpu ragged", "bfloat16-gpu")
@kernels
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_skipped_step_keeps_every_bit(kernel, dtype):
    [g], written = leaf((2500,), dtype)
    written[0] = written[0].at[3].set(-0.0).at[2400].set(1e-40)
    g = g.at[::7].set(jnp.nan).at[1::7].set(jnp.inf).at[2::7].set(-jnp.inf)
    new, _ = jax.jit(lambda *a: kernel(without_terms, *a))(hyperparameters(1.0), [g], written)
    for a, b in zip(new, written, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.whole_but(
    "(5,)-tpu", "(1500,)-gpu", "(300, 64)-tpu ragged", "(1500,)-tpu", "(300, 64)-gpu"
)
@pytest.mark.slow_but("(5,)-tpu", "(1500,)-gpu", "(300, 64)-tpu ragged")
@kernels
@pytest.mark.parametrize("shape", [(5,), (1500,), (300, 64)], ids=str)
def test_sums_without_written_arrays(kernel, shape):
    [g], _ = leaf(shape)
    check(*both(kernel, squares, hyperparameters(), [g], [], num_sums=1))
    for bad in (np.nan, np.inf):
        one = jax.jit(lambda *a: kernel(squares, *a, [], num_sums=1))
        _, sums = one(hyperparameters(), [g.at[-1].set(bad)])
        assert not jnp.isfinite(sums[0])


@pytest.mark.slow_but("tpu", "tpu ragged")
@kernels
def test_long_rows_and_short_rows(kernel):
    for shape in ((3, 5000), (5000, 3)):
        check(*both(kernel, adamw, hyperparameters(), *leaf(shape), num_sums=2))


@pytest.mark.slow
def test_many_leaves_in_one_gpu_kernel():
    shapes = [(2048,), (1500,), (64,), (300,), (), (17, 128)]
    leaves = [
        (hyperparameters().at[-1].set(-k), *leaf(shape, seed=k)) for k, shape in enumerate(shapes)
    ]
    new, sums = jax.jit(lambda a: gpu.map_leaves(adamw, a, num_sums=2, interpret=True))(leaves)
    assert sums.shape == (len(leaves), 2)
    for k, args in enumerate(leaves):
        check((new[k], sums[k]), blocks.map_whole(adamw, *args, num_sums=2))


def test_the_gpu_square_root_before_jax_0_12(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    x = np.array([0, 1e-30, 2, 3e38, np.inf, np.nan], np.float32)
    np.testing.assert_allclose(gpu._sqrt(jnp.asarray(x)), np.sqrt(x), rtol=3e-7)
    np.testing.assert_array_equal(gpu._sqrt(jnp.array([1e-40, -1.0], jnp.float32)), [0, np.nan])


def test_wrong_arguments():
    h, (read, written) = hyperparameters(), leaf((2048,))
    with pytest.raises(ValueError, match="float32 vector"):
        tpu.map_blocks(adamw, h.astype(jnp.bfloat16), read, written)
    with pytest.raises(ValueError, match="one shape"):
        tpu.map_blocks(adamw, h, [read[0][:5]], written)
    with pytest.raises(ValueError, match="2 terms to sum; num_sums is 1"):
        tpu.map_blocks(adamw, h, read, written, num_sums=1, interpret=True)
    with pytest.raises(ValueError, match="for the written arrays"):
        tpu.map_blocks(lambda h, r, w, q: ([f32(w[0])], []), h, [], read, interpret=True)


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(map_, check_vma):
    """The map of each device's shard, whose sums are added up over the devices."""

    def shard(h, read, written):
        new, sums = map_(adamw, h, read, written, num_sums=2)
        return new, lax.psum(sums, "data")

    data = jax.P("data")
    specs = dict(in_specs=(jax.P(), data, data), out_specs=(data, jax.P()))
    return jax.jit(jax.shard_map(shard, mesh=mesh(), check_vma=check_vma, **specs))


def test_shards():
    args = hyperparameters(), *leaf((4 * 1300,))
    check(sharded(KERNELS["tpu"], False)(*args), blocks.map_whole(adamw, *args, num_sums=2))
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        sharded(gpu.map_blocks, True)(*args)


_LOWERING = """
import jax, jax.numpy as jnp, re, sys
sys.path.insert(0, {tests!r})
from jax._src.mesh import AbstractDevice
import test_fused_kernels as t

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
target = jax.sharding.AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))

def lowered(platform, f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    call = {{"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}}[platform]
    return len(re.findall("@" + call, text)), text.count("output_operand_alias<")

h = t.hyperparameters()
for platform, module in (("cuda", t.gpu), ("tpu", t.tpu)):
    for dtype in (jnp.float32, jnp.bfloat16):
        for shape in ((1 << 20,), (278011,), (1500,), (300, 130), (9, 16, 256)):
            for fun, sums in ((t.adamw, 2), (t.without_terms, 0)):
                args = t.leaf(shape, dtype)
                f = lambda h, *a: module.map_blocks(fun, h, *a, num_sums=sums)
                # one-dimensional blocks need to know the TPU
                with jax.sharding.use_abstract_mesh(target):
                    found = lowered(platform, f, h, *args)
                assert found == (1, 3), (platform, dtype, shape, found)
    norm = lambda h, g: module.map_blocks(t.squares, h, [g], [], num_sums=1)
    assert lowered(platform, norm, h, jnp.ones((300, 256), jnp.bfloat16)) == (1, 0)
    f = t.sharded(module.map_blocks, check_vma=platform == "tpu")
    assert lowered(platform, f, h, *t.leaf((4 * 4096,))) == (1, 3)
leaves = [(h, *t.leaf((n,))) for n in (2048, 1500, 64, 300)]
f = lambda a: t.gpu.map_leaves(t.adamw, a, num_sums=2)
assert lowered("cuda", f, leaves) == (1, 9)
print("lowered")
"""


@pytest.mark.slow
def test_kernels_lower_in_place_without_an_accelerator():
    tests = pathlib.Path(__file__).parent
    paths = os.pathsep.join(map(str, (tests, tests.parent, tests.parents[1])))
    run = subprocess.run(
        [sys.executable, "-c", _LOWERING.format(tests=str(tests))],
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "lowered", run.stderr[-3000:]
