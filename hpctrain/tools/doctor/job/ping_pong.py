"""Ping-pong of short and long messages between all pairs of ranks, to find slow ranks and links.

    round 0   0-3  1-2         a tournament of P ranks: in each of P - 1 rounds
    round 1   1-3  0-2         every rank has another partner
    round 2   2-3  0-1

The first tournaments take place inside all nodes at once. The others take place between nodes, with
one rank per node at a time. So no two pairs share an adapter, and ranks with adapters of their own
use them. The fastest of several tries counts for a pair: it shows what the link can do.

Cost: N nodes of m ranks take m - 1 rounds inside nodes and m (N - 1) rounds between nodes, at most
P - 1 rounds for P ranks. The time of a round follows from `TOTAL_BUDGET_S`, so that all rounds take
about 10 s, plus the time to connect. 64 nodes of 8 ranks take 511 rounds of 19 ms. The output grows
with the number of pairs, there 17,920: rank 0 shows the worst pairs, --json keeps all.

A rank whose best link is much slower than usual is slow itself, or its node or adapter is slow. Its
links are left out when the links between the other ranks are compared.

Source of the tournament: the circle method, Kirkman 1847. Source of the limits: see check.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.collectives import all_gather_short
from hpctrain.hardware.nics import Nic, fastest_port
from hpctrain.tools.doctor.check import (
    MIN_RELATIVE_MARGIN,
    Check,
    MedianMad,
    Verdict,
    compute_median_mad,
    node_list,
)
from hpctrain.transport.link import Link
from hpctrain.transport.pace import Pace
from hpctrain.tuning.measure import ping_pong
from hpctrain.world import World

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
MAX_TRIES, MAX_CALLS = 20, 10  # short tries fit between the time slices of other threads
MIN_TRIES = 2  # after the first: with one try, any interruption would look like a slow link
MAX_PAIR_S, TOTAL_BUDGET_S = 0.02, 10.0  # time per pair and size, and of the whole stage
SMALL_MARGIN = 1.0  # times the median: one more switch on the path is no fault
SEVERE_RATIO = 3.0  # times the median of long messages between nodes: "bad" rather than "slow"
MIB = 1 << 20
MIN_RATE_SHARE = 0.25  #: of an adapter's rate: with RDMA, 1 MiB reaches more than half of the rate
FALLBACK_REMEDY = (
    "MPI seems to use another network, or TCP: check UCX_TLS and UCX_NET_DEVICES, Open MPI's "
    "`--mca pml ucx`, libfabric's FI_PROVIDER, and memlock"
)


@dataclass(frozen=True)
class Ping:
    """One-way times of a short and a long message between ranks `a` < `b`."""

    a: int
    b: int
    inside: bool  #: whether both ranks are on one node
    small_s: float
    large_s: float


def measure_all_pairs(world: World) -> list[Ping]:
    """Return the pings of the pairs in which this rank is the lower one; collective."""
    node, inter_node_link = world.node, world.across
    nodes = world.main.nodes
    node_ranks = next(ranks for ranks in nodes if world.rank in ranks)
    max_ranks = max(map(len, nodes))
    budget_s = min(MAX_PAIR_S, TOTAL_BUDGET_S / (2 * (max_ranks + max_ranks * len(nodes))))
    pings = _run_tournament(node, node_ranks, budget_s, inside=True)
    for local_rank in range(max_ranks):
        sleeping_barrier(world.link)
        if node.rank == local_rank:
            ranks = sorted(members[local_rank] for members in nodes if len(members) > local_rank)
            pings += _run_tournament(inter_node_link, ranks, budget_s, inside=False)
    sleeping_barrier(world.link)
    return pings


def find_partner(rank: int, round_: int, size: int) -> int | None:
    """Return the partner of `rank` of `size` in a round, or None if the rank pauses.

    Rounds are 0 .. size - 2, or size - 1 if `size` is odd. The last place is fixed and the others
    rotate. If the number of ranks is odd, the last place is empty.
    """
    place_count = size + size % 2
    rotating_places = place_count - 1
    if rank == rotating_places:
        partner_rank = round_ * (place_count // 2) % rotating_places
    else:
        partner_rank = (round_ - rank) % rotating_places
        partner_rank = rotating_places if partner_rank == rank else partner_rank
    return partner_rank if partner_rank < size else None


def check_links(pings: Sequence[Ping], hosts: Sequence[str], oversubscribed: bool) -> list[Check]:
    """Return the checks of the links; slow links of oversubscribed ranks are only noted."""
    checks = []
    for inside, name in ((False, "links between nodes"), (True, "links inside nodes")):
        links = [ping for ping in pings if ping.inside is inside]
        if links:
            checks.append(_check_link_kind(name, links, hosts, oversubscribed))
    return checks


def check_rdma(pings: Sequence[Ping], adapters: Sequence[Sequence[Nic]]) -> list[Check]:
    """Return the check that messages between nodes are as fast as RDMA allows.

    It finds a fallback to another network on all links, where no link is an outlier. `adapters` are
    the ports of each node. Returns [] if a node has no RDMA: sockets may reach any share of a rate.
    """
    seconds = [ping.large_s for ping in pings if not ping.inside]
    fastest_nics = [fastest_port(tuple(nic for nic in ports if nic.has_rdma)) for ports in adapters]
    rates = [nic.gbit_s for nic in fastest_nics if nic is not None and nic.gbit_s]
    if not seconds or len(rates) < len(adapters):
        return []
    bytes_per_s, rate = LARGE_BYTES / min(seconds), min(rates)
    share = bytes_per_s * 8e-9 / rate
    observed = (
        f"1 MiB at {bytes_per_s / MIB:,.0f} MiB/s at best, {share:.0%} of an adapter's "
        f"{rate:g} Gbit/s"
    )
    if share >= MIN_RATE_SHARE:
        return [Check("RDMA between nodes", "ok", observed)]
    return [Check("RDMA between nodes", "slow", observed, FALLBACK_REMEDY)]


def _run_tournament(
    link: Link, ranks: Sequence[int], budget_s: float, *, inside: bool
) -> list[Ping]:
    pings = []
    for round_ in range(link.size - 1 + link.size % 2):
        partner_rank = find_partner(link.rank, round_, link.size)
        if partner_rank is None:
            continue
        seconds = [
            _measure_one_way_s(link, partner_rank, np.zeros(n, np.uint8), budget_s)
            for n in (SMALL_BYTES, LARGE_BYTES)
        ]
        if link.rank < partner_rank:
            pings.append(Ping(ranks[link.rank], ranks[partner_rank], inside, *seconds))
    return pings


def _measure_one_way_s(link: Link, peer: int, x: np.ndarray, budget_s: float) -> float:
    """Return the one-way time of the fastest message; the lower rank sets the number of calls."""
    is_leading, counts = link.rank < peer, np.zeros(2, np.int64)
    ping_pong(link, peer, x[:1], 1, is_leading)  # establishes the connection
    first_try_s = _time_call(lambda: ping_pong(link, peer, x, 1, is_leading))
    if is_leading:
        tries = min(MAX_TRIES, max(MIN_TRIES, int(budget_s / first_try_s)))
        counts[:] = tries, min(MAX_CALLS, max(1, int(budget_s / tries / first_try_s)))
        link.isend(counts, peer).wait()
    else:
        link.irecv(counts, peer).wait()
    tries, calls = map(int, counts)
    seconds = [
        _time_call(lambda: ping_pong(link, peer, x, calls, is_leading)) / calls
        for _ in range(tries)
    ]
    return min(first_try_s, *seconds) / 2


def _time_call(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sleeping_barrier(link: Link) -> None:
    """Wait for all ranks while sleeping, so that ranks that still measure have the cores."""
    waits = link.endpoint.waits
    previous_pace, waits.pace = waits.pace, Pace()
    all_gather_short(link, np.zeros(1, np.uint8))
    waits.pace = previous_pace


def _check_link_kind(
    name: str, links: Sequence[Ping], hosts: Sequence[str], oversubscribed: bool
) -> Check:
    slow_by_size = {
        "8 B": SlowLinks.find({(p.a, p.b): p.small_s for p in links}, SMALL_MARGIN),
        "1 MiB": SlowLinks.find({(p.a, p.b): p.large_s for p in links}),
    }
    observed = f"{len(links)} pair{'s' * (len(links) > 1)}: " + ", ".join(
        f"{size} {_format_median(slow_links.statistics, size)}"
        for size, slow_links in slow_by_size.items()
    )
    descriptions = [
        word
        for size, slow_links in slow_by_size.items()
        for word in slow_links.describe(size, hosts)
    ]
    if not descriptions:
        return Check(name, "ok", observed)
    if oversubscribed:
        observed += "; some are slower, but ranks take turns on cores, so this is no verdict"
        return Check(name, "note", observed)
    is_severe = links[0].inside is False and slow_by_size["1 MiB"].worst_ratio > SEVERE_RATIO
    verdict: Verdict = "bad" if is_severe else "slow"
    nodes = tuple(
        dict.fromkeys(hosts[r] for slow_links in slow_by_size.values() for r in slow_links.ranks)
    )
    is_single = sum(len(slow_links.links) for slow_links in slow_by_size.values()) == 1
    location = f"on {node_list(nodes)}" if nodes else f"between these{' two' * is_single}"
    remedy = (
        f"look at adapter and cable {location} (ibstat, ethtool; are UCX_NET_DEVICES, "
        "OMPI_MCA_btl_tcp_if_include the fast ones?), or leave the node out"
    )
    if links[0].inside:
        remedy = f"see {location} what else runs there, and how ranks are bound"
    return Check(name, verdict, f"{observed}; {'; '.join(descriptions)}", remedy, nodes)


def _format_median(stats: MedianMad, size: str) -> str:
    if size == "8 B":
        return f"median {stats.median * 1e6:.1f} us (MAD {stats.mad * 1e6:.1f})"
    return f"median {LARGE_BYTES / stats.median / MIB:,.0f} MiB/s"


@dataclass(frozen=True)
class SlowLinks:
    """Slow ranks with the time of their best link, and slow links between the other ranks."""

    statistics: MedianMad
    ranks: Mapping[int, float]
    links: Mapping[tuple[int, int], float]

    @classmethod
    def find(
        cls, times: Mapping[tuple[int, int], float], margin: float = MIN_RELATIVE_MARGIN
    ) -> SlowLinks:
        """Find slow ranks and links; `times` are seconds by pair; check.py explains `margin`.

        The P (P - 1) / 2 links of P ranks are passed once, since all ranks wait for rank 0.
        """
        best_s: dict[int, float] = {}
        for pair, seconds in times.items():
            for rank in pair:
                best_s[rank] = min(seconds, best_s.get(rank, seconds))
        rank_stats = compute_median_mad(list(best_s.values()), margin)
        # With two ranks either may be slow, so only their link is reported.
        slow_ranks = {
            rank: seconds
            for rank, seconds in sorted(best_s.items())
            if seconds > rank_stats.limit and len(best_s) > 2
        }
        remaining_times = {
            pair: seconds for pair, seconds in times.items() if not slow_ranks.keys() & set(pair)
        }
        link_stats = compute_median_mad(list((remaining_times or times).values()), margin)
        return cls(
            link_stats,
            slow_ranks,
            {
                pair: seconds
                for pair, seconds in remaining_times.items()
                if seconds > link_stats.limit
            },
        )

    @property
    def worst_ratio(self) -> float:
        """The slowest rank or link as a multiple of the median, 0 for none."""
        return max([*self.ranks.values(), *self.links.values()], default=0) / self.statistics.median

    def describe(self, size: str, hosts: Sequence[str]) -> list[str]:
        """Return a line of text for each slow rank and link."""
        ratio = self.statistics.format_ratio
        lines = [
            f"{size}: rank {rank} on {hosts[rank]} takes {ratio(seconds)} at best"
            for rank, seconds in self.ranks.items()
        ]
        lines += [
            f"{size}: ranks {a} and {b} ({hosts[a]}, {hosts[b]}) take {ratio(seconds)}"
            for (a, b), seconds in self.links.items()
        ]
        return lines[:4] + [f"{len(lines) - 4} more"] * (len(lines) > 4)
