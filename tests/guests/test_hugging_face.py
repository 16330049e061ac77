"""Data sets of Hugging Face under the Trainer of PyTorch: as objects, and in a DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_on
from torch.utils.data import DataLoader, default_collate

import hpctrain as ht

datasets = pytest.importorskip("datasets")  # with the clients, in one environment
datasets.disable_progress_bars()

N = 40
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3
ORDER = np.random.default_rng(1).permutation(N)
FEATURES = datasets.Features({
    "pixels": datasets.Sequence(datasets.Value("float32"), length=4),
    "labels": datasets.ClassLabel(names=["a", "b", "c"]),
})  # fmt: skip
STORED = datasets.Dataset.from_dict({"pixels": X.tolist(), "labels": Y}, FEATURES).select(ORDER)


class ByName(torch.nn.Linear):
    """Takes a sample by the names of its columns."""

    def forward(self, pixels, labels=None):
        return super().forward(pixels)


def doubled(batch):
    return {"pixels": [2 * torch.tensor(row) for row in batch["pixels"]], "labels": batch["labels"]}


def as_pair(items):
    batch = default_collate(items)
    return batch["pixels"], batch["labels"]


def loader(data, **options):
    return DataLoader(data, 7, shuffle=True, **options)


#: the module, its data, and the factor of X in them
DATA = {
    "object": (torch.nn.Linear, STORED, 1),
    "object with a format": (torch.nn.Linear, STORED.with_format("torch"), 1),
    "loader of dicts": (ByName, loader(STORED.with_format("torch")), 1),
    "loader of pairs": (
        torch.nn.Linear,
        loader(STORED.with_format("torch"), collate_fn=as_pair),
        1,
    ),
    "loader with a transform": (
        torch.nn.Linear,
        loader(STORED.with_transform(doubled), collate_fn=as_pair),
        2,
    ),
}


def trained(make, data):
    torch.manual_seed(0)
    modules = [make(4, 3) for _ in range(2)]
    for module in modules:
        module.load_state_dict(modules[0].state_dict())

    def body(world):
        with ht.torch.Trainer(modules[world.rank], "sgd", world=world) as trainer:
            summary = trainer.fit(data, epochs=2, batch=7, evaluate=data)
            return summary["params_sha256"], summary["test_loss"], trainer.evaluate(data)["loss"]

    return run_on("threads", 2, body)[0]


@pytest.mark.parametrize("name", DATA)
def test_a_module_is_trained_as_on_arrays(name):
    make, data, factor = DATA[name]
    assert trained(make, data) == trained(torch.nn.Linear, (factor * X[ORDER], Y[ORDER]))
