"""A loop of one's own: one line of hpctrain, after the optimizer is made.

mpirun -n 4 python loop.py        srun python loop.py        python loop.py
"""

import torch

import hpctrain as ht

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :2].sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
synced = ht.torch.sync(model, optimizer)  # from here on backward() ends with means over all ranks

rank, size = synced.world.rank, synced.world.size
for _ in range(5):
    for batch in torch.randperm(len(x)).split(32 * size):
        share = batch[rank::size]  # permuted alike: all ranks have the same seed
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()
synced.close()
with torch.no_grad():
    right = (model(x).argmax(1) == y).sum()
if rank == 0:
    print(f"{size} ranks: accuracy {right.item() / len(y):.3f}")
