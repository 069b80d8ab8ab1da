"""A table of wrong arguments: every argument that is no plain setting, and the values it refuses.

Settings (numbers, bools, dtypes, choices, functions, axis names) are in `test_settings`, whose
tables are made from the signatures. Here are trees, states, keys, meshes, schedules, policies,
rules, words, what functions of the user return, and the arguments of the functions that public
names return: `init`, `update`, a step.

An entry has a call with one argument left open, and the groups of values that are wrong for it.
A call that would compute is traced (`traced`), so that nothing is compiled.
"""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx import fused, pipelining, plotting

SOURCES = pathlib.Path(ampx.__file__).parent
W = np.ones((4, 4), np.float32)
P = {"w": jnp.asarray(W)}
X = jnp.ones((4, 4))
SGD = optax.sgd(0.1)
NAN = float("nan")
AUTO = (jax.sharding.AxisType.Auto,)
KEY = jax.random.key(0)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def deleted(like=W):
    """An array whose buffer is gone, as after a donation."""
    array = jnp.asarray(like)
    array.delete()
    return array


def traced(call):
    """A call whose arrays are traced and not computed; what it returns does not matter."""

    def check(value):
        jax.eval_shape(lambda: (call(value), ())[1])

    return check


# --- groups of wrong values, by name --------------------------------------------------------------

WORDS = {"a word": "w", "an object": object(), "a function": len}
NO_ARRAYS = {
    **WORDS,
    "a word inside": {"w": "x"},
    "an object array": {"w": np.array([None])},
    "an array of words": {"w": np.array("x")},
    "a deleted array": {"w": deleted()},
}
OTHER_TREES = {
    "another name": {"v": X},
    "one more": {"w": X, "b": X},
    "one less": {},
    "a list": [X],
    "a bare array": X,
    "None": None,
    "another shape": {"w": jnp.ones(4)},
    "a row": {"w": jnp.ones((1, 4))},
    "a number": {"w": 1.0},
}
LIKE_PARAMS = {**NO_ARRAYS, **OTHER_TREES}
NO_GRADS = {"bools": {"w": X > 0}, "a random key": {"w": jax.random.split(KEY, (4, 4))}}
NO_STATES = {**WORDS, "a number": 3, "a mapping of words": {"w": "x"}}
PARAMS_AS_STATE = {"parameters": P}
KEYS = {
    "a word": "k",
    "a seed": 3,
    "a float": 0.5,
    "floats": jnp.ones(2),
    "several keys": jax.random.split(KEY),
    "a bool": True,
    "an object": object(),
}
NOT_A_WORD = {"a number": 3, "None": None, "bytes": b"x", "a list": ["a"], "an object": object()}
MESHES = {"a number": 3, "a word": "data", "a tuple": (2, 2), "an object": object()}
POLICIES = {
    "a number": 3,
    "an unknown word": "bfloat61",
    "a level that is none": "O7",
    "a list": ["O2"],
    "a bool": True,
    "an object": object(),
    "a schedule's words": "fast|step|0.9",
}
RULES = {"a number": 3, "a word": "half", "a dict": {}, "a list": [], "None": None}
SCHEDULES = {"a number": 3, "a word": "fast|step|0.9", "None": None, "phases": (ampx.Phase("O2"),)}
GRIDS = {"a number": 3, "a word": "1f1b", "None": None, "rows": ((),)}
NO_NAMES = {"a number": 3, "a number inside": {"w": 3}, "an object": object(), "a bool": True}
NO_NAMES |= {"no name": jax.P(jax.P.UNCONSTRAINED), "an array": np.ones(2)}
NO_AXES = {"a number": 3, "a word": "axes", "an object": object()}
WORDS_NO_FUNCTION = {"a word": "2", "an object": object(), "None": None, "a bool": True}
AUX = {"a slip": "maen", "a number": 3, "a slip inside": {"a": "sun"}}
SCALES = {
    "a word": "8",
    "a bool": True,
    "NaN": NAN,
    "a tree": {},
    "a vector": jnp.ones(2),
    "0": 0.0,
}
MASKS = {"a word": "w", "a number": 3, "words inside": {"w": "yes"}, "another tree": {"v": True}}
OTHER_LABELS = {"another tree": {"v": "a"}}  # labels may be words and numbers
AS_STATES = {**NO_STATES, **PARAMS_AS_STATE, "a list of arrays": [X]}
BATCHES = {
    **NO_ARRAYS,
    "a scalar": {"x": jnp.float32(1)},
    "no rows": {},
    "leaves of other sizes": {"x": jnp.ones(4), "y": jnp.ones(2)},
    "rows that k does not divide": jnp.ones((3, 4)),
}
ORDERS = {"a number": 3, "a word": "0", "a hole": (0, 2), "floats": (0.0,), "bools": (True,)}

# --- the table ------------------------------------------------------------------------------------

TABLE = {}


def add(name, call, *groups):
    assert name not in TABLE, name
    TABLE[name] = (call, {key: value for group in groups for key, value in group.items()})


def without(group, *names):
    return {name: value for name, value in group.items() if name not in names}


# Trees.
add("apply_updates.params", traced(lambda v: ampx.apply_updates(v, P)), LIKE_PARAMS)
add("apply_updates.updates", traced(lambda v: ampx.apply_updates(P, v)), LIKE_PARAMS, NO_GRADS)
SHAPES_ALONE = without(NO_ARRAYS, "a deleted array")  # a deleted array still has a shape
add("bucket_layout.tree", ampx.bucket_layout, SHAPES_ALONE)
add("count_nonfinite.tree", traced(ampx.count_nonfinite), NO_ARRAYS)
add("forward_order.params", lambda v: ampx.forward_order(loss_fn, v, X), SHAPES_ALONE)
add("fused.flatten.params", traced(fused.flatten), NO_ARRAYS, {"flat ones": fused.flatten(P)})
add("split_microbatches.batch", traced(lambda v: ampx.split_microbatches(v, 2)), BATCHES)
for name in ("cast", "cast_floating"):
    cast = getattr(ampx, name)
    gone = {"a deleted array": {"w": deleted()}}
    add(f"{name}.tree", traced(lambda v, cast=cast: cast(v, "bf16")), gone)


def mapped(call):
    """In a mapped axis "data"."""
    return lambda v: jax.eval_shape(jax.vmap(lambda x: (call(v), x)[1], axis_name="data"), X)


reduce_in_backward = ampx.reduce_in_backward
add(
    "reduce_in_backward.params",
    mapped(lambda v: reduce_in_backward(v, "data")),
    NO_ARRAYS,
)
add(
    "reduce_in_backward.accumulator",
    mapped(lambda v: reduce_in_backward(P, "data", v)),
    without(LIKE_PARAMS, "None"),
)

# States.
SCALED = ampx.dynamic_loss_scale(SGD)
SCALED_STATE = SCALED.init(P)
for name in "current_loss_scale find_loss_scale_state is_skipped metrics precision_phase".split():
    add(f"{name}.opt_state", traced(getattr(ampx, name)), AS_STATES)
add("raise_if_exhausted.opt_state", ampx.raise_if_exhausted, AS_STATES)
RUNNING = optax.adam(0.1)
add("extend_state.opt_state", traced(lambda v: ampx.extend_state(RUNNING, v, P)), AS_STATES)
add(
    "extend_state.params",
    traced(lambda v: ampx.extend_state(RUNNING, RUNNING.init(P), v)),
    without(SHAPES_ALONE),
    {"another shape": {"w": jnp.ones(4)}},
)
NO_FORMAT = {"a number": 3, "None": None, "a state": SCALED_STATE, "no keys": {}, "a word": "1"}
add("check_state_format.saved", lambda v: ampx.check_state_format(v, SCALED_STATE), NO_FORMAT)
SAVED = ampx.state_format(SCALED_STATE)
OTHER_STATE = {"sgd's": SGD.init(P), "parameters": P, "None": None, "a word": "w"}
add("check_state_format.state", lambda v: ampx.check_state_format(SAVED, v), OTHER_STATE)
add(
    "upgrade_state.saved",
    lambda v: ampx.upgrade_state(v, SCALED_STATE),
    without(NO_FORMAT, "a state"),
)
add("upgrade_state.state", lambda v: ampx.upgrade_state(SCALED_STATE, v), OTHER_STATE)
NO_OPTIMIZER = {"a word": "w", "a number": 3, "an object": object()}
add("is_skipped.optimizer", traced(lambda v: ampx.is_skipped(SCALED_STATE, v)), NO_OPTIMIZER)
select = ampx.select_if_finite
add(
    "select_if_finite.optimizer",
    traced(lambda v: select(SCALED_STATE, P, P, v)),
    NO_OPTIMIZER,
)
add("select_if_finite.opt_state", traced(lambda v: select(v, P, P)), AS_STATES)
for at, name in enumerate(("new_tree", "old_tree")):

    def pick(v, at=at):
        return select(SCALED_STATE, *((v, P) if at == 0 else (P, v)))

    add(f"select_if_finite.{name}", traced(pick), LIKE_PARAMS)
MASTERS = ampx.master_weights(SGD).init(P)
add("master_params.opt_state", traced(lambda v: ampx.master_params(v, P)), AS_STATES)
add(
    "master_params.params",
    traced(lambda v: ampx.master_params(MASTERS, v)),
    without(LIKE_PARAMS, "a deleted array"),
)

# Policies, rules, schedules, words.
PHASE = ampx.Phase("O2")
add("as_recipe.policy", ampx.as_recipe, POLICIES)
add("Phase.policy", ampx.Phase, POLICIES, {"None": None})
SPEC = partial(ampx.precision_schedule, "fast|step|0.9", total_steps=10)
add("precision_schedule.policy", lambda v: SPEC(policy=v), POLICIES, {"None": None})
add("value_and_grad.policy", lambda v: ampx.value_and_grad(loss_fn, policy=v), POLICIES)
add("train_step.policy", lambda v: ampx.train_step(loss_fn, SGD, policy=v), POLICIES)
add("autocast.rules", lambda v: ampx.autocast(loss_fn, rules=v), RULES)
NO_DOTS = {"a slip": "flaot8", "a dtype": jnp.float8_e4m3fn, "a number": 8, "a bool": True}
add("autocast.dots", lambda v: ampx.autocast(loss_fn, dots=v), NO_DOTS)
add("explain.dots", lambda v: ampx.explain(loss_fn, dots=v), NO_DOTS)
add("opt_level.dots", lambda v: ampx.opt_level("O1", dots=v), NO_DOTS)
add("explain.rules", lambda v: ampx.explain(loss_fn, rules=v), RULES)
TRACED = partial(ampx.trace_overflow, loss_fn, half_dtype=jnp.bfloat16)
add("trace_overflow.dots", lambda v: TRACED(dots=v), NO_DOTS)
add("trace_overflow.rules", lambda v: ampx.trace_overflow(loss_fn, rules=v), RULES)
add("opt_level.rules", lambda v: ampx.opt_level("O1", rules=v), RULES)
add("follow_schedule.schedule", lambda v: ampx.follow_schedule(SGD, v), SCHEDULES)
NO_PHASES = {"a number": 3, "a word": "O2", "None": None, "none": (), "numbers": (1, 2)}
NO_PHASES |= {"a phase": PHASE, "no end": (PHASE, PHASE), "no policy": (3, "O2")}
add("PrecisionSchedule.phases", ampx.PrecisionSchedule, NO_PHASES)
add("get_policy.name", ampx.get_policy, NOT_A_WORD, {"a slip": "p=f32,k=f16", "nothing": ""})
add("is_norm_path.path", ampx.is_norm_path, NOT_A_WORD)
add("norm_rule.model", ampx.norm_rule, WORDS, {"a number": 3, "None": None, "parameters": P})
add("opt_level.level", ampx.opt_level, NOT_A_WORD, {"a zero": "00", "another": "O4", "small": "o2"})
LEVEL_SCALES = {"a slip": "dynamc", "a bool": True, "too small": 0.5, "NaN": NAN, "a tree": {}}
LEVEL_SCALES |= {"an object": object(), "a vector": np.ones(2)}
add("opt_level.loss_scale", lambda v: ampx.opt_level("O2", loss_scale=v), LEVEL_SCALES)
CONFIGS = {
    "a file's name": "ds_config.json",
    "a list": [],
    "None": None,
    "a key that is none": {"gradient_clipping": 0, "fp17": {}},
}
add("read_deepspeed_config.config", lambda v: ampx.read_deepspeed_config(v, SGD), CONFIGS)
add("train_step.loss_scale", lambda v: ampx.train_step(loss_fn, SGD, loss_scale=v), LEVEL_SCALES)
add("loss_scale.choice", lambda v: ampx.loss_scale(v, SGD), LEVEL_SCALES)
add("loss_scale.options", lambda v: ampx.loss_scale("dynamic", SGD, **{v: 1}), {"a slip": "scal"})
FLAGS = {"a word": "False", "a number": 1, "None": None}
add("opt_level.keep_norm_float32", lambda v: ampx.opt_level("O2", keep_norm_float32=v), FLAGS)
NO_SPECS = {"one field": "fast", "a slip": "fsat|step|0.9", "too much": "fast|step|2", "two": "a|b"}
add(
    "precision_schedule.spec",
    lambda v: ampx.precision_schedule(v, total_steps=10),
    NOT_A_WORD,
    NO_SPECS,
)
add("banned_function.instead", lambda v: ampx.banned_function(loss_fn, v), NOT_A_WORD)


def label(v):
    with ampx.progress_bar(3, label=v, disable=True):
        pass


add("progress_bar.label", label, NOT_A_WORD)
add(
    "multi_steps.every_k",
    lambda v: ampx.multi_steps(SGD, v),
    {"0": 0, "a float": 2.0},
    WORDS_NO_FUNCTION,
)
add("train_step.local_norm", lambda v: ampx.train_step(loss_fn, SGD, local_norm=v), FLAGS)
for name, given in (("value_and_grad", ()), ("train_step", (SGD,))):
    make = partial(getattr(ampx, name), loss_fn, *given)
    add(f"{name}.aux_reduction", lambda v, make=make: make(aux_reduction=v), AUX)
    NO_AXIS = {"1": 1, "a word": "0", "a float": 0.0, "a bool": True, "1 inside": {"x": 1}}
    add(f"{name}.batch_axes", lambda v, make=make: make(batch_axes=v), NO_AXIS)
    NO_TABLES = {"a number": 3, "a word": "w", "a list": ["w"], "no function": {"w": 3}}
    NO_TABLES |= {"a number as a path": {1: len}}
    add(f"{name}.sparse_rows", lambda v, make=make: make(sparse_rows=v), NO_TABLES)
add("all_reduce.order", lambda v: ampx.all_reduce("data", order=v), ORDERS)
add("clip_by_bucket_norm.order", lambda v: ampx.clip_by_bucket_norm(1.0, order=v), ORDERS)
add("bucket_layout.order", lambda v: ampx.bucket_layout(P, order=v), ORDERS)
timeline = partial(ampx.bucket_timeline, bandwidth=1.0, backward_seconds=1.0, update_seconds=1.0)
NO_BYTES = {"a word": "12", "nothing": [], "a number": 3, "None": None, "bools": [True, False]}
NO_BYTES |= {"negative": [-1.0], "NaN": [NAN], "complex": [1j], "a matrix": np.ones((2, 2))}
add("bucket_timeline.bucket_bytes", timeline, NO_BYTES)
add("bucket_timeline.overlap", lambda v: timeline([1.0], overlap=v), {**FLAGS, "a slip": "tial"})
add(
    "check_overlap.compiled",
    lambda v: ampx.check_overlap(loss_fn, P, X, compiled=v),
    FLAGS,
)
NO_CHECKS = {"a word": "callback", "a number": 3, "None": None, "a slip": ["calback"]}
NO_CHECKS |= {"numbers": [1, 2], "a set": {"callback"}}
add("lint_step.ignore", lambda v: ampx.lint_step(loss_fn, ignore=v), NO_CHECKS)

# Meshes.
for name, make in {
    "train_step": partial(ampx.train_step, loss_fn, SGD),
    "dynamic_loss_scale": partial(ampx.dynamic_loss_scale, SGD),
    "static_loss_scale": partial(ampx.static_loss_scale, SGD, 8.0),
    "all_reduce": partial(ampx.all_reduce, "data"),
    "value_and_grad": partial(
        ampx.value_and_grad, loss_fn, axis_name="data", scatter_gradients=True
    ),
}.items():
    add(f"{name}.model_axes", lambda v, make=make: make(model_axes=v), NO_NAMES)
ZERO = ampx.zero1(SGD, "data")
OTHER_MESH = jax.make_mesh((1,), ("model",), axis_types=AUTO)
add(
    "zero1_specs.mesh",
    lambda v: ampx.zero1_specs(ZERO, P, v),
    MESHES,
    {"None": None, "another's": OTHER_MESH},
)
MESH = jax.make_mesh((1,), ("data",), axis_types=AUTO)
add("zero1_specs.params", lambda v: ampx.zero1_specs(ZERO, v, MESH), SHAPES_ALONE)
add(
    "zero1.model_axes",
    lambda v: ampx.zero1(SGD, "data", model_axes=v),
    NO_NAMES,
)
add(
    "zero1_specs.model_axes",
    lambda v: ampx.zero1_specs(ZERO, P, MESH, model_axes=v),
    {**NO_NAMES, "another mesh's": "model", "a name alone": "data"},
)
add("zero1_specs.tx", lambda v: ampx.zero1_specs(v, P, MESH), {"no zero1": SGD})

# Functions that public names return: gradients.
GRADS_OF = {
    "value_and_grad()": ampx.value_and_grad(loss_fn),
    "value_and_grad(2)": ampx.value_and_grad(loss_fn, num_microbatches=2),
}
for name, grads_of in GRADS_OF.items():
    add(f"{name}.params", traced(lambda v, g=grads_of: g(v, X)), NO_ARRAYS)
    add(f"{name}.loss_scale", traced(lambda v, g=grads_of: g(P, X, loss_scale=v)), SCALES)
    add(f"{name}.key", traced(lambda v, g=grads_of: g(P, X, key=v)), KEYS)
    add(
        f"{name}.differentiate",
        traced(lambda v, g=grads_of: g(P, X, differentiate=v)),
        without(FLAGS, "None"),
    )
add("value_and_grad(2).batch", traced(lambda v: GRADS_OF["value_and_grad(2)"](P, v)), BATCHES)
SCHEDULE = SPEC()
GRADS_IN_PHASES = ampx.value_and_grad(loss_fn, policy=SCHEDULE)
NO_PHASE = {"None": None, "a word": "0", "too large": 2, "negative": -1, "a float": 0.0}
NO_PHASE |= {"a bool": True, "a vector": jnp.zeros(2, jnp.int32), "an object": object()}
add("value_and_grad(schedule).phase", traced(lambda v: GRADS_IN_PHASES(P, X, phase=v)), NO_PHASE)
STATEFUL = ampx.value_and_grad(lambda p, x, model_state: (jnp.sum(p["w"]), model_state))
add(
    "value_and_grad(state).model_state",
    traced(lambda v: STATEFUL(P, X, model_state=v)),
    NO_ARRAYS,
)

# Transformations: init and update.
TRANSFORMATIONS = {
    "dynamic_loss_scale": ampx.dynamic_loss_scale(optax.adam(0.1)),
    "dynamic_loss_scale(fused)": ampx.dynamic_loss_scale(fused.adam(0.1)),
    "static_loss_scale": ampx.static_loss_scale(SGD, 8.0),
    "multi_steps": ampx.multi_steps(optax.adam(0.1), 2),
    "master_weights": ampx.master_weights(optax.adam(0.1)),
    "follow_schedule": ampx.follow_schedule(ampx.dynamic_loss_scale(optax.adam(0.1)), SCHEDULE),
    "fused.split_masters": fused.split_masters(fused.adam(0.1)),
    "fused.stochastic_rounding": fused.stochastic_rounding(fused.adam(0.1)),
    "fused.adam": fused.adam(0.1),
    "fused.adamw": fused.adamw(0.1),
    "fused.sgd": fused.sgd(0.1),
    "fused.sgd(momentum)": fused.sgd(0.1, 0.9),
    "fused.lamb": fused.lamb(0.1),
    "fused.lion": fused.lion(0.1),
    "fused.novograd": fused.novograd(0.1),
    "fused.adagrad": fused.adagrad(0.1),
    "fused.adadelta": fused.adadelta(0.1),
    "clip_by_bucket_norm": ampx.clip_by_bucket_norm(1.0),
}
NEEDS_PARAMS = (
    "master_weights fused.split_masters fused.stochastic_rounding fused.adamw fused.lamb fused.lion"
).split()
# These keep no array like the parameters. So nothing tells whose their state is, and with no state
# that has the right class they can go wrong; and without parameters gradients are compared to none.
KEEP_NOTHING = ("static_loss_scale", "fused.sgd")
STATES_OF_OTHERS = {
    "sgd's": SGD.init(P),
    "momentum's": optax.sgd(0.1, 0.9).init(P),
    "adam's": optax.adam(0.1).init(P),
    "a clip's": optax.chain(optax.clip(1.0), optax.adam(0.1)).init(P),
    "a scaled sgd's": ampx.static_loss_scale(optax.sgd(0.1, 0.9), 2.0).init(P),
    "a window's": ampx.multi_steps(optax.sgd(0.1, 0.9), 2).init(P),
    "fused lion's": fused.lion(0.1).init(P),
    "a deleted one": jax.tree.map(deleted, SCALED_STATE),
}
OTHER_PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
for name, tx in TRANSFORMATIONS.items():
    state = tx.init(P)
    if name != "clip_by_bucket_norm":  # whose `init` looks at nothing
        gone = NO_ARRAYS if name == "master_weights" else SHAPES_ALONE
        add(f"{name}.init.params", traced(tx.init), gone)
    add(
        f"{name}.update.updates",
        traced(lambda v, tx=tx, state=state: tx.update(v, state, P)),
        LIKE_PARAMS,
        NO_GRADS,
    )
    if name not in ("clip_by_bucket_norm", *NEEDS_PARAMS):
        add(
            f"{name}.update.updates, alone",
            traced(lambda v, tx=tx, state=state: tx.update(v, state)),
            NO_ARRAYS if name in KEEP_NOTHING else LIKE_PARAMS,
        )
    if name != "clip_by_bucket_norm":  # keeps nothing
        # A state whose leaves and classes are right is one, whoever has made it.
        own = jax.tree.structure(state)
        others = {k: s for k, s in STATES_OF_OTHERS.items() if jax.tree.structure(s) != own}
        others["its own, for other parameters"] = tx.init(OTHER_PARAMS)
        if name in KEEP_NOTHING:
            others = {}
        add(
            f"{name}.update.state",
            traced(lambda v, tx=tx: tx.update(P, v, P)),
            AS_STATES,
            others,
        )
        gone = LIKE_PARAMS if name in NEEDS_PARAMS else without(LIKE_PARAMS, "None")
        add(f"{name}.update.params", traced(lambda v, tx=tx, s=state: tx.update(P, s, v)), gone)
WEIGHED = ampx.multi_steps(SGD, 2, normalize="weights")
NO_WEIGHT = {"None": None, "a word": "8", "a tree": {}, "a vector": jnp.ones(2), "a bool": True}
add(
    "multi_steps.update.weight",
    traced(lambda v: WEIGHED.update(P, WEIGHED.init(P), weight=v)),
    NO_WEIGHT,
)
WAITS = ampx.precision_schedule("fast1|loss|1.5", final_loss=2.0)
WAITING = ampx.follow_schedule(SGD, WAITS)
add(
    "follow_schedule.update.value",
    traced(lambda v: WAITING.update(P, WAITING.init(P), value=v)),
    NO_WEIGHT,
)
TWO = ampx.dynamic_loss_scale(SGD, num_losses=2)
NO_LOSSES = {
    "one tree": P,
    "one": (P,),
    "none": (None, None),
    "a word": "w",
    "other trees": (P, {}),
}
add(
    "dynamic_loss_scale(2).update.updates",
    traced(lambda v: TWO.update(v, TWO.init(P), P)),
    NO_LOSSES,
)


def shards(tx):
    """`update` of a transformation that reduces, in a mapped axis of one device."""

    def update(grads, state, params):
        def local(x):
            tx.update(grads, state, params)
            return x

        # Values are closed over, so whatever they are the program itself is right.
        spec = jax.sharding.PartitionSpec()
        jax.eval_shape(jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec), X)

    return update


ZEROS = ampx.zero1(optax.adam(0.1), "data")
UPDATE_ZERO, REDUCE = shards(ZEROS), shards(ampx.all_reduce("data"))
ZERO_STATE = ZEROS.init(P)
add("zero1.update.updates", lambda v: UPDATE_ZERO(v, ZERO_STATE, P), LIKE_PARAMS)
add("zero1.update.params", lambda v: UPDATE_ZERO(P, ZERO_STATE, v), LIKE_PARAMS)
add("zero1.update.state", lambda v: UPDATE_ZERO(P, v, P), AS_STATES, STATES_OF_OTHERS)
add("zero1.init.params", traced(ZEROS.init), SHAPES_ALONE)
add("all_reduce.update.updates", lambda v: REDUCE(v, (), P), NO_ARRAYS)

ADAM = fused.adam(0.1)
ADAM_STATE = ADAM.init(P)
add("fused.apply.grads", traced(lambda v: fused.apply(ADAM, v, ADAM_STATE, P)), LIKE_PARAMS)
add("fused.apply.params", traced(lambda v: fused.apply(ADAM, P, ADAM_STATE, v)), LIKE_PARAMS)
add(
    "fused.apply.opt_state",
    traced(lambda v: fused.apply(ADAM, P, v, P)),
    AS_STATES,
    without(STATES_OF_OTHERS),
)
FUSED_SCALED = ampx.dynamic_loss_scale(ADAM)
NO_VERDICTS = {
    "a word": "good",
    "a bool": True,
    "a pair": (1, 2),
    "counts": jnp.zeros(2, jnp.int32),
}
add(
    "fused.apply.verdict",
    traced(lambda v: fused.apply(FUSED_SCALED, P, FUSED_SCALED.init(P), P, verdict=v)),
    NO_VERDICTS,
)
add(
    "fused.apply.model_axes",
    traced(lambda v: fused.apply(ADAM, P, ADAM_STATE, P, model_axes=v)),
    NO_NAMES,
)
add("fused.apply.tx", traced(lambda v: fused.apply(v, P, ADAM_STATE, P)), {"optax's": SGD})
for name, argument in (
    ("adamw", "mask"),
    ("lamb", "mask"),
    ("lion", "mask"),
    ("adadelta", "weight_decay_mask"),
):

    def decay(v, name=name, argument=argument):
        tx = getattr(fused, name)(0.1, weight_decay=0.1, **{argument: v})
        return tx.update(P, tx.init(P), P)

    add(f"fused.{name}.{argument}", traced(decay), MASKS)
add("fused.flatten.mask", traced(lambda v: fused.flatten(P, mask=v)), OTHER_LABELS)
FLAT = fused.flatten(P)
add(
    "fused.per_buffer.choice",
    traced(lambda v: optax.adamw(0.1, mask=fused.per_buffer(v)).init(FLAT)),
    OTHER_LABELS,
)
NO_BITS = {"4": 4, "a word": "8", "a bool": True, "a float": 8.0, "None": None}
add("fused.split_masters.error_bits", lambda v: fused.split_masters(SGD, v), NO_BITS)
add("FlatParams.like.tree", traced(FLAT.like), LIKE_PARAMS)
LAYOUT = ampx.bucket_layout(P)
add("BucketLayout.flatten.tree", traced(LAYOUT.flatten), LIKE_PARAMS)
NO_BUFFERS = {"a number": 3, "a word": "w", "none": [], "two": [jnp.ones(16)] * 2}
NO_BUFFERS |= {
    "a short one": [jnp.ones(4)],
    "words": ["w"],
    "a deleted one": [deleted(np.ones(16))],
}
add("BucketLayout.unflatten.buffers", traced(lambda v: LAYOUT.unflatten(v, P)), NO_BUFFERS)
add(
    "BucketLayout.unflatten.like",
    traced(lambda v: LAYOUT.unflatten([jnp.ones(16)], v)),
    without(OTHER_TREES),
)

# The step.
STEP = ampx.train_step(loss_fn, optax.adam(0.1), loss_scale="dynamic")
STEP2 = ampx.train_step(loss_fn, optax.adam(0.1), num_microbatches=2)
STATE = STEP.init(P)
add("TrainStep.init.params", traced(STEP.init), NO_ARRAYS)
add("TrainStep.init.key", traced(lambda v: STEP.init(P, key=v)), KEYS)
add("TrainStep.init.model_state", traced(lambda v: STEP.init(P, model_state=v)), NO_ARRAYS)
OTHER_STATES = {
    f"with the state of {name}": STATE._replace(opt_state=state)
    for name, state in STATES_OF_OTHERS.items()
}
OTHER_STATES |= {
    "with other parameters": STATE._replace(params=OTHER_PARAMS),
    "with parameters of another shape": STATE._replace(params={"w": jnp.ones(4)}),
    "with a word for parameters": STATE._replace(params="w"),
    "with deleted parameters": STATE._replace(params={"w": deleted()}),
    "with a word for a step": STATE._replace(step="0"),
    "with steps": STATE._replace(step=jnp.zeros(2, jnp.int32)),
    "with a float for a step": STATE._replace(step=0.5),
    "with None for a step": STATE._replace(step=None),
    "its optimizer state": STATE.opt_state,
    "a pair": (P, STATE.opt_state),
}
OTHER_STATES |= {f"with {name} as a key": STATE._replace(key=key) for name, key in KEYS.items()}
add("TrainStep.call.state", traced(lambda v: STEP(v, X)), AS_STATES, {"None": None}, OTHER_STATES)
add("TrainStep.call.batch", traced(lambda v: STEP2(STEP2.init(P), v)), BATCHES)
add("TrainStep.call.key", traced(lambda v: STEP(STATE, X, key=v)), KEYS)
OWN = ("grad", "weight", "verdict", "reduce_op", "reduce_axes", "shared_loss_axes", "overflow")
OWN += ("tail",)
TAKEN = {name: name for name in OWN}
add("TrainStep.call.more", traced(lambda v: STEP(STATE, X, v)), {"a batch": X, "None": None})
add("TrainStep.call.extra_args", traced(lambda v: STEP(STATE, X, **{v: 1.0})), TAKEN)
PHASES_STEP = ampx.train_step(loss_fn, SGD, policy=SCHEDULE)
NO_NUMBER = {"a word": "1", "a float": 0.5, "a bool": True, "too large": 2, "negative": -1}
NO_NUMBER |= {"None": None, "a vector": np.zeros(2, int)}
add("TrainStep.in_phase.number", PHASES_STEP.in_phase, NO_NUMBER)
add(
    "PrecisionSchedule.phase_at.step",
    SCHEDULE.phase_at,
    without(NO_NUMBER, "too large"),
)

# Records and rules.
for name in ("half", "float8", "float32", "widest", "banned"):
    method = getattr(ampx.DEFAULT_RULES, name)
    NO_TARGETS = {"a number": 3, "None": None, "nothing": "", "a slip": "dot_genral"}
    NO_TARGETS |= {"another sign": "scatter_add", "built-in code": len, "a list": ["exp"]}
    add(f"Rules.{name}.targets", method, NO_TARGETS)
    add(f"Rules.{name}.when", lambda v, m=method: m(when=v), {"a number": 3, "a word": "exp"})
NO_RESULT = {"half": jnp.float16, "a slip": "float23", "a number": 3, "a bool": True}
rule = ampx.DEFAULT_RULES.half
add("Rules.half.result", lambda v: rule("dot_general", result=v), NO_RESULT)
RECIPE = ampx.opt_level("O2")
add("Recipe.wrap.fun", RECIPE.wrap, {"a number": 3, "a word": "f", "None": None})
INDICES = jnp.array([0, 1])
sparse = ampx.SparseRows.of
NO_INDICES = {"floats": jnp.ones(2), "a word": "w", "bools": jnp.ones(2, bool), "too many": X}
NO_INDICES |= {"None": None, "an object": object(), "a deleted array": deleted(np.arange(2))}
NO_ROWS = {"too few": jnp.ones((1, 4)), "a word": "w", "None": None, "a deleted array": deleted()}
add("SparseRows.of.indices", traced(lambda v: sparse(v, X[:2], num_rows=4)), NO_INDICES)
add("SparseRows.of.rows", traced(lambda v: sparse(INDICES, v, num_rows=4)), NO_ROWS)
NO_COUNT = {"0": 0, "negative": -1, "a float": 4.0, "a word": "4", "a bool": True, "None": None}
add("SparseRows.of.num_rows", traced(lambda v: sparse(INDICES, X[:2], num_rows=v)), NO_COUNT)

# Pipelines.


def stages(**kwargs):
    arguments = dict(
        first=lambda p, shared, batch, key: batch,
        stage=lambda p, x, key: x * p,
        last=lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(2)),
        schedule=pipelining.one_f_one_b(1, 2),
        axis_name="stage",
        mesh=STAGES,
    )
    return pipelining.value_and_grad(**{**arguments, **kwargs})


STAGES = jax.make_mesh((1,), ("stage",), axis_types=AUTO)
PIPELINE = stages()
LAYERS, ROWS = {"stages": jnp.ones(1)}, jnp.ones(2)
NO_FUNCTION = {"a number": 3, "a word": "f", "None": None}
for name in ("first", "last", "stage"):
    add(f"pipelining.value_and_grad.{name}", lambda v, n=name: stages(**{n: v}), NO_FUNCTION)
PIPELINE_SETTINGS = {
    "schedule": GRIDS,
    "mesh": {**MESHES, "another's": OTHER_MESH},
    "policy": POLICIES,
    "aux_reduction": {**AUX, "stack": "stack"},
    "stash": {"a slip": "inpust", "a number": 3, "None": None},
    "skips": {
        "a number": 3,
        "a word": "a",
        "a tuple": (1,),
        "no edge": {"a": 3},
        "one": {"a": (0,)},
    },
    "layers_per_stage": {"a number": 3, "a word": "22", "a float": (2.5,), "a bool": (True,)},
    "param_specs": {"a number": 3, "a word": "a", "a tuple": (1,), "no spec": {"stages": 3}},
    "axis_name": {"another": "data"},
    "data_axes": {"another": "data", "its own": "stage"},
}
for name, group in PIPELINE_SETTINGS.items():
    add(f"pipelining.value_and_grad.{name}", lambda v, n=name: stages(**{n: v}), group)
NO_PARTS = {
    **NO_ARRAYS,
    "no stages": {"first": X},
    "None": None,
    "a part too many": {**LAYERS, "x": X},
}
NO_PARTS |= {"a word for stages": {"stages": "w"}}
NO_PARTS |= {"layers that do not divide": {"stages": {"w": jnp.ones(1), "b": jnp.ones(2)}}}
NO_PARTS |= {"deleted ones": {"stages": deleted(np.ones(1))}, "a scalar": {"stages": jnp.ones(())}}
PIPELINE_CALLS = {
    "call": lambda params, batch, **kwargs: PIPELINE(params, batch, **kwargs),
    "value": lambda params, batch, **kwargs: PIPELINE.value(params, batch, **kwargs),
}
ROWS_THAT_DO_NOT_FIT = {**BATCHES, "rows that k does not divide": jnp.ones(3)}
for name, run in PIPELINE_CALLS.items():
    owner = f"PipelineGradients.{name}"
    add(f"{owner}.params", traced(lambda v, run=run: run(v, ROWS)), NO_PARTS)
    add(f"{owner}.batch", traced(lambda v, run=run: run(LAYERS, v)), ROWS_THAT_DO_NOT_FIT)
    add(f"{owner}.key", traced(lambda v, run=run: run(LAYERS, ROWS, key=v)), KEYS)
IN_PHASES = stages(policy=SCHEDULE)
add("PipelineGradients.call.phase", traced(lambda v: IN_PHASES(LAYERS, ROWS, phase=v)), NO_PHASE)
add(
    "PipelineGradients.value.phase",
    traced(lambda v: IN_PHASES.value(LAYERS, ROWS, phase=v)),
    NO_PHASE,
)
add("PipelineGradients.in_phase.number", IN_PHASES.in_phase, NO_NUMBER)
add(
    "PipelineGradients.call.loss_scale",
    traced(lambda v: PIPELINE(LAYERS, ROWS, loss_scale=v)),
    SCALES,
)
add(
    "PipelineGradients.call.model_state",
    traced(lambda v: PIPELINE(LAYERS, ROWS, model_state=v)),
    {"a state": P, "a word": "w"},
)
add("PipelineGradients.call.wrt", traced(lambda v: PIPELINE(LAYERS, ROWS, wrt=v)), WORDS)
SHAPELESS = without(NO_PARTS, "a deleted array", "deleted ones")
add("PipelineGradients.shardings.params", PIPELINE.shardings, SHAPELESS)
add(
    "PipelineGradients.shardings.mesh",
    lambda v: PIPELINE.shardings(LAYERS, v),
    MESHES,
    {"another's": OTHER_MESH},
)
plan = pipelining.plan
NO_COST = {
    "a word": "1",
    "a bool": True,
    "negative": -1.0,
    "NaN": NAN,
    "words": ["1"],
    "two": [1, 2],
}
PLAN_ARGUMENTS = {
    "grads_of": {"a number": 3, "a step": STEP, "None": None},
    "params": SHAPELESS,
    "batch": without(ROWS_THAT_DO_NOT_FIT, "a deleted array"),
    "tx": {"a number": 3, "a word": "adam"},
    "mesh": {**MESHES, "another's": OTHER_MESH, "words": {"stage": "1"}, "0": {"stage": 0}},
    "key": KEYS,
    "forward": NO_COST,
    "backward": NO_COST,
}
for name, group in PLAN_ARGUMENTS.items():

    def make_plan(v, name=name):
        return plan(**{"grads_of": PIPELINE, "params": LAYERS, "batch": ROWS, **{name: v}})

    add(f"pipelining.plan.{name}", make_plan, group)
SCHEDULE_1F1B = pipelining.one_f_one_b(2, 4)
for name in ("forward", "backward", "input_grad", "weight_grad"):
    group = {**NO_COST, "three": [1, 2, 3]}
    del group["two"]
    add(f"Schedule.simulate.{name}", lambda v, n=name: SCHEDULE_1F1B.simulate(**{n: v}), group)
NO_TIME = {
    "a word": "1",
    "a bool": True,
    "NaN": NAN,
    "negative": -1,
    "a list": [1],
    "infinite": NAN,
}
add("Schedule.simulate.communication", lambda v: SCHEDULE_1F1B.simulate(communication=v), NO_TIME)
NO_MODE = {"a slip": "asnyc", "a number": 3, "None": None}
add("Schedule.simulate.mode", lambda v: SCHEDULE_1F1B.simulate(mode=v), NO_MODE)
add("Schedule.liveness.mode", lambda v: SCHEDULE_1F1B.liveness(mode=v), NO_MODE)
NO_STASH = {"a slip": "inpust", "a number": 3, "a policy": jax.checkpoint_policies.dots_saveable}
add("Schedule.simulate.stash", lambda v: SCHEDULE_1F1B.simulate(stash=v), NO_STASH)
add("Schedule.liveness.stash", lambda v: SCHEDULE_1F1B.liveness(stash=v), NO_STASH, {"None": None})
add("Schedule.liveness.merge_chunks", lambda v: SCHEDULE_1F1B.liveness(merge_chunks=v), FLAGS)
NO_TICK = {"a word": "1", "a float": 1.5, "a bool": True, "a list": [1]}
for name in ("start", "stop"):
    add(f"Schedule.render.{name}", lambda v, n=name: SCHEDULE_1F1B.render(**{n: v}), NO_TICK)
add("Schedule.from_csv.name", lambda v: pipelining.Schedule.from_csv("0F0,0B0", name=v), NOT_A_WORD)
NO_SOURCE = {"a number": 3, "None": None, "an object": object(), "a slip": "0G0", "nothing": ""}
NO_SOURCE |= {"a list": [["0F0"]], "a gap": "0F0,2F0,0B0,2B0", "bytes": b"0F0,0B0"}
add("Schedule.from_csv.source", pipelining.Schedule.from_csv, NO_SOURCE)
NO_PATH = {"a number": 3, "a list": ["a"], "an object": object(), "a bool": True}
add("Schedule.to_csv.path", SCHEDULE_1F1B.to_csv, NO_PATH)
F, B = pipelining.Action(0, "F", 0), pipelining.Action(0, "B", 0)
grid = dict(name="mine", rows=((F, B),), device_of=(0,), num_microbatches=1)
NO_FIELD = {
    "rows": {"a number": 3, "words": (("F", "B"),), "None": None, "none": (), "a row": (F, B)},
    "device_of": {
        "a number": 3,
        "words": ("0",),
        "too large": (1,),
        "floats": (0.0,),
        "two": (0, 0),
    },
    "num_microbatches": {"a word": "1", "a float": 1.0, "0": 0, "None": None, "two": 2},
    "has_backward": FLAGS,
    "name": NOT_A_WORD,
}
for name, group in NO_FIELD.items():

    def make_schedule(v, name=name):
        return pipelining.Schedule(**{**grid, name: v}).validate()

    add(f"Schedule.{name}", make_schedule, group)
NO_COSTS = {
    "a word": "12",
    "words": ["1", "2"],
    "bools": [True, False],
    "complex": [1j, 2],
    "NaN": [NAN],
}
NO_COSTS |= {"nothing": [], "a number": 3, "negative": [-1.0, 2], "a matrix": np.ones((2, 2))}
add("pipelining.balance.costs", lambda v: pipelining.balance(v, 1), NO_COSTS)
add("pipelining.make_schedule.name", lambda v: pipelining.make_schedule(v, 2, 4), NOT_A_WORD)


def layer(p, x, key):
    return x * p


costs = partial(pipelining.layer_costs)
add("pipelining.layer_costs.layer", lambda v: costs(v, X, X), NO_FUNCTION, {"a list": [3]})
add(
    "pipelining.layer_costs.params",
    lambda v: costs(layer, v, X),
    without(NO_ARRAYS, "a deleted array"),
)
add("pipelining.layer_costs.x", lambda v: costs(layer, X, v), without(NO_ARRAYS, "a deleted array"))
add("pipelining.layer_costs.key", lambda v: costs(layer, X, X, key=v), KEYS)

STACK = {"b_0": {"w": W}, "b_1": {"w": W}, "other": len}
stack, unstack = pipelining.stack_layers, pipelining.unstack_layers
NO_LAYERS = {**without(NO_ARRAYS, "a deleted array"), "None": None, "none": {}, "a gap": {"b_2": W}}
NO_LAYERS |= {"layers that differ": {"b_0": W, "b_1": {"w": W}}, "words": {"b_0": "x", "b_1": "y"}}
add("pipelining.stack_layers.params", lambda v: stack(v, "b_{}"), NO_LAYERS)
NO_PATTERN = {
    "a number": 3,
    "no number": "b_",
    "another name": "c_{}",
    "two": "b_{}{}",
    "a list": [],
}
add("pipelining.stack_layers.pattern", lambda v: stack(STACK, v), NO_PATTERN, {"None": None})
NO_STACK = {**without(NO_ARRAYS, "a deleted array"), "three": {"w": np.ones((3, 4, 4))}, "{}": {}}
NO_STACK |= {"None": None, "another name": {"v": np.ones((2, 4, 4))}, "scalars": {"w": np.ones(())}}
add("pipelining.unstack_layers.stages", lambda v: unstack(v, STACK, "b_{}"), NO_STACK)
STACKED = {"w": np.ones((2, 4, 4))}
add("pipelining.unstack_layers.into", lambda v: unstack(STACKED, v, "b_{}"), NO_LAYERS)
add("pipelining.unstack_layers.pattern", lambda v: unstack(STACKED, STACK, v), NO_PATTERN)

# Pictures.
TIMELINE = timeline([8.0])
add("plotting.plot_schedule.schedule", plotting.plot_schedule, GRIDS)
add("plotting.plot_schedule.axes", lambda v: plotting.plot_schedule(SCHEDULE_1F1B, axes=v), NO_AXES)
add("Schedule.plot.axes", lambda v: SCHEDULE_1F1B.plot(axes=v), NO_AXES)
add(
    "plotting.plot_buckets.timeline", plotting.plot_buckets, {**NO_AXES, "None": None, "two": [[1]]}
)
add("plotting.plot_buckets.unit", lambda v: plotting.plot_buckets(TIMELINE, unit=v), NOT_A_WORD)
add("plotting.plot_buckets.axes", lambda v: plotting.plot_buckets(TIMELINE, axes=v), NO_AXES)
exponents = partial(plotting.plot_exponents, np.arange(2))
NO_EXPONENTS = {"a word": "1", "words": ["a"], "None": None, "a number": 3, "floats": [0.5, 1.5]}
NO_EXPONENTS |= {"not rising": [1, 0], "a matrix": np.ones((2, 2))}
add(
    "plotting.plot_exponents.exponents",
    lambda v: plotting.plot_exponents(v, {"x": [1, 2]}),
    NO_EXPONENTS,
)
NO_COUNTS = {
    "a number": 3,
    "None": None,
    "nothing": {},
    "a list": [1, 2],
    "words": {"x": ["a", "b"]},
}
NO_COUNTS |= {"too few": {"x": [1]}, "negative": {"x": [-1, 2]}, "NaN": {"x": [NAN, 1]}}
add("plotting.plot_exponents.counts", exponents, NO_COUNTS)
NO_FORMATS = {"a number": 3, "an integer": ("int32",), "a slip": ("bfloat61",), "nothing": ()}
NO_FORMATS |= {"None": None}
add("plotting.plot_exponents.formats", lambda v: exponents({"x": [1, 2]}, formats=v), NO_FORMATS)
add("plotting.plot_exponents.axes", lambda v: exponents({"x": [1, 2]}, axes=v), NO_AXES)
NO_HISTORY = {"a number": 3, "None": None, "nothing": {}, "a list": [1], "a word": "a"}
NO_HISTORY |= {"a number as a run": {"a": 3}, "no loss": {"a": {}}, "words": {"a": {"loss": ["x"]}}}
add("plotting.plot_training.histories", plotting.plot_training, NO_HISTORY)
RUN = {"a": {"loss": [1.0, 2.0]}}
add(
    "plotting.plot_training.reference",
    lambda v: plotting.plot_training(RUN, reference=v),
    {"a number": 3, "another run": "b", "a list": ["a"], "nothing": ""},
)
NO_PANELS = {**NO_AXES, "one": (1,), "two words": ("a", "b")}
add("plotting.plot_training.axes", lambda v: plotting.plot_training(RUN, axes=v), NO_PANELS)

# What functions of the user return.


def returns(call):
    """A call with a function of the user in it, which returns the value."""
    return traced(lambda v: call(lambda *args, **kwargs: v))


NO_LOSS = {"a word": "1", "None": None, "a vector": X, "an int": jnp.int32(1), "a pair": (1.0, 2.0)}
NO_LOSS |= {"a dict": {"loss": 1.0}, "a complex": jnp.complex64(1), "a bool": jnp.array(True)}
NO_LOSS |= {"an object": object()}
add("value_and_grad.loss_fn returns", returns(lambda f: ampx.value_and_grad(f)(P, X)), NO_LOSS)
add(
    "train_step.loss_fn returns",
    returns(lambda f: ampx.train_step(f, SGD)(ampx.train_step(f, SGD).init(P), X)),
    NO_LOSS,
)
NO_PAIR = {**NO_LOSS, "a word as weight": (1.0, "1"), "three": (1.0, 2.0, 3.0)}
del NO_PAIR["a pair"]
NO_PAIR |= {"weights": (jnp.float32(1), X), "a bool as weight": (jnp.float32(1), True)}
add(
    "value_and_grad(weights).loss_fn returns",
    returns(lambda f: ampx.value_and_grad(f, normalize="weights")(P, X)),
    NO_PAIR,
)
NO_AUX = {"a loss": jnp.float32(1), "three": (jnp.float32(1), 2, 3), "a list": [jnp.float32(1), 2]}
NO_AUX |= {"a word": (jnp.float32(1), "w"), "an int": (jnp.float32(1), jnp.int32(1))}
add(
    "value_and_grad(has_aux).loss_fn returns",
    returns(lambda f: ampx.value_and_grad(f, has_aux=True)(P, X)),
    NO_AUX,
)
NO_LENGTH = {"a float": 2.0, "a bool": True, "a word": "2", "None": None, "0": 0, "negative": -1}
NO_LENGTH |= {"a vector": jnp.ones(2, jnp.int32), "an array of floats": jnp.float32(2)}


def window(f):
    tx = ampx.multi_steps(SGD, f)
    return tx.update(P, tx.init(P))


add("multi_steps.every_k returns", returns(window), NO_LENGTH)
NO_GROUP = {"a list": ["a"], "a dict": {}, "an array": X}
layout = ampx.bucket_layout
add("bucket_layout.group_of returns", returns(lambda f: layout(P, group_of=f)), NO_GROUP)
NO_GROUP_NAME = {"a number": 3, "None": None, "a list": ["a"], "an object": object()}


def grouped(f):
    step = ampx.train_step(loss_fn, SGD, local_norm=f)
    return step(step.init(P), X)


add("train_step.local_norm returns", returns(grouped), NO_GROUP_NAME)
NO_RULE = {"a word": "no", "None": None, "a number": 1, "an object": object()}


def keeping(f):
    return ampx.opt_level("O2", keep_norm_float32=f).half_params(P)


add("opt_level.keep_norm_float32 returns", returns(keeping), NO_RULE)


def looking(f):
    grads_of = ampx.value_and_grad(lambda p, x: jnp.sum(p["w"]), sparse_rows={"w": f})
    return grads_of(P, X)


NO_LOOK = {"floats": jnp.ones(2), "a word": "w", "None": None, "bools": jnp.ones(2, bool)}
NO_LOOK |= {"an object": object(), "a list": [0, 1]}
add("value_and_grad.sparse_rows returns", returns(looking), NO_LOOK)


def ruled(f):
    return ampx.autocast(lambda x: x @ x, rules=ampx.DEFAULT_RULES.float32(when=f))(X)


add("Rules.float32.when returns", returns(ruled), NO_RULE)
NO_RATE = {"a word": "0.1", "None": None, "a tree": {}, "a vector": jnp.ones(2), "a bool": True}


def rated(f):
    tx = fused.adam(f)
    return tx.update(P, tx.init(P))


add("fused.adam.learning_rate returns", returns(rated), NO_RATE)


def reported(f):
    step = ampx.train_step(loss_fn, SGD, learning_rate=f)
    return step(step.init(P), X)


add("train_step.learning_rate returns", returns(reported), NO_RATE)


def masked(f):
    tx = fused.adamw(0.1, mask=f)
    return tx.update(P, tx.init(P), P)


add("fused.adamw.mask returns", returns(masked), MASKS)


def of_rule(**settings):
    return fused.from_rule(lambda g, p, s, n, o: (g, s), 0.1, **settings)


BY_NAME = {"a word": "w", "names alone": ["w"], "no name": {"1": 0.0}, "a word inside": {"w": "x"}}
add("fused.from_rule.slots", lambda v: of_rule(slots=v), BY_NAME)
add("fused.from_rule.numbers", lambda v: of_rule(numbers=v), BY_NAME, {"taken": {"factor": 1.0}})


# --- how many -------------------------------------------------------------------------------------

KINDS = {
    "parameters, gradients, batches and other trees": (
        "params updates tree batch grads accumulator new_tree old_tree like buffers model_state "
        "indices rows num_rows x"
    ),
    "states of optimizers and training": "state opt_state tx verdict weight value",
    "random keys and loss scales": "key loss_scale choice options",
    "policies, phases, rules, words": (
        "policy rules schedule phases name path model level spec instead label targets when phase "
        "step number fun keep_norm_float32 differentiate extra_args"
    ),
    "meshes, layouts, pipelines, pictures": "",  # what is in none of the others
}


def count_cases():
    """From a kind of argument to the number of wrong values, all of which are refused."""
    from test_settings import WRONG, cases

    kind_of = {word: kind for kind, words in KINDS.items() for word in words.split()}
    *_, rest = KINDS
    counts = {"settings": len(list(cases(WRONG))), **dict.fromkeys(KINDS, 0)}
    counts["what functions of the user return"] = 0
    for name, (_, values) in TABLE.items():
        word = name.rsplit(".", 1)[-1]
        kind = kind_of.get(word.split(",")[0], rest)
        if word.endswith("returns"):
            kind = "what functions of the user return"
        counts[kind] += len(values)
    return counts


if __name__ == "__main__":
    print("| an argument of this kind | wrong values |\n| --- | --- |")
    for kind, count in count_cases().items():
        print(f"| {kind} | {count} |")
