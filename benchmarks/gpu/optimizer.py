"""Claims: an update of the whole arena moves its bytes at >= 70 % of the speed of a copy.

    python benchmarks/gpu/optimizer.py [--bytes 536870912]

float32, parameters of that many bytes and as many gradients; several updates between two looks at
the clock. The speed of a copy: one array of the GPU into another, bytes read and written. What an
update must read and write, in units of the parameters' bytes:

    sgd 3      momentum 5      adamw 7      lamb, clipped: as they are, without a claim
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS, machine_facts, summarize_times, time_interleaved
from lib.outcomes import print_claims, save_result

from hpctrain import optim
from hpctrain.core import xp
from hpctrain.gradients.arena import Slot
from hpctrain.optim import Optimizer
from hpctrain.transport.device import gpus
from hpctrain.world import World, init

MIN_COPY_SHARE, CALLS_PER_TIMING, TENSOR_COUNT = 0.7, 10, 64


class Case(NamedTuple):
    """An optimizer, and how many arrays it must read and write."""

    optimizer: Optimizer
    passes: int
    claimed: bool = True


CASES = {
    "sgd": Case(optim.sgd(1e-3), 3),
    "momentum": Case(optim.sgd(1e-3, 0.9, weight_decay=1e-4), 5),
    "adamw": Case(optim.adamw(1e-3), 7),
    "adamw, clipped": Case(optim.adamw(1e-3, clip_norm=1.0), 8, claimed=False),
    "lamb": Case(optim.lamb(1e-3), 12, claimed=False),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=512 << 20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "optimizer.json")
    options = parser.parse_args()
    world = init("gpu")
    rows = measure_optimizers(world, options.bytes, options.rounds)
    claims = make_claims(rows)
    save_result(
        options.json, {"machine": machine_facts(world), "device": world.device}, claims, rows
    )
    sys.exit(not print_claims(claims))


def measure_optimizers(world: World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for the copy and one for each optimizer, with the GB/s that it moves."""
    cupy = gpus.import_cupy()
    param, grad = (cupy.full(nbytes // 4, 1e-3, np.float32) for _ in range(2))
    found = [
        measure_row(
            "copy", 2, nbytes, world, repeat_call(lambda: xp.copy(param, grad), param), rounds
        )
    ]
    for name, case in CASES.items():
        call = repeat_call(make_update(case.optimizer, param, grad), param)
        found.append(measure_row(name, case.passes, nbytes, world, call, rounds))
    return found


def measure_row(
    name: str, passes: int, nbytes: int, world: World, call: Callable[[], None], rounds: int
) -> dict[str, Any]:
    """Time `call` and return its row."""
    seconds = [
        duration / CALLS_PER_TIMING
        for duration in time_interleaved(world.link, {name: call}, rounds)[name]
    ]
    rate = passes * nbytes / float(np.median(seconds)) / 1e9
    return {
        "what": name,
        "bytes": nbytes,
        "passes": passes,
        **summarize_times(seconds),
        "gb_per_s": rate,
    }


def make_update(optimizer: Optimizer, param: xp.Array, grad: xp.Array) -> Callable[[], None]:
    """Return a call that updates `param`, of SLOTS equal tensors, once."""
    state, n = optimizer.init(param), param.size // TENSOR_COUNT
    slots = [Slot(f"{i}", (n // 16, 16), i * n) for i in range(TENSOR_COUNT)]
    return lambda: optimizer.update(grad, state, param, slots, lambda rows: rows)


def repeat_call(once: Callable[[], None], x: xp.Array) -> Callable[[], None]:
    """Return a call that does CALLS of `once` and waits for the last."""

    def calls() -> None:
        for _ in range(CALLS_PER_TIMING):
            once()
        xp.finish(x)

    return calls


def make_claims(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Return what is claimed of the rates."""
    copy_rate = rows[0]["gb_per_s"]
    return {
        f"{r['what']} moves {r['gb_per_s']:.0f} GB/s, {r['gb_per_s'] / copy_rate:.2f} of a copy's "
        f"{copy_rate:.0f}, >= {MIN_COPY_SHARE}": r["gb_per_s"] >= MIN_COPY_SHARE * copy_rate
        for r in rows[1:]
        if CASES[r["what"]].claimed
    }


if __name__ == "__main__":
    main()
