"""The features of `torch.distributed` on ranks of MPI, each equal to one process in float64.

`mpiexec -n P python features.py [NAME...]` prints a line per feature on rank 0: its name and the
largest difference, and ends with an error if one is above 1e-12. No script here imports hpctrain.
FEATURES_BACKEND (hpctrain) and FEATURES_DEVICE (cpu) are read from the environment.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMIT = 1e-12
STEPS, BATCH, WIDTH = 5, 24, 16
DEVICE = os.environ.get("FEATURES_DEVICE", "cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)]
    return nn.Sequential(*layers).double().to(DEVICE)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(
            torch.randn(BATCH, n, generator=generator, dtype=torch.float64).to(DEVICE)
            for n in (WIDTH, 4)
        )
        for _ in range(STEPS)
    ]


def loss_of(model, inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


def train(model, optimizer, share=slice(None), step=None):
    """Train on `share` of each batch; return the parameters."""
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss_of(model, inputs[share], targets[share]).backward()
        (step or optimizer.step)()
    return parameters_of(model)


def parameters_of(model):
    return torch.cat([full(p.detach()).reshape(-1) for p in model.parameters()])


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reference(make_optimizer=None):
    model = make_model()
    make_optimizer = make_optimizer or sgd
    return train(model, make_optimizer(model.parameters()))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def own_share():
    return slice(dist.get_rank(), None, dist.get_world_size())


def ddp(**options):
    model = DistributedDataParallel(make_model(), **options)
    return train(model, sgd(model.parameters()), own_share()) - reference()


def ddp_static_graph():
    return ddp(static_graph=True)


def ddp_bucket_views():
    return ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.001)


def ddp_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, allreduce_hook)
    return train(model, sgd(model.parameters()), own_share()) - reference()


def ddp_no_sync():
    """Two halves of a share, the first without communication, are the whole share."""
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model.parameters())
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        inputs, targets = inputs[own_share()], targets[own_share()]
        half = len(inputs) // 2
        with model.no_sync():
            (loss_of(model, inputs[:half], targets[:half]) * half / len(inputs)).backward()
        rest = (len(inputs) - half) / len(inputs)
        (loss_of(model, inputs[half:], targets[half:]) * rest).backward()
        optimizer.step()
    return parameters_of(model) - reference()


def ddp_join():
    """Rank r has r more batches; those who have none left shadow the others' collectives."""
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model.parameters())
    batches = make_batches()[: 2 + dist.get_rank()]
    with model.join():
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
    mine = parameters_of(model)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest - mine


def ddp_unused_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = make_model(), nn.Linear(3, 3).double().to(DEVICE)

        def forward(self, x):
            return self.used(x)

    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = sgd(model.parameters())
    train(model, optimizer, own_share())
    return parameters_of(model.module.used) - reference()


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        make_model(), sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device(DEVICE)
    )
    train(model, sgd(model.parameters()), own_share())
    with FullyShardedDataParallel.summon_full_params(model):
        return parameters_of(model) - reference()


def fsdp2(mesh=None):
    from torch.distributed.fsdp import fully_shard

    model, options = make_model(), {} if mesh is None else {"mesh": mesh}
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return train(model, sgd(model.parameters()), own_share()) - reference()


def hsdp():
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    if size % 2:
        return None
    return fsdp2(init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = make_model()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Some parameters are DTensors, some are not: no kernel for all at once, the default on GPUs.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
    return parameters_of(model) - reference()


def fsdp_and_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    if size % 2:
        return None
    mesh = init_device_mesh(DEVICE, (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = make_model()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    share = slice(mesh["data"].get_local_rank(), None, size // 2)
    return train(model, sgd(model.parameters()), share) - reference()


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return train(model, optimizer, own_share()) - reference(adam)


def pipeline(schedule_name, stages_per_rank=1, split_backward=False):
    """A chain of as many equal layers as stages; the sum over micro-batches is the batch's loss."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * stages_per_rank
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double().to(DEVICE) for _ in range(total)
    ]
    whole = nn.Sequential(*copy.deepcopy(layers))
    schedule_class = getattr(schedules, schedule_name)
    if schedule_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        numbers = [rank, total - 1 - rank]
    else:
        numbers = list(range(rank, total, size))
    parts = [pipelining.PipelineStage(layers[i], i, total, torch.device(DEVICE)) for i in numbers]
    stage = parts if stages_per_rank > 1 else parts[0]
    inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64).to(DEVICE)
    targets = torch.randn(BATCH, WIDTH, dtype=torch.float64).to(DEVICE)
    count = 2 * size
    schedule = schedule_class(
        stage, count, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    first, last = 0 in numbers, total - 1 in numbers
    schedule.step(*([inputs] if first else []), **({"target": targets} if last else {}))
    ((whole(inputs) - targets) ** 2).sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for i in numbers for p in whole[i].parameters()])
    seen = torch.cat([p.grad.reshape(-1) for i in numbers for p in layers[i].parameters()])
    return (seen - expected) / expected.abs().max()


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    torch.manual_seed(0)
    x = torch.randn(7, 9, dtype=torch.float64).to(DEVICE)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    return columns.redistribute(mesh, [Replicate()]).to_local() - x


def checkpoint(use_async=False):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp(prefix="dcp-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model = make_model()
    fully_shard(model)
    state = {"model": model.state_dict()}
    if use_async:
        dcp.async_save(state, checkpoint_id=folder[0]).result()
    else:
        dcp.save(state, checkpoint_id=folder[0])
    other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other)
    restored = {"model": other.state_dict()}
    dcp.load(restored, checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return parameters_of(other) - parameters_of(model)


def async_checkpoint():
    return checkpoint(use_async=True)


def compiled_functional():
    import torch.distributed._functional_collectives as functional

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double_sum(x):
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 2

    ranks = torch.arange(dist.get_world_size(), dtype=torch.float64)
    own = torch.full((3,), float(dist.get_rank()), dtype=torch.float64, device=DEVICE)
    return double_sum(own) - 2 * float(ranks.sum())


def functional_out():
    """Functional collectives into given tensors: C++ calls those of process groups otherwise."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    functional, x = torch.ops._c10d_functional, torch.arange(size * 3.0).double().to(DEVICE) + rank
    gathered, part = x.new_empty(size * size * 3), x.new_empty(3)
    functional.all_gather_into_tensor_out(x, size, name, out=gathered)
    functional.reduce_scatter_tensor_out(x.clone(), "sum", size, name, out=part)
    rows = torch.cat([x - rank + r for r in range(size)])
    total = rows.view(size, size, 3).sum(0)[rank]
    gathered, part = functional.wait_tensor(gathered), functional.wait_tensor(part)
    return torch.cat([gathered - rows, part - total])


def compiled_with_inductor():
    """Forward and backward compiled, where a C++ compiler is there; its workers are processes."""
    if shutil.which("g++") is None:
        return None
    model = DistributedDataParallel(make_model())
    compiled = torch.compile(model)
    optimizer = sgd(model.parameters())
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss_of(compiled, inputs[own_share()], targets[own_share()]).backward()
        optimizer.step()
    return parameters_of(model) - reference()


def objects():
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    wrong = [i for i, value in enumerate(gathered) if value != {"rank": i}]
    return torch.tensor([float(len(wrong))])


FEATURES = {
    "ddp": ddp,
    "ddp static graph": ddp_static_graph,
    "ddp bucket views": ddp_bucket_views,
    "ddp hook": ddp_hook,
    "ddp no_sync": ddp_no_sync,
    "ddp join": ddp_join,
    "ddp unused parameters": ddp_unused_parameters,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tensor parallel": tensor_parallel,
    "fsdp2 and tensor parallel": fsdp_and_tensor_parallel,
    "zero redundancy optimizer": zero_redundancy,
    "gpipe": lambda: pipeline("ScheduleGPipe"),
    "1f1b": lambda: pipeline("Schedule1F1B"),
    "interleaved 1f1b": lambda: pipeline("ScheduleInterleaved1F1B", 2),
    "looped bfs": lambda: pipeline("ScheduleLoopedBFS", 2),
    "interleaved zero bubble": lambda: pipeline("ScheduleInterleavedZeroBubble", 2),
    "zbv zero bubble": lambda: pipeline("ScheduleZBVZeroBubble", 2),
    "dualpipev": lambda: pipeline("ScheduleDualPipeV", 2),
    "dtensor": dtensor,
    "checkpoint": checkpoint,
    "async checkpoint": async_checkpoint,
    "compiled functional": compiled_functional,
    "functional into out": functional_out,
    "objects": objects,
}
SLOW_FEATURES = {"compiled with inductor": compiled_with_inductor}


def main() -> None:
    dist.init_process_group(os.environ.get("FEATURES_BACKEND", "hpctrain"))
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    wrong = []
    for name in sys.argv[1:] or FEATURES:
        difference = {**FEATURES, **SLOW_FEATURES}[name]()
        largest = torch.zeros(1, dtype=torch.float64)
        if difference is not None:
            largest[0] = difference.detach().abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            note = "not for this number of ranks" if difference is None else f"{largest.item():.1e}"
            print(f"{name}: {note}", flush=True)
        if not largest.item() <= LIMIT:
            wrong.append(name)
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"differ by more than {LIMIT}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
