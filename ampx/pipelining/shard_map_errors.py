"""What JAX says of a pipeline's functions, told in terms of the pipeline.

JAX refuses some functions inside `shard_map`, which a user of a pipeline has never called. Its
message says where it happened. What is added here says why, and what there is to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_BOXES = (
    "Inside of a pipeline no sharding can be asked for along the axes that it maps: those of the "
    "stages, of the data and of param_specs. Parameters of flax.linen ask for it at each use if "
    "nn.with_partitioning or nn.with_logical_partitioning has put them into boxes: take them out, "
    "by flax.linen.unbox(params), and say how they are divided in param_specs"
)

# What JAX says, and what a user of a pipeline can do. The first that fits counts.
_NOTES = {
    # check_vma=False would take such a rule, and hide what is wrong with it.
    "Custom VJP bwd rule": (
        "A custom_vjp returns a gradient whose type says that it differs along other axes than its "
        "input. If its backward sums over an axis of param_specs, as one of Megatron's f and g "
        "does, write plain jax.lax.psum in the place of both: a pipeline differentiates it right, "
        "and with the pair and check_vma=False gradients would be too small. If it is made from "
        "constants, begin with numbers of the input, as jnp.zeros_like(x)"
    ),
    "manual axis types do not match": (
        "In a pipeline activations and parameters differ between devices, which their types say, "
        "and numbers made from constants, such as jnp.zeros(x.shape), do not. Loops and branches "
        "need one type: begin with numbers of the input, as jnp.zeros_like(x), or give "
        "ampx.pipelining.value_and_grad check_vma=False, which compares no such types and computes "
        "the same"
    ),
    "can only refer to Auto axes of the mesh": _BOXES,
    "Resource axis: ": _BOXES,
    "out_specs which require replication": (
        "In a pipeline the loss must be the same along the axes of param_specs that are no "
        "data_axes, also by its type, and the type of what jax.lax.all_gather or all_to_all "
        'returns says that it differs. Gather by jax.lax.all_gather(..., to="invarying"), end in a '
        "psum, or give ampx.pipelining.value_and_grad check_vma=False, which compares no types; "
        "or, if the rows of the batch are divided over that axis, name it in data_axes"
    ),
    "Closing over inputs to shard_map": (
        "first, stage or last closes over an array that lies on a mesh with Explicit axes, such as "
        "a table of positions. Make it a NumPy array, by np.asarray(table) outside of jit, or make "
        "it inside of the function that reads it; what differs between steps belongs in the batch"
    ),
}


@contextlib.contextmanager
def explain_refused_functions() -> Iterator[None]:
    """Adds to an error of JAX about the functions of a pipeline what can be done."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        notes = (note for words, note in _NOTES.items() if words in str(error))
        if note := next(notes, None):
            error.add_note(note)
        raise
