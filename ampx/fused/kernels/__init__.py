"""Pallas kernels that map one function over arrays in place, block by block: `gpu` and `tpu`."""
