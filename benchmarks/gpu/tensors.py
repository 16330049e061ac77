"""Claims: an all-reduce of PyTorch's tensors on GPUs costs two copies more than one of our arrays.

    python benchmarks/gpu/tensors.py [--ranks 2] [--sizes 1048576,67108864,536870912]

Ranks of one node, in turn: `torch.distributed.all_reduce` of the backend hpctrain, whose tensors
are copied through buffers that CUDA IPC maps, and `direct` on arrays that it maps. Where the ranks
share a GPU, a copy to the buffer and one back move 4 P n bytes beside the 2 P n of the sum.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS, machine_facts, summarize_times, time_interleaved
from lib.outcomes import print_claims, save_result

from hpctrain.cluster.launch import launch_program
from hpctrain.collectives.direct import direct
from hpctrain.core import launchers, xp
from hpctrain.world import World, current_world

MAX_RATIO = 4.0


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="1048576,67108864,536870912")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "tensors.json")
    options = parser.parse_args()
    if launchers.launched(os.environ).size == 1:
        sys.exit(launch_program(options.ranks, [sys.executable, *sys.argv]))
    import torch.distributed as dist

    dist.init_process_group("hpctrain")
    world = current_world()
    assert world is not None
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = [row for nbytes in sizes for row in measure_size(world, nbytes, options.rounds)]
    claims = check_claims(rows)
    if world.rank == 0:
        one_gpu = len(set(world.places)) == 1
        about = {"machine": machine_facts(world), "device": world.device, "one_gpu": one_gpu}
        save_result(options.json, about, claims, rows)
        print_claims(claims)
    dist.destroy_process_group()
    sys.exit(False in claims.values())


def measure_size(world: World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for the tensor and one for the array of `nbytes`."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((nbytes // 4,), world.rank + 1.0, device="cuda")
    assert world.memory.gpu is not None
    array = world.memory.gpu.zeros(nbytes // 4, np.float32)
    array.fill(world.rank + 1)

    def reduce_tensor() -> None:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()

    def reduce_array() -> None:
        direct(world.main, array, np.add)
        xp.finish(array)

    reduce_tensor(), reduce_array()
    total = world.size * (world.size + 1) / 2
    is_correct = bool((tensor == total).all()) and bool((array == total).all())
    tensor.zero_(), array.fill(0)
    seconds = time_interleaved(world.link, {"tensor": reduce_tensor, "array": reduce_array}, rounds)
    return [
        {"what": name, "bytes": nbytes, "ranks": world.size, "right": is_correct,
         **summarize_times(times), "gb_per_s": nbytes / float(np.median(times)) / 1e9}
        for name, times in seconds.items()
    ]  # fmt: skip


def check_claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the claims on the longest size, and whether they hold."""
    tensor, array = rows[-2:]
    ratio = tensor["median_s"] / array["median_s"]
    return {
        f"{tensor['ranks']} ranks, {tensor['bytes'] >> 20} MiB: {tensor['gb_per_s']:.0f} GB/s of "
        f"PyTorch's tensors, {ratio:.1f} times as long as mapped arrays, <= {MAX_RATIO}": (
            ratio <= MAX_RATIO
        ),
        "all sums are right": all(row["right"] for row in rows),
    }


if __name__ == "__main__":
    main()
