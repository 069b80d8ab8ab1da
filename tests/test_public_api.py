import ast
import doctest
import functools
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import jax
import pytest

import ampx

SOURCES = sorted(Path(ampx.__file__).parent.rglob("*.py"))
MODULES = sorted(info.name for info in pkgutil.walk_packages(ampx.__path__, "ampx."))
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


FACES = {"ampx": ampx, "ampx.fused": ampx.fused, "ampx.pipelining": ampx.pipelining}
PUBLIC = [(face, name) for face, module in FACES.items() for name in module.__all__]


@pytest.mark.parametrize(("face", "name"), PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(face, name):
    value = getattr(FACES[face], name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    found = doctest.DocTestFinder(recurse=False).find(value, name)
    assert found and found[0].examples, f"{name} has no example"
    # The test below runs the examples of modules: this one must be among them.
    assert (value.__name__ if inspect.ismodule(value) else value.__module__) in MODULES


# Examples that compile whole programs or many operations, which other tests run too.
SLOW = (
    "ampx.examples.",
    "ampx.fused.moments.int8_blocks",
    "ampx.param_storage.rounding",
    "ampx.param_storage.split_",
    "ampx.param_storage.stochastic_rounding",
    "ampx.pipelining.gradients",
    "ampx.pipelining.planning.plans",
    "ampx.pipelining.shard_map_program",
)


@pytest.mark.slow_but(*(module for module in MODULES if not module.startswith(SLOW)))
@pytest.mark.whole("ampx.examples.pipelined")  # which tests of examples train
@pytest.mark.parametrize("module", MODULES)
def test_examples_run_under_strict_promotion(module):
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    result = doctest.testmod(importlib.import_module(module), optionflags=DOCTEST_FLAGS)
    assert not result.failed


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_all_is_sorted_and_complete(face):
    assert list(face.__all__) == sorted(set(face.__all__))
    imported = {
        alias.asname or alias.name
        for node in ast.parse(Path(face.__file__).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or "").startswith("_")  # for use at import, not on offer
    }
    assert set(face.__all__) == imported, "what is imported into a face is what it offers"


def test_no_module_shadows_a_public_name_beside_it():
    """`ampx.train_step` is a function; that it lives in a module of that name harms nobody."""
    for face, module in FACES.items():
        siblings = {own for up, _, own in (name.rpartition(".") for name in MODULES) if up == face}
        assert not (siblings - {"fused", "pipelining"}) & set(module.__all__)


def imports_at_module_level(path):
    """Modules that a file imports when it is loaded."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            yield from submodules
            if len(submodules) < len(node.names):
                yield node.module
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes.extend(ast.iter_child_nodes(node))


def test_only_faces_re_export_names():
    """A package says what it is in one line; whoever needs a name imports its module."""
    faces = {*FACES, "ampx.plotting"}
    for package in PACKAGES:
        if package not in faces:
            (doc,) = ast.parse(Path(importlib.import_module(package).__file__).read_text()).body
            assert "\n" not in ast.literal_eval(doc.value), package


@functools.cache
def import_graph():
    """From each module to the modules of ampx that it imports when it is loaded."""
    return {
        name: set(imports_at_module_level(Path(importlib.import_module(name).__file__)))
        & {"ampx", *MODULES}
        for name in ("ampx", *MODULES)
    }


def test_imports_point_one_way():
    order = list(TopologicalSorter(import_graph()).static_order())  # CycleError names the cycle
    names = ("ampx.trees", "ampx.loss_scaling.wrappers", "ampx")
    ranks = [order.index(name) for name in names]
    assert ranks == sorted(ranks)
    assert not import_graph()["ampx.flax_modules"]


PACKAGES = sorted({name.rpartition(".")[0] for name in MODULES})


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_the_rooms_of_a_package_point_one_way(package):
    """Two packages that import each other are one idea, even where no files form a circle."""

    def room(module):
        inside = module.removeprefix(f"{package}.")
        return inside.split(".")[0] if inside != module else None

    graph = {}
    for module, imported in import_graph().items():
        if own := room(module):
            graph.setdefault(own, set()).update({room(other) for other in imported} - {own, None})
    list(TopologicalSorter(graph).static_order())  # CycleError names the cycle


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_source_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 450, "one file, one idea: split it"


@pytest.mark.slow
def test_ampx_needs_neither_flax_nor_plotting():
    """A program without them never pays for them."""
    names = "{'flax', 'matplotlib', 'tqdm', 'orbax', 'rich'}"
    code = f"import sys, ampx; print({names} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(Path(ampx.__file__).parent.parent)}
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "set()"
