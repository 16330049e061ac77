"""Modules of PyTorch under engines, and in loops of their own: the parameters after a few steps.

`mpiexec -n P python modules.py FILE.npz [NAME...]` trains each row of TABLE and writes the final
parameters and buffers, float64, of rank 0. Rows that are the same on any number of ranks are
compared by tests/guests/test_modules.py.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hpctrain as ht

STEPS, BATCH, CLASSES = 5, 24, 4
TOKENS, LENGTH = 11, 6


def make_images():
    generator = np.random.default_rng(0)
    return generator.normal(size=(96, 8, 8)), generator.integers(CLASSES, size=96)


def make_texts():
    generator = np.random.default_rng(1)
    return tuple(generator.integers(TOKENS, size=(96, LENGTH)) for _ in range(2))


def make_cnn(dropout=0.3, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(4 * 36, 16), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(16, CLASSES),
    )  # fmt: skip


class Shift(nn.Module):
    """Adds a buffer to its input, and counts its calls in another."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, channels))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x + self.shift[:, None, None]


class Gpt(nn.Module):
    """A transformer with tied weights; `recomputes`: blocks are computed again in backward."""

    def __init__(self, recomputes=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.recomputes = nn.Embedding(TOKENS, 16), recomputes
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Random(nn.Module):
    """Functional dropout, noise and attention dropout; `recomputes`: once more in backward."""

    def __init__(self, recomputes=False):
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.recomputes = nn.Linear(8, 16), recomputes
        self.drops = nn.Sequential(nn.Dropout(0.2), nn.Dropout1d(0.2), nn.AlphaDropout(0.1))
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = checkpoint(self.draw, x, use_reentrant=False) if self.recomputes else self.draw(x)
        return self.head(x.mean(1))

    def draw(self, x):
        x = self.drops(nn.functional.dropout(self.inputs(x), 0.3, self.training))
        x = self.attention(x)
        if not self.training:
            return x
        noise = 0.1 * torch.randn_like(x) + 0.1 * torch.empty_like(x).normal_(1, 0.5)
        gates = nn.functional.gumbel_softmax(x, tau=2.0) + torch.bernoulli(torch.sigmoid(x))
        mask = torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.8
        return (x + noise + gates) * mask + torch.empty_like(x).uniform_(-0.1, 0.1)


def train(module, engine, data, **options):
    loss = options.pop("loss", "cross_entropy")
    # Not Adam: of biases before a norm the gradient is rounding, which it would scale up.
    optimizer = ht.optim.sgd(rate=0.1, momentum=0.9)
    trainer = ht.torch.Trainer(module, optimizer, engine, loss, precision="float64")
    with trainer:
        trainer.fit(data, steps=STEPS, batch=BATCH, **options)
    return module


def run_cnn(engine="allreduce", **options):
    return train(make_cnn(), engine, make_images(), **options)


def run_plain_cnn(engine="allreduce", **options):
    return train(make_cnn(norm=nn.Identity), engine, make_images(), **options)


def run_gpt(engine="allreduce", recomputes=False, **options):
    module = Gpt(recomputes)
    return train(module, engine, make_texts(), **options)


def run_random(engine="allreduce", recomputes=False, **options):
    return train(Random(recomputes), engine, make_images(), **options)


def run_torch_optimizer(engine="allreduce"):
    module = make_cnn(dropout=0.0, norm=nn.Identity)
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim == 1], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    trainer = ht.torch.Trainer(
        module, optimizer, engine, nn.CrossEntropyLoss(label_smoothing=0.1), precision="float64",
        schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    )  # fmt: skip
    images, labels = map(torch.from_numpy, make_images())
    with trainer:
        trainer.fit(DataLoader(TensorDataset(images, labels)), steps=STEPS, batch=BATCH)
    return module


def run_loader(engine="allreduce"):
    """A sampler without a generator of its own, and a loss whose mean is over weights."""
    images, labels = map(torch.from_numpy, make_images())
    sampler = WeightedRandomSampler(torch.arange(96.0), 60)
    loader = DataLoader(TensorDataset(images, labels), sampler=sampler, drop_last=True)
    loss = nn.CrossEntropyLoss(torch.tensor([0.1, 1, 2, 3], dtype=torch.float64), ignore_index=3)
    return train(make_cnn(norm=nn.Identity), engine, loader, loss=loss)


def run_sync(parts=1, norm=nn.Identity, **options):
    """A loop of one's own: clipped, with gradients of `parts` micro-batches added up."""
    world, module = ht.init("cpu"), make_cnn(dropout=0.0, norm=norm).double()
    if world.rank > 0:
        nn.init.zeros_(module[-1].weight)  # rank 0 broadcasts its own
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    images, labels = map(torch.from_numpy, make_images())
    with ht.torch.sync(module, optimizer, **options) as synced:
        for step in range(STEPS):
            share = torch.arange(step * 12, step * 12 + 12 * parts) % 96
            share = share.reshape(parts, -1)[:, world.rank :: world.size]
            optimizer.zero_grad()
            for buffer in module.buffers():
                buffer += world.rank  # each forward pass takes those of rank 0
            for i, indexes in enumerate(share):
                if i < parts - 1:
                    with synced.no_sync():
                        backward(module, images[indexes], labels[indexes], parts)
                else:
                    backward(module, images[indexes], labels[indexes], parts)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    return module


def backward(module, inputs, targets, parts):
    (nn.functional.cross_entropy(module(inputs), targets) / parts).backward()


#: name: how to train; results do not depend on the number of ranks
TABLE = {
    "cnn allreduce": run_cnn,
    "cnn priority": lambda: run_plain_cnn(ht.engines.AllReduce(priority=True)),
    "cnn overlap": lambda: run_cnn(ht.engines.AllReduce(overlap="always", bucket_bytes=1000)),
    "cnn sharded optimizer": lambda: run_cnn(ht.engines.AllReduce(shard_optimizer=True)),
    "cnn shared parameters": lambda: run_cnn(ht.engines.AllReduce(share_parameters=True)),
    "cnn ps-sync": lambda: run_cnn(ht.engines.PsSync(placement="colocated")),
    "cnn micro-batches": lambda: run_plain_cnn(micro_batches=3),
    "gpt allreduce": run_gpt,
    "gpt priority": lambda: run_gpt(ht.engines.AllReduce(priority=True)),
    "gpt recomputed": lambda: run_gpt(recomputes=True),
    "gpt ordered": lambda: run_gpt(ht.engines.AllReduce(reduction="ordered", blocks=4)),
    "random": run_random,
    "random recomputed": lambda: run_random(recomputes=True),
    "random micro-batches": lambda: run_random(micro_batches=3),
    "random ps-sync": lambda: run_random(ht.engines.PsSync(placement="colocated")),
    "random ordered": lambda: run_random(ht.engines.AllReduce(reduction="ordered", blocks=4)),
    "cnn ordered": lambda: run_plain_cnn(ht.engines.AllReduce(reduction="ordered")),
    "loader, weighted loss": run_loader,
    "loader, weighted loss, ordered": lambda: run_loader(
        ht.engines.AllReduce(reduction="ordered", blocks=4)
    ),
    "torch.optim": run_torch_optimizer,
    "torch.optim, sharded": lambda: run_torch_optimizer(ht.engines.AllReduce(shard_optimizer=True)),
    "sync": run_sync,
    "sync, no_sync": lambda: run_sync(parts=2),
    "sync, buffers": lambda: run_sync(norm=Shift),
    "sync, overlap": lambda: run_sync(overlap="always", bucket_bytes=1000),
}


def main():
    file, *names = sys.argv[1:]
    world = ht.init("cpu")
    results = {}
    for name in names or TABLE:
        module = TABLE[name]()
        state = [x.double().reshape(-1) for x in module.state_dict().values()]
        results[name] = torch.cat(state).numpy()
    if world.rank == 0:
        np.savez(file, **results)


if __name__ == "__main__":
    main()
