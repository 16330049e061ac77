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
LIMIT_S = 240.0  # each of three trials ends within a minute
GRACE_S = 15.0  # the child gives its trial twice 5 s


def may_use_gpu(arguments: Sequence[str]) -> bool:
    """Return whether `hpctrain ARGUMENTS` may use a GPU: a driver, CuPy, and no --device cpu."""
    on_cpu = "--device=cpu" in arguments or ("--device", "cpu") in pairwise(arguments)
    return not on_cpu and nvidia.driver() is not None and find_spec("cupy") is not None


def verdict(repeat: bool = False) -> str:
    """Return the line of JSON about GPU memory on this host, "" if the probe took too long."""
    line = [*module_command("hpctrain.transport.gpu_probe.verdicts"), *["--again"] * repeat]
    process = subprocess.Popen(
        line,
        env=launchers.without_rank_variables(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            log.warning("the trials of GPU memory did not end within %.0f s", LIMIT_S)
            return _stop(process)
    return (output.splitlines() or [""])[-1]


def _stop(process: subprocess.Popen[str]) -> str:
    """End the child, which first ends the trial that it has started; return ""."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return ""
