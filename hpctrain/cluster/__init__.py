"""Clusters: launching on this machine, Slurm, a lab of several hosts."""
