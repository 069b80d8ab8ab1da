"""Interval analysis of traced programs: bounds on all numbers that a program can compute."""
