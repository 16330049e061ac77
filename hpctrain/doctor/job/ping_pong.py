"""Ping-pong of short and long messages between all pairs of ranks; slow ranks and links are named.

    round 0   0-3  1-2         a tournament of P ranks: P - 1 rounds, in each of which every rank
    round 1   1-3  0-2         has one partner of its own
    round 2   2-3  0-1

First inside all nodes at once, then between them, one rank of each node at a time: so no two pairs
share an adapter, and where ranks have adapters of their own, each rank tries its own. Of a pair
the fastest of some tries counts: the best that its link can do.

Cost: N nodes of m ranks take m - 1 rounds inside nodes and m (N - 1) between them, in the worst
case P - 1 of P ranks, never their square; a round is as long as `TOTAL_S` allows, so that all
take some 10 s, and the time to connect. 64 nodes of 8: 511 rounds of 19 ms. The output grows as
the pairs: there 17,920, of which rank 0 shows the worst and --json keeps all.

A rank whose best link is far above the usual one is slow itself, or its node or adapter is, and its
links are left out when the links of the others are compared.

Source of the tournament: the circle method, Kirkman 1847; of the limits: see outliers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.collectives import all_gather_short
from hpctrain.doctor.check import Check, Verdict, node_list
from hpctrain.doctor.job.outliers import MIN_MARGIN, MedianMad, median_mad
from hpctrain.hardware.nics import Nic, fastest
from hpctrain.transport.link import Link
from hpctrain.tuning.measure import rally
from hpctrain.world import World

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
MAX_TRIES, MAX_CALLS = 20, 10  # short tries: some of them fall between the time slices of others
MIN_TRIES = 2  # beside the first: of one try alone, any hiccup would be a slow link
TRY_S, TOTAL_S = 0.02, 10.0  # the time of one pair and size, and of all of them, if links allow it
SMALL_MARGIN = 1.0  # of the median more: one more switch on the way is no fault
SEVERE_TIMES = 3.0  # slower than usual in long messages between nodes: worse than slow
MIB = 1 << 20
MIN_SHARE = 0.25  #: of an adapter's rate: with RDMA, 1 MiB takes more than half of it
TCP_FALLBACK_REMEDY = (
    "MPI seems to take another network, or TCP: look at UCX_TLS and UCX_NET_DEVICES, Open MPI's "
    "`--mca pml ucx`, libfabric's FI_PROVIDER, and memlock"
)


@dataclass(frozen=True)
class Ping:
    """Seconds of one message, one way, between ranks `a` < `b`."""

    a: int
    b: int
    inside: bool  #: a node
    small_s: float
    large_s: float


def all_pairs(world: World) -> list[Ping]:
    """Return the pings of the pairs in which this rank is the lower one; collective."""
    node, across = world.node, world.across
    nodes = world.main.nodes
    node_ranks = next(ranks for ranks in nodes if world.rank in ranks)
    max_ranks = max(map(len, nodes))
    budget_s = min(TRY_S, TOTAL_S / (2 * (max_ranks + max_ranks * len(nodes))))
    pings = _tournament(node, node_ranks, budget_s, inside=True)
    for local in range(max_ranks):
        sleeping_barrier(world.link)
        if node.rank == local:
            ranks = sorted(members[local] for members in nodes if len(members) > local)
            pings += _tournament(across, ranks, budget_s, inside=False)
    sleeping_barrier(world.link)
    return pings


def partner(rank: int, round_number: int, size: int) -> int | None:
    """Return the partner of `rank` of `size` in round 0 .. size - 2 (size - 1 if odd), or None.

    The last place is fixed and the others rotate; an odd number of ranks is made even by an absent
    rank.
    """
    places = size + size % 2
    rotating = places - 1
    if rank == rotating:
        other = round_number * (places // 2) % rotating
    else:
        other = (round_number - rank) % rotating
        other = rotating if other == rank else other
    return other if other < size else None


def checks(pings: Sequence[Ping], hosts: Sequence[str], oversubscribed: bool) -> list[Check]:
    """Return the checks of all links; `oversubscribed`: ranks take turns on cores."""
    pairs_of_round = []
    for inside, name in ((False, "links between nodes"), (True, "links inside nodes")):
        links = [ping for ping in pings if ping.inside is inside]
        if links:
            pairs_of_round.append(_check(name, links, hosts, oversubscribed))
    return pairs_of_round


def check_rdma(pings: Sequence[Ping], adapters: Sequence[Sequence[Nic]]) -> list[Check]:
    """Return the check that messages between nodes are as fast as RDMA can make them.

    If all links have fallen back to another network, none is an outlier. `adapters`: the ports of
    each node. Returns [] if one has no RDMA: sockets may reach any share of its rate.
    """
    seconds = [ping.large_s for ping in pings if not ping.inside]
    best_rates = [fastest(tuple(nic for nic in ports if nic.rdma)) for ports in adapters]
    rates = [nic.gbit_s for nic in best_rates if nic is not None and nic.gbit_s]
    if not seconds or len(rates) < len(adapters):
        return []
    bytes_per_s, rate = LARGE_BYTES / min(seconds), min(rates)
    share = bytes_per_s * 8e-9 / rate
    observed = (
        f"1 MiB at {bytes_per_s / MIB:,.0f} MiB/s at best, {share:.0%} of an adapter's "
        f"{rate:g} Gbit/s"
    )
    if share >= MIN_SHARE:
        return [Check("RDMA between nodes", "ok", observed)]
    return [Check("RDMA between nodes", "slow", observed, TCP_FALLBACK_REMEDY)]


def _tournament(link: Link, ranks: Sequence[int], budget_s: float, *, inside: bool) -> list[Ping]:
    pings = []
    for round_number in range(link.size - 1 + link.size % 2):
        other = partner(link.rank, round_number, link.size)
        if other is None:
            continue
        seconds = [
            _one_way_s(link, other, np.zeros(n, np.uint8), budget_s)
            for n in (SMALL_BYTES, LARGE_BYTES)
        ]
        if link.rank < other:
            pings.append(Ping(ranks[link.rank], ranks[other], inside, *seconds))
    return pings


def _one_way_s(link: Link, peer: int, x: np.ndarray, budget_s: float) -> float:
    """Return the seconds of the fastest message, one way; the lower rank leads."""
    is_first, plan = link.rank < peer, np.zeros(2, np.int64)
    rally(link, peer, x[:1], 1, is_first)  # connects
    first_s = _seconds(lambda: rally(link, peer, x, 1, is_first))
    if is_first:
        tries = min(MAX_TRIES, max(MIN_TRIES, int(budget_s / first_s)))
        plan[:] = tries, min(MAX_CALLS, max(1, int(budget_s / tries / first_s)))
        link.isend(plan, peer).wait()
    else:
        link.irecv(plan, peer).wait()
    tries, calls = map(int, plan)
    seconds = [
        _seconds(lambda: rally(link, peer, x, calls, is_first)) / calls for _ in range(tries)
    ]
    return min(first_s, *seconds) / 2


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sleeping_barrier(link: Link) -> None:
    """Barrier whose waiting ranks sleep: they leave their cores to ranks that still measure."""
    old_setting, link.sleeps_while_waiting = link.sleeps_while_waiting, True
    all_gather_short(link, np.zeros(1, np.uint8))
    link.sleeps_while_waiting = old_setting


def _check(name: str, links: Sequence[Ping], hosts: Sequence[str], oversubscribed: bool) -> Check:
    by_size = {
        "8 B": SlowLinks.find({(p.a, p.b): p.small_s for p in links}, SMALL_MARGIN),
        "1 MiB": SlowLinks.find({(p.a, p.b): p.large_s for p in links}),
    }
    observed = f"{len(links)} pair{'s' * (len(links) > 1)}: " + ", ".join(
        f"{size} {_median_text(slow_links.statistics, size)}"
        for size, slow_links in by_size.items()
    )
    words = [word for size, slow_links in by_size.items() for word in slow_links.words(size, hosts)]
    if not words:
        return Check(name, "ok", observed)
    if oversubscribed:
        observed += "; some differ, but ranks take turns on cores: not judged"
        return Check(name, "note", observed)
    is_severe = links[0].inside is False and by_size["1 MiB"].worst > SEVERE_TIMES
    verdict: Verdict = "bad" if is_severe else "slow"
    nodes = tuple(
        dict.fromkeys(hosts[r] for slow_links in by_size.values() for r in slow_links.ranks)
    )
    is_single = sum(len(slow_links.links) for slow_links in by_size.values()) == 1
    place = f"on {node_list(nodes)}" if nodes else f"between these{' two' * is_single}"
    remedy = (
        f"look at adapter and cable {place} (ibstat, ethtool; are UCX_NET_DEVICES, "
        "OMPI_MCA_btl_tcp_if_include the fast ones?), or leave the node out"
    )
    if links[0].inside:
        remedy = f"see {place} what else runs there, and how ranks are bound"
    return Check(name, verdict, f"{observed}; {'; '.join(words)}", remedy, nodes)


def _median_text(stats: MedianMad, size: str) -> str:
    if size == "8 B":
        return f"median {stats.median * 1e6:.1f} us (MAD {stats.mad * 1e6:.1f})"
    return f"median {LARGE_BYTES / stats.median / MIB:,.0f} MiB/s"


@dataclass(frozen=True)
class SlowLinks:
    """Ranks whose best link is slow, with its seconds, and slow links between the others."""

    statistics: MedianMad
    ranks: Mapping[int, float]
    links: Mapping[tuple[int, int], float]

    @classmethod
    def find(cls, times: Mapping[tuple[int, int], float], margin: float = MIN_MARGIN) -> SlowLinks:
        """Return slow ranks and links; `times`: seconds by pair of ranks; `margin`: of median.

        One pass over the P (P - 1) / 2 links of P ranks: rank 0 makes it while the others wait.
        """
        best_times: dict[int, float] = {}
        for pair, seconds in times.items():
            for rank in pair:
                best_times[rank] = min(seconds, best_times.get(rank, seconds))
        of_ranks = median_mad(list(best_times.values()), margin)
        # Of two ranks either may be slow: only their link can be named.
        slow_ranks = {
            rank: s
            for rank, s in sorted(best_times.items())
            if s > of_ranks.limit and len(best_times) > 2
        }
        remaining = {pair: s for pair, s in times.items() if not slow_ranks.keys() & set(pair)}
        of_links = median_mad(list((remaining or times).values()), margin)
        return cls(
            of_links, slow_ranks, {pair: s for pair, s in remaining.items() if s > of_links.limit}
        )

    @property
    def worst(self) -> float:
        """The slowest of them as a multiple of the median, 0 for none."""
        return max([*self.ranks.values(), *self.links.values()], default=0) / self.statistics.median

    def words(self, size: str, hosts: Sequence[str]) -> list[str]:
        """Return a line of text for each slow rank and link."""
        lines = [f"{size}: rank {rank} on {hosts[rank]} takes {self.statistics.times(s)} at best"
                 for rank, s in self.ranks.items()]  # fmt: skip
        lines += [
            f"{size}: ranks {a} and {b} ({hosts[a]}, {hosts[b]}) take {self.statistics.times(s)}"
            for (a, b), s in self.links.items()
        ]
        return lines[:4] + [f"{len(lines) - 4} more"] * (len(lines) > 4)
