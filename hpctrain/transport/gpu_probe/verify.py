"""Test messages between GPUs at the start of a run: a corrupted verdict must not corrupt data.

    rank 0 --pattern--> 1 --pattern--> 2 --pattern--> ... --> 0       each on the path it will take
    rank 0 --pattern--> 2, then 4, 8, ...                             and so all ranks

These are the pairs of rings, trees and halving-doubling, and all classes of pairs are among them. A
path on which other bytes arrive is replaced, on all ranks, by staging through the host. Costs a
short and a long message per rank and distance, only where MPI is given pointers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpctrain.core.xp import Array, to_host
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link
from hpctrain.transport.paths import (
    POINTER_PATHS,
    Path,
    RankPlace,
    Verdict,
    path_between,
    thresholds_between,
)

logger = logging.getLogger("hpctrain")
Gather = Callable[[bytes], list[bytes]]  #: from this rank's bytes to every rank's
TEST_MESSAGE_BYTES = (1 << 8, 1 << 20)  #: MPIs send short and long messages in different ways


def verify_paths(
    link: Link, gather: Gather, places: Sequence[RankPlace], verdict: Verdict
) -> Verdict:
    """Give `link` the paths of `verdict` that pass; return them as a verdict; collective."""
    if not any(place.gpu for place in places):
        return verdict
    link.endpoint.traffic.set_paths(_paths_from(verdict, places, link.rank))  # whatever the length
    if not any(
        path in POINTER_PATHS for r in range(link.size) for path in _paths_from(verdict, places, r)
    ):
        return verdict
    corrupted_paths = {
        name.decode() for name in gather(_find_corrupted_path(link, places, verdict).encode())
    } - {""}
    if corrupted_paths:
        chosen_paths: dict[str, Any] = {
            name: "staged" if getattr(verdict, name) in corrupted_paths else getattr(verdict, name)
            for name in ("same_gpu", "same_node", "across")
        }
        reason = f"test messages by {', '.join(sorted(corrupted_paths))} arrived corrupted"
        verdict = replace(verdict, **chosen_paths, reason=reason)
        if link.rank == 0:
            logger.warning("%s; run `hpctrain doctor`", verdict.reason)
    path_thresholds = [thresholds_between(verdict, places[link.rank], place) for place in places]
    link.endpoint.traffic.set_paths(_paths_from(verdict, places, link.rank), path_thresholds)
    return verdict


def _paths_from(verdict: Verdict, places: Sequence[RankPlace], rank: int) -> list[Path]:
    return [path_between(verdict, places[rank], place) for place in places]


def _find_corrupted_path(link: Link, places: Sequence[RankPlace], verdict: Verdict) -> str:
    """Return a path on which this rank received corrupted bytes, "" if there is none."""
    corrupted_path, distance = "", 1
    while distance < link.size:
        left, right = (link.rank - distance) % link.size, (link.rank + distance) % link.size
        intact_by_size = [
            _message_arrives_intact(link, bool(places[link.rank].gpu), left, right, nbytes)
            for nbytes in TEST_MESSAGE_BYTES
        ]
        path = path_between(verdict, places[left], places[link.rank])
        corrupted_path = (
            corrupted_path if all(intact_by_size) or path not in POINTER_PATHS else path
        )
        distance *= 2
    return corrupted_path


def _message_arrives_intact(link: Link, on_gpu: bool, left: int, right: int, nbytes: int) -> bool:
    xp = gpus.import_cupy() if on_gpu else np
    x: Array = xp.asarray(byte_pattern(link.rank, nbytes))
    inbox: Array = xp.zeros(nbytes, np.uint8)
    link.sendrecv(x, right, inbox, left)
    return bool((to_host(inbox) == byte_pattern(left, nbytes)).all())


def byte_pattern(rank: int, nbytes: int) -> np.ndarray:
    """Return a pattern that differs from rank to rank: (nbytes,) uint8 without a zero."""
    return ((np.arange(nbytes, dtype=np.uint32) * 31 + rank) % 251 + 1).astype(np.uint8)
