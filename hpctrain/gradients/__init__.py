"""The arena of parameters and gradients, replicas, buckets, reduction, precision."""
