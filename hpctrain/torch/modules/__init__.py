"""Modules of PyTorch under every engine: parameters and gradients in the arena of a Replica."""
