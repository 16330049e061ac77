"""Training runs as jobs of a scheduler: `ht.slurm`.

`submit` puts a run into the queue; `status`, `log` and `cancel` take the folders of runs.
"""

from hpctrain.cluster.jobs.jobs import Submission, cancel, log, status, submit

__all__ = ["Submission", "cancel", "log", "status", "submit"]
