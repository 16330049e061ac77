"""The trials of a study: on this machine, on a netlab, or as jobs of Slurm."""
