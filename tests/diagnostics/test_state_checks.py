"""State that a step does not hand on, and keys that it uses again; sound steps that look alike."""

import functools
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import optax_optimizers
import pytest
from flax import nnx, struct
from flax.training import train_state

import ampx
from ampx.diagnostics.lint import lint_step

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
BATCH = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 3))}
RATE = optax.linear_schedule(0.1, 0.0, 100)


def loss_of(params, batch, keep=1.0):
    return jnp.mean((jnp.tanh(batch["x"] * keep @ params["w"] + params["b"]) - batch["y"]) ** 2)


def told(step, *args):
    return [(found.check, found.message) for found in lint_step(step)(*args).findings]


def line_of(report):
    """The source text of the line that a report's one finding names."""
    (found,) = report.findings
    lines = pathlib.Path(__file__).read_text().splitlines()
    return lines[int(found.source.split(":")[1].split()[0]) - 1]


def handing_on(tx, choose, loss=loss_of):
    def step(params, opt_state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, new = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return choose(params, opt_state, new)

    return step, (PARAMS, tx.init(PARAMS), BATCH)


OLD = lambda params, old, new: (params, old)  # noqa: E731
NEW = lambda params, old, new: (params, new)  # noqa: E731
NONE = lambda params, old, new: params  # noqa: E731
READING = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.sgd(RATE),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
    "inject": optax.inject_hyperparams(optax.adam)(RATE),
    "fused": ampx.fused.adamw(0.1),
    "dynamic": ampx.dynamic_loss_scale(optax.adam(0.1), init_scale=1.0),
    "masters": ampx.master_weights(optax.adam(0.1)),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "no jit"])
@pytest.mark.parametrize("choose", [OLD, NONE], ids=["old", "none"])
@pytest.mark.parametrize("name", READING)
def test_an_optimizer_state_that_is_not_handed_on_is_found(name, choose, jit):
    step, args = handing_on(READING[name], choose)
    report = lint_step(jit(step), ignore=["loss_scale"])(*args)
    assert [found.check for found in report.findings] == ["lost_state"], report
    assert "an optimizer's state that does not change: argument 1" in report.findings[0].message
    assert "opt_state = tx.update" in report.findings[0].fix
    assert line_of(report)


@pytest.mark.parametrize("name", READING)
def test_an_optimizer_state_that_is_handed_on_is_not(name):
    for choose in (
        NEW,
        lambda params, old, new: {"state": new, "params": params},
        lambda params, old, new: (old, params, new),
        lambda params, old, new: (params, jax.tree.leaves(new)),
        lambda params, old, new: (params, jax.tree.map(lambda x: x[None], new)),
    ):
        step, args = handing_on(READING[name], choose)
        assert lint_step(step, ignore=["loss_scale"])(*args).ok


FIELDS = "mu nu trace ema exp_avg exp_avg_sq m1 e_g grad_sum count".split()
EXTRA = {
    "value": lambda p, b, g: loss_of(p, b),
    "grad": lambda p, b, g: g,
    "value_fn": lambda p, b, g: lambda q: loss_of(q, b),
    "obj_fn": lambda p, b, g: lambda q: loss_of(q, b),
    "grad_fn": lambda p, b, g: lambda q, i: jax.grad(loss_of)(q, b),
}


def keeping(name, kept=lambda path: False):
    """A step of an optimizer of optax's that returns some of the leaves of its old state."""
    tx = optax_optimizers.make(name)

    def step(params, old, batch):
        grads = jax.grad(loss_of)(params, batch)
        takes = optax_optimizers.TAKES.get(name, ())
        updates, new = tx.update(
            grads, old, params, **{key: EXTRA[key](params, batch, grads) for key in takes}
        )
        new = jax.tree_util.tree_map_with_path(
            lambda path, before, after: before if kept(path) else after, old, new
        )
        return optax.apply_updates(params, updates), new

    return step, (PARAMS, tx.init(PARAMS), BATCH)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", optax_optimizers.NAMES)
def test_a_part_of_a_state_that_is_not_handed_on_is_found(name):
    step, args = keeping(name)
    assert not told(step, *args), "a sound step"
    fields = {
        getattr(key, "name", None)
        for path, _ in jax.tree_util.tree_leaves_with_path(args[1])
        for key in path
    }
    if name in ("lion", "signum"):
        fields.remove("count")  # which nothing reads there
    for field in fields.intersection(FIELDS):
        step, args = keeping(
            name, lambda path, f=field: f in [getattr(k, "name", "") for k in path]
        )
        (found, *more) = told(step, *args)
        assert found[0] == "lost_state" and not more, (field, found, more)
        assert field in found[1] or "argument 1" in found[1]


def test_half_of_the_moments_or_one_optimizer_of_two_is_found():
    def of_one_leaf(params, old, new):
        mu = {**new[0].mu, "w": old[0].mu["w"]}
        return params, (new[0]._replace(mu=mu), *new[1:])

    step, args = handing_on(optax.adam(0.1), of_one_leaf)
    ((check, message),) = told(step, *args)
    assert check == "lost_state" and message.endswith(
        "a part of an optimizer's state that does not change: of argument 1, 0/mu/w"
    )

    txs = {"w": optax.adam(0.1), "b": optax.sgd(RATE)}

    def two(state, batch, kept):
        grads = jax.grad(loss_of)(state.params, batch)
        params, states = {}, {}
        for name, tx in txs.items():
            update, states[name] = tx.update(grads[name], state.opt_state[name], state.params[name])
            params[name] = optax.apply_updates(state.params[name], update)
        states |= {name: state.opt_state[name] for name in kept}
        return state.replace(params=params, opt_state=states)

    state = train_state.TrainState(
        step=jnp.int32(0),
        apply_fn=None,
        params=PARAMS,
        tx=None,
        opt_state={name: tx.init(PARAMS[name]) for name, tx in txs.items()},
    )
    for name in txs:
        ((check, message),) = told(functools.partial(two, kept=[name]), state, BATCH)
        assert check == "lost_state" and f"opt_state/{name}" in message
    assert not told(functools.partial(two, kept=[]), state, BATCH)


FORGOTTEN = {
    "all": (lambda new, old: old, "params/b, params/w"),
    "one": (lambda new, old: {**new, "w": old["w"]}, "params/w"),
}


def with_average(choose, tx=None):
    tx = optax.adam(0.1) if tx is None else tx

    def step(state, batch):
        grads = jax.grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return choose({**state, "params": new, "opt": opt}, state, updates)

    return step, ({"params": PARAMS, "average": PARAMS, "opt": tx.init(PARAMS)}, BATCH)


@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9), optax.lion(0.1)])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_parameters_that_are_not_updated_are_found(name, tx):
    pick, names = FORGOTTEN[name]

    def choose(new, old, updates):
        params = pick(new["params"], old["params"])
        return {"params": params, "opt": new["opt"]}

    step, args = with_average(choose, tx)
    ((check, message),) = told(step, {k: v for k, v in args[0].items() if k != "average"}, BATCH)
    assert check == "lost_state" and message.endswith(f"its moments of them: {names}")
    assert message.startswith("parameters come back as they went in")


def test_parameters_that_are_elsewhere_or_copies_are_not():
    averaged = lambda new, old: {  # noqa: E731
        **new,
        "average": optax.incremental_update(new["params"], old["average"], 0.1),
    }
    sound = {
        "an average": lambda new, old, updates: averaged(new, old),
        "one that another function moves": lambda new, old, updates: new,
        "updates that the caller adds": lambda new, old, updates: (
            {**old, "opt": new["opt"]},
            updates,
        ),
        "a choice": lambda new, old, updates: jax.tree.map(
            functools.partial(jnp.where, jnp.isfinite(updates["w"]).all()), new, old
        ),
    }
    for name, choose in sound.items():
        step, args = with_average(choose)
        assert not told(step, *args), name
    groups = optax.partition(
        {"yes": optax.adam(0.1), "no": optax.set_to_zero()}, {"w": "no", "b": "yes"}
    )
    step, args = with_average(lambda new, old, updates: new, groups)
    assert not told(step, *args)

    def of_a_head(state, batch):  # another array that is called alike
        head, opt = handing_on(optax.adam(0.1), NEW)[0](state["head"], state["opt"], batch)
        return {**state, "head": head, "opt": opt}

    state = {"head": PARAMS, "opt": optax.adam(0.1).init(PARAMS)}
    assert not told(of_a_head, {**state, "body": {"w": jnp.ones((9, 4))}}, BATCH)


@pytest.mark.parametrize("is_teacher", [False, True])
@pytest.mark.parametrize("every", [None, 1, 10])
def test_an_average_that_stays_is_found_if_parameters_are_updated_with_it(every, is_teacher):
    """One that only passes through may be moved by another function, between steps."""
    tx, average = optax.adam(0.1), optax.ema(0.9)

    def step(state, batch):
        def loss(params):
            towards = state["average"].ema if is_teacher else jax.tree.map(jnp.zeros_like, params)
            gaps = jax.tree.map(lambda p, a: jnp.mean((p - a) ** 2), params, towards)
            return loss_of(params, batch) + sum(jax.tree.leaves(gaps))

        updates, opt = tx.update(jax.grad(loss)(state["params"]), state["opt"])
        params = optax.apply_updates(state["params"], updates)
        _, moved = average.update(params, state["average"])  # dropped where `every` is None
        if every is None:
            moved = state["average"]
        elif every > 1:
            is_due = opt[0].count % every == 0
            moved = jax.lax.cond(is_due, lambda: moved, lambda: state["average"])
        return {"params": params, "opt": opt, "average": moved}

    state = {"params": PARAMS, "opt": tx.init(PARAMS), "average": average.init(PARAMS)}
    found = [check for check, _ in told(step, state, BATCH)]
    assert found == (["lost_state"] if is_teacher and every is None else [])


def test_a_train_state_that_keeps_its_old_optimizer_state_is_found():
    tx = optax.adam(0.1)
    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    def step(state, batch, is_right):
        grads = jax.grad(loss_of)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        kept = opt_state if is_right else state.opt_state
        return state.replace(step=state.step + 1, params=params, opt_state=kept)

    ((check, message),) = told(functools.partial(step, is_right=False), state, BATCH)
    assert check == "lost_state" and message.endswith("does not change: opt_state")
    assert not told(functools.partial(step, is_right=True), state, BATCH)


def test_steps_of_a_scan_that_keep_the_first_state_are_found():
    def steps(choose):
        step, (params, opt_state, batch) = handing_on(optax.adam(0.1), choose)
        batches = jax.tree.map(lambda x: jnp.stack([x] * 3), batch)

        def run(params, opt_state, batches):
            return jax.lax.scan(lambda c, b: (step(*c, b), None), (params, opt_state), batches)[0]

        return told(run, params, opt_state, batches)

    assert [check for check, _ in steps(OLD)] == ["lost_state"]
    assert not steps(NEW)


def test_states_that_a_step_reads_or_passes_on_are_no_fault():
    tx = optax.adam(0.1)
    opt_state = tx.init(PARAMS)

    def held_in_turns(params, opt_state, batch, is_mine):
        new = handing_on(tx, NEW)[0](params, opt_state, batch)
        return jax.tree.map(functools.partial(jnp.where, is_mine), new, (params, opt_state))

    def of_another(params, other, batch):
        grads = jax.grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), other

    def eval_step(params, opt_state, batch):
        return loss_of(params, batch), optax.tree.norm(opt_state[0].mu)

    constant = ampx.static_loss_scale(optax.sgd(0.1), 4.0)
    scaled = lambda p, b: loss_of(p, b) * 4.0  # noqa: E731
    assert not told(held_in_turns, PARAMS, opt_state, BATCH, jnp.bool_(True))
    assert not told(of_another, PARAMS, opt_state, BATCH)
    assert not told(eval_step, PARAMS, opt_state, BATCH)
    for choose in (OLD, NEW):
        assert not told(*_flat(handing_on(optax.sgd(0.1), choose)))
    assert not told(*_flat(handing_on(constant, NEW, scaled)))


def _flat(made):
    return made[0], *made[1]


@struct.dataclass
class Keyed:
    params: Any
    key: Any
    step: Any


def with_noise(key_of, next_of=lambda key: key, new_key=None):
    """Dropout on the inputs, whose key is made of the state."""

    def step(state, batch):
        keep = jnp.where(jax.random.bernoulli(key_of(state), 0.9, (8, 4)), 1 / 0.9, 0.0)
        grads = jax.grad(loss_of)(state.params, batch, keep)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
        return Keyed(params, next_of(state.key), state.step + 1)

    key = jax.random.key(0) if new_key is None else new_key
    return step, (Keyed(PARAMS, key, jnp.int32(0)), BATCH)


def looped(state):
    """A key that a loop made, which folds its own counter in."""
    return jax.lax.fori_loop(0, 3, lambda i, key: jax.random.fold_in(key, i), state.key)


SAME_KEYS = {
    "itself": lambda state: state.key,
    "split": lambda state: jax.random.split(state.key)[1],
    "folded with a number": lambda state: jax.random.fold_in(state.key, 7),
    "of a loop": looped,
    "of a branch": lambda state: jax.lax.cond(
        jnp.bool_(True), lambda k: k, lambda k: jax.random.fold_in(k, 1), state.key
    ),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "no jit"])
@pytest.mark.parametrize("new_key", [jax.random.key, jax.random.PRNGKey], ids=["key", "raw"])
@pytest.mark.parametrize("name", SAME_KEYS)
def test_a_key_that_draws_the_same_numbers_in_each_step_is_found(name, new_key, jit):
    step, args = with_noise(SAME_KEYS[name], new_key=new_key(0))
    report = lint_step(jit(step))(*args)
    assert [found.check for found in report.findings] == ["random_key"]
    assert report.findings[0].message.endswith("a key that comes back unchanged: key")
    assert "keep = jnp.where(jax.random" in line_of(report)


def split_first(key):
    return jax.random.split(key)[0]


def test_a_key_that_is_written_in_the_program_is_found():
    held = jax.random.key(1)
    keys = {
        "made": lambda state: jax.random.key(0),
        "raw": lambda state: jax.random.PRNGKey(0),
        "closed over": lambda state: held,
        "split": lambda state: jax.random.split(jax.random.key(0))[1],
        "folded with a number": lambda state: jax.random.fold_in(held, 7),
    }
    for name, key_of in keys.items():
        step, args = with_noise(key_of, split_first)
        for jit in (jax.jit, lambda step: step):
            report = lint_step(jit(step))(*args)
            assert [found.check for found in report.findings] == ["random_key"], name
            assert report.findings[0].message.endswith("a key that is written in the program")
            assert "keep = jnp.where(jax.random" in line_of(report)

    def shuffled(params, batch):
        batch = jax.tree.map(lambda x: jax.random.permutation(held, x), batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))

    assert [check for check, _ in told(shuffled, PARAMS, BATCH)] == ["random_key"]


def test_what_is_the_same_in_each_step_on_purpose_is_no_fault():
    step, _ = with_noise(lambda state: state.key, split_first)

    def projected(params, batch):  # a fixed random matrix, as of random features
        matrix = jax.random.normal(jax.random.key(0), (4, 4))
        batch = {**batch, "x": jnp.cos(batch["x"] @ matrix)}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))

    def begun(params, batch, number):  # the first step draws the parameters
        first = lambda: {**params, "w": jax.random.normal(jax.random.key(0), (4, 3))}  # noqa: E731
        params = jax.lax.cond(number == 0, first, lambda: params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))

    def counted(state, batch):
        key = jax.random.fold_in(jax.random.key(0), state.step)
        return step(state.replace(key=key), batch)

    assert not told(projected, PARAMS, BATCH)
    assert not told(begun, PARAMS, BATCH, jnp.int32(0))
    assert not told(counted, Keyed(PARAMS, jax.random.key(0), jnp.int32(0)), BATCH)


NEW_KEYS = {
    "split": lambda: with_noise(lambda state: jax.random.split(state.key)[1], split_first),
    "the step's number": lambda: with_noise(lambda s: jax.random.fold_in(s.key, s.step)),
    "the step's number in a loop": lambda: with_noise(
        lambda s: jax.lax.fori_loop(0, 3, lambda i, k: jax.random.fold_in(k, i + s.step), s.key)
    ),
    "a number of the parameters": lambda: with_noise(
        lambda s: jax.random.fold_in(
            s.key, jax.lax.bitcast_convert_type(s.params["b"][0], jnp.int32)
        )
    ),
    "split now and then": lambda: with_noise(
        lambda s: jax.random.split(s.key)[1],
        lambda k: jax.lax.cond(jnp.bool_(True), split_first, lambda k: k, k),
    ),
}


@pytest.mark.parametrize("name", NEW_KEYS)
def test_a_key_that_changes_is_not(name):
    step, args = NEW_KEYS[name]()
    assert not told(step, *args)


def test_keys_of_the_caller_and_numbers_that_train_nothing_are_no_fault():
    step, (state, batch) = with_noise(lambda state: state.key)

    def given(params, batch, key):  # the caller makes a new key for each call
        return step(Keyed(params, key, 0), batch).params

    def counted(params, key, batch, number):  # the caller counts
        key_now = jax.random.fold_in(key, number)
        return step(Keyed(params, key_now, 0), batch).params, key

    def shown(state, batch):
        return state.replace(step=state.step + 1), jax.random.normal(state.key)

    assert not told(given, PARAMS, batch, jax.random.key(0))
    assert not told(counted, PARAMS, jax.random.key(0), batch, jnp.int32(0))
    assert not told(shown, state, batch)
    assert not told(*_flat(handing_on(optax.adam(0.1), NEW)))
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):
        assert not told(*_flat(handing_on(noisy, NEW)))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


def linen_step(tx, trained, overwritten=False):
    model = Norm()
    variables = model.init(jax.random.key(0), BATCH["x"])

    def loss(variables, batch):
        out, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new

    def step(variables, opt_state, batch):
        if trained:
            grads, new = jax.grad(loss, has_aux=True)(variables, batch)
            updates, opt_state = tx.update(grads, opt_state, variables)
            variables = optax.apply_updates(variables, updates)
            return {**variables, **(new if overwritten else {})}, opt_state
        params = variables["params"]
        grads, new = jax.grad(lambda p: loss({**variables, "params": p}, batch), has_aux=True)(
            params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return {"params": optax.apply_updates(params, updates), **new}, opt_state

    return step, variables, tx.init(variables if trained else variables["params"]), BATCH


@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)])
def test_batch_statistics_that_an_optimizer_moves_are_found(tx):
    (found,) = lint_step(linen_step(tx, trained=True)[0])(
        *linen_step(tx, trained=True)[1:]
    ).findings
    assert found.check == "batch_stats" and "BatchNorm_0/mean" in found.message
    assert 'variables["params"]' in found.fix
    assert not told(*linen_step(tx, trained=False))
    assert not told(*linen_step(tx, trained=True, overwritten=True))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(3)(x)


def statistics_step(keep, train=True, trained=True):
    """A step of flax's usual kind, which may forget the statistics."""
    model, tx = Deep(), optax.adam(0.1)
    variables = model.init(jax.random.key(0), BATCH["x"])
    state = {**variables, "opt": tx.init(variables["params"])}

    def step(state, batch):
        def loss(params):
            own = {"params": params, "batch_stats": state["batch_stats"]}
            out, new = model.apply(own, batch["x"], train, mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        if not trained:
            return state, value
        return {"params": params, "opt": opt, **keep(new, state)}, value

    return step, (state, BATCH)


def test_statistics_that_are_dropped_are_found():
    forgotten = lambda new, old: {"batch_stats": old["batch_stats"]}  # noqa: E731
    step, args = statistics_step(forgotten)
    for jit in (jax.jit, lambda step: step):
        (found,) = lint_step(jit(step))(*args).findings
        assert found.check == "batch_stats" and "nothing reads them" in found.message
        assert "BatchNorm_0/mean" in found.message and "BatchNorm_1/var" in found.message
        assert 'mutable=["batch_stats"]' in found.fix
    for sound in (
        statistics_step(lambda new, old: new),
        statistics_step(forgotten, train=False),  # frozen: the norms read them
        statistics_step(forgotten, trained=False),  # evaluation
    ):
        assert not told(sound[0], *sound[1])


def test_statistics_of_a_model_that_is_not_evaluated_are_no_fault():
    step, (state, batch) = statistics_step(lambda new, old: new)

    def with_target(state, batch):
        new, value = step({k: v for k, v in state.items() if k != "target"}, batch)
        target = optax.incremental_update(new["params"], state["target"]["params"], 0.1)
        return {**new, "target": {**state["target"], "params": target}}, value

    target = {"params": state["params"], "batch_stats": state["batch_stats"]}
    assert not told(with_target, {**state, "target": target}, batch)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(x)))


def nnx_step(wrt=nnx.Param, give=lambda model, optimizer: None):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=wrt)

    def step(model, optimizer, batch):
        def loss(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        grads = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        return give(model, optimizer)

    return step, (model, optimizer, BATCH)


def test_batch_statistics_of_nnx_that_an_optimizer_moves_are_found():
    step, args = nnx_step(wrt=(nnx.Param, nnx.BatchStat))
    (found,) = lint_step(step)(*args).findings
    assert found.check == "batch_stats" and "norm/mean" in found.message
    assert not told(nnx.jit(nnx_step()[0]), *args[:0], *nnx_step()[1])


def test_changes_of_nnx_modules_that_jax_jit_loses_are_found():
    step, args = nnx_step()
    (found,) = lint_step(jax.jit(step))(*args).findings
    assert found.check == "lost_state" and "norm/mean" in found.message
    assert (
        "nnx.jit" in found.fix and "test_state_checks.py" in found.source or "flax" in found.source
    )
    for jit in (nnx.jit, lambda step: step):
        assert not told(jit(step), *args)


GIVEN = {
    "both": lambda model, optimizer: (model, optimizer),
    "both, exchanged": lambda model, optimizer: {"optimizer": optimizer, "model": model},
    "states": lambda model, optimizer: (1.0, nnx.state(model), nnx.state(optimizer)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_modules_that_jax_jit_returns_are_not_lost(name):
    step, args = nnx_step(give=GIVEN[name])
    assert not told(jax.jit(step), *args)


def test_modules_that_jax_jit_only_reads_are_not_lost():
    def eval_step(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    model = Network(nnx.Rngs(0))
    model.eval()
    assert not told(jax.jit(eval_step), model, BATCH)


def test_a_weak_type_that_comes_back_is_found():
    step, (params, opt_state, batch) = handing_on(optax.sgd(0.1), NEW)

    def adding(state, batch, weak):
        params, _ = step(state["params"], opt_state, batch)
        rate = jnp.where(True, 0.1, 0.2) if weak else state["rate"] * 0.5
        return {"params": params, "rate": rate}

    state = {"params": params, "rate": jnp.float32(0.1)}
    ((check, message),) = told(functools.partial(adding, weak=True), state, batch)
    assert check == "dtype" and message == "float32 comes back as weakly typed float32: rate"
    assert not told(functools.partial(adding, weak=False), state, batch)
    weak = {**state, "rate": jnp.asarray(0.1)}
    for each in (True, False):
        assert not told(functools.partial(adding, weak=each), weak, batch)
    traces = []

    @jax.jit
    def counted(state):
        traces.append(1)
        return adding(state, batch, weak=True)

    for _ in range(3):
        state = counted(state)
    assert len(traces) == 2
