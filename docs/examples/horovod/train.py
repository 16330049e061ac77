"""A script of Horovod, as it is: the same training as ../pytorch/loop.py.

mpirun -n 4 python -m hpctrain.horovod train.py        hpctrain-horovodrun -np 4 python train.py
"""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :2].sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

rank, size = hvd.rank(), hvd.size()
for _ in range(5):
    for batch in torch.randperm(len(x)).split(32 * size):
        share = batch[rank::size]  # permuted alike: all ranks have the same seed
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()
with torch.no_grad():
    share = torch.arange(len(x))[rank::size]
    right = (model(x[share]).argmax(1) == y[share]).sum()
right = hvd.allreduce(right, op=hvd.Sum, name="right")
if rank == 0:
    print(f"{size} ranks: accuracy {right.item() / len(y):.3f}")
