"""What is done to gradients and updates around an optimizer: norms, clipping, applying."""
