"""Loss scales: what is finite, how a scale moves, and the wrappers of optimizers."""
