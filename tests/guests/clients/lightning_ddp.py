"""Lightning on the backend: prints the sum of the parameters after training."""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """Linear regression."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1).double()

    def training_step(self, batch, _):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 8).double(), torch.randn(64, 1).double())
ranks = int(sys.argv[1])
strategy = DDPStrategy(process_group_backend=sys.argv[2]) if ranks > 1 else "auto"
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    strategy=strategy,
    devices=ranks,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(data, batch_size=64 // ranks, shuffle=False))
if trainer.is_global_zero:
    print(f"parameters {sum(p.sum().item() for p in model.parameters()):.12f}")
