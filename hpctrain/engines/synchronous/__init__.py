"""Synchronous data parallelism: one update per step, the same on all ranks."""
