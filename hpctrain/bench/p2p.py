"""`hpctrain bench p2p`: latency and bandwidth of a link between two ranks.

    ping-pong   round trips, back to back; half of one is the time of one message
    one-way     a window of messages at once, then one byte back; the time of the window / messages

As OSU's osu_latency and osu_bw do it, over the Link that our algorithms use. With `--device gpu`
the messages lie on GPUs, and each path they may take is measured: see p2p_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import config
from hpctrain.bench import checks, memory_check, message_sizes, output, p2p_gpu
from hpctrain.bench.collectives import must_draw, rounds_of
from hpctrain.bench.rank_pair import RankPair
from hpctrain.bench.sweep import calls_per_round
from hpctrain.collectives import all_gather_bytes
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.tuning.measure import interleaved, rally, spread
from hpctrain.world import World

DEVICES: dict[str, gpus.Device] = {"cpu": "cpu", "gpu": "gpu"}
LEAST_WINDOW = 8  #: messages on their way at once, also of the longest
TIMED = (
    "ping-pong: half the time of `calls` round trips / calls; one-way: the time of a window of "
    "`calls` messages and a byte back / calls; the slower end counts"
)
COLUMNS = (output.SIZE, output.ALGORITHM, *output.TIMES, ("GB/s", output.number("algbw", ".3g")),
           output.CORRECT)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of the command line, validated."""

    sizes: Sequence[int]
    ranks: tuple[int, int] | None  #: the two ranks; None: the default
    rounds: int
    warm_up: int
    json: Path | None
    plot: Path | None
    device: gpus.Device = "cpu"


def check(
    sizes_text: str,
    ranks: str | None,
    iterations: int,
    warm_up: int,
    json: Path | None,
    plot: Path | None,
    device: str = "cpu",
) -> Options:
    """Return the validated options; raise UsageError."""
    must_draw(plot)
    return Options(
        message_sizes.parse(sizes_text),
        None if ranks is None else _parse_pair(ranks),
        rounds_of("--iterations", iterations, 1),
        rounds_of("--warm-up", warm_up, 0),
        json,
        plot,
        config.pick(DEVICES, device, "--device"),
    )


def run(world: World, options: Options) -> list[Row]:
    """Measure, show and save the rows, and return them. Collective."""
    source, to = _choose_pair(world, options.ranks)
    memory_check.check(world, max(options.sizes), rivals=False)
    on_gpu = options.device == "gpu"
    if on_gpu and all(place.gpu for place in world.places):  # else `ranks` names a rank without one
        memory_check.check_gpu(world, max(options.sizes), max(options.sizes))
    output.must_be_writable(world, options.json, options.plot)
    x = _buffer(world, max(options.sizes), on_gpu)
    pairs = p2p_gpu.pairs(world, source, to, x) if on_gpu else [RankPair(world.link, source, to)]
    rate = p2p_gpu.nic_rate(world, source, to) if on_gpu else None
    title = f"p2p, {_rank_text(world, source)} to {_rank_text(world, to)}"
    columns = p2p_gpu.COLUMNS if on_gpu else COLUMNS
    printer = output.RowPrinter(world, title, columns, len(options.sizes))
    rows = printer.print_groups(measure(world, options, x, pairs, rate))
    about = {"device": "gpu", "paths": asdict(world.verdict), "nic_gb_s": rate} if on_gpu else {}
    output.write(world, options.json, output.report(world, rows, timed=TIMED, **about))
    if options.plot is not None and world.rank == 0:
        import_module("hpctrain.bench.plot").draw(rows, title, options.plot, "algbw")
    return rows


def measure(
    world: World,
    options: Options,
    buffer: xp.Array,
    pairs: Sequence[RankPair],
    rate: float | None = None,
) -> Iterator[list[Row]]:
    """Yield the rows of each size, both ways over each of `pairs`; collective.

    Messages are the beginning of `buffer`. `rate`: the GB/s of which a row's bandwidth is a share.
    """
    for size in options.sizes:
        x = buffer[:size]
        calls = max(LEAST_WINDOW, calls_per_round(size))
        plan = {f"{way}{_path_text(pair)}": (way, pair) for pair in pairs for way in METHODS}
        calls_by_name = {name: METHODS[way](pair, x, calls) for name, (way, pair) in plan.items()}
        correct_by_name = {
            name: _is_correct(world, plan[name][1], x, call) for name, call in calls_by_name.items()
        }
        seconds = interleaved(world.link, calls_by_name, options.rounds, options.warm_up)
        per_message = {"ping-pong": 2 * calls, "one-way": calls}
        yield [
            _row(world, pair, name, size, np.array(seconds[name]) / per_message[way], rate)
            | {"calls": calls, "rounds": options.rounds, "correct": correct_by_name[name]}
            for name, (way, pair) in plan.items()
        ]


def _path_text(pair: RankPair) -> str:
    return "" if pair.path == "host" else f" {pair.path}"


def _buffer(world: World, nbytes: int, on_gpu: bool) -> xp.Array:
    """Return zeros (nbytes,), uint8, with every page written once; collective."""
    if on_gpu:
        return p2p_gpu.buffer(world, nbytes)
    x = aligned_zeros(nbytes, np.uint8)
    x.fill(0)
    return x


def _ping_pong(pair: RankPair, x: xp.Array, calls: int) -> Callable[[], None]:
    if pair.peer is None:
        return lambda: None
    return partial(rally, pair.link, pair.peer, x, calls, pair.link.rank == pair.source)


def _window(pair: RankPair, x: xp.Array, calls: int) -> Callable[[], None]:
    link, peer, first = pair.link, pair.peer, pair.link.rank == pair.source
    answer = np.zeros(1, np.uint8)

    def burst() -> None:
        if peer is None:
            return
        start = link.isend if first else link.irecv
        for request in [start(x, peer) for _ in range(calls)]:
            request.wait()
        (link.irecv(answer, peer) if first else link.isend(answer, peer)).wait()

    return burst


METHODS = {"ping-pong": _ping_pong, "one-way": _window}


def _is_correct(world: World, pair: RankPair, x: xp.Array, call: Callable[[], None]) -> bool:
    """Return whether `call` brings the data of one end to the other end; collective."""
    values = checks.block(0, np.dtype(np.int32)).view(np.uint8)[: checks.PERIOD]
    data = np.zeros(x.size, np.uint8)
    if pair.link.rank == pair.source:
        checks.fill_pattern(data, values)
    xp.copy(x, data)
    call()
    expected = values.astype(np.float64)
    is_right = pair.peer is None or checks.agrees(xp.to_host(x), expected, np.zeros(checks.PERIOD))
    return all(vote == b"\1" for vote in all_gather_bytes(world.link, bytes([is_right])))


def _row(
    world: World, pair: RankPair, name: str, size: int, seconds: np.ndarray, rate: float | None
) -> Row:
    statistics = spread(seconds.tolist())
    speed = size / statistics["median_s"] / 1e9
    return {
        "operation": "p2p",
        "algorithm": name,
        "bytes": size,
        "ranks": world.size,
        "from": pair.source,
        "to": pair.to,
        "path": pair.path,
        **statistics,
        "algbw": speed,
        "busbw": speed,
        **({"share_of_nic": speed / rate} if rate else {}),
    }


def _rank_text(world: World, rank: int) -> str:
    gpu = world.places[rank].gpu
    return f"rank {rank} ({world.hosts[rank]}{f', {gpu}' if gpu else ''})"


def _parse_pair(text: str) -> tuple[int, int]:
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[0] == words[1]:
        raise UsageError(f"--ranks: expected two different ranks such as 0,1, seen '{text}'")
    return int(words[0]), int(words[1])


def _choose_pair(world: World, pair: tuple[int, int] | None) -> tuple[int, int]:
    """Return the chosen `pair`, by default rank 0 and a rank on another node if there is one."""
    if world.size < 2:
        raise UsageError("p2p needs two ranks, seen 1: hpctrain launch -n 2 bench p2p")
    if pair is None:
        nodes = world.main.nodes
        return 0, nodes[1][0] if len(nodes) > 1 else 1
    if max(pair) >= world.size:
        raise UsageError(f"--ranks: expected ranks below {world.size}, seen {max(pair)}")
    return pair
