"""Claims: across hosts our ring fills the link, and our hierarchical all-reduce does better where
hosts have several ranks. busbw of the ring at 8, 16 and 64 MiB: at 1 Gbit/s between 4 hosts >= 94 %
of the link on MPICH and >= 90 % on Open MPI, >= 1.6 times MPI_Allreduce; at 2.5 Gbit/s >= 92 %
(MPICH); at 10 Gbit/s between 2 hosts >= 90 %. Between 4 hosts at 10 Gbit/s the two cores of the
machine are the limit: reported only. On 2 hosts of 2 ranks, 1 Gbit/s: hierarchical >= 1.42 times a
well-placed flat ring (1.5 is the bound), and >= 88 % of the link.

    python benchmarks/netlab.py [--sections 1gbit,2.5gbit,...] [--rounds 7]

The hosts are network namespaces with shaped links and real MPI over TCP (`hpctrain netlab`): this
script starts itself on them. The link is what one-way messages reach in the same run, between rank
0 and the next host: as many bytes as cross a host's link in the all-reduce, at once or in segments
with several in flight, whichever is faster. All on one float32 buffer, in turn; per round the
slowest rank counts. A section that ends without a result is begun once more, with the sizes that
are missing: what was measured is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from _common import interleaved, keep, machine, paired_ratio, spread

from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.collectives import ALLREDUCE, Group, all_gather_bytes
from hpctrain.collectives.chunks import segments
from hpctrain.collectives.ring import STREAM_BYTES
from hpctrain.core import launchers
from hpctrain.world import World, init

MIB = 1 << 20
SIZES = (8, 16, 64)
TIMES = 2  #: a section is begun
INTERRUPTED = 130


class Section(NamedTuple):
    """A lab, what is measured in it, and which shares of the link are claimed, by MPI."""

    hosts: int
    ranks_per_host: int
    link: str
    algorithms: tuple[str, ...]
    claimed: dict[str, float]
    times: tuple[tuple[str, str, float], ...] = ()  #: this one, that one, how many times as fast


FLAT = ("ring", "double-tree", "native")
SECTIONS = {
    "1gbit": Section(
        4, 1, "1gbit", FLAT, {"MPICH": 0.94, "Open MPI": 0.90}, (("ring", "native", 1.6),)
    ),
    "2.5gbit": Section(4, 1, "2.5gbit", FLAT, {"MPICH": 0.92}),
    "10gbit": Section(2, 1, "10gbit", FLAT, {"MPICH": 0.90, "Open MPI": 0.90}),
    "10gbit-4-hosts": Section(4, 1, "10gbit", FLAT, {}),
    "2x2": Section(
        2, 2, "1gbit", ("hierarchical", "ring", "native"), {"MPICH": 0.88, "Open MPI": 0.88},
        (("hierarchical", "ring", 1.42),),
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7, help="times each rival is measured")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in MiB")
    parser.add_argument("--part", type=Path, help="where ranks leave what they saw of each size")
    arguments = parser.parse_args()
    names = arguments.sections.split(",")
    if launchers.launched(os.environ).size > 1:
        measure(init(), SECTIONS[names[0]], arguments)
        return 0
    return max(start(name, arguments.rounds, arguments.sizes) for name in names)


def start(name: str, rounds: int, sizes: Sequence[int]) -> int:
    """Run this script on the hosts of a section, tell what it found, and return the exit code."""
    one = SECTIONS[name]
    print(f"{name}: {one.hosts} hosts x {one.ranks_per_host} ranks, {one.link}", flush=True)
    lab, found = Lab(one.hosts, one.ranks_per_host, parse_speed(one.link)), {}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part")
        part.touch()
        here = [sys.executable, __file__, "--sections", name, "--rounds", str(rounds)]
        for time_ in range(TIMES):
            missing = [str(size) for size in sizes if size not in found]
            began = perf_counter()
            code = netlab(lab, [*here, "--part", str(part), "--sizes", *missing])
            found |= {told["mib"]: told for told in map(json.loads, part.open())}
            if len(found) == len(sizes):
                break
            _say_what_is_missing(name, code, perf_counter() - began, set(sizes) - set(found))
            if code == INTERRUPTED or time_ + 1 == TIMES:
                break
            print(f"{name}: once more", flush=True)
    return tell(name, one, found, len(found) == len(sizes))


def _say_what_is_missing(name: str, code: int, seconds: float, sizes: Collection[int]) -> None:
    why = " (interrupted, or its time was up)" if code == INTERRUPTED else ""
    missing = ", ".join(map(str, sorted(sizes)))
    print(f"{name}: ended with code {code}{why} after {seconds:.0f} s, without {missing} MiB",
          flush=True)  # fmt: skip


def measure(world: World, section: Section, given: argparse.Namespace) -> None:
    """Measure every size; rank 0 leaves the rows of each when it has them."""
    for size in given.sizes:
        rows = measure_size(world, section, size * MIB, given.rounds)
        if world.rank == 0:
            told = {"mib": size, "machine": machine(world), "rows": rows}
            with given.part.open("a") as part:
                print(json.dumps(told), file=part)
            print(f"{size} MiB:", *(f"{r['algorithm']} {r['share_of_link']:.1%}" for r in rows),
                  flush=True)  # fmt: skip


def tell(name: str, section: Section, found: Mapping[int, Any], whole: bool) -> int:
    """Keep what was `found` at each size, and what is claimed of it; return the exit code."""
    if not found:
        return 1
    parts = [found[size] for size in sorted(found)]
    rows = [row for part in parts for row in part["rows"]]
    held = claims(section, rows, parts[0]["machine"]["mpi"].rsplit(maxsplit=1)[0])
    held["every size was measured"] = whole
    lab = {"hosts": section.hosts, "ranks_per_host": section.ranks_per_host, "link": section.link}
    keep(f"netlab-{name}", {"machine": parts[0]["machine"], **lab}, rows, held)
    return 0 if all(held.values()) else 1


def claims(section: Section, rows: Sequence[Mapping[str, Any]], mpi: str) -> dict[str, bool]:
    """Return what is claimed of `rows` under this MPI, and whether it holds."""
    best, held = section.algorithms[0], {}
    for row in rows:
        size, share = row["bytes"] // MIB, row["share_of_link"]
        if row["algorithm"] == best and mpi in section.claimed:
            least = section.claimed[mpi]
            held[f"{best} {share:.1%} of the link at {size} MiB, >= {least:.0%}"] = share >= least
        for this, that, least in section.times:
            if row["algorithm"] == that:
                times = row["speed_up"]
                held[f"{this} {times:.2f}x {that} at {size} MiB, >= {least}"] = times >= least
    held["all sums are right"] = all(row["correct"] for row in rows)
    return held


def measure_size(world: World, section: Section, size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per algorithm, and of the link, for `size` bytes."""
    x = world.memory.zeros(size // 4, np.float32)
    rivals = {one: partial(ALLREDUCE[one], world.main, x, np.add) for one in section.algorithms}
    crossing = size * 2 * (section.hosts - 1) // section.hosts  # bytes of `best`, a host's link
    seconds = interleaved(world.link, {**rivals, **links(world, crossing)}, rounds, warm_up=1)
    link = min(("link", "link-in-segments"), key=lambda one: np.median(seconds[one]))
    best, ranks = section.algorithms[0], world.size
    rows = []
    for name, taken in seconds.items():
        found, is_link = spread(taken), name.startswith("link")
        moved = crossing if is_link else size * 2 * (ranks - 1) / ranks
        rows.append(
            {
                "operation": "p2p" if is_link else "allreduce",
                "algorithm": name,
                "bytes": size,
                "ranks": ranks,
                **found,
                "busbw": moved / found["median_s"] / 1e9,
                "share_of_link": paired_ratio(seconds[link], taken),
                "speed_up": paired_ratio(taken, seconds[best]),
                "correct": is_link or correct(world.main, name),
            }
        )
    return rows


def links(world: World, nbytes: int) -> dict[str, Callable[[], None]]:
    """Return one-way messages of `nbytes` from rank 0 to the next host: whole, and in segments."""
    x = np.zeros(nbytes, np.uint8)
    to = next((r for r, host in enumerate(world.hosts) if host != world.hosts[0]), 0)
    return {
        "link": partial(one_way, world, to, [x]),
        "link-in-segments": partial(one_way, world, to, list(segments(x, STREAM_BYTES))),
    }


def one_way(world: World, to: int, pieces: list[np.ndarray]) -> None:
    """Send `pieces` from rank 0 to rank `to`; each of the two returns when all are there."""
    link, word = world.link, np.zeros(1, np.uint8)
    if link.rank == 0:
        for request in [link.isend(piece, to) for piece in pieces]:
            request.wait()
        link.irecv(word, to).wait()
    elif link.rank == to:
        for request in [link.irecv(piece, 0) for piece in pieces]:
            request.wait()
        link.isend(word, 0).wait()


def correct(group: Group, name: str) -> bool:
    """Return whether random data, long enough to stream, are summed to what float64 says; on all
    ranks: collective.
    """
    length = group.link.size * STREAM_BYTES // 4 * 3 + 1
    values = [
        np.random.default_rng(rank).standard_normal(length) for rank in range(group.link.size)
    ]
    x = values[group.link.rank].astype(np.float32)
    ALLREDUCE[name](group, x, np.add)
    right = np.allclose(x, np.sum(values, 0), atol=1e-4)
    return all(said == b"\1" for said in all_gather_bytes(group.link, bytes([right])))


if __name__ == "__main__":
    sys.exit(main())
