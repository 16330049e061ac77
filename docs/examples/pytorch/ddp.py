"""A plain PyTorch script: nothing in it names MPI, Slurm or hpctrain but the backend.

mpirun -n 4 python ddp.py        srun python ddp.py        python ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("hpctrain")
torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :2].sum(1) > 0).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
with torch.no_grad():
    right = (model(x).argmax(1) == y).sum()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks: accuracy {right.item() / len(y):.3f}")
dist.destroy_process_group()
