"""The one compiled program that runs a schedule."""
