"""Every argument of every public name, given what is wrong for it, ends in an error of ampx's own.

The tables are in `bad_inputs`, those of plain settings in `test_settings`. An error is ampx's own
if a `raise` statement in ampx has made it; an AttributeError that happens to come up in ampx's code
is none. It must name the argument.
"""

import ast
import functools
import inspect
import pathlib
import re
import traceback

import bad_inputs
import jax.numpy as jnp
import pytest
import test_settings
from bad_inputs import SOURCES, TABLE

import ampx
from ampx import fused, pipelining

# Arguments that are in no table, with the reason.
EXEMPT = {
    "args": "of the user's own function",
    "kwargs": "of the user's own function",
    "extra_args": "for the user's own transformation, which ignores or refuses them",
    "simulation": "handed to Schedule.simulate, whose arguments are here",
    "inner": "transformations: test_settings",
    "tx": "transformations: test_settings",
}
# Methods that are there for ampx's other packages, or take what these hand on.
INSIDE = {
    "Bucket": "made by bucket_layout",
    "Explanation": "made by explain",
    "NumericsReport": "made by numerics_report",
    "Plan": "made by plan",
    "GradResult.with_scale": "takes a scale that value_and_grad has checked",
    "GradResult.with_parts_over": "takes axes that value_and_grad has checked",
    "PipelineGradients.observed": "for ampx.pipelining.plan",
    "PrecisionSchedule.next_phase": "takes what follow_schedule hands it",
    "PrecisionSchedule.remember": "takes what follow_schedule hands it",
    "Recipe.call": "the arguments of the user's function",
    "Recipe.call_part": "the arguments of the user's function",
    "Recipe.cast_params": "leaves what is no array alone",
    "Recipe.half_params": "leaves what is no array alone",
    "Rules.match": "takes an equation of a jaxpr",
    "Policy": "its methods leave what is no array alone",
    "state_format": "describes any tree",
    "densify": "leaves what is no array alone",
    "current_loss_scale.loss_id": "test_settings",
}


# Other words by which an error may name an argument.
SYNONYMS = {
    "params": ("parameter", "pattern", "is missing", "layer"),
    "into": ("pattern", "is missing", "layer"),
    "more": ("without a name",),
    "policy": ("param_dtype", "level", "precision schedule"),
    "name": ("policy", "param_dtype"),
    "model": ("module",),
    "loss_scale": ("loss scale",),
    "choice": ("loss scale",),
    "spec": ("field",),
    "tx": ("transformation", "fused optimizer"),
    "updates": ("gradient", "every loss"),
    "opt_state": ("state",),
    "weight_decay_mask": ("mask",),
    "like": ("layout",),
    "extra_args": ("is given by name",),
    "targets": ("target", "primitive"),
    "forward": ("backward",),
    "source": ("line", "the schedule", "stages"),
    "rows": ("schedule",),
    "device_of": ("schedule",),
    "num_microbatches": ("schedule",),
    "costs": ("layers",),
    "histories": ("run",),
    "loss_fn": ("loss", "weight", "aux_reduction"),
}


@functools.cache
def raise_statements(path):
    nodes = ast.walk(ast.parse(pathlib.Path(path).read_text()))
    return {(node.lineno, node.col_offset) for node in nodes if isinstance(node, ast.Raise)}


def is_own(error):
    """Whether a `raise` statement of ampx has made an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_ampx = SOURCES in pathlib.Path(frame.filename).parents
    return is_ampx and (frame.lineno, frame.colno) in raise_statements(frame.filename)


def argument_of(name):
    """The argument that an entry of the table is about: "batch" of "train_step(2).batch"."""
    return re.split(r"[ ,]", name.rsplit(".", 1)[-1])[0]


# Their arguments are checked by the same functions as those of the others.
SLOW = tuple(f"fused.{name}." for name in "adamw sgd lamb lion novograd adagrad adadelta".split())
SLOW += ("fused.sgd(momentum).", "static_loss_scale.", "pipelining.plan.", "plotting.")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith(SLOW) else ()) for name in TABLE],
)
def test_a_wrong_argument_gets_an_error_of_ampx_that_names_it(name):
    call, values = TABLE[name]
    for kind, value in values.items():
        with pytest.raises(Exception) as caught:
            call(value)
            raise AssertionError(f"{kind} is accepted")
        assert is_own(caught.value), f"{kind}: {caught.value!r}"
        assert isinstance(caught.value, TypeError | ValueError | IndexError), kind
        argument = argument_of(name)
        words = (argument, *SYNONYMS.get(argument, ()))
        assert any(word in str(caught.value) for word in words), f"{kind}: {caught.value}"


def test_the_check_of_errors_tells_those_of_other_libraries():
    for call in (lambda: {}.attribute, lambda: jnp.zeros(-1), lambda: len(3)):
        with pytest.raises(Exception) as caught:
            call()
        assert not is_own(caught.value)
    with pytest.raises(TypeError) as caught:
        ampx.get_policy(3)
    assert is_own(caught.value)


def public_arguments():
    """Every argument of public functions and of methods of public classes, as in the table."""
    for name, value in test_settings.public_callables():
        for argument in inspect.signature(value).parameters:
            yield f"{name}.{argument}"
    for module in (ampx, fused, pipelining):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isclass(value):
                continue
            for method, function in vars(value).items():
                own = getattr(function, "__func__", function)
                is_method = inspect.isfunction(own) and own.__module__ == value.__module__
                if not is_method or (method.startswith("_") and method != "__call__"):
                    continue
                for argument in list(inspect.signature(own).parameters)[1:]:
                    yield f"{name}.{method.strip('_')}.{argument}"


def test_every_argument_is_in_a_table():
    settings = {f"{name}.{parameter.name}" for name, parameter, _ in test_settings.SETTINGS}
    known = settings | set(TABLE) | set(test_settings.MIXED)
    missing = [
        argument
        for argument in public_arguments()
        if argument not in known
        and argument.rsplit(".")[-1] not in EXEMPT
        and not any(argument == name or argument.startswith(f"{name}.") for name in INSIDE)
    ]
    assert not missing


def test_the_table_in_the_docs_is_that_of_today():
    """As many cases as it says, or about as many: arguments come and go."""
    text = (SOURCES.parent / "docs/design.md").read_text()
    for kind, count in bad_inputs.count_cases().items():
        said = re.search(rf"^\| {re.escape(kind)} \| (\d+) \|$", text, re.MULTILINE)
        assert said, f"make the table with python tests/bad_inputs.py: no row {kind!r}"
        assert 0.9 * count <= int(said[1]) <= 1.1 * count, (
            f"{kind}: {said[1]} in docs/design.md, {count}"
        )
