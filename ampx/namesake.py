"""A warning where the other distribution called ampx is installed beside this one.

This library is distributed as `ampx-jax`, since another project owns the name `ampx` on the package
index. Both install a file `ampx/__init__.py`, and the other's is empty. In one folder the one that
is installed last replaces the first's, and `pip uninstall` of either removes it for both. An empty
file cannot warn: that it was replaced shows in errors such as "module 'ampx' has no attribute
'train_step'". This module can only tell of trouble to come, while this
library's file is there.
"""

from __future__ import annotations

import importlib.metadata
import warnings

ADVICE = (
    "the distribution 'ampx', which is another project's, is installed beside 'ampx-jax', which is "
    "this library. Both have a file ampx/__init__.py, and each replaces or removes the other's. "
    "Run `pip uninstall ampx`, and then install ampx-jax once more with --force-reinstall --no-deps"
)


def warn_of_namesake() -> None:
    """Warns if a distribution called `ampx` is installed; looks at names of folders alone.

    Examples:
      >>> from ampx import namesake
      >>> namesake.warn_of_namesake()  # silent: only ampx-jax is here
    """
    try:
        importlib.metadata.distribution("ampx")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(ADVICE, stacklevel=3)  # the line that imports ampx
