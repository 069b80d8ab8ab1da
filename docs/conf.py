"""Sphinx configuration. Notebooks are shown as committed; the tests run them, not this build."""

import re

from sphinx.util import logging

import ampx
import ampx.plotting

project = "ampx"
author = "the ampx authors"
copyright = author
release = version = ampx.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
exclude_patterns = ["_build", "**/.jupyter_cache", "**/.ipynb_checkpoints", "jupyter_execute"]

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
    + ("LossScaleChoice", "OnFloor", "PathRule", "Refill")
}
napoleon_attr_annotations = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Attributes:" lists the fields, so the hook below leaves them out

html_theme = "furo"
html_title = f"ampx {release}"


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


def _check_coverage(app, env):
    """Warns, and so fails the build, where a public name has no entry under its public path."""
    documented = set(env.domains.python_domain.objects)
    for face in (ampx, ampx.fused, ampx.pipelining, ampx.plotting):
        for name in face.__all__:
            path = f"{face.__name__}.{name}"
            if callable(getattr(face, name)) and path not in documented:
                logging.getLogger(__name__).warning("%s is on no page of docs/api", path)


def setup(app):
    """Connects the hooks above."""
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _tidy_signature)
    app.connect("env-check-consistency", _check_coverage)
