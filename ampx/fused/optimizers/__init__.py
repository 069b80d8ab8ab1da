"""The fused optimizers, one a module, named as in optax."""
