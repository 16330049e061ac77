"""Claims: messages between two GPUs reach what the slowest leg of their way allows.

    python benchmarks/gpu/paths.py [--bytes 67108864]

Two ranks, one way, taken in turn: each path of `hpctrain bench p2p --device gpu`, and the legs of
the staged one: GPU to pinned host memory and back, and as much between two ranks' host memory.

The staged path reaches >= 80 % of its slowest leg; where MPI takes device pointers on one node, it
is within 20 % of CUDA IPC.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS, machine_facts, summarize_times, time_interleaved
from lib.outcomes import print_claims, save_result

from hpctrain.cluster.launch import launch_program
from hpctrain.core import launchers, xp
from hpctrain.tools.bench import p2p, p2p_gpu
from hpctrain.tools.bench.p2p_gpu import RankPair
from hpctrain.transport.device import gpus
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.world import World, init

MESSAGES, STAGED_SHARE, POINTER_SHARE = 8, 0.8, 0.8


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "paths.json")
    options = parser.parse_args()
    if launchers.launched(os.environ).size == 1:
        sys.exit(launch_program(2, [sys.executable, *sys.argv]))
    world = init("gpu")
    rows = measure_paths(world, options.bytes, options.rounds)
    claims = check_claims({row["what"]: row["gb_per_s"] for row in rows})
    if world.rank == 0:
        about = {
            "machine": machine_facts(world),
            "device": world.device,
            "reason": world.verdict.reason,
        }
        save_result(options.json, about, claims, rows)
        print_claims(claims)
    sys.exit(False in claims.values())


def measure_paths(world: World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each path and leg."""
    x, host = p2p_gpu.zeros_on_gpu(world, nbytes), aligned_zeros(nbytes, np.uint8)
    host.fill(0)  # pages of its own
    one_way = p2p.METHODS["one-way"]
    calls: dict[str, Callable[[], Any]] = {
        pair.path: one_way(pair, x, MESSAGES) for pair in p2p_gpu.pairs_by_path(world, 0, 1, x)
    }
    wire = world.threads.link_for("between hosts")
    calls["host to host"] = one_way(RankPair(wire, 0, 1), host, MESSAGES)
    # As the staged path uses the bus: the sender's way up, the receiver's way down.
    calls["to the host"] = partial(copy_leg, x, True) if world.rank == 0 else do_nothing
    calls["from the host"] = partial(copy_leg, x, False) if world.rank == 1 else do_nothing
    seconds = time_interleaved(world.link, calls, rounds)
    return [
        {"what": name, "bytes": nbytes, **summarize_times(times),
         "gb_per_s": MESSAGES * nbytes / float(np.median(times)) / 1e9}
        for name, times in seconds.items()
    ]  # fmt: skip


def do_nothing() -> None:
    """Leave the bus to the other rank."""


def copy_leg(x: xp.Array, to_host: bool) -> None:
    """Copy `x` MESSAGES times between the GPU and pinned memory."""
    pinned = _pinned_buffer(x.nbytes)
    for _ in range(MESSAGES):
        if to_host:
            x.get(out=pinned, blocking=False)
        else:
            x.set(pinned)
    xp.finish(x)


def _pinned_buffer(nbytes: int) -> np.ndarray:
    if nbytes not in _pinned_buffers:
        memory = gpus.import_cupy().cuda.alloc_pinned_memory(nbytes)
        _pinned_buffers[nbytes] = np.frombuffer(memory, np.uint8, nbytes)
    return _pinned_buffers[nbytes]


_pinned_buffers: dict[int, np.ndarray] = {}


def check_claims(rates: dict[str, float]) -> dict[str, bool | None]:
    """Return what is claimed of the rates in GB/s, and whether it holds."""
    slowest = min(("to the host", "from the host", "host to host"), key=lambda leg: rates[leg])
    share = rates["staged"] / rates[slowest]
    claims: dict[str, bool | None] = {
        f"the staged path moves {rates['staged']:.1f} GB/s, {share:.2f} of its slowest leg, "
        f"{slowest} with {rates[slowest]:.1f}, >= {STAGED_SHARE}": share >= STAGED_SHARE
    }
    pointer_path = next((path for path in ("gdr", "cuda-aware") if path in rates), None)
    if pointer_path is None or "ipc" not in rates:
        available = ", ".join(path for path in ("cuda-aware", "ipc") if path in rates) or "neither"
        return {
            **claims,
            f"by pointer within 20 % of CUDA IPC: there is {available} of the two": None,
        }
    share = rates[pointer_path] / rates["ipc"]
    claims[f"by pointer {rates[pointer_path]:.1f} GB/s, {share:.2f} of CUDA IPC's, >= "
          f"{POINTER_SHARE}"] = share >= POINTER_SHARE  # fmt: skip
    return claims


if __name__ == "__main__":
    main()
