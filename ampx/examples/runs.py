"""What a run of the demo leaves behind."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

import ampx
from ampx import pipelining


class Run(NamedTuple):
    """What came out of one run.

    Attributes:
      label: the run's name.
      history: the reports of all steps as one `StepReport` of numpy arrays.
      held_out_loss: nats per character of held-out text, computed at the run's own precision.
      milliseconds: mean time of a step, without compilation.
      compile_seconds: time to trace and compile the step.
      temporary_bytes: memory of the compiled step beyond its inputs and outputs.
      state: the last `ampx.TrainState`; whole arrays in the model's own layout, also after training
        over a mesh.
      devices: how many there were.
      schedule: of the pipeline, or None.
      characters: that a step trains on.

    Examples:
      >>> from ampx.examples import language_model, text
      >>> corpus = text.load_corpus()
      >>> model = language_model.make_model(corpus, layers=1, width=8, heads=1)
      >>> config = language_model.Config(precision="O2", steps=3, batch_size=2)
      >>> run = language_model.train(config, corpus=corpus, model=model)
      >>> run.history.loss.shape, run.skipped
      ((3,), 0)
    """

    label: str
    history: ampx.StepReport
    held_out_loss: float
    milliseconds: float
    compile_seconds: float
    temporary_bytes: int
    state: ampx.TrainState
    devices: int = 1
    schedule: pipelining.Schedule | None = None
    characters: int = 0

    @property
    def skipped(self) -> int:
        """Steps that were undone."""
        return int(np.sum(self.history.overflow))

    @property
    def gigaflops(self) -> float:
        """Useful work: 1e9 floating-point operations a second, of all devices together.

        Each parameter takes part in a product and a sum for each character, forward, and in two of
        both backward: 6 operations, as is usual for the utilization of a model ("MFU"). Attention's
        products of activations and what remat repeats are left out.
        """
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        return 6 * parameters * self.characters / self.milliseconds / 1e6

    @property
    def final_scale(self) -> float:
        """The loss scale after the last step."""
        return float(ampx.current_loss_scale(self.state.opt_state))
