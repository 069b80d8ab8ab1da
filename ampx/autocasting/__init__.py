"""Per-operation mixed precision: rules, planning, rewriting, and the report of it."""
