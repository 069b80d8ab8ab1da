"""Speed, memory and compile time of ampx beside the same work done with optax; see `__main__`."""
