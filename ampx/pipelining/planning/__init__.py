"""What a pipeline costs before it runs: balance of stages, memory, time."""
