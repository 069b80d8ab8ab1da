"""Looking at a step: where it overflows, what its numbers need, what waits for what."""
