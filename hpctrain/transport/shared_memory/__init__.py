"""Memory shared by the ranks of a node: host pages, GPU memory, flags."""
