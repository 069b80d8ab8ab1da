"""Gradients and optimizer states over devices: reduced, in buckets, or sharded as in ZeRO-1."""
