"""Results and faults of ranks: each rank acts, then every rank gets each rank's result."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpctrain.checkpoint.format import DamagedError
from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)


class RankResult(NamedTuple):
    """One rank's result or fault; `damaged` if the checkpoint itself is the cause."""

    value: Any
    fault: str | None = None
    damaged: bool = False


def gather_results(link: Link, call: Callable[[], Any]) -> list[RankResult]:
    """Return the results of `call` on all ranks, which are JSON data."""
    try:
        payload = json.dumps(RankResult(call()))
    except Exception as error:  # the other ranks wait for this rank's result
        logger.debug("reported to all ranks:", exc_info=True)
        is_expected = isinstance(error, (OSError, DamagedError, UsageError))
        prefix = "" if is_expected else f"{type(error).__name__}: "
        rank_text = f"rank {link.rank} on {socket.gethostname()}: " if link.size > 1 else ""
        fault = f"{rank_text}{prefix}{error}"
        payload = json.dumps(RankResult(None, fault, isinstance(error, DamagedError)))
    return [RankResult(*json.loads(reply)) for reply in all_gather_bytes(link, payload.encode())]


def broadcast_from_first(link: Link, call: Callable[[], bytes]) -> tuple[bytes, list[RankResult]]:
    """Call `call` on rank 0, and broadcast its bytes and each rank's result; memory for a copy."""
    own_data = [b""]
    results = gather_results(link, lambda: own_data.append(call()) if link.rank == 0 else None)
    return broadcast_bytes(link, own_data[-1]), results


def join_faults(results: Sequence[RankResult]) -> str:
    """Return the faults of `results`, the first three; empty for none."""
    faults = [result.fault for result in results if result.fault]
    rest_text = f" (and {len(faults) - 3} more ranks)" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + rest_text
