"""Before a run on GPUs: a child finds out which way their memory takes here, and remembers it.

Ranks must not try: an MPI that takes no device pointers crashes on the first one. They find what
`python -m hpctrain.transport.verdicts` left in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise

from hpctrain import launchers
from hpctrain.hardware import nvidia

LIMIT_S = 240.0  # each of three trials ends within a minute


def wanted(arguments: Sequence[str]) -> bool:
    """Return whether `hpctrain ARGUMENTS` may use a GPU: a driver, CuPy, and no --device cpu."""
    on_cpu = "--device=cpu" in arguments or ("--device", "cpu") in pairwise(arguments)
    return not on_cpu and nvidia.driver() is not None and find_spec("cupy") is not None


def verdict(again: bool = False) -> str:
    """Return the line of JSON about GPU memory here, "" if none was found in time."""
    line = [sys.executable, "-m", "hpctrain.transport.verdicts", *["--again"] * again]
    try:
        done = subprocess.run(
            line,
            env=launchers.scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return ""
    return (done.stdout.splitlines() or [""])[-1]
