"""`hpctrain bench p2p`: latency and bandwidth of a link between two ranks.

    ping-pong   round trips, back to back; a message takes half a round trip
    one-way     a window of messages at once, then one byte back; the time of the window / messages

These are the methods of OSU's osu_latency and osu_bw, over the Link of our algorithms. With
`--device gpu` the messages lie on GPUs, and each available path is measured: see p2p_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import all_gather_bytes
from hpctrain.core import config, xp
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import base, measured_collectives, p2p_gpu, units
from hpctrain.tools.bench.base import Bench, check_gpu_memory, check_host_memory
from hpctrain.tools.bench.p2p_gpu import RankPair
from hpctrain.tools.bench.sweep import Row, calls_per_round
from hpctrain.transport.device import gpus
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.tuning.measure import ping_pong, summarize_times, time_interleaved
from hpctrain.world import World

DEVICES: dict[str, gpus.Device] = {"cpu": "cpu", "gpu": "gpu"}
MIN_WINDOW = 8  #: messages in flight at once, also for the longest messages
TIMING_METHOD = (
    "ping-pong: half the time of `calls` round trips / calls; one-way: the time of a window of "
    "`calls` messages and a byte back / calls; the slower rank of the two counts"
)
COLUMNS = (
    base.SIZE_COLUMN,
    base.ALGORITHM_COLUMN,
    *base.TIME_COLUMNS,
    ("GB/s", base.number_column("algbw", ".3g")),
    base.CORRECT_COLUMN,
)


@dataclass(frozen=True, kw_only=True)
class LinkOptions(Bench):
    """Validated options of the command line."""

    sizes: Sequence[int]
    ranks: tuple[int, int] | None  #: the measured pair; None: the default pair
    device: gpus.Device = "cpu"


def parse_options(
    sizes_text: str, ranks: str | None, device: str = "cpu", **bench: Any
) -> LinkOptions:
    """Return the validated options; raise UsageError."""
    return LinkOptions(
        sizes=units.parse_sizes(sizes_text),
        ranks=None if ranks is None else _parse_pair(ranks),
        device=config.pick(DEVICES, device, "--device"),
        **bench,
    )


def run(world: World, options: LinkOptions) -> list[Row]:
    """Measure, print, save and return the rows; collective."""
    source, target = _choose_pair(world, options.ranks)
    check_host_memory(world, max(options.sizes), with_rivals=False)
    is_on_gpu = options.device == "gpu"
    # If a rank lacks a GPU, `pairs_by_path` reports whether it is one of the two.
    if is_on_gpu and all(place.gpu for place in world.places):
        check_gpu_memory(world, max(options.sizes), max(options.sizes))
    base.check_writable(world, options.json, options.plot)
    length = max(options.sizes)
    x = p2p_gpu.zeros_on_gpu(world, length) if is_on_gpu else aligned_zeros(length, np.uint8)
    x.fill(0)  # every page is written once
    pairs = (
        p2p_gpu.pairs_by_path(world, source, target, x)
        if is_on_gpu
        else [RankPair(world.link, source, target)]
    )
    nic_rate = p2p_gpu.nominal_nic_rate(world, source, target) if is_on_gpu else None
    title = f"p2p, {_describe_rank(world, source)} to {_describe_rank(world, target)}"
    columns = p2p_gpu.COLUMNS if is_on_gpu else COLUMNS
    groups = measure(world, options, x, pairs, nic_rate)
    rows = base.print_groups(world, title, columns, groups, len(options.sizes))
    gpu_facts = (
        {"device": "gpu", "paths": asdict(world.verdict), "nic_gb_s": nic_rate} if is_on_gpu else {}
    )
    facts = {"timed": TIMING_METHOD, **gpu_facts}
    base.save(
        world,
        options,
        rows,
        title,
        lambda plot: partial(plot.draw_size_plot, bandwidth="algbw"),
        facts,
    )
    return rows


def measure(
    world: World,
    options: LinkOptions,
    buffer: xp.Array,
    pairs: Sequence[RankPair],
    nic_rate: float | None = None,
) -> Iterator[list[Row]]:
    """Yield the rows of each size: every method over each of `pairs`; collective.

    Messages are the first bytes of `buffer`. `nic_rate`: the nominal GB/s of the network adapters.
    """
    for nbytes in options.sizes:
        x = buffer[:nbytes]
        calls = max(MIN_WINDOW, calls_per_round(nbytes))
        contenders = {
            f"{method}{'' if pair.path == 'host' else f' {pair.path}'}": (method, pair)
            for pair in pairs
            for method in METHODS
        }
        calls_by_name = {
            name: METHODS[method](pair, x, calls) for name, (method, pair) in contenders.items()
        }
        correct_by_name = {
            name: _delivers_data(world, contenders[name][1], x, call)
            for name, call in calls_by_name.items()
        }
        seconds = time_interleaved(world.link, calls_by_name, options.iterations, options.warm_up)
        messages_per_call = {"ping-pong": 2 * calls, "one-way": calls}
        yield [
            _make_row(
                world,
                pair,
                name,
                nbytes,
                np.array(seconds[name]) / messages_per_call[method],
                nic_rate,
            )
            | {"calls": calls, "rounds": options.iterations, "correct": correct_by_name[name]}
            for name, (method, pair) in contenders.items()
        ]


def _ping_pong_call(pair: RankPair, x: xp.Array, calls: int) -> Callable[[], None]:
    if pair.peer is None:
        return lambda: None
    return partial(ping_pong, pair.link, pair.peer, x, calls, pair.link.rank == pair.source)


def _one_way_call(pair: RankPair, x: xp.Array, calls: int) -> Callable[[], None]:
    link, peer, is_sender = pair.link, pair.peer, pair.link.rank == pair.source
    reply = np.zeros(1, np.uint8)

    def burst() -> None:
        if peer is None:
            return
        start = link.isend if is_sender else link.irecv
        for request in [start(x, peer) for _ in range(calls)]:
            request.wait()
        (link.irecv(reply, peer) if is_sender else link.isend(reply, peer)).wait()

    return burst


METHODS = {"ping-pong": _ping_pong_call, "one-way": _one_way_call}


def _delivers_data(world: World, pair: RankPair, x: xp.Array, call: Callable[[], None]) -> bool:
    """Return whether `call` delivers the source's data to the target; collective."""
    pattern = measured_collectives.random_block(0, np.dtype(np.int32)).view(np.uint8)[
        : measured_collectives.BLOCK_LENGTH
    ]
    sent_data = np.zeros(x.size, np.uint8)
    if pair.link.rank == pair.source:
        measured_collectives.fill_with_block(sent_data, pattern)
    xp.copy(x, sent_data)
    call()
    expected = pattern.astype(np.float64)
    is_received = pair.peer is None or measured_collectives.is_close(
        xp.to_host(x), expected, np.zeros(measured_collectives.BLOCK_LENGTH)
    )
    return all(vote == b"\1" for vote in all_gather_bytes(world.link, bytes([is_received])))


def _make_row(
    world: World,
    pair: RankPair,
    name: str,
    nbytes: int,
    seconds: np.ndarray,
    nic_rate: float | None,
) -> Row:
    statistics = summarize_times(seconds.tolist())
    bandwidth = nbytes / statistics["median_s"] / 1e9
    return {
        "operation": "p2p",
        "algorithm": name,
        "bytes": nbytes,
        "ranks": world.size,
        "from": pair.source,
        "to": pair.target,
        "path": pair.path,
        **statistics,
        "algbw": bandwidth,
        "busbw": bandwidth,
        **({"share_of_nic": bandwidth / nic_rate} if nic_rate else {}),
    }


def _describe_rank(world: World, rank: int) -> str:
    gpu = world.places[rank].gpu
    return f"rank {rank} ({world.hosts[rank]}{f', {gpu}' if gpu else ''})"


def _parse_pair(text: str) -> tuple[int, int]:
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[0] == words[1]:
        raise UsageError(f"--ranks: expected two different ranks such as 0,1, seen '{text}'")
    return int(words[0]), int(words[1])


def _choose_pair(world: World, pair: tuple[int, int] | None) -> tuple[int, int]:
    """Return `pair`; by default rank 0 and, if possible, a rank on another node."""
    if world.size < 2:
        raise UsageError("p2p needs two ranks, seen 1: hpctrain launch -n 2 bench p2p")
    if pair is None:
        node_ranks = world.main.nodes
        return 0, node_ranks[1][0] if len(node_ranks) > 1 else 1
    if max(pair) >= world.size:
        raise UsageError(f"--ranks: expected ranks below {world.size}, seen {max(pair)}")
    return pair
