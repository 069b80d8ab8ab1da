"""Sphinx configuration. Notebooks are shown as committed; the tests run them, not this build."""

import contextlib
import inspect
import pathlib
import re
import urllib.request

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.domains.python import PyObject
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import ampx
import ampx.plotting

project = "ampx"
author = "the ampx authors"
copyright = author
release = version = ampx.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
extensions += ["sphinx.ext.intersphinx"]
exclude_patterns = ["_build", "**/.jupyter_cache", "**/.ipynb_checkpoints", "jupyter_execute"]

# Names of other libraries are links to their pages.
LIBRARIES = {
    "jax": "https://docs.jax.dev/en/latest",
    "optax": "https://optax.readthedocs.io/en/latest",
    "flax": "https://flax.readthedocs.io/en/latest",
    "numpy": "https://numpy.org/doc/stable",
    "python": "https://docs.python.org/3",
}


def fetch_indices(libraries, folder):
    """Fetches the index of each library, which says what page a name is on.

    intersphinx would fetch them, too, but warns where it cannot, and warnings are errors. Without a
    network the first failure ends the search, so that nobody waits; what an earlier build has
    fetched is used then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = True
    for name, url in libraries.items():
        try:
            if answers:
                with urllib.request.urlopen(f"{url}/objects.inv", timeout=3) as response:
                    (folder / name).write_bytes(response.read())
        except OSError:
            answers = False
    found = [name for name in libraries if (folder / name).exists()]
    return {name: (libraries[name], str(folder / name)) for name in found}


intersphinx_mapping = fetch_indices(
    LIBRARIES, pathlib.Path(__file__).parent / "_build/indices_of_libraries"
)

nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

default_role = "py:obj"  # `name` in a docstring becomes code, and a link where there is a target
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {  # shown by name, not spelt out
    name: name
    for name in ("ArrayLike", "DTypeLike", "optax.OptState", "optax.Params", "optax.Updates")
    + ("optax.ScalarOrSchedule", "optax.Schedule")
    + ("LossScaleChoice", "OnFloor", "PathRule", "Refill")
}
python_maximum_signature_line_length = 90  # a longer one has a line for each argument
napoleon_attr_annotations = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Attributes:" lists the fields, so the hook below leaves them out

# It calls the fields of an object "Variables".
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"

html_theme = "furo"
html_title = f"ampx {release}"
html_static_path = ["static"]
html_css_files = ["tables.css"]


def _skip(app, what, name, obj, skip, options):
    """Skips fields that `Attributes:` lists already, and types that a class holds."""
    field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if field or isinstance(obj, type) else None


def _tidy_signature(app, what, name, obj, options, signature, returns):
    """Writes dtype defaults as in source, and type aliases inside a union by their name."""

    def tidy(text):
        text = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", text)
        return re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)

    return signature and tidy(signature), returns and tidy(returns)


FACES = ("fused", "pipelining", "plotting")
# What `ampx.` begins in a profiler: name scopes of compiled programs.
SCOPES = {"ampx.micro_batch", "ampx.scale", "ampx.verdict", "ampx.bucket_0", "ampx.update"}


def find_bare_names():
    """The public names that can only mean ampx's own, also without `ampx.` before them.

    A word that is an argument of some function as well, such as `loss_scale`, may mean that one.
    """
    functions = (getattr(face, name) for face in FACES_OF_API for name in face.__all__)
    arguments = set()
    for function in filter(callable, functions):
        with contextlib.suppress(ValueError):  # what has no signature
            arguments.update(inspect.signature(function).parameters)
    return set(ampx.__all__) - arguments


FACES_OF_API = (ampx, ampx.fused, ampx.pipelining, ampx.plotting)
BARE_NAMES = find_bare_names()
OF_OTHERS = "migrating/"  # pages where a bare name may be that of another library


class LinkNames(SphinxTransform):
    """Makes each name in code type a link: `ampx.zero1`, `train_step(...)`, `jax.lax.scan`.

    A name of ampx that has no entry in the API pages is a warning, which fails the build.
    """

    default_priority = 450  # before Sphinx collects what is to be resolved

    def apply(self):
        """Puts a reference around the code; Sphinx resolves it when all pages are read."""
        for literal in list(self.document.findall(nodes.literal)):
            if not isinstance(literal.parent, pending_xref | nodes.reference):
                self._link(literal)

    def _link(self, literal):
        found = re.match(r"([A-Za-z]\w*(?:\.[A-Za-z_]\w*)*)(?=[(,]|$)", literal.astext())
        if not found or found[1] in SCOPES:
            return
        first, *rest = found[1].split(".")
        if rest:
            is_own, is_name = first in FACES, first[0].islower()
        else:
            is_own = is_name = first in BARE_NAMES and not self.env.docname.startswith(OF_OTHERS)
        if not is_name:
            return
        name = f"ampx.{found[1]}" if is_own else found[1]
        ours = name.startswith("ampx.")
        reference = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=name,
            refexplicit=True,
            refdoc=self.env.docname,
            refwarn=ours,
        )
        reference.source, reference.line = literal.source, literal.line
        literal.replace_self(reference)
        reference += literal


def _check_coverage(app, env):
    """Warns, and so fails the build, where a public name has no entry under its public path."""
    documented = set(env.domains.python_domain.objects)
    for face in FACES_OF_API:
        for name in face.__all__:
            path = f"{face.__name__}.{name}"
            if callable(getattr(face, name)) and path not in documented:
                logging.getLogger(__name__).warning("%s is on no page of docs/api", path)


def setup(app):
    """Connects the hooks above."""
    app.add_transform(LinkNames)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _tidy_signature)
    app.connect("env-check-consistency", _check_coverage)
