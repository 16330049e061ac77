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
from lib.common import machine_facts, median_ratio, save_result, summarize_times, time_interleaved

from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.collectives import ALLREDUCE, Group, all_gather_bytes
from hpctrain.collectives.chunks import STREAM_SEGMENT_BYTES, segments
from hpctrain.core import launchers
from hpctrain.world import World, init

MIB = 1 << 20
SIZES = (8, 16, 64)
MAX_ATTEMPTS = 2  #: a section is begun
EXIT_INTERRUPTED = 130


class Section(NamedTuple):
    """A lab, what is measured in it, and which shares of the link are claimed, by MPI."""

    hosts: int
    ranks_per_host: int
    link: str
    algorithms: tuple[str, ...]
    claimed_shares: dict[str, float]
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
    parser.add_argument(
        "--part", type=Path, help="file to which rank 0 appends the result of each size"
    )
    arguments = parser.parse_args()
    names = arguments.sections.split(",")
    if launchers.launched(os.environ).size > 1:
        measure(init(), SECTIONS[names[0]], arguments)
        return 0
    return max(run_section(name, arguments.rounds, arguments.sizes) for name in names)


def run_section(name: str, rounds: int, sizes: Sequence[int]) -> int:
    """Run this script on the hosts of a section and save the results; return the exit code."""
    section = SECTIONS[name]
    print(
        f"{name}: {section.hosts} hosts x {section.ranks_per_host} ranks, {section.link}",
        flush=True,
    )
    lab, results_by_mib = Lab(section.hosts, section.ranks_per_host, parse_speed(section.link)), {}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part")
        part.touch()
        command = [sys.executable, __file__, "--sections", name, "--rounds", str(rounds)]
        for attempt in range(MAX_ATTEMPTS):
            missing = [str(size) for size in sizes if size not in results_by_mib]
            start_s = perf_counter()
            code = netlab(lab, [*command, "--part", str(part), "--sizes", *missing])
            results_by_mib |= {result["mib"]: result for result in map(json.loads, part.open())}
            if len(results_by_mib) == len(sizes):
                break
            _print_missing_sizes(
                name, code, perf_counter() - start_s, set(sizes) - set(results_by_mib)
            )
            if code == EXIT_INTERRUPTED or attempt + 1 == MAX_ATTEMPTS:
                break
            print(f"{name}: once more", flush=True)
    return save_section(name, section, results_by_mib, len(results_by_mib) == len(sizes))


def _print_missing_sizes(name: str, code: int, seconds: float, sizes: Collection[int]) -> None:
    reason = " (interrupted, or its time was up)" if code == EXIT_INTERRUPTED else ""
    missing = ", ".join(map(str, sorted(sizes)))
    print(f"{name}: ended with code {code}{reason} after {seconds:.0f} s, without {missing} MiB",
          flush=True)  # fmt: skip


def measure(world: World, section: Section, options: argparse.Namespace) -> None:
    """Measure every size; rank 0 leaves the rows of each when it has them."""
    for size in options.sizes:
        rows = measure_size(world, section, size * MIB, options.rounds)
        if world.rank == 0:
            result = {"mib": size, "machine": machine_facts(world), "rows": rows}
            with options.part.open("a") as part:
                print(json.dumps(result), file=part)
            print(f"{size} MiB:", *(f"{r['algorithm']} {r['share_of_link']:.1%}" for r in rows),
                  flush=True)  # fmt: skip


def save_section(
    name: str, section: Section, results_by_mib: Mapping[int, Any], is_complete: bool
) -> int:
    """Save the results of all sizes and their claims; return the exit code."""
    if not results_by_mib:
        return 1
    parts = [results_by_mib[size] for size in sorted(results_by_mib)]
    rows = [row for part in parts for row in part["rows"]]
    claims_held = check_claims(section, rows, parts[0]["machine"]["mpi"].rsplit(maxsplit=1)[0])
    claims_held["every size was measured"] = is_complete
    lab = {"hosts": section.hosts, "ranks_per_host": section.ranks_per_host, "link": section.link}
    save_result(f"netlab-{name}", {"machine": parts[0]["machine"], **lab}, rows, claims_held)
    return 0 if all(claims_held.values()) else 1


def check_claims(section: Section, rows: Sequence[Mapping[str, Any]], mpi: str) -> dict[str, bool]:
    """Return {claim: whether it holds} for `rows` under this MPI."""
    best, claims_held = section.algorithms[0], {}
    for row in rows:
        size, share = row["bytes"] // MIB, row["share_of_link"]
        if row["algorithm"] == best and mpi in section.claimed_shares:
            minimum = section.claimed_shares[mpi]
            claims_held[f"{best} {share:.1%} of the link at {size} MiB, >= {minimum:.0%}"] = (
                share >= minimum
            )
        for faster, slower, minimum in section.times:
            if row["algorithm"] == slower:
                ratio = row["speed_up"]
                claims_held[f"{faster} {ratio:.2f}x {slower} at {size} MiB, >= {minimum}"] = (
                    ratio >= minimum
                )
    claims_held["all sums are right"] = all(row["correct"] for row in rows)
    return claims_held


def measure_size(world: World, section: Section, size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per algorithm, and of the link, for `size` bytes."""
    x = world.memory.zeros(size // 4, np.float32)
    rivals = {name: partial(ALLREDUCE[name], world.main, x, np.add) for name in section.algorithms}
    # Bytes that the reference algorithm sends over the link of a host.
    link_bytes = size * 2 * (section.hosts - 1) // section.hosts
    seconds = time_interleaved(
        world.link, {**rivals, **link_calls(world, link_bytes)}, rounds, warm_up=1
    )
    link = min(("link", "link-in-segments"), key=lambda name: np.median(seconds[name]))
    reference, ranks = section.algorithms[0], world.size
    rows = []
    for name, times in seconds.items():
        statistics, is_link = summarize_times(times), name.startswith("link")
        bytes_moved = link_bytes if is_link else size * 2 * (ranks - 1) / ranks
        rows.append(
            {
                "operation": "p2p" if is_link else "allreduce",
                "algorithm": name,
                "bytes": size,
                "ranks": ranks,
                **statistics,
                "busbw": bytes_moved / statistics["median_s"] / 1e9,
                "share_of_link": median_ratio(seconds[link], times),
                "speed_up": median_ratio(times, seconds[reference]),
                "correct": is_link or is_correct(world.main, name),
            }
        )
    return rows


def link_calls(world: World, nbytes: int) -> dict[str, Callable[[], None]]:
    """Return calls that send `nbytes` from rank 0 to the next host: whole, and in segments."""
    x = np.zeros(nbytes, np.uint8)
    to = next((r for r, host in enumerate(world.hosts) if host != world.hosts[0]), 0)
    return {
        "link": partial(one_way, world, to, [x]),
        "link-in-segments": partial(one_way, world, to, list(segments(x, STREAM_SEGMENT_BYTES))),
    }


def one_way(world: World, to: int, pieces: list[np.ndarray]) -> None:
    """Send `pieces` from rank 0 to rank `to`; both return after the last one has arrived."""
    link, reply = world.link, np.zeros(1, np.uint8)
    if link.rank == 0:
        for request in [link.isend(piece, to) for piece in pieces]:
            request.wait()
        link.irecv(reply, to).wait()
    elif link.rank == to:
        for request in [link.irecv(piece, 0) for piece in pieces]:
            request.wait()
        link.isend(reply, 0).wait()


def is_correct(group: Group, name: str) -> bool:
    """Return whether the sum of random data agrees with float64 on all ranks; collective.

    The data are long enough for the streaming path.
    """
    length = group.link.size * STREAM_SEGMENT_BYTES // 4 * 3 + 1
    values = [
        np.random.default_rng(rank).standard_normal(length) for rank in range(group.link.size)
    ]
    x = values[group.link.rank].astype(np.float32)
    ALLREDUCE[name](group, x, np.add)
    is_close = np.allclose(x, np.sum(values, 0), atol=1e-4)
    return all(vote == b"\1" for vote in all_gather_bytes(group.link, bytes([is_close])))


if __name__ == "__main__":
    sys.exit(main())
