"""Damages each file of a checkpoint in turn, restores it, and prints what came of it.

    python tests/damaged_checkpoints.py FOLDER

A line for each: the damage, the size of the file, and `refused`, `same` (bit for bit what was
saved) or `other`. A program of its own, since orbax leaves coroutines behind that complain later.
"""

import pathlib
import shutil
import sys

import interrupted_training
import jax
import numpy as np
import orbax.checkpoint as ocp

DAMAGES = ("truncated", "deleted", "a bit flipped")


def damage(path, kind, generator):
    """Damages a file; whether there was anything to damage."""
    content = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif content:
        content[generator.integers(len(content))] ^= 1 << generator.integers(8)
        path.write_bytes(content)
    return bool(content)


def restore(checkpointer, folder, state):
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    try:
        restored = checkpointer.restore(folder, like)
    except Exception:  # of whatever kind orbax and tensorstore raise
        return "refused"
    digests = map(interrupted_training.digest, (restored, state))
    return "same" if len(set(digests)) == 1 else "other"


def main(folder):
    step, generator = interrupted_training.make_step(), np.random.default_rng(0)
    state = step.init(interrupted_training.make_params())
    state, _ = jax.jit(step)(state, interrupted_training.make_batch(0))
    sound = folder / "sound"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(sound, state)
        checkpointer.wait_until_finished()
        for path in sorted(path for path in sound.rglob("*") if path.is_file()):
            for kind in DAMAGES:
                copy = folder / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(sound, copy)
                size = path.stat().st_size
                if damage(copy / path.relative_to(sound), kind, generator):
                    print(f"{kind}: {size}: {restore(checkpointer, copy, state)}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
