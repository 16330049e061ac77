"""Before a run on GPUs: a child process probes the path of GPU memory and caches the verdict.

Ranks must not probe: an MPI that takes no device pointers crashes on the first one. They read the
verdict that `python -m hpctrain.transport.gpu_probe.verdicts` left in the user's cache.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise

from hpctrain.core import launchers
from hpctrain.core.interpreter import module_command
from hpctrain.hardware import nvidia

log = logging.getLogger(__name__)
TRIALS_TIMEOUT_S = 240.0  # three trials of at most a minute each, and a margin
GRACE_PERIOD_S = 15.0  # the child itself waits up to 5 s after SIGTERM and 5 s after SIGKILL


def may_use_gpu(arguments: Sequence[str]) -> bool:
    """Return whether `hpctrain ARGUMENTS` may use a GPU: a driver, CuPy, and no --device cpu."""
    cpu_requested = "--device=cpu" in arguments or ("--device", "cpu") in pairwise(arguments)
    return (
        not cpu_requested and nvidia.driver_version() is not None and find_spec("cupy") is not None
    )


def run_probe(force: bool = False) -> str:
    """Return the verdict on GPU memory of this host as one line of JSON; "" after a timeout.

    `force` repeats the trials even if the verdict is cached.
    """
    command = [*module_command("hpctrain.transport.gpu_probe.verdicts"), *["--again"] * force]
    process = subprocess.Popen(
        command,
        env=launchers.without_rank_variables(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            output = process.communicate(timeout=TRIALS_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            log.warning("the trials of GPU memory did not end within %.0f s", TRIALS_TIMEOUT_S)
            return _terminate(process)
    return (output.splitlines() or [""])[-1]


def _terminate(process: subprocess.Popen[str]) -> str:
    """Terminate the child, which ends its running trial before it exits; return ""."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE_PERIOD_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return ""
