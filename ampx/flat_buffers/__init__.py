"""Trees as few flat buffers: buckets of gradients, and parameters that stay flat."""
