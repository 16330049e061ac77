"""Results and faults of all ranks: each rank acts, then every rank gets the reports of all."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from hpctrain.checkpoint.format import DamagedError
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)


class Report(NamedTuple):
    """One rank's result or fault; `damaged` if the checkpoint itself is the cause."""

    value: Any
    fault: str | None = None
    damaged: bool = False


def gather(link: Link, act: Callable[[], Any]) -> list[Report]:
    """Return the reports of all ranks on their call of `act`, whose results are JSON data."""
    try:
        payload = json.dumps(Report(act()))
    except Exception as error:  # the other ranks wait for this rank's report
        logger.debug("reported to all ranks:", exc_info=True)
        fault = _fault_of(link.rank, error)
        payload = json.dumps(Report(None, fault, isinstance(error, DamagedError)))
    return [Report(*json.loads(reply)) for reply in all_gather_bytes(link, payload.encode())]


def faults(reports: list[Report]) -> str:
    """Return the faults of `reports`, the first three; empty for none."""
    texts = [report.fault for report in reports if report.fault]
    rest = f" (and {len(texts) - 3} more ranks)" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + rest


def _fault_of(rank: int, error: Exception) -> str:
    plain = isinstance(error, (OSError, DamagedError, UsageError))
    kind = "" if plain else f"{type(error).__name__}: "
    return f"rank {rank} on {socket.gethostname()}: {kind}{error}"
