"""Warn about a nearly full /dev/shm before MPI_Init, which may then crash without a message."""

from __future__ import annotations

import logging
import socket
import time

from hpctrain.core.launchers import Launched
from hpctrain.hardware import shm

logger = logging.getLogger("hpctrain")
#: For the launcher, to forward the warning; and for the rank that warns, to do so before another
#: rank of the node dies and takes all with it.
FORWARD_S, WARN_FIRST_S = 0.2, 2.0


def warn(launched: Launched) -> None:
    """Warn, once on each node, that its ranks may be lost as soon as MPI starts."""
    message = shm.too_little() if launched.size > 1 else ""
    if not message:
        return
    warns = launched.local_rank in (0, None)
    if warns:
        logger.warning("%s: %s", socket.gethostname(), message)
    time.sleep(FORWARD_S if warns else WARN_FIRST_S)
