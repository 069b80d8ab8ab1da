"""Jaxprs, the programs that JAX traces: how to read, build, fold and run them."""
