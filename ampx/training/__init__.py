"""The whole step, the states that it takes, and what it reports."""
