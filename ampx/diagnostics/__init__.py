"""Where overflows are born, which ranges numbers have, and what a step's reductions hide behind."""
