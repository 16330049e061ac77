"""Claims: a step of a PyTorch module takes at most 0.65 of DistributedDataParallel's on gloo.

    python benchmarks/torch_engines.py [--ranks 2] [--rounds 15] [--batches 32,128]

An MLP of 10 M parameters, SGD with momentum, the same weights and samples: `ht.torch.sync` in a
loop, the engine allreduce under `ht.torch.Trainer`, DDP on gloo (on any core) and on the backend
hpctrain, in turns; after 10 steps their losses must be equal. `alone`: the module in a loop without
communication. One thread of PyTorch per rank. Needs PyTorch (`make test-guests`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _common import make_parser, report_result, start_world, summarize_times, time_interleaved
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_backend import make_mlp, unbound

import hpctrain as ht
from hpctrain.engines import Flags, Task
from hpctrain.gradients.replica import Batch
from hpctrain.nn import Key
from hpctrain.torch.modules.model import TorchModel
from hpctrain.world import World

RATE, EQUAL_STEPS = 0.01, 10
LIMITS = {32: {"sync": 0.6, "engine": 0.65}, 128: {"sync": 0.75, "engine": 0.8}}
Step = Callable[[], float]


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=15)
    parser.add_argument("--batches", default="32,128")
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain")
    with unbound():
        gloo = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=gloo)  # gloo's threads start here, on any core
    rows, claims = [], {}
    for batch in map(int, arguments.batches.split(",")):
        batch_rows = measure(world, batch, gloo, arguments.rounds)
        rows += batch_rows
        claims |= claims_of(batch, {row["contender"]: row for row in batch_rows})
    about = {"torch": torch.__version__}
    claims = claims if world.rank == 0 else {}
    report_result(world, f"torch-engines-{world.size}-ranks", rows, claims, **about)
    dist.destroy_process_group()


def measure(world: World, batch: int, gloo: Any, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender, measured in turns."""
    generator = torch.Generator().manual_seed(world.rank)
    inputs = torch.randn(batch, 1024, generator=generator)
    targets = torch.randint(10, (batch,), generator=generator)
    steps: dict[str, Step] = {
        "engine": make_engine_step(world, inputs, targets),
        "sync": make_loop_step(inputs, targets, ht.torch.sync),
        "DDP on hpctrain": make_ddp_step(inputs, targets, None),
        "DDP on gloo": make_ddp_step(inputs, targets, gloo),
        "alone": make_loop_step(inputs, targets, None),
    }
    contexts = {"DDP on gloo": unbound}
    losses = {}
    for name, step in steps.items():
        with contexts.get(name, nullcontext)():
            losses[name] = [step() for _ in range(EQUAL_STEPS)][-1]
    seconds = time_interleaved(world.link, steps, rounds, calls=3, contexts=contexts)
    return [
        {"contender": name, "batch": batch, "ms": 1e3 * float(np.median(times)),
         "loss": losses[name], **summarize_times(times)}
        for name, times in seconds.items()
    ]  # fmt: skip


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return make_mlp()


def make_loop_step(inputs: torch.Tensor, targets: torch.Tensor, sync: Any) -> Step:
    model = make_model()
    optimizer = make_optimizer(model)
    if sync is not None:
        sync(model, optimizer)
    return lambda: train_step(model, optimizer, inputs, targets)


def make_ddp_step(inputs: torch.Tensor, targets: torch.Tensor, group: Any) -> Step:
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = make_optimizer(model)
    return lambda: train_step(model, optimizer, inputs, targets)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def make_engine_step(world: World, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    replica = TorchModel(make_model()).make_replica(0, "float32", on_gpu=False)
    optimizer = ht.optim.sgd(rate=RATE, momentum=0.9)
    engine: Any = ht.engines.AllReduce().build(world, replica, optimizer)
    batch = Batch(inputs.numpy(), targets.numpy(), len(inputs))
    task = Task(batch, 1 / (batch.n * world.size), Key(0, 0, 0, samples=batch.n * world.size))

    def step() -> float:
        sums, _ = engine.step(task, Flags())
        return sums["loss"].mean

    return step


def claims_of(batch: int, rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    gloo = rows["DDP on gloo"]
    claims = {}
    for name, limit in LIMITS.get(batch, {}).items():
        ratio = rows[name]["ms"] / gloo["ms"]
        claims[f"{name}, batch {batch}: {ratio:.2f} of DDP on gloo, <= {limit}"] = ratio <= limit
    trained = [rows[name]["loss"] for name in rows if name != "alone"]
    claims[f"batch {batch}: equal losses"] = max(trained) - min(trained) <= 1e-5 * max(trained)
    return claims


if __name__ == "__main__":
    main()
