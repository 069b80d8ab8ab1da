"""Runs the demo's command line in processes of their own, and compares training runs."""

import json
import pathlib
import subprocess
import sys

import numpy as np
from processes import environment

# The demo's own command line, but with a small model and few held-out characters, so that a run
# takes seconds. Its losses are written to a file: the printed table rounds them.
COMMAND = """
import json, pathlib, sys
import numpy as np
from ampx.examples import language_model as lm, text, transformer
corpus = text.load_corpus()
corpus = corpus._replace(held_out=corpus.held_out[:2000])
text.load_corpus = lambda: corpus
lm.make_model = lambda corpus, layers: transformer.make_model(
    corpus, layers=layers, width=16, heads=2
)
runs, compare = [], lm.compare
lm.compare = lambda *args, **kwargs: runs.extend(compare(*args, **kwargs))
lm.main(sys.argv[2:])
losses = np.asarray(runs[0].history.loss, float).tolist()
pathlib.Path(sys.argv[1]).write_text(json.dumps([runs[0].held_out_loss, *losses]))
"""
FLAGS = "--precision float32 --steps 20 --batch-size 8 --learning-rate 0.01"


def run_commands(folder: pathlib.Path, *commands: str) -> list[tuple[str, str, list[float]]]:
    """Runs all commands at once; for each, what it printed (stdout, stderr) and its losses."""
    started = []
    try:
        for number, flags in enumerate(commands):
            own = folder / str(number)
            own.mkdir()
            with (own / "out").open("wb") as out, (own / "err").open("wb") as err:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", COMMAND, "losses", *flags.split()],
                        cwd=own,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=environment() | {"MPLBACKEND": "Agg"},
                    )
                )
        ends = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()  # does nothing to those that have ended
            process.wait()
    shown = [
        [(folder / str(i) / name).read_text() for name in ("out", "err")] for i in range(len(ends))
    ]
    assert not any(ends), shown
    losses = [json.loads((folder / str(i) / "losses").read_text()) for i in range(len(ends))]
    return [(*two, own) for two, own in zip(shown, losses, strict=True)]


def assert_same_training(history, expected) -> None:
    """Asserts that losses, norms, loss scales and skips agree at every one of the 20 steps."""
    # The losses and gradients of 8 windows in another order: some units of 2**-24 relative, of
    # which AdamW makes more where a second moment is nearly zero. Found: 4e-7 and 3e-7.
    np.testing.assert_allclose(history.loss, expected.loss, rtol=2e-6)
    np.testing.assert_allclose(history.global_norm, expected.global_norm, rtol=2e-6)
    np.testing.assert_array_equal(history.loss_scale, expected.loss_scale)
    np.testing.assert_array_equal(history.overflow, expected.overflow)
