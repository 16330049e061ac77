"""Slurm: scripts, submission, states of jobs."""
