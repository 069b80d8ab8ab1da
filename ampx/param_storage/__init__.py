"""Half-precision parameters that train well: masters, split floats, stochastic rounding."""
