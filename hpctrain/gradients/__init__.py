"""Gradients: the arena of a model's planes, buckets, reduction, precision, compression."""
