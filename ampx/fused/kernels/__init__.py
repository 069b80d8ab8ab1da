"""Pallas kernels that map an elementwise rule over arrays in place: `gpu` and `tpu`."""
