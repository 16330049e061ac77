"""All pairs of ranks send short and long messages to each other, and who is slow is named.

    round 0   0-3  1-2         a tournament of P ranks: P - 1 rounds, in each of which everybody
    round 1   1-3  0-2         has one partner and keeps it to itself
    round 2   2-3  0-1

First inside all nodes at once, then between them, one rank of each node at a time: so no two pairs
share an adapter, and adapters of their own are tried each by its rank. Of a pair the fastest of
some tries counts, what its link can do at best.

Cost: N nodes of m ranks take m - 1 rounds inside nodes and m (N - 1) between them, in the worst
case P - 1 of P ranks, never their square; a round is as long as `ALL_S` allows, so that all of them
take some 10 s, and the time to connect. 64 nodes of 8: 511 rounds of 19 ms. What is told grows as
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
from hpctrain.doctor.check import Check, Verdict
from hpctrain.doctor.job.hosts import listed
from hpctrain.doctor.job.outliers import LEAST, Usual, usual
from hpctrain.hardware.nics import Nic, fastest
from hpctrain.transport.link import Link
from hpctrain.tuning.measure import rally
from hpctrain.world import World

SMALL, LARGE = 8, 1 << 20
TRIES, MOST_CALLS = 20, 10  # short tries: some of them fall between the time slices of others
FEWEST = 2  # beside the first: of one try alone, any hiccup would be a slow link
TRY_S, ALL_S = 0.02, 10.0  # the time of one pair and size, and of all of them, if links allow it
SMALL_LEAST = 1.0  # of the median more: one more switch on the way is no fault
MANY_TIMES = 3.0  # slower than usual in long messages between nodes: worse than slow
MIB = 1 << 20
LEAST_SHARE = 0.25  #: of an adapter's rate: with RDMA, 1 MiB takes more than half of it
FALLEN_BACK = (
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
    """Return what this rank measured as the lower of two; collective."""
    node, across = world.main.links[1:3]
    nodes = world.main.nodes
    mine = next(ranks for ranks in nodes if world.rank in ranks)
    most = max(map(len, nodes))
    budget_s = min(TRY_S, ALL_S / (2 * (most + most * len(nodes))))
    found = _tournament(node, mine, True, budget_s)
    for local in range(most):
        wait_quietly(world.link)
        if node.rank == local:
            ranks = sorted(one[local] for one in nodes if len(one) > local)
            found += _tournament(across, ranks, False, budget_s)
    wait_quietly(world.link)
    return found


def partner(rank: int, round_: int, size: int) -> int | None:
    """Return whom `rank` of `size` meets in round 0 .. size - 2 (size - 1 if odd), None: nobody.

    The last place stays where it is and the others turn round it; a number that is odd is made even
    by somebody who is not there.
    """
    places = size + size % 2
    turning = places - 1
    if rank == turning:
        other = round_ * (places // 2) % turning
    else:
        other = (round_ - rank) % turning
        other = turning if other == rank else other
    return other if other < size else None


def checks(found: Sequence[Ping], hosts: Sequence[str], crowded: bool) -> list[Check]:
    """Return what is to be said of all links; `crowded`: ranks take turns on cores."""
    out = []
    for inside, name in ((False, "links between nodes"), (True, "links inside nodes")):
        links = [one for one in found if one.inside is inside]
        if links:
            out.append(_check(name, links, hosts, crowded))
    return out


def of_adapters(found: Sequence[Ping], adapters: Sequence[Sequence[Nic]]) -> list[Check]:
    """Return the check that messages between nodes are as fast as RDMA can make them.

    All links may have fallen back to another network alike, and then none sticks out. `adapters`:
    the ports of each node; [] where one has no RDMA, of which sockets may take any share.
    """
    taken = [one.large_s for one in found if not one.inside]
    best = [fastest(tuple(nic for nic in some if nic.rdma)) for some in adapters]
    rates = [nic.gbit_s for nic in best if nic is not None and nic.gbit_s]
    if not taken or len(rates) < len(adapters):
        return []
    bytes_per_s, rate = LARGE / min(taken), min(rates)
    share = bytes_per_s * 8e-9 / rate
    seen = (
        f"1 MiB at {bytes_per_s / MIB:,.0f} MiB/s at best, {share:.0%} of an adapter's "
        f"{rate:g} Gbit/s"
    )
    if share >= LEAST_SHARE:
        return [Check("RDMA between nodes", "ok", seen)]
    return [Check("RDMA between nodes", "slow", seen, FALLEN_BACK)]


def _tournament(link: Link, ranks: Sequence[int], inside: bool, budget_s: float) -> list[Ping]:
    found = []
    for round_ in range(link.size - 1 + link.size % 2):
        other = partner(link.rank, round_, link.size)
        if other is None:
            continue
        seconds = [_measured(link, other, np.zeros(n, np.uint8), budget_s) for n in (SMALL, LARGE)]
        if link.rank < other:
            found.append(Ping(ranks[link.rank], ranks[other], inside, *seconds))
    return found


def _measured(link: Link, peer: int, x: np.ndarray, budget_s: float) -> float:
    """Return the seconds of one message at best; the lower rank leads."""
    leads, plan = link.rank < peer, np.zeros(2, np.int64)
    rally(link, peer, x[:1], 1, leads)  # connects
    first_s = _timed(lambda: rally(link, peer, x, 1, leads))
    if leads:
        tries = min(TRIES, max(FEWEST, int(budget_s / first_s)))
        plan[:] = tries, min(MOST_CALLS, max(1, int(budget_s / tries / first_s)))
        link.isend(plan, peer).wait()
    else:
        link.irecv(plan, peer).wait()
    tries, calls = map(int, plan)
    taken = [_timed(lambda: rally(link, peer, x, calls, leads)) / calls for _ in range(tries)]
    return min(first_s, *taken) / 2


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait_quietly(link: Link) -> None:
    """Return once all ranks have come; who waits leaves its core to those who measure."""
    before, link.patient = link.patient, True
    all_gather_short(link, np.zeros(1, np.uint8))
    link.patient = before


def _check(name: str, links: Sequence[Ping], hosts: Sequence[str], crowded: bool) -> Check:
    found = {
        "8 B": Slow.among({(p.a, p.b): p.small_s for p in links}, SMALL_LEAST),
        "1 MiB": Slow.among({(p.a, p.b): p.large_s for p in links}),
    }
    seen = f"{len(links)} pair{'s' * (len(links) > 1)}: " + ", ".join(
        f"{size} {_shown(one.usual, size)}" for size, one in found.items()
    )
    words = [word for size, one in found.items() for word in one.words(size, hosts)]
    if not words:
        return Check(name, "ok", seen)
    if crowded:
        seen += "; some differ, but ranks take turns on cores: not judged"
        return Check(name, "note", seen)
    many = links[0].inside is False and found["1 MiB"].worst > MANY_TIMES
    verdict: Verdict = "bad" if many else "slow"
    nodes = tuple(dict.fromkeys(hosts[r] for one in found.values() for r in one.ranks))
    one = sum(len(slow.links) for slow in found.values()) == 1
    where = f"on {listed(nodes)}" if nodes else f"between these{' two' * one}"
    remedy = (
        f"look at adapter and cable {where} (ibstat, ethtool; are UCX_NET_DEVICES, "
        "OMPI_MCA_btl_tcp_if_include the fast ones?), or leave the node out"
    )
    if links[0].inside:
        remedy = f"look {where} what else runs there, and how ranks are bound"
    return Check(name, verdict, f"{seen}; {'; '.join(words)}", remedy, nodes)


def _shown(found: Usual, size: str) -> str:
    if size == "8 B":
        return f"median {found.median * 1e6:.1f} us (MAD {found.mad * 1e6:.1f})"
    return f"median {LARGE / found.median / MIB:,.0f} MiB/s"


@dataclass(frozen=True)
class Slow:
    """Ranks whose best link is slow, with its seconds, and slow links between the others."""

    usual: Usual
    ranks: Mapping[int, float]
    links: Mapping[tuple[int, int], float]

    @classmethod
    def among(cls, times: Mapping[tuple[int, int], float], least: float = LEAST) -> Slow:
        """Return who is slow; links are pairs of ranks with their seconds; `least`: of `usual`.

        One pass over the links, of which P ranks have P (P - 1) / 2: the others wait meanwhile.
        """
        best: dict[int, float] = {}
        for pair, seconds in times.items():
            for rank in pair:
                best[rank] = min(seconds, best.get(rank, seconds))
        of_ranks = usual(list(best.values()), least)
        # Of two ranks either may be slow, and their link is all there is.
        slow = {rank: s for rank, s in sorted(best.items()) if s > of_ranks.limit and len(best) > 2}
        left = {pair: s for pair, s in times.items() if not slow.keys() & set(pair)}
        of_links = usual(list((left or times).values()), least)
        return cls(of_links, slow, {pair: s for pair, s in left.items() if s > of_links.limit})

    @property
    def worst(self) -> float:
        """How many times the usual the slowest of them takes, 0 for none."""
        return max([*self.ranks.values(), *self.links.values()], default=0) / self.usual.median

    def words(self, size: str, hosts: Sequence[str]) -> list[str]:
        """Return who is slow, in words with figures."""
        told = [f"{size}: rank {rank} on {hosts[rank]} takes {self.usual.times(s)} at best"
                for rank, s in self.ranks.items()]  # fmt: skip
        told += [
            f"{size}: ranks {a} and {b} ({hosts[a]}, {hosts[b]}) take {self.usual.times(s)}"
            for (a, b), s in self.links.items()
        ]
        return told[:4] + [f"{len(told) - 4} more"] * (len(told) > 4)
