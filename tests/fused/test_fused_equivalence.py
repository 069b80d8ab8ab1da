"""Each fused optimizer is optax's: its numbers, its state, its checkpoints; or nearer the truth."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_bit_equal, optimizer_step, types_of

import ampx
from ampx import fused

SHAPES = {
    "dense": {"kernel": (5, 130), "bias": (7,)},
    "norm": {"scale": (), "empty": (0, 3)},
    "last": (3, 2, 5),
}
RATE = optax.cosine_decay_schedule(0.05, 30, alpha=0.1)
DECAY = optax.linear_schedule(0.2, 0.01, 15)
TREE_MASK = {
    "dense": {"kernel": True, "bias": False},
    "norm": {"scale": False, "empty": True},
    "last": True,
}
PREFIX_MASK = {"dense": True, "norm": False, "last": True}


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


CASES = {
    "sgd": ("sgd", dict(learning_rate=0.1)),
    "sgd, schedule": ("sgd", dict(learning_rate=RATE)),
    "sgd, momentum": ("sgd", dict(learning_rate=RATE, momentum=0.9)),
    "sgd, nesterov": ("sgd", dict(learning_rate=0.05, momentum=0.8, nesterov=True)),
    "adam": ("adam", dict(learning_rate=0.02)),
    "adam, eps_root": ("adam", dict(learning_rate=RATE, b1=0.7, eps=1e-3, eps_root=1e-2)),
    "adam, nesterov": ("adam", dict(learning_rate=0.02, b2=0.95, nesterov=True)),
    "adamw": ("adamw", dict(learning_rate=0.02)),
    "adamw, no decay": ("adamw", dict(learning_rate=0.02, weight_decay=0.0)),
    "adamw, schedules": ("adamw", dict(learning_rate=RATE, weight_decay=DECAY)),
    "adamw, callable mask": ("adamw", dict(learning_rate=0.1, weight_decay=0.2, mask=matrices)),
    "adamw, tree mask": ("adamw", dict(learning_rate=0.1, weight_decay=0.2, mask=TREE_MASK)),
    "adamw, all": (
        "adamw",
        dict(
            learning_rate=RATE, eps_root=1e-4, weight_decay=DECAY, mask=PREFIX_MASK, nesterov=True
        ),
    ),
    "lamb": ("lamb", dict(learning_rate=0.02)),
    "lamb, all": (
        "lamb",
        dict(learning_rate=RATE, b1=0.8, eps_root=1e-6, weight_decay=DECAY, mask=matrices),
    ),
    "adadelta": ("adadelta", dict(learning_rate=1.0)),
    "adadelta, no rate": ("adadelta", dict(rho=0.8, eps=1e-3)),
    "adadelta, all": (
        "adadelta",
        dict(learning_rate=RATE, weight_decay=DECAY, weight_decay_mask=TREE_MASK),
    ),
    "lion": ("lion", dict(learning_rate=0.01)),
    "lion, all": ("lion", dict(learning_rate=RATE, b1=0.8, weight_decay=DECAY, mask=PREFIX_MASK)),
    "adagrad": ("adagrad", dict(learning_rate=0.1)),
    "adagrad, all": (
        "adagrad",
        dict(learning_rate=RATE, initial_accumulator_value=0.0, eps=1e-3),
    ),
    "novograd": ("novograd", dict(learning_rate=0.02)),
    "novograd, all": (
        "novograd",
        dict(learning_rate=RATE, b1=0.8, b2=0.9, eps=1e-3, eps_root=1e-2, weight_decay=0.1),
    ),
}


def build(library, case):
    name, settings = CASES[case]
    return getattr(library, name)(**settings)


def normal(seed, shapes=SHAPES, dtype=jnp.float32):
    """Rounded through bfloat16, so that half gradients can hold the same numbers."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda shape: jnp.asarray(draw(size=shape), jnp.bfloat16).astype(dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def apply_step(tx, params, state, grads):
    return fused.apply(tx, grads, state, params)[:2]


def run(tx, params, grads_sequence, step=optimizer_step, state=None):
    """Jitted steps; afterwards (parameters, state)."""
    jitted = jax.jit(functools.partial(step, tx))
    state = tx.init(params) if state is None else state
    for grads in grads_sequence:
        params, state = jitted(params, state, grads)
    return params, state


def assert_near(actual, expected, tolerance=2e-6):
    """Leaf by leaf the largest error, over the largest number."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape
        error = np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


# --- against optax, in float32 -------------------------------------------------------------------


@pytest.mark.slow_but("sgd, nesterov", "adamw, all", "lamb, all", "novograd")
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_optax_by_either_face(case):
    params = normal(0)
    steps = [normal(i) for i in range(1, 21)]
    expected = run(build(optax, case), params, steps)
    faces = (optimizer_step, apply_step) if case in ONE_OF_EACH else (apply_step,)
    for step in faces:
        actual = run(build(fused, case), params, steps, step)
        assert_near(actual, expected)
        assert types_of(actual[0]) == types_of(params)


@pytest.mark.slow_but("lamb, all")
@pytest.mark.parametrize("case", ["adamw, schedules", "lamb, all"])
def test_a_long_vector_of_odd_length_equals_optax(case):
    settings = {k: v for k, v in CASES[case][1].items() if k != "mask"}
    name, params = CASES[case][0], normal(0, (278_011,))
    steps = [normal(i, (278_011,)) for i in (1, 2, 3)] * 7
    expected = run(getattr(optax, name)(**settings), params, steps[:20])
    actual = run(getattr(fused, name)(**settings), params, steps[:20], apply_step)
    assert_near(actual, expected)


@pytest.mark.slow
def test_five_hundred_parameters_are_updated_as_one_array_of_them():
    case = "sgd, momentum"
    params, *steps = (normal(i, (500, 3)) for i in range(4))
    expected = run(build(optax, case), params, steps)

    def as_leaves(array):
        return dict(enumerate(np.asarray(array)))

    actual = run(build(fused, case), as_leaves(params), map(as_leaves, steps), apply_step)
    stacked = np.stack([actual[0][i] for i in range(500)])
    assert_near(stacked, expected[0])


@pytest.mark.whole_but(
    "sgd, nesterov-float16", "adamw, all-bfloat16", "lamb, all-float16", "adadelta, all-bfloat16"
)
@pytest.mark.slow_but("lamb, all-float16")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["sgd, nesterov", "adamw, all", "lamb, all", "adadelta, all"])
def test_half_gradients_of_float32_parameters_lose_nothing(case, half):
    params = normal(0)
    steps = [normal(i) for i in range(1, 6)]
    expected = run(build(optax, case), params, steps)
    halves = [ampx.cast_floating(grads, half) for grads in steps]
    for step in (optimizer_step, apply_step):
        assert_near(run(build(fused, case), params, halves, step), expected)


@pytest.mark.slow_but("float16")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_parameters_follow_masters_that_move_as_optax_moves_them(half):
    params = ampx.cast_floating(normal(0), half)
    steps = [ampx.cast_floating(normal(i), half) for i in range(1, 21)]
    _, expected = run(ampx.master_weights(build(optax, "adamw, all")), params, steps)
    for step in (optimizer_step, apply_step):
        ours, state = run(ampx.master_weights(build(fused, "adamw, all")), params, steps, step)
        assert_near(state, expected)
        assert_bit_equal(ours, ampx.cast_floating(state.master_params, half))


# --- against the papers, in float64 --------------------------------------------------------------


def paper_sgd(p, m, g, t, *, lr, momentum):
    """Sutskever et al., 2013, in the form of the look ahead."""
    m = momentum * m + g
    return p - lr * (g + momentum * m), m


def paper_adamw(p, m, v, g, t, *, lr, b1, b2, eps, wd):
    """Loshchilov and Hutter, algorithm 2, with the rate in the decay."""
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    return p - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + wd * p), m, v


def paper_lamb(p, m, v, g, t, *, lr, b1, b2, eps, wd):
    """You et al., algorithm 2, with the identity for phi."""
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    r = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + wd * p
    return p - lr * np.linalg.norm(p) / np.linalg.norm(r) * r, m, v


def paper_adadelta(p, e_g, e_x, g, t, *, lr, rho, eps, wd):
    """Zeiler, algorithm 1, with an L2 penalty in the gradient."""
    g = g + wd * p
    e_g = rho * e_g + (1 - rho) * g**2
    step = -np.sqrt(e_x + eps) / np.sqrt(e_g + eps) * g
    return p + lr * step, e_g, rho * e_x + (1 - rho) * step**2


def paper_lion(p, m, g, t, *, lr, b1, b2, wd):
    """Chen et al., algorithm 2."""
    c = b1 * m + (1 - b1) * g
    return p - lr * (np.sign(c) + wd * p), b2 * m + (1 - b2) * g


# paper's step, its settings, the number of its moments, and optax's settings for the same
PAPERS = {
    "sgd": (
        paper_sgd,
        dict(lr=0.05, momentum=0.9),
        1,
        dict(learning_rate=0.05, momentum=0.9, nesterov=True),
    ),
    "adamw": (
        paper_adamw,
        dict(lr=0.02, b1=0.9, b2=0.95, eps=1e-8, wd=0.1),
        2,
        dict(learning_rate=0.02, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
    ),
    "lamb": (
        paper_lamb,
        dict(lr=0.02, b1=0.9, b2=0.99, eps=1e-6, wd=0.01),
        2,
        dict(learning_rate=0.02, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.01),
    ),
    "adadelta": (
        paper_adadelta,
        dict(lr=1.0, rho=0.9, eps=1e-3, wd=0.05),
        2,
        dict(learning_rate=1.0, rho=0.9, eps=1e-3, weight_decay=0.05),
    ),
    "lion": (
        paper_lion,
        dict(lr=0.01, b1=0.9, b2=0.99, wd=0.1),
        1,
        dict(learning_rate=0.01, b1=0.9, b2=0.99, weight_decay=0.1),
    ),
}


def by_the_paper(name, params, grads_sequence, stored_dtype=np.float64):
    """Steps in float64; only what lives from step to step is rounded to `stored_dtype`."""
    step, settings, count, _ = PAPERS[name]

    def stored(x):
        return np.asarray(x, np.float64).astype(stored_dtype).astype(np.float64)

    held = [stored(params), *(np.zeros(params.shape),) * count]
    for t, grads in enumerate(grads_sequence, start=1):
        held = [stored(x) for x in step(*held, np.asarray(grads, np.float64), t, **settings)]
    return held[0]


@pytest.mark.slow_but("lamb")
@pytest.mark.parametrize("name", PAPERS)
def test_bfloat16_parameters_round_only_what_is_stored(name):
    settings = PAPERS[name][3]
    params, *steps = (normal(i, (40, 33), jnp.bfloat16) for i in range(21))
    truth = by_the_paper(name, params, steps, ml_dtypes.bfloat16)

    def error(library, step):
        ours, _ = run(getattr(library, name)(**settings), params, steps, step)
        return np.mean(np.abs(np.asarray(ours, np.float64) - truth))

    ours = error(fused, apply_step)
    # A number in the middle between two bfloat16 may go either way; next to none is.
    assert ours < 2e-4 * np.mean(np.abs(truth))
    assert ours <= error(optax, optimizer_step)
    assert error(fused, optimizer_step) <= error(optax, optimizer_step)


@pytest.mark.parametrize("name", PAPERS)
def test_float64_parameters_are_updated_in_float64(name):
    with jax.enable_x64(True):
        params, *steps = (normal(i, (4, 7), jnp.float64) for i in range(21))
        for step in (optimizer_step, apply_step):
            ours, state = run(getattr(fused, name)(**PAPERS[name][3]), params, steps, step)
            assert ours.dtype == jnp.float64
            assert_near(ours, by_the_paper(name, params, steps), 1e-12)


@pytest.mark.parametrize("name", PAPERS)
def test_float32_parameters_are_near_the_paper(name):
    params, *steps = (normal(i, (40, 33)) for i in range(21))
    ours, _ = run(getattr(fused, name)(**PAPERS[name][3]), params, steps, apply_step)
    assert_near(ours, by_the_paper(name, params, steps), 1e-5)


# --- the state -----------------------------------------------------------------------------------

HALF_MOMENTS = {
    "sgd": dict(learning_rate=0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adam": dict(learning_rate=0.1, mu_dtype=jnp.bfloat16),
    "adamw": dict(learning_rate=RATE, mu_dtype="bfloat16"),
    "lion": dict(learning_rate=RATE, mu_dtype=jnp.bfloat16),
}


def described(tree):
    """Paths, shapes and dtypes."""
    return [
        (jax.tree_util.keystr(path), leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_state_has_the_paths_shapes_and_dtypes_of_optax(case, dtype):
    params = normal(0, dtype=dtype)
    assert_same_state(build(fused, case), build(optax, case), params)


@pytest.mark.parametrize("name", HALF_MOMENTS)
def test_moments_are_kept_in_the_dtype_asked_for(name):
    tx, plain = (getattr(library, name)(**HALF_MOMENTS[name]) for library in (fused, optax))
    assert_same_state(tx, plain, normal(0))
    assert jnp.bfloat16 in [leaf.dtype for leaf in jax.tree.leaves(tx.init(normal(0)))]


def assert_same_state(tx, plain, params):
    state = tx.init(params)
    assert described(state) == described(plain.init(params))
    assert_bit_equal(jax.tree.leaves(state), jax.tree.leaves(plain.init(params)))
    for step in (optimizer_step, apply_step):
        after = jax.eval_shape(functools.partial(step, tx), params, state, params)[1]
        assert described(after) == described(state)
        assert jax.tree.structure(after) == jax.tree.structure(state)


ONE_OF_EACH = ["sgd, nesterov", "adam", "adamw, all", "lamb, all", "adadelta, all", "lion, all"]
ONE_OF_EACH += ["adagrad, all", "novograd, all"]


@pytest.mark.slow_but("adamw, all")
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_checkpoints_go_to_and_from_optax(case, tmp_path):
    tx, plain = build(fused, case), build(optax, case)
    shapes = SHAPES | {"norm": {"scale": (), "empty": (1, 3)}}  # orbax saves no empty arrays
    params, *steps = (normal(i, shapes) for i in range(7))
    later, state = run(plain, params, steps[:3])
    structures = [jax.tree.structure(t.init(params)) for t in (tx, plain)]
    as_fused = structures[0].unflatten(jax.tree.leaves(state))
    assert_bit_equal(structures[1].unflatten(jax.tree.leaves(as_fused)), state)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "optax", state)
        checkpointer.wait_until_finished()
        checkpointer.save(tmp_path / "fused", as_fused)
        checkpointer.wait_until_finished()
        assert_bit_equal(checkpointer.restore(tmp_path / "optax", as_fused), as_fused)
        assert_bit_equal(checkpointer.restore(tmp_path / "fused", state), state)

    expected = run(plain, later, steps[3:], state=state)
    assert_near(run(tx, later, steps[3:], apply_step, state=as_fused), expected)


def test_optax_finds_and_maps_over_the_state():
    params = normal(0)
    tx = fused.adamw(0.1)
    state = tx.init(params)
    assert_bit_equal(optax.tree.get(state, "mu"), jax.tree.map(jnp.zeros_like, params))
    marked = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
    assert_bit_equal(marked[0].nu, jax.tree.map(jnp.ones_like, params))
    assert_bit_equal(marked[0].count, state[0].count)


# --- what callers hand in ------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class CallableModel:
    """A module in the manner of Equinox: a pytree that can be called."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x):
        return x @ self.kernel + self.bias

    def tree_flatten(self):
        return (self.kernel, self.bias), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_a_mask_may_be_a_module_that_can_be_called():
    model = CallableModel(jnp.ones((2, 3)), jnp.ones(3))
    settings = dict(learning_rate=0.1, weight_decay=0.5, mask=CallableModel(True, False))
    expected = run(optax.adamw(**settings), model, [model])
    assert_near(run(fused.adamw(**settings), model, [model], apply_step), expected)


def test_parameters_and_gradients_may_be_numpy_arrays_and_plain_numbers():
    params, grads = {"w": np.ones(3, np.float32), "b": 2.0}, {"w": np.ones(3, np.float32), "b": 1.0}
    expected = run(optax.adamw(0.1), params, [grads])
    assert_near(run(fused.adamw(0.1), params, [grads]), expected)
    tx = fused.adamw(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_near(updates, optax.adamw(0.1).update(grads, optax.adamw(0.1).init(params), params)[0])


@pytest.mark.slow_but("sgd, nesterov", "adamw, all", "adam")
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_parameters_are_asked_for_only_where_they_are_needed(case):
    tx, plain, params = build(fused, case), build(optax, case), normal(0)
    if case in ("sgd, nesterov", "adam", "adagrad, all"):
        updates, _ = tx.update(params, tx.init(params))
        expected, _ = plain.update(params, plain.init(params))
        assert_near(updates, expected)
    else:
        with pytest.raises(ValueError, match="needs params"):
            tx.update(params, tx.init(params))


@pytest.mark.slow_but("sgd, nesterov", "adam")
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_complex_parameters_are_refused(case):
    tx, params = build(fused, case), normal(0)
    params = params | {"last": jnp.ones(3, jnp.complex64)}
    for step in (optimizer_step, apply_step):
        with pytest.raises(TypeError, match="it takes real numbers"):
            step(tx, params, tx.init(params), params)


def test_optax_own_state_is_refused_or_taken_but_never_lost():
    params, tx = normal(0), fused.adamw(0.1)
    state = optax.adamw(0.1).init(params)
    try:
        _, after = tx.update(params, state, params)
    except (TypeError, ValueError):
        return
    assert_bit_equal(after[0].count, jnp.ones((), jnp.int32))
