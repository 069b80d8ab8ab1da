"""Pipeline schedules as data: made, checked, simulated and drawn."""
