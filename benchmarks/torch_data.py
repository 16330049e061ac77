"""Claims: `ht.torch.Trainer` reads a data set of PyTorch at the cost of a plain loop.

    python benchmarks/torch_data.py [--rounds 5] [--steps 469]

An epoch of 60,000 samples of MNIST's size, float32, in batches of 128, through an MLP with SGD, on
one rank and one thread: CPU time of this process per step, contenders in turns. Batches of a
TensorDataset cost at most 1.2 times the indexing of its tensors, batches of items at most 1.5 times
what a DataLoader takes, since each item has a seed. A whole step of the Trainer takes at most 1.5
times that of a plain loop: the rest is the engine's. Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
from lib.common import make_parser, report_result, start_world
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hpctrain as ht
from hpctrain.data import Sampler
from hpctrain.torch.modules.samples import as_samples

SAMPLES, BATCH, RATE = 60_000, 128, 0.01
LIMIT, STEP_LIMIT = 1.2, 1.5


class Items(Dataset[Any]):
    """The rows of a TensorDataset as items."""

    def __init__(self, data: TensorDataset):
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def make_module() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def train_by_indexing(data: TensorDataset, steps: int) -> None:
    x, y = data.tensors
    order = torch.randperm(len(x))
    train_on(((x[rows], y[rows]) for rows in order.split(BATCH)), steps)


def train_by_loader(data: Dataset[Any], steps: int) -> None:
    train_on(DataLoader(data, BATCH, shuffle=True), steps)


def train_on(batches: Any, steps: int) -> None:
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _, (x, y) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def train_by_trainer(data: Dataset[Any], steps: int) -> None:
    optimizer = ht.optim.sgd(rate=RATE)
    loss = nn.functional.cross_entropy
    with ht.torch.Trainer(make_module(), optimizer, loss=loss) as trainer:
        trainer.fit(data, steps=steps, batch=BATCH)


def read_by_indexing(data: TensorDataset, steps: int) -> None:
    x, y = data.tensors
    for rows in torch.randperm(len(x)).split(BATCH)[:steps]:
        _ = x[rows], y[rows]


def read_by_loader(data: Dataset[Any], steps: int) -> None:
    for _ in zip(range(steps), DataLoader(data, BATCH, shuffle=True), strict=False):
        pass


def read_by_samples(data: Dataset[Any], steps: int) -> None:
    samples = as_samples(data)
    sampler = Sampler.of(samples, BATCH, 0)
    for step in range(steps):
        samples.rows(sampler.batch_indexes(step))


def measure(contenders: dict[str, Callable[[int], None]], rounds: int, steps: int) -> list[Any]:
    """Return a row for each contender: its CPU time per step, medians over rounds in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call(3)
    for _ in range(rounds):
        for name, call in contenders.items():
            start = process_time()
            call(steps)
            seconds[name].append((process_time() - start) / steps)
    milliseconds = {name: [1e3 * s for s in values] for name, values in seconds.items()}
    return [
        {"name": name, "cpu_ms_per_step": median(values), "rounds_ms": values}
        for name, values in milliseconds.items()
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(ranks=1, rounds=5)
    parser.add_argument("--steps", type=int, default=-(-SAMPLES // BATCH))
    arguments = parser.parse_args()
    world = start_world(1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(SAMPLES, 784), torch.randint(10, (SAMPLES,)))
    contenders = {
        "indexing": partial(read_by_indexing, data),
        "Samples": partial(read_by_samples, data),
        "DataLoader of items": partial(read_by_loader, Items(data)),
        "Samples of items": partial(read_by_samples, Items(data)),
        "training by indexing": partial(train_by_indexing, data),
        "training by the Trainer": partial(train_by_trainer, data),
        "training on a DataLoader of items": partial(train_by_loader, Items(data)),
        "training by the Trainer, items": partial(train_by_trainer, Items(data)),
    }
    rows = measure(contenders, arguments.rounds, arguments.steps)
    ms = {row["name"]: row["cpu_ms_per_step"] for row in rows}
    step, plain_step = ms["training by the Trainer"], ms["training by indexing"]
    claims = {
        "batches <= 1.2 indexing": ms["Samples"] <= LIMIT * ms["indexing"],
        "items <= 1.5 DataLoader": ms["Samples of items"] <= STEP_LIMIT * ms["DataLoader of items"],
        "a step <= 1.5 of a plain loop": step <= STEP_LIMIT * plain_step,
    }
    report_result(world, "torch-data", rows, claims, torch=torch.__version__)


if __name__ == "__main__":
    main()
