"""Gradients of micro-batches: divided, summed, averaged, now or over several calls."""
