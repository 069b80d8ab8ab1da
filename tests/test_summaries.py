"""Every public object shows itself in one line, whatever it holds, and reports as tables."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ampx
import ampx.plotting
from ampx import summaries
from ampx.summaries import show_fields, summarize

FACES = (ampx, ampx.fused, ampx.pipelining)
CLASSES = {
    f"{face.__name__}.{name}": getattr(face, name)
    for face in FACES
    for name in face.__all__
    if isinstance(getattr(face, name), type)
}
# They say in a line of their own what they are.
WITH_OWN_REPR = {
    "ampx.LintReport",
    "ampx.PrecisionSchedule",
    "ampx.Rules",
    "ampx.fused.FlatParams",
    "ampx.pipelining.PipelineGradients",
}
# Their `str` is a line, too.
ONE_LINE = {
    "ampx.OverflowRecord",
    "ampx.Policy",
    "ampx.PrecisionSchedule",
    "ampx.Recommendation",
    "ampx.pipelining.Action",
}
# A field may hold anything: here a tree of a model's size, a text, or rows of a report.
PARAMS = {f"layer_{i}": np.zeros((16, 16), np.float32) for i in range(100)}
ROWS = tuple(ampx.LintFinding("donation", "long " * 100, "a\nb", "fix") for _ in range(50))
LONG = (PARAMS, "long\n" * 100, ROWS, np.zeros((200, 200)), {i: (i, i) for i in range(500)})


def filled(cls, value):
    """An object of a class with a value in each field; none is checked."""
    if hasattr(cls, "_fields"):
        return tuple.__new__(cls, [value] * len(cls._fields))
    new = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(new, field.name, value)
    return new


@pytest.mark.parametrize("name", CLASSES)
def test_public_objects_are_shown_in_one_line(name):
    cls = CLASSES[name]
    if name in WITH_OWN_REPR:
        assert "__repr__" in vars(cls) and cls.__repr__ is not show_fields
        return
    for value in LONG:
        shown = repr(filled(cls, value))
        number = len(getattr(cls, "_fields", None) or dataclasses.fields(cls))
        assert shown.startswith(f"{cls.__name__}(") and "\n" not in shown
        assert len(shown) <= 20 + number * (summaries.LONGEST + 30)


def test_objects_that_are_met_daily_are_shown():
    step = ampx.train_step(lambda w, x: jnp.mean(x @ w), optax.adam(0.1), policy="O2")
    state = step.init(jnp.ones((3, 2)))
    assert repr(state) == ("TrainState(step=0, params=float32[3,2], opt_state=LossScaleState(...))")
    assert repr(state.opt_state) == (
        "LossScaleState(loss_scale=65536.0, growth_tracker=0, hysteresis_tracker=1, inf_total=0, "
        "nan_total=0, floor_hits=0, ceiling_hits=0, overflow=False, skipped_total=0, "
        "bad_update_total=0, nonfinite_loss_total=0, floor_flag=False, "
        "inner_state=<3 arrays, 13 numbers>)"
    )
    assert repr(step.recipe) == (
        "Recipe(policy=Policy(...), stays_float32=is_norm_path, loss_scale='dynamic', "
        "master_weights=True, level='O2', rules=ampx.DEFAULT_RULES)"
    )
    assert repr(ampx.get_policy("c=bf16")) == (
        "Policy(param_dtype=float32, compute_dtype=bfloat16, output_dtype=bfloat16)"
    )
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state.opt_state)), state)
    assert seen[0].startswith("LossScaleState(loss_scale=float32[], growth_tracker=int32[]")


def test_values_that_cannot_be_read_are_shown_by_their_type():
    donated = jnp.float32(1) + 1
    donated.delete()
    across = nnx.Param(jnp.arange(2.0))
    sharded = SimpleNamespace(shape=(), dtype=jnp.dtype("float32"))
    for value, shown in (
        (donated, "float32[]"),
        (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "bfloat16[2,3]"),
        (jax.random.key(0), "key<fry>[]"),
        (across, "float32[2]"),
        (nnx.Param(jnp.int32(3)), "3"),
        (sharded, "float32[]"),
        (np.float16(2), "2.0"),
        (jnp.bfloat16(0.5), "0.5"),
        ([1, 2], "[1, 2]"),
        (list(range(99)), "<99 items>"),
        ({"a": jnp.ones(()), "b": None}, "<1 array, 1 number>"),
        (optax.TraceState({"w": jnp.ones(3)}), "<1 array, 3 numbers>"),
        ("x" * 99, repr("x" * 55 + "...")),
        (object(), "<object>"),
    ):
        assert summarize(value) == shown


def test_a_table_is_text_of_fixed_width():
    layout = ampx.bucket_layout({"w": jnp.ones((30, 200)), "b": jnp.ones(3)}, multiple_of=8)
    assert str(layout).splitlines() == [
        "bucket  dtype    leaves  numbers  padding  bytes",
        "0       float32  2       6,003    5        24,032",
    ]
    assert layout._repr_html_() == f"<pre>{layout}</pre>"


@pytest.mark.parametrize("name", CLASSES)
def test_what_prints_as_a_table_is_one_in_notebooks(name):
    """treescope shows `_repr_html_`, too, and without one opens the fields of states by itself."""
    cls = CLASSES[name]
    prints = "__str__" in vars(cls) and name not in ONE_LINE
    assert hasattr(cls, "_repr_html_") == hasattr(cls, "__rich_console__") == prints


class Unused(NamedTuple):
    """Fields that hold nothing are left out."""

    one: int = 1
    two: int | None = None
    three: tuple = ()
    __repr__ = show_fields


def test_empty_fields_are_left_out():
    assert repr(Unused()) == "Unused(one=1)"


@pytest.mark.parametrize("face", (*FACES, ampx.plotting), ids=lambda face: face.__name__)
def test_completion_offers_public_names_alone(face):
    assert dir(face) == sorted({*face.__all__, *(["plotting"] if face is ampx else [])})
    assert not {name for name in dir(face) if not hasattr(face, name)}
