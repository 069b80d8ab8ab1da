"""Speed and memory of ampx beside the same work done with optax, in one run."""
