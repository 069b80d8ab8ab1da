"""Complete programs, small enough to read and to copy from; `python -m ampx.examples.<name>`."""
