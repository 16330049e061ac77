"""Results and faults of all ranks: each rank acts, then every rank gets the results of all."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.format import DamagedError
from hpctrain.collectives import Group, all_gather_bytes, broadcast
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)


class RankResult(NamedTuple):
    """One rank's result or fault; `damaged` if the checkpoint itself is the cause."""

    value: Any
    fault: str | None = None
    damaged: bool = False


def gather(link: Link, act: Callable[[], Any]) -> list[RankResult]:
    """Return the results of `act` on all ranks, which are JSON data."""
    try:
        payload = json.dumps(RankResult(act()))
    except Exception as error:  # the other ranks wait for this rank's result
        logger.debug("reported to all ranks:", exc_info=True)
        fault = _fault_of(link.rank, error)
        payload = json.dumps(RankResult(None, fault, isinstance(error, DamagedError)))
    return [RankResult(*json.loads(reply)) for reply in all_gather_bytes(link, payload.encode())]


def from_first(link: Link, act: Callable[[], bytes]) -> tuple[bytes, list[RankResult]]:
    """Return the bytes of `act` on rank 0, and the results of all ranks; memory for one copy."""
    own = [b""]
    results = gather(link, lambda: own.append(act()) if link.rank == 0 else None)
    length = np.array([len(own[-1])])
    broadcast(Group(link), length)
    data = np.frombuffer(bytearray(own[-1]) or bytearray(int(length[0])), np.uint8)
    broadcast(Group(link), data)
    return data.tobytes(), results


def faults(results: Sequence[RankResult]) -> str:
    """Return the faults of `results`, the first three; empty for none."""
    texts = [result.fault for result in results if result.fault]
    rest = f" (and {len(texts) - 3} more ranks)" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + rest


def _fault_of(rank: int, error: Exception) -> str:
    plain = isinstance(error, (OSError, DamagedError, UsageError))
    kind = "" if plain else f"{type(error).__name__}: "
    return f"rank {rank} on {socket.gethostname()}: {kind}{error}"
