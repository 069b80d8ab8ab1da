"""Every optimizer of optax and `optax.contrib`, found by introspection, with settings to run it.

A name that a new optax brings runs with `learning_rate=0.01` alone, or fails until it is listed.
"""

import inspect
import warnings

import jax
import optax

RATE = 0.01


def _adversary():
    return optax.chain(optax.contrib.normalize(), optax.sgd(0.05))


# What is not built with a learning rate alone: name -> transformation.
SETTINGS = {
    "lbfgs": optax.lbfgs,
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "contrib.cocob": optax.contrib.cocob,
    "contrib.galore": lambda: optax.contrib.galore(RATE, rank=2),
    "contrib.hutchinson_estimator_diag_hessian": lambda: optax.chain(
        optax.contrib.hutchinson_estimator_diag_hessian(), optax.scale(-RATE)
    ),
    "contrib.mechanize": lambda: optax.contrib.mechanize(optax.sgd(RATE)),
    "contrib.normalize": _adversary,
    "contrib.reduce_on_plateau": lambda: optax.chain(
        optax.sgd(RATE), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(RATE), _adversary()),
    # It takes matrices alone, and wants to be told of each which axes are which.
    "contrib.scale_by_muon": lambda: optax.chain(
        optax.masked(
            optax.contrib.scale_by_muon(
                weight_dimension_numbers=lambda tree: jax.tree.map(
                    lambda _: optax.contrib.MuonDimensionNumbers(), tree
                )
            ),
            lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree),
        ),
        optax.scale(-RATE),
    ),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(
        optax.adam(RATE, b1=0.0), learning_rate=RATE
    ),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(
        optax.adam(RATE)
    ),
    # Not aliases, but ways of using them that take other arguments.
    "sgd, scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)
    ),
    "contrib.sam, opaque": lambda: optax.contrib.sam(
        optax.sgd(RATE), _adversary(), opaque_mode=True
    ),
}
# The extra arguments that each one asks for; all others ask for none.
TAKES = {
    "lbfgs": ("value", "grad", "value_fn"),
    "polyak_sgd": ("value",),
    "contrib.hutchinson_estimator_diag_hessian": ("obj_fn",),
    "contrib.momo": ("value",),
    "contrib.momo_adam": ("value",),
    "contrib.reduce_on_plateau": ("value",),
    "contrib.sophia": ("obj_fn",),
    "sgd, scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "contrib.sam, opaque": ("grad_fn",),
}
_PER_EXAMPLE = "takes the gradients of single examples, which a step does not compute"
EXCLUDED = {
    "contrib.differentially_private_aggregate": _PER_EXAMPLE,
    "contrib.dpsgd": _PER_EXAMPLE,
}


def _find_names():
    for name, value in inspect.getmembers(optax, inspect.isfunction):
        if value.__module__ == "optax._src.alias":
            yield name
    for name, _ in inspect.getmembers(optax.contrib, inspect.isfunction):
        if name != "schedule_free_eval_params":  # a function of a state
            yield f"contrib.{name}"


NAMES = sorted({*_find_names(), *SETTINGS} - set(EXCLUDED))


def make(name):
    """The transformation of one of `NAMES`."""
    if name in SETTINGS:
        return SETTINGS[name]()
    home, _, own = name.rpartition(".")
    build = getattr(optax.contrib if home else optax, own)
    if "learning_rate" in inspect.signature(build).parameters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # old names, too
            return build(learning_rate=RATE)
    return optax.chain(build(), optax.scale(-RATE))  # scale_by_...


def table():
    """The table of the guide, in its lines."""
    yield "| optimizer | takes | plain | dynamic scale | micro-batches |"
    yield "| --- | --- | --- | --- | --- |"
    for name in sorted({*NAMES, *EXCLUDED}):
        takes = ", ".join(f"`{argument}`" for argument in TAKES.get(name, ()))
        runs = ("yes",) * 3 if name in NAMES else (EXCLUDED[name], "", "")
        yield f"| `{name}` | {' | '.join((takes, *runs))} |".replace("|  |", "| |")
