"""Processes that a launcher started together and that train apart, mostly by mistake.

A script that reads RANK before anything else takes each process of a plain mpirun for a job of its
own. After its first optimizer step without a process group, rank 0 says so in one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hpctrain.core import launchers
from hpctrain.core.printing import say
from hpctrain.core.torchrun import TORCHRUN

SILENCING_VARIABLE = "HPCTRAIN_INDEPENDENT"
#: modules of libraries by which ranks train together without a process group of PyTorch
TOGETHER = (
    "deepspeed",
    "horovod",
    "hpctrain.torch.gradient_sync.synchronous",
    "hpctrain.training.trainer",
    "hpctrain.world.calls.calls",
)


def watch_training(environ: Mapping[str, str]) -> None:
    """Let rank 0 of several say after its first optimizer step whether it trains alone.

    Nothing is registered where the variable HPCTRAIN_INDEPENDENT is set, as for a sweep.
    """
    job = launchers.launched(environ)
    is_silent = environ.get(SILENCING_VARIABLE, "0") not in ("", "0") or TORCHRUN in environ
    if job.size == 1 or job.rank > 0 or is_silent:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    start, is_first_step = os.getpid(), True

    def report_once(*_: Any) -> None:
        nonlocal is_first_step
        if not is_first_step:  # it stays: PyTorch iterates over the hooks that it calls
            return
        from hpctrain.torch import ranks

        is_first_step = False
        if os.getpid() == start and _trains_alone(ranks.variables != {}):
            say(text(job, ranks.variables != {}), err=True)

    register_optimizer_step_post_hook(report_once)


def _trains_alone(has_variables: bool) -> bool:
    """Return whether nothing of this process trains with other ranks.

    `has_variables`: MPI was started for torchrun's variables, not by the script.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return False
    has_own_mpi = "mpi4py.MPI" in sys.modules and not has_variables
    return not has_own_mpi and not any(name in sys.modules for name in TOGETHER)


def text(job: launchers.Launched, has_variables: bool) -> str:
    """Return the line about the processes of `job`."""
    remedy = (
        "does the script need an option for several processes?"
        if has_variables
        else "to train one, start the script by `python -m hpctrain.torch SCRIPT`"
    )
    return (
        f"hpctrain: {job.size} processes of {launchers.TITLES[job.name]} train {job.size} models "
        f"independently, without a process group; {remedy} ({SILENCING_VARIABLE}=1 silences this)"
    )
