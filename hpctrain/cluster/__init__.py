"""Start, supervise and restart jobs: mpiexec, Slurm, several emulated hosts."""
