"""Stragglers: ranks with a longer compute time per step than other ranks, and the known causes.

    score of a rank = its compute_s / the median of compute_s over the ranks that do the same work

The score compares workers, in a pipeline the ranks of a stage; there is no score where each worker
takes steps of its own. A rank beyond MAX_SCORE for ROWS rows is named once in a warning, with

    known   planted by [faults]; the time in which it was ready to run, but another thread had its
            core (run delay, /proc/thread-self/schedstat); more ranks of the job than cores
    guess   fewer cores or BLAS threads than others, a lower clock: such a rank may be slow

A GPU's own clock is not read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np

from hpctrain.engines import Engine
from hpctrain.parallel.mesh import Mesh
from hpctrain.transport.machine import blas_threads

log = logging.getLogger(__name__)
MAX_SCORE, ROWS = 1.2, 3
MIN_COMPUTE_S = 0.1  #: of the median in a row: below, one interruption decides
_MIN_DELAY = 0.05  # of the compute time: less does not explain a score beyond MAX_SCORE
_LOWER_CLOCK = 0.95  # times the median


class RankFacts(TypedDict):
    """The facts of a rank that may explain its score."""

    cores: list[int]
    blas_threads: int
    mhz: float | None  #: mean over its cores; None where the kernel does not show it
    load: float  #: processes that are ready to run on its node, mean over a minute


class Stragglers:
    """The scores of each rank since the first step, and the warnings of a run."""

    def __init__(self, mesh: Mesh, engine: Engine, slow_rank: int | None) -> None:
        """`slow_rank`: the one planted by [faults]."""
        self._world, self._slow_rank = mesh.everyone, slow_rank
        is_scored = engine.worker is not None and not engine.asynchronous
        stage = 0 if mesh.data.grid is None else mesh.pipe.rank
        self._kind = stage if is_scored else -1
        self._last_facts: Mapping[str, np.ndarray] = {}
        self._rows_beyond = np.zeros(mesh.everyone.size, int)
        self._reported_ranks: set[int] = set()

    def rank_facts(self) -> dict[str, float]:
        """Return this rank's numbers for `row` and `scores`."""
        return {"kind_of_work": self._kind, "core_wait_s": core_wait_s()}

    def row(self, ranks: Mapping[str, np.ndarray]) -> None:
        """Close an interval: warn of ranks beyond the limit for ROWS rows; collective.

        `ranks`: by name each rank's numbers since the first step, equal on all ranks.
        """
        time_names = ("compute_s", "core_wait_s")
        interval_times = {
            name: ranks[name] - self._last_facts.get(name, 0.0)
            for name in time_names
            if self._last_facts
        }
        self._last_facts = ranks
        if not interval_times:
            return  # the clock of waits for a core began before the first step
        scores = score(interval_times["compute_s"], ranks["kind_of_work"], MIN_COMPUTE_S)
        self._rows_beyond = np.where(scores > MAX_SCORE, self._rows_beyond + 1, 0)
        slow_ranks = [int(rank) for rank in np.flatnonzero(self._rows_beyond >= ROWS)]
        if new_ranks := [rank for rank in slow_ranks if rank not in self._reported_ranks]:
            self._reported_ranks |= {*new_ranks}
            delays = interval_times["core_wait_s"] / np.maximum(interval_times["compute_s"], 1e-9)
            self._warn_of_ranks(new_ranks, scores, delays)

    def scores(self, ranks: Mapping[str, np.ndarray]) -> list[float | None] | None:
        """Return the score of each rank since the first step, None for ranks without a score.

        Returns None if no rank has a score, as in a job of a single rank.
        """
        scores = score(ranks["compute_s"], ranks["kind_of_work"])
        values = [None if np.isnan(value) else round(float(value), 4) for value in scores]
        return values if any(value is not None for value in values) else None

    def _warn_of_ranks(
        self, slow_ranks: Sequence[int], scores: np.ndarray, delays: np.ndarray
    ) -> None:
        world = self._world
        facts: list[RankFacts] = [json.loads(text) for text in world.gather(json.dumps(_facts()))]
        for rank in slow_ranks if world.rank == 0 else ():
            planted = ["planted by [faults] slow_rank"] * (rank == self._slow_rank)
            causes_found = [*planted, *known_causes(rank, facts, world.hosts, delays.tolist())]
            causes_text = (
                f"known: {'; '.join(causes_found)}" if causes_found else "no cause is known"
            )
            if guesses := list(possible_causes(rank, facts)):
                causes_text += f"; may be: {'; '.join(guesses)}"
            log.warning(
                "rank %d on %s computes for %.2f times as long per step as the median of the ranks "
                "with the same work, in %d rows: %s",
                rank, world.hosts[rank], scores[rank], ROWS, causes_text,
            )  # fmt: skip


def score(compute_s: np.ndarray, kinds: np.ndarray, min_s: float = 0.0) -> np.ndarray:
    """Return the score of each rank, float64 (ranks,); nan for ranks without a score.

    `kinds`: the kind of work of each rank, -1 for none. A kind needs two ranks, and a median of
    compute time over `min_s`.
    """
    scores = np.full(len(compute_s), np.nan)
    for kind in {*kinds.tolist()} - {-1}:
        has_kind = kinds == kind
        median_s = float(np.median(compute_s[has_kind]))
        if has_kind.sum() > 1 and median_s > min_s:
            scores[has_kind] = compute_s[has_kind] / median_s
    return scores


def known_causes(
    rank: int, facts: Sequence[RankFacts], hosts: Sequence[str], delays: Sequence[float]
) -> Iterator[str]:
    """Yield the causes that were measured, if they concern `rank` more than others.

    `delays`: of each rank the time ready to run over its compute time.
    """
    shares = [_find_sharing_ranks(r, facts, hosts) for r in range(len(facts))]
    sharing, cores = shares[rank]
    if len(sharing) / max(cores, 1) > max(min(len(s) / max(n, 1) for s, n in shares), 1):
        others = ", ".join(str(r) for r in sharing if r != rank)
        ranks_text = f"rank{'s' * (len(sharing) > 2)} {others}"
        yield f"it shares {cores} core{'s' * (cores > 1)} with {ranks_text}"
    if delays[rank] > _MIN_DELAY + median(delays):
        yield (
            f"for {delays[rank]:.0%} of its compute time other threads had its core, usual are "
            f"{median(delays):.0%} (load of its node {facts[rank]['load']:.1f})"
        )


def _find_sharing_ranks(
    rank: int, facts: Sequence[RankFacts], hosts: Sequence[str]
) -> tuple[list[int], int]:
    """Return the ranks that share a core with `rank`, itself included, and the number of cores."""
    own_cores = {*facts[rank]["cores"]}
    on_host = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    sharing = [r for r in on_host if own_cores & {*facts[r]["cores"]}]
    return sharing, len(set[int]().union(*(facts[r]["cores"] for r in sharing)))


def possible_causes(rank: int, facts: Sequence[RankFacts]) -> Iterator[str]:
    """Yield the differences to the other ranks that may slow a rank."""
    own_facts, other_facts = facts[rank], [fact for r, fact in enumerate(facts) if r != rank]
    cores, usual_cores = len(own_facts["cores"]), median(len(fact["cores"]) for fact in other_facts)
    if cores < usual_cores:
        yield f"{cores} cores, others {usual_cores:g}"
    usual_threads = median(fact["blas_threads"] for fact in other_facts)
    if own_facts["blas_threads"] < usual_threads:
        yield f"{own_facts['blas_threads']} BLAS threads, others {usual_threads:g}"
    clocks = [fact["mhz"] for fact in other_facts if fact["mhz"]]
    if own_facts["mhz"] and clocks and own_facts["mhz"] < _LOWER_CLOCK * median(clocks):
        yield f"a clock of {own_facts['mhz']:.0f} MHz, others {median(clocks):.0f}"


def core_wait_s(path: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Return the seconds in which this thread was ready to run and had no core; 0 if not known."""
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _facts() -> RankFacts:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    clocks = [clock for core in cores if (clock := _clock_mhz(core))]
    return {
        "cores": cores,
        "blas_threads": blas_threads(),
        "mhz": float(np.mean(clocks)) if clocks else None,
        "load": os.getloadavg()[0],
    }


def _clock_mhz(core: int) -> float | None:
    """Return the present clock of a core; None where the kernel does not show it."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")
    try:
        return int(path.read_text()) / 1000
    except (OSError, ValueError):
        return None
