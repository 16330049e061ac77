"""The schedulers to which jobs are submitted: Slurm, PBS and Flux, as records of one kind."""
