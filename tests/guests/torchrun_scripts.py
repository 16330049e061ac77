"""Scripts in the manner of public ones made for torchrun: `torchrun_scripts.py NAME BACKEND`.

Each reads torchrun's variables before it makes a process group. Rank 0 prints its losses as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    return torch.nn.Sequential(*layers).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 16, generator=source, dtype=torch.float64)
    return x, torch.randint(0, 4, (12,), generator=source)


def train(model, seed, micro_steps=1, context=nullcontext) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for micro_step in range(micro_steps):
            with context() if micro_step < micro_steps - 1 else nullcontext():
                x, y = batch(seed + 100 * step + micro_step)
                loss = torch.nn.functional.cross_entropy(model(x), y) / micro_steps
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gpt(backend: str) -> list[float]:
    """nanoGPT: without RANK it is a job of its own; gradients are accumulated."""
    ddp = int(os.environ.get("RANK", -1)) != -1
    micro_steps, seed_offset = 4, 0
    model = make_model()
    if ddp:
        dist.init_process_group(backend=backend)
        seed_offset = int(os.environ["RANK"])
        assert micro_steps % int(os.environ["WORLD_SIZE"]) == 0
        micro_steps //= int(os.environ["WORLD_SIZE"])
        model = DistributedDataParallel(model)
    losses = train(model, seed_offset, micro_steps, model.no_sync if ddp else nullcontext)
    if ddp:
        dist.destroy_process_group()
    return losses


def tutorial(backend: str) -> list[float]:
    """A tutorial of DDP: ranks are read, and given as arguments."""
    local_rank = int(os.environ["LOCAL_RANK"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method="env://", rank=rank, world_size=size)
    assert local_rank == dist.get_node_local_rank()
    losses = train(DistributedDataParallel(make_model()), rank)
    dist.barrier()
    dist.destroy_process_group()
    return losses


def sharded(backend: str) -> list[float]:
    """An example of FSDP2."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend)
    model = make_model()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    losses = train(fully_shard(model, mesh=mesh), rank)
    dist.destroy_process_group()
    return losses


def tensor_parallel(backend: str) -> list[float]:
    """An example of tensor parallelism: the mesh makes the default group, of PyTorch's choice."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = make_model()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(model, 0)
    dist.destroy_process_group()
    return losses


SCRIPTS = {
    "gpt": gpt,
    "tutorial": tutorial,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
}


def reference(name: str, ranks: int = 2) -> list[float]:
    """Return the losses of rank 0 of `ranks`, by one process that adds up all gradients."""
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ranks = 1 if name == "tensor parallel" else ranks
    micro_steps = 4 // ranks if name == "gpt" else 1
    for step in range(STEPS):
        for rank in reversed(range(ranks)):
            for micro_step in range(micro_steps):
                x, y = batch(rank + 100 * step + micro_step)
                loss = torch.nn.functional.cross_entropy(model(x), y) / micro_steps
                (loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    name, backend = sys.argv[1:]
    losses = SCRIPTS[name](backend)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main()
