"""JAX's traced programs: read, built, evaluated and traced back to the user's lines."""
