"""A word before MPI starts, where it may end without one: a /dev/shm with hardly any room."""

from __future__ import annotations

import logging
import socket
import time

from hpctrain.hardware import shm
from hpctrain.launchers import Launched

logger = logging.getLogger("hpctrain")
#: For the launcher, to hand on the word; and for who speaks, to come that far before another rank
#: of the node dies and takes all with it.
HEARD_S, SPOKEN_S = 0.2, 2.0


def warn(launched: Launched) -> None:
    """Say, once on each node, that its ranks may be lost as soon as MPI starts."""
    said = shm.too_little() if launched.size > 1 else ""
    if not said:
        return
    speaks = launched.local_rank in (0, None)
    if speaks:
        logger.warning("%s: %s", socket.gethostname(), said)
    time.sleep(HEARD_S if speaks else SPOKEN_S)
