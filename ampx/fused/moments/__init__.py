"""How fused optimizers store their moments: formats, and blocks of int8."""
