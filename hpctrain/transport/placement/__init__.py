"""Placement of ranks: cores, GPUs, network adapters; set, then compared."""
