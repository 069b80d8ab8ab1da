"""Settings of every public function, given what they do not mean.

The tables are made from the signatures: each argument whose annotation says that it is an int, a
number, a bool, a dtype, a choice, a function or an axis is given the wrong values of that kind, and
the right ones that are no Python numbers. An argument that is in no table fails a test.
"""

import dataclasses
import inspect
import pathlib
import traceback
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
from ampx import checking, fused, pipelining, plotting
from ampx.autocasting.tables import DEFAULTS

P = {"w": jnp.ones((4, 4))}
SGD = optax.sgd(0.1)
SOURCES = pathlib.Path(ampx.__file__).parent


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def progress(total_steps, **kwargs):
    with ampx.progress_bar(total_steps, disable=kwargs.pop("disable", True), **kwargs):
        pass


def pipeline(**kwargs):
    return pipelining.value_and_grad(
        first=kwargs.pop("first", lambda p, shared, batch, key: batch),
        stage=kwargs.pop("stage", lambda p, x, key: x * p),
        last=kwargs.pop("last", lambda p, shared, x, batch, key: (jnp.sum(x), jnp.float32(2))),
        schedule=kwargs.pop("schedule", pipelining.one_f_one_b(2, 4)),
        axis_name=kwargs.pop("axis_name", "stage"),
        **kwargs,
    )


def apply(**kwargs):
    tx = fused.adam(0.1)
    return fused.apply(tx, P, tx.init(P), P, **kwargs)


def schedule_by_loss(final_loss):
    return ampx.precision_schedule("fast|loss", final_loss=final_loss)


def plan(bandwidth):
    return pipelining.plan(pipeline(), {"stages": jnp.ones(4)}, jnp.ones(8), bandwidth=bandwidth)


def specs(axis_name):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return ampx.zero1_specs(ampx.zero1(SGD, "data"), P, mesh, axis_name)


def scattered(bucket_bytes):
    options = dict(axis_name="data", scatter_gradients=True)
    return ampx.value_and_grad(loss_fn, bucket_bytes=bucket_bytes, **options)


def exponents(loss_scale):
    return plotting.plot_exponents(np.arange(2), {"x": [1, 2]}, loss_scale=loss_scale)


def training_plot(smoothing):
    return plotting.plot_training({"a": {"loss": [1.0, 2.0]}}, smoothing=smoothing)


def layer_costs(**kwargs):
    return pipelining.layer_costs(lambda p, x, key: x * p, jnp.ones(2), jnp.ones(2), **kwargs)


# How each function is called besides the argument in question, which is always given by name.
CALLS = {
    "all_reduce": partial(ampx.all_reduce, axis_name=("host", "data")),
    "autocast": partial(ampx.autocast, fun=loss_fn),
    "bucket_layout": partial(ampx.bucket_layout, P),
    "bucket_timeline": partial(
        ampx.bucket_timeline, [8.0], bandwidth=1.0, backward_seconds=1.0, update_seconds=1.0
    ),
    "cast": partial(ampx.cast, P),
    "cast_floating": partial(ampx.cast_floating, P),
    "clip_by_bucket_norm": partial(ampx.clip_by_bucket_norm, max_norm=1.0),
    "count_nonfinite": partial(ampx.count_nonfinite, P),
    "current_loss_scale": partial(ampx.current_loss_scale, SGD.init(P)),
    "dynamic_loss_scale": partial(ampx.dynamic_loss_scale, SGD),
    "explain": partial(ampx.explain, fun=loss_fn),
    "multi_steps": partial(ampx.multi_steps, SGD, every_k=2),
    "numerics_report": partial(ampx.numerics_report, fun=loss_fn),
    "opt_level": partial(ampx.opt_level, "O2"),
    "check_overlap": ampx.check_overlap,
    "lint_step": partial(ampx.lint_step, step=loss_fn),
    "forward_order": partial(ampx.forward_order, params=P),
    "Phase": partial(ampx.Phase, "O2"),
    "Policy": ampx.Policy,
    "precision_schedule": partial(ampx.precision_schedule, "fast|step|0.9", total_steps=10),
    "progress_bar": partial(progress, total_steps=3),
    "read_deepspeed_config": partial(ampx.read_deepspeed_config, {"gradient_clipping": 0}, SGD),
    "reduce_in_backward": partial(ampx.reduce_in_backward, P),
    "split_microbatches": partial(ampx.split_microbatches, jnp.ones(8)),
    "static_loss_scale": partial(ampx.static_loss_scale, SGD, scale=2.0),
    "trace_overflow": partial(ampx.trace_overflow, fun=loss_fn),
    "train_step": partial(ampx.train_step, loss_fn=loss_fn, tx=SGD, axis_name="data"),
    "value_and_grad": partial(ampx.value_and_grad, loss_fn=loss_fn, axis_name="data"),
    "zero1": partial(ampx.zero1, SGD, axis_name="data"),
    "fused.adadelta": partial(fused.adadelta, learning_rate=0.1),
    "fused.adagrad": partial(fused.adagrad, learning_rate=0.1),
    "fused.adam": partial(fused.adam, learning_rate=0.1),
    "fused.adamw": partial(fused.adamw, learning_rate=0.1),
    "fused.apply": apply,
    "fused.flatten": partial(fused.flatten, P),
    "fused.from_rule": partial(
        fused.from_rule, direction=lambda g, p, s, n, o: (g, {}), learning_rate=0.1
    ),
    "fused.fuse": partial(fused.fuse, SGD),
    "fused.lamb": partial(fused.lamb, learning_rate=0.1),
    "fused.lion": partial(fused.lion, learning_rate=0.1),
    "fused.novograd": partial(fused.novograd, learning_rate=0.1),
    "fused.sgd": partial(fused.sgd, learning_rate=0.1),
    "fused.split_masters": partial(fused.split_masters, SGD),
    "fused.stochastic_rounding": partial(fused.stochastic_rounding, SGD),
    "pipelining.balance": partial(pipelining.balance, [1, 2, 3], num_stages=2),
    "pipelining.layer_costs": layer_costs,
    "pipelining.value_and_grad": pipeline,
    "pipelining.make_schedule": partial(
        pipelining.make_schedule, "interleaved", num_stages=2, num_microbatches=4
    ),
    **{
        f"pipelining.{name}": partial(getattr(pipelining, name), num_stages=2, num_microbatches=4)
        for name in (
            "eager_one_f_one_b forward_only gpipe interleaved looped_breadth_first one_f_one_b "
            "zero_bubble interleaved_zero_bubble zero_bubble_v dualpipe_v"
        ).split()
    },
}
# Arguments that need another call than the function's other ones, or are good for one value alone.
OWN_CALLS = {
    ("precision_schedule", "final_loss"): schedule_by_loss,
    ("pipelining.plan", "bandwidth"): plan,
    ("plotting.plot_exponents", "loss_scale"): exponents,
    ("plotting.plot_training", "smoothing"): training_plot,
    ("zero1_specs", "axis_name"): specs,
    ("value_and_grad", "bucket_bytes"): scattered,
    ("half_function", "fun"): ampx.half_function,
    ("float_function", "fun"): ampx.float_function,
    ("promote_function", "fun"): ampx.promote_function,
    ("banned_function", "fun"): ampx.banned_function,
}
# Words for annotations of choices, with a value that is right.
CHOICES = {
    "AuxReduction": "mean",
    "Normalize": "mean",
    "Remainder": "error",
    "Refill": "growth",
    "OnFloor": "raise-flag",
    "NonfiniteUpdates": "hold",
    "NonfiniteLoss": "count",
    "OnNonfinite": "drop_window",
    "Output": "original",
    "CustomVjp": "transform",
    "Op": "mean",
    "Backend": "auto",
    "CostKind": "flops",
    "Literal['O1', 'O2']": "O2",
}
AXES = ("axis_name", "axis_names", "data_axes")
# What is no setting, or takes several kinds: each has a reason.
ELSEWHERE = {
    "loss_scale.choice": "a word or a number by design: tests/loss_scaling",
    "opt_level.loss_scale": "the same",
    "opt_level.keep_norm_float32": "a bool or a function: tests/precision",
    "train_step.local_norm": "a bool or a function: below",
    "multi_steps.every_k": "an int or a function: below",
    "bucket_timeline.overlap": "a bool or a word: below",
    "bucket_timeline.bucket_bytes": "a list: tests/plotting",
    "bucket_layout.order": "a list: below",
    "all_reduce.order": "a list: below",
    "clip_by_bucket_norm.order": "a list: below",
    "fused.split_masters.error_bits": "8 or 16: tests/fused",
    "pipelining.value_and_grad.stash": "a word or a policy: tests/pipelining",
    "pipelining.value_and_grad.layers_per_stage": "a list: below",
    "pipelining.value_and_grad.stage": "a function or several: tests/pipelining",
    "pipelining.value_and_grad.first": "three functions in one error: tests/pipelining",
    "pipelining.value_and_grad.last": "the same",
    "pipelining.balance.costs": "a list: below",
    "pipelining.layer_costs.layer": "a function or several: tests/pipelining",
    "value_and_grad.sparse_rows": "a mapping: below",
    "train_step.sparse_rows": "the same",
    "check_overlap.compiled": "a right one compiles: below",
    "pipelining.plan.mesh": "a mesh or sizes: tests/pipelining",
    "plotting.plot_buckets.timeline": "arrays",
    "plotting.plot_exponents.exponents": "arrays",
    "plotting.plot_exponents.counts": "arrays",
    "plotting.plot_exponents.formats": "a list: tests/plotting",
    "Recipe.loss_scale": "a record, made by opt_level",
    "Recipe.master_weights": "the same",
    "SparseRows.of": "arrays",
}


def public_callables():
    for prefix, module in (("", ampx), ("fused.", fused), ("pipelining.", pipelining)):
        for name in module.__all__:
            value = getattr(module, name)
            is_record = inspect.isclass(value) and name not in ("Phase", "Policy")
            if callable(value) and not is_record:
                yield prefix + name, value
    for name in plotting.__all__:
        yield f"plotting.{name}", getattr(plotting, name)


def kind_of(parameter):
    """The kind of a setting by its annotation, or None where it is no setting."""
    words = str(parameter.annotation).replace(" | None", "")
    if parameter.name in AXES:
        return "axes"
    if words in CHOICES:
        return "choice"
    if words.startswith("Callable"):
        return "function"
    kinds = {
        "bool": "bool",
        "int": "int",
        "int | Sequence[int]": "int",
        "float": "number",
        "float | jax.Array": "number",
        "ArrayLike": "number",
        "ArrayLike | optax.Schedule": "number",
        "optax.ScalarOrSchedule": "number",
        "optax.ScalarOrSchedule | Mapping[str, optax.ScalarOrSchedule]": "number",
        "DTypeLike": "dtype",
        "SlotDtype": "dtype",
    }
    if words in kinds:
        return kinds[words]
    has_setting = any(w in words for w in ("int", "float", "bool", "DType", "Literal", "ArrayLike"))
    return "unknown" if has_setting else None


def settings():
    for function, value in public_callables():
        for parameter in inspect.signature(value).parameters.values():
            kind = kind_of(parameter)
            if kind is None or f"{function}.{parameter.name}" in ELSEWHERE:
                continue
            yield function, parameter, kind


SETTINGS = list(settings())
NAN, INF = float("nan"), float("inf")
WRONG = {
    "bool": ["False", "yes", 1, 0.0, np.int64(1), np.array([True]), [True]],
    "int": [True, "4", 4.5, np.float32(4), np.array([4]), np.bool_(True), [4]],
    "number": [True, "0.1", NAN, 1j, np.array([0.1, 0.2]), np.bool_(True), [0.1], {}],
    "dtype": ["foo", "int32", jnp.int32, bool, np.complex64, 3, True, {}, np.longdouble],
    "function": [3, "f", 0.1],
    "axes": [3, True, 0.1, ("data", 3), [None], ("data", "data")],
}
AS_GOOD = {
    "bool": [np.True_, np.array(False), True],
    "int": [np.int64, np.int32, np.uint8, np.array, jnp.array],
    "number": [np.float32, np.float64, np.array, jnp.float32],
    "dtype": ["bf16", "bfloat16", "BF16", "half", "fp16", jnp.bfloat16, np.dtype(">f2")],
}
# Any int is a seed, and number 0 a loss.
ANY_INT = {("fused.stochastic_rounding", "seed"), ("current_loss_scale", "loss_id")}
# A counter of int32 counts up to them; `progress_bar.total_steps` is one that Python counts.
COUNTED = ("growth_interval", "hysteresis", "until_step", "every_k")
# An infinite norm clips nothing, and an infinite bandwidth takes no time.
MAY_BE_INFINITE = ("max_norm", "max_grad_norm", "bandwidth")
# A right number, where that is not 1 or the default.
RIGHT = {
    "num_stages": 2,
    "num_microbatches": 4,
    "chunks": 2,
    "total_steps": 3,
    "backoff_factor": 0.5,
    "b1": 0.5,
    "b2": 0.5,
    "rho": 0.5,
    "loss_id": 0,
    "max_scale": 2.0**16,
}
SLOW = ("pipelining.plan",)  # compiles where the value is right


def cases(table):
    for function, parameter, kind in SETTINGS:
        values = list(table.get(kind, ()))
        if table is WRONG and kind == "choice":
            right = CHOICES[str(parameter.annotation).replace(" | None", "")]
            values = [right[:-1], right.upper() + "x", 3, ("a",)]
        if table is WRONG and kind == "int" and (function, parameter.name) not in ANY_INT:
            values += [0, -1, np.int64(-3)]
        if table is WRONG and kind == "int" and parameter.name in COUNTED:
            values += [2**31, 10**12]
        if table is WRONG and kind == "number" and parameter.name not in MAY_BE_INFINITE:
            values += [INF, -INF, np.float32(INF), 10**400]
        if table is AS_GOOD and function in SLOW:
            continue
        for number, value in enumerate(values):
            yield pytest.param(
                function, parameter.name, kind, value, id=f"{function}-{parameter.name}-{number}"
            )


def call(function, name, value):
    own = OWN_CALLS.get((function, name))
    return own(value) if own else CALLS[function](**{name: value})


def test_every_setting_is_in_a_table():
    unknown = [
        f"{function}.{parameter.name}: {parameter.annotation}"
        for function, parameter, kind in SETTINGS
        if kind == "unknown"
        or (function not in CALLS and (function, parameter.name) not in OWN_CALLS)
    ]
    assert not unknown
    assert len(SETTINGS) > 150


@pytest.mark.parametrize(("function", "name", "kind", "value"), list(cases(WRONG)))
def test_a_wrong_value_is_refused_by_name(function, name, kind, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(function, name, value)
    frames = traceback.extract_tb(caught.tb)
    assert SOURCES in pathlib.Path(frames[-1].filename).parents, frames[-1]
    message = str(caught.value)
    assert name in message
    shown = [repr(value), str(value), str(value)[:100]]
    if kind == "dtype":
        shown.append(getattr(value, "__name__", "?").rstrip("_"))
    if kind == "axes":
        shown.append(repr(tuple(value)) if isinstance(value, list) else "?")
    assert any(text in message for text in shown), message


@pytest.mark.parametrize(("function", "name", "kind", "value"), list(cases(AS_GOOD)))
def test_numbers_of_numpy_and_words_for_dtypes_are_right(function, name, kind, value):
    if kind in ("int", "number"):
        right = RIGHT.get(name, 1)
        if kind == "number" and name not in RIGHT:
            right = 1.0
        value = value(right)
    call(function, name, value)


# What functions need besides the transformation that they are given.
BESIDE = {
    "every_k": 2,
    "axis_name": "data",
    "scale": 2.0,
    "schedule": ampx.precision_schedule("fast1|step|0.9", total_steps=10),
    "choice": None,
    "loss_fn": loss_fn,
    "params": P,
    "grads": P,
    "opt_state": (),
    "mesh": None,
    "grads_of": None,
    "batch": None,
    "config": {"gradient_clipping": 0},
}


def takers_of_transformations():
    for function, value in public_callables():
        parameters = inspect.signature(value).parameters
        taken = [name for name in ("inner", "tx") if name in parameters]
        if taken and function != "pipelining.plan":  # where None is no optimizer
            needed = [p.name for p in parameters.values() if p.name in BESIDE]
            yield function, value, taken[0], {name: BESIDE[name] for name in needed}


@pytest.mark.parametrize(
    ("value", "name", "beside"),
    [pytest.param(*rest, id=function) for function, *rest in takers_of_transformations()],
)
def test_what_is_no_transformation_is_refused(value, name, beside):
    for wrong in (None, 3, "adam", optax.adam, optax.sgd(0.1).update):
        with pytest.raises(TypeError, match=f"{name} must be an optax gradient transformation"):
            value(**{name: wrong}, **beside)


def test_words_for_dtypes_are_one_set():
    for word, name in checking._WORDS.items():
        assert checking.as_dtype("x", word, "floating").name == name
        assert checking.as_dtype("x", word.upper(), "floating").name == name
    for kind in ("half", "castable", "sum", "floating", "moment"):
        assert checking.as_dtype("x", "bf16", kind) == jnp.bfloat16
        for nothing in (None, object(), "", "int32", jnp.uint8, np.ones(2, int)):
            with pytest.raises(ValueError, match="x must be"):
                checking.as_dtype("x", nothing, kind)
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"):
        ampx.autocast(loss_fn, half_dtype="bfloat61")
    with pytest.raises(ValueError, match="did you mean 'float16'"):
        ampx.opt_level("O2", half_dtype="flaot16")
    with pytest.raises(ValueError, match=r"got 'foo'$"):
        ampx.value_and_grad(loss_fn, accumulator_dtype="foo")
    assert str(ampx.get_policy("p=FP32,c=fp16")) == "p=f32,c=f16,o=f16"


@pytest.mark.parametrize(
    ("value", "known", "meant"),
    [("maen", ("mean", "sum"), "mean"), ("weight", ("mean", "weights"), "weights")],
)
def test_a_slip_in_a_choice_gets_what_was_meant(value, known, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant!r}"):
        checking.check_choice("normalize", value, known)


def test_traced_settings_are_refused_by_name():
    for build in (
        lambda n: ampx.value_and_grad(loss_fn, num_microbatches=n),
        lambda n: ampx.train_step(loss_fn, SGD, max_grad_norm=n),
        lambda n: ampx.dynamic_loss_scale(SGD, init_scale=n),
        lambda n: ampx.autocast(loss_fn, enabled=n),
    ):
        with pytest.raises(TypeError, match="got a traced value.*static argument"):
            jax.jit(lambda n, build=build: build(n) and None)(1)


NUMBERS = [(function, p.name) for function, p, kind in SETTINGS if kind == "number"]


@pytest.mark.parametrize(("function", "name"), NUMBERS)
def test_an_array_with_axes_is_no_number(function, name):
    for array in (jnp.array([0.1]), jnp.array([[0.1]]), jnp.array([0.1, 0.2])):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be") as caught:
            call(function, name, array)
        assert SOURCES in pathlib.Path(traceback.extract_tb(caught.tb)[-1].filename).parents


def test_what_no_counter_reaches_is_refused_by_name():
    for build in (
        lambda n: ampx.multi_steps(SGD, n),
        lambda n: ampx.dynamic_loss_scale(SGD, growth_interval=(2, n)),
        lambda n: ampx.precision_schedule("fast|step|0.9", total_steps=n),
        lambda n: ampx.multi_steps(SGD, lambda step: n).update(P, ampx.multi_steps(SGD, 2).init(P)),
    ):
        with pytest.raises(ValueError, match="must be at most 2147483647, the largest count, got"):
            build(2**31)
        build(2**31 - 1)


def test_numpys_numbers_make_the_same_program():
    def program(number, integer):
        tx = ampx.dynamic_loss_scale(
            ampx.multi_steps(optax.adam(0.1), integer(2)),
            init_scale=number(8.0),
            growth_factor=number(4.0),
            growth_interval=integer(10),
            hysteresis=integer(2),
        )
        step = ampx.train_step(
            loss_fn,
            tx,
            loss_scale=None,
            num_microbatches=integer(2),
        )
        clipping = ampx.train_step(loss_fn, fused.adam(0.1), max_grad_norm=number(1.0))
        batch = jnp.ones((4, 4), jnp.float32)
        return [str(jax.make_jaxpr(s)(s.init(P), batch)) for s in (step, clipping)]

    with jax.enable_x64(True):
        expected = program(float, int)
        for number, integer in ((np.float64, np.int64), (np.array, jnp.array)):
            assert program(number, integer) == expected


@pytest.mark.slow_but("lamb-")
@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (fused.adam, dict(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-8, eps_root=0.0)),
        (fused.adamw, dict(learning_rate=0.1, weight_decay=0.1)),
        (fused.sgd, dict(learning_rate=0.1, momentum=0.9)),
        (fused.lamb, dict(learning_rate=0.1)),
        (fused.lion, dict(learning_rate=0.1)),
        (fused.novograd, dict(learning_rate=0.1)),
        (fused.adagrad, dict(learning_rate=0.1)),
        (fused.adadelta, dict(learning_rate=0.1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hyperparameters_may_be_traced_arrays_and_schedules(make, rates):
    plain = make(**rates)
    expected = plain.update(P, plain.init(P), P)[0]["w"]

    @jax.jit
    def traced(rates):
        tx = make(**rates)
        return tx.update(P, tx.init(P), P)[0]["w"]

    np.testing.assert_allclose(traced(rates), expected, rtol=1e-4)
    np.testing.assert_allclose(traced(jax.tree.map(jnp.asarray, rates)), expected, rtol=1e-4)
    for tx in (
        optax.inject_hyperparams(make)(**rates),
        make(**{**rates, "learning_rate": lambda _: 0.1}),
    ):
        found = jax.jit(tx.update)(P, tx.init(P), P)[0]["w"]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    with pytest.raises(
        TypeError, match="learning_rate must be a number, got an array of dtype bool"
    ):
        make(**{**rates, "learning_rate": jnp.array(True)})


def test_autocast_is_a_decorator_with_settings():
    @ampx.autocast(half_dtype="fp16")
    def product(w, x):
        """Its docstring."""
        return x @ w

    assert product(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype == jnp.float16
    assert (product.__name__, product.__doc__) == ("product", "Its docstring.")
    assert ampx.autocast()(lambda x: x @ x)(jnp.ones((2, 2))).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="half_dtype"):
        ampx.autocast(half_dtype="foo")
    with pytest.raises(TypeError, match=r"fun must be a function, called as fun\(\*args\), got 3"):
        ampx.autocast()(3)


SLIPS = "dot_genral dot_generla dot_gener_al dot_gneral reduce_smu concatnate convert_elemnt_type"


@pytest.mark.parametrize("name", SLIPS.split())
def test_a_slip_in_the_name_of_a_primitive_is_refused(name):
    for choose in ("half", "float32", "widest", "banned"):
        with pytest.raises(ValueError, match=f"no primitive is called '{name}': did you mean '"):
            getattr(ampx.DEFAULT_RULES, choose)(name)


def test_names_that_are_or_may_come_are_taken():
    of_users = "head encoder/head my_exp Dense_0 Reshape logits exps lgo flash_attention rmsnorm"
    with_endings = "squared gathers transposed"
    to_come = "dynamic_slice2 ragged_dot_general_v2 all_gather_3 my_dot_general quantized_dot"
    of_jax = "silu isfinite erfinv dot_product_attention log_softmax logsumexp layer_norm einsum"
    names = (*of_users.split(), *with_endings.split(), *to_come.split(), *of_jax.split(), *DEFAULTS)
    assert len(ampx.DEFAULT_RULES.float32(*names).entries) == len(names)


OTHERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "scaled": ampx.dynamic_loss_scale(optax.adam(0.1)),
    "clipped": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "fused": fused.adam(0.1),
    "partition": optax.partition({"a": optax.adam(0.1)}, {"w": "a"}),
}


@pytest.mark.parametrize("of", OTHERS)
def test_a_train_state_of_another_optimizer_names_both(of):
    state = ampx.train_step(loss_fn, OTHERS[of]).init(P)
    step = ampx.train_step(loss_fn, optax.adam(0.1))
    with pytest.raises(
        ValueError, match="the state holds the optimizer state .*step.init"
    ) as caught:
        jax.eval_shape(step, state, jnp.ones((4, 4)))
    message = str(caught.value)
    assert "(ScaleByAdamState, EmptyState)" in message
    kinds = dict(sgd="TraceState", scaled="LossScaleState((ScaleBy", clipped="(EmptyState, (Scale")
    assert kinds.get(of, "") in message
    own = step.init(P)
    jax.eval_shape(step, own, jnp.ones((4, 4)))
    other = own._replace(opt_state=step.init({"w": P["w"], "b": P["w"]}).opt_state)
    with pytest.raises(ValueError, match="made for other parameters than params"):
        jax.eval_shape(step, other, jnp.ones((4, 4)))


def test_an_optimizer_whose_init_cannot_be_traced_is_taken():
    def init(params):
        return float(jnp.sum(params["w"])), optax.EmptyState()

    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    step = ampx.train_step(loss_fn, tx)
    step(step.init(P), jnp.ones((4, 4)))


def test_an_optimizer_state_of_arrays_alone_trains():
    def update(grads, state, params=None):
        state = jax.tree.map(lambda s, g: 0.9 * s + g, state, grads)
        return jax.tree.map(jnp.negative, state), state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    step = ampx.train_step(loss_fn, tx)
    jax.eval_shape(step, step.init(P), jnp.ones((4, 4)))


def test_a_loss_scale_is_read_from_optimizer_states_alone():
    for state in (SGD.init(P), optax.adam(0.1).init(P), (), optax.identity().init(P)):
        assert ampx.current_loss_scale(state) == 1.0
    assert ampx.current_loss_scale(ampx.no_loss_scale(fused.sgd(0.1)).init(P)) == 1.0
    for tree in (P, [P, P], P["w"], (P["w"],), {"a": {"b": np.ones(2)}}):
        with pytest.raises(TypeError, match="nothing but arrays, which looks like parameters"):
            ampx.current_loss_scale(tree)


WRAPPERS = {
    "loss_scale": ampx.dynamic_loss_scale,
    "multi_steps": partial(ampx.multi_steps, every_k=2),
    "master_weights": ampx.master_weights,
    "fused.split_masters": fused.split_masters,
    "fused.stochastic_rounding": fused.stochastic_rounding,
    "zero1": partial(ampx.zero1, axis_name="data"),
    "follow_schedule": partial(
        ampx.follow_schedule,
        schedule=ampx.precision_schedule("fast1|step|0.9", total_steps=10),
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("inner", [optax.adam(0.1), fused.adam(0.1)], ids=["optax", "fused"])
def test_a_wrapper_refuses_the_state_of_what_is_inside(name, inner):
    tx = WRAPPERS[name](inner)
    with pytest.raises(TypeError, match=f"ampx.{name} got a state of type tuple"):
        tx.update(P, inner.init(P), P)


def test_shapes_that_differ_are_refused_not_broadcast():
    wrong = {"w": jnp.ones(4)}
    with pytest.raises(ValueError, match=r"update at 'w' has shape \(4,\), .* \(4, 4\)"):
        ampx.apply_updates(P, wrong)
    for tx in (
        fused.adam(0.1),
        fused.sgd(0.1),
        fused.sgd(0.1, 0.9),
        fused.lamb(0.1),
        fused.novograd(0.1),
    ):
        with pytest.raises(ValueError, match=r"gradient at 'w' has shape \(4,\).*parameter"):
            fused.apply(tx, wrong, tx.init(P), P)
        with pytest.raises(ValueError, match=r"gradient at 'w' has shape \(4,\).*parameter"):
            tx.update(wrong, tx.init(P), P)
    with pytest.raises(ValueError, match=r"\(4,\), and its mu in the state has shape \(4, 4\)"):
        fused.adam(0.1).update(wrong, fused.adam(0.1).init(P))
    scaled = ampx.dynamic_loss_scale(fused.adam(0.1))
    with pytest.raises(ValueError, match="gradient at 'w'"):
        fused.apply(scaled, wrong, scaled.init(P), P)


@pytest.mark.parametrize("answer", ["no", 1, 0.5, None, jnp.ones(2, bool), jnp.ones(())])
def test_drop_if_must_answer_with_a_bool(answer):
    tx = ampx.multi_steps(SGD, 2, drop_if=lambda grads: answer)
    with pytest.raises(TypeError, match="drop_if must return a bool scalar, got"):
        tx.update(P, tx.init(P))
    for right in (True, np.True_, jnp.array(True), np.array(True)):
        tx = ampx.multi_steps(SGD, 2, drop_if=lambda grads, right=right: right)
        assert tx.update(P, tx.init(P))[1].dropped_total == 1


MIXED = {
    "local_norm": (lambda v: ampx.train_step(loss_fn, SGD, local_norm=v), ["yes", 1, None]),
    "every_k": (lambda v: ampx.multi_steps(SGD, v), ["2", 2.0, True, 0, None]),
    "compiled": (lambda v: ampx.check_overlap(loss_fn, compiled=v), ["yes", 1, None]),
    "overlap": (
        lambda v: ampx.bucket_timeline(
            [1.0], bandwidth=1, backward_seconds=1, update_seconds=1, overlap=v
        ),
        ["tial", 1, None],
    ),
    "bucket_bytes": (lambda v: ampx.train_step(loss_fn, SGD, bucket_bytes=v), [-1, 0, "1", True]),
    "order": (lambda v: ampx.all_reduce("data", order=v), [3, "01", (0, 2), (0.0, 1.0), (True, 0)]),
    "sparse_rows": (lambda v: ampx.value_and_grad(loss_fn, sparse_rows=v), [3, "w", ["w"]]),
    "sparse_rows['w']": (lambda v: ampx.value_and_grad(loss_fn, sparse_rows={"w": v}), [3, "x"]),
    "layers_per_stage": (lambda v: pipeline(layers_per_stage=v), [3, "22", (2, 2.5), (True, 1)]),
    "skips": (lambda v: pipeline(skips=v), [3, "a", (1,)]),
    "param_specs": (lambda v: pipeline(param_specs=v), [3, "a", (1,)]),
    "costs": (lambda v: pipelining.balance(v, 2), ["12", ["1", "2"], [True, False], [1j, 2]]),
    "forward": (
        lambda v: pipelining.one_f_one_b(2, 4).simulate(forward=v),
        ["1", True, NAN, -1, ["1", "2"]],
    ),
    "communication": (
        lambda v: pipelining.one_f_one_b(2, 4).simulate(communication=v),
        ["1", True, NAN, INF, -1],
    ),
    "loss_scale": (
        lambda v: ampx.value_and_grad(loss_fn)(P, jnp.ones((4, 4)), loss_scale=v),
        ["8", True, NAN, {}],
    ),
    "master_weights": (lambda v: ampx.opt_level("O2", master_weights=v), ["False", 1]),
    "loss scale": (lambda v: ampx.opt_level("O2", loss_scale=v), ["dynamc", 0.5, True]),
    "name": (lambda v: ampx.get_policy(v), [3, None]),
    "number": (lambda v: ampx.train_step(loss_fn, SGD).in_phase(v), ["1", 0.5, True]),
    "mesh": (lambda v: ampx.zero1_specs(ampx.zero1(SGD, "data"), P, v), [3, "data", None]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}-{i}") for n, (_, vs) in MIXED.items() for i, v in enumerate(vs)],
)
def test_a_setting_of_several_kinds_refuses_the_others(name, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        MIXED[name][0](value)
    frames = traceback.extract_tb(caught.tb)
    assert SOURCES in pathlib.Path(frames[-1].filename).parents, frames[-1]
    assert name in str(caught.value)


def test_axes_that_a_mesh_lacks_are_refused_at_once():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=auto)
    assert pipeline(mesh=mesh, data_axes="data").data_axes == ("data",)
    with pytest.raises(ValueError, match="none named 'pipe', which axis_name, data_axes"):
        pipeline(mesh=mesh, axis_name="pipe")
    with pytest.raises(ValueError, match="none named 'rows'"):
        pipeline(mesh=mesh, data_axes=("data", "rows"))
    with pytest.raises(ValueError, match=r"none named 'model', which axis_name asks for"):
        ampx.zero1_specs(ampx.zero1(SGD, "model"), P, mesh)


def test_schedules_of_numpys_ints_are_those_of_pythons():
    names = "gpipe 1f1b eager-1f1b interleaved looped-bfs zero-bubble interleaved-zero-bubble"
    for name in (*names.split(), "zero-bubble-v", "dualpipe-v"):
        plain = pipelining.make_schedule(name, 2, 4)
        found = pipelining.make_schedule(name, np.int64(2), np.int32(4))
        assert found == plain and repr(found.rows) == repr(plain.rows)
        assert type(found.num_microbatches) is int


def test_a_frozen_setting_keeps_what_was_converted():
    phase = ampx.Phase("O2", until_step=np.int64(4), until_loss=np.float32(0.5))
    assert (type(phase.until_step), type(phase.until_loss)) == (int, float)
    assert dataclasses.replace(phase, until_step=jnp.array(5)).until_step == 5
    policy = ampx.Policy("fp32", "bf16", "half")
    assert str(policy) == "p=f32,c=bf16,o=f16"
