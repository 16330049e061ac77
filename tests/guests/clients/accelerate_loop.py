"""Accelerate refuses a backend that it does not know, but takes a group that was made before.

With another backend than hpctrain it makes the group itself.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[2] == "hpctrain":
    dist.init_process_group("hpctrain")
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == dist.get_world_size()
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 8).double(), torch.randn(64, 1).double())
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=64 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
if accelerator.is_main_process:
    print(f"parameters {sum(p.sum().item() for p in model.parameters()):.12f}")
dist.destroy_process_group()
