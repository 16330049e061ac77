"""Claims: beside gloo, the backend hpctrain of torch.distributed reduces three times as fast.

    python benchmarks/torch_backend.py [--ranks 2] [--rounds 20] [--busy N] [--device cuda]
    python benchmarks/torch_backend.py --hosts 4 [--link 1gbit] [--rounds 5]

One job, three groups of all its ranks, measured in turns: ours and gloo on ranks that are bound to
cores each, and gloo on ranks and threads that may run on any core. `--busy N`: beside N processes
per core that compute. Steps are of DDP with SGD: an MLP of 10 M parameters, and a small CNN.
`--hosts N`: one rank on each host of a netlab (root), where links are slow and gloo's step and ours
wait for the same wire.
With `--device cuda` tensors are on a GPU, and nccl is measured too. Not run on a GPU yet.
Needs PyTorch (`make test-guests` makes an environment that has it). With commux, a backend on UCX,
it is measured too, but for DDP, since it has no all-gather: `pip install --no-deps commux`. Its
wheel is built for one PyTorch: that of 0.2.1 for torch 2.12 (HPCTRAIN_OLD_TORCH=1).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lib.common import make_parser, report_result, start_world, summarize_times, time_interleaved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.world import World

LENGTHS = {4: 300, 1 << 10: 300, 1 << 20: 20, 16 << 20: 3, 64 << 20: 1}  # bytes: calls per round
MOVED = {4: 300, 1 << 20: 20, 16 << 20: 3}  # the same for broadcasts and messages
ALL_CORES = range(os.cpu_count() or 1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=20)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--link", default="1gbit")
    arguments = parser.parse_args()
    if arguments.hosts > 1 and launchers.launched(os.environ).size == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lab"  # gloo would listen on the loopback interface
        lab = Lab(arguments.hosts, 1, parse_speed(arguments.link))
        sys.exit(netlab(lab, [sys.executable, *sys.argv]))
    world = start_world(arguments.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain")
    with unbound():
        free = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=free)  # gloo's threads start here, on any core
    groups = {"hpctrain": None, "gloo": dist.new_group(backend="gloo"), "gloo unbound": free}
    if arguments.device == "cuda":
        torch.set_default_device(f"cuda:{world.local_rank % torch.cuda.device_count()}")
        groups["nccl"] = dist.new_group(backend="nccl")
    if has_commux(world):
        groups["commux"] = dist.new_group(backend="commux")
    check_sums(groups)
    burners = start_burners(arguments.busy) if world.rank == 0 else []
    try:
        rows = [
            row
            for name, make in operations().items()
            for row in measure(world, name, make, groups, arguments.rounds)
        ]
    finally:
        for burner in burners:
            burner.kill()
    place = f"{world.size}-ranks"
    claims = quiet_claims
    if arguments.busy:
        place, claims = f"{place}-{arguments.busy}-busy", busy_claims
    elif arguments.hosts > 1:
        place, claims = f"{arguments.hosts}-hosts-{arguments.link}", hosts_claims
    if "commux" in groups:
        place += "-commux"
    name = f"torch-backend-{arguments.device}-{place}"
    about = {"torch": torch.__version__, "busy_processes_per_core": arguments.busy}
    about["load_average"] = os.getloadavg()[0]  # of other processes, too
    report_result(world, name, rows, claims(rows) if world.rank == 0 else {}, **about)
    dist.destroy_process_group()


@contextmanager
def unbound() -> Iterator[None]:
    """Let this thread, and those that it starts, run on all cores."""
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL_CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def has_commux(world: World) -> bool:
    """Return whether commux is registered; rank 0 says why not."""
    try:
        import commux
    except ImportError as error:  # it is not installed, or was built for another PyTorch
        if world.rank == 0:
            print(f"without commux: {error}; pip install --no-deps commux, for its PyTorch")
        return False
    commux.register(["commux"])
    return True


def check_sums(groups: dict[str, Any]) -> None:
    """Exit unless every backend sums: a time of wrong sums says nothing."""
    for name, group in groups.items():
        x = torch.ones(1000)
        dist.all_reduce(x, group=group)
        if not bool((x == dist.get_world_size()).all()):
            sys.exit(f"{name}: the sum of ones is {x}")


def start_burners(count_per_core: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "while True: pass"]
    with unbound():
        return [subprocess.Popen(command) for _ in ALL_CORES for _ in range(count_per_core)]


def operations() -> dict[str, tuple[Callable[[Any], Callable[[], Any]], int, int]]:
    """Return {name: (maker of a call for a group, bytes reduced or 0, calls per round)}."""
    table: dict[str, Any] = {
        f"all_reduce {nbytes}": (partial(make_all_reduce, nbytes), nbytes, calls)
        for nbytes, calls in LENGTHS.items()
    }
    for nbytes, calls in MOVED.items():
        table[f"broadcast {nbytes}"] = partial(make_broadcast, nbytes), 0, calls
        table[f"send and back {nbytes}"] = partial(make_ping_pong, nbytes), 0, calls
    table["barrier"] = lambda group: partial(dist.barrier, group=group), 0, 300
    table["DDP MLP, batch 32"] = partial(make_step, make_mlp, (32, 1024)), 0, 1
    table["DDP MLP, batch 32, no_sync"] = (
        partial(make_step, make_mlp, (32, 1024), syncs=False),
        0,
        1,
    )
    table["DDP MLP, batch 128"] = partial(make_step, make_mlp, (128, 1024)), 0, 1
    table["DDP CNN, batch 32"] = partial(make_step, make_cnn, (32, 1, 14, 14)), 0, 5
    return table


def measure(
    world: World, name: str, operation: tuple[Any, int, int], groups: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each group, measured in turns."""
    make, nbytes, calls = operation
    contexts = {"gloo unbound": unbound}
    named = {key: group for key, group in groups.items() if "DDP" not in name or key != "commux"}
    rivals = {group_name: make(group) for group_name, group in named.items()}
    seconds = time_interleaved(world.link, rivals, rounds, calls=calls, contexts=contexts)
    rows = []
    for group_name, times in seconds.items():
        row = {"operation": name, "backend": group_name, "ranks": world.size}
        row |= {"us": 1e6 * float(np.median(times)), **summarize_times(times)}
        if nbytes:
            row["algbw_gb_s"] = nbytes / float(np.median(times)) / 1e9
        rows.append(row)
    return rows


def make_all_reduce(nbytes: int, group: Any) -> Callable[[], Any]:
    x = torch.zeros(nbytes // 4)
    return lambda: (dist.all_reduce(x, group=group), finish(x))


def make_broadcast(nbytes: int, group: Any) -> Callable[[], Any]:
    x = torch.zeros(nbytes // 4)
    return lambda: (dist.broadcast(x, 0, group=group), finish(x))


def make_ping_pong(nbytes: int, group: Any) -> Callable[[], Any]:
    """Return a message to the neighbour, and one back; with an odd number the last rank waits."""
    x, rank, partner = torch.zeros(nbytes // 4), dist.get_rank(), dist.get_rank() ^ 1
    calls = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)

    def ping_pong() -> None:
        for call in calls if partner < dist.get_world_size() else ():
            call(x, partner, group=group)
        finish(x)

    return ping_pong


def finish(x: torch.Tensor) -> None:
    """Wait for work on the GPU of `x`, if it is on one."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def make_mlp() -> nn.Module:
    """10.5 M parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048),
        nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def make_step(
    make_model: Callable[[], nn.Module], shape: tuple[int, ...], group: Any, syncs: bool = True
) -> Callable[[], Any]:
    """Return a training step on random inputs; with `syncs` False without communication."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(*shape), torch.randint(10, (shape[0],))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        finish(inputs)

    def step_alone() -> None:
        with model.no_sync():
            step()

    return step if syncs else step_alone


def median_us(rows: list[dict[str, Any]], operation: str, backend: str) -> float:
    (row,) = [r for r in rows if (r["operation"], r["backend"]) == (operation, backend)]
    return float(row["us"])


def quiet_claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    claims = {}
    for nbytes, limit_us in ((4, 12.0), (1 << 20, 250.0), (64 << 20, (64 << 20) / 4e9 * 1e6)):
        operation = f"all_reduce {nbytes}"
        ours, gloo = (median_us(rows, operation, b) for b in ("hpctrain", "gloo unbound"))
        claims[f"{operation}: {ours:.1f} us, <= {limit_us:.0f}"] = ours <= limit_us
        claims[f"... {gloo / ours:.1f} times as fast as gloo unbound, >= 3"] = gloo >= 3 * ours
    operation = "DDP MLP, batch 32"
    ours, gloo = (median_us(rows, operation, b) for b in ("hpctrain", "gloo unbound"))
    claims[f"{operation}: {ours / gloo:.2f} of gloo's step, <= 0.8"] = ours <= 0.8 * gloo
    return claims


def hosts_claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the claims: shorter where latency counts, as long where both fill the wire."""
    claims = {}
    for operation, limit in (("DDP CNN, batch 32", 0.8), ("DDP MLP, batch 32", 1.1)):
        ours, gloo = (median_us(rows, operation, b) for b in ("hpctrain", "gloo unbound"))
        claims[f"{operation}: {ours / gloo:.2f} of gloo's step, <= {limit}"] = ours <= limit * gloo
    return claims


def busy_claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    operation = "DDP CNN, batch 32"
    ours, gloo = (median_us(rows, operation, b) for b in ("hpctrain", "gloo unbound"))
    return {f"{operation}: {ours / gloo:.2f} of gloo's step, <= 1.5": ours <= 1.5 * gloo}


if __name__ == "__main__":
    main()
