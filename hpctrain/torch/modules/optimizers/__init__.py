"""Optimizers and schedulers of PyTorch on the flat arrays of a Trainer."""
