"""A loop of one's own that goes on when ranks are lost, with those that are left.

hpctrain launch -n 4 --elastic -- python survive.py
"""

import torch

import hpctrain as ht

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :2].sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
synced = ht.torch.sync(model, optimizer)

world = synced.world  # rank and size change when a rank is lost: read them for each batch
for _ in range(5):
    for batch in torch.randperm(len(x)).split(128):
        share = batch[world.rank :: world.size]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()


def count_right():
    """Return how many samples the model gets right, of this rank's share and then of all."""
    share = torch.arange(len(x))[world.rank :: world.size]
    with torch.no_grad():
        right = (model(x[share]).argmax(1) == y[share]).sum().reshape(1).double().numpy()
    ht.allreduce(right)
    return right.item()


right = synced.retry(count_right)  # again, by the ranks that are left, if one is lost meanwhile
if world.rank == 0:
    print(f"{world.size} ranks: accuracy {right / len(y):.3f}")
synced.close()
