"""A module under an engine of hpctrain: checkpoints, metrics, any regime.

mpirun -n 4 python trainer.py        srun python trainer.py        python trainer.py
"""

import torch
from torch.utils.data import TensorDataset

import hpctrain as ht

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :2].sum(1) > 0).long()
module = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

with ht.torch.Trainer(module, optimizer, engine="allreduce") as trainer:
    summary = trainer.fit(TensorDataset(x, y), epochs=5, batch=64, evaluate=TensorDataset(x, y))
if trainer.world.rank == 0:
    print(f"{trainer.world.size} ranks: accuracy {summary['test_accuracy']:.3f}")
